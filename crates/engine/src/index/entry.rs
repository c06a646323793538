//! One cached extent in memory: 16 bytes.
//!
//! Owns the packing. The first word orders entries by their end; the second holds a pointer in bcache's own
//! layout (generation, sector) with three flags in the bits that the on-disk pointer uses for the device index,
//! which is always 0 in a set with one cache device.
//!
//! Invariants: `size` is at least 1 and at most 65535; `end >= size`; a tombstone has no pointer, its place holds
//! the journal sequence number that made the range a hole.

use format::{Gen, JournalSeq, Ptr, Sector, Sectors};

use crate::canary::{Bug, bug};

/// Largest size of one extent (the 16-bit field of a bkey).
pub(crate) const MAX_EXTENT: Sectors = Sectors(65535);

/// Positions are kept in 47 bits: 64 PiB. Larger devices are refused when they are attached.
pub(crate) const MAX_POSITION: Sector = Sector((1 << 47) - 1);

const UNWRITTEN: u64 = 1 << 51;
const JOURNALED: u64 = 1 << 52;
const TOMBSTONE: u64 = 1 << 53;
const PTR_MASK: u64 = (1 << 51) - 1;

/// A cached extent, or a range that is known to be a hole and must be written as one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    /// end (47 bits), size (16), dirty (1)
    place: u64,
    /// generation (8 bits), cache sector (43), flags
    target: u64,
}

impl Entry {
    /// A cached extent ending at `end`.
    pub(crate) fn extent(end: Sector, size: Sectors, dirty: bool, ptr: Ptr) -> Entry {
        Entry { place: place(end, size, dirty), target: ptr.0 & PTR_MASK }
    }

    /// A hole that `seq` made.
    pub(crate) fn tombstone(end: Sector, size: Sectors, seq: JournalSeq) -> Entry {
        assert!(seq.0 <= PTR_MASK, "journal sequence number {seq} does not fit in 51 bits");
        Entry { place: place(end, size, false), target: seq.0 | TOMBSTONE }
    }

    /// The same entry, not yet in any written set of its node.
    pub(crate) fn unwritten(mut self) -> Entry {
        self.target |= UNWRITTEN;
        self
    }

    /// The same entry, whose key a crash may bring back: it went into the journal, or an older set covers it.
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

    pub(crate) fn is_tombstone(self) -> bool {
        self.target & TOMBSTONE != 0
    }

    pub(crate) fn is_unwritten(self) -> bool {
        self.target & UNWRITTEN != 0
    }

    /// One of an unwritten entry, none of others; and the same of an unwritten hole: sums of many, without a branch.
    pub(crate) fn count_unwritten(self) -> (usize, usize) {
        let unwritten = (self.target / UNWRITTEN) & 1;
        let hole = (self.target / TOMBSTONE) & unwritten;
        (unwritten as usize, hole as usize)
    }

    /// Whether a crash may bring this very entry back: it is, or a larger one that it was part of, in a written set or in
    /// the journal.
    pub(crate) fn may_be_durable(self) -> bool {
        self.target & (UNWRITTEN | JOURNALED) != UNWRITTEN
    }

    /// Where the data is; meaningless for a tombstone.
    pub(crate) fn ptr(self) -> Ptr {
        debug_assert!(!self.is_tombstone());
        Ptr(self.target & PTR_MASK)
    }

    pub(crate) fn generation(self) -> Gen {
        self.ptr().generation()
    }

    /// The journal entry that made this hole; meaningless for an extent.
    pub(crate) fn hole_seq(self) -> JournalSeq {
        debug_assert!(self.is_tombstone());
        JournalSeq(self.target & PTR_MASK)
    }

    pub(crate) fn mark_written(&mut self) {
        self.target &= !UNWRITTEN;
    }

    /// The next set of its node shall hold it, although an older one may do so already.
    pub(crate) fn mark_rewritten(&mut self) {
        if !self.is_unwritten() {
            self.target |= UNWRITTEN | JOURNALED;
        }
    }

    /// Drops the first `n` sectors.
    pub(crate) fn cut_front(&mut self, n: Sectors) {
        assert!(n < self.size(), "cutting {n} of {} sectors leaves nothing", self.size());
        self.place = place(self.end(), self.size() - n, self.dirty());
        if !self.is_tombstone() {
            self.target += n.0 << 8;
        }
    }

    /// Drops the last `n` sectors.
    pub(crate) fn cut_back(&mut self, n: Sectors) {
        assert!(n < self.size(), "cutting {n} of {} sectors leaves nothing", self.size());
        self.place = place(self.end() - n, self.size() - n, self.dirty());
    }

    /// The part of the entry inside `[start, end)`, which must overlap it.
    pub(crate) fn clipped(mut self, start: Sector, end: Sector) -> Entry {
        if self.start() < start {
            self.cut_front(start - self.start());
        }
        if self.end() > end {
            self.cut_back(self.end() - end);
        }
        self
    }

    /// Joins `right` to this entry if the two say the same as one would: adjacent on the device and in the
    /// cache, alike in every flag, and in one bucket of `1 << bucket_shift` sectors.
    pub(crate) fn try_join(&mut self, right: Entry, bucket_shift: u32) -> bool {
        let size = self.size() + right.size();
        if self.end() != right.start() || self.dirty() != right.dirty() || size > MAX_EXTENT {
            return false;
        }
        let expected = if self.is_tombstone() { self.target } else { self.target + (self.size().0 << 8) };
        if right.target != expected {
            return false;
        }
        // At the end of the largest cache `expected` carries into the flags, and `right` may be a hole. Its place for the pointer
        // then says sector 0, which is in another bucket.
        let bucket = |e: Entry| Ptr(e.target & PTR_MASK).offset().0 >> bucket_shift;
        if !self.is_tombstone() && bucket(*self) != bucket(right) && !bug(Bug::JoinedAcrossBuckets) {
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
        match (self.is_tombstone(), self.dirty()) {
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
