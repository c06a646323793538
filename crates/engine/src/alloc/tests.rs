//! What the allocator counts, against what there is.

use std::pin::pin;

use format::{Gen, Ptr, Sector, Sectors};
use io::sync::{Either, select};
use proptest::prelude::*;

use super::*;
use crate::testing::run;

const BUCKET: Sectors = Sectors(64);
const NBUCKETS: u32 = 128;
const FIRST: u32 = 4;

fn geometry() -> Geometry {
    Geometry::new(BUCKET, Sectors(1), NBUCKETS.into(), FIRST as u16, 4).unwrap()
}

/// One change of a bucket, where it may be done; others do nothing.
fn change(buckets: &mut Buckets, b: BucketNr, what: u8, sectors: u64) {
    let ptr = Ptr::new(0, Sector(u64::from(b.0) * BUCKET.0), buckets.generation(b));
    let size = Sectors(sectors);
    let used = buckets.used(b);
    let is_data = used == Use::Data;
    match what {
        0 if buckets.may_invalidate(b) => buckets.invalidate(b),
        1 | 2 if used == Use::Ready => buckets.take(b, what == 2),
        3 if used == Use::Metadata => buckets.free_metadata(b),
        4 if used == Use::Metadata => buckets.reuse(b),
        5 | 6 if is_data && buckets.live(b) + size <= BUCKET => drop(buckets.add(ptr, size, what == 6)),
        7 if is_data && buckets.dirty(b) >= size => drop(buckets.sub(ptr, size, true)),
        8 if is_data && buckets.live(b) - buckets.dirty(b) >= size => drop(buckets.sub(ptr, size, false)),
        9 if is_data => buckets.pin(b),
        10 if buckets.pins(b) > 0 => buckets.unpin(b),
        11 if is_data && buckets.live(b) == Sectors::ZERO && buckets.pins(b) == 0 => buckets.mark_metadata(b),
        12 => buckets.load(b, Gen(buckets.generation(b).0), 7),
        _ => {}
    }
}

proptest! {
    /// The table is counted as it changes; counting it all gives the same at any moment.
    #[test]
    fn counts_are_those_of_the_table(
        changes in prop::collection::vec((FIRST..NBUCKETS, 0u8..13, 1u64..64), 1..300)
    ) {
        let mut buckets = Buckets::new(&geometry(), BucketNr(FIRST), NBUCKETS);
        for (b, what, sectors) in changes {
            change(&mut buckets, BucketNr(b), what, sectors);
            let count = |which: &dyn Fn(BucketNr) -> bool| buckets.all().filter(|b| which(*b)).count() as u32;
            let is_ready = |b: BucketNr| buckets.used(b) == Use::Ready;
            let is_reclaimable = |b: BucketNr| {
                buckets.used(b) == Use::Data && buckets.dirty(b) == Sectors::ZERO && buckets.pins(b) == 0
            };
            let available = count(&|b| is_ready(b) || is_reclaimable(b));
            prop_assert_eq!(buckets.available(), available);
            prop_assert_eq!(buckets.in_use_percent(), (NBUCKETS - available) * 100 / NBUCKETS);
            prop_assert_eq!(buckets.reclaimable(), count(&is_reclaimable));
            let is_unused = |b| is_ready(b) || is_reclaimable(b) && buckets.live(b) == Sectors::ZERO;
            prop_assert_eq!(buckets.unused(), count(&is_unused));
            let live = buckets.all().fold(Sectors::ZERO, |n, b| n + buckets.live(b));
            prop_assert_eq!(buckets.live_total(), live);
        }
    }
}

/// The list is filled up before it is short; while a bucket is waited for, at once.
#[test]
fn the_list_is_refilled_up_to_its_target() {
    for more in 0..40 {
        let alloc = Allocator::new(&geometry(), 1024, 2);
        let (reserves, target) = (alloc.reserves.total(), alloc.reserves.total() + alloc.batch);
        assert_eq!(alloc.batch, 32);
        let have = reserves + more;
        alloc.put_ready((0..have as u32).map(BucketNr));
        let when_short = if more < 16 { target - have } else { 0 };
        assert_eq!(alloc.missing(), when_short, "{have} of {target}");
        alloc.waiting.set(1);
        assert_eq!(alloc.missing(), target.saturating_sub(have), "{have} of {target}, waited for");
    }
}

/// A wait that is given up no longer counts.
#[test]
fn a_wait_that_is_given_up_does_not_count() {
    run(|rt| async move {
        let alloc = Allocator::new(&geometry(), 1024, 2);
        {
            let wait = pin!(alloc.wait(Purpose::Data, || false));
            assert!(matches!(select(wait, rt.sleep(Nanos(1))).await, Either::Right(())));
            assert!(alloc.is_wanted());
        }
        assert!(!alloc.is_wanted());
    });
}
