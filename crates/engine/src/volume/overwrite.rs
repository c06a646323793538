//! Writing over dirty data in place.
//!
//! A cache that is full of live data can put a write over dirty data into a new bucket only after it has emptied an old
//! bucket, which takes more requests than the write itself. The write also needs a key in the journal. Writing to the
//! place that the dirty data already has needs neither. Decision 014 says why this loses nothing; in short:
//!
//! * only data that is already dirty is overwritten. Only the cache has this data, before and after, so no key changes.
//!   A crash leaves each sector old or new, as on a disk;
//! * no other task uses the place meanwhile. The caller holds the range as a change, so no other write, discard, detach
//!   or new writeback overlaps it. The data is not overwritten in place if writeback of the range began earlier or if
//!   the moving garbage collector empties the bucket, because both would make an older state current. The bucket is
//!   pinned;
//! * a write that has begun runs to its end: if it were cancelled, its range would be released while the device still
//!   writes. For the same reason a write to the backing device runs to its end;
//! * [`CachedData::end_overwrite`](crate::data::CachedData::end_overwrite) makes the next flush cover it. A write with FUA
//!   is durable by itself, together with the keys that are not durable yet.

use format::{JournalSeq, Ptr, Sectors};
use io::Nanos;

use super::Cache;
use super::Target;
use super::hit::blocks_of_data;
use super::hit::bytes_of;
use super::write::Write;
use crate::canary::{Bug, Mark, bug, mark};
use crate::index::Kind;
use crate::policy::congestion::Direction;
use crate::tunables::Overwrite;

/// Room is short when fewer than one bucket in this many has no live data: packing begins soon then.
const FEW_UNUSED: u32 = 4;
/// A request that keeps the device busy for less than this is cheap: joining small writes then saves less than the keys
/// cost that writes to new places need. Memory and NVMe devices need a few us for each request, devices with a limit of
/// some thousand requests a second need some hundred us. The break-even point between them was not measured.
const CHEAP_REQUEST: Nanos = Nanos::from_us(50);

/// Whether dirty data should be overwritten in place instead of written to a new place. While there is room and
/// requests are not cheap, a new place is better, because small writes are joined to large ones there.
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
    cache.device.model(|m| m.is_known() && m.costs().per_request() < CHEAP_REQUEST)
}

/// The place of the dirty data that the write replaces, if the write may go there.
pub(super) fn place_to_overwrite(target: Target<'_>, write: &Write) -> Option<Ptr> {
    let Target { volume, cache, inode } = target;
    let seg = cache.index.segment(inode, write.start, write.end).ok()?;
    let Kind::Hit { ptr, dirty: true, .. } = seg.kind else { return None };
    // A part of a block has no checksum of its own. A kernel may have placed data so that blocks of the volume are such parts.
    let blocks = blocks_of_data(cache);
    if seg.end != write.end || !blocks.are_whole(ptr.offset(), write.sectors()) {
        return None;
    }
    let copied = volume.ranges.is_written_back(write.start, write.end) && !bug(Bug::OverwrittenInWriteback);
    let buckets = cache.alloc.buckets();
    let moved = buckets.is_moving(buckets.bucket_of(ptr)) && !bug(Bug::OverwrittenWhileMoved);
    (!copied && !moved).then_some(ptr)
}

/// Overwrites dirty data in the place that [`place_to_overwrite`] has just found. Returns the newest journal entry that
/// a durable write needs, or `None` if the write failed or the key has moved: the caller then writes the data to a new
/// place. The caller holds the range as a change.
pub(super) async fn overwrite(target: Target<'_>, write: &Write, ptr: Ptr) -> Option<JournalSeq> {
    let Target { volume, cache, .. } = target;
    let bucket = cache.alloc.buckets().bucket_of(ptr);
    cache.alloc.pin(bucket);
    if cache.data.has_checksums() {
        let new = bytes_of(&write.buffer, write.offset_bytes, write.sectors());
        let may = Box::pin(cache.data.begin_overwrite(ptr, new)).await;
        // The key may have moved during the wait.
        if !may || place_to_overwrite(target, write) != Some(ptr) {
            if may {
                cache.data.give_up_overwrite(ptr, write.sectors());
            }
            cache.alloc.unpin(bucket);
            Box::pin(cache.data.write_footer_of_damaged(ptr)).await;
            return None;
        }
    }
    let began = volume.rt.turn_time();
    let (data, offset, sectors) = (write.buffer.clone(), write.offset_bytes, write.sectors());
    let done = cache.data.overwrite((ptr, sectors), data, offset, write.fua).await;
    cache.data.end_overwrite(ptr, sectors, &done.result, write.fua);
    cache.alloc.unpin(bucket);
    cache.device.observe_data(&done.result);
    if cache.data.is_damaged_beside(ptr, Sectors::ZERO) {
        // A read has found damage in the bucket meanwhile.
        Box::pin(cache.data.write_footer_of_damaged(ptr)).await;
    }
    // After an error the content of the place is unknown. The caller writes the data to a new place and moves the key
    // there.
    done.result.ok()?;
    if place_to_overwrite(target, write) != Some(ptr) {
        return None;
    }
    mark(Mark::OverwrittenInPlace);
    let now = volume.rt.turn_time();
    cache.congestion().observe_latency(Direction::Write, now.since(began), now);
    cache.device.counters().count_written(sectors);
    cache.count_overwrite();
    cache.alloc.touch(ptr);
    Some(if bug(Bug::OverwriteForgetsKeys) { JournalSeq(0) } else { cache.journal.newest_keys() })
}
