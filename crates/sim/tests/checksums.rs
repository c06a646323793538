//! Checksums of cached data: damage is noticed before it reaches a client or the backing device, and nothing else counts
//! as damage.
#![allow(clippy::unwrap_used)]

use engine::tunables::Overwrite;
use engine::{SetEvent, SetOptions};
use format::{CacheMode, Sector, Sectors};
use sim::disk::Retained;
use sim::hardware::Layout;
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
    b.open().await;
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
fn damaged_dirty_data_is_neither_served_nor_written_back() {
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

/// Data is overwritten in place at all moments of the life of its bucket: nothing counts as damaged, neither at once nor
/// after a power loss.
#[test]
fn data_that_is_overwritten_in_place_does_not_count_as_damaged() {
    for retained in [Retained::Nothing, Retained::Everything, Retained::Some(3), Retained::Some(8)] {
        let mut scenario = Scenario::new(3, layout(CacheMode::Writeback), 0);
        for round in 0..3 {
            scenario.boot(move |b| async move {
                let mut options = SetOptions::default();
                options.tunables.overwrite_in_place = Overwrite::Always;
                b.open_with(options).await;
                b.tune(0, "sequential_cutoff", "0").await;
                b.tune(0, "writeback_running", "0").await;
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
                assert!(round == 0 || counters.footers_voided > 0, "{counters:?}");
            });
            scenario.power_cut(retained);
        }
        scenario.judge().happy_end();
    }
}
