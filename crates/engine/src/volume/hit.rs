//! Hits: the read of an extent from the cache, and what follows it.
//!
//! The caller reads clean data from the backing device if its read from the cache fails. After a read the generation of the bucket
//! is checked: if it has changed, the bucket may have been reused during the read. Then the checksums are compared, if the set has
//! them. A hit is recorded, and its data is promoted if its bucket will be evicted soon.
//!
//! Owns these steps, for requests of one extent and of several pieces. Must not know what else the request reads.

use format::{Ptr, Sector, Sectors};
use io::{Buffer, IoError, Nanos};

use super::backing::start_around;
use super::request::Read;
use super::{Blocks, Cache, CachedPiece, Target, is_sound};
use crate::canary::{Bug, bug};
use crate::data::ReadToken;
use crate::device::{MeteredIo, ReadEpoch};
use crate::error::EngineError;
use crate::policy::congestion::Direction;

/// An extent, or a part of one, that a request reads from the cache.
#[derive(Clone, Copy)]
pub(super) struct CachedExtent {
    pub(super) ptr: Ptr,
    pub(super) dirty: bool,
}

/// The moment at which a request looked its extents up and began to read them.
#[derive(Clone, Copy)]
pub(super) struct ReadStart {
    time: Nanos,
    token: ReadToken,
    epoch: ReadEpoch,
}

impl ReadStart {
    /// The present moment. `epoch`: the epoch of the look-up.
    #[inline]
    pub(super) fn now(target: Target<'_>, epoch: ReadEpoch) -> ReadStart {
        ReadStart { time: target.volume.rt.turn_time(), token: target.cache.data.read_token(), epoch }
    }
}

/// When the read of an extent began, and when the device answered.
#[derive(Clone, Copy)]
pub(super) struct ReadTimes<'s> {
    pub(super) began: &'s ReadStart,
    pub(super) ended: Nanos,
}

/// The data that was read for an extent: the whole blocks in which it was read, and the bytes of the extent in them.
#[derive(Clone, Copy)]
pub(super) struct ReadData<'d> {
    pub(super) blocks: &'d [u8],
    pub(super) skip_bytes: usize,
    pub(super) sectors: Sectors,
}

impl<'d> ReadData<'d> {
    /// Data that was read as it was asked for.
    pub(super) fn exact(buffer: &'d Buffer, offset_bytes: usize, sectors: Sectors) -> ReadData<'d> {
        ReadData { blocks: bytes_of(buffer, offset_bytes, sectors), skip_bytes: 0, sectors }
    }

    /// The bytes of the extent.
    pub(super) fn bytes(self) -> &'d [u8] {
        let end = self.skip_bytes + self.sectors.bytes() as usize;
        self.blocks.get(self.skip_bytes..end).unwrap_or_default()
    }
}

/// The bytes of a part of a buffer.
pub(super) fn bytes_of(buffer: &Buffer, offset_bytes: usize, sectors: Sectors) -> &[u8] {
    let end = offset_bytes + sectors.bytes() as usize;
    buffer.as_slice().get(offset_bytes..end).unwrap_or_default()
}

/// The bytes of a part of a buffer, to write to.
///
/// # Panics
/// If the buffer is shorter.
pub(super) fn bytes_of_mut(buffer: &mut Buffer, offset_bytes: usize, sectors: Sectors) -> &mut [u8] {
    &mut buffer.as_mut()[offset_bytes..offset_bytes + sectors.bytes() as usize]
}

/// The blocks in which cached data is read: if it has checksums, those of the cache, because a part of a block cannot be
/// checked.
#[inline]
pub(super) fn blocks_of_data(cache: &Cache) -> Blocks {
    let disk = Blocks::of_disk(cache.device.disk());
    if cache.data.has_checksums() { disk.max(Blocks::of(&cache.geometry)) } else { disk }
}

/// Starts a read of a part of an extent, widened to the blocks in which the cache is read.
pub(super) fn start_hit(cache: &Cache, extent: CachedExtent, sectors: Sectors) -> (MeteredIo, usize) {
    let start = |first, span, buffer| cache.data.read(first, span, buffer, 0);
    start_around(blocks_of_data(cache), cache.device.disk(), extent.ptr.offset(), sectors, start)
}

/// Records how the read of an extent from the cache device ended. Returns false if the read failed and the backing device
/// has the data, too, because it is clean.
///
/// # Errors
/// If the read failed and only the cache has the data.
#[inline]
pub(super) fn hit_ended(
    target: Target<'_>,
    extent: CachedExtent,
    result: Result<(), IoError>,
) -> Result<bool, EngineError> {
    target.cache.device.observe_data(&result);
    match result {
        Ok(()) => Ok(true),
        Err(e) => hit_failed(target, extent, e),
    }
}

#[cold]
fn hit_failed(target: Target<'_>, extent: CachedExtent, error: IoError) -> Result<bool, EngineError> {
    let only_cache_has_it = extent.dirty || target.volume.backing.is_none();
    if only_cache_has_it { Err(error.into()) } else { Ok(false) }
}

/// Ends a read of one extent whose data is sound: records the hit, and promotes the data if its bucket will be evicted soon.
/// Returns false if the request must look up and read again, because the data may not be that of the look-up.
#[inline]
pub(super) fn accept<'d>(
    target: Target<'_>,
    read: &Read,
    extent: CachedExtent,
    times: ReadTimes<'_>,
    data: impl FnOnce() -> ReadData<'d>,
) -> bool {
    let Target { volume, cache, .. } = target;
    let ReadTimes { began, ended } = times;
    cache.congestion().observe_latency(Direction::Read, ended.since(began.time), ended);
    let is_reused = !cache.alloc.buckets().is_current(extent.ptr) && !bug(Bug::StaleGenerationRead);
    if is_reused || cache.device.read_epoch() != began.epoch {
        return false;
    }
    if cache.alloc.used(extent.ptr, read.sectors(), volume.saving_of(read.meta)) && !extent.dirty {
        promote(target, read.start, extent.ptr, data().bytes());
    }
    true
}

/// Compares the data of an extent with its checksums, if the set has them, and then does as [`accept`].
///
/// # Errors
/// If dirty data is damaged, or the set has failed.
pub(super) async fn verify_and_accept(
    target: Target<'_>,
    read: &Read,
    extent: CachedExtent,
    times: ReadTimes<'_>,
    data: ReadData<'_>,
) -> Result<bool, EngineError> {
    let Target { cache, .. } = target;
    if cache.data.has_checksums() {
        let skip = Sectors::from_bytes_floor(data.skip_bytes as u64);
        let first = CachedPiece { start: read.start - skip, ptr: extent.ptr.rewound(skip) };
        if !Box::pin(is_sound(target, first, data.blocks, times.began.token)).await? {
            return Ok(false);
        }
    }
    Ok(accept(target, read, extent, times, || data))
}

/// Promotes the whole blocks of clean data that was just read.
#[cold]
fn promote(target: Target<'_>, start: Sector, ptr: Ptr, data: &[u8]) {
    let Target { cache, inode, .. } = target;
    let end = start + Sectors::from_bytes_floor(data.len() as u64);
    let Some((first, last)) = Blocks::of(&cache.geometry).inside((start, end)) else { return };
    let skip = first - start;
    if let Some(data) = data.get(skip.bytes() as usize..(last - start).bytes() as usize) {
        crate::gc::promote(&cache.gc, inode, first, ptr.advanced(skip), data);
    }
}
