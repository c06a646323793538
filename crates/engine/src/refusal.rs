//! The reasons for which the engine refuses an operation, or gives it up.
//!
//! Owns one variant for each reason, with its figures, its message and, where another error is the cause, that error as
//! the source. Must not know components.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

use format::{BackingState, Inode, Sector, Sectors, Uuid};
use io::{NoMemory, OverBudget};

use crate::tunables::TunableError;

/// The reason for which an operation was refused or given up.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Refusal {
    /// A tunable or its value.
    #[error(transparent)]
    Tunable(#[from] TunableError),
    /// The tunable `synchronous` would be 0.
    #[error(
        "synchronous: expected 1; 0 would discard the cache with its dirty data at the next start. Detach the devices \
         and format the cache instead"
    )]
    NotSynchronous,
    /// A label that the superblock cannot hold.
    #[error("label: expected at most 32 bytes, found {bytes}")]
    LabelTooLong {
        /// The length of the label.
        bytes: usize,
    },
    /// A device does not fit.
    #[error("{device}: {why}")]
    Device {
        /// The name of the device.
        device: Arc<str>,
        /// The reason.
        #[source]
        why: DeviceRefusal,
    },
    /// The backing device is disabled.
    #[error("{volume}: io_disable is set, by the operator or after too many errors")]
    IoDisabled {
        /// The label or name of the volume.
        volume: String,
    },
    /// The operator has disabled the set (`io_disable`).
    #[error("{volume}: io_disable of the set is set")]
    IoDisabledBySet {
        /// The label or name of the volume.
        volume: String,
    },
    /// The size of a new flash-only volume.
    #[error("volume: expected 1 block to {most} sectors, found {size}")]
    VolumeSize {
        /// The largest size.
        most: Sector,
        /// The requested size.
        size: Sectors,
    },
    /// The UUID table is full.
    #[error("all {slots} slots of the set are in use")]
    NoSlot {
        /// The number of slots.
        slots: usize,
    },
    /// A slot is not that of a flash-only volume.
    #[error("slot {inode} is not a flash-only volume")]
    NotFlashOnly {
        /// The slot.
        inode: Inode,
    },
    /// Another caller has deleted the volume.
    #[error("the volume of slot {inode} has been deleted")]
    Deleted {
        /// The slot.
        inode: Inode,
    },
    /// A volume has no cache.
    #[error("{volume} is not attached")]
    NotAttached {
        /// The name of the volume.
        volume: String,
    },
    /// Dirty data could not be written back.
    #[error(
        "{volume}: {left} dirty sectors could not be written back: {}",
        cause(source, "the volume was stopped")
    )]
    NotWrittenBack {
        /// The name of the volume.
        volume: String,
        /// The sectors that are left.
        left: Sectors,
        /// The last error of writeback; none if the volume was stopped.
        source: Option<Cause>,
    },
    /// All dirty data that is left is damaged.
    #[error(
        "{volume}: damaged dirty data in the cache: {}, the first at sector {first}. No other device has this data; overwrite \
         it, or accept or drop it with `ubcache damaged {volume}`",
        format::counted(left, "sector")
    )]
    OnlyDamagedLeft {
        /// The name of the volume.
        volume: String,
        /// The sectors that are left.
        left: Sectors,
        /// The first of them.
        first: Sector,
    },
    /// A damaged block could not be accepted.
    #[error(
        "{device}: sector {at}: the damaged block cannot get a new checksum, because the checksums of its bucket are \
             being written for too long; try again"
    )]
    NotAccepted {
        /// The name of the cache device.
        device: Arc<str>,
        /// The position on it.
        at: Sector,
    },
    /// Dirty data of a device that is not registered cannot be dropped.
    #[error("{device} is not registered: register it before its damaged data is dropped")]
    DropNeedsDevice {
        /// Label or UUID of the device.
        device: String,
    },
    /// The set has no checksums.
    #[error("{device}: cached data has no checksums: only `ubcache make --checksums` switches them on")]
    NoChecksums {
        /// The name of the cache device.
        device: Arc<str>,
    },
    /// A wipe or a scrub was cancelled.
    #[error("cancelled before its end")]
    Cancelled,
    /// A wipe has not finished every bucket.
    #[error(
        "{device}: wipe: {buckets} buckets may still hold data that nothing refers to: {source}: run `ubcache wipe` for \
         this set"
    )]
    WipeUnfinished {
        /// The name of the cache device.
        device: Arc<str>,
        /// The number of buckets.
        buckets: u32,
        /// The error that ended the wipe.
        source: Cause,
    },
    /// The journal has too many keys for the memory of the process.
    #[error("{device}: sector {sector}: {keys} keys of the journal: {source}")]
    JournalMemory {
        /// The name of the cache device.
        device: Arc<str>,
        /// The first sector of the journal bucket.
        sector: Sector,
        /// The number of keys.
        keys: usize,
        /// The exceeded budget.
        source: OverBudget,
    },
    /// A device answered without an error and without the buffer of the request.
    #[error("device closed")]
    Closed,
    /// The set stopped before the change was made.
    #[error("the set is being stopped")]
    Stopping,
    /// A volume cannot have its dirty data in a second set, too.
    #[error("{volume}: its dirty data cannot be kept in a second set: {why}")]
    Mirror {
        /// The name of the volume.
        volume: String,
        /// The reason.
        why: MirrorRefusal,
    },
    /// The cache device does not answer, and another set of its group does.
    #[error(
        "{device}: no answer to a request for {waited_ms} ms (group_timeout_ms of the set); the other cache device of the group goes on \
         alone"
    )]
    NotAnswering {
        /// The name of the cache device.
        device: Arc<str>,
        /// The age of the oldest request, in milliseconds.
        waited_ms: u64,
    },
    /// A decision about damaged data of a copy, whose device is not registered.
    #[error(
        "{device}: expected a registered device, found one that is not; another set has its dirty data, too, and that one decides: register \
         the device, then run this command again"
    )]
    CopyNeedsDevice {
        /// Label or UUID of the device.
        device: String,
    },
    /// A set that is to leave its group has a volume, or dirty data that no other set has.
    #[error("{volume}: expected a set without volumes and dirty data, found this one in it")]
    HasVolume {
        /// Label or UUID of the volume.
        volume: String,
    },
    /// The set is disabled, and the failure is not known.
    #[error("the set is disabled")]
    SetFailed,
}

/// The reason for which a volume gets no second set.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MirrorRefusal {
    /// It is the set of the volume.
    #[error("expected another set than that of the volume")]
    SameSet,
    /// The block sizes differ.
    #[error("expected blocks of {first} sectors as in its set, found {second}")]
    BlockSize {
        /// The block size of the set of the volume.
        first: Sectors,
        /// The block size of the other set.
        second: Sectors,
    },
    /// It has a second set.
    #[error("expected a volume with one set, found one with two")]
    HasCopy,
    /// No second set has all dirty data.
    #[error("expected a second set with all of it, found none")]
    NoCopy,
    /// The second set has failed before it had all dirty data.
    #[error("the second set has failed before it had all of it")]
    Lost,
}

/// The reason for which a device does not fit.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DeviceRefusal {
    /// Another set was to serve it, which has no copy of its dirty data.
    #[error(
        "it belongs to set {set}, and set {copy_in} has no valid copy of its dirty data: register it together with its own set"
    )]
    NoCopy {
        /// The set of the device.
        set: Uuid,
        /// The other set.
        copy_in: Uuid,
    },
    /// It is too small for a superblock.
    #[error("expected at least 16 sectors for a superblock, found {sectors}")]
    TooSmall {
        /// The size of the device.
        sectors: Sectors,
    },
    /// The set has a format that cannot be written.
    #[error("the set uses the obsolete large-bucket format, which is read-only: extract its data instead")]
    ObsoleteFormat,
    /// It has too few buckets for the metadata of a set.
    #[error(
        "expected more than {least} buckets, for the metadata of a set, found {found}: format it with smaller buckets"
    )]
    TooFewBuckets {
        /// One bucket more than this is enough.
        least: u32,
        /// The number of buckets.
        found: u32,
    },
    /// The tables of the set take too much memory.
    #[error(
        "{buckets} buckets of {bucket_sectors} sectors take {wanted_bytes} bytes of memory: {source}. Format the cache \
         with larger buckets, or give the process more memory"
    )]
    Memory {
        /// The number of buckets.
        buckets: u32,
        /// Their size.
        bucket_sectors: Sectors,
        /// The memory that the set needs.
        wanted_bytes: u64,
        /// The exceeded limit.
        source: MemoryLimit,
    },
    /// Serving the device alone would lose its dirty data.
    #[error(
        "has dirty data in cache set {set}, which only the cache device has; serving this device alone would lose it; \
         `ubcache up -C CACHE-DEVICE -B {device}` serves both; if the cache device is lost, see the page dead-ssd-dirty of \
         the guide"
    )]
    DirtyInSet {
        /// The UUID of the set.
        set: Uuid,
        /// The name of the device.
        device: Arc<str>,
    },
    /// The cache device is in another state than the one that has the dirty data.
    #[error(
        "has dirty data in another state of cache set {set}: {cache} does not know the last registration of this \
         device: the cache device (or this one) was restored from an older copy. Attach the newest one; `ubcache \
         extract` reads what this one has; serving this device alone loses the dirty data"
    )]
    DirtyInOtherState {
        /// The UUID of the set.
        set: Uuid,
        /// The name of the cache device.
        cache: Arc<str>,
    },
    /// The set does not know the device, which has dirty data.
    #[error(
        "has dirty data in a cache, but cache set {set} does not know its UUID {device}: the dirty data is in another \
         cache device, or this one is an older copy, made before the device was attached"
    )]
    DirtyInOtherCache {
        /// The UUID of the set.
        set: Uuid,
        /// The UUID of the device.
        device: Uuid,
    },
    /// A device with this UUID is attached.
    #[error("a device with UUID {device} is already attached to set {set}")]
    Attached {
        /// The UUID of the device.
        device: Uuid,
        /// The UUID of the set.
        set: Uuid,
    },
    /// A flash-only volume of the set has the UUID of the device.
    #[error("has UUID {device}, which a flash-only volume of set {set} has: the device cannot join that set")]
    UuidOfVolume {
        /// The UUID of the device.
        device: Uuid,
        /// The UUID of the set.
        set: Uuid,
    },
    /// Another caller attaches or detaches a device with this UUID.
    #[error("a device with UUID {device} is being attached to or detached from set {set}")]
    BeingAttached {
        /// The UUID of the device.
        device: Uuid,
        /// The UUID of the set.
        set: Uuid,
    },
    /// The device belongs to another set.
    #[error("is {} and attached to cache set {found}, expected set {expected}", state.name())]
    InOtherSet {
        /// The state of the device.
        state: BackingState,
        /// The UUID of its set.
        found: Uuid,
        /// The UUID of the set that the caller named.
        expected: Uuid,
    },
    /// The blocks of the device are smaller than those of the set.
    #[error("block size: expected at least the set's {least} sectors, found {found}")]
    BlockSize {
        /// The block size of the set.
        least: Sectors,
        /// The block size of the device.
        found: Sectors,
    },
    /// The keys of the index cannot name the end of the data.
    #[error("size: expected an end of the data at sector {most} at most")]
    TooLarge {
        /// The greatest end.
        most: Sector,
    },
    /// The UUID table is full.
    #[error("all {slots} slots of the set are in use")]
    NoSlot {
        /// The number of slots.
        slots: usize,
    },
    /// The cache has dirty data beyond the data area.
    #[error(
        "the cache has dirty data for sectors {at}..+{sectors}: expected all of it between sectors {start} and {end}, \
         the data area of the device, which may have been truncated"
    )]
    DirtyOutside {
        /// The first sector of the dirty data.
        at: Sector,
        /// Its length.
        sectors: Sectors,
        /// The begin of the data area.
        start: Sector,
        /// The end of the data area.
        end: Sector,
    },
}

/// The limit that the memory of a set would exceed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MemoryLimit {
    /// The share of one set.
    #[error("a set may take {bytes} bytes here")]
    Set {
        /// The share.
        bytes: u64,
    },
    /// The budget of the process.
    #[error(transparent)]
    Process(#[from] OverBudget),
    /// What the system gives the process.
    #[error(transparent)]
    System(#[from] NoMemory),
}

impl DeviceRefusal {
    /// The refusal of the device of this name.
    pub(crate) fn of(self, device: &Arc<str>) -> Refusal {
        Refusal::Device { device: device.clone(), why: self }
    }

    /// The refusal to serve this device without the set that has dirty data of it.
    pub(crate) fn dirty_in_set(set: Uuid, device: &Arc<str>) -> Refusal {
        DeviceRefusal::DirtyInSet { set, device: device.clone() }.of(device)
    }
}

/// An error of the engine that is the cause of a refusal.
#[derive(Clone, Debug)]
pub struct Cause(Arc<dyn Error + Send + Sync>);

impl Cause {
    /// Makes a cause of an error.
    pub(crate) fn of(cause: Arc<impl Error + Send + Sync + 'static>) -> Cause {
        Cause(cause)
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Error for Cause {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&*self.0)
    }
}

/// The message of an error, or `otherwise` without one.
fn cause(error: &Option<Cause>, otherwise: &str) -> String {
    error.as_ref().map_or_else(|| otherwise.to_owned(), ToString::to_string)
}
