//! A mixed load under settings of all kinds: its total costs, and the figures.
//!
//! The other pages cover one feature at a time. Here several clients send requests concurrently while data is written back,
//! packed, evicted and read again; after each round the sums have the requests to the devices.

use engine::SetOptions;
use engine::figures::VolumeFigures;
use engine::tunables::{InPlaceOfLru, Overwrite};
use format::{CacheMode, Replacement};
use io::{Nanos, Rng, ZeroFlags};
use sim::disk::Speed;
use sim::hardware::Layout;
use sim::scenario::Boot;

use crate::page::{Detail, page, sums};

/// Requests of each client in a round.
const REQUESTS: u64 = 120;

/// A large device and a small one in writethrough mode.
pub fn unlike(mode: CacheMode, bucket_sectors: u64, nbuckets: u64) -> Layout {
    let two = Layout::sized(mode, nbuckets, 16384).and_backing(4096, CacheMode::Writethrough);
    Layout { bucket_sectors, ..two }
}

/// One client's requests of a round: mostly small ones in a hot part, and some streams. `may_fail`: they need not succeed.
pub async fn load(b: &Boot, client: usize, round: u64, writes_percent: u64, may_fail: bool) {
    let c = &b.clients[client];
    let mut rng = Rng::new(round * 10 + client as u64 + 1);
    let size = c.size();
    let mut stream = rng.below(size);
    for _ in 0..REQUESTS {
        let largest = if rng.below(8) == 0 { 64 } else { 12 };
        let sectors = 1 + rng.below(largest);
        let place = match rng.below(4) {
            0 => rng.below(size),
            1 => {
                stream += sectors;
                stream
            }
            _ => rng.below(size / 8),
        };
        let (start, fua) = (place % (size - sectors), rng.below(10) == 0);
        let done = match rng.below(100) {
            n if n < writes_percent => c.write(start, sectors, fua).await,
            90..95 => c.discard(start, sectors).await,
            95..97 => c.write_zeroes(start, sectors, ZeroFlags::default()).await,
            97..99 => c.flush().await,
            _ => c.read(start, sectors).await.is_some(),
        };
        assert!(done || may_fail, "client {client}, round {round}: {start}+{sectors}");
        b.rt.sleep(Nanos(rng.below(3_000_000))).await;
    }
}

async fn rounds(b: &Boot, count: u64, writes_percent: u64) {
    rounds_from(b, 0..count, writes_percent, false).await;
}

/// Rounds of all clients side by side, and what each round cost.
pub async fn rounds_from(b: &Boot, rounds: std::ops::Range<u64>, writes_percent: u64, may_fail: bool) {
    for round in rounds {
        let clients: Vec<_> = (0..b.clients.len())
            .map(|client| {
                let theirs = b.clone();
                b.rt.spawn(async move { load(&theirs, client, round, writes_percent, may_fail).await })
            })
            .collect();
        for client in clients {
            client.await;
        }
        b.sleep_ms(1200).await;
        sums(b, &format!("round {round}"));
        b.world.log(|| format!("= {:?}", b.set().counters()));
        b.world.log(|| format!("= {:?}", b.set().set_counters()));
        for v in b.set().volumes().iter().filter(|v| !v.is_flash_only()) {
            let w = VolumeFigures::of(v).writeback;
            b.world
                .log(|| format!("= {}: {:?}, share {:.3}, {:?}", v.name(), w.rate_reason, w.share, w.rate));
        }
    }
}

/// A full cache, whose dirty data goes at once to a device that is slow.
#[test]
fn a_cache_that_is_too_small() {
    for replacement in [Replacement::Lru, Replacement::Fifo] {
        let mut small = unlike(CacheMode::Writeback, 16, 256);
        (small.replacement, small.discard) = (replacement, replacement == Replacement::Fifo);
        let name = format!("mixed_small_{replacement:?}").to_lowercase();
        page(&name, Detail::Sums, (small, 0), |b| async move {
            b.open().await;
            b.tune(0, "writeback_delay", "1").await;
            b.backings[0].set_speed(Speed::even(4000));
            rounds(&b, 6, 60).await;
        });
    }
}

/// Blocks of 4 KiB on a device with such sectors, and requests that are no multiple of them.
#[test]
fn large_blocks() {
    let mut large = unlike(CacheMode::Writeback, 64, 256);
    (large.block_sectors, large.logical_block_bytes) = (8, 4096);
    large.backings.iter_mut().for_each(|backing| backing.block_sectors = 8);
    page("mixed_blocks", Detail::Sums, (large, 1024), |b| async move {
        b.open().await;
        b.tune(0, "writeback_delay", "1").await;
        b.tune(0, "admission", "kernel").await;
        rounds(&b, 5, 50).await;
    });
}

/// Mostly reads of more than the cache holds, by what they save.
#[test]
fn reads_of_more_than_there_is_room_for() {
    let mut thin = unlike(CacheMode::Writethrough, 16, 256);
    thin.backings[1].mode = CacheMode::Writearound;
    page("mixed_reads", Detail::Sums, (thin, 0), |b| async move {
        let mut options = SetOptions::default();
        options.tunables.replacement = InPlaceOfLru::named("cost_benefit").unwrap();
        b.open_with(options).await;
        b.backings[0].set_speed(Speed::even(5000));
        b.backings[1].set_speed(Speed::even(300));
        rounds(&b, 8, 10).await;
        let map = b.set().bucket_map(16).await;
        b.world.log(|| format!("= {map:?}"));
    });
}

/// Dirty data that is cut up and packed, by the controller of the kernel.
#[test]
fn sparse_dirty_data() {
    page("mixed_sparse", Detail::Sums, (unlike(CacheMode::Writeback, 64, 192), 512), |b| async move {
        let mut options = SetOptions::default();
        options.tunables.overwrite_in_place = Overwrite::Off;
        options.tunables.copy_gc_enabled = true;
        options.tunables.writeback_batch_sectors = 128;
        b.open_with(options).await;
        for (name, value) in [("writeback_controller", "kernel"), ("sequential_cutoff", "0")] {
            b.tune(0, name, value).await;
        }
        b.tune(0, "writeback_delay", "2").await;
        b.tune(0, "writeback_rate_update_seconds", "1").await;
        for round in 0..2 {
            rounds(&b, 3, 80).await;
            b.set().gc().await.unwrap();
            sums(&b, &format!("walked {round}"));
        }
    });
}

/// An index that does not fit into memory and is written anew by every walk, behind a journal that is never large enough.
#[test]
fn an_index_that_is_always_on_its_way() {
    page("mixed_index", Detail::Sums, (unlike(CacheMode::Writeback, 8, 1024), 2048), |b| async move {
        let mut options = SetOptions::default();
        options.tunables.btree_cache_limit = 4 << 10;
        options.tunables.gc_always_rewrite = true;
        b.open_with(options).await;
        b.tune(0, "sequential_cutoff", "0").await;
        b.cache.set_speed(Speed::even(400));
        for round in 0..3 {
            rounds(&b, 2, 70).await;
            b.set().gc().await.unwrap();
            sums(&b, &format!("walked {round}"));
            b.world.log(|| format!("= {:?}", b.set().status()));
        }
    });
}

/// Stripes, runs over gaps, and a device without costs that are known.
#[test]
fn stripes_and_runs() {
    let mut striped = unlike(CacheMode::Writeback, 32, 512);
    striped.backings[0].stripe_bytes = 64 * 512;
    page("mixed_stripes", Detail::Sums, (striped, 0), |b| async move {
        b.open().await;
        b.tune(0, "writeback_bridge_limit", "32768").await;
        b.tune(0, "writeback_delay", "1").await;
        b.tune(0, "writeback_percent", "0").await;
        b.backings[0].set_speed(Speed::even(8000));
        rounds(&b, 6, 60).await;
        b.volume(0).drained().await.unwrap();
        sums(&b, "drained");
    });
}
