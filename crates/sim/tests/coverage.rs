//! Every case of registration, replay and loss is reached: by seeds, or by a story where seeds do not go.
//!
//! Run with `cargo test -p ubcache-sim --features canary --test coverage`.
#![allow(clippy::unwrap_used)]

use engine::canary::{Mark, reached};
use engine::{SetOptions, Volume};
use format::{BackingState, CacheMode, RawSuperblock, Sector, Sectors, Uuid};
use sim::disk::{Fault, Keep, Kind, Matching, SimDisk};
use sim::image::Image;
use sim::rig::Layout;
use sim::run::run_seed;
use sim::story::{Boot, Story};

const SEEDS: u64 = 700;

fn story() -> Story {
    Story::new(1, Layout::small(CacheMode::Writeback), 0)
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
    story().boot(|b| async move {
        b.cache.put(Sector(8), &[0; 4096]);
        refused(&b).await;
    });
    // A superblock whose write was lost: it says clean, and the cache has dirty data.
    let mut s = story();
    s.boot(|b| async move {
        b.open().await;
        b.tune(0, "writeback_running", "0").await;
        assert!(b.clients[0].write(0, 16, true).await);
    });
    s.power_cut(Keep::Nothing);
    s.boot(|b| async move {
        change(&b, |sb| sb.set_state(BackingState::Clean));
        b.open().await;
        assert_eq!(b.volume(0).state(), Some(BackingState::Dirty));
    });
    story().boot(|b| async move {
        change(&b, |sb| {
            sb.set_set_uuid(Uuid([9; 16]));
            sb.set_state(BackingState::Clean);
        });
        assert!(refused(&b).await.contains("attached to cache set"));
    });
    story().boot(|b| async move {
        change(&b, |sb| sb.set_state(BackingState::Dirty));
        assert!(refused(&b).await.contains("does not know"));
    });
    story().boot(|b| async move {
        b.open().await;
        let again = b.set().register(b.parts.backings[0].clone()).await.map(drop);
        assert!(again.unwrap_err().to_string().contains("already attached"));
        // A device that belongs nowhere is served alone.
        b.set().detach(&b.volume(0)).await.unwrap();
        let alone = Volume::pass_through(b.parts.backings[0].clone(), false).await.unwrap();
        assert_eq!(alone.state(), Some(BackingState::None));
    });
}

/// The cache fails while the superblock that lets the device go is being written.
fn lost_while_detaching() {
    story().boot(|b| async move {
        b.open().await;
        b.clients[0].set_tolerant(true);
        b.backings[0].hold(Matching { kind: Kind::DurableWrite, range: 8..16 });
        let (set, volume) = (b.set(), b.volume(0));
        let detach = b.rt.spawn(async move { set.detach(&volume).await });
        b.sleep_ms(10).await;
        b.cache.die_after(0);
        assert!(b.set().gc().await.is_err() && b.set().failure().is_some());
        let c = b.clients[0].clone();
        let read = b.rt.spawn(async move { c.read(0, 8).await });
        b.sleep_ms(10).await;
        b.backings[0].release();
        assert!(read.await.is_some());
        assert!(detach.await.is_err(), "the slot could not be given up");
        assert_eq!(b.volume(0).state(), Some(BackingState::None));
    });
}

/// A dirty write that fails is nothing that a detach has to wait for.
fn failed_write() {
    story().boot(|b| async move {
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
    let mut s = story();
    s.boot(|b| async move {
        b.open().await;
        b.tune(0, "writeback_running", "0").await;
        assert!(b.clients[0].write(2000, 16, true).await);
    });
    s.power_cut(Keep::Nothing);
    s.boot(|b| async move {
        let small = SimDisk::new(&b.world, 9, SimDisk::describe("small", 1024, 512));
        small.put(Sector(0), &b.backings[0].image().read_vec(Sector(0), Sectors(1024)));
        let disk = io::Disk::new(small, b.rt.clone());
        let set = engine::CacheSet::open(b.parts.cache.clone(), SetOptions::default()).await.unwrap();
        let error = set.register(disk).await.map(drop).unwrap_err().to_string();
        assert!(error.contains("truncated"), "{error}");
    });
}

#[test]
fn every_case_is_reached() {
    for seed in 0..SEEDS {
        run_seed(seed, false).unwrap_or_else(|f| panic!("{f}"));
    }
    let by_seeds = reached();
    refusals();
    truncated();
    lost_while_detaching();
    failed_write();
    let all = reached();
    let missed: Vec<_> = Mark::ALL.iter().filter(|m| !all.contains(m)).collect();
    println!("by seeds: {by_seeds:?}");
    assert!(missed.is_empty(), "not reached: {missed:?}");
}
