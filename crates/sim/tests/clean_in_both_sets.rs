//! Clean data of a volume with two sets is spread over both (decision 037): also after a crash or a loss at any moment, a clean copy in
//! either set equals the backing device.
#![allow(clippy::unwrap_used)]

use engine::SetOptions;
use engine::stats::View;
use format::CacheMode;
use inspect::{Mode, PieceKind, SetView};
use sim::crash::every_crash;
use sim::disk::{Kind, Matching, Retained, SimDisk};
use sim::group::Present;
use sim::hardware::Layout;
use sim::scenario::{Boot, Scenario};

/// The part of the volume that the tests use: 32 parts of a bucket each.
const HOT: u64 = 256;

fn scenario(seed: u64) -> Scenario {
    Scenario::with_second(seed, Layout::small(CacheMode::Writeback))
}

fn scenario_with_checksums(seed: u64) -> Scenario {
    Scenario::with_second(seed, Layout::with_checksums(CacheMode::Writeback))
}

/// Makes a copy, and has clean data in both sets: half of it was read, half was written back.
async fn warm(b: Boot) {
    b.open_both().await;
    b.make_copy(0).await.unwrap();
    let c = b.clients[0].clone();
    b.tune(0, "cache_mode", "writearound").await;
    assert!(c.write(0, HOT, true).await);
    b.tune(0, "cache_mode", "writeback").await;
    b.tune(0, "sequential_cutoff", "0").await;
    assert!(c.write(0, HOT / 2, false).await);
    b.volume(0).drained().await.unwrap();
    b.read_all(0).await;
    b.stop().await;
}

fn clean_sectors(disk: &SimDisk) -> u64 {
    let view = SetView::open(&disk.image(), Mode::Strict).unwrap();
    let clean = view.pieces().filter(|(_, piece, kind)| *kind == PieceKind::Clean && piece.ptr.is_some());
    clean.map(|(_, piece, _)| piece.len.0).sum()
}

/// Each set has about half of the clean data, no block is in both, and reads need the backing device no more. The same holds after a clean
/// stop, and each set alone with the devices is right.
#[test]
fn each_set_has_its_part() {
    for make in [scenario, scenario_with_checksums] {
        let mut scenario = make(1);
        scenario.boot_and_stop(warm);
        scenario.judge();
        let second = scenario.hardware.second.clone().unwrap();
        let (one, two) = (clean_sectors(&scenario.hardware.cache), clean_sectors(&second));
        let all = 2048;
        assert_eq!(one + two, all, "{one} and {two}");
        assert!(one > all / 4 && two > all / 4, "{one} and {two}");
        scenario.boot_and_stop(|b| async move {
            b.open_both().await;
            let disk = b.backings[0].clone();
            disk.hold(Matching { kind: Kind::Read, range: 16..4096 });
            // No read waits for the backing device.
            b.read_all(0).await;
            assert_eq!(disk.held(), 0);
            disk.release();
            b.stop().await;
        });
        scenario.judge().happy_end();
    }
}

/// Overwrites, direct writes, discards and writeback over clean data of both sets.
async fn changes(b: Boot) {
    b.open_both().await;
    let c = b.clients[0].clone();
    b.tune(0, "sequential_cutoff", "0").await;
    b.stay_dirty(0).await;
    assert!(c.write(0, 48, false).await && c.write(64, 16, true).await);
    b.tune(0, "cache_mode", "writethrough").await;
    assert!(c.write(72, 40, false).await && c.write(16, 8, true).await);
    b.tune(0, "cache_mode", "writeback").await;
    assert!(c.discard(120, 24).await && c.read(96, 64).await.is_some());
    assert!(c.write(160, 48, false).await);
    b.tune(0, "writeback_running", "1").await;
    b.volume(0).drained().await.unwrap();
    b.tune(0, "cache_mode", "writearound").await;
    assert!(c.write(160, 24, false).await && c.write(8, 32, true).await);
    assert!(c.read(0, HOT).await.is_some() && c.flush().await);
    b.stop().await;
}

/// Each set alone is right after a crash at any moment.
#[test]
fn a_crash_at_any_moment_beside_clean_data_in_both_sets() {
    for make in [scenario, scenario_with_checksums] {
        let crashes = every_crash(3, || make(3), warm, changes, 2);
        assert!(crashes > 60, "{crashes}");
    }
}

/// Dirty data is written back over older clean data of the second set. A crash at any moment brings the older data back in no set.
#[test]
pub fn a_crash_at_any_moment_of_writeback_over_clean_data() {
    let script = |b: Boot| async move {
        b.open_both().await;
        // Writeback begins before the keys are journaled for another reason.
        b.tune(0, "writeback_delay", "0").await;
        b.tune(0, "writeback_percent", "0").await;
        for at in [0, 40, 16, 100] {
            assert!(b.clients[0].write(at, 24, false).await);
            b.volume(0).drained().await.unwrap();
        }
        b.stop().await;
    };
    assert!(every_crash(0, || scenario(0), warm, script, 1) > 10);
}

/// Data is read while the copy of a volume is being made, and overwritten where the copy has not got to. The second set keeps no data that
/// was read before, because it does not get the later write.
#[test]
pub fn an_incomplete_copy_has_no_clean_data() {
    let mut scenario = Scenario::with_second(4, Layout::sized(CacheMode::Writeback, 256, 8192));
    scenario.boot(|b| async move {
        b.open_both().await;
        let c = b.clients[0].clone();
        b.tune(0, "sequential_cutoff", "0").await;
        b.stay_dirty(0).await;
        assert!(c.write(0, 8, true).await);
        // The copy of the first chunk, of 2048 sectors, waits.
        let place = b.place_of(0).0;
        b.cache.hold(Matching { kind: Kind::Read, range: place..place + 8 });
        let theirs = b.clone();
        let copying = b.rt.spawn(async move { theirs.make_copy(0).await });
        b.wait_until(|| b.cache.held() > 0).await;
        assert!(c.read(5000, HOT).await.is_some());
        b.sleep_ms(100).await;
        assert!(c.write(5000, HOT, true).await);
        b.tune(0, "writeback_delay", "0").await;
        b.tune(0, "writeback_percent", "0").await;
        b.tune(0, "writeback_running", "1").await;
        b.wait_until(|| b.volume(0).dirty_sectors().0 == 8).await;
        b.cache.release();
        copying.await.unwrap();
        b.volume(0).drained().await.unwrap();
        b.read_all(0).await;
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// The second set is lost at each of its requests, or the first one, while clean data is read from both. No client sees an error.
#[test]
fn a_set_is_lost_at_any_request_of_reads() {
    for first in [true, false] {
        let (mut after, mut failed) = (0, true);
        while failed {
            let mut scenario = scenario(after);
            scenario.boot_and_stop(warm).boot(|b| async move {
                b.open_both().await;
                b.lose(first, after);
                for at in [0, 128, 64, 512] {
                    assert!(b.clients[0].read(at, HOT).await.is_some());
                }
                assert!(b.clients[0].write(20, 40, true).await);
                b.read_all(0).await;
            });
            let second = scenario.hardware.second.clone().unwrap();
            failed = if first { scenario.hardware.cache.is_failing() } else { second.is_failing() };
            scenario.power_loss(Retained::Some(2)).judge().happy_end();
            after += 3;
        }
        assert!(after > 30, "{after}");
    }
}

/// The set that takes over has its part of the clean data still.
#[test]
fn a_set_that_takes_over_keeps_its_clean_data() {
    let mut scenario = scenario(6);
    scenario.boot_and_stop(warm).boot(|b| async move {
        b.open_both().await;
        b.lose(true, 0);
        assert!(b.clients[0].write(1000, 8, true).await);
        let read = |b: &Boot| b.volume(0).with_stats(|s| s.view(View::Total).cache_hits);
        let before = read(&b);
        for at in (0..HOT).step_by(8) {
            assert!(b.clients[0].read(at, 8).await.is_some());
        }
        let hits = read(&b) - before;
        assert!(hits > HOT / 8 / 4, "{hits} hits of {}", HOT / 8);
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// At a start without the first set, the second one has no clean data of a device that is clean: a kernel may have changed the device through
/// the first set, and leaves no trace of it.
#[test]
pub fn a_start_without_the_first_set_trusts_no_clean_data() {
    let mut scenario = scenario(7);
    scenario.boot_and_stop(warm).boot(|b| async move {
        b.open_group(Present::Second, SetOptions::default()).await;
        for at in (0..HOT).step_by(8) {
            assert!(b.clients[0].read(at, 8).await.is_some());
        }
        assert_eq!(b.volume(0).with_stats(|s| s.view(View::Total).cache_hits), 0);
        assert!(b.clients[0].write(0, 16, true).await);
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// The second set keeps nothing of a volume that is detached: its slot stayed, and `wipe` took the data for needed.
#[test]
fn a_detach_leaves_no_data_in_the_second_set() {
    let mut scenario = scenario(8);
    scenario.boot_and_stop(warm).boot_and_stop(|b| async move {
        b.open_both().await;
        let (first, _) = b.sets_of(&b.volume(0));
        first.detach(&b.volume(0)).await.unwrap();
        b.stop_sets(true).await;
    });
    let second = scenario.hardware.second.clone().unwrap();
    let view = SetView::open(&second.image(), Mode::Strict).unwrap();
    assert_eq!(view.slots.values().filter(|slot| slot.is_backing()).count(), 0);
}
