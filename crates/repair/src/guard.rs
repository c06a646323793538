//! The state in which a repair leaves the cache device.
//!
//! Owns [`Guard`]. Each start of a set raises the sequence number of the superblock, and a set that is used gets newer journal entries.
//! The module `undo` stores a guard in the undo file.

use std::fmt;
use std::path::{Path, PathBuf};

use format::JournalSeq;
use format::checksum::crc64;
use inspect::device::read_superblock_bytes;
use inspect::{Mode, ReadAt, SetView};

use crate::fields::{number, take};

/// What changes on a cache device as soon as the set is used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Guard {
    /// Path of the cache device.
    pub path: PathBuf,
    /// Checksum of the superblock with its sequence number; `None` if it cannot be read.
    superblock: Option<u64>,
    /// The newest journal entry; `None` if there is none.
    newest: Option<JournalSeq>,
}

impl Guard {
    /// Reads the state of a device.
    pub fn of(path: &Path, cache: &dyn ReadAt) -> Guard {
        let view = SetView::open(cache, Mode::BestEffort).ok();
        Guard {
            path: path.to_owned(),
            superblock: read_superblock_bytes(cache).ok().map(|bytes| crc64(&bytes[..])),
            newest: view.and_then(|view| view.journal).map(|journal| journal.newest),
        }
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        let path = std::os::unix::ffi::OsStrExt::as_bytes(self.path.as_os_str());
        out.extend_from_slice(&(path.len() as u64).to_le_bytes());
        out.extend_from_slice(path);
        for word in [self.superblock, self.newest.map(|seq| seq.0)] {
            out.extend_from_slice(&u64::from(word.is_some()).to_le_bytes());
            out.extend_from_slice(&word.unwrap_or(0).to_le_bytes());
        }
    }

    pub(crate) fn decode(bytes: &mut &[u8]) -> Option<Guard> {
        let len = usize::try_from(number(bytes)?).ok()?;
        let path: &std::ffi::OsStr = std::os::unix::ffi::OsStrExt::from_bytes(take(bytes, len)?);
        let mut word = || {
            let is_some = number(bytes)? == 1;
            Some(Some(number(bytes)?).filter(|_| is_some))
        };
        let (superblock, newest) = (word()?, word()?.map(JournalSeq));
        Some(Guard { path: PathBuf::from(path), superblock, newest })
    }
}

impl fmt::Display for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.newest {
            Some(seq) => write!(f, "{seq} as the newest journal entry")?,
            None => f.write_str("no journal entry")?,
        }
        match self.superblock {
            Some(sum) => write!(f, " and a superblock with checksum {sum:016x}"),
            None => f.write_str(" and no superblock"),
        }
    }
}
