//! Checksums of cached data: damage is noticed before it reaches a client or the backing device, and nothing else counts
//! as damage.
#![allow(clippy::unwrap_used)]

use std::cell::Cell;
use std::rc::Rc;

use engine::tunables::Overwrite;
use engine::{SetEvent, SetOptions};
use format::checksum::crc32c;
use format::{
    BucketNr, CacheMode, FooterId, FooterKey, FooterLayout, Gen, Geometry, Sector, Sectors, parse_footer,
};
use io::Rng;
use sim::disk::{Fault, Kind, Matching, Retained};
use sim::hardware::{Layout, SET_UUID};
use sim::image::Image;
use sim::judge;
use sim::scenario::{Boot, Scenario};
use sim::stamp::{Content, SECTOR, decode};

/// Buckets of seven blocks of data and a footer.
fn layout(mode: CacheMode) -> Layout {
    Layout { checksums: true, ..Layout::small(mode) }
}

/// Flips a bit in each sector of the cache device that has data of one of these sectors of volume 0. Returns how many.
fn flip(b: &Boot, sectors: std::ops::Range<u64>) -> usize {
    let image = b.cache.image();
    let mut flipped = 0;
    for at in 0..256 * 8 {
        let mut bytes = [0; SECTOR];
        image.read(Sector(at), &mut bytes);
        if matches!(decode(&bytes), Content::Data { volume: 0, sector, .. } if sectors.contains(&sector)) {
            bytes[77] ^= 4;
            b.cache.put(Sector(at), &bytes);
            flipped += 1;
        }
    }
    flipped
}

fn damage(events: Vec<SetEvent>) -> Vec<(u64, bool)> {
    let of = |e: &SetEvent| match e {
        SetEvent::DamagedData { sector, dirty, .. } => Some((sector.0, *dirty)),
        _ => None,
    };
    let mut found: Vec<_> = events.iter().filter_map(of).collect();
    found.sort_unstable();
    found
}

async fn open(b: &Boot) {
    open_with(b, |_| ()).await;
}

/// Opens the set with other options. No stream bypasses the cache, and dirty data stays dirty.
async fn open_with(b: &Boot, change: impl FnOnce(&mut SetOptions)) {
    let mut options = SetOptions::default();
    change(&mut options);
    b.open_with(options).await;
    b.tune(0, "sequential_cutoff", "0").await;
    b.tune(0, "writeback_running", "0").await;
}

/// The checksums of the first read are in memory, those of the second on the device.
#[test]
fn damaged_clean_data_is_read_from_the_backing_device() {
    let mut scenario = Scenario::new(1, layout(CacheMode::Writeback), 0);
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
        let mut scenario = Scenario::new(1, layout(CacheMode::Writeback), 0);
        scenario.boot_and_stop(move |b| async move {
            open(&b).await;
            assert!(b.clients[0].write(100, 50, true).await);
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
                refused.contains("3 sectors of dirty data are damaged in the cache, the first at sector 110"),
                "{refused}"
            );
            assert_eq!(damage(b.set().take_events()), [(110, true), (111, true), (112, true)]);
            assert!(b.clients[0].write(110, 3, true).await);
            assert!(b.clients[0].read(100, 50).await.is_some());
            b.volume(0).drained().await.unwrap();
        });
        scenario.power_cut(Retained::Nothing).judge().happy_end();
    }
}

/// The judge sees damage that the engine has not read yet.
#[test]
fn the_judge_compares_data_with_its_footers() {
    let mut scenario = Scenario::new(1, layout(CacheMode::Writeback), 0);
    scenario.boot_and_stop(|b| async move {
        open(&b).await;
        assert!(b.clients[0].write(100, 50, true).await && b.clients[0].read(300, 8).await.is_some());
        b.stop().await;
    });
    let (cache, backing) = (scenario.hardware.cache.image(), scenario.hardware.backings[0].image());
    assert_eq!(judge::check(&cache, std::slice::from_ref(&backing)), Ok(58));
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
        assert!(judged.contains("1 extents from their checksums"), "{judged}");
    }
}

/// The second read of a damaged block fails: there is nothing but the data that did not match.
#[test]
fn a_damaged_block_that_cannot_be_read_again_is_damaged() {
    let mut scenario = Scenario::new(1, layout(CacheMode::Writeback), 0);
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
    scenario.power_cut(Retained::Nothing).judge().happy_end();
}

/// A stop writes the footers of all buckets that were overwritten in place, and flushes for all of them together.
#[test]
fn a_stop_leaves_no_block_without_a_checksum() {
    let mut scenario = Scenario::new(1, layout(CacheMode::Writeback), 0);
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
        scenario.power_cut(Retained::Nothing);
    }
    scenario.judge().happy_end();
}

/// A power loss keeps the footer and loses the data that was overwritten before it. The older data is back, and does not
/// count as damaged.
#[test]
pub fn a_footer_waits_for_data_that_was_overwritten_in_place() {
    for n in 0..40 {
        let mut scenario = Scenario::new(n, layout(CacheMode::Writeback), 0);
        scenario.boot(|b| async move {
            open_with(&b, |o| {
                (o.tunables.overwrite_in_place, o.tunables.journal_delay_ms) = (Overwrite::Always, 60_000)
            })
            .await;
            assert!(b.clients[0].write(0, 1, true).await && b.clients[0].write(0, 1, false).await);
            // The bucket is full, and gets its footer.
            assert!(b.clients[0].write(100, 6, false).await);
            b.sleep_ms(1000).await;
            assert_eq!(b.set().checksum_counters().footers_written, 1);
        });
        scenario.power_cut(Retained::Some(n)).judge().happy_end();
    }
}

/// Packing reads damaged data and would give its copy a checksum of its own.
#[test]
pub fn damaged_data_is_not_packed() {
    let mut scenario = Scenario::new(1, layout(CacheMode::Writeback), 0);
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
    scenario.power_cut(Retained::Nothing).judge().happy_end();
}

/// Data is overwritten in place at all moments of the life of its bucket: nothing counts as damaged, neither at once nor
/// after a power loss.
#[test]
pub fn data_that_is_overwritten_in_place_does_not_count_as_damaged() {
    for retained in [Retained::Nothing, Retained::Everything, Retained::Some(3), Retained::Some(8)] {
        let mut scenario = Scenario::new(3, layout(CacheMode::Writeback), 0);
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
            scenario.power_cut(retained);
        }
        scenario.judge().happy_end();
    }
}

/// The first sectors of the blocks whose checksum is on the device and matches.
fn verified_blocks(image: &Image, l: &Layout) -> Vec<u64> {
    let geometry =
        Geometry::new(Sectors(l.bucket_sectors), Sectors(l.block_sectors), l.nbuckets, 4, 8).unwrap();
    let layout = FooterLayout::of(&geometry).unwrap();
    let mut found = Vec::new();
    for bucket in 0..l.nbuckets {
        let start = bucket * l.bucket_sectors;
        let (at, size) = layout.place(Sector(start));
        let footer = read(image, at.0, size.0);
        let id =
            FooterId { set_uuid: SET_UUID, bucket: BucketNr(bucket as u32), generation: Gen(footer[40]) };
        let Ok(sums) = parse_footer(&layout, FooterKey(0x5eed), id, &footer) else { continue };
        for block in 0..layout.blocks() {
            let at = start + block as u64 * l.block_sectors;
            if sums.get(block) == Some(crc32c(&read(image, at, l.block_sectors))) {
                found.push(at);
            }
        }
    }
    found
}

fn read(image: &Image, at: u64, sectors: u64) -> Vec<u8> {
    let mut bytes = vec![0; sectors as usize * SECTOR];
    image.read(Sector(at), &mut bytes);
    bytes
}

/// Damages blocks: a flipped bit, a write to the wrong place, or a write that was lost. Returns the number of blocks.
fn damage_blocks(b: &Boot, l: &Layout, rng: &mut Rng) -> u64 {
    let image = b.cache.image();
    let blocks = verified_blocks(&image, l);
    let mut damaged = 0;
    for &at in &blocks {
        if !rng.chance(1, 3) {
            continue;
        }
        let mut bytes = read(&image, at, l.block_sectors);
        let before = bytes.clone();
        match rng.below(4) {
            0 => bytes = read(&image, blocks[rng.below(blocks.len() as u64) as usize], l.block_sectors),
            1 => bytes.fill(0),
            _ => bytes[rng.below(before.len() as u64) as usize] ^= 1 << rng.below(8),
        }
        b.cache.put(Sector(at), &bytes);
        damaged += u64::from(bytes != before);
    }
    damaged
}

/// Random requests, then damage, then reads of everything beside writeback.
async fn live_with_damage(b: Boot, l: Layout, seed: u64) -> u64 {
    let rng = &mut Rng::new(seed);
    let overwrite = if rng.chance(1, 2) { Overwrite::Always } else { Overwrite::Off };
    open_with(&b, |o| o.tunables.overwrite_in_place = overwrite).await;
    let client = b.clients[0].clone();
    for _ in 0..60 {
        let (at, sectors) = (rng.below(300), 1 + rng.below(12));
        match rng.below(3) {
            0 => assert!(client.read(at, sectors).await.is_some()),
            _ => assert!(client.write(at, sectors, rng.chance(1, 4)).await),
        }
    }
    b.sleep_ms(500).await;
    client.set_tolerant(true);
    drop(b.set().take_events());
    let damaged = damage_blocks(&b, &l, rng);
    let volume = b.volume(0);
    let drained = b.rt.spawn(async move { volume.drained().await });
    for _ in 0..2 {
        for at in 0..312 {
            client.read(at, 1 + rng.below(2)).await;
        }
    }
    drop(drained.await);
    let found = damage(b.set().take_events());
    let mut once: Vec<u64> = found.iter().map(|(sector, _)| *sector).collect();
    once.dedup();
    assert_eq!(once.len(), found.len(), "a damaged block was reported twice");
    assert!(found.len() as u64 <= damaged);
    for at in 0..2048 {
        let bytes = read(&b.backings[0].image(), 16 + at, 1);
        let right = matches!(decode(&bytes), Content::Data { volume: 0, sector, .. } if sector == at);
        assert!(right, "sector {at} of the backing device has damaged data");
    }
    damaged
}

/// Damages about `wanted` blocks.
fn many_damaged_blocks(wanted: u64) {
    let (mut damaged, mut seed) = (0, 0);
    while damaged < wanted {
        seed += 1;
        let blocks = [1, 1, 2, 8][seed as usize % 4];
        let mut layout =
            Layout { block_sectors: blocks, bucket_sectors: 8 * blocks, ..layout(CacheMode::Writeback) };
        layout.backings[0].block_sectors = blocks;
        let count = Rc::new(Cell::new(0));
        let (theirs, l) = (count.clone(), layout.clone());
        let mut scenario = Scenario::new(seed, layout, 0);
        scenario.boot(move |b| async move { theirs.set(live_with_damage(b, l, seed).await) });
        damaged += count.get();
    }
    println!("{damaged} damaged blocks in {seed} sets");
}

#[test]
fn damaged_blocks_reach_neither_clients_nor_the_backing_device() {
    many_damaged_blocks(20_000);
}
