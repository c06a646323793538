//! A mounted file system without volumes, for example for control files.
//!
//! Owns its mount and its threads, with the same clean-up after a process that has ended as for volumes. Every function blocks,
//! so none may run on the thread of a driver. Must not know what the files are.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use blockio::mountinfo;
use fuser::{BackgroundSession, Filesystem};

use crate::error::FuseError;
use crate::mount::{self, Mount, MountBy};
use crate::{session, stale};

/// Time in which the threads must end after the unmount.
const UNMOUNT_WITHIN: Duration = Duration::from_secs(5);
const STEP: Duration = Duration::from_millis(5);

/// A mounted file system. If it is dropped, it is removed, even in use.
pub struct Tree {
    dir: PathBuf,
    mount: Mount,
    session: Option<BackgroundSession>,
    notes: Vec<String>,
}

impl Tree {
    /// Mounts `files` at `dir`, which must be empty, and is created if it does not exist.
    ///
    /// The mount of a process that has ended is removed first.
    ///
    /// # Errors
    /// If the host has no FUSE or refuses to mount, or `dir` is not free.
    pub fn mount(dir: &Path, files: impl Filesystem, by: MountBy) -> Result<Tree, FuseError> {
        let at_dir = |source| FuseError::Directory { dir: dir.to_path_buf(), source };
        let dir = std::path::absolute(dir).map_err(at_dir)?;
        let dir = mountinfo::located(&dir).map_err(at_dir)?;
        let notes = stale::clean_up(&dir)?;
        let (device, mount) = mount::mount(&dir, by)?;
        // If a later step fails, the drop of this value removes the mount.
        let mut tree = Tree { dir: dir.clone(), mount, session: None, notes };
        let failed = |source| FuseError::Session { dir: dir.clone(), source };
        // Two threads, so that one slow file does not delay the others.
        tree.session = Some(session::start(files, device, 2).map_err(failed)?);
        rustix::fs::statfs(&dir).map_err(|e| failed(e.into()))?;
        Ok(tree)
    }

    /// The mount point.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Messages about the start, one sentence each.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Whether the file system was unmounted by another process.
    pub fn has_ended(&self) -> bool {
        self.session.as_ref().is_none_or(|s| s.guard.is_finished())
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        // If this fails, the mount stays, as after the end of the process; the next start removes it.
        let _: io::Result<()> = self.mount.abort();
        let deadline = Instant::now() + UNMOUNT_WITHIN;
        while !self.has_ended() && Instant::now() < deadline {
            std::thread::sleep(STEP);
        }
        if !self.has_ended() {
            let _ = self.mount.end_connection();
        }
    }
}
