//! The space that the bsets of a leaf take after a kernel has merged them in place.
//!
//! A kernel that reads a leaf merges its bsets into one at the start of the node, and continues behind the blocks that
//! the bsets take on disk. So the merged keys, holes included, must take no more space than the bsets themselves
//! (format section 8.5). Merging can increase the number of keys: a new key inside an older one splits it, so two keys
//! become three. Two measures keep the rule. The part of the old key behind the new one goes into the next bset, too
//! (`Extents::replace`). If the next bset would break the rule in spite of that, it is not appended and the leaf is
//! replaced.
//!
//! Owns the estimate of the space. Invariant: the estimate is never too low. Must not know how bsets are written.

use super::extents::{Extents, Unwritten};

/// Words of the header of a bset.
const HEADER_WORDS: usize = 4;
/// Words of a key with a pointer, and of a key without one.
const EXTENT_WORDS: usize = 3;
const HOLE_WORDS: usize = 2;

/// The words that the keys of a bset take.
pub(crate) fn words_of(new: Unwritten) -> usize {
    (new.keys - new.holes) * EXTENT_WORDS + new.holes * HOLE_WORDS
}

/// An upper bound for the merged keys of the bsets of a leaf.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Merged {
    words: usize,
    /// Holes among the keys; the extents in memory do not have them.
    holes: usize,
}

impl Merged {
    /// The keys of a single bset with this many extents and no hole.
    pub(crate) fn of_set(extents: usize) -> Merged {
        Merged { words: extents * EXTENT_WORDS, holes: 0 }
    }

    /// The merged keys of all bsets, as extents with their holes.
    pub(crate) fn of_extents(extents: &Extents) -> Merged {
        let holes = extents.iter().filter(|(_, e)| e.is_hole()).count();
        Merged { words: (extents.len() - holes) * EXTENT_WORDS + holes * HOLE_WORDS, holes }
    }

    /// The merged keys after one more bset with the unwritten keys `new`; `extents` is the number of extents in memory.
    pub(crate) fn with_set(self, new: Unwritten, extents: usize) -> Merged {
        let Unwritten { keys, holes: new_holes } = new;
        // A new key may split an old hole in two, but no extent: see the module head.
        let cut_holes = if self.holes > 0 { keys } else { 0 };
        let holes = self.holes + cut_holes + new_holes;
        let added = (keys - new_holes) * EXTENT_WORDS + (new_holes + cut_holes) * HOLE_WORDS;
        // A second bound: all extents in memory, and the holes.
        let counted = extents * EXTENT_WORDS + holes * HOLE_WORDS;
        Merged { words: (self.words + added).min(counted), holes }
    }

    /// Whether the merged keys fit into the space of bsets of this size.
    pub(crate) fn fits(self, written_bytes: usize) -> bool {
        (HEADER_WORDS + self.words) * 8 <= written_bytes
    }
}

#[cfg(test)]
mod tests {
    use format::{Gen, Inode, JournalSeq, Ptr, Sector, Sectors};
    use proptest::prelude::*;

    use super::*;
    use crate::index::entry::Entry;

    /// One change: an extent or a hole.
    type Change = (u64, u64, bool);

    fn entry(start: u64, size: u64, hole: bool, n: u64) -> Entry {
        let (end, size) = (Sector(start + size), Sectors(size));
        if hole {
            return Entry::hole(end, size, JournalSeq(n));
        }
        Entry::extent(end, size, false, Ptr::new(0, Sector(n * 1000), Gen(0)))
    }

    fn put(x: &mut Extents, e: Entry) {
        x.replace(Inode(0), e.start(), e.end(), Some(e), |_| {});
    }

    /// Ten extents of three words and the header are 272 bytes.
    #[test]
    fn the_estimate_of_a_set_fits_to_the_last_byte() {
        assert!(Merged::of_set(10).fits(272));
        assert!(!Merged::of_set(10).fits(271));
    }

    /// A header of 32 bytes, 24 bytes for each extent and 16 bytes for each hole.
    #[test]
    fn merged_extents_fit_with_their_holes_to_the_last_byte() {
        for (extents, holes) in [(0, 0), (1, 0), (10, 0), (0, 10), (7, 3), (3, 7)] {
            let mut x = Extents::new(Sectors(1 << 20));
            (0..extents + holes).for_each(|n| put(&mut x, entry(n * 20, 8, n >= extents, n)));
            let (merged, bytes) = (Merged::of_extents(&x), (32 + 24 * extents + 16 * holes) as usize);
            assert!(merged.fits(bytes) && !merged.fits(bytes - 1), "{extents} extents, {holes} holes");
            assert_eq!(merged.holes, holes as usize);
        }
    }

    proptest! {
        /// Bsets are written as a leaf writes them; the estimate is compared with a merge of all their keys.
        #[test]
        fn the_estimate_is_never_too_low(
            sets in prop::collection::vec(prop::collection::vec((0u64..400, 1u64..60, prop::bool::weighted(0.2)), 1..20), 1..12),
            with_holes: bool,
        ) {
            let mut memory = Extents::new(Sectors(1 << 20));
            let mut disk = Extents::new(Sectors(1 << 20));
            let (mut merged, mut n, mut set_words) = (Merged::default(), 1, 0);
            for set in sets as Vec<Vec<Change>> {
                for (start, size, hole) in set {
                    put(&mut memory, entry(start, size, hole && with_holes, n).unwritten());
                    n += 1;
                }
                merged = merged.with_set(memory.count_unwritten(), memory.len());
                for (_, e) in memory.iter_unwritten() {
                    set_words += if e.is_hole() { HOLE_WORDS } else { EXTENT_WORDS };
                    put(&mut disk, e);
                }
                memory.mark_all_written();
                memory.retain(|_, e| !e.is_hole());
                let really = Merged::of_extents(&disk);
                prop_assert!(merged.words >= really.words, "{merged:?} {really:?}");
                prop_assert!(merged.holes >= really.holes, "{merged:?} {really:?}");
                prop_assert!(with_holes || really.words <= set_words, "{really:?} of {set_words} words");
            }
        }
    }
}
