//! Reads whose missing data evicts what other reads are about to return.
#![allow(clippy::unwrap_used)]

use format::{CacheMode, Replacement};
use io::Nanos;
use sim::disk::{Retained, Speed};
use sim::hardware::Layout;
use sim::scenario::Scenario;

/// Length of each of the two reads, in pieces of 8 sectors.
const PIECES: u64 = 150;

/// Two reads together need more buckets than the cache has. Each inserted its missing data, which evicted data of the other before
/// that was returned, so both read again for ever (seed 2100110845).
#[test]
pub fn two_reads_that_are_larger_than_the_cache_end() {
    let mut layout = Layout::sized(CacheMode::Writethrough, 256, 2 * PIECES * 8);
    layout.replacement = Replacement::Random;
    let mut scenario = Scenario::new(1, layout, 0);
    scenario.boot(|b| async move {
        b.open().await;
        b.tune(0, "sequential_cutoff", "0").await;
        // Half of each piece is in the cache, so both reads have hits and misses.
        for n in 0..2 * PIECES {
            assert!(b.clients[0].read(n * 8, 4).await.is_some());
        }
        b.cache.set_speed(Speed::even(100));
        b.backings[0].set_speed(Speed::even(10_000));
        let mut readings = Vec::new();
        for n in 0..2 {
            let reader = b.clients[0].clone();
            readings.push(b.rt.spawn(async move { reader.read(n * PIECES * 8, PIECES * 8).await }));
            b.rt.sleep(Nanos::from_ms(5)).await;
        }
        b.rt.sleep(Nanos::from_ms(1000)).await;
        for reading in readings {
            assert!(reading.try_take().is_some_and(|data| data.is_some()), "no answer after a hundred reads");
        }
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}
