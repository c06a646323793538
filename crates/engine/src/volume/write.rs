//! Writes to a volume.
//!
//! A write goes to the cache alone as dirty data (*writeback*), or to the backing device (`direct`), with or without a
//! clean copy in the cache. A write over dirty data goes through the cache, except while the volume is being detached
//! and when the cache has no room. So a dirty key is replaced only by another dirty key, or after the backing device
//! was written and flushed. Owns the path of a write. Must not know the rules by which a write bypasses the cache
//! (`policy::bypass`).
//!
//! Invariant: the data is written before its key enters the journal and the index, and the write is answered after
//! that.

use std::rc::Rc;

use format::{BackingState, CacheMode, JournalSeq, Sector, Sectors};
use io::{Buffer, IoError, Nanos, VolumeError};

use super::Blocks;
use super::Cache;
use super::Target;
use super::Volume;
use super::backing::read_directly;
use super::blocks::widened;
use super::direct::write_direct;
use super::mirror::{Mirror, write_both};
use super::overwrite::{overwrite, place_to_overwrite};
use super::read::read_merged;
use crate::alloc::{DataKind, Placed, Purpose};
use crate::canary::{Bug, bug};
use crate::device::{BackingDevice, MeteredIo};
use crate::error::{EngineError, NoSpace};
use crate::index::{Change, Durability, Kind, Progress};
use crate::policy::bypass::{
    BypassReason, Decision, RequestHints, RequestKind, WriteInputs, WritePath, write_path,
};
use crate::policy::congestion::Direction;
use crate::policy::stripes::StripeGeometry;
use crate::policy::yielding;
use crate::refusal::Refusal;
use crate::stats::Outcome;
use crate::tunables::Controller;

/// The reason why the cache could not take a write.
pub(super) enum NotTaken {
    /// The cache has no room, or the cache device failed the write: the backing device can take it.
    ByCache,
    /// The write fails.
    Failed(EngineError),
}

impl From<EngineError> for NotTaken {
    fn from(e: EngineError) -> NotTaken {
        NotTaken::Failed(e)
    }
}

/// Counts a dirty write until its keys are in the index or it has failed. The end of the last one wakes the tasks that
/// wait until nothing is dirty.
struct DirtyWrite<'a>(&'a Volume);

impl<'a> DirtyWrite<'a> {
    fn begin(volume: &'a Volume) -> DirtyWrite<'a> {
        volume.dirty_in_flight.set(volume.dirty_in_flight.get() + 1);
        DirtyWrite(volume)
    }
}

impl Drop for DirtyWrite<'_> {
    fn drop(&mut self) {
        let left = self.0.dirty_in_flight.get() - 1;
        self.0.dirty_in_flight.set(left);
        if left == 0 && !bug(Bug::FailedWriteUnnoticed) {
            self.0.writeback.progressed();
        }
    }
}

/// A part of a write that is being written to the cache device.
#[derive(Clone, Copy)]
pub(super) struct WritePiece {
    at: Sector,
    placed: Placed,
    began: Nanos,
}

/// A write request.
pub(super) struct Write {
    pub(super) start: Sector,
    pub(super) end: Sector,
    pub(super) buffer: Buffer,
    pub(super) offset_bytes: usize,
    pub(super) fua: bool,
    /// The data is metadata of a file system.
    pub(super) meta: bool,
}

impl Write {
    pub(super) fn sectors(&self) -> Sectors {
        self.end - self.start
    }

    pub(super) fn range(&self) -> (Sector, Sector) {
        (self.start, self.end)
    }

    /// The write of the whole blocks `[start, end)` around this write: `blocks` with the data of this write copied over
    /// it.
    fn over(&self, mut blocks: Buffer, start: Sector, end: Sector) -> Write {
        let at = (self.start - start).bytes() as usize;
        let len = self.sectors().bytes() as usize;
        blocks.as_mut()[at..at + len]
            .copy_from_slice(&self.buffer.as_slice()[self.offset_bytes..self.offset_bytes + len]);
        Write { start, end, buffer: blocks, offset_bytes: 0, fua: self.fua, meta: self.meta }
    }
}

/// Writes through the cache or past it; returns the path that the write took.
pub(super) async fn write_cached(target: Target<'_>, write: &Write) -> Result<Outcome, EngineError> {
    let Target { volume, cache, .. } = target;
    cache.foreground_request();
    let outer = widened(volume, cache, write.range());
    let range = match volume.ranges.try_hold_for_change(outer.0, outer.1) {
        Some(range) => range,
        None => volume.ranges.hold_for_change(outer.0, outer.1).await,
    };
    if !volume.links.is_to(cache) {
        volume.links.refuse_other(cache)?;
        // The volume was detached during the wait; the other path takes its own range.
        drop(range);
        return write_uncached(volume, write).await.map(|()| Outcome::PassThrough).map_err(EngineError::from);
    }
    let decision = volume.decide(cache, RequestKind::Write, write.start, write.sectors(), write.meta);
    let mut path = WritePath::Writeback;
    let merged;
    let mut write = write;
    let inputs = inputs_if_aligned(volume, cache, write, outer);
    if !inputs.as_ref().is_some_and(|i| write_path(i, decision) == WritePath::Writeback) {
        (merged, path) = choose_path(target, write, outer, decision, inputs).await?;
        write = merged.as_ref().unwrap_or(write);
    }
    if path == WritePath::Writeback {
        if bug(Bug::WriteAwaitsWriteback) {
            volume.ranges.writeback_done(write.start, write.end).await;
        }
        let kind = if volume.backing.is_some() { DataKind::Dirty } else { DataKind::Volume };
        if let Some(mirror) = volume.mirror()
            && !bug(Bug::OverwriteWithCopy)
        {
            return Box::pin(write_back_twice(target, mirror, write)).await;
        }
        match write_back(target, write, kind).await {
            Ok(newest) => {
                if kind == DataKind::Dirty {
                    cache.count_for_aging(write.sectors());
                }
                if write.fua {
                    commit(cache, newest).await?;
                }
                cache.device.check()?;
                return Ok(Outcome::Writeback);
            }
            Err(NotTaken::ByCache) if volume.backing.is_some() => {
                path = WritePath::Bypass(BypassReason::NoBucket);
            }
            Err(not_taken) => return Err(failure_of(volume, not_taken)),
        }
    }
    write_past(target, write, path).await
}

/// Reads the blocks around a write and returns the write of these blocks with its data merged into them.
pub(super) async fn merge(
    target: Target<'_>,
    write: &Write,
    start: Sector,
    end: Sector,
) -> Result<Write, EngineError> {
    Ok(write.over(read_merged(target, start, end).await?, start, end))
}

/// Whether the range has live dirty data.
async fn overlaps_dirty(target: Target<'_>, start: Sector, end: Sector) -> Result<bool, EngineError> {
    let Target { cache, inode, .. } = target;
    if cache.index.tree().dirty_sectors(inode) == Sectors::ZERO {
        return Ok(false);
    }
    let mut at = start;
    while at < end {
        let seg = cache.index.segment_loaded(inode, at, end).await?;
        if matches!(seg.kind, Kind::Hit { dirty: true, .. }) {
            return Ok(true);
        }
        at = seg.end;
    }
    Ok(false)
}

/// The inputs of the write path, if they are known without a look-up in the index: the write is whole blocks of a cached
/// device on which stripes do not matter. A write that then does not become dirty data still needs [`choose_path`].
fn inputs_if_aligned(
    volume: &Volume,
    cache: &Cache,
    write: &Write,
    outer: (Sector, Sector),
) -> Option<WriteInputs> {
    let aligned =
        outer == write.range() && Blocks::of(&cache.geometry).are_whole(write.start, write.sectors());
    let plain = aligned && volume.backing.is_some() && volume.expensive_stripes().is_none();
    plain.then(|| inputs_of(volume, cache, write))
}

/// Chooses the path of a write whose range is held, with look-ups in the index. Returns also the write of the whole
/// blocks `outer`, if the write must be merged with the data around it. `inputs`: [`inputs_if_aligned`].
async fn choose_path(
    target: Target<'_>,
    write: &Write,
    outer: (Sector, Sector),
    decision: Decision,
    inputs: Option<WriteInputs>,
) -> Result<(Option<Write>, WritePath), EngineError> {
    let Target { volume, cache, .. } = target;
    let (first, last) = outer;
    let unaligned = outer != write.range();
    let takes_as_it_is =
        |b: &Rc<BackingDevice>| Blocks::of_disk(b.disk()).are_whole(write.start, write.sectors());
    // Whether the range has dirty data, as soon as a look-up has told that.
    let mut over_dirty = None;
    let mut merged = None;
    if unaligned {
        if volume.backing.as_ref().is_some_and(takes_as_it_is) {
            over_dirty = Some(overlaps_dirty(target, first, last).await?);
        }
        if over_dirty.unwrap_or(true) {
            merged = Some(merge(target, write, first, last).await?);
        }
    }
    if volume.backing.is_none() {
        return Ok((merged, WritePath::Writeback));
    }
    let write = merged.as_ref().unwrap_or(write);
    let touches_dirty_stripe = match volume.expensive_stripes() {
        Some(stripes) => touches_dirty_stripe(target, write, &stripes).await?,
        None => false,
    };
    let inputs = inputs.unwrap_or_else(|| inputs_of(volume, cache, write));
    let mut inputs = WriteInputs { touches_dirty_stripe, ..inputs };
    let mut path = write_path(&inputs, decision);
    if path != WritePath::Writeback {
        let over_dirty = match over_dirty {
            Some(over_dirty) => over_dirty,
            None => overlaps_dirty(target, write.start, write.end).await?,
        };
        // Writeback may be writing a gap between dirty extents together with them. A write past the cache would have to
        // wait for its end.
        inputs.overlaps_dirty = over_dirty
            || inputs.mode == CacheMode::Writeback && volume.ranges.is_written_back(write.start, write.end);
        path = write_path(&inputs, decision);
    }
    if path == WritePath::Writeback {
        // The cache takes whole blocks only, so a write that could bypass as it is must be merged first.
        if outer != write.range() {
            merged = Some(merge(target, write, first, last).await?);
        }
        if !Blocks::of(&cache.geometry).are_whole(first, last - first) {
            // A block that the volume has only a part of is never cached.
            path = WritePath::Bypass(BypassReason::Unaligned);
        }
    }
    Ok((merged, path))
}

/// The inputs of the write path that are known without a look-up in the index.
fn inputs_of(volume: &Volume, cache: &Cache, write: &Write) -> WriteInputs {
    let dirty_limit_percent = volume.dirty_limit_percent(cache, write.sectors());
    let t = cache.tunables.borrow();
    WriteInputs {
        kind: RequestKind::Write,
        hints: RequestHints { sync: write.fua, meta: write.meta, ..RequestHints::default() },
        mode: volume.tunables.borrow().cache_mode,
        detaching: volume.is_detaching(),
        in_use_percent: cache.alloc.in_use_percent(),
        cutoff_writeback: t.cutoff_writeback,
        cutoff_writeback_sync: t.cutoff_writeback_sync,
        dirty_limit_percent,
        touches_dirty_stripe: false,
        overlaps_dirty: false,
        cache_takes_dirty: true,
    }
}

/// Writes to the backing device, by a path that is not writeback.
async fn write_past(target: Target<'_>, write: &Write, path: WritePath) -> Result<Outcome, EngineError> {
    let Target { volume, cache, .. } = target;
    let reason = match path {
        WritePath::Writethrough => {
            cache.count_for_aging(write.sectors());
            write_direct(target, write, true).await?;
            return Ok(Outcome::Writethrough);
        }
        WritePath::Bypass(reason) => reason,
        // The policy wants writeback although the cache has no room.
        WritePath::Writeback => BypassReason::NoBucket,
    };
    count_bypass(volume, cache, reason, write.sectors());
    write_direct(target, write, false).await?;
    Ok(Outcome::Bypass(reason))
}

pub(super) fn count_bypass(volume: &Volume, cache: &Cache, reason: BypassReason, sectors: Sectors) {
    volume.stats.borrow_mut().bypassed(reason, sectors);
    cache.stats.borrow_mut().bypassed(reason, sectors);
    if reason == BypassReason::CacheFull95 {
        volume.writeback.wake();
    }
}

/// Waits until journal entry `newest`, the newest with a key of a write, is durable.
async fn commit(cache: &Cache, newest: JournalSeq) -> Result<(), EngineError> {
    if bug(Bug::FuaBeforeJournal) {
        return Ok(());
    }
    cache.journal.commit(newest).await
}

/// Writes the data to the cache device and inserts dirty keys into the index. Returns the newest journal entry with one
/// of these keys.
async fn write_back(target: Target<'_>, write: &Write, kind: DataKind) -> Result<JournalSeq, NotTaken> {
    let Target { volume, cache, inode } = target;
    let _dirty = DirtyWrite::begin(volume);
    if let Some(backing) = &volume.backing
        && !bug(Bug::DirtyStateForgotten)
        && backing.state() != BackingState::Dirty
    {
        backing.begin_dirty(&cache.device).await?;
    }
    if super::overwrite::overwrites_in_place(cache)
        && let Some(ptr) = place_to_overwrite(target, write)
        && let Some(newest) = overwrite(target, write, ptr).await
    {
        return Ok(newest);
    }
    if cache.alloc.buckets().in_use_percent() > yielding::THROTTLE_FROM_PERCENT {
        throttle_write(volume, cache, write.sectors()).await;
    }
    let mut newest = JournalSeq(0);
    let mut at = write.start;
    while at < write.end {
        cache.device.check()?;
        let Some(placed) = cache.alloc.try_place(kind, write.end - at) else {
            wait_for_room(volume, cache).await?;
            continue;
        };
        let (first, future) = start_piece((volume, cache), write, (at, placed.size), placed);
        at += placed.size;
        // Most writes are one piece. The pieces of a longer write are written at the same time, as far as there is room
        // now.
        let mut more = Vec::new();
        while at < write.end
            && let Some(placed) = cache.alloc.try_place(kind, write.end - at)
        {
            more.push(start_piece((volume, cache), write, (at, placed.size), placed));
            at += placed.size;
        }
        let mut written = piece_written(volume, cache, first, future.await.result);
        for (piece, future) in &mut more {
            written = written.and(piece_written(volume, cache, *piece, future.await.result));
        }
        let mut outcome = outcome_of(volume, written);
        for WritePiece { at, placed, .. } in std::iter::once(&first).chain(more.iter().map(|(p, _)| p)) {
            if outcome.is_ok() {
                let (at, new) = (*at, Some((placed.ptr, true)));
                let mut change = Change::new(inode, at, at + placed.size, new, Durability::Journaled);
                let changed = match cache.index.advance(&mut change) {
                    Ok(Progress::Blocked(blocked)) => cache.index.complete(change, blocked).await,
                    Ok(Progress::Done(seq)) => Ok(seq),
                    Err(e) => Err(e),
                };
                outcome = changed.map(|seq| newest = newest.max(seq)).map_err(NotTaken::Failed);
            }
            cache.alloc.release(*placed);
        }
        outcome?;
    }
    volume.writeback.dirtied();
    Ok(newest)
}

/// Writes the data to both sets of the volume, or past the cache if one of them has no room.
async fn write_back_twice(
    target: Target<'_>,
    mirror: Rc<Mirror>,
    write: &Write,
) -> Result<Outcome, EngineError> {
    let Target { volume, cache, .. } = target;
    match write_both_durably(target, &mirror, write).await {
        Ok(()) => {
            cache.count_for_aging(write.sectors());
            mirror.cache.count_for_aging(write.sectors());
            cache.device.check()?;
            Ok(Outcome::Writeback)
        }
        Err(NotTaken::ByCache) => write_past(target, write, WritePath::Bypass(BypassReason::NoBucket)).await,
        Err(not_taken) => Err(failure_of(volume, not_taken)),
    }
}

/// Writes the data to both sets of the volume, and inserts dirty keys into both indexes; see [`write_back`]. A durable write waits for
/// the keys of both.
async fn write_both_durably(target: Target<'_>, mirror: &Mirror, write: &Write) -> Result<(), NotTaken> {
    let Target { volume, cache, .. } = target;
    let _dirty = DirtyWrite::begin(volume);
    if let Some(backing) = &volume.backing
        && backing.state() != BackingState::Dirty
    {
        backing.begin_dirty(&cache.device).await?;
    }
    if cache.alloc.buckets().in_use_percent() > yielding::THROTTLE_FROM_PERCENT {
        throttle_write(volume, cache, write.sectors()).await;
    }
    let newest = write_both(target, mirror, write).await?;
    if write.fua {
        let (first, second) = io::sync::join(commit(cache, newest), mirror.commit_keys()).await;
        second.and(first)?;
    }
    Ok(())
}

/// The outcome of a write whose pieces the cache device has written, or has failed to write. After an error no key of
/// any piece is inserted.
pub(super) fn outcome_of(volume: &Volume, written: Result<(), IoError>) -> Result<(), NotTaken> {
    match written {
        Ok(()) => Ok(()),
        Err(_) if volume.backing.is_some() => Err(NotTaken::ByCache),
        Err(e) => Err(NotTaken::Failed(e.into())),
    }
}

/// Delays a write that needs new room while the cache is nearly full. Without the delay the cache would soon be full,
/// and writes would have to bypass it or wait much longer.
async fn throttle_write(volume: &Volume, cache: &Cache, sectors: Sectors) {
    let in_use_percent = cache.alloc.buckets().in_use_percent();
    // Writeback cannot make room by data of flash-only volumes.
    if volume.backing.is_none() || volume.dirty_sectors().0 < room_worth_waiting_for(cache) {
        return;
    }
    let most = {
        let t = volume.tunables.borrow();
        if t.writeback_controller == Controller::Kernel || !t.writeback_running {
            return;
        }
        Nanos::from_ms(u64::from(t.writeback_latency_ms))
    };
    let now = volume.rt.turn_time();
    let mut throttle = cache.shared.throttle.get();
    let due = throttle.due(now, sectors.0, volume.writeback.cleaned_per_second(), in_use_percent, most);
    cache.shared.throttle.set(throttle);
    if due > now {
        volume.rt.sleep_until(due).await;
    }
}

/// The number of dirty sectors below which writeback of the volume makes too little room to wait for.
fn room_worth_waiting_for(cache: &Cache) -> u64 {
    cache.geometry.bucket_sectors.0 * u64::from(cache.geometry.nbuckets) / 20
}

/// Starts to write a part of a write, `size` sectors from `at` on, to the begin of its place.
pub(super) fn start_piece(
    (volume, cache): (&Volume, &Cache),
    write: &Write,
    (at, size): (Sector, Sectors),
    placed: Placed,
) -> (WritePiece, MeteredIo) {
    let offset = write.offset_bytes + (at - write.start).bytes() as usize;
    let piece = WritePiece { at, placed, began: volume.rt.turn_time() };
    let data = write.buffer.clone();
    (piece, cache.data.write(placed.ptr, size, data, offset))
}

/// Records that the write of a piece to the cache device has ended, well or with an error.
pub(super) fn piece_written(
    volume: &Volume,
    cache: &Cache,
    piece: WritePiece,
    result: Result<(), IoError>,
) -> Result<(), IoError> {
    cache.device.wrote();
    cache.device.observe_data(&result);
    result?;
    let now = volume.rt.turn_time();
    cache.congestion().observe_latency(Direction::Write, now.since(piece.began), now);
    cache.device.counters().count_written(piece.placed.size);
    Ok(())
}

/// Writes whole blocks of a flash-only volume.
pub(super) async fn write_flash_only(target: Target<'_>, write: &Write) -> Result<JournalSeq, EngineError> {
    let volume = target.volume;
    write_back(target, write, DataKind::Volume).await.map_err(|e| failure_of(volume, e))
}

/// The error of a write that has no other device to go to.
#[cold]
pub(super) fn failure_of(volume: &Volume, not_taken: NotTaken) -> EngineError {
    match not_taken {
        NotTaken::Failed(e) => e,
        NotTaken::ByCache => NoSpace::Data { volume: volume.name().to_string() }.into(),
    }
}

/// Waits until an open bucket may have room, while buckets are being made ready; returns an error when none can be made
/// ready.
pub(super) async fn wait_for_room(volume: &Volume, cache: &Rc<Cache>) -> Result<(), NotTaken> {
    // If no bucket is reclaimable, only writeback can make room, and the write can go to the backing device without
    // waiting for it. If some are, a walk of the index makes room; only a flash-only volume, which has no other device,
    // waits for the walk.
    let give_up = || {
        let can_wait = volume.backing.is_none() && cache.alloc.buckets().reclaimable() > 0;
        cache.alloc.is_starved() && !can_wait
    };
    if give_up() {
        volume.writeback.wake();
        return Err(NotTaken::ByCache);
    }
    if cache.device.is_stopping() {
        cache.device.check()?;
        return Err(NotTaken::Failed(Refusal::Stopping.into()));
    }
    let is_over = || cache.device.is_stopping() || give_up();
    cache.alloc.wait(Purpose::Data, is_over).await;
    Ok(())
}

/// Writes to the backing device of a volume without a cache.
pub(super) async fn write_uncached(volume: &Volume, write: &Write) -> Result<(), VolumeError> {
    let Some(backing) = volume.backing() else { return Err(VolumeError::Stopped(volume.name())) };
    let (first, last) = Blocks::of_disk(backing.disk()).around(write.range());
    let _range = volume.ranges.hold_for_change(first, last).await;
    volume.ranges.writeback_done(first, last).await;
    let blocks;
    let mut write = write;
    if (first, last) != write.range() {
        let span = last - first;
        let around = volume.rt.pool().take(span.bytes() as usize);
        let (around, result) = read_directly(volume, first, span, around, 0).await;
        result?;
        blocks = write.over(around, first, last);
        write = &blocks;
    }
    let (at, size) = (write.start, write.sectors());
    let done = backing.write_data(at, size, write.buffer.clone(), write.offset_bytes, write.fua).await;
    backing.wrote_directly();
    if let Err(e) = &done.result {
        backing.failed(e, volume.tunables.borrow().io_error_limit);
    }
    done.result.map_err(VolumeError::from)
}

/// Whether a stripe that the write touches has dirty data.
async fn touches_dirty_stripe(
    target: Target<'_>,
    write: &Write,
    stripes: &StripeGeometry,
) -> Result<bool, EngineError> {
    let (first, _) = stripes.extent(stripes.stripe_of(write.start));
    let (last, len) = stripes.extent(stripes.stripe_of(write.end - Sectors(1)));
    overlaps_dirty(target, first, last + len).await
}

#[cfg(test)]
mod tests;
