//! Spreads the clean data of a volume over its two sets (decision 037).
//!
//! Owns the choice of the set for a position: a hash of its part of the volume, weighted by the sizes of the caches. A part is as large as
//! a bucket, so few requests cross its end. The choice depends on the UUIDs of the sets, not on their roles, so data stays where it is when
//! the roles change. Must not know what a set has cached.

use format::{Sector, Sectors, Uuid};

use super::splitmix::splitmix64;

/// A set of a volume, for the spread of its clean data.
#[derive(Clone, Copy, Debug)]
pub struct SpreadSet {
    /// UUID of the set.
    pub uuid: Uuid,
    /// The size of its cache.
    pub sectors: Sectors,
    /// The size of a bucket as a power of two, in sectors.
    pub bucket_shift: u32,
}

/// Tells which of two sets is to have the clean data of a position.
#[derive(Clone, Copy, Debug)]
pub struct Spread {
    /// Hashes below this limit, of 2^32, belong to the set with the smaller UUID.
    limit: u64,
    is_secondary_smaller: bool,
    /// The size of a part as a power of two, in sectors.
    part_shift: u32,
}

impl Spread {
    /// The spread over these two sets.
    pub fn new(primary: SpreadSet, secondary: SpreadSet) -> Spread {
        let is_secondary_smaller = secondary.uuid.0 < primary.uuid.0;
        let smaller = if is_secondary_smaller { secondary } else { primary };
        let both = u128::from(primary.sectors.0) + u128::from(secondary.sectors.0);
        let limit = ((u128::from(smaller.sectors.0) << 32) / both.max(1)) as u64;
        let part_shift = primary.bucket_shift.max(secondary.bucket_shift);
        Spread { limit, is_secondary_smaller, part_shift }
    }

    /// Whether the secondary is to have the clean data of this position.
    #[inline]
    pub fn is_in_secondary(&self, at: Sector) -> bool {
        let is_smaller = (splitmix64(at.0 >> self.part_shift) >> 32) < self.limit;
        is_smaller == self.is_secondary_smaller
    }

    /// The end of the part of a position: up to there the answer is the same.
    #[inline]
    pub fn end_of_part(&self, at: Sector) -> Sector {
        Sector(((at.0 >> self.part_shift) + 1) << self.part_shift)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn set(uuid: u8, sectors: u64) -> SpreadSet {
        SpreadSet { uuid: Uuid([uuid; 16]), sectors: Sectors(sectors), bucket_shift: 8 + u32::from(uuid) }
    }

    proptest! {
        /// Each set gets its share of the parts, a part has one set, and the roles do not matter.
        #[test]
        fn shares_follow_the_sizes(one in 1u64..1 << 40, other in 1u64..1 << 40, first in any::<bool>()) {
            let (a, b) = if first { (set(1, one), set(2, other)) } else { (set(2, one), set(1, other)) };
            let (spread, swapped) = (Spread::new(a, b), Spread::new(b, a));
            let mut in_secondary = 0;
            for part in 0..20_000u64 {
                let begin = Sector(part << 10);
                let end = spread.end_of_part(begin);
                let answer = spread.is_in_secondary(begin);
                prop_assert_eq!(end, Sector((part + 1) << 10));
                prop_assert_eq!(spread.is_in_secondary(Sector(end.0 - 1)), answer);
                prop_assert_eq!(swapped.is_in_secondary(begin), !answer);
                in_secondary += u64::from(answer);
            }
            let share = other as f64 / (one + other) as f64;
            prop_assert!((in_secondary as f64 / 20_000.0 - share).abs() < 0.02, "{in_secondary}, {share}");
        }
    }
}
