//! Reads and checks superblocks, which say what kind of device a source is.
//!
//! Owns the reading and the check of superblocks; findings name the device and the sector.

use format::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR};
use format::{BackingSuper, CacheSuper, Identity, RawSuperblock, Sectors, identify};

use crate::finding::{Finding, Invariant, Mismatch, Place, Severity};
use crate::source::{ReadAt, ReadError};

/// The checked superblock of a device.
#[derive(Clone, Debug)]
pub enum DeviceSuper {
    /// A cache device.
    Cache(CacheSuper),
    /// A backing device.
    Backing(BackingSuper),
}

/// Reads the 4096 bytes at the superblock's place, without a check.
///
/// # Errors
/// If the device is too small or cannot be read.
pub fn read_superblock_bytes(source: &dyn ReadAt) -> Result<Box<[u8; SUPERBLOCK_BYTES]>, ReadError> {
    let mut bytes = Box::new([0; SUPERBLOCK_BYTES]);
    source.read_at(SUPERBLOCK_SECTOR, &mut bytes[..])?;
    Ok(bytes)
}

/// A superblock that cannot be used. The message is that of the finding, without its severity and its invariant.
#[derive(Debug, thiserror::Error)]
pub enum SuperblockError {
    /// The device cannot be read.
    #[error("{}", finding.as_error())]
    Unreadable {
        /// The fatal finding for a report.
        finding: Box<Finding>,
        /// The failed read.
        source: ReadError,
    },
    /// A rule of the format is broken.
    #[error("{}", .0.as_error())]
    Broken(Box<Finding>),
}

impl SuperblockError {
    /// The fatal finding for a report.
    pub fn finding(&self) -> &Finding {
        match self {
            SuperblockError::Unreadable { finding, .. } | SuperblockError::Broken(finding) => finding,
        }
    }

    /// See [`SuperblockError::finding`].
    pub fn into_finding(self) -> Box<Finding> {
        match self {
            SuperblockError::Unreadable { finding, .. } | SuperblockError::Broken(finding) => finding,
        }
    }
}

/// Reads and checks the superblock of a device of either kind.
///
/// # Errors
/// If it cannot be read, or at the first rule that is broken.
pub fn read_superblock(source: &dyn ReadAt) -> Result<DeviceSuper, SuperblockError> {
    let bytes = read_superblock_bytes(source).map_err(|e| {
        let finding = unreadable(source, "superblock", &e);
        SuperblockError::Unreadable { finding, source: e }
    })?;
    check_superblock(source, &bytes[..], source.sectors()).map_err(SuperblockError::Broken)
}

/// Checks superblock `bytes` that were read from `source`, as if the device had `device_sectors`.
pub(crate) fn check_superblock(
    source: &dyn ReadAt,
    bytes: &[u8],
    device_sectors: Sectors,
) -> Result<DeviceSuper, Box<Finding>> {
    let not_bcache = |expected: &str, found: String| {
        let place = superblock_place(source, "superblock");
        Box::new(Finding::new(
            Severity::Fatal,
            Invariant::Superblock,
            place,
            Mismatch::new("magic", expected, found),
        ))
    };
    let corrupt = |structure, e: format::Corrupt| {
        let place = superblock_place(source, structure);
        Box::new(Finding::corrupt(Severity::Fatal, Invariant::Superblock, place, &e))
    };
    let raw = RawSuperblock::from_prefix(bytes).map_err(|e| corrupt("superblock", e))?;
    let block = source.logical_block_bytes().unwrap_or(0);
    match identify(bytes) {
        Identity::Cache => raw
            .check_cache(device_sectors, block)
            .map(DeviceSuper::Cache)
            .map_err(|e| corrupt("cache superblock", e)),
        Identity::Backing => raw
            .check_backing(device_sectors, block)
            .map(DeviceSuper::Backing)
            .map_err(|e| corrupt("backing superblock", e)),
        Identity::UnknownVersion(version) => {
            let mut finding = not_bcache("0 to 6, except 2", version.to_string());
            finding.field = "version (not supported)".to_owned();
            Err(finding)
        }
        Identity::NotBcache => {
            Err(not_bcache("the magic of bcache", "something else: not a bcache device".to_owned()))
        }
    }
}

/// The place of the superblock of `source`.
pub(crate) fn superblock_place(source: &dyn ReadAt, structure: &'static str) -> Place {
    Place::new(source.name(), structure).sector(SUPERBLOCK_SECTOR)
}

/// The finding that a superblock could not be read.
fn unreadable(source: &dyn ReadAt, structure: &'static str, e: &ReadError) -> Box<Finding> {
    let place = superblock_place(source, structure);
    Box::new(unreadable_at(Invariant::Superblock, Severity::Fatal, place, e))
}

/// The finding that a structure at `place` could not be read.
pub(crate) fn unreadable_at(
    invariant: Invariant,
    severity: Severity,
    place: Place,
    e: &ReadError,
) -> Finding {
    let expected = format!("{} readable sectors at sector {}", e.sectors, e.at);
    Finding::new(severity, invariant, place, Mismatch::new("device", expected, &e.reason))
}
