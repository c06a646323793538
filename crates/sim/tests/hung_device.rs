//! A backing device that answers nothing, beside a healthy one in the same set: the set's journal, leaves and table of
//! devices are shared, but no request and no command waits for a device that it does not need (contract 13).
#![allow(clippy::unwrap_used)]

use engine::SetOptions;
use format::{CacheMode, Sectors};
use sim::disk::{Kind, Matching, Retained};
use sim::hardware::Layout;
use sim::scenario::{Boot, Scenario};

/// The device that hangs, and the healthy device.
const HUNG: usize = 0;
const HEALTHY: usize = 1;

/// What a request of the healthy device may take at most, in milliseconds of virtual time: a late flush is waited for
/// 500 ms while requests need room in the journal.
const LONGEST_MS: u64 = 2000;

async fn open(b: &Boot) {
    b.open_with(SetOptions::default()).await;
    for i in [HUNG, HEALTHY] {
        b.tune(i, "sequential_cutoff", "0").await;
    }
}

/// Writes until the ring of the journal has been used several times over.
async fn write_until_the_ring_wrapped(b: &Boot) {
    for n in 0..6000u64 {
        let began = b.rt.now();
        assert!(b.clients[HEALTHY].write(n * 37 % 1024, 1, n % 3 == 0).await);
        let took_ms = b.rt.now().since(began).0 / 1_000_000;
        assert!(took_ms <= LONGEST_MS, "write {n} took {took_ms} ms");
    }
}

/// The leaf has clean copies of a device that does not answer the flush that they wait for, and holds the oldest entry of the
/// journal. Writes to the other device must not fill the journal.
#[test]
pub fn a_flush_that_hangs_does_not_fill_the_journal() {
    for retained in [Retained::Nothing, Retained::Everything, Retained::Some(3)] {
        let mut scenario = Scenario::new(3, Layout::pair(), 0);
        scenario.boot(|b| async move {
            open(&b).await;
            b.tune(HUNG, "cache_mode", "writethrough").await;
            b.backings[HUNG].hold(Matching::all(Kind::Flush));
            for n in 0..64 {
                assert!(b.clients[HUNG].write(n * 8, 4, false).await);
            }
            write_until_the_ring_wrapped(&b).await;
            // Writes past the cache need no flush of their own.
            assert!(b.clients[HUNG].write(0, 64, false).await);
            assert!(b.clients[HUNG].read(0, 128).await.is_some());
        });
        scenario.power_loss(retained).judge().happy_end();
    }
}

/// A device with dirty data hangs while that data is written back: it can be overwritten and flushed all the same.
#[test]
pub fn dirty_data_is_written_and_flushed_while_its_device_hangs() {
    for only_flushes in [false, true] {
        let mut scenario = Scenario::new(5, Layout::pair(), 0);
        scenario.boot(move |b| async move {
            open(&b).await;
            b.tune(HUNG, "writeback_percent", "0").await;
            b.tune(HUNG, "writeback_delay", "0").await;
            assert!(b.clients[HUNG].write(0, 64, true).await);
            b.backings[HUNG].hang_after(0, only_flushes);
            b.wait_until(|| b.backings[HUNG].held() > 0).await;
            for n in 0..400 {
                let began = b.rt.now();
                assert!(b.clients[HUNG].write(n * 8 % 64, 8, n % 3 == 0).await);
                assert!(n % 5 > 0 || b.clients[HUNG].flush().await);
                let took_ms = b.rt.now().since(began).0 / 1_000_000;
                assert!(took_ms <= LONGEST_MS, "write {n} took {took_ms} ms");
            }
        });
        scenario.power_loss(Retained::Nothing).judge().happy_end();
    }
}

/// After the late flush has ended, copies of the device are inserted and written again.
#[test]
fn a_device_that_answers_late_is_cached_again() {
    let mut scenario = Scenario::new(4, Layout::pair(), 0);
    scenario.boot(|b| async move {
        open(&b).await;
        b.tune(HUNG, "cache_mode", "writethrough").await;
        b.backings[HUNG].hold(Matching::all(Kind::Flush));
        assert!(b.clients[HUNG].write(0, 64, false).await);
        write_until_the_ring_wrapped(&b).await;
        b.backings[HUNG].release();
        b.sleep_ms(100).await;
        let before = b.set().status().cached_sectors;
        assert!(b.clients[HUNG].write(512, 64, false).await);
        // Old enough for the leaf to be written, with the copies.
        b.sleep_ms(90_000).await;
        assert!(b.set().status().cached_sectors > before);
        assert!(b.clients[HEALTHY].flush().await);
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// A walk that replaces the leaf waits for the flush as a write of the leaf does, and then continues without the copies.
#[test]
fn a_leaf_is_replaced_without_copies_of_a_device_that_hangs() {
    let mut scenario = Scenario::new(8, Layout::pair(), 0);
    scenario.boot(|b| async move {
        open(&b).await;
        b.tune(HUNG, "cache_mode", "writethrough").await;
        b.set().set("gc_always_rewrite", "1").await.unwrap();
        b.backings[HUNG].hold(Matching::all(Kind::Flush));
        assert!(b.clients[HUNG].write(0, 64, false).await);
        assert!(b.set().status().cached_sectors > Sectors::ZERO);
        b.set().gc().await.unwrap();
        assert_eq!(b.set().status().cached_sectors, Sectors::ZERO);
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// The flush of a device is late. Until it ends, no other leaf and no other write of the leaf waits for the device again.
#[test]
fn a_device_that_is_late_is_not_waited_for_again() {
    let mut scenario = Scenario::new(8, Layout::pair(), 0);
    scenario.boot(|b| async move {
        open(&b).await;
        b.tune(HUNG, "cache_mode", "writethrough").await;
        b.set().set("gc_always_rewrite", "1").await.unwrap();
        b.backings[HUNG].hold(Matching::all(Kind::Flush));
        for round in 0..3 {
            assert!(b.clients[HUNG].write(64 * round, 64, false).await);
            assert!(b.set().status().cached_sectors > Sectors::ZERO);
            let began = b.rt.now();
            b.set().gc().await.unwrap();
            assert_eq!(b.set().status().cached_sectors, Sectors::ZERO);
            let took_ms = b.rt.now().since(began).0 / 1_000_000;
            assert!(round == 0 || took_ms < 1000, "walk {round} took {took_ms} ms");
        }
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// A leaf that no request waits for is written after the flush of its device, also if that takes a second, and keeps its copies.
#[test]
fn a_slow_flush_costs_no_copies() {
    let mut scenario = Scenario::new(7, Layout::pair(), 0);
    scenario.boot(|b| async move {
        open(&b).await;
        b.tune(HUNG, "cache_mode", "writethrough").await;
        assert!(b.clients[HUNG].write(0, 64, false).await);
        b.volume(HUNG).take_events();
        let copies = b.set().status().cached_sectors;
        assert!(copies > Sectors::ZERO);
        b.backings[HUNG].hold(Matching::all(Kind::Flush));
        let set = b.set();
        let walk = b.rt.spawn(async move { set.gc().await });
        b.sleep_ms(1000).await;
        assert!(b.backings[HUNG].held() > 0, "the leaf waits for the flush");
        b.backings[HUNG].release();
        walk.await.unwrap();
        assert_eq!(b.set().status().cached_sectors, copies);
        assert!(b.volume(HUNG).take_events().is_empty());
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// The leaf waits for a flush while copies arrive, more of them than a leaf may hold: they wait for the leaf to be written,
/// the reads that brought them do not.
#[test]
fn copies_wait_for_a_full_leaf_and_reads_do_not() {
    let mut layout = Layout::small(CacheMode::Writethrough);
    layout.nbuckets = 2048;
    layout.backings[0].data_sectors = 16384;
    let mut scenario = Scenario::new(9, layout, 0);
    scenario.boot(|b| async move {
        b.open().await;
        b.tune(0, "sequential_cutoff", "0").await;
        let c = &b.clients[0];
        assert!(c.write(0, 8, false).await);
        b.backings[0].hold(Matching::all(Kind::Flush));
        let began = b.rt.now();
        for n in 0..500 {
            assert!(c.read(16 + n * 24, 8).await.is_some());
        }
        assert!(b.rt.now().since(began).0 / 1_000_000 <= LONGEST_MS);
        // The keys of two nodes' worth of extents are as many as a leaf has in memory.
        let copies = b.set().status().cached_sectors;
        assert!((Sectors(300 * 8)..Sectors(400 * 8)).contains(&copies), "{copies}");
        // The flush is late: the leaf is written without the copies, and there is room for others.
        b.sleep_ms(30_000).await;
        b.backings[0].release();
        b.sleep_ms(1000).await;
        let before = b.set().status().cached_sectors;
        assert!(c.read(16_000, 8).await.is_some());
        b.sleep_ms(1000).await;
        assert_eq!(b.set().status().cached_sectors, before + Sectors(8));
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// A detach that waits for a hung write of its own volume holds no lock that another attach or detach needs.
#[test]
fn a_detach_that_hangs_holds_up_no_other_device() {
    let mut scenario = Scenario::new(5, Layout::pair(), 0);
    scenario.boot(|b| async move {
        open(&b).await;
        b.tune(HUNG, "cache_mode", "none").await;
        b.backings[HUNG].hold(Matching::all(Kind::Write));
        b.write_beside(HUNG, 100, 8, false);
        b.sleep_ms(10).await;
        let (set, hung) = (b.set(), b.volume(HUNG));
        b.rt.spawn(async move { set.detach(&hung).await });
        b.sleep_ms(10).await;
        assert!(b.clients[HEALTHY].write(0, 8, true).await);
        let began = b.rt.now();
        b.tune(HEALTHY, "label", "other").await;
        b.set().detach(&b.volume(HEALTHY)).await.unwrap();
        assert!(b.clients[HEALTHY].write(0, 8, true).await);
        assert!(b.rt.now().since(began).0 / 1_000_000 <= LONGEST_MS);
    });
    scenario.power_loss(Retained::Nothing);
}

/// Requests of a device that is being detached do not wait for the table of devices, which the cache device has: from the
/// superblock on, the device has no cache.
#[test]
fn a_cache_device_that_hangs_holds_up_no_request_of_a_detached_device() {
    let mut scenario = Scenario::new(8, Layout::pair(), 0);
    scenario.boot(|b| async move {
        open(&b).await;
        b.tune(HEALTHY, "cache_mode", "writethrough").await;
        assert!(b.clients[HEALTHY].write(0, 8, true).await);
        b.cache.hold(Matching::all(Kind::DurableWrite));
        let (set, volume) = (b.set(), b.volume(HEALTHY));
        let detach = b.rt.spawn(async move { set.detach(&volume).await });
        b.sleep_ms(100).await;
        assert!(b.cache.held() > 0 && b.volume(HEALTHY).inode().is_none(), "the table is being written");
        let began = b.rt.now();
        assert!(b.clients[HEALTHY].write(8, 8, true).await && b.clients[HEALTHY].read(0, 16).await.is_some());
        assert!(b.rt.now().since(began).0 / 1_000_000 <= LONGEST_MS);
        b.cache.release();
        detach.await.unwrap();
    });
    scenario.power_loss(Retained::Nothing);
}

/// Attaching a device that hangs holds up neither requests nor a detach of others.
#[test]
fn an_attach_that_hangs_holds_up_no_other_device() {
    let mut scenario = Scenario::new(6, Layout::pair(), 0);
    scenario.boot(|b| async move {
        open(&b).await;
        b.set().detach(&b.volume(HUNG)).await.unwrap();
        b.backings[HUNG].hold(Matching::all(Kind::DurableWrite));
        let (set, hung) = (b.set(), b.parts.backings[HUNG].clone());
        b.rt.spawn(async move { set.register(hung).await.map(drop) });
        b.sleep_ms(10).await;
        let twice = b.set().register(b.parts.backings[HUNG].clone()).await.map(drop).unwrap_err();
        assert!(twice.to_string().contains("is being attached"), "{twice}");
        let began = b.rt.now();
        assert!(b.clients[HEALTHY].write(0, 8, true).await);
        b.set().detach(&b.volume(HEALTHY)).await.unwrap();
        assert!(b.rt.now().since(began).0 / 1_000_000 <= LONGEST_MS);
    });
    scenario.power_loss(Retained::Nothing);
}
