//! The contents of a damaged set, with a map of what is certain.
//!
//! Owns [`Salvage`]: a plan of a repair stays in memory, and the contents are extracted from its overlays. `judge` says which ranges
//! are certain, `journal_end` whether the journal can have had a newer entry, `mapper` compares bytes and makes the lines of the map.
//! Nothing is written to the devices of the set.
//!
//! Invariant: a sector is certain only if no damaged and no guessed structure could have decided about its bytes.

mod alone;
mod history;
mod journal_end;
mod judge;
mod map;
mod mapper;
mod orphans;

use std::ops::ControlFlow;

use format::{BackingState, BackingSuper, Inode, Sector, Sectors};
use inspect::{
    Attachment, DamagedDirty, DeviceSuper, ExtractError, ExtractOptions, Extracted, Extraction, Mode,
    Progress, ReadAt, Relation, SetView, Sink, SuperblockError, Target, read_superblock,
};

use crate::plan::Plan;
use crate::work::Doubt;
use journal_end::JournalEnd;
use judge::{Case, Judged};
use mapper::Mapper;

pub use map::{MapLine, Part, Reason, Salvaged, State};

/// The disk whose contents are salvaged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SalvageTarget {
    /// The cached device with the backing device of this index in the plan.
    Backing(usize),
    /// The flash-only volume in this slot.
    Volume(Inode),
}

/// Options of a salvage.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SalvageOptions {
    /// The newest journal entry that is found counts as the last one that was written.
    pub trust_journal_end: bool,
    /// What the output gets in place of dirty data that does not have its checksum. The sectors are lost in each case.
    pub damaged: DamagedDirty,
    /// Another process can write to the devices while they are read. Nothing is certain then.
    pub in_use: bool,
}

/// Contents that cannot be salvaged.
#[derive(Debug, thiserror::Error)]
pub enum SalvageError {
    /// There is no such backing device.
    #[error("expected a backing device, found none")]
    NoDevice,
    /// The superblock of the backing device is not rebuilt.
    #[error("{source}; it cannot be rebuilt: {}", reasons(refused))]
    BackingSuperblock {
        /// What the plan refused.
        refused: Vec<String>,
        /// What is wrong with it.
        source: Box<SuperblockError>,
    },
    /// The device given as backing device is a cache device.
    #[error("{device}: expected a backing device, found a cache device")]
    NotABackingDevice {
        /// Name of the device.
        device: String,
    },
    /// The cache device belongs to another set than the backing device.
    #[error(
        "{device}: expected a backing device of the set on {cache}, found one of set {set}: this cache has none of its data; give \
         the cache device of that set with -C"
    )]
    OtherSet {
        /// Name of the backing device.
        device: String,
        /// Name of the cache device.
        cache: String,
        /// UUID of the set of the backing device.
        set: format::Uuid,
    },
    /// The set cannot be opened, and a volume has its data nowhere else.
    #[error("{0}")]
    NoSet(Box<inspect::OpenError>),
    /// The map cannot be written.
    #[error("map: {0}")]
    Map(#[source] std::io::Error),
    /// The extraction failed.
    #[error(transparent)]
    Extract(#[from] ExtractError),
}

fn reasons(refused: &[String]) -> String {
    if refused.is_empty() { "nothing says what it was".to_owned() } else { refused.join("; ") }
}

/// The contents of a disk of a damaged set.
pub struct Salvage<'p> {
    plan: &'p Plan<'p>,
    /// The set with the changes of the plan; `None` if it cannot be opened.
    view: Option<SetView>,
    target: SalvageTarget,
    options: ExtractOptions,
    sectors: Sectors,
    judged: Judged,
    journal_end: Option<JournalEnd>,
}

impl<'p> Salvage<'p> {
    /// Examines what a plan leaves of a disk. Reads metadata only.
    ///
    /// # Errors
    /// If nothing can be salvaged; see [`SalvageError`].
    pub fn new(
        plan: &'p Plan<'p>,
        target: SalvageTarget,
        options: SalvageOptions,
    ) -> Result<Salvage<'p>, SalvageError> {
        let opened = SetView::open(plan.cache(), Mode::BestEffort);
        let damaged = match options.damaged {
            DamagedDirty::Refuse => DamagedDirty::Zeros,
            other => other,
        };
        let extract = ExtractOptions { best_effort: true, damaged, ..ExtractOptions::default() };
        let (case, sectors) = match (target, &opened) {
            (SalvageTarget::Backing(index), _) => {
                let backing = backing_super(plan, index)?;
                (of_backing(plan, &opened, &backing, index)?, backing.data_sectors())
            }
            (SalvageTarget::Volume(_), Err(e)) => return Err(SalvageError::NoSet(Box::new(e.clone()))),
            (SalvageTarget::Volume(inode), Ok(view)) => {
                let it = Extraction::new(view, plan.cache(), Target::Volume(inode), extract)?;
                let case = Case { slot: Some(inode), ..Case::default() };
                (case, it.sectors())
            }
        };
        let journal_end = opened.as_ref().ok().and_then(|view| JournalEnd::of(view, plan.cache()));
        let mut case = Case { sectors, is_trusted: options.trust_journal_end, ..case };
        if options.in_use {
            case.hard = Some("the devices are in use, and can change while they are read".to_owned());
            case.is_clean = false;
        }
        let judged = judge::judge(plan, opened.as_ref().ok(), &case, journal_end.as_ref());
        let salvage =
            Salvage { plan, view: opened.ok(), target, options: extract, sectors, judged, journal_end };
        salvage.extraction()?;
        Ok(salvage)
    }

    /// Size of the output.
    pub fn sectors(&self) -> Sectors {
        self.sectors
    }

    /// The extraction from the overlays; `None` if the cache device has no set that can be opened.
    fn extraction(&self) -> Result<Option<Extraction<'_>>, SalvageError> {
        let Some(view) = &self.view else { return Ok(None) };
        let target = match self.target {
            SalvageTarget::Volume(inode) => Target::Volume(inode),
            SalvageTarget::Backing(index) => {
                Target::Cached(self.plan.backings().get(index).ok_or(SalvageError::NoDevice)?)
            }
        };
        Ok(Some(Extraction::new(view, self.plan.cache(), target, self.options)?))
    }

    /// Writes the contents to `sink`, and each range of the map to `line`, in order.
    ///
    /// # Errors
    /// If the output or the map cannot be written, or `progress` ends the salvage.
    pub fn run(
        &self,
        sink: &mut dyn Sink,
        line: &mut dyn FnMut(&MapLine) -> std::io::Result<()>,
        progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<Salvaged, SalvageError> {
        let backing = match self.target {
            SalvageTarget::Backing(index) => self.plan.backings().get(index),
            SalvageTarget::Volume(_) => None,
        };
        let backing = backing.map(|b| b as &dyn ReadAt);
        let mut mapper = Mapper::new(&self.judged, self.plan.cache(), backing, sink, line);
        let extracted = match (self.extraction()?, backing) {
            (Some(extraction), _) => extraction.run(&mut mapper, progress),
            (None, Some(backing)) => {
                alone::copy(backing, self.judged.data_offset, self.sectors, &mut mapper, progress)
                    .map(|()| Extracted { sectors: self.sectors.0, ..Extracted::default() })
            }
            (None, None) => return Err(SalvageError::NoDevice),
        };
        let extracted = extracted.map_err(|e| mapper.map_error.take().map_or(e.into(), SalvageError::Map))?;
        let totals = mapper.totals;
        let report = self.plan.report();
        Ok(Salvaged {
            schema_version: 1,
            sectors: self.sectors.0,
            certain: totals.certain,
            uncertain: totals.uncertain,
            lost: totals.lost,
            uncertain_by_journal_end: totals.by_journal_end,
            journal_entry: self.journal_end.as_ref().map(|end| end.newest.0),
            backing_is_clean: self.judged.is_clean,
            reasons: totals.reasons,
            more_reasons: totals.more_reasons,
            steps: report.steps,
            refused: report.refused,
            notes: extracted.notes.clone(),
            warnings: extracted.warnings.clone(),
            extracted,
        })
    }
}

/// The superblock of a backing device, with the changes of the plan.
fn backing_super(plan: &Plan<'_>, index: usize) -> Result<BackingSuper, SalvageError> {
    let device = plan.backings().get(index).ok_or(SalvageError::NoDevice)?;
    match read_superblock(device) {
        Ok(DeviceSuper::Backing(backing)) => Ok(backing),
        Ok(DeviceSuper::Cache(_)) => {
            Err(SalvageError::NotABackingDevice { device: device.name().to_owned() })
        }
        Err(source) => {
            Err(SalvageError::BackingSuperblock { refused: plan.report().refused, source: Box::new(source) })
        }
    }
}

/// What is known of a cached device, its size excepted.
fn of_backing(
    plan: &Plan<'_>,
    opened: &Result<SetView, inspect::OpenError>,
    backing: &BackingSuper,
    index: usize,
) -> Result<Case, SalvageError> {
    let (state, name) = (backing.state(), backing.state().name());
    let mut case = Case { backing: Some(index), data_offset: backing.data_offset(), ..Case::default() };
    case.is_alone = state == BackingState::None;
    let view = match opened {
        Ok(view) => view,
        Err(_) if case.is_alone => return Ok(case),
        Err(e) => {
            case.hard = Some(format!(
                "the state of the backing device is {name}, and which of its data the cache had is not known: {e}"
            ));
            return Ok(case);
        }
    };
    let relation = Relation::of(view, backing);
    case.slot = relation.attached();
    let dirty = relation.slot.map(|slot| view.totals_of(slot).dirty_sectors).unwrap_or_default();
    let is_clean = state == BackingState::Clean;
    // After a crash a device with dirty data can have the state clean.
    case.is_clean = is_clean && dirty == 0 && !plan.work.doubts.contains(&Doubt::BackingSuperblock(index));
    case.hard = match relation.attachment {
        Attachment::OtherSet => {
            return Err(SalvageError::OtherSet {
                device: plan.backings().get(index).map(|b| b.name().to_owned()).unwrap_or_default(),
                cache: view.device.clone(),
                set: backing.set_uuid(),
            });
        }
        Attachment::Attached | Attachment::Unattached => None,
        Attachment::NoSlot if is_clean => None,
        Attachment::NoSlot => Some(format!(
            "the state of the backing device is {name}, and the set has no slot for it: its newest data is lost"
        )),
        Attachment::OlderDirty | Attachment::OlderClean => Some(
            "one of the two devices was restored from an older copy, so these are contents of different times"
                .to_owned(),
        ),
        Attachment::Invalid if dirty == 0 && case.is_alone => None,
        Attachment::Invalid => Some(format!(
            "the state of the backing device is {name}, so {dirty} dirty sectors of its slot are out of date and not used"
        )),
    };
    Ok(case)
}

/// The end of a range.
fn end_of(start: Sector, len: Sectors) -> Sector {
    Sector(start.0.saturating_add(len.0))
}
