//! One suite that every replacement policy has to pass, and what is special about each.

use std::cell::Cell;

use io::Rng;
use proptest::prelude::*;

use super::{Aging, BTREE_PRIO, BucketNr, Candidate, INITIAL_PRIO, Replacement, Selector, lru_weight};

const POLICIES: [Replacement; 3] = [Replacement::Lru, Replacement::Fifo, Replacement::Random];
const FIRST: u32 = 3;

/// Buckets by number; those before [`FIRST`] must never be asked for.
#[derive(Debug)]
struct Cache(Vec<Candidate>);

impl Cache {
    fn at(&self, nr: BucketNr) -> Candidate {
        assert!(nr.0 >= FIRST, "bucket {nr} is not for data");
        self.0[nr.0 as usize]
    }

    fn selector(&self, policy: Replacement) -> Selector {
        Selector::new(policy, BucketNr(FIRST), self.0.len() as u32)
    }

    fn pick(&self, policy: Replacement, wanted: usize, seed: u64) -> Vec<BucketNr> {
        let mut out = Vec::new();
        self.selector(policy).pick(wanted, 0, &mut Rng::new(seed), |nr| self.at(nr), &mut out);
        out
    }

    fn eligible(&self) -> usize {
        self.0.iter().skip(FIRST as usize).filter(|c| c.eligible).count()
    }
}

fn bucket(eligible: bool, prio: u16, live_sectors: u32) -> Candidate {
    Candidate { eligible, prio, live_sectors }
}

fn uniform(nbuckets: usize) -> Cache {
    Cache(vec![bucket(true, INITIAL_PRIO, 100); nbuckets])
}

fn caches() -> impl Strategy<Value = Cache> {
    let bucket = (any::<bool>(), 32000u16..=32768, 0u32..50).prop_map(|(e, p, s)| bucket(e, p, s));
    prop::collection::vec(bucket, FIRST as usize..300).prop_map(Cache)
}

proptest! {
    #[test]
    fn picks_are_eligible_distinct_and_few_enough(cache in caches(), wanted in 0usize..100, seed: u64) {
        for policy in POLICIES {
            let mut picks = cache.pick(policy, wanted, seed);
            prop_assert!(picks.len() <= wanted);
            prop_assert!(picks.iter().all(|&nr| cache.at(nr).eligible));
            let found = picks.len();
            picks.sort_unstable();
            picks.dedup();
            prop_assert_eq!(picks.len(), found, "a bucket was picked twice");
            if policy != Replacement::Random {
                prop_assert_eq!(found, wanted.min(cache.eligible()), "{:?} finds all there are", policy);
            }
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_picks(cache in caches(), wanted in 0usize..100, seed: u64) {
        for policy in POLICIES {
            prop_assert_eq!(cache.pick(policy, wanted, seed), cache.pick(policy, wanted, seed));
        }
    }

    #[test]
    fn slices_change_nothing(cache in caches(), wanted in 0usize..100, seed: u64, slice in 1u32..40) {
        for policy in POLICIES {
            let mut selector = cache.selector(policy);
            let mut rng = Rng::new(seed);
            let mut scan = selector.begin(wanted, 0);
            let mut slices = 0;
            while !selector.step(&mut scan, slice, &mut rng, |nr| cache.at(nr)) {
                slices += 1;
                prop_assert!(slices <= cache.0.len(), "the scan does not end");
            }
            let mut out = Vec::new();
            Selector::finish(scan, |nr| cache.at(nr), &mut out);
            prop_assert_eq!(out, cache.pick(policy, wanted, seed));
        }
    }

    #[test]
    fn lru_agrees_with_sorting_everything(cache in caches(), wanted in 0usize..100, min_prio in 0u16..=32768) {
        let mut sorted: Vec<(u64, BucketNr)> = (FIRST..cache.0.len() as u32)
            .map(BucketNr)
            .filter(|&nr| cache.at(nr).eligible)
            .map(|nr| (lru_weight(cache.at(nr).prio, min_prio, cache.at(nr).live_sectors), nr))
            .collect();
        sorted.sort_unstable();
        let expected: Vec<BucketNr> = sorted.into_iter().take(wanted).map(|(_, nr)| nr).collect();
        let mut out = Vec::new();
        let mut selector = cache.selector(Replacement::Lru);
        selector.pick(wanted, min_prio, &mut Rng::new(0), |nr| cache.at(nr), &mut out);
        prop_assert_eq!(out, expected);
    }

    #[test]
    fn weights_never_overflow(prio: u16, min_prio: u16, live: u32) {
        prop_assert!(lru_weight(prio, min_prio, live) <= (65535 + 4096) * u64::from(u32::MAX));
    }
}

#[test]
fn every_policy_stands_degenerate_caches() {
    let mut rng = Rng::new(0);
    for policy in POLICIES {
        let mut out = Vec::new();
        for (first, end) in [(0, 0), (5, 5), (9, 5)] {
            let mut selector = Selector::new(policy, BucketNr(first), end);
            selector.pick(10, 0, &mut rng, |nr| panic!("bucket {nr} does not exist"), &mut out);
        }
        let mut selector = Selector::new(policy, BucketNr(4), 5);
        selector.pick(10, 0, &mut rng, |_| bucket(true, 1, 1), &mut out);
        assert_eq!(out, [BucketNr(4)], "{policy:?}");
        out.clear();
        selector.pick(10, 0, &mut rng, |_| bucket(false, 1, 1), &mut out);
        assert!(out.is_empty(), "{policy:?}");
    }
}

#[test]
fn picks_that_became_ineligible_are_dropped() {
    let cache = uniform(100);
    for policy in POLICIES {
        let mut selector = cache.selector(policy);
        let mut scan = selector.begin(10, 0);
        selector.step(&mut scan, u32::MAX, &mut Rng::new(1), |nr| cache.at(nr));
        let mut out = vec![BucketNr(77)];
        Selector::finish(scan, |nr| bucket(nr.0 % 2 == 0, 0, 0), &mut out);
        assert_eq!(out.remove(0), BucketNr(77), "what was in the list stays");
        assert!(out.len() < 10 && out.iter().all(|nr| nr.0 % 2 == 0), "{policy:?}: {out:?}");
    }
}

#[test]
fn weights_by_hand() {
    // (prio - min_prio + (32768 - min_prio) / 8) * sectors
    assert_eq!(lru_weight(32768, 0, 10), (32768 + 4096) * 10);
    assert_eq!(lru_weight(32768, 32000, 10), (768 + 96) * 10);
    assert_eq!(lru_weight(32000, 32000, 10), 960);
    assert_eq!(lru_weight(32768, 32000, 0), 0, "an unused bucket weighs nothing");
    assert_eq!(lru_weight(0, 32000, 10), 960, "a priority below the minimum counts as the minimum");
    assert_eq!(lru_weight(32768, u16::MAX, 10), 0);
}

#[test]
fn lru_takes_unused_then_old_and_small_buckets() {
    let cache = Cache(vec![
        bucket(true, 1, 0),
        bucket(true, 1, 0),
        bucket(true, 1, 0),
        bucket(true, 32768, 8),
        bucket(true, 32768, 0),
        bucket(false, 32000, 0),
        bucket(true, 32010, 100),
        bucket(true, 32000, 100),
        bucket(true, 32500, 10),
    ]);
    let mut out = Vec::new();
    let mut selector = cache.selector(Replacement::Lru);
    selector.pick(9, 32000, &mut Rng::new(0), |nr| cache.at(nr), &mut out);
    // Weights: 4: 0; 8: (500 + 96) * 10 = 5960; 3: (768 + 96) * 8 = 6912; 7: 9600; 6: 10600.
    assert_eq!(out, [4, 8, 3, 7, 6].map(BucketNr));
}

#[test]
fn fifo_goes_round() {
    let cache = uniform(8);
    let mut selector = cache.selector(Replacement::Fifo);
    let mut rng = Rng::new(0);
    let mut pick = |wanted| {
        let mut out = Vec::new();
        selector.pick(wanted, 0, &mut rng, |nr| cache.at(nr), &mut out);
        out.into_iter().map(|nr| nr.0).collect::<Vec<_>>()
    };
    assert_eq!(pick(3), [3, 4, 5]);
    assert_eq!(pick(3), [6, 7, 3]);
    assert_eq!(pick(9), [4, 5, 6, 7, 3], "one turn at most");
    assert_eq!(pick(1), [4]);
}

#[test]
fn random_gives_up_after_half_as_many_tries_as_buckets() {
    let tries = Cell::new(0);
    let mut out = Vec::new();
    let mut selector = Selector::new(Replacement::Random, BucketNr(0), 1000);
    selector.pick(
        10,
        0,
        &mut Rng::new(5),
        |_| {
            tries.set(tries.get() + 1);
            bucket(false, 0, 0)
        },
        &mut out,
    );
    assert_eq!((tries.get(), out.len()), (500, 0));
}

#[test]
fn random_picks_are_spread_over_the_cache() {
    let picks = uniform(10_003).pick(Replacement::Random, 1000, 42);
    for tenth in 0..10 {
        let range = FIRST + tenth * 1000..FIRST + (tenth + 1) * 1000;
        let hits = picks.iter().filter(|nr| range.contains(&nr.0)).count();
        assert!((60..=140).contains(&hits), "{hits} of 1000 picks in {range:?}");
    }
}

#[test]
fn a_new_policy_holds_from_the_next_scan_on() {
    let cache = uniform(10);
    let mut selector = cache.selector(Replacement::Fifo);
    let mut rng = Rng::new(0);
    let mut scan = selector.begin(2, 0);
    selector.set_policy(Replacement::Lru);
    assert!(!selector.step(&mut scan, 1, &mut rng, |nr| cache.at(nr)));
    assert!(selector.step(&mut scan, 1, &mut rng, |nr| cache.at(nr)), "fifo is done when it has enough");
    assert_eq!(selector.policy(), Replacement::Lru);
    let mut scan = selector.begin(2, 0);
    assert!(!selector.step(&mut scan, 6, &mut rng, |nr| cache.at(nr)), "lru has to see everything");
}

#[test]
fn aging_is_due_once_per_1024th_of_the_cache() {
    let mut aging = Aging::new();
    // 1 GiB: 2 097 152 sectors, 2048 for a period.
    assert!(aging.count(8, 2_097_152), "the counter starts at 0");
    // 2040 are left; 255 requests of 8 bring it to 0, the next one below.
    let due = (0..256).filter(|_| aging.count(8, 2_097_152)).count();
    assert_eq!(due, 1);
    assert!(aging.count(u64::MAX, 2_097_152));
    assert!(aging.count(0, u64::MAX), "still in arrears");
}

#[test]
fn priorities_age_except_those_of_metadata() {
    let mut prios = [0, 1, 2, 32768, BTREE_PRIO];
    assert_eq!(Aging::age_all(prios.iter_mut()), 0);
    assert_eq!(prios, [0, 0, 1, 32767, BTREE_PRIO]);
    assert_eq!(Aging::age_all(prios[3..].iter_mut()), 32766);
    assert_eq!(Aging::age_all(std::iter::empty()), 0);
}

/// The request that uses up the period is the one after it is used up exactly.
#[test]
fn aging_is_due_when_more_than_the_period_was_used() {
    let due = |requests: &[u64]| {
        let mut aging = Aging::new();
        requests.iter().map(|sectors| aging.count(*sectors, 10 * 1024)).collect::<Vec<_>>()
    };
    assert_eq!(due(&[0, 0]), [false, false], "nothing was used");
    assert_eq!(due(&[1, 9, 1, 9, 1]), [true, false, true, false, true]);
    assert_eq!(due(&[1, 10, 9, 1]), [true, true, false, true]);
    assert_eq!(due(&[25, 0, 0, 0]), [true, true, true, false]);
}

/// Ages below the least priority, and caches without aging.
#[test]
fn the_least_priority_is_that_of_what_ages() {
    for (before, after, least) in [
        (vec![5, 3, 9], vec![4, 2, 8], 2),
        (vec![0, 7, BTREE_PRIO], vec![0, 6, BTREE_PRIO], 6),
        (vec![1, 7], vec![0, 6], 0),
        (vec![0, BTREE_PRIO], vec![0, BTREE_PRIO], 0),
        (vec![BTREE_PRIO - 1], vec![BTREE_PRIO - 2], BTREE_PRIO - 2),
    ] {
        let mut prios = before.clone();
        assert_eq!(Aging::age_all(prios.iter_mut()), least, "{before:?}");
        assert_eq!(prios, after);
    }
}

/// A scan that wants nothing is complete before it has looked at anything; a step without a budget looks at nothing.
#[test]
fn scans_look_at_no_more_than_they_must() {
    let cache = uniform(10);
    for policy in POLICIES {
        let mut selector = cache.selector(policy);
        let mut rng = Rng::new(3);
        let looks = Cell::new(0);
        let look = |nr: BucketNr| {
            looks.set(looks.get() + 1);
            cache.at(nr)
        };
        let mut nothing = selector.begin(0, 0);
        assert!(selector.step(&mut nothing, 100, &mut rng, look), "{policy:?}");
        let mut scan = selector.begin(1, 0);
        assert!(!selector.step(&mut scan, 0, &mut rng, look), "{policy:?}");
        assert_eq!(looks.get(), 0, "{policy:?}");
        assert_eq!(selector.step(&mut scan, 1, &mut rng, look), policy != Replacement::Lru);
        assert_eq!(looks.get(), 1, "{policy:?}");
        assert!(selector.step(&mut scan, 6, &mut rng, look), "seven buckets in all");
    }
}

/// Numbers of buckets that random selection tries: half of them, rounded up.
#[test]
fn random_tries_half_of_the_buckets() {
    for (buckets, most) in [(1, 1), (2, 1), (3, 2), (4, 2), (999, 500)] {
        let tries = Cell::new(0);
        let mut selector = Selector::new(Replacement::Random, BucketNr(3), 3 + buckets);
        let look = |nr: BucketNr| {
            assert!((3..3 + buckets).contains(&nr.0));
            tries.set(tries.get() + 1);
            bucket(false, 0, 0)
        };
        selector.pick(9, 0, &mut Rng::new(1), look, &mut Vec::new());
        assert_eq!(tries.get(), most, "{buckets} buckets");
    }
}
