//! Runs one workload on one replacement policy: the engine in virtual time.
//!
//! The cache is 128 MiB (256 buckets) on an SSD with 3000 requests per second; the disk behind it does 150. One client
//! sends one request at a time. Streams are cached like other requests, so only the replacement differs.

use std::cell::Cell;
use std::rc::Rc;

use engine::policy::replacement::{InPlaceOfLru, POLICIES};
use format::{Sector, Sectors};
use io::WriteFlags;

use crate::virt::{HDD, SSD, run, slow_rig};
use crate::workloads::Access;

const BLOCK_SECTORS: u64 = 8;
/// Number of blocks for which the cache device has room, including metadata.
pub const CACHE_BLOCKS: u64 = 128 * 256;

/// A policy: its name in the tables, `cache_replacement_policy`, `replacement`.
pub type Policy = (&'static str, &'static str, &'static str);

/// All policies of the engine: first those of our own, which take the place of lru, then those that a superblock can name.
pub fn policies() -> impl Iterator<Item = Policy> + Clone {
    let own = &InPlaceOfLru::names()[1..];
    let stored = POLICIES.iter().map(|policy| policy.name).filter(|name| !own.contains(name));
    own.iter().map(|name| (*name, "lru", *name)).chain(stored.map(|name| (name, name, "kernel")))
}

/// The policy with this name.
///
/// # Panics
/// If the engine has none.
pub fn policy(name: &str) -> Policy {
    policies().find(|policy| policy.0 == name).unwrap_or_else(|| panic!("no policy {name}"))
}

/// The results, from the first counted request on.
#[derive(Clone, Copy, Default, Debug)]
pub struct Outcome {
    /// Share of the reads that the cache answered.
    pub hits: f64,
    /// Bytes written to the cache device.
    pub cache_written: u64,
    /// Number of requests to the disk.
    pub disk_requests: u64,
    /// Duration of the requests in seconds.
    pub seconds: f64,
}

/// Runs `accesses`, and counts from request `from` on.
///
/// # Panics
/// If a request fails.
pub fn play(accesses: &[Access], from: usize, policy: &Policy) -> Outcome {
    let accesses: Rc<[Access]> = accesses.into();
    let outcome = Rc::new(Cell::new(Outcome::default()));
    let (result, policy) = (outcome.clone(), *policy);
    run(move |rt| async move {
        let blocks = accesses.iter().map(|a| a.block + a.blocks).max().unwrap_or(0);
        let disk = Sectors(blocks * BLOCK_SECTORS + 2048);
        let r = slow_rig(&rt, (Sectors(CACHE_BLOCKS * BLOCK_SECTORS), SSD), (disk, HDD), |_| 0).await;
        for (k, v) in [
            ("cache_replacement_policy", policy.1),
            ("replacement", policy.2),
            ("congested_read_threshold_us", "0"),
            ("congested_write_threshold_us", "0"),
        ] {
            r.set.set(k, v).await.unwrap_or_else(|e| panic!("{e}"));
        }
        // Reads of gaps would count as misses.
        for (k, v) in [("sequential_cutoff", "0"), ("writeback_bridge", "off")] {
            r.volume.set(k, v).await.unwrap_or_else(|e| panic!("{e}"));
        }
        let mut read_bytes = 0;
        let (mut began, mut disk, mut cache) = (rt.now(), r.backing.asked(), r.cache.asked());
        for (i, a) in accesses.iter().enumerate() {
            if i == from {
                (began, disk, cache, read_bytes) = (rt.now(), r.backing.asked(), r.cache.asked(), 0);
            }
            let (at, sectors) = (Sector(a.block * BLOCK_SECTORS), Sectors(a.blocks * BLOCK_SECTORS));
            if a.write {
                let buffer = rt.pool().zeroed(sectors.bytes() as usize);
                let done = r.volume.write(at, sectors, buffer, 0, WriteFlags::default()).await;
                done.unwrap_or_else(|e| panic!("{e}"));
            } else {
                let buffer = rt.pool().take(sectors.bytes() as usize);
                let (_, done) = r.volume.read(at, sectors, buffer, 0).await;
                done.unwrap_or_else(|e| panic!("{e}"));
                read_bytes += sectors.bytes();
            }
        }
        let now = r.backing.asked();
        result.set(Outcome {
            hits: 1.0 - (now.bytes_read - disk.bytes_read) as f64 / read_bytes.max(1) as f64,
            cache_written: r.cache.asked().bytes_written - cache.bytes_written,
            disk_requests: now.reads + now.writes - disk.reads - disk.writes,
            seconds: (rt.now().0 - began.0) as f64 / 1e9,
        });
        r.set.abandon();
    });
    outcome.get()
}
