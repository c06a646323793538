//! Scrub: reads all live data in the cache, and compares it with its checksums.
//!
//! Owns the order of the walk, its speed, and the report. The walk goes over the buckets in the order of the device. A survey of
//! the index finds the live extents of some buckets at a time (`survey`). The blocks of each bucket are read, as far as
//! they are live:
//!
//! * a block that does not match its checksum is damaged. Clean data is invalidated, dirty data is listed, as at every other
//!   read;
//! * a block without a known checksum gets that of the data that was read, unless the block was overwritten meanwhile. When all
//!   blocks of the bucket are read, its footer is written, so that these blocks are verified from then on.
//!
//! A scrub yields to clients: it takes a share of the time, which is smaller the more clients wait (`policy::yielding`), and
//! reads at most `scrub_rate` bytes in a second. The superblock has the bucket with which an unfinished scrub continues after a
//! restart, and the time at which the last one ended.
//!
//! Must not know how a footer is written.

mod damaged;
mod survey;

use std::cell::{Cell, OnceCell};
use std::rc::Rc;

use format::{BucketNr, Gen, Inode, Ptr, ScrubState, Sector, Sectors};
use io::sync::{Either, Event, Mutex, select};
use io::{Buffer, Nanos};

pub use self::damaged::DamagedRange;
pub(crate) use self::damaged::{damaged_buckets, damaged_ranges, resolve};
use self::survey::{FoundExtent, Group, group_of, next_group, survey};
use crate::data::{ReadSum, ReadToken, Verdict};
use crate::error::EngineError;
use crate::events::SetEvent;
use crate::policy::yielding::{self, Pressure};
use crate::refusal::Refusal;
pub use crate::stats::ScrubReport;
use crate::volume::{Blocks, Cache, CachedPiece, Found, Owner, Volume, found_damaged};

/// The largest read, so that a request of a client waits for a short time only.
const MOST_READ: Sectors = Sectors(1024);
/// Dead data of up to this size is read, because one request is cheaper than two.
const MOST_GAP: Sectors = Sectors(64);
/// How often an extent is read again that was overwritten or moved during its read.
const TRIES: u32 = 3;
/// The number of times that a whole scrub stores in the superblock how far it has come.
const STORED_TIMES: u32 = 16;
/// How often the schedule is checked.
const CHECK_INTERVAL: Nanos = Nanos::from_secs(3600);
/// The time after the start before a scrub that is due begins, so that it does not slow the start of the clients down.
const AFTER_START: Nanos = Nanos::from_secs(600);
const SECONDS_OF_A_DAY: u64 = 86_400;

/// Looks up the registered volume of a slot.
type VolumeOf = Box<dyn Fn(Inode) -> Option<Rc<Volume>>>;

/// The scrubs of a set, and the decisions about damaged data.
pub(crate) struct Scrubber {
    cache: Rc<Cache>,
    volume_of: OnceCell<VolumeOf>,
    /// Held during a scrub: there is one at a time.
    lock: Mutex,
    running: Cell<bool>,
    /// The live data that the scrub has passed, and all of it at the begin.
    progress: Cell<(Sectors, Sectors)>,
    stopping: Cell<bool>,
    /// Wakes a pause.
    wake: Event,
    last: Cell<ScrubReport>,
}

impl Scrubber {
    pub(crate) fn new(cache: Rc<Cache>) -> Scrubber {
        Scrubber {
            cache,
            volume_of: OnceCell::new(),
            lock: Mutex::default(),
            running: Cell::new(false),
            progress: Cell::default(),
            stopping: Cell::new(false),
            wake: Event::default(),
            last: Cell::default(),
        }
    }

    /// Sets the function that looks up volumes. Called once, before the first scrub.
    pub(crate) fn set_volumes(&self, volume_of: impl Fn(Inode) -> Option<Rc<Volume>> + 'static) {
        assert!(self.volume_of.set(Box::new(volume_of)).is_ok(), "a set is assembled once");
    }

    /// The registered volume of a slot.
    fn volume_of(&self, inode: Inode) -> Option<Rc<Volume>> {
        self.volume_of.get().and_then(|volume_of| volume_of(inode))
    }

    /// Wakes the pauses of the scrub and of its schedule, so that they check whether the set is stopping or has failed.
    pub(crate) fn kick(&self) {
        self.wake.notify_all();
    }

    /// Ends the scrub under way, because the set is being stopped.
    pub(crate) fn stop(&self) {
        self.stopping.set(true);
        self.wake.notify_all();
    }
}

/// The scrubs of a set.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ScrubFigures {
    /// Whether a scrub is under way.
    pub running: bool,
    /// The live data that it has passed, or at its end had passed.
    pub done: Sectors,
    /// The live data at its begin.
    pub total: Sectors,
    /// The time at which the last complete scrub ended, in Unix seconds; `None` if there was none.
    pub completed_unix_seconds: Option<u64>,
    /// Whether an unfinished scrub is to continue.
    pub is_unfinished: bool,
    /// What the scrub under way, or the last one since the start, has found.
    pub report: ScrubReport,
}

impl ScrubFigures {
    pub(crate) fn of(s: &Scrubber) -> ScrubFigures {
        let state = s.cache.device.superblock().scrub_state();
        let (done, total) = s.progress.get();
        let completed = state.completed_unix_seconds;
        ScrubFigures {
            running: s.running.get(),
            done,
            total,
            completed_unix_seconds: (completed > 0).then_some(completed),
            is_unfinished: state.next > BucketNr(0),
            report: s.last.get(),
        }
    }
}

/// Tells the task of a scrub that its caller was dropped.
#[derive(Default)]
struct ScrubCancelled {
    is_cancelled: Cell<bool>,
}

/// Sets the flag when the future of the caller is dropped.
struct ScrubRequest(Rc<ScrubCancelled>, Rc<Scrubber>);

impl Drop for ScrubRequest {
    fn drop(&mut self) {
        self.0.is_cancelled.set(true);
        self.1.wake.notify_all();
    }
}

/// Reads all live data in the cache and compares it with its checksums: see the module head. Begins where an unfinished scrub
/// has ended. Dropping the future cancels the scrub, and a later one continues there.
///
/// # Errors
/// If the set has no checksums, or fails or is stopped.
pub(crate) async fn scrub(scrubber: &Rc<Scrubber>) -> Result<ScrubReport, EngineError> {
    in_task(scrubber, async |scrub| scrub.run().await).await
}

/// Reads the live data of these buckets and compares it with its checksums, so that damage which was known before a restart is
/// known again. This is no scrub for the schedule and the report. Dropping the future cancels it.
///
/// # Errors
/// If the set has no checksums, or fails or is stopped.
pub(crate) async fn read_again(scrubber: &Rc<Scrubber>, buckets: Vec<BucketNr>) -> Result<(), EngineError> {
    in_task(scrubber, async move |scrub: Scrub<'_>| {
        let group = group_of(&scrub.scrubber.cache, &buckets);
        Scrub { is_scrub: false, ..scrub }.group(&group).await
    })
    .await
}

/// Does work as a task of its own, which ends only after its requests. One such task runs at a time. Dropping the future cancels
/// the work.
async fn in_task<T: 'static>(
    scrubber: &Rc<Scrubber>,
    work: impl AsyncFnOnce(Scrub<'_>) -> Result<T, EngineError> + 'static,
) -> Result<T, EngineError> {
    if !scrubber.cache.data.has_checksums() {
        return Err(Refusal::NoChecksums { device: scrubber.cache.device.place().device.clone() }.into());
    }
    let cancelled = Rc::new(ScrubCancelled::default());
    let _request = ScrubRequest(cancelled.clone(), scrubber.clone());
    let theirs = scrubber.clone();
    let task = scrubber.cache.rt.spawn(async move {
        let _one = theirs.lock.lock().await;
        let _background = theirs.cache.tasks.begin();
        work(Scrub::new(&theirs, cancelled)).await
    });
    task.await
}

/// Scrubs the set whenever that is due.
pub(crate) async fn scrub_task(scrubber: Rc<Scrubber>) {
    let wait = async |span| {
        let is_ending = || scrubber.stopping.get() || scrubber.cache.device.is_stopping();
        let stopping = std::pin::pin!(scrubber.wake.wait_until(is_ending));
        matches!(select(stopping, scrubber.cache.rt.sleep(span)).await, Either::Right(()))
    };
    let mut goes_on = wait(AFTER_START).await;
    while goes_on && !scrubber.cache.device.is_stopping() {
        if is_due(&scrubber) {
            // An error of the device is reported by its own event, and the next check tries again.
            drop(scrub(&scrubber).await);
        }
        goes_on = wait(CHECK_INTERVAL).await;
    }
}

/// Whether an unfinished scrub is to continue, also one that was cancelled, or the last complete one is old enough. A set that was
/// never scrubbed is due.
fn is_due(scrubber: &Scrubber) -> bool {
    let cache = &scrubber.cache;
    let days = u64::from(cache.tunables.borrow().scrub_interval_days);
    if days == 0 {
        return false;
    }
    let state = cache.device.superblock().scrub_state();
    let age = cache.rt.wall_seconds().saturating_sub(state.completed_unix_seconds);
    state.next > BucketNr(0) || age >= days * SECONDS_OF_A_DAY
}

/// A scrub that is under way.
struct Scrub<'a> {
    scrubber: &'a Rc<Scrubber>,
    cancelled: Rc<ScrubCancelled>,
    report: ScrubReport,
    /// The bucket that comes next.
    next: BucketNr,
    /// Whether blocks without a checksum get one, and the progress and the report are shown. A block that was damaged before a
    /// restart must not get the checksum of the damage.
    is_scrub: bool,
}

/// Some extents that are read with one request.
struct ScrubRead<'a> {
    extents: &'a [FoundExtent],
    /// The first block on the device, and the sectors of the read.
    at: Sector,
    sectors: Sectors,
}

/// Data that the scrub has read.
struct ScrubData<'b> {
    /// The place of the data.
    at: Ptr,
    buffer: &'b Buffer,
    /// Taken before the read.
    began: ReadToken,
}

impl<'a> Scrub<'a> {
    fn new(scrubber: &'a Rc<Scrubber>, cancelled: Rc<ScrubCancelled>) -> Scrub<'a> {
        Scrub { scrubber, cancelled, report: ScrubReport::default(), next: BucketNr(0), is_scrub: true }
    }

    async fn run(mut self) -> Result<ScrubReport, EngineError> {
        let scrubber = self.scrubber;
        scrubber.running.set(true);
        let result = self.walk().await;
        scrubber.running.set(false);
        scrubber.last.set(self.report);
        if result.is_ok() {
            self.next = BucketNr(0);
            scrubber.cache.device.emit(SetEvent::Scrubbed { report: self.report });
        }
        let stored = self.store(result.is_ok()).await;
        result.and(stored).map(|()| self.report)
    }

    fn check(&self) -> Result<(), EngineError> {
        let cache = &self.scrubber.cache;
        cache.device.check()?;
        if self.is_ending() {
            return Err(Refusal::Cancelled.into());
        }
        Ok(())
    }

    fn is_ending(&self) -> bool {
        let (scrubber, device) = (self.scrubber, &self.scrubber.cache.device);
        self.cancelled.is_cancelled.get() || scrubber.stopping.get() || device.is_stopping()
    }

    /// Reads the buckets from the first one that is not scrubbed yet.
    async fn walk(&mut self) -> Result<(), EngineError> {
        let (cache, scrubber) = (&self.scrubber.cache, self.scrubber);
        self.next = cache.device.superblock().scrub_state().next;
        let all = cache.alloc.buckets().len();
        let total = cache.alloc.buckets().live_total();
        let first = Sectors(total.0 * u64::from(self.next.0) / u64::from(all.max(1)));
        scrubber.progress.set((first.min(total), total));
        let mut stored = self.next.0;
        while self.next.0 < all {
            self.check()?;
            let group = next_group(cache, self.next);
            let extents = survey(cache, &group).await?;
            for &(bucket, generation) in &group.buckets {
                self.check()?;
                self.bucket(generation, extents_of(cache, &extents, bucket)).await?;
                self.next = BucketNr(bucket.0 + 1);
                if self.next.0 - stored >= (all / STORED_TIMES).max(1) {
                    stored = self.next.0;
                    self.store(false).await?;
                }
            }
            self.next = group.end;
        }
        scrubber.progress.set((total, total));
        Ok(())
    }

    /// Reads the buckets of a group.
    async fn group(&mut self, group: &Group) -> Result<(), EngineError> {
        let cache = &self.scrubber.cache;
        let extents = survey(cache, group).await?;
        for &(bucket, generation) in &group.buckets {
            self.check()?;
            self.bucket(generation, extents_of(cache, &extents, bucket)).await?;
        }
        Ok(())
    }

    /// Stores how far the scrub has come.
    async fn store(&self, is_complete: bool) -> Result<(), EngineError> {
        let cache = &self.scrubber.cache;
        if cache.device.check().is_err() {
            return Ok(());
        }
        let _config = cache.uuids.lock().await;
        let before = cache.device.superblock().scrub_state();
        let completed_unix_seconds = match is_complete {
            true => cache.rt.wall_seconds(),
            false => before.completed_unix_seconds,
        };
        let state = ScrubState { completed_unix_seconds, next: self.next };
        if state == before {
            return Ok(());
        }
        // The footers of the buckets that the scrub has passed are durable before it counts as having passed them.
        cache.device.flush_all().await?;
        cache.device.change_superblock(|sb| sb.set_scrub_state(state));
        cache.device.write_superblock().await
    }

    /// Reads the live extents of one bucket.
    async fn bucket(&mut self, generation: Gen, extents: &[FoundExtent]) -> Result<(), EngineError> {
        let scrubber = self.scrubber;
        let mut found = Vec::new();
        let mut rest = extents;
        while let Some(chunk) = first_chunk(rest, scrubber.cache.geometry.block_sectors) {
            self.check()?;
            rest = rest.get(chunk.extents.len()..).unwrap_or_default();
            let began = scrubber.cache.rt.now();
            self.chunk(generation, &chunk, &mut found).await?;
            if self.is_scrub {
                let live: Sectors = chunk.extents.iter().fold(Sectors::ZERO, |sum, e| sum + e.size);
                let (done, total) = scrubber.progress.get();
                scrubber.progress.set(((done + live).min(total), total));
                scrubber.last.set(self.report);
            }
            self.pause(scrubber.cache.rt.now().since(began), chunk.sectors).await;
        }
        let unknown = found.len() as u64;
        // The device counts a footer that cannot be written. The scrub continues, because the buckets behind may have damage.
        let learnt = if self.is_scrub { scrubber.cache.data.learn(&found, false).await } else { Ok(0) };
        let new = learnt.unwrap_or(0);
        scrubber.cache.data.count_learnt(new);
        self.report.learnt_blocks += new;
        self.report.unverified_blocks += unknown.saturating_sub(new);
        Ok(())
    }

    /// Reads a chunk and compares its blocks. Blocks without a known checksum are added to `found`.
    async fn chunk(
        &mut self,
        generation: Gen,
        chunk: &ScrubRead<'_>,
        found: &mut Vec<ReadSum>,
    ) -> Result<(), EngineError> {
        let cache = &self.scrubber.cache;
        let began = cache.data.read_token();
        let at = Ptr::new(0, chunk.at, generation);
        let Some(buffer) = self.read(at, chunk.sectors).await else { return Ok(()) };
        for extent in chunk.extents {
            if !self.extent(extent, &ScrubData { at, buffer: &buffer, began }, found).await? {
                self.again(extent, found).await?;
            }
        }
        Ok(())
    }

    /// Reads a part of a bucket. Returns nothing if the bucket was reused, or the device fails the request.
    async fn read(&mut self, at: Ptr, sectors: Sectors) -> Option<Buffer> {
        let cache = &self.scrubber.cache;
        if !cache.alloc.buckets().is_current(at) {
            return None;
        }
        let buffer = cache.rt.pool().take(sectors.bytes() as usize);
        let done = cache.data.read(at.offset(), sectors, buffer, 0).await;
        cache.device.observe_data(&done.result);
        if done.result.is_err() {
            self.report.unreadable_blocks += sectors.0 / cache.geometry.block_sectors.0.max(1);
            return None;
        }
        done.buffer.filter(|_| cache.alloc.buckets().is_current(at))
    }

    /// Reads an extent again, alone, because it was overwritten or moved during its read.
    async fn again(&mut self, extent: &FoundExtent, found: &mut Vec<ReadSum>) -> Result<(), EngineError> {
        let cache = &self.scrubber.cache;
        let blocks = whole(extent, cache.geometry.block_sectors);
        let at = extent.ptr.rewound(extent.ptr.offset() - blocks.start);
        for _ in 0..TRIES {
            let began = cache.data.read_token();
            let Some(buffer) = self.read(at, blocks.end - blocks.start).await else { return Ok(()) };
            if self.extent(extent, &ScrubData { at, buffer: &buffer, began }, found).await? {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Compares the blocks of an extent in data that was read. Returns false if the extent must be read again.
    async fn extent(
        &mut self,
        extent: &FoundExtent,
        data: &ScrubData<'_>,
        found: &mut Vec<ReadSum>,
    ) -> Result<bool, EngineError> {
        let ScrubData { at, buffer, began } = *data;
        let scrubber = self.scrubber;
        let block = scrubber.cache.geometry.block_sectors;
        let blocks = whole(extent, block);
        let mut from = blocks.start;
        while from < blocks.end {
            let (begin, end) =
                ((from - at.offset()).bytes() as usize, (blocks.end - at.offset()).bytes() as usize);
            let Some(bytes) = buffer.as_slice().get(begin..end) else { return Ok(true) };
            let ptr = at.advanced(from - at.offset());
            let count = (blocks.end - from).0 / block.0.max(1);
            match scrubber.cache.data.verify(ptr, bytes, began).await {
                Verdict::Verified => self.report.verified_blocks += count,
                Verdict::Unverified => {
                    let unknown = self.unknown(ptr, bytes, began, found);
                    self.report.verified_blocks += count.saturating_sub(unknown);
                }
                Verdict::ReadAgain => return Ok(false),
                Verdict::Damaged(mismatch) => {
                    self.report.verified_blocks += mismatch.at.0 / block.0.max(1);
                    let ptr = ptr.advanced(mismatch.at);
                    // The block may begin before the extent.
                    let start =
                        Sector((extent.start.0 + ptr.offset().0).saturating_sub(extent.ptr.offset().0));
                    let volume = scrubber.volume_of(extent.inode);
                    let owner =
                        Owner { volume: volume.as_ref(), cache: &scrubber.cache, inode: extent.inode };
                    match found_damaged(owner, CachedPiece { start, ptr }, mismatch).await? {
                        Found::Replaced => {}
                        Found::Clean => self.report.damaged_clean_blocks += 1,
                        Found::Dirty => self.report.damaged_dirty_blocks += 1,
                    }
                    from = ptr.offset() + block;
                    continue;
                }
            }
            return Ok(true);
        }
        Ok(true)
    }

    /// Adds the blocks without a known checksum to `found`; returns how many there are.
    fn unknown(&self, from: Ptr, bytes: &[u8], began: ReadToken, found: &mut Vec<ReadSum>) -> u64 {
        let cache = &self.scrubber.cache;
        let block = cache.geometry.block_sectors;
        let before = found.len();
        for (n, bytes) in (0..).zip(bytes.chunks_exact(block.bytes() as usize)) {
            let at = from.advanced(Sectors(n * block.0));
            if !cache.data.knows(at) {
                found.push(ReadSum { at, sum: format::checksum::crc32c(bytes), began });
            }
        }
        (found.len() - before) as u64
    }

    /// Pauses after a read that took the time `took`, for the share of the time that is not the scrub's, and for the rate.
    async fn pause(&self, took: Nanos, sectors: Sectors) {
        let cache = &self.scrubber.cache;
        let (share, rate) = {
            let t = cache.tunables.borrow();
            (f64::from(t.scrub_share) / 100.0, t.scrub_rate)
        };
        let pause = yielding::pause(took, share * yielding::share(cache.busiest_share(), &NO_PRESSURE));
        let least = (sectors.bytes().saturating_mul(1_000_000_000).checked_div(rate)).unwrap_or(0);
        let pause = pause.max(Nanos(least.saturating_sub(took.0)));
        if pause == Nanos(0) {
            return cache.rt.yield_now().await;
        }
        let ending = std::pin::pin!(self.scrubber.wake.wait_until(|| self.is_ending()));
        match select(ending, cache.rt.sleep(pause)).await {
            Either::Left(()) | Either::Right(()) => {}
        }
    }
}

/// The pressure on the cache that the pauses of a scrub assume. A scrub makes no room, so it does not run faster in a full cache.
const NO_PRESSURE: Pressure = Pressure { dirty_percent: 0.0, in_use_percent: 0.0, cutoffs: (100, 100) };

/// The extents in a bucket, of extents in the order of the device.
fn extents_of<'a>(cache: &Cache, extents: &'a [FoundExtent], bucket: BucketNr) -> &'a [FoundExtent] {
    let (start, end) =
        (cache.geometry.bucket_start(bucket), cache.geometry.bucket_start(BucketNr(bucket.0 + 1)));
    let from = extents.partition_point(|e| e.ptr.offset() < start);
    let to = extents.partition_point(|e| e.ptr.offset() < end);
    extents.get(from..to).unwrap_or_default()
}

/// The whole blocks on the cache device that an extent touches.
fn whole(extent: &FoundExtent, block: Sectors) -> std::ops::Range<Sector> {
    let start = extent.ptr.offset();
    let (first, last) = Blocks::of_size(block).around((start, start + extent.size));
    first..last
}

/// The first extents that are read with one request.
fn first_chunk(extents: &[FoundExtent], block: Sectors) -> Option<ScrubRead<'_>> {
    let first = whole(extents.first()?, block);
    let mut end = first.end;
    let mut count = 1;
    for next in extents.iter().skip(1) {
        let blocks = whole(next, block);
        if blocks.start.0 > end.0 + MOST_GAP.0 || blocks.end.0 > first.start.0 + MOST_READ.0 {
            break;
        }
        end = end.max(blocks.end);
        count += 1;
    }
    Some(ScrubRead { extents: extents.get(..count)?, at: first.start, sectors: end - first.start })
}

#[cfg(test)]
mod tests {
    use format::Inode;

    use super::*;

    fn extent(at: u64, size: u64) -> FoundExtent {
        let ptr = Ptr::new(0, Sector(at), Gen(1));
        FoundExtent { inode: Inode(1), start: Sector(9), size: Sectors(size), ptr }
    }

    #[test]
    fn extents_that_are_near_each_other_are_read_together() {
        let chunk = |extents: &[FoundExtent]| {
            let c = first_chunk(extents, Sectors(8)).unwrap();
            (c.extents.len(), c.at.0, c.sectors.0)
        };
        assert!(first_chunk(&[], Sectors(8)).is_none());
        assert_eq!(chunk(&[extent(16, 8)]), (1, 16, 8));
        assert_eq!(chunk(&[extent(20, 1), extent(22, 8)]), (2, 16, 16), "whole blocks");
        assert_eq!(chunk(&[extent(16, 8), extent(24 + 64, 8)]), (2, 16, 80));
        assert_eq!(chunk(&[extent(16, 8), extent(24 + 72, 8)]), (1, 16, 8), "a gap");
        assert_eq!(chunk(&[extent(0, 1016), extent(1016, 8)]), (2, 0, 1024));
        assert_eq!(chunk(&[extent(0, 1024), extent(1024, 8)]), (1, 0, 1024), "a long read");
        assert_eq!(chunk(&[extent(0, 4096)]), (1, 0, 4096), "an extent is not divided");
    }
}
