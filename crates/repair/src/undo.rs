//! The undo file: what a repair replaces, so that the devices can become byte for byte what they were.
//!
//! Owns the bytes of the file, and the writing of changes and of what they replaced. The file is complete and synced before the
//! first change. Layout, little endian: magic, version, number of devices; for each device the length and bytes of its path, its
//! size in sectors, and the number of changes; for each change the first sector, the number of sectors, and the bytes before and
//! after; at the end a checksum of all.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use format::checksum::crc64;
use format::{Sector, Sectors};
use inspect::{FileSource, OpenFileError, ReadAt, ReadError};
use thiserror::Error;

use crate::overlay::Change;

const MAGIC: &[u8; 16] = b"ubcache undo 1\n\0";

/// The changes of one device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UndoneDevice {
    /// Path of the device.
    pub path: PathBuf,
    /// Size of the device.
    pub sectors: Sectors,
    /// What changes.
    pub changes: Vec<Change>,
}

/// All changes of a repair.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Undo {
    /// The devices that change.
    pub devices: Vec<UndoneDevice>,
}

/// An undo file that cannot be used, or a change that failed.
#[derive(Debug, Error)]
pub enum UndoError {
    /// A file or device failed.
    #[error("{path}: {doing}: {reason}")]
    Io {
        /// The file or device.
        path: String,
        /// What failed.
        doing: &'static str,
        /// The error.
        #[source]
        reason: io::Error,
    },
    /// A device cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenFileError),
    /// A device cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The file is not an undo file, or is damaged.
    #[error("{path}: expected the undo file of a repair, found {found}")]
    NotAnUndoFile {
        /// The file.
        path: String,
        /// What is wrong.
        found: &'static str,
    },
    /// A device is not what the repair left or found.
    #[error(
        "{path}: expected the bytes that the repair left at sector {at}, found others: the device was changed since; nothing was \
         written"
    )]
    Changed {
        /// The device.
        path: String,
        /// The first sector of the range that differs.
        at: Sector,
    },
    /// A device has another size.
    #[error(
        "{path}: expected {expected} sectors, found {found}: this is another device; nothing was written"
    )]
    Size {
        /// The device.
        path: String,
        /// Size in the undo file.
        expected: Sectors,
        /// Size of the device.
        found: Sectors,
    },
}

fn failed(path: &Path, doing: &'static str) -> impl FnOnce(io::Error) -> UndoError {
    let path = path.display().to_string();
    move |reason| UndoError::Io { path, doing, reason }
}

impl Undo {
    /// Writes the undo file and syncs it and its directory. The file must not exist.
    ///
    /// # Errors
    /// If it exists or cannot be written.
    pub fn save(&self, path: &Path) -> Result<(), UndoError> {
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
            .map_err(failed(path, "cannot be created"))?;
        let written = file.write_all(&self.encode()).and_then(|()| file.sync_all());
        written.map_err(failed(path, "cannot be written"))?;
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let synced = File::open(parent).and_then(|dir| dir.sync_all());
        synced.map_err(failed(parent, "cannot be synced"))
    }

    /// Reads an undo file.
    ///
    /// # Errors
    /// If it cannot be read, or is damaged.
    pub fn load(path: &Path) -> Result<Undo, UndoError> {
        let mut bytes = Vec::new();
        let read = File::open(path).and_then(|mut file| file.read_to_end(&mut bytes));
        read.map_err(failed(path, "cannot be read"))?;
        let found = |found| UndoError::NotAnUndoFile { path: path.display().to_string(), found };
        let body = bytes.len().checked_sub(8).and_then(|n| bytes.split_at_checked(n));
        let (body, sum) = body.ok_or_else(|| found("a shorter file"))?;
        if !body.starts_with(MAGIC) {
            return Err(found("another file"));
        }
        if sum != crc64(body).to_le_bytes() {
            return Err(found("a wrong checksum"));
        }
        decode(body.get(MAGIC.len()..).unwrap_or_default()).ok_or_else(|| found("a list that ends too early"))
    }

    /// Writes the changes to the devices and syncs them.
    ///
    /// # Errors
    /// If a device has other bytes than the plan was made for, before anything is written; or if a device fails.
    pub fn apply(&self) -> Result<(), UndoError> {
        self.write(|change| (&change.before, &change.after))
    }

    /// Writes back what the repair replaced, and syncs the devices. Devices that the repair did not change yet stay as they are.
    ///
    /// # Errors
    /// If a device has neither the bytes from before nor those from after the repair, before anything is written; or if a device
    /// fails.
    pub fn revert(&self) -> Result<(), UndoError> {
        self.write(|change| (&change.after, &change.before))
    }

    /// Replaces the first bytes of each change by the second. A range that has the second ones already may stay.
    fn write(&self, of: impl Fn(&Change) -> (&Vec<u8>, &Vec<u8>)) -> Result<(), UndoError> {
        for device in &self.devices {
            let source = FileSource::open(&device.path)?;
            let path = || device.path.display().to_string();
            if source.sectors() != device.sectors {
                let (expected, found) = (device.sectors, source.sectors());
                return Err(UndoError::Size { path: path(), expected, found });
            }
            for change in &device.changes {
                let (from, to) = of(change);
                let mut now = vec![0; from.len()];
                source.read_at(change.at, &mut now)?;
                // An interrupted write may have changed some sectors.
                let sectors = now.chunks(512).zip(from.chunks(512)).zip(to.chunks(512));
                if let Some(n) = sectors.into_iter().position(|((now, from), to)| now != from && now != to) {
                    let at = Sector(change.at.0 + u64::try_from(n).unwrap_or(0));
                    return Err(UndoError::Changed { path: path(), at });
                }
            }
        }
        for device in &self.devices {
            let file = OpenOptions::new().write(true).open(&device.path);
            let file = file.map_err(failed(&device.path, "cannot be opened for writing"))?;
            for change in &device.changes {
                let written = file.write_all_at(of(change).1, change.at.bytes());
                written.map_err(failed(&device.path, "cannot be written"))?;
            }
            file.sync_all().map_err(failed(&device.path, "cannot be synced"))?;
        }
        Ok(())
    }

    fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        let number = |out: &mut Vec<u8>, n: u64| out.extend_from_slice(&n.to_le_bytes());
        number(&mut out, self.devices.len() as u64);
        for device in &self.devices {
            let path = std::os::unix::ffi::OsStrExt::as_bytes(device.path.as_os_str());
            number(&mut out, path.len() as u64);
            out.extend_from_slice(path);
            number(&mut out, device.sectors.0);
            number(&mut out, device.changes.len() as u64);
            for change in &device.changes {
                number(&mut out, change.at.0);
                number(&mut out, change.before.len() as u64);
                out.extend_from_slice(&change.before);
                out.extend_from_slice(&change.after);
            }
        }
        let sum = crc64(&out);
        number(&mut out, sum);
        out
    }
}

fn number(bytes: &mut &[u8]) -> Option<u64> {
    let (front, rest) = bytes.split_first_chunk::<8>()?;
    *bytes = rest;
    Some(u64::from_le_bytes(*front))
}

fn take<'a>(bytes: &mut &'a [u8], n: usize) -> Option<&'a [u8]> {
    let (front, rest) = bytes.split_at_checked(n)?;
    *bytes = rest;
    Some(front)
}

fn decode(mut bytes: &[u8]) -> Option<Undo> {
    let mut undo = Undo::default();
    for _ in 0..number(&mut bytes)? {
        let len = usize::try_from(number(&mut bytes)?).ok()?;
        let path: &std::ffi::OsStr = std::os::unix::ffi::OsStrExt::from_bytes(take(&mut bytes, len)?);
        let sectors = Sectors(number(&mut bytes)?);
        let mut changes = Vec::new();
        for _ in 0..number(&mut bytes)? {
            let at = Sector(number(&mut bytes)?);
            let len = usize::try_from(number(&mut bytes)?).ok()?;
            let before = take(&mut bytes, len)?.to_vec();
            changes.push(Change { at, before, after: take(&mut bytes, len)?.to_vec() });
        }
        undo.devices.push(UndoneDevice { path: PathBuf::from(path), sectors, changes });
    }
    bytes.is_empty().then_some(undo)
}
