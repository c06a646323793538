//! Test doubles: a real cache set on devices in memory ([`Rig`]), a volume in memory ([`RamVolume`]), and the messages of a test
//! that cannot run ([`skipped`]).
//!
//! Owns the format and the opening of such a set, and the behaviour of such a volume. Must not check anything itself, or know
//! which test uses it.
#![allow(clippy::unwrap_used, clippy::missing_panics_doc, reason = "a test may fail")]

mod ram;
mod skip;

use std::rc::Rc;

use blockio::wrap::MemDisk;
use blockio::{Driver, DriverOptions};
use engine::{CacheSet, SetOptions, Volume};
use format::superblock::{BackingFormat, CacheFormat};
use format::{BackingSuper, CacheMode, CacheSuper, Replacement, Sector, Sectors, Uuid};
use io::{Disk, Handle, WriteFlags};
pub use ram::{Counts, RamDisk, RamOp, RamVolume};
pub use skip::{skip_requested, skipped, skipped_in_part};

/// First data sector of the backing device.
pub const DATA_OFFSET: Sector = Sector(16);

/// The devices of a set: names and sizes.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Name of the cache device.
    pub cache_name: &'static str,
    /// Size of the cache device.
    pub cache_sectors: Sectors,
    /// Name of the backing device.
    pub backing_name: &'static str,
    /// Size of the backing device.
    pub backing_sectors: Sectors,
    /// Block size of both devices.
    pub block_sectors: Sectors,
    /// Bucket size of the cache device.
    pub bucket_sectors: Sectors,
}

impl Default for Shape {
    /// A cache device of 16 MiB and a backing device of 32 MiB, with blocks of 4 KiB and buckets of 64 KiB.
    fn default() -> Shape {
        Shape {
            cache_name: "cache",
            cache_sectors: Sectors(1 << 15),
            backing_name: "backing",
            backing_sectors: Sectors(1 << 16),
            block_sectors: Sectors(8),
            bucket_sectors: Sectors(128),
        }
    }
}

/// A set in writeback mode and its cached volume.
pub struct Rig {
    /// The set.
    pub set: CacheSet,
    /// The cached volume of the set.
    pub volume: Rc<Volume>,
    rt: Handle,
}

impl Shape {
    /// Formats new devices in memory and opens the set.
    pub async fn open(self, rt: &Handle) -> Rig {
        let disk = |name, sectors| Disk::new(Rc::new(MemDisk::new(name, sectors, 512)), rt.clone());
        let cache = disk(self.cache_name, self.cache_sectors);
        let backing = disk(self.backing_name, self.backing_sectors);
        format(&cache, &backing, self.block_sectors, self.bucket_sectors).await;
        let set = CacheSet::open(cache, SetOptions::default()).await.unwrap();
        let volume = set.register(backing).await.unwrap();
        Rig { set, volume, rt: rt.clone() }
    }

    /// Runs `test` with a set on its own driver, and stops the set.
    pub fn run<T>(self, test: impl AsyncFnOnce(&Rig) -> T) -> T {
        let driver = Driver::new(DriverOptions::default()).unwrap();
        let rt = driver.handle();
        driver.block_on(async {
            let rig = self.open(&rt).await;
            let value = test(&rig).await;
            rig.set.stop().await.unwrap();
            value
        })
    }
}

/// Formats two devices as a cache device and its backing device in writeback mode.
///
/// The superblocks give each device's whole size to the set. Other contents of the devices stay.
pub async fn format(cache: &Disk, backing: &Disk, block_sectors: Sectors, bucket_sectors: Sectors) {
    let set_uuid = Uuid([7; 16]);
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
        data_offset: DATA_OFFSET,
        cache_mode: CacheMode::Writeback,
        label: [0; 32],
    });
    let write = async |disk: &Disk, superblock: &[u8]| {
        let buffer = disk.runtime().pool().copy_of(superblock);
        disk.write(Sector(8), buffer, true).await.unwrap();
    };
    write(cache, &cache_super.unwrap().encode()).await;
    write(backing, &backing_super.unwrap().encode()).await;
}

impl Rig {
    /// The runtime of the set.
    pub fn runtime(&self) -> &Handle {
        &self.rt
    }

    /// Reads a range and ignores its data.
    pub async fn read(&self, at: u64, sectors: u64) {
        let buffer = self.rt.pool().take(Sectors(sectors).bytes() as usize);
        self.volume.read(Sector(at), Sectors(sectors), buffer, 0).await.1.unwrap();
    }

    /// Writes zeros to a range.
    pub async fn write(&self, at: u64, sectors: u64) {
        let buffer = self.rt.pool().zeroed(Sectors(sectors).bytes() as usize);
        let flags = WriteFlags::default();
        self.volume.write(Sector(at), Sectors(sectors), buffer, 0, flags).await.unwrap();
    }

    /// Sets a tunable of the volume.
    pub async fn set(&self, key: &str, value: &str) {
        self.volume.set(key, value).await.unwrap();
    }
}
