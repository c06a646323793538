//! The second set takes a volume over although the first one works, because that cannot store data any more: changes that are under way
//! end before (decision 037). And damage of the second set, which the first one decides about.
#![allow(clippy::unwrap_used)]

use std::cell::Cell;
use std::rc::Rc;

use engine::Resolution;
use format::CacheMode;
use sim::damaged_data::flip_on;
use sim::disk::{Fault, Kind, Matching, Retained};
use sim::hardware::Layout;
use sim::scenario::{Boot, Scenario};

fn copied(seed: u64) -> Scenario {
    let mut scenario = Scenario::with_second(seed, Layout::with_checksums(CacheMode::Writeback));
    scenario.boot_and_stop(|b| async move {
        b.open_both().await;
        b.make_copy(0).await.unwrap();
        b.stop().await;
    });
    scenario
}

/// Dirty data at 0 is damaged in the first set, which cannot store it again: a read makes the second set take over.
async fn take_over_by_read(b: &Boot) {
    assert_eq!(flip_on(&b.cache, 0..8), 8);
    // Only data is written without FUA. So few errors do not disable the set.
    b.cache.set_faults(vec![Fault { matching: Matching::all(Kind::Write), skip: 0, count: 7 }]);
}

/// Zeros are written over dirty data, and wait for the backing device, when the second set takes over. They dropped the dirty data from the
/// first set only, so the older data came back.
#[test]
fn a_direct_write_over_dirty_data_ends_before_a_takeover() {
    let mut scenario = copied(1);
    scenario.boot(|b| async move {
        b.open_both().await;
        b.stay_dirty(0).await;
        let c = b.clients[0].clone();
        assert!(c.write(0, 8, true).await && c.write(100, 300, true).await);
        let disk = b.backings[0].clone();
        disk.hold(Matching { kind: Kind::Write, range: 116..416 });
        let (zeroes, flags) = (c.clone(), io::ZeroFlags { may_unmap: false, fua: false });
        let zeroes = b.rt.spawn(async move { zeroes.write_zeroes(100, 300, flags).await });
        b.wait_until(|| disk.held() > 0).await;
        let (first, _) = b.sets_of(&b.volume(0));
        take_over_by_read(&b).await;
        let reader = c.clone();
        let read = b.rt.spawn(async move { reader.read(0, 8).await.is_some() });
        b.sleep_ms(500).await;
        disk.release();
        assert!(zeroes.await && read.await);
        assert_ne!(b.volume(0).set_uuid(), Some(first.uuid()), "the second set has taken over");
        assert!(first.status().failed.is_none(), "the first set works");
        b.read_all(0).await;
        assert!(c.write(4, 100, true).await);
        b.read_all(0).await;
    });
    // The first set still has the damaged data, which does not count any more.
    scenario.power_loss(Retained::Nothing);
}

/// Writes of every alignment are under way when the second set takes over. One that had looked around its data looked for ever in the set
/// that the volume had left.
#[test]
fn unaligned_writes_beside_a_takeover() {
    let taken_over = Rc::new(Cell::new(0));
    for seed in 0..16 {
        let mut layout = Layout::with_checksums(CacheMode::Writeback);
        (layout.block_sectors, layout.bucket_sectors, layout.backings[0].block_sectors) = (2, 16, 2);
        let mut scenario = Scenario::with_second(seed, layout);
        scenario.boot_and_stop(|b| async move {
            b.open_both().await;
            b.make_copy(0).await.unwrap();
            b.stop().await;
        });
        let counter = taken_over.clone();
        scenario.boot(move |b| async move {
            b.open_both().await;
            b.stay_dirty(0).await;
            let c = b.clients[0].clone();
            assert!(c.write(0, 8, true).await && c.write(100, 40, true).await);
            let (first, _) = b.sets_of(&b.volume(0));
            take_over_by_read(&b).await;
            let reader = c.clone();
            let read = b.rt.spawn(async move { reader.read(0, 8).await.is_some() });
            for _ in 0..seed {
                b.rt.sleep(io::Nanos(20_000)).await;
            }
            let writes: Vec<_> = (0..6).map(|n| b.write_beside(0, 101 + 6 * n, 3, n % 2 == 0)).collect();
            assert!(read.await);
            for write in writes {
                assert!(write.await);
            }
            // Otherwise the writes have had the errors, and the damaged data was stored again.
            counter.set(counter.get() + u32::from(b.volume(0).set_uuid() != Some(first.uuid())));
            b.read_all(0).await;
        });
        scenario.power_loss(Retained::Nothing);
    }
    assert!(taken_over.get() > 4, "{}", taken_over.get());
}

/// The copy is damaged in the second set. The operator accepts the damage there: the data of the first set replaces it. It was accepted as
/// it was, and served later as clean data.
#[test]
fn damage_of_a_copy_is_repaired_from_the_set_that_decides() {
    for (seed, how) in [(1, None), (2, Some(Resolution::Accepted)), (3, Some(Resolution::Dropped))] {
        let mut scenario = copied(seed);
        scenario.boot(move |b| async move {
            b.open_both().await;
            b.stay_dirty(0).await;
            let c = b.clients[0].clone();
            assert!(c.write(100, 50, true).await);
            let (first, second) = b.sets_of(&b.volume(0));
            let damaged = b.second.clone().unwrap();
            if how.is_some() {
                // The first set cannot be read for a moment, so the scrub cannot repair what it finds.
                b.cache.set_faults(vec![Fault { matching: Matching::all(Kind::Read), skip: 0, count: 4 }]);
            }
            assert_eq!(flip_on(&damaged, 110..113), 3);
            assert!(second.scrub().await.unwrap().damaged_dirty_blocks > 0);
            b.sleep_ms(100).await;
            b.cache.set_faults(Vec::new());
            if let Some(how) = how {
                second.resolve_damaged(None, None, how).await.unwrap();
            }
            assert!(second.damaged().is_empty() && first.damaged().is_empty());
            b.tune(0, "writeback_running", "1").await;
            b.volume(0).drained().await.unwrap();
            assert_eq!(first.scrub().await.unwrap().damaged_dirty_blocks, 0);
            b.read_all(0).await;
            assert!(c.flush().await);
        });
        scenario.power_loss(Retained::Nothing).judge().happy_end();
    }
}
