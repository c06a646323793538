//! Published workloads on throttled disks, in virtual time: what they take, and how many requests reach the disks.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::rc::Rc;

use bench::virt::{Asked, DATA_OFFSET, HDD, Limits, RAM, SSD, SlowDisk, SlowRig, fill, run, slow_rig};
use format::{Sector, Sectors};
use io::{Disk, Handle, Nanos, Rng, WriteFlags};

const MIB: u64 = 2048;
const BLOCK: Sectors = Sectors(8);

fn seconds(rt: &Handle) -> f64 {
    rt.now().0 as f64 / 1e9
}

fn fresh(page: u64) -> u64 {
    page ^ 0x5555_0000_0000_0000
}

const DIRTY: u64 = 0xdddd_0000_0000_0000;

async fn tune(r: &SlowRig, settings: &[(&str, &str)]) {
    for (name, value) in settings {
        r.volume.set(name, value).await.unwrap();
    }
}

/// Writes 40 960 of the blocks in `span_mib`, and drains them. Returns the time, and what the disk was asked.
async fn drain(rt: Handle, span_mib: u64, bridge: &str) -> (f64, Asked) {
    let r = slow_rig(&rt, (Sectors(600 * MIB), RAM), (Sectors(2000 * MIB), HDD), fresh).await;
    tune(&r, &[("writeback_running", "0"), ("writeback_percent", "0"), ("writeback_bridge", bridge)]).await;
    let blocks = span_mib * MIB / BLOCK.0;
    let mut rng = Rng::new(7);
    let mut dirty = vec![false; blocks as usize];
    let mut chosen = Vec::new();
    while chosen.len() < 40_960 {
        let b = rng.below(blocks);
        if !std::mem::replace(&mut dirty[b as usize], true) {
            chosen.push(b);
        }
    }
    for some in chosen.chunks(16) {
        let writes: Vec<_> = some
            .iter()
            .map(|b| {
                let mut buffer = rt.pool().take(4096);
                fill(buffer.as_mut(), DIRTY | b);
                let (v, at) = (r.volume.clone(), Sector(b * BLOCK.0));
                rt.spawn(async move { v.write(at, BLOCK, buffer, 0, WriteFlags::default()).await })
            })
            .collect();
        for w in writes {
            w.await.unwrap();
        }
    }
    assert_eq!(r.volume.dirty_sectors(), Sectors(40_960 * BLOCK.0));
    let (began, before) = (seconds(&rt), r.backing.asked());
    tune(&r, &[("writeback_running", "1")]).await;
    r.volume.drained().await.unwrap();
    let took = seconds(&rt) - began;
    let after = r.backing.asked();
    for b in 0..blocks {
        let page = b + DATA_OFFSET.0 / BLOCK.0;
        let expected = if dirty[b as usize] { DIRTY | b } else { fresh(page) };
        assert_eq!(r.backing.word(page), Some(expected), "block {b}");
    }
    let asked = Asked {
        reads: after.reads - before.reads,
        bytes_read: after.bytes_read - before.bytes_read,
        writes: after.writes - before.writes,
        bytes_written: after.bytes_written - before.bytes_written,
        flushes: after.flushes - before.flushes,
    };
    let c = r.set.set_counters();
    println!(
        "{span_mib} MiB, {bridge}: {took:.1} s, {asked:?}, {} bridged runs, {} sectors read, {} sectors of gaps",
        c.writeback_bridged_runs, c.writeback_bridge_read, c.writeback_bridge_written
    );
    r.volume.stop().await.unwrap();
    r.set.stop().await.unwrap();
    r.set.abandon();
    (took, asked)
}

/// 40 960 dirty blocks in 400 MiB on a disk with 150 requests and 150 MB a second: kernel bcache takes 253 s.
#[test]
fn dense_dirty_blocks_drain_in_large_requests() {
    run(|rt| async move {
        let (took, asked) = drain(rt.clone(), 400, "auto").await;
        assert!(took <= 253.0 / 20.0, "{took} s");
        assert!(asked.reads + asked.writes < 1200, "{asked:?}");
    });
}

/// Dirty blocks that are spread over 1900 MiB: kernel bcache takes 271 s.
#[test]
fn sparse_dirty_blocks_drain_in_large_requests() {
    run(|rt| async move {
        let (took, _) = drain(rt.clone(), 1900, "auto").await;
        assert!(took <= 271.0 / 5.0, "{took} s");
    });
}

/// Without bridging every block is a request, and the disk's limit is all that there is.
#[test]
fn without_bridging_every_block_is_a_request() {
    run(|rt| async move {
        let (took, asked) = drain(rt.clone(), 400, "off").await;
        assert!(took <= 253.0, "{took} s");
        assert_eq!(asked.bytes_read, 0, "{asked:?}");
    });
}

/// What `sysbench fileio` does, on a device or a volume.
trait Files {
    async fn read(&self, at: Sector);
    async fn write(&self, at: Sector);
    async fn flush(&self);
}

const REQUEST: Sectors = Sectors(32);
const FILES: Sectors = Sectors(400 * MIB);

struct Raw(Disk);

impl Files for Raw {
    async fn read(&self, at: Sector) {
        let buffer = self.0.runtime().pool().take(REQUEST.bytes() as usize);
        self.0.read(at, buffer).await.1.unwrap();
    }

    async fn write(&self, at: Sector) {
        let buffer = self.0.runtime().pool().zeroed(REQUEST.bytes() as usize);
        self.0.write(at, buffer, false).await.unwrap();
    }

    async fn flush(&self) {
        self.0.flush().await.unwrap();
    }
}

struct Cached(Rc<SlowRig>, Handle);

impl Files for Cached {
    async fn read(&self, at: Sector) {
        let buffer = self.1.pool().take(REQUEST.bytes() as usize);
        self.0.volume.read(at, REQUEST, buffer, 0).await.1.unwrap();
    }

    async fn write(&self, at: Sector) {
        let buffer = self.1.pool().zeroed(REQUEST.bytes() as usize);
        self.0.volume.write(at, REQUEST, buffer, 0, WriteFlags::default()).await.unwrap();
    }

    async fn flush(&self) {
        self.0.volume.flush().await.unwrap();
    }
}

/// Writes all files in order, then three times half a minute of random reads and writes, three to two, with a flush
/// after each hundred. Returns MiB/s of the three, and the longest request of each in ms.
async fn sysbench(rt: &Handle, files: &impl Files) -> [(f64, f64); 3] {
    let begin = Sector(40 * MIB);
    for at in (0..FILES.0).step_by(REQUEST.0 as usize) {
        files.write(begin + Sectors(at)).await;
    }
    files.flush().await;
    let mut rng = Rng::new(4);
    let mut rates = [(0.0, 0.0); 3];
    for rate in &mut rates {
        let (began, mut requests, mut longest) = (seconds(rt), 0, 0.0_f64);
        while seconds(rt) - began < 30.0 {
            let at = begin + Sectors(rng.below(FILES.0 / REQUEST.0) * REQUEST.0);
            let sent = seconds(rt);
            match requests % 5 {
                0..3 => files.read(at).await,
                _ => files.write(at).await,
            }
            longest = longest.max(seconds(rt) - sent);
            requests += 1;
            if requests % 100 == 0 {
                files.flush().await;
            }
        }
        let mib = (requests * REQUEST.0) as f64 / MIB as f64;
        *rate = (mib / (seconds(rt) - began), longest * 1e3);
    }
    rates
}

/// `sysbench fileio` on a 3000-IOPS cache in front of a 150-IOPS disk. Kernel bcache reaches 10, 23 and 35 % of the SSD.
#[test]
fn files_on_a_cached_disk_are_nearly_as_fast_as_on_the_ssd() {
    run(|rt| async move {
        let ssd = SlowDisk::new(&rt, "ssd", Sectors(600 * MIB), SSD, |_| 0);
        let raw = sysbench(&rt, &Raw(Disk::new(ssd, rt.clone()))).await;
        let r = slow_rig(&rt, (Sectors(600 * MIB), SSD), (Sectors(2000 * MIB), HDD), |_| 0).await;
        let r = Rc::new(r);
        let cached = sysbench(&rt, &Cached(r.clone(), rt.clone())).await;
        for (c, r) in cached.iter().zip(raw) {
            assert!(c.0 / r.0 >= 0.92, "{:.1} of {:.1} MiB/s", c.0, r.0);
            println!("{:.1} MiB/s, {:.2} of the SSD; longest request {:.1} ms", c.0, c.0 / r.0, c.1);
        }
        r.set.clone().abandon();
    });
}

/// A client that never pauses, for half a minute, while a fifth of the cache is dirty. Returns the requests that it was
/// answered, and the sectors that were written back meanwhile.
async fn beside_writeback(rt: &Handle, controller: &str) -> (u64, u64) {
    let r = slow_rig(rt, (Sectors(600 * MIB), SSD), (Sectors(2000 * MIB), HDD), |_| 0).await;
    tune(&r, &[("writeback_controller", controller), ("writeback_delay", "0"), ("writeback_running", "0")])
        .await;
    let write = async |at: u64| {
        let buffer = rt.pool().zeroed(REQUEST.bytes() as usize);
        r.volume.write(Sector(at), REQUEST, buffer, 0, WriteFlags::default()).await.unwrap();
    };
    // Scattered over the cache, so that each block written back is a request to it.
    let blocks = 120 * MIB / REQUEST.0;
    for n in 0..blocks {
        write((n * 1571) % blocks * REQUEST.0).await;
    }
    tune(&r, &[("writeback_running", "1"), ("writeback_rate", "1000000")]).await;
    let (mut rng, mut answered) = (Rng::new(3), 0);
    let (before, began) = (r.backing.asked().bytes_written, seconds(rt));
    while seconds(rt) - began < 30.0 {
        let (at, buffer) =
            (rng.below(120 * MIB / REQUEST.0) * REQUEST.0, rt.pool().take(REQUEST.bytes() as usize));
        r.volume.read(Sector(at), REQUEST, buffer, 0).await.1.unwrap();
        answered += 1;
    }
    let written = r.backing.asked().bytes_written - before;
    r.set.abandon();
    (answered, written / 512)
}

/// With the kernel's controller the same client shares the cache device with writeback.
#[test]
fn writeback_leaves_the_devices_to_a_client_that_waits() {
    run(|rt| async move {
        let (kernel, much) = beside_writeback(&rt, "kernel").await;
        let (yielding, little) = beside_writeback(&rt, "yield").await;
        println!(
            "kernel: {kernel} reads, {much} sectors written back; yield: {yielding} reads, {little} sectors"
        );
        assert!(yielding > kernel && little * 2 < much && little > 0);
    });
}

/// Random blocks over three times the cache, one after the other, with a flush after each ten; each takes the client
/// `think` besides. Returns the writes of each second.
async fn synchronous_writes(rt: &Handle, cache: Limits, think: Nanos, for_seconds: usize) -> Vec<u64> {
    let r = slow_rig(rt, (Sectors(600 * MIB), cache), (Sectors(2000 * MIB), HDD), |_| 0).await;
    let (mut rng, mut sent, began) = (Rng::new(5), 0_u64, seconds(rt));
    let mut each_second = vec![0; for_seconds];
    loop {
        let at = Sector(rng.below(1800 * MIB / BLOCK.0) * BLOCK.0);
        let buffer = rt.pool().zeroed(BLOCK.bytes() as usize);
        r.volume.write(at, BLOCK, buffer, 0, WriteFlags::default()).await.unwrap();
        sent += 1;
        if sent.is_multiple_of(10) {
            r.volume.flush().await.unwrap();
        }
        rt.sleep(think).await;
        match each_second.get_mut((seconds(rt) - began) as usize) {
            Some(n) => *n += 1,
            None => break,
        }
    }
    r.set.abandon();
    each_second
}

/// Kernel bcache comes down to 2 writes a second here, dm-writecache to 225 (docs/benchmarks.md). Writeback makes room as
/// fast as a client fills it, whether that is slow or fast; the fast one is slowed down evenly.
#[test]
fn synchronous_writes_go_on_when_the_cache_is_full() {
    run(|rt| async move {
        for (think_us, at_least) in [(400, 2300), (100, 3000)] {
            let rates = synchronous_writes(&rt, RAM, Nanos::from_us(think_us), 120).await;
            let tens: Vec<u64> = rates.chunks(10).map(|c| c.iter().sum::<u64>() / 10).collect();
            let worst = rates.iter().min().copied().unwrap_or_default();
            println!("{think_us} us: {tens:?}, the worst second {worst}");
            assert!(tens.iter().all(|n| *n >= at_least), "{think_us} us: {tens:?}");
            assert!(worst >= 1500, "{think_us} us: {rates:?}");
        }
    });
}

/// Overwriting dirty data in its place costs the request itself: nothing for the journal, nothing for the index.
#[test]
fn an_overwrite_in_place_is_one_request() {
    run(|rt| async move {
        let r = slow_rig(&rt, (Sectors(600 * MIB), SSD), (Sectors(2000 * MIB), HDD), |_| 0).await;
        tune(&r, &[("writeback_running", "0")]).await;
        r.set.set("overwrite_in_place", "always").await.unwrap();
        let mut before = (0, 0, 0);
        for round in 0..3 {
            for n in 0..100 {
                let (buffer, at) = (rt.pool().zeroed(BLOCK.bytes() as usize), Sector(n * 64));
                r.volume.write(at, BLOCK, buffer, 0, WriteFlags::default()).await.unwrap();
            }
            r.volume.flush().await.unwrap();
            let (asked, journal) = (r.cache.asked(), r.set.status().journal_written.0);
            if round > 0 {
                let now = (asked.writes - before.0, asked.flushes - before.1, journal - before.2);
                assert_eq!(now, (100, 1, 0), "writes, flushes, journal entries");
            }
            before = (asked.writes, asked.flushes, journal);
        }
        assert_eq!(r.set.counters().overwrites, 200);
        r.volume.stop().await.unwrap();
        r.set.stop().await.unwrap();
        r.set.abandon();
    });
}
