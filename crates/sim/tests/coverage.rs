//! Every case of registration, replay and loss is reached: by seeds, or by a scenario where seeds do not go.
//!
//! Run with `cargo test -p ubcache-sim --features canary --test coverage`.
#![allow(clippy::unwrap_used)]

mod contract;
#[allow(dead_code)]
mod resized_devices;

use std::rc::Rc;

use engine::canary::{Mark, reached};
use engine::{CacheSet, SetOptions, Volume};
use format::{BackingState, Bkey, BucketNr, CacheMode, Inode, Ptr, RawSuperblock, Sector, Sectors, Uuid};
use io::CrashLogRef;
use sim::crash_log::Memory;
use sim::disk::{Fault, Kind, Matching, Retained, SimDisk};
use sim::edit::Heads;
use sim::hardware::{Layout, uuid_of};
use sim::image::Image;
use sim::run::run_seed;
use sim::scenario::{Boot, Scenario};

const SEEDS: u64 = 700;

fn scenario() -> Scenario {
    Scenario::new(1, Layout::small(CacheMode::Writeback), 0)
}

/// Changes the superblock of the backing device.
fn change(b: &Boot, change: impl FnOnce(&mut format::BackingSuper)) {
    let image: Image = b.backings[0].image();
    let bytes = image.read_vec(Sector(8), Sectors(8));
    let mut sb = RawSuperblock::from_prefix(&bytes).unwrap().check_backing(image.size(), 512).unwrap();
    change(&mut sb);
    b.backings[0].put(Sector(8), &sb.encode());
}

async fn refused(b: &Boot) -> String {
    b.parts.open(SetOptions::default()).await.map(drop).unwrap_err().to_string()
}

fn refusals() {
    scenario().boot(|b| async move {
        b.cache.put(Sector(8), &[0; 4096]);
        refused(&b).await;
    });
    // A superblock whose write was lost: it says clean, and the cache has dirty data.
    let mut s = scenario();
    s.boot(|b| async move {
        b.open().await;
        b.tune(0, "writeback_running", "0").await;
        assert!(b.clients[0].write(0, 16, true).await);
    });
    s.power_loss(Retained::Nothing);
    s.boot(|b| async move {
        change(&b, |sb| sb.set_state(BackingState::Clean));
        b.open().await;
        assert_eq!(b.volume(0).state(), Some(BackingState::Dirty));
    });
    scenario().boot(|b| async move {
        change(&b, |sb| {
            sb.set_set_uuid(Uuid([9; 16]));
            sb.set_state(BackingState::Clean);
        });
        assert!(refused(&b).await.contains("attached to cache set"));
    });
    scenario().boot(|b| async move {
        change(&b, |sb| sb.set_state(BackingState::Dirty));
        assert!(refused(&b).await.contains("does not know"));
    });
    scenario().boot(|b| async move {
        b.open().await;
        let again = b.set().register(b.parts.backings[0].clone()).await.map(drop);
        assert!(again.unwrap_err().to_string().contains("already attached"));
        // A device that belongs nowhere is served alone.
        b.set().detach(&b.volume(0)).await.unwrap();
        let alone = Volume::pass_through(b.parts.backings[0].clone(), false).await.unwrap();
        assert_eq!(alone.state(), Some(BackingState::None));
    });
}

/// A dirty write that fails is nothing that a detach has to wait for.
fn failed_write() {
    scenario().boot(|b| async move {
        b.open().await;
        let superblock = Matching { kind: Kind::DurableWrite, range: 8..16 };
        b.backings[0].hold(superblock.clone());
        b.backings[0].set_faults(vec![Fault { matching: superblock, skip: 0, count: 1 }]);
        b.clients[0].set_tolerant(true);
        let write = b.write_beside(0, 0, 16, false);
        b.sleep_ms(10).await;
        let (set, volume) = (b.set(), b.volume(0));
        let detach = b.rt.spawn(async move { set.detach(&volume).await });
        b.sleep_ms(10).await;
        b.backings[0].release();
        assert!(!write.await);
        detach.await.unwrap();
    });
}

/// The device lost its end while the cache has dirty data for it.
fn truncated() {
    let mut s = scenario();
    s.boot(|b| async move {
        b.open().await;
        b.tune(0, "writeback_running", "0").await;
        assert!(b.clients[0].write(2000, 16, true).await);
    });
    s.power_loss(Retained::Nothing);
    s.boot(|b| async move {
        let small = SimDisk::new(&b.world, 9, SimDisk::describe("small", 1024, 512));
        small.put(Sector(0), &b.backings[0].image().read_vec(Sector(0), Sectors(1024)));
        let disk = io::Disk::new(small, b.rt.clone());
        let set = engine::CacheSet::open(b.parts.cache.clone(), SetOptions::default()).await.unwrap();
        let error = set.register(disk).await.map(drop).unwrap_err().to_string();
        assert!(error.contains("truncated"), "{error}");
    });
}

/// Each structure that a start reads, zeroed: the set is refused, with words about that structure.
fn damaged_structures() {
    for (what, expected) in [
        ("journal", "journal"),
        ("prios", "prio"),
        ("root", "btree node"),
        ("uuids", "backing device"),
        ("super", "superblock"),
    ] {
        let mut s = scenario();
        s.boot(|b| async move {
            b.open().await;
            assert!(b.clients[0].write(0, 16, true).await);
        });
        s.power_loss(Retained::Nothing);
        s.boot(move |b| async move {
            let Heads { superblock: sb, newest, .. } = Heads::read(&b.cache);
            let g = *sb.geometry();
            let zero = |at: Sector| b.cache.put(at, &vec![0; g.bucket_sectors.bytes() as usize]);
            let refused_with = match what {
                "journal" => {
                    sb.journal_buckets().for_each(|bucket| zero(g.bucket_start(bucket)));
                    refused(&b).await
                }
                "prios" => {
                    zero(g.bucket_start(BucketNr(newest.prio_bucket[0] as u32)));
                    refused(&b).await
                }
                "root" => {
                    zero(newest.btree_root.pointer().unwrap().offset());
                    refused(&b).await
                }
                "uuids" => {
                    let at = newest.uuid_bucket.pointer().unwrap().offset().0;
                    let matching = Matching { kind: Kind::Read, range: at..at + 1 };
                    b.cache.set_faults(vec![Fault { matching, skip: 0, count: 1 }]);
                    refused(&b).await;
                    "backing device".to_owned()
                }
                _ => {
                    b.backings[0].put(Sector(8), &[0; 4096]);
                    refused(&b).await
                }
            };
            assert!(refused_with.contains(expected), "{what}: {refused_with}");
        });
    }
}

/// A disabled set, one with larger blocks, one without a free slot: none of them takes a device.
fn sets_that_take_no_device() {
    scenario().boot(|b| async move {
        b.open().await;
        b.set().detach(&b.volume(0)).await.unwrap();
        b.volume(0).stop().await.unwrap();
        b.cache.die_after(0);
        assert!(b.set().gc().await.is_err());
        assert!(b.set().register(b.parts.backings[0].clone()).await.is_err());
    });
    let layout = Layout { block_sectors: 8, ..Layout::small(CacheMode::Writeback) };
    Scenario::new(1, layout, 0).boot(|b| async move {
        assert!(refused(&b).await.contains("block size"));
    });
    scenario().boot(|b| async move {
        let set = CacheSet::open(b.parts.cache.clone(), SetOptions::default()).await.unwrap();
        let mut made = 0;
        while set.create_volume(uuid_of(made + 1), Sectors(8), "").await.is_ok() {
            made += 1;
        }
        assert_eq!(made, 32, "a table of one bucket has as many slots");
        let error = set.register(b.parts.backings[0].clone()).await.map(drop).unwrap_err().to_string();
        assert!(error.contains("slots"), "{error}");
    });
}

/// The superblock says dirty; whatever was dirty is written back.
fn dirty_without_keys() {
    let mut s = scenario();
    s.boot_and_stop(|b| async move {
        b.open().await;
        b.read_all(0).await;
        b.stop().await;
    });
    s.boot(|b| async move {
        change(&b, |sb| sb.set_state(BackingState::Dirty));
        b.open().await;
        b.read_all(0).await;
        b.volume(0).drained().await.unwrap();
        assert_eq!(b.volume(0).state(), Some(BackingState::Clean));
    });
}

/// A journal whose newest entry says that every bucket that is left holds dirty data.
fn no_bucket_left() {
    let mut s = scenario();
    s.boot(|b| async move {
        CacheSet::open(b.parts.cache.clone(), SetOptions::default()).await.unwrap();
    });
    s.power_loss(Retained::Nothing);
    s.boot(|b| async move {
        let mut heads = Heads::read(&b.cache);
        let (g, newest) = (*heads.superblock.geometry(), heads.newest.clone());
        let bucket_of = |key: &Bkey| key.pointer().map(|p| g.bucket_of(p.offset()).unwrap());
        let metadata = [
            bucket_of(&newest.uuid_bucket),
            bucket_of(&newest.btree_root),
            Some(BucketNr(newest.prio_bucket[0] as u32)),
        ];
        let free = (g.first_dynamic().0..g.nbuckets).map(BucketNr).filter(|n| !metadata.contains(&Some(*n)));
        let size = g.bucket_sectors;
        let keys: Vec<Bkey> = free
            .enumerate()
            .map(|(i, n)| {
                let ptr = Ptr::new(0, g.bucket_start(n), format::Gen(0));
                Bkey::extent(Inode(0), Sector(size.0 * (i as u64 + 1)), size, true, ptr)
            })
            .collect();
        for group in keys.chunks(100) {
            heads.append(&b.cache, group, &newest.roots());
        }
        let error = refused(&b).await;
        assert!(error.contains("needed to write priorities"), "{error}");
    });
}

/// The process dies, with memory that outlives it.
fn crash_log() {
    let memory = Rc::new(Memory::default());
    let options = || SetOptions { crash_log: Some(CrashLogRef(memory.clone())), ..SetOptions::default() };
    let mut s = scenario();
    let first = options();
    s.boot(|b| async move {
        b.open_with(first).await;
        assert!(b.clients[0].write(0, 16, false).await);
    });
    s.kill();
    let second = options();
    s.boot(|b| async move {
        b.open_with(second).await;
        assert_eq!(b.volume(0).dirty_sectors(), Sectors(16));
    });
}

/// The power fails while a journal entry of several blocks, or such a set of a leaf, is on its way.
fn torn() {
    for seed in 0..40 {
        // All data in one bucket: none needs new priorities, and a journal entry with them.
        let layout = Layout { bucket_sectors: 128, nbuckets: 128, ..Layout::small(CacheMode::Writeback) };
        let mut s = Scenario::new(seed, layout, 0);
        s.boot(move |b| async move {
            let mut options = SetOptions::default();
            options.tunables.journal_delay_ms = 60_000;
            b.open_with(options).await;
            b.stay_dirty(0).await;
            let leaf = Heads::read(&b.cache).newest.btree_root.pointer().unwrap().offset().0;
            let in_leaf = seed % 2 == 0;
            // The journal lies before everything else.
            let range = if in_leaf { leaf..leaf + 128 } else { 16..leaf };
            for i in 0..60 {
                assert!(b.clients[0].write(i * 3, 1, false).await);
            }
            if in_leaf {
                assert!(b.clients[0].flush().await);
            }
            b.cache.hold(Matching { kind: Kind::DurableWrite, range });
            let c = b.clients[0].clone();
            b.rt.spawn(async move { c.flush().await });
            b.sleep_ms(50_000).await;
            assert_eq!(b.cache.held(), 1, "the write is on its way");
        });
        s.power_loss(Retained::Some(4)).judge().happy_end();
    }
}

#[test]
fn every_case_is_reached() {
    for seed in 0..SEEDS {
        run_seed(seed, false).unwrap_or_else(|f| panic!("{f}"));
    }
    let by_seeds = reached();
    refusals();
    truncated();
    resized_devices::copies_behind_the_end_of_a_truncated_device_are_gone();
    contract::a_device_that_was_let_go_says_so_when_the_cache_fails();
    failed_write();
    damaged_structures();
    sets_that_take_no_device();
    dirty_without_keys();
    no_bucket_left();
    crash_log();
    torn();
    let all = reached();
    let missed: Vec<_> = Mark::ALL.iter().filter(|m| !all.contains(m)).collect();
    println!("by seeds: {by_seeds:?}");
    assert!(missed.is_empty(), "not reached: {missed:?}");
}
