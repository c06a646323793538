//! Callers that are dropped while the engine works for them: a flush, or a detach that the operator cancels.
#![allow(clippy::unwrap_used)]

use std::pin::pin;

use engine::figures::VolumeFigures;
use engine::{CacheSet, SetOptions};
use format::{CacheMode, Sectors};
use io::Nanos;
use io::sync::{Either, select};
use sim::disk::{Retained, Speed};
use sim::hardware::Layout;
use sim::scenario::{Boot, Scenario};

/// Slow enough for everything else to come first.
const SLOW: Nanos = Nanos::from_secs(20);

/// Everything is written back, and the caller no longer waits when the superblock is on its way that says so.
async fn give_up_when_clean_is_on_its_way(b: &Boot) {
    b.open().await;
    b.tune(0, "sequential_cutoff", "0").await;
    b.tune(0, "writeback_delay", "0").await;
    assert!(b.clients[0].write(0, 8, true).await);
    b.tune(0, "writeback_running", "0").await;
    b.backings[0].set_speed(Speed { base: SLOW, ..Speed::even(0) });
    let volume = b.volume(0);
    let drained = pin!(volume.drained());
    // The data takes as long, then a flush, then the superblock.
    assert!(matches!(select(drained, b.rt.sleep(Nanos(SLOW.0 * 5 / 2))).await, Either::Right(())));
}

/// A write that came next made the superblock say dirty, in a write that overtook the one that said clean: the device
/// was clean in the end with dirty data in the cache.
#[test]
pub fn the_update_of_a_superblock_is_not_overtaken() {
    for seed in 0..8 {
        let mut scenario = Scenario::new(seed, Layout::small(CacheMode::Writeback), 0);
        scenario.boot(|b| async move {
            give_up_when_clean_is_on_its_way(&b).await;
            b.backings[0].set_speed(Speed::even(10));
            let began = b.rt.now();
            assert!(b.clients[0].write(64, 8, true).await);
            assert!(b.rt.now().since(began) < SLOW, "the scenario is about a write that comes meanwhile");
            b.rt.sleep(SLOW).await;
        });
        scenario.power_loss(Retained::Everything).judge().happy_end();
    }
}

/// A command that was given up half way left the lock to the next one while its write was under way.
#[test]
fn a_command_goes_on_when_its_caller_does_not_wait() {
    async fn label(b: &Boot, label: &str, wait: Nanos) {
        let volume = b.volume(0);
        drop(select(pin!(volume.set("label", label)), b.rt.sleep(wait)).await);
    }
    let mut scenario = Scenario::new(1, Layout::small(CacheMode::Writeback), 0);
    scenario.boot_and_stop(|b| async move {
        b.open().await;
        b.cache.set_speed(Speed { base: SLOW, ..Speed::even(0) });
        label(&b, "first", Nanos(SLOW.0 / 2)).await;
        let set: CacheSet = b.set();
        drop(select(pin!(set.set("cache_replacement_policy", "fifo")), b.rt.sleep(Nanos(SLOW.0 / 2))).await);
        b.cache.set_speed(Speed::even(10));
        label(&b, "second", Nanos(SLOW.0 * 100)).await;
        set.set("cache_replacement_policy", "random").await.unwrap();
        assert_eq!(set.get("cache_replacement_policy").unwrap(), "lru fifo [random]");
        b.stop().await;
    });
    scenario.boot(|b| async move {
        b.open().await;
        assert_eq!(b.set().get("cache_replacement_policy").unwrap(), "lru fifo [random]");
        assert_eq!(b.volume(0).get("label").unwrap(), "second");
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// A volume without a cache was stopped although its device could not be flushed, and no command reported the error.
#[test]
fn a_stop_says_that_the_device_was_not_flushed() {
    let mut scenario = Scenario::new(1, Layout::small(CacheMode::None), 0);
    scenario.boot(|b| async move {
        b.open().await;
        b.set().detach(&b.volume(0)).await.unwrap();
        assert!(b.clients[0].write(0, 8, false).await);
        b.backings[0].lose_in_flush(0, Retained::Nothing);
        let said = b.set().release(&b.volume(0)).await.unwrap_err().to_string();
        assert!(said.contains("flush"), "{said}");
        b.clients[0].loss_reported();
    });
    scenario.power_loss(Retained::Nothing).judge();
}

/// A walk of the index runs to its end without its caller, so it leaves no leaf busy. Requests would wait for a busy leaf, and in
/// the end all of them, because the journal fills.
#[test]
fn a_walk_goes_on_when_its_caller_does_not_wait() {
    for cut_us in [10, 100, 500, 1000, 3000, 10_000] {
        let layout = Layout { nbuckets: 1024, ..Layout::small(CacheMode::Writeback) };
        let mut scenario = Scenario::new(3, layout, 0);
        scenario.boot_and_stop(move |b| async move {
            b.open().await;
            b.stay_dirty(0).await;
            for n in 0..600 {
                assert!(b.clients[0].write(n * 3, 1, false).await);
            }
            let set = b.set();
            set.set("gc_always_rewrite", "1").await.unwrap();
            assert!(set.status().btree_nodes > 3, "{} nodes", set.status().btree_nodes);
            let wait = b.rt.sleep(Nanos(cut_us * 1000));
            drop(select(pin!(set.gc()), wait).await);
            for n in 0..600 {
                assert!(b.clients[0].write(n * 3 + 1, 1, true).await);
            }
            set.gc().await.unwrap();
            b.stop().await;
        });
        scenario.judge().happy_end();
    }
}

/// The stop of a set ended at the first device that could not be flushed: what was written to others stayed in memory.
#[test]
fn a_device_that_cannot_be_flushed_keeps_nothing_of_others_from_being_durable() {
    let mut layout = Layout::small(CacheMode::Writeback);
    let second = layout.backings[0].clone();
    layout.backings.push(second);
    let mut scenario = Scenario::new(1, layout, 0);
    scenario.boot(|b| async move {
        let mut options = SetOptions::default();
        options.tunables.journal_delay_ms = 60_000;
        b.open_with(options).await;
        b.tune(0, "cache_mode", "writethrough").await;
        for i in [0, 1] {
            b.stay_dirty(i).await;
        }
        assert!(b.clients[1].write(0, 1, true).await, "the device is dirty now");
        assert!(b.clients[0].write(0, 8, false).await && b.clients[1].write(64, 8, false).await);
        b.backings[0].lose_in_flush(0, Retained::Nothing);
        assert!(b.set().stop().await.is_err());
        b.clients[0].loss_reported();
        b.clients[1].oracle.borrow_mut().stopped();
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// Two operators detach a volume, and one of them gives up. The other one's volume took dirty data again, and under load it was
/// never drained.
#[test]
fn one_of_two_detaches_is_given_up() {
    let mut scenario = Scenario::new(2, Layout::small(CacheMode::Writeback), 0);
    scenario.boot_and_stop(|b| async move {
        b.open().await;
        b.tune(0, "sequential_cutoff", "0").await;
        let volume = b.volume(0);
        let first = b.set().begin_detach(&volume).await.unwrap();
        let second = b.set().begin_detach(&volume).await.unwrap();
        drop(first);
        assert!(VolumeFigures::of(&volume).detaching);
        assert!(b.clients[0].write(0, 8, false).await);
        assert_eq!(volume.dirty_sectors(), Sectors::ZERO);
        drop(second);
        assert!(!VolumeFigures::of(&volume).detaching);
        b.stop().await;
    });
    scenario.judge().happy_end();
}

/// Two operators delete a volume, and a third one creates one. The slot was that of the new volume when the second deletion came
/// to its turn, and the new volume was deleted.
#[test]
fn a_volume_is_deleted_once() {
    let mut scenario = Scenario::new(3, Layout::small(CacheMode::Writeback), 256);
    scenario.boot(|b| async move {
        b.open().await;
        let set = b.set();
        let inode = b.volume(1).inode().unwrap();
        b.clients[1].set_volume(None);
        let deletions = [(); 2].map(|()| {
            let set = set.clone();
            b.rt.spawn(async move { set.delete_volume(inode).await })
        });
        let mut ended = Vec::new();
        for deletion in deletions {
            ended.push(deletion.await.is_ok());
        }
        assert_eq!(ended, [true, false]);
    });
}
