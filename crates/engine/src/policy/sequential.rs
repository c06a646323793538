//! Which requests belong to a sequential stream, and how long that stream is by now.
//!
//! Owns the records of the streams seen lately on one backing device (runtime semantics 4.1): at most
//! 128 of them, each forgotten 5 seconds after its last request, the least recently used one given up
//! first. Reads and writes share them.
//!
//! The kernel also averages the run lengths of each *task* (thread) and applies the average to
//! whatever the task does next. A block server has no such tasks: one worker speaks for many clients,
//! one client is spread over many workers, and the average of one punishes the others. So here a
//! stream is known by its positions alone. Two things stand in for the averages:
//!
//! * A [`StreamHint`] (say, the number of the export's connection) tells apart streams that end at the
//!   same sector. It never separates what continues seamlessly, since a client may send one stream
//!   over several connections.
//! * Streams *join*. Asynchronous servers deliver the requests of one stream slightly out of order; a
//!   request that came early begins a stream of its own, and when the one before it arrives the two
//!   become one, with their lengths added. A request that continues nothing never joins what follows
//!   it, so descending access is not taken for a stream.
//!
//! *Invariants:* a record's length is `last - first`; every live record is in the chain of its first
//! and of its last sector exactly once; the order of use is a permutation of all records. *Must not
//! know:* tunables, and what is done about long streams.

use format::{Sector, Sectors};
use io::Nanos;

/// Streams remembered per device (runtime semantics 4.1).
const RECORDS: usize = 128;
/// Bits of the hash over a sector: as many chains as records (runtime semantics 4.1).
const HASH_BITS: u32 = 7;
/// How long a stream is remembered after its last request (runtime semantics 4.1).
const LIFETIME: Nanos = Nanos::from_secs(5);
/// "No record": an index that no record has.
const NIL: u8 = u8::MAX;

/// Where a request comes from, as far as the caller can tell: the number of the connection or queue.
/// Callers that know nothing pass the default for all.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct StreamHint(pub u16);

#[derive(Clone, Copy, Default)]
struct Record {
    first: Sector,
    /// End of the last request: where the stream continues.
    last: Sector,
    /// The last moment at which the record may still be matched.
    expires: Nanos,
    hint: StreamHint,
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
    /// A detector that has seen nothing.
    pub fn new() -> SequentialDetector {
        SequentialDetector {
            records: [Record::default(); RECORDS],
            by_first: Chains::new(),
            by_last: Chains::new(),
            order: UseOrder::new(),
        }
    }

    /// Takes note of a request for `sectors` from `start` and returns the length of the stream that it
    /// belongs to, itself included. A stream of one request is as long as the request.
    pub fn observe(&mut self, start: Sector, sectors: Sectors, now: Nanos, hint: StreamHint) -> Sectors {
        let end = Sector(start.0.saturating_add(sectors.0));
        if end == start {
            return Sectors::ZERO;
        }
        let slot = match self.ending_at(start, now, hint) {
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
            // Each round removes a record from its chain, so this ends.
            while let Some(next) = self.beginning_at(last, now, hint) {
                last = self.records[usize::from(next)].last;
                self.unlink(next);
                self.order.make_least_recent(next);
            }
        }
        let record = &mut self.records[usize::from(slot)];
        record.last = last;
        record.expires = now.after(LIFETIME);
        record.hint = hint;
        record.live = true;
        let length = Sectors(record.last.0.saturating_sub(record.first.0));
        self.by_first.push(self.records[usize::from(slot)].first, slot);
        self.by_last.push(last, slot);
        self.order.make_most_recent(slot);
        length
    }

    fn ending_at(&self, sector: Sector, now: Nanos, hint: StreamHint) -> Option<u8> {
        self.best(&self.by_last, sector, now, hint, |r| r.last)
    }

    fn beginning_at(&self, sector: Sector, now: Nanos, hint: StreamHint) -> Option<u8> {
        self.best(&self.by_first, sector, now, hint, |r| r.first)
    }

    /// Of the records whose `key` is `sector`: the most recently used one with this hint, else the most
    /// recently used one. Chains are in order of use, since every use pushes anew.
    fn best(
        &self,
        chains: &Chains,
        sector: Sector,
        now: Nanos,
        hint: StreamHint,
        key: fn(&Record) -> Sector,
    ) -> Option<u8> {
        let mut any = None;
        for slot in chains.iter(sector) {
            let record = &self.records[usize::from(slot)];
            if key(record) != sector || record.expires < now {
                continue;
            }
            if record.hint == hint {
                return Some(slot);
            }
            any = any.or(Some(slot));
        }
        any
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

/// Hash chains through the records, most recently pushed first.
struct Chains {
    heads: [u8; RECORDS],
    next: [u8; RECORDS],
}

impl Chains {
    fn new() -> Chains {
        Chains { heads: [NIL; RECORDS], next: [NIL; RECORDS] }
    }

    fn hash(sector: Sector) -> usize {
        // Multiplicative hashing by 2^64 / golden ratio; the upper bits are the well mixed ones.
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

/// All records from the least to the most recently used, as a doubly linked ring with one extra link
/// that is no record.
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
