//! Which buckets are given up next.
//!
//! Owns the replacement policy in use with its state, and the count that ages priorities. Must not know how buckets are
//! given up. The policies themselves are pure (`policy::replacement`, `policy::reuse`).

use format::{BucketNr, Geometry, Inode, Ptr, Replacement, Sector, Sectors};
use io::Rng;

use super::Buckets;
use crate::policy::replacement::{Aging, Candidate, Selector};
use crate::policy::reuse::{Reuse, Segment};

/// Whether priorities were aged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Aged {
    /// They were not.
    No,
    /// They were.
    Yes,
    /// They were, and cost-benefit replacement wants to know what hits save now.
    ByCostBenefit,
}

/// See the module head.
pub(crate) struct Eviction {
    geometry: Geometry,
    selector: Selector,
    /// Cost-benefit replacement is wanted.
    by_cost_benefit: bool,
    /// What it knows: from when it is first asked for to the first aging after it is not wanted any more.
    cost_benefit: Option<Reuse>,
    aging: Aging,
    /// The smallest priority that aging left.
    min_prio: u16,
    rng: Rng,
}

impl Eviction {
    pub(crate) fn new(geometry: Geometry, policy: Replacement, seed: u64) -> Eviction {
        Eviction {
            selector: Selector::new(policy, geometry.first_dynamic(), geometry.nbuckets),
            by_cost_benefit: false,
            cost_benefit: None,
            aging: Aging::new(),
            min_prio: 0,
            rng: Rng::new(seed),
            geometry,
        }
    }

    /// Sets the policy that the superblock stores.
    pub(crate) fn set_policy(&mut self, policy: Replacement) {
        self.selector.set_policy(policy);
    }

    /// Sets whether cost-benefit replacement takes the place of that policy.
    pub(crate) fn set_by_cost_benefit(&mut self, wanted: bool) {
        self.by_cost_benefit = wanted;
    }

    pub(super) fn by_cost_benefit(&self) -> bool {
        self.by_cost_benefit
    }

    /// Cost-benefit replacement, if that is wanted. It begins to learn when it is first asked for.
    fn cost_benefit(&mut self) -> Option<&mut Reuse> {
        if !self.by_cost_benefit {
            return None;
        }
        let g = &self.geometry;
        let begin = || Reuse::new(g.first_dynamic(), g.nbuckets, g.bucket_sectors, g.block_sectors);
        Some(self.cost_benefit.get_or_insert_with(begin))
    }

    /// Chooses up to `wanted` buckets of those that `candidate` calls eligible.
    pub(super) fn choose(
        &mut self,
        wanted: usize,
        candidate: impl Fn(BucketNr) -> Candidate,
        chosen: &mut Vec<BucketNr>,
    ) {
        match self.cost_benefit() {
            Some(policy) => policy.choose(wanted, candidate, chosen),
            None => self.selector.pick(wanted, self.min_prio, &mut self.rng, candidate, chosen),
        }
    }

    /// A bucket was taken, to be filled with data of this kind.
    pub(super) fn fills(&mut self, bucket: BucketNr, segment: Segment) {
        if let Some(policy) = &mut self.cost_benefit {
            policy.fills(bucket, segment);
        }
    }

    /// Cached data was read, which saved so much. True if its bucket will be reused soon.
    #[cold]
    pub(super) fn hit(&mut self, buckets: &Buckets, ptr: Ptr, worth: u32) -> bool {
        let Some(policy) = self.cost_benefit() else { return false };
        let b = buckets.bucket_of(ptr);
        // What is still being filled is not reused soon.
        policy.hit(b, worth) && buckets.pins(b) == 0
    }

    /// Data that is not cached was read. True if it was cached not long ago.
    pub(crate) fn miss(&mut self, inode: Inode, at: Sector) -> bool {
        self.cost_benefit().is_some_and(|policy| policy.miss(inode, at))
    }

    /// Whether priorities are to be aged, after so many more foreground sectors.
    pub(super) fn is_due(&mut self, sectors: Sectors, cache_sectors: u64) -> bool {
        self.aging.count(sectors.0, cache_sectors)
    }

    /// Priorities were aged, and the smallest is `min`.
    #[cold]
    pub(super) fn age(&mut self, min: u16) -> Aged {
        self.min_prio = min;
        match self.cost_benefit() {
            Some(policy) => {
                policy.tick();
                Aged::ByCostBenefit
            }
            None => {
                self.cost_benefit = None;
                Aged::Yes
            }
        }
    }
}
