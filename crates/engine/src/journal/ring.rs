//! The space in the journal ring.
//!
//! Owns the place of the next entry, and the knowledge which ring buckets may be overwritten. Must not know the content
//! of an entry.
//!
//! Invariants:
//! * a bucket is overwritten only when its newest entry is older than the `last_seq` of the newest *durable* entry,
//!   because recovery after a crash needs it until then;
//! * an entry gets a place only if a given number of blocks is free after it is durable. Buckets that the entry itself
//!   frees count as free. So entries that free the journal always find room.

use format::{JournalSeq, Sectors};

use crate::canary::{Bug, bug};

/// The journal ring: the buckets in which entries are written in turn.
pub(crate) struct Ring {
    bucket_sectors: Sectors,
    block_sectors: Sectors,
    current: usize,
    used_in_current: Sectors,
    /// The newest entry in each ring bucket; 0 for none.
    newest_in: Vec<JournalSeq>,
    /// The `last_seq` of the newest durable entry.
    durable_last_seq: JournalSeq,
}

/// The place of an entry in the ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RingSlot {
    /// The index of the ring bucket.
    pub(crate) bucket: usize,
    /// The offset in the bucket.
    pub(crate) offset: Sectors,
}

impl Ring {
    /// Makes a ring whose next entry goes to `next`.
    pub(crate) fn new(
        bucket_sectors: Sectors,
        block_sectors: Sectors,
        newest_in: Vec<JournalSeq>,
        next: RingSlot,
        durable_last_seq: JournalSeq,
    ) -> Ring {
        let RingSlot { bucket: current, offset: used_in_current } = next;
        assert!(current < newest_in.len());
        Ring { bucket_sectors, block_sectors, current, used_in_current, newest_in, durable_last_seq }
    }

    /// The size of an entry of `bytes`, padded to whole blocks.
    pub(crate) fn padded(&self, bytes: usize) -> Sectors {
        let block = self.block_sectors.bytes();
        Sectors::from_bytes_floor((bytes as u64).next_multiple_of(block))
    }

    fn room_in_current(&self) -> Sectors {
        self.bucket_sectors - self.used_in_current
    }

    /// The number of ring buckets, without the current one, whose entries are all older than `seq`.
    fn free_below(&self, seq: JournalSeq) -> usize {
        let others = self.newest_in.iter().enumerate().filter(|(i, _)| *i != self.current);
        others.filter(|(_, newest)| **newest < seq).count()
    }

    /// The number of free ring buckets, and of all ring buckets.
    pub(crate) fn free(&self) -> (usize, usize) {
        (self.free_below(self.durable_last_seq), self.newest_in.len())
    }

    /// Whether all entries of the next bucket are older than `needed`, so that it may be overwritten.
    fn next_is_free(&self, needed: JournalSeq) -> bool {
        let next = self.next();
        next != self.current && self.newest_in[next] < needed
    }

    fn next(&self) -> usize {
        (self.current + 1) % self.newest_in.len()
    }

    /// The number of blocks of the ring.
    pub(crate) fn blocks(&self) -> u64 {
        self.newest_in.len() as u64 * (self.bucket_sectors.0 / self.block_sectors.0)
    }

    /// Whether an entry of `bytes` with this `last_seq` has a place now and leaves `reserve` free blocks after it is
    /// durable.
    pub(crate) fn has_room(&self, bytes: usize, reserve: u64, last_seq: JournalSeq) -> bool {
        let need = self.padded(bytes);
        let needed = if bug(Bug::RingBucketFreedEarly) { last_seq } else { self.durable_last_seq };
        let (current, room) = if need <= self.room_in_current() {
            (self.current, self.room_in_current())
        } else if self.next_is_free(needed) {
            (self.next(), self.bucket_sectors)
        } else {
            return false;
        };
        let short = (reserve * self.block_sectors.0).saturating_sub((room - need).0);
        let wanted = short.div_ceil(self.bucket_sectors.0) as usize;
        // Every added key calls this, so the search stops at the number of buckets that it needs. The buckets behind
        // the current one become free first.
        let (before, from_current) = self.newest_in.split_at(current);
        let others = from_current.iter().skip(1).chain(before);
        wanted == 0 || others.filter(|newest| **newest < last_seq).nth(wanted - 1).is_some()
    }

    /// Takes the place of an entry; [`Ring::has_room`] must have returned true for it.
    pub(crate) fn take(&mut self, bytes: usize, seq: JournalSeq) -> RingSlot {
        let need = self.padded(bytes);
        if need > self.room_in_current() {
            assert!(
                self.next_is_free(self.durable_last_seq) || bug(Bug::RingBucketFreedEarly),
                "journal bucket {} would be overwritten while it is needed",
                self.current
            );
            self.current = self.next();
            self.used_in_current = Sectors::ZERO;
        }
        let slot = RingSlot { bucket: self.current, offset: self.used_in_current };
        self.used_in_current += need;
        self.newest_in[self.current] = seq;
        slot
    }

    /// Whether an entry with this `last_seq` would free further buckets.
    pub(crate) fn would_free(&self, last_seq: JournalSeq) -> bool {
        self.free_below(last_seq) > self.free_below(self.durable_last_seq)
    }

    /// The number of sectors that entries can still take, and the size of the ring.
    pub(crate) fn left(&self) -> (Sectors, Sectors) {
        let (free, total) = self.free();
        let bucket = self.bucket_sectors.0;
        (Sectors(self.room_in_current().0 + free as u64 * bucket), Sectors(total as u64 * bucket))
    }

    /// The newest entry of the ring bucket that has entry `seq`, or of the first bucket behind it.
    pub(crate) fn newest_beside(&self, seq: JournalSeq) -> JournalSeq {
        self.newest_in.iter().copied().filter(|n| *n >= seq).min().unwrap_or(seq)
    }

    /// The `last_seq` of the newest durable entry.
    pub(crate) fn durable_last_seq(&self) -> JournalSeq {
        self.durable_last_seq
    }

    /// Records that an entry with this `last_seq` is durable.
    pub(crate) fn durable(&mut self, last_seq: JournalSeq) {
        self.durable_last_seq = self.durable_last_seq.max(last_seq);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// There is room for an entry if it fits and leaves enough free blocks: in its bucket, and in buckets whose
        /// entries are not needed after it is durable.
        #[test]
        fn room_is_what_is_left(
            newest in prop::collection::vec(0u64..20, 2..6),
            (current, used, blocks, reserve) in (0usize..6, 0u64..=8, 1u64..9, 0u64..45),
            (durable, more) in (0u64..20, 0u64..20),
        ) {
            let (current, last) = (current % newest.len(), durable + more);
            let newest_in = newest.iter().map(|n| JournalSeq(*n)).collect();
            // Buckets of eight blocks of two sectors.
            let (bucket, block) = (Sectors(16), Sectors(2));
            let next = RingSlot { bucket: current, offset: Sectors(used * 2) };
            let mut r = Ring::new(bucket, block, newest_in, next, JournalSeq(durable));
            let others = |at: usize, below: u64| {
                newest.iter().enumerate().filter(|(i, n)| *i != at && **n < below).count() as u64
            };
            let next = (current + 1) % newest.len();
            let place = if blocks <= 8 - used {
                Some((current, used))
            } else {
                (newest[next] < durable).then_some((next, 0))
            };
            let left = |(at, used): (usize, u64)| 8 - used - blocks + 8 * others(at, last);
            let bytes = (blocks * 1024 - 1000) as usize;
            let has_room = r.has_room(bytes, reserve, JournalSeq(last));
            prop_assert_eq!(has_room, place.is_some_and(|p| left(p) >= reserve));
            prop_assert_eq!(r.free(), (others(current, durable) as usize, newest.len()));
            let sectors = Sectors((8 - used + 8 * others(current, durable)) * 2);
            prop_assert_eq!(r.left(), (sectors, Sectors(newest.len() as u64 * 16)));
            prop_assert_eq!(r.blocks(), newest.len() as u64 * 8);
            prop_assert_eq!(r.would_free(JournalSeq(last)), others(current, last) > others(current, durable));
            let beside = newest.iter().copied().filter(|n| *n >= last).min().unwrap_or(last);
            prop_assert_eq!(r.newest_beside(JournalSeq(last)), JournalSeq(beside));
            if let Some((at, used)) = place {
                let slot = r.take(bytes, JournalSeq(99));
                prop_assert_eq!(slot, RingSlot { bucket: at, offset: Sectors(used * 2) });
                prop_assert_eq!((r.current, r.used_in_current), (at, Sectors((used + blocks) * 2)));
                prop_assert_eq!(r.newest_in[at], JournalSeq(99));
            }
            r.durable(JournalSeq(last));
            r.durable(JournalSeq(durable));
            prop_assert_eq!(r.durable_last_seq, JournalSeq(last));
        }
    }

    fn ring(n: usize) -> Ring {
        Ring::new(
            Sectors(8),
            Sectors(1),
            vec![JournalSeq(0); n],
            RingSlot { bucket: 0, offset: Sectors::ZERO },
            JournalSeq(1),
        )
    }

    #[test]
    fn entries_leave_the_reserve() {
        let mut r = ring(4);
        let mut seq = JournalSeq(1);
        // All entries from entry 1 on are needed.
        let mut taken = 0;
        while r.has_room(512, 10, JournalSeq(1)) {
            r.take(512, seq);
            seq = seq.next();
            taken += 1;
        }
        assert_eq!(taken, 4 * 8 - 10);
        assert!(r.has_room(512, 9, JournalSeq(1)));
        assert!(r.has_room(5 * 512, 0, JournalSeq(1)), "in the last bucket");
        // An entry that frees two buckets may use the reserve.
        assert!(r.has_room(512, 10, JournalSeq(17)));
        for _ in 0..10 {
            assert!(r.has_room(512, 0, JournalSeq(1)));
            r.take(512, seq);
            seq = seq.next();
        }
        assert!(!r.has_room(512, 0, JournalSeq(17)), "what it gives up is not free before it is durable");
        r.durable(JournalSeq(17));
        assert_eq!(r.free().0, 2);
        assert_eq!(r.take(512, seq), RingSlot { bucket: 0, offset: Sectors(0) });
    }

    #[test]
    fn a_ring_of_two_buckets_never_gets_stuck() {
        let mut r = ring(2);
        for s in 1..100 {
            let seq = JournalSeq(s);
            assert!(r.has_room(4096, 8, seq), "entry {s}");
            r.take(4096, seq);
            r.durable(seq);
        }
    }

    /// Entry 2 is the last of its bucket, entry 3 the first of the next one.
    #[test]
    fn the_last_entry_of_a_bucket_is_beside_itself() {
        let newest_in = [2, 3, 0].map(JournalSeq).to_vec();
        let r = Ring::new(
            Sectors(8),
            Sectors(1),
            newest_in,
            RingSlot { bucket: 1, offset: Sectors(1) },
            JournalSeq(2),
        );
        assert_eq!(r.newest_beside(JournalSeq(2)), JournalSeq(2));
        assert_eq!(r.newest_beside(JournalSeq(3)), JournalSeq(3));
        assert_eq!(r.free(), (1, 3), "entry 2 is needed");
        assert!(!r.would_free(JournalSeq(2)), "it frees nothing that is not free");
        assert!(r.would_free(JournalSeq(3)));
    }
}
