//! Inserts clean data into the cache: what a read found missing, and the copy of a write to the backing device.
//!
//! The insertion runs in a background task, for which the answer does not wait. The data was read from the backing device under a
//! *miss* range: if a change overlapped the range, the copy may be old and is dropped (`cache_miss_collisions`). The
//! key goes to its leaf only, not to the journal: if a crash loses it, the next read is a miss.
//!
//! Owns the insertion and its limits. Must not know the read that found the data missing.

use std::rc::Rc;

use format::{Sector, Sectors};
use io::Buffer;

use super::Blocks;
use super::RangeGuard;
use super::Target;
use super::backing::flush_has_failed;
use super::clean_set::CleanSet;
use crate::alloc::{DataKind, Purpose};
use crate::canary::{Bug, bug};
use crate::index::{Blocked, Durability, IndexSegment, Kind};

/// The largest number of insertions under way, and of bytes that their data may hold. Beyond these limits a miss is
/// answered and not inserted.
const MAX_BACKGROUND: usize = 128;
const MAX_BACKGROUND_BYTES: usize = 16 << 20;

/// Data that a read found missing and has read from the backing device.
pub(super) struct Missed {
    pub(super) start: Sector,
    pub(super) end: Sector,
    /// The buffer; the data begins at byte `skip`.
    pub(super) data: Buffer,
    pub(super) skip: usize,
    /// The miss range, which becomes invalid when a change overlaps it.
    pub(super) range: RangeGuard,
    /// Whether the backing device had failed a flush when the read began. If it fails one later, it may not have this data
    /// any more.
    pub(super) flush_failed: bool,
}

/// Starts to insert the whole blocks of data that a read found missing. `meta`: the data is metadata of a file system.
pub(super) fn insert_miss(target: Target<'_>, missed: Missed, meta: bool) {
    let Target { volume, cache, inode } = target;
    let start = missed.start;
    let Some((first, last)) = Blocks::of(&cache.geometry).inside((start, missed.end)) else { return };
    let data_bytes = missed.data.capacity();
    let held_bytes = cache.tasks.held_bytes() + data_bytes;
    if cache.tasks.under_way() >= MAX_BACKGROUND || held_bytes > MAX_BACKGROUND_BYTES {
        return;
    }
    let skip = missed.skip + (first - start).bytes() as usize;
    let missed = Missed { start: first, end: last, skip, ..missed };
    let set = CleanSet::of(target, (first, last));
    let again = set.cache.alloc.eviction().on_miss(set.inode, start);
    let kind = match (meta, again) {
        (true, _) => DataKind::Meta,
        (false, true) => DataKind::Promoted,
        (false, false) => DataKind::Clean,
    };
    let (volume, cache) = (volume.clone(), cache.clone());
    let background = cache.tasks.begin_with(data_bytes);
    target.volume.rt.spawn(async move {
        let target = volume.target(&cache, inode);
        insert_pieces(target, kind, missed).await;
        drop(background);
    });
}

/// Places, writes and inserts whole blocks, in as many pieces as there are places.
async fn insert_pieces(target: Target<'_>, kind: DataKind, missed: Missed) {
    let volume = target.volume;
    let Missed { start, end, data, skip, range: miss, flush_failed } = missed;
    let mut at = start;
    // No data of a detached device may reach the cache device: a wipe may have passed already.
    let is_current = || miss.is_valid() && flush_has_failed(volume) == flush_failed;
    while at < end && volume.links.is_as(target.cache, target.inode) {
        let set = CleanSet::of(target, (at, end));
        let cache = &set.cache;
        // The second set does not end while the data is being inserted into it.
        let theirs = (!Rc::ptr_eq(cache, target.cache)).then(|| cache.tasks.begin());
        if theirs.is_some() && cache.device.is_stopping() {
            return;
        }
        let Some(placed) = cache.alloc.try_place(kind, set.end - at) else {
            // No client waits for this insertion, so it may wait for buckets, but not for writeback to make room.
            let give_up = || cache.device.is_stopping() || cache.alloc.is_starved();
            if is_current() && !give_up() {
                cache.alloc.wait(Purpose::Data, give_up).await;
                continue;
            }
            volume.not_cached(end - at);
            return;
        };
        let offset = skip + (at - start).bytes() as usize;
        let done = cache.data.write(placed.ptr, placed.size, data.clone(), offset).await;
        cache.device.observe_data(&done.result);
        let ok = done.result.is_ok();
        let tick = cache.device.wrote();
        let piece_end = at + placed.size;
        if ok {
            let durability = Durability::LeafOnly(tick);
            let copy = CleanCopy { start: at, end: piece_end, ptr: placed.ptr, durability };
            let validity = Validity { is_current: &is_current, is_linked: &|| set.is_linked(target) };
            insert_where_hole(set.target(volume), copy, validity).await;
            if !Rc::ptr_eq(cache, target.cache) {
                cache.count_for_aging(placed.size);
            }
        }
        cache.alloc.release(placed);
        if !ok {
            return;
        }
        at = piece_end;
    }
}

/// A clean copy of a range that the cache device has.
struct CleanCopy {
    start: Sector,
    end: Sector,
    ptr: format::Ptr,
    durability: Durability,
}

/// Tells whether a clean copy may still be inserted.
struct Validity<'a> {
    /// Whether the copy equals the data of the backing device.
    is_current: &'a dyn Fn() -> bool,
    /// Whether the volume still has the set.
    is_linked: &'a dyn Fn() -> bool,
}

/// Inserts a clean copy where the index still has a hole, as long as the copy is current and the volume has the set.
async fn insert_where_hole(target: Target<'_>, copy: CleanCopy, validity: Validity<'_>) {
    let Target { volume, cache, inode } = target;
    let CleanCopy { start, end, ptr, durability } = copy;
    let mut at = start;
    let mut collided = false;
    while at < end {
        // Every condition for the change is checked again after each wait.
        let mine = (validity.is_linked)();
        if !mine || cache.device.is_stopping() || !((validity.is_current)() || bug(Bug::MissOverNewerWrite)) {
            collided = true;
            break;
        }
        let blocked = match cache.index.segment(inode, at, end) {
            Err(e) => e.into(),
            Ok(IndexSegment { kind: Kind::Hole { seq: Some(seq) }, .. })
                if seq > cache.journal.durable() && !bug(Bug::MissOverPendingHole) =>
            {
                // The hole hides an older key until its journal entry is durable, and the copy would hide the number of
                // that entry. A durable write past the cache must find this number and wait for the entry.
                Blocked::NotDurable(seq)
            }
            Ok(seg) if matches!(seg.kind, Kind::Hole { .. }) || bug(Bug::MissOverNewerWrite) => {
                let here = ptr.advanced(at - start);
                match cache.index.try_change(inode, at, seg.end, Some((here, false)), durability) {
                    Ok((done, _)) => {
                        at = done;
                        continue;
                    }
                    Err(b) => b,
                }
            }
            Ok(seg) => {
                collided = true;
                at = seg.end;
                continue;
            }
        };
        if cache.index.unblock(blocked).await.is_err() {
            return;
        }
    }
    if collided {
        volume.stats.borrow_mut().miss_collision();
        cache.stats.borrow_mut().miss_collision();
    }
}

/// Inserts a clean copy that a write has just written to both devices. The caller holds the range.
pub(super) async fn insert_written(
    target: Target<'_>,
    start: Sector,
    size: Sectors,
    ptr: format::Ptr,
) -> Result<(), crate::error::EngineError> {
    let Target { cache, inode, .. } = target;
    let tick = cache.device.wrote();
    cache.index.change(inode, start, start + size, Some((ptr, false)), Durability::LeafOnly(tick)).await?;
    Ok(())
}
