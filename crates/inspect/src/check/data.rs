//! The data of live extents against its checksums: invariant 21.
//!
//! Owns the reading of all cached data in the order of the cache device, and the figures and ranges for the report. Must not know
//! how a footer is read.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::ControlFlow;

use format::{Inode, Ptr, Sector, Sectors, counted, form};
use serde::Serialize;

use crate::device::unreadable_at;
use crate::extent_map::Piece;
use crate::finding::{Finding, Findings, Invariant, Mismatch, Severity};
use crate::source::{ReadAt, ReadError};
use crate::verify::Verifier;
use crate::view::{PieceKind, SetView, SlotKind, data_place};

/// Number of sectors that are read at a time.
const CHUNK: u64 = 2048;

/// The data of one slot, as its checksums say.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct DataSummary {
    /// Blocks whose data has the checksum of its footer.
    pub verified_blocks: u64,
    /// Blocks without a valid footer; that is no damage.
    pub unverified_blocks: u64,
    /// Blocks of dirty data that do not have their checksum, or cannot be read.
    pub damaged_dirty_blocks: u64,
    /// Blocks of clean data that do not have their checksum, or cannot be read.
    pub damaged_clean_blocks: u64,
    /// The damaged ranges, in order; all of them.
    pub damaged: Vec<DamagedRange>,
}

/// A range of damaged data.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
pub struct DamagedRange {
    /// First sector as keys count it: for a cached device it includes the data offset, so it is a sector of the backing
    /// device.
    pub position: u64,
    /// First sector on the volume; absent if the backing device, which says the data offset, was not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sector: Option<u64>,
    /// Length in sectors.
    pub sectors: u64,
    /// Whether the data is newer than the backing device.
    pub dirty: bool,
}

impl DataSummary {
    fn damage(&mut self, start: Sector, len: Sectors, dirty: bool) {
        let blocks = if dirty { &mut self.damaged_dirty_blocks } else { &mut self.damaged_clean_blocks };
        *blocks += 1;
        match self.damaged.last_mut() {
            Some(last) if last.dirty == dirty && last.position + last.sectors == start.0 => {
                last.sectors += len.0;
            }
            _ => {
                let sectors = len.0;
                self.damaged.push(DamagedRange { position: start.0, sector: None, sectors, dirty });
            }
        }
    }

    /// Orders the ranges, joins those that meet, and adds the sectors on the volume.
    pub(super) fn finished(mut self, data_offset: Option<Sector>) -> DataSummary {
        self.damaged.sort_unstable();
        let mut joined: Vec<DamagedRange> = Vec::new();
        for range in self.damaged {
            match joined.last_mut() {
                Some(l) if l.dirty == range.dirty && l.position + l.sectors == range.position => {
                    l.sectors += range.sectors;
                }
                _ => joined.push(range),
            }
        }
        for range in &mut joined {
            range.sector = data_offset.and_then(|first| range.position.checked_sub(first.0));
        }
        self.damaged = joined;
        self
    }
}

/// Number of damaged ranges in the text of a report.
const SHOWN: usize = 20;

impl fmt::Display for DataSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DataSummary { verified_blocks, unverified_blocks, .. } = self;
        let (dirty, clean) = (self.damaged_dirty_blocks, self.damaged_clean_blocks);
        let verified = counted(verified_blocks, "block");
        write!(f, "    checksums: {verified} verified, {unverified_blocks} unverified")?;
        if dirty + clean == 0 {
            return writeln!(f);
        }
        writeln!(f, ", DAMAGED: {} and {}", counted(dirty, "dirty block"), counted(clean, "clean block"))?;
        for range in self.damaged.iter().take(SHOWN) {
            writeln!(f, "      {range}")?;
        }
        match self.damaged.len().checked_sub(SHOWN) {
            None | Some(0) => Ok(()),
            Some(more) => writeln!(f, "      and {}, which --json lists", counted(more, "more range")),
        }
    }
}

impl fmt::Display for DamagedRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = if self.dirty { "dirty" } else { "clean" };
        match self.sector {
            Some(start) => {
                write!(f, "damaged, {what}: sectors {start}+{} of the volume", self.sectors)
            }
            None => {
                let (start, sectors) = (self.position, self.sectors);
                write!(f, "damaged, {what}: sectors {start}+{sectors} of the backing device")
            }
        }
    }
}

/// The result of the comparison, by slot.
#[derive(Clone, Debug, Default)]
pub(super) struct VerifiedData {
    /// Whether the set has checksums and the data was compared with them.
    pub(super) compared: bool,
    pub(super) slots: BTreeMap<Inode, DataSummary>,
    /// The caller stopped the comparison before its end.
    pub(super) cancelled: bool,
}

/// The data that [`verify`] reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Which {
    /// All cached data.
    All,
    /// Dirty data alone, whose damage is a loss.
    Dirty,
}

/// Sectors that [`verify`] looks at; none if the set has no checksums.
pub(super) fn sectors_to_verify(view: &SetView, cache: &dyn ReadAt, which: Which) -> Sectors {
    if Verifier::of(view, cache).is_none() {
        return Sectors(0);
    }
    let wanted = view
        .pieces()
        .filter(|(inode, piece, kind)| piece.ptr.is_some() && is_wanted(view, *inode, *kind, which));
    Sectors(wanted.map(|(_, piece, _)| piece.len.0).sum())
}

/// An extent whose data is compared.
struct Data<'a> {
    inode: Inode,
    piece: &'a Piece,
    ptr: Ptr,
    /// Whether the data is dirty, so that it is nowhere else.
    dirty: bool,
}

/// Whether a piece is data that a client can read. That of a deleted volume is not: its slot is invalid, and a wipe or a new use may
/// overwrite its buckets before its keys are gone from the device.
fn is_wanted(view: &SetView, inode: Inode, kind: PieceKind, which: Which) -> bool {
    let is_valid = view.slots.get(&inode).is_none_or(|slot| slot.kind != SlotKind::Invalidated);
    is_valid && kind.is_live() && (which == Which::All || kind == PieceKind::Dirty)
}

/// Compares cached data with its checksums, in the order of the cache device.
///
/// `progress` is called with the number of sectors that were looked at.
pub(super) fn verify(
    view: &SetView,
    cache: &dyn ReadAt,
    which: Which,
    findings: &mut Findings,
    progress: &mut dyn FnMut(Sectors) -> ControlFlow<()>,
) -> VerifiedData {
    let mut found = VerifiedData::default();
    let Some(mut verifier) = Verifier::of(view, cache) else { return found };
    found.compared = true;
    let live = view.pieces().filter(|(inode, _, kind)| is_wanted(view, *inode, *kind, which));
    let mut all: Vec<Data<'_>> = live
        .filter_map(|(inode, piece, kind)| {
            Some(Data { inode, piece, ptr: piece.ptr?, dirty: kind == PieceKind::Dirty })
        })
        .collect();
    all.sort_unstable_by_key(|data| data.ptr.offset());
    let mut buffer = Vec::new();
    for data in &all {
        let summary = found.slots.entry(data.inode).or_default();
        let mut pass = Pass { view, cache, verifier: &mut verifier, findings, summary, buffer: &mut buffer };
        pass.extent(data);
        if progress(data.piece.len).is_break() {
            found.cancelled = true;
            break;
        }
    }
    found
}

/// The comparison of one extent.
struct Pass<'a, 'b> {
    view: &'a SetView,
    cache: &'a dyn ReadAt,
    verifier: &'a mut Verifier<'b>,
    findings: &'a mut Findings,
    summary: &'a mut DataSummary,
    buffer: &'a mut Vec<u8>,
}

/// The damage in one extent, from which its finding is made. An extent has at most one finding.
#[derive(Default)]
struct Worst {
    blocks: u64,
    /// The first damaged block: its start as keys count, the checksum expected and the one found.
    first: Option<(Sector, u32, u32)>,
    unreadable: Option<ReadError>,
}

impl Pass<'_, '_> {
    fn extent(&mut self, data: &Data<'_>) {
        let len = data.piece.len;
        if !self.verifier.has_sums(data.ptr) {
            self.summary.unverified_blocks += self.verifier.blocks_of(data.ptr.offset(), len);
            return;
        }
        let mut worst = Worst::default();
        let mut at = Sectors(0);
        while at < len {
            let n = Sectors((len.0 - at.0).min(CHUNK));
            if self.chunk(data, at, n, &mut worst).is_err() {
                self.by_blocks(data, at, n, &mut worst);
            }
            at.0 += n.0;
        }
        self.report(data, worst);
    }

    /// Compares a part of an extent that cannot be read at once.
    fn by_blocks(&mut self, data: &Data<'_>, from: Sectors, len: Sectors, worst: &mut Worst) {
        let block = self.verifier.block_sectors().0;
        let mut done = 0;
        while done < len.0 {
            let at = Sectors(from.0 + done);
            let in_block = data.ptr.advanced(at).offset().0 % block;
            let n = Sectors((len.0 - done).min(block - in_block));
            if let Err(e) = self.chunk(data, at, n, worst) {
                self.summary.damage(Sector(data.piece.start.0 + at.0), n, data.dirty);
                worst.unreadable.get_or_insert(e);
            }
            done += n.0;
        }
    }

    fn chunk(
        &mut self,
        data: &Data<'_>,
        at: Sectors,
        len: Sectors,
        worst: &mut Worst,
    ) -> Result<(), ReadError> {
        let ptr = data.ptr.advanced(at);
        self.buffer.resize(usize::try_from(len.bytes()).unwrap_or(0), 0);
        self.cache.read_at(ptr.offset(), self.buffer)?;
        let verdict = self.verifier.compare(ptr, self.buffer)?;
        self.summary.verified_blocks += verdict.verified;
        self.summary.unverified_blocks += verdict.unverified;
        for block in verdict.damaged {
            let start = Sector(data.piece.start.0 + at.0 + block.from.0);
            self.summary.damage(start, block.sectors, data.dirty);
            worst.blocks += 1;
            worst.first.get_or_insert((start, block.expected, block.found));
        }
        Ok(())
    }

    fn report(&mut self, data: &Data<'_>, worst: Worst) {
        let invariant = Invariant::DataChecksum;
        let place = || data_place(self.view, data.inode, data.piece);
        if let Some(e) = &worst.unreadable {
            self.findings.push_with(invariant, Severity::Error, || {
                unreadable_at(invariant, Severity::Error, place(), e)
            });
        }
        let Some((start, expected, found)) = worst.first else { return };
        let (severity, note) = if data.dirty {
            (Severity::Error, "this data is nowhere else: reads of it fail, and it is not written back")
        } else {
            (
                Severity::Notice,
                "ubcache reads this data from the backing device instead; a kernel would return the damaged bytes",
            )
        };
        self.findings.push_with(invariant, severity, || {
            let field = if data.dirty { "checksum of dirty data" } else { "checksum of clean data" };
            let (expected, found) = (
                format!("{expected:#010x}"),
                format!(
                    "{found:#010x} in {}; {} {} damaged",
                    self.view.range_text(data.inode, start, self.verifier.block_sectors()),
                    counted(worst.blocks, "block"),
                    form(worst.blocks, "is", "are")
                ),
            );
            Finding::new(severity, invariant, place(), Mismatch::new(field, expected, found)).note(note)
        });
    }
}
