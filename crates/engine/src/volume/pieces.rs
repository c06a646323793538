//! Reads of several pieces: those that the index has, from the cache, and the others, from the backing device.
//!
//! All pieces are read at the same time. Every missing piece is inserted into the cache by a background task, for which the
//! answer does not wait (`miss`).
//!
//! Owns the pieces of a request, from the look-up to their data in the buffer. Must not know how a missing piece is
//! inserted.

use std::future::{Future, poll_fn};
use std::pin::Pin;

use io::sync::join_all;
use io::{Buffer, Completion, Handle, IoError, Nanos};

use super::backing::{flush_has_failed, is_usable, read_directly, start_aligned};
use super::hit::{
    CachedExtent, ReadData, ReadStart, ReadTimes, bytes_of_mut, hit_ended, start_hit, verify_and_accept,
};
use super::miss::{Missed, insert_miss};
use super::request::Read;
use super::{RangeGuard, Target, Volume};
use crate::canary::{Bug, bug};
use crate::device::{MeteredIo, ReadEpoch};
use crate::error::EngineError;
use crate::index::{IndexSegment, Kind, NotLoaded};
use crate::policy::bypass::Decision;
use crate::refusal::Refusal;
use crate::stats::Outcome;

/// The beginning of a request in the index, as just looked up.
#[derive(Clone, Copy)]
pub(super) struct LookUp {
    /// The extent or hole at the beginning of the request.
    pub(super) first: IndexSegment,
    /// The epoch of the look-up.
    pub(super) epoch: ReadEpoch,
}

/// A part of a request that is one extent of the cache, or a hole.
#[derive(Clone, Copy)]
struct ReadPiece {
    part: Read,
    /// The extent of the cache; `None` for a hole.
    hit: Option<CachedExtent>,
}

/// A piece whose read was started.
struct Reading {
    piece: ReadPiece,
    /// Bytes in the buffer of the request before the first sector of the piece (a device block can be larger than the alignment
    /// of the piece).
    skip_bytes: usize,
    miss: Option<RangeGuard>,
}

/// Splits a request into the extents and holes of the index; adjacent holes become one piece. `first`: the extent or
/// hole at the beginning of the request, as just looked up. Returns also false if a change overlapped the request while the
/// look-ups waited for a leaf: the pieces may be of different moments then, so no miss may be inserted.
async fn pieces(
    target: Target<'_>,
    read: &Read,
    first: IndexSegment,
) -> Result<(Vec<ReadPiece>, bool), EngineError> {
    let Target { volume, cache, inode } = target;
    let mut pieces: Vec<ReadPiece> = Vec::new();
    let mut waited: Option<RangeGuard> = None;
    let (mut at, mut seg) = (read.start, first);
    loop {
        let hit = match seg.kind {
            Kind::Hit { ptr, dirty, .. } if is_usable(volume, seg.kind) => Some(CachedExtent { ptr, dirty }),
            Kind::Hit { .. } | Kind::Hole { .. } => None,
        };
        match pieces.last_mut() {
            Some(last) if last.hit.is_none() && hit.is_none() => last.part.end = seg.end,
            _ => pieces.push(ReadPiece { part: read.part(at, seg.end), hit }),
        }
        at = seg.end;
        if at >= read.end {
            let unchanged = waited.is_none_or(|range| range.is_valid());
            return Ok((pieces, unchanged || bug(Bug::ChangeDuringLookUpUnnoticed)));
        }
        seg = loop {
            match cache.index.segment(inode, at, read.end) {
                Ok(seg) => break seg,
                Err(NotLoaded(leaf)) => {
                    waited.get_or_insert_with(|| volume.ranges.hold_for_miss(read.start, read.end));
                    cache.index.load_leaf(leaf).await?;
                }
            }
        };
    }
}

/// Reads a request that is not one extent of the cache. Returns how much of the request the cache had, or `None` if the
/// request must look up and read again.
pub(super) async fn read_parts(
    target: Target<'_>,
    read: &Read,
    look_up: LookUp,
    mut buffer: Buffer,
) -> (Buffer, Result<Option<Outcome>, EngineError>) {
    let Target { volume, cache, inode } = target;
    let LookUp { first, epoch } = look_up;
    let caches = read.inserts
        && volume.backing().is_some()
        && read.decision == Decision::Cache
        && !cache.device.is_stopping();
    let (pieces, unchanged) = match pieces(target, read, first).await {
        Ok(found) => found,
        Err(e) => return (buffer, Err(e)),
    };
    // The look-ups may have waited, and the slot may be that of another volume now.
    if !volume.links.is_as(cache, inode) && !bug(Bug::ReadOutlastsDetach) {
        return (buffer, Ok(None));
    }
    let hits = pieces.iter().filter(|p| p.hit.is_some()).count();
    let found = match hits {
        0 => Outcome::Miss,
        _ if hits == pieces.len() => Outcome::Hit,
        _ => Outcome::Partial,
    };
    let began = Began { cache: ReadStart::now(target, epoch), flush_failed: flush_has_failed(volume) };
    let (readings, requests) = start_pieces(target, pieces, caches && unchanged);
    if volume.backing().is_none() && found != Outcome::Hit {
        // Nothing is read for the holes of a flash-only volume.
        bytes_of_mut(&mut buffer, read.offset_bytes, read.sectors()).fill(0);
    }
    let answers = join_all(requests.into_iter().map(|io| timed(io, &volume.rt))).await;
    let mut outcome = Ok(true);
    for (reading, answer) in readings.into_iter().zip(answers) {
        let (b, result) = end_piece(target, reading, answer, began, buffer).await;
        buffer = b;
        outcome = outcome.and_then(|whole| result.map(|valid| whole && valid));
    }
    let is_valid = cache.device.read_epoch() == epoch;
    (buffer, outcome.map(|whole| (whole && is_valid).then_some(found)))
}

/// The moment at which the reads of the pieces began.
#[derive(Clone, Copy)]
struct Began {
    cache: ReadStart,
    /// Whether the backing device had failed a flush.
    flush_failed: bool,
}

/// Starts the reads of all pieces, except the holes of a flash-only volume. If `caches` is set, missing pieces get a miss
/// range, so that they can be inserted into the cache.
fn start_pieces(target: Target<'_>, pieces: Vec<ReadPiece>, caches: bool) -> (Vec<Reading>, Vec<MeteredIo>) {
    let Target { volume, cache, .. } = target;
    let start_piece = |piece: ReadPiece| {
        let part = &piece.part;
        let is_missing = caches && piece.hit.is_none();
        let miss = is_missing.then(|| volume.ranges.hold_for_miss(part.start, part.end));
        let (request, skip_bytes) = match piece.hit {
            Some(extent) => start_hit(cache, extent, part.sectors()),
            None => start_aligned(&*volume.backing()?, part.start, part.sectors()),
        };
        Some((Reading { piece, skip_bytes, miss }, request))
    };
    pieces.into_iter().filter_map(start_piece).unzip()
}

/// The answer of a device to the read of a piece.
struct Answer {
    completion: Completion,
    ended: Nanos,
}

/// A request, and the time at which the device answered: the answer is polled at once, also beside a slower request.
fn timed<'r>(mut io: MeteredIo, rt: &'r Handle) -> impl Future<Output = Answer> + Unpin + 'r {
    poll_fn(move |cx| {
        let done = Pin::new(&mut io).poll(cx);
        done.map(|completion| Answer { completion, ended: rt.turn_time() })
    })
}

/// Puts the data of a piece into the buffer of the request, and the data of a missing piece into the cache. Returns false if
/// the request must look up and read again.
async fn end_piece(
    target: Target<'_>,
    reading: Reading,
    answer: Answer,
    began: Began,
    mut buffer: Buffer,
) -> (Buffer, Result<bool, EngineError>) {
    let Reading { piece: ReadPiece { part, hit }, skip_bytes, miss } = reading;
    let Answer { completion, ended } = answer;
    let volume = target.volume;
    let is_read = match hit {
        Some(extent) => hit_ended(target, extent, completion.result),
        None => missing_ended(volume, completion.result).map(|()| true),
    };
    let blocks = match (is_read, completion.buffer) {
        (Ok(true), Some(blocks)) => blocks,
        (Ok(true), None) => return (buffer, Err(Refusal::Closed.into())),
        (Ok(false), _) => {
            let (buffer, result) =
                read_directly(volume, part.start, part.sectors(), buffer, part.offset_bytes).await;
            return (buffer, result.map(|()| true).map_err(EngineError::from));
        }
        (Err(e), _) => return (buffer, Err(e)),
    };
    let data = ReadData { blocks: blocks.as_slice(), skip_bytes, sectors: part.sectors() };
    bytes_of_mut(&mut buffer, part.offset_bytes, part.sectors()).copy_from_slice(data.bytes());
    let accepted = match (hit, miss) {
        (Some(extent), _) => {
            let times = ReadTimes { began: &began.cache, ended };
            verify_and_accept(target, &part, extent, times, data).await
        }
        (None, Some(range)) => {
            let (start, end, flush_failed) = (part.start, part.end, began.flush_failed);
            let missed = Missed { start, end, data: blocks, skip: skip_bytes, range, flush_failed };
            insert_miss(target, missed, part.meta);
            Ok(true)
        }
        (None, None) => Ok(true),
    };
    (buffer, accepted)
}

/// Records how the read of a missing piece from the backing device ended.
fn missing_ended(volume: &Volume, result: Result<(), IoError>) -> Result<(), EngineError> {
    if let (Err(e), Some(backing)) = (&result, volume.backing()) {
        backing.failed(e, volume.tunables.borrow().io_error_limit);
    }
    result.map_err(EngineError::from)
}
