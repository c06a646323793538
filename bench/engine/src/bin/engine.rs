//! Measures the engine alone, on devices in memory with one thread: processor time of each 4 KiB request.
//!
//! The time includes the copy by the devices. The last measurement is the device alone: the cost of the copy from memory
//! that no processor cache has any more.
//!
//! `engine [BLOCKS [ROUNDS]]`: BLOCKS 4 KiB blocks are written (each a new extent), overwritten while dirty, and read
//! ROUNDS times.

use bench::{MemorySet, driver, memory_set, shuffled};
use engine::CacheSet;
use format::{Sector, Sectors};
use io::{Disk, Rng, WriteFlags};

const BLOCK: Sectors = Sectors(8);

/// Nanoseconds for which this thread has run on a processor. Other load on the machine does not count.
fn cpu_ns() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0)
}

fn report(what: &str, requests: u64, began: u64) {
    println!("{what:28} {:8.0} ns", (cpu_ns() - began) as f64 / requests as f64);
}

/// Prints the memory of the set's index and the metadata that it has written.
fn report_metadata(set: &CacheSet, blocks: u64) {
    let status = set.status();
    println!(
        "index                        {:8.1} bytes per extent",
        status.index_bytes as f64 / blocks as f64
    );
    println!(
        "journal                      {:8.1} bytes per write",
        status.journal_written.1 as f64 / (2 * blocks) as f64
    );
    println!(
        "btree nodes {}, rewrites {}, prio writes {}",
        status.btree_nodes,
        set.counters().btree_rewrites,
        set.counters().prio_writes
    );
}

fn main() {
    let blocks: u64 = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(200_000);
    let rounds: u64 = std::env::args().nth(2).and_then(|a| a.parse().ok()).unwrap_or(1);
    let driver = driver();
    let rt = driver.handle();
    driver.block_on(async {
        let space = Sectors(blocks * 8);
        let MemorySet { set, volume, cache, .. } =
            memory_set(&rt, Sectors(space.0 * 4), Sectors(space.0 * 2 + 1024)).await;
        let mut rng = Rng::new(1);
        // Only every second block is used, so that no two extents can be joined.
        let order = shuffled(blocks, &mut rng);
        let at = |block: u64| Sector(block * 16);
        let write = async |block: u64| {
            let buffer = rt.pool().take(4096);
            if let Err(e) = volume.write(at(block), BLOCK, buffer, 0, WriteFlags::default()).await {
                panic!("write: {e}");
            }
        };
        let began = cpu_ns();
        for b in &order {
            write(*b).await;
        }
        report("insert (new dirty extent)", blocks, began);
        let began = cpu_ns();
        for _ in 0..blocks {
            write(rng.below(blocks)).await;
        }
        report("overwrite of dirty", blocks, began);
        let mut buffer = rt.pool().take(4096);
        let began = cpu_ns();
        for _ in 0..blocks * rounds {
            let (b, result) = volume.read(at(rng.below(blocks)), BLOCK, buffer, 0).await;
            buffer = b;
            if let Err(e) = result {
                panic!("read: {e}");
            }
        }
        report("read hit", blocks * rounds, began);
        let device = Disk::new(cache, rt.clone());
        let began = cpu_ns();
        for _ in 0..blocks * rounds {
            let done = device.start_read(at(rng.below(blocks)), BLOCK, buffer, 0).await;
            let Some(b) = done.buffer else { panic!("the device kept the buffer") };
            buffer = b;
        }
        report("device alone, read", blocks * rounds, began);
        report_metadata(&set, blocks);
    });
}
