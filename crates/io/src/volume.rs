//! The block device that an export serves, with asynchronous operations.
//!
//! The engine's volumes and test doubles implement it; every export calls it. Must not know any protocol.
//! Positions and lengths are in 512-byte sectors. A volume accepts any sector-aligned request;
//! `logical_block_bytes` is only advice to clients.

use std::error::Error;
use std::future::Future;
use std::sync::Arc;

use format::{Sector, Sectors};

use crate::buffer::Buffer;
use crate::request::IoError;

/// Hints about a read.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ReadFlags {
    /// The data is a file system's metadata. A hint.
    pub meta: bool,
}

/// The durability of a write, and hints about it.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct WriteFlags {
    /// Durable at completion.
    pub fua: bool,
    /// The data is a file system's metadata. A hint.
    pub meta: bool,
}

/// How a volume writes zeros.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ZeroFlags {
    /// Durable at completion.
    pub fua: bool,
    /// The volume may free the space instead of writing it.
    pub may_unmap: bool,
}

/// A run of sectors in the answer to a status query.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RangeStatus {
    /// Length of the run.
    pub sectors: Sectors,
    /// No space is allocated.
    pub hole: bool,
    /// Reads as zeros.
    pub zero: bool,
}

/// Why a volume refused or failed a request.
#[derive(Clone, Debug, thiserror::Error)]
pub enum VolumeError {
    /// The range is not inside the volume.
    #[error("sectors {sector}..+{sectors} are outside of the volume of {capacity} sectors")]
    OutOfRange {
        /// First sector of the request.
        sector: Sector,
        /// Length of the request.
        sectors: Sectors,
        /// Size of the volume.
        capacity: Sectors,
    },
    /// The volume is being or has been stopped.
    #[error("volume {0} is stopped")]
    Stopped(String),
    /// The volume cannot be written to.
    #[error("volume {0} is read-only")]
    ReadOnly(String),
    /// No space is left, and none can be freed.
    #[error(transparent)]
    NoSpace(Arc<dyn Error + Send + Sync>),
    /// A device failed.
    #[error(transparent)]
    Io(#[from] IoError),
    /// The cache set is disabled, or its metadata is damaged.
    #[error(transparent)]
    Failed(Arc<dyn Error + Send + Sync>),
}

impl VolumeError {
    /// No space is left, for this reason.
    pub fn no_space(why: impl Into<Box<dyn Error + Send + Sync>>) -> VolumeError {
        VolumeError::NoSpace(why.into().into())
    }

    /// The volume has failed, for this reason.
    pub fn failed(why: impl Into<Box<dyn Error + Send + Sync>>) -> VolumeError {
        VolumeError::Failed(why.into().into())
    }
}

/// A block device for exports.
pub trait BlockVolume: 'static {
    /// Name by which clients find it.
    fn name(&self) -> String;

    /// Size.
    fn sectors(&self) -> Sectors;

    /// Unit of requests that clients should use, in bytes: 512 or 4096.
    fn logical_block_bytes(&self) -> u32;

    /// Unit that is written without read-modify-write; at least the logical block.
    fn physical_block_bytes(&self) -> u32 {
        self.logical_block_bytes()
    }

    /// Preferred size of requests, 0 for no preference.
    fn optimal_io_bytes(&self) -> u32;

    /// Whether writes are refused.
    fn read_only(&self) -> bool;

    /// Reads `sectors` at `sector` into `buffer` from byte `offset_bytes` on.
    ///
    /// It returns the buffer on failure too.
    fn read(
        &self,
        sector: Sector,
        sectors: Sectors,
        buffer: Buffer,
        offset_bytes: usize,
    ) -> impl Future<Output = (Buffer, Result<(), VolumeError>)>;

    /// Reads like [`BlockVolume::read`], with hints about the read.
    ///
    /// A volume that does not use hints keeps the default, which calls [`BlockVolume::read`].
    fn read_as(
        &self,
        sector: Sector,
        sectors: Sectors,
        buffer: Buffer,
        offset_bytes: usize,
        flags: ReadFlags,
    ) -> impl Future<Output = (Buffer, Result<(), VolumeError>)> {
        let _ = flags;
        self.read(sector, sectors, buffer, offset_bytes)
    }

    /// Writes `sectors` at `sector` from `buffer`, byte `offset_bytes` on.
    ///
    /// The buffer may stay shared after completion, because a write to a second device may still use it. The caller
    /// takes a new buffer for the next write.
    fn write(
        &self,
        sector: Sector,
        sectors: Sectors,
        buffer: Buffer,
        offset_bytes: usize,
        flags: WriteFlags,
    ) -> impl Future<Output = Result<(), VolumeError>>;

    /// Makes all operations that were acknowledged before the call durable.
    fn flush(&self) -> impl Future<Output = Result<(), VolumeError>>;

    /// Tells the volume that the contents of the range are no longer needed.
    fn discard(&self, sector: Sector, sectors: Sectors) -> impl Future<Output = Result<(), VolumeError>>;

    /// Makes the range read as zeros.
    fn write_zeroes(
        &self,
        sector: Sector,
        sectors: Sectors,
        flags: ZeroFlags,
    ) -> impl Future<Output = Result<(), VolumeError>>;

    /// The state of a range without reading it: at least one run, from the start of the range on.
    fn status(
        &self,
        sector: Sector,
        sectors: Sectors,
    ) -> impl Future<Output = Result<Vec<RangeStatus>, VolumeError>>;
}
