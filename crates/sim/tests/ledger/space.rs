//! Buckets: filling, reuse by every policy, packing, and a cache that is too small.

use engine::SetOptions;
use engine::figures::VolumeFigures;
use engine::tunables::{InPlaceOfLru, Overwrite};
use format::{CacheMode, Replacement};
use io::Nanos;
use sim::disk::Speed;
use sim::hardware::Layout;
use sim::scenario::Boot;

use crate::page::{Detail, page, sums};

fn small_cache(mode: CacheMode, replacement: Replacement) -> Layout {
    let mut layout = Layout::small(mode);
    layout.bucket_sectors = 16;
    layout.nbuckets = 128;
    layout.replacement = replacement;
    layout.discard = replacement == Replacement::Fifo;
    layout.backings[0].data_sectors = 8192;
    layout
}

/// Reads more than the cache holds, some of it again and again.
async fn read_on(b: &Boot, rounds: u64) {
    for round in 0..rounds {
        for n in 0..200 {
            let at = if n % 4 == 0 { n % 20 * 16 } else { (round * 200 + n) * 48 % 8000 };
            assert!(b.clients[0].read(at, 12).await.is_some());
        }
        b.sleep_ms(200).await;
        sums(b, &format!("round {round}"));
        b.world.log(|| format!("= {:?}", b.set().counters()));
    }
}

#[test]
fn each_policy_evicts_buckets() {
    for replacement in [Replacement::Lru, Replacement::Fifo, Replacement::Random] {
        let name = format!("replacement_{replacement:?}").to_lowercase();
        page(&name, Detail::Sums, (small_cache(CacheMode::Writethrough, replacement), 0), |b| async move {
            b.open().await;
            b.tune(0, "sequential_cutoff", "0").await;
            read_on(&b, 6).await;
        });
    }
}

#[test]
fn cost_benefit_evicts_buckets() {
    let layout = small_cache(CacheMode::Writethrough, Replacement::Lru);
    page("replacement_cost_benefit", Detail::Sums, (layout, 0), |b| async move {
        let mut options = SetOptions::default();
        options.tunables.replacement = InPlaceOfLru::named("cost_benefit").unwrap();
        b.open_with(options).await;
        b.tune(0, "sequential_cutoff", "0").await;
        b.backings[0].set_speed(Speed::even(5000));
        read_on(&b, 6).await;
        let map = b.set().bucket_map(16).await;
        b.world.log(|| format!("= {map:?}"));
    });
}

/// Dirty data fills the cache: writes are slowed down, writeback goes as fast as it can.
#[test]
fn a_cache_that_is_full_of_dirty_data() {
    let layout = small_cache(CacheMode::Writeback, Replacement::Lru);
    page("full", Detail::Sums, (layout, 512), |b| async move {
        b.open().await;
        b.tune(0, "sequential_cutoff", "0").await;
        b.backings[0].set_speed(Speed::even(3000));
        for round in 0..6 {
            for n in 0..60 {
                assert!(b.clients[0].write((round * 60 + n) * 16 % 8000, 16, false).await);
                b.clients[1].write((round * 60 + n) * 8 % 512, 4, false).await;
            }
            sums(&b, &format!("round {round}"));
            let w = VolumeFigures::of(&b.volume(0)).writeback;
            b.world.log(|| format!("= {:?}, share {:.3}, {:?}", w.rate_reason, w.share, w.rate));
        }
    });
}

/// Packing, started by the set and by command.
#[test]
fn sparse_buckets_are_packed() {
    let mut layout = Layout::small(CacheMode::Writeback);
    layout.bucket_sectors = 64;
    layout.nbuckets = 512;
    layout.backings[0].data_sectors = 16384;
    page("packing", Detail::Sums, (layout, 0), |b| async move {
        let mut options = SetOptions::default();
        options.tunables.overwrite_in_place = Overwrite::Off;
        b.open_with(options).await;
        b.stay_dirty(0).await;
        let c = &b.clients[0];
        for n in 0..1200 {
            assert!(c.write(n * 12, 8, false).await);
        }
        for n in (0..1200).filter(|n| n % 8 > n / 8 % 5) {
            assert!(c.write(n * 12, 8, false).await);
        }
        sums(&b, "sparse");
        b.set().set("copy_gc_enabled", "1").await.unwrap();
        b.set().gc().await.unwrap();
        sums(&b, "packed");
        b.world.log(|| format!("= {:?}", b.set().counters()));
        for n in 0..600 {
            assert!(c.write(n * 24, 4, false).await);
        }
        b.sleep_ms(5000).await;
        sums(&b, "packed of its own accord");
        b.world.log(|| format!("= {:?}", b.set().counters()));
        let map = b.set().bucket_map(7).await;
        b.world.log(|| format!("= {map:?}"));
    });
}

/// The cache device answers late: requests go past it, and come back.
#[test]
fn a_cache_device_that_is_congested() {
    for admission in ["kernel", "cost"] {
        let layout = small_cache(CacheMode::Writethrough, Replacement::Lru);
        page(&format!("congestion_{admission}"), Detail::Sums, (layout, 0), move |b| async move {
            b.open().await;
            b.tune(0, "admission", admission).await;
            b.tune(0, "sequential_cutoff", "65536").await;
            for (what, micros) in [("fast", 50), ("slow", 60_000), ("fast again", 50)] {
                b.cache.set_speed(Speed::even(micros));
                for n in 0..60 {
                    let at = if n % 3 == 0 { n / 3 * 8 % 64 } else { n * 64 % 4096 };
                    assert!(b.clients[0].read(at, 8).await.is_some());
                    assert!(b.clients[0].write(4096 + n * 16, 8, false).await);
                    b.rt.sleep(Nanos::from_ms(2)).await;
                }
                sums(&b, what);
                let f = b.set().figures();
                b.world.log(|| format!("= congested: {:?}; {:?}", f.congested, f.volumes[0].requests));
            }
        });
    }
}

/// Dirty data is cut up until no bucket is left for what is written over it: that goes past the cache, and the dirty data
/// under it goes first.
#[test]
fn dirty_data_is_overwritten_when_no_bucket_is_left() {
    let layout = small_cache(CacheMode::Writeback, Replacement::Lru);
    page("no_bucket", Detail::Sums, (layout, 0), |b| async move {
        let mut options = SetOptions::default();
        options.tunables.overwrite_in_place = Overwrite::Off;
        b.open_with(options).await;
        b.stay_dirty(0).await;
        for n in 0..80 {
            assert!(b.clients[0].write(n * 16, 16, false).await);
        }
        sums(&b, "dirty");
        for round in 0..4 {
            for n in 0..40 {
                assert!(b.clients[0].write(n * 32 + round * 4, 3, n % 10 == 0).await);
            }
            sums(&b, &format!("cut up {round} times"));
        }
        assert!(b.clients[0].flush().await);
        sums(&b, "flushed");
    });
}
