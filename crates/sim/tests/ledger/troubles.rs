//! The mixed load with commands of an operator, with devices that fail or are late, and with metadata that has no room.

use engine::SetOptions;
use engine::tunables::Overwrite;
use format::{CacheMode, Sectors};
use io::Nanos;
use sim::disk::{Fault, Kind, Matching, Retained, Speed};
use sim::hardware::{Layout, uuid_of};
use sim::scenario::{Boot, Scenario};

use crate::mixed::{load, rounds_from, unlike};
use crate::page::{Detail, chapter, compare, page, sums};

/// Devices that fail one in so many requests, and are never given up.
#[test]
fn devices_that_fail_now_and_then() {
    for (name, cache, backing) in [("cache", 40, 0), ("backing", 0, 25), ("both", 90, 60)] {
        page(
            &format!("failing_{name}"),
            Detail::Sums,
            (unlike(CacheMode::Writeback, 16, 512), 512),
            move |b| async move {
                b.open().await;
                b.set().set("io_error_limit", "100000").await.unwrap();
                for i in 0..2 {
                    b.tune(i, "io_error_limit", "100000").await;
                    b.tune(i, "writeback_delay", "1").await;
                }
                b.clients.iter().for_each(|c| c.set_tolerant(true));
                // Errors of metadata would disable the set: data alone fails.
                let data = Matching { kind: Kind::Read, range: 2000..1 << 40 };
                let reads = |skip| Fault { matching: data.clone(), skip, count: 2 };
                for round in 0..6 {
                    if cache > 0 {
                        b.cache.set_faults((1..4).map(|n| reads(n * cache)).collect());
                    }
                    b.backings.iter().for_each(|d| d.set_errors(backing));
                    rounds_from(&b, round..round + 1, 60, true).await;
                    b.world
                        .log(|| format!("= {} failures", b.clients.iter().map(|c| c.errors()).sum::<u64>()));
                }
                b.cache.set_faults(Vec::new());
                b.backings.iter().for_each(|d| d.set_errors(0));
                b.clients.iter().for_each(|c| c.loss_reported());
            },
        );
    }
}

/// Takes a device away from its client and gives it back.
async fn detach_and_register(b: &Boot, i: usize, by_release: bool) {
    let (v, set) = (b.volume(i), b.set());
    if by_release {
        b.clients[i].pause().await;
        b.clients[i].set_volume(None);
        set.release(&v).await.unwrap();
        b.clients[i].oracle.borrow_mut().released();
    } else {
        set.detach(&v).await.unwrap();
        b.clients[i].pause().await;
        v.stop().await.unwrap();
    }
    drop(v);
    b.clients[i].set_volume(Some(set.register(b.parts.backings[i].clone()).await.unwrap()));
    b.clients[i].resume();
}

async fn operator(b: Boot) {
    let set = b.set();
    b.sleep_ms(20).await;
    for round in 0..3 {
        for mode in ["writethrough", "writearound", "none", "writeback"] {
            b.tune(round % 2, "cache_mode", mode).await;
            b.sleep_ms(15).await;
        }
        set.gc().await.unwrap();
        detach_and_register(&b, round % 2, round == 2).await;
        b.world.log(|| format!("= given back {round}"));
        sums(&b, "given back");
        let wiped = set.wipe().await.unwrap();
        b.world.log(|| format!("= {wiped:?}, {:?}", set.wipe_progress()));
        let made = set.create_volume(uuid_of(50 + round), Sectors(64), "another").await.unwrap();
        set.delete_volume(made.inode().unwrap()).await.unwrap();
        b.tune(0, "label", &format!("label {round}")).await;
        b.volume(1).drained().await.unwrap();
        set.set("cache_replacement_policy", ["fifo", "random", "lru"][round]).await.unwrap();
        sums(&b, "commands");
    }
}

/// An operator does everything that there is to do, beside the load.
#[test]
fn commands_beside_requests() {
    for overwrite in [Overwrite::Off, Overwrite::Always] {
        let name = format!("commands_{overwrite:?}").to_lowercase();
        page(&name, Detail::Sums, (unlike(CacheMode::Writeback, 16, 384), 256), move |b| async move {
            let mut options = SetOptions::default();
            options.tunables.overwrite_in_place = overwrite;
            b.open_with(options).await;
            let actions = b.rt.spawn(operator(b.clone()));
            for round in 0..4 {
                let clients: Vec<_> = (0..b.clients.len())
                    .map(|client| {
                        let theirs = b.clone();
                        b.rt.spawn(async move { load(&theirs, client, round, 60, false).await })
                    })
                    .collect();
                for client in clients {
                    client.await;
                }
                sums(&b, &format!("round {round}"));
            }
            actions.await;
            sums(&b, "the operator is done");
        });
    }
}

/// Metadata has hardly any room: a journal of a few blocks, a cache of few buckets, an index that is not kept in memory.
#[test]
fn metadata_without_room() {
    for (name, nbuckets, delay_ms) in [("tiny", 128, "30000"), ("small", 140, "0"), ("slow", 160, "100")] {
        page(
            &format!("short_{name}"),
            Detail::Sums,
            (unlike(CacheMode::Writeback, 8, nbuckets), 0),
            move |b| async move {
                let mut options = SetOptions::default();
                options.tunables.btree_cache_limit = 1;
                b.open_with(options).await;
                b.set().set("journal_delay_ms", delay_ms).await.unwrap();
                b.tune(0, "sequential_cutoff", "0").await;
                b.tune(1, "cache_mode", "writeback").await;
                b.tune(0, "writeback_delay", "1").await;
                if name == "slow" {
                    b.cache.set_speed(Speed::even(2000));
                }
                for round in 0..5 {
                    rounds_from(&b, round..round + 1, 70, false).await;
                    b.world.log(|| format!("= {:?}", b.set().status()));
                }
            },
        );
    }
}

/// A device answers flushes late, for a while; another, which shares the journal and leaves, is served meanwhile.
#[test]
fn flushes_that_are_late() {
    for (name, held_ms) in [("soon", 300), ("late", 8_000)] {
        page(
            &format!("late_{name}"),
            Detail::Sums,
            (unlike(CacheMode::Writeback, 8, 256), 0),
            move |b| async move {
                b.open().await;
                b.tune(0, "sequential_cutoff", "0").await;
                b.tune(1, "sequential_cutoff", "0").await;
                for round in 0..3 {
                    b.backings[1].hold(Matching::all(Kind::Flush));
                    let theirs = b.clone();
                    let others = b.rt.spawn(async move {
                        load(&theirs, 0, round, 80, false).await;
                        load(&theirs, 0, round + 10, 80, false).await;
                    });
                    for n in 0..40 {
                        assert!(b.clients[1].write(n * 90 % 4000, 8, false).await);
                        assert!(b.clients[1].read(n * 70 % 4000, 8).await.is_some());
                    }
                    // A walk writes the leaves, with the copies that are settled in time.
                    let set = b.set();
                    let walk = b.rt.spawn(async move { set.gc().await });
                    b.sleep_ms(held_ms).await;
                    sums(&b, "held");
                    b.backings[1].release();
                    walk.await.unwrap();
                    others.await;
                    b.sleep_ms(500).await;
                    sums(&b, &format!("round {round}"));
                    b.world.log(|| format!("= {:?}", b.set().status()));
                }
            },
        );
    }
}

/// A tree of three levels: filled at random, walked, read again with a small memory, emptied.
#[test]
fn a_tree_of_three_levels() {
    let mut large = Layout::small(CacheMode::Writeback);
    large.nbuckets = 40_000;
    large.backings[0].data_sectors = 90_000;
    page("forest", Detail::Sums, (large, 0), |b| async move {
        b.open().await;
        for (name, value) in [("writeback_running", "0"), ("sequential_cutoff", "0")] {
            b.tune(0, name, value).await;
        }
        let c = &b.clients[0];
        for round in 0..4 {
            for n in 0..4500 {
                assert!(c.write((round * 4500 + n) * 7919 % 18_000 * 5, 2, false).await);
            }
            sums(&b, &format!("round {round}"));
            b.world.log(|| format!("= {:?}", b.set().status()));
        }
        b.set().set("btree_cache_limit", "65536").await.unwrap();
        b.set().gc().await.unwrap();
        sums(&b, "walked");
        for n in 0..400 {
            assert!(c.read(n * 9973 % 18_000 * 5, 4).await.is_some());
        }
        b.world.log(|| format!("= {:?}", b.set().status()));
        for n in 0..87 {
            assert!(c.discard(n * 1024, 1000).await);
        }
        b.set().gc().await.unwrap();
        sums(&b, "emptied");
        b.world.log(|| format!("= {:?}", b.set().status()));
    });
}

/// Stops at moments of all kinds, each followed by a start that finds what is left.
#[test]
fn stops() {
    let mut scenario = Scenario::new(1, unlike(CacheMode::Writeback, 8, 512), 128);
    let mut lines = Vec::new();
    let phases = ["at once", "dirty", "under load", "a walk", "a wipe", "a drain", "copies", "aged"];
    for (n, phase) in (0..).zip(phases) {
        lines.push(phase.to_owned());
        lines.extend(chapter(&mut scenario, Detail::Sums, move |b| async move {
            b.open().await;
            sums(&b, "open");
            if phase != "at once" {
                load(&b, 0, n, 60, false).await;
                load(&b, 2, n, 60, false).await;
            }
            let set = b.set();
            let beside = match phase {
                "under load" => Some(b.write_beside(0, 0, 300, false)),
                "a walk" => Some(b.rt.spawn(async move { set.gc().await.is_ok() })),
                "a wipe" => Some(b.rt.spawn(async move { set.wipe().await.is_ok() })),
                "a drain" => {
                    let v = b.volume(0);
                    Some(b.rt.spawn(async move { v.drained().await.is_ok() }))
                }
                _ => None,
            };
            if phase == "copies" {
                assert!(b.clients[1].read(0, 64).await.is_some());
            }
            b.rt.sleep(if phase == "aged" { Nanos::from_secs(100) } else { Nanos(70_000) }).await;
            sums(&b, "stops");
            b.stop().await;
            sums(&b, "stopped");
            if let Some(beside) = beside {
                let done = beside.await;
                b.world.log(|| format!("= what was under way: {done}"));
            }
        }));
        scenario.oracles.iter().for_each(|o| o.borrow_mut().stopped());
        scenario.power_loss(Retained::Nothing).judge();
    }
    scenario.happy_end();
    compare("stops", &lines);
}

/// Packing under pressure: dirty data in every bucket, by data and by costs.
#[test]
fn packing_beside_requests() {
    for (name, bucket_sectors, nbuckets) in [("thin", 64, 160), ("short", 32, 128)] {
        page(
            &format!("packing_{name}"),
            Detail::Sums,
            (unlike(CacheMode::Writeback, bucket_sectors, nbuckets), 0),
            move |b| async move {
                let mut options = SetOptions::default();
                options.tunables.overwrite_in_place = Overwrite::Off;
                b.open_with(options).await;
                for i in 0..2 {
                    b.tune(i, "sequential_cutoff", "0").await;
                    b.tune(i, "cache_mode", "writeback").await;
                    b.tune(i, "writeback_delay", "20").await;
                }
                b.backings[0].set_speed(Speed::even(6000));
                for round in 0..6 {
                    rounds_from(&b, round..round + 1, 65, false).await;
                    b.world.log(|| format!("= {:?}", b.set().counters()));
                }
            },
        );
    }
}
