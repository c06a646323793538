//! Policies that take each other's places, among them one that no table has.

use std::cell::Cell;

use format::{BucketNr, Replacement};

use super::*;
use crate::policy::replacement::{Candidate, InPlaceOfLru};
use crate::testing::geometry;

const NBUCKETS: u32 = 128;

fn choose(eviction: &mut Eviction, wanted: usize) -> Vec<u32> {
    let mut out = Vec::new();
    let all = |_| Candidate { eligible: true, prio: 30_000, live_sectors: 1 };
    eviction.choose(wanted, &all, &mut out);
    out.into_iter().map(|nr| nr.0).collect()
}

fn cost_benefit() -> &'static PolicyEntry {
    InPlaceOfLru::named("cost_benefit").unwrap().policy(Replacement::Lru)
}

/// A policy that comes back continues where it was, unless it took memory for each bucket and priorities have aged meanwhile.
#[test]
fn a_policy_that_comes_back_knows_what_it_knew() {
    let fifo = PolicyEntry::stored(Replacement::Fifo);
    let mut eviction = Eviction::new(geometry(Sectors(16), NBUCKETS, 3), fifo, 0);
    let first = choose(&mut eviction, 3);
    eviction.set_policy(cost_benefit());
    let missed = |e: &mut Eviction| e.on_miss(Inode(1), Sector(8));
    assert_eq!(
        (missed(&mut eviction), missed(&mut eviction)),
        (false, true),
        "the second miss of a block finds the first one"
    );
    assert_eq!(eviction.age(7), Aged::Observed);
    eviction.set_policy(fifo);
    assert!(!eviction.observes() && !missed(&mut eviction), "fifo is not told");
    assert_eq!(choose(&mut eviction, 1), [first[2] + 1]);
    eviction.set_policy(cost_benefit());
    assert!(missed(&mut eviction), "no priorities have aged");
    eviction.set_policy(fifo);
    assert_eq!(eviction.age(7), Aged::Yes);
    eviction.set_policy(cost_benefit());
    assert!(!missed(&mut eviction), "it was dropped");
    eviction.set_policy(fifo);
    assert_eq!(choose(&mut eviction, 1), [first[2] + 2]);
}

/// A policy that is not in use gets the calls for fills, too, as long as it is there.
#[test]
fn a_policy_that_is_not_in_use_is_told_of_fills() {
    let mut eviction = Eviction::new(geometry(Sectors(16), NBUCKETS, 3), cost_benefit(), 0);
    eviction.on_fill(BucketNr(60), FillKind::FirstRead);
    choose(&mut eviction, 0);
    eviction.set_policy(PolicyEntry::stored(Replacement::Lru));
    eviction.on_fill(BucketNr(61), FillKind::FirstRead);
    eviction.set_policy(cost_benefit());
    let in_probation = |e: &mut Eviction, b| e.policy().on_hit(BucketNr(b), 1);
    assert!(in_probation(&mut eviction, 61));
    assert!(!in_probation(&mut eviction, 62), "protected");
    assert!(!in_probation(&mut eviction, 60), "filled before the policy was asked for the first time");
}

thread_local! {
    static AGED: Cell<u32> = const { Cell::new(0) };
}

/// The last bucket, whatever is in it.
struct Last(u32);

impl ReplacementPolicy for Last {
    fn new(space: &Space) -> Last {
        Last(space.nbuckets - 1)
    }

    fn age(&mut self) {
        AGED.set(AGED.get() + 1);
    }

    fn begin(&mut self, _wanted: usize, min_prio: u16) {
        assert_eq!(min_prio, 9, "the smallest priority that the last aging left");
    }

    fn step(&mut self, _budget: u32, _candidates: Candidates<'_>) -> bool {
        true
    }

    fn finish(&mut self, _candidates: Candidates<'_>, out: &mut Vec<BucketNr>) {
        out.push(BucketNr(self.0));
    }
}

/// The allocator knows policies by the trait alone.
#[test]
fn a_policy_of_no_table_can_be_used() {
    const LAST: PolicyEntry = PolicyEntry::of::<Last>("last");
    let mut eviction =
        Eviction::new(geometry(Sectors(16), NBUCKETS, 3), PolicyEntry::stored(Replacement::Random), 1);
    assert_eq!(choose(&mut eviction, 2).len(), 2);
    eviction.set_policy(&LAST);
    assert_eq!((eviction.age(9), AGED.get()), (Aged::Yes, 1));
    assert_eq!(choose(&mut eviction, 5), [NBUCKETS - 1]);
}
