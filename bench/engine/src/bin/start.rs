//! Measures a start after a kill: the time until the first request is served, on devices in memory.
//!
//! `start [EXTENTS]`: the program writes EXTENTS dirty extents, drops the set without a stop, and opens it again.

use std::time::Instant;

use bench::{MemorySet, driver, memory_set_of};
use engine::{CacheSet, SetOptions};
use format::{Sector, Sectors};
use io::{Disk, Rng, WriteFlags};

fn main() {
    let extents: u64 = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(1_000_000);
    let first = driver();
    let rt = first.handle();
    let (nodes, cache, backing) = first.block_on(async {
        // Extents of one sector make only the index large.
        let made = memory_set_of(&rt, Sectors(extents * 4), Sectors(extents * 2 + 1024), Sectors(1)).await;
        let MemorySet { set, volume, cache, backing } = made;
        let mut order: Vec<u64> = (0..extents).collect();
        let mut rng = Rng::new(1);
        for i in (1..order.len()).rev() {
            order.swap(i, rng.below(i as u64 + 1) as usize);
        }
        for b in order {
            let result =
                volume.write(Sector(b * 2), Sectors(1), rt.pool().take(512), 0, WriteFlags::default());
            if let Err(e) = result.await {
                panic!("write: {e}");
            }
        }
        if let Err(e) = volume.flush().await {
            panic!("flush: {e}");
        }
        (set.status().btree_nodes, cache, backing)
    });
    // All memory of the first process is dropped with its driver.
    drop(first);

    let second = driver();
    let rt = second.handle();
    second.block_on(async {
        let began = Instant::now();
        let (cache, backing) = (Disk::new(cache, rt.clone()), Disk::new(backing, rt.clone()));
        let set = CacheSet::open(cache, SetOptions::default()).await.unwrap_or_else(|e| panic!("{e}"));
        let volume = set.register(backing).await.unwrap_or_else(|e| panic!("{e}"));
        let (_, result) = volume.read(Sector(0), Sectors(8), rt.pool().take(4096), 0).await;
        let took = began.elapsed();
        if let Err(e) = result {
            panic!("read: {e}");
        }
        let status = set.status();
        println!(
            "{extents} dirty extents in {nodes} nodes: first request served after {:.0} ms, {} dirty sectors found",
            took.as_secs_f64() * 1e3,
            volume.dirty_sectors()
        );
        println!("index: {:.1} bytes per extent", status.index_bytes as f64 / extents as f64);
    });
}
