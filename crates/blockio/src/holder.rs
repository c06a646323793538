//! The users of a device, for error messages.
//!
//! Owns the reading of `/proc` and `/sys`. The search is best effort and never fails: a user that it does not find is not
//! named. It checks mounts, swap, stacked devices, file locks, and finally the open files of processes.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::info::sysfs_dir;
use crate::mountinfo;

/// A user of a device.
pub(crate) struct Holder {
    /// Description for the error message.
    pub(crate) who: String,
    /// Whether the user keeps the device. A process that only has it open may be a probe, which closes it within milliseconds.
    pub(crate) lasting: bool,
}

impl Holder {
    fn lasting(who: String) -> Holder {
        Holder { who, lasting: true }
    }
}

/// A user of the block device `rdev` or of one of its partitions.
pub(crate) fn of_block_device(rdev: u64) -> Option<Holder> {
    let mut devices = vec![rdev];
    let dir = sysfs_dir(rdev);
    // A mounted partition keeps its disk busy.
    for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
        if entry.path().join("partition").exists() {
            devices.extend(dev_of(&entry.path()));
        }
    }
    devices
        .iter()
        .find_map(|d| stacked_on(*d).or_else(|| mounted(*d)).or_else(|| swapping(*d)))
        .map(Holder::lasting)
        .or_else(|| devices.iter().find_map(|d| opened_by(*d)).map(|who| Holder { who, lasting: false }))
}

/// The number of the block device whose sysfs directory is `dir`.
fn dev_of(dir: &Path) -> Option<u64> {
    let text = fs::read_to_string(dir.join("dev")).ok()?;
    let (major, minor) = text.trim().split_once(':')?;
    Some(rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?))
}

fn stacked_on(rdev: u64) -> Option<String> {
    let dir = sysfs_dir(rdev);
    let holder = fs::read_dir(dir.join("holders")).ok()?.flatten().next()?;
    let name = holder.file_name().to_string_lossy().into_owned();
    // The number of a device-mapper device means nothing to operators, so the message has its name too.
    match fs::read_to_string(holder.path().join("dm/name")) {
        Ok(n) => Some(format!("device mapper's {} (/dev/{name})", n.trim())),
        Err(_) => Some(format!("/dev/{name}")),
    }
}

fn is_device(path: &Path, rdev: u64) -> bool {
    path.is_absolute() && fs::metadata(path).is_ok_and(|m| m.rdev() == rdev)
}

fn mounted(rdev: u64) -> Option<String> {
    let mounts = mountinfo::mounts().ok()?;
    let number = (rustix::fs::major(rdev), rustix::fs::minor(rdev));
    // Some file systems have a number of their own, and name their device only as the source.
    let found = mounts.iter().find(|m| m.device == number || is_device(Path::new(&m.source), rdev))?;
    Some(format!("a file system mounted on {}", found.at.display()))
}

fn swapping(rdev: u64) -> Option<String> {
    let swaps = fs::read("/proc/swaps").ok()?;
    let used = swaps.split(|&b| b == b'\n').skip(1).any(|line| {
        let device = mountinfo::unescaped(line.split(|&b| b == b' ').next().unwrap_or_default());
        is_device(Path::new(&device), rdev)
    });
    used.then(|| "the system as swap".to_string())
}

/// Number and name of a process.
fn process(pid: u32) -> Option<String> {
    let comm = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    Some(format!("process {pid} ({})", comm.trim()))
}

/// A process that has the block device open.
fn opened_by(rdev: u64) -> Option<String> {
    let own = std::process::id();
    fs::read_dir("/proc").ok()?.flatten().find_map(|entry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        let mut fds = fs::read_dir(entry.path().join("fd")).ok()?.flatten();
        // Following the link reaches the device even if its path was removed.
        let open = |fd: &fs::DirEntry| {
            fs::read_link(fd.path()).is_ok_and(|to| to.starts_with("/dev"))
                && fs::metadata(fd.path())
                    .is_ok_and(|m| m.rdev() == rdev && m.mode() & 0o170_000 == 0o060_000)
        };
        let found = fds.any(|fd| open(&fd));
        if !found {
            return None;
        }
        if pid == own { Some("this process".to_string()) } else { process(pid) }
    })
}

/// A kind of lock that is searched for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Lock {
    /// One that excludes all others.
    Exclusive,
    /// An exclusive one, or one that readers share.
    Any,
}

/// The holder of a lock of flock(2) on the file.
pub(crate) fn of_locked_file(meta: &fs::Metadata, lock: Lock) -> Option<Holder> {
    let locks = fs::read_to_string("/proc/locks").ok()?;
    let (major, minor) = (rustix::fs::major(meta.dev()), rustix::fs::minor(meta.dev()));
    let wanted = format!("{major:02x}:{minor:02x}:{}", meta.ino());
    locks.lines().find_map(|line| {
        let pid = locked_by(line, &wanted, lock)?;
        let who = if pid == std::process::id() { Some("this process".to_string()) } else { process(pid) };
        who.map(Holder::lasting)
    })
}

/// The process that holds the lock of a line of `/proc/locks`, if it is on the file `wanted`. A line that waits for a lock,
/// marked with an arrow, is no lock.
fn locked_by(line: &str, wanted: &str, lock: Lock) -> Option<u32> {
    // "1: FLOCK  ADVISORY  WRITE 4711 fe:00:1234 0 EOF"
    let fields: Vec<&str> = line.split_whitespace().collect();
    let [_, "FLOCK", _, access, pid, file, ..] = fields.as_slice() else { return None };
    let counts = *file == wanted && (lock == Lock::Any || *access == "WRITE");
    counts.then(|| pid.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::{Lock, locked_by};

    #[test]
    fn lines_of_locks() {
        let by = |line, lock| locked_by(line, "fe:00:1234", lock);
        let write = "1: FLOCK  ADVISORY  WRITE 4711 fe:00:1234 0 EOF";
        let read = "2: FLOCK  ADVISORY  READ  4712 fe:00:1234 0 EOF";
        assert_eq!(by(write, Lock::Exclusive), Some(4711));
        assert_eq!(by(read, Lock::Exclusive), None);
        assert_eq!(by(read, Lock::Any), Some(4712));
        assert_eq!(by("1: FLOCK  ADVISORY  WRITE 4711 fe:00:12345 0 EOF", Lock::Any), None);
        assert_eq!(by("1: -> FLOCK  ADVISORY  WRITE 4713 fe:00:1234 0 EOF", Lock::Any), None);
        assert_eq!(by("3: POSIX  ADVISORY  WRITE 4711 fe:00:1234 0 EOF", Lock::Any), None);
    }
}
