//! The interface between the view and the owner of the sets.
//!
//! Owns the orders and the error numbers. Must not know the files.

use engine::figures::{BucketFigures, SetFigures, VolumeFigures};
use format::{Sectors, Uuid};

/// A positive error number of the system, with which a file answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Errno(pub i32);

impl Errno {
    /// Nothing has this name.
    pub const ENOENT: Errno = Errno(2);
    /// The operation failed.
    pub const EIO: Errno = Errno(5);
    /// Another process uses the device.
    pub const EBUSY: Errno = Errno(16);
    /// The text is not valid.
    pub const EINVAL: Errno = Errno(22);
    /// The number is out of range.
    pub const ERANGE: Errno = Errno(34);
    /// The kernel supports this, and ubcache does not.
    pub const EOPNOTSUPP: Errno = Errno(95);
    /// The owner does not answer in time.
    pub const ETIMEDOUT: Errno = Errno(110);
}

/// All sets and volumes at one moment.
#[derive(Clone, Default, Debug)]
pub struct Snapshot {
    /// Sets with their volumes.
    pub sets: Vec<SetFigures>,
    /// Volumes without a set.
    pub alone: Vec<VolumeFigures>,
}

/// Identifies a volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VolumeId {
    /// UUID of its set; `None` if it is served alone.
    pub set: Option<Uuid>,
    /// UUID of its backing device; `None` for a flash-only volume.
    pub backing: Option<Uuid>,
    /// Its name for clients, which is unique in its set.
    pub name: String,
}

/// The orders to a volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DeviceOrder {
    /// Change a tunable.
    Tune {
        /// Its name.
        key: &'static str,
        /// Its value, checked as the kernel does.
        value: String,
    },
    /// Attach it to the set of this name (a UUID).
    Attach(Uuid),
    /// Write all dirty data back and detach it.
    Detach,
    /// Stop serving it; dirty data stays in the cache.
    Stop,
    /// Serve it without its cache (`running`).
    Run,
    /// Reset the totals.
    ClearStats,
    /// Change the size of a flash-only volume.
    Resize(Sectors),
    /// Delete a flash-only volume.
    Unregister,
}

/// The orders to a set.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SetOrder {
    /// Change a tunable.
    Tune {
        /// Its name.
        key: &'static str,
        /// Its value, checked as the kernel does.
        value: String,
    },
    /// Stop all volumes and the set.
    Stop,
    /// Detach all devices, then stop.
    Unregister,
    /// Make a flash-only volume.
    CreateVolume(Sectors),
    /// Reset the totals of the set.
    ClearStats,
    /// Reset the counters of the cache device.
    ClearDeviceStats,
    /// Walk the index now.
    Gc,
    /// Drop this many btree nodes from memory.
    Prune(u64),
}

/// An order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Order {
    /// An order that the kernel accepts without effect. It is never passed to the owner.
    Nothing,
    /// Register a device.
    Register {
        /// Its path.
        path: String,
        /// A device that is registered already is not an error.
        quiet: bool,
    },
    /// Unregister every backing device whose set is missing.
    ForgetPending,
    /// Pass an order to a volume.
    Device(VolumeId, DeviceOrder),
    /// Pass an order to a set.
    Set(Uuid, SetOrder),
}

/// The process that writes to a file, as the kernel says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Writer {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Number of the process; `None` if this process cannot see it.
    pub pid: Option<i32>,
}

/// The owner of the sets. The threads of the view call it and wait for the answer, so every call must end.
pub trait Owner: Send + Sync + 'static {
    /// All sets and volumes at this moment.
    ///
    /// # Errors
    /// If the owner does not answer.
    fn snapshot(&self) -> Result<Snapshot, Errno>;

    /// The contents of the buckets of a set.
    ///
    /// # Errors
    /// If the set is not served any more or does not answer.
    fn buckets(&self, set: Uuid) -> Result<BucketFigures, Errno>;

    /// Carries out an order of this process. On return the order is done or, where the kernel does not wait either, has begun.
    ///
    /// # Errors
    /// The error number that the kernel would answer.
    fn obey(&self, order: Order, by: Writer) -> Result<(), Errno>;
}
