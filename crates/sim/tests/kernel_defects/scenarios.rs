//! The same defects as scenarios of the simulator: the oracle watches every request and judges what data must survive. The
//! other modules cut the power themselves. An item is the number of semantics section 18. Every test fails with the kernel's
//! behaviour.

use format::{BackingState, CacheMode, Sector, Sectors};
use io::ZeroFlags;
use sim::disk::{Fault, Kind, Matching, Retained, Speed};
use sim::hardware::Layout;
use sim::image::Image;
use sim::scenario::{Boot, Scenario};
use sim::stamp::Content;

const RETAINED: [Retained; 4] =
    [Retained::Nothing, Retained::Everything, Retained::Some(2), Retained::Some(6)];
const MODES: [&str; 3] = ["writethrough", "writearound", "none"];

fn writes() -> Matching {
    // Behind the superblock.
    Matching { kind: Kind::Write, range: 16..u64::MAX }
}

fn superblock() -> Matching {
    Matching { kind: Kind::DurableWrite, range: 8..16 }
}

/// State in the superblock of a backing device, as a power loss would leave it.
fn durable_state(image: &Image) -> BackingState {
    let bytes = image.read_vec(Sector(8), Sectors(8));
    let raw = format::RawSuperblock::from_prefix(&bytes).unwrap();
    raw.check_backing(image.size(), 512).unwrap().state()
}

async fn dirty_and_flushed(b: &Boot, start: u64, sectors: u64) {
    b.tune(0, "cache_mode", "writeback").await;
    b.stay_dirty(0).await;
    assert!(b.clients[0].write(start, sectors, false).await);
    assert!(b.clients[0].flush().await);
    assert_eq!(b.volume(0).dirty_sectors(), Sectors(sectors));
}

/// Item 0. Version 1 is on the backing device, version 2 is dirty in the cache and was flushed. Version 3 is written
/// past the cache, and the backing device is slow. The kernel journals the invalidation at once: after a power loss
/// version 1 is back.
#[test]
fn item_0_a_write_past_dirty_data_does_not_bring_back_older_data() {
    for (n, mode) in MODES.into_iter().enumerate() {
        for retained in RETAINED {
            let mut scenario = Scenario::new(n as u64, Layout::small(CacheMode::Writeback), 0);
            scenario.boot(|b| async move {
                b.open().await;
                dirty_and_flushed(&b, 100, 256).await;
                b.tune(0, "cache_mode", mode).await;
                b.backings[0].hold(writes());
                b.write_beside(0, 100, 256, false);
                b.sleep_ms(2000).await;
            });
            scenario.power_loss(retained).judge().happy_end();
        }
    }
}

/// Item 0, with the other ways past the cache: a sequential stream, a device that is being detached, a discard, zeros.
#[test]
fn item_0_every_way_past_dirty_data() {
    for way in 0..4 {
        for retained in RETAINED {
            let mut scenario = Scenario::new(way, Layout::small(CacheMode::Writeback), 0);
            scenario.boot(move |b| async move {
                b.open().await;
                dirty_and_flushed(&b, 100, 64).await;
                b.backings[0].hold(writes());
                b.backings[0].hold(Matching::all(Kind::Discard));
                let (c, volume, set) = (b.clients[0].clone(), b.volume(0), b.set());
                match way {
                    0 => {
                        b.tune(0, "admission", "kernel").await;
                        b.tune(0, "sequential_cutoff", "4096").await;
                        b.write_beside(0, 100, 64, false);
                    }
                    1 => {
                        b.rt.spawn(async move { set.detach(&volume).await });
                        b.sleep_ms(10).await;
                        b.write_beside(0, 100, 64, false);
                    }
                    2 => drop(b.rt.spawn(async move { c.discard(100, 64).await })),
                    _ => {
                        let zeroes = async move { c.write_zeroes(0, 1024, ZeroFlags::default()).await };
                        b.rt.spawn(zeroes);
                    }
                }
                b.sleep_ms(2000).await;
            });
            scenario.power_loss(retained).judge().happy_end();
        }
    }
}

/// Item 1. The cache of a clean device fails, the device is served alone and is written to, the machine is switched off
/// and on, the cache is back. The kernel serves what the cache remembers: blocks from before the writes.
#[test]
fn item_1_a_cache_that_was_away_comes_back_empty() {
    for (n, retained) in RETAINED.into_iter().enumerate() {
        let mut scenario = Scenario::new(n as u64, Layout::small(CacheMode::Writethrough), 0);
        scenario.boot(|b| async move {
            b.open().await;
            b.tune(0, "sequential_cutoff", "0").await;
            b.read_all(0).await;
            assert!(b.clients[0].write(0, 128, true).await);
            b.sleep_ms(60_000).await;
            b.cache.die_after(0);
            b.clients[0].set_tolerant(true);
            for i in 0..40 {
                assert!(b.clients[0].write(i * 50, 20, false).await, "the device is clean: nobody notices");
            }
            assert!(b.clients[0].flush().await);
            assert!(b.set().failure().is_some());
        });
        scenario.power_loss(retained).judge().happy_end();
    }
}

/// Item 1: what makes that safe is on the device before the first write that the cache does not see.
#[test]
fn item_1_the_device_says_stale_before_it_is_written_alone() {
    let mut scenario = Scenario::new(1, Layout::small(CacheMode::Writethrough), 0);
    scenario.boot(|b| async move {
        b.open().await;
        b.read_all(0).await;
        b.sleep_ms(90_000).await;
        b.cache.die_after(0);
        b.clients[0].set_tolerant(true);
        b.backings[0].hold(superblock());
        let before = b.backings[0].image();
        let writes: Vec<_> = (0..30).map(|i| b.write_beside(0, i * 60, 8, false)).collect();
        b.sleep_ms(5000).await;
        assert!(b.backings[0].held() > 0, "the superblock is on its way");
        let unchanged = |at: u64| {
            before.read_vec(Sector(at), Sectors(8)) == b.backings[0].image().read_vec(Sector(at), Sectors(8))
        };
        // Writes that were under way when the cache failed may have gone on; none may begin now.
        let late = b.write_beside(0, 1900, 8, false);
        b.sleep_ms(5000).await;
        assert!(late.try_take().is_none() && unchanged(1916));
        b.backings[0].release();
        assert!(late.await);
        for w in writes {
            w.await;
        }
        let image = b.backings[0].after_power_loss(Retained::Nothing, &mut io::Rng::new(1));
        assert_eq!(durable_state(&image), BackingState::Stale);
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// Item 2. Dirty data was written back, the keys say clean, the superblock says clean; then the power fails before
/// anybody flushed. The kernel has sent no flush to the backing device: acknowledged and flushed data is gone.
#[test]
fn item_2_data_written_back_is_flushed_before_it_is_clean() {
    let mut scenario = Scenario::new(2, Layout::small(CacheMode::Writeback), 0);
    scenario.boot(|b| async move {
        b.open().await;
        dirty_and_flushed(&b, 0, 512).await;
        let flushes = b.backings[0].counters().flushes;
        b.volume(0).drained().await.unwrap();
        assert!(b.backings[0].counters().flushes > flushes);
        assert_eq!(b.volume(0).state(), Some(BackingState::Clean));
        let image = b.backings[0].after_power_loss(Retained::Nothing, &mut io::Rng::new(1));
        for sector in 0..512 {
            let bytes = image.read_vec(Sector(16 + sector), Sectors(1));
            b.clients[0].oracle.borrow().check_sector(sector, &bytes).unwrap();
        }
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// Item 3. The kernel starts to write "dirty" into the backing superblock and acknowledges the write without waiting:
/// after a crash the device counts as clean, and can be started without its cache.
#[test]
fn item_3_the_superblock_says_dirty_before_the_first_dirty_write_is_acknowledged() {
    let mut scenario = Scenario::new(3, Layout::small(CacheMode::Writeback), 0);
    scenario.boot(|b| async move {
        b.open().await;
        b.backings[0].hold(superblock());
        let first = b.write_beside(0, 0, 8, false);
        let second = b.write_beside(0, 100, 8, true);
        b.sleep_ms(60_000).await;
        assert!(first.try_take().is_none() && second.try_take().is_none());
        b.backings[0].release();
        assert!(first.await && second.await);
        let image = b.backings[0].after_power_loss(Retained::Nothing, &mut io::Rng::new(1));
        assert_eq!(durable_state(&image), BackingState::Dirty);
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// Item 4. Copies of what was read go to the index without the journal; the leaf is written 30 seconds later. The
/// kernel does not flush the cache device in between: after a power loss keys point to what was in the bucket before.
#[test]
fn item_4_no_key_is_durable_before_its_data() {
    for seed in 0..10 {
        let mut scenario = Scenario::new(seed, Layout::small(CacheMode::Writethrough), 0);
        scenario.boot(|b| async move {
            b.open().await;
            b.tune(0, "sequential_cutoff", "0").await;
            b.read_all(0).await;
            b.sleep_ms(90_000).await;
            // The buckets again, with other data: the old must not show.
            b.clients[0].discard(0, 2048).await;
            b.read_all(0).await;
            b.sleep_ms(90_000).await;
        });
        scenario.power_loss(Retained::Nothing).judge();
        let cached = scenario.hardware.cache.image();
        let view = inspect::SetView::open(&cached, inspect::Mode::Strict).unwrap();
        let clean: u64 = view.pieces().filter(|(.., kind)| kind.is_live()).map(|(_, p, _)| p.len.0).sum();
        assert!(clean > 500, "{clean} sectors are cached: the scenario is about nothing");
        scenario.happy_end();
    }
}

/// Item 5. A write-through over cached data is under way when the power fails: some blocks are on the backing device,
/// others are not. The kernel serves the old copies from the cache, and the new blocks when these are evicted: a
/// sector changes without being written.
#[test]
fn item_5_no_sector_changes_without_a_write() {
    for mode in MODES {
        for (n, retained) in RETAINED.into_iter().enumerate() {
            let mut scenario = Scenario::new(n as u64, Layout::small(CacheMode::Writethrough), 0);
            scenario.boot(|b| async move {
                b.open().await;
                b.tune(0, "sequential_cutoff", "0").await;
                b.tune(0, "cache_mode", mode).await;
                b.read_all(0).await;
                b.sleep_ms(90_000).await;
                b.cache.set_speed(Speed::even(1000));
                let slow = io::Nanos::from_secs(3);
                b.backings[0].set_speed(Speed { base: slow, spread: slow, ..Speed::even(0) });
                for i in 0..20 {
                    b.write_beside(0, 40 + i * 32, 32, false);
                }
                b.sleep_ms(4500).await;
            });
            scenario.power_loss(retained).judge();
            // The oracle remembers what is read; once from the cache, once from the device alone.
            scenario.boot_and_stop(|b| async move {
                b.open().await;
                let first = b.read_all(0).await;
                b.set().detach(&b.volume(0)).await.unwrap();
                assert_eq!(b.read_all(0).await, first);
                b.stop().await;
            });
            scenario.judge().happy_end();
        }
    }
}

/// Item 8, for clean copies: the walk has moved them, a write past the cache forgets them, the power fails before the
/// leaf was written. What replay and the old leaf say must not be the copies in their old place.
#[test]
fn item_8_moved_copies_do_not_come_back_from_their_old_place() {
    for retained in RETAINED {
        let mut layout = Layout::small(CacheMode::Writethrough);
        layout.bucket_sectors = 32;
        let mut scenario = Scenario::new(8, layout, 0);
        scenario.boot(|b| async move {
            b.open().await;
            let c = &b.clients[0];
            b.tune(0, "sequential_cutoff", "0").await;
            for i in 0..64 {
                assert!(c.read(i * 8, 8).await.is_some());
            }
            b.sleep_ms(90_000).await;
            b.tune(0, "cache_mode", "none").await;
            // One piece is left in each bucket.
            for i in (0..64).filter(|i| i % 4 != 0) {
                assert!(c.write(i * 8, 8, false).await);
            }
            b.sleep_ms(90_000).await;
            b.set().set("copy_gc_enabled", "1").await.unwrap();
            let moved = b.set().counters().moved_extents;
            b.set().gc().await.unwrap();
            assert!(
                b.set().counters().moved_extents > moved,
                "nothing was moved: the scenario is about nothing"
            );
            for i in 0..16 {
                assert!(c.write(i * 32, 8, true).await);
            }
        });
        scenario.power_loss(retained).judge().happy_end();
    }
}

/// Item 9. The cache device fails the write of dirty data. The kernel hands the error to the client, although the
/// backing device could take the data.
#[test]
fn item_9_a_failed_cache_write_goes_to_the_backing_device() {
    for mode in ["writeback", "writethrough"] {
        let mut scenario = Scenario::new(9, Layout::small(CacheMode::Writeback), 0);
        scenario.boot(|b| async move {
            b.open().await;
            b.tune(0, "cache_mode", mode).await;
            assert!(b.clients[0].write(0, 8, true).await);
            // Metadata is written with FUA.
            let matching = Matching::all(Kind::Write);
            b.cache.set_faults(vec![Fault { matching, skip: 0, count: 1 }]);
            assert!(b.clients[0].write(0, 8, false).await, "no error reaches the client");
            assert_eq!(b.cache.counters().failed, 1);
            assert!(b.clients[0].read(0, 16).await.is_some());
            assert!(b.clients[0].flush().await);
        });
        scenario.power_loss(Retained::Nothing).judge().happy_end();
    }
}

/// Item 10. The backing device fails a flush that a client waits for. The kernel does not report it.
#[test]
fn item_10_a_failed_backing_flush_is_reported() {
    for mode in MODES {
        let mut scenario = Scenario::new(10, Layout::small(CacheMode::Writeback), 0);
        scenario.boot(|b| async move {
            b.open().await;
            b.tune(0, "cache_mode", mode).await;
            b.clients[0].set_tolerant(true);
            assert!(b.clients[0].write(0, 8, false).await);
            let matching = Matching::all(Kind::Flush);
            b.backings[0].set_faults(vec![Fault { matching, skip: 0, count: 1 }]);
            assert!(!b.clients[0].flush().await);
            assert!(!b.clients[0].flush().await, "the data may be gone: asking again must not hide that");
        });
        scenario.power_loss(Retained::Nothing).judge().happy_end();
    }
}

/// Item 11. The kernel flushes the backing device at every flush, in writeback mode too.
#[test]
fn item_11_a_flush_leaves_a_backing_device_alone_that_was_not_written() {
    let mut scenario = Scenario::new(11, Layout::small(CacheMode::Writeback), 0);
    scenario.boot(|b| async move {
        b.open().await;
        b.tune(0, "writeback_running", "0").await;
        assert!(b.clients[0].write(0, 8, true).await);
        let prios = b.set().counters().prio_writes;
        let before = (b.backings[0].counters(), b.cache.counters());
        for i in 0..10 {
            assert!(b.clients[0].write(i * 8, 8, false).await && b.clients[0].flush().await);
        }
        // Without a write in between there is nothing to make durable.
        assert!(b.clients[0].flush().await);
        let after = (b.backings[0].counters(), b.cache.counters());
        assert_eq!(after.0.flushes, before.0.flushes);
        let prios = b.set().counters().prio_writes - prios;
        let (flushes, writes) =
            (after.1.flushes - before.1.flushes, after.1.durable_writes - before.1.durable_writes);
        assert!((10..=10 + prios).contains(&flushes), "{flushes} flushes, one for each journal entry");
        assert!((10..=10 + 2 * prios).contains(&writes), "{writes} durable writes");
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// Item 15. The kernel caches only the first missing piece of a read.
#[test]
fn item_15_all_missing_pieces_of_a_read_are_cached() {
    let mut scenario = Scenario::new(15, Layout::small(CacheMode::Writethrough), 0);
    scenario.boot_and_stop(|b| async move {
        b.open().await;
        b.tune(0, "sequential_cutoff", "0").await;
        for i in 0..8 {
            assert!(b.clients[0].read(i * 16, 8).await.is_some());
        }
        b.sleep_ms(100).await;
        assert!(b.clients[0].read(0, 128).await.is_some());
        b.sleep_ms(100).await;
        let before = b.backings[0].counters().reads;
        assert!(b.clients[0].read(0, 128).await.is_some());
        assert_eq!(b.backings[0].counters().reads, before);
        b.stop().await;
    });
    scenario.judge().happy_end();
}

/// Item 16. The kernel inserts a key for each 16 MiB of a discard, whatever is cached.
#[test]
fn item_16_a_discard_costs_what_it_drops() {
    let mut scenario = Scenario::new(16, Layout::small(CacheMode::Writeback), 0);
    scenario.boot_and_stop(|b| async move {
        b.open().await;
        let entries = || b.set().status().journal_written.0;
        let before = entries();
        assert!(b.clients[0].discard(0, 2048).await);
        b.sleep_ms(1000).await;
        assert_eq!(entries(), before, "nothing was cached");
        assert!(b.clients[0].write(512, 8, false).await);
        assert!(b.clients[0].discard(0, 2048).await);
        assert_eq!(b.volume(0).dirty_sectors(), Sectors(0));
        b.stop().await;
    });
    scenario.judge().happy_end();
}

/// Item 17. A device with dirty data was started alone, by the operator's explicit wish; later it comes back. In the
/// kernel its old dirty keys occupy the cache for ever.
#[test]
fn item_17_dirty_keys_that_nobody_can_reach_go_away() {
    let mut scenario = Scenario::new(17, Layout::small(CacheMode::Writeback), 0);
    scenario.boot(|b| async move {
        b.open().await;
        dirty_and_flushed(&b, 0, 1024).await;
        assert!(b.set().status().cached_sectors >= Sectors(1024));
        b.sleep_ms(100).await;
    });
    scenario.power_loss(Retained::Nothing).judge();
    scenario.boot(|b| async move {
        let disk = b.parts.backings[0].clone();
        let refused = engine::Volume::pass_through(disk.clone(), false).await.map(drop).unwrap_err();
        assert!(refused.to_string().contains("dirty data"), "{refused}");
        // The dirty data is given up: for the oracle every sector is what the device has now.
        let v = engine::Volume::pass_through(disk, true).await.unwrap();
        b.clients[0].set_volume(Some(v));
        for i in 0..8 {
            assert!(b.clients[0].write(i * 256, 256, true).await);
        }
        b.clients[0].volume().unwrap().stop().await.unwrap();
    });
    scenario.kill();
    scenario.boot_and_stop(|b| async move {
        b.open().await;
        b.read_all(0).await;
        b.set().gc().await.unwrap();
        let s = b.set().status();
        assert_eq!(s.dirty, []);
        assert!(s.in_use_percent < 20, "{s:?}");
        b.stop().await;
    });
    scenario.judge().happy_end();
}

/// Item 18. The cache of a clean device fails: in the kernel every request gets an error until the device has been
/// switched over, although it has all data.
#[test]
fn item_18_no_errors_while_a_clean_device_loses_its_cache() {
    for seed in 0..20 {
        let mut scenario = Scenario::new(seed, Layout::small(CacheMode::Writethrough), 0);
        scenario.boot(|b| async move {
            b.open().await;
            b.tune(0, "sequential_cutoff", "0").await;
            b.read_all(0).await;
            b.cache.set_speed(Speed::even(300));
            b.cache.die_after(50);
            // A client that tolerates nothing: an error is a panic.
            let requests: Vec<_> = (0..16)
                .map(|n| {
                    let c = b.clients[0].clone();
                    b.rt.spawn(async move {
                        for i in 0..20 {
                            let at = (n * 131 + i * 97) % 2000;
                            match (n + i) % 3 {
                                0 => drop(c.read(at, 16).await),
                                1 => drop(c.write(at, 16, false).await),
                                _ => drop(c.flush().await),
                            }
                        }
                    })
                })
                .collect();
            for r in requests {
                r.await;
            }
            assert!(b.set().failure().is_some());
            assert_eq!(b.clients[0].errors(), 0);
        });
        scenario.power_loss(Retained::Some(4)).judge().happy_end();
    }
}

/// Item 20. After a complete scan the kernel sleeps `writeback_delay`: the state stays dirty for that long after the
/// last dirty block is gone, and new dirty data waits twice.
#[test]
fn item_20_nothing_waits_longer_than_the_delay() {
    let mut scenario = Scenario::new(20, Layout::small(CacheMode::Writeback), 0);
    scenario.boot_and_stop(|b| async move {
        b.open().await;
        b.tune(0, "writeback_percent", "0").await;
        assert!(b.clients[0].write(0, 8, false).await);
        b.sleep_ms(29_000).await;
        assert_eq!(b.volume(0).state(), Some(BackingState::Dirty));
        b.sleep_ms(1_500).await;
        assert_eq!(b.volume(0).state(), Some(BackingState::Clean), "as soon as nothing is dirty");
        // Right after the scan: the delay counts from here.
        assert!(b.clients[0].write(64, 8, false).await);
        b.sleep_ms(30_500).await;
        assert_eq!(b.volume(0).dirty_sectors(), Sectors(0));
        assert_eq!(b.volume(0).state(), Some(BackingState::Clean));
        b.stop().await;
    });
    scenario.judge().happy_end();
}

/// Item 25. With `gc_always_rewrite` the kernel's walk never ends: it rewrites the root and begins again.
#[test]
fn item_25_a_walk_that_rewrites_everything_ends() {
    let mut scenario = Scenario::new(25, Layout::small(CacheMode::Writeback), 0);
    scenario.boot_and_stop(|b| async move {
        b.open().await;
        b.tune(0, "writeback_running", "0").await;
        for i in 0..600 {
            assert!(b.clients[0].write(i * 3, 1, false).await);
        }
        let set = b.set();
        set.gc().await.unwrap();
        let (before, nodes) = (set.counters(), set.status().btree_nodes as u64);
        assert!(nodes > 3, "{nodes} nodes: the scenario is about nothing");
        set.set("gc_always_rewrite", "1").await.unwrap();
        set.gc().await.unwrap();
        let after = set.counters();
        assert_eq!(after.gc_runs - before.gc_runs, 1);
        let rewrites = after.btree_rewrites - before.btree_rewrites;
        assert!((1..=nodes).contains(&rewrites), "{rewrites} rewrites of {nodes} nodes");
        assert!(after.prio_writes - before.prio_writes <= nodes);
        b.stop().await;
    });
    scenario.judge().happy_end();
}

/// Contract 6, the other way round: the state says clean only after the last dirty key is gone, durably.
#[test]
fn clean_in_the_superblock_means_no_dirty_key_on_disk() {
    for (n, retained) in RETAINED.into_iter().enumerate() {
        let mut scenario = Scenario::new(n as u64, Layout::small(CacheMode::Writeback), 0);
        scenario.boot(|b| async move {
            b.open().await;
            dirty_and_flushed(&b, 0, 64).await;
            b.backings[0].hold(superblock());
            let v = b.volume(0);
            b.rt.spawn(async move { v.drained().await });
            b.sleep_ms(5000).await;
            assert_eq!(b.backings[0].held(), 1, "the superblock is being written");
        });
        scenario.power_loss(retained).judge();
        let cache = scenario.hardware.cache.image();
        let view = inspect::SetView::open(&cache, inspect::Mode::Strict).unwrap();
        assert!(!view.extents_are_dirty(), "dirty keys are left");
        scenario.happy_end();
    }
}

trait Dirty {
    fn extents_are_dirty(&self) -> bool;
}

impl Dirty for inspect::SetView {
    fn extents_are_dirty(&self) -> bool {
        self.pieces().any(|(_, p, kind)| p.dirty && kind.is_live())
    }
}

/// A discarded sector is one of three things, and stays it.
#[test]
fn the_content_of_a_discarded_sector_does_not_change() {
    for seed in 0..10 {
        let mut scenario = Scenario::new(seed, Layout::small(CacheMode::Writeback), 0);
        scenario.boot(|b| async move {
            b.open().await;
            dirty_and_flushed(&b, 0, 512).await;
            assert!(b.clients[0].discard(10, 300).await);
            let found = b.read_all(0).await;
            assert!(found[..10].iter().all(|c| matches!(c, Content::Data { write: 1, .. })));
            assert_eq!(b.read_all(0).await, found);
            assert!(b.clients[0].flush().await);
        });
        scenario.power_loss(Retained::Some(4)).judge().happy_end();
    }
}
