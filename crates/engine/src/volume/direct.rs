//! Writes, discards and zeros that go to the backing device.
//!
//! The order keeps every sector's content unambiguous after a crash (durability contract 7, 8 and 9):
//!
//! 1. writeback of the range that is under way ends: it would overwrite the new data with older;
//! 2. clean copies in the cache that a crash could bring back become durable holes, and dirty keys that hide such
//!    copies durable, *before* the backing device changes;
//! 3. the backing device is written (and, beside it, a clean copy into the cache);
//! 4. over dirty data: the backing device is flushed, and only then are the dirty keys replaced;
//! 5. the clean copy enters the index.

use std::rc::Rc;

use format::{Inode, JournalSeq, Sector, Sectors};
use io::{Op, VolumeError};

use super::Cache;
use super::Volume;
use super::write::{Write, into_engine};
use crate::alloc::{Placed, Stream};
use crate::canary::{Bug, bug};
use crate::device::Watched;
use crate::error::EngineError;
use crate::index::{How, Kind};
use crate::policy::bypass::BypassReason;

/// What is done to the backing device instead of a write.
pub(super) enum Direct {
    Discard,
    Zeroes { fua: bool },
}

impl Volume {
    /// Carries out a write past the cache, or through it with a clean copy (`copy`). The caller holds the range.
    pub(super) async fn write_direct(
        self: &Rc<Self>,
        cache: &Rc<Cache>,
        inode: Inode,
        write: &Write,
        copy: bool,
        over_dirty: bool,
    ) -> Result<(), EngineError> {
        let Some(backing) = self.backing() else { return Ok(()) };
        self.ranges.writeback_done(write.start, write.end).await;
        let (outer_start, outer_end) = self.widened(cache, write.start, write.end);
        self.forget_clean(cache, inode, outer_start, outer_end).await?;
        let mut copies: Vec<(Sector, Placed, Watched)> = Vec::new();
        if copy {
            let mut at = write.start;
            while at < write.end {
                let Some(placed) = cache.alloc.try_place(Stream::Clean, (inode, at), write.end - at) else {
                    self.not_cached(write.end - at);
                    break;
                };
                let offset = write.offset_bytes + (at - write.start).bytes() as usize;
                let data = write.buffer.clone();
                let future = cache.device.write_data(placed.ptr.offset(), placed.size, data, offset);
                copies.push((at, placed, future));
                at += placed.size;
            }
        }
        let (sectors, data) = (write.sectors(), write.buffer.clone());
        let done = backing.write_data(write.start, sectors, data, write.offset_bytes, write.fua).await;
        backing.wrote_directly();
        let result = match done.result {
            Err(e) => {
                backing.failed(&e, self.tunables.borrow().io_error_limit);
                Err(e.into())
            }
            Ok(()) if over_dirty => self.drop_dirty(cache, inode, write.start, write.end, write.fua).await,
            Ok(()) => Ok(()),
        };
        for (at, placed, future) in copies {
            let copied = future.await.result;
            cache.device.observe_data(&copied);
            if copied.is_ok() && result.is_ok() {
                cache.device.counters().count_written(placed.size);
                // Failing to remember a clean copy is no failure of the write.
                let _ = self.insert_written(cache, inode, at, placed.size, placed.ptr).await;
            }
            cache.alloc.release(placed);
        }
        result
    }

    /// Discards or zeroes a range of a cached device or flash-only volume.
    pub(super) async fn remove_cached(
        self: &Rc<Self>,
        cache: &Rc<Cache>,
        inode: Inode,
        start: Sector,
        sectors: Sectors,
        op: &Direct,
    ) -> Result<(), EngineError> {
        cache.foreground_request();
        let end = start + sectors;
        let (outer_start, outer_end) = self.widened(cache, start, end);
        let range = self.ranges.change(outer_start, outer_end).await;
        if !self.is_attached_to(cache) {
            // Detached while waiting; the other path takes its own range.
            drop(range);
            return self.remove_uncached(start, sectors, op).await.map_err(into_engine);
        }
        let Some(backing) = self.backing() else {
            return self.unmap(cache, inode, start, end, op).await;
        };
        self.count_bypass(cache, BypassReason::Discard, sectors);
        // Only whole blocks: a discard is advice, and zeros at the edges are written like data.
        let block =
            u64::from(backing.disk.info().logical_block_bytes / 512).max(cache.geometry.block_sectors.0);
        let (first, last) = (Sector(start.0.next_multiple_of(block)), Sector(end.0 / block * block));
        let whole = first < last;
        if let Direct::Zeroes { fua } = op {
            let edges = if whole { [(start, first), (last, end)] } else { [(start, end), (end, end)] };
            for (a, b) in edges.into_iter().filter(|(a, b)| a < b) {
                self.zero_edge(cache, inode, a, b, *fua).await?;
            }
        }
        if !whole {
            return Ok(());
        }
        self.ranges.writeback_done(first, last).await;
        self.forget_clean(cache, inode, first, last).await?;
        let operation = match op {
            Direct::Zeroes { .. } => Some(Op::WriteZeroes),
            _ => backing.disk.info().discard.then_some(Op::Discard),
        };
        if let Some(operation) = operation {
            let result = backing.disk.start_plain(operation, first, last - first).await.result;
            backing.wrote_directly();
            // A discard that the device refuses has done nothing; zeros that were not written are an error.
            if operation == Op::WriteZeroes {
                result?;
            }
        }
        let fua = matches!(op, Direct::Zeroes { fua: true });
        if self.overlaps_dirty(cache, inode, first, last).await? {
            self.drop_dirty(cache, inode, first, last, fua).await?;
        } else if fua {
            backing.settle_direct_writes().await?;
        }
        Ok(())
    }

    /// Zeros less than a block, as data.
    async fn zero_edge(
        self: &Rc<Self>,
        cache: &Rc<Cache>,
        inode: Inode,
        start: Sector,
        end: Sector,
        fua: bool,
    ) -> Result<(), EngineError> {
        let buffer = self.rt.pool().zeroed((end - start).bytes() as usize);
        let write = Write { start, end, buffer, offset_bytes: 0, fua, meta: false };
        let (outer_start, outer_end) = self.widened(cache, start, end);
        let write = self.merge(cache, inode, &write, outer_start, outer_end).await?;
        let over_dirty = self.overlaps_dirty(cache, inode, outer_start, outer_end).await?;
        self.write_direct(cache, inode, &write, false, over_dirty).await
    }

    /// A flash-only volume forgets whole blocks; zeros at the edges are written.
    async fn unmap(
        self: &Rc<Self>,
        cache: &Rc<Cache>,
        inode: Inode,
        start: Sector,
        end: Sector,
        op: &Direct,
    ) -> Result<(), EngineError> {
        let block = cache.geometry.block_sectors.0;
        let (first, last) = (Sector(start.0.next_multiple_of(block)), Sector(end.0 / block * block));
        let fua = matches!(op, Direct::Zeroes { fua: true });
        let mut newest = JournalSeq(0);
        if let Direct::Zeroes { .. } = op {
            let edges = if first < last { [(start, first), (last, end)] } else { [(start, end), (end, end)] };
            for (a, b) in edges.into_iter().filter(|(a, b)| a < b) {
                let buffer = self.rt.pool().zeroed((b - a).bytes() as usize);
                // What is overwritten in its place has no key whose entry could be waited for.
                let fua = fua && !bug(Bug::EdgesNotDurable);
                let write = Write { start: a, end: b, buffer, offset_bytes: 0, fua, meta: false };
                let (outer_start, outer_end) = self.widened(cache, a, b);
                let write = self.merge(cache, inode, &write, outer_start, outer_end).await?;
                newest = newest.max(self.write_volume(cache, inode, &write).await?);
            }
        }
        if first < last {
            newest = newest.max(self.drop_mapped(cache, inode, first, last).await?);
        }
        if fua {
            cache.journal.commit(newest).await?;
        }
        Ok(())
    }

    /// Makes every cached part of the range a hole, by the journal. Returns the entry with which all of it is one.
    async fn drop_mapped(
        &self,
        cache: &Cache,
        inode: Inode,
        start: Sector,
        end: Sector,
    ) -> Result<JournalSeq, EngineError> {
        let mut newest = JournalSeq(0);
        let mut at = start;
        while at < end {
            let seg = cache.index.segment_loaded(inode, at, end).await?;
            let seq = match seg.kind {
                Kind::Hit { .. } => Some(cache.index.change(inode, at, seg.end, None, How::Journaled).await?),
                // What made the hole may be on its way still.
                Kind::Hole { seq, .. } if !bug(Bug::HoleTakenForDurable) => seq,
                Kind::Hole { .. } => None,
            };
            newest = newest.max(seq.unwrap_or_default());
            at = seg.end;
        }
        Ok(newest)
    }

    /// Step 4: the data that replaces dirty data is made durable, then the dirty keys go.
    async fn drop_dirty(
        &self,
        cache: &Cache,
        inode: Inode,
        start: Sector,
        end: Sector,
        fua: bool,
    ) -> Result<(), EngineError> {
        let Some(backing) = self.backing() else { return Ok(()) };
        if !bug(Bug::DirtyDroppedBeforeFlush) {
            backing.settle_direct_writes().await?;
        }
        let newest = self.drop_mapped(cache, inode, start, end).await?;
        if fua {
            cache.journal.commit(newest).await?;
        }
        self.writeback.progress.notify_all();
        Ok(())
    }

    /// Step 2: no clean copy of the range can come back after this, neither from its own key nor from behind dirty
    /// keys: those are durable before the backing device changes.
    async fn forget_clean(
        &self,
        cache: &Cache,
        inode: Inode,
        start: Sector,
        end: Sector,
    ) -> Result<(), EngineError> {
        let mut newest = JournalSeq(0);
        let mut over_dirty = false;
        let mut at = start;
        while at < end {
            cache.device.check()?;
            let seg = cache.index.segment_loaded(inode, at, end).await?;
            let how = match seg.kind {
                Kind::Hit { dirty: true, .. } => {
                    over_dirty = true;
                    None
                }
                Kind::Hit { may_be_durable: true, .. } => Some(How::Journaled),
                Kind::Hit { .. } => Some(How::LeafOnly(cache.device.gate().latest())),
                Kind::Hole { seq, .. } => {
                    newest = newest.max(seq.unwrap_or(JournalSeq(0)));
                    None
                }
            };
            let Some(how) = how else {
                at = seg.end;
                continue;
            };
            match cache.index.try_change(inode, at, seg.end, None, how) {
                Ok((done, seq)) => {
                    newest = newest.max(seq);
                    at = done;
                }
                Err(blocked) => cache.index.unblock(blocked).await?,
            }
        }
        if !bug(Bug::HoleNotDurable) {
            cache.journal.commit(newest).await?;
        }
        if over_dirty && !bug(Bug::DirectBeforeDirtyKey) {
            cache.journal.commit_keys().await?;
        }
        // A copy whose bucket was invalidated is no hit any more, but comes back if the new generation is lost.
        if !bug(Bug::GenerationsNotAwaited) {
            cache.alloc.generations_durable(|| cache.device.is_failed()).await;
        }
        cache.device.check()
    }

    /// Discards or zeroes a range of a device that has no cache.
    pub(super) async fn remove_uncached(
        self: &Rc<Self>,
        start: Sector,
        sectors: Sectors,
        op: &Direct,
    ) -> Result<(), VolumeError> {
        let Some(backing) = self.backing() else { return Err(VolumeError::Stopped(self.name())) };
        let block = u64::from(backing.disk.info().logical_block_bytes / 512).max(1);
        let end = start + sectors;
        let (first, last) = (Sector(start.0.next_multiple_of(block)), Sector(end.0 / block * block));
        if let Direct::Zeroes { fua } = op {
            let edges = if first < last { [(start, first), (last, end)] } else { [(start, end), (end, end)] };
            for (a, b) in edges.into_iter().filter(|(a, b)| a < b) {
                let zeros = self.rt.pool().zeroed((b - a).bytes() as usize);
                self.write_uncached(a, b - a, zeros, 0, *fua).await?;
            }
        }
        if first >= last {
            return Ok(());
        }
        let _range = self.ranges.change(first, last).await;
        self.ranges.writeback_done(first, last).await;
        match op {
            Direct::Zeroes { fua } => {
                backing.disk.write_zeroes(first, last - first).await?;
                backing.wrote_directly();
                if *fua {
                    backing.settle_direct_writes().await?;
                }
            }
            _ if backing.disk.info().discard => {
                // Advice: a device that refuses it has done nothing.
                let _ = backing.disk.discard(first, last - first).await;
                backing.wrote_directly();
            }
            _ => {}
        }
        Ok(())
    }
}
