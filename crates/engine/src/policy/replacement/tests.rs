//! Every policy of the table passes the conformance suite, also the example of the how-to; settings name policies.

use std::cell::Cell;

use format::{BucketNr, PRIO_INITIAL};
use proptest::prelude::*;

use super::*;

/// First bucket for data of the caches here.
pub(super) const FIRST: u32 = 3;

/// Buckets by number; those before [`FIRST`] must never be asked for.
#[derive(Clone, Debug)]
pub(super) struct Cache(pub(super) Vec<Candidate>);

impl Cache {
    pub(super) fn at(&self, nr: BucketNr) -> Candidate {
        assert!(nr.0 >= FIRST, "bucket {nr} is not for data");
        self.0[nr.0 as usize]
    }

    pub(super) fn space(&self, seed: u64) -> Space {
        space(FIRST, self.0.len() as u32, seed)
    }
}

pub(super) fn space(first: u32, nbuckets: u32, seed: u64) -> Space {
    Space { first, nbuckets, bucket_sectors: Sectors(1024), block_sectors: Sectors(8), seed }
}

pub(super) fn bucket(eligible: bool, prio: u16, live_sectors: u32) -> Candidate {
    Candidate { eligible, prio, live_sectors }
}

/// Buckets that are all alike.
pub(super) fn uniform(nbuckets: usize) -> Cache {
    Cache(vec![bucket(true, PRIO_INITIAL, 100); nbuckets])
}

pub(super) fn caches() -> impl Strategy<Value = Cache> {
    let bucket = (any::<bool>(), 32000u16..=32768, 0u32..50).prop_map(|(e, p, s)| bucket(e, p, s));
    prop::collection::vec(bucket, FIRST as usize..300).prop_map(Cache)
}

/// The numbers of the buckets that a policy chooses.
pub(super) fn pick(
    policy: &mut dyn ReplacementPolicy,
    wanted: usize,
    min_prio: u16,
    cache: &Cache,
) -> Vec<u32> {
    let mut out = Vec::new();
    policy.choose(wanted, min_prio, &|nr| cache.at(nr), &mut out);
    out.into_iter().map(|nr| nr.0).collect()
}

#[test]
fn every_policy_of_the_table_conforms() {
    POLICIES.iter().for_each(conformance::check);
}

/// The suite finds a policy that breaks a rule.
mod broken {
    use super::*;

    /// Chooses the first buckets, whether or not they are eligible.
    #[derive(Debug)]
    pub(super) struct Careless(Space, usize);

    impl ReplacementPolicy for Careless {
        fn new(space: &Space) -> Careless {
            Careless(*space, 0)
        }

        fn begin(&mut self, wanted: usize, _min_prio: u16) {
            self.1 = wanted;
        }

        fn step(&mut self, _budget: u32, _candidates: Candidates<'_>) -> bool {
            true
        }

        fn finish(&mut self, _candidates: Candidates<'_>, out: &mut Vec<BucketNr>) {
            out.extend((self.0.first..self.0.nbuckets).take(self.1).map(BucketNr));
        }
    }
}

#[test]
#[should_panic(expected = "careless: the only bucket is not eligible")]
fn a_policy_that_breaks_a_rule_is_found() {
    conformance::check(&PolicyEntry::of::<broken::Careless>("careless"));
}

/// The names of settings lead to the policies of the table.
#[test]
fn settings_name_policies() {
    for (value, name) in Replacement::ALL {
        assert_eq!(PolicyEntry::stored(*value).name, *name);
    }
    assert_eq!(InPlaceOfLru::named("kernel"), Some(InPlaceOfLru::default()));
    assert_eq!(InPlaceOfLru::named("lru"), None, "the superblock says that");
    let former = POLICIES.iter().filter_map(|policy| Some((policy.former_name?, policy.name)));
    for (former, name) in former {
        assert_eq!(InPlaceOfLru::named(former), InPlaceOfLru::named(name), "{former}");
    }
    for (value, name) in InPlaceOfLru::ALL {
        assert_eq!(InPlaceOfLru::named(name), Some(*value));
        let in_use = if *name == "kernel" { "lru" } else { *name };
        assert_eq!(value.policy(Replacement::Lru).name, in_use);
        assert_eq!(value.policy(Replacement::Fifo).name, "fifo");
    }
}

/// lru, fifo and random ask for no bucket if none is wanted; fifo and random stop when they have enough.
#[test]
fn scans_ask_for_no_more_than_they_must() {
    let cache = uniform(10);
    for (_, name) in Replacement::ALL {
        let entry = POLICIES.iter().find(|entry| entry.name == *name).unwrap();
        let mut policy = (entry.new)(&cache.space(3));
        let asked = Cell::new(0);
        let ask = |nr: BucketNr| {
            asked.set(asked.get() + 1);
            cache.at(nr)
        };
        policy.begin(0, 0);
        assert!(policy.step(100, &ask), "{name}");
        policy.begin(1, 0);
        assert!(!policy.step(0, &ask), "{name}");
        assert_eq!(asked.get(), 0, "{name}");
        assert_eq!(policy.step(1, &ask), *name != "lru");
        assert_eq!(asked.get(), 1, "{name}");
        assert!(policy.step(6, &ask), "seven buckets in all");
    }
}

/// Every policy but random finds all eligible buckets.
#[test]
fn all_eligible_buckets_are_found() {
    let mut cache = uniform(64);
    cache.0.iter_mut().step_by(3).for_each(|c| c.eligible = false);
    for entry in POLICIES.iter().filter(|entry| entry.name != "random") {
        let mut found = pick(&mut *(entry.new)(&cache.space(0)), 64, 0, &cache);
        found.sort_unstable();
        let expected: Vec<u32> = (FIRST..64).filter(|nr| nr % 3 != 0).collect();
        assert_eq!(found, expected, "{}", entry.name);
    }
}
