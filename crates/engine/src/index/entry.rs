//! One cached extent in memory: 16 bytes.
//!
//! Owns the packing. The first word has the end of the extent in its highest bits. The second word has a pointer in
//! bcache's layout (generation, sector), with three flags in the bits that a pointer on disk uses for the device index,
//! which is always 0 in a set with one cache device.
//!
//! Invariants: `size` is at least 1 and at most 65535; `end >= size`; a hole has the sequence number of the
//! journal entry that made the range a hole in place of a pointer.

use format::{Gen, JournalSeq, Ptr, Sector, Sectors};

use crate::canary::{Bug, bug};

/// Largest size of one extent (the 16-bit field of a bkey).
pub(crate) const MAX_EXTENT: Sectors = Sectors(65535);

/// Largest position: 47 bits, which is 64 PiB. Attaching a larger device is refused.
pub(crate) const MAX_POSITION: Sector = Sector((1 << 47) - 1);

const UNWRITTEN: u64 = 1 << 51;
const JOURNALED: u64 = 1 << 52;
const HOLE: u64 = 1 << 53;
const PTR_MASK: u64 = (1 << 51) - 1;

/// A cached extent, or a hole that a bset must record.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    /// end (47 bits), size (16), dirty (1)
    place: u64,
    /// generation (8 bits), cache sector (43), flags
    target: u64,
}

impl Entry {
    /// Makes the entry of a cached extent that ends at `end`.
    pub(crate) fn extent(end: Sector, size: Sectors, dirty: bool, ptr: Ptr) -> Entry {
        Entry { place: place(end, size, dirty), target: ptr.0 & PTR_MASK }
    }

    /// Makes the entry of a hole that journal entry `seq` made.
    pub(crate) fn hole(end: Sector, size: Sectors, seq: JournalSeq) -> Entry {
        assert!(seq.0 <= PTR_MASK, "journal sequence number {seq} does not fit in 51 bits");
        Entry { place: place(end, size, false), target: seq.0 | HOLE }
    }

    /// Returns the entry marked as not yet in any written bset of its node.
    pub(crate) fn unwritten(mut self) -> Entry {
        self.target |= UNWRITTEN;
        self
    }

    /// Returns the entry marked as one whose key a crash may bring back: the key is in the journal, or an older bset
    /// covers it.
    pub(crate) fn journaled(mut self) -> Entry {
        self.target |= JOURNALED;
        self
    }

    pub(crate) fn end(self) -> Sector {
        Sector(self.place >> 17)
    }

    pub(crate) fn size(self) -> Sectors {
        Sectors((self.place >> 1) & 0xFFFF)
    }

    pub(crate) fn start(self) -> Sector {
        self.end() - self.size()
    }

    pub(crate) fn dirty(self) -> bool {
        self.place & 1 != 0
    }

    pub(crate) fn is_hole(self) -> bool {
        self.target & HOLE != 0
    }

    pub(crate) fn is_unwritten(self) -> bool {
        self.target & UNWRITTEN != 0
    }

    /// Returns 1 or 0 for whether the entry is unwritten, and for whether it is an unwritten hole. Sums over many
    /// entries need no branch.
    pub(crate) fn count_unwritten(self) -> (usize, usize) {
        let unwritten = (self.target / UNWRITTEN) & 1;
        let hole = (self.target / HOLE) & unwritten;
        (unwritten as usize, hole as usize)
    }

    /// Whether a crash may bring this entry back: the entry, or a larger one that it was part of, is in a written bset
    /// or in the journal.
    pub(crate) fn may_be_durable(self) -> bool {
        self.target & (UNWRITTEN | JOURNALED) != UNWRITTEN
    }

    /// The place of the data. The caller has checked that the entry is not a hole.
    pub(crate) fn ptr(self) -> Ptr {
        debug_assert!(!self.is_hole());
        Ptr(self.target & PTR_MASK)
    }

    pub(crate) fn generation(self) -> Gen {
        self.ptr().generation()
    }

    /// The journal entry that made this hole. The caller has checked that the entry is a hole.
    pub(crate) fn hole_seq(self) -> JournalSeq {
        debug_assert!(self.is_hole());
        JournalSeq(self.target & PTR_MASK)
    }

    pub(crate) fn mark_written(&mut self) {
        self.target &= !UNWRITTEN;
    }

    /// Makes the next bset of the node contain the entry, although an older bset may contain it already.
    pub(crate) fn mark_rewritten(&mut self) {
        if !self.is_unwritten() {
            self.target |= UNWRITTEN | JOURNALED;
        }
    }

    /// Drops the first `n` sectors.
    pub(crate) fn cut_front(&mut self, n: Sectors) {
        assert!(n < self.size(), "cutting {n} of {} sectors leaves nothing", self.size());
        self.place = place(self.end(), self.size() - n, self.dirty());
        if !self.is_hole() {
            self.target += n.0 << 8;
        }
    }

    /// Drops the last `n` sectors.
    pub(crate) fn cut_back(&mut self, n: Sectors) {
        assert!(n < self.size(), "cutting {n} of {} sectors leaves nothing", self.size());
        self.place = place(self.end() - n, self.size() - n, self.dirty());
    }

    /// Returns the part of the entry inside `[start, end)`, which must overlap the entry.
    pub(crate) fn clipped(mut self, start: Sector, end: Sector) -> Entry {
        if self.start() < start {
            self.cut_front(start - self.start());
        }
        if self.end() > end {
            self.cut_back(self.end() - end);
        }
        self
    }

    /// Joins `right` to this entry if one entry can stand for both: they are adjacent on the device and in the cache,
    /// have the same flags, and lie in one bucket of `1 << bucket_shift` sectors.
    pub(crate) fn try_join(&mut self, right: Entry, bucket_shift: u32) -> bool {
        let size = self.size() + right.size();
        if self.end() != right.start() || self.dirty() != right.dirty() || size > MAX_EXTENT {
            return false;
        }
        let expected = if self.is_hole() { self.target } else { self.target + (self.size().0 << 8) };
        if right.target != expected {
            return false;
        }
        // At the end of the largest cache `expected` overflows into the flags, and `right` may be a hole. The pointer
        // bits of `right` then name sector 0, which is in another bucket.
        let bucket = |e: Entry| Ptr(e.target & PTR_MASK).offset().0 >> bucket_shift;
        if !self.is_hole() && bucket(*self) != bucket(right) && !bug(Bug::JoinedAcrossBuckets) {
            return false;
        }
        self.place = place(right.end(), size, self.dirty());
        true
    }
}

fn place(end: Sector, size: Sectors, dirty: bool) -> u64 {
    assert!(size.0 > 0 && size <= MAX_EXTENT, "extent of {size} sectors");
    assert!(end <= MAX_POSITION && end.0 >= size.0, "extent of {size} sectors ending at {end}");
    end.0 << 17 | size.0 << 1 | u64::from(dirty)
}

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "[{}, {})", self.start(), self.end())?;
        match (self.is_hole(), self.dirty()) {
            (true, _) => write!(f, " hole of journal entry {}", self.hole_seq())?,
            (false, dirty) => {
                let kind = if dirty { "dirty" } else { "clean" };
                write!(f, " {kind} at {} gen {}", self.ptr().offset(), self.generation())?;
            }
        }
        if self.is_unwritten() {
            f.write_str(" unwritten")?;
        }
        Ok(())
    }
}

#[cfg(any(test, kani))]
mod model;
#[cfg(kani)]
mod proofs;
#[cfg(test)]
mod properties;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_sixteen_bytes() {
        assert_eq!(size_of::<Entry>(), 16);
    }

    #[test]
    fn cutting_moves_the_pointer_only_at_the_front() {
        let mut e = Entry::extent(Sector(100), Sectors(20), true, Ptr::new(0, Sector(1000), Gen(3)));
        e.cut_front(Sectors(5));
        assert_eq!((e.start(), e.end(), e.ptr().offset()), (Sector(85), Sector(100), Sector(1005)));
        e.cut_back(Sectors(5));
        assert_eq!((e.start(), e.end(), e.ptr().offset()), (Sector(85), Sector(95), Sector(1005)));
        assert_eq!(e.generation(), Gen(3));
        assert!(e.dirty());
    }

    #[test]
    fn only_neighbours_in_both_places_join() {
        let at = |s| Ptr::new(0, Sector(s), Gen(1));
        let left = Entry::extent(Sector(8), Sectors(8), true, at(64));
        let right = Entry::extent(Sector(16), Sectors(8), true, at(72));
        let mut joined = left;
        assert!(joined.try_join(right, 10));
        assert_eq!(joined, Entry::extent(Sector(16), Sectors(16), true, at(64)));
        assert!(!{ left }.try_join(right, 3), "they lie in two buckets of eight sectors");
        assert!(!{ left }.try_join(right.unwritten(), 10));
        assert!(!{ left }.try_join(Entry::extent(Sector(16), Sectors(8), false, at(72)), 10));
        assert!(!{ left }.try_join(Entry::extent(Sector(16), Sectors(8), true, at(80)), 10));
    }
}
