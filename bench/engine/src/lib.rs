//! Code that the benches share: a set on devices in memory.
//!
//! Must not measure anything itself.

pub mod alloc;
pub mod callgrind;
pub mod study;
pub mod virt;
pub mod workloads;

use std::rc::Rc;

use blockio::wrap::MemDisk;
use blockio::{Driver, DriverOptions};
use engine::{CacheSet, SetOptions, Volume};
use format::{FooterKey, RawSuperblock, Sector, Sectors};
use io::{Disk, Handle, Rng};

/// The place of a superblock.
const SUPERBLOCK: Sector = Sector(8);
/// Bucket size of every set of the benches.
const BUCKET: Sectors = Sectors(1024);

/// A cache set with one backing device, all in memory.
pub struct MemorySet {
    /// The set.
    pub set: CacheSet,
    /// Its cached device.
    pub volume: Rc<Volume>,
    /// The cache device, for opening it again on another driver.
    pub cache: Rc<MemDisk>,
    /// The backing device, for opening it again on another driver.
    pub backing: Rc<MemDisk>,
}

/// A driver for benches.
///
/// # Panics
/// If the system refuses io_uring and threads.
pub fn driver() -> Driver {
    Driver::new(DriverOptions::default()).unwrap_or_else(|e| panic!("no driver: {e}"))
}

/// The numbers below `count` in random order.
pub fn shuffled(count: u64, rng: &mut Rng) -> Vec<u64> {
    let mut order: Vec<u64> = (0..count).collect();
    for i in (1..order.len()).rev() {
        order.swap(i, rng.below(i as u64 + 1) as usize);
    }
    order
}

/// Formats devices of these sizes in memory and opens them as a set in writeback mode, with blocks of 4 KiB.
///
/// # Panics
/// If the set cannot be opened.
pub async fn memory_set(rt: &Handle, cache_sectors: Sectors, backing_sectors: Sectors) -> MemorySet {
    memory_set_of(rt, cache_sectors, backing_sectors, Sectors(8)).await
}

/// Formats devices of these sizes in memory and opens them as a set in writeback mode, with blocks of any size.
///
/// # Panics
/// If the set cannot be opened.
pub async fn memory_set_of(
    rt: &Handle,
    cache_sectors: Sectors,
    backing_sectors: Sectors,
    block_sectors: Sectors,
) -> MemorySet {
    let cache_device = Rc::new(MemDisk::new("cache", cache_sectors, 512));
    let backing_device = Rc::new(MemDisk::new("backing", backing_sectors, 512));
    let cache = Disk::new(cache_device.clone(), rt.clone());
    // Memory is allocated here. Otherwise the first write would allocate it, and the measurement would include that.
    let mut at = Sector(0);
    while at < Sector(cache_sectors.0) {
        let n = Sectors((cache_sectors.0 - at.0).min(2048));
        let buffer = rt.pool().zeroed(n.bytes() as usize);
        cache.write(at, buffer, false).await.unwrap_or_else(|e| panic!("{e}"));
        at += n;
    }
    let (set, volume) = open_on(cache, Disk::new(backing_device.clone(), rt.clone()), block_sectors).await;
    MemorySet { set, volume, cache: cache_device, backing: backing_device }
}

/// Formats two disks and opens them as a set in writeback mode, without writeback and without bypasses.
///
/// # Panics
/// If the set cannot be opened.
pub async fn open_on(cache: Disk, backing: Disk, block_sectors: Sectors) -> (CacheSet, Rc<Volume>) {
    rig::format(&cache, &backing, block_sectors, BUCKET).await;
    open_formatted(cache, backing).await
}

/// The same with blocks of 4 KiB, and with checksums of cached data.
///
/// # Panics
/// If the set cannot be opened.
pub async fn open_with_checksums(cache: Disk, backing: Disk) -> (CacheSet, Rc<Volume>) {
    rig::format(&cache, &backing, Sectors(8), BUCKET).await;
    let buffer = cache.runtime().pool().take(4096);
    let (bytes, read) = cache.read(SUPERBLOCK, buffer).await;
    read.unwrap_or_else(|e| panic!("{e}"));
    let info = cache.info();
    let superblock = RawSuperblock::from_prefix(bytes.as_slice())
        .and_then(|raw| raw.check_cache(info.sectors, info.logical_block_bytes));
    let mut superblock = superblock.unwrap_or_else(|e| panic!("{e}"));
    superblock.set_checksum_key(Some(FooterKey(7)));
    let buffer = cache.runtime().pool().copy_of(&superblock.encode());
    cache.write(SUPERBLOCK, buffer, true).await.unwrap_or_else(|e| panic!("{e}"));
    open_formatted(cache, backing).await
}

async fn open_formatted(cache: Disk, backing: Disk) -> (CacheSet, Rc<Volume>) {
    let set = CacheSet::open(cache, SetOptions::default()).await.unwrap_or_else(|e| panic!("{e}"));
    let volume = set.register(backing).await.unwrap_or_else(|e| panic!("{e}"));
    for (k, v) in [("sequential_cutoff", "0"), ("writeback_running", "0")] {
        volume.set(k, v).await.unwrap_or_else(|e| panic!("{e}"));
    }
    for k in ["congested_read_threshold_us", "congested_write_threshold_us"] {
        set.set(k, "0").await.unwrap_or_else(|e| panic!("{e}"));
    }
    (set, volume)
}
