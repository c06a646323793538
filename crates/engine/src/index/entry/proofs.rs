//! Proofs of the properties in `model` for all entries: `scripts/kani`. They have never run.
//!
//! Owns the ranges of the values. Must not know the properties.

use format::Sector;

use super::model::{
    CACHE_END, EntryTarget, FLAGS, build, check_clipped, check_cuts, check_halves, check_join,
};
use super::{Entry, MAX_POSITION, PTR_MASK};

/// Any number from `least` to `most`.
fn any_from(least: u64, most: u64) -> u64 {
    let n = kani::any();
    kani::assume(least <= n && n <= most);
    n
}

/// Any extent or hole.
fn any_entry() -> Entry {
    let size = any_from(1, 65535);
    let end = any_from(size, MAX_POSITION.0);
    let is_hole: bool = kani::any();
    let target = match is_hole {
        true => EntryTarget::Hole { seq: any_from(0, PTR_MASK) },
        false => EntryTarget::Cache { offset: any_from(0, CACHE_END - size), generation: kani::any() },
    };
    let flags = match any_from(0, 2) {
        0 => FLAGS[0],
        1 => FLAGS[1],
        _ => FLAGS[2],
    };
    let dirty: bool = kani::any();
    build((end, size, dirty && !is_hole), target, flags)
}

/// The exponent of any size of a bucket.
fn any_bucket_shift() -> u32 {
    let shift = kani::any();
    kani::assume((3..=31).contains(&shift));
    shift
}

#[kani::proof]
fn an_entry_returns_what_it_was_made_of() {
    any_entry();
}

#[kani::proof]
fn cuts_are_what_the_model_says() {
    let e = any_entry();
    check_cuts(e, any_from(0, e.size().0 - 1));
}

#[kani::proof]
fn parts_are_what_the_model_says() {
    let e = any_entry();
    let from = any_from(0, e.end().0 - 1);
    let to = any_from(from + 1, u64::MAX);
    kani::assume(Sector(to) > e.start());
    check_clipped(e, from, to);
}

#[kani::proof]
fn any_two_entries_join_as_the_model_says() {
    check_join(any_entry(), any_entry(), any_bucket_shift());
}

#[kani::proof]
fn two_halves_join_to_the_whole() {
    let e = any_entry();
    kani::assume(e.size().0 > 1);
    check_halves(e, any_from(1, e.size().0 - 1), any_bucket_shift());
}
