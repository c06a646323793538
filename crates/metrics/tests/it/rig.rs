//! A real set on devices in memory.

use std::rc::Rc;

use blockio::wrap::MemDisk;
use blockio::{Driver, DriverOptions};
use engine::figures::SetFigures;
use engine::{CacheSet, SetOptions, Volume};
use format::superblock::{BackingFormat, CacheFormat};
use format::{BackingSuper, CacheMode, CacheSuper, Replacement, Sector, Sectors, Uuid};
use io::{Disk, Handle, WriteFlags};

pub struct Rig {
    pub set: CacheSet,
    pub volume: Rc<Volume>,
    rt: Handle,
}

async fn disk(rt: &Handle, name: &str, sectors: u64, superblock: &[u8]) -> Disk {
    let disk = Disk::new(Rc::new(MemDisk::new(name, Sectors(sectors), 512)), rt.clone());
    disk.write(Sector(8), rt.pool().copy_of(superblock), true).await.unwrap();
    disk
}

async fn rig(rt: &Handle) -> Rig {
    let (set_uuid, block, bucket) = (Uuid([7; 16]), Sectors(8), Sectors(128));
    let cache = CacheSuper::format(&CacheFormat {
        uuid: Uuid([1; 16]),
        set_uuid,
        device_sectors: Sectors(1 << 15),
        block_sectors: block,
        bucket_sectors: bucket,
        replacement: Replacement::Lru,
        discard: false,
    });
    let backing = BackingSuper::format(&BackingFormat {
        uuid: Uuid([2; 16]),
        set_uuid,
        device_sectors: Sectors(1 << 16),
        block_sectors: block,
        bucket_sectors: bucket,
        data_offset: Sector(16),
        cache_mode: CacheMode::Writeback,
        label: [0; 32],
    });
    let cache = disk(rt, "cache", 1 << 15, &cache.unwrap().encode()).await;
    let backing = disk(rt, "a \"backing\" device", 1 << 16, &backing.unwrap().encode()).await;
    let set = CacheSet::open(cache, SetOptions::default()).await.unwrap();
    let volume = set.register(backing).await.unwrap();
    volume.set("writeback_running", "0").await.unwrap();
    Rig { set, volume, rt: rt.clone() }
}

impl Rig {
    pub async fn read(&self, at: u64, sectors: u64) {
        let buffer = self.rt.pool().take(Sectors(sectors).bytes() as usize);
        self.volume.read(Sector(at), Sectors(sectors), buffer, 0).await.1.unwrap();
    }

    pub async fn write(&self, at: u64, sectors: u64) {
        let buffer = self.rt.pool().zeroed(Sectors(sectors).bytes() as usize);
        let flags = WriteFlags::default();
        self.volume.write(Sector(at), Sectors(sectors), buffer, 0, flags).await.unwrap();
    }
}

/// The figures of a set after some work.
pub fn figures(work: impl AsyncFnOnce(&Rig)) -> SetFigures {
    let driver = Driver::new(DriverOptions::default()).unwrap();
    let rt = driver.handle();
    driver.block_on(async {
        let rig = rig(&rt).await;
        work(&rig).await;
        let figures = rig.set.figures();
        rig.set.stop().await.unwrap();
        figures
    })
}
