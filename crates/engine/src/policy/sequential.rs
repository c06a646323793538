//! The detection of sequential streams and of their lengths.
//!
//! Owns the records of the recent streams on one backing device (semantics section 4.1): at most 128, each valid for 5
//! seconds after its last request. A new stream replaces the least recently used record. Reads and writes share the
//! records.
//!
//! The kernel also averages the run lengths of each *task* (thread) and applies the average to the next requests of the
//! task. A block server has no such tasks: one worker serves many clients, many workers serve one client, and the
//! average of one client would affect the others. So this detector identifies a stream by its positions alone: a client
//! may send one stream over several connections.
//!
//! Streams *join* instead. Asynchronous servers deliver the requests of one stream slightly out of order. A request that
//! arrives early begins a new stream; when the request before it arrives, the two streams become one, with the sum of
//! their lengths. A request that continues no stream never joins a stream behind it, so descending access is not a
//! stream.
//!
//! *Invariants:* the length of a record is `last - first`; every live record is exactly once in the chain of its first
//! sector and once in that of its last sector; the order of use is a permutation of all records. *Must not know:*
//! tunables, and the use of the lengths.

use format::{Sector, Sectors};
use io::Nanos;

/// The number of records of a device (semantics section 4.1).
const RECORDS: usize = 128;
/// The bits of the hash of a sector: there are as many chains as records (semantics section 4.1).
const HASH_BITS: u32 = 7;
/// The time for which a record is valid after its last request (semantics section 4.1).
const LIFETIME: Nanos = Nanos::from_secs(5);
/// The index that no record has.
const NIL: u8 = u8::MAX;

#[derive(Clone, Copy, Default)]
struct Record {
    first: Sector,
    /// The end of the last request, at which the stream continues.
    last: Sector,
    /// The time until which the record is valid.
    expires: Nanos,
    live: bool,
}

/// The streams of one backing device.
pub struct SequentialDetector {
    records: [Record; RECORDS],
    by_first: Chains,
    by_last: Chains,
    order: UseOrder,
}

impl Default for SequentialDetector {
    fn default() -> Self {
        SequentialDetector::new()
    }
}

impl SequentialDetector {
    /// Makes a detector without streams.
    pub fn new() -> SequentialDetector {
        SequentialDetector {
            records: [Record::default(); RECORDS],
            by_first: Chains::new(),
            by_last: Chains::new(),
            order: UseOrder::new(),
        }
    }

    /// Records a request for `sectors` from `start`, and returns the length of its stream, including the request. A
    /// stream of one request has the length of the request.
    pub fn observe(&mut self, start: Sector, sectors: Sectors, now: Nanos) -> Sectors {
        let end = Sector(start.0.saturating_add(sectors.0));
        if end == start {
            return Sectors::ZERO;
        }
        let slot = match self.ending_at(start, now) {
            Some(slot) => {
                self.unlink(slot);
                slot
            }
            None => {
                let slot = self.order.least_recent();
                self.unlink(slot);
                self.records[usize::from(slot)].first = start;
                slot
            }
        };
        let continues = self.records[usize::from(slot)].first != start;
        let mut last = end;
        if continues {
            // Each round removes a record from its chain, so the loop ends.
            while let Some(next) = self.beginning_at(last, now) {
                last = self.records[usize::from(next)].last;
                self.unlink(next);
                self.order.make_least_recent(next);
            }
        }
        let record = &mut self.records[usize::from(slot)];
        record.last = last;
        record.expires = now.after(LIFETIME);
        record.live = true;
        let length = Sectors(record.last.0.saturating_sub(record.first.0));
        self.by_first.push(self.records[usize::from(slot)].first, slot);
        self.by_last.push(last, slot);
        self.order.make_most_recent(slot);
        length
    }

    fn ending_at(&self, sector: Sector, now: Nanos) -> Option<u8> {
        self.newest(&self.by_last, sector, now, |r| r.last)
    }

    fn beginning_at(&self, sector: Sector, now: Nanos) -> Option<u8> {
        self.newest(&self.by_first, sector, now, |r| r.first)
    }

    /// Among the records whose `key` is `sector`: the most recently used one. Chains are in order of use, because every
    /// use pushes the record again.
    fn newest(&self, chains: &Chains, sector: Sector, now: Nanos, key: fn(&Record) -> Sector) -> Option<u8> {
        chains.iter(sector).find(|&slot| {
            let record = &self.records[usize::from(slot)];
            key(record) == sector && record.expires >= now
        })
    }

    fn unlink(&mut self, slot: u8) {
        let record = &mut self.records[usize::from(slot)];
        if record.live {
            record.live = false;
            self.by_first.remove(record.first, slot);
            self.by_last.remove(record.last, slot);
        }
    }
}

/// Hash chains of records, the most recently pushed one first.
struct Chains {
    heads: [u8; RECORDS],
    next: [u8; RECORDS],
}

impl Chains {
    fn new() -> Chains {
        Chains { heads: [NIL; RECORDS], next: [NIL; RECORDS] }
    }

    fn hash(sector: Sector) -> usize {
        // Multiplicative hashing by 2^64 / golden ratio; the upper bits are mixed best.
        (sector.0.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (u64::BITS - HASH_BITS)) as usize
    }

    fn push(&mut self, sector: Sector, slot: u8) {
        let head = &mut self.heads[Chains::hash(sector)];
        self.next[usize::from(slot)] = *head;
        *head = slot;
    }

    fn remove(&mut self, sector: Sector, slot: u8) {
        let behind = self.next[usize::from(slot)];
        let mut link = &mut self.heads[Chains::hash(sector)];
        while *link != slot {
            if *link == NIL {
                debug_assert!(false, "record {slot} is not in the chain of sector {sector}");
                return;
            }
            link = &mut self.next[usize::from(*link)];
        }
        *link = behind;
    }

    fn iter(&self, sector: Sector) -> impl Iterator<Item = u8> + '_ {
        let known = |slot: u8| (slot != NIL).then_some(slot);
        std::iter::successors(known(self.heads[Chains::hash(sector)]), move |&slot| {
            known(self.next[usize::from(slot)])
        })
    }
}

/// All records in the order of use, as a doubly linked ring with one extra link that is not a record.
struct UseOrder {
    newer: [u8; RECORDS + 1],
    older: [u8; RECORDS + 1],
}

/// The extra link: its `newer` is the least recently used record, its `older` the most recent one.
const ENDS: u8 = RECORDS as u8;

impl UseOrder {
    fn new() -> UseOrder {
        let mut order = UseOrder { newer: [ENDS; RECORDS + 1], older: [ENDS; RECORDS + 1] };
        for slot in 0..ENDS {
            order.insert_between(order.older[usize::from(ENDS)], slot, ENDS);
        }
        order
    }

    fn least_recent(&self) -> u8 {
        self.newer[usize::from(ENDS)]
    }

    fn make_most_recent(&mut self, slot: u8) {
        self.remove(slot);
        self.insert_between(self.older[usize::from(ENDS)], slot, ENDS);
    }

    fn make_least_recent(&mut self, slot: u8) {
        self.remove(slot);
        self.insert_between(ENDS, slot, self.newer[usize::from(ENDS)]);
    }

    fn remove(&mut self, slot: u8) {
        let (older, newer) = (self.older[usize::from(slot)], self.newer[usize::from(slot)]);
        self.newer[usize::from(older)] = newer;
        self.older[usize::from(newer)] = older;
    }

    fn insert_between(&mut self, older: u8, slot: u8, newer: u8) {
        self.older[usize::from(slot)] = older;
        self.newer[usize::from(slot)] = newer;
        self.newer[usize::from(older)] = slot;
        self.older[usize::from(newer)] = slot;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The same rules without chains and rings: a list of live records, the most recently used one first.
    #[derive(Default)]
    struct Naive {
        records: Vec<Record>,
    }

    impl Naive {
        fn take(&mut self, now: Nanos, fits: impl Fn(&Record) -> bool) -> Option<Record> {
            let fits = |r: &Record| fits(r) && now.0 <= r.expires.0;
            self.records.iter().position(fits).map(|i| self.records.remove(i))
        }

        fn observe(&mut self, start: Sector, sectors: Sectors, now: Nanos) -> Sectors {
            let mut last = start + sectors;
            let mut first = start;
            if let Some(before) = self.take(now, |r| r.last == start) {
                first = before.first;
                while let Some(after) = self.take(now, |r| r.first == last) {
                    last = after.last;
                }
            }
            self.records.truncate(RECORDS - 1);
            self.records.insert(0, Record { first, last, expires: now.after(LIFETIME), live: true });
            last - first
        }
    }

    fn feed(detector: &mut SequentialDetector, start: u64, sectors: u64, ms: u64) -> u64 {
        detector.observe(Sector(start), Sectors(sectors), Nanos::from_ms(ms)).0
    }

    #[test]
    fn the_64th_request_of_64_kib_reaches_4_mib() {
        let mut d = SequentialDetector::new();
        for i in 1..=100u64 {
            let length = feed(&mut d, 1000 + (i - 1) * 128, 128, i);
            assert_eq!(length, i * 128);
            assert_eq!(length >= (4 << 20) / 512, i >= 64, "request {i}");
        }
    }

    #[test]
    fn a_stream_ends_after_five_seconds() {
        let mut d = SequentialDetector::new();
        feed(&mut d, 0, 8, 0);
        assert_eq!(feed(&mut d, 8, 8, 5000), 16, "5 s later: still known");
        assert_eq!(feed(&mut d, 16, 8, 10001), 8, "longer than that: a new stream");
    }

    #[test]
    fn the_129th_stream_takes_the_place_of_the_least_recently_used() {
        let mut d = SequentialDetector::new();
        for i in 0..128 {
            feed(&mut d, i * 1000, 8, 0);
        }
        assert_eq!(feed(&mut d, 8, 8, 1), 16, "the first one is used again");
        feed(&mut d, 999_000, 8, 1);
        assert_eq!(feed(&mut d, 1008, 8, 1), 8, "the second one is gone");
        assert_eq!(feed(&mut d, 16, 8, 1), 24);
        assert_eq!(feed(&mut d, 127_008, 8, 1), 16);
    }

    #[test]
    fn of_two_streams_that_end_at_one_sector_the_newer_one_continues() {
        let mut d = SequentialDetector::new();
        feed(&mut d, 100, 100, 0);
        feed(&mut d, 190, 10, 0);
        assert_eq!(feed(&mut d, 200, 10, 0), 20);
        assert_eq!(feed(&mut d, 200, 10, 0), 110);
    }

    #[test]
    fn requests_out_of_order_join_their_stream() {
        let mut d = SequentialDetector::new();
        assert_eq!(feed(&mut d, 0, 8, 0), 8);
        assert_eq!(feed(&mut d, 16, 8, 0), 8, "early");
        assert_eq!(feed(&mut d, 24, 8, 0), 16, "early, too");
        assert_eq!(feed(&mut d, 8, 8, 0), 32, "the gap is closed");
        assert_eq!(feed(&mut d, 32, 8, 0), 40);
    }

    #[test]
    fn descending_access_is_no_stream() {
        let mut d = SequentialDetector::new();
        for i in (0..200).rev() {
            assert_eq!(feed(&mut d, i * 8, 8, 0), 8);
        }
    }

    #[test]
    fn extremes_do_no_harm() {
        let mut d = SequentialDetector::new();
        assert_eq!(feed(&mut d, 7, 0, 0), 0, "nothing");
        assert_eq!(feed(&mut d, 0, u64::MAX, 0), u64::MAX);
        assert_eq!(feed(&mut d, u64::MAX, 8, 0), 0, "beyond the end of everything");
        assert_eq!(feed(&mut d, u64::MAX - 4, 8, 0), 4);
        assert_eq!(d.observe(Sector(1), Sectors(1), Nanos(u64::MAX)), Sectors(1));
        assert_eq!(d.observe(Sector(2), Sectors(1), Nanos(u64::MAX)), Sectors(2));
    }

    /// The records of streams at positions of all kinds are spread over the chains, so each chain is short.
    #[test]
    fn chains_are_short() {
        for step in [8, 128, 1000, 1 << 20, (1 << 20) + 8] {
            let mut chains = Chains::new();
            let mut slots = Vec::new();
            for slot in 0..128 {
                chains.push(Sector(u64::from(slot) * step), slot);
            }
            for slot in 0..128 {
                let found: Vec<u8> = chains.iter(Sector(u64::from(slot) * step)).collect();
                assert!(found.contains(&slot) && found.len() <= 16, "{step}: {found:?}");
                slots.extend((found[0] == slot).then_some(slot));
            }
            assert!(slots.len() > 40, "{step}: {} chains are in use", slots.len());
        }
    }

    /// The least recently used record is replaced first, also after some were joined or have expired.
    #[test]
    fn records_are_taken_in_the_order_of_their_use() {
        let mut order = UseOrder::new();
        let mut naive: Vec<u8> = (0..128).collect();
        let mut number: u64 = 1;
        for _ in 0..2000 {
            number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let slot = (number >> 57) as u8;
            naive.retain(|s| *s != slot);
            if number >> 56 & 1 == 0 {
                order.make_most_recent(slot);
                naive.push(slot);
            } else {
                order.make_least_recent(slot);
                naive.insert(0, slot);
            }
            assert_eq!(order.least_recent(), naive[0]);
        }
        let mut at = ENDS;
        for slot in naive {
            at = order.newer[usize::from(at)];
            assert_eq!((at, order.newer[usize::from(order.older[usize::from(at)])]), (slot, slot));
        }
    }

    proptest! {
        /// Dense positions give matches and joins, wide ones evictions.
        #[test]
        fn agrees_with_the_naive_detector(
            span in prop_oneof![Just(40u64), Just(400), Just(4000)],
            requests in prop::collection::vec((any::<u64>(), 1u64..5, 0u64..1500), 1..600),
            slow in any::<bool>(),
        ) {
            let mut d = SequentialDetector::new();
            let mut naive = Naive::default();
            let mut now = Nanos(0);
            for (at, sectors, ms) in requests {
                now = now.after(Nanos::from_ms(if slow { ms } else { ms % 20 }));
                let (start, sectors) = (Sector(at % span), Sectors(sectors));
                let expected = naive.observe(start, sectors, now);
                prop_assert_eq!(d.observe(start, sectors, now), expected);
            }
        }
    }
}
