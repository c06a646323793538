//! Replacement policies: which buckets are invalidated next.
//!
//! Owns the trait [`ReplacementPolicy`], the table of all policies ([`POLICIES`]), and the setting that puts a policy in the
//! place of lru ([`InPlaceOfLru`]). Each policy has its own file. A policy sees a bucket only as a [`Candidate`]. It must not
//! know why a bucket is eligible, and it changes no bucket.
//!
//! A cache has up to millions of buckets, so a choice is a scan that runs in slices: `begin`, `step` until it returns true,
//! `finish`. [`ReplacementPolicy::choose`] runs a whole scan at once.
//!
//! *Invariants*, which the conformance suite checks for every policy of the table: a scan yields eligible buckets only, none
//! twice, none outside of [`Space`], and at most as many as wanted. A bucket that is no longer eligible at the end of the scan
//! is left out. The result does not depend on the slices, and the same seed gives the same result. Every scan ends.

#[cfg(test)]
mod conformance;
mod cost_benefit;
mod fifo;
mod lru;
#[cfg(test)]
mod newest;
mod random;
mod saving;
#[cfg(test)]
mod tests;

use format::{BucketNr, Geometry, Inode, Replacement, Sector, Sectors};

use super::choices::Choice;
use cost_benefit::CostBenefit;
use fifo::Fifo;
use lru::Lru;
use random::Random;
pub use saving::Saving;

/// All policies. Those of the superblock come first.
pub const POLICIES: &[PolicyEntry] = &[
    PolicyEntry::of::<Lru>("lru"),
    PolicyEntry::of::<Fifo>("fifo"),
    PolicyEntry::of::<Random>("random"),
    PolicyEntry::of::<CostBenefit>("cost_benefit").formerly("reuse"),
    #[cfg(test)]
    PolicyEntry::of::<newest::Newest>("newest"),
];

/// Policies that the superblock can name (format section 2.3); each of the others can take the place of lru.
const STORED: usize = <Replacement as Choice>::NAMES.len();
/// Policies that can take the place of lru.
const OWN: usize = POLICIES.len() - STORED;

/// A bucket as a policy sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Candidate {
    /// It may be invalidated: no metadata, no dirty data, not pinned, generation not too far ahead.
    pub eligible: bool,
    /// Its priority: 32768 at the last use; every aging lowers it.
    pub prio: u16,
    /// Live sectors in it; 0 if nothing refers to it.
    pub live_sectors: u32,
}

/// Returns the state of a bucket.
pub type Candidates<'a> = &'a dyn Fn(BucketNr) -> Candidate;

/// The kind of data that fills a bucket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FillKind {
    /// Data that a read brings in for the first time in a while.
    FirstRead,
    /// Data that was read again or written, and metadata of file systems.
    Lasting,
}

/// The buckets that a policy chooses from, and what its random choices depend on.
#[derive(Clone, Copy, Debug)]
pub struct Space {
    /// First bucket for data.
    pub first: u32,
    /// Number of buckets of the cache device.
    pub nbuckets: u32,
    /// Size of a bucket.
    pub bucket_sectors: Sectors,
    /// Block size of the set.
    pub block_sectors: Sectors,
    /// Seed of random choices.
    pub seed: u64,
}

impl Space {
    /// The buckets of a cache device.
    pub fn of(geometry: &Geometry, seed: u64) -> Space {
        let g = geometry;
        Space {
            first: g.first_dynamic().0.min(g.nbuckets),
            nbuckets: g.nbuckets,
            bucket_sectors: g.bucket_sectors,
            block_sectors: g.block_sectors,
            seed,
        }
    }
}

/// A rule by which buckets are chosen to be invalidated, with the state that it keeps.
///
/// `on_fill`, `on_hit`, `on_miss` and `age` must not allocate, because requests call them.
pub trait ReplacementPolicy {
    /// A policy that knows nothing of the buckets yet.
    fn new(space: &Space) -> Self
    where
        Self: Sized;

    /// Bytes of memory that the policy takes for each bucket. A policy that takes any is dropped at the first aging after
    /// another policy took its place.
    fn bytes_each() -> u64
    where
        Self: Sized,
    {
        0
    }

    /// Whether the policy needs the calls `on_fill`, `on_hit` and `on_miss`.
    fn observes() -> bool
    where
        Self: Sized,
    {
        false
    }

    /// A bucket begins to be filled.
    fn on_fill(&mut self, bucket: BucketNr, fill: FillKind) {
        let _ = (bucket, fill);
    }

    /// Data in a bucket was read, which saved `worth` ([`Saving::of`]). True if that data is to be copied to a new bucket,
    /// because this one will be invalidated soon.
    fn on_hit(&mut self, bucket: BucketNr, worth: u32) -> bool {
        let _ = (bucket, worth);
        false
    }

    /// Data that is not in the cache was read. True if it is to be filled in as [`FillKind::Lasting`].
    fn on_miss(&mut self, inode: Inode, at: Sector) -> bool {
        let _ = (inode, at);
        false
    }

    /// The priorities of all buckets were lowered.
    fn age(&mut self) {}

    /// Begins to choose up to `wanted` buckets. `min_prio` is the smallest priority in the cache, 0 before the first aging.
    fn begin(&mut self, wanted: usize, min_prio: u16);

    /// Asks for the state of up to `budget` buckets; true when the scan is complete.
    fn step(&mut self, budget: u32, candidates: Candidates<'_>) -> bool;

    /// Ends a scan, complete or not: appends the chosen buckets to `out`, the best first.
    fn finish(&mut self, candidates: Candidates<'_>, out: &mut Vec<BucketNr>);

    /// Runs a whole scan: appends up to `wanted` buckets to `out`, the best first.
    fn choose(&mut self, wanted: usize, min_prio: u16, candidates: Candidates<'_>, out: &mut Vec<BucketNr>) {
        self.begin(wanted, min_prio);
        while !self.step(u32::MAX, candidates) {}
        self.finish(candidates, out);
    }
}

/// One line of the table of policies.
#[derive(Clone, Copy)]
pub struct PolicyEntry {
    /// What settings call the policy.
    pub name: &'static str,
    /// What settings called the policy in the release before; they may still do so.
    pub former_name: Option<&'static str>,
    /// A new policy.
    pub new: fn(&Space) -> Box<dyn ReplacementPolicy>,
    /// [`ReplacementPolicy::bytes_each`].
    pub bytes_each: fn() -> u64,
    /// [`ReplacementPolicy::observes`].
    pub observes: fn() -> bool,
}

impl PolicyEntry {
    /// The entry of the policy `P`.
    pub const fn of<P: ReplacementPolicy + 'static>(name: &'static str) -> PolicyEntry {
        PolicyEntry {
            name,
            former_name: None,
            new: boxed::<P>,
            bytes_each: P::bytes_each,
            observes: P::observes,
        }
    }

    /// Accepts a former name of the policy, too.
    const fn formerly(mut self, name: &'static str) -> PolicyEntry {
        self.former_name = Some(name);
        self
    }

    /// The policy that a superblock names.
    pub fn stored(policy: Replacement) -> &'static PolicyEntry {
        // The first entries are in the order of the names, which a test checks.
        &POLICIES[policy.position()]
    }
}

fn boxed<P: ReplacementPolicy + 'static>(space: &Space) -> Box<dyn ReplacementPolicy> {
    Box::new(P::new(space))
}

/// The most bytes of memory that any policy takes for each bucket.
pub fn most_bytes_each() -> u64 {
    POLICIES.iter().map(|entry| (entry.bytes_each)()).max().unwrap_or(0)
}

/// What takes the place of lru: nothing (`kernel`), or a policy that the superblock cannot name.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct InPlaceOfLru(Option<usize>);

impl InPlaceOfLru {
    /// The value with this name, or with this former name.
    pub fn named(name: &str) -> Option<InPlaceOfLru> {
        <Self as Choice>::named(name).and_then(Self::at)
    }

    /// The names of all values: `kernel`, then the policies in the order of [`POLICIES`].
    pub const fn names() -> &'static [&'static str] {
        <Self as Choice>::NAMES
    }

    /// The policy that is in use where the superblock names `stored`.
    pub fn policy(self, stored: Replacement) -> &'static PolicyEntry {
        match (stored, self.0) {
            (Replacement::Lru, Some(own)) => &POLICIES[own],
            _ => PolicyEntry::stored(stored),
        }
    }
}

impl Choice for InPlaceOfLru {
    const ALL: &'static [(Self, &'static str)] = &{
        let mut all = [(InPlaceOfLru(None), "kernel"); OWN + 1];
        let mut i = 0;
        while i < OWN {
            all[i + 1] = (InPlaceOfLru(Some(STORED + i)), POLICIES[STORED + i].name);
            i += 1;
        }
        all
    };
    const NAMES: &'static [&'static str] = &{
        let mut names = ["kernel"; OWN + 1];
        let mut i = 0;
        while i < OWN {
            names[i + 1] = POLICIES[STORED + i].name;
            i += 1;
        }
        names
    };

    fn named(text: &str) -> Option<usize> {
        let is_former = |name: &&str| {
            POLICIES.iter().any(|policy| policy.name == *name && policy.former_name == Some(text))
        };
        let position = Self::NAMES.iter().position(|name| *name == text);
        position.or_else(|| Self::NAMES.iter().position(is_former))
    }
}
