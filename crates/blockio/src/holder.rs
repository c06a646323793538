//! The users of a device, for error messages.
//!
//! Owns the reading of `/proc` and `/sys`. The search is best effort and never fails: a user that it does not find is not
//! named. It checks mounts, swap, stacked devices, loop devices, file locks, and finally the open files of processes.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::info::sysfs_dir;

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

/// Undoes the octal escapes of `/proc/mounts`.
fn unescape(field: &str) -> String {
    let mut out = Vec::new();
    let bytes = field.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        let code = field.get(at + 1..at + 4).and_then(|s| u8::from_str_radix(s, 8).ok());
        match (bytes[at], code) {
            (b'\\', Some(c)) => {
                out.push(c);
                at += 4;
            }
            (c, _) => {
                out.push(c);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

fn is_device(path: &str, rdev: u64) -> bool {
    path.starts_with('/') && fs::metadata(path).is_ok_and(|m| m.rdev() == rdev)
}

fn mounted(rdev: u64) -> Option<String> {
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ');
        let (device, on) = (unescape(fields.next()?), unescape(fields.next()?));
        is_device(&device, rdev).then(|| format!("a file system mounted on {on}"))
    })
}

fn swapping(rdev: u64) -> Option<String> {
    let swaps = fs::read_to_string("/proc/swaps").ok()?;
    let used = swaps
        .lines()
        .skip(1)
        .any(|line| line.split_whitespace().next().is_some_and(|device| is_device(&unescape(device), rdev)));
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

/// The holder of a lock on the file.
pub(crate) fn of_locked_file(meta: &fs::Metadata) -> Option<Holder> {
    let locks = fs::read_to_string("/proc/locks").ok()?;
    let (major, minor) = (rustix::fs::major(meta.dev()), rustix::fs::minor(meta.dev()));
    let wanted = format!("{major:02x}:{minor:02x}:{}", meta.ino());
    // "1: FLOCK  ADVISORY  WRITE 4711 fe:00:1234 0 EOF"
    locks.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let at = fields.iter().position(|f| *f == wanted)?;
        let pid: u32 = fields.get(at.checked_sub(1)?)?.parse().ok()?;
        let who = if pid == std::process::id() { Some("this process".to_string()) } else { process(pid) };
        who.map(Holder::lasting)
    })
}

/// The loop device that is built on the file.
pub(crate) fn loop_device_on(path: &Path, meta: &fs::Metadata) -> Option<String> {
    let path = fs::canonicalize(path).unwrap_or_else(|_| PathBuf::from(path));
    fs::read_dir("/sys/block").ok()?.flatten().find_map(|entry| {
        let backing = fs::read_to_string(entry.path().join("loop/backing_file")).ok()?;
        let backing = Path::new(backing.trim_end_matches('\n'));
        let same = backing == path
            || fs::metadata(backing).is_ok_and(|m| (m.dev(), m.ino()) == (meta.dev(), meta.ino()));
        same.then(|| format!("/dev/{}, which is built on it", entry.file_name().to_string_lossy()))
    })
}

#[cfg(test)]
mod tests {
    use super::unescape;

    #[test]
    fn octal_escapes_are_undone() {
        assert_eq!(unescape(r"/mnt/a\040b\134c"), r"/mnt/a b\c");
        assert_eq!(unescape(r"/mnt/\04"), r"/mnt/\04", "no escape");
        assert_eq!(unescape("/mnt/ä"), "/mnt/ä");
    }
}
