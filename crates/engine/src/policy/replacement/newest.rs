//! The example of CONTRIBUTING.md, "Add a replacement policy": invalidates the buckets that were used last.
//!
//! Owns the buckets that a scan has found. It is a line of the table in the tests of this crate alone, because no cache wants it.

use format::BucketNr;

use super::{Candidates, ReplacementPolicy, Space};

/// The policy `newest`: the highest priority first, then the lowest bucket number.
#[derive(Debug)]
pub(super) struct Newest {
    space: Space,
    next: u32,
    wanted: usize,
    found: Vec<(u16, u32)>,
}

impl ReplacementPolicy for Newest {
    fn new(space: &Space) -> Newest {
        Newest { space: *space, next: space.first, wanted: 0, found: Vec::new() }
    }

    fn begin(&mut self, wanted: usize, _min_prio: u16) {
        (self.wanted, self.next) = (wanted, self.space.first);
        self.found.clear();
    }

    fn step(&mut self, budget: u32, candidates: Candidates<'_>) -> bool {
        let until = self.next.saturating_add(budget).min(self.space.nbuckets);
        let all = (self.next..until).map(|nr| (candidates(BucketNr(nr)), nr));
        self.found.extend(all.filter(|(c, _)| c.eligible).map(|(c, nr)| (u16::MAX - c.prio, nr)));
        self.next = until;
        until == self.space.nbuckets
    }

    fn finish(&mut self, candidates: Candidates<'_>, out: &mut Vec<BucketNr>) {
        self.found.sort_unstable();
        let found = self.found.drain(..).map(|(_, nr)| BucketNr(nr));
        out.extend(found.filter(|nr| candidates(*nr).eligible).take(self.wanted));
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Cache, bucket, pick};
    use super::*;

    #[test]
    fn the_highest_priority_goes_first() {
        let cache = Cache((0..10).map(|n| bucket(true, 32000 + n, 1)).collect());
        assert_eq!(pick(&mut Newest::new(&cache.space(0)), 3, 0, &cache), [9, 8, 7]);
    }
}
