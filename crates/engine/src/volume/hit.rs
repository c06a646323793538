//! Hits: what follows the read of an extent from the cache.
//!
//! After a read the generation of the bucket is checked: if it has changed, the bucket may have been reused during the read.
//! A hit is recorded, and its data is promoted if its bucket will be evicted soon. If the cache device fails, clean data is
//! read from the backing device. Must not know requests of several pieces.

use format::{Ptr, Sector, Sectors};
use io::{Buffer, Nanos};

use super::read::{Read, read_settled};
use super::{Blocks, Cache, Target, Volume};
use crate::canary::{Bug, bug};
use crate::device::ReadEpoch;
use crate::error::EngineError;
use crate::policy::congestion::Direction;
use crate::stats::{OpKind, Outcome};

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
    let (buffer, result) = read_settled(volume, read.start, sectors, buffer, read.offset_bytes).await;
    if result.is_ok() {
        volume.answered(OpKind::Read, Outcome::Miss, sectors, arrived);
    }
    (buffer, result.map_err(EngineError::from))
}

/// Whether data that was read from `ptr` is still the data to which the key pointed when it was looked up, at `epoch`.
pub(super) fn is_still_valid(cache: &Cache, ptr: Ptr, epoch: ReadEpoch) -> bool {
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

pub(super) fn observe_latency(volume: &Volume, cache: &Cache, direction: Direction, began: io::Nanos) {
    let now = volume.rt.turn_time();
    cache.congestion().observe_latency(direction, now.since(began), now);
}
