//! The file of a crash log: a mapped file in a file system in memory, which outlives the process.
//!
//! Owns the layout of that file. The next process on the same machine finds all stores of the previous process in the file, up
//! to the last instruction, because the pages belong to the kernel. A reboot makes the file invalid: the file stores the boot
//! ID of the kernel. The file consists of 64-bit words in the byte order of this machine:
//!
//! | word | what |
//! |---|---|
//! | 0 | magic and version |
//! | 1, 2 | boot ID of the kernel |
//! | 3, 4 | state numbers of the device, for which alone the contents are valid |
//! | 5 | length of the incarnation of the device, in bytes |
//! | 6 … 511 | the incarnation, as text |
//! | 512 + 4096 n | sequence number of a journal entry; n is the lowest bit of the number |
//! | 513 + 4096 n | number of words of the entry |
//! | 514 + 4096 n … | the words of the entry |
//!
//! Invariant: a count covers only words that are stored, so the count is stored after the words.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ::io::{CrashLogMemory, RECORDED_ENTRIES, RECORDED_WORDS};

const MAGIC: u64 = u64::from_be_bytes(*b"ubkept\0\x02");
const INCARNATION_AT: usize = 6;
const INCARNATION_BYTES: usize = (HALVES_AT - INCARNATION_AT) * 8;
const HALF_WORDS: usize = 4096;
const HALVES_AT: usize = 512;
const WORDS: usize = HALVES_AT + RECORDED_ENTRIES * HALF_WORDS;
/// Number of tries to get the lock while another process ends: 50 tries, 20 ms apart, take 1 s.
const LOCK_TRIES: u32 = 50;
const BETWEEN_LOCK_TRIES: Duration = Duration::from_millis(20);
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// The mapped and locked file of one crash log.
pub struct CrashLogFile {
    words: *const AtomicU64,
    path: PathBuf,
    /// Incarnation whose log was dropped; see [`CrashLogFile::forgotten`].
    forgotten: Option<String>,
    /// The open file, which holds the lock.
    _file: File,
}

impl CrashLogFile {
    /// Opens or creates the file at `path`. Only one process can have the file open.
    ///
    /// If the contents are of another boot of the machine, or of another `incarnation` of the device, they are dropped.
    ///
    /// # Errors
    /// If the directory is not in a file system in memory, `incarnation` does not fit into the file, another process has the file
    /// open, or the system refuses.
    pub fn open(path: &Path, incarnation: &str) -> io::Result<CrashLogFile> {
        if incarnation.len() > INCARNATION_BYTES {
            let found = incarnation.len();
            let what =
                format!("too many devices below this one: expected {INCARNATION_BYTES} bytes, found {found}");
            return Err(io::Error::other(what));
        }
        let file = open_locked(path)?;
        let words = map(&file)?;
        let mut kept = CrashLogFile { words, path: path.to_path_buf(), forgotten: None, _file: file };
        let boot = boot_number()?;
        let found = [kept.load(0), kept.load(1), kept.load(2)];
        let other = found == [MAGIC, boot[0], boot[1]] && kept.incarnation() != incarnation;
        if other && !kept.recorded().is_empty() {
            kept.forgotten = Some(kept.incarnation());
        }
        if other || found != [MAGIC, boot[0], boot[1]] {
            kept.store(0, 0);
            kept.reset();
            kept.tie([0, 0]);
            kept.store(1, boot[0]);
            kept.store(2, boot[1]);
            kept.set_incarnation(incarnation);
            kept.store(0, MAGIC);
        }
        Ok(kept)
    }

    /// The former incarnation of the device, if [`CrashLogFile::open`] dropped recorded entries of it.
    pub fn forgotten(&self) -> Option<&str> {
        self.forgotten.as_deref()
    }

    fn incarnation(&self) -> String {
        let len = usize::try_from(self.load(INCARNATION_AT - 1)).unwrap_or(0).min(INCARNATION_BYTES);
        let words = (INCARNATION_AT..HALVES_AT).map(|at| self.load(at).to_ne_bytes());
        let bytes: Vec<u8> = words.flatten().take(len).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn set_incarnation(&self, to: &str) {
        for (at, bytes) in (INCARNATION_AT..).zip(to.as_bytes().chunks(8)) {
            let mut word = [0; 8];
            word.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
            self.store(at, u64::from_ne_bytes(word));
        }
        self.store(INCARNATION_AT - 1, to.len() as u64);
    }

    /// Empties and removes the file.
    pub fn remove(&self) {
        self.reset();
        // If this fails, the file is empty, and the next open uses it.
        let _ = std::fs::remove_file(&self.path);
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at < WORDS, "word {at} of {WORDS}");
        // SAFETY: `at` is below `WORDS`, which is the length of the mapping. The mapping is aligned to a page and lives as
        // long as this value. Other processes that map the file only store whole words, which atomics allow.
        unsafe { &*self.words.add(at) }
    }

    fn load(&self, at: usize) -> u64 {
        self.word(at).load(Ordering::Acquire)
    }

    fn store(&self, at: usize, value: u64) {
        self.word(at).store(value, Ordering::Release);
    }
}

impl Drop for CrashLogFile {
    fn drop(&mut self) {
        // SAFETY: `open` made this mapping with this length, and no reference to it outlives this value.
        unsafe { libc::munmap(self.words.cast_mut().cast(), WORDS * 8) };
    }
}

/// Opens or creates the file in a file system in memory, locks it, and makes it as long as a crash log.
fn open_locked(path: &Path) -> io::Result<File> {
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW)
        .open(path)?;
    if rustix::fs::fstatfs(&file)?.f_type as i64 != TMPFS_MAGIC {
        drop(file);
        let _ = std::fs::remove_file(path);
        return Err(io::Error::other("expected a file system in memory (tmpfs)"));
    }
    lock(&file)?;
    let len = (WORDS * 8) as u64;
    let known = file.metadata()?.len() == len;
    if !known {
        file.set_len(0)?;
    }
    // This allocates all pages, so a store to the mapping cannot fail.
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, len)?;
    Ok(file)
}

/// Maps all words of the file, and locks their pages in memory if the process may.
fn map(file: &File) -> io::Result<*const AtomicU64> {
    // SAFETY: the kernel chooses the address of the new mapping, so it replaces no existing memory.
    let start = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            WORDS * 8,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the range is the mapping that was just made. Without the lock, a write would wait for pages that were
    // swapped out. A process without the right to lock memory accepts this, so a failure is ignored.
    let _ = unsafe { libc::mlock(start, WORDS * 8) };
    Ok(start.cast_const().cast())
}

/// Locks the file. Retries for 1 s, because the process that holds the lock may be about to end.
fn lock(file: &File) -> io::Result<()> {
    let mut tries = 0;
    loop {
        match rustix::fs::flock(file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) if tries < LOCK_TRIES => {
                tries += 1;
                std::thread::sleep(BETWEEN_LOCK_TRIES);
            }
            result => return Ok(result?),
        }
    }
}

fn boot_number() -> io::Result<[u64; 2]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let number = u128::from_str_radix(&digits, 16).map_err(io::Error::other)?;
    Ok([(number >> 64) as u64, number as u64])
}

impl CrashLogMemory for CrashLogFile {
    fn record(&self, seq: u64, words: &[u64]) {
        let half = HALVES_AT + (seq as usize % RECORDED_ENTRIES) * HALF_WORDS;
        if self.load(half) != seq {
            self.store(half + 1, 0);
            self.store(half, seq);
        }
        let count = self.load(half + 1) as usize;
        assert!(count + words.len() <= RECORDED_WORDS, "a journal entry has fewer words");
        for (i, word) in words.iter().enumerate() {
            self.store(half + 2 + count + i, *word);
        }
        self.store(half + 1, (count + words.len()) as u64);
    }

    fn recorded(&self) -> Vec<(u64, Vec<u64>)> {
        let mut entries: Vec<_> = (0..RECORDED_ENTRIES)
            .map(|n| HALVES_AT + n * HALF_WORDS)
            .map(|half| {
                let count = usize::try_from(self.load(half + 1)).unwrap_or(0);
                let words = if count > RECORDED_WORDS { 0 } else { count };
                (self.load(half), (0..words).map(|i| self.load(half + 2 + i)).collect::<Vec<_>>())
            })
            .filter(|(_, words)| !words.is_empty())
            .collect();
        entries.sort_by_key(|(seq, _)| *seq);
        entries
    }

    fn reset(&self) {
        for n in 0..RECORDED_ENTRIES {
            self.store(HALVES_AT + n * HALF_WORDS + 1, 0);
            self.store(HALVES_AT + n * HALF_WORDS, 0);
        }
    }

    fn tie(&self, states: [u64; 2]) {
        self.store(3, states[0]);
        self.store(4, states[1]);
    }

    fn tied(&self) -> [u64; 2] {
        [self.load(3), self.load(4)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory in a file system in memory.
    fn dir() -> tempfile::TempDir {
        tempfile::tempdir_in("/dev/shm").unwrap()
    }

    #[test]
    fn the_next_process_finds_what_was_kept() {
        let dir = dir();
        let path = dir.path().join("kept");
        let file = CrashLogFile::open(&path, "sda 7").unwrap();
        assert_eq!(file.recorded(), []);
        file.tie([7, 8]);
        file.record(10, &[1, 2, 3]);
        file.record(11, &[4]);
        file.record(10, &[5]);
        drop(file);
        let file = CrashLogFile::open(&path, "sda 7").unwrap();
        assert_eq!(file.recorded(), [(10, vec![1, 2, 3, 5]), (11, vec![4])]);
        assert_eq!(file.tied(), [7, 8]);
        file.record(12, &[6]);
        assert_eq!(file.recorded(), [(11, vec![4]), (12, vec![6])]);
        file.record(13, &vec![9; RECORDED_WORDS]);
        assert_eq!(file.recorded()[1].1.len(), RECORDED_WORDS);
        file.reset();
        assert_eq!(file.recorded(), []);
        file.remove();
        assert!(!path.exists());
    }

    #[test]
    fn another_boot_and_damage_leave_nothing() {
        let dir = dir();
        let path = dir.path().join("kept");
        let damage = |at: usize| {
            let file = CrashLogFile::open(&path, "sda 7").unwrap();
            file.tie([1, 1]);
            file.record(4, &[1]);
            file.store(at, u64::MAX);
            drop(file);
            CrashLogFile::open(&path, "sda 7").unwrap().recorded()
        };
        assert_eq!(damage(0), []);
        assert_eq!(damage(1), []);
        assert_eq!(damage(HALVES_AT + 1), [], "an impossible count");
        std::fs::write(&path, b"short").unwrap();
        assert_eq!(CrashLogFile::open(&path, "sda 7").unwrap().recorded(), []);
    }

    /// A device that lost its power while the host stayed up has lost what was in its volatile cache: replayed keys would
    /// name data that never reached the medium, in the place of older data that was flushed.
    #[test]
    fn another_incarnation_of_the_device_leaves_nothing() {
        let dir = dir();
        let path = dir.path().join("kept");
        let file = CrashLogFile::open(&path, "dm-0 12 on sda 7, sdb 8").unwrap();
        file.tie([7, 8]);
        file.record(10, &[1]);
        drop(file);
        let file = CrashLogFile::open(&path, "dm-0 12 on sda 7, sdb 9").unwrap();
        assert_eq!((file.recorded(), file.tied()), (vec![], [0, 0]));
        assert_eq!(file.forgotten(), Some("dm-0 12 on sda 7, sdb 8"));
        file.record(11, &[2]);
        drop(file);
        let file = CrashLogFile::open(&path, "dm-0 12 on sda 7, sdb 9").unwrap();
        assert_eq!((file.recorded(), file.forgotten()), (vec![(11, vec![2])], None));
        assert!(CrashLogFile::open(&dir.path().join("other"), &"x".repeat(INCARNATION_BYTES + 1)).is_err());
    }

    #[test]
    fn one_process_at_a_time_and_only_in_memory() {
        let dir = dir();
        let path = dir.path().join("kept");
        let first = CrashLogFile::open(&path, "sda 7").unwrap();
        assert!(CrashLogFile::open(&path, "sda 7").is_err());
        drop(first);
        CrashLogFile::open(&path, "sda 7").unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(CrashLogFile::open(&link, "sda 7").is_err());
    }
}
