//! The weights by hand, and the choice against sorting everything.

use format::BucketNr;
use proptest::prelude::*;

use super::super::tests::{Cache, FIRST, bucket, caches, pick};
use super::*;

proptest! {
    #[test]
    fn lru_agrees_with_sorting_everything(cache in caches(), wanted in 0usize..100, min_prio in 0u16..=32768) {
        let mut sorted: Vec<(u64, u32)> = (FIRST..cache.0.len() as u32)
            .map(|nr| (cache.at(BucketNr(nr)), nr))
            .filter(|(c, _)| c.eligible)
            .map(|(c, nr)| (weight(c.prio, min_prio, c.live_sectors), nr))
            .collect();
        sorted.sort_unstable();
        let expected: Vec<u32> = sorted.into_iter().take(wanted).map(|(_, nr)| nr).collect();
        let found = pick(&mut Lru::new(&cache.space(0)), wanted, min_prio, &cache);
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn weights_never_overflow(prio: u16, min_prio: u16, live: u32) {
        prop_assert!(weight(prio, min_prio, live) <= (65535 + 4096) * u64::from(u32::MAX));
    }
}

#[test]
fn weights_by_hand() {
    // (prio - min_prio + (32768 - min_prio) / 8) * sectors
    assert_eq!(weight(32768, 0, 10), (32768 + 4096) * 10);
    assert_eq!(weight(32768, 32000, 10), (768 + 96) * 10);
    assert_eq!(weight(32000, 32000, 10), 960);
    assert_eq!(weight(32768, 32000, 0), 0, "an unused bucket weighs nothing");
    assert_eq!(weight(0, 32000, 10), 960, "a priority below the minimum counts as the minimum");
    assert_eq!(weight(32768, u16::MAX, 10), 0);
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
    // Weights: 4: 0; 8: (500 + 96) * 10 = 5960; 3: (768 + 96) * 8 = 6912; 7: 9600; 6: 10600.
    assert_eq!(pick(&mut Lru::new(&cache.space(0)), 9, 32000, &cache), [4, 8, 3, 7, 6]);
}
