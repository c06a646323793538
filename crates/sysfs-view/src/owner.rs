//! The interface between the view and the owner of the sets.

use engine::figures::{BucketFigures, SetFigures, VolumeFigures};
use format::{Sectors, Uuid};

/// A number by which a file answers that something cannot be done, positive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Errno(pub i32);

impl Errno {
    /// Nothing of that name.
    pub const ENOENT: Errno = Errno(2);
    /// It was tried and failed.
    pub const EIO: Errno = Errno(5);
    /// Another process uses it.
    pub const EBUSY: Errno = Errno(16);
    /// Makes no sense.
    pub const EINVAL: Errno = Errno(22);
    /// A number that is too large for any of ours.
    pub const ERANGE: Errno = Errno(34);
    /// The kernel has this, we do not.
    pub const EOPNOTSUPP: Errno = Errno(95);
    /// The owner does not answer.
    pub const ETIMEDOUT: Errno = Errno(110);
}

/// Everything there is at one moment.
#[derive(Clone, Default, Debug)]
pub struct Snapshot {
    /// Sets with their volumes.
    pub sets: Vec<SetFigures>,
    /// Volumes without a set.
    pub alone: Vec<VolumeFigures>,
}

/// Which volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VolumeId {
    /// UUID of its set; none if it is served alone.
    pub set: Option<Uuid>,
    /// UUID of its backing device; none for a flash-only volume.
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
    /// Serve it no more; dirty data stays in the cache.
    Stop,
    /// Serve it without its cache (`running`).
    Run,
    /// Begin the totals anew.
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
    /// Begin the totals of the set anew.
    ClearStats,
    /// Reset the counters of the cache device.
    ClearDeviceStats,
    /// Walk the index now.
    Gc,
    /// Drop as many nodes from memory.
    Prune(u64),
}

/// An order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Order {
    /// An order that the kernel accepts without effect. Owners never get it.
    Nothing,
    /// Take a device up.
    Register {
        /// Its path.
        path: String,
        /// It is no error if it is there already.
        quiet: bool,
    },
    /// Let go of every backing device whose set is not there.
    ForgetPending,
    /// Tell a volume.
    Device(VolumeId, DeviceOrder),
    /// Tell a set.
    Set(Uuid, SetOrder),
}

/// The owner of the sets. Called from the view's own threads, which may wait for the answer; it must come at some time.
pub trait Owner: Send + Sync + 'static {
    /// Everything at this moment.
    ///
    /// # Errors
    /// If the owner does not answer.
    fn snapshot(&self) -> Result<Snapshot, Errno>;

    /// The contents of the buckets of a set.
    ///
    /// # Errors
    /// If the set is gone or does not answer.
    fn buckets(&self, set: Uuid) -> Result<BucketFigures, Errno>;

    /// Does something; it is done, or well under way as in the kernel, when this returns.
    ///
    /// # Errors
    /// As the kernel would answer.
    fn obey(&self, order: Order) -> Result<(), Errno>;
}
