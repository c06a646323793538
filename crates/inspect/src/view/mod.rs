//! A cache set, opened read-only from its cache device (format section 10, step by step).
//!
//! Owns [`SetView`]: superblock, journal, generations, slots, nodes, extents. One file per step. The view never writes and
//! never trusts contents: damage becomes a [`Finding`], and [`Mode`] decides whether the opening continues.
//!
//! Invariants: every btree node, prio set and journal entry is read at most a fixed number of times, so that time is bounded by
//! the size of the device's contents; memory is linear in the number of keys. Must not know backing devices (module `attach`)
//! or rules that need the whole view (module `check`).

mod btree;
mod extents;
mod gens;
mod journal;
mod prio;
mod scan;
mod slots;

pub use crate::extent_map::NodeId;
pub(crate) use btree::MAX_POINTER_AGE;
pub use btree::{BsetInfo, BtreeStats, NodeView};
pub use extents::{PieceKind, Totals};
pub use gens::{BucketState, Gens};
pub use journal::{EntryInfo, JournalBucket, JournalStop, JournalView};
pub use prio::PrioView;
pub use slots::{Slot, SlotKind};

use std::collections::BTreeMap;

use format::{BucketNr, CacheSuper, Geometry, Inode, RawSuperblock, Sector, Sectors};
use thiserror::Error;

use crate::device::{DeviceSuper, check_superblock, read_superblock_bytes, superblock_place, unreadable_at};
use crate::extent_map::{ExtentMap, Origin, Piece};
use crate::finding::{Finding, Findings, Invariant, Mismatch, Place, Severity};
use crate::source::ReadAt;
use scan::{Scan, Stop};

/// The reaction to damage.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// Stop at the first fatal finding: the view then has only what the kernel would accept.
    Strict,
    /// Continue with the readable part, and list the assumptions.
    BestEffort,
}

/// A cache set as its cache device describes it.
#[derive(Clone, Debug)]
pub struct SetView {
    /// Name of the cache device.
    pub device: String,
    /// Superblock of the cache device.
    pub superblock: CacheSuper,
    /// The journal; `None` on a device that was never initialised (`sync` is 0). All fields below are then empty: nothing is
    /// cached.
    pub journal: Option<JournalView>,
    /// The chain of prio sets.
    pub prio: PrioView,
    /// Generations and priorities of the buckets.
    pub gens: Gens,
    /// The slots of the UUID table that are in use, by inode.
    pub slots: BTreeMap<Inode, Slot>,
    /// Bucket of the UUID table.
    pub uuid_bucket: Option<BucketNr>,
    /// The btree nodes that were read, in key order, parents first. A [`NodeId`] is an index into this list.
    pub nodes: Vec<NodeView>,
    /// Statistics of the btree.
    pub btree: BtreeStats,
    /// The extents of leaves and journal.
    pub extents: ExtentMap,
    /// The findings so far.
    pub findings: Findings,
    /// Assumptions about damaged structures; empty unless opened with [`Mode::BestEffort`].
    pub assumptions: Vec<String>,
    /// The ranges of keys of which not all are known, because a node could not be read to its end. All keys lie behind `after`.
    pub unknown: Vec<KeyRange>,
    /// The first data sector of each device, as far as its backing device was given. Keys count from the start of the device.
    data_offsets: BTreeMap<Inode, Sector>,
}

/// A range of positions of keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeyRange {
    /// The position before the range.
    pub after: (Inode, Sector),
    /// The last position.
    pub last: (Inode, Sector),
}

/// A set that cannot be opened.
#[derive(Clone, Debug, Error)]
#[error("{fatal}")]
pub struct OpenError {
    /// The finding that ended the opening.
    pub fatal: Box<Finding>,
    /// All findings, `fatal` included.
    pub findings: Findings,
}

impl SetView {
    /// Opens the set on a cache device.
    ///
    /// # Errors
    /// With [`Mode::Strict`] at the first fatal finding. With [`Mode::BestEffort`] if the superblock is unusable, or the journal
    /// has no entry.
    pub fn open(source: &dyn ReadAt, mode: Mode) -> Result<SetView, OpenError> {
        let mut scan = Scan::new(source, mode);
        let view = open(&mut scan);
        view.map_err(|Stop(fatal)| OpenError { fatal, findings: std::mem::take(&mut scan.findings) })
    }

    /// The sizes of the cache device.
    pub fn geometry(&self) -> &Geometry {
        self.superblock.geometry()
    }

    /// Whether the device was initialised, so that data can be cached on it.
    pub fn is_initialised(&self) -> bool {
        self.journal.is_some()
    }

    /// The volumes of the set, with their sizes.
    pub fn volumes(&self) -> impl Iterator<Item = (Inode, Sectors)> {
        self.slots.iter().filter_map(|(inode, slot)| match slot.kind {
            SlotKind::Volume(sectors) => Some((*inode, sectors)),
            _ => None,
        })
    }

    /// Takes the first data sectors of backing devices, so that messages count sectors as clients of the volumes do.
    pub(crate) fn know_data_offsets(&mut self, offsets: impl Iterator<Item = (Inode, Sector)>) {
        self.data_offsets = offsets.chain(self.volumes().map(|(inode, _)| (inode, Sector(0)))).collect();
    }

    /// A range of keys for messages: sectors of the volume; sectors of the backing device if its data offset is not known, or
    /// the range lies before it.
    pub(crate) fn range_text(&self, inode: Inode, start: Sector, len: Sectors) -> String {
        let first = self.data_offsets.get(&inode).and_then(|first| start.0.checked_sub(first.0));
        match first {
            Some(first) => format!("sectors {first}+{len} of the volume"),
            None => format!("sectors {start}+{len} of the backing device"),
        }
    }

    /// A btree node; `None` if the view has no node with this number.
    pub fn node(&self, id: NodeId) -> Option<&NodeView> {
        self.nodes.get(usize::try_from(id.0).ok()?)
    }

    /// Buckets of the nodes from the root to the node `id`.
    pub fn path(&self, id: NodeId) -> Vec<u32> {
        btree::path(&self.nodes, Some(id))
    }

    /// The place of a btree node.
    pub fn node_place(&self, id: NodeId) -> Place {
        let place = Place::new(&self.device, "btree node");
        match self.node(id) {
            Some(node) => node.place(place).node(node.level, self.path(id)),
            None => place,
        }
    }

    /// The place of the key that a piece comes from.
    pub fn origin_place(&self, origin: Origin) -> Place {
        match origin {
            Origin::Node(id) => self.node_place(id),
            Origin::Journal(seq) => {
                let place = Place::new(&self.device, "journal entry").item(format!("seq {seq}"));
                let info = self.journal.as_ref().and_then(|j| j.entry(seq));
                match info {
                    Some(info) => place.sector(info.sector).bucket(info.bucket),
                    None => place,
                }
            }
        }
    }
}

fn open(scan: &mut Scan<'_>) -> Result<SetView, Stop> {
    let superblock = open_superblock(scan)?;
    let mut view = SetView {
        device: scan.source.name().to_owned(),
        gens: Gens::new(&superblock),
        superblock,
        journal: None,
        prio: PrioView::default(),
        slots: BTreeMap::new(),
        uuid_bucket: None,
        nodes: Vec::new(),
        btree: BtreeStats::default(),
        extents: ExtentMap::default(),
        findings: Findings::default(),
        assumptions: Vec::new(),
        unknown: Vec::new(),
        data_offsets: BTreeMap::new(),
    };
    if view.superblock.sync() {
        fill(scan, &mut view)?;
    }
    view.findings = std::mem::take(&mut scan.findings);
    view.assumptions = std::mem::take(&mut scan.assumptions);
    Ok(view)
}

/// Carries out steps 2 to 7.
fn fill(scan: &mut Scan<'_>, view: &mut SetView) -> Result<(), Stop> {
    let journal = journal::open(scan, &view.superblock)?;
    let Some(newest) = journal.replay.last() else {
        // `journal::open` has reported the empty journal.
        return Ok(());
    };
    view.prio = prio::open(scan, &view.superblock, newest, &mut view.gens)?;
    (view.uuid_bucket, view.slots) = slots::open(scan, &view.superblock, newest)?;
    btree::open(scan, newest, view)?;
    extents::overlay_journal(&journal, &mut view.gens, &mut view.extents);
    view.journal = Some(journal);
    Ok(())
}

/// Carries out step 1. Best effort continues if the meaning of the fields is certain.
fn open_superblock(scan: &mut Scan<'_>) -> Result<CacheSuper, Stop> {
    let bytes = match read_superblock_bytes(scan.source) {
        Ok(bytes) => bytes,
        Err(e) => {
            let place = superblock_place(scan.source, "cache superblock");
            return Err(scan.give_up(unreadable_at(Invariant::Superblock, Severity::Fatal, place, &e)));
        }
    };
    let finding = match check_superblock(scan.source, &bytes[..], scan.source.sectors()) {
        Ok(DeviceSuper::Cache(superblock)) => return Ok(superblock),
        Ok(DeviceSuper::Backing(_)) => {
            let place = superblock_place(scan.source, "superblock");
            let (expected, found) = ("a cache device (0, 3 or 5)", "a backing device");
            return Err(scan.give_up(Finding::new(
                Severity::Fatal,
                Invariant::Superblock,
                place,
                Mismatch::new("version", expected, found),
            )));
        }
        Err(finding) => *finding,
    };
    match tolerant(&bytes[..]) {
        Some((superblock, assumed)) => {
            scan.report(finding)?;
            scan.assume(assumed);
            Ok(superblock)
        }
        None => Err(scan.give_up(finding)),
    }
}

/// The superblock, if only its checksum or the size of the device is wrong; with the assumption.
fn tolerant(bytes: &[u8]) -> Option<(CacheSuper, String)> {
    let raw = RawSuperblock::from_prefix(bytes).ok()?;
    let any_size = Sectors(u64::MAX);
    if let Ok(superblock) = raw.check_cache(any_size, 0) {
        let end = superblock.geometry().used_sectors();
        return Some((
            superblock,
            format!("the device should have at least {end} sectors; what lies behind its end is lost"),
        ));
    }
    let mut raw = raw.clone();
    raw.csum = raw.computed_csum()?.into();
    let superblock = raw.check_cache(any_size, 0).ok()?;
    Some((superblock, "the fields of the superblock are valid although its checksum is wrong".to_owned()))
}

/// The place of a piece's key, with its range and pointer.
pub(crate) fn data_place(view: &SetView, inode: Inode, piece: &Piece) -> Place {
    let place = view.origin_place(piece.origin);
    let mut item = place.item.clone().map(|i| i + ", ").unwrap_or_default();
    item += &format!("slot {inode}, {}", view.range_text(inode, piece.start, piece.len));
    if let Some(ptr) = piece.ptr {
        item += &format!(" at cache sector {}", ptr.offset());
        if let Some(bucket) = view.gens.bucket_of(ptr, piece.len) {
            item += &format!(" (bucket {bucket})");
        }
        item += &format!(" gen {}", ptr.generation());
    }
    place.item(item)
}
