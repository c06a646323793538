//! How much space the sets of a leaf take once somebody merges them in place.
//!
//! A kernel that reads a leaf merges its sets into one at the start of the node, and goes on behind the blocks that the
//! sets take on disk. So what the sets amount to, holes included, must take no more space than the sets themselves
//! (format section 8.5). Sets can amount to more keys than they hold: a key in the middle of an older one makes three of
//! the two. Two things keep the rule: the part behind the new key goes into the next set too (`Extents::replace`), and a
//! set that would break the rule nevertheless is not appended, but the leaf replaced.
//!
//! Owns the estimate, which is never too low. Must not know how sets are written.

use super::extents::{Extents, Unwritten};

/// Words of a set's header.
const HEADER_WORDS: usize = 4;
/// Words of a key with and without a pointer.
const EXTENT_WORDS: usize = 3;
const HOLE_WORDS: usize = 2;

/// Words of the keys of a set.
pub(crate) fn words_of(new: Unwritten) -> usize {
    (new.keys - new.holes) * EXTENT_WORDS + new.holes * HOLE_WORDS
}

/// What the sets of a leaf amount to, at most.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Merged {
    words: usize,
    /// Holes among it, which memory does not keep.
    holes: usize,
}

impl Merged {
    /// A single set of this many extents.
    pub(crate) fn of_set(extents: usize) -> Merged {
        Merged { words: extents * EXTENT_WORDS, holes: 0 }
    }

    /// Everything that the sets say, with its holes.
    pub(crate) fn of_extents(extents: &Extents) -> Merged {
        let holes = extents.iter().filter(|(_, e)| e.is_tombstone()).count();
        Merged { words: (extents.len() - holes) * EXTENT_WORDS + holes * HOLE_WORDS, holes }
    }

    /// The same with one more set, of what is unwritten, where memory has so many extents.
    pub(crate) fn with_set(self, new: Unwritten, extents: usize) -> Merged {
        let Unwritten { keys, holes: new_holes } = new;
        // Each new key may cut one of the old holes in two, but no extent: see the module head.
        let cut_holes = if self.holes > 0 { keys } else { 0 };
        let holes = self.holes + cut_holes + new_holes;
        let added = (keys - new_holes) * EXTENT_WORDS + (new_holes + cut_holes) * HOLE_WORDS;
        // Or by what is there in the end: everything in memory, and holes.
        let counted = extents * EXTENT_WORDS + holes * HOLE_WORDS;
        Merged { words: (self.words + added).min(counted), holes }
    }

    /// Whether it fits where sets of this size are.
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

    /// One change: an extent, or a hole.
    type Change = (u64, u64, bool);

    fn entry(start: u64, size: u64, hole: bool, n: u64) -> Entry {
        let (end, size) = (Sector(start + size), Sectors(size));
        if hole {
            return Entry::tombstone(end, size, JournalSeq(n));
        }
        Entry::extent(end, size, false, Ptr::new(0, Sector(n * 1000), Gen(0)))
    }

    fn put(x: &mut Extents, e: Entry) {
        x.replace(Inode(0), e.start(), e.end(), Some(e), |_| {});
    }

    /// Ten extents of three words and the header are 272 bytes.
    #[test]
    fn what_sets_amount_to_fits_to_the_last_byte() {
        assert!(Merged::of_set(10).fits(272));
        assert!(!Merged::of_set(10).fits(271));
    }

    proptest! {
        /// Sets are written as leaves do it; what they amount to is compared with an overlay of all their keys.
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
                    set_words += if e.is_tombstone() { HOLE_WORDS } else { EXTENT_WORDS };
                    put(&mut disk, e);
                }
                memory.mark_all_written();
                memory.retain(|_, e| !e.is_tombstone());
                let really = Merged::of_extents(&disk);
                prop_assert!(merged.words >= really.words, "{merged:?} {really:?}");
                prop_assert!(merged.holes >= really.holes, "{merged:?} {really:?}");
                prop_assert!(with_holes || really.words <= set_words, "{really:?} of {set_words} words");
            }
        }
    }
}
