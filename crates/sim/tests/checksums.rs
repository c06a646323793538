//! Checksums of cached data: damage is noticed before it reaches a client or the backing device, and nothing else counts
//! as damage.
#![allow(clippy::unwrap_used)]

use std::pin::pin;

use engine::SetOptions;
use engine::tunables::Overwrite;
use format::{CacheMode, Sector, Sectors};
use io::Nanos;
use io::sync::select;
use sim::damaged_data::{Tally, damage, damage_many, flip};
use sim::disk::{Fault, Kind, Matching, Retained};
use sim::hardware::Layout;
use sim::image::Image;
use sim::judge;
use sim::scenario::{Boot, Scenario};
use sim::stamp::{Content, SECTOR, decode};
use sim::violation::Violation;

async fn open(b: &Boot) {
    open_with(b, |_| ()).await;
}

/// Opens the set with other options. No stream bypasses the cache, and dirty data stays dirty.
async fn open_with(b: &Boot, change: impl FnOnce(&mut SetOptions)) {
    let mut options = SetOptions::default();
    change(&mut options);
    b.open_with(options).await;
    b.stay_dirty(0).await;
}

/// The checksums of the first read are in memory, those of the second on the device.
#[test]
fn damaged_clean_data_is_read_from_the_backing_device() {
    let mut scenario = Scenario::new(1, Layout::with_checksums(CacheMode::Writeback), 0);
    for _ in 0..2 {
        scenario.boot_and_stop(|b| async move {
            open(&b).await;
            assert!(b.clients[0].read(100, 50).await.is_some());
            b.sleep_ms(1000).await;
            assert_eq!(flip(&b, 110..113), 3);
            // The client knows what it must read.
            assert!(b.clients[0].read(100, 50).await.is_some());
            let damaged = damage(b.set().take_events());
            assert_eq!(damaged, [(110, false), (111, false), (112, false)]);
            let counters = b.set().checksum_counters();
            assert_eq!((counters.damaged_blocks, counters.corrected_blocks), (3, 0), "{counters:?}");
            b.sleep_ms(1000).await;
            assert!(b.clients[0].read(100, 50).await.is_some());
            assert_eq!(b.set().checksum_counters().damaged_blocks, 3, "it is cached anew");
        });
    }
    scenario.judge().happy_end();
}

/// Dirty data that is damaged fails, is not written back, and counts again when it is overwritten.
#[test]
pub fn damaged_dirty_data_is_neither_served_nor_written_back() {
    for is_reopened in [false, true] {
        let mut scenario = Scenario::new(1, Layout::with_checksums(CacheMode::Writeback), 0);
        scenario.boot_and_stop(move |b| async move {
            open(&b).await;
            assert!(b.clients[0].write(100, 50, true).await);
            // The footers are on the device.
            b.stop().await;
        });
        scenario.boot(move |b| async move {
            open(&b).await;
            if !is_reopened {
                assert!(b.clients[0].write(100, 50, true).await);
            }
            // Data that was replaced is still there, too.
            assert!(flip(&b, 110..113) >= 3);
            b.clients[0].set_tolerant(true);
            assert!(b.clients[0].read(100, 50).await.is_none(), "the damage was served");
            assert!(b.clients[0].read(100, 10).await.is_some() && b.clients[0].read(113, 37).await.is_some());
            let before = b.backings[0].image();
            let volume = b.volume(0);
            let drained = b.rt.spawn(async move { volume.drained().await });
            b.sleep_ms(60_000).await;
            let written: Vec<u64> = (0..200)
                .filter(|s| {
                    let (mut old, mut new) = ([0; SECTOR], [0; SECTOR]);
                    before.read(Sector(16 + s), &mut old);
                    b.backings[0].image().read(Sector(16 + s), &mut new);
                    old != new
                })
                .collect();
            assert_eq!(written, (100..110).chain(113..150).collect::<Vec<_>>());
            assert_eq!(b.volume(0).dirty_sectors(), Sectors(3));
            let refused = drained.await.unwrap_err().to_string();
            assert!(
                refused.contains("damaged dirty data in the cache: 3 sectors, the first at sector 110"),
                "{refused}"
            );
            assert_eq!(damage(b.set().take_events()), [(110, true), (111, true), (112, true)]);
            assert!(b.clients[0].write(110, 3, true).await);
            assert!(b.clients[0].read(100, 50).await.is_some());
            b.volume(0).drained().await.unwrap();
        });
        scenario.power_loss(Retained::Nothing).judge().happy_end();
    }
}

/// The judge sees damage that the engine has not read yet.
#[test]
fn the_judge_compares_data_with_its_footers() {
    let mut scenario = Scenario::new(1, Layout::with_checksums(CacheMode::Writeback), 0);
    scenario.boot_and_stop(|b| async move {
        open(&b).await;
        assert!(b.clients[0].write(100, 50, true).await && b.clients[0].read(300, 8).await.is_some());
        b.stop().await;
    });
    let (cache, backing) = (scenario.hardware.cache.image(), scenario.hardware.backings[0].image());
    assert_eq!(judge::check(&cache, std::slice::from_ref(&backing)).unwrap(), 58);
    for sector in [120, 303] {
        let mut cache = cache.clone();
        let at = (0..256 * 8).find(|at| {
            let found = decode(&read(&cache, *at, 1));
            matches!(found, Content::Data { volume: 0, sector: s, .. } if s == sector)
        });
        let mut bytes = read(&cache, at.unwrap(), 1);
        bytes[300] ^= 1;
        cache.write(Sector(at.unwrap()), &bytes);
        let judged = judge::check(&cache, std::slice::from_ref(&backing)).unwrap_err();
        assert!(matches!(judged, Violation::Structures { damaged: 1, .. }), "{judged}");
    }
}

/// The second read of a damaged block fails: there is nothing but the data that did not match.
#[test]
fn a_damaged_block_that_cannot_be_read_again_is_damaged() {
    let mut scenario = Scenario::new(1, Layout::with_checksums(CacheMode::Writeback), 0);
    scenario.boot(|b| async move {
        open(&b).await;
        assert!(b.clients[0].write(100, 1, true).await);
        assert_eq!(flip(&b, 100..101), 1);
        b.clients[0].set_tolerant(true);
        b.cache.set_faults(vec![Fault { matching: Matching::all(Kind::Read), skip: 1, count: u32::MAX }]);
        assert!(b.clients[0].read(100, 1).await.is_none(), "the damage was served");
        b.cache.set_faults(Vec::new());
        assert_eq!(damage(b.set().take_events()), [(100, true)]);
        assert!(b.clients[0].write(100, 1, true).await && b.clients[0].read(100, 1).await.is_some());
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// A stop writes the footers of all buckets that were overwritten in place, and flushes for all of them together.
#[test]
fn a_stop_leaves_no_block_without_a_checksum() {
    let mut scenario = Scenario::new(1, Layout::with_checksums(CacheMode::Writeback), 0);
    for round in 0..2 {
        scenario.boot(move |b| async move {
            open_with(&b, |o| o.tunables.overwrite_in_place = Overwrite::Always).await;
            if round == 0 {
                for at in (0..700).chain(0..700) {
                    assert!(b.clients[0].write(at, 1, false).await);
                }
                let flushes = b.cache.counters().flushes;
                b.stop().await;
                let more = b.cache.counters().flushes - flushes;
                assert!(more <= 8, "{more} flushes for a hundred buckets");
                return;
            }
            assert!(b.clients[0].read(0, 700).await.is_some());
            let counters = b.set().checksum_counters();
            assert_eq!((counters.verified_blocks, counters.unverified_blocks), (700, 0));
            b.stop().await;
        });
        scenario.power_loss(Retained::Nothing);
    }
    scenario.judge().happy_end();
}

/// A power loss keeps the footer and loses the data that was overwritten before it. The older data is back, and does not
/// count as damaged.
#[test]
pub fn a_footer_waits_for_data_that_was_overwritten_in_place() {
    for n in 0..40 {
        let mut scenario = Scenario::new(n, Layout::with_checksums(CacheMode::Writeback), 0);
        scenario.boot(|b| async move {
            open_with(&b, |o| {
                (o.tunables.overwrite_in_place, o.tunables.journal_delay_ms) = (Overwrite::Always, 60_000)
            })
            .await;
            // The first footer waits for a prio chain, whose entry follows a flush.
            assert!(b.clients[0].write(200, 7, true).await);
            b.sleep_ms(1000).await;
            assert!(b.clients[0].write(0, 1, true).await && b.clients[0].write(0, 1, false).await);
            // The bucket is full, and gets its footer.
            assert!(b.clients[0].write(100, 6, false).await);
            b.sleep_ms(1000).await;
            assert_eq!(b.set().checksum_counters().footers_written, 2);
        });
        scenario.power_loss(Retained::Some(n)).judge().happy_end();
    }
}

/// Packing reads damaged data and would give its copy a checksum of its own.
#[test]
pub fn damaged_data_is_not_packed() {
    let mut scenario = Scenario::new(1, Layout::with_checksums(CacheMode::Writeback), 0);
    scenario.boot(|b| async move {
        open_with(&b, |o| o.tunables.overwrite_in_place = Overwrite::Off).await;
        // In each bucket of seven blocks two are left.
        for n in 0..70 {
            assert!(b.clients[0].write(n, 1, false).await);
        }
        for n in (0..70).filter(|n| n % 7 > 1) {
            assert!(b.clients[0].write(n, 1, false).await);
        }
        b.set().set("copy_gc_enabled", "1").await.unwrap();
        assert!(flip(&b, 14..15) >= 1);
        b.set().gc().await.unwrap();
        assert!(b.set().counters().moved_extents > 4, "{:?}", b.set().counters());
        b.clients[0].set_tolerant(true);
        assert!(b.clients[0].read(14, 1).await.is_none(), "the damage was served");
        assert!(b.clients[0].read(0, 14).await.is_some() && b.clients[0].read(15, 55).await.is_some());
        assert!(b.clients[0].write(14, 1, true).await);
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// Data is overwritten in place at all moments of the life of its bucket: nothing counts as damaged, neither at once nor
/// after a power loss.
#[test]
pub fn data_that_is_overwritten_in_place_does_not_count_as_damaged() {
    for retained in [Retained::Nothing, Retained::Everything, Retained::Some(3), Retained::Some(8)] {
        let mut scenario = Scenario::new(3, Layout::with_checksums(CacheMode::Writeback), 0);
        for round in 0..3 {
            scenario.boot(move |b| async move {
                open_with(&b, |o| o.tunables.overwrite_in_place = Overwrite::Always).await;
                for i in 0..100 {
                    assert!(b.clients[0].write((i * 7 + round) % 120, 1 + i % 3, i % 10 == 0).await);
                    if i % 20 == 0 {
                        assert!(b.clients[0].flush().await);
                    }
                }
                b.read_all(0).await;
                let counters = b.set().checksum_counters();
                assert!(counters.verified_blocks > 0 && counters.footers_written > 0, "{counters:?}");
                assert_eq!(counters.damaged_blocks, 0);
                assert!(round == 0 || counters.footers_erased > 0, "{counters:?}");
            });
            scenario.power_loss(retained);
        }
        scenario.judge().happy_end();
    }
}

/// A wipe writes zeros over a footer, which are not durable at once. In the next boot the footer is missing, and dirty data of
/// its bucket is overwritten in place, durably. The power fails: the old footer must not come back over the new data.
#[test]
pub fn a_footer_that_a_wipe_has_overwritten_does_not_come_back_over_other_data() {
    for us in [200, 500, 1000, 2000, 4000, 8000, 16_000, 32_000] {
        let layout = Layout::with_checksums(CacheMode::Writeback);
        let mut scenario = Scenario::new(us, layout, 0);
        scenario.boot_and_stop(|b| async move {
            open(&b).await;
            assert!(b.clients[0].write(0, 7, true).await);
            b.stop().await;
        });
        scenario.boot(move |b| async move {
            open_with(&b, |options| {
                options.tunables.overwrite_in_place = Overwrite::Always;
                options.tunables.journal_delay_ms = 60_000;
            })
            .await;
            b.sleep_ms(1000).await;
            // The operator gives the wipe up.
            drop(select(pin!(b.set().wipe()), b.rt.sleep(Nanos::from_us(us))).await);
            b.sleep_ms(10).await;
            assert!(b.clients[0].read(0, 7).await.is_some());
            assert!(b.clients[0].write(3, 1, true).await);
        });
        scenario.power_loss(Retained::Nothing);
        scenario.happy_end();
    }
}

/// Damaged dirty data that a client overwrites in its place is as good as any other: it is written back.
#[test]
fn damaged_data_that_is_overwritten_in_place_is_written_back() {
    let mut scenario = Scenario::new(1, Layout::with_checksums(CacheMode::Writeback), 0);
    scenario.boot(|b| async move {
        open_with(&b, |options| options.tunables.overwrite_in_place = Overwrite::Always).await;
        let c = &b.clients[0];
        assert!(c.write(100, 50, true).await);
        assert!(flip(&b, 110..113) >= 3);
        c.set_tolerant(true);
        for sector in 110..113 {
            assert!(c.read(sector, 1).await.is_none(), "the damage was served");
        }
        c.set_tolerant(false);
        assert!(c.write(110, 3, true).await && c.read(100, 50).await.is_some());
        b.volume(0).drained().await.unwrap();
    });
}

/// Writes two full buckets of dirty data, and their footers.
async fn fill_two_buckets(b: Boot) {
    open(&b).await;
    assert!(b.clients[0].write(0, 7, true).await && b.clients[0].write(100, 7, true).await);
    b.stop().await;
}

/// The first overwriting in place of a bucket replaces its footer by zeros. The checksums of its other blocks stay known, also if
/// nothing has read the footer since the start.
#[test]
fn damage_beside_data_that_is_overwritten_in_place_is_noticed() {
    let mut scenario = Scenario::new(1, Layout::with_checksums(CacheMode::Writeback), 0);
    scenario.boot_and_stop(fill_two_buckets);
    scenario.boot(|b| async move {
        open_with(&b, |options| options.tunables.overwrite_in_place = Overwrite::Always).await;
        assert_eq!(flip(&b, 3..4), 1);
        assert!(b.clients[0].write(0, 1, false).await);
        assert_eq!(b.set().counters().overwrites, 1);
        b.clients[0].set_tolerant(true);
        assert!(b.clients[0].read(3, 1).await.is_none(), "the damage was served");
        assert!(b.clients[0].write(3, 1, true).await);
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// A read waits for the footer of its bucket while the footer of another bucket is replaced by zeros.
#[test]
fn damage_is_noticed_while_another_bucket_is_overwritten_in_place() {
    let mut scenario = Scenario::new(1, Layout::with_checksums(CacheMode::Writeback), 0);
    scenario.boot_and_stop(fill_two_buckets);
    scenario.boot(|b| async move {
        open_with(&b, |options| options.tunables.overwrite_in_place = Overwrite::Always).await;
        let image = b.cache.image();
        let is_third =
            |at: &u64| matches!(decode(&read(&image, *at, 1)), Content::Data { volume: 0, sector: 3, .. });
        let footer = (0..256 * 8).find(is_third).unwrap() / 8 * 8 + 7;
        assert_eq!(flip(&b, 3..4), 1);
        b.clients[0].set_tolerant(true);
        b.cache.hold(Matching { kind: Kind::Read, range: footer..footer + 1 });
        let reader = b.clients[0].clone();
        let reading = b.rt.spawn(async move { reader.read(3, 1).await });
        b.sleep_ms(100).await;
        assert_eq!(b.cache.held(), 1);
        assert!(b.clients[0].write(100, 1, false).await);
        assert_eq!(b.set().counters().overwrites, 1);
        b.cache.release();
        assert!(reading.await.is_none(), "the damage was served");
        assert!(b.clients[0].write(3, 1, true).await);
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// Releases the reads of the cache device that are held back, and holds back those that follow. Waits for the first of them.
async fn release_until_the_next_read(b: &Boot) {
    b.cache.release();
    b.cache.hold(Matching::all(Kind::Read));
    b.wait_until(|| b.cache.held() > 0).await;
}

/// The device returns wrong data once while packing reads it, and the right data when it is read again. The wrong data is not
/// moved: its new place would get a checksum of it.
#[test]
fn data_that_was_read_wrong_once_is_not_packed() {
    let mut scenario = Scenario::new(1, Layout::with_checksums(CacheMode::Writeback), 0);
    scenario.boot(|b| async move {
        open_with(&b, |o| o.tunables.overwrite_in_place = Overwrite::Off).await;
        for n in 0..70 {
            assert!(b.clients[0].write(n, 1, false).await);
        }
        for n in (0..70).filter(|n| n % 7 > 1) {
            assert!(b.clients[0].write(n, 1, false).await);
        }
        b.set().set("copy_gc_enabled", "1").await.unwrap();
        b.cache.hold(Matching::all(Kind::Read));
        let set = b.set();
        let packing = b.rt.spawn(async move { set.gc().await });
        b.sleep_ms(1000).await;
        assert!(b.cache.held() > 0, "packing reads");
        let place = b.place_of(14);
        let right = read(&b.cache.image(), place.0, 1);
        assert_eq!(flip(&b, 14..15), 1);
        release_until_the_next_read(&b).await;
        b.cache.put(place, &right);
        b.cache.release();
        packing.await.unwrap();
        assert!(b.set().counters().moved_extents > 4, "{:?}", b.set().counters());
        let counters = b.set().checksum_counters();
        assert_eq!((counters.corrected_blocks, counters.damaged_blocks), (1, 0), "{counters:?}");
        b.read_all(0).await;
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// A block does not match. While it is read a second time, a client overwrites it in place, and the device answers the read
/// with what it had before. That is no damage.
#[test]
fn damaged_data_that_is_overwritten_while_it_is_read_again_does_not_count() {
    let mut scenario = Scenario::new(1, Layout::with_checksums(CacheMode::Writeback), 0);
    scenario.boot(|b| async move {
        open_with(&b, |o| o.tunables.overwrite_in_place = Overwrite::Always).await;
        let c = b.clients[0].clone();
        assert!(c.write(100, 1, true).await);
        let place = b.place_of(100);
        assert_eq!(flip(&b, 100..101), 1);
        let old = read(&b.cache.image(), place.0, 1);
        c.set_tolerant(true);
        b.cache.hold(Matching::all(Kind::Read));
        let reader = c.clone();
        let reading = b.rt.spawn(async move { reader.read(100, 1).await });
        b.sleep_ms(10).await;
        release_until_the_next_read(&b).await;
        assert!(c.write(100, 1, true).await);
        assert_eq!(b.set().counters().overwrites, 1);
        let new = read(&b.cache.image(), place.0, 1);
        assert_ne!(old, new);
        b.cache.put(place, &old);
        release_until_the_next_read(&b).await;
        b.cache.put(place, &new);
        b.cache.release();
        assert!(reading.await.is_some(), "the data counts as damaged");
        assert_eq!(damage(b.set().take_events()), []);
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// Damaged clean data is a hole before the backing device gets newer data, also if a crash brings back the leaf that has its
/// key. The device returned wrong data for a while, and the data that is older than the backing device is right again.
#[test]
fn invalidated_clean_data_does_not_come_back_over_newer_data() {
    let mut scenario = Scenario::new(1, Layout::with_checksums(CacheMode::Writethrough), 0);
    scenario.boot(|b| async move {
        open(&b).await;
        let c = &b.clients[0];
        assert!(c.write(100, 7, true).await);
        // Old enough for the leaf to be written.
        b.sleep_ms(90_000).await;
        b.tune(0, "cache_mode", "none").await;
        let place = b.place_of(103);
        let right = read(&b.cache.image(), place.0, 1);
        assert_eq!(flip(&b, 103..104), 1);
        assert!(c.read(103, 1).await.is_some());
        assert_eq!(damage(b.set().take_events()), [(103, false)]);
        assert!(c.write(103, 1, true).await);
        b.cache.put(place, &right);
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// The zeros over a footer cannot be written. The footer may still be there, so the next overwriting in place writes them
/// again first.
#[test]
fn a_footer_that_could_not_be_replaced_is_replaced_later() {
    for seed in 0..4 {
        let mut scenario = Scenario::new(seed, Layout::with_checksums(CacheMode::Writeback), 0);
        scenario.boot_and_stop(|b| async move {
            open(&b).await;
            assert!(b.clients[0].write(0, 7, true).await);
            b.stop().await;
        });
        scenario.boot(|b| async move {
            open_with(&b, |o| o.tunables.overwrite_in_place = Overwrite::Always).await;
            let c = &b.clients[0];
            assert!(c.read(0, 7).await.is_some());
            let footer = b.place_of(6).0 + 1;
            assert_eq!(footer % 8, 7);
            let matching = Matching { kind: Kind::DurableWrite, range: footer..footer + 1 };
            b.cache.set_faults(vec![Fault { matching, skip: 0, count: 1 }]);
            assert!(c.write(3, 1, true).await && c.write(4, 1, true).await);
            assert_eq!(b.set().counters().overwrites, 1, "the first write went to a new place");
            assert_eq!(b.set().checksum_counters().footers_erased, 2);
        });
        scenario.power_loss(Retained::Nothing).judge().happy_end();
    }
}

/// The bucket that is open at a stop gets its footer, too.
#[test]
fn a_stop_writes_the_footer_of_the_open_bucket() {
    let mut scenario = Scenario::new(1, Layout::with_checksums(CacheMode::Writeback), 0);
    scenario.boot_and_stop(|b| async move {
        open(&b).await;
        assert!(b.clients[0].write(0, 3, true).await);
        b.stop().await;
    });
    scenario.boot(|b| async move {
        open(&b).await;
        assert!(b.clients[0].read(0, 3).await.is_some());
        let counters = b.set().checksum_counters();
        assert_eq!((counters.verified_blocks, counters.unverified_blocks), (3, 0));
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// A process fills buckets, and then no durable key names them: other data replaces the data before a stop, or the keys of
/// clean copies are lost with the power. A kernel, which ignores footers, then fills these buckets in part. Its data is sound.
#[test]
pub fn data_of_a_kernel_does_not_count_as_damaged() {
    for stops in [true, false] {
        let mut scenario = Scenario::new(1, Layout::with_checksums(CacheMode::Writeback), 0);
        scenario.boot(move |b| async move {
            open_with(&b, |o| o.tunables.overwrite_in_place = Overwrite::Off).await;
            let c = &b.clients[0];
            for _ in 0..2 {
                assert!(if stops { c.write(0, 7, true).await } else { c.read(0, 7).await.is_some() });
                b.sleep_ms(1000).await;
            }
            assert!(b.set().checksum_counters().footers_written > 0);
            if stops {
                b.stop().await;
            }
        });
        scenario.power_loss(Retained::Everything);
        scenario.hardware.turn_checksums_off();
        for n in 0..4 {
            scenario.boot_and_stop(move |b| async move {
                open(&b).await;
                assert!(b.clients[0].write(100 + 10 * n, 3, true).await);
                b.stop().await;
            });
        }
        scenario.hardware.turn_checksums_on();
        scenario.boot(|b| async move {
            open(&b).await;
            b.read_all(0).await;
            assert_eq!(damage(b.set().take_events()), []);
        });
        scenario.power_loss(Retained::Nothing).judge().happy_end();
    }
}

fn read(image: &Image, at: u64, sectors: u64) -> Vec<u8> {
    image.read_vec(Sector(at), Sectors(sectors))
}

/// A million are a part of `make soak`: `ubcache-sim --damage 1000000`.
#[test]
fn damaged_blocks_reach_neither_clients_nor_the_backing_device() {
    let tally = damage_many(20_000, 1..);
    println!("{tally:?}");
    let Tally { flipped, misdirected, lost, reported_dirty, reported_clean, .. } = tally;
    assert!(flipped > 8000 && misdirected > 4000 && lost > 4000, "{tally:?}");
    assert!(reported_dirty > 2000 && reported_clean > 2000, "{tally:?}");
}
