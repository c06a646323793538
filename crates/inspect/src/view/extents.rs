//! Steps 6 and 7: applies journal keys over leaf keys, and classifies pieces once generations are known.
//!
//! Owns the replay of keys and the classification of pieces.

use format::Inode;

use super::SetView;
use super::gens::Gens;
use super::journal::JournalView;
use crate::extent_map::{ExtentMap, Origin, Piece};

/// The classification of a piece of the extent map.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum PieceKind {
    /// Cached, and newer than the backing device.
    Dirty,
    /// Cached, and not marked as newer than the backing device.
    Clean,
    /// Not cached: the bucket was reused after the key was written.
    Stale,
    /// Not cached: the key has no pointer.
    Hole,
    /// Not cached: placeholder of a cache miss.
    Check,
    /// Not cached: the pointer does not point into a bucket of this device. No writer makes such pointers.
    Invalid,
}

impl PieceKind {
    /// Whether data is cached in the piece.
    pub fn is_live(self) -> bool {
        matches!(self, PieceKind::Dirty | PieceKind::Clean)
    }

    /// Short stable name.
    pub fn name(self) -> &'static str {
        match self {
            PieceKind::Dirty => "dirty",
            PieceKind::Clean => "clean",
            PieceKind::Stale => "stale",
            PieceKind::Hole => "hole",
            PieceKind::Check => "check",
            PieceKind::Invalid => "invalid",
        }
    }
}

/// Number of pieces and of their sectors, by kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Totals {
    /// Dirty extents.
    pub dirty_extents: u64,
    /// Sectors of dirty extents.
    pub dirty_sectors: u64,
    /// Clean extents.
    pub clean_extents: u64,
    /// Sectors of clean extents.
    pub clean_sectors: u64,
    /// Extents whose bucket was reused.
    pub stale_extents: u64,
    /// Stale extents whose key is dirty.
    pub stale_dirty_extents: u64,
    /// Ranges of keys without a pointer, and of placeholders of cache misses.
    pub holes: u64,
    /// Ranges of placeholders of cache misses.
    pub check_keys: u64,
    /// Ranges of pointers that do not point into a bucket of this device.
    pub invalid: u64,
}

impl Totals {
    /// Number of clean and dirty extents.
    pub fn live_extents(&self) -> u64 {
        self.dirty_extents + self.clean_extents
    }

    /// Counts one piece.
    pub fn add(&mut self, piece: &Piece, kind: PieceKind) {
        match kind {
            PieceKind::Dirty => {
                self.dirty_extents += 1;
                self.dirty_sectors += piece.len.0;
            }
            PieceKind::Clean => {
                self.clean_extents += 1;
                self.clean_sectors += piece.len.0;
            }
            PieceKind::Stale => {
                self.stale_extents += 1;
                self.stale_dirty_extents += u64::from(piece.dirty);
            }
            PieceKind::Hole => self.holes += 1,
            PieceKind::Check => {
                self.holes += 1;
                self.check_keys += 1;
            }
            PieceKind::Invalid => self.invalid += 1,
        }
    }
}

/// Replays the keys of the journal over `extents`, and raises generations with them.
pub(super) fn overlay_journal(journal: &JournalView, gens: &mut Gens, extents: &mut ExtentMap) {
    for jset in &journal.replay {
        for key in &jset.keys {
            if let Some(ptr) = key.pointer() {
                gens.raise(ptr, key.size());
            }
            if let Some(piece) = Piece::of(key, Origin::Journal(jset.seq)) {
                extents.insert(key.inode(), piece);
            }
        }
    }
}

impl SetView {
    /// Classifies `piece`.
    pub fn kind(&self, piece: &Piece) -> PieceKind {
        let Some(ptr) = piece.ptr else { return PieceKind::Hole };
        if ptr.is_check() {
            return PieceKind::Check;
        }
        match self.gens.age(ptr, piece.len) {
            None => PieceKind::Invalid,
            Some(0) if piece.dirty => PieceKind::Dirty,
            Some(0) => PieceKind::Clean,
            Some(_) => PieceKind::Stale,
        }
    }

    /// All pieces in key order, with their kinds.
    pub fn pieces(&self) -> impl Iterator<Item = (Inode, &Piece, PieceKind)> {
        self.extents.iter().map(|(inode, piece)| (inode, piece, self.kind(piece)))
    }

    /// The cached extents of one inode, in order. Positions are those of keys, with the data offset.
    pub fn live(&self, inode: Inode) -> impl Iterator<Item = (&Piece, PieceKind)> {
        self.extents.of_inode(inode).map(|p| (p, self.kind(p))).filter(|(_, kind)| kind.is_live())
    }

    /// Totals of one inode.
    pub fn totals_of(&self, inode: Inode) -> Totals {
        let mut totals = Totals::default();
        self.extents.of_inode(inode).for_each(|p| totals.add(p, self.kind(p)));
        totals
    }

    /// Totals of all inodes.
    pub fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        self.pieces().for_each(|(_, piece, kind)| totals.add(piece, kind));
        totals
    }
}
