//! A real cache set with one backing device, on devices in memory, for tests of what looks at sets from outside.
//!
//! Owns how such a set is formatted and opened. Must not check anything itself, nor know who tests what.
#![allow(clippy::unwrap_used, clippy::missing_panics_doc, reason = "a test may fail")]

use std::rc::Rc;

use blockio::wrap::MemDisk;
use blockio::{Driver, DriverOptions};
use engine::{CacheSet, SetOptions, Volume};
use format::superblock::{BackingFormat, CacheFormat};
use format::{BackingSuper, CacheMode, CacheSuper, Replacement, Sector, Sectors, Uuid};
use io::{Disk, Handle, WriteFlags};

/// What the devices are like.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Name of the cache device.
    pub cache_name: &'static str,
    /// Its size.
    pub cache_sectors: Sectors,
    /// Name of the backing device.
    pub backing_name: &'static str,
    /// Its size.
    pub backing_sectors: Sectors,
    /// Blocks of both.
    pub block_sectors: Sectors,
    /// Buckets of the cache device.
    pub bucket_sectors: Sectors,
}

impl Default for Shape {
    /// 16 MiB in front of 32 MiB, blocks of 4 KiB in buckets of 64 KiB.
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
    /// Its volume.
    pub volume: Rc<Volume>,
    rt: Handle,
}

impl Shape {
    /// Formats the devices and opens the set.
    pub async fn open(self, rt: &Handle) -> Rig {
        let set_uuid = Uuid([7; 16]);
        let cache = CacheSuper::format(&CacheFormat {
            uuid: Uuid([1; 16]),
            set_uuid,
            device_sectors: self.cache_sectors,
            block_sectors: self.block_sectors,
            bucket_sectors: self.bucket_sectors,
            replacement: Replacement::Lru,
            discard: false,
        });
        let backing = BackingSuper::format(&BackingFormat {
            uuid: Uuid([2; 16]),
            set_uuid,
            device_sectors: self.backing_sectors,
            block_sectors: self.block_sectors,
            bucket_sectors: self.bucket_sectors,
            data_offset: Sector(16),
            cache_mode: CacheMode::Writeback,
            label: [0; 32],
        });
        let cache = disk(rt, self.cache_name, self.cache_sectors, &cache.unwrap().encode()).await;
        let backing = disk(rt, self.backing_name, self.backing_sectors, &backing.unwrap().encode()).await;
        let set = CacheSet::open(cache, SetOptions::default()).await.unwrap();
        let volume = set.register(backing).await.unwrap();
        Rig { set, volume, rt: rt.clone() }
    }

    /// Runs `test` with a set on a driver of its own, and stops the set.
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

async fn disk(rt: &Handle, name: &str, sectors: Sectors, superblock: &[u8]) -> Disk {
    let disk = Disk::new(Rc::new(MemDisk::new(name, sectors, 512)), rt.clone());
    disk.write(Sector(8), rt.pool().copy_of(superblock), true).await.unwrap();
    disk
}

impl Rig {
    /// The runtime on which it runs.
    pub fn runtime(&self) -> &Handle {
        &self.rt
    }

    /// Reads, whatever is there.
    pub async fn read(&self, at: u64, sectors: u64) {
        let buffer = self.rt.pool().take(Sectors(sectors).bytes() as usize);
        self.volume.read(Sector(at), Sectors(sectors), buffer, 0).await.1.unwrap();
    }

    /// Writes zeroes.
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
