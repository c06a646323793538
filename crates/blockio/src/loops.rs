//! Loop devices and the files below them.
//!
//! Owns the search from a file to the loop device that is built on it, and from a block device to the files below it. A file
//! on a dead file system (FUSE, NFS) blocks the thread that calls stat(2) on it. The search from a file therefore calls it only
//! for files of the same file system. Must not know what a caller does with the result.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::holder::{self, Holder, Lock};
use crate::info::{lower_devices, sysfs_dir, whole_disk};
use crate::mountinfo::{self, MountEntry};

/// The loop device that is built on the file.
pub(crate) fn device_on(path: &Path, meta: &fs::Metadata) -> Option<String> {
    let path = fs::canonicalize(path).unwrap_or_else(|_| PathBuf::from(path));
    let mounts = mountinfo::mounts().unwrap_or_default();
    fs::read_dir("/sys/block").ok()?.flatten().find_map(|entry| {
        let backing = backing_file(&entry.path())?;
        let same = backing == path
            || (may_be_same(&mounts, &backing, &path)
                && fs::metadata(&backing).is_ok_and(|m| (m.dev(), m.ino()) == (meta.dev(), meta.ino())));
        same.then(|| format!("/dev/{}, which is built on it", entry.file_name().to_string_lossy()))
    })
}

/// The holder of a lock on a file below the block device `rdev`; only of a lock that excludes readers unless `for_writing`.
///
/// It can block if the file system of such a file is dead; then every request to the device blocks as well.
pub(crate) fn locked_below(rdev: u64, for_writing: bool) -> Option<Holder> {
    lower_devices(&sysfs_dir(rdev)).iter().find_map(|dir| {
        let file = backing_file(dir)?;
        let meta = fs::metadata(&file).ok()?;
        let lock = if for_writing { Lock::Any } else { Lock::Exclusive };
        let found = holder::of_locked_file(&meta, lock)?;
        Some(Holder { who: format!("{}, which holds {} below it", found.who, file.display()), ..found })
    })
}

/// The file below the loop device whose directory in sysfs is `dir`, if it is one.
pub(crate) fn backing_file(dir: &Path) -> Option<PathBuf> {
    let text = fs::read_to_string(whole_disk(dir).join("loop/backing_file")).ok()?;
    Some(PathBuf::from(text.trim_end_matches('\n')))
}

/// Whether both paths lie in one file system, by the table of mounts. The files themselves are not examined.
fn may_be_same(mounts: &[MountEntry], one: &Path, other: &Path) -> bool {
    match (mount_of(mounts, one), mount_of(mounts, other)) {
        (Some(one), Some(other)) => one.device == other.device,
        _ => false,
    }
}

/// The mount in which a path without links lies: of those with the longest mount point, the topmost.
fn mount_of<'a>(mounts: &'a [MountEntry], path: &Path) -> Option<&'a MountEntry> {
    mounts.iter().filter(|m| path.starts_with(&m.at)).max_by_key(|m| m.at.as_os_str().len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(device: u32, at: &str) -> MountEntry {
        MountEntry {
            device: (0, device),
            at: at.into(),
            fs_type: String::new(),
            source: std::ffi::OsString::new(),
        }
    }

    /// A loop device over a dead FUSE file system blocked the opening of every file on the machine.
    #[test]
    fn a_file_of_another_file_system_is_not_examined() {
        let mounts =
            [mount(1, "/"), mount(2, "/mnt/dead"), mount(3, "/mnt"), mount(1, "/bind"), mount(4, "/mnt")];
        let same = |one: &str, other: &str| may_be_same(&mounts, Path::new(one), Path::new(other));
        assert!(!same("/mnt/dead/volume", "/srv/disk"));
        assert!(!same("/mnt/deadly", "/mnt/dead/volume"));
        assert!(same("/bind/disk", "/srv/disk"), "a bind mount shows the same files");
        assert_eq!(
            mount_of(&mounts, Path::new("/mnt/x")).unwrap().device,
            (0, 4),
            "the later mount hides the other"
        );
        assert!(!may_be_same(&[], Path::new("/a"), Path::new("/a")));
    }
}
