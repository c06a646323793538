//! A distribution of durations.
//!
//! Owns a histogram of fixed size: four buckets of equal width for each power of two, from a microsecond to a minute, so
//! that a quantile is right within an eighth. Recording takes a few instructions and never allocates. A reader copies
//! the histogram, which is plain data. Must not know what is measured.

use std::fmt;

use crate::timer::Nanos;

/// Values are counted in units of 2^10 ns.
const UNIT_SHIFT: u32 = 10;
/// Buckets of one power of two: 2^2.
const LINEAR_SHIFT: u32 = 2;
/// Values from 2^36 ns (69 s) on share the last bucket.
const LAST_SHIFT: u32 = 36;
/// Buckets below the last one.
const OVERFLOW: usize = ((LAST_SHIFT - UNIT_SHIFT - LINEAR_SHIFT + 1) << LINEAR_SHIFT) as usize;
const BUCKETS: usize = OVERFLOW + 1;

/// A distribution of times.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Histogram {
    counts: [u64; BUCKETS],
    sum: Nanos,
    max: Nanos,
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram { counts: [0; BUCKETS], sum: Nanos(0), max: Nanos(0) }
    }
}

impl fmt::Debug for Histogram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (count, sum, max) = (self.count(), self.sum, self.max);
        f.debug_struct("Histogram").field("count", &count).field("sum", &sum).field("max", &max).finish()
    }
}

/// The bucket of a time; always below [`BUCKETS`].
fn bucket_of(time: Nanos) -> usize {
    let units = time.0 >> UNIT_SHIFT;
    if units < 1 << LINEAR_SHIFT {
        return units as usize;
    }
    let power = units.ilog2();
    let part = (units >> (power - LINEAR_SHIFT)) & ((1 << LINEAR_SHIFT) - 1);
    ((((power - LINEAR_SHIFT + 1) << LINEAR_SHIFT) as usize) + part as usize).min(OVERFLOW)
}

/// The first time that is behind a bucket.
fn end_of(bucket: usize) -> Nanos {
    let linear = 1 << LINEAR_SHIFT;
    let (power, part) = (bucket as u64 >> LINEAR_SHIFT, bucket as u64 % linear);
    let units = if power == 0 { part + 1 } else { (linear + part + 1) << (power - 1) };
    Nanos(units << UNIT_SHIFT)
}

impl Histogram {
    /// Records a time.
    pub fn record(&mut self, time: Nanos) {
        if let Some(count) = self.counts.get_mut(bucket_of(time)) {
            *count += 1;
        }
        self.sum = self.sum.after(time);
        self.max = self.max.max(time);
    }

    /// How many times were recorded.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Whether no time was recorded.
    pub fn is_empty(&self) -> bool {
        self.counts.iter().all(|n| *n == 0)
    }

    /// The sum of all times.
    pub fn sum(&self) -> Nanos {
        self.sum
    }

    /// The longest time; zero if no time was recorded.
    pub fn max(&self) -> Nanos {
        self.max
    }

    /// The mean of all times; zero if no time was recorded.
    pub fn mean(&self) -> Nanos {
        Nanos(self.sum.0.checked_div(self.count()).unwrap_or(0))
    }

    /// How many times were shorter than 2^`shift` nanoseconds; exact for shifts from 12 to 36.
    pub fn below(&self, shift: u32) -> u64 {
        let buckets = bucket_of(Nanos(1 << shift.clamp(UNIT_SHIFT + LINEAR_SHIFT, LAST_SHIFT)));
        self.counts.iter().take(buckets).sum()
    }

    /// A time that the share `share` (0 to 1) of all times did not exceed.
    ///
    /// It is the end of a bucket, or the longest time if that is shorter. Zero if no time was recorded.
    pub fn quantile(&self, share: f64) -> Nanos {
        let count = self.count();
        if count == 0 {
            return Nanos(0);
        }
        // From the first time to the last. No count reaches 2^53, so the conversion is exact.
        let rank = ((count as f64 * share).ceil() as u64).clamp(1, count);
        let mut seen = 0;
        for (bucket, n) in self.counts.iter().enumerate().take(OVERFLOW) {
            seen += n;
            if seen >= rank {
                return end_of(bucket).min(self.max);
            }
        }
        self.max
    }

    /// The times that were recorded after `earlier` was copied from this histogram.
    ///
    /// Of the longest time only the bucket is known.
    #[must_use]
    pub fn since(&self, earlier: &Histogram) -> Histogram {
        let mut new = Histogram::default();
        for (n, (now, then)) in new.counts.iter_mut().zip(self.counts.iter().zip(&earlier.counts)) {
            *n = now.saturating_sub(*then);
        }
        new.sum = self.sum.since(earlier.sum);
        if let Some(last) = new.counts.iter().rposition(|n| *n > 0) {
            new.max = if last == OVERFLOW { self.max } else { end_of(last).min(self.max) };
        }
        new
    }

    /// The buckets that are not empty: the end of each, and how many times it has. The end of the last bucket is the longest
    /// time.
    pub fn buckets(&self) -> impl Iterator<Item = (Nanos, u64)> + '_ {
        let end = |bucket| if bucket == OVERFLOW { self.max } else { end_of(bucket) };
        let counts = self.counts.iter().enumerate().filter(|(_, n)| **n > 0);
        counts.map(move |(bucket, n)| (end(bucket), *n))
    }

    /// A histogram with these buckets of another one, whose sum of times is not known.
    pub fn of_buckets(buckets: impl IntoIterator<Item = (Nanos, u64)>) -> Histogram {
        let mut new = Histogram::default();
        for (end, n) in buckets {
            if let Some(count) = new.counts.get_mut(bucket_of(Nanos(end.0.saturating_sub(1)))) {
                *count = count.saturating_add(n);
            }
            new.max = new.max.max(end);
        }
        new
    }

    /// Adds the values of another histogram.
    pub fn add(&mut self, other: &Histogram) {
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine = mine.saturating_add(*theirs);
        }
        self.sum = self.sum.after(other.sum);
        self.max = self.max.max(other.max);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn buckets_follow_each_other_without_a_gap() {
        assert_eq!((bucket_of(Nanos(0)), end_of(0)), (0, Nanos(1024)));
        for b in 0..OVERFLOW {
            let end = end_of(b);
            assert_eq!(
                (bucket_of(Nanos(end.0 - 1)), bucket_of(end)),
                (b, b + 1),
                "bucket {b} ends at {end:?}"
            );
        }
        assert_eq!(end_of(OVERFLOW - 1), Nanos(1 << LAST_SHIFT));
        assert_eq!(bucket_of(Nanos(u64::MAX)), OVERFLOW);
    }

    #[test]
    fn figures_by_hand() {
        let mut h = Histogram::default();
        assert_eq!((h.quantile(0.5), h.mean(), h.is_empty()), (Nanos(0), Nanos(0), true));
        for us in 1..=100 {
            h.record(Nanos::from_us(us));
        }
        assert_eq!((h.count(), h.sum(), h.max()), (100, Nanos::from_us(5050), Nanos::from_us(100)));
        assert_eq!(h.mean(), Nanos(50_500));
        // 2^14 ns are 16.384 us.
        assert_eq!((h.below(14), h.below(36), h.below(12)), (16, 100, 4));
        // The 50th is 50 us: the bucket from 49.152 to 57.344 us.
        assert_eq!(h.quantile(0.5), Nanos(57_344));
        assert_eq!((h.quantile(0.0), h.quantile(1.0)), (Nanos(1024), Nanos::from_us(100)));
        let mut both = h;
        both.add(&h);
        assert_eq!((both.count(), both.max()), (200, h.max()));
        h.record(Nanos(u64::MAX));
        assert_eq!((h.quantile(1.0), h.below(36)), (Nanos(u64::MAX), 100));
    }

    #[test]
    fn a_difference_has_the_later_samples() {
        let mut h = Histogram::default();
        h.record(Nanos::from_ms(90));
        let then = h;
        assert!(h.since(&then).is_empty());
        assert_eq!(h.since(&then).max(), Nanos(0));
        h.record(Nanos::from_us(50));
        h.record(Nanos::from_us(50));
        let new = h.since(&then);
        assert_eq!((new.count(), new.sum(), new.max()), (2, Nanos::from_us(100), Nanos(57_344)));
        assert_eq!(new.quantile(0.99), Nanos(57_344));
        assert_eq!(
            h.since(&Histogram::default()),
            Histogram { max: end_of(bucket_of(h.max)).min(h.max), ..h }
        );
        h.record(Nanos(u64::MAX));
        assert_eq!(h.since(&then).max(), Nanos(u64::MAX));
    }

    proptest! {
        #[test]
        fn buckets_have_the_same_quantiles(
            times in prop::collection::vec(prop_oneof![0u64..1 << 37, Just(1 << 36), Just(u64::MAX)], 0..50),
        ) {
            let mut h = Histogram::default();
            times.iter().for_each(|t| h.record(Nanos(*t)));
            let copy = Histogram::of_buckets(h.buckets());
            prop_assert_eq!(copy.count(), h.count());
            for share in [0.0, 0.5, 0.99, 1.0] {
                let (exact, copied) = (h.quantile(share), copy.quantile(share));
                // Without the longest time, only the end of its bucket is known.
                prop_assert!(copied >= exact && bucket_of(Nanos(copied.0.saturating_sub(1))) <= bucket_of(exact));
            }
        }

        #[test]
        fn quantiles_are_right_within_a_quarter(
            times in prop::collection::vec(0u64..1 << 36, 1..200), share in 0.0f64..=1.0,
        ) {
            let mut h = Histogram::default();
            for t in &times {
                h.record(Nanos(*t));
            }
            let mut sorted = times;
            sorted.sort_unstable();
            let rank = ((sorted.len() as f64 * share).ceil() as usize).clamp(1, sorted.len());
            let (exact, shown) = (sorted[rank - 1], h.quantile(share).0);
            prop_assert!(shown >= exact, "{shown} for {exact}");
            prop_assert!(shown <= exact + (exact / 4).max(1024), "{shown} for {exact}");
        }
    }
}
