//! Geometry from hostile numbers: what is accepted follows from the format's rules, and everything computed from it is what plain
//! numbers of 128 bits give. Tests stop at an overflow, so that one that wraps around does not pass.
//!
//! The edges are tried exhaustively and the rest is sampled. A model checker (kani) would prove all of it; it brings a compiler of
//! its own, which a build from the crate registry alone cannot have.
#![allow(clippy::unwrap_used)]

use format::{BucketNr, Gen, Geometry, Ptr, Sector, Sectors};
use proptest::prelude::*;

type Numbers = (u64, u64, u64, u16, u16);

fn geometry((bucket, block, nbuckets, first, njournal): Numbers) -> Option<Geometry> {
    Geometry::new(Sectors(bucket), Sectors(block), nbuckets, first, njournal).ok()
}

/// The rules, once more.
fn is_allowed((bucket, block, nbuckets, first, njournal): Numbers) -> bool {
    let (first, njournal) = (u128::from(first), u128::from(njournal));
    matches!(block, 1 | 2 | 4 | 8)
        && (3..=31).any(|shift| bucket == 1 << shift)
        && (128..1 << 32).contains(&nbuckets)
        && u128::from(nbuckets) * u128::from(bucket) <= 1 << 43
        && njournal <= 256
        && first + njournal <= u128::from(nbuckets)
        && first * u128::from(bucket) >= 16
}

fn check_sizes(g: &Geometry, n: Numbers) {
    let (bucket, nbuckets) = (u128::from(n.0), u128::from(n.2));
    assert_eq!(u128::from(g.used_sectors().0), bucket * nbuckets, "{n:?}");
    assert_eq!(u128::from(g.first_dynamic().0), u128::from(n.3) + u128::from(n.4), "{n:?}");
    let described = u128::from(g.prio_buckets) * u128::from(g.prios_per_bucket);
    assert!(described >= nbuckets && described - u128::from(g.prios_per_bucket) < nbuckets, "{n:?}: {g:?}");
    assert!(g.meta_sectors <= g.bucket_sectors && g.node_sectors <= g.meta_sectors, "{n:?}: {g:?}");
    assert!(
        g.node_sectors > Sectors::ZERO && u64::from(g.nr_uuids) * 128 <= g.meta_sectors.bytes(),
        "{n:?}: {g:?}"
    );
    assert!((1..=4096).contains(&g.block_bytes()));
    for size in g.prio_set_sizes() {
        assert!(size >= g.meta_sectors && size <= g.bucket_sectors, "{n:?}: prio set of {size}");
    }
}

fn check_journal(g: &Geometry, n: Numbers, index: u32) {
    let expected = (u64::from(index) < u64::from(n.4)).then(|| u64::from(n.3) + u64::from(index));
    assert_eq!(g.journal_bucket(index).map(|b| u64::from(b.0)), expected, "{n:?}, journal bucket {index}");
}

fn check_bucket(g: &Geometry, n: Numbers, nr: u32) {
    assert_eq!(
        u128::from(g.bucket_start(BucketNr(nr)).0),
        u128::from(nr) * u128::from(n.0),
        "{n:?}, bucket {nr}"
    );
}

fn check_sector(g: &Geometry, n: Numbers, sector: u64) {
    let nr = sector / n.0;
    let expected = (nr < n.2).then_some(nr);
    assert_eq!(g.bucket_of(Sector(sector)).map(|b| u64::from(b.0)), expected, "{n:?}, sector {sector}");
    assert_eq!(g.offset_in_bucket(Sector(sector)).0, sector % n.0, "{n:?}, sector {sector}");
}

fn check_ptr(g: &Geometry, n: Numbers, ptr: Ptr, size: u64) {
    let offset = ptr.offset().0;
    let (nr, last) = (offset / n.0, u128::from(offset % n.0) + u128::from(size));
    let inside = ptr.dev() < 8 && nr < n.2 && nr >= u64::from(n.3) && last <= u128::from(n.0);
    let found = g.ptr_bucket(ptr, Sectors(size)).map(|b| u64::from(b.0));
    assert_eq!(found, inside.then_some(nr), "{n:?}, {size} sectors at {ptr:?}");
}

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
                        let found = geometry(n);
                        assert_eq!(found.is_some(), is_allowed(n), "{n:?}");
                        let Some(g) = found else { continue };
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
        let n = (bucket, block, nbuckets, first, njournal);
        prop_assert_eq!(geometry(n).is_some(), is_allowed(n));
    }

    #[test]
    fn any_queries_of_any_geometry(shift in 3..=31u32, block in 0..=3u32, count in any::<u64>(), first in 0..300u16,
                                   njournal in 0..=260u16, hostile in any::<u64>(), size in any::<u64>()) {
        let bucket = 1u64 << shift;
        let most = ((1u64 << 43) / bucket).min(u64::from(u32::MAX));
        let n = (bucket, 1 << block, 128 + count % (most - 127), first, njournal);
        let found = geometry(n);
        prop_assert_eq!(found.is_some(), is_allowed(n));
        if let Some(g) = found {
            check_sizes(&g, n);
            check_queries(&g, n, hostile, size % (2 * bucket));
        }
    }
}
