//! What a failed flush and a failed writeback leave behind: data that the backing device has dropped, which must not come back
//! after a client has read the older data, and data that it has and no flush follows.
#![allow(clippy::unwrap_used)]

use std::future::Future;

use engine::SetOptions;
use format::{CacheMode, Sector, Sectors};
use sim::disk::{Fault, Kind, Matching, Retained};
use sim::hardware::Layout;
use sim::scenario::{Boot, Scenario};

/// A minute: no journal entry is written because of its age.
const NEVER_MS: u16 = 60_000;

/// Settings under which writeback is off, and then begins at once and fills all gaps.
async fn tune(b: &Boot) {
    for (name, value) in [
        ("sequential_cutoff", "0"),
        ("writeback_running", "0"),
        ("writeback_bridge", "always"),
        ("writeback_percent", "0"),
        ("writeback_delay", "0"),
    ] {
        b.tune(0, name, value).await;
    }
}

/// Writes a clean copy between two dirty extents: sectors 8 to 15 of 0 to 23.
async fn copy_in_a_gap(b: &Boot) {
    let c = &b.clients[0];
    b.tune(0, "cache_mode", "writethrough").await;
    assert!(c.write(8, 8, false).await);
    b.tune(0, "cache_mode", "writeback").await;
    assert!(c.write(0, 8, false).await && c.write(16, 8, false).await);
    c.set_tolerant(true);
}

/// The backing device fails a flush and drops all that was not flushed.
async fn drop_in_flush(b: &Boot) {
    b.backings[0].lose_in_flush(0, Retained::Nothing);
    assert!(!b.clients[0].flush().await);
    b.clients[0].oracle.borrow_mut().device_lost();
}

/// A client has read the older data of the gap between two dirty extents. Writeback must not fill the gap with the clean copy of
/// the data that the device has dropped.
#[test]
pub fn writeback_does_not_fill_a_gap_with_data_that_the_device_has_dropped() {
    let mut scenario = Scenario::new(1, Layout::small(CacheMode::Writeback), 0);
    scenario.boot(|b| async move {
        let mut options = SetOptions::default();
        options.tunables.journal_delay_ms = NEVER_MS;
        b.open_with(options).await;
        tune(&b).await;
        copy_in_a_gap(&b).await;
        drop_in_flush(&b).await;
        let first = b.clients[0].read(8, 8).await.unwrap();
        b.tune(0, "writeback_running", "1").await;
        b.sleep_ms(5000).await;
        assert_eq!(first, b.clients[0].read(8, 8).await.unwrap());
    });
}

/// The cache device fails the read of a clean copy, and meanwhile the backing device drops the data in a failed flush. The read
/// from the backing device waits for writeback that still has the dropped data in a gap.
#[test]
fn a_read_in_place_of_a_failed_one_waits_for_writeback() {
    let mut scenario = Scenario::new(1, Layout::small(CacheMode::Writeback), 0);
    scenario.boot(|b| async move {
        let mut options = SetOptions::default();
        options.tunables.journal_delay_ms = NEVER_MS;
        b.open_with(options).await;
        tune(&b).await;
        copy_in_a_gap(&b).await;
        b.backings[0].hold(Matching { kind: Kind::Write, range: 16..40 });
        b.tune(0, "writeback_running", "1").await;
        b.wait_until(|| b.backings[0].held() == 1).await;
        b.cache.hold(Matching::all(Kind::Read));
        b.cache.set_faults(vec![Fault { matching: Matching::all(Kind::Read), skip: 0, count: 1 }]);
        let reader = b.clients[0].clone();
        let reading = b.rt.spawn(async move { reader.read(8, 8).await });
        b.sleep_ms(10).await;
        assert_eq!(b.cache.held(), 1);
        drop_in_flush(&b).await;
        b.cache.release();
        b.sleep_ms(100).await;
        b.backings[0].release();
        let first = reading.await.unwrap();
        b.sleep_ms(5000).await;
        assert_eq!(first, b.clients[0].read(8, 8).await.unwrap());
    });
}

/// The write of a run with gaps fails and leaves a part of its data. Meanwhile a wipe has begun a new read epoch, so the second
/// attempt, without the gaps, is given up without an error. A client discards the dirty data and reads that part; its copy must
/// not become durable before the part.
#[test]
fn a_copy_of_what_a_run_that_was_given_up_has_left_waits_for_a_flush() {
    for seed in 0..8 {
        let mut layout = Layout::small(CacheMode::Writeback);
        layout.backings[0].discard = false;
        let mut scenario = Scenario::new(seed, layout, 0);
        scenario.boot(move |b| async move {
            b.open().await;
            tune(&b).await;
            let c = &b.clients[0];
            c.set_tolerant(true);
            assert!(c.write(200, 20, true).await && c.write(224, 16, true).await);
            let matching = Matching::all(Kind::Write);
            b.backings[0].set_faults(vec![Fault { matching: matching.clone(), skip: 0, count: 1 }]);
            b.backings[0].hold(matching);
            b.tune(0, "writeback_running", "1").await;
            b.wait_until(|| b.backings[0].held() > 0).await;
            b.set().wipe().await.unwrap();
            b.tune(0, "writeback_running", "0").await;
            b.backings[0].release();
            b.sleep_ms(1000).await;
            assert_eq!(b.volume(0).dirty_sectors(), Sectors(36));
            assert!(c.discard(200, 40).await && c.read(200, 40).await.is_some());
            b.sleep_ms(200).await;
            for n in 0..100 {
                assert!(c.write(n * 2 % 200, 1, n % 10 == 9).await);
            }
        });
        scenario.power_loss(Retained::Nothing);
        scenario.judge();
        scenario.happy_end();
    }
}

/// Writeback fails and leaves a part of its data; a client discards the dirty data and reads that part. When the device leaves
/// the set, it is flushed, because a leaf counts copies of a device that has left as durable.
#[test]
pub fn a_release_flushes_what_a_failed_writeback_has_written() {
    for seed in 0..8 {
        let mut layout = Layout::small(CacheMode::Writeback);
        layout.backings[0].discard = false;
        let mut scenario = Scenario::new(seed, layout, 0);
        scenario.boot(move |b| async move {
            b.open().await;
            tune(&b).await;
            let c = &b.clients[0];
            c.set_tolerant(true);
            assert!(c.write(200, 40, true).await);
            let matching = Matching::all(Kind::Write);
            b.backings[0].set_faults(vec![Fault { matching, skip: 0, count: 1 }]);
            b.tune(0, "writeback_delay", "1").await;
            b.tune(0, "writeback_running", "1").await;
            b.wait_until(|| b.backings[0].counters().failed > 0).await;
            b.tune(0, "writeback_running", "0").await;
            assert!(c.discard(200, 40).await && c.read(200, 40).await.is_some());
            b.sleep_ms(200).await;
            b.set().release(&b.volume(0)).await.unwrap();
            b.set().gc().await.unwrap();
        });
        scenario.power_loss(Retained::Nothing);
        scenario.judge();
        scenario.happy_end();
    }
}

/// The first sectors of the leaves that a request of a client reads one after the other.
async fn leaves_that_are_read(b: &Boot, request: impl Future<Output = bool> + 'static) -> Vec<u64> {
    let request = b.rt.spawn(request);
    let mut leaves = Vec::new();
    loop {
        b.cache.hold(Matching::all(Kind::Read));
        b.sleep_ms(100).await;
        let held = held_reads(&b.cache.dump());
        b.cache.release();
        if held.is_empty() {
            assert!(request.await);
            return leaves;
        }
        leaves.extend(held);
    }
}

/// The first sector of each read in the list of requests that is held back.
fn held_reads(dump: &str) -> Vec<u64> {
    let one = |r: &str| r.split_once("read ")?.1.split_once('+')?.0.trim().parse().ok();
    dump.split(", ").filter(|r| r.contains("held")).filter_map(one).collect()
}

/// A read looks up a hole and then waits for another leaf. A change of the hole begins and ends meanwhile. What the read then
/// gets from the backing device may be older, so it must not be inserted.
#[test]
pub fn a_change_while_a_read_looks_its_pieces_up_keeps_the_miss_out_of_the_cache() {
    let mut layout = Layout::small(CacheMode::Writeback);
    layout.backings[0].data_sectors = 32_768;
    layout.nbuckets = 512;
    let mut scenario = Scenario::new(1, layout, 0);
    scenario.boot(|b| async move {
        let mut options = SetOptions::default();
        options.tunables.btree_cache_limit = 1;
        b.open_with(options).await;
        tune(&b).await;
        let c = &b.clients[0];
        for n in 0..500 {
            assert!(c.write(n * 4, 1, false).await);
        }
        assert!(c.flush().await);
        b.sleep_ms(100_000).await;
        assert!(b.set().status().btree_nodes > 3);
        // A read that inserts nothing shows where the leaves are.
        b.tune(0, "cache_mode", "none").await;
        let reader = c.clone();
        let leaves = leaves_that_are_read(&b, async move { reader.read(1, 1200).await.is_some() }).await;
        b.tune(0, "cache_mode", "writeback").await;
        let [first, second, ..] = leaves[..] else { panic!("{leaves:?}") };
        b.sleep_ms(10_000).await;
        b.cache.hold(Matching { kind: Kind::Read, range: second..second + 1 });
        let reader = c.clone();
        let reading = b.rt.spawn(async move { reader.read(1, 1200).await });
        b.sleep_ms(100).await;
        assert_eq!(b.cache.held(), 1, "of {first} and {second}");
        let changer = c.clone();
        let change = b.rt.spawn(async move { changer.discard(1, 1).await });
        b.sleep_ms(200).await;
        assert_eq!(change.try_take(), Some(true), "the change waits");
        b.cache.release();
        assert!(reading.await.is_some());
        b.sleep_ms(1000).await;
        let before = b.backings[0].counters().reads;
        assert!(c.read(1, 1).await.is_some());
        assert_eq!(b.backings[0].counters().reads, before + 1, "the miss was inserted");
    });
}

/// A bset that was written and released its journal entries is gone when the leaf is read again. The keys in it vanished without
/// an error, and reads got what the backing device had.
#[test]
pub fn a_leaf_that_has_lost_a_bset_is_damage() {
    let mut layout = Layout::small(CacheMode::Writeback);
    layout.backings[0].data_sectors = 32_768;
    layout.nbuckets = 512;
    let bucket_sectors = layout.bucket_sectors;
    let mut scenario = Scenario::new(1, layout, 0);
    scenario.boot(move |b| async move {
        let mut options = SetOptions::default();
        options.tunables.btree_cache_limit = 1;
        b.open_with(options).await;
        tune(&b).await;
        b.stay_dirty(0).await;
        let c = &b.clients[0];
        for n in 0..500 {
            assert!(c.write(n * 4, 1, false).await);
        }
        assert!(c.flush().await);
        b.sleep_ms(100_000).await;
        let image = b.cache.image();
        let before = image.read_vec(Sector(0), image.size());
        assert!(c.write(1, 1, false).await && c.flush().await);
        b.sleep_ms(100_000).await;
        let reader = c.clone();
        let leaves = leaves_that_are_read(&b, async move { reader.read(1, 1).await.is_some() }).await;
        let [leaf, _] = leaves[..] else { panic!("{leaves:?}") };
        let bytes = |sector: u64| (sector * 512) as usize;
        b.cache.put(Sector(leaf), &before[bytes(leaf)..bytes(leaf + bucket_sectors)]);
        b.sleep_ms(10_000).await;
        c.set_tolerant(true);
        assert_eq!(c.read(1, 1).await, None, "the dirty data is not replaced by that of the device");
        let failure = b.set().failure().expect("the set is disabled").to_string();
        assert!(failure.contains("expected bsets in"), "{failure}");
    });
}
