//! Dirty data in two sets (decision 037): after a crash or the loss of a set at any moment, each set that the devices name as one with
//! all dirty data has what the clients may expect, alone with the backing device.
#![allow(clippy::unwrap_used)]

use engine::{Resolution, SetOptions};
use format::{CacheMode, Sector, Sectors};
use inspect::{Mode, PieceKind, SetView};
use sim::crash::{every_crash, every_outcome};
use sim::damaged_data::flip_on;
use sim::disk::{Kind, Matching, Retained};
use sim::group::Present;
use sim::hardware::Layout;
use sim::scenario::{Boot, Scenario};
use sim::stamp::{Content, SECTOR, decode};

fn scenario(seed: u64) -> Scenario {
    Scenario::with_second(seed, Layout::small(CacheMode::Writeback))
}

/// Makes a copy in the second set, which is empty yet.
async fn copied(b: Boot) {
    b.open_both().await;
    b.make_copy(0).await.unwrap();
    b.stop().await;
}

async fn write_back(b: &Boot) {
    b.tune(0, "writeback_percent", "0").await;
    b.tune(0, "writeback_running", "1").await;
}

/// Loses one of the cache devices at each of its requests. No client sees an error, and nothing is lost that was flushed: not if the power
/// fails then, and not if the lost device returns.
fn loss_at_every_request(first: bool) {
    let mut after = 0;
    loop {
        let mut scenario = scenario(after);
        scenario.boot_and_stop(copied).boot(|b| async move {
            b.open_both().await;
            b.lose(first, after);
            requests(&b).await;
            b.read_all(0).await;
            assert!(b.clients[0].write(500, 8, true).await);
            assert!(b.clients[0].flush().await);
        });
        let second = scenario.hardware.second.clone().unwrap();
        let has_failed = if first { scenario.hardware.cache.is_failing() } else { second.is_failing() };
        let outcome = [Retained::Nothing, Retained::Everything][after as usize / 2 % 2];
        scenario.power_loss(outcome).judge().happy_end();
        if !has_failed {
            break;
        }
        after += 1;
    }
    assert!(after > 50, "{after}");
}

#[test]
fn the_second_set_is_lost_at_any_request() {
    loss_at_every_request(false);
}

#[test]
fn the_first_set_is_lost_at_any_request() {
    loss_at_every_request(true);
}

/// The power fails at any moment after one of the cache devices was lost.
#[test]
fn a_crash_at_any_moment_after_a_loss() {
    let mut crashes = 0;
    for after in 0..12 {
        let script = move |b: Boot| async move {
            b.open_both().await;
            b.lose(after % 3 == 0, after * 5);
            requests(&b).await;
        };
        crashes += every_crash(after, || scenario(after), copied, script, 3);
    }
    assert!(crashes > 300, "{crashes}");
}

/// The power fails at any moment while the copy is made, beside writes.
#[test]
fn a_crash_at_any_moment_of_a_copy() {
    let dirty = |b: Boot| async move {
        b.open_group(Present::First, SetOptions::default()).await;
        b.stay_dirty(0).await;
        let c = &b.clients[0];
        assert!(c.write(0, 64, false).await && c.write(200, 8, false).await && c.write(600, 64, false).await);
        b.stop().await;
    };
    let script = |b: Boot| async move {
        b.open_both().await;
        let beside =
            [(32, 64), (190, 30), (590, 90)].map(|(at, sectors)| b.write_beside(0, at, sectors, at == 190));
        b.make_copy(0).await.unwrap();
        for write in beside {
            assert!(write.await);
        }
        assert!(b.clients[0].write(40, 8, true).await);
        b.stop().await;
    };
    for seed in 0..4 {
        let crashes = every_crash(seed, || scenario(seed), dirty, script, 1);
        assert!(crashes > 30, "{crashes}");
    }
}

/// The second set takes over at a start, because the first one is gone. The power fails at any moment of it.
#[test]
fn a_crash_at_any_moment_of_a_start_without_the_first_set() {
    let dirty = |b: Boot| async move {
        b.open_both().await;
        b.make_copy(0).await.unwrap();
        let c = &b.clients[0];
        assert!(c.write(0, 64, true).await && c.write(32, 64, false).await && c.write(600, 8, true).await);
        b.stop().await;
    };
    let script = |b: Boot| async move {
        b.open_group(Present::Second, SetOptions::default()).await;
        b.read_all(0).await;
        assert!(b.clients[0].write(40, 8, true).await);
        b.volume(0).drained().await.unwrap();
        b.stop().await;
    };
    let crashes = every_crash(3, || scenario(3), dirty, script, 1);
    assert!(crashes > 10, "{crashes}");
}

/// What was flushed is in both sets.
#[test]
fn each_set_alone_has_what_was_flushed() {
    let mut scenario = scenario(1);
    scenario.boot_and_stop(copied).boot(|b| async move {
        b.open_both().await;
        let c = &b.clients[0];
        assert!(c.write(0, 16, false).await && c.write(100, 40, false).await && c.write(8, 16, false).await);
        assert!(c.flush().await);
        assert!(c.write(300, 8, true).await);
    });
    scenario.power_loss(Retained::Nothing).judge();
    for cache in [&scenario.hardware.cache, scenario.hardware.second.as_ref().unwrap()] {
        let view = SetView::open(&cache.image(), Mode::Strict).unwrap();
        let dirty = view.pieces().filter(|(_, _, kind)| *kind == PieceKind::Dirty);
        assert_eq!(dirty.map(|(_, piece, _)| piece.len.0).sum::<u64>(), 24 + 40 + 8);
    }
    scenario.happy_end();
}

/// Two sets that share dirty data are stopped in any order, also during writes. A stop of the set with the copies alone waited for ever for
/// the journal of the other one.
#[test]
fn two_sets_are_stopped_in_any_order() {
    for (seed, in_order) in [(1, true), (2, false)] {
        let mut scenario = scenario(seed);
        scenario.boot_and_stop(copied).boot_and_stop(move |b| async move {
            b.open_both().await;
            b.clients[0].set_tolerant(true);
            let beside =
                [(0, 64), (200, 200), (32, 64)].map(|(at, sectors)| b.write_beside(0, at, sectors, true));
            b.stop_sets(in_order).await;
            for write in beside {
                write.await;
            }
        });
        scenario.judge().happy_end();
    }
}

/// A set is lost, and a backing device that cannot record that. A volume with another backing device waits only until the set that remains
/// has recorded it: the journal of that set waited for ever.
#[test]
fn a_failed_backing_device_does_not_stop_the_journal_of_the_remaining_set() {
    for (seed, first) in [(1, true), (2, false)] {
        let mut scenario = Scenario::with_second(seed, Layout::pair());
        scenario.boot_and_stop(|b| async move {
            b.open_both().await;
            b.make_copy(0).await.unwrap();
            b.make_copy(1).await.unwrap();
            b.stop().await;
        });
        scenario.boot(move |b| async move {
            b.open_both().await;
            b.clients.iter().for_each(|c| c.set_tolerant(true));
            // The lost set will not have these keys durably.
            assert!(b.clients[0].write(0, 8, false).await && b.clients[1].write(0, 8, false).await);
            b.backings[1].die_after(0);
            b.lose(first, 0);
            for i in 0..20 {
                assert!(b.clients[0].write(i * 8, 8, true).await && b.clients[0].flush().await);
            }
            assert!(!b.clients[1].write(64, 8, true).await);
        });
        scenario.power_loss(Retained::Nothing).judge().happy_end();
    }
}

/// A volume goes to its second set while a batch of writeback is under way, and a client overwrites a block of the batch before the batch
/// ends. The end of the batch dropped the new data from the second set.
#[test]
fn a_batch_of_writeback_outlasts_no_change_of_the_set() {
    let mut scenario = scenario(5);
    scenario.boot_and_stop(copied).boot(|b| async move {
        b.open_both().await;
        assert!(b.clients[0].write(0, 8, true).await);
        let disk = b.backings[0].clone();
        disk.hold(Matching { kind: Kind::Write, range: 16..4096 });
        write_back(&b).await;
        b.wait_until(|| disk.held() > 0).await;
        let (set, _) = b.sets_of(&b.volume(0));
        let (set, volume) = (set.clone(), b.volume(0));
        let handed = b.rt.spawn(async move { set.hand_over(&volume).await });
        // The client does not wait for the batch.
        b.sleep_ms(50).await;
        assert!(b.clients[0].write(0, 8, true).await);
        disk.release();
        handed.await.unwrap();
        b.read_all(0).await;
        assert!(b.clients[0].flush().await);
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// Both copies of dirty data are damaged, and the operator accepts or drops it. That holds for both sets: the second one alone has the
/// accepted data, and does not have the dropped data.
#[test]
fn a_decision_about_damaged_data_holds_for_both_sets() {
    for (seed, how) in [(1, Resolution::Accepted), (2, Resolution::Dropped)] {
        let mut scenario = Scenario::with_second(seed, Layout::with_checksums(CacheMode::Writeback));
        scenario.boot_and_stop(copied).boot(move |b| async move {
            b.open_both().await;
            b.clients[0].set_tolerant(true);
            assert!(b.clients[0].write(100, 50, true).await);
            let (set, _) = b.sets_of(&b.volume(0));
            for disk in [&b.cache, b.second.as_ref().unwrap()] {
                assert_eq!(flip_on(disk, 110..113), 3);
            }
            assert_eq!(set.scrub().await.unwrap().damaged_dirty_blocks, 3);
            assert_eq!(set.resolve_damaged(None, None, how).await.unwrap(), Sectors(3));
            b.lose(true, 0);
            // The loss is noticed by the next write.
            assert!(b.clients[0].write(300, 8, true).await);
            for at in 110..113 {
                let buffer = b.rt.pool().take(SECTOR);
                let (buffer, result) = b.volume(0).read(Sector(at), Sectors(1), buffer, 0).await;
                let found = decode(buffer.as_slice());
                // Accepted data has the flipped bit. Dropped data is gone, so the read returns the older data of the backing device.
                let is_old = matches!(found, Content::Data { write: 0, .. });
                assert!(result.is_ok(), "{at}: {result:?}");
                assert_eq!(is_old, how == Resolution::Dropped, "{at}: {found:?}");
            }
            assert!(b.clients[0].write(110, 3, true).await);
        });
        scenario.power_loss(Retained::Nothing).judge().happy_end();
    }
}

/// Writes, overwrites, direct writes, discards and writeback.
async fn requests(b: &Boot) {
    let c = b.clients[0].clone();
    for (at, sectors, fua) in [(0, 8, false), (16, 24, true), (4, 8, false), (200, 64, false), (20, 8, true)]
    {
        assert!(c.write(at, sectors, fua).await);
    }
    assert!(c.flush().await);
    assert!(c.discard(16, 16).await);
    b.tune(0, "cache_mode", "writethrough").await;
    assert!(c.write(0, 16, false).await && c.write(400, 16, true).await);
    b.tune(0, "cache_mode", "writeback").await;
    assert!(c.write(200, 32, false).await && c.write(400, 8, false).await);
    assert!(c.flush().await);
    write_back(b).await;
    let beside = b.write_beside(0, 216, 8, true);
    drained(b).await;
    assert!(beside.await);
    assert!(c.write(216, 8, false).await && c.write(0, 8, true).await);
    drained(b).await;
}

/// Waits until nothing is dirty. A drain ends with an error when the set fails; the other set goes on then.
async fn drained(b: &Boot) {
    let mut drained = b.volume(0).drained().await;
    for _ in 0..3 {
        if drained.is_ok() {
            return;
        }
        b.sleep_ms(10).await;
        drained = b.volume(0).drained().await;
    }
    drained.unwrap();
}

async fn mixed(b: Boot) {
    b.open_both().await;
    requests(&b).await;
    b.stop().await;
}

#[test]
fn each_set_alone_is_right_after_a_crash_at_any_moment() {
    for seed in 0..2 {
        let crashes = every_crash(seed, || scenario(seed), copied, mixed, 1);
        assert!(crashes > 100, "{crashes}");
    }
}

/// Every subset of what is not durable, on both cache devices and the backing device.
#[test]
fn each_set_alone_is_right_with_any_outcome_of_a_crash() {
    let script = |b: Boot| async move {
        b.open_both().await;
        let c = b.clients[0].clone();
        assert!(c.write(0, 8, true).await && c.write(0, 8, false).await);
        write_back(&b).await;
        b.volume(0).drained().await.unwrap();
        assert!(c.write(0, 8, false).await && c.flush().await);
        b.stop().await;
    };
    let tried = every_outcome(|| scenario(7), copied, script, 3);
    assert!(tried.outcomes > 30, "{tried:?}");
}
