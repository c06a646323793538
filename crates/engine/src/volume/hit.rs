//! Reads of an extent of the cache.
//!
//! A request that is one extent is read into the caller's buffer without a copy. After a read the generation of the bucket
//! is checked: if it has changed, the bucket may have been reused during the read. Data that has checksums is compared with
//! them; without checksums a request does not pay for them. A hit is recorded, and promoted if its bucket will be evicted
//! soon.
//!
//! Owns the read of one extent and the record of a hit. Must not know requests of several pieces.

use format::{Ptr, Sector, Sectors};
use io::{Buffer, IoError, Nanos};

use super::read::{Read, count_read, read_directly};
use super::{Blocks, Cache, CachedPiece, Target, Volume, is_sound};
use crate::canary::{Bug, bug};
use crate::device::ReadEpoch;
use crate::error::EngineError;
use crate::policy::congestion::Direction;
use crate::stats::{OpKind, Outcome};

/// The extent of the cache that has the whole range of a request.
#[derive(Clone, Copy)]
pub(super) struct Whole {
    pub(super) start: Sector,
    pub(super) ptr: Ptr,
    pub(super) dirty: bool,
    /// When the extent was looked up.
    pub(super) epoch: ReadEpoch,
    /// When the request arrived.
    pub(super) arrived: Nanos,
    /// When the read began.
    pub(super) began: Nanos,
}

/// What the read of an extent has found.
pub(super) enum Found {
    /// The buffer has the data to which the key points.
    Data,
    /// The cache has changed meanwhile, so the caller looks the data up again.
    Changed,
    /// The cache device has failed to read clean data, which the backing device has, too.
    OnBacking,
    /// The data cannot be read.
    Failed(EngineError),
}

/// Judges the result of the read of an extent.
#[inline]
pub(super) fn found_by(target: Target<'_>, whole: &Whole, result: Result<(), IoError>) -> Found {
    let Target { volume, cache, .. } = target;
    cache.device.observe_data(&result);
    match result {
        Ok(()) => {
            observe_latency(volume, cache, Direction::Read, whole.began);
            if is_still_valid(cache, whole.ptr, whole.epoch) { Found::Data } else { Found::Changed }
        }
        Err(e) if whole.dirty || volume.backing().is_none() => Found::Failed(e.into()),
        Err(_) => Found::OnBacking,
    }
}

/// Reads an extent and compares it with its checksums. Returns the answer, or `None` if the caller must look the data up
/// again.
pub(super) async fn read_verified(
    target: Target<'_>,
    read: &Read,
    whole: Whole,
    buffer: Buffer,
) -> (Buffer, Option<Result<(), EngineError>>) {
    let Target { volume, cache, .. } = target;
    let (token, spare) = (cache.data.read_token(), buffer.len());
    let done = cache.data.read(whole.ptr.offset(), read.sectors(), buffer, read.offset_bytes).await;
    let buffer = done.buffer.unwrap_or_else(|| volume.rt.pool().take(spare));
    let Whole { start, ptr, dirty, epoch, arrived, .. } = whole;
    match found_by(target, &whole, done.result) {
        Found::Data => {}
        Found::Changed => return (buffer, None),
        Found::OnBacking => {
            let (buffer, result) = read_instead(volume, read, buffer, arrived).await;
            return (buffer, Some(result));
        }
        Found::Failed(e) => return (buffer, Some(Err(e))),
    }
    let data = bytes_of(&buffer, read.offset_bytes, read.sectors());
    match is_sound(target, CachedPiece { start, ptr }, data, token).await {
        Ok(true) if is_still_valid(cache, ptr, epoch) => {}
        Ok(_) => return (buffer, None),
        Err(e) => return (buffer, Some(Err(e))),
    }
    hit(target, read.meta, (start, read.sectors()), (ptr, dirty), || data);
    count_read(target, read, Outcome::Hit, arrived);
    (buffer, Some(Ok(())))
}

/// The bytes of a part of a buffer.
pub(super) fn bytes_of(buffer: &Buffer, offset_bytes: usize, sectors: Sectors) -> &[u8] {
    let end = offset_bytes + sectors.bytes() as usize;
    buffer.as_slice().get(offset_bytes..end).unwrap_or_default()
}

/// Reads clean data from the backing device after the cache device has failed to read it.
pub(super) async fn read_instead(
    volume: &Volume,
    read: &Read,
    buffer: Buffer,
    arrived: Nanos,
) -> (Buffer, Result<(), EngineError>) {
    let sectors = read.sectors();
    let (buffer, result) = read_directly(volume, read.start, sectors, buffer, read.offset_bytes).await;
    if result.is_ok() {
        volume.answered(OpKind::Read, Outcome::Miss, sectors, arrived);
    }
    (buffer, result.map_err(EngineError::from))
}

/// Whether data that was read from `ptr` is still the data to which the key pointed when it was looked up, at `epoch`.
fn is_still_valid(cache: &Cache, ptr: Ptr, epoch: ReadEpoch) -> bool {
    let reused = !cache.alloc.buckets().is_current(ptr) && !bug(Bug::StaleGenerationRead);
    let valid = !reused && cache.device.read_epoch() == epoch;
    if !valid {
        cache.device.counters().cache_read_races += 1;
    }
    valid
}

/// Records that a range was read from the cache, and promotes the data if its bucket will be evicted soon. `data`
/// returns bytes that begin with the data that was read.
#[inline]
pub(super) fn hit<'d>(
    target: Target<'_>,
    meta: bool,
    (start, sectors): (Sector, Sectors),
    (ptr, dirty): (Ptr, bool),
    data: impl FnOnce() -> &'d [u8],
) {
    let Target { volume, cache, .. } = target;
    if cache.alloc.used(ptr, sectors, volume.saving_of(meta)) && !dirty {
        let data = data().get(..sectors.bytes() as usize).unwrap_or_default();
        promote(target, start, ptr, data);
    }
}

/// Promotes the whole blocks of clean data that was just read from `ptr`. `data` is the data at `start`.
#[cold]
fn promote(target: Target<'_>, start: Sector, ptr: Ptr, data: &[u8]) {
    let Target { cache, inode, .. } = target;
    let end = start + Sectors::from_bytes_floor(data.len() as u64);
    let Some((first, last)) = Blocks::of(&cache.geometry).inside((start, end)) else { return };
    let skip = first - start;
    if let Some(data) = data.get(skip.bytes() as usize..(last - start).bytes() as usize) {
        crate::gc::promote(&cache.gc, (inode, first), ptr.advanced(skip), data);
    }
}

fn observe_latency(volume: &Volume, cache: &Cache, direction: Direction, began: io::Nanos) {
    let now = volume.rt.turn_time();
    cache.congestion().observe_latency(direction, now.since(began), now);
}
