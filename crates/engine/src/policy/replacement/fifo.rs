//! The policy fifo: the buckets in the order of their numbers, again and again (semantics section 7.3).

use format::BucketNr;

use super::{Candidates, ReplacementPolicy, Space};

/// See the module head. A scan asks for every bucket at most once, and begins where the last one ended.
#[derive(Debug)]
pub struct Fifo {
    first: u32,
    end: u32,
    /// The bucket that the next step asks for.
    cursor: u32,
    wanted: usize,
    /// Buckets that the scan may still ask for.
    left: u32,
    found: Vec<BucketNr>,
}

impl ReplacementPolicy for Fifo {
    fn new(space: &Space) -> Fifo {
        let (first, end) = (space.first, space.nbuckets);
        Fifo { first, end, cursor: first, wanted: 0, left: 0, found: Vec::new() }
    }

    fn begin(&mut self, wanted: usize, _min_prio: u16) {
        self.wanted = wanted;
        self.left = self.end - self.first;
        self.found.clear();
    }

    fn step(&mut self, budget: u32, candidates: Candidates<'_>) -> bool {
        for _ in 0..budget {
            if self.is_complete() {
                return true;
            }
            self.left -= 1;
            let nr = self.cursor;
            self.cursor = if nr + 1 < self.end { nr + 1 } else { self.first };
            if candidates(BucketNr(nr)).eligible {
                self.found.push(BucketNr(nr));
            }
        }
        self.is_complete()
    }

    fn finish(&mut self, candidates: Candidates<'_>, out: &mut Vec<BucketNr>) {
        let found = std::mem::take(&mut self.found);
        out.extend(found.into_iter().filter(|&nr| candidates(nr).eligible));
    }
}

impl Fifo {
    fn is_complete(&self) -> bool {
        self.left == 0 || self.found.len() >= self.wanted
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{pick, uniform};
    use super::*;

    #[test]
    fn fifo_goes_round() {
        let cache = uniform(8);
        let mut fifo = Fifo::new(&cache.space(0));
        let mut next = |wanted| pick(&mut fifo, wanted, 0, &cache);
        assert_eq!(next(3), [3, 4, 5]);
        assert_eq!(next(3), [6, 7, 3]);
        assert_eq!(next(9), [4, 5, 6, 7, 3], "one turn at most");
        assert_eq!(next(1), [4]);
    }
}
