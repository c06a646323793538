//! What it costs to have dirty data on two cache devices, and what it brings to have clean data on both (decision 037), in virtual time.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use bench::virt::{HDD, Limits, RAM, SSD, SlowDisk, run, slow_rig};
use engine::stats::View;
use engine::{CacheSet, SetOptions};
use format::superblock::CacheFormat;
use format::{CacheSuper, Replacement, Sector, Sectors, Uuid};
use io::{Disk, Handle, Nanos, Rng, WriteFlags};

const MIB: u64 = 2048;
const BLOCK: Sectors = Sectors(8);
const WRITES: u64 = 20_000;
const READS: u64 = 20_000;
/// The part of the volume that is read.
const HOT_MIB: u64 = 200;

/// A set on a device of its own.
async fn second_set(rt: &Handle, limits: Limits) -> CacheSet {
    let sectors = Sectors(600 * MIB);
    let disk = Disk::new(SlowDisk::new(rt, "second", sectors, limits, |_| 0), rt.clone());
    let superblock = CacheSuper::format(&CacheFormat {
        uuid: Uuid([21; 16]),
        set_uuid: Uuid([22; 16]),
        device_sectors: sectors,
        block_sectors: BLOCK,
        bucket_sectors: Sectors(1024),
        replacement: Replacement::Lru,
        discard: false,
    });
    let bytes = rt.pool().copy_of(&superblock.unwrap().encode());
    disk.write(Sector(8), bytes, true).await.unwrap();
    CacheSet::open(disk, SetOptions::default()).await.unwrap()
}

/// Seconds that random writes of 4 KiB take, 16 at a time. After each `flush_every` of them they are flushed.
async fn dirty_writes(rt: &Handle, limits: Limits, two: bool, flush_every: u64) -> f64 {
    let r = slow_rig(rt, (Sectors(600 * MIB), limits), (Sectors(2000 * MIB), HDD), |_| 0).await;
    r.volume.set("writeback_running", "0").await.unwrap();
    if two {
        let second = second_set(rt, limits).await;
        r.set.mirror(&r.volume, &second).await.unwrap();
    }
    let (mut rng, began) = (Rng::new(7), rt.now());
    for n in 0..WRITES / 16 {
        let writes: Vec<_> = (0..16)
            .map(|_| {
                let (volume, at) = (r.volume.clone(), Sector(rng.below(1900 * MIB / BLOCK.0) * BLOCK.0));
                let buffer = rt.pool().zeroed(BLOCK.bytes() as usize);
                rt.spawn(async move { volume.write(at, BLOCK, buffer, 0, WriteFlags::default()).await })
            })
            .collect();
        for write in writes {
            write.await.unwrap();
        }
        if n % (flush_every / 16) == 0 {
            r.volume.flush().await.unwrap();
        }
    }
    let took = rt.now().since(began);
    r.volume.stop().await.unwrap();
    r.set.abandon();
    took.0 as f64 / 1e9
}

/// Dirty writes on two devices reach at least 0.8 of the rate of one.
#[test]
fn dirty_writes_to_two_devices_take_little_longer_than_to_one() {
    run(|rt| async move {
        for (what, limits) in [("3000 requests/s", SSD), ("memory", RAM)] {
            for flush_every in [16, 64, 1024] {
                let one = dirty_writes(&rt, limits, false, flush_every).await;
                let two = dirty_writes(&rt, limits, true, flush_every).await;
                println!(
                    "{what}, a flush after {flush_every} writes: one device {one:.2} s, two {two:.2} s: {:.2} of the rate",
                    one / two
                );
                assert!(one / two >= 0.8, "{what}, {flush_every}: {one} s, {two} s");
            }
        }
    });
}

/// Seconds that random reads of 4 KiB from the cache take, 32 at a time.
async fn clean_reads(rt: &Handle, limits: Limits, two: bool) -> f64 {
    let r = slow_rig(rt, (Sectors(600 * MIB), limits), (Sectors(2000 * MIB), HDD), |_| 0).await;
    r.volume.set("sequential_cutoff", "0").await.unwrap();
    let second = match two {
        true => Some(second_set(rt, limits).await),
        false => None,
    };
    if let Some(second) = &second {
        r.set.mirror(&r.volume, second).await.unwrap();
    }
    let chunk = Sectors(MIB / 2);
    for n in 0..2 * HOT_MIB {
        let buffer = rt.pool().take(chunk.bytes() as usize);
        r.volume.read(Sector(n * chunk.0), chunk, buffer, 0).await.1.unwrap();
        // The data is inserted behind the answer.
        rt.sleep(Nanos::from_ms(200)).await;
    }
    let misses = || r.volume.with_stats(|s| s.view(View::Total).cache_misses);
    let (mut rng, began, missed) = (Rng::new(7), rt.now(), misses());
    for _ in 0..READS / 32 {
        let reads: Vec<_> = (0..32)
            .map(|_| {
                let (volume, at) = (r.volume.clone(), Sector(rng.below(HOT_MIB * MIB / BLOCK.0) * BLOCK.0));
                let buffer = rt.pool().take(BLOCK.bytes() as usize);
                rt.spawn(async move { volume.read(at, BLOCK, buffer, 0).await.1 })
            })
            .collect();
        for read in reads {
            read.await.unwrap();
        }
    }
    assert_eq!(misses(), missed, "all of it is cached");
    let took = rt.now().since(began);
    r.volume.stop().await.unwrap();
    r.set.abandon();
    took.0 as f64 / 1e9
}

/// Reads of clean data from two devices reach at least 1.7 times the rate of one, where the devices are the limit.
#[test]
fn clean_reads_use_both_devices() {
    run(|rt| async move {
        let one = clean_reads(&rt, SSD, false).await;
        let two = clean_reads(&rt, SSD, true).await;
        println!(
            "3000 requests/s: {READS} reads from one device {one:.2} s, from two {two:.2} s: {:.2} times the rate",
            one / two
        );
        assert!(one / two >= 1.7, "{one} s, {two} s");
    });
}
