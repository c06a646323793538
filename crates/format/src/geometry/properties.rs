//! Geometry from hostile numbers: what is accepted follows from the format's rules, and everything computed from it is what plain
//! numbers of 128 bits give. Tests stop at an overflow, so that one that wraps around does not pass.
//!
//! The edges are tried exhaustively and the rest is sampled. `proofs` has the same properties for a model checker, which has
//! not proved them yet.

use proptest::prelude::*;

use super::Geometry;
use super::model::{
    Numbers, check_accepted, check_bucket, check_journal, check_ptr, check_sector, check_sizes,
};
use crate::key::Ptr;
use crate::units::{Gen, Sector};

fn check_queries(g: &Geometry, n: Numbers, hostile: u64, size: u64) {
    check_journal(g, n, (hostile >> 32) as u32);
    check_bucket(g, n, hostile as u32);
    let end = n.0 * n.2;
    for sector in [hostile, hostile % end, end - 1, end, end + 1, 0] {
        check_sector(g, n, sector);
        for dev in [0, 7, 8, 4095] {
            check_ptr(g, n, Ptr::new(dev, Sector(sector), Gen(255)), size);
        }
    }
    check_ptr(g, n, Ptr(hostile), size);
}

/// Zero, each power of two and its neighbours, and the largest number.
fn edges() -> impl Iterator<Item = u64> {
    (0..64).flat_map(|shift| [(1 << shift) - 1, 1 << shift, (1 << shift) + 1]).chain([u64::MAX])
}

#[test]
fn edges_are_accepted_by_the_rules_and_computed_without_overflow() {
    let mut accepted = 0;
    for bucket in edges() {
        // The counts at which the largest cache is reached.
        let full = (1u64 << 43) / bucket.max(1);
        let counts = [0, 1, 127, 128, 129, 513, (1 << 31) + 1, (1 << 32) - 1, 1 << 32, u64::MAX];
        for nbuckets in counts.into_iter().chain([full.saturating_sub(1), full, full + 1]) {
            for first in [0, 1, 2, 3, 127, 128, 129, u16::MAX] {
                for njournal in [0, 1, 127, 255, 256, 257, u16::MAX] {
                    for block in [0, 1, 3, 8, 9, 16, u64::MAX] {
                        let n = (bucket, block, nbuckets, first, njournal);
                        let Some(g) = check_accepted(n) else { continue };
                        accepted += 1;
                        check_sizes(&g, n);
                        for hostile in [0, 1 << 43, u64::MAX] {
                            for size in [0, 1, bucket, bucket + 1, u64::MAX] {
                                check_queries(&g, n, hostile, size);
                            }
                        }
                    }
                }
            }
        }
    }
    assert!(accepted > 5000, "{accepted} geometries accepted: the edges miss what they are to try");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn any_numbers(bucket in any::<u64>(), block in any::<u64>(), nbuckets in any::<u64>(), first in any::<u16>(),
                   njournal in any::<u16>()) {
        check_accepted((bucket, block, nbuckets, first, njournal));
    }

    #[test]
    fn any_queries_of_any_geometry(shift in 3..=31u32, block in 0..=3u32, count in any::<u64>(), first in 0..300u16,
                                   njournal in 0..=260u16, hostile in any::<u64>(), size in any::<u64>()) {
        let bucket = 1u64 << shift;
        let most = ((1u64 << 43) / bucket).min(u64::from(u32::MAX));
        let n = (bucket, 1 << block, 128 + count % (most - 127), first, njournal);
        if let Some(g) = check_accepted(n) {
            check_sizes(&g, n);
            check_queries(&g, n, hostile, size % (2 * bucket));
        }
    }
}
