//! The users of a block device or a directory, for messages when it cannot be removed.
//!
//! Owns the search in `/proc` and `/sys`, which serves messages and early refusals. The search finds the users that this
//! process may see, at one moment. Only the kernel decides whether a device is free.

use std::fmt;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::mountinfo;

/// A user of a device or a directory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum User {
    /// A mounted file system.
    Mount {
        /// The device: the whole one or a partition.
        device: PathBuf,
        /// The mount point.
        at: PathBuf,
    },
    /// Swap space.
    Swap(PathBuf),
    /// Another block device that is built on the device (device mapper, RAID).
    Holder(String),
    /// A process that has the device, or a file in the directory, open.
    Process {
        /// The process number.
        pid: u32,
        /// The process name.
        name: String,
        /// The open file.
        path: PathBuf,
    },
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            User::Mount { device, at } => write!(f, "{} is mounted at {}", device.display(), at.display()),
            User::Swap(device) => write!(f, "{} is swap space", device.display()),
            User::Holder(name) => write!(f, "/dev/{name} is built on it"),
            User::Process { pid, name, path } => {
                write!(f, "process {pid} ({name}) has {} open", path.display())
            }
        }
    }
}

/// Lists the users in a sentence.
pub fn in_words(users: &[User]) -> String {
    if users.is_empty() {
        return "the kernel does not report its users".to_string();
    }
    users.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// A block device and its partitions, by the names that the kernel gives them.
struct Family {
    /// `loop3`, `loop3p1` and so on.
    names: Vec<String>,
    numbers: Vec<(u32, u32)>,
}

impl Family {
    fn of(name: &str) -> Family {
        let sys = PathBuf::from("/sys/block").join(name);
        let partitions = fs::read_dir(&sys)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|e| e.file_name().into_string().ok())
            .filter(|n| n.starts_with(name));
        let names: Vec<String> = std::iter::once(name.to_string()).chain(partitions).collect();
        let numbers = names.iter().filter_map(|n| number_of(&sys_path(name, n))).collect();
        Family { names, numbers }
    }

    fn has_path(&self, path: &Path) -> bool {
        path.strip_prefix("/dev")
            .is_ok_and(|rest| self.names.iter().any(|n| rest.as_os_str().as_bytes() == n.as_bytes()))
    }
}

/// The directory in sysfs of `member`, which is the device `name` or one of its partitions.
fn sys_path(name: &str, member: &str) -> PathBuf {
    let whole = PathBuf::from("/sys/block").join(name);
    if member == name { whole } else { whole.join(member) }
}

fn number_of(sys: &Path) -> Option<(u32, u32)> {
    let text = fs::read_to_string(sys.join("dev")).ok()?;
    let (major, minor) = text.trim().split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// All users of the block device `name` (`loop3`) or of a partition of it.
pub fn of_block_device(name: &str) -> Vec<User> {
    let family = Family::of(name);
    let mut users = Vec::new();
    for mount in mountinfo::mounts().unwrap_or_default() {
        let source = Path::new(&mount.source);
        // The number finds a device that was mounted under another name. The name finds file systems with device numbers
        // of their own (btrfs).
        if family.numbers.contains(&mount.device) || family.has_path(source) {
            users.push(User::Mount { device: source.to_path_buf(), at: mount.at });
        }
    }
    let swaps = fs::read("/proc/swaps").unwrap_or_default();
    for line in swaps.split(|&b| b == b'\n').skip(1) {
        let path = PathBuf::from(mountinfo::unescaped(line.split(|&b| b == b' ').next().unwrap_or_default()));
        if family.has_path(&path) {
            users.push(User::Swap(path));
        }
    }
    for member in &family.names {
        let holders = fs::read_dir(sys_path(name, member).join("holders")).into_iter().flatten().flatten();
        users.extend(holders.map(|h| User::Holder(h.file_name().to_string_lossy().into_owned())));
    }
    users.extend(processes(|path| family.has_path(path)));
    users
}

/// The processes that have a file in `dir` open, or whose working directory, root or executable is in it.
pub fn of_directory(dir: &Path) -> Vec<User> {
    processes(|path| path.starts_with(dir))
}

/// The processes that hold a path for which `wanted` returns true.
///
/// This function reads links and never follows them: to follow a link into a file system that does not answer would hang.
fn processes(wanted: impl Fn(&Path) -> bool) -> Vec<User> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        let process = entry.path();
        let open = fs::read_dir(process.join("fd")).into_iter().flatten().flatten().map(|e| e.path());
        let places = ["cwd", "root", "exe"].map(|n| process.join(n));
        let path = open.chain(places).filter_map(|link| fs::read_link(link).ok()).find(|p| wanted(p));
        if let Some(path) = path {
            let name = fs::read_to_string(process.join("comm")).unwrap_or_default().trim().to_string();
            found.push(User::Process { pid, name, path });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_open_file_is_found_with_its_process() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        assert!(of_directory(&dir).is_empty());
        let path = dir.join("open");
        let _file = fs::File::create(&path).unwrap();
        let users = of_directory(&dir);
        assert!(
            matches!(&users[..], [User::Process { pid, path: p, .. }] if *pid == std::process::id() && *p == path),
            "{users:?}"
        );
    }

    #[test]
    fn partitions_belong_to_the_family_and_other_devices_do_not() {
        let family = Family { names: vec!["loop1".into(), "loop1p2".into()], numbers: Vec::new() };
        for (path, expected) in
            [("/dev/loop1", true), ("/dev/loop1p2", true), ("/dev/loop10", false), ("/dev/loop1p1", false)]
        {
            assert_eq!(family.has_path(Path::new(path)), expected, "{path}");
        }
    }

    #[test]
    fn users_are_named_in_words() {
        let at = |d: &str, a: &str| User::Mount { device: d.into(), at: a.into() };
        assert_eq!(at("/dev/loop3", "/mnt").to_string(), "/dev/loop3 is mounted at /mnt");
        let process = User::Process { pid: 7, name: "dd".into(), path: "/dev/loop3".into() };
        assert_eq!(process.to_string(), "process 7 (dd) has /dev/loop3 open");
        assert_eq!(User::Holder("dm-0".into()).to_string(), "/dev/dm-0 is built on it");
    }
}
