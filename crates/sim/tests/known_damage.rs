//! Damage of dirty data that is known stays known, and reads of it end.
#![allow(clippy::unwrap_used)]

use std::cell::Cell;
use std::rc::Rc;

use engine::SetOptions;
use engine::tunables::Overwrite;
use format::{CacheMode, Sectors};
use sim::damaged_data::flip;
use sim::disk::{Fault, Kind, Matching, Retained};
use sim::hardware::Layout;
use sim::scenario::{Boot, Scenario};

async fn open(b: &Boot) {
    let mut options = SetOptions::default();
    options.tunables.overwrite_in_place = Overwrite::Always;
    options.tunables.scrub_share = 100;
    b.open_with(options).await;
    b.stay_dirty(0).await;
}

/// Dirty data of a bucket with a footer is damaged, and the operator knows it. A client overwrites another block of the bucket in
/// place, and the power fails. The damage is still noticed: it is neither served nor written back.
#[test]
fn known_damage_is_known_after_a_crash_although_its_bucket_was_overwritten_in_place() {
    for (reads_again, is_reopened) in [(false, false), (true, false), (true, true)] {
        let mut scenario = Scenario::new(1, Layout::with_checksums(CacheMode::Writeback), 0);
        scenario.boot_and_stop(|b| async move {
            open(&b).await;
            assert!(b.clients[0].write(0, 7, true).await);
            b.stop().await;
        });
        let buckets = Rc::new(std::cell::RefCell::new(Vec::new()));
        let theirs = buckets.clone();
        scenario.boot(move |b| async move {
            open(&b).await;
            b.clients[0].set_tolerant(true);
            if is_reopened {
                assert!(b.clients[0].write(0, 1, true).await);
            }
            assert_eq!(flip(&b, 3..4), 1);
            assert!(b.clients[0].read(3, 1).await.is_none(), "the damage was served");
            assert_eq!(b.set().damaged().len(), 1);
            *theirs.borrow_mut() = b.set().damaged_buckets();
            assert!(b.clients[0].write(0, 1, true).await);
        });
        scenario.power_loss(Retained::Nothing);
        scenario.boot(move |b| async move {
            open(&b).await;
            b.clients[0].set_tolerant(true);
            if reads_again {
                // As the daemon does.
                let again = buckets.borrow().clone();
                b.set().read_again(again).await.unwrap();
                assert_eq!(b.set().checksum_counters().learnt_blocks, 0, "damage got a checksum");
            }
            assert!(b.clients[0].read(3, 1).await.is_none(), "the damage was served");
        });
    }
}

/// A block of dirty data is damaged. Clients overwrite other blocks of its bucket in place all the time. A read of the block ends
/// with an error, and does not wait until they pause.
#[test]
fn a_read_of_damaged_data_ends_beside_overwriting_of_other_blocks() {
    let mut scenario = Scenario::new(1, Layout::with_checksums(CacheMode::Writeback), 0);
    scenario.boot(|b| async move {
        open(&b).await;
        let c = b.clients[0].clone();
        c.set_tolerant(true);
        assert!(c.write(0, 7, true).await);
        assert_eq!(flip(&b, 3..4), 1);
        let stop = Rc::new(Cell::new(false));
        let writers: Vec<_> = [0, 1, 2, 4, 5, 6]
            .into_iter()
            .map(|at| {
                let (c, stop) = (c.clone(), stop.clone());
                b.rt.spawn(async move {
                    while !stop.get() {
                        assert!(c.write(at, 1, false).await);
                    }
                })
            })
            .collect();
        b.sleep_ms(10).await;
        let reader = c.clone();
        let reading = b.rt.spawn(async move { reader.read(3, 1).await });
        b.sleep_ms(300).await;
        let answer = reading.try_take();
        stop.set(true);
        for w in writers {
            w.await;
        }
        assert!(answer.is_some_and(|data| data.is_none()), "the read has not ended after 300 ms");
        assert_eq!(b.set().damaged().first().map(|d| d.sectors), Some(Sectors(1)));
    });
}

/// The footer of the first bucket cannot be written. A scrub still finds the damage in the buckets behind it.
#[test]
fn a_scrub_goes_on_behind_a_footer_that_cannot_be_written() {
    let mut scenario = Scenario::new(1, Layout::with_checksums(CacheMode::Writeback), 0);
    scenario.boot_and_stop(|b| async move {
        open(&b).await;
        assert!(b.clients[0].write(0, 7, true).await && b.clients[0].write(100, 7, true).await);
        b.stop().await;
    });
    scenario.boot(|b| async move {
        open(&b).await;
        // The first bucket is reopened, and has no footer after the power loss.
        let first = if b.place_of(0) < b.place_of(100) { 0 } else { 100 };
        assert!(b.clients[0].write(first, 1, true).await);
    });
    scenario.power_loss(Retained::Nothing);
    scenario.boot(|b| async move {
        open(&b).await;
        let (first, second) = if b.place_of(0) < b.place_of(100) { (0, 100) } else { (100, 0) };
        assert_eq!(flip(&b, second + 3..second + 4), 1);
        let footer = b.place_of(first).0 / 8 * 8 + 7;
        let matching = Matching { kind: Kind::Write, range: footer..footer + 1 };
        b.cache.set_faults(vec![Fault { matching, skip: 0, count: u32::MAX }]);
        b.clients[0].set_tolerant(true);
        for _ in 0..3 {
            assert!(b.set().scrub().await.is_ok());
        }
        assert!(b.set().failure().is_none());
        assert_eq!(b.set().damaged().len(), 1, "the damage in the second bucket was not found");
    });
}
