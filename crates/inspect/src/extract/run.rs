//! A running extraction: reads ranges from their devices and passes them to the sink in order.
//!
//! Owns the copying, and the best effort if a device fails: it reads parts again separately, reads clean data from the backing
//! device instead, and fills lost ranges with zeros and lists them. The plan of the extraction has chosen the device of each
//! range.

use std::ops::ControlFlow;

use format::{Sector, Sectors};

use super::{ExtractError, Extracted, Extraction, Lost, Progress, Sink};
use crate::SCHEMA_VERSION;
use crate::extent_map::Piece;
use crate::source::{ReadAt, ReadError};
use crate::view::PieceKind;

/// Number of lost ranges that are listed. Further ones are only counted.
const MAX_LOST: usize = 1000;
/// Number of bytes that are read and written at a time.
const CHUNK: usize = 1 << 20;
/// Number of zero sectors that are written between two checks for cancellation: 1 GiB.
const ZEROS: Sectors = Sectors(1 << 21);
/// Number of sectors of a retry after a larger read failed.
const RETRY_SECTORS: u64 = 8;

/// Runs the extraction `it`; see [`Extraction::run`].
pub(super) fn run(
    it: &Extraction<'_>,
    sink: &mut dyn Sink,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<Extracted, ExtractError> {
    sink.begin(it.sectors).map_err(ExtractError::Output)?;
    let (schema_version, sectors, notes) = (SCHEMA_VERSION, it.sectors.0, it.notes.clone());
    let warnings = it.warnings.clone();
    let result = Extracted { schema_version, sectors, notes, warnings, ..Extracted::default() };
    let mut run = Run { it, sink, progress, result, buffer: vec![0; CHUNK], done: Sectors(0) };
    let mut at = it.data_offset;
    for (piece, kind) in it.overlay() {
        run.gap(at, piece.start)?;
        run.extent(&piece, kind)?;
        at = piece.end();
    }
    run.gap(at, it.end())?;
    let result = run.result;
    sink.finish().map_err(ExtractError::Output)?;
    Ok(result)
}

/// A running extraction.
struct Run<'a, 'b> {
    it: &'a Extraction<'a>,
    sink: &'b mut dyn Sink,
    progress: &'b mut dyn FnMut(Progress) -> ControlFlow<()>,
    result: Extracted,
    buffer: Vec<u8>,
    done: Sectors,
}

impl Run<'_, '_> {
    /// Writes a range that no extent covers. Positions are those of keys.
    fn gap(&mut self, from: Sector, to: Sector) -> Result<(), ExtractError> {
        let mut at = from;
        while at < to {
            // Without a backing device, the whole range is zeros.
            let data = self.it.backing.map_or(to, |backing| backing.next_data(at)).min(to);
            let zeros = Sectors(data.0.saturating_sub(at.0));
            self.zeros(zeros)?;
            self.result.zero_sectors += zeros.0;
            at = data;
            let Some(backing) = self.it.backing.filter(|_| at < to) else { continue };
            let len = Sectors(to.0.saturating_sub(at.0).min(CHUNK as u64 / 512));
            match self.read(backing, at, len) {
                Ok(()) => self.write(len)?,
                Err(e) => {
                    self.by_parts(e, len, |run, part, len| {
                        match run.read(backing, Sector(at.0 + part.0), len) {
                            Ok(()) => Ok(()),
                            Err(e) => Err(format!("zeros in place of the backing device's: {e}")),
                        }
                    })?;
                }
            }
            self.result.backing_sectors += len.0;
            at.0 += len.0;
        }
        Ok(())
    }

    /// Writes a cached range.
    fn extent(&mut self, piece: &Piece, kind: PieceKind) -> Result<(), ExtractError> {
        let Some(ptr) = piece.ptr else { return Ok(()) };
        let mut at = Sectors(0);
        while at < piece.len {
            let len = Sectors((piece.len.0 - at.0).min(CHUNK as u64 / 512));
            let (from, position) = (Sector(ptr.offset().0 + at.0), Sector(piece.start.0 + at.0));
            match self.read(self.it.cache, from, len) {
                Ok(()) => self.write(len)?,
                Err(e) => self.by_parts(e, len, |run, part, len| {
                    let Err(e) = run.read(run.it.cache, Sector(from.0 + part.0), len) else { return Ok(()) };
                    let backing = run.it.backing.filter(|_| kind == PieceKind::Clean);
                    match backing.map(|b| run.read(b, Sector(position.0 + part.0), len)) {
                        // The backing device has clean data too.
                        Some(Ok(())) => Ok(()),
                        _ => Err(format!("zeros in place of {} data: {e}", kind.name())),
                    }
                })?,
            }
            match kind {
                PieceKind::Dirty => self.result.dirty_sectors += len.0,
                _ => self.result.clean_sectors += len.0,
            }
            at.0 += len.0;
        }
        Ok(())
    }

    /// After a read of `len` sectors failed with `error`: reads parts with `read`, which fills the front
    /// of the buffer or lists the range as lost. Without best effort it returns the error. The error of `read` is text, because it
    /// becomes a line of the report.
    fn by_parts(
        &mut self,
        error: ReadError,
        len: Sectors,
        read: impl Fn(&mut Self, Sectors, Sectors) -> Result<(), String>,
    ) -> Result<(), ExtractError> {
        if !self.it.options.best_effort {
            return Err(ExtractError::Read(error));
        }
        let mut part = Sectors(0);
        while part < len {
            let n = Sectors((len.0 - part.0).min(RETRY_SECTORS));
            match read(self, part, n) {
                Ok(()) => self.write(n)?,
                Err(reason) => {
                    self.lose(n, reason);
                    self.zeros(n)?;
                }
            }
            part.0 += n.0;
        }
        Ok(())
    }

    fn lose(&mut self, len: Sectors, reason: String) {
        self.result.lost_sectors += len.0;
        if self.result.lost.len() < MAX_LOST {
            self.result.lost.push(Lost { start: self.done.0, sectors: len.0, reason });
        }
    }

    /// Reads `len` sectors, [`CHUNK`] bytes at most, into the front of the buffer.
    fn read(&mut self, from: &dyn ReadAt, at: Sector, len: Sectors) -> Result<(), ReadError> {
        from.read_at(at, front(&mut self.buffer, len))
    }

    /// Writes the front of the buffer to the sink.
    fn write(&mut self, len: Sectors) -> Result<(), ExtractError> {
        self.sink.data(front(&mut self.buffer, len)).map_err(ExtractError::Output)?;
        self.advance(len)
    }

    fn zeros(&mut self, len: Sectors) -> Result<(), ExtractError> {
        let mut left = len;
        while left > Sectors(0) {
            let n = left.min(ZEROS);
            self.sink.zeros(n).map_err(ExtractError::Output)?;
            self.advance(n)?;
            left -= n;
        }
        Ok(())
    }

    fn advance(&mut self, len: Sectors) -> Result<(), ExtractError> {
        self.done.0 += len.0;
        match (self.progress)(Progress { done: self.done, total: self.it.sectors }) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => {
                Err(ExtractError::Cancelled { done: self.done, total: self.it.sectors })
            }
        }
    }
}

fn front(buffer: &mut [u8], len: Sectors) -> &mut [u8] {
    let len = usize::try_from(len.bytes()).unwrap_or(usize::MAX).min(buffer.len());
    buffer.get_mut(..len).unwrap_or_default()
}
