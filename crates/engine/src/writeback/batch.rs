//! One batch of writeback: reads runs of dirty extents, writes them, flushes the backing device, marks the keys clean.
//!
//! A batch does not block writes to the cache: an extent that is overwritten meanwhile stays dirty, because its key has
//! changed. A change that writeback must not overlap holds its range (`volume::ranges`), and the batch skips such
//! ranges.
//!
//! A run with gaps writes to the gaps the data that the backing device has there. So a crash in the middle of the write
//! leaves the gaps unchanged, provided that no other task changes them meanwhile: the run holds its whole range from
//! before the gaps are read until the keys are clean. A clean copy in the cache equals the data on the backing device
//! (contract 9), so a gap may be read from the cache, if the bucket was not reused during the read. A write that makes
//! data in a gap dirty meanwhile goes to the cache alone and does not change the backing device.
//!
//! Gaps of zeros in a sparse file may be holes. They are not written, because they would take room in the file system.
//!
//! If the write of a run with gaps fails, its dirty data is written without the gaps, so that a sector that cannot be
//! read or has no room does not keep other data dirty.

use std::collections::VecDeque;
use std::rc::Rc;

use format::{Inode, Sector, Sectors};
use io::{Buffer, JoinHandle, Nanos};

use super::runs::{Extent, Filling, Run, collect, groups, whole_blocks};
use crate::canary::{Bug, bug};
use crate::data::ReadToken;
use crate::device::BackingDevice;
use crate::error::EngineError;
use crate::index::{Durability, Kind};
use crate::refusal::Refusal;
use crate::volume::{Blocks, Cache};
use crate::volume::{CachedPiece, Mirror, RangeGuard, Volume, damaged_left, end_dirty_copy, heal, is_sound};

/// The limits for the number of runs under way: at least and at most.
const RUNS_AT_ONCE: (usize, usize) = (4, 32);
/// The largest number of sectors of all runs under way; a single run may have more. Runs and their pieces take up to
/// four times as much memory, because the sizes of buffers are powers of two. On a host with swap on a volume this
/// memory must be available in advance (decision 028).
const SECTORS_AT_ONCE: Sectors = Sectors(16384);
/// The number of pieces that a run reads from the cache at the same time.
const READS_AT_ONCE: usize = 32;

/// The result of a run. Its range is released when the guard is dropped.
struct Written {
    cleaned: Vec<Extent>,
    range: (Sector, Sector),
    guard: RangeGuard,
    result: Result<(), EngineError>,
}

/// The result of a batch.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Batch {
    /// The sectors that were written back, including those whose keys had changed meanwhile.
    pub(super) written: Sectors,
    /// The number of dirty extents that were read from the cache device, each by one request.
    pub(super) extents: u32,
}

impl Batch {
    /// The time that the cache device was busy with the batch, by its cost model. It can be longer than the batch: a
    /// device with a limit of requests per second accepts some at once after a pause and then delays the following
    /// ones.
    pub(super) fn cost(&self, cache: &Cache) -> Nanos {
        cache.device.model(|m| {
            if !m.is_known() {
                return Nanos(0);
            }
            let c = m.costs();
            let requests = c.per_request().0.saturating_mul(u64::from(self.extents));
            Nanos(requests.saturating_add(c.transfer(self.written).0))
        })
    }
}

/// Writes back up to `limit` sectors of dirty data.
pub(super) async fn write_back(
    volume: &Rc<Volume>,
    cache: &Rc<Cache>,
    inode: Inode,
    limit: Sectors,
) -> Result<Batch, EngineError> {
    let Some(backing) = volume.backing() else { return Ok(Batch::default()) };
    let epoch = cache.device.read_epoch();
    let mut runs = collect(volume, cache, &backing, inode, limit).await?;
    if runs.is_empty() {
        return only_damaged_left(volume, cache, inode).await.map(|()| Batch::default());
    }
    runs.iter_mut().for_each(|run| run.filling.epoch = epoch);
    // The dirty keys become durable first: a crash that loses them could bring back an older clean key of the range,
    // whose data would be older than that on the backing device (contract 9).
    if !bug(Bug::WritebackBeforeDirtyKey) {
        cache.journal.commit_keys().await?;
    }
    let mirror = volume.mirror();
    if let Some(mirror) = mirror.as_ref().filter(|_| !bug(Bug::WritebackBeforeSecondKey)) {
        mirror.commit_keys().await?;
    }
    let done = write_out(volume, cache, &backing, runs).await;
    let any_cleaned = done.iter().any(|w| !w.cleaned.is_empty());
    if any_cleaned && !bug(Bug::CleanBeforeBackingFlush) {
        // Contract 4: the flush begins after the writes and ends before any key is marked clean.
        let _busy = backing.busy();
        backing.flush_all().await?;
    }
    if let Some(mirror) = mirror.as_ref().filter(|_| any_cleaned && !bug(Bug::SecondCopyOutlivesFirst)) {
        for e in done.iter().flat_map(|w| &w.cleaned) {
            end_dirty_copy(volume.target(cache, inode), mirror, (e.start, e.end()), e.ptr).await?;
        }
        // Otherwise a clean key of the primary could be durable while a dirty one of the secondary is older than the next direct write.
        if !bug(Bug::DroppedCopyNotDurable) {
            mirror.commit_keys().await?;
        }
    }
    let mut batch = Batch::default();
    let mut failed = Vec::new();
    for w in done {
        for e in w.cleaned {
            batch.written += e.size;
            batch.extents = batch.extents.saturating_add(1);
            mark_clean((cache, inode), mirror.as_deref(), &e).await?;
        }
        // Only now may a change go past the cache: an earlier one would find a dirty key, which this batch would then
        // turn into a clean key with old data.
        drop(w.guard);
        failed.extend(w.result.err().map(|e| (w.range, e)));
    }
    let mut result = Ok(batch);
    for (range, e) in failed {
        if let Err(e) = replace_unreadable(volume, cache, range, e).await {
            result = result.and(Err(e));
        }
    }
    result
}

/// Replaces the dirty data of a run by that of the second set, if the cache device could not read it. A later batch writes it back then.
async fn replace_unreadable(
    volume: &Rc<Volume>,
    cache: &Cache,
    range: (Sector, Sector),
    error: EngineError,
) -> Result<(), EngineError> {
    let of_cache = match &error {
        EngineError::Io(e) => e.device == cache.device.place().device,
        other => matches!(other, EngineError::DamagedData { .. }),
    };
    if of_cache && volume.mirror().is_some() && heal(volume, range).await? {
        return Ok(());
    }
    Err(error)
}

/// Fails if a caller waits until nothing is dirty, and all dirty data is damaged.
async fn only_damaged_left(volume: &Rc<Volume>, cache: &Rc<Cache>, inode: Inode) -> Result<(), EngineError> {
    if !volume.writeback().is_draining() && !volume.is_detaching() {
        return Ok(());
    }
    match damaged_left(volume.target(cache, inode)).await? {
        Some((first, left)) if left == cache.index.tree().dirty_sectors(inode) => {
            Err(Refusal::OnlyDamagedLeft { volume: volume.label_or_name(), left, first }.into())
        }
        _ => Ok(()),
    }
}

/// Reads and writes all runs, several at the same time.
async fn write_out(
    volume: &Rc<Volume>,
    cache: &Rc<Cache>,
    backing: &Rc<BackingDevice>,
    runs: Vec<Run>,
) -> Vec<Written> {
    let mut done = Vec::with_capacity(runs.len());
    let mut under_way: VecDeque<(Sectors, JoinHandle<Written>)> = VecDeque::new();
    let mut sectors = Sectors::ZERO;
    for run in runs {
        let size = run.size;
        let most = runs_at_once(volume, backing, size);
        while !has_room(under_way.len(), sectors, size, most)
            && let Some((size, first)) = under_way.pop_front()
        {
            done.push(first.await);
            sectors -= size;
        }
        let (v, c, b) = (volume.clone(), cache.clone(), backing.clone());
        under_way.push_back((size, volume.rt().spawn(async move { write_run(&v, &c, &b, run).await })));
        sectors += size;
    }
    while let Some((_, first)) = under_way.pop_front() {
        done.push(first.await);
    }
    done
}

/// Whether a run of `next` sectors may begin beside `runs` others with `sectors` in total; at most `most` runs may be
/// under way.
fn has_room(runs: usize, sectors: Sectors, next: Sectors, most: usize) -> bool {
    runs == 0 || runs < most && sectors + next <= SECTORS_AT_ONCE
}

/// The number of runs of this size that may be under way: enough to keep the device busy, and few enough that other
/// requests do not wait too long.
fn runs_at_once(volume: &Volume, backing: &BackingDevice, size: Sectors) -> usize {
    let queue_time = Nanos::from_ms(u64::from(volume.settings().writeback_latency_ms));
    let each = backing.model(|m| m.costs().random(size));
    in_time(queue_time, each)
}

/// The number of runs that may be under way if each takes the time `each` and the last one may wait for `queue_time`.
fn in_time(queue_time: Nanos, each: Nanos) -> usize {
    let (least, most) = RUNS_AT_ONCE;
    usize::try_from(queue_time.0 / each.0.max(1)).unwrap_or(most).clamp(least, most)
}

/// Reads and writes one run; if a run with gaps fails, writes it without the gaps.
async fn write_run(volume: &Rc<Volume>, cache: &Rc<Cache>, backing: &Rc<BackingDevice>, run: Run) -> Written {
    let (gaps, range) = (run.gaps(), (run.start, run.start + run.size));
    if gaps > Sectors::ZERO {
        return match write_whole(volume, cache, backing, &run).await {
            Ok(written) => {
                let read = run.filling.disk.map_or(Sectors::ZERO, |(_, size)| size);
                let gaps = gaps - (run.size - written);
                cache.device.counters().count_bridged(read, gaps);
                Written { cleaned: run.extents, range, guard: run.guard, result: Ok(()) }
            }
            // The moving garbage collector has moved a part of the run. A later sweep finds all of it; single writes of
            // its extents would take as long as dozens of runs.
            Err(Failure::Replaced) => {
                Written { cleaned: Vec::new(), range, guard: run.guard, result: Ok(()) }
            }
            Err(why) => {
                // The error counts, although the run is written without its gaps: a gap may be what cannot be read.
                let _ = count_failure(volume, backing, why);
                write_groups(volume, cache, backing, run).await
            }
        };
    }
    match write_whole(volume, cache, backing, &run).await {
        Ok(_) => Written { cleaned: run.extents, range, guard: run.guard, result: Ok(()) },
        Err(e) => Written {
            cleaned: Vec::new(),
            range,
            guard: run.guard,
            result: count_failure(volume, backing, e),
        },
    }
}

/// The reason why a run was not written.
enum Failure {
    /// The data that was read may be wrong: a bucket was reused, or a wipe has passed.
    Replaced,
    /// The cache device failed.
    Cache(EngineError),
    /// The backing device failed.
    Backing(io::IoError),
}

fn count_failure(volume: &Volume, backing: &BackingDevice, why: Failure) -> Result<(), EngineError> {
    match why {
        Failure::Replaced => Ok(()),
        Failure::Cache(e) => Err(e),
        Failure::Backing(e) => {
            backing.failed(&e, volume.settings().io_error_limit);
            Err(e.into())
        }
    }
}

/// Writes the extents of a run without its gaps.
async fn write_groups(
    volume: &Rc<Volume>,
    cache: &Rc<Cache>,
    backing: &Rc<BackingDevice>,
    run: Run,
) -> Written {
    let mut cleaned = Vec::new();
    let mut result = Ok(());
    for extents in groups(&run.extents) {
        let (start, size, around) = whole_blocks(Blocks::of_disk(backing.disk()), &extents);
        let filling = Filling { epoch: run.filling.epoch, ..around.unwrap_or_default() };
        let span = Span { start, size, extents: &extents, filling: &filling };
        match write_span(volume, cache, backing, &span).await {
            Ok(_) => cleaned.extend(extents),
            Err(e) => result = result.and(count_failure(volume, backing, e)),
        }
    }
    Written { cleaned, range: (run.start, run.start + run.size), guard: run.guard, result }
}

async fn write_whole(
    volume: &Rc<Volume>,
    cache: &Rc<Cache>,
    backing: &Rc<BackingDevice>,
    run: &Run,
) -> Result<Sectors, Failure> {
    let span = Span { start: run.start, size: run.size, extents: &run.extents, filling: &run.filling };
    write_span(volume, cache, backing, &span).await
}

/// A range that is written at once: a whole run, or a group of its extents. Each sector is in an extent or in the
/// filling.
struct Span<'a> {
    start: Sector,
    size: Sectors,
    extents: &'a [Extent],
    filling: &'a Filling,
}

/// Reads a span and writes it. Returns the number of sectors that were written. The caller holds the range.
async fn write_span(
    volume: &Rc<Volume>,
    cache: &Rc<Cache>,
    backing: &Rc<BackingDevice>,
    span: &Span<'_>,
) -> Result<Sectors, Failure> {
    let Span { start, size, extents, filling } = *span;
    let offset = |at: Sector| (at - start).bytes() as usize;
    let mut whole = volume.rt().pool().take(size.bytes() as usize);
    let token = cache.data.read_token();
    if let Some((from, sectors)) = filling.disk {
        let spare = whole.len();
        let done = backing.read_for_writeback(from, sectors, whole, offset(from)).await;
        done.result.map_err(Failure::Backing)?;
        whole = done.buffer.unwrap_or_else(|| volume.rt().pool().take(spare));
    }
    whole = match (extents, filling.copies.as_slice(), filling.disk) {
        ([only], [], None) => read_piece(cache, only, whole).await?,
        _ => read_pieces(volume, cache, span, whole).await?,
    };
    // If a bucket was reused during the reads, the buffer has wrong data.
    let usable = filling.copies.iter().chain(extents).all(|p| cache.alloc.buckets().is_current(p.ptr));
    if !usable || cache.device.read_epoch() != filling.epoch {
        return Err(Failure::Replaced);
    }
    if cache.data.has_checksums() && !bug(Bug::WrittenBackUnverified) {
        check_pieces(volume, cache, span, SpanData { bytes: whole.as_slice(), token }).await?;
    }
    // A range that was read as a whole has extents that are not whole blocks of the device.
    if backing.disk().info().sparse && filling.disk != Some((start, size)) {
        let parts = between_holes(start, extents, whole.as_slice());
        if parts.len() > 1 {
            return write_parts(volume, backing, start, &parts, whole.as_slice()).await;
        }
    }
    let done = backing.write_back(start, size, whole).await;
    backing.wrote_back(&done.result);
    done.result.map_err(Failure::Backing)?;
    Ok(size)
}

/// The data of a span as it was read.
struct SpanData<'d> {
    bytes: &'d [u8],
    /// Taken before the first read.
    token: ReadToken,
}

/// Checks the data of a span before it is written to the backing device.
async fn check_pieces(
    volume: &Rc<Volume>,
    cache: &Rc<Cache>,
    span: &Span<'_>,
    whole: SpanData<'_>,
) -> Result<(), Failure> {
    let attached = volume.attached().filter(|(first, _)| Rc::ptr_eq(first, cache));
    let Some((_, inode)) = attached else { return Err(Failure::Replaced) };
    let target = volume.target(cache, inode);
    for e in span.extents.iter().chain(&span.filling.copies) {
        let from = (e.start - span.start).bytes() as usize;
        let data = whole.bytes.get(from..from + e.size.bytes() as usize).unwrap_or_default();
        let piece = CachedPiece { start: e.start, ptr: e.ptr };
        // A later batch leaves damaged data out, and reads the other data again.
        if !matches!(is_sound(target, piece, data, whole.token).await, Ok(true)) {
            return Err(Failure::Replaced);
        }
    }
    let still_valid = span.extents.iter().all(|e| cache.alloc.buckets().is_current(e.ptr));
    if still_valid && cache.device.read_epoch() == span.filling.epoch {
        Ok(())
    } else {
        Err(Failure::Replaced)
    }
}

/// The parts of a range of ascending extents that remain without the gaps of zeros between them. `whole` is the data of
/// the range from `start` on.
fn between_holes(start: Sector, extents: &[Extent], whole: &[u8]) -> Vec<(Sector, Sectors)> {
    let offset = |at: Sector| (at - start).bytes() as usize;
    let is_hole = |from: Sector, to: Sector| {
        let gap = whole.get(offset(from)..offset(to)).unwrap_or_default();
        !gap.is_empty() && gap.chunks(512).all(|sector| sector.iter().fold(0, |any, byte| any | byte) == 0)
    };
    let mut parts: Vec<(Sector, Sectors)> = Vec::new();
    for e in extents {
        match parts.last_mut() {
            Some((from, size)) if !is_hole(*from + *size, e.start) => *size = e.end() - *from,
            _ => parts.push((e.start, e.size)),
        }
    }
    parts
}

/// Writes parts of a range, one after the other; returns the number of sectors that were written.
async fn write_parts(
    volume: &Volume,
    backing: &BackingDevice,
    start: Sector,
    parts: &[(Sector, Sectors)],
    whole: &[u8],
) -> Result<Sectors, Failure> {
    let mut written = Sectors::ZERO;
    for &(from, size) in parts {
        let begin = (from - start).bytes() as usize;
        let buffer = volume.rt().pool().copy_of(&whole[begin..begin + size.bytes() as usize]);
        let done = backing.write_back(from, size, buffer).await;
        backing.wrote_back(&done.result);
        done.result.map_err(Failure::Backing)?;
        written += size;
    }
    Ok(written)
}

/// Reads an extent to the begin of a buffer.
async fn read_piece(cache: &Cache, piece: &Extent, buffer: Buffer) -> Result<Buffer, Failure> {
    let done = cache.data.read(piece.ptr.offset(), piece.size, buffer, 0).await;
    cache.device.observe_data(&done.result);
    done.result.map_err(|e| Failure::Cache(e.into()))?;
    done.buffer.ok_or(Failure::Replaced)
}

/// Reads the extents and the clean copies of a span, each to its place in the buffer of the span.
async fn read_pieces(
    volume: &Volume,
    cache: &Cache,
    span: &Span<'_>,
    mut whole: Buffer,
) -> Result<Buffer, Failure> {
    let pieces: Vec<&Extent> = span.filling.copies.iter().chain(span.extents).collect();
    for some in pieces.chunks(READS_AT_ONCE) {
        let reading: Vec<_> = some
            .iter()
            .map(|p| {
                let buffer = volume.rt().pool().take(p.size.bytes() as usize);
                cache.data.read(p.ptr.offset(), p.size, buffer, 0)
            })
            .collect();
        for (p, future) in some.iter().zip(reading) {
            let done = future.await;
            cache.device.observe_data(&done.result);
            done.result.map_err(|e| Failure::Cache(e.into()))?;
            let piece = done.buffer.ok_or(Failure::Replaced)?;
            let at = (p.start - span.start).bytes() as usize;
            whole.as_mut()[at..at + piece.len()].copy_from_slice(piece.as_slice());
        }
    }
    Ok(whole)
}

/// Marks an extent that was written back as clean, except parts that have changed meanwhile. Parts that the second set keeps as clean
/// data become holes.
async fn mark_clean(
    (cache, inode): (&Rc<Cache>, Inode),
    mirror: Option<&Mirror>,
    extent: &Extent,
) -> Result<(), EngineError> {
    let (mut at, end) = (extent.start, extent.end());
    let mut collided = false;
    while at < end {
        cache.device.check()?;
        let here = extent.ptr.advanced(at - extent.start);
        let blocked = match cache.index.segment(inode, at, end) {
            Err(e) => e.into(),
            Ok(seg) => match seg.kind {
                Kind::Hit { ptr, dirty: true, .. } if ptr == here => {
                    let kept = mirror.map(|mirror| mirror.has_clean((at, seg.end)));
                    let (part, new) = match kept {
                        Some((part, true)) => (part, None),
                        Some((part, false)) => (part, Some((here, false))),
                        None => (seg.end, Some((here, false))),
                    };
                    match cache.index.try_change(inode, at, part, new, Durability::Journaled) {
                        Ok((done, _)) => {
                            at = done;
                            continue;
                        }
                        Err(b) => b,
                    }
                }
                _ => {
                    collided = true;
                    at = seg.end;
                    continue;
                }
            },
        };
        cache.index.unblock(blocked).await?;
    }
    let counters = &mut *cache.device.counters();
    if collided {
        counters.writeback_keys_failed += 1;
    } else {
        counters.writeback_keys_done += 1;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use format::{Gen, Ptr};
    use proptest::prelude::*;

    use super::*;
    use crate::set::SetOptions;
    use crate::testing::{Watching, components, open_set, run};

    /// A batch costs as much as a random request for each extent, and nothing while the costs are unknown.
    #[test]
    fn a_batch_costs_what_its_extents_cost() {
        run(|rt| async move {
            let set = open_set(&Watching::new(16_384), &rt, (16, false), SetOptions::default()).await;
            let cache = components(set, &rt);
            let meter = cache.device.meter();
            let batch = Batch { written: Sectors(3 * 2048), extents: 3 };
            for _ in 0..64 {
                assert_eq!(batch.cost(&cache), Nanos(0));
                let buffer = rt.pool().take(512);
                meter.read(cache.device.disk(), Sector(0), Sectors(1), buffer, 0).await.result.unwrap();
                if meter.model(|m| m.is_known()) {
                    break;
                }
            }
            assert!(meter.model(|m| m.is_known()));
            let one = meter.model(|m| m.costs().random(Sectors(2048)));
            assert!(one > Nanos(1000) && batch.cost(&cache).0.abs_diff(3 * one.0) < 10);
        });
    }

    #[test]
    fn runs_under_way_by_what_each_costs() {
        let runs = |each_us: u64| in_time(Nanos::from_ms(100), Nanos(each_us * 1000));
        assert_eq!([40_000, 25_000, 20_001, 20_000, 3125, 3000, 0].map(runs), [4, 4, 4, 5, 32, 32, 32]);
        assert_eq!(in_time(Nanos(0), Nanos(0)), 4);
        assert_eq!(in_time(Nanos(5), Nanos(0)), 5);
    }

    #[test]
    fn runs_under_way_are_limited_by_their_sectors() {
        let sectors = |n: u64| Sectors(n * 2048);
        assert!(has_room(7, sectors(7), sectors(1), 32) && !has_room(8, sectors(8), Sectors(1), 32));
        assert!(has_room(31, Sectors(31), Sectors(1), 32) && !has_room(32, Sectors(32), Sectors(1), 32));
        assert!(has_room(0, Sectors::ZERO, sectors(100), 4), "one may always begin");
    }

    proptest! {
        /// Everything of a range is written except gaps of zeros, in the smallest number of parts. Dirty zeros are
        /// data.
        #[test]
        fn all_but_holes_is_written(
            pieces in prop::collection::vec((0usize..3, any::<bool>(), 1u64..4, any::<bool>()), 1..9)
        ) {
            let start = Sector(1000);
            let (mut extents, mut whole, mut is_written) = (Vec::new(), Vec::new(), Vec::new());
            for (i, (gap, gap_has_data, size, has_data)) in pieces.into_iter().enumerate() {
                // A run begins with an extent.
                let gap = if i == 0 { 0 } else { gap };
                whole.resize(whole.len() + gap * 512, 0u8);
                if let Some(last) = whole.last_mut().filter(|_| gap > 0) {
                    *last = u8::from(gap_has_data);
                }
                is_written.extend(std::iter::repeat_n(gap_has_data, gap));
                let at = start + Sectors(is_written.len() as u64);
                extents.push(Extent { start: at, size: Sectors(size), ptr: Ptr::new(0, Sector(8), Gen(0)) });
                whole.extend(std::iter::repeat_n(u8::from(has_data), size as usize * 512));
                is_written.extend(std::iter::repeat_n(true, size as usize));
            }
            let mut expected: Vec<(Sector, Sectors)> = Vec::new();
            for (i, written) in is_written.iter().enumerate() {
                let at = start + Sectors(i as u64);
                match expected.last_mut() {
                    Some((from, size)) if *written && *from + *size == at => *size += Sectors(1),
                    _ if *written => expected.push((at, Sectors(1))),
                    _ => {}
                }
            }
            prop_assert_eq!(between_holes(start, &extents, &whole), expected);
        }
    }
}
