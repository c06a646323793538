//! Whether a write of the state would fail, as far as the file system says without a write.
//!
//! Owns the questions: read-only, no permission, no room, no inode. A quota or a failing disk is found by a write only. Must not
//! write.

use std::io;
use std::path::Path;

use rustix::fs::{Access, StatVfsMountFlags, access, statvfs};
use rustix::io::Errno;
use rustix::process::geteuid;

/// Why the file would not be written again with so many bytes more; `None` if nothing is known against it.
pub(super) fn refusal(file: &Path, more: u64) -> Option<io::Error> {
    let dir = file.parent()?;
    let found = match statvfs(dir) {
        Ok(found) => found,
        Err(e) => return Some(e.into()),
    };
    if found.f_flag.contains(StatVfsMountFlags::RDONLY) {
        return Some(Errno::ROFS.into());
    }
    if let Err(e) = access(dir, Access::WRITE_OK | Access::EXEC_OK) {
        return Some(e.into());
    }
    // Only root may use what the file system reserves.
    let free = if geteuid().is_root() { found.f_bfree } else { found.f_bavail };
    let size = std::fs::metadata(file).map_or(0, |m| m.len());
    let needed = size.saturating_add(more).div_ceil(found.f_frsize.max(1));
    // Some file systems count neither blocks nor inodes.
    let is_full = found.f_blocks > 0 && free < needed || found.f_files > 0 && found.f_ffree == 0;
    is_full.then(|| Errno::NOSPC.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_told_without_a_write() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("state.json");
        assert!(refusal(&file, 1).is_none());
        assert_eq!(refusal(&file, u64::MAX).unwrap().kind(), io::ErrorKind::StorageFull);
        assert_eq!(refusal(&dir.path().join("x/y"), 1).unwrap().kind(), io::ErrorKind::NotFound);
        assert!(std::fs::read_dir(dir.path()).unwrap().next().is_none(), "nothing is written");
    }
}
