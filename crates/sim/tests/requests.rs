//! Waits and costs of requests, for bugs that change nothing else.
#![allow(clippy::unwrap_used)]

use std::pin::pin;

use engine::figures::{RateReason, VolumeFigures};
use engine::tunables::Overwrite;
use engine::{SetEvent, SetOptions, VolumeRef};
use format::{CacheMode, Sector, Sectors};
use io::sync::{Either, select};
use io::{BlockVolume, Nanos, WriteFlags, ZeroFlags};
use sim::disk::{Fault, Kind, Matching, Retained, Speed};
use sim::hardware::Layout;
use sim::scenario::{Boot, Scenario};

const MINUTE: Nanos = Nanos::from_secs(60);

/// Waits for something that has nothing more to wait for.
async fn soon<T>(b: &Boot, what: &str, wait: impl Future<Output = T>) -> T {
    match select(pin!(wait), b.rt.sleep(MINUTE)).await {
        Either::Left(done) => done,
        Either::Right(()) => panic!("{what} is not done after a minute"),
    }
}

/// The last of the requests ends the wait of the stop.
#[test]
fn a_stop_waits_for_requests_under_way_and_no_longer() {
    let mut scenario = Scenario::new(1, Layout::small(CacheMode::Writeback), 0);
    scenario.boot(|b| async move {
        b.open().await;
        b.backings[0].hold(Matching::all(Kind::Read));
        let (first, second) = (b.clients[0].clone(), b.clients[0].clone());
        let first = b.rt.spawn(async move { first.read(0, 8).await });
        let second = b.rt.spawn(async move { second.read(64, 8).await });
        b.sleep_ms(10).await;
        let volume = b.volume(0);
        let stop = b.rt.spawn(async move { volume.stop().await });
        b.sleep_ms(10).await;
        assert!(stop.try_take().is_none(), "two reads are under way");
        b.backings[0].release();
        soon(&b, "the stop", stop).await.unwrap();
        assert!(first.await.is_some() && second.await.is_some());
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// The leaf with a copy is written behind a flush of the device, which fails: the copy is given up, and no more are made.
#[test]
fn a_device_that_failed_a_flush_gets_no_more_copies() {
    let mut scenario = Scenario::new(1, Layout::small(CacheMode::Writethrough), 0);
    scenario.boot(|b| async move {
        b.open().await;
        b.tune(0, "sequential_cutoff", "0").await;
        assert!(b.clients[0].write(0, 16, false).await);
        assert_eq!(b.set().status().cached_sectors, Sectors(16));
        let faults = vec![Fault { matching: Matching::all(Kind::Flush), skip: 0, count: 1 }];
        b.backings[0].set_faults(faults);
        b.set().gc().await.unwrap();
        assert_eq!(b.set().status().cached_sectors, Sectors::ZERO, "the flush failed");
        assert!(b.clients[0].read(0, 16).await.is_some() && b.clients[0].write(64, 16, false).await);
        b.sleep_ms(100).await;
        assert_eq!(b.set().status().cached_sectors, Sectors::ZERO, "nobody knows what the device has");
    });
    scenario.power_loss(Retained::Everything);
}

/// A map of more buckets than are looked at in one turn.
#[test]
fn a_map_of_many_buckets_has_them_all() {
    let mut layout = Layout::small(CacheMode::Writethrough);
    layout.nbuckets = 70_000;
    let mut scenario = Scenario::new(1, layout, 0);
    scenario.boot(|b| async move {
        b.open().await;
        for cells in [1, 3, 100] {
            let map = b.set().bucket_map(cells).await;
            assert_eq!((map.total, map.cells.len()), (70_000, cells as usize));
        }
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// Only leaves that were read from the device counted: the index of a set that is filled by writes, which reads none, grew
/// without a bound.
#[test]
fn an_index_that_grows_by_writes_stays_in_its_memory() {
    const LIMIT_BYTES: u64 = 8192;
    let layout = Layout { nbuckets: 1024, ..Layout::small(CacheMode::Writeback) };
    let mut scenario = Scenario::new(12, layout, 0);
    scenario.boot(|b| async move {
        let mut options = SetOptions::default();
        options.tunables.btree_cache_limit = LIMIT_BYTES;
        b.open_with(options).await;
        b.stay_dirty(0).await;
        let mut most = 0;
        for n in 0..700 {
            assert!(b.clients[0].write(n * 2, 1, false).await);
            b.sleep_ms(20).await;
            most = most.max(b.set().status().index_bytes as u64);
        }
        // Beside what fits: the leaf that is in use, and two that have taken its place.
        let one_leaf = 2 * (128 * 16 + 64);
        assert!(most <= LIMIT_BYTES + 3 * one_leaf, "{most} bytes");
        assert_eq!(b.volume(0).dirty_sectors(), Sectors(700));
        b.read_all(0).await;
        assert!(b.set().counters().btree_reads > 0);
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// The memory of holes that were written counted for ever: leaves went from memory too early, in the end at once.
#[test]
fn holes_that_are_written_take_no_memory() {
    let mut scenario = Scenario::new(19, Layout::small(CacheMode::Writeback), 0);
    scenario.boot(|b| async move {
        b.open().await;
        b.stay_dirty(0).await;
        for _ in 0..5 {
            assert!(b.clients[0].write(0, 8, false).await);
            assert!(b.clients[0].discard(0, 8).await);
            // Old enough for the leaf to be written.
            b.sleep_ms(60_000).await;
            assert_eq!(b.set().status().index_bytes, 0);
        }
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// What exports tell their clients about a volume.
#[test]
fn an_export_is_told_what_the_volume_is() {
    let mut layout = Layout::small(CacheMode::Writeback);
    layout.backings[0].block_sectors = 8;
    layout.backings[0].stripe_bytes = 1 << 16;
    let size = layout.backings[0].data_sectors;
    let mut scenario = Scenario::new(1, layout, 1024);
    scenario.boot(move |b| async move {
        b.open().await;
        b.volume(0).set_name("first");
        let (cached, flash) = (VolumeRef(b.volume(0)), VolumeRef(b.volume(1)));
        assert_eq!((cached.name().as_str(), flash.name().as_str()), ("first", "flash"));
        assert_eq!((cached.sectors(), flash.sectors()), (Sectors(size), Sectors(1024)));
        assert_eq!((cached.logical_block_bytes(), flash.logical_block_bytes()), (4096, 512));
        assert_eq!((cached.physical_block_bytes(), flash.physical_block_bytes()), (4096, 512));
        assert_eq!((cached.optimal_io_bytes(), flash.optimal_io_bytes()), (1 << 16, 0));
        assert!(!cached.read_only() && !flash.read_only());
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// Writes that come while a device is being detached go past the cache: else there would always be something to write back.
#[test]
fn a_detach_takes_no_new_dirty_data() {
    let mut scenario = Scenario::new(2, Layout::small(CacheMode::Writeback), 0);
    scenario.boot(|b| async move {
        b.open().await;
        b.stay_dirty(0).await;
        assert!(b.clients[0].write(0, 8, false).await);
        b.backings[0].hold(Matching { kind: Kind::Write, range: 16..24 });
        let (set, volume) = (b.set(), b.volume(0));
        let detach = b.rt.spawn(async move { set.detach(&volume).await });
        b.sleep_ms(10).await;
        assert_eq!(VolumeFigures::of(&b.volume(0)).writeback.rate_reason, RateReason::Detaching);
        assert!(b.clients[0].write(64, 8, false).await);
        assert_eq!(b.volume(0).dirty_sectors(), Sectors(8), "only what was dirty before");
        b.backings[0].release();
        soon(&b, "the detach", detach).await.unwrap();
    });
    scenario.power_loss(Retained::Nothing).judge();
}

/// Of zeros over whole blocks nothing is written; those at the edges are written once, also where what is there is
/// overwritten in its place.
#[test]
fn zeros_over_a_volume_write_the_edges_once() {
    for overwrite in [Overwrite::Off, Overwrite::Always] {
        let mut layout = Layout::small(CacheMode::Writeback);
        layout.bucket_sectors = 128;
        (layout.block_sectors, layout.backings[0].block_sectors) = (8, 8);
        let mut scenario = Scenario::new(3, layout, 1024);
        scenario.boot(move |b| async move {
            let mut options = SetOptions::default();
            options.tunables.overwrite_in_place = overwrite;
            b.open_with(options).await;
            let volume = &b.clients[1];
            for (start, sectors, edges) in [(128, 256, 0), (130, 256, 2), (130, 254, 1), (128, 257, 1)] {
                assert!(volume.write(0, 512, false).await);
                let before = b.set().set_counters().written;
                assert!(volume.write_zeroes(start, sectors, ZeroFlags::default()).await);
                let written = b.set().set_counters().written - before;
                assert_eq!(written, Sectors(edges * 8), "{sectors} zeros at {start}");
            }
        });
        scenario.power_loss(Retained::Everything).judge().happy_end();
    }
}

/// On a device with large blocks, too, dirty data is overwritten where it is.
#[test]
fn dirty_data_is_overwritten_in_place_whatever_the_blocks() {
    for logical_block_bytes in [512, 4096] {
        let mut layout = Layout::small(CacheMode::Writeback);
        layout.bucket_sectors = 64;
        (layout.block_sectors, layout.backings[0].block_sectors) = (8, 8);
        layout.logical_block_bytes = logical_block_bytes;
        let mut scenario = Scenario::new(4, layout, 0);
        scenario.boot(|b| async move {
            let mut options = SetOptions::default();
            options.tunables.overwrite_in_place = Overwrite::Always;
            b.open_with(options).await;
            b.tune(0, "writeback_running", "0").await;
            for (start, sectors) in [(0, 8), (16, 24)] {
                for _ in 0..2 {
                    assert!(b.clients[0].write(start, sectors, false).await);
                }
            }
            assert_eq!(b.set().counters().overwrites, 2);
        });
        scenario.power_loss(Retained::Nothing).judge().happy_end();
    }
}

/// What is read from the cache is copied to another bucket only if its own is about to be reused.
#[test]
fn a_hit_copies_nothing_while_there_is_room() {
    let mut scenario = Scenario::new(5, Layout::small(CacheMode::Writeback), 0);
    scenario.boot(|b| async move {
        b.open().await;
        assert!(b.clients[0].write(64, 8, false).await && b.clients[0].read(0, 8).await.is_some());
        b.sleep_ms(100).await;
        let before = b.set().set_counters().written;
        for (start, sectors) in [(0, 8), (64, 8), (2, 2), (0, 4)] {
            assert!(b.clients[0].read(start, sectors).await.is_some());
        }
        b.sleep_ms(100).await;
        let hits = b.volume(0).with_stats(|s| s.view(engine::stats::View::Total).cache_hits);
        assert_eq!((hits, b.set().counters().promoted_extents), (4, 0));
        assert_eq!(b.set().set_counters().written, before);
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// Errors reach the operator, and commands wait for events without polling.
#[test]
fn errors_are_counted_and_events_are_waited_for() {
    let mut scenario = Scenario::new(6, Layout::small(CacheMode::Writeback), 0);
    scenario.boot(|b| async move {
        b.open().await;
        let (set, volume) = (b.set(), b.volume(0));
        drop((set.take_events(), volume.take_events()));
        let (of_set, of_volume) = (pin!(set.events_arrived()), pin!(volume.events_arrived()));
        let any = pin!(select(of_set, of_volume));
        assert!(matches!(select(any, b.rt.sleep(MINUTE)).await, Either::Right(())), "nothing happened");
        assert!(b.clients[0].write(64, 8, false).await);
        soon(&b, "the message of dirty data", set.events_arrived()).await;
        let dirty = |e: &SetEvent| matches!(e, SetEvent::State { state: "dirty", .. });
        assert!(set.take_events().iter().any(dirty));

        b.clients[0].set_tolerant(true);
        b.backings[0].set_faults(vec![Fault { matching: Matching::all(Kind::Read), skip: 0, count: 3 }]);
        for n in 0..3 {
            assert!(b.clients[0].read(n * 8, 8).await.is_none());
        }
        soon(&b, "the message of an error", volume.events_arrived()).await;
        assert_eq!((volume.io_errors(), VolumeFigures::of(&volume).io_errors), (3, 3));

        assert!(set.set_counters().written > Sectors::ZERO);
        set.clear_device_stats();
        assert_eq!(set.set_counters().written, Sectors::ZERO);
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// The operator learns that the set is disabled, and that its clean device works without the cache.
#[test]
fn the_failure_of_a_set_and_its_effect_on_a_clean_device_are_events() {
    let mut scenario = Scenario::new(9, Layout::small(CacheMode::Writethrough), 0);
    scenario.boot(|b| async move {
        b.open().await;
        assert!(b.clients[0].write(64, 8, true).await);
        drop(b.set().take_events());
        b.cache.set_faults(vec![Fault { matching: Matching::all(Kind::DurableWrite), skip: 0, count: 1 }]);
        assert!(b.set().set("cache_replacement_policy", "fifo").await.is_err());
        assert!(b.clients[0].read(64, 8).await.is_some());
        let events = b.set().take_events();
        assert_eq!(events.iter().filter(|e| matches!(e, SetEvent::Failed { .. })).count(), 1, "{events:?}");
        let stale = |e: &&SetEvent| matches!(e, SetEvent::State { state: "inconsistent", .. });
        assert_eq!(events.iter().filter(stale).count(), 1, "{events:?}");
    });
    scenario.power_loss(Retained::Nothing);
}

/// A request of two pieces: one that the cache fails to read, and one that it does not have. The backing device fails both.
#[test]
fn an_error_of_a_read_in_place_of_the_cache_counts_for_the_backing_device() {
    let mut scenario = Scenario::new(8, Layout::small(CacheMode::Writeback), 0);
    scenario.boot(|b| async move {
        b.open().await;
        b.tune(0, "sequential_cutoff", "0").await;
        assert!(b.clients[0].read(0, 8).await.is_some());
        b.sleep_ms(100).await;
        assert_eq!(b.set().status().cached_sectors, Sectors(8));
        b.clients[0].set_tolerant(true);
        b.cache.set_faults(vec![Fault { matching: Matching::all(Kind::Read), skip: 0, count: 1 }]);
        b.backings[0].set_faults(vec![Fault { matching: Matching::all(Kind::Read), skip: 0, count: 2 }]);
        assert!(b.clients[0].read(0, 16).await.is_none());
        assert_eq!(b.volume(0).io_errors(), 2);
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// Zeros that the device does not write count as an error of the device, with its cache and without it.
#[test]
fn an_error_of_zeros_counts_for_the_backing_device() {
    let mut scenario = Scenario::new(18, Layout::small(CacheMode::Writethrough), 0);
    scenario.boot(|b| async move {
        b.open().await;
        b.clients[0].set_tolerant(true);
        let fault = || vec![Fault { matching: Matching::all(Kind::Write), skip: 0, count: 1 }];
        b.backings[0].set_faults(fault());
        assert!(!b.clients[0].write_zeroes(0, 16, ZeroFlags::default()).await);
        assert_eq!(b.volume(0).io_errors(), 1);
        b.stop().await;
        let alone = engine::Volume::pass_through(b.parts.backings[0].clone(), false).await.unwrap();
        b.clients[0].set_volume(Some(alone.clone()));
        b.backings[0].set_faults(fault());
        assert!(!b.clients[0].write_zeroes(0, 16, ZeroFlags::default()).await);
        assert_eq!(alone.io_errors(), 1);
        alone.stop().await.unwrap();
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// Data that was read is inserted after the reply: at most 128 inserts at a time. Further reads are answered without an insert.
#[test]
fn so_many_misses_are_cached_at_a_time() {
    let mut scenario = Scenario::new(7, Layout::small(CacheMode::Writeback), 0);
    scenario.boot(|b| async move {
        b.open().await;
        b.tune(0, "sequential_cutoff", "0").await;
        b.cache.hold(Matching::all(Kind::Write));
        for n in 0..150 {
            assert!(b.clients[0].read(n * 8, 1).await.is_some());
        }
        b.sleep_ms(10).await;
        assert_eq!(b.cache.held(), 128);
        b.cache.release();
        b.sleep_ms(10).await;
        assert!(b.clients[0].read(1300, 1).await.is_some());
        b.sleep_ms(10).await;
        assert_eq!(b.set().status().cached_sectors, Sectors(129), "there is room for more again");
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// A request for a volume that is being deleted is waited for; one that comes later fails, and changes nothing.
#[test]
fn a_deleted_volume_takes_no_requests() {
    let mut scenario = Scenario::new(8, Layout::small(CacheMode::Writeback), 256);
    scenario.boot(|b| async move {
        b.open().await;
        let (set, volume) = (b.set(), b.volume(1));
        b.cache.hold(Matching::all(Kind::Write));
        let write = b.write_beside(1, 0, 8, false);
        b.sleep_ms(10).await;
        let inode = volume.inode().unwrap();
        let deleting = b.rt.spawn(async move { set.delete_volume(inode).await });
        b.sleep_ms(10).await;
        assert!(deleting.try_take().is_none(), "a write is under way");
        b.cache.release();
        assert!(soon(&b, "the write", write).await);
        soon(&b, "the deletion", deleting).await.unwrap();
        let buffer = b.rt.pool().zeroed(512);
        let late = volume.write(Sector(0), Sectors(1), buffer, 0, WriteFlags::default()).await;
        assert!(late.is_err(), "the volume is gone");
        assert_eq!(b.set().status().dirty, vec![]);
    });
    scenario.power_loss(Retained::Nothing);
}

/// Mode and label are in the superblock. A write of it that fails leaves what was there before, on the disk and in memory.
#[test]
fn a_mode_that_cannot_be_stored_is_not_set() {
    let mut scenario = Scenario::new(1, Layout::small(CacheMode::Writeback), 0);
    scenario.boot(|b| async move {
        b.open().await;
        let volume = b.volume(0);
        for (name, value) in [("cache_mode", "writearound"), ("label", "other")] {
            let before = volume.tunables();
            let faults = vec![Fault { matching: Matching::all(Kind::DurableWrite), skip: 0, count: 1 }];
            b.backings[0].set_faults(faults);
            assert!(volume.set(name, value).await.is_err(), "{name}: the superblock cannot be written");
            assert_eq!(volume.tunables().cache_mode, before.cache_mode);
            assert_eq!(volume.tunables().label, before.label);
            volume.set(name, value).await.unwrap();
        }
        assert_eq!(volume.tunables().cache_mode, CacheMode::Writearound);
        assert_eq!(volume.tunables().label, "other");
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// A detach that fails changes nothing: what is written afterwards is dirty data again.
#[test]
fn a_volume_goes_on_after_a_detach_that_failed() {
    let mut scenario = Scenario::new(13, Layout::small(CacheMode::Writeback), 0);
    scenario.boot(|b| async move {
        b.open().await;
        b.stay_dirty(0).await;
        assert!(b.clients[0].write(0, 8, false).await);
        let all = Fault { matching: Matching::all(Kind::Write), skip: 0, count: u32::MAX };
        b.backings[0].set_faults(vec![all]);
        assert!(b.set().detach(&b.volume(0)).await.is_err());
        b.backings[0].set_faults(Vec::new());
        assert!(b.clients[0].write(64, 8, false).await);
        assert_eq!(b.volume(0).dirty_sectors(), Sectors(16));
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// A walk of the index is asked for when nothing of a device is dirty any more, in a cache that is half full.
#[test]
fn a_walk_follows_writeback_where_that_is_wanted() {
    for (wanted, flash_sectors, walks) in [("1", 1280, 1), ("0", 1280, 0), ("1", 256, 0)] {
        let mut scenario = Scenario::new(14, Layout::small(CacheMode::Writeback), flash_sectors);
        scenario.boot(move |b| async move {
            b.open().await;
            b.set().set("gc_after_writeback", wanted).await.unwrap();
            for n in 0..flash_sectors / 64 {
                assert!(b.clients[1].write(n * 64, 64, false).await);
            }
            let before = b.set().counters().gc_runs;
            assert!(b.clients[0].write(0, 8, false).await);
            b.volume(0).drained().await.unwrap();
            b.sleep_ms(1000).await;
            assert_eq!(b.set().counters().gc_runs - before, walks, "{wanted} {flash_sectors}");
        });
        scenario.power_loss(Retained::Nothing).judge().happy_end();
    }
}

/// Reads are not the only ones that a slow cache device holds up.
#[test]
fn writes_that_are_late_count_as_congestion() {
    let mut scenario = Scenario::new(15, Layout::small(CacheMode::Writeback), 0);
    scenario.boot(|b| async move {
        b.open().await;
        b.tune(0, "sequential_cutoff", "0").await;
        b.tune(0, "admission", "kernel").await;
        let mut congested = Vec::new();
        for micros in [50, 60_000] {
            b.cache.set_speed(Speed::even(micros));
            for n in 0..8 {
                assert!(b.clients[0].write(n * 16, 8, false).await);
            }
            congested.push(b.set().figures().congested);
        }
        assert_ne!(congested[0], congested[1]);
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// A stop writes every leaf that has something unwritten: sixteen at a time.
#[test]
fn leaves_are_written_sixteen_at_a_time() {
    let mut layout = Layout { nbuckets: 2048, ..Layout::small(CacheMode::Writeback) };
    layout.backings[0].data_sectors = 16384;
    let mut scenario = Scenario::new(16, layout, 0);
    scenario.boot(|b| async move {
        let mut options = SetOptions::default();
        options.tunables.overwrite_in_place = Overwrite::Off;
        b.open_with(options).await;
        b.stay_dirty(0).await;
        for n in 0..3000 {
            assert!(b.clients[0].write(n * 4, 1, false).await);
        }
        assert!(b.set().status().btree_nodes > 20);
        b.sleep_ms(120_000).await;
        for n in (0..3000).step_by(25) {
            assert!(b.clients[0].write(n * 4, 1, false).await);
        }
        assert!(b.clients[0].flush().await);
        b.clients[0].pause().await;
        b.volume(0).stop().await.unwrap();
        // Behind the journal.
        b.cache.hold(Matching { kind: Kind::DurableWrite, range: 256..u64::MAX });
        let set = b.set();
        let stopping = b.rt.spawn(async move { set.stop().await });
        b.sleep_ms(1000).await;
        assert_eq!(b.cache.held(), 16);
        b.cache.release();
        stopping.await.unwrap();
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// A device that is served alone ends with its last whole block.
#[test]
fn a_device_without_its_cache_has_whole_blocks() {
    let mut layout = Layout::small(CacheMode::Writeback);
    layout.backings[0].data_sectors = 2046;
    layout.backings[0].block_sectors = 8;
    let mut scenario = Scenario::new(17, layout, 0);
    scenario.boot(|b| async move {
        let volume = engine::Volume::pass_through(b.parts.backings[0].clone(), false).await.unwrap();
        assert_eq!(volume.size(), Sectors(2040));
        volume.stop().await.unwrap();
    });
}

/// A bucket that is used for the 257th time has the generation that it had at first; that is counted.
#[test]
fn generations_go_around() {
    let layout = Layout { nbuckets: 128, ..Layout::small(CacheMode::Writethrough) };
    let mut scenario = Scenario::new(18, layout, 0);
    scenario.boot(|b| async move {
        b.open().await;
        b.tune(0, "sequential_cutoff", "0").await;
        let mut reads = 0;
        while b.set().counters().gen_wraps == 0 && reads < 60_000 {
            assert!(b.clients[0].read(reads * 8 % 2040, 8).await.is_some());
            reads += 1;
        }
        assert!((10_000..60_000).contains(&reads), "{reads} reads");
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}
