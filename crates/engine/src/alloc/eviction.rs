//! Which buckets are given up next.
//!
//! Owns the replacement policy in use, those that were in use before as long as they know something, and the count that ages
//! priorities. Must not know how buckets are given up, nor which policies there are (`policy::replacement` has the table).

use format::{BucketNr, Geometry, Inode, Ptr, Sector, Sectors};

use super::Buckets;
use crate::policy::aging::Aging;
use crate::policy::replacement::{Candidates, FillKind, PolicyEntry, ReplacementPolicy, Space};

/// Whether priorities were aged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Aged {
    /// They were not.
    No,
    /// They were.
    Yes,
    /// They were, and the policy needs to know what hits save now.
    Observed,
}

/// See the module head.
pub(crate) struct Eviction {
    space: Space,
    entry: &'static PolicyEntry,
    /// The policy in use, from when it is first asked.
    policy: Option<Box<dyn ReplacementPolicy>>,
    /// The policy in use needs the calls for fills, hits and misses.
    observes: bool,
    /// Policies that were in use before.
    others: Vec<(&'static PolicyEntry, Box<dyn ReplacementPolicy>)>,
    aging: Aging,
    /// The smallest priority that aging left.
    min_prio: u16,
}

impl Eviction {
    pub(crate) fn new(geometry: Geometry, entry: &'static PolicyEntry, seed: u64) -> Eviction {
        Eviction {
            space: Space::of(&geometry, seed),
            entry,
            policy: None,
            observes: (entry.observes)(),
            others: Vec::new(),
            aging: Aging::new(),
            min_prio: 0,
        }
    }

    /// Sets the policy for the scans that begin from now on.
    pub(crate) fn set_policy(&mut self, entry: &'static PolicyEntry) {
        if entry.name == self.entry.name {
            return;
        }
        self.others.extend(self.policy.take().map(|policy| (self.entry, policy)));
        let before = self.others.iter().position(|(other, _)| other.name == entry.name);
        self.policy = before.map(|at| self.others.swap_remove(at).1);
        (self.entry, self.observes) = (entry, (entry.observes)());
    }

    /// Whether the policy needs the calls for hits.
    pub(crate) fn observes(&self) -> bool {
        self.observes
    }

    /// The policy in use. It begins to learn when it is first asked.
    fn policy(&mut self) -> &mut dyn ReplacementPolicy {
        let policy = self.policy.get_or_insert_with(|| (self.entry.new)(&self.space));
        policy.as_mut()
    }

    /// Chooses up to `wanted` buckets of those that `candidates` calls eligible.
    pub(super) fn choose(&mut self, wanted: usize, candidates: Candidates<'_>, chosen: &mut Vec<BucketNr>) {
        let min_prio = self.min_prio;
        self.policy().choose(wanted, min_prio, candidates, chosen);
    }

    /// A bucket was taken, to be filled with data of this kind.
    pub(super) fn on_fill(&mut self, bucket: BucketNr, fill: FillKind) {
        if self.observes
            && let Some(policy) = &mut self.policy
        {
            policy.on_fill(bucket, fill);
        }
        self.others.iter_mut().for_each(|(_, policy)| policy.on_fill(bucket, fill));
    }

    /// Cached data was read, which saved so much. True if its bucket will be invalidated soon.
    #[cold]
    pub(super) fn on_hit(&mut self, buckets: &Buckets, ptr: Ptr, worth: u32) -> bool {
        let b = buckets.bucket_of(ptr);
        // A bucket that is still being filled is not invalidated soon.
        self.policy().on_hit(b, worth) && buckets.pins(b) == 0
    }

    /// Data that is not cached was read. True if it was cached not long ago.
    pub(crate) fn on_miss(&mut self, inode: Inode, at: Sector) -> bool {
        self.observes && self.policy().on_miss(inode, at)
    }

    /// Whether priorities are to be aged, after so many more foreground sectors.
    pub(super) fn is_due(&mut self, sectors: Sectors, cache_sectors: u64) -> bool {
        self.aging.count(sectors.0, cache_sectors)
    }

    /// Priorities were aged, and the smallest is `min`.
    #[cold]
    pub(super) fn age(&mut self, min: u16) -> Aged {
        self.min_prio = min;
        self.policy().age();
        self.others.retain(|(entry, _)| (entry.bytes_each)() == 0);
        if self.observes { Aged::Observed } else { Aged::Yes }
    }
}

#[cfg(test)]
mod tests;
