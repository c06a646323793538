//! Proofs of the properties in `model` for all numbers: `scripts/kani`. They have never run.
//!
//! Owns the ranges of the values. Must not know the properties. The size of a bucket is a constant in each round of a loop, because
//! a model checker divides by a constant power of two much faster than by a variable.

use super::Geometry;
use super::model::{
    Numbers, check_accepted, check_bucket, check_journal, check_ptr, check_sector, check_sizes,
};
use crate::key::Ptr;

/// Exponents of the sizes of a bucket that the format allows.
const SHIFTS: std::ops::RangeInclusive<u32> = 3..=31;

fn any_numbers(bucket: u64) -> Numbers {
    (bucket, kani::any(), kani::any(), kani::any(), kani::any())
}

/// Calls `check` with any geometry of each size of a bucket.
fn for_any_geometry(check: impl Fn(&Geometry, Numbers)) {
    for shift in SHIFTS {
        let n = any_numbers(1 << shift);
        if let Some(g) = check_accepted(n) {
            check(&g, n);
        }
    }
}

#[kani::proof]
#[kani::unwind(31)]
fn no_other_size_of_a_bucket_is_accepted() {
    let bucket: u64 = kani::any();
    kani::assume(!SHIFTS.into_iter().any(|shift| bucket == 1 << shift));
    assert!(check_accepted(any_numbers(bucket)).is_none());
}

#[kani::proof]
#[kani::unwind(31)]
fn sizes_are_those_of_the_rules() {
    for_any_geometry(check_sizes);
}

#[kani::proof]
#[kani::unwind(31)]
fn any_journal_bucket_is_inside() {
    for_any_geometry(|g, n| check_journal(g, n, kani::any()));
}

#[kani::proof]
#[kani::unwind(31)]
fn any_bucket_and_any_sector_are_found() {
    for_any_geometry(|g, n| {
        check_bucket(g, n, kani::any());
        check_sector(g, n, kani::any());
    });
}

#[kani::proof]
#[kani::unwind(31)]
fn any_pointer_is_usable_or_refused() {
    for_any_geometry(|g, n| check_ptr(g, n, Ptr(kani::any()), kani::any()));
}
