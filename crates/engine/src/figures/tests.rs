//! Tests of the figures of a set with known tables.

use std::cell::Cell;

use format::superblock::BackingFormat;
use format::{BackingSuper, BucketNr, CacheMode, Gen, Sector, Uuid};
use io::{Disk, Handle, Nanos, WriteFlags};

use super::*;
use crate::alloc::Buckets;
use crate::policy::congestion::Direction;
use crate::set::SetOptions;
use crate::testing::{Watching, fill_bucket, open_set, run};

const BUCKET: u64 = 16;

async fn set(rt: &Handle) -> CacheSet {
    open_set(&Watching::new(1024 * BUCKET), rt, (BUCKET, false), SetOptions::default()).await
}

/// Replaces the table of the set by another one, in which buckets from 10 on are empty.
fn table(set: &CacheSet, nbuckets: u32) {
    *set.cache().alloc.buckets_mut() = Buckets::new(&set.cache().geometry, BucketNr(10), nbuckets).unwrap();
}

/// 64 buckets that were used 0 to 63 agings ago, in any order; the others have no age.
#[test]
fn ages_by_hand() {
    run(|rt| async move {
        let set = set(&rt).await;
        table(&set, 100);
        let none =
            BucketFigures { total: 100, unused: 90, metadata: 10, available: 90, ..BucketFigures::default() };
        assert_eq!(set.bucket_figures(), none);
        for n in 0..64_u32 {
            let age = n * 37 % 64;
            set.cache().alloc.buckets_mut().load(BucketNr(20 + n), Gen(0), 32768 - age as u16);
        }
        (20..27).for_each(|b| fill_bucket(set.cache(), b, 3, false));
        (30..35).for_each(|b| fill_bucket(set.cache(), b, 2, true));
        set.cache().alloc.buckets_mut().pin(BucketNr(20));
        let expected = BucketFigures {
            total: 100,
            unused: 78,
            clean: 7,
            dirty: 5,
            metadata: 10,
            // All buckets except ten of metadata, five dirty ones and the pinned one.
            available: 84,
            // 2016 generations in 64 buckets.
            average_age: 31,
            // 64 buckets of 16 sectors, in 32 parts.
            sectors_per_quantile: 32,
            quantiles: (1..32).map(|n| 2 * n).collect(),
        };
        assert_eq!(set.bucket_figures(), expected);
    });
}

/// All parts have the same number of buckets, or one more. Other tasks run during the count of many buckets.
#[test]
fn a_map_has_all_buckets_in_order() {
    run(|rt| async move {
        let set = set(&rt).await;
        table(&set, 100);
        fill_bucket(set.cache(), 12, 5, false);
        fill_bucket(set.cache(), 13, 6, true);
        fill_bucket(set.cache(), 99, 7, true);
        let map = set.bucket_map(7).await;
        assert_eq!((map.total, map.bucket_sectors), (100, Sectors(BUCKET)));
        let cell = |unused, clean, dirty, metadata, live| BucketCell {
            unused,
            clean,
            dirty,
            metadata,
            live: Sectors(live),
        };
        // The parts begin at 0, 14, 28, 42, 57, 71 and 85.
        let expected = [
            cell(2, 1, 1, 10, 11),
            cell(14, 0, 0, 0, 0),
            cell(14, 0, 0, 0, 0),
            cell(15, 0, 0, 0, 0),
            cell(14, 0, 0, 0, 0),
            cell(14, 0, 0, 0, 0),
            cell(14, 0, 1, 0, 7),
        ];
        assert_eq!(map.cells, expected);
        for (wanted, cells) in [(0, 1), (1, 1), (2, 2), (99, 99), (100, 100), (101, 100), (u32::MAX, 100)] {
            let map = set.bucket_map(wanted).await;
            let all = map.cells.iter().map(|c| c.unused + c.clean + c.dirty + c.metadata).sum::<u32>();
            assert_eq!((map.cells.len(), all), (cells, 100), "{wanted}");
        }
    });
}

/// 32768 buckets at a time.
#[test]
fn others_get_turns_while_a_map_is_made() {
    run(|rt| async move {
        let set = set(&rt).await;
        for (nbuckets, turns) in [(1000, 0), (32_767, 0), (32_768, 1), (100_000, 3), (131_072, 4)] {
            table(&set, nbuckets);
            for cells in [1, 3] {
                let (seen, done) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(false)));
                let (counts, until, other) = (seen.clone(), done.clone(), rt.clone());
                rt.spawn(async move {
                    while !until.get() {
                        counts.set(counts.get() + 1);
                        other.yield_now().await;
                    }
                });
                let map = set.bucket_map(cells).await;
                done.set(true);
                assert_eq!((seen.get(), map.cells.len()), (turns, cells as usize), "{nbuckets}");
                assert_eq!(map.cells.iter().map(|c| c.unused + c.metadata).sum::<u32>(), nbuckets);
                rt.yield_now().await;
            }
        }
    });
}

/// 98 extents of eight sectors, with gaps of the same size, in a flash-only volume.
async fn filled(set: &CacheSet, rt: &Handle) -> Rc<Volume> {
    let volume = set.create_volume(Uuid([3; 16]), Sectors(4096), "flash").await.unwrap();
    for n in 0..98 {
        let buffer = rt.pool().zeroed(8 * 512);
        let flags = WriteFlags::default();
        volume.write(Sector(16 * n), Sectors(8), buffer, 0, flags).await.unwrap();
    }
    volume
}

#[test]
fn the_btree_by_what_is_in_it() {
    run(|rt| async move {
        let set = set(&rt).await;
        let empty = set.figures().btree;
        assert_eq!((empty.extents, empty.average_extent), (0, Sectors(0)));
        assert_eq!((empty.root_usage_percent, empty.used_percent), (0, 0));
        let volume = filled(&set, &rt).await;
        let b = set.figures().btree;
        assert_eq!((b.extents, b.average_extent, b.depth), (98, Sectors(8), 0));
        // The only leaf has 8 KiB. The header takes four words, and each key three.
        assert_eq!((b.node_sectors, b.sectors_per_node), (Sectors(16), Sectors(16)));
        assert_eq!((b.root_usage_percent, b.used_percent), (28, 28), "294 of 1020");
        let v = VolumeFigures::of(&volume);
        assert!(v.is_flash_only());
        assert_eq!(
            (v.stripe, v.size, v.dirty, v.name.as_str()),
            (Sectors(0), Sectors(4096), Sectors(784), "flash")
        );
        assert_eq!((v.total.all_of(OpKind::Write).requests, v.inode), (98, volume.inode()));
    });
}

/// The cached data of a volume was not known, only that of the whole set.
#[test]
fn cached_data_is_counted_for_each_slot() {
    run(|rt| async move {
        let set = set(&rt).await;
        let empty = set.cached_figures().await;
        assert_eq!(empty, CachedFigures { by_slot: Vec::new(), complete: true });
        let volume = filled(&set, &rt).await;
        let inode = volume.inode().unwrap();
        let expected = CachedFigures { by_slot: vec![(inode, Sectors(784))], complete: true };
        assert_eq!(set.cached_figures().await, expected);
        assert_eq!(set.slot(inode).map(|(_, label)| label).as_deref(), Some("flash"));
        let (writes, time) = volume.latency_of(OpKind::Write);
        assert_eq!((writes, volume.latency_of(OpKind::Read)), (98, (0, Nanos(0))));
        assert!(time <= rt.now(), "{time:?}");
    });
}

/// Figures that are not from tables: congestion without the random bits, and needed journal entries.
#[test]
fn figures_have_congestion_and_needed_entries() {
    run(|rt| async move {
        let set = set(&rt).await;
        let cache = set.cache();
        let idle = set.figures();
        assert_eq!((idle.congested, idle.journal_entries_in_use), (None, 1));
        let slow = Nanos(512 << 20);
        cache.congestion().observe_latency(Direction::Read, slow, rt.now());
        let open = cache.journal.open_seq();
        cache.journal.pin(open);
        for n in 1..4 {
            let seq = cache
                .journal
                .try_add(&format::Bkey::hole(Inode(0), Sector(8 * n), Sectors(8)), rt.now())
                .unwrap();
            cache.journal.commit(seq).await.unwrap();
        }
        let f = set.figures();
        assert_eq!(f.congested, Some(Sectors(256)));
        assert_eq!((f.journal_entries_in_use, f.now), (4, rt.now()), "three and the open one");
        assert_eq!(f.available_buckets, cache.alloc.buckets().available());
    });
}

#[test]
fn a_cached_volume_shows_its_rate() {
    run(|rt| async move {
        let set = set(&rt).await;
        let disk = Disk::new(Watching::new(8192), rt.clone());
        let superblock = BackingSuper::format(&BackingFormat {
            uuid: Uuid([2; 16]),
            set_uuid: Uuid([7; 16]),
            device_sectors: Sectors(8192),
            block_sectors: Sectors(1),
            bucket_sectors: Sectors(BUCKET),
            data_offset: Sector(16),
            cache_mode: CacheMode::Writeback,
            label: [0; 32],
        });
        let bytes = rt.pool().copy_of(&superblock.unwrap().encode());
        disk.write(Sector(8), bytes, true).await.unwrap();
        let volume = set.register(disk).await.unwrap();
        assert!(!VolumeFigures::of(&volume).is_flash_only());
        for rate in [1, 77] {
            volume.writeback().set_rate(rate);
            assert_eq!(VolumeFigures::of(&volume).tunables.writeback_rate, rate);
        }
    });
}
