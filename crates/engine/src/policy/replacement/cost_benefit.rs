//! The policy cost-benefit: the buckets whose hits save the least time for the room that they take (decision 017).
//!
//! A bucket has blocks that are read often and blocks that are not, so the last use of the bucket says little. Here each
//! bucket belongs to a segment:
//!
//! * *Probation*: buckets with data that a read miss inserted. A block that is read again there is copied to the protected
//!   segment.
//! * *Protected*: buckets with data that was read again or written. Each hit adds the time that it saved to the rate of its
//!   bucket.
//! * *Draining*: the protected buckets with the lowest rates, which are evicted next. A block that is read there is copied
//!   to a new protected bucket; the read already has its data.
//!
//! The oldest bucket on probation is evicted first, unless its rate is more than twice that of the coldest protected
//! bucket. Both segments always keep a share. *Ghosts* record which blocks missed. While the protected segment is below
//! its share, a block that misses again is protected at once. So a part of a loop that is larger than the cache stays
//! cached.
//!
//! While at least a quarter of the buckets is empty, no block is copied.
//!
//! Time is counted in *ticks*: one for each aging of priorities, that is, each 1024th of the cache in requests. Owns the
//! rates and segments. Must not know the content of a bucket, or a clock.
//!
//! *Invariants:* a scan asks for every bucket, also if none is wanted, and yields as many buckets as wanted if so many are
//! eligible.

use format::{BucketNr, Inode, Sector};

use super::saving::UNKNOWN_WORTH;
use super::{Candidates, FillKind, ReplacementPolicy, Space};
use crate::policy::splitmix::splitmix64;

/// The number of ticks in a window; an eighth of the cache in requests.
const WINDOW_TICKS: u32 = 128;
/// The windows of the two averages. The smaller average counts: the long one stays high during a short pause, the short
/// one falls soon after the hot set changes.
const SHORT_WINDOWS: u32 = 6;
const LONG_WINDOWS: u32 = 16;
/// Rates are kept in these parts of the unit of worth for each window.
const RATE_PARTS: u64 = 16;
/// Divisors: at least 1/20 and at most 1/4 of the clean buckets are on probation.
const PROBATION_LEAST_PART: usize = 20;
const PROBATION_MOST_PART: usize = 4;
/// Divisor: at least 1/32 of the protected buckets drain, and at least as many as the scan wants.
const DRAINING_PART: usize = 32;
/// Divisor: while 1/4 of the buckets is empty, no block is copied, because data that fits need not be written twice.
const SPARE_PART: usize = 4;
/// The hits that a new bucket counts as having until its first window ends.
const CREDIT_HITS: u64 = 8;
/// The oldest bucket on probation stays if its rate is more than this many times that of the coldest protected bucket.
const PROBATION_HANDICAP: u64 = 2;
/// The largest number of ghosts (2 bytes each), and the number for each block of the cache.
const MAX_GHOSTS: u64 = 1 << 24;
const GHOSTS_PER_BLOCK: u64 = 4;
/// Largest granule that a ghost stands for: 64 KiB.
const MAX_GRANULE_SECTORS: u64 = 128;

/// The segment of a bucket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BucketSegment {
    /// Data that was read once.
    Probation,
    /// Data that was read again, or written.
    Protected,
    /// Protected, and evicted next.
    Draining,
}

/// What is known about the use of a bucket.
#[derive(Clone, Copy, Debug)]
struct Heat {
    segment: BucketSegment,
    /// Whole windows seen, up to [`LONG_WINDOWS`].
    windows: u8,
    /// Tick at which it began to be filled.
    born: u32,
    /// Tick at which it began to be drained.
    drains: u32,
    /// Worth of the hits of this window; on probation, of all hits.
    hits: u32,
    /// Rates of the last windows. While draining, `long` is the rate with which that began.
    short: u32,
    long: u32,
}

impl Heat {
    /// The state of a bucket that begins to be filled at tick `born`.
    fn new(segment: BucketSegment, born: u32) -> Heat {
        Heat { segment, windows: 0, born, drains: 0, hits: 0, short: 0, long: 0 }
    }
}

/// The number and the total worth of recent hits, halved after each window.
#[derive(Clone, Copy, Default, Debug)]
struct Mean {
    hits: u64,
    worth: u64,
}

/// Fingerprints of the granules that missed. A later miss with the same slot replaces an older one.
#[derive(Debug)]
struct Ghosts {
    /// Fingerprints; 0 is none.
    slots: Vec<u16>,
    granule_shift: u32,
}

impl Ghosts {
    fn new(cache_sectors: u64, block_sectors: u64) -> Ghosts {
        let block = block_sectors.max(1).next_power_of_two();
        let wanted = (cache_sectors / block).saturating_mul(GHOSTS_PER_BLOCK).max(64).next_power_of_two();
        let slots = wanted.min(MAX_GHOSTS);
        let granule = (block * (wanted / slots)).min(MAX_GRANULE_SECTORS.max(block));
        Ghosts { slots: vec![0; slots as usize], granule_shift: granule.trailing_zeros() }
    }

    /// Records a miss. Returns true if the granule has missed before.
    fn note(&mut self, inode: Inode, at: Sector) -> bool {
        let (index, print) = self.place(inode, at);
        self.slots.get_mut(index).is_some_and(|slot| std::mem::replace(slot, print) == print)
    }

    /// The slot of a granule, and its fingerprint.
    fn place(&self, inode: Inode, at: Sector) -> (usize, u16) {
        let hash = splitmix64((at.0 >> self.granule_shift) ^ (u64::from(inode.0) << 48));
        // A fingerprint is never 0, because 0 is an empty slot.
        let print = (hash >> 48) as u16 | 1;
        ((hash & (self.slots.len() as u64 - 1)) as usize, print)
    }
}

/// The state of the policy. See the module head.
#[derive(Debug)]
pub struct CostBenefit {
    heat: Vec<Heat>,
    first: u32,
    ticks: u32,
    ghosts: Ghosts,
    mean: Mean,
    /// The protected segment has less than its share.
    has_room: bool,
    /// Few buckets hold nothing, so data will be given up.
    is_full: bool,
    /// How many buckets the scan is to choose.
    wanted: usize,
    /// Next bucket of the scan.
    next: u32,
    /// What the scan has found so far.
    found: Sorted,
}

impl ReplacementPolicy for CostBenefit {
    /// Nothing is known about the buckets: they count as protected.
    fn new(space: &Space) -> CostBenefit {
        let cache_sectors = u64::from(space.nbuckets).saturating_mul(space.bucket_sectors.0);
        CostBenefit {
            heat: vec![Heat::new(BucketSegment::Protected, 0); space.nbuckets as usize],
            first: space.first,
            ticks: 0,
            ghosts: Ghosts::new(cache_sectors, space.block_sectors.0),
            mean: Mean::default(),
            has_room: true,
            is_full: false,
            wanted: 0,
            next: space.nbuckets,
            found: Sorted::default(),
        }
    }

    fn bytes_each() -> u64 {
        size_of::<Heat>() as u64
    }

    fn observes() -> bool {
        true
    }

    fn on_fill(&mut self, bucket: BucketNr, fill: FillKind) {
        let segment = match fill {
            FillKind::FirstRead => BucketSegment::Probation,
            FillKind::Lasting => BucketSegment::Protected,
        };
        if let Some(h) = self.heat.get_mut(bucket.0 as usize) {
            *h = Heat::new(segment, self.ticks);
        }
    }

    #[inline]
    fn on_hit(&mut self, bucket: BucketNr, worth: u32) -> bool {
        let Some(h) = self.heat.get_mut(bucket.0 as usize) else { return false };
        h.hits = h.hits.saturating_add(worth);
        self.mean.hits += 1;
        self.mean.worth += u64::from(worth);
        h.segment != BucketSegment::Protected && self.is_full
    }

    fn on_miss(&mut self, inode: Inode, at: Sector) -> bool {
        self.ghosts.note(inode, at) && self.has_room
    }

    fn age(&mut self) {
        self.ticks = self.ticks.wrapping_add(1);
        if !self.ticks.is_multiple_of(WINDOW_TICKS) {
            return;
        }
        for h in self.heat.iter_mut().filter(|h| h.segment == BucketSegment::Protected) {
            let parts = |hits: u32, ticks: u32| {
                let n = u64::from(hits) * RATE_PARTS * u64::from(WINDOW_TICKS) / u64::from(ticks);
                u32::try_from(n).unwrap_or(u32::MAX)
            };
            let toward = |old: u32, new: u32, part: u32| match new >= old {
                true => old + (new - old) / part,
                false => old - (old - new).div_ceil(part),
            };
            if h.windows == 0 {
                let age = self.ticks.wrapping_sub(h.born).clamp(WINDOW_TICKS / 4, WINDOW_TICKS);
                h.short = parts(h.hits, age);
                h.long = h.short;
            } else {
                let now = parts(h.hits, WINDOW_TICKS);
                h.short = toward(h.short, now, SHORT_WINDOWS);
                h.long = toward(h.long, now, LONG_WINDOWS.min(u32::from(h.windows) + 1));
            }
            h.windows = h.windows.saturating_add(1).min(LONG_WINDOWS as u8);
            h.hits = 0;
        }
        let m = &mut self.mean;
        (m.hits, m.worth) = (m.hits / 2, m.worth / 2);
    }

    fn begin(&mut self, wanted: usize, _min_prio: u16) {
        (self.wanted, self.next) = (wanted, self.first);
        self.found = Sorted::default();
    }

    fn step(&mut self, budget: u32, candidates: Candidates<'_>) -> bool {
        let end = self.heat.len() as u32;
        let until = self.next.saturating_add(budget).min(end);
        let mut found = std::mem::take(&mut self.found);
        for nr in self.next..until {
            let c = candidates(BucketNr(nr));
            let Some(h) = self.heat.get(nr as usize).filter(|_| c.eligible) else { continue };
            match h.segment {
                _ if c.live_sectors == 0 => found.empty.push(nr),
                BucketSegment::Probation => found.probation.push((self.ticks.wrapping_sub(h.born), nr)),
                BucketSegment::Draining => found.draining.push((self.ticks.wrapping_sub(h.drains), nr)),
                BucketSegment::Protected => found.protected.push((self.rate(h), c.prio, nr)),
            }
        }
        (self.found, self.next) = (found, until);
        until == end
    }

    /// Chooses the coldest buckets that were found, and moves the coldest protected ones to the draining segment.
    fn finish(&mut self, candidates: Candidates<'_>, out: &mut Vec<BucketNr>) {
        let mut left = std::mem::take(&mut self.found);
        let wanted = self.wanted;
        let most = out.len() + wanted;
        let clean = left.probation.len() + left.draining.len() + left.protected.len();
        let protected = left.draining.len() + left.protected.len();
        let drain = (protected / DRAINING_PART).max(wanted);
        left.sort(drain);
        self.is_full = left.empty.len() < wanted + self.heat.len() / SPARE_PART;
        let eligible = |nr: &u32| candidates(BucketNr(*nr)).eligible;
        out.extend(left.empty.iter().filter(|nr| eligible(nr)).take(wanted).map(|nr| BucketNr(*nr)));
        let limits = (clean / PROBATION_LEAST_PART, clean / PROBATION_MOST_PART);
        while out.len() < most {
            let from_probation = self.is_probation_next(&left, limits);
            let Some(nr) = left.pop(from_probation) else { break };
            if eligible(&nr) {
                out.push(BucketNr(nr));
            }
        }
        let more = drain.saturating_sub(left.draining.len());
        for _ in 0..more {
            let Some((rate, _, nr)) = left.protected.pop() else { break };
            if let Some(h) = self.heat.get_mut(nr as usize) {
                (h.segment, h.drains, h.long) = (BucketSegment::Draining, self.ticks, rate);
            }
        }
        self.has_room = protected < clean - clean / PROBATION_LEAST_PART - clean / 64;
    }
}

impl CostBenefit {
    /// The worth of the hits in a window of this bucket.
    fn rate(&self, h: &Heat) -> u32 {
        let age = u64::from(self.ticks.wrapping_sub(h.born));
        let scaled = |worth: u64, ticks: u64| {
            u32::try_from(worth * RATE_PARTS * u64::from(WINDOW_TICKS) / ticks.max(1)).unwrap_or(u32::MAX)
        };
        match (h.segment, h.windows) {
            (BucketSegment::Draining, _) => h.long,
            (BucketSegment::Probation, _) => scaled(u64::from(h.hits), age),
            (BucketSegment::Protected, 0) => {
                let usual = self.mean.worth.checked_div(self.mean.hits).unwrap_or(u64::from(UNKNOWN_WORTH));
                scaled(u64::from(h.hits) + CREDIT_HITS * usual, age + u64::from(WINDOW_TICKS / 2))
            }
            (BucketSegment::Protected, _) => h.short.min(h.long),
        }
    }

    /// Whether the next bucket comes from probation. `limits`: the least and the largest number of buckets that stay there.
    fn is_probation_next(&self, left: &Sorted, (least, most): (usize, usize)) -> bool {
        if left.probation.len() > most {
            return true;
        }
        if left.probation.len() <= least {
            return false;
        }
        let rate = |nr: u32| self.heat.get(nr as usize).map(|h| u64::from(self.rate(h))).unwrap_or_default();
        match (left.probation.last(), left.draining.last()) {
            (Some((_, oldest)), Some((_, coldest))) => rate(*oldest) <= rate(*coldest) * PROBATION_HANDICAP,
            _ => true,
        }
    }
}

/// The eligible buckets of a cache. Once sorted, those that are chosen first are at the end of each list.
#[derive(Default, Debug)]
struct Sorted {
    empty: Vec<u32>,
    /// By age.
    probation: Vec<(u32, u32)>,
    /// By the ticks since draining began.
    draining: Vec<(u32, u32)>,
    /// By rate and priority, falling.
    protected: Vec<(u32, u16, u32)>,
}

impl Sorted {
    /// Takes the next bucket, from the probation segment or a draining one if there are both.
    fn pop(&mut self, from_probation: bool) -> Option<u32> {
        let next = if from_probation { self.probation.pop() } else { self.draining.pop() };
        let next = next.or_else(|| self.probation.pop()).or_else(|| self.draining.pop());
        next.map(|(_, nr)| nr).or_else(|| self.protected.pop().map(|(_, _, nr)| nr))
    }

    /// Sorts the lists. Of the protected buckets only the `2 * drain` coldest are kept.
    fn sort(&mut self, drain: usize) {
        self.probation.sort_unstable_by_key(|(age, nr)| (*age, std::cmp::Reverse(*nr)));
        self.draining.sort_unstable_by_key(|(age, nr)| (*age, std::cmp::Reverse(*nr)));
        // At most `drain` protected buckets are chosen, and then at most `drain` begin to drain.
        let matter = 2 * drain;
        if self.protected.len() > matter {
            self.protected.select_nth_unstable(matter);
            self.protected.truncate(matter);
        }
        self.protected.sort_unstable_by_key(|key| std::cmp::Reverse(*key));
    }
}

#[cfg(test)]
mod tests;
