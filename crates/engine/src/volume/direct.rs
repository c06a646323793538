//! Writes, discards and zeros that go directly to the backing device.
//!
//! Owns the order of their steps. Must not know why a request bypasses the cache.
//!
//! The order of the steps keeps the content of every sector unambiguous after a crash (durability contract 7, 8 and 9):
//!
//! 1. wait until writeback of the range has ended, because it would overwrite the new data with older data;
//! 2. replace clean copies in the cache that a crash could bring back by durable holes, and make dirty keys that hide
//!    such copies durable, *before* the backing device changes;
//! 3. write the backing device and, at the same time, a clean copy into the cache if one is wanted;
//! 4. if the range has dirty data: flush the backing device, and only then replace the dirty keys;
//! 5. insert the clean copy into the index.

use std::rc::Rc;

use format::{Inode, JournalSeq, Sector, Sectors};
use io::sync::{join, join_all};
use io::{IoError, Op, VolumeError, ZeroFlags};

use super::Blocks;
use super::Cache;
use super::Target;
use super::Volume;
use super::blocks::widened;
use super::clean_set::CleanSet;
use super::miss::insert_written;
use super::write::Write;
use super::write::{count_bypass, merge, write_flash_only, write_uncached};
use crate::alloc::{DataKind, Placed};
use crate::canary::{Bug, bug};
use crate::device::{BackingDevice, MeteredIo};
use crate::error::EngineError;
use crate::index::{Durability, Kind};
use crate::policy::bypass::BypassReason;

/// The operation on the backing device that is not a write of data.
pub(super) enum Direct {
    Discard,
    Zeroes(ZeroFlags),
}

/// Writes to the backing device and, if `copy` is set, a clean copy into the cache. The caller holds the range. If the
/// blocks around the write have dirty data, the write is whole blocks.
pub(super) async fn write_direct(target: Target<'_>, write: &Write, copy: bool) -> Result<(), EngineError> {
    let Target { volume, cache, .. } = target;
    let Some(backing) = volume.backing() else {
        panic!("volume {}: a write past the cache, but the volume has no backing device", volume.name());
    };
    volume.ranges.writeback_done(write.start, write.end).await;
    let (outer_start, outer_end) = widened(volume, cache, write.range());
    let over_dirty = invalidate_clean(target, outer_start, outer_end).await?;
    let (copies, requests) = if copy { start_copies(target, write) } else { Default::default() };
    let (sectors, data) = (write.sectors(), write.buffer.clone());
    let written = backing.write_data(write.start, sectors, data, write.offset_bytes, write.fua);
    // The requests are polled together, so that the time of a copy does not include that of the backing device.
    let (done, copied) = join(written, join_all(requests)).await;
    backing.wrote_directly();
    let result = match done.result {
        Err(e) => {
            backing.failed(&e, volume.tunables.borrow().io_error_limit);
            Err(e.into())
        }
        Ok(()) if over_dirty => drop_dirty(target, write.start, write.end, write.fua).await,
        Ok(()) => Ok(()),
    };
    for (WrittenCopy { at, set, placed }, copied) in copies.into_iter().zip(copied) {
        set.cache.device.observe_data(&copied.result);
        if copied.result.is_ok() && result.is_ok() && set.is_linked(target) {
            set.cache.device.counters().count_written(placed.size);
            // A clean copy that is not inserted does not make the write fail.
            let _ = insert_written(set.target(volume), at, placed.size, placed.ptr).await;
        }
        set.cache.alloc.release(placed);
    }
    result
}

/// A clean copy of a part of a write.
struct WrittenCopy {
    at: Sector,
    set: CleanSet,
    placed: Placed,
}

/// Starts to write clean copies of the data into the cache, as far as there is room.
fn start_copies(target: Target<'_>, write: &Write) -> (Vec<WrittenCopy>, Vec<MeteredIo>) {
    let (mut copies, mut requests, mut at) = (Vec::new(), Vec::new(), write.start);
    while at < write.end {
        let set = CleanSet::of(target, (at, write.end));
        let Some(placed) = set.cache.alloc.try_place(DataKind::Clean, set.end - at) else {
            target.volume.not_cached(write.end - at);
            break;
        };
        let offset = write.offset_bytes + (at - write.start).bytes() as usize;
        requests.push(set.cache.data.write(placed.ptr, placed.size, write.buffer.clone(), offset));
        copies.push(WrittenCopy { at, set, placed });
        at += placed.size;
    }
    (copies, requests)
}

/// Discards or zeroes a range of a cached device or flash-only volume.
pub(super) async fn remove_cached(
    target: Target<'_>,
    start: Sector,
    sectors: Sectors,
    op: &Direct,
) -> Result<(), EngineError> {
    let Target { volume, cache, .. } = target;
    cache.foreground_request();
    let end = start + sectors;
    let (outer_start, outer_end) = widened(volume, cache, (start, end));
    let range = volume.ranges.hold_for_change(outer_start, outer_end).await;
    if !volume.links.is_to(cache) {
        volume.links.refuse_other(cache)?;
        // The volume was detached during the wait; the other path takes its own range.
        drop(range);
        return remove_uncached(volume, start, sectors, op).await.map_err(EngineError::from);
    }
    let Some(backing) = volume.backing() else {
        return unmap(target, start, end, op).await;
    };
    count_bypass(volume, cache, BypassReason::Discard, sectors);
    // Only whole blocks go to the device: a discard is a hint, and zeros at the edges are written like data.
    let split = Blocks::of_disk(backing.disk()).max(Blocks::of(&cache.geometry)).split((start, end));
    if let Direct::Zeroes(ZeroFlags { fua, .. }) = op {
        for (a, b) in split.edges() {
            zero_edge(target, a, b, *fua).await?;
        }
    }
    let Some((first, last)) = split.whole else { return Ok(()) };
    volume.ranges.writeback_done(first, last).await;
    let over_dirty = invalidate_clean(target, first, last).await?;
    match op {
        Direct::Zeroes(flags) => zero_blocks(volume, &backing, (first, last), flags.may_unmap).await?,
        Direct::Discard => discard_blocks(&backing, (first, last)).await,
    }
    let fua = matches!(op, Direct::Zeroes(ZeroFlags { fua: true, .. }));
    if over_dirty {
        drop_dirty(target, first, last, fua).await?;
    } else if fua {
        backing.settle_direct_writes().await?;
    }
    Ok(())
}

/// Writes zeros to a part of a block, as data.
async fn zero_edge(target: Target<'_>, start: Sector, end: Sector, fua: bool) -> Result<(), EngineError> {
    let Target { volume, cache, .. } = target;
    let buffer = volume.rt.pool().zeroed((end - start).bytes() as usize);
    let write = Write { start, end, buffer, offset_bytes: 0, fua, meta: false };
    let (outer_start, outer_end) = widened(volume, cache, (start, end));
    let write = merge(target, &write, outer_start, outer_end).await?;
    write_direct(target, &write, false).await
}

/// Unmaps the whole blocks of a range of a flash-only volume, and writes zeros at its edges.
async fn unmap(target: Target<'_>, start: Sector, end: Sector, op: &Direct) -> Result<(), EngineError> {
    let Target { volume, cache, .. } = target;
    let split = Blocks::of(&cache.geometry).split((start, end));
    let fua = matches!(op, Direct::Zeroes(ZeroFlags { fua: true, .. }));
    let mut newest = JournalSeq(0);
    if let Direct::Zeroes(_) = op {
        for (a, b) in split.edges() {
            let buffer = volume.rt.pool().zeroed((b - a).bytes() as usize);
            // A write in place inserts no key, so there is no journal entry to wait for.
            let fua = fua && !bug(Bug::EdgesNotDurable);
            let write = Write { start: a, end: b, buffer, offset_bytes: 0, fua, meta: false };
            let (outer_start, outer_end) = widened(volume, cache, write.range());
            let write = merge(target, &write, outer_start, outer_end).await?;
            newest = newest.max(write_flash_only(target, &write).await?);
        }
    }
    if let Some((first, last)) = split.whole {
        newest = newest.max(drop_mapped(target, first, last).await?);
    }
    if fua {
        cache.journal.commit(newest).await?;
    }
    Ok(())
}

/// Makes every cached part of the range a hole, through the journal. Returns the journal entry after which the whole
/// range is a hole.
async fn drop_mapped(target: Target<'_>, start: Sector, end: Sector) -> Result<JournalSeq, EngineError> {
    let Target { cache, inode, .. } = target;
    let mut newest = JournalSeq(0);
    let mut at = start;
    while at < end {
        let seg = cache.index.segment_loaded(inode, at, end).await?;
        let seq = match seg.kind {
            Kind::Hit { .. } => {
                Some(cache.index.change(inode, at, seg.end, None, Durability::Journaled).await?)
            }
            // The journal entry that made the hole may not be durable yet.
            Kind::Hole { seq, .. } if !bug(Bug::HoleTakenForDurable) => seq,
            Kind::Hole { .. } => None,
        };
        newest = newest.max(seq.unwrap_or_default());
        at = seg.end;
    }
    Ok(newest)
}

/// Step 4: makes the data that replaces dirty data durable, then removes the dirty keys.
async fn drop_dirty(target: Target<'_>, start: Sector, end: Sector, fua: bool) -> Result<(), EngineError> {
    let Target { volume, cache, .. } = target;
    let Some(backing) = volume.backing() else { return Ok(()) };
    if !bug(Bug::DirtyDroppedBeforeFlush) {
        backing.settle_direct_writes().await?;
    }
    let mirror = volume.mirror();
    if let Some(mirror) = mirror.as_ref().filter(|_| !bug(Bug::DropInFirstSetOnly)) {
        super::mirror::drop_both(target, mirror, start, end).await?;
    }
    let newest = drop_mapped(target, start, end).await?;
    if fua {
        cache.journal.commit(newest).await?;
        if let Some(mirror) = mirror {
            mirror.commit_keys().await?;
        }
    }
    volume.writeback.progressed();
    Ok(())
}

/// Step 2: invalidates the clean copies of the range. After this step no crash can bring a clean copy back, neither by
/// its own key nor by the loss of a dirty key that hides it: those keys are durable before the backing device changes.
/// Returns whether the range has dirty data.
async fn invalidate_clean(target: Target<'_>, start: Sector, end: Sector) -> Result<bool, EngineError> {
    let Target { volume, cache, inode } = target;
    let found = drop_clean(cache, inode, (start, end)).await?;
    if !bug(Bug::HoleNotDurable) {
        cache.journal.commit(found.newest).await?;
    }
    if let Some(mirror) = volume.mirror() {
        let second = &mirror.cache;
        if !bug(Bug::CleanCopyOfSecondKept) {
            drop_clean(second, mirror.inode, (start, end)).await?;
        }
        if found.is_over_dirty {
            super::mirror::drop_where_clean(target, &mirror, (start, end)).await?;
        }
        // Its dirty keys, and its holes over older ones.
        mirror.commit_keys().await?;
        if !bug(Bug::GenerationsNotAwaited) {
            second.alloc.generations_durable(|| second.device.is_failed()).await;
        }
        second.device.check()?;
    }
    if found.is_over_dirty && !bug(Bug::DirectBeforeDirtyKey) {
        cache.journal.commit_keys().await?;
    }
    // A copy in an invalidated bucket is a miss now, but a crash brings it back if the new generation is not durable.
    if !bug(Bug::GenerationsNotAwaited) {
        cache.alloc.generations_durable(|| cache.device.is_failed()).await;
    }
    cache.device.check()?;
    Ok(found.is_over_dirty)
}

/// What a set had in a range whose clean copies were dropped.
struct CleanDropped {
    /// The journal entry after which the range has no clean copies.
    newest: JournalSeq,
    is_over_dirty: bool,
}

/// Drops the clean copies that a set has of a range.
async fn drop_clean(
    cache: &Cache,
    inode: Inode,
    (start, end): (Sector, Sector),
) -> Result<CleanDropped, EngineError> {
    let mut dropped = CleanDropped { newest: JournalSeq(0), is_over_dirty: false };
    let mut at = start;
    while at < end {
        cache.device.check()?;
        let seg = cache.index.segment_loaded(inode, at, end).await?;
        let durability = match seg.kind {
            Kind::Hit { dirty: true, .. } => {
                dropped.is_over_dirty = true;
                None
            }
            Kind::Hit { may_be_durable: true, .. } => Some(Durability::Journaled),
            Kind::Hit { .. } => Some(Durability::LeafOnly(cache.device.latest_write())),
            Kind::Hole { seq, .. } => {
                dropped.newest = dropped.newest.max(seq.unwrap_or(JournalSeq(0)));
                None
            }
        };
        let Some(durability) = durability else {
            at = seg.end;
            continue;
        };
        match cache.index.try_change(inode, at, seg.end, None, durability) {
            Ok((done, seq)) => {
                dropped.newest = dropped.newest.max(seq);
                at = done;
            }
            Err(blocked) => cache.index.unblock(blocked).await?,
        }
    }
    Ok(dropped)
}

/// Discards or zeroes a range of a device that has no cache.
pub(super) async fn remove_uncached(
    volume: &Rc<Volume>,
    start: Sector,
    sectors: Sectors,
    op: &Direct,
) -> Result<(), VolumeError> {
    let Some(backing) = volume.backing() else { return Err(VolumeError::Stopped(volume.name())) };
    let split = Blocks::of_disk(backing.disk()).split((start, start + sectors));
    if let Direct::Zeroes(ZeroFlags { fua, .. }) = op {
        for (a, b) in split.edges() {
            let zeros = volume.rt.pool().zeroed((b - a).bytes() as usize);
            let write = Write { start: a, end: b, buffer: zeros, offset_bytes: 0, fua: *fua, meta: false };
            write_uncached(volume, &write).await?;
        }
    }
    let Some((first, last)) = split.whole else { return Ok(()) };
    let _range = volume.ranges.hold_for_change(first, last).await;
    volume.ranges.writeback_done(first, last).await;
    match op {
        Direct::Zeroes(flags) => {
            zero_blocks(volume, &backing, (first, last), flags.may_unmap).await?;
            if flags.fua {
                backing.settle_direct_writes().await?;
            }
        }
        Direct::Discard => discard_blocks(&backing, (first, last)).await,
    }
    Ok(())
}

/// Writes zeros to whole blocks of the backing device.
async fn zero_blocks(
    volume: &Volume,
    backing: &BackingDevice,
    (first, last): (Sector, Sector),
    may_unmap: bool,
) -> Result<(), IoError> {
    let done = backing.disk().start_plain(Op::WriteZeroes { may_unmap }, first, last - first).await;
    // A request that failed may have changed a part of the range.
    backing.wrote_directly();
    if let Err(e) = &done.result {
        backing.failed(e, volume.tunables.borrow().io_error_limit);
    }
    done.result
}

/// Discards whole blocks of the backing device, if it can. A discard is a hint, so a failed one is no error.
async fn discard_blocks(backing: &BackingDevice, (first, last): (Sector, Sector)) {
    if backing.disk().info().discard {
        let _ = backing.disk().start_plain(Op::Discard, first, last - first).await;
        backing.wrote_directly();
    }
}
