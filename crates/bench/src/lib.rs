//! What the benches share: a set on devices in memory.
//!
//! Must not measure anything itself.

pub mod alloc;
pub mod study;
pub mod virt;
pub mod workloads;

use std::rc::Rc;

use blockio::wrap::MemDisk;
use blockio::{Driver, DriverOptions};
use engine::{CacheSet, SetOptions, Volume};
use format::superblock::{BackingFormat, CacheFormat};
use format::{BackingSuper, CacheMode, CacheSuper, Replacement, Sector, Sectors, Uuid};
use io::{Disk, Handle};

/// A cache set with one backing device, all in memory.
pub struct Rig {
    /// The set.
    pub set: CacheSet,
    /// Its cached device.
    pub volume: Rc<Volume>,
    /// The devices, for opening them again on another driver.
    pub cache: Rc<MemDisk>,
    /// See `cache`.
    pub backing: Rc<MemDisk>,
}

/// A driver for benches.
///
/// # Panics
/// If the system refuses io_uring and threads.
pub fn driver() -> Driver {
    Driver::new(DriverOptions::default()).unwrap_or_else(|e| panic!("no driver: {e}"))
}

/// Formats devices of these sizes in memory and opens them as a set in writeback mode.
///
/// # Panics
/// If the set does not come up.
pub async fn rig(rt: &Handle, cache_sectors: Sectors, backing_sectors: Sectors) -> Rig {
    rig_of(rt, cache_sectors, backing_sectors, Sectors(8)).await
}

/// The same with blocks of any size.
///
/// # Panics
/// If the set does not come up.
pub async fn rig_of(
    rt: &Handle,
    cache_sectors: Sectors,
    backing_sectors: Sectors,
    block_sectors: Sectors,
) -> Rig {
    let cache_device = Rc::new(MemDisk::new("cache", cache_sectors, 512));
    let backing_device = Rc::new(MemDisk::new("backing", backing_sectors, 512));
    let cache = Disk::new(cache_device.clone(), rt.clone());
    // Memory is allocated now, not when it is first written to: that would be measured as well.
    let mut at = Sector(0);
    while at < Sector(cache_sectors.0) {
        let n = Sectors((cache_sectors.0 - at.0).min(2048));
        let buffer = rt.pool().zeroed(n.bytes() as usize);
        cache.write(at, buffer, false).await.unwrap_or_else(|e| panic!("{e}"));
        at += n;
    }
    let (set, volume) = open_on(cache, Disk::new(backing_device.clone(), rt.clone()), block_sectors).await;
    Rig { set, volume, cache: cache_device, backing: backing_device }
}

/// Formats two disks and opens them as a set in writeback mode, where nothing is written back and nothing goes around
/// the cache.
///
/// # Panics
/// If the set does not come up.
pub async fn open_on(cache: Disk, backing: Disk, block_sectors: Sectors) -> (CacheSet, Rc<Volume>) {
    format_both(&cache, &backing, block_sectors).await;
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

/// Formats two disks as a cache device and its backing device in writeback mode.
async fn format_both(cache: &Disk, backing: &Disk, block_sectors: Sectors) {
    let set_uuid = Uuid([7; 16]);
    let bucket_sectors = Sectors(1024);
    let cache_super = CacheSuper::format(&CacheFormat {
        uuid: Uuid([1; 16]),
        set_uuid,
        device_sectors: cache.info().sectors,
        block_sectors,
        bucket_sectors,
        replacement: Replacement::Lru,
        discard: false,
    });
    let backing_super = BackingSuper::format(&BackingFormat {
        uuid: Uuid([2; 16]),
        set_uuid,
        device_sectors: backing.info().sectors,
        block_sectors,
        bucket_sectors,
        data_offset: Sector(16),
        cache_mode: CacheMode::Writeback,
        label: [0; 32],
    });
    let pool = cache.runtime().pool();
    let write = |disk: &Disk, bytes: &[u8]| {
        let (disk, buffer) = (disk.clone(), pool.copy_of(bytes));
        async move { disk.write(Sector(8), buffer, true).await }
    };
    write(cache, &cache_super.unwrap_or_else(|e| panic!("{e}")).encode())
        .await
        .unwrap_or_else(|e| panic!("{e}"));
    write(backing, &backing_super.unwrap_or_else(|e| panic!("{e}")).encode())
        .await
        .unwrap_or_else(|e| panic!("{e}"));
}
