//! The contents of a cached device or of a volume, as a whole.
//!
//! Owns [`Extraction`]: what is read from where (cache over backing, format section 10 step 8), and the
//! decision what is refused. [`sink`] is where it goes. It reads only, and works on a set that was not
//! shut down.
//!
//! *Invariant:* without best effort, what comes out is what the kernel would return after its own
//! recovery, or nothing: whatever could make a sector wrong is an error before the first byte is
//! written, except a device that fails while it is read.

mod error;
mod sink;

pub use error::ExtractError;
pub use sink::{FileSink, Sink, StreamSink};

use std::ops::ControlFlow;

use format::superblock::DEFAULT_DATA_OFFSET;
use format::{BackingState, BackingSuper, Inode, Sector, Sectors};
use serde::Serialize;

use crate::attach::{Relation, Standing};
use crate::device::{DeviceSuper, read_superblock};
use crate::extent_map::Piece;
use crate::finding::Severity;
use crate::source::{ReadAt, ReadError};
use crate::view::{PieceKind, SetView, SlotKind};

/// What to extract.
#[derive(Clone, Copy)]
pub enum Target<'a> {
    /// The cached device with this backing device.
    Cached(&'a dyn ReadAt),
    /// The volume in this slot.
    Volume(Inode),
    /// What the cache has of the cached device in this slot, whose backing device is not at hand. Only
    /// with best effort.
    WithoutBacking {
        /// The slot.
        slot: Inode,
        /// First data sector of the absent device, which only its superblock knows;
        /// [`DEFAULT_DATA_OFFSET`] on most.
        data_offset: Sector,
    },
}

impl Target<'_> {
    /// [`Target::WithoutBacking`] with the usual data offset.
    pub const fn without_backing(slot: Inode) -> Target<'static> {
        Target::WithoutBacking { slot, data_offset: DEFAULT_DATA_OFFSET }
    }
}

/// How to extract.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ExtractOptions {
    /// Leave clean extents alone and read their ranges from the backing device. The two differ after
    /// some crashes.
    pub dirty_only: bool,
    /// Go on where the contents cannot be right, and say so in the result.
    pub best_effort: bool,
}

/// How far it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Progress {
    /// Sectors handed to the sink.
    pub done: Sectors,
    /// All of them.
    pub total: Sectors,
}

/// A range without its contents.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Lost {
    /// First sector on the cached device or volume.
    pub start: u64,
    /// Length in sectors.
    pub sectors: u64,
    /// What stands there now, and why.
    pub reason: String,
}

/// What was extracted.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Extracted {
    /// Size of the device or volume in sectors; all of it was written to the sink.
    pub sectors: u64,
    /// Sectors from dirty extents.
    pub dirty_sectors: u64,
    /// Sectors from clean extents.
    pub clean_sectors: u64,
    /// Sectors from the backing device.
    pub backing_sectors: u64,
    /// Sectors of zeros: holes of the backing device, or parts of a volume that were never written.
    pub zero_sectors: u64,
    /// Sectors whose contents are lost; zeros or older data stand there.
    pub lost_sectors: u64,
    /// Where, as far as kept.
    pub lost: Vec<Lost>,
    /// What was assumed, or left out.
    pub notes: Vec<String>,
}

/// No file and no device can be longer than 2^63 bytes.
const MAX_SECTORS: u64 = 1 << 54;
/// Lost ranges that are listed; more are counted only.
const MAX_LOST: usize = 1000;

/// Contents that can be extracted.
pub struct Extraction<'a> {
    view: &'a SetView,
    cache: &'a dyn ReadAt,
    backing: Option<&'a dyn ReadAt>,
    /// The slot whose extents are merged in.
    slot: Option<Inode>,
    data_offset: Sector,
    sectors: Sectors,
    options: ExtractOptions,
    notes: Vec<String>,
}

impl<'a> Extraction<'a> {
    /// Finds out what `target` consists of. Reads nothing but the backing device's superblock.
    ///
    /// `cache` is the device that `view` was opened from.
    ///
    /// # Errors
    /// If the contents could not be right; see [`ExtractError`]. With best effort only if there is
    /// nothing to extract.
    pub fn new(
        view: &'a SetView,
        cache: &'a dyn ReadAt,
        target: Target<'a>,
        options: ExtractOptions,
    ) -> Result<Extraction<'a>, ExtractError> {
        let fatal = view.findings.list().iter().find(|f| f.severity == Severity::Fatal);
        if let Some(finding) = fatal.filter(|_| !options.best_effort) {
            return Err(ExtractError::Damaged { finding: Box::new(finding.clone()) });
        }
        let mut it = Extraction {
            view,
            cache,
            backing: None,
            slot: None,
            data_offset: Sector(0),
            sectors: Sectors(0),
            options,
            notes: view.assumptions.clone(),
        };
        match target {
            Target::Cached(backing) => it.cached(backing)?,
            Target::Volume(inode) => it.volume(inode)?,
            Target::WithoutBacking { slot, data_offset } => it.without_backing(slot, data_offset)?,
        }
        if it.sectors.0 > MAX_SECTORS {
            let (sectors, most) = (it.sectors, MAX_SECTORS);
            return Err(ExtractError::TooLarge { sectors, most });
        }
        it.check_extents()?;
        Ok(it)
    }

    /// Size of what will be extracted.
    pub fn sectors(&self) -> Sectors {
        self.sectors
    }

    /// What was assumed, or left out, so far.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// An error, or with best effort a note.
    fn refuse(&mut self, error: ExtractError) -> Result<(), ExtractError> {
        if !self.options.best_effort {
            return Err(error);
        }
        self.notes.push(error.to_string());
        Ok(())
    }

    fn cached(&mut self, source: &'a dyn ReadAt) -> Result<(), ExtractError> {
        let backing = match read_superblock(source) {
            Ok(DeviceSuper::Backing(backing)) => backing,
            Ok(DeviceSuper::Cache(_)) => {
                return Err(ExtractError::NotABackingDevice { device: source.name().to_owned() });
            }
            Err(finding) => return Err(ExtractError::Damaged { finding }),
        };
        self.backing = Some(source);
        self.data_offset = backing.data_offset();
        self.sectors = backing.data_sectors();
        let relation = Relation::of(self.view, &backing);
        self.slot = relation.attached();
        if relation.standing != Standing::Attached {
            self.backing_alone(source, &backing, relation)?;
        }
        Ok(())
    }

    /// The cache has nothing for this backing device: is it complete alone?
    fn backing_alone(
        &mut self,
        source: &dyn ReadAt,
        backing: &BackingSuper,
        relation: Relation,
    ) -> Result<(), ExtractError> {
        let device = source.name().to_owned();
        let (cache, set) = (self.view.device.clone(), self.view.superblock.set_uuid());
        let state = backing.state();
        match relation.standing {
            Standing::OtherSet => self.refuse(ExtractError::OtherSet {
                device,
                device_set: backing.set_uuid(),
                state: state.name(),
                cache,
                set,
            }),
            Standing::NoSlot if state == BackingState::Dirty => self.refuse(ExtractError::NoSlot {
                device,
                uuid: backing.uuid(),
                state: state.name(),
                cache,
                set,
            }),
            Standing::Void => {
                let totals = relation.slot.map(|slot| self.view.totals_of(slot)).unwrap_or_default();
                let slot = relation.slot.unwrap_or_default();
                let error = ExtractError::VoidSlot {
                    device,
                    state: state.name(),
                    slot,
                    dirty_sectors: totals.dirty_sectors,
                    clean_sectors: totals.clean_sectors,
                };
                if totals.dirty_sectors > 0 {
                    return self.refuse(error);
                }
                self.notes.push(error.to_string());
                Ok(())
            }
            Standing::NoSlot | Standing::Unattached | Standing::Attached => {
                self.notes.push(format!(
                    "{device} (state {}) has nothing in {cache}: these are its own contents",
                    state.name()
                ));
                Ok(())
            }
        }
    }

    fn volume(&mut self, inode: Inode) -> Result<(), ExtractError> {
        match self.view.slots.get(&inode).map(|slot| slot.kind) {
            Some(SlotKind::Volume(sectors)) => {
                self.slot = Some(inode);
                self.sectors = sectors;
                Ok(())
            }
            other => Err(ExtractError::NotAVolume {
                cache: self.view.device.clone(),
                slot: inode,
                found: match other {
                    Some(SlotKind::Cached) => "a cached device",
                    Some(SlotKind::Invalidated) => "a device that was detached, or a volume that was deleted",
                    _ => "nothing",
                },
                volumes: self.view.volumes().map(|(inode, _)| inode).collect(),
            }),
        }
    }

    fn without_backing(&mut self, slot: Inode, data_offset: Sector) -> Result<(), ExtractError> {
        let uuid = self.view.slots.get(&slot).filter(|s| s.is_backing()).map(|s| s.uuid);
        let totals = self.view.totals_of(slot);
        if uuid.is_none() && totals.live_extents() == 0 {
            let cache = self.view.device.clone();
            return Err(ExtractError::NothingInSlot { cache, slot });
        }
        self.refuse(ExtractError::BackingAbsent {
            slot,
            uuid: uuid.unwrap_or_default(),
            dirty_sectors: totals.dirty_sectors,
            clean_sectors: totals.clean_sectors,
        })?;
        let end = self.view.live(slot).map(|(piece, _)| piece.end()).max().unwrap_or(data_offset);
        self.slot = Some(slot);
        self.data_offset = data_offset;
        self.sectors = end.checked_since(data_offset).unwrap_or_default();
        Ok(())
    }

    /// Dirty data that is there and cannot come out.
    fn check_extents(&mut self) -> Result<(), ExtractError> {
        let Some(slot) = self.slot else { return Ok(()) };
        let (first, end) = (self.data_offset, self.end());
        let (mut outside, mut unusable) = ((0, None), (0, None));
        for piece in self.view.extents.of_inode(slot).filter(|p| p.dirty) {
            let count = match self.view.kind(piece) {
                PieceKind::Dirty if piece.start < first || piece.end() > end => &mut outside,
                PieceKind::Invalid => &mut unusable,
                _ => continue,
            };
            count.0 += piece.len.0;
            count.1.get_or_insert(piece.start);
        }
        if let (dirty_sectors, Some(at)) = outside {
            self.refuse(ExtractError::OutsideDevice { slot, dirty_sectors, at, first, end })?;
        }
        if let (dirty_sectors, Some(at)) = unusable {
            self.refuse(ExtractError::InvalidPointer { slot, dirty_sectors, at })?;
        }
        Ok(())
    }

    /// End (exclusive) in key positions.
    fn end(&self) -> Sector {
        Sector(self.data_offset.0.saturating_add(self.sectors.0))
    }

    /// The extents that are merged in, cut to the device; positions as in keys.
    fn overlay(&self) -> impl Iterator<Item = (Piece, PieceKind)> + '_ {
        let (first, end) = (self.data_offset, self.end());
        let dirty_only = self.options.dirty_only;
        let live = self.slot.map(|slot| self.view.live(slot)).into_iter().flatten();
        live.filter(move |(_, kind)| *kind == PieceKind::Dirty || !dirty_only)
            .filter_map(move |(piece, kind)| Some((piece.cut(first, end)?, kind)))
    }

    /// Writes everything to `sink`, from the first sector to the last. `progress` is called now and
    /// then, and ends the extraction by answering [`ControlFlow::Break`].
    ///
    /// # Errors
    /// If a device or the sink fails, or `progress` says so. What was written up to then is in the sink
    /// and is not complete.
    pub fn run(
        &self,
        sink: &mut dyn Sink,
        progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<Extracted, ExtractError> {
        sink.begin(self.sectors).map_err(ExtractError::Output)?;
        let mut run = Run {
            it: self,
            sink,
            progress,
            result: Extracted { sectors: self.sectors.0, notes: self.notes.clone(), ..Extracted::default() },
            buffer: vec![0; CHUNK],
            done: Sectors(0),
        };
        let mut at = self.data_offset;
        for (piece, kind) in self.overlay() {
            run.gap(at, piece.start)?;
            run.extent(&piece, kind)?;
            at = piece.end();
        }
        run.gap(at, self.end())?;
        let result = run.result;
        sink.finish().map_err(ExtractError::Output)?;
        Ok(result)
    }
}

/// Bytes that are read and written at a time.
const CHUNK: usize = 1 << 20;
/// Zeros that are handed on between two looks at whether to go on: 1 GiB.
const ZEROS: Sectors = Sectors(1 << 21);
/// Sectors that are read alone after a larger read failed.
const RETRY_SECTORS: u64 = 8;

/// An extraction under way.
struct Run<'a, 'b> {
    it: &'a Extraction<'a>,
    sink: &'b mut dyn Sink,
    progress: &'b mut dyn FnMut(Progress) -> ControlFlow<()>,
    result: Extracted,
    buffer: Vec<u8>,
    done: Sectors,
}

impl Run<'_, '_> {
    /// A range that no extent covers; positions as in keys.
    fn gap(&mut self, from: Sector, to: Sector) -> Result<(), ExtractError> {
        let mut at = from;
        while at < to {
            // Without a backing device everything here is zero.
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

    /// A cached range.
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
                        // Clean data is on the backing device too.
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
    /// of the buffer or says what is lost. Without best effort the error stands.
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

    /// Reads into the front of the buffer; `len` is at most [`CHUNK`].
    fn read(&mut self, from: &dyn ReadAt, at: Sector, len: Sectors) -> Result<(), ReadError> {
        from.read_at(at, front(&mut self.buffer, len))
    }

    /// Hands the front of the buffer to the sink.
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
