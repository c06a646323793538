//! Compares the map of live blocks with a set of blocks.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

const BUCKETS: [u32; 3] = [4, 5, 9];

proptest! {
    /// Blocks and buckets of several sizes. Ranges may cover a part of a block, and may lie in other buckets.
    #[test]
    fn live_blocks_agree_with_a_set(
        block in prop_oneof![Just(1u64), Just(2), Just(8)],
        blocks_each in prop_oneof![Just(4u64), Just(8), Just(64), Just(128)],
        ranges in prop::collection::vec((0u32..12, 0u64..1024, 1u64..40), 0..30),
    ) {
        let size = block * blocks_each;
        let geometry = Geometry::new(Sectors(size), Sectors(block), 1024, 4, 4);
        prop_assume!(geometry.is_ok());
        let surveyed = BUCKETS.map(|b| (BucketNr(b), Gen(0)));
        let mut live = Live::none(&geometry.unwrap(), &surveyed);
        let mut blocks: BTreeSet<(u32, u64)> = BTreeSet::new();
        for (bucket, at, sectors) in ranges {
            let at = at % size;
            let sectors = sectors.min(size - at);
            live.add(Sector(u64::from(bucket) * size + at), Sectors(sectors));
            blocks.extend((at..at + sectors).map(|s| (bucket, s / block)));
        }
        for bucket in 0..12 {
            let b = BucketNr(bucket);
            let is_surveyed = BUCKETS.contains(&bucket);
            let has = |n: &u64| blocks.contains(&(bucket, *n));
            prop_assert_eq!(live.is_empty(b), is_surveyed && !(0..blocks_each).any(|n| has(&n)));
            let mut dead = BTreeSet::new();
            let found = live.dead_in(b);
            for (from, n) in &found {
                prop_assert!(n.0.is_multiple_of(block));
                dead.extend((from.0..from.0 + n.0).map(|s| (s - u64::from(bucket) * size) / block));
            }
            let expected: BTreeSet<u64> = (0..blocks_each).filter(|n| is_surveyed && !has(n)).collect();
            prop_assert_eq!(dead, expected);
            // Adjacent dead blocks form one range.
            prop_assert!(found.windows(2).all(|w| w[0].0 + w[0].1 < w[1].0));
        }
    }
}

/// A survey takes 4 MiB of bits, and at most a million buckets.
#[test]
fn surveys_are_limited() {
    let most = |bucket, block| {
        most_buckets(&Geometry::new(Sectors(bucket), Sectors(block), 4096, 4, 4).expect("a geometry"))
    };
    assert_eq!([most(1024, 8), most(1024, 1), most(64, 8), most(8, 8)], [262_144, 32_768, 1 << 20, 1 << 20]);
}
