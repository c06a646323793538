//! The rules that every replacement policy keeps, as a suite that runs for an entry of a table.
//!
//! Owns the rules of the head of [`super`]. Must not know a policy: what is special about one is tested beside it. A failure
//! names the policy.

use std::cell::Cell;

use format::{BucketNr, Inode, Sector};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use super::tests::{Cache, FIRST, bucket, caches, space, uniform};
use super::{FillKind, PolicyEntry, ReplacementPolicy};

/// What happens to a policy and its cache between two scans.
#[derive(Clone, Debug)]
enum PolicyStep {
    Fill(u32, bool),
    Hit(u32, u32),
    Miss(u32, u64),
    Age(u32),
    /// The state of a bucket becomes another.
    Change(u32, (bool, u16, u32)),
    /// A scan for so many buckets.
    Choose(usize),
}

/// Runs the suite.
///
/// # Panics
/// If the policy breaks a rule.
pub(super) fn check(entry: &PolicyEntry) {
    degenerate_caches(entry);
    buckets_that_became_ineligible(entry);
    scans_end(entry);
    scans_begin_anew(entry);
    let steps = prop::collection::vec(steps(), 1..60);
    let cases = (caches(), steps, any::<u64>(), 1_u32..40);
    let result = TestRunner::default().run(&cases, |(cache, steps, seed, slice)| {
        history(entry, &cache, &steps, seed, slice);
        Ok(())
    });
    result.unwrap_or_else(|e| panic!("{}: {e}", entry.name));
}

fn steps() -> impl Strategy<Value = PolicyStep> {
    let state = (prop::bool::weighted(0.8), 32000_u16..=32768, 0_u32..50);
    prop_oneof![
        4 => (any::<u32>(), any::<bool>()).prop_map(|(b, first)| PolicyStep::Fill(b, first)),
        6 => (any::<u32>(), 1_u32..2000).prop_map(|(b, worth)| PolicyStep::Hit(b, worth)),
        2 => (0_u32..3, 0_u64..4).prop_map(|(inode, n)| PolicyStep::Miss(inode, n * 8)),
        2 => (1_u32..200).prop_map(PolicyStep::Age),
        4 => (any::<u32>(), state).prop_map(|(b, state)| PolicyStep::Change(b, state)),
        3 => (0_usize..100).prop_map(PolicyStep::Choose),
    ]
}

/// Plays the same history for a policy that scans at once and for one that scans in slices: both choose the same, and what
/// they choose keeps the rules.
fn history(entry: &PolicyEntry, cache: &Cache, steps: &[PolicyStep], seed: u64, slice: u32) {
    let (name, mut cache) = (entry.name, cache.clone());
    let nbuckets = cache.0.len() as u32;
    let mut whole = (entry.new)(&cache.space(seed));
    let mut sliced = (entry.new)(&cache.space(seed));
    let place = |b: u32| FIRST + b % (nbuckets - FIRST).max(1);
    for step in steps {
        match *step {
            PolicyStep::Fill(b, first) => {
                let fill = if first { FillKind::FirstRead } else { FillKind::Lasting };
                whole.on_fill(BucketNr(place(b)), fill);
                sliced.on_fill(BucketNr(place(b)), fill);
            }
            PolicyStep::Hit(b, worth) => {
                let [one, other] = [&mut whole, &mut sliced].map(|p| p.on_hit(BucketNr(place(b)), worth));
                assert_eq!(one, other, "{name}: a hit");
            }
            PolicyStep::Miss(inode, at) => {
                let [one, other] = [&mut whole, &mut sliced].map(|p| p.on_miss(Inode(inode), Sector(at)));
                assert_eq!(one, other, "{name}: a miss");
            }
            PolicyStep::Age(times) => {
                for _ in 0..times {
                    whole.age();
                    sliced.age();
                }
            }
            PolicyStep::Change(b, (eligible, prio, live)) => {
                if let Some(c) = cache.0.get_mut(place(b) as usize) {
                    *c = bucket(eligible, prio, live);
                }
            }
            PolicyStep::Choose(wanted) => {
                let chosen = judged(entry, &mut *whole, wanted, &cache);
                assert_eq!(chosen, in_slices(entry, &mut *sliced, wanted, &cache, slice), "{name}: slices");
            }
        }
    }
}

/// The buckets that a policy chooses, which keep the rules. The oracle is the definition: it knows which are eligible.
fn judged(
    entry: &PolicyEntry,
    policy: &mut dyn ReplacementPolicy,
    wanted: usize,
    cache: &Cache,
) -> Vec<BucketNr> {
    let (name, before) = (entry.name, [BucketNr(1), BucketNr(2)]);
    let mut out = before.to_vec();
    policy.choose(wanted, 0, &|nr| cache.at(nr), &mut out);
    assert_eq!(out[..2], before, "{name}: what was in the list stays");
    let chosen = out.split_off(2);
    assert!(chosen.len() <= wanted, "{name}: {} buckets of {wanted}", chosen.len());
    for (i, nr) in chosen.iter().enumerate() {
        assert!(cache.at(*nr).eligible, "{name}: bucket {nr} is not eligible");
        assert!(!chosen[..i].contains(nr), "{name}: bucket {nr} is chosen twice");
    }
    chosen
}

fn in_slices(
    entry: &PolicyEntry,
    policy: &mut dyn ReplacementPolicy,
    wanted: usize,
    cache: &Cache,
    slice: u32,
) -> Vec<BucketNr> {
    policy.begin(wanted, 0);
    let mut slices = 0;
    while !policy.step(slice, &|nr| cache.at(nr)) {
        slices += 1;
        assert!(slices <= cache.0.len(), "{}: the scan does not end", entry.name);
    }
    let mut out = Vec::new();
    policy.finish(&|nr| cache.at(nr), &mut out);
    out
}

/// Caches without a bucket for data, and with one.
fn degenerate_caches(entry: &PolicyEntry) {
    let name = entry.name;
    let mut out = Vec::new();
    for end in [0, 5] {
        let mut policy = (entry.new)(&space(end, end, 0));
        policy.choose(10, 0, &|nr| panic!("{name}: bucket {nr} does not exist"), &mut out);
        assert!(out.is_empty(), "{name}: there is no bucket");
        // A hit of a bucket that does not exist has no effect.
        policy.on_fill(BucketNr(end), FillKind::Lasting);
        assert!(!policy.on_hit(BucketNr(end), 1), "{name}: there is no such bucket");
    }
    let mut policy = (entry.new)(&space(4, 5, 0));
    policy.choose(10, 0, &|_| bucket(true, 1, 1), &mut out);
    assert_eq!(out, [BucketNr(4)], "{name}: the only bucket");
    out.clear();
    policy.choose(10, 0, &|_| bucket(false, 1, 1), &mut out);
    assert!(out.is_empty(), "{name}: the only bucket is not eligible");
}

/// Buckets are left out that became ineligible between the steps of a scan and its end.
fn buckets_that_became_ineligible(entry: &PolicyEntry) {
    let cache = uniform(100);
    let mut policy = (entry.new)(&cache.space(1));
    policy.begin(10, 0);
    policy.step(u32::MAX, &|nr| cache.at(nr));
    let mut out = Vec::new();
    policy.finish(&|nr| bucket(nr.0 % 2 == 0, 0, 1), &mut out);
    assert!(out.len() <= 10 && out.iter().all(|nr| nr.0 % 2 == 0), "{}: {out:?}", entry.name);
}

/// A scan asks for each bucket once on average, and a step for no more buckets than its budget.
fn scans_end(entry: &PolicyEntry) {
    let (name, cache) = (entry.name, uniform(50));
    let mut policy = (entry.new)(&cache.space(7));
    let asked = Cell::new(0);
    let ask = |nr: BucketNr| {
        asked.set(asked.get() + 1);
        bucket(false, cache.at(nr).prio, 1)
    };
    policy.begin(5, 0);
    assert!(!policy.step(0, &ask) && asked.get() == 0, "{name}: a step without a budget");
    loop {
        let before = asked.get();
        let complete = policy.step(3, &ask);
        assert!(asked.get() - before <= 3, "{name}: a step exceeds its budget");
        if complete {
            break;
        }
        assert!(asked.get() > before, "{name}: a step does nothing");
    }
    assert!(asked.get() <= 50 - FIRST, "{name}: {} buckets were asked for", asked.get());
    policy.finish(&ask, &mut Vec::new());
}

/// A scan that was given up leaves nothing to the next one.
fn scans_begin_anew(entry: &PolicyEntry) {
    let cache = uniform(40);
    let mut policy = (entry.new)(&cache.space(9));
    policy.begin(20, 0);
    policy.step(10, &|nr| cache.at(nr));
    assert!(judged(entry, &mut *policy, 3, &cache).len() == 3, "{}: three of 37 buckets", entry.name);
}
