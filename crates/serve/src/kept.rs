//! What was answered and not flushed outlives a process in a file in memory.
//!
//! Owns where that file is, which devices have one (those of which a loss of power is noticed), and the rule that a start
//! which cannot read what is there does not go on: it would lose what was answered. Must not know what is in it.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::rc::Rc;

use blockio::{Incarnation, KeptFile};
use format::CacheSuper;
use io::{Disk, SurvivorRef};

use crate::exports;
use crate::failure::Failure;
use crate::message;

/// The memory of one cache device, if this host has such memory.
pub struct Kept {
    file: Option<Rc<KeptFile>>,
    why_not: Option<String>,
}

impl Kept {
    /// Where there is no cache there is nothing to be kept.
    pub fn nothing() -> Kept {
        Kept { file: None, why_not: None }
    }

    /// The memory that outlives the process which has this cache device: by the set and by what the device is, since a
    /// copy of it is another one. Nobody else may have the device.
    ///
    /// # Errors
    /// If there is something that cannot be read.
    pub fn open(disk: &Disk, superblock: &CacheSuper) -> Result<Kept, Failure> {
        let device = Path::new(&*disk.info().name);
        let meta = std::fs::metadata(device).map_err(|e| Failure::at(device, "cannot be looked at", e))?;
        let (a, b) =
            if meta.file_type().is_block_device() { (0, meta.rdev()) } else { (meta.dev(), meta.ino()) };
        let dir = match exports::runtime_dir() {
            Ok(dir) => dir,
            Err(e) => return Ok(Kept { file: None, why_not: e.message().map(str::to_owned) }),
        };
        let path = dir.join(format!("{}-{a:x}-{b:x}.kept", superblock.set_uuid()));
        let something = std::fs::symlink_metadata(&path).is_ok_and(|m| m.len() > 0);
        let unread =
            "what an earlier process has answered and not flushed may be in it, and it cannot be read";
        let incarnation = match blockio::incarnation(device) {
            Ok(Incarnation::Known(words)) => words,
            Ok(Incarnation::Unknown(why)) => return Kept::untrusted(&path, something, why),
            // The device may be what it was, and what was kept for it may count.
            Err(e) => return Err(Failure::at(device, "cannot find out what the device is", e)),
        };
        match KeptFile::open(&path, &incarnation) {
            Ok(file) => {
                warn_of_forgotten(device, &file, &incarnation);
                Ok(Kept { file: Some(Rc::new(file)), why_not: None })
            }
            Err(e) if something => Err(Failure::at(&path, unread, e)),
            Err(e) => {
                // What may be left of the attempt is empty.
                let _ = std::fs::remove_file(&path);
                let why = Failure::at(&path, "cannot keep what was not flushed", e);
                Ok(Kept { file: None, why_not: why.message().map(str::to_owned) })
            }
        }
    }

    /// Nothing tells whether such a device has lost its power since: what was kept for it does not count.
    fn untrusted(path: &Path, something: bool, why: String) -> Result<Kept, Failure> {
        if something {
            let file = KeptFile::open(path, "").map_err(|e| Failure::at(path, "cannot be opened", e))?;
            warn_of_forgotten(path, &file, "not known");
            file.remove();
        }
        let why_not = format!("{why}: a loss of power of the device alone would not be noticed");
        Ok(Kept { file: None, why_not: Some(why_not) })
    }

    /// For the engine.
    pub fn survivor(&self) -> Option<SurvivorRef> {
        self.file.clone().map(|file| SurvivorRef(file))
    }

    /// Why there is no such memory, if there is none.
    pub fn why_not(&self) -> Option<&str> {
        self.why_not.as_deref()
    }

    /// Everything is on the devices: nothing is to be kept any more.
    pub fn remove(&self) {
        if let Some(file) = &self.file {
            file.remove();
        }
    }
}

/// Says that what was kept for another incarnation of the device does not count.
fn warn_of_forgotten(device: &Path, file: &KeptFile, incarnation: &str) {
    if let Some(before) = file.forgotten() {
        message::warn(format!(
            "{}: the device was {before} when a process died, and is {incarnation} now: it may have lost its power. \
             Writes that were answered and not flushed are not restored",
            device.display()
        ));
    }
}
