//! Counts the costs of 4 KiB requests in the engine alone: bytes to the cache device, memory, and instructions (callgrind).
//!
//! One thread sends one request after the other. Every 32 requests the engine's other tasks (journal, leaves, allocator)
//! run, and their work counts. The cache has 8 GiB and completes requests at once without reading the data, so the figures
//! contain no copy.
//!
//! `valgrind --tool=callgrind --dump-before='*end_of_phase*' counts [BLOCKS]` writes one file for each phase, in this
//! order: set-up, inserts of new dirty extents, overwrites of dirty data, read hits, the loop alone. `bench::callgrind`
//! runs it; the test `instructions` checks the limits, and B7 of `make bench` reports.
//!
//! `counts BLOCKS checksums` counts the bytes of a set with checksums, and reads nothing, because the device has no data to compare.

use std::cell::Cell;
use std::hint::black_box;
use std::rc::Rc;

use bench::{driver, open_on, open_with_checksums, shuffled};
use blockio::wrap::MemDisk;
use engine::{CacheSet, Volume};
use format::{Sector, Sectors};
use io::{Completer, Device, DeviceInfo, Disk, Handle, Request, Rng, WriteFlags};

const BLOCK: Sectors = Sectors(8);
const BLOCK_BYTES: usize = 4096;
/// Number of requests between two turns of the engine's other tasks.
const TURN: u64 = 32;

const CACHE: Sectors = Sectors(8 << 21);

/// A device in memory that, once it is hollow, completes requests without storing data.
struct Hollow {
    disk: MemDisk,
    is_hollow: Cell<bool>,
}

impl Device for Hollow {
    fn info(&self) -> &DeviceInfo {
        self.disk.info()
    }

    fn submit(&self, request: Request, completer: Completer) {
        match self.is_hollow.get() {
            true => completer.complete(Ok(()), request.buffer),
            false => self.disk.submit(request, completer),
        }
    }
}

/// Marks the end of a phase, at which callgrind starts another file.
#[inline(never)]
fn end_of_phase(phase: &str) {
    black_box(phase);
}

async fn turn(rt: &Handle, done: u64) {
    if done.is_multiple_of(TURN) {
        rt.yield_now().await;
    }
}

fn written(cache: &Disk) -> u64 {
    cache.figures().writes.bytes
}

/// Prints a count per request.
fn say(what: &str, count: u64, requests: u64) {
    println!("{what} {:.4}", count as f64 / requests as f64);
}

/// A set whose cache device is hollow.
async fn open(rt: &Handle, blocks: u64, checksums: bool) -> (Disk, CacheSet, Rc<Volume>) {
    let device = Rc::new(Hollow { disk: MemDisk::new("cache", CACHE, 4096), is_hollow: Cell::new(false) });
    let cache = Disk::new(device.clone(), rt.clone());
    let backing = Disk::new(Rc::new(MemDisk::new("backing", Sectors(blocks * 16 + 1024), 512)), rt.clone());
    let (set, volume) = match checksums {
        true => open_with_checksums(cache.clone(), backing).await,
        false => open_on(cache.clone(), backing, BLOCK).await,
    };
    device.is_hollow.set(true);
    (cache, set, volume)
}

fn main() {
    let blocks: u64 = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(10_000);
    let checksums = std::env::args().nth(2).is_some_and(|a| a == "checksums");
    let driver = driver();
    let rt = driver.handle();
    driver.block_on(async {
        let (cache, set, volume) = open(&rt, blocks, checksums).await;
        let mut rng = Rng::new(1);
        // Only every second block is used, so that no two extents can be joined.
        let order = shuffled(blocks, &mut rng);
        let at = |block: u64| Sector(block * 16);
        let write = async |block: u64| {
            let buffer = rt.pool().take(BLOCK_BYTES);
            if let Err(e) = volume.write(at(block), BLOCK, buffer, 0, WriteFlags::default()).await {
                panic!("write: {e}");
            }
        };
        let user_bytes = blocks * BLOCK_BYTES as u64;
        end_of_phase("set-up");

        let before = written(&cache);
        for (n, b) in order.iter().enumerate() {
            write(*b).await;
            turn(&rt, n as u64).await;
        }
        end_of_phase("insert");
        say("insert_cache_bytes_per_user_byte", written(&cache) - before, user_bytes);
        say("index_bytes_per_extent", set.status().index_bytes as u64, blocks);

        let before = written(&cache);
        for n in 0..blocks {
            write(rng.below(blocks)).await;
            turn(&rt, n).await;
        }
        end_of_phase("overwrite");
        say("overwrite_cache_bytes_per_user_byte", written(&cache) - before, user_bytes);
        if checksums {
            return;
        }

        let mut buffer = rt.pool().take(BLOCK_BYTES);
        for n in 0..blocks {
            let (b, result) = volume.read(at(rng.below(blocks)), BLOCK, buffer, 0).await;
            buffer = b;
            if let Err(e) = result {
                panic!("read: {e}");
            }
            turn(&rt, n).await;
        }
        end_of_phase("read");

        for n in 0..blocks {
            black_box(at(rng.below(blocks)));
            turn(&rt, n).await;
        }
        end_of_phase("nothing");
    });
}
