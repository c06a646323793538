//! The rules of a geometry in plain numbers of 128 bits, and the properties that compare the arithmetic of a geometry with them.
//!
//! Owns the properties. Tests call them with boundary and random values (`properties`), the harnesses of a model checker
//! with all values (`proofs`). Must not know the source of the values.

use super::Geometry;
use crate::key::Ptr;
use crate::units::{BucketNr, Sector, Sectors};

/// Sectors of a bucket and of a block, number of buckets, first bucket, number of journal buckets.
pub(super) type Numbers = (u64, u64, u64, u16, u16);

/// The geometry of these numbers, if they are accepted.
fn geometry((bucket, block, nbuckets, first, njournal): Numbers) -> Option<Geometry> {
    Geometry::new(Sectors(bucket), Sectors(block), nbuckets, first, njournal).ok()
}

/// Whether the rules of the format allow these numbers.
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

/// Checks that numbers are accepted by the rules alone, and returns their geometry.
pub(super) fn check_accepted(n: Numbers) -> Option<Geometry> {
    let found = geometry(n);
    assert_eq!(found.is_some(), is_allowed(n), "{n:?}");
    found
}

/// Sizes that follow from the numbers.
pub(super) fn check_sizes(g: &Geometry, n: Numbers) {
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

/// Journal bucket `index`, which may not exist.
pub(super) fn check_journal(g: &Geometry, n: Numbers, index: u32) {
    let expected = (u64::from(index) < u64::from(n.4)).then(|| u64::from(n.3) + u64::from(index));
    assert_eq!(g.journal_bucket(index).map(|b| u64::from(b.0)), expected, "{n:?}, journal bucket {index}");
}

/// The start of bucket `nr`.
pub(super) fn check_bucket(g: &Geometry, n: Numbers, nr: u32) {
    assert_eq!(
        u128::from(g.bucket_start(BucketNr(nr)).0),
        u128::from(nr) * u128::from(n.0),
        "{n:?}, bucket {nr}"
    );
}

/// The bucket of a sector, and the offset in it.
pub(super) fn check_sector(g: &Geometry, n: Numbers, sector: u64) {
    let nr = sector / n.0;
    let expected = (nr < n.2).then_some(nr);
    assert_eq!(g.bucket_of(Sector(sector)).map(|b| u64::from(b.0)), expected, "{n:?}, sector {sector}");
    assert_eq!(g.offset_in_bucket(Sector(sector)).0, sector % n.0, "{n:?}, sector {sector}");
}

/// The bucket of `size` sectors at `ptr`, which may be unusable.
pub(super) fn check_ptr(g: &Geometry, n: Numbers, ptr: Ptr, size: u64) {
    let offset = ptr.offset().0;
    let (nr, last) = (offset / n.0, u128::from(offset % n.0) + u128::from(size));
    let inside = ptr.dev() < 8 && nr < n.2 && nr >= u64::from(n.3) && last <= u128::from(n.0);
    let found = g.ptr_bucket(ptr, Sectors(size)).map(|b| u64::from(b.0));
    assert_eq!(found, inside.then_some(nr), "{n:?}, {size} sectors at {ptr:?}");
}
