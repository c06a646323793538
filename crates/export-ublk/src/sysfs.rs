//! Information about ublk devices from sysfs and /proc: nodes, queues, processes.
//!
//! Owns the paths of devices, and the reads and writes of their attributes. Must not know the driver's commands.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::abi;

/// The path of the character device by which a device is served.
pub(crate) fn node(number: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkc{number}"))
}

/// The name of the block device.
pub(crate) fn disk_name(number: u32) -> String {
    format!("ublkb{number}")
}

/// The path of the block device.
pub(crate) fn disk(number: u32) -> PathBuf {
    PathBuf::from("/dev").join(disk_name(number))
}

/// Numbers of the existing devices, smallest first.
pub(crate) fn devices() -> Vec<u32> {
    let entries =
        fs::read_dir("/sys/class/ublk-char").or_else(|_| fs::read_dir("/dev")).into_iter().flatten();
    let mut numbers: Vec<u32> = entries
        .flatten()
        .filter_map(|e| {
            e.file_name().to_str().and_then(|n| n.strip_prefix("ublkc")).and_then(|n| n.parse().ok())
        })
        .filter(|n| *n < abi::MAX_DEVICES)
        .collect();
    numbers.sort_unstable();
    numbers
}

/// Whether a process runs. A process that has ended and waits for its parent does not count: it has closed its files.
pub(crate) fn is_alive(pid: i32) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    // The name is in parentheses and may contain any character; the state follows the last parenthesis.
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    !matches!(state, None | Some('Z' | 'X'))
}

pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Loads the module of the driver. The next open of the driver shows whether that worked.
pub(crate) fn load_driver() {
    let quiet = Stdio::null;
    let _ = Command::new("modprobe")
        .args(["-q", "ublk_drv"])
        .stdin(quiet())
        .stdout(quiet())
        .stderr(quiet())
        .status();
}

/// A setting of a disk that could not be written.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {source}")]
pub(crate) struct SettingError {
    path: PathBuf,
    source: io::Error,
}

/// Leaves one tag of each queue without a request, always.
///
/// If each queue has an outstanding fetch, the driver notices at once that a server has ended. If every tag has a request,
/// drivers before Linux 6.15 notice only by the block layer's timeout, after 30 seconds. The scheduler must be `none`,
/// because other schedulers give requests numbers that are not tags. Requests are scheduled below the cache.
///
/// # Errors
/// The failed write.
pub(crate) fn leave_one_tag_free(number: u32, depth: u16) -> Result<(), SettingError> {
    let queue = PathBuf::from("/sys/block").join(disk_name(number)).join("queue");
    for (name, value) in [("scheduler", "none".to_owned()), ("nr_requests", (depth - 1).to_string())] {
        let path = queue.join(name);
        fs::write(&path, value).map_err(|source| SettingError { path, source })?;
    }
    Ok(())
}

/// Makes the page cache of a disk durable, if no process has a claim on the disk; false if one has.
///
/// A file system that is being unmounted may still write, although it is in no table any more; it still has its claim. A
/// program that closes the disk has no descriptor any more while the kernel writes its data. To stop the disk then would
/// lose both. The disk is opened for reading, because udev probes a device when a descriptor for writing is closed.
///
/// # Errors
/// The error of the system.
pub(crate) fn settle(number: u32) -> io::Result<bool> {
    let opened = File::options().read(true).custom_flags(libc::O_EXCL).open(disk(number));
    match opened {
        Ok(disk) => disk.sync_all().map(|()| true),
        Err(e) if e.raw_os_error() == Some(libc::EBUSY) => Ok(false),
        // A disk that does not exist, or may not be opened, has no data to wait for.
        Err(e)
            if matches!(e.raw_os_error(), Some(libc::EACCES | libc::EPERM | libc::ENOENT | libc::ENXIO)) =>
        {
            Ok(true)
        }
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_are_told_from_their_remains() {
        assert!(is_alive(std::process::id() as i32));
        assert!(!is_alive(i32::MAX));
        let mut child = Command::new("true").spawn().unwrap();
        let pid = child.id() as i32;
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while is_alive(pid) {
            assert!(std::time::Instant::now() < deadline, "a child that was not waited for is a zombie");
            std::thread::yield_now();
        }
        child.wait().unwrap();
    }
}
