//! Writeback: its rate, its order, and the data that it does not write.
#![allow(clippy::unwrap_used)]

use std::pin::pin;

use engine::SetOptions;
use format::{CacheMode, Sectors};
use io::sync::{Either, select};
use io::{Nanos, ZeroFlags};
use sim::disk::{Fault, Kind, Matching, Retained};
use sim::hardware::Layout;
use sim::scenario::{Boot, Scenario};

/// Where data begins on a backing device.
const OFFSET: u64 = 16;

async fn open(b: &Boot, options: SetOptions) {
    b.open_with(options).await;
    b.stay_dirty(0).await;
}

/// Writeback that is not urgent: dirty data goes at the rate that is set, here 8 sectors in a second.
#[test]
fn writeback_keeps_to_its_rate() {
    let mut scenario = Scenario::new(1, Layout::small(CacheMode::Writeback), 0);
    scenario.boot(|b| async move {
        open(&b, SetOptions::default()).await;
        for n in 0..32 {
            assert!(b.clients[0].write(n * 16, 8, false).await);
        }
        b.tune(0, "writeback_rate_update_seconds", "1000").await;
        b.tune(0, "writeback_delay", "0").await;
        b.tune(0, "writeback_rate", "8").await;
        b.tune(0, "writeback_running", "1").await;
        b.sleep_ms(10_000).await;
        let written = Sectors(32 * 8) - b.volume(0).dirty_sectors();
        assert!((Sectors(40)..=Sectors(120)).contains(&written), "{written} sectors in ten seconds");
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// A gap of zeros in a sparse file may be a hole, for which there is no room: it is not written. Other gaps are.
#[test]
fn holes_between_dirty_data_are_not_filled() {
    let mut scenario = Scenario::new(2, Layout::small(CacheMode::Writeback), 0);
    scenario.boot(|b| async move {
        open(&b, SetOptions::default()).await;
        b.tune(0, "writeback_bridge", "always").await;
        assert!(b.clients[0].write_zeroes(8, 8, ZeroFlags::default()).await);
        b.volume(0).drained().await.unwrap();
        let before = b.backings[0].counters().writes;
        for start in [0, 16, 32, 40] {
            assert!(b.clients[0].write(start, 8, false).await);
        }
        b.volume(0).drained().await.unwrap();
        let counters = b.set().set_counters();
        assert_eq!(counters.writeback_bridged_runs, 1);
        assert_eq!(counters.writeback_bridge_written, Sectors(8), "the gap that has data");
        assert_eq!(b.backings[0].counters().writes - before, 2);
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// A gap that the device fails to read counts as an error of the device. The dirty data around it is written alone.
#[test]
fn a_gap_that_cannot_be_read_counts_as_an_error() {
    let mut scenario = Scenario::new(5, Layout::small(CacheMode::Writeback), 0);
    scenario.boot(|b| async move {
        open(&b, SetOptions::default()).await;
        b.tune(0, "writeback_bridge", "always").await;
        for start in [0, 16] {
            assert!(b.clients[0].write(start, 8, false).await);
        }
        let matching = Matching { kind: Kind::Read, range: OFFSET + 8..OFFSET + 16 };
        b.backings[0].set_faults(vec![Fault { matching, skip: 0, count: 1 }]);
        b.volume(0).drained().await.unwrap();
        assert_eq!(b.volume(0).io_errors(), 1);
        assert_eq!(b.set().set_counters().writeback_bridged_runs, 0);
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// A sweep that finds nothing up to the end of the device continues at its start, without a rest.
#[test]
fn a_sweep_goes_on_at_the_begin_of_the_device() {
    let mut scenario = Scenario::new(3, Layout::small(CacheMode::Writeback), 0);
    scenario.boot(|b| async move {
        let mut options = SetOptions::default();
        options.tunables.writeback_batch_sectors = 8;
        open(&b, options).await;
        for start in [100, 200, 300] {
            assert!(b.clients[0].write(start, 8, false).await);
        }
        // The drain is given up in the second batch.
        b.backings[0].hold(Matching { kind: Kind::Write, range: OFFSET + 200..OFFSET + 208 });
        let volume = b.volume(0);
        let given_up = select(pin!(volume.drained()), b.rt.sleep(Nanos::from_secs(5))).await;
        assert!(matches!(given_up, Either::Right(())));
        b.backings[0].release();
        b.sleep_ms(5000).await;
        assert_eq!(volume.dirty_sectors(), Sectors(8));
        assert!(b.clients[0].discard(300, 8).await && b.clients[0].write(0, 8, false).await);
        b.sleep_ms(5000).await;
        let began = b.rt.now();
        volume.drained().await.unwrap();
        let took = b.rt.now().since(began);
        assert!(took < Nanos::from_ms(500), "{took:?} for 8 sectors");
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// A device that is written in stripes has a full one at its end. A start leaves little of the index in memory; the count of
/// dirty stripes reads the rest, and the full stripe is written before all others.
#[test]
fn stripes_are_counted_in_leaves_that_are_not_in_memory() {
    // Positions on the backing device count: its second stripe begins here.
    const STRIPE: u64 = 8192;
    let mut layout = Layout { nbuckets: 1024, ..Layout::small(CacheMode::Writeback) };
    layout.backings[0].stripe_bytes = 16 * 512;
    layout.backings[0].data_sectors = STRIPE - OFFSET + 64;
    let mut scenario = Scenario::new(4, layout, 0);
    scenario.boot_and_stop(|b| async move {
        open(&b, SetOptions::default()).await;
        for n in 0..700 {
            assert!(b.clients[0].write(n * 10, 1, false).await);
        }
        assert!(b.clients[0].write(STRIPE - OFFSET, 64, false).await);
        b.stop().await;
    });
    scenario.boot(|b| async move {
        let mut options = SetOptions::default();
        options.tunables.btree_cache_limit = 8192;
        open(&b, options).await;
        b.backings[0].hold(Matching { kind: Kind::Write, range: OFFSET..STRIPE });
        let volume = b.volume(0);
        let draining = b.rt.spawn(async move { volume.drained().await });
        let mut left_ms = 10_000;
        while b.volume(0).dirty_sectors() > Sectors(700) && left_ms > 0 {
            b.sleep_ms(10).await;
            left_ms -= 10;
        }
        assert_eq!(b.volume(0).dirty_sectors(), Sectors(700), "all but the full stripe");
        b.backings[0].release();
        draining.await.unwrap();
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// A drain that begins during a dirty write writes back what that write brings.
#[test]
fn a_drain_waits_for_a_dirty_write_that_is_under_way() {
    let mut scenario = Scenario::new(5, Layout::small(CacheMode::Writeback), 0);
    scenario.boot(|b| async move {
        open(&b, SetOptions::default()).await;
        b.cache.hold(Matching::all(Kind::Write));
        let write = b.write_beside(0, 100, 8, false);
        b.sleep_ms(100).await;
        assert_eq!(b.cache.held(), 1);
        let volume = b.volume(0);
        let draining = b.rt.spawn(async move { volume.drained().await });
        b.sleep_ms(1000).await;
        assert!(draining.try_take().is_none(), "the drain ended before the write");
        b.cache.release();
        assert!(write.await);
        draining.await.unwrap();
        assert_eq!(b.volume(0).dirty_sectors(), Sectors::ZERO);
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}
