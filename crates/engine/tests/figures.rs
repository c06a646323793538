//! What became of requests is found in the figures.

#![allow(clippy::unwrap_used)]

use engine::figures::{RateReason, VolumeFigures};
use engine::policy::bypass::BypassReason;
use engine::stats::{OpKind, Outcome, View, Work};
use format::{Sector, Sectors};
use io::{Nanos, Op, Purpose};
use rig::{Rig, Shape};

fn with(test: impl AsyncFnOnce(&Rig)) {
    Shape::default().run(test);
}

#[test]
fn each_request_has_its_outcome() {
    with(async |rig| {
        rig.set("writeback_running", "0").await;
        rig.write(0, 8).await;
        rig.read(0, 8).await;
        rig.read(0, 16).await;
        rig.read(4096, 8).await;
        rig.volume.flush().await.unwrap();
        rig.volume.discard(Sector(8192), Sectors(8)).await.unwrap();
        rig.set("cache_mode", "writearound").await;
        rig.write(1024, 8).await;
        rig.set("cache_mode", "writethrough").await;
        rig.write(2048, 8).await;
        rig.set("cache_mode", "none").await;
        rig.read(3072, 8).await;
        rig.read(0, 8).await;
        // Merged with what is around it, which counts as no read of a client's.
        rig.write(3, 1).await;

        let figures = rig.set.figures();
        let v = &figures.volumes[0];
        let expected = [
            (OpKind::Read, Outcome::Hit, 1),
            (OpKind::Read, Outcome::Partial, 1),
            (OpKind::Read, Outcome::Miss, 1),
            (OpKind::Read, Outcome::Bypass(BypassReason::ModeNone), 2),
            (OpKind::Write, Outcome::Writeback, 2),
            (OpKind::Write, Outcome::Writethrough, 1),
            (OpKind::Write, Outcome::Bypass(BypassReason::WriteAround), 1),
            (OpKind::Flush, Outcome::Done, 1),
            (OpKind::Discard, Outcome::Bypass(BypassReason::Discard), 1),
        ];
        for op in OpKind::ALL {
            for outcome in Outcome::all() {
                let wanted = expected.iter().find(|e| (e.0, e.1) == (op, outcome)).map_or(0, |e| e.2);
                let found = v.total.of(op, outcome).requests;
                assert_eq!(found, wanted, "{op:?} {outcome:?}");
                assert_eq!(v.latencies.of(op, outcome).count(), wanted, "{op:?} {outcome:?}");
            }
        }
        assert_eq!(v.recent, v.total, "all of it is less than five minutes ago");
        assert_eq!(v.errors, [0; 4]);
        let view = v.cache.view(View::Total);
        assert_eq!((view.cache_hits, view.cache_misses), (1, 2));
        assert_eq!((view.cache_bypass_hits, view.cache_bypass_misses), (1, 1));
        assert_eq!(v.cache.reason(BypassReason::ModeNone).requests, 2);
        assert_eq!(v.dirty, Sectors(8));
        assert_eq!(v.writeback.rate_reason, RateReason::Stopped);
        assert!(v.dirty_target > Sectors(0));
        assert!(figures.device.writes.latency.count() > 3 && figures.device.reads.bytes >= 8192);
        assert!(v.device.reads.latency.count() >= 3);
        assert_eq!((figures.device.writes.errors, v.device.reads.errors), (0, 0));
        assert!(figures.times.journal_writes.count() >= 1);
        let slices = figures.times.slices().find(|(work, _)| *work == Work::Journal);
        assert!(slices.is_some_and(|(_, h)| h.count() > 0));
    });
}

#[test]
fn buckets_add_up_and_a_walk_is_timed() {
    with(async |rig| {
        rig.set("writeback_running", "0").await;
        for n in 0..8 {
            rig.write(n * 128, 128).await;
        }
        rig.set.gc().await.unwrap();
        let figures = rig.set.figures();
        assert_eq!(figures.times.work.gc_durations.count(), 1);
        let b = rig.set.bucket_figures();
        assert_eq!(b.unused + b.clean + b.dirty + b.metadata, b.total);
        assert!(b.dirty >= 8 && b.metadata > 2, "{b:?}");
        assert_eq!(b.quantiles.len(), 31);
        assert!(b.quantiles.is_sorted());
        assert_eq!(b.total, figures.status.nbuckets);

        let map = rig.set.bucket_map(10).await;
        let sum = |of: fn(&engine::figures::BucketCell) -> u32| map.cells.iter().map(of).sum::<u32>();
        assert_eq!((map.total, map.cells.len(), map.bucket_sectors), (b.total, 10, Sectors(128)));
        assert_eq!(
            (sum(|c| c.unused), sum(|c| c.clean), sum(|c| c.dirty), sum(|c| c.metadata)),
            (b.unused, b.clean, b.dirty, b.metadata)
        );
        assert!(map.cells[0].metadata > 2, "superblock and journal are at the begin: {map:?}");
        assert_eq!(map.cells.iter().map(|c| c.live.0).sum::<u64>(), 8 * 128);
        assert_eq!(rig.set.bucket_map(u32::MAX).await.cells.len(), b.total as usize, "one bucket each");
        assert_eq!(rig.set.bucket_map(0).await.cells.len(), 1);
    });
}

#[test]
fn backing_requests_are_traced_with_their_purpose() {
    with(async |rig| {
        rig.set("writeback_running", "0").await;
        rig.write(0, 8).await;
        let look = |since| rig.volume.backing_trace(since, Nanos::from_secs(3600)).unwrap();
        let begin = look(0);
        assert_eq!((begin.next, begin.missed, begin.requests.as_slice()), (0, 0, &[][..]));
        rig.read(4096, 8).await;
        rig.set("cache_mode", "writearound").await;
        rig.write(1024, 8).await;
        rig.set("writeback_running", "1").await;
        rig.volume.drained().await.unwrap();

        let seen = look(begin.next);
        assert_eq!((seen.next, seen.missed), (seen.requests.len() as u64, 0));
        assert!(seen.requests.is_sorted_by_key(|r| r.at) && seen.requests.iter().all(|r| r.at <= seen.now));
        let there = |op: Op, purpose: Purpose, sector: u64| {
            let found =
                seen.requests.iter().filter(|r| (r.op, r.purpose, r.sector.0) == (op, purpose, sector));
            found.count()
        };
        let write = Op::Write { fua: false };
        assert_eq!(there(Op::Read, Purpose::Client, 16 + 4096), 1, "a miss: {seen:?}");
        assert_eq!(there(write, Purpose::Client, 16 + 1024), 1, "{seen:?}");
        assert_eq!(there(write, Purpose::Writeback, 16), 1, "{seen:?}");
        assert!(there(Op::Flush, Purpose::Client, 0) > 0, "{seen:?}");
        assert!(there(Op::Write { fua: true }, Purpose::Metadata, 8) > 0, "the superblock: {seen:?}");
        assert_eq!(look(seen.next).requests, []);
        assert_eq!(rig.volume.backing_size(), Some(Sectors(1 << 16)));
    });
}

#[test]
fn a_rate_has_its_reason() {
    with(async |rig| {
        let reason = || VolumeFigures::of(&rig.volume).writeback.rate_reason;
        assert_eq!(reason(), RateReason::NothingDirty);
        rig.set("writeback_delay", "1000").await;
        rig.write(0, 8).await;
        // Once the task has seen it.
        for _ in 0..1000 {
            if reason() == RateReason::Delayed {
                break;
            }
            rig.runtime().yield_now().await;
        }
        assert_eq!(reason(), RateReason::Delayed);
        rig.volume.drained().await.unwrap();
        assert_eq!(reason(), RateReason::NothingDirty);
        let v = VolumeFigures::of(&rig.volume);
        assert_eq!((v.writeback.written, v.writeback.failures), (Sectors(8), 0));
        assert_eq!(rig.set.figures().times.work.writeback_batches.count(), 1);
    });
}

#[test]
fn the_btree_is_measured() {
    with(async |rig| {
        rig.set("writeback_running", "0").await;
        for n in 0..10 {
            rig.write(n * 64, 8 + 8 * (n % 2)).await;
        }
        let b = rig.set.figures().btree;
        assert_eq!((b.depth, b.extents, b.average_extent), (0, 10, Sectors(12)));
        assert!(b.root_usage_percent <= 5 && b.root_usage_percent == b.used_percent, "{b:?}");
        assert_eq!(b.node_sectors, b.sectors_per_node);
    });
}
