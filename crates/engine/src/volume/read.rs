//! Reads of a volume.
//!
//! A request that is one extent is read into the caller's buffer without a copy. Any other request is read in pieces
//! (`pieces`). If a bucket was reused during the read, or a wipe has overwritten dead sectors, the whole request looks up and
//! reads again. A request whose volume was detached meanwhile reads the backing device: its former slot may have invalid keys, or
//! belong to another volume.
//!
//! Owns the path of a read up to its answer. Must not know how a missing piece is inserted.

use format::Sector;
use io::{Buffer, Nanos};

use super::backing::{flush_has_failed, is_usable, read_settled};
use super::blocks::widened;
use super::hit::{
    CachedExtent, ReadData, ReadStart, ReadTimes, accept, blocks_of_data, hit_ended, verify_and_accept,
};
use super::pieces::{LookUp, read_parts};
use super::request::Read;
use super::{RangeGuard, Target};
use crate::canary::{Bug, bug};
use crate::error::EngineError;
use crate::index::{IndexSegment, Kind, NotLoaded};
use crate::policy::bypass::{BypassReason, Decision};
use crate::refusal::Refusal;
use crate::stats::{OpKind, Outcome};

/// So often a read looks up again before it prevents the causes of that.
///
/// From then on it inserts no missing data: two reads that together need more buckets than can be evicted would evict each other's
/// data for ever. If data has checksums, it also lets no further change of its range begin.
const MOST_RACES: u32 = 3;

/// The state of a read that looks up again.
#[derive(Default)]
struct Again {
    /// The number of times that the data was not that of the look-up.
    races: u32,
    /// Whether the read has waited for the operations that were under way when a flush had failed.
    waited: bool,
    /// Excludes further changes of the range until the read ends: a block with a checksum that is overwritten in place all the time
    /// would delay the read for ever.
    range: Option<RangeGuard>,
}

impl Again {
    /// Prepares the next look-up. Returns false if the volume was detached from the cache.
    fn prepare(&mut self, target: Target<'_>, read: &Read) -> bool {
        let Target { volume, cache, inode } = target;
        if self.races >= MOST_RACES && cache.data.has_checksums() && self.range.is_none() {
            let (start, end) = widened(volume, cache, (read.start, read.end));
            self.range = Some(volume.ranges.exclude_changes(start, end));
        }
        volume.links.is_as(cache, inode) || bug(Bug::ReadOutlastsDetach)
    }
}

/// The time at which a read arrived, and the state of its look-ups.
struct ReadProgress<'a> {
    arrived: Nanos,
    again: &'a mut Option<Box<Again>>,
}

/// Reads through the cache.
pub(super) async fn read_cached(
    target: Target<'_>,
    read: &Read,
    mut buffer: Buffer,
) -> (Buffer, Result<(), EngineError>) {
    let Target { volume, cache, inode } = target;
    let (sectors, arrived) = (read.sectors(), volume.rt.turn_time());
    cache.foreground_request();
    let mut again: Option<Box<Again>> = None;
    loop {
        if let Err(e) = cache.device.check() {
            return (buffer, Err(e));
        }
        let epoch = cache.device.read_epoch();
        let first = cache.index.segment(inode, read.start, read.end);
        let extent = first.ok().and_then(|seg| whole_extent(target, read, seg));
        if let Some(extent) = extent {
            let began = ReadStart::now(target, epoch);
            let done = cache.data.read(extent.ptr.offset(), sectors, buffer, read.offset_bytes).await;
            buffer = done.buffer.unwrap_or_else(|| volume.rt.pool().take(read.end_bytes()));
            match hit_ended(target, extent, done.result) {
                Ok(true) => {}
                Ok(false) => return Box::pin(read_instead(target, read, buffer, arrived)).await,
                Err(e) => return (buffer, Err(e)),
            }
            let ended = volume.rt.turn_time();
            let data = || ReadData::exact(&buffer, read.offset_bytes, sectors);
            let is_valid = if cache.data.has_checksums() {
                let times = ReadTimes { began: &began, ended };
                match Box::pin(verify_and_accept(target, read, extent, times, data())).await {
                    Ok(is_valid) => is_valid,
                    Err(e) => return (buffer, Err(e)),
                }
            } else {
                accept(target, read, extent, ReadTimes { began: &began, ended }, data)
            };
            if is_valid {
                count_read(target, read, Outcome::Hit, arrived);
                return (buffer, Ok(()));
            }
            count_race(target, &mut again);
        } else {
            let first = first.map(|first| LookUp { first, epoch });
            let progress = ReadProgress { arrived, again: &mut again };
            let in_pieces = read_in_pieces(target, read, first, buffer, progress);
            let (b, answered) = Box::pin(in_pieces).await;
            buffer = b;
            match answered {
                Ok(false) => {}
                answered => return (buffer, answered.map(|_| ())),
            }
        }
        if !again.get_or_insert_default().prepare(target, read) {
            return Box::pin(read_instead(target, read, buffer, arrived)).await;
        }
    }
}

/// Counts a look-up that was too old when its data had been read.
#[cold]
fn count_race(target: Target<'_>, again: &mut Option<Box<Again>>) {
    target.cache.device.counters().cache_read_races += 1;
    again.get_or_insert_default().races += 1;
}

/// Reads a request that is not one extent. Returns false if the request must look up (again) and read.
///
/// If the leaf with its beginning is not in memory, the function only loads it. After a failed flush of the backing device it first
/// waits, once, for the operations under way in the parts of the request that are not dirty data.
async fn read_in_pieces(
    target: Target<'_>,
    read: &Read,
    look_up: Result<LookUp, NotLoaded>,
    buffer: Buffer,
    progress: ReadProgress<'_>,
) -> (Buffer, Result<bool, EngineError>) {
    let Target { volume, cache, .. } = target;
    let ReadProgress { arrived, again } = progress;
    let look_up = match look_up {
        Ok(look_up) => look_up,
        Err(NotLoaded(id)) => return (buffer, cache.index.load_leaf(id).await.map(|()| false)),
    };
    let flush_failed = flush_has_failed(volume);
    if flush_failed && !bug(Bug::FailedFlushIgnoredByReads) {
        let again = again.get_or_insert_default();
        if !again.waited {
            again.waited = true;
            // The read must not wait for itself.
            again.range = None;
            let mut at = read.start;
            while let Some((start, end)) = next_part_of_backing(target, read, at) {
                volume.ranges.present_ended(start, end).await;
                at = end;
            }
            return (buffer, Ok(false));
        }
    }
    let races = again.as_ref().map_or(0, |again| again.races);
    let part = Read { inserts: races < MOST_RACES || bug(Bug::ReadsEvictEachOther), ..*read };
    let (buffer, found) = read_parts(target, &part, look_up, buffer).await;
    let is_settled = flush_has_failed(volume) == flush_failed || bug(Bug::FailedFlushIgnoredByReads);
    let found = match found {
        Ok(found) => found.filter(|_| is_settled),
        Err(e) => return (buffer, Err(e)),
    };
    match found {
        Some(found) => count_read(target, read, found, arrived),
        None => count_race(target, again),
    }
    (buffer, Ok(found.is_some()))
}

/// The next part of a request, at or behind `at`, that is not dirty data, so that the backing device has to do with it. A part in a
/// leaf that is not in memory counts as one.
///
/// It is looked up after the wait for the part before, because a part can become dirty data meanwhile. A change of it may then wait
/// for a device that hangs, while the cache alone has what the read needs.
fn next_part_of_backing(target: Target<'_>, read: &Read, from: Sector) -> Option<(Sector, Sector)> {
    let mut at = from;
    while at < read.end {
        let seg = match target.cache.index.segment(target.inode, at, read.end) {
            Ok(seg) => seg,
            Err(NotLoaded(_)) => return Some((at, read.end)),
        };
        if !matches!(seg.kind, Kind::Hit { dirty: true, .. }) || bug(Bug::ReadAwaitsWriteback) {
            return Some((at, seg.end));
        }
        at = seg.end;
    }
    None
}

/// The extent that a request is, if it is one that the device can read without a copy. `first`: what the index has at its
/// beginning.
#[inline]
fn whole_extent(target: Target<'_>, read: &Read, first: IndexSegment) -> Option<CachedExtent> {
    let Kind::Hit { ptr, dirty, .. } = first.kind else { return None };
    let is_whole = first.end == read.end
        && is_usable(target.volume, first.kind)
        && blocks_of_data(target.cache).are_whole(ptr.offset(), read.sectors());
    is_whole.then_some(CachedExtent { ptr, dirty })
}

/// Reads the backing device in place of the cache: the cache device has failed to read clean data, or the volume was detached.
async fn read_instead(
    target: Target<'_>,
    read: &Read,
    buffer: Buffer,
    arrived: Nanos,
) -> (Buffer, Result<(), EngineError>) {
    let (volume, sectors) = (target.volume, read.sectors());
    if let Err(e) = volume.links.refuse_other(target.cache) {
        return (buffer, Err(e));
    }
    let (buffer, result) = read_settled(volume, read.start, sectors, buffer, read.offset_bytes).await;
    if result.is_ok() {
        count_read(target, read, Outcome::Miss, arrived);
    }
    (buffer, result.map_err(EngineError::from))
}

/// Counts a read. `found`: how much of it the cache had.
fn count_read(target: Target<'_>, read: &Read, found: Outcome, arrived: Nanos) {
    let Target { volume, cache, .. } = target;
    let (sectors, decision) = (read.sectors(), read.decision);
    let hit = found == Outcome::Hit;
    let bypassed = matches!(decision, Decision::Bypass(_));
    for stats in [&volume.stats, &cache.stats] {
        let s = &mut *stats.borrow_mut();
        s.read(hit, bypassed);
        if let Decision::Bypass(reason) = decision {
            s.bypassed(reason, sectors);
        }
    }
    let outcome = match decision {
        Decision::Bypass(reason) => Outcome::Bypass(reason),
        Decision::Cache => {
            cache.count_for_aging(sectors);
            found
        }
    };
    volume.answered(OpKind::Read, outcome, sectors, arrived);
}

/// Reads the present content of a range for read-modify-write. It inserts nothing into the cache and counts nothing.
pub(super) async fn read_merged(
    target: Target<'_>,
    start: Sector,
    end: Sector,
) -> Result<Buffer, EngineError> {
    let Target { volume, cache, inode } = target;
    let mut buffer = volume.rt.pool().take((end - start).bytes() as usize);
    let decision = Decision::Bypass(BypassReason::Unaligned);
    let read = Read { start, end, offset_bytes: 0, meta: false, decision, inserts: false };
    loop {
        cache.device.check()?;
        if !volume.links.is_as(cache, inode) {
            // The second set has taken the volume over while this one works: no later look-up here is accepted.
            volume.links.refuse_other(cache)?;
            return Err(Refusal::NotAttached { volume: volume.label_or_name() }.into());
        }
        let epoch = cache.device.read_epoch();
        let first = cache.index.segment_loaded(inode, start, end).await?;
        let (b, outcome) = read_parts(target, &read, LookUp { first, epoch }, buffer).await;
        buffer = b;
        if outcome?.is_some() {
            return Ok(buffer);
        }
    }
}
