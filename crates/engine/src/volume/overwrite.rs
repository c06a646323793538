//! Writing over dirty data where it is.
//!
//! A cache that is full of live data can take a write over dirty data into a new bucket only at the price of emptying an
//! old one, which costs more requests than the write itself; and of a key, with its place in the journal. The data's own
//! place is free. Decision 014 says why nothing is lost; in short:
//!
//! * only data that is dirty already: nothing but the cache has it, before and after, so no key changes. A crash leaves
//!   each sector old or new, as on a disk; what was flushed before was answered as a write since, or not at all;
//! * nobody else uses the place meanwhile: the caller holds the range as a change, so no other write, discard or
//!   detach and no new writeback is there; writeback that began earlier, and moving garbage collection of the bucket,
//!   which would both make an older state count, are reasons not to; the bucket is pinned;
//! * a write that has begun is not given up half way: its range would be free while the device still writes. (So it is
//!   with writes past the cache.)
//! * a flush covers it by [`CacheDevice::overwrote`](crate::device::CacheDevice::overwrote), and FUA by itself, together with keys that are not durable yet.

use format::{JournalSeq, Ptr};
use io::Nanos;

use super::Cache;
use super::Target;
use super::write::Write;
use crate::canary::{Bug, Mark, bug, mark};
use crate::index::Kind;
use crate::policy::congestion::Direction;
use crate::tunables::Overwrite;

/// Where buckets without any live data are fewer than one in so many, packing is near.
const FEW_UNUSED: u32 = 4;
/// A request that keeps the device busy for less than this is cheap: joining small writes saves less there than the keys
/// cost that each write to a new place needs. Memory and NVMe need a few us, disks with a limit of some thousand
/// requests a second hundreds; where between them the two are even was not measured.
const CHEAP_REQUEST: Nanos = Nanos::from_us(50);

/// Whether dirty data should be overwritten in its place instead of written to a new place. As long as there is room, and
/// requests cost the device something, elsewhere is better: small writes become large ones there.
pub(super) fn overwrites_in_place(cache: &Cache) -> bool {
    match cache.tunables.borrow().overwrite_in_place {
        Overwrite::Off => false,
        Overwrite::Always => true,
        Overwrite::Auto => {
            let buckets = cache.alloc.buckets();
            let is_short_of_room = buckets.unused() < buckets.len() / FEW_UNUSED;
            !cache.device.disk().info().rotational && (is_short_of_room || requests_are_cheap(cache))
        }
    }
}

fn requests_are_cheap(cache: &Cache) -> bool {
    cache.device.meter().model(|m| m.is_known() && m.costs().per_request() < CHEAP_REQUEST)
}

/// Where the data is that the write replaces, if it may be written there.
pub(super) fn place_to_overwrite(target: Target<'_>, write: &Write) -> Option<Ptr> {
    let Target { volume, cache, inode } = target;
    let seg = cache.index.segment(inode, write.start, write.end).ok()?;
    let Kind::Hit { ptr, dirty: true, .. } = seg.kind else { return None };
    let block = u64::from(cache.device.disk().info().logical_block_bytes / 512).max(1);
    let aligned = ptr.offset().0.is_multiple_of(block) && write.sectors().0.is_multiple_of(block);
    if seg.end != write.end || !aligned {
        return None;
    }
    let copied = volume.ranges.is_written_back(write.start, write.end) && !bug(Bug::OverwrittenInWriteback);
    let buckets = cache.alloc.buckets();
    let moved = buckets.is_moving(buckets.bucket_of(ptr)) && !bug(Bug::OverwrittenWhileMoved);
    (!copied && !moved).then_some(ptr)
}

/// Writes over dirty data in its place, just found by [`Volume::place_to_overwrite`]. If that fails, nothing has
/// happened that counts, and the write goes another way. The caller holds the range as a change. Returns the newest
/// journal entry that a durable write needs.
pub(super) async fn overwrite(target: Target<'_>, write: &Write, ptr: Ptr) -> Option<JournalSeq> {
    let Target { volume, cache, .. } = target;
    let bucket = cache.alloc.buckets().bucket_of(ptr);
    cache.alloc.buckets_mut().pin(bucket);
    let began = volume.rt.turn_time();
    let (data, offset) = (write.buffer.clone(), write.offset_bytes);
    let (at, sectors) = (ptr.offset(), write.sectors());
    let done = cache.device.meter().write(cache.device.disk(), (at, sectors), data, offset, write.fua).await;
    if !write.fua && !bug(Bug::OverwriteNotFlushed) {
        cache.device.overwrote();
    }
    cache.alloc.unpin(bucket);
    cache.device.observe_data(&done.result);
    // After an error the place holds unknown data. The caller writes the data elsewhere, and the key moves there.
    done.result.ok()?;
    if place_to_overwrite(target, write) != Some(ptr) {
        return None;
    }
    mark(Mark::OverwrittenInPlace);
    let now = volume.rt.turn_time();
    cache.congestion().observe_latency(Direction::Write, now.since(began), now);
    cache.device.counters().count_written(sectors);
    cache.count_overwrite();
    cache.alloc.buckets_mut().touch(ptr);
    Some(if bug(Bug::OverwriteForgetsKeys) { JournalSeq(0) } else { cache.journal.newest_keys() })
}
