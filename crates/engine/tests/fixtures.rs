//! Sets that a real kernel wrote, opened by the engine: every byte is there, also after everything was written back,
//! after a restart, and on the backing device alone.
#![allow(clippy::disallowed_methods, clippy::unwrap_used)]

use std::rc::Rc;

use blockio::wrap::MemDisk;
use blockio::{Driver, DriverOptions};
use engine::{CacheSet, SetOptions, Volume};
use format::{BackingState, Sector, Sectors};
use io::{Disk, Handle};
use sha2::{Digest, Sha256};

#[path = "../../format/tests/common/fixtures.rs"]
#[allow(dead_code)]
mod files;

struct Fixture {
    cache: Disk,
    backing: Disk,
    expected: serde_json::Value,
}

async fn load(rt: &Handle, dir: &str) -> Fixture {
    let mut disks = Vec::new();
    for (name, bytes) in [("cache", files::cache(dir)), ("backing", files::backing(dir))] {
        let sectors = Sectors(bytes.len() as u64 / 512);
        let disk = Disk::new(Rc::new(MemDisk::new(name, sectors, 512)), rt.clone());
        for (i, chunk) in bytes.chunks(1 << 20).enumerate() {
            disk.write(Sector(i as u64 * 2048), rt.pool().copy_of(chunk), false).await.unwrap();
        }
        disks.push(disk);
    }
    let backing = disks.pop().unwrap();
    let cache = disks.pop().unwrap();
    Fixture { cache, backing, expected: files::expected(dir) }
}

async fn sha256(rt: &Handle, volume: &Rc<Volume>) -> String {
    let mut hash = Sha256::new();
    let mut at = Sector(0);
    let end = Sector(volume.size().0);
    while at < end {
        let n = Sectors((end - at).0.min(256));
        let (buffer, result) = volume.read(at, n, rt.pool().take(n.bytes() as usize), 0).await;
        result.unwrap();
        hash.update(buffer.as_slice());
        at += n;
    }
    hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

/// `(inode, sha256)` of every device in the set, as served now.
async fn contents(rt: &Handle, f: &Fixture, set: &CacheSet) -> Vec<(u64, String)> {
    let mut all = Vec::new();
    for v in set.volumes() {
        all.push((u64::from(v.inode().unwrap().0), sha256(rt, &v).await));
    }
    all.sort();
    let _ = f;
    all
}

fn expected(f: &Fixture) -> Vec<(u64, String)> {
    let devices = f.expected["devices"].as_array().unwrap();
    let mut all: Vec<(u64, String)> = devices
        .iter()
        .filter(|d| d["inode"].is_u64())
        .map(|d| (d["inode"].as_u64().unwrap(), d["sha256"].as_str().unwrap().to_owned()))
        .collect();
    all.sort();
    all
}

fn test_fixture(dir: &'static str) {
    let driver = Driver::new(DriverOptions::default()).unwrap();
    let rt = driver.handle();
    driver.block_on(async {
        let f = load(&rt, dir).await;
        let set = CacheSet::open(f.cache.clone(), SetOptions::default()).await.unwrap();
        let volume = set.register(f.backing.clone()).await.unwrap();
        // Nothing is written back or cached yet: exactly what the kernel would serve.
        volume.set("writeback_running", "0").await.unwrap();
        assert_eq!(contents(&rt, &f, &set).await, expected(&f), "{dir}: as found");
        for d in f.expected["devices"].as_array().unwrap() {
            let inode = format::Inode(d["inode"].as_u64().unwrap() as u32);
            let dirty = d["dirty_sectors"].as_u64().unwrap();
            assert_eq!(set.dirty_sectors(inode), Sectors(dirty), "{dir}: dirty sectors of slot {inode}");
        }
        set.stop().await.unwrap();

        let set = CacheSet::open(f.cache.clone(), SetOptions::default()).await.unwrap();
        let volume = set.register(f.backing.clone()).await.unwrap();
        assert_eq!(contents(&rt, &f, &set).await, expected(&f), "{dir}: after a restart");
        volume.set("writeback_running", "1").await.unwrap();
        volume.drained().await.unwrap();
        assert_eq!(volume.dirty_sectors(), Sectors(0));
        assert_eq!(volume.state(), Some(BackingState::Clean));
        set.gc().await.unwrap();
        assert_eq!(contents(&rt, &f, &set).await, expected(&f), "{dir}: written back");
        set.stop().await.unwrap();

        let set = CacheSet::open(f.cache.clone(), SetOptions::default()).await.unwrap();
        let volume = set.register(f.backing.clone()).await.unwrap();
        set.detach(&volume).await.unwrap();
        let inode = f.expected["devices"].as_array().unwrap().iter().find(|d| d["kind"] == "cached");
        // Clean copies may differ from the backing device after the kernel's crash (docs/compat.md, item 5).
        let differing = inode.map_or(0, |d| d["clean_extents_differing_from_backing"].as_u64().unwrap());
        if differing == 0 {
            let want = inode.unwrap()["sha256"].as_str().unwrap();
            assert_eq!(sha256(&rt, &volume).await, want, "{dir}: the backing device alone");
        }
        set.stop().await.unwrap();
        volume.stop().await.unwrap();
    });
}

macro_rules! fixtures {
    ($($name:ident: $dir:literal),* $(,)?) => {$(
        #[test]
        fn $name() {
            test_fixture($dir);
        }
    )*};
}

fixtures! {
    attached_empty: "02-attached-empty",
    writeback_clean_stop: "03-writeback-clean-stop",
    writeback_killed: "04-writeback-killed",
    clean_only: "05-clean-only",
    volume_and_backing_killed: "06-volume-and-backing-killed",
    busy_killed: "07-busy-killed",
    synthetic: "08-synthetic",
    small_buckets_killed: "09-small-buckets-killed",
}
