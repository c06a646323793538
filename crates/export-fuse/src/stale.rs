//! Removes the mount of a process that has ended, and the loop devices over its files.
//!
//! Every access to such a mount fails ("Transport endpoint is not connected").
//!
//! Owns the clean-up before a new mount, and the list of loop devices that are still in use after it. Every
//! function blocks, so none may run on the thread of a driver.
//!
//! Invariant: a working mount is not changed. A mount is removed only if it has the type of this export and answers "not
//! connected"; a loop device is removed only if its file lies in such a mount.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use blockio::{mountinfo, users};
use rustix::io::Errno;

use crate::error::FuseError;
use crate::loopdev;
use crate::mount::{self, FS_TYPE};

/// A loop device of a process that has ended. Every access to it fails. The kernel removes it when no process uses it any more.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Leftover {
    /// The loop device.
    pub device: PathBuf,
    /// The file that the device was over.
    pub file: PathBuf,
    /// What tells the device from a later one with the same number.
    sequence: Option<String>,
}

impl Leftover {
    fn is_there(&self) -> bool {
        let is_in_use = sys_of(&self.device).join("loop/backing_file").exists();
        is_in_use && sequence_of(&self.device) == self.sequence
    }
}

/// The loop devices in use that this process has found when it removed the mounts of processes that had died.
static LEFT: Mutex<Vec<Leftover>> = Mutex::new(Vec::new());

/// The loop devices of dead processes that this process has found at the start of its exports, and that are still in use.
pub fn leftovers() -> Vec<Leftover> {
    let mut left = LEFT.lock().unwrap_or_else(PoisonError::into_inner);
    left.retain(Leftover::is_there);
    left.clone()
}

/// The directory of a block device in `/sys`.
fn sys_of(device: &Path) -> PathBuf {
    Path::new("/sys/block").join(device.file_name().unwrap_or_default())
}

/// The number that the kernel gives a device at each new use; `None` if the kernel has none.
fn sequence_of(device: &Path) -> Option<String> {
    fs::read_to_string(sys_of(device).join("diskseq")).ok()
}

/// Frees `dir` for a new mount. Returns messages for the log.
pub(crate) fn clean_up(dir: &Path) -> Result<Vec<String>, FuseError> {
    let mut notes = Vec::new();
    // Several dead mounts may lie on top of each other.
    while let Some(entry) =
        mountinfo::topmost(dir).map_err(|source| FuseError::Mount { dir: dir.to_path_buf(), source })?
    {
        let occupied = |what: String| FuseError::Occupied { dir: dir.to_path_buf(), what };
        // statfs(2), because the kernel may answer stat(2) from its cache.
        let dead = rustix::fs::statfs(dir).err() == Some(Errno::NOTCONN);
        match (dead, entry.fs_type == FS_TYPE) {
            (true, true) => {
                notes.extend(free_loop_devices(dir));
                mount::detach_lazily(dir)
                    .map_err(|source| FuseError::Unmount { dir: dir.to_path_buf(), source })?;
                notes.push(format!(
                    "{}: unmounted the file system of a process that has ended",
                    dir.display()
                ));
            }
            (true, false) => {
                return Err(occupied(format!(
                    "a file system of type {} whose process has ended",
                    entry.fs_type
                )));
            }
            (false, true) => return Err(occupied("a file system of a running ubcache".to_string())),
            // Another file system is mounted there, and its directory can be a mount point again.
            (false, false) => break,
        }
    }
    Ok(notes)
}

/// Detaches files in `dir` from their loop devices. Returns messages for the log.
fn free_loop_devices(dir: &Path) -> Vec<String> {
    let mut notes = Vec::new();
    for (device, file) in loop_devices().unwrap_or_default() {
        if !file.starts_with(dir) {
            continue;
        }
        let name = device.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let users = users::of_block_device(&name);
        let sequence = sequence_of(&device);
        let what = format!("{} over {}, of a process that has ended", device.display(), file.display());
        notes.push(match loopdev::clear(&device) {
            Err(e) => format!("{what}: cannot be removed: {e}"),
            Ok(()) if users.is_empty() => format!("{what}: removed"),
            Ok(()) => {
                let left = Leftover { device, file, sequence };
                LEFT.lock().unwrap_or_else(PoisonError::into_inner).push(left);
                format!(
                    "{what}: every access to it fails; it is removed when no process uses it any more ({})",
                    users::in_words(&users)
                )
            }
        });
    }
    notes
}

/// Loop devices in use, and their files with the paths that the kernel reports.
fn loop_devices() -> io::Result<Vec<(PathBuf, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/sys/block")?.flatten() {
        let name = entry.file_name();
        if let Ok(file) = fs::read_to_string(entry.path().join("loop/backing_file")) {
            found.push((Path::new("/dev").join(&name), PathBuf::from(file.trim_end_matches('\n'))));
        }
    }
    Ok(found)
}
