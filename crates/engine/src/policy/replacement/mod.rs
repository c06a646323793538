//! Which buckets to invalidate next.
//!
//! Owns the three replacement policies of a cache device (semantics section 7.3) and the aging of
//! bucket priorities (semantics section 7.5). A policy sees a bucket only as a [`Candidate`]; it must not know why a
//! bucket is eligible, nor do anything to it.
//!
//! Selection is a [`Scan`] that runs in slices, since a cache has up to millions of buckets: `begin`,
//! `step` until it says so, `finish`. What became ineligible between the slices is left out at the
//! end. [`Selector::pick`] does all of it at once.
//!
//! *Invariants:* a scan yields eligible buckets only, none twice, none outside of
//! `first_bucket..nbuckets`, at most as many as wanted; and the same ones whatever the slices, for the
//! same candidates and the same random source.

use std::collections::{BTreeSet, BinaryHeap};

use format::{BucketNr, Replacement};
use io::Rng;

/// Priority of a bucket that was just allocated or hit (semantics section 5, semantics section 7.1).
pub const INITIAL_PRIO: u16 = 32768;
/// Priority of buckets with metadata, which never age (semantics section 7.1).
pub const BTREE_PRIO: u16 = u16::MAX;
/// The youngest possible bucket counts this part of the priority range on top of its age in the lru
/// weight, so that the size matters among equally old buckets (semantics section 7.3).
const LRU_RANGE_PART: u64 = 8;
/// Part of the cache that is used between two agings (semantics section 7.5).
const AGING_PART: u64 = 1024;

/// A bucket as a policy sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Candidate {
    /// It may be invalidated: no metadata, no dirty data, not pinned, generation not too far ahead.
    pub eligible: bool,
    /// Its priority; 32768 at the last use, lower the longer that is ago.
    pub prio: u16,
    /// Live sectors in it; 0 if nothing refers to it.
    pub live_sectors: u32,
}

/// The state that a policy keeps between scans.
#[derive(Clone, Debug)]
pub struct Selector {
    policy: Replacement,
    first: u32,
    end: u32,
    /// Where fifo goes on.
    cursor: u32,
}

/// A selection in progress.
#[derive(Debug)]
pub struct Scan {
    policy: Replacement,
    wanted: usize,
    min_prio: u16,
    /// Looks at a bucket that are left.
    left: u32,
    /// Next bucket of the lru scan.
    next: u32,
    /// lru: the best ones so far, the worst on top.
    lightest: BinaryHeap<(u64, u32)>,
    /// fifo and random: in the order in which they were found.
    found: Vec<u32>,
    /// random: what was found, to find nothing twice.
    seen: BTreeSet<u32>,
}

impl Selector {
    /// A selector over the buckets `first_bucket..nbuckets`.
    pub fn new(policy: Replacement, first_bucket: BucketNr, nbuckets: u32) -> Selector {
        let first = first_bucket.0.min(nbuckets);
        Selector { policy, first, end: nbuckets, cursor: first }
    }

    /// The policy.
    pub fn policy(&self) -> Replacement {
        self.policy
    }

    /// Changes the policy for the scans that begin from now on.
    pub fn set_policy(&mut self, policy: Replacement) {
        self.policy = policy;
    }

    /// Begins to look for up to `wanted` buckets. `min_prio` is the smallest priority in the cache, as
    /// [`Aging::age_all`] returned it (0 before the first aging).
    pub fn begin(&self, wanted: usize, min_prio: u16) -> Scan {
        let buckets = self.end - self.first;
        let left = match self.policy {
            // One full turn (semantics section 7.3).
            Replacement::Lru | Replacement::Fifo => buckets,
            // Half as many tries as there are buckets (semantics section 7.3), but one at least.
            Replacement::Random => buckets.div_ceil(2),
        };
        Scan {
            policy: self.policy,
            wanted,
            min_prio,
            left,
            next: self.first,
            lightest: BinaryHeap::new(),
            found: Vec::new(),
            seen: BTreeSet::new(),
        }
    }

    /// Looks at up to `budget` buckets; true when the scan is complete.
    pub fn step(
        &mut self,
        scan: &mut Scan,
        budget: u32,
        rng: &mut Rng,
        candidate: impl Fn(BucketNr) -> Candidate,
    ) -> bool {
        for _ in 0..budget {
            if scan.is_complete() {
                return true;
            }
            scan.left -= 1;
            match scan.policy {
                Replacement::Lru => {
                    let nr = scan.next;
                    scan.next += 1;
                    scan.weigh(nr, candidate(BucketNr(nr)));
                }
                Replacement::Fifo => {
                    let nr = self.cursor;
                    self.cursor = if nr + 1 < self.end { nr + 1 } else { self.first };
                    if candidate(BucketNr(nr)).eligible {
                        scan.found.push(nr);
                    }
                }
                Replacement::Random => {
                    let nr = self.first + rng.below(u64::from(self.end - self.first)) as u32;
                    if candidate(BucketNr(nr)).eligible && scan.seen.insert(nr) {
                        scan.found.push(nr);
                    }
                }
            }
        }
        scan.is_complete()
    }

    /// Ends a scan: appends the buckets found to `out`, best first, without those that are no longer
    /// eligible. Also ends a scan that is not complete, with what it has found so far.
    pub fn finish(scan: Scan, candidate: impl Fn(BucketNr) -> Candidate, out: &mut Vec<BucketNr>) {
        let lightest = scan.lightest.into_sorted_vec().into_iter().map(|(_, nr)| nr);
        let buckets = scan.found.into_iter().chain(lightest).map(BucketNr);
        out.extend(buckets.filter(|&nr| candidate(nr).eligible));
    }

    /// A whole scan at once: appends up to `wanted` buckets to `out`, best first.
    pub fn pick(
        &mut self,
        wanted: usize,
        min_prio: u16,
        rng: &mut Rng,
        candidate: impl Fn(BucketNr) -> Candidate,
        out: &mut Vec<BucketNr>,
    ) {
        let mut scan = self.begin(wanted, min_prio);
        while !self.step(&mut scan, u32::MAX, rng, &candidate) {}
        Selector::finish(scan, candidate, out);
    }
}

impl Scan {
    fn is_complete(&self) -> bool {
        // lru, which finds nothing before it has seen every bucket, ends early only if nothing is wanted.
        self.left == 0 || self.found.len() >= self.wanted
    }

    fn weigh(&mut self, nr: u32, candidate: Candidate) {
        if !candidate.eligible {
            return;
        }
        let entry = (lru_weight(candidate.prio, self.min_prio, candidate.live_sectors), nr);
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
pub fn lru_weight(prio: u16, min_prio: u16, live_sectors: u32) -> u64 {
    let age = u64::from(prio.saturating_sub(min_prio));
    let range = u64::from(INITIAL_PRIO.saturating_sub(min_prio));
    (age + range / LRU_RANGE_PART) * u64::from(live_sectors)
}

/// When priorities are to be lowered, and how (semantics section 7.5).
#[derive(Clone, Debug, Default)]
pub struct Aging {
    /// Sectors of requests until the next aging; negative when it is due.
    left: i64,
}

impl Aging {
    /// A new counter: the first cached request makes aging due.
    pub fn new() -> Aging {
        Aging::default()
    }

    /// Counts a request of `sectors` that was not bypassed; true if all priorities are to be lowered
    /// now ([`Aging::age_all`]). `cache_sectors` is the size of the cache in sectors.
    pub fn count(&mut self, sectors: u64, cache_sectors: u64) -> bool {
        self.left = self.left.saturating_sub(i64::try_from(sectors).unwrap_or(i64::MAX));
        if self.left >= 0 {
            return false;
        }
        let period = i64::try_from(cache_sectors / AGING_PART).unwrap_or(i64::MAX);
        self.left = self.left.saturating_add(period);
        true
    }

    /// Lowers every priority of `prios` that can age by 1 and returns the smallest of those afterwards,
    /// 0 if there are none. The caller leaves out pinned buckets.
    pub fn age_all<'a>(prios: impl Iterator<Item = &'a mut u16>) -> u16 {
        let mut min = None;
        for prio in prios {
            if *prio != 0 && *prio != BTREE_PRIO {
                *prio -= 1;
                min = Some(min.map_or(*prio, |m: u16| m.min(*prio)));
            }
        }
        min.unwrap_or(0)
    }
}

#[cfg(test)]
mod tests;
