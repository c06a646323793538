//! Claims of what lies below a loop device.
//!
//! The kernel permits several loop devices on one file, and a loop device on a disk that a process has claimed. `O_EXCL` on a
//! loop device therefore does not exclude a second loop device with the same data. This module locks the bytes of the file that
//! the loop device shows, with a lock of the open file description (`F_OFD_SETLK`). Loop devices and partitions that show
//! different bytes of a file do not exclude each other. A disk below a loop device is claimed as a whole.
//!
//! Owns these locks. Must not know who opens the device. Best effort: a file that cannot be opened for writing, or that
//! a file system cannot lock, is not locked. An error other than "in use" does not prevent the start.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::info::{read_number, sysfs_dir, whole_disk};
use crate::loops::backing_file;

/// The maximum depth of stacked devices that is followed.
const MAX_STACK: u32 = 8;
const SECTOR_BYTES: u64 = 512;

/// A part of a file or a disk, in bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Part {
    path: PathBuf,
    start: u64,
    /// `None` for everything behind the start.
    len: Option<u64>,
}

/// Claims the files and disks below the loop devices on which the block device `rdev` stands. The claims last as long as the
/// returned files are open.
///
/// # Errors
/// `EWOULDBLOCK` if another claim overlaps one of them.
pub(crate) fn claim(rdev: u64, for_writing: bool) -> io::Result<Vec<File>> {
    let mut parts = Vec::new();
    collect(&sysfs_dir(rdev), (0, None), false, MAX_STACK, &mut parts);
    let claimed: io::Result<Vec<_>> = parts.iter().map(|part| claim_part(part, for_writing)).collect();
    Ok(claimed?.into_iter().flatten().collect())
}

/// Collects the parts below a part of the device whose directory in sysfs is `dir`. `below_loop`: the device is itself below a
/// loop device.
fn collect(dir: &Path, within: (u64, Option<u64>), below_loop: bool, depth: u32, parts: &mut Vec<Part>) {
    let (mut start, mut len) = within;
    if depth == 0 {
        return;
    }
    if dir.join("partition").exists() {
        len = len.or_else(|| bytes_of(&dir.join("size")));
        start = start.saturating_add(bytes_of(&dir.join("start")).unwrap_or(0));
    }
    let disk = whole_disk(dir);
    if let Some(file) = backing_file(&disk) {
        len = len.or_else(|| bytes_of(&disk.join("size")));
        start = start.saturating_add(read_number(&disk.join("loop/offset")).unwrap_or(0));
        match fs::metadata(&file) {
            Ok(meta) if meta.file_type().is_block_device() => {
                collect(&sysfs_dir(meta.rdev()), (start, len), true, depth - 1, parts);
            }
            _ => parts.push(Part { path: file, start, len }),
        }
        return;
    }
    let slaves: Vec<PathBuf> =
        fs::read_dir(disk.join("slaves")).into_iter().flatten().flatten().map(|s| s.path()).collect();
    // The table of a stacked device is not examined, so it counts as using all of each device below.
    slaves.iter().for_each(|s| collect(s, (0, None), below_loop, depth - 1, parts));
    if slaves.is_empty() && below_loop {
        parts.extend(device_path(dir).map(|path| Part { path, start: 0, len: None }));
    }
}

/// A size in sectors as sysfs has it, in bytes.
fn bytes_of(path: &Path) -> Option<u64> {
    read_number(path)?.checked_mul(SECTOR_BYTES)
}

/// The path in `/dev` of the block device whose directory in sysfs is `dir`.
fn device_path(dir: &Path) -> Option<PathBuf> {
    let uevent = fs::read_to_string(dir.join("uevent")).ok()?;
    let name = uevent.lines().find_map(|l| l.strip_prefix("DEVNAME="))?;
    Some(Path::new("/dev").join(name))
}

/// Claims one part; nothing if it cannot be opened.
fn claim_part(part: &Part, for_writing: bool) -> io::Result<Option<File>> {
    let is_disk = fs::metadata(&part.path).is_ok_and(|m| m.file_type().is_block_device());
    let flags = libc::O_CLOEXEC | if is_disk { libc::O_EXCL } else { 0 };
    let file = match File::options()
        .read(true)
        .write(for_writing && !is_disk)
        .custom_flags(flags)
        .open(&part.path)
    {
        Ok(file) => file,
        Err(e) if e.raw_os_error() == Some(libc::EBUSY) => return Err(in_use()),
        Err(_) => return Ok(None),
    };
    if is_disk {
        return Ok(Some(file));
    }
    match lock(&file, part, for_writing) {
        Ok(()) => Ok(Some(file)),
        Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Err(in_use()),
        // File systems without such locks.
        Err(_) => Ok(None),
    }
}

fn in_use() -> io::Error {
    io::Error::from_raw_os_error(libc::EWOULDBLOCK)
}

/// Locks a part of an open file, without waiting.
fn lock(file: &File, part: &Part, for_writing: bool) -> io::Result<()> {
    let number = |n: u64| libc::off_t::try_from(n).unwrap_or(libc::off_t::MAX);
    let kind = if for_writing { libc::F_WRLCK } else { libc::F_RDLCK };
    let wanted = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: number(part.start),
        // A length of 0 means everything up to the end.
        l_len: number(part.len.unwrap_or(0)),
        l_pid: 0,
    };
    // SAFETY: `wanted` is the structure that F_OFD_SETLK reads, and it outlives the call; the descriptor is open.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const wanted) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(dir: &Path, files: &[(&str, &str)]) {
        for (path, text) in files {
            let path = dir.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    /// A partition of a loop device with an offset: the bytes of the partition in the file.
    #[test]
    fn a_partition_uses_its_part_of_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let files = [
            ("loop0/loop/backing_file", "/no/such/image\n"),
            ("loop0/loop/offset", "4096\n"),
            ("loop0/size", "1000\n"),
            ("loop0/loop0p2/partition", "2\n"),
            ("loop0/loop0p2/start", "100\n"),
            ("loop0/loop0p2/size", "50\n"),
            ("dm-0/slaves/a/size", "1\n"),
        ];
        tree(dir.path(), &files);
        let parts = |device: &str| {
            let mut parts = Vec::new();
            collect(&dir.path().join(device), (0, None), false, MAX_STACK, &mut parts);
            parts
        };
        let part = |start, len| Part { path: "/no/such/image".into(), start, len: Some(len) };
        assert_eq!(parts("loop0"), [part(4096, 1000 * 512)]);
        assert_eq!(parts("loop0/loop0p2"), [part(4096 + 100 * 512, 50 * 512)]);
        assert_eq!(parts("dm-0"), [], "no loop device is below");
    }

    #[test]
    fn only_overlapping_parts_exclude_each_other() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        fs::write(&path, [0; 4096]).unwrap();
        let claim =
            |start, len, for_writing| claim_part(&Part { path: path.clone(), start, len }, for_writing);
        let first = claim(0, Some(1024), true).unwrap();
        assert!(first.is_some());
        let beside = claim(1024, Some(1024), true).unwrap();
        for (start, len, for_writing) in [(0, None, true), (512, Some(1), false), (2047, Some(10), true)] {
            let error = claim(start, len, for_writing).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        }
        drop((first, beside));
        let readers = (claim(0, None, false).unwrap(), claim(0, None, false).unwrap());
        assert!(claim(0, None, true).is_err());
        drop(readers);
        assert!(claim(0, None, true).unwrap().is_some());
    }
}
