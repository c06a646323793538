//! Reads of several pieces: those that the index has, from the cache, and the others, from the backing device. Where the set of the
//! volume has no data, its second set may have clean data (decision 037).
//!
//! All pieces are read at the same time. Every missing piece is inserted into the cache by a background task, for which the
//! answer does not wait (`miss`).
//!
//! Owns the pieces of a request, from the look-up to their data in the buffer. Must not know how a missing piece is
//! inserted.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;

use format::{Inode, Sector};
use io::sync::join_all;
use io::{Buffer, Completion, Handle, IoError, Nanos};

use super::backing::{flush_has_failed, is_usable, read_directly, start_aligned};
use super::hit::{
    CachedExtent, ReadData, ReadStart, ReadTimes, bytes_of_mut, hit_ended, start_hit, verify_and_accept,
};
use super::mirror::{Mirror, Which};
use super::miss::{Missed, insert_miss};
use super::request::Read;
use super::{Cache, RangeGuard, Target, Volume};
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

/// A part of a request that is one extent of a cache, or a hole.
#[derive(Clone, Copy)]
struct ReadPiece {
    part: Read,
    /// The extent, and the set that has it; `None` for a hole.
    hit: Option<(Which, CachedExtent)>,
}

/// A piece whose read was started.
struct Reading {
    piece: ReadPiece,
    /// Bytes in the buffer of the request before the first sector of the piece (a device block can be larger than the alignment
    /// of the piece).
    skip_bytes: usize,
    miss: Option<RangeGuard>,
}

/// The pieces of a request, in ascending order.
struct Pieces<'a> {
    target: Target<'a>,
    read: &'a Read,
    /// The second set of the volume, if it may have clean data.
    second: Option<&'a Mirror>,
    found: Vec<ReadPiece>,
    /// Becomes invalid if a change overlaps the request while the look-ups wait for a leaf.
    waited: Option<RangeGuard>,
}

impl Pieces<'_> {
    /// Adds the part up to `end`.
    fn push(&mut self, (start, end): (Sector, Sector), hit: Option<(Which, CachedExtent)>) {
        match self.found.last_mut() {
            Some(last) if last.hit.is_none() && hit.is_none() => last.part.end = end,
            _ => self.found.push(ReadPiece { part: self.read.part(start, end), hit }),
        }
    }

    /// Looks a part up in one of the sets.
    async fn look_up(
        &mut self,
        (cache, inode): (&Cache, Inode),
        (start, end): (Sector, Sector),
    ) -> Result<IndexSegment, EngineError> {
        loop {
            match cache.index.segment(inode, start, end) {
                Ok(seg) => return Ok(seg),
                Err(NotLoaded(leaf)) => {
                    let (volume, read) = (self.target.volume, self.read);
                    self.waited.get_or_insert_with(|| volume.ranges.hold_for_miss(read.start, read.end));
                    cache.index.load_leaf(leaf).await?;
                }
            }
        }
    }

    /// Adds the parts of a hole of the primary: the secondary may have clean data there.
    async fn push_hole(&mut self, (start, end): (Sector, Sector)) -> Result<(), EngineError> {
        let Some(mirror) = self.second else {
            self.push((start, end), None);
            return Ok(());
        };
        let mut at = start;
        while at < end {
            let part = mirror.end_of_part((at, end));
            if !mirror.keeps_clean(at) {
                self.push((at, part), None);
                at = part;
                continue;
            }
            let Ok(seg) = self.look_up((&mirror.cache, mirror.inode), (at, part)).await else {
                // The secondary cannot read its index. The backing device has the data.
                self.push((at, part), None);
                at = part;
                continue;
            };
            // Dirty data of the secondary is newer than the look-up in the primary.
            let hit = match seg.kind {
                Kind::Hit { ptr, dirty: false, .. } if is_usable(self.target.volume, seg.kind) => {
                    Some((Which::Secondary, CachedExtent { ptr, dirty: false }))
                }
                Kind::Hit { .. } | Kind::Hole { .. } => None,
            };
            self.push((at, seg.end), hit);
            at = seg.end;
        }
        Ok(())
    }
}

/// Splits a request into the extents and holes of the index; adjacent holes become one piece. `first`: the extent or
/// hole at the beginning of the request, as just looked up. Returns also false if a change overlapped the request while the
/// look-ups waited for a leaf: the pieces may be of different moments then, so no miss may be inserted.
async fn pieces(
    target: Target<'_>,
    read: &Read,
    first: IndexSegment,
    second: Option<&Mirror>,
) -> Result<(Vec<ReadPiece>, bool), EngineError> {
    let Target { volume, cache, inode } = target;
    let mut pieces = Pieces { target, read, second, found: Vec::new(), waited: None };
    let (mut at, mut seg) = (read.start, first);
    loop {
        match seg.kind {
            Kind::Hit { ptr, dirty, .. } if is_usable(volume, seg.kind) => {
                pieces.push((at, seg.end), Some((Which::Primary, CachedExtent { ptr, dirty })));
            }
            Kind::Hit { .. } | Kind::Hole { .. } => pieces.push_hole((at, seg.end)).await?,
        }
        at = seg.end;
        if at >= read.end {
            let unchanged = pieces.waited.is_none_or(|range| range.is_valid());
            return Ok((pieces.found, unchanged || bug(Bug::ChangeDuringLookUpUnnoticed)));
        }
        seg = pieces.look_up((cache, inode), (at, read.end)).await?;
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
    let second = second_of(volume);
    let second_epoch = second.as_ref().map(|mirror| mirror.cache.device.read_epoch());
    let caches = read.inserts
        && volume.backing().is_some()
        && read.decision == Decision::Cache
        && !cache.device.is_stopping();
    let (pieces, unchanged) = match pieces(target, read, first, second.as_deref()).await {
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
    let sets = Sets::now((target, epoch), second.as_ref().zip(second_epoch));
    let (readings, requests) = start_pieces(&sets, pieces, caches && unchanged);
    if volume.backing().is_none() && found != Outcome::Hit {
        // Nothing is read for the holes of a flash-only volume.
        bytes_of_mut(&mut buffer, read.offset_bytes, read.sectors()).fill(0);
    }
    let answers = join_all(requests.into_iter().map(|io| timed(io, &volume.rt))).await;
    let mut outcome = Ok(true);
    for (reading, answer) in readings.into_iter().zip(answers) {
        let (b, result) = end_piece(&sets, reading, answer, buffer).await;
        buffer = b;
        outcome = outcome.and_then(|whole| result.map(|valid| whole && valid));
    }
    let is_valid = cache.device.read_epoch() == epoch;
    (buffer, outcome.map(|whole| (whole && is_valid).then_some(found)))
}

/// The second set of a volume, if it may have clean data that can be read.
fn second_of(volume: &Volume) -> Option<Rc<Mirror>> {
    if !volume.links.has_second() {
        return None;
    }
    volume.mirror().filter(|mirror| mirror.may_have_clean() && mirror.cache.device.check().is_ok())
}

/// One of the sets of a volume, and the moment at which the reads of pieces from it began.
#[derive(Clone, Copy)]
struct FromSet<'a> {
    target: Target<'a>,
    began: ReadStart,
}

/// The sets from which pieces are read.
struct Sets<'a> {
    first: FromSet<'a>,
    second: Option<(&'a Rc<Mirror>, FromSet<'a>)>,
    /// Whether the backing device had failed a flush when the reads began.
    flush_failed: bool,
}

impl<'a> Sets<'a> {
    /// The present moment. Each epoch is that of the look-ups.
    fn now(
        (target, epoch): (Target<'a>, ReadEpoch),
        second: Option<(&'a Rc<Mirror>, ReadEpoch)>,
    ) -> Sets<'a> {
        let flush_failed = flush_has_failed(target.volume);
        let from = |target, epoch| FromSet { target, began: ReadStart::now(target, epoch) };
        let second = second.map(|(mirror, epoch)| {
            let target = Target { cache: &mirror.cache, inode: mirror.inode, ..target };
            (mirror, from(target, epoch))
        });
        Sets { first: from(target, epoch), second, flush_failed }
    }

    /// The set of a piece. Without a second set all pieces are of the first one.
    fn of(&self, which: Which) -> FromSet<'a> {
        match (which, self.second) {
            (Which::Secondary, Some((_, second))) => second,
            _ => self.first,
        }
    }

    /// Whether the set still belongs to the volume. A second set that has left may have other data in its buckets.
    fn is_linked(&self, which: Which) -> bool {
        match (which, self.second) {
            (Which::Secondary, Some((mirror, from))) => {
                from.target.volume.mirror().is_some_and(|present| Rc::ptr_eq(&present, mirror))
            }
            _ => true,
        }
    }
}

/// Starts the reads of all pieces, except the holes of a flash-only volume. If `caches` is set, missing pieces get a miss
/// range, so that they can be inserted into the cache.
fn start_pieces(sets: &Sets<'_>, pieces: Vec<ReadPiece>, caches: bool) -> (Vec<Reading>, Vec<MeteredIo>) {
    let volume = sets.first.target.volume;
    let start_piece = |piece: ReadPiece| {
        let part = &piece.part;
        let is_missing = caches && piece.hit.is_none();
        let miss = is_missing.then(|| volume.ranges.hold_for_miss(part.start, part.end));
        let (request, skip_bytes) = match piece.hit {
            Some((which, extent)) => start_hit(sets.of(which).target.cache, extent, part.sectors()),
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
    sets: &Sets<'_>,
    reading: Reading,
    answer: Answer,
    mut buffer: Buffer,
) -> (Buffer, Result<bool, EngineError>) {
    let Reading { piece: ReadPiece { part, hit }, skip_bytes, miss } = reading;
    let Answer { completion, ended } = answer;
    let target = sets.first.target;
    let volume = target.volume;
    let is_read = match hit {
        Some((which, extent)) => hit_ended(sets.of(which).target, extent, completion.result),
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
        (Some((which, extent)), _) => {
            let FromSet { target, began } = sets.of(which);
            let times = ReadTimes { began: &began, ended };
            match verify_and_accept(target, &part, extent, times, data).await {
                Ok(accepted) => {
                    if which == Which::Secondary {
                        target.cache.count_for_aging(part.sectors());
                    }
                    Ok(accepted && sets.is_linked(which))
                }
                // If the secondary has failed, the next look-up is without it.
                Err(_) if which == Which::Secondary => Ok(false),
                Err(e) => Err(e),
            }
        }
        (None, Some(range)) => {
            let (start, end, flush_failed) = (part.start, part.end, sets.flush_failed);
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
