//! Reads of a volume.
//!
//! A request that is one extent is read into the caller's buffer without a copy. Any other request is read in pieces
//! (`pieces`). If a bucket was reused during the read, or a wipe has overwritten dead sectors, the whole request looks up and
//! reads again.
//!
//! Owns the path of a read up to its answer. Must not know how a missing piece is inserted.

use format::Sector;
use io::{Buffer, Nanos};

use super::Target;
use super::backing::{flush_has_failed, is_usable, read_settled};
use super::hit::{CachedExtent, ReadData, ReadStart, accept, verify_and_accept};
use super::pieces::{blocks_of_data, read_parts};
use super::request::Read;
use crate::canary::{Bug, bug};
use crate::device::ReadEpoch;
use crate::error::EngineError;
use crate::index::{IndexSegment, Kind, NotLoaded};
use crate::policy::bypass::{BypassReason, Decision};
use crate::stats::{OpKind, Outcome};

/// Reads through the cache.
pub(super) async fn read_cached(
    target: Target<'_>,
    read: &Read,
    mut buffer: Buffer,
) -> (Buffer, Result<(), EngineError>) {
    let Target { volume, cache, inode } = target;
    let (sectors, arrived) = (read.sectors(), volume.rt.turn_time());
    cache.foreground_request();
    let mut waited = false;
    loop {
        if let Err(e) = cache.device.check() {
            return (buffer, Err(e));
        }
        let epoch = cache.device.read_epoch();
        let seg = match cache.index.segment(inode, read.start, read.end) {
            Ok(seg) => seg,
            Err(NotLoaded(id)) => match cache.index.load_leaf(id).await {
                Ok(()) => continue,
                Err(e) => return (buffer, Err(e)),
            },
        };
        if let Some(extent) = whole_extent(target, read, seg) {
            let began = ReadStart::now(target, epoch);
            let spare = buffer.len();
            let done = cache.data.read(extent.ptr.offset(), sectors, buffer, read.offset_bytes).await;
            buffer = done.buffer.unwrap_or_else(|| volume.rt.pool().take(spare));
            cache.device.observe_data(&done.result);
            match done.result {
                Ok(()) => {}
                Err(e) if extent.dirty || volume.backing().is_none() => return (buffer, Err(e.into())),
                // The data is clean, so the backing device has it, too.
                Err(_) => return Box::pin(read_instead(target, read, buffer, arrived)).await,
            }
            let ended = volume.rt.turn_time();
            let data = || ReadData::exact(&buffer, read.offset_bytes, sectors);
            let is_valid = if cache.data.has_checksums() {
                match Box::pin(verify_and_accept(target, read, extent, (&began, ended), data())).await {
                    Ok(is_valid) => is_valid,
                    Err(e) => return (buffer, Err(e)),
                }
            } else {
                accept(target, read, extent, (&began, ended), data)
            };
            if is_valid {
                count_read(target, read, Outcome::Hit, arrived);
                return (buffer, Ok(()));
            }
            cache.device.counters().cache_read_races += 1;
            continue;
        }
        let in_pieces = read_in_pieces(target, read, (seg, epoch), buffer, (arrived, &mut waited));
        let (b, answered) = Box::pin(in_pieces).await;
        buffer = b;
        match answered {
            Ok(true) => return (buffer, Ok(())),
            Ok(false) => {}
            Err(e) => return (buffer, Err(e)),
        }
    }
}

/// Reads a request that is not one extent. After a failed flush it first waits for the operations under way in the range,
/// unless it has `waited` already. Returns false if the request must look up and read again.
async fn read_in_pieces(
    target: Target<'_>,
    read: &Read,
    first: (IndexSegment, ReadEpoch),
    buffer: Buffer,
    (arrived, waited): (Nanos, &mut bool),
) -> (Buffer, Result<bool, EngineError>) {
    let Target { volume, cache, .. } = target;
    let flush_failed = flush_has_failed(volume);
    if flush_failed && !*waited && !bug(Bug::FailedFlushIgnoredByReads) {
        *waited = true;
        volume.ranges.present_ended(read.start, read.end).await;
        return (buffer, Ok(false));
    }
    let (buffer, outcome) = read_parts(target, read, first, buffer).await;
    let is_settled = flush_has_failed(volume) == flush_failed || bug(Bug::FailedFlushIgnoredByReads);
    let found = match outcome {
        Ok(found) => found.filter(|_| is_settled),
        Err(e) => return (buffer, Err(e)),
    };
    match found {
        Some(found) => count_read(target, read, found, arrived),
        None => cache.device.counters().cache_read_races += 1,
    }
    (buffer, Ok(found.is_some()))
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

/// Reads clean data from the backing device after the cache device has failed to read it.
async fn read_instead(
    target: Target<'_>,
    read: &Read,
    buffer: Buffer,
    arrived: Nanos,
) -> (Buffer, Result<(), EngineError>) {
    let (volume, sectors) = (target.volume, read.sectors());
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
    let read = Read { start, end, offset_bytes: 0, meta: false, decision };
    loop {
        cache.device.check()?;
        let epoch = cache.device.read_epoch();
        let first = cache.index.segment_loaded(inode, start, end).await?;
        let (b, outcome) = read_parts(target, &read, (first, epoch), buffer).await;
        buffer = b;
        if outcome?.is_some() {
            return Ok(buffer);
        }
    }
}
