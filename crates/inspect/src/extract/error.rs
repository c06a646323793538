//! Errors of an extraction.

use std::fmt;
use std::io;

use format::{Inode, Sector, Sectors, Uuid, counted};
use thiserror::Error;

use super::Lost;
use crate::device::SuperblockError;
use crate::finding::Finding;
use crate::source::ReadError;

/// Contents that may be wrong, or an extraction that ended early.
///
/// With best effort most of these errors become notes of the result. Positions are those of keys: sectors of the backing
/// device, the data offset included.
#[derive(Debug, Error)]
pub enum ExtractError {
    /// The set is damaged.
    #[error("damaged: {finding}")]
    Damaged {
        /// The first fatal finding.
        finding: Box<Finding>,
    },
    /// The backing superblock cannot be used.
    #[error("damaged: {0}")]
    Superblock(#[from] SuperblockError),
    /// The device given as backing device is a cache device.
    #[error("{device}: expected a backing device, found a cache device")]
    NotABackingDevice {
        /// Name of the device.
        device: String,
    },
    /// The backing device is attached to another set.
    #[error(
        "{device}: expected a backing device of set {set} ({cache}), found one of set {device_set} (state \
         {state}): this cache has none of its data"
    )]
    OtherSet {
        /// Name of the backing device.
        device: String,
        /// UUID of the set to which the backing device is attached.
        device_set: Uuid,
        /// State of the backing device.
        state: &'static str,
        /// Name of the cache device.
        cache: String,
        /// UUID of the cache device's set.
        set: Uuid,
    },
    /// The backing device lacks data that the set no longer knows.
    #[error(
        "{device}: expected a slot for {uuid} in set {set} ({cache}), as the device is attached to it (state \
         {state}), found none: its newest data is lost"
    )]
    NoSlot {
        /// Name of the backing device.
        device: String,
        /// UUID of the backing device.
        uuid: Uuid,
        /// State of the backing device.
        state: &'static str,
        /// Name of the cache device.
        cache: String,
        /// UUID of the cache device's set.
        set: Uuid,
    },
    /// The backing device was detached, or ran without its cache.
    #[error(
        "{device}: state is {state}, so {dirty_sectors} dirty and {clean_sectors} clean sectors of slot \
         {slot} are out of date and not used"
    )]
    InvalidSlot {
        /// Name of the backing device.
        device: String,
        /// State of the backing device.
        state: &'static str,
        /// Slot of the backing device.
        slot: Inode,
        /// Dirty sectors in the slot.
        dirty_sectors: u64,
        /// Clean sectors in the slot.
        clean_sectors: u64,
    },
    /// The slot has no volume.
    #[error("{cache}: expected a volume in slot {slot} (volumes are in {volumes:?}), found {found}")]
    NotAVolume {
        /// Name of the cache device.
        cache: String,
        /// The slot.
        slot: Inode,
        /// Type of the slot.
        found: &'static str,
        /// Slots that have volumes.
        volumes: Vec<u32>,
    },
    /// The slot is free, and there is no data for it.
    #[error("{cache}: expected a cached device in slot {slot}, found nothing")]
    NothingInSlot {
        /// Name of the cache device.
        cache: String,
        /// The slot.
        slot: Inode,
    },
    /// The backing device is not there.
    #[error(
        "slot {slot}: expected backing device {uuid}, found none: only {dirty_sectors} dirty and \
         {clean_sectors} clean sectors are known, all else is zeros"
    )]
    BackingAbsent {
        /// The slot.
        slot: Inode,
        /// UUID of the backing device.
        uuid: Uuid,
        /// Dirty sectors in the slot.
        dirty_sectors: u64,
        /// Clean sectors in the slot.
        clean_sectors: u64,
    },
    /// The size is larger than any file or device.
    #[error("expected a size of at most {most} sectors, found {sectors}")]
    TooLarge {
        /// The size.
        sectors: Sectors,
        /// The largest possible one.
        most: u64,
    },
    /// There is dirty data for sectors that the device does not have.
    #[error(
        "slot {slot}: expected dirty data between sectors {first} and {end} of the device, found {} outside, the first at \
         {at}",
        counted(dirty_sectors, "sector")
    )]
    OutsideDevice {
        /// The slot.
        slot: Inode,
        /// Dirty sectors of extents that are not inside.
        dirty_sectors: u64,
        /// Start of the first such extent.
        at: Sector,
        /// First data sector.
        first: Sector,
        /// End of the device.
        end: Sector,
    },
    /// The place of dirty data is not known, because its pointer is not valid.
    #[error(
        "slot {slot}: expected dirty data inside buckets of the cache, found {} with invalid pointers, the first at sector {at} \
         of the device",
        counted(dirty_sectors, "sector")
    )]
    InvalidPointer {
        /// The slot.
        slot: Inode,
        /// Dirty sectors of these extents.
        dirty_sectors: u64,
        /// Start of the first such extent.
        at: Sector,
    },
    /// Dirty data does not have its checksum.
    #[error(
        "{cache}: expected dirty data with the checksums of its footers, found {}: {ranges} of the volume: \
         the output would be wrong there; `--damaged older` writes the older data of the backing device in these places, \
         `--damaged zeros` zeros, `--damaged as-is` the damaged bytes",
        counted(sectors, "damaged sector")
    )]
    DamagedData {
        /// Name of the cache device.
        cache: String,
        /// Number of damaged sectors.
        sectors: Sectors,
        /// The damaged ranges on the volume, up to a limit.
        ranges: Ranges,
    },
    /// A device failed.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The output failed.
    #[error("output: {0}")]
    Output(#[source] io::Error),
    /// The caller did not want more.
    #[error("stopped after {done} of {total} sectors")]
    Cancelled {
        /// Sectors handed to the output.
        done: Sectors,
        /// Sectors of the whole output.
        total: Sectors,
    },
}

/// Ranges of sectors for a message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ranges {
    /// The ranges, up to a limit.
    pub listed: Vec<Lost>,
    /// Whether there are more.
    pub more: bool,
}

impl fmt::Display for Ranges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let each = self.listed.iter().map(|r| format!("{}+{}", r.start, r.sectors));
        f.write_str(&each.collect::<Vec<_>>().join(", "))?;
        f.write_str(if self.more { ", and more" } else { "" })
    }
}
