//! The policy cost-benefit: the buckets whose hits save the least time for the room that they take (decision 017).
//!
//! Buckets mix blocks of different heat, so the last use of a bucket (lru) says little: some hot block keeps every
//! bucket young. Here buckets belong to segments:
//!
//! * *Probation*: what reads brought in once. A block that is read again there goes to the protected segment.
//! * *Protected*: what was read again, and what was written. Each hit adds the time that it saved to the bucket's rate.
//! * *Draining*: the protected buckets with the lowest rates, next to be reused. A block that is still read there is
//!   copied to a new protected bucket, on the strength of the read that has just fetched it: nothing has to be looked for.
//!
//! The oldest bucket on probation is reused first, unless it has more hits than the coldest protected one; some of both is
//! always kept. *Ghosts* remember which blocks were missed before: while the protected segment has less than its share,
//! what is missed again goes there at once, and so what is read in loops larger than the cache stays in part instead of
//! being replaced just before it is read again.
//!
//! While a quarter of the buckets holds nothing, nothing is copied.
//!
//! Time is counted in *ticks*, the agings of priorities: a 1024th of the cache in requests. Owns no bucket's state but
//! this; must not know what is in a bucket, nor what time it is.
//!
//! *Invariants:* a scan asks for every bucket, also if none is wanted, and yields as many buckets as wanted if so many are
//! eligible.

use format::{BucketNr, Inode, Sector};

use super::saving::UNKNOWN_WORTH;
use super::{Candidates, FillKind, ReplacementPolicy, Space};

/// Ticks after which hits become a rate: an eighth of the cache.
const WINDOW_TICKS: u32 = 128;
/// Windows that the two averages of a rate remember. The smaller one counts: the long one does not take a quiet moment
/// for cold, the short one sees when the hot set has moved on.
const SHORT_WINDOWS: u32 = 6;
const LONG_WINDOWS: u32 = 16;
/// Rates are kept in these parts of the unit of worth for each window.
const RATE_PARTS: u64 = 16;
/// Share of the clean buckets that is on probation at least, and at most.
const PROBATION_LEAST_PART: usize = 20;
const PROBATION_MOST_PART: usize = 4;
/// Share of the protected buckets that is draining; at least what is wanted next.
const DRAINING_PART: usize = 32;
/// Buckets that hold nothing, as a part of all, from which on nothing is copied: what fits is not written twice.
const SPARE_PART: usize = 4;
/// Hits that a new bucket is credited with, until it is known better.
const CREDIT_HITS: u64 = 8;
/// The oldest bucket on probation stays if it has more than so many times the rate of the coldest protected one.
const PROBATION_HANDICAP: u64 = 2;
/// Ghosts at most (2 bytes each), and for each block that the cache has room for.
const MAX_GHOSTS: u64 = 1 << 24;
const GHOSTS_PER_BLOCK: u64 = 4;
/// Largest granule that a ghost stands for: 64 KiB.
const MAX_GRANULE_SECTORS: u64 = 128;

/// Which data a bucket is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BucketSegment {
    /// What was read once.
    Probation,
    /// What was read again, or written.
    Protected,
    /// Protected, and about to be reused.
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
    /// Of a bucket of which nothing is known yet but when it began to be filled.
    fn new(segment: BucketSegment, born: u32) -> Heat {
        Heat { segment, windows: 0, born, drains: 0, hits: 0, short: 0, long: 0 }
    }
}

/// What hits were in the last windows, on average.
#[derive(Clone, Copy, Default, Debug)]
struct Mean {
    hits: u64,
    worth: u64,
}

/// Granules that were missed. Direct-mapped: whatever is missed later may take the place of an older one.
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

    /// Notes a miss; says whether it is known that there was one before.
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

/// The number that the generator SplitMix64 yields from this state.
fn splitmix64(state: u64) -> u64 {
    let mut hash = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ (hash >> 31)
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

    /// Also lets the coldest protected buckets drain.
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

    /// Whether the next bucket is to come from the probation segment, of which `limits` says how much is to stay at least
    /// and at most.
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
    /// By the time that it has been going on.
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

    /// Sorts; of the protected ones, as many as can matter.
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
