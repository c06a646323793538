//! Background work: writeback, garbage, stripes.

use std::rc::Rc;

use engine::Volume;
use format::{BackingState, CacheMode, Sectors};
use sim::hardware::Layout;
use sim::world::Order;

use crate::stage::{boot, new_hardware, play};

/// Limit 17. Dirty keys of a device that was taken away for good keep their place in the kernel's cache for ever: a
/// cache filled up with data of disks that were long sold. Here they go with the next walk of the index, and stay
/// away.
#[test]
fn d17_dirty_data_of_an_invalid_slot_is_freed() {
    let hardware = new_hardware(5, Layout::small(CacheMode::Writeback));
    let (mut m, b) = boot(&hardware, Order::Fifo);
    let theirs = b.clone();
    m.block_on(async move {
        let b = theirs;
        b.tune("writeback_running", "0").await;
        b.tune("sequential_cutoff", "0").await;
        b.write(0, 256, 1).await;
        b.flush().await;
        b.v.stop().await.unwrap();
        b.set.stop().await.unwrap();
        // The operator gives the dirty data up: the device runs alone from now on.
        let disk = io::Disk::new(b.backing(), b.rt.clone());
        let alone: Rc<Volume> = Volume::pass_through(disk, true).await.unwrap();
        assert_eq!(alone.state(), Some(BackingState::Stale));
        alone.stop().await.unwrap();
    });
    drop(m);
    b.end();
    for _ in 0..2 {
        let (mut m, b) = boot(&hardware, Order::Fifo);
        let theirs = b.clone();
        m.block_on(async move {
            let b = theirs;
            assert_eq!(b.versions(0, 256).await, [0; 256], "given up");
            b.set.gc().await.unwrap();
            b.set.gc().await.unwrap();
            assert_eq!(b.set.status().dirty, vec![]);
            assert!(
                b.set.status().cached_sectors <= Sectors(256),
                "what the reads brought in is all there is"
            );
            b.v.stop().await.unwrap();
            b.set.stop().await.unwrap();
        });
        drop(m);
        b.end();
    }
}

/// Limit 20. When the kernel's writeback has gone through a device it rests for `writeback_delay`, whatever happens
/// meanwhile: "dirty" stayed for half a minute after the last block, and a device was not let go. Here it is clean
/// when the last block is, and data that becomes dirty then waits for its own delay only.
#[test]
fn d20_clean_at_once_and_new_dirty_data_waits_for_one_delay() {
    play(Layout::small(CacheMode::Writeback), |b| async move {
        b.tune("writeback_delay", "10").await;
        b.tune("writeback_percent", "0").await;
        for version in 1..4 {
            let began = b.rt.now();
            b.write(100, 8, version).await;
            assert_eq!(b.v.state(), Some(BackingState::Dirty));
            b.sleep_ms(9_000).await;
            assert!(b.v.dirty_sectors() > Sectors(0), "the delay is kept");
            while b.v.dirty_sectors() > Sectors(0) {
                b.sleep_ms(10).await;
            }
            let written = b.rt.now().since(began).as_ms();
            assert!(
                (10_000..11_000).contains(&written),
                "version {version}: written back after {written} ms"
            );
            b.sleep_ms(500).await;
            assert_eq!(b.v.state(), Some(BackingState::Clean), "version {version}");
        }
    });
}

/// Defect 21. The kernel takes positions inside stripes with a mask although stripes are what the RAID says, and
/// forgets where the data begins: a RAID 5 of three data disks had its stripes counted wrong. Here a write joins
/// the dirty data of exactly its own stripe.
#[test]
fn d21_stripes_of_any_size_are_told_apart() {
    let mut layout = Layout::small(CacheMode::Writeback);
    let (stripe, offset) = (3 * 2816, 16);
    layout.backings[0].data_sectors = 2 * stripe + 100;
    layout.backings[0].stripe_bytes = stripe as u32 * 512;
    play(layout, move |b| async move {
        let dirty = |b: &crate::stage::Boot| b.v.dirty_sectors().0;
        b.tune("writeback_running", "0").await;
        b.tune("sequential_cutoff", "0").await;
        let border = stripe - offset;
        let end = 2 * stripe + 100;
        b.write(border, 8, 1).await;
        b.write(end - 8, 8, 1).await;
        assert_eq!(dirty(&b), 16);
        // Long writes go past the cache, except into a stripe that is partly dirty.
        b.tune("admission", "kernel").await;
        b.tune("sequential_cutoff", "4096").await;
        b.write(border - 64, 64, 2).await;
        assert_eq!(dirty(&b), 16, "the stripe before the border has nothing dirty");
        b.write(2 * stripe - offset - 64, 64, 2).await;
        assert_eq!(dirty(&b), 80, "the far end of the second stripe");
        b.write(2 * stripe - offset, 64, 2).await;
        assert_eq!(dirty(&b), 144, "the stripe at the end of the device");
        b.v.drained().await.unwrap();
        assert_eq!(dirty(&b), 0);
    });
}

/// A RAID 5 that gets a part of a stripe reads the rest to compute the parity. The kernel writes back full stripes
/// first, as far as it can find them (docs/compat.md, item 21); here they come first although the other dirty data lies before
/// them, and a stripe that becomes full during a sweep is not missed.
#[test]
fn d21_full_stripes_are_written_back_first() {
    let mut layout = Layout::small(CacheMode::Writeback);
    let (stripe, offset) = (3 * 2816, 16);
    layout.nbuckets = 4096;
    layout.backings[0].data_sectors = 3 * stripe;
    layout.backings[0].stripe_bytes = stripe as u32 * 512;
    play(layout, move |b| async move {
        b.tune("writeback_running", "0").await;
        b.tune("sequential_cutoff", "0").await;
        b.tune("writeback_percent", "0").await;
        b.tune("writeback_delay", "0").await;
        b.write(0, 64, 1).await;
        let fill = async |nr: u64, version| {
            for i in 0..stripe / 64 {
                b.write(nr * stripe - offset + i * 64, 64, version).await;
            }
        };
        fill(1, 1).await;
        assert_eq!(b.v.dirty_sectors(), Sectors(stripe + 64));
        // Both ways: the stripe is dirty when the walk begins, and becomes dirty later.
        for version in 1..3 {
            b.tune("writeback_running", "1").await;
            while b.v.dirty_sectors() > Sectors(64) {
                b.rt.sleep(io::Nanos(50_000)).await;
            }
            assert_eq!(b.v.dirty_sectors(), Sectors(64), "version {version}: the part of a stripe is last");
            b.v.drained().await.unwrap();
            b.tune("writeback_running", "0").await;
            b.write(0, 64, version + 1).await;
            fill(1, version + 1).await;
        }
    });
}

/// Defect 25. With `gc_always_rewrite` the kernel's garbage collection rewrites the root, starts over because the
/// root has changed, and never ends. Here a walk rewrites each leaf once.
#[test]
fn d25_a_walk_that_rewrites_everything_ends() {
    let mut layout = Layout::small(CacheMode::Writeback);
    layout.nbuckets = 1024;
    play(layout, |b| async move {
        b.tune("writeback_running", "0").await;
        b.tune("sequential_cutoff", "0").await;
        // Every second sector: nothing joins, so there are several leaves.
        for i in 0..512 {
            b.write(i * 2, 1, 1).await;
        }
        b.flush().await;
        b.tune_set("gc_always_rewrite", "1").await;
        let (before, nodes) = (b.set.counters(), b.set.status().btree_nodes as u64);
        b.set.gc().await.unwrap();
        let after = b.set.counters();
        assert_eq!(after.gc_runs, before.gc_runs + 1);
        let rewrites = after.btree_rewrites - before.btree_rewrites;
        assert!((1..=2 * nodes).contains(&rewrites), "{rewrites} rewrites of {nodes} nodes");
        assert!(after.prio_writes - before.prio_writes <= 4, "{before:?} {after:?}");
        assert_eq!(b.versions(0, 1024).await, [1, 0].repeat(512));
    });
}
