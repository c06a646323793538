//! A running extraction: reads ranges from their devices and passes them to the sink in order.
//!
//! Owns the copying, and the best effort if a device fails: it reads parts again separately, reads clean data from the backing
//! device instead, and fills lost ranges with zeros and lists them. The same happens to data that does not have its checksum,
//! as far as the options allow. The plan of the extraction has chosen the device of each range.

use std::borrow::Cow;
use std::ops::ControlFlow;

use format::{Sector, Sectors};

use super::error::Ranges;
use super::{DamagedDirty, ExtractError, Extracted, Extraction, Lost, Progress, Remark, Sink};
use crate::SCHEMA_VERSION;
use crate::extent_map::Piece;
use crate::source::{ReadAt, ReadError};
use crate::verify::{DamagedBlock, Verifier};
use crate::view::PieceKind;

/// Number of lost ranges that are listed. Further ones are only counted.
const MAX_LOST: usize = 1000;
/// Number of damaged ranges in the message of a refusal.
const MAX_NAMED: usize = 50;
/// Number of bytes that are read and written at a time.
const CHUNK: usize = 1 << 20;
/// Number of zero sectors that are written between two checks for cancellation: 1 GiB.
const ZEROS: Sectors = Sectors(1 << 21);
/// Number of sectors of a retry after a larger read failed.
const RETRY_SECTORS: u64 = 8;

/// A part that cannot be read, so that the output has zeros there.
#[derive(Debug, thiserror::Error)]
#[error("zeros in place of {of}: {source}")]
struct Gap {
    of: Cow<'static, str>,
    source: ReadError,
}

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
    let verifier = Verifier::of(it.view, it.cache);
    let (buffer, done, refused) = (vec![0; CHUNK], Sectors(0), false);
    let mut run = Run { it, sink, progress, verifier, result, buffer, done, refused };
    let mut at = it.data_offset;
    for (piece, kind) in it.overlay() {
        run.gap(at, piece.start)?;
        run.extent(&piece, kind)?;
        at = piece.end();
    }
    run.gap(at, it.end())?;
    let (mut result, refused) = (run.result, run.refused);
    if refused {
        return Err(refusal(it, result));
    }
    if result.damaged_clean_sectors > 0 {
        result.warnings.push(format!(
            "{}: clean data without its checksum was read from the backing device: {}",
            it.view.device,
            format::counted(result.damaged_clean_sectors, "sector")
        ));
    }
    sink.finish().map_err(ExtractError::Output)?;
    Ok(result)
}

fn refusal(it: &Extraction<'_>, result: Extracted) -> ExtractError {
    let sectors = Sectors(result.lost_sectors);
    let mut listed = result.lost;
    let more = listed.iter().map(|l| l.sectors).sum::<u64>() < sectors.0 || listed.len() > MAX_NAMED;
    listed.truncate(MAX_NAMED);
    ExtractError::DamagedData { cache: it.view.device.clone(), sectors, ranges: Ranges { listed, more } }
}

/// A running extraction.
struct Run<'a, 'b> {
    it: &'a Extraction<'a>,
    sink: &'b mut dyn Sink,
    progress: &'b mut dyn FnMut(Progress) -> ControlFlow<()>,
    verifier: Option<Verifier<'a>>,
    result: Extracted,
    buffer: Vec<u8>,
    done: Sectors,
    /// Damage was found that the options refuse. The rest of the dirty data is verified, so that the error names all ranges, and
    /// nothing more is written.
    refused: bool,
}

impl Run<'_, '_> {
    /// Writes a range that no extent covers. Positions are those of keys.
    fn gap(&mut self, from: Sector, to: Sector) -> Result<(), ExtractError> {
        if self.refused {
            return self.advance(Sectors(to.0.saturating_sub(from.0)));
        }
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
                            Err(source) => Err(Gap { of: Cow::Borrowed("the backing device's"), source }),
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
        if piece.ptr.is_none() {
            return Ok(());
        }
        if self.refused && kind != PieceKind::Dirty {
            return self.advance(piece.len);
        }
        let mut at = Sectors(0);
        while at < piece.len {
            let len = Sectors((piece.len.0 - at.0).min(CHUNK as u64 / 512));
            let position = Sector(piece.start.0 + at.0);
            match self.read_verified(&Extent { piece, kind }, at, len) {
                Ok(()) => self.write(len)?,
                Err(e) => self.by_parts(e, len, |run, part, len| {
                    let of_part = Sectors(at.0 + part.0);
                    let Err(source) = run.read_verified(&Extent { piece, kind }, of_part, len) else {
                        return Ok(());
                    };
                    let backing = run.it.backing.filter(|_| kind == PieceKind::Clean);
                    match backing.map(|b| run.read(b, Sector(position.0 + part.0), len)) {
                        // The backing device has clean data too.
                        Some(Ok(())) => {
                            run.sink.remark(run.done, len, Remark::FromBacking);
                            Ok(())
                        }
                        _ => Err(Gap { of: Cow::Owned(format!("{} data", kind.name())), source }),
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

    /// Reads a part of an extent into the front of the buffer, and replaces what does not have its checksum.
    fn read_verified(&mut self, extent: &Extent<'_>, at: Sectors, len: Sectors) -> Result<(), ReadError> {
        let Some(ptr) = extent.piece.ptr.map(|ptr| ptr.advanced(at)) else { return Ok(()) };
        self.read(self.it.cache, ptr.offset(), len)?;
        let Some(verifier) = &mut self.verifier else { return Ok(()) };
        let verdict = verifier.compare(ptr, front(&mut self.buffer, len))?;
        self.result.verified_blocks += verdict.verified;
        self.result.unverified_blocks += verdict.unverified;
        for block in verdict.damaged {
            self.replace(extent, at, &block);
        }
        Ok(())
    }

    /// Replaces a damaged block in the buffer, which begins `at` sectors behind the start of the extent.
    fn replace(&mut self, extent: &Extent<'_>, at: Sectors, block: &DamagedBlock) {
        let position = Sector(extent.piece.start.0 + at.0 + block.from.0);
        let bytes = part(&mut self.buffer, block.from, block.sectors);
        let older = |bytes: &mut [u8]| self.it.backing.is_some_and(|b| b.read_at(position, bytes).is_ok());
        let in_place = if extent.kind == PieceKind::Clean {
            if older(bytes) {
                self.result.damaged_clean_sectors += block.sectors.0;
                let start = Sectors(self.done.0 + block.from.0);
                self.sink.remark(start, block.sectors, Remark::FromBacking);
                return;
            }
            bytes.fill(0);
            "zeros in place of"
        } else {
            match self.it.options.damaged {
                DamagedDirty::Refuse => {
                    self.refused = true;
                    "no output for"
                }
                DamagedDirty::AsIs => "the damaged bytes of",
                DamagedDirty::Older if older(bytes) => "older data in place of",
                DamagedDirty::Older | DamagedDirty::Zeros => {
                    bytes.fill(0);
                    "zeros in place of"
                }
            }
        };
        let kind = extent.kind.name();
        let reason = format!("{in_place} {kind} data that does not have its checksum");
        self.lose(block.from, block.sectors, Remark::Damaged, reason);
    }

    /// After a read of `len` sectors failed with `error`: reads parts with `read`, which fills the front
    /// of the buffer or lists the range as lost. Without best effort it returns the error. The reason of a gap
    /// becomes a line of the report.
    fn by_parts(
        &mut self,
        error: ReadError,
        len: Sectors,
        read: impl Fn(&mut Self, Sectors, Sectors) -> Result<(), Gap>,
    ) -> Result<(), ExtractError> {
        if !self.it.options.best_effort {
            return Err(ExtractError::Read(error));
        }
        let mut part = Sectors(0);
        while part < len {
            let n = Sectors((len.0 - part.0).min(RETRY_SECTORS));
            match read(self, part, n) {
                Ok(()) => self.write(n)?,
                Err(gap) => {
                    self.lose(Sectors(0), n, Remark::Unreadable, gap.to_string());
                    self.zeros(n)?;
                }
            }
            part.0 += n.0;
        }
        Ok(())
    }

    /// Adds a range to the list of lost ranges. It begins `from` sectors behind the last sector that was written to the output.
    fn lose(&mut self, from: Sectors, len: Sectors, why: Remark, reason: String) {
        self.result.lost_sectors += len.0;
        let start = self.done.0 + from.0;
        self.sink.remark(Sectors(start), len, why);
        let is_full = self.result.lost.len() >= MAX_LOST;
        match self.result.lost.last_mut() {
            Some(last) if last.start + last.sectors == start && last.reason == reason => {
                last.sectors += len.0
            }
            _ if !is_full => {
                self.result.lost.push(Lost { start, sectors: len.0, reason });
            }
            _ => {}
        }
    }

    /// Reads `len` sectors, [`CHUNK`] bytes at most, into the front of the buffer.
    fn read(&mut self, from: &dyn ReadAt, at: Sector, len: Sectors) -> Result<(), ReadError> {
        from.read_at(at, front(&mut self.buffer, len))
    }

    /// Writes the front of the buffer to the sink.
    fn write(&mut self, len: Sectors) -> Result<(), ExtractError> {
        if !self.refused {
            self.sink.data(front(&mut self.buffer, len)).map_err(ExtractError::Output)?;
        }
        self.advance(len)
    }

    fn zeros(&mut self, len: Sectors) -> Result<(), ExtractError> {
        if self.refused {
            return self.advance(len);
        }
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

/// An extent that is part of the output.
struct Extent<'a> {
    piece: &'a Piece,
    kind: PieceKind,
}

/// The sectors of the buffer from a distance on.
fn part(buffer: &mut [u8], from: Sectors, len: Sectors) -> &mut [u8] {
    let at = usize::try_from(from.bytes()).unwrap_or(usize::MAX);
    front(buffer.get_mut(at..).unwrap_or_default(), len)
}

fn front(buffer: &mut [u8], len: Sectors) -> &mut [u8] {
    let len = usize::try_from(len.bytes()).unwrap_or(usize::MAX).min(buffer.len());
    buffer.get_mut(..len).unwrap_or_default()
}
