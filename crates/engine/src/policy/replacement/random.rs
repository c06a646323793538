//! The policy random: any buckets (semantics section 7.3).

use std::collections::BTreeSet;

use format::BucketNr;
use io::Rng;

use super::{Candidates, ReplacementPolicy, Space};

/// See the module head. A scan makes half as many tries as there are buckets, and may miss the few that are eligible.
#[derive(Debug)]
pub struct Random {
    first: u32,
    end: u32,
    rng: Rng,
    wanted: usize,
    /// Tries that are left.
    left: u32,
    /// In the order in which they were found.
    found: Vec<BucketNr>,
    /// The buckets of `found`, so that none is found twice.
    distinct: BTreeSet<u32>,
}

impl ReplacementPolicy for Random {
    fn new(space: &Space) -> Random {
        Random {
            first: space.first,
            end: space.nbuckets,
            rng: Rng::new(space.seed),
            wanted: 0,
            left: 0,
            found: Vec::new(),
            distinct: BTreeSet::new(),
        }
    }

    fn begin(&mut self, wanted: usize, _min_prio: u16) {
        self.wanted = wanted;
        // The policy examines at least one bucket.
        self.left = (self.end - self.first).div_ceil(2);
        self.found.clear();
        self.distinct.clear();
    }

    fn step(&mut self, budget: u32, candidates: Candidates<'_>) -> bool {
        for _ in 0..budget {
            if self.is_complete() {
                return true;
            }
            self.left -= 1;
            let nr = self.first + self.rng.below(u64::from(self.end - self.first)) as u32;
            if candidates(BucketNr(nr)).eligible && self.distinct.insert(nr) {
                self.found.push(BucketNr(nr));
            }
        }
        self.is_complete()
    }

    fn finish(&mut self, candidates: Candidates<'_>, out: &mut Vec<BucketNr>) {
        self.distinct.clear();
        let found = std::mem::take(&mut self.found);
        out.extend(found.into_iter().filter(|&nr| candidates(nr).eligible));
    }
}

impl Random {
    fn is_complete(&self) -> bool {
        self.left == 0 || self.found.len() >= self.wanted
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::super::tests::{FIRST, bucket, pick, space, uniform};
    use super::*;

    #[test]
    fn random_gives_up_after_half_as_many_tries_as_buckets() {
        let tries = Cell::new(0);
        let mut random = Random::new(&space(0, 1000, 5));
        let mut out = Vec::new();
        let count = |_| {
            tries.set(tries.get() + 1);
            bucket(false, 0, 0)
        };
        random.choose(10, 0, &count, &mut out);
        assert_eq!((tries.get(), out.len()), (500, 0));
    }

    #[test]
    fn random_picks_are_spread_over_the_cache() {
        let cache = uniform(10_003);
        let picks = pick(&mut Random::new(&cache.space(42)), 1000, 0, &cache);
        for tenth in 0..10 {
            let range = FIRST + tenth * 1000..FIRST + (tenth + 1) * 1000;
            let hits = picks.iter().filter(|nr| range.contains(nr)).count();
            assert!((60..=140).contains(&hits), "{hits} of 1000 picks in {range:?}");
        }
    }

    /// Numbers of buckets that random selection tries: half of them, rounded up.
    #[test]
    fn random_tries_half_of_the_buckets() {
        for (buckets, most) in [(1, 1), (2, 1), (3, 2), (4, 2), (999, 500)] {
            let tries = Cell::new(0);
            let mut random = Random::new(&space(3, 3 + buckets, 1));
            let count = |nr: BucketNr| {
                assert!((3..3 + buckets).contains(&nr.0));
                tries.set(tries.get() + 1);
                bucket(false, 0, 0)
            };
            random.choose(9, 0, &count, &mut Vec::new());
            assert_eq!(tries.get(), most, "{buckets} buckets");
        }
    }
}
