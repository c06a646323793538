//! What an export serves: a block device made of asynchronous operations.
//!
//! Implemented by the engine's volumes and by test doubles; called by every export. Must not know any
//! protocol. Positions and lengths are in 512-byte sectors; any sector-aligned request is accepted,
//! whatever `logical_block_bytes` says (that is only advice to clients).

use std::future::Future;

use format::{Sector, Sectors};

use crate::buffer::Buffer;
use crate::request::IoError;

/// Hints about a read.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ReadFlags {
    /// It is for a file system's metadata. A hint.
    pub meta: bool,
}

/// The durability of a write, and hints about it.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct WriteFlags {
    /// Durable at completion.
    pub fua: bool,
    /// It is a file system's metadata. A hint.
    pub meta: bool,
}

/// How zeros are to be written.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ZeroFlags {
    /// Durable at completion.
    pub fua: bool,
    /// The space may be given back instead of being written.
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
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum VolumeError {
    /// The range does not lie in the volume.
    #[error("sectors {sector}..+{sectors} are outside of the volume of {capacity} sectors")]
    OutOfRange {
        /// First sector asked for.
        sector: Sector,
        /// Length asked for.
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
    /// No space is left, and none can be made.
    #[error("{0}")]
    NoSpace(String),
    /// A device failed.
    #[error(transparent)]
    Io(#[from] IoError),
    /// The cache set is disabled, or its metadata is damaged.
    #[error("{0}")]
    Failed(String),
}

/// A block device for exports.
pub trait BlockVolume: 'static {
    /// Name by which clients find it.
    fn name(&self) -> String;

    /// Size.
    fn sectors(&self) -> Sectors;

    /// Unit that clients should keep to: 512 or 4096.
    fn logical_block_bytes(&self) -> u32;

    /// Unit that is written without a read of its surroundings; at least the logical block.
    fn physical_block_bytes(&self) -> u32 {
        self.logical_block_bytes()
    }

    /// Preferred size of requests, 0 for no preference.
    fn optimal_io_bytes(&self) -> u32;

    /// Whether writes are refused.
    fn read_only(&self) -> bool;

    /// Fills `sectors` at `sector` into `buffer`, byte `offset_bytes` on. The buffer comes back in any case.
    fn read(
        &self,
        sector: Sector,
        sectors: Sectors,
        buffer: Buffer,
        offset_bytes: usize,
    ) -> impl Future<Output = (Buffer, Result<(), VolumeError>)>;

    /// The same, by somebody who knows more about it. Volumes that make no use of that are asked with
    /// [`BlockVolume::read`].
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

    /// Stores `sectors` at `sector` from `buffer`, byte `offset_bytes` on. The buffer may stay shared for a while
    /// after completion (it may still be on its way to a second device), so take a new one for the next write.
    fn write(
        &self,
        sector: Sector,
        sectors: Sectors,
        buffer: Buffer,
        offset_bytes: usize,
        flags: WriteFlags,
    ) -> impl Future<Output = Result<(), VolumeError>>;

    /// Makes everything that completed before durable.
    fn flush(&self) -> impl Future<Output = Result<(), VolumeError>>;

    /// The contents of the range are no longer needed.
    fn discard(&self, sector: Sector, sectors: Sectors) -> impl Future<Output = Result<(), VolumeError>>;

    /// The range reads as zeros afterwards.
    fn write_zeroes(
        &self,
        sector: Sector,
        sectors: Sectors,
        flags: ZeroFlags,
    ) -> impl Future<Output = Result<(), VolumeError>>;

    /// The state of a range without reading it: runs that cover it from its start, at least one.
    fn status(
        &self,
        sector: Sector,
        sectors: Sectors,
    ) -> impl Future<Output = Result<Vec<RangeStatus>, VolumeError>>;
}
