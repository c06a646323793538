//! The policy lru: the buckets whose data was not used for the longest time, weighed by what is in them (semantics section 7.3).

use std::collections::BinaryHeap;

use format::{BucketNr, PRIO_INITIAL};

use super::{Candidate, Candidates, ReplacementPolicy, Space};

/// The youngest possible bucket counts this part of the priority range on top of its age, so that the size matters among
/// equally old buckets (semantics section 7.3).
const RANGE_PART: u64 = 8;

/// See the module head. A scan asks for every bucket once.
#[derive(Debug)]
pub struct Lru {
    first: u32,
    end: u32,
    /// Next bucket of the scan.
    next: u32,
    wanted: usize,
    min_prio: u16,
    /// The best buckets so far by weight and number, the worst on top.
    lightest: BinaryHeap<(u64, u32)>,
}

impl ReplacementPolicy for Lru {
    fn new(space: &Space) -> Lru {
        let (first, end) = (space.first, space.nbuckets);
        Lru { first, end, next: end, wanted: 0, min_prio: 0, lightest: BinaryHeap::new() }
    }

    fn begin(&mut self, wanted: usize, min_prio: u16) {
        // A scan that wants nothing is complete at once.
        self.next = if wanted == 0 { self.end } else { self.first };
        (self.wanted, self.min_prio) = (wanted, min_prio);
        self.lightest.clear();
    }

    fn step(&mut self, budget: u32, candidates: Candidates<'_>) -> bool {
        let until = self.next.saturating_add(budget).min(self.end);
        for nr in self.next..until {
            self.weigh(nr, candidates(BucketNr(nr)));
        }
        self.next = until;
        until == self.end
    }

    fn finish(&mut self, candidates: Candidates<'_>, out: &mut Vec<BucketNr>) {
        let lightest = std::mem::take(&mut self.lightest).into_sorted_vec();
        let buckets = lightest.into_iter().map(|(_, nr)| BucketNr(nr));
        out.extend(buckets.filter(|&nr| candidates(nr).eligible));
    }
}

impl Lru {
    fn weigh(&mut self, nr: u32, candidate: Candidate) {
        if !candidate.eligible {
            return;
        }
        let entry = (weight(candidate.prio, self.min_prio, candidate.live_sectors), nr);
        if self.lightest.len() < self.wanted {
            self.lightest.push(entry);
        } else if let Some(mut heaviest) = self.lightest.peek_mut()
            && entry < *heaviest
        {
            *heaviest = entry;
        }
    }
}

/// How much would be lost with a bucket (semantics section 7.3):
/// `(prio - min_prio + (32768 - min_prio)/8) * live sectors`. The smallest weight goes first; among
/// equal ones the smallest bucket number.
fn weight(prio: u16, min_prio: u16, live_sectors: u32) -> u64 {
    let age = u64::from(prio.saturating_sub(min_prio));
    let range = u64::from(PRIO_INITIAL.saturating_sub(min_prio));
    (age + range / RANGE_PART) * u64::from(live_sectors)
}

#[cfg(test)]
mod tests;
