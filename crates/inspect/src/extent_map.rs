//! The map of extents: ranges of keys, after newer keys have replaced parts of older ones (format section 8.3, format
//! section 9.4).
//!
//! Owns the overlay rule: a key with size > 0 replaces all older keys in its range, whether or not it has a pointer, and
//! whether or not the pointer is stale. The map does not judge pointers, because generations are known only after the last key
//! was read.
//!
//! Invariant: pieces of one inode are disjoint and not empty. Every insertion adds at most two pieces, so memory is linear in
//! the number of keys.

use std::collections::BTreeMap;

use format::{Bkey, Inode, JournalSeq, Ptr, Sector, Sectors};

/// Number of a node in its view: the index into `SetView::nodes`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NodeId(pub u32);

/// The key that a piece is part of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Origin {
    /// A key in a leaf.
    Node(NodeId),
    /// A key in the journal entry of this sequence number.
    Journal(JournalSeq),
}

/// The state of the range `[start, start + len)` of an inode.
///
/// Positions are those of keys: for a cached device they include the data offset.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// First sector.
    pub start: Sector,
    /// Length; never zero.
    pub len: Sectors,
    /// The pointer, advanced to `start`; `None` if the range is not cached.
    pub ptr: Option<Ptr>,
    /// Whether the data is newer than the backing device.
    pub dirty: bool,
    /// Place of the key.
    pub origin: Origin,
}

impl Piece {
    /// The range of `key`; `None` if the key has none: its size is 0, or larger than its end position.
    pub fn of(key: &Bkey, origin: Origin) -> Option<Piece> {
        let (start, len) = (key.start()?, key.size());
        (len.0 > 0).then_some(Piece { start, len, ptr: key.pointer(), dirty: key.dirty(), origin })
    }

    /// End (exclusive).
    pub fn end(&self) -> Sector {
        Sector(self.start.0.saturating_add(self.len.0))
    }

    /// The part inside `[first, end)`; `None` if no part is inside.
    pub fn cut(&self, first: Sector, end: Sector) -> Option<Piece> {
        let mut piece = *self;
        if piece.end() > end {
            piece.len = end.checked_since(piece.start)?;
        }
        piece.tail(piece.start.max(first))
    }

    /// The part from `at` on; `None` if there is none.
    fn tail(mut self, at: Sector) -> Option<Piece> {
        let rest = self.end().checked_since(at).filter(|r| r.0 > 0)?;
        let cut = at.checked_since(self.start)?;
        // The offset in a check key's pointer is random, so it is not advanced.
        self.ptr = self.ptr.map(|p| if p.is_check() { p } else { p.advanced(cut) });
        self.start = at;
        self.len = rest;
        Some(self)
    }
}

/// Pieces of all inodes, in key order.
#[derive(Clone, Debug, Default)]
pub struct ExtentMap {
    pieces: BTreeMap<(Inode, Sector), Piece>,
}

impl ExtentMap {
    /// Replaces the state of the range of `new`.
    pub fn insert(&mut self, inode: Inode, new: Piece) {
        let (start, end) = (new.start, new.end());
        if end <= start {
            return;
        }
        let mut tail = None;
        // Pieces are disjoint, so only one can begin before `start` and reach into the range.
        if let Some((_, old)) = self.pieces.range_mut((inode, Sector(0))..(inode, start)).next_back()
            && old.end() > start
        {
            tail = old.tail(end);
            old.len = Sectors(start.0.saturating_sub(old.start.0));
        }
        while let Some((&at, _)) = self.pieces.range((inode, start)..(inode, end)).next() {
            // Only the last piece in the range can reach beyond `end`.
            tail = self.pieces.remove(&at).and_then(|old| old.tail(end)).or(tail);
        }
        for piece in [Some(new), tail].into_iter().flatten() {
            self.pieces.insert((inode, piece.start), piece);
        }
    }

    /// All pieces, by inode and position.
    pub fn iter(&self) -> impl Iterator<Item = (Inode, &Piece)> {
        self.pieces.iter().map(|((inode, _), piece)| (*inode, piece))
    }

    /// The pieces of one inode, by position.
    pub fn of_inode(&self, inode: Inode) -> impl Iterator<Item = &Piece> {
        self.pieces.range((inode, Sector(0))..=(inode, Sector(u64::MAX))).map(|(_, piece)| piece)
    }

    /// Number of pieces.
    pub fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Whether the map has no piece.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use format::Gen;
    use proptest::prelude::*;

    use super::*;

    const JOURNAL: Origin = Origin::Journal(JournalSeq(1));

    proptest! {
        /// Compares the map with a per-sector map.
        ///
        /// The last key that covers a sector decides about it, and its pointer advances with the sector.
        #[test]
        fn the_last_key_decides(keys in prop::collection::vec((0u32..2, 1u64..40, 0u64..60, any::<bool>()), 0..60)) {
            let mut map = ExtentMap::default();
            let mut oracle = BTreeMap::new();
            for (i, &(inode, len, start, pointer)) in keys.iter().enumerate() {
                let at = Sector(1000 * (i as u64 + 1));
                let ptr = Ptr::new(0, at, Gen(i as u8));
                let end = Sector(start + len);
                let key = if pointer {
                    Bkey::extent(Inode(inode), end, Sectors(len), i % 3 == 0, ptr)
                } else {
                    Bkey::hole(Inode(inode), end, Sectors(len))
                };
                map.insert(Inode(inode), Piece::of(&key, JOURNAL).unwrap());
                for n in 0..len {
                    let ptr = pointer.then(|| ptr.advanced(Sectors(n)));
                    oracle.insert((Inode(inode), start + n), (ptr, key.dirty()));
                }
            }
            let mut seen = BTreeMap::new();
            for (inode, piece) in map.iter() {
                prop_assert!(piece.len.0 > 0);
                for n in 0..piece.len.0 {
                    let ptr = piece.ptr.map(|p| p.advanced(Sectors(n)));
                    let old = seen.insert((inode, piece.start.0 + n), (ptr, piece.dirty));
                    prop_assert!(old.is_none(), "pieces overlap");
                }
            }
            prop_assert_eq!(seen, oracle);
            prop_assert_eq!(map.of_inode(Inode(1)).count(), map.iter().filter(|e| e.0 == Inode(1)).count());
            prop_assert!(map.len() <= 2 * keys.len());
        }
    }

    #[test]
    fn check_pointers_do_not_move_and_empty_keys_say_nothing() {
        let check = Ptr::new(Ptr::CHECK_DEV, Sector((1 << 43) - 1), Gen(3));
        let key = Bkey::extent(Inode(0), Sector(100), Sectors(50), false, check);
        let mut map = ExtentMap::default();
        map.insert(Inode(0), Piece::of(&key, JOURNAL).unwrap());
        map.insert(Inode(0), Piece::of(&Bkey::hole(Inode(0), Sector(60), Sectors(5)), JOURNAL).unwrap());
        assert_eq!(map.iter().filter(|(_, p)| p.ptr == Some(check)).count(), 2);
        assert!(Piece::of(&Bkey::hole(Inode(0), Sector(60), Sectors(0)), JOURNAL).is_none());
        assert!(Piece::of(&Bkey::hole(Inode(0), Sector(6), Sectors(7)), JOURNAL).is_none());
    }
}
