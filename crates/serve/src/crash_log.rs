//! The crash log: a file in memory that preserves acknowledged writes without a flush after a process crash.
//!
//! Owns the path of the file, the decision which devices have one (those whose power loss can be detected), and the rule that
//! a start fails if it cannot read the file: it would lose acknowledged writes. Must not know the contents of the file.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use blockio::{CrashLogFile, Incarnation};
use format::{CacheSuper, Uuid};
use io::{CrashLogRef, Disk};

use crate::exports;
use crate::failure::Failure;
use crate::message;

/// The crash log of one cache device, or the reason why there is none.
pub struct CrashLog {
    file: Option<Rc<CrashLogFile>>,
    why_not: Option<String>,
}

impl CrashLog {
    /// No crash log, for volumes without a cache.
    pub fn nothing() -> CrashLog {
        CrashLog { file: None, why_not: None }
    }

    /// Opens the crash log of this cache device, or makes one.
    ///
    /// It belongs to the set and to the device itself, because a copy of the device is another device. The caller has
    /// claimed the device.
    ///
    /// # Errors
    /// If there is a crash log that cannot be read, or the device cannot be identified.
    pub fn open(disk: &Disk, superblock: &CacheSuper) -> Result<CrashLog, Failure> {
        let device = Path::new(&*disk.info().name);
        let suffix = suffix_of(device).map_err(|e| Failure::at(device, "cannot be examined", e))?;
        let dir = match exports::runtime_dir() {
            Ok(dir) => dir,
            Err(e) => return Ok(CrashLog { file: None, why_not: e.message().map(str::to_owned) }),
        };
        let path = dir.join(file_name(superblock.set_uuid(), &suffix));
        let something = std::fs::symlink_metadata(&path).is_ok_and(|m| m.len() > 0);
        let unread = "this crash log of an earlier process cannot be read; it may have acknowledged writes \
                      that were not flushed";
        let incarnation = match blockio::incarnation(device) {
            Ok(Incarnation::Known(words)) => words,
            Ok(Incarnation::Unknown(why)) => return CrashLog::untrusted(&path, something, why),
            // The device may be the same, and its crash log may be valid.
            Err(e) => return Err(Failure::at(device, "cannot identify the device", e)),
        };
        match CrashLogFile::open(&path, &incarnation) {
            Ok(file) => {
                warn_of_forgotten(device, &file, &incarnation);
                Ok(CrashLog { file: Some(Rc::new(file)), why_not: None })
            }
            Err(e) if something => Err(Failure::at(&path, unread, e)),
            Err(e) => {
                // The failed attempt may have left an empty file.
                let _ = std::fs::remove_file(&path);
                let why = Failure::at(&path, "cannot store writes that are not flushed", e);
                let why = why.message().unwrap_or_default();
                Ok(CrashLog { file: None, why_not: Some(exports::passed_over().unwrap_or_default() + why) })
            }
        }
    }

    /// Removes the crash logs of a device that failed a request before its set was known.
    ///
    /// Such a device may have lost writes that were not flushed, so its crash logs are invalid.
    pub fn forget(disk: &Disk) {
        let device = Path::new(&*disk.info().name);
        let (Ok(suffix), Ok(dir)) = (suffix_of(device), exports::runtime_dir()) else { return };
        for path in crash_logs_in(&dir, &suffix) {
            let said = match std::fs::remove_file(&path) {
                Ok(()) => "acknowledged writes that were not flushed are not restored".to_owned(),
                Err(e) => format!("{}: cannot be removed: {e}", path.display()),
            };
            message::warn(format!("{}: the device failed a request: {said}", device.display()));
        }
    }

    /// The result for a device whose power loss cannot be detected: no crash log. An existing one is removed.
    fn untrusted(path: &Path, something: bool, why: String) -> Result<CrashLog, Failure> {
        if something {
            let file = CrashLogFile::open(path, "").map_err(|e| Failure::at(path, "cannot be opened", e))?;
            warn_of_forgotten(path, &file, "not known");
            file.remove();
        }
        let why_not = format!("{why}: a power loss of this device alone could not be detected");
        Ok(CrashLog { file: None, why_not: Some(why_not) })
    }

    /// The file, for the engine.
    pub fn file(&self) -> Option<CrashLogRef> {
        self.file.clone().map(|file| CrashLogRef(file))
    }

    /// Why there is no crash log; `None` if there is one.
    pub fn why_not(&self) -> Option<&str> {
        self.why_not.as_deref()
    }

    /// Removes the file, because all data is on the devices.
    pub fn remove(&self) {
        if let Some(file) = &self.file {
            file.remove();
        }
    }
}

/// The crash log that an earlier process left for a cache device, if there is one. Such a log may have acknowledged writes
/// that are nowhere else.
pub fn left_behind(device: &Path, set: Uuid) -> Option<PathBuf> {
    let path = exports::runtime_dir().ok()?.join(file_name(set, &suffix_of(device).ok()?));
    std::fs::symlink_metadata(&path).is_ok_and(|m| m.len() > 0).then_some(path)
}

fn file_name(set: Uuid, suffix: &str) -> String {
    format!("{set}{suffix}")
}

/// The suffix of the names of a device's crash logs.
pub(crate) fn suffix_of(device: &Path) -> std::io::Result<String> {
    let meta = std::fs::metadata(device)?;
    let (a, b) = if meta.file_type().is_block_device() { (0, meta.rdev()) } else { (meta.dev(), meta.ino()) };
    Ok(format!("-{a:x}-{b:x}.kept"))
}

/// The crash logs of a device, of all sets.
fn crash_logs_in(dir: &Path, suffix: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let of_device = |e: &std::fs::DirEntry| e.file_name().to_string_lossy().ends_with(suffix);
    entries.filter(of_device).map(|e| e.path()).collect()
}

/// Warns that the crash log of another incarnation of the device is invalid.
fn warn_of_forgotten(device: &Path, file: &CrashLogFile, incarnation: &str) {
    if let Some(before) = file.forgotten() {
        message::warn(format!(
            "{}: the device was {before} when a process died, and is {incarnation} now: it may have lost \
             power. Acknowledged writes that were not flushed are not restored",
            device.display()
        ));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// If the superblock of a device cannot be read, its set is not known.
    #[test]
    fn a_crash_log_is_found_by_its_device_alone() {
        let dir = tempfile::tempdir().unwrap();
        let (one, other) = (dir.path().join("one"), dir.path().join("other"));
        for device in [&one, &other] {
            std::fs::write(device, "").unwrap();
        }
        let suffix = suffix_of(&one).unwrap();
        let mine = dir.path().join(format!("5e5e5e5e{suffix}"));
        let theirs = dir.path().join(format!("5e5e5e5e{}", suffix_of(&other).unwrap()));
        for crash_log in [&mine, &theirs] {
            std::fs::write(crash_log, "keys").unwrap();
        }
        assert_eq!(crash_logs_in(dir.path(), &suffix), [mine]);
    }
}
