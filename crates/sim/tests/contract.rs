//! The durability contract, as scenarios for violations that random runs find only after many seeds.
#![allow(clippy::unwrap_used)]

use engine::SetOptions;
use engine::tunables::Overwrite;
use format::{BackingState, CacheMode, Sectors};
use io::ZeroFlags;
use sim::disk::{Fault, Kind, Matching, Retained};
use sim::hardware::Layout;
use sim::scenario::{Boot, Scenario};

/// Nothing becomes durable by itself while the scenario runs.
const NEVER_MS: u16 = 60_000;

/// Opens a set whose cache holds a durable clean copy of the first 512 sectors, and newer dirty data over a few
/// of them, of which nothing is durable: no flush, a journal with a long delay, and no new bucket, whose generation
/// would have to be durable. From now on nothing can become durable on the cache device.
async fn dirty_over_a_clean_copy(b: &Boot) {
    let mut options = SetOptions::default();
    options.tunables.journal_delay_ms = NEVER_MS;
    b.open_with(options).await;
    b.stay_dirty(0).await;
    assert!(b.clients[0].read(0, 512).await.is_some());
    // The leaf is written, and the superblock says dirty.
    b.sleep_ms(90_000).await;
    assert_eq!(b.set().status().cached_sectors, Sectors(512));
    assert!(b.clients[0].write(1000, 1, true).await);
    assert!(b.clients[0].write(128, 4, false).await);
    assert_eq!(b.volume(0).dirty_sectors(), Sectors(5));
    b.cache.hold(Matching::all(Kind::Flush));
    b.cache.hold(Matching::all(Kind::DurableWrite));
}

/// Contract 9: after a crash the older clean copy would be believed, and the sectors would change when it is evicted.
#[test]
fn writeback_waits_until_the_dirty_keys_are_durable() {
    for retained in [Retained::Nothing, Retained::Some(2), Retained::Some(6)] {
        let mut scenario = Scenario::new(9, Layout::small(CacheMode::Writeback), 0);
        scenario.boot(|b| async move {
            dirty_over_a_clean_copy(&b).await;
            let volume = b.volume(0);
            b.rt.spawn(async move { volume.drained().await });
            b.sleep_ms(2000).await;
            assert!(b.cache.held() > 0, "the journal is on its way");
        });
        scenario.power_loss(retained).judge().happy_end();
    }
}

/// Contract 6: the keys that say clean were durable when the superblock had its turn, but it waited for another update of
/// itself, and meanwhile there was other dirty data, which was discarded.
#[test]
fn clean_in_the_superblock_waits_for_the_keys_of_now() {
    let mut scenario = Scenario::new(11, Layout::small(CacheMode::Writeback), 0);
    scenario.boot(|b| async move {
        let mut options = SetOptions::default();
        options.tunables.journal_delay_ms = NEVER_MS;
        b.open_with(options).await;
        b.tune(0, "sequential_cutoff", "0").await;
        b.tune(0, "writeback_delay", "0").await;
        b.tune(0, "writeback_percent", "0").await;
        assert!(b.clients[0].write(0, 8, true).await);
        b.backings[0].hold(Matching::all(Kind::DurableWrite));
        let volume = b.volume(0);
        b.rt.spawn(async move { volume.set("label", "another").await });
        // Written back, and durably clean in the journal; the superblock waits for its label.
        let volume = b.volume(0);
        let drained = b.rt.spawn(async move { volume.drained().await });
        b.sleep_ms(1000).await;
        assert_eq!(b.volume(0).dirty_sectors(), Sectors::ZERO);
        assert!(b.clients[0].write(64, 8, true).await && b.clients[0].discard(64, 8).await);
        assert_eq!(b.volume(0).dirty_sectors(), Sectors::ZERO);
        b.backings[0].release();
        drained.await.unwrap();
        assert_eq!(b.volume(0).state(), Some(BackingState::Clean));
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// A write or discard that bypasses the cache over dirty data waits until the key of that data is durable.
#[test]
pub fn direct_changes_wait_until_the_dirty_keys_are_durable() {
    for way in ["detaching", "discard"] {
        for retained in [Retained::Everything, Retained::Nothing, Retained::Some(2), Retained::Some(6)] {
            let mut scenario = Scenario::new(9, Layout::small(CacheMode::Writeback), 0);
            scenario.boot(move |b| async move {
                dirty_over_a_clean_copy(&b).await;
                let c = b.clients[0].clone();
                match way {
                    "discard" => drop(b.rt.spawn(async move { c.discard(128, 4).await })),
                    _ => {
                        let (set, volume) = (b.set(), b.volume(0));
                        b.rt.spawn(async move { set.detach(&volume).await });
                        b.write_beside(0, 128, 4, false);
                    }
                }
                b.sleep_ms(2000).await;
                assert!(b.cache.held() > 0, "the journal is on its way");
            });
            scenario.power_loss(retained).judge().happy_end();
        }
    }
}

/// The cache fails while the superblock that lets the device go is being written.
#[test]
pub fn a_device_that_was_let_go_says_so_when_the_cache_fails() {
    Scenario::new(1, Layout::small(CacheMode::Writeback), 0).boot(|b| async move {
        b.open().await;
        b.clients[0].set_tolerant(true);
        b.backings[0].hold(Matching { kind: Kind::DurableWrite, range: 8..16 });
        let (set, volume) = (b.set(), b.volume(0));
        let detach = b.rt.spawn(async move { set.detach(&volume).await });
        b.sleep_ms(10).await;
        b.cache.die_after(0);
        assert!(b.set().gc().await.is_err() && b.set().failure().is_some());
        let c = b.clients[0].clone();
        let read = b.rt.spawn(async move { c.read(0, 8).await });
        b.sleep_ms(10).await;
        b.backings[0].release();
        assert!(read.await.is_some());
        assert!(detach.await.is_err(), "the slot could not be given up");
        assert_eq!(b.volume(0).state(), Some(BackingState::None));
    });
}

/// Contract 2 and 8: the hole that a discard leaves over flushed dirty data is not durable yet. A read puts a clean copy over
/// it. A durable write past the cache finds the copy, and must wait for the hole below it all the same: else a power loss
/// brings the dirty data back over what was acknowledged as durable.
#[test]
pub fn a_durable_write_past_the_cache_waits_for_the_hole_below_a_copy() {
    for way in ["write", "zeroes"] {
        for retained in [Retained::Nothing, Retained::Everything, Retained::Some(2), Retained::Some(6)] {
            let mut scenario = Scenario::new(9, Layout::small(CacheMode::Writeback), 0);
            scenario.boot(move |b| async move {
                let mut options = SetOptions::default();
                options.tunables.journal_delay_ms = NEVER_MS;
                b.open_with(options).await;
                b.stay_dirty(0).await;
                let c = &b.clients[0];
                assert!(c.write(256, 4, false).await && c.flush().await);
                if way == "write" {
                    b.tune(0, "cache_mode", "writethrough").await;
                }
                assert!(c.discard(256, 4).await);
                assert_eq!(b.volume(0).dirty_sectors(), Sectors(0));
                assert!(c.read(256, 4).await.is_some());
                // The copy is inserted behind the read.
                b.sleep_ms(200).await;
                assert!(match way {
                    "write" => c.write(256, 4, true).await,
                    _ => c.write_zeroes(200, 200, ZeroFlags { fua: true, ..ZeroFlags::default() }).await,
                });
            });
            scenario.power_loss(retained).judge().happy_end();
        }
    }
}

/// Contract 2: the edges of large zeros are parts of blocks, so they are written; the rest becomes a hole. The edge was
/// overwritten in the place of dirty data, without a key, and the entry that was waited for was that of the hole, which
/// was there before.
#[test]
pub fn durable_zeros_of_a_flash_only_volume_wait_for_their_edges() {
    let layout = Layout { bucket_sectors: 16, block_sectors: 8, ..Layout::small(CacheMode::Writeback) };
    let layout = Layout { backings: Vec::new(), ..layout };
    let mut scenario = Scenario::new(1, layout, 256);
    scenario.boot(|b| async move {
        let mut options = SetOptions::default();
        options.tunables.overwrite_in_place = Overwrite::Always;
        b.open_with(options).await;
        assert!(b.clients[0].write(0, 8, true).await);
        assert!(b.clients[0].write_zeroes(4, 132, ZeroFlags { fua: true, may_unmap: true }).await);
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// A request of this kind fails once in writeback. The client discards the dirty data, reads what the device returns, and fills a leaf,
/// so that its keys are written. Then the power fails.
fn copies_after_a_failure_of_writeback(kind: Kind) {
    for seed in 0..8 {
        let mut layout = Layout::small(CacheMode::Writeback);
        layout.backings[0].discard = false;
        let mut scenario = Scenario::new(seed, layout, 0);
        scenario.boot(move |b| async move {
            b.open().await;
            b.tune(0, "sequential_cutoff", "0").await;
            b.tune(0, "writeback_delay", "1").await;
            b.tune(0, "writeback_percent", "0").await;
            b.clients[0].set_tolerant(true);
            assert!(b.clients[0].write(200, 40, true).await);
            let matching = Matching::all(kind);
            b.backings[0].set_faults(vec![Fault { matching, skip: 0, count: 1 }]);
            b.wait_until(|| b.backings[0].counters().failed > 0).await;
            b.tune(0, "writeback_running", "0").await;
            assert!(b.clients[0].discard(200, 40).await);
            assert!(b.clients[0].read(200, 40).await.is_some());
            // The copies are inserted behind the read.
            b.sleep_ms(200).await;
            for n in 0..100 {
                assert!(b.clients[0].write(n * 2 % 200, 1, n % 10 == 9).await);
            }
        });
        scenario.power_loss(Retained::Nothing).judge().happy_end();
    }
}

/// Writeback writes data, and the flush after it fails. The device loses that data in a power loss, although a later flush succeeds,
/// so no copy of it may be made.
#[test]
pub fn after_a_failed_flush_of_writeback_no_copies_are_made() {
    copies_after_a_failure_of_writeback(Kind::Flush);
}

/// A write by writeback fails and leaves a part of its data on the backing device, which no flush follows. The copy of that part must
/// not outlive it.
#[test]
pub fn a_copy_of_what_a_failed_writeback_has_written_waits_for_a_flush() {
    copies_after_a_failure_of_writeback(Kind::Write);
}
