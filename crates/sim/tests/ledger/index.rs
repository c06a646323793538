//! The index: leaves that fill up, are written, replaced, dropped from memory and read again; the journal under it.

use engine::SetOptions;
use format::CacheMode;
use sim::disk::Retained;
use sim::hardware::Layout;
use sim::scenario::Scenario;

use crate::page::{Detail, chapter, compare, page, sums};

fn large(nbuckets: u64, data_sectors: u64) -> Layout {
    let mut layout = Layout::small(CacheMode::Writeback);
    layout.nbuckets = nbuckets;
    layout.backings[0].data_sectors = data_sectors;
    layout
}

/// Places all over the volume, each once.
fn scattered(n: u64, of: u64) -> u64 {
    n * 797 % of
}

#[test]
fn leaves_fill_up() {
    page("leaves_fill_up", Detail::Sums, (large(2048, 8192), 0), |b| async move {
        b.open().await;
        b.stay_dirty(0).await;
        for round in 0..10 {
            for n in 0..100 {
                assert!(b.clients[0].write(scattered(round * 100 + n, 1024) * 8, 3, n % 10 == 0).await);
            }
            sums(&b, &format!("{} extents", (round + 1) * 100));
            b.world.log(|| format!("= {:?}", b.set().status()));
        }
        // What was written last is written over, then everything is one extent.
        for n in (0..1024).step_by(2) {
            assert!(b.clients[0].write(n * 8 + 2, 2, false).await);
        }
        sums(&b, "overwritten");
        b.set().gc().await.unwrap();
        sums(&b, "walked");
        for n in 0..128 {
            assert!(b.clients[0].discard(n * 64, 64).await);
        }
        b.set().gc().await.unwrap();
        sums(&b, "empty");
        b.world.log(|| format!("= {:?}", b.set().status()));
    });
}

/// One leaf, request by request.
#[test]
fn a_leaf_from_its_first_key_to_its_division() {
    page("one_leaf", Detail::Requests, (large(512, 4096), 0), |b| async move {
        b.open().await;
        b.stay_dirty(0).await;
        for n in 0..300 {
            assert!(b.clients[0].write(scattered(n, 512) * 8, 2, false).await);
            if n % 50 == 49 {
                assert!(b.clients[0].flush().await);
                b.sleep_ms(150).await;
            }
        }
        b.sleep_ms(120_000).await;
    });
}

/// A start after a stop, after a crash and after a crash of the process; leaves are read when they are needed.
#[test]
fn starts() {
    let mut scenario = Scenario::new(1, large(8192, 32768), 0);
    let mut lines = chapter(&mut scenario, Detail::Sums, |b| async move {
        b.open().await;
        b.stay_dirty(0).await;
        for n in 0..2500 {
            assert!(b.clients[0].write(scattered(n, 4096) * 8, 3, n % 25 == 0).await);
        }
        assert!(b.clients[0].read(1, 4).await.is_some());
        sums(&b, "before the crash");
    });
    for (what, kill) in [("power loss", false), ("the process dies", true)] {
        if kill {
            scenario.kill()
        } else {
            scenario.power_loss(Retained::Nothing)
        };
        lines.push(what.to_owned());
        lines.extend(chapter(&mut scenario, Detail::Requests, |b| async move {
            b.open().await;
            b.stay_dirty(0).await;
            assert!(b.clients[0].read(800, 16).await.is_some());
            assert!(b.clients[0].write(803, 9, true).await && b.clients[0].write(3, 9, false).await);
            b.sleep_ms(2000).await;
        }));
    }
    scenario.power_loss(Retained::Everything);
    scenario.boot_and_stop(|b| async move {
        b.open().await;
        b.stop().await;
    });
    lines.push("after a stop".to_owned());
    lines.extend(chapter(&mut scenario, Detail::Requests, |b| async move {
        b.open().await;
        assert!(b.clients[0].read(800, 16).await.is_some());
    }));
    scenario.kill();
    lines.push("wiped".to_owned());
    // Request by request it would be thousands.
    lines.extend(chapter(&mut scenario, Detail::Sums, |b| async move {
        b.open().await;
        let wiped = b.set().wipe().await.unwrap();
        b.world.log(|| format!("= {wiped:?}"));
        sums(&b, "wiped");
    }));
    scenario.power_loss(Retained::Nothing).judge().happy_end();
    compare("starts", &lines);
}

/// The ring of the journal goes around several times.
#[test]
fn a_journal_that_goes_around() {
    page("journal", Detail::Sums, (large(256, 2048), 0), |b| async move {
        b.open().await;
        b.stay_dirty(0).await;
        for round in 0..8 {
            for n in 0..150 {
                assert!(b.clients[0].write((round * 150 + n) * 37 % 1000, 1, n % 3 == 0).await);
            }
            sums(&b, &format!("round {round}"));
            let s = b.set().figures();
            b.world.log(|| format!("= {:?}, {} entries", s.status.journal_free, s.journal_entries_in_use));
        }
    });
}

/// Nodes that do not fit into memory.
#[test]
fn leaves_leave_the_memory() {
    page("memory", Detail::Sums, (large(4096, 16384), 0), |b| async move {
        let mut options = SetOptions::default();
        options.tunables.btree_cache_limit = 64 << 10;
        b.open_with(options).await;
        b.stay_dirty(0).await;
        for n in 0..1500 {
            assert!(b.clients[0].write(scattered(n, 2048) * 8, 2, n % 50 == 0).await);
        }
        b.set().gc().await.unwrap();
        sums(&b, "written");
        b.world.log(|| format!("= {:?}", b.set().status()));
        for n in 0..200 {
            assert!(b.clients[0].read(scattered(n * 3, 2048) * 8, 4).await.is_some());
        }
        sums(&b, "read");
        b.world.log(|| format!("= {:?}", b.set().status()));
    });
}
