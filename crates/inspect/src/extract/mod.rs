//! The contents of a cached device or of a volume, as a whole.
//!
//! Owns [`Extraction`], which decides from which device each range is read (cache over backing device, step 8 of format section
//! 10), and the refusals. [`Sink`] is the output. An extraction only reads, and works on a set that was not shut down.
//!
//! Invariant: without best effort, the output is what the kernel would return after its own recovery, or the extraction fails.
//! Every condition that could make a sector wrong is an error before the first byte is written, except a device that fails
//! during a read, and dirty data that does not have its checksum. Damaged clean data is read from the backing device.

mod error;
mod run;
mod sink;

pub use error::ExtractError;
pub use sink::{FileSink, Remark, Sink, StreamSink};

use std::ops::ControlFlow;

use format::superblock::DEFAULT_DATA_OFFSET;
use format::{BackingState, BackingSuper, Inode, Sector, Sectors};
use serde::Serialize;

use crate::attach::{Attachment, Relation};
use crate::device::{DeviceSuper, read_superblock};
use crate::extent_map::Piece;
use crate::finding::Severity;
use crate::source::ReadAt;
use crate::view::{PieceKind, SetView, SlotKind};

/// The target of an extraction.
#[derive(Clone, Copy)]
pub enum Target<'a> {
    /// The cached device with this backing device.
    Cached(&'a dyn ReadAt),
    /// The volume in this slot.
    Volume(Inode),
    /// The cached data of the cached device in this slot, without its backing device. Needs best effort.
    WithoutBacking {
        /// The slot.
        slot: Inode,
        /// First data sector of the absent device, which only its superblock has; [`DEFAULT_DATA_OFFSET`] on most devices.
        data_offset: Sector,
    },
}

impl Target<'_> {
    /// [`Target::WithoutBacking`] with the usual data offset.
    pub const fn without_backing(slot: Inode) -> Target<'static> {
        Target::WithoutBacking { slot, data_offset: DEFAULT_DATA_OFFSET }
    }
}

/// Options of an extraction.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ExtractOptions {
    /// Reads the ranges of clean extents from the backing device. Cache and backing device differ after some crashes.
    pub dirty_only: bool,
    /// Continues where the contents may be wrong, and lists these places in the result.
    pub best_effort: bool,
    /// What the output gets in place of dirty data that does not have its checksum.
    pub damaged: DamagedDirty,
}

/// What the output gets in place of dirty data that does not have its checksum.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DamagedDirty {
    /// Nothing: the extraction fails with the list of these ranges.
    #[default]
    Refuse,
    /// Zeros; the ranges are listed as lost.
    Zeros,
    /// The older data of the backing device, or zeros of a volume; the ranges are listed as lost.
    Older,
    /// The damaged bytes; the ranges are listed as lost.
    AsIs,
}

/// Progress of an extraction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Progress {
    /// Sectors handed to the sink.
    pub done: Sectors,
    /// Sectors of the whole output.
    pub total: Sectors,
}

/// A range whose contents are lost.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Lost {
    /// First sector on the cached device or volume.
    pub start: u64,
    /// Length in sectors.
    pub sectors: u64,
    /// What the output has in the range, and the reason.
    pub reason: String,
}

/// The result of an extraction.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Extracted {
    /// Version of this document's layout.
    pub schema_version: u32,
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
    /// Blocks from the cache whose data has its checksum.
    pub verified_blocks: u64,
    /// Blocks from the cache without a known checksum.
    pub unverified_blocks: u64,
    /// Sectors of clean data that did not have their checksum, and were read from the backing device instead.
    pub damaged_clean_sectors: u64,
    /// Sectors whose contents are lost; the output has zeros, older data or damaged data there.
    pub lost_sectors: u64,
    /// The lost ranges, up to a limit.
    pub lost: Vec<Lost>,
    /// Assumptions and omissions.
    pub notes: Vec<String>,
    /// Why the contents may be older than the last writes.
    pub warnings: Vec<String>,
}

/// No file and no device can be longer than 2^63 bytes.
const MAX_SECTORS: u64 = 1 << 54;

/// Contents that can be extracted.
pub struct Extraction<'a> {
    view: &'a SetView,
    cache: &'a dyn ReadAt,
    backing: Option<&'a dyn ReadAt>,
    /// The slot whose extents are part of the output.
    slot: Option<Inode>,
    data_offset: Sector,
    sectors: Sectors,
    options: ExtractOptions,
    notes: Vec<String>,
    warnings: Vec<String>,
}

impl<'a> Extraction<'a> {
    /// Plans the extraction of `target`. Reads only the superblock of the backing device.
    ///
    /// `cache` must be the device from which `view` was opened.
    ///
    /// # Errors
    /// If the contents may be wrong; see [`ExtractError`]. With best effort only if there is nothing to extract.
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
            warnings: Vec::new(),
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

    /// Size of the output.
    pub fn sectors(&self) -> Sectors {
        self.sectors
    }

    /// Assumptions and omissions so far.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns an error, or with best effort adds a note.
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
            // A read that failed is an error of the device, but its message is that of the finding, as in a report.
            Err(e) => return Err(ExtractError::Superblock(e)),
        };
        self.backing = Some(source);
        self.data_offset = backing.data_offset();
        self.sectors = backing.data_sectors();
        let relation = Relation::of(self.view, &backing);
        self.slot = relation.attached();
        if relation.attachment == Attachment::OlderDirty {
            self.warnings.push(format!(
                "{} does not know the last registration of {}: one of the two was restored from an older copy, and a set \
                 refuses them: writes are missing, so these are contents of different times",
                self.view.device,
                source.name()
            ));
        } else if relation.attachment != Attachment::Attached {
            self.backing_alone(source, &backing, relation)?;
        }
        Ok(())
    }

    /// Checks whether a backing device without data in the cache is complete by itself.
    fn backing_alone(
        &mut self,
        source: &dyn ReadAt,
        backing: &BackingSuper,
        relation: Relation,
    ) -> Result<(), ExtractError> {
        let device = source.name().to_owned();
        let (cache, set) = (self.view.device.clone(), self.view.superblock.set_uuid());
        let state = backing.state();
        match relation.attachment {
            Attachment::OtherSet => self.refuse(ExtractError::OtherSet {
                device,
                device_set: backing.set_uuid(),
                state: state.name(),
                cache,
                set,
            }),
            Attachment::NoSlot if state == BackingState::Dirty => self.refuse(ExtractError::NoSlot {
                device,
                uuid: backing.uuid(),
                state: state.name(),
                cache,
                set,
            }),
            Attachment::Invalid => {
                let totals = relation.slot.map(|slot| self.view.totals_of(slot)).unwrap_or_default();
                let slot = relation.slot.unwrap_or_default();
                let error = ExtractError::InvalidSlot {
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
            Attachment::OlderClean => {
                let totals = relation.slot.map(|slot| self.view.totals_of(slot)).unwrap_or_default();
                self.warnings.push(format!(
                    "{cache} does not know the last registration of {device}: one of the two was restored from an older copy; \
                     {} dirty and {} clean sectors of the cache are out of date and not used",
                    totals.dirty_sectors, totals.clean_sectors
                ));
                Ok(())
            }
            Attachment::NoSlot | Attachment::Unattached | Attachment::Attached | Attachment::OlderDirty => {
                self.notes.push(format!(
                    "{device} (state {}) has nothing in {cache}: the output has the contents of the device \
                     alone",
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
                volumes: self.view.volumes().map(|(inode, _)| inode.0).collect(),
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

    /// Checks for dirty data that cannot be part of the output.
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

    /// End of the output (exclusive), in key positions.
    fn end(&self) -> Sector {
        Sector(self.data_offset.0.saturating_add(self.sectors.0))
    }

    /// The extents that are part of the output, cut to the device. Positions are those of keys.
    fn overlay(&self) -> impl Iterator<Item = (Piece, PieceKind)> + '_ {
        let (first, end) = (self.data_offset, self.end());
        let dirty_only = self.options.dirty_only;
        let live = self.slot.map(|slot| self.view.live(slot)).into_iter().flatten();
        live.filter(move |(_, kind)| *kind == PieceKind::Dirty || !dirty_only)
            .filter_map(move |(piece, kind)| Some((piece.cut(first, end)?, kind)))
    }

    /// Writes the output to `sink`, from the first sector to the last.
    ///
    /// `progress` is called from time to time; [`ControlFlow::Break`] ends the extraction.
    ///
    /// # Errors
    /// If a device or the sink fails, or `progress` ends the extraction. The sink then has an incomplete output.
    pub fn run(
        &self,
        sink: &mut dyn Sink,
        progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<Extracted, ExtractError> {
        run::run(self, sink, progress)
    }
}
