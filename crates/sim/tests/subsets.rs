//! Short scenarios with the power loss before every effect of a device, and every subset of what was not durable surviving:
//! block by block where a device has at most [`MOST`] of them, else write by write, and where there are more than
//! [`MOST`] writes, none, all, each alone, and all but one.
#![allow(clippy::unwrap_used)]

use format::CacheMode;
use inspect::CheckOptions;
use inspect::check::SetSummary;
use sim::crash::{Tried, every_outcome};
use sim::hardware::Layout;
use sim::scenario::{Boot, Scenario};

/// Blocks or writes of a device of which every subset is tried.
const MOST: usize = 9;

fn scenario() -> Scenario {
    Scenario::new(1, Layout::sized(CacheMode::Writeback, 128, 64), 0)
}

async fn open(b: &Boot) {
    b.open().await;
    b.tune(0, "sequential_cutoff", "0").await;
    b.tune(0, "writeback_percent", "0").await;
    b.tune(0, "writeback_delay", "0").await;
}

/// As [`open`], and dirty data stays in the cache.
async fn open_dirty(b: &Boot) {
    open(b).await;
    b.tune(0, "writeback_running", "0").await;
}

async fn write(b: &Boot, start: u64, sectors: u64) {
    assert!(b.clients[0].write(start, sectors, false).await);
}

/// Everything is cached, clean, and durable.
async fn prologue(b: Boot) {
    open(&b).await;
    b.read_all(0).await;
    b.stop().await;
}

fn check(tried: Tried) {
    println!("{tried:?}");
    assert!(tried.crashes > 40 && tried.outcomes > 20, "{tried:?}");
}

fn every_outcome_of<T: Future<Output = ()> + 'static>(script: impl Fn(Boot) -> T) {
    check(every_outcome(scenario, prologue, script, MOST));
}

#[test]
fn flushed_writes_survive_every_subset() {
    every_outcome_of(|b| async move {
        open_dirty(&b).await;
        write(&b, 0, 8).await;
        write(&b, 4, 8).await;
        assert!(b.clients[0].flush().await);
        assert!(b.clients[0].write(6, 2, true).await);
    });
}

/// Dirty data over dirty data, some of it durable, over clean copies, several writes at once.
#[test]
fn overwrites_survive_every_subset() {
    every_outcome_of(|b| async move {
        open_dirty(&b).await;
        write(&b, 0, 4).await;
        assert!(b.clients[0].flush().await);
        write(&b, 2, 4).await;
        let beside = [b.write_beside(0, 3, 2, false), b.write_beside(0, 0, 2, true)];
        for w in beside {
            assert!(w.await);
        }
        write(&b, 1, 3).await;
        assert!(b.clients[0].flush().await);
    });
}

#[test]
fn writeback_survives_every_subset() {
    every_outcome_of(|b| async move {
        open(&b).await;
        write(&b, 0, 8).await;
        b.volume(0).drained().await.unwrap();
        write(&b, 0, 4).await;
        b.volume(0).drained().await.unwrap();
        b.stop().await;
    });
}

#[test]
fn mode_switches_and_discards() {
    every_outcome_of(|b| async move {
        open_dirty(&b).await;
        write(&b, 0, 8).await;
        for mode in ["writethrough", "none"] {
            b.tune(0, "cache_mode", mode).await;
            write(&b, 4, 8).await;
        }
        assert!(b.clients[0].discard(2, 16).await && b.clients[0].flush().await);
    });
}

/// Each mode after each other one, over what the one before has left.
#[test]
fn changes_of_the_mode_survive_every_subset() {
    every_outcome_of(|b| async move {
        open_dirty(&b).await;
        for mode in ["writethrough", "writeback", "writearound", "writeback", "none", "writeback"] {
            b.tune(0, "cache_mode", mode).await;
            write(&b, 4, 2).await;
        }
        assert!(b.clients[0].read(0, 8).await.is_some());
        b.tune(0, "cache_mode", "writethrough").await;
        assert!(b.clients[0].read(0, 8).await.is_some() && b.clients[0].flush().await);
    });
}

#[test]
fn a_detach_survives_every_subset() {
    every_outcome_of(|b| async move {
        open(&b).await;
        write(&b, 0, 8).await;
        let late = b.write_beside(0, 6, 2, false);
        b.set().detach(&b.volume(0)).await.unwrap();
        assert!(late.await);
        write(&b, 4, 8).await;
        assert!(b.clients[0].flush().await);
    });
}

/// A device that was detached and has changed since; what is left of it in the cache must not come back.
#[test]
fn an_attach_survives_every_subset() {
    let detached = |b: Boot| async move {
        open(&b).await;
        write(&b, 0, 8).await;
        b.set().detach(&b.volume(0)).await.unwrap();
        write(&b, 4, 8).await;
        b.stop().await;
    };
    check(every_outcome(
        scenario,
        detached,
        |b| async move {
            open_dirty(&b).await;
            assert!(b.clients[0].read(0, 16).await.is_some());
            write(&b, 2, 4).await;
            assert!(b.clients[0].flush().await);
            write(&b, 3, 1).await;
        },
        MOST,
    ));
}

/// A set that was never used, and its first device.
#[test]
fn the_first_start_survives_every_subset() {
    check(every_outcome(
        || Scenario::new(1, Layout::sized(CacheMode::Writeback, 128, 64), 32),
        |_| async {},
        |b| async move {
            open_dirty(&b).await;
            write(&b, 2, 4).await;
            assert!(b.clients[1].write(2, 4, false).await && b.clients[0].flush().await);
        },
        MOST,
    ));
}

/// A walk replaces every leaf while clients write, one of them durably.
#[test]
fn a_walk_beside_writes() {
    every_outcome_of(|b| async move {
        open_dirty(&b).await;
        for i in 0..4 {
            write(&b, i * 3, 1).await;
        }
        b.set().set("gc_always_rewrite", "1").await.unwrap();
        let set = b.set();
        let walk = b.rt.spawn(async move { set.gc().await });
        let beside = [b.write_beside(0, 1, 3, false), b.write_beside(0, 20, 2, true)];
        for w in beside {
            assert!(w.await);
        }
        walk.await.unwrap();
        write(&b, 9, 2).await;
        assert!(b.clients[0].flush().await);
    });
}

/// What crate `inspect` says about the set on the cache device.
fn summary(b: &Boot) -> SetSummary {
    let options = CheckOptions::METADATA;
    inspect::check_set(&b.cache.image(), &[], options).summary.expect("a set")
}

/// The ring of the journal has 8 buckets of 8 blocks here. The scenario begins in its last bucket and continues over the
/// oldest entries.
#[test]
fn a_journal_that_wraps_survives_every_subset() {
    let index = |b: &Boot| summary(b).journal.unwrap().newest_in_journal_index;
    let nearly_full = move |b: Boot| async move {
        open_dirty(&b).await;
        // The first bucket to be used is the second one.
        while index(&b) != 0 {
            assert!(b.clients[0].write(0, 1, true).await);
        }
        b.stop().await;
    };
    check(every_outcome(
        scenario,
        nearly_full,
        move |b| async move {
            open_dirty(&b).await;
            let before = index(&b);
            for i in 0..10 {
                assert!(b.clients[0].write(i % 5, 2, true).await);
            }
            assert_eq!((before, index(&b)), (0, 1), "over the oldest bucket");
        },
        MOST,
    ));
}

/// A leaf of 4 KiB becomes two under a new root; then one of several becomes two more, which their parent's next set
/// says.
#[test]
fn splits_of_the_index_survive_every_subset() {
    for (extents, nodes) in [(112, 1), (200, 4)] {
        let full = move |b: Boot| async move {
            open_dirty(&b).await;
            for i in 0..extents {
                write(&b, 2 * i, 1).await;
            }
            b.stop().await;
        };
        check(every_outcome(
            || Scenario::new(1, Layout::sized(CacheMode::Writeback, 256, 1024), 0),
            full,
            move |b| async move {
                open_dirty(&b).await;
                assert_eq!(summary(&b).btree.nodes, nodes);
                let mut at = 2 * extents;
                while summary(&b).btree.nodes == nodes {
                    for _ in 0..12 {
                        write(&b, at, 1).await;
                        at += 2;
                    }
                    // By now the leaf is written.
                    b.sleep_ms(60_000).await;
                }
                println!("{nodes} nodes before, {} after {at} sectors", summary(&b).btree.nodes);
            },
            // A start reads a long index here.
            5,
        ));
    }
}
