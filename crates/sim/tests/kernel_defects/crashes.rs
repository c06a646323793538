//! Defects of the kernel's bcache with power losses, which ubcache does not have.

use format::{BackingState, CacheMode};
use sim::hardware::Layout;

use crate::stage::{Boot, at_every_effect, durable, new_hardware, on_backing, on_image, play, state_of};

/// Dirty data stays dirty: writeback waits.
async fn flushed_dirty(b: &Boot, version: u32) {
    b.tune("writeback_running", "0").await;
    b.tune("sequential_cutoff", "0").await;
    b.write(100, 24, version).await;
    b.flush().await;
}

/// Defect 0. The kernel drops or replaces a dirty key while the backing device is still being written. A user
/// flushed version 1, wrote version 2 in another mode, lost power, and found version 0 from before both. Here no cut
/// at any moment brings back what is older than the flush, and flushed version 2 stays as well.
#[test]
fn d00_a_write_past_the_cache_never_uncovers_data_older_than_the_last_flush() {
    for mode in ["writearound", "writethrough", "none"] {
        let cuts = at_every_effect(
            &Layout::small(CacheMode::Writeback),
            1,
            |b| async move {
                flushed_dirty(&b, 1).await;
                b
            },
            move |b| async move {
                b.tune("cache_mode", mode).await;
                b.write(96, 16, 2).await;
                b.flush().await;
            },
            move |b, ended| async move {
                let found = b.versions(96, 28).await;
                let new = |at: u64| (96..112).contains(&at);
                for (at, v) in (96..).zip(found) {
                    let old = u32::from((100..124).contains(&at));
                    let fine = if new(at) && ended { v == 2 } else { v == old || new(at) && v == 2 };
                    assert!(fine, "{mode}: sector {at} has version {v}");
                }
            },
        );
        assert!(cuts > 8, "{mode}: only {cuts} cuts");
    }
}

/// Defect 0 again, by the road that has to go past the cache: while a device is being detached its dirty data must
/// shrink, so writes go to the backing device. It is flushed before the dirty key goes.
#[test]
fn d00_a_write_during_a_detach_never_uncovers_older_data() {
    at_every_effect(
        &Layout::small(CacheMode::Writeback),
        1,
        |b| async move {
            flushed_dirty(&b, 1).await;
            b
        },
        |b| async move {
            let (set, v) = (b.set.clone(), b.v.clone());
            let detach = b.rt.spawn(async move { set.detach(&v).await });
            b.rt.yield_now().await;
            b.write(96, 16, 2).await;
            b.flush().await;
            detach.await.unwrap();
        },
        |b, ended| async move {
            let found = b.versions(100, 24).await;
            assert!(found[..12].iter().all(|v| *v == 2 || !ended && *v == 1), "{found:?}");
            assert!(found[12..].iter().all(|v| *v == 1), "{found:?}");
        },
    );
}

/// Defect 2. The kernel marks keys clean, and the device too, without flushing the backing device. A user waited for
/// "clean", lost power, and the disk's own cache with it: flushed data was gone. Here a cut at any moment of the
/// drain, or after it, loses nothing, and a superblock that says clean has all data behind it.
#[test]
fn d02_written_back_means_on_the_medium() {
    at_every_effect(
        &Layout::small(CacheMode::Writeback),
        1,
        |b| async move {
            flushed_dirty(&b, 1).await;
            b.write(300, 5, 1).await;
            b.flush().await;
            b
        },
        |b| async move {
            b.v.drained().await.unwrap();
            assert_eq!(b.v.state(), Some(BackingState::Clean));
            assert_eq!(on_image(&durable(&b.backing()), 100, 24), [1; 24]);
        },
        |b, _| async move {
            assert_eq!(b.versions(100, 24).await, [1; 24]);
            assert_eq!(b.versions(300, 5).await, [1; 5]);
            if b.v.state() == Some(BackingState::Clean) {
                assert_eq!(on_backing(&b.hardware, 100, 24), [1; 24]);
                assert_eq!(on_backing(&b.hardware, 300, 5), [1; 5]);
            }
        },
    );
}

/// Defect 3. The kernel sends the superblock's change from clean to dirty on its way and waits for nothing. After a
/// crash the device counted as clean, and was brought up without its cache and the dirty data in it. Here "dirty" is
/// on the medium before the first dirty write is answered.
#[test]
fn d03_the_backing_device_durably_says_dirty_before_the_first_dirty_answer() {
    play(Layout::small(CacheMode::Writeback), |b| async move {
        b.tune("writeback_running", "0").await;
        assert_eq!(state_of(&durable(&b.backing())), BackingState::Clean);
        b.write(100, 8, 1).await;
        assert_eq!(state_of(&durable(&b.backing())), BackingState::Dirty);
    });
    at_every_effect(
        &Layout::small(CacheMode::Writeback),
        1,
        |b| async move {
            b.tune("writeback_running", "0").await;
            b
        },
        |b| async move {
            b.write(100, 8, 1).await;
            b.flush().await;
        },
        |b, ended| async move {
            let found = b.versions(100, 8).await;
            assert!(!ended || found == [1; 8], "{found:?}");
        },
    );
}

/// Defect 4. The kernel makes index nodes durable before the data that they name. A cache device lost its volatile
/// write cache in a power loss, and clean keys named whatever the bucket had held before. Here data is flushed before
/// a key that names it is written: the contents stay right whatever the cache device forgets.
#[test]
fn d04_no_durable_key_names_data_that_is_not() {
    // Only clean data, whose keys are in the index alone; then dirty data among it.
    for dirty in [false, true] {
        let cuts = at_every_effect(
            &Layout::small(CacheMode::Writeback),
            1,
            |b| async move {
                b.tune("writeback_running", "0").await;
                b.tune("sequential_cutoff", "0").await;
                b
            },
            move |b| async move {
                for i in 0..4 {
                    b.versions(i * 24, 16).await;
                }
                if dirty {
                    b.write(100, 16, 1).await;
                    b.write(8, 4, 1).await;
                }
                b.sleep_ms(5).await;
                if dirty {
                    b.set.gc().await.unwrap();
                }
                // Writes every leaf.
                b.set.stop().await.unwrap();
            },
            move |b, ended| async move {
                for (at, v) in (0..128).zip(b.versions(0, 128).await) {
                    let new = dirty && ((100..116).contains(&at) || (8..12).contains(&at));
                    let fine = if ended { v == u32::from(new) } else { v == 0 || new };
                    assert!(fine, "sector {at}: version {v}");
                }
            },
        );
        assert!(cuts > 20, "{cuts}");
    }
}

/// Defect 5. The kernel writes both devices at once. After a crash in writethrough mode the cache served one version
/// of a sector and the backing device held another; the day the block left the cache the content changed without a
/// write. Here what is read after the crash is what the backing device has, with the cache and without it.
#[test]
fn d05_no_sector_changes_without_a_write_after_a_crash() {
    for mode in [CacheMode::Writethrough, CacheMode::Writearound] {
        at_every_effect(
            &Layout::small(mode),
            1,
            |b| async move {
                b.tune("sequential_cutoff", "0").await;
                // Clean copies of version 0, some of them in a leaf on the medium.
                b.versions(100, 16).await;
                b.sleep_ms(5).await;
                let b = b.restart().await;
                b.tune("sequential_cutoff", "0").await;
                b.versions(116, 8).await;
                b.sleep_ms(5).await;
                b
            },
            |b| async move {
                b.write(96, 20, 1).await;
                b.write(110, 10, 2).await;
                b.flush().await;
            },
            |b, _| async move {
                let first = b.versions(96, 32).await;
                assert_eq!(first, on_backing(&b.hardware, 96, 32));
                assert_eq!(first, b.versions(96, 32).await);
                b.set.detach(&b.v).await.unwrap();
                assert_eq!(first, b.versions(96, 32).await);
            },
        );
    }
}

/// Defect 8. After a crash the kernel may forget that its copying garbage collector has moved a dirty extent, and
/// find the old key, whose bucket has another content by now. Here a moved dirty extent is journaled, and its old
/// bucket is used again only when no durable key names it.
#[test]
fn d08_data_moved_by_the_garbage_collector_survives_a_crash() {
    async fn thin_buckets(b: Boot) -> Boot {
        b.tune("writeback_running", "0").await;
        b.tune("sequential_cutoff", "0").await;
        b.tune_set("copy_gc_enabled", "1").await;
        for i in 0..32 {
            b.write(i * 8, 4, 1).await;
        }
        for i in 0..32 {
            b.write(i * 8, 2, 2).await;
        }
        b.flush().await;
        b
    }
    async fn as_before(b: &Boot) {
        for i in 0..32 {
            assert_eq!(b.versions(i * 8, 4).await, [2, 2, 1, 1], "extent {i}");
        }
    }
    play(Layout::small(CacheMode::Writeback), |b| async move {
        let b = thin_buckets(b).await;
        let before = b.set.counters().moved_extents;
        b.set.gc().await.unwrap();
        assert!(b.set.counters().moved_extents > before, "nothing was moved: the scenario shows nothing");
        as_before(&b).await;
    });
    at_every_effect(
        &Layout::small(CacheMode::Writeback),
        3,
        thin_buckets,
        |b| async move {
            b.set.gc().await.unwrap();
            // Buckets that came free are used again.
            for i in 0..16 {
                b.write(1024 + i * 8, 8, 3).await;
            }
            b.flush().await;
        },
        |b, ended| async move {
            as_before(&b).await;
            if ended {
                assert_eq!(b.versions(1024, 128).await, [3; 128]);
            }
        },
    );
}

/// The stage itself: a cut in the middle of a write does lose what was not flushed, or the scenarios above would prove
/// nothing.
#[test]
fn the_stage_does_lose_what_was_not_flushed() {
    let hardware = new_hardware(1, Layout::small(CacheMode::None));
    let (mut m, b) = crate::stage::boot(&hardware, sim::world::Order::Fifo);
    let theirs = b.clone();
    m.block_on(async move { theirs.write(100, 8, 1).await });
    crate::stage::cut(&hardware, m, b, crate::stage::CUTS[0]);
    assert_eq!(on_backing(&hardware, 100, 8), [0; 8]);
}
