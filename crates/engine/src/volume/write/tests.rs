//! Tests of writes without room, in a set on disks in memory.

use std::pin::pin;

use format::superblock::{BackingFormat, CacheFormat};
use format::{BackingSuper, BucketNr, CacheSuper, Replacement, Uuid};
use io::sync::{Either, select};
use io::{Disk, Handle};

use super::*;
use crate::set::{CacheSet, SetOptions};
use crate::testing::{TestDisk, run};

const BUCKET: Sectors = Sectors(8);
const SET: Uuid = Uuid([7; 16]);

async fn disk(rt: &Handle, sectors: Sectors, superblock: &[u8]) -> Disk {
    let disk = Disk::new(TestDisk::new(sectors.0), rt.clone());
    disk.write(Sector(8), rt.pool().copy_of(superblock), true).await.unwrap();
    disk
}

/// A set, its cached volume, and its flash-only one.
async fn set(rt: &Handle) -> (CacheSet, [Rc<Volume>; 2]) {
    let size = Sectors(2048);
    let cache = CacheSuper::format(&CacheFormat {
        uuid: Uuid([1; 16]),
        set_uuid: SET,
        device_sectors: size,
        block_sectors: Sectors(1),
        bucket_sectors: BUCKET,
        replacement: Replacement::Lru,
        discard: false,
    });
    let backing = BackingSuper::format(&BackingFormat {
        uuid: Uuid([2; 16]),
        set_uuid: SET,
        device_sectors: size,
        block_sectors: Sectors(1),
        bucket_sectors: BUCKET,
        data_offset: Sector(16),
        cache_mode: CacheMode::Writeback,
        label: [0; 32],
    });
    let cache = disk(rt, size, &cache.unwrap().encode()).await;
    let backing = disk(rt, size, &backing.unwrap().encode()).await;
    let set = CacheSet::open(cache, SetOptions::default()).await.unwrap();
    let cached = set.register(backing).await.unwrap();
    let flash = set.create_volume(Uuid([3; 16]), Sectors(64), "flash").await.unwrap();
    (set, [cached, flash])
}

/// Leaves `reclaimable` buckets that can be reused, and sets the state in which the allocator found none.
fn starve(cache: &Cache, reclaimable: u32) {
    let buckets = &mut *cache.alloc.buckets_mut();
    let all: Vec<BucketNr> = buckets.all().filter(|b| buckets.is_reclaimable(*b)).collect();
    for b in all {
        if buckets.reclaimable() > reclaimable {
            buckets.pin(b);
        }
    }
    assert_eq!(buckets.reclaimable(), reclaimable);
    cache.alloc.starve();
}

/// A write to a flash-only volume waits while a walk of the index may make room. A write to a cached volume goes to the backing
/// device at once.
#[test]
fn only_writes_to_flash_only_volumes_wait_for_a_walk() {
    for (cached, reclaimable, waits) in
        [(true, 8, false), (true, 0, false), (false, 8, true), (false, 1, true), (false, 0, false)]
    {
        run(move |rt| async move {
            let (set, [with, without]) = set(&rt).await;
            let volume = if cached { with } else { without };
            starve(set.cache(), reclaimable);
            let room = pin!(wait_for_room(&volume, set.cache()));
            let taken = match select(room, rt.sleep(Nanos(1))).await {
                Either::Left(done) => done.is_ok(),
                Either::Right(()) => true,
            };
            assert_eq!(taken, waits, "with a backing device: {cached}; {reclaimable} buckets");
        });
    }
}
