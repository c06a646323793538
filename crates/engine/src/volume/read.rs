//! Reads.
//!
//! What the index has is read from the cache, the rest from the backing device, all pieces at once; a request that is
//! one extent goes straight into the caller's buffer. After a read from the cache the bucket's generation is checked:
//! if it changed, the bucket may have been reused during the read, and the whole request starts over; also if a wipe has
//! overwritten dead sectors meanwhile. Every missing piece goes into the cache behind the answer (`miss`).

use std::rc::Rc;

use format::{Inode, Ptr, Sector, Sectors};
use io::{Buffer, Disk, Nanos, ReadFlags, VolumeError};

use super::Cache;
use super::{RangeGuard, Volume};
use crate::canary::{Bug, bug};
use crate::device::{Meter, Watched};
use crate::error::EngineError;
use crate::index::{Kind, NotLoaded};
use crate::policy::bypass::{Decision, RequestKind};
use crate::policy::congestion::Direction;
use crate::stats::{OpKind, Outcome};

/// A part of a request.
#[derive(Clone, Copy)]
struct Piece {
    start: Sector,
    end: Sector,
    /// Where the cache has it, and whether it is dirty.
    hit: Option<(Ptr, bool)>,
}

/// A piece being read.
struct Reading {
    piece: Piece,
    future: Option<Watched>,
    /// Bytes of the piece's buffer before its first sector (device blocks can be larger than the piece's alignment).
    skip: usize,
    miss: Option<RangeGuard>,
}

/// Starts a read of any sector range, widened to the device's blocks; returns the bytes to skip in the answer.
fn start_aligned(disk: &Disk, meter: &Rc<Meter>, sector: Sector, sectors: Sectors) -> (Watched, usize) {
    let block = u64::from(disk.info().logical_block_bytes / 512).max(1);
    let first = Sector(sector.0 / block * block);
    let last = (sector + sectors).0.next_multiple_of(block);
    let span = Sectors(last - first.0);
    let buffer = disk.runtime().pool().take(span.bytes() as usize);
    (meter.read(disk, first, span, buffer, 0), (sector - first).bytes() as usize)
}

fn is_aligned(disk: &Disk, sector: Sector, sectors: Sectors) -> bool {
    let block = u64::from(disk.info().logical_block_bytes / 512).max(1);
    sector.0.is_multiple_of(block) && sectors.0.is_multiple_of(block)
}

impl Volume {
    /// Reads from the backing device into the caller's buffer.
    pub(super) async fn read_directly(
        &self,
        start: Sector,
        sectors: Sectors,
        mut buffer: Buffer,
        offset_bytes: usize,
    ) -> (Buffer, Result<(), VolumeError>) {
        let Some(backing) = self.backing() else {
            return (buffer, Err(VolumeError::Stopped(self.name())));
        };
        if is_aligned(&backing.disk, start, sectors) {
            let spare = buffer.len();
            let done = backing.read_data(start, sectors, buffer, offset_bytes).await;
            if let Err(e) = &done.result {
                backing.failed(e, self.tunables.borrow().io_error_limit);
            }
            let buffer = done.buffer.unwrap_or_else(|| self.rt.pool().take(spare));
            return (buffer, done.result.map_err(VolumeError::from));
        }
        let (future, skip) = start_aligned(&backing.disk, &backing.meter, start, sectors);
        let done = future.await;
        let len = sectors.bytes() as usize;
        let result = match (done.result, done.buffer) {
            (Ok(()), Some(b)) => {
                let target = &mut buffer.as_mut()[offset_bytes..offset_bytes + len];
                target.copy_from_slice(&b.as_slice()[skip..skip + len]);
                Ok(())
            }
            (Err(e), _) => {
                backing.failed(&e, self.tunables.borrow().io_error_limit);
                Err(e.into())
            }
            (Ok(()), None) => Err(VolumeError::Stopped(self.name())),
        };
        (buffer, result)
    }

    /// Reads through the cache.
    pub(super) async fn read_cached(
        self: &Rc<Self>,
        cache: &Rc<Cache>,
        inode: Inode,
        (start, sectors): (Sector, Sectors),
        mut buffer: Buffer,
        offset_bytes: usize,
        ReadFlags { meta }: ReadFlags,
    ) -> (Buffer, Result<(), EngineError>) {
        let arrived = self.rt.turn_time();
        let decision = self.decide(cache, RequestKind::Read, start, sectors, meta);
        cache.foreground_request();
        let end = start + sectors;
        loop {
            if let Err(e) = cache.device.check() {
                return (buffer, Err(e));
            }
            let turn = cache.device.turn();
            let seg = match cache.index.segment(inode, start, end) {
                Ok(seg) => seg,
                Err(NotLoaded(id)) => match cache.index.load_leaf(id).await {
                    Ok(()) => continue,
                    Err(e) => return (buffer, Err(e)),
                },
            };
            if let Kind::Hit { ptr, dirty, .. } = seg.kind
                && seg.end == end
                && is_aligned(cache.device.disk(), ptr.offset(), sectors)
            {
                let began = self.rt.turn_time();
                let spare = buffer.len();
                let done = cache.device.read_data(ptr.offset(), sectors, buffer, offset_bytes).await;
                buffer = done.buffer.unwrap_or_else(|| self.rt.pool().take(spare));
                cache.device.observe_data(&done.result);
                match done.result {
                    Ok(()) => {
                        self.observe_latency(cache, Direction::Read, began);
                        let reused = !cache.alloc.buckets().is_current(ptr) && !bug(Bug::StaleGenerationRead);
                        if reused || cache.device.turn() != turn {
                            cache.device.counters().cache_read_races += 1;
                            continue;
                        }
                        if cache.alloc.used(ptr, sectors, self.saving_of(meta)) && !dirty {
                            let data =
                                &buffer.as_slice()[offset_bytes..offset_bytes + sectors.bytes() as usize];
                            crate::gc::promote(&cache.gc, (inode, start), ptr, data);
                        }
                        self.count_read(cache, Outcome::Hit, decision, sectors, arrived);
                        return (buffer, Ok(()));
                    }
                    Err(e) if dirty || self.backing().is_none() => return (buffer, Err(e.into())),
                    Err(_) => {
                        // The backing device has the same data.
                        let (b, r) = self.read_directly(start, sectors, buffer, offset_bytes).await;
                        if r.is_ok() {
                            self.answered(OpKind::Read, Outcome::Miss, sectors, arrived);
                        }
                        return (b, r.map_err(|e| EngineError::Invalid(e.to_string())));
                    }
                }
            }
            let pieces = match self.pieces(cache, inode, start, end).await {
                Ok(p) => p,
                Err(e) => return (buffer, Err(e)),
            };
            let found = match (pieces.iter().all(|p| p.hit.is_some()), pieces.iter().any(|p| p.hit.is_some()))
            {
                (true, _) => Outcome::Hit,
                (false, true) => Outcome::Partial,
                (false, false) => Outcome::Miss,
            };
            let (b, outcome) =
                self.read_pieces(cache, inode, pieces, start, buffer, offset_bytes, decision, meta).await;
            buffer = b;
            match outcome {
                Ok(true) if cache.device.turn() == turn => {
                    self.count_read(cache, found, decision, sectors, arrived);
                    return (buffer, Ok(()));
                }
                Ok(_) => cache.device.counters().cache_read_races += 1,
                Err(e) => return (buffer, Err(e)),
            }
        }
    }

    fn observe_latency(&self, cache: &Cache, direction: Direction, began: io::Nanos) {
        let now = self.rt.turn_time();
        cache.congestion().observe_latency(direction, now.since(began), now);
    }

    /// `found`: what the cache had of it.
    fn count_read(&self, cache: &Cache, found: Outcome, decision: Decision, sectors: Sectors, began: Nanos) {
        let hit = found == Outcome::Hit;
        let bypassed = matches!(decision, Decision::Bypass(_));
        for stats in [&self.stats, &cache.stats] {
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
        self.answered(OpKind::Read, outcome, sectors, began);
    }

    /// What the index knows about a request; adjacent holes are one piece.
    async fn pieces(
        &self,
        cache: &Cache,
        inode: Inode,
        start: Sector,
        end: Sector,
    ) -> Result<Vec<Piece>, EngineError> {
        let mut pieces: Vec<Piece> = Vec::new();
        let mut at = start;
        while at < end {
            let seg = cache.index.segment_loaded(inode, at, end).await?;
            let hit = match seg.kind {
                Kind::Hit { ptr, dirty, .. } => Some((ptr, dirty)),
                Kind::Hole { .. } => None,
            };
            match pieces.last_mut() {
                Some(last) if last.hit.is_none() && hit.is_none() => last.end = seg.end,
                _ => pieces.push(Piece { start: at, end: seg.end, hit }),
            }
            at = seg.end;
        }
        Ok(pieces)
    }

    /// Reads all pieces at once; false if a bucket was reused meanwhile.
    #[allow(clippy::too_many_arguments)]
    async fn read_pieces(
        self: &Rc<Self>,
        cache: &Rc<Cache>,
        inode: Inode,
        pieces: Vec<Piece>,
        start: Sector,
        mut buffer: Buffer,
        offset_bytes: usize,
        decision: Decision,
        meta: bool,
    ) -> (Buffer, Result<bool, EngineError>) {
        let missing = pieces.iter().any(|p| p.hit.is_none());
        let keep =
            missing && self.backing().is_some() && decision == Decision::Cache && !cache.device.is_stopping();
        let mut reading = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let size = piece.end - piece.start;
            let miss = (keep && piece.hit.is_none()).then(|| self.ranges.miss(piece.start, piece.end));
            let (future, skip) = match (piece.hit, self.backing()) {
                (Some((ptr, _)), _) => {
                    let (f, skip) =
                        start_aligned(cache.device.disk(), cache.device.meter(), ptr.offset(), size);
                    (Some(f), skip)
                }
                (None, Some(b)) => {
                    let (f, skip) = start_aligned(&b.disk, &b.meter, piece.start, size);
                    (Some(f), skip)
                }
                // A hole of a flash-only volume.
                (None, None) => (None, 0),
            };
            reading.push(Reading { piece, future, skip, miss });
        }
        let mut outcome = Ok(true);
        for r in reading {
            let size = r.piece.end - r.piece.start;
            let len = size.bytes() as usize;
            let at = offset_bytes + (r.piece.start - start).bytes() as usize;
            let Some(future) = r.future else {
                buffer.as_mut()[at..at + len].fill(0);
                continue;
            };
            let done = future.await;
            match (done.result, done.buffer) {
                (Ok(()), Some(data)) => {
                    buffer.as_mut()[at..at + len].copy_from_slice(&data.as_slice()[r.skip..r.skip + len]);
                    match (r.piece.hit, r.miss) {
                        (Some((ptr, dirty)), _) => {
                            cache.device.observe_data(&Ok(()));
                            if cache.alloc.buckets().is_current(ptr) || bug(Bug::StaleGenerationRead) {
                                if cache.alloc.used(ptr, size, self.saving_of(meta)) && !dirty {
                                    let data = &data.as_slice()[r.skip..r.skip + len];
                                    crate::gc::promote(&cache.gc, (inode, r.piece.start), ptr, data);
                                }
                            } else if outcome.is_ok() {
                                outcome = Ok(false);
                            }
                        }
                        (None, Some(miss)) => {
                            self.insert_miss(
                                cache,
                                inode,
                                (r.piece.start, r.piece.end),
                                data,
                                r.skip,
                                miss,
                                meta,
                            );
                        }
                        (None, None) => {}
                    }
                }
                (result, _) => {
                    let e = self.piece_failed(cache, r.piece, result, &mut buffer, at).await;
                    if let Err(e) = e {
                        outcome = Err(e);
                    }
                }
            }
        }
        (buffer, outcome)
    }

    /// A piece could not be read: clean data is on the backing device too.
    async fn piece_failed(
        &self,
        cache: &Cache,
        piece: Piece,
        result: Result<(), io::IoError>,
        buffer: &mut Buffer,
        at: usize,
    ) -> Result<(), EngineError> {
        let error =
            result.err().map_or_else(|| EngineError::Invalid("device closed".into()), EngineError::from);
        let size = piece.end - piece.start;
        match (piece.hit, self.backing()) {
            (Some((_, dirty)), backing) => {
                if let EngineError::Io(e) = &error {
                    cache.device.observe_data(&Err(e.clone()));
                }
                let Some(b) = backing.filter(|_| !dirty) else { return Err(error) };
                let (future, skip) = start_aligned(&b.disk, &b.meter, piece.start, size);
                let done = future.await;
                done.result?;
                let len = size.bytes() as usize;
                if let Some(data) = done.buffer {
                    buffer.as_mut()[at..at + len].copy_from_slice(&data.as_slice()[skip..skip + len]);
                }
                Ok(())
            }
            (None, Some(b)) => {
                if let EngineError::Io(e) = &error {
                    b.failed(e, self.tunables.borrow().io_error_limit);
                }
                Err(error)
            }
            (None, None) => Err(error),
        }
    }

    /// Reads a range as it is now, for read-modify-write: nothing is inserted or counted.
    pub(super) async fn read_merged(
        self: &Rc<Self>,
        cache: &Rc<Cache>,
        inode: Inode,
        start: Sector,
        end: Sector,
    ) -> Result<Buffer, EngineError> {
        let mut buffer = self.rt.pool().take((end - start).bytes() as usize);
        loop {
            cache.device.check()?;
            let turn = cache.device.turn();
            let pieces = self.pieces(cache, inode, start, end).await?;
            let skip_insert = Decision::Bypass(crate::policy::bypass::BypassReason::Unaligned);
            let (b, outcome) =
                self.read_pieces(cache, inode, pieces, start, buffer, 0, skip_insert, false).await;
            buffer = b;
            if outcome? && cache.device.turn() == turn {
                return Ok(buffer);
            }
        }
    }
}
