//! The undo file: what a repair replaces, so that the devices can become byte for byte what they were.
//!
//! Owns the bytes of the file, and the writing of changes and of what they replaced. The file is complete and synced before the
//! first change. Layout, little endian: magic, version, number of devices; for each device the length and bytes of its path, its
//! size in sectors, and the number of changes; for each change the first sector, the number of bytes, and the bytes before and
//! after; then the guard (`guard`); at the end a checksum of all. A file of version 1 has no guard.
//!
//! Invariant: a set that was used after the repair is changed only with [`IfUsed::Revert`], because its other structures are newer than
//! the bytes from before the repair.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use format::checksum::crc64;
use format::{Sector, Sectors};
use inspect::{FileSource, OpenFileError, ReadAt, ReadError};
use thiserror::Error;

use crate::fields::{number, take};
use crate::guard::Guard;
use crate::overlay::Change;

const MAGIC: &[u8; 16] = b"ubcache undo 2\n\0";
/// The magic of a file without a guard.
const MAGIC_1: &[u8; 16] = b"ubcache undo 1\n\0";

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
    /// What the repair leaves of the set, to notice that the set was used since; `None` in files of older versions.
    pub guard: Option<Guard>,
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
    /// The set was used after the repair.
    #[error(
        "{path}: expected {expected}, as the repair left it, found {found}: the set was used since, and the undo file has bytes of \
         an older state; nothing was written; to write them anyway, repeat with --force"
    )]
    Used {
        /// The cache device.
        path: String,
        /// What the repair left.
        expected: String,
        /// What the device has.
        found: String,
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

/// What to do if the set was used after the repair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IfUsed {
    /// Nothing is written.
    Refuse,
    /// The repair is taken back.
    Revert,
}

/// Which bytes of a change replace the others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Direction {
    Apply,
    Revert,
}

impl Direction {
    /// The bytes that are replaced, and those that replace them.
    fn of(self, change: &Change) -> (&[u8], &[u8]) {
        match self {
            Direction::Apply => (&change.before, &change.after),
            Direction::Revert => (&change.after, &change.before),
        }
    }
}

impl UndoneDevice {
    fn open(&self) -> Result<FileSource, UndoError> {
        Ok(FileSource::open(&self.path)?)
    }

    /// Whether the device has in each sector the bytes from before or from after the repair. A sector that cannot be read may have been
    /// under way to the device when the power failed: it can be written.
    ///
    /// # Errors
    /// If the device has other bytes or another size.
    pub fn check_revert(&self, device: &dyn ReadAt) -> Result<(), UndoError> {
        self.check(device, Direction::Revert)
    }

    fn check(&self, device: &dyn ReadAt, direction: Direction) -> Result<(), UndoError> {
        let path = || self.path.display().to_string();
        if device.sectors() != self.sectors {
            let (expected, found) = (self.sectors, device.sectors());
            return Err(UndoError::Size { path: path(), expected, found });
        }
        for change in &self.changes {
            let (from, to) = direction.of(change);
            let mut now = vec![0; from.len()];
            let is_read = match device.read_at(change.at, &mut now) {
                Ok(()) => true,
                Err(_) if direction == Direction::Revert => false,
                Err(e) => return Err(e.into()),
            };
            // An interrupted write may have changed some sectors.
            let sectors = now.chunks_mut(512).zip(from.chunks(512)).zip(to.chunks(512));
            for (at, ((now, from), to)) in (change.at.0..).map(Sector).zip(sectors) {
                if !is_read && device.read_at(at, now).is_err() {
                    continue;
                }
                if *now != *from && *now != *to {
                    return Err(UndoError::Changed { path: path(), at });
                }
            }
        }
        Ok(())
    }
}

/// A device as the repair left it: the changed sectors come from the undo file, because some may be taken back or unreadable.
struct Repaired<'a> {
    device: &'a dyn ReadAt,
    sectors: BTreeMap<u64, &'a [u8]>,
}

impl<'a> Repaired<'a> {
    fn new(device: &'a dyn ReadAt, changes: impl Iterator<Item = &'a Change>) -> Repaired<'a> {
        let sectors = changes.flat_map(|change| (change.at.0..).zip(change.after.chunks(512))).collect();
        Repaired { device, sectors }
    }
}

impl ReadAt for Repaired<'_> {
    fn read_at(&self, at: Sector, into: &mut [u8]) -> Result<(), ReadError> {
        let end = at.0.saturating_add(Sectors::from_bytes_ceil(into.len() as u64).0);
        if self.sectors.range(at.0..end).next().is_none() {
            return self.device.read_at(at, into);
        }
        for (sector, part) in (at.0..).zip(into.chunks_mut(512)) {
            match self.sectors.get(&sector).and_then(|bytes| bytes.get(..part.len())) {
                Some(bytes) => part.copy_from_slice(bytes),
                None => self.device.read_at(Sector(sector), part)?,
            }
        }
        Ok(())
    }

    fn sectors(&self) -> Sectors {
        self.device.sectors()
    }

    fn name(&self) -> &str {
        self.device.name()
    }

    fn next_data(&self, from: Sector) -> Sector {
        let changed = self.sectors.range(from.0..).next().map(|(sector, _)| Sector(*sector));
        let data = self.device.next_data(from);
        changed.map_or(data, |changed| data.min(changed))
    }
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
        let (magic, rest) = body.split_at_checked(MAGIC.len()).unwrap_or_default();
        if magic != MAGIC && magic != MAGIC_1 {
            return Err(found("another file"));
        }
        if sum != crc64(body).to_le_bytes() {
            return Err(found("a wrong checksum"));
        }
        decode(rest, magic == MAGIC).ok_or_else(|| found("a list that ends too early"))
    }

    /// Writes the changes to the devices and syncs them.
    ///
    /// # Errors
    /// If a device has other bytes than the plan was made for, before anything is written; or if a device fails.
    pub fn apply(&self) -> Result<(), UndoError> {
        for device in &self.devices {
            device.check(&device.open()?, Direction::Apply)?;
        }
        self.write(Direction::Apply)
    }

    /// Writes back what the repair replaced, and syncs the devices. Devices that the repair did not change yet stay as they are.
    ///
    /// # Errors
    /// Those of [`Undo::check_revert`], before anything is written; or if a device fails.
    pub fn revert(&self, used: IfUsed) -> Result<(), UndoError> {
        self.check_revert(used)?;
        self.write(Direction::Revert)
    }

    /// Whether [`Undo::revert`] may write. Reads only.
    ///
    /// # Errors
    /// If a device has neither the bytes from before nor those from after the repair, or the set was used since.
    pub fn check_revert(&self, used: IfUsed) -> Result<(), UndoError> {
        for device in &self.devices {
            device.check_revert(&device.open()?)?;
        }
        match (&self.guard, used) {
            (Some(guard), IfUsed::Refuse) => self.check_unused(guard, &FileSource::open(&guard.path)?),
            _ => Ok(()),
        }
    }

    /// Whether the set is as the repair left it. Changes that were taken back already do not count.
    fn check_unused(&self, guard: &Guard, cache: &dyn ReadAt) -> Result<(), UndoError> {
        let changes = self.devices.iter().filter(|d| d.path == guard.path).flat_map(|d| &d.changes);
        let found = Guard::of(&guard.path, &Repaired::new(cache, changes));
        if found == *guard {
            return Ok(());
        }
        let (expected, found) = (guard.to_string(), found.to_string());
        Err(UndoError::Used { path: guard.path.display().to_string(), expected, found })
    }

    fn write(&self, direction: Direction) -> Result<(), UndoError> {
        for device in &self.devices {
            let file = OpenOptions::new().write(true).open(&device.path);
            let file = file.map_err(failed(&device.path, "cannot be opened for writing"))?;
            for change in &device.changes {
                let written = file.write_all_at(direction.of(change).1, change.at.bytes());
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
        number(&mut out, u64::from(self.guard.is_some()));
        if let Some(guard) = &self.guard {
            guard.encode(&mut out);
        }
        let sum = crc64(&out);
        number(&mut out, sum);
        out
    }
}

fn decode(mut bytes: &[u8], has_guard: bool) -> Option<Undo> {
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
    if has_guard && number(&mut bytes)? == 1 {
        undo.guard = Some(Guard::decode(&mut bytes)?);
    }
    bytes.is_empty().then_some(undo)
}
