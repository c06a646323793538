//! Reads of a volume.
//!
//! A read takes the pieces that the index has from the cache and the others from the backing device, all at the same
//! time. A request that is one extent is read into the caller's buffer without a copy. After a read from the cache, the
//! read checks the generation of the bucket: if it has changed, the bucket may have been reused during the read, and
//! the whole request starts again. It also starts again if a wipe has overwritten dead sectors meanwhile. Every missing
//! piece is inserted into the cache by a background task, for which the answer does not wait (`miss`).
//!
//! A backing device that fails a flush may drop data that it had acknowledged and not flushed. A later read then returns the
//! older data. The dropped data must not come back after that read, but three operations still have it in memory or in the
//! cache: a write that has read the blocks around its data, writeback that has read gaps, and a clean copy. So after a
//! failed flush a read waits until the operations under way in its range have ended, and does not use clean copies of
//! which no leaf on the cache device has a key. A read during which a flush failed starts again.
//!
//! Owns the path of a read up to its answer. Must not know how a missing piece is inserted.

use format::{Ptr, Sector, Sectors};
use io::{Buffer, Disk, Nanos, VolumeError};

use super::Blocks;
use super::Cache;
use super::Target;
use super::hit::{bytes_of, hit, is_still_valid, observe_latency, read_instead};
use super::miss::{Missed, insert_miss};
use super::{CachedPiece, RangeGuard, Volume, is_sound};
use crate::canary::{Bug, bug};
use crate::data::ReadToken;
use crate::device::{BackingDevice, MeteredIo};
use crate::error::EngineError;
use crate::index::{IndexSegment, Kind, NotLoaded};
use crate::policy::bypass::{BypassReason, Decision, RequestKind};
use crate::policy::congestion::Direction;
use crate::refusal::Refusal;
use crate::stats::{OpKind, Outcome};

/// A part of a request that is one extent of the cache, or a hole.
#[derive(Clone, Copy)]
struct ReadPiece {
    start: Sector,
    end: Sector,
    /// The place in the cache and whether the data is dirty; `None` for a hole.
    hit: Option<(Ptr, bool)>,
}

/// A piece that is being read.
struct Reading {
    piece: ReadPiece,
    future: Option<MeteredIo>,
    /// Bytes in the buffer before the first sector of the piece (a device block can be larger than the alignment of the
    /// piece).
    skip: usize,
    miss: Option<RangeGuard>,
}

/// Starts a read of a range of the backing device, widened to its whole blocks; returns the number of bytes to skip in the
/// buffer.
fn start_aligned(backing: &BackingDevice, sector: Sector, sectors: Sectors) -> (MeteredIo, usize) {
    let disk = backing.disk();
    let start = |first, span, buffer| backing.read_data(first, span, buffer, 0);
    start_around(Blocks::of_disk(disk), disk, (sector, sectors), start)
}

/// Starts a read of a part of the cached data, widened to the blocks in which the cache is read.
fn start_cached(cache: &Cache, ptr: Ptr, sectors: Sectors) -> (MeteredIo, usize) {
    let start = |first, span, buffer| cache.data.read(first, span, buffer, 0);
    start_around(blocks_of_data(cache), cache.device.disk(), (ptr.offset(), sectors), start)
}

/// The blocks in which cached data is read: if it has checksums, those of the cache, because a part of a block cannot be
/// checked.
#[inline]
fn blocks_of_data(cache: &Cache) -> Blocks {
    let disk = Blocks::of_disk(cache.device.disk());
    if cache.data.has_checksums() { disk.max(Blocks::of(&cache.geometry)) } else { disk }
}

fn start_around(
    blocks: Blocks,
    disk: &Disk,
    (sector, sectors): (Sector, Sectors),
    start: impl FnOnce(Sector, Sectors, Buffer) -> MeteredIo,
) -> (MeteredIo, usize) {
    let (first, last) = blocks.around((sector, sector + sectors));
    let span = last - first;
    let buffer = disk.runtime().pool().take(span.bytes() as usize);
    (start(first, span, buffer), (sector - first).bytes() as usize)
}

/// Reads from the backing device into the caller's buffer.
pub(super) async fn read_directly(
    volume: &Volume,
    start: Sector,
    sectors: Sectors,
    mut buffer: Buffer,
    offset_bytes: usize,
) -> (Buffer, Result<(), VolumeError>) {
    let Some(backing) = volume.backing() else {
        return (buffer, Err(VolumeError::Stopped(volume.name())));
    };
    if Blocks::of_disk(backing.disk()).are_whole(start, sectors) {
        let spare = buffer.len();
        let done = backing.read_data(start, sectors, buffer, offset_bytes).await;
        if let Err(e) = &done.result {
            backing.failed(e, volume.tunables.borrow().io_error_limit);
        }
        let buffer = done.buffer.unwrap_or_else(|| volume.rt.pool().take(spare));
        return (buffer, done.result.map_err(VolumeError::from));
    }
    let (future, skip) = start_aligned(&backing, start, sectors);
    let done = future.await;
    let len = sectors.bytes() as usize;
    let result = match (done.result, done.buffer) {
        (Ok(()), Some(b)) => {
            let target = &mut buffer.as_mut()[offset_bytes..offset_bytes + len];
            target.copy_from_slice(&b.as_slice()[skip..skip + len]);
            Ok(())
        }
        (Err(e), _) => {
            backing.failed(&e, volume.tunables.borrow().io_error_limit);
            Err(e.into())
        }
        (Ok(()), None) => Err(VolumeError::Stopped(volume.name())),
    };
    (buffer, result)
}

/// Reads from the backing device alone. After a failed flush it waits for the operations under way, and a read during which a
/// flush failed is repeated; see the head of the module.
pub(super) async fn read_settled(
    volume: &Volume,
    start: Sector,
    sectors: Sectors,
    mut buffer: Buffer,
    offset_bytes: usize,
) -> (Buffer, Result<(), VolumeError>) {
    loop {
        let flush_failed = flush_has_failed(volume);
        if flush_failed {
            volume.ranges.present_ended(start, start + sectors).await;
        }
        let (b, result) = read_directly(volume, start, sectors, buffer, offset_bytes).await;
        buffer = b;
        if flush_has_failed(volume) == flush_failed || result.is_err() {
            return (buffer, result);
        }
    }
}

/// A read request. Its buffer is passed beside it, because the answer returns the buffer.
pub(super) struct Read {
    pub(super) start: Sector,
    end: Sector,
    /// The position in the buffer at which the data begins.
    pub(super) offset_bytes: usize,
    /// The data is metadata of a file system.
    meta: bool,
    /// Whether missing data is put into the cache.
    decision: Decision,
}

impl Read {
    /// Begins a read of a range and decides whether it goes through the cache.
    pub(super) fn begin(
        target: Target<'_>,
        (start, end): (Sector, Sector),
        offset_bytes: usize,
        meta: bool,
    ) -> Read {
        let Target { volume, cache, .. } = target;
        let decision = volume.decide(cache, RequestKind::Read, start, end - start, meta);
        Read { start, end, offset_bytes, meta, decision }
    }

    pub(super) fn sectors(&self) -> Sectors {
        self.end - self.start
    }
}

/// Reads through the cache.
pub(super) async fn read_cached(
    target: Target<'_>,
    read: &Read,
    mut buffer: Buffer,
) -> (Buffer, Result<(), EngineError>) {
    let Target { volume, cache, inode } = target;
    let (start, end, sectors) = (read.start, read.end, read.sectors());
    let arrived = volume.rt.turn_time();
    cache.foreground_request();
    let mut waited = false;
    loop {
        if let Err(e) = cache.device.check() {
            return (buffer, Err(e));
        }
        let epoch = cache.device.read_epoch();
        let seg = match cache.index.segment(inode, start, end) {
            Ok(seg) => seg,
            Err(NotLoaded(id)) => match cache.index.load_leaf(id).await {
                Ok(()) => continue,
                Err(e) => return (buffer, Err(e)),
            },
        };
        if let Kind::Hit { ptr, dirty, .. } = seg.kind
            && seg.end == end
            && is_usable(volume, seg.kind)
            && blocks_of_data(cache).are_whole(ptr.offset(), sectors)
        {
            let began = volume.rt.turn_time();
            let token = cache.data.read_token();
            let spare = buffer.len();
            let done = cache.data.read(ptr.offset(), sectors, buffer, read.offset_bytes).await;
            buffer = done.buffer.unwrap_or_else(|| volume.rt.pool().take(spare));
            cache.device.observe_data(&done.result);
            match done.result {
                Ok(()) => {
                    observe_latency(volume, cache, Direction::Read, began);
                    if !is_still_valid(cache, ptr, epoch) {
                        continue;
                    }
                    if cache.data.has_checksums() {
                        let data = bytes_of(&buffer, read.offset_bytes, sectors);
                        match Box::pin(is_sound(target, CachedPiece { start, ptr }, data, token)).await {
                            Ok(true) if is_still_valid(cache, ptr, epoch) => {}
                            Ok(_) => continue,
                            Err(e) => return (buffer, Err(e)),
                        }
                    }
                    let data = || buffer.as_slice().get(read.offset_bytes..).unwrap_or_default();
                    hit(target, read.meta, (start, sectors), (ptr, dirty), data);
                    count_read(target, read, Outcome::Hit, arrived);
                    return (buffer, Ok(()));
                }
                Err(e) if dirty || volume.backing().is_none() => return (buffer, Err(e.into())),
                // The data is clean, so the backing device has it, too.
                Err(_) => return read_instead(volume, read, buffer, arrived).await,
            }
        }
        let flush_failed = flush_has_failed(volume);
        if flush_failed && !waited && !bug(Bug::FailedFlushIgnoredByReads) {
            waited = true;
            Box::pin(volume.ranges.present_ended(start, end)).await;
            continue;
        }
        let (b, outcome) = read_parts(target, read, seg, buffer).await;
        buffer = b;
        let is_settled = flush_has_failed(volume) == flush_failed || bug(Bug::FailedFlushIgnoredByReads);
        match outcome {
            Ok(Some(found)) if cache.device.read_epoch() == epoch && is_settled => {
                count_read(target, read, found, arrived);
                return (buffer, Ok(()));
            }
            Ok(_) => cache.device.counters().cache_read_races += 1,
            Err(e) => return (buffer, Err(e)),
        }
    }
}

/// Whether a flush of the backing device has failed. This never ends while the device is open.
pub(super) fn flush_has_failed(volume: &Volume) -> bool {
    volume.backing.as_ref().is_some_and(|b| b.flush_has_failed())
}

/// Whether the data of this extent may be taken from the cache: after a failed flush of the backing device clean copies may
/// be of data that the device has dropped, unless a leaf on the cache device has their keys.
pub(crate) fn is_usable(volume: &Volume, kind: Kind) -> bool {
    let may_be_dropped = matches!(kind, Kind::Hit { dirty: false, may_be_durable: false, .. });
    !may_be_dropped || !flush_has_failed(volume) || bug(Bug::FailedFlushIgnoredByReads)
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
            Kind::Hit { ptr, dirty, .. } if is_usable(target.volume, seg.kind) => Some((ptr, dirty)),
            Kind::Hit { .. } | Kind::Hole { .. } => None,
        };
        match pieces.last_mut() {
            Some(last) if last.hit.is_none() && hit.is_none() => last.end = seg.end,
            _ => pieces.push(ReadPiece { start: at, end: seg.end, hit }),
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

/// Reads a request that is not one extent of the cache. `first`: the extent or hole at its beginning, as just looked
/// up. Returns how much of the request the cache had, or `None` if a bucket was reused meanwhile.
async fn read_parts(
    target: Target<'_>,
    read: &Read,
    first: IndexSegment,
    buffer: Buffer,
) -> (Buffer, Result<Option<Outcome>, EngineError>) {
    let Target { volume, cache, .. } = target;
    let caches =
        volume.backing().is_some() && read.decision == Decision::Cache && !cache.device.is_stopping();
    let (pieces, unchanged) = match pieces(target, read, first).await {
        Ok(found) => found,
        Err(e) => return (buffer, Err(e)),
    };
    let caches = caches && unchanged;
    let found = match (pieces.iter().all(|p| p.hit.is_some()), pieces.iter().any(|p| p.hit.is_some())) {
        (true, _) => Outcome::Hit,
        (false, true) => Outcome::Partial,
        (false, false) => Outcome::Miss,
    };
    let (buffer, whole) = read_pieces(target, read, (pieces, caches), buffer).await;
    (buffer, whole.map(|whole| whole.then_some(found)))
}

/// Starts the reads of all pieces. If `caches` is set, missing pieces get a miss range, so that they can be inserted
/// into the cache.
fn start_pieces(target: Target<'_>, pieces: Vec<ReadPiece>, caches: bool) -> Vec<Reading> {
    let Target { volume, cache, .. } = target;
    let start_piece = |piece: ReadPiece| {
        let size = piece.end - piece.start;
        let miss =
            (caches && piece.hit.is_none()).then(|| volume.ranges.hold_for_miss(piece.start, piece.end));
        let (future, skip) = match (piece.hit, volume.backing()) {
            (Some((ptr, _)), _) => {
                let (f, skip) = start_cached(cache, ptr, size);
                (Some(f), skip)
            }
            (None, Some(b)) => {
                let (f, skip) = start_aligned(&b, piece.start, size);
                (Some(f), skip)
            }
            // A hole of a flash-only volume.
            (None, None) => (None, 0),
        };
        Reading { piece, future, skip, miss }
    };
    pieces.into_iter().map(start_piece).collect()
}

/// Reads all pieces at the same time; returns false if a bucket was reused meanwhile. If `caches` is set, missing pieces are
/// inserted into the cache.
async fn read_pieces(
    target: Target<'_>,
    read: &Read,
    (pieces, caches): (Vec<ReadPiece>, bool),
    mut buffer: Buffer,
) -> (Buffer, Result<bool, EngineError>) {
    let Target { volume, cache, .. } = target;
    let mut outcome = Ok(true);
    let token = cache.data.read_token();
    let flush_failed = flush_has_failed(volume);
    for r in start_pieces(target, pieces, caches) {
        let size = r.piece.end - r.piece.start;
        let len = size.bytes() as usize;
        let at = read.offset_bytes + (r.piece.start - read.start).bytes() as usize;
        let Some(future) = r.future else {
            buffer.as_mut()[at..at + len].fill(0);
            continue;
        };
        let done = future.await;
        match (done.result, done.buffer) {
            (Ok(()), Some(data)) => {
                let checked = check_piece(target, r.piece, r.skip, (data.as_slice(), token)).await;
                let is_sound = matches!(checked, Ok(true));
                match checked {
                    Ok(sound) => outcome = outcome.map(|whole| whole && sound),
                    Err(e) => outcome = Err(e),
                }
                let bytes = &data.as_slice()[r.skip..r.skip + len];
                buffer.as_mut()[at..at + len].copy_from_slice(bytes);
                match (r.piece.hit, r.miss) {
                    (Some((ptr, dirty)), _) => {
                        cache.device.observe_data(&Ok(()));
                        if cache.alloc.buckets().is_current(ptr) || bug(Bug::StaleGenerationRead) {
                            // A copy of damaged data in another bucket would get a checksum of the damage.
                            if is_sound {
                                hit(target, read.meta, (r.piece.start, size), (ptr, dirty), || bytes);
                            }
                        } else if outcome.is_ok() {
                            outcome = Ok(false);
                        }
                    }
                    (None, Some(miss)) => {
                        let (start, end, skip) = (r.piece.start, r.piece.end, r.skip);
                        let missed = Missed { start, end, data, skip, range: miss, flush_failed };
                        insert_miss(target, missed, read.meta);
                    }
                    (None, None) => {}
                }
            }
            (result, _) => {
                let e =
                    piece_failed(volume, cache, r.piece, result, &mut buffer.as_mut()[at..at + len]).await;
                if let Err(e) = e {
                    outcome = Err(e);
                }
            }
        }
    }
    (buffer, outcome)
}

/// Checks the data of a piece that was read from the cache, with `skip_bytes` before it; see [`is_sound`].
async fn check_piece(
    target: Target<'_>,
    piece: ReadPiece,
    skip_bytes: usize,
    (data, began): (&[u8], ReadToken),
) -> Result<bool, EngineError> {
    let Some((ptr, _)) = piece.hit.filter(|_| target.cache.data.has_checksums()) else { return Ok(true) };
    let skip = Sectors::from_bytes_floor(skip_bytes as u64);
    let piece = CachedPiece { start: piece.start - skip, ptr: ptr.rewound(skip) };
    Box::pin(is_sound(target, piece, data, began)).await
}

/// Handles a piece that could not be read. Clean data is read from the backing device into `out`; a failed read of
/// dirty data is an error.
async fn piece_failed(
    volume: &Volume,
    cache: &Cache,
    piece: ReadPiece,
    result: Result<(), io::IoError>,
    out: &mut [u8],
) -> Result<(), EngineError> {
    let error = result.err().map_or_else(|| Refusal::Closed.into(), EngineError::from);
    let size = piece.end - piece.start;
    match (piece.hit, volume.backing()) {
        (Some((_, dirty)), backing) => {
            if let EngineError::Io(e) = &error {
                cache.device.observe_data(&Err(e.clone()));
            }
            let Some(b) = backing.filter(|_| !dirty) else { return Err(error) };
            let (future, skip) = start_aligned(&b, piece.start, size);
            let done = future.await;
            if let Err(e) = &done.result {
                b.failed(e, volume.tunables.borrow().io_error_limit);
            }
            done.result?;
            if let Some(data) = done.buffer {
                out.copy_from_slice(&data.as_slice()[skip..skip + out.len()]);
            }
            Ok(())
        }
        (None, Some(b)) => {
            if let EngineError::Io(e) = &error {
                b.failed(e, volume.tunables.borrow().io_error_limit);
            }
            Err(error)
        }
        (None, None) => Err(error),
    }
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
        let (b, outcome) = read_parts(target, &read, first, buffer).await;
        buffer = b;
        if outcome?.is_some() && cache.device.read_epoch() == epoch {
            return Ok(buffer);
        }
    }
}
