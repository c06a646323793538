//! Fifteen busy seconds of a set, with a power loss at every effect of a device, and several outcomes of each cut: none, all or
//! some of the writes that are not durable survive.
#![allow(clippy::unwrap_used)]

use engine::SetOptions;
use format::CacheMode;
use io::{Nanos, ZeroFlags};
use sim::crash::every_crash;
use sim::disk::Speed;
use sim::hardware::Layout;
use sim::scenario::{Boot, Scenario};

const SECTORS: u64 = 320;

fn scenario(seed: u64, flash_sectors: u64) -> Scenario {
    Scenario::new(seed, Layout::sized(CacheMode::Writeback, 128, SECTORS), flash_sectors)
}

fn uneven(b: &Boot) {
    let speed = |base: u64, spread: u64| Speed {
        base: Nanos(base * 1000),
        spread: Nanos(spread * 1000),
        slow_one_in: 11,
        slow: Nanos::from_ms(20),
        nodes: Nanos(0),
    };
    b.cache.set_speed(speed(30, 200));
    b.backings[0].set_speed(speed(300, 3000));
}

/// The first boot: the set exists, and some clean data is in the cache.
async fn prologue(b: Boot) {
    b.open().await;
    b.tune(0, "sequential_cutoff", "0").await;
    assert!(b.clients[0].read(0, 64).await.is_some());
    assert!(b.clients[0].write(32, 64, false).await);
    b.stop().await;
}

async fn open(b: &Boot) {
    uneven(b);
    let mut options = SetOptions::default();
    options.tunables.btree_cache_limit = 1;
    options.tunables.journal_delay_ms = 5;
    b.open_with(options).await;
    b.tune(0, "sequential_cutoff", "0").await;
    b.tune(0, "writeback_percent", "0").await;
    b.tune(0, "writeback_delay", "0").await;
}

/// Writes in every mode over the same places, several at once, with writeback beside them.
async fn modes(b: Boot) {
    open(&b).await;
    let c = &b.clients[0];
    for (n, mode) in
        ["writeback", "writethrough", "writeback", "writearound", "none", "writeback"].iter().enumerate()
    {
        b.tune(0, "cache_mode", mode).await;
        let n = n as u64;
        let beside = [
            b.write_beside(0, 16 * n, 40, false),
            b.write_beside(0, 16 * n + 20, 40, n.is_multiple_of(2)),
            b.write_beside(0, 3, 5, false),
        ];
        assert!(c.read(0, 120).await.is_some());
        for t in beside {
            t.await;
        }
        if n % 2 == 1 {
            assert!(c.flush().await);
        }
        assert!(c.discard(16 * n + 8, 24).await);
    }
    c.write_zeroes(50, 200, ZeroFlags { fua: true, may_unmap: true }).await;
    assert!(c.write(60, 8, true).await);
    b.stop().await;
}

/// Small writes until leaves are split and buckets run out, a walk that moves data, then everything is written back.
async fn index(b: Boot) {
    open(&b).await;
    b.tune(0, "writeback_running", "0").await;
    b.set().set("copy_gc_enabled", "1").await.unwrap();
    let c = &b.clients[0];
    for round in 0..2 {
        for i in 0..80 {
            assert!(c.write((i * 7 + round) % SECTORS, 1, i % 16 == 0).await);
        }
        b.set().gc().await.unwrap();
    }
    assert!(c.flush().await);
    b.volume(0).drained().await.unwrap();
    for i in 0..20 {
        assert!(c.read(i * 16, 16).await.is_some());
    }
    b.stop().await;
}

/// Detached and attached again, alone in between, with clients all the time; then the flash-only volume.
async fn attaching(b: Boot) {
    open(&b).await;
    let c = b.clients[0].clone();
    for i in 0..6 {
        assert!(c.write(i * 40, 16, false).await);
    }
    let detaching = {
        let (set, volume) = (b.set(), b.volume(0));
        b.rt.spawn(async move { set.detach(&volume).await })
    };
    for i in 0..6 {
        assert!(c.write(i * 40 + 8, 16, i % 2 == 0).await);
    }
    detaching.await.unwrap();
    assert!(c.write(0, 64, true).await);
    b.volume(0).stop().await.unwrap();
    let volume = b.set().register(b.parts.backings[0].clone()).await.unwrap();
    c.set_volume(Some(volume));
    assert!(c.read(0, 128).await.is_some());
    assert!(c.write(10, 10, true).await);
    let f = b.clients[1].clone();
    assert!(f.write(0, 40, true).await && f.discard(4, 8).await && f.write(6, 1, true).await);
    b.stop().await;
}

#[test]
fn modes_with_a_crash_anywhere() {
    let n = every_crash(1, || scenario(1, 0), prologue, modes, 1);
    assert!(n > 300, "{n} crashes");
}

#[test]
fn index_with_a_crash_anywhere() {
    let n = every_crash(2, || scenario(2, 0), prologue, index, 3);
    assert!(n > 300, "{n} crashes");
}

#[test]
fn attaching_with_a_crash_anywhere() {
    let n = every_crash(3, || scenario(3, 64), prologue, attaching, 1);
    assert!(n > 200, "{n} crashes");
}

/// The very first start writes the whole metadata of a set.
#[test]
fn first_start_with_a_crash_anywhere() {
    let nothing = |_: Boot| async {};
    let script = |b: Boot| async move {
        b.open().await;
        assert!(b.clients[0].write(0, 16, true).await);
        b.stop().await;
    };
    let n = every_crash(4, || scenario(4, 0), nothing, script, 1);
    assert!(n > 30, "{n} crashes");
}

/// A crash in the recovery from a crash, at every effect of it.
#[test]
fn recovery_with_a_crash_anywhere() {
    let prologue = |b: Boot| async move {
        uneven(&b);
        b.open().await;
        b.tune(0, "writeback_running", "0").await;
        for i in 0..100 {
            assert!(b.clients[0].write(i * 3, 2, i % 10 == 0).await);
        }
        // Not stopped: what follows begins with a journal to be replayed.
        assert!(b.clients[0].flush().await);
    };
    let script = |b: Boot| async move {
        open(&b).await;
        b.read_all(0).await;
        b.volume(0).drained().await.unwrap();
        b.stop().await;
    };
    let n = every_crash(5, || scenario(5, 0), prologue, script, 1);
    assert!(n > 100, "{n} crashes");
}
