//! A wipe overwrites what no volume of the set needs: after it, nothing of a detached device is on the cache device, and
//! whatever a crash does in the middle of it, data of other volumes is never hurt.
#![allow(clippy::unwrap_used)]

use std::rc::Rc;

use engine::SetOptions;
use format::{CacheMode, Sector, Sectors};
use io::Disk;
use sim::crash::every_crash;
use sim::disk::{Fault, Kind, Matching, Retained, SimDisk, WithHoles};
use sim::hardware::Layout;
use sim::scenario::{Boot, Scenario};
use sim::stamp::{Content, decode};

/// The device that is detached, the one that stays, and the flash-only volume.
const DETACHED: usize = 0;
const STAYS: usize = 1;
const FLASH: usize = 2;

/// Blocks are larger than what clients write at times, and buckets are shared.
fn shared_buckets(nbuckets: u64) -> Layout {
    let two = Layout::sized(CacheMode::Writeback, nbuckets, 256).and_backing(256, CacheMode::Writeback);
    Layout { bucket_sectors: 16, ..two }
}

fn scenario(seed: u64) -> Scenario {
    Scenario::new(seed, shared_buckets(256), 64)
}

async fn open(b: &Boot) {
    b.open_with(SetOptions::default()).await;
    for i in [DETACHED, STAYS] {
        b.tune(i, "sequential_cutoff", "0").await;
        b.tune(i, "writeback_percent", "0").await;
    }
    b.tune(STAYS, "writeback_running", "0").await;
}

/// Both devices fill the cache in turns, overwrite, and read; so their data shares buckets, and old versions are
/// everywhere.
async fn use_it(b: &Boot) {
    for round in 0..3 {
        for n in 0..16 {
            let at = (n * 13 + round * 5) % 240;
            assert!(b.clients[DETACHED].write(at, 3, n % 5 == 0).await);
            assert!(b.clients[STAYS].write(at, 2, n % 7 == 0).await);
            assert!(b.clients[FLASH].write(at % 60, 2, false).await);
            assert!(b.clients[DETACHED].read((at + 100) % 240, 8).await.is_some());
            assert!(b.clients[STAYS].read((at + 50) % 240, 8).await.is_some());
        }
    }
}

/// Sectors of the medium that hold data of a volume.
fn on_medium(disk: &SimDisk, volume: usize) -> Vec<u64> {
    let image = disk.image();
    (0..image.size().0)
        .filter(|at| {
            let bytes = image.read_vec(Sector(*at), Sectors(1));
            matches!(decode(&bytes), Content::Data { volume: v, .. } if usize::from(v) == volume)
        })
        .collect()
}

async fn detach(b: &Boot) {
    b.set().detach(&b.volume(DETACHED)).await.unwrap();
}

fn assert_wiped(cache: &Rc<SimDisk>) {
    let left = on_medium(cache, DETACHED);
    assert!(left.is_empty(), "{} sectors of the detached device are left: {left:?}", left.len());
}

/// Without a wipe, everything is still there; with it nothing, also on the medium behind a volatile cache.
#[test]
fn nothing_is_left_of_a_detached_device() {
    for seed in 0..8 {
        let mut scenario = scenario(seed);
        scenario.boot(|b| async move {
            open(&b).await;
            use_it(&b).await;
            detach(&b).await;
            assert!(on_medium(&b.cache, DETACHED).len() > 50, "a detach alone leaves the data");
            let wiped = b.set().wipe().await.unwrap();
            assert!(
                wiped.whole_buckets > 0 && wiped.shared_buckets > 0 && wiped.zeroed > Sectors(64),
                "{wiped:?}"
            );
            assert_wiped(&b.cache);
            assert!(b.clients[STAYS].write(200, 8, true).await);
        });
        scenario.power_loss(Retained::Nothing);
        assert_wiped(&scenario.hardware.cache);
        scenario.judge().happy_end();
    }
}

/// Zeros would take room in a file with holes, so it is discarded. What it does not make zeros is overwritten all the same:
/// a discard of this disk leaves the data, or makes it anything.
#[test]
fn a_discard_is_not_believed() {
    for seed in 0..4 {
        let mut scenario = scenario(seed);
        scenario.boot(|mut b| async move {
            b.parts.cache = Disk::new(WithHoles::new(b.cache.clone()), b.rt.clone());
            open(&b).await;
            use_it(&b).await;
            detach(&b).await;
            b.set().wipe().await.unwrap();
            assert_wiped(&b.cache);
        });
        scenario.power_loss(Retained::Nothing).judge().happy_end();
    }
}

/// Clients of the other volumes send requests all the time, and read what they wrote: a wipe may overwrite a place that a reader has
/// just looked up.
#[test]
fn others_are_served_meanwhile() {
    for seed in 0..12 {
        let mut scenario = scenario(seed);
        scenario.boot(|b| async move {
            open(&b).await;
            use_it(&b).await;
            b.tune(STAYS, "writeback_running", "1").await;
            b.tune(STAYS, "writeback_delay", "0").await;
            detach(&b).await;
            let set = b.set();
            let wipe = b.rt.spawn(async move { set.wipe().await });
            let (others, rt) = (b.clone(), b.rt.clone());
            let tasks: Vec<_> = (0..4_u64)
                .map(|task| {
                    let b = others.clone();
                    rt.spawn(async move {
                        for n in 0..150 {
                            let at = (n * 29 + task * 61) % 240;
                            assert!(b.clients[STAYS].write(at, 2, n % 9 == 0).await);
                            assert!(b.clients[STAYS].read((at + 1) % 240, 12).await.is_some());
                            assert!(b.clients[FLASH].write(at % 60, 3, false).await);
                            assert!(b.clients[FLASH].read(at % 50, 12).await.is_some());
                            // It is served alone: nothing of this may come to the cache device.
                            assert!(b.clients[DETACHED].write(at, 2, false).await);
                            assert!(b.clients[DETACHED].read(at, 2).await.is_some());
                        }
                    })
                })
                .collect();
            for t in tasks {
                t.await;
            }
            wipe.await.unwrap();
            assert_wiped(&b.cache);
            b.read_all(STAYS).await;
            b.read_all(FLASH).await;
        });
        scenario.power_loss(Retained::Some(2)).judge().happy_end();
    }
}

/// Power losses before every effect of a detach with its wipe, while others write; several outcomes of each.
#[test]
fn a_crash_hurts_nobody() {
    let crashes = every_crash(
        5,
        || Scenario::new(5, shared_buckets(128), 64),
        |b| async move {
            open(&b).await;
            use_it(&b).await;
            b.stop().await;
        },
        |b| async move {
            open(&b).await;
            assert!(b.clients[DETACHED].write(7, 9, false).await);
            assert!(b.clients[STAYS].write(7, 9, false).await);
            detach(&b).await;
            let beside: Vec<_> =
                (0..12).map(|n| b.write_beside(STAYS, n * 19 % 240, 3, n % 3 == 0)).collect();
            let set = b.set();
            let wipe = b.rt.spawn(async move { set.wipe().await });
            for w in beside {
                assert!(w.await);
            }
            assert!(b.clients[STAYS].write(0, 40, false).await);
            wipe.await.unwrap();
            assert_wiped(&b.cache);
            assert!(b.clients[STAYS].flush().await);
        },
        1,
    );
    assert!(crashes > 200, "{crashes} crashes");
}

/// A wipe that a crash interrupted is run again, and does the rest: the operator does not have to name what was detached.
#[test]
fn a_wipe_is_run_again_after_a_crash() {
    for effects in [5, 40, 120] {
        let mut scenario = scenario(effects);
        scenario.boot(move |b| async move {
            open(&b).await;
            use_it(&b).await;
            detach(&b).await;
            let set = b.set();
            b.rt.spawn(async move { set.wipe().await });
            let until = b.world.effects() + effects;
            while b.world.effects() < until {
                b.rt.yield_now().await;
                b.sleep_ms(1).await;
            }
        });
        scenario.power_loss(Retained::Some(2)).judge();
        assert!(!on_medium(&scenario.hardware.cache, DETACHED).is_empty(), "it was not at its end");
        scenario.boot(|b| async move {
            let set = engine::CacheSet::open(b.parts.cache.clone(), SetOptions::default()).await.unwrap();
            set.wipe().await.unwrap();
            assert_wiped(&b.cache);
            set.stop().await.unwrap();
        });
        scenario.power_loss(Retained::Nothing).judge().happy_end();
    }
}

/// A device that refuses says so, and the wipe says what is left; the next one does it.
#[test]
fn a_wipe_that_fails_says_so() {
    let mut scenario = scenario(3);
    scenario.boot(|b| async move {
        open(&b).await;
        use_it(&b).await;
        detach(&b).await;
        b.set().set("io_error_limit", "100").await.unwrap();
        let matching = Matching::all(Kind::Write);
        b.cache.set_faults(vec![Fault { matching, skip: 10, count: 1 }]);
        let e = b.set().wipe().await.unwrap_err().to_string();
        assert!(e.contains("buckets may still hold data") && e.contains("ubcache wipe"), "{e}");
        b.set().wipe().await.unwrap();
        assert_wiped(&b.cache);
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// The set fails while a wipe is under way: the wipe says why it did not end.
#[test]
fn a_wipe_of_a_set_that_fails_says_why() {
    let mut scenario = scenario(12);
    scenario.boot(|b| async move {
        open(&b).await;
        use_it(&b).await;
        detach(&b).await;
        b.cache.hold(Matching::all(Kind::Write));
        let set = b.set();
        let wipe = b.rt.spawn(async move { set.wipe().await });
        b.sleep_ms(10).await;
        assert!(b.cache.held() > 0, "zeros are being written");
        b.cache.set_faults(vec![Fault { matching: Matching::all(Kind::Flush), skip: 0, count: 100 }]);
        b.clients[STAYS].set_tolerant(true);
        b.clients[STAYS].flush().await;
        b.cache.release();
        let e = wipe.await.unwrap_err().to_string();
        assert!(e.contains("buckets may still hold data") && !e.contains("given up"), "{e}");
    });
    scenario.power_loss(Retained::Nothing);
}

/// A wipe that is given up, or whose set is stopped, leaves a set that works.
#[test]
fn a_wipe_can_be_given_up() {
    let mut scenario = scenario(4);
    scenario.boot(|b| async move {
        open(&b).await;
        use_it(&b).await;
        detach(&b).await;
        for _ in 0..20 {
            let set = b.set();
            let _ = io::sync::select(
                Box::pin(async move { set.wipe().await }),
                b.rt.sleep(io::Nanos::from_us(300)),
            )
            .await;
            assert!(b.clients[STAYS].write(0, 64, true).await);
        }
        let set = b.set();
        let wipe = b.rt.spawn(async move { set.wipe().await });
        b.rt.yield_now().await;
        b.stop().await;
        let _ = wipe.await;
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// A reader has looked a key up and waits for the data; then the data is replaced, and a wipe overwrites its old place. The
/// reader gets zeros from the device, and must look again.
#[test]
fn a_reader_that_a_wipe_overtakes_looks_again() {
    let mut scenario = scenario(6);
    scenario.boot(|b| async move {
        open(&b).await;
        use_it(&b).await;
        b.set().set("overwrite_in_place", "off").await.unwrap();
        assert!(b.clients[STAYS].write(100, 8, true).await);
        // Metadata is in memory: only data is read.
        b.cache.hold(Matching::all(Kind::Read));
        let (whole, part) = (b.clients[STAYS].clone(), b.clients[STAYS].clone());
        let readers = [
            b.rt.spawn(async move { whole.read(100, 8).await }),
            b.rt.spawn(async move { part.read(98, 8).await }),
        ];
        b.sleep_ms(10).await;
        assert!(b.cache.held() >= 2);
        assert!(b.clients[STAYS].write(100, 8, true).await);
        b.set().wipe().await.unwrap();
        b.cache.release();
        for r in readers {
            assert!(r.await.is_some());
        }
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// A wipe is durable when it ends, without a client's flush after it.
#[test]
fn a_wipe_that_has_ended_is_durable() {
    let mut scenario = scenario(11);
    scenario.boot(|b| async move {
        open(&b).await;
        use_it(&b).await;
        detach(&b).await;
        b.set().wipe().await.unwrap();
        let (done, all) = b.set().wipe_progress();
        assert!(done > 0 && done <= all, "{done} of {all} buckets");
    });
    scenario.power_loss(Retained::Nothing);
    assert_wiped(&scenario.hardware.cache);
    scenario.judge().happy_end();
}
