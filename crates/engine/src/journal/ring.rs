//! Space in the journal ring.
//!
//! Owns where the next entry goes and which ring buckets may be overwritten. Must not know what is in an entry.
//!
//! Invariants:
//! * a bucket is overwritten only when its newest entry is older than the `last_seq` of the newest *durable* entry,
//!   because until then a crash would look for it;
//! * entries with keys leave [`Ring::reserve`] free buckets untouched, unless the entry itself gives up others:
//!   what frees the journal (a new root, new priorities, an advanced `last_seq`) always finds room.

use format::{JournalSeq, Sectors};

pub(crate) struct Ring {
    bucket_sectors: Sectors,
    block_sectors: Sectors,
    current: usize,
    used_in_current: Sectors,
    /// Newest entry in each ring bucket; 0 for none.
    newest_in: Vec<JournalSeq>,
    /// `last_seq` of the newest durable entry.
    durable_last_seq: JournalSeq,
}

/// Where an entry goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Slot {
    /// Index of the ring bucket.
    pub(crate) bucket: usize,
    /// Sectors into it.
    pub(crate) offset: Sectors,
}

impl Ring {
    pub(crate) fn new(
        bucket_sectors: Sectors,
        block_sectors: Sectors,
        newest_in: Vec<JournalSeq>,
        current: usize,
        used_in_current: Sectors,
        durable_last_seq: JournalSeq,
    ) -> Ring {
        assert!(current < newest_in.len());
        Ring { bucket_sectors, block_sectors, current, used_in_current, newest_in, durable_last_seq }
    }

    /// Buckets kept for entries without keys.
    fn reserve(&self) -> usize {
        if self.newest_in.len() >= 8 { 2 } else { 1 }
    }

    /// Size of an entry of `bytes`, padded to whole blocks.
    pub(crate) fn padded(&self, bytes: usize) -> Sectors {
        let block = self.block_sectors.bytes();
        Sectors::from_bytes_floor((bytes as u64).next_multiple_of(block))
    }

    fn room_in_current(&self) -> Sectors {
        self.bucket_sectors - self.used_in_current
    }

    /// Ring buckets other than the current one whose entries are all older than `seq`.
    fn free_below(&self, seq: JournalSeq) -> usize {
        let others = self.newest_in.iter().enumerate().filter(|(i, _)| *i != self.current);
        others.filter(|(_, newest)| **newest < seq).count()
    }

    /// Free ring buckets, and how many there are in all.
    pub(crate) fn free(&self) -> (usize, usize) {
        (self.free_below(self.durable_last_seq), self.newest_in.len())
    }

    fn next_is_free(&self) -> bool {
        let next = (self.current + 1) % self.newest_in.len();
        next != self.current && self.newest_in[next] < self.durable_last_seq
    }

    /// Whether an entry of `bytes` has a place now. `last_seq` is what it would carry.
    pub(crate) fn has_room(&self, bytes: usize, keys: bool, last_seq: JournalSeq) -> bool {
        if self.padded(bytes) <= self.room_in_current() {
            return true;
        }
        if !self.next_is_free() {
            return false;
        }
        if !keys {
            return true;
        }
        let (free, _) = self.free();
        // Once the entry is durable, buckets below its `last_seq` are free, the current one among them.
        let gained = self.free_below(last_seq) - free + usize::from(self.newest_in[self.current] < last_seq);
        free > self.reserve() || free - 1 + gained >= self.reserve()
    }

    /// Takes the place for an entry. [`Ring::has_room`] must have said yes.
    pub(crate) fn take(&mut self, bytes: usize, seq: JournalSeq) -> Slot {
        let need = self.padded(bytes);
        if need > self.room_in_current() {
            assert!(
                self.next_is_free(),
                "journal bucket {} would be overwritten while it is needed",
                self.current
            );
            self.current = (self.current + 1) % self.newest_in.len();
            self.used_in_current = Sectors::ZERO;
        }
        let slot = Slot { bucket: self.current, offset: self.used_in_current };
        self.used_in_current += need;
        self.newest_in[self.current] = seq;
        slot
    }

    /// Whether an entry with this `last_seq` would make more buckets free than there are.
    pub(crate) fn would_free(&self, last_seq: JournalSeq) -> bool {
        self.free_below(last_seq) > self.free_below(self.durable_last_seq)
    }

    /// Sectors that entries can still take, and the size of the ring.
    pub(crate) fn left(&self) -> (Sectors, Sectors) {
        let (free, total) = self.free();
        let bucket = self.bucket_sectors.0;
        (Sectors(self.room_in_current().0 + free as u64 * bucket), Sectors(total as u64 * bucket))
    }

    /// The newest entry of the ring bucket that holds `seq` (or of the first one behind it).
    pub(crate) fn newest_beside(&self, seq: JournalSeq) -> JournalSeq {
        self.newest_in.iter().copied().filter(|n| *n >= seq).min().unwrap_or(seq)
    }

    /// An entry with this `last_seq` is durable.
    pub(crate) fn durable(&mut self, last_seq: JournalSeq) {
        self.durable_last_seq = self.durable_last_seq.max(last_seq);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(n: usize) -> Ring {
        Ring::new(Sectors(8), Sectors(1), vec![JournalSeq(0); n], 0, Sectors::ZERO, JournalSeq(1))
    }

    #[test]
    fn entries_with_keys_leave_the_reserve() {
        let mut r = ring(4);
        let mut seq = JournalSeq(1);
        // Everything from entry 1 on is needed: keys may fill all but one bucket.
        let mut taken = 0;
        while r.has_room(512, true, JournalSeq(1)) {
            r.take(512, seq);
            seq = seq.next();
            taken += 1;
        }
        assert_eq!(taken, 3 * 8);
        assert!(r.has_room(512, false, JournalSeq(1)), "the reserve is there for entries without keys");
        // An entry that gives up two buckets may use the reserve itself.
        assert!(r.has_room(512, true, JournalSeq(20)));
        let slot = r.take(512, seq);
        assert_eq!(slot, Slot { bucket: 3, offset: Sectors(0) });
        r.durable(JournalSeq(20));
        assert_eq!(r.free().0, 2);
    }

    #[test]
    fn a_ring_of_two_buckets_keeps_turning() {
        let mut r = ring(2);
        for s in 1..100 {
            let seq = JournalSeq(s);
            assert!(r.has_room(4096, true, seq), "entry {s}");
            r.take(4096, seq);
            r.durable(seq);
        }
    }
}
