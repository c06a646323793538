//! The devices of a set, as the rest of the engine uses them.
//!
//! [`CacheDevice`] owns the cache device: its superblock, its flushes, its errors, and whether the set is disabled.
//! [`BackingDevice`] owns the superblock, flushes and errors of one backing device; [`BackingDevices`] finds it by its
//! slot. `flush` shares the flushes of a device, `meter` measures the costs of its requests, `read_epoch` tells whether
//! data that was read is still valid, `crash_log` is memory that outlives the process. [`Reader`] is the device for the
//! functions that read its metadata.
//!
//! Must not know the index, the journal or any volume.

mod backing;
mod backings;
mod cache;
mod crash_log;
mod flush;
mod meter;
mod read_epoch;
mod reader;
mod superblock;

pub(crate) use backing::BackingDevice;
pub(crate) use backings::BackingDevices;
pub(crate) use cache::{CacheDevice, ErrorLimits};
pub(crate) use crash_log::CrashLog;
use flush::FlushGate;
pub(crate) use flush::Tick;
pub(crate) use meter::MeteredIo;
use meter::{BusyGuard, Meter};
pub(crate) use read_epoch::ReadEpoch;
pub(crate) use reader::Reader;
pub(crate) use superblock::{SUPERBLOCK_SECTOR, read_backing, read_cache};
