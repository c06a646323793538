//! Load on a filesystem: files that are replaced again and again, each durably, in such a way that after a power loss
//! every file can be judged.
//!
//! Each worker has a directory with [`SLOTS`] files. Its request number `i` (from 1) writes a new file, syncs it, puts it
//! in place of file `i % SLOTS`, and syncs the directory; then it reports `i`. So a file holds a version that is not
//! older than the last one reported, and it holds it whole.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use super::stamp::{self, SECTOR};

/// Files of a worker.
pub const SLOTS: u32 = 24;

fn path(dir: &Path, worker: u32, slot: u32) -> PathBuf {
    dir.join(format!("worker-{worker}")).join(format!("file-{slot}"))
}

/// Sizes vary between 1 and 160 sectors.
fn content(worker: u32, version: u32) -> Vec<u8> {
    let sectors = 1 + version.wrapping_mul(2_654_435_761) % 160;
    let mut bytes = vec![0; sectors as usize * SECTOR];
    stamp::fill(&mut bytes, 0, version, worker + 1);
    bytes
}

/// Runs one worker from request `first` until `last`.
///
/// # Errors
/// Of the filesystem.
pub fn run(dir: &Path, worker: u32, first: u32, last: u32, done: impl Fn(u32)) -> io::Result<()> {
    let own = dir.join(format!("worker-{worker}"));
    fs::create_dir_all(&own)?;
    File::open(dir)?.sync_all()?;
    for version in first..=last {
        let new = own.join("new");
        let mut file = File::create(&new)?;
        file.write_all(&content(worker, version))?;
        file.sync_all()?;
        fs::rename(&new, path(dir, worker, version % SLOTS))?;
        File::open(&own)?.sync_all()?;
        done(version);
    }
    Ok(())
}

/// Compares every file of a worker whose last reported request was `reported`. Returns the newest version found.
///
/// # Errors
/// Of the filesystem, or what is wrong.
pub fn verify(dir: &Path, worker: u32, reported: u32) -> io::Result<u32> {
    let mut newest = 0;
    for slot in 0..SLOTS {
        // The last reported version of this slot; 0 if there is none.
        let expected = (1..=reported).rev().take(SLOTS as usize).find(|v| v % SLOTS == slot).unwrap_or(0);
        let path = path(dir, worker, slot);
        let mut bytes = Vec::new();
        match File::open(&path).and_then(|mut f| f.read_to_end(&mut bytes)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound && expected == 0 => continue,
            Err(e) => return Err(io::Error::other(format!("{}: {e}", path.display()))),
            Ok(_) => {}
        }
        let found = bytes.get(8..12).and_then(|b| b.first_chunk()).map_or(0, |b| u32::from_le_bytes(*b));
        if found < expected || found % SLOTS != slot || bytes != content(worker, found) {
            let what =
                format!("expected version {expected} or newer, whole, found {found}, {} bytes", bytes.len());
            return Err(io::Error::other(format!("{}: {what}", path.display())));
        }
        newest = newest.max(found);
    }
    Ok(newest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_are_there_are_accepted_and_older_ones_are_not() {
        let dir = tempfile::tempdir().unwrap();
        run(dir.path(), 0, 1, 50, |_| ()).unwrap();
        assert_eq!(verify(dir.path(), 0, 50).unwrap(), 50);
        assert_eq!(verify(dir.path(), 0, 30).unwrap(), 50);
        assert!(verify(dir.path(), 0, 51).is_err());
        let torn = path(dir.path(), 0, 3);
        let bytes = fs::read(&torn).unwrap();
        fs::write(&torn, bytes.get(..bytes.len() - 1).unwrap()).unwrap();
        assert!(verify(dir.path(), 0, 50).is_err());
    }
}
