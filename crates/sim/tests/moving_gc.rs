//! Moving garbage collection: it empties the selected buckets with few requests, and all of them are free afterwards.
#![allow(clippy::unwrap_used)]

use std::pin::pin;

use engine::SetOptions;
use engine::tunables::Overwrite;
use format::{CacheMode, Sectors};
use io::Nanos;
use io::sync::{Either, select};
use sim::disk::{Kind, Matching, Retained};
use sim::hardware::Layout;
use sim::scenario::{Boot, Scenario};

/// Size of an extent, how many fit into a bucket, and how far apart they are on the volume.
const PIECE: u64 = 32;
const IN_BUCKET: u64 = 8;
const STEP: u64 = 40;

/// Ten buckets are kept back for what is moved: 2560 sectors.
fn many_buckets() -> Layout {
    let bucket_sectors = PIECE * IN_BUCKET;
    Layout { bucket_sectors, ..Layout::sized(CacheMode::Writeback, 1280, 8192) }
}

/// Fills buckets with dirty extents, and writes those elsewhere of which `leaves` says no: its arguments are the bucket and
/// the extent in it.
async fn thin(b: &Boot, buckets: u64, leaves: impl Fn(u64, u64) -> bool) {
    let mut options = SetOptions::default();
    options.tunables.overwrite_in_place = Overwrite::Off;
    b.open_with(options).await;
    b.stay_dirty(0).await;
    for n in 0..buckets * IN_BUCKET {
        assert!(b.clients[0].write(n * STEP, PIECE, false).await);
    }
    for n in (0..buckets * IN_BUCKET).filter(|n| !leaves(n / IN_BUCKET, n % IN_BUCKET)) {
        assert!(b.clients[0].write(n * STEP, PIECE, false).await);
    }
    b.set().set("copy_gc_enabled", "1").await.unwrap();
}

/// Walks the index and packs; returns how many extents were moved.
async fn pack(b: &Boot) -> u64 {
    let (set, before) = (b.set(), b.set().counters().moved_extents);
    match select(pin!(set.gc()), b.rt.sleep(Nanos::from_secs(60))).await {
        Either::Left(done) => done.unwrap(),
        Either::Right(()) => panic!("packing does not end"),
    }
    b.set().counters().moved_extents - before
}

/// 14 buckets of which five eighths are left: more than one batch of 64 extents or 1 MiB. They come free, at the price of nine
/// others.
#[test]
fn packed_data_leaves_its_buckets() {
    let mut scenario = Scenario::new(1, many_buckets(), 0);
    scenario.boot(|b| async move {
        thin(&b, 14, |_, n| n < 5).await;
        let (buckets, io) = (b.set().bucket_figures(), b.cache.counters());
        assert_eq!(pack(&b).await, 14 * 5);
        let (after, io_after) = (b.set().bucket_figures(), b.cache.counters());
        assert_eq!(after.dirty + 14, buckets.dirty + 9);
        // One read for a bucket, since what lies between costs less than a request; one write for what lies together.
        let (reads, writes) = (io_after.reads - io.reads, io_after.writes - io.writes);
        assert!((1..=20).contains(&reads) && (1..=20).contains(&writes), "{reads} reads and {writes} writes");

        // Nothing is on its way to any bucket but the two that are being filled.
        b.tune(0, "writeback_running", "1").await;
        b.volume(0).drained().await.unwrap();
        let idle = b.set().bucket_figures();
        let taken = idle.total - idle.available - idle.metadata;
        assert!(idle.dirty == 0 && taken <= 2, "{taken} buckets are in use: {idle:?}");
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// Extents too far apart to be read together.
#[test]
fn each_extent_is_moved_however_few_there_are() {
    for sparse_buckets in [2, 3] {
        let mut scenario = Scenario::new(2, many_buckets(), 0);
        scenario.boot(move |b| async move {
            thin(&b, 13, |bucket, n| bucket % 5 != 0 || bucket / 5 >= sparse_buckets || n == 0).await;
            assert_eq!(pack(&b).await, sparse_buckets);
        });
        scenario.power_loss(Retained::Nothing).judge().happy_end();
    }
}

/// Packing pays up to three quarters, and no further.
#[test]
fn buckets_that_are_three_quarters_full_stay() {
    for (left, moved) in [(5, 14 * 5), (6, 0), (7, 0)] {
        let mut scenario = Scenario::new(3, many_buckets(), 0);
        scenario.boot(move |b| async move {
            thin(&b, 14, |_, n| n < left).await;
            assert_eq!(pack(&b).await, moved, "{left} eighths are left");
        });
        scenario.power_loss(Retained::Nothing).judge().happy_end();
    }
}

/// A hundred of 256 buckets hold a little dirty data among clean data: there is room, so both are packed. (With hardly any
/// room only the dirty data is.)
#[test]
fn clean_data_is_packed_along_while_there_is_room() {
    const HIGH: u64 = 8192;
    let mut layout = Layout::small(CacheMode::Writeback);
    layout.bucket_sectors = 64;
    layout.backings[0].data_sectors = 2 * HIGH;
    let offset = layout.backings[0].data_offset;
    let mut scenario = Scenario::new(4, layout, 0);
    scenario.boot(move |b| async move {
        let mut options = SetOptions::default();
        options.tunables.overwrite_in_place = Overwrite::Off;
        options.tunables.writeback_batch_sectors = 16;
        b.open_with(options).await;
        for (name, value) in [
            ("sequential_cutoff", "0"),
            ("writeback_running", "0"),
            ("writeback_percent", "0"),
            ("writeback_delay", "0"),
        ] {
            b.tune(0, name, value).await;
        }
        // A bucket gets four extents of the lower half and four of the upper one.
        let c = &b.clients[0];
        for n in 0..400 {
            assert!(c.write(n * 16, 8, false).await && c.write(HIGH + n * 16, 8, false).await);
        }
        for n in (0..400).filter(|n| n % 4 != 0) {
            assert!(c.discard(HIGH + n * 16, 8).await);
        }
        // The lower half is written back.
        b.backings[0].hold(Matching { kind: Kind::Write, range: offset + HIGH..offset + 2 * HIGH });
        b.tune(0, "writeback_running", "1").await;
        while b.volume(0).dirty_sectors() >= Sectors(110 * 8) {
            b.sleep_ms(10).await;
        }
        b.sleep_ms(1000).await;
        let moved = b.set().counters().moved_extents;
        assert!(moved >= 400, "{moved} extents were moved");
        assert_eq!(b.set().status().cached_sectors, Sectors(500 * 8), "nothing was given up");
        b.backings[0].release();
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}
