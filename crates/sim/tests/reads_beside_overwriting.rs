//! Reads of sound data beside clients that overwrite it in place all the time.
#![allow(clippy::unwrap_used)]

use std::cell::Cell;
use std::rc::Rc;

use engine::SetOptions;
use engine::tunables::Overwrite;
use format::CacheMode;
use io::Nanos;
use sim::disk::{Kind, Matching, Retained, Speed};
use sim::hardware::Layout;
use sim::scenario::{Boot, Scenario};

async fn open(b: &Boot) {
    let mut options = SetOptions::default();
    options.tunables.overwrite_in_place = Overwrite::Always;
    b.open_with(options).await;
    b.stay_dirty(0).await;
}

/// Starts a client that overwrites this range all the time, until `stop` is set.
fn overwrite_always(b: &Boot, (at, sectors): (u64, u64), stop: &Rc<Cell<bool>>) -> io::JoinHandle<()> {
    let (c, stop) = (b.clients[0].clone(), stop.clone());
    b.rt.spawn(async move {
        while !stop.get() {
            assert!(c.write(at, sectors, false).await);
        }
    })
}

/// A client reads a range that has one block of dirty data; the rest comes from the backing device, which takes longer than the
/// overwriting of the block. No read of it may wait until the writer pauses.
#[test]
fn a_read_of_a_block_that_is_overwritten_all_the_time_ends() {
    for checksums in [false, true] {
        let layout = Layout { checksums, ..Layout::small(CacheMode::Writeback) };
        let mut scenario = Scenario::new(1, layout, 0);
        scenario.boot(|b| async move {
            open(&b).await;
            assert!(b.clients[0].write(8, 1, true).await);
            b.tune(0, "cache_mode", "none").await;
            b.cache.set_speed(Speed::even(100));
            b.backings[0].set_speed(Speed::even(10_000));
            let stop = Rc::new(Cell::new(false));
            let writer = overwrite_always(&b, (8, 1), &stop);
            let reader = b.clients[0].clone();
            let reading = b.rt.spawn(async move { reader.read(0, 64).await });
            b.rt.sleep(Nanos::from_ms(1000)).await;
            let answer = reading.try_take();
            stop.set(true);
            writer.await;
            assert!(
                answer.is_some_and(|data| data.is_some()),
                "no answer after a hundred reads of the device, checksums: {checksums}"
            );
        });
        scenario.power_loss(Retained::Nothing).judge().happy_end();
    }
}

/// A discard waits for writeback, because the device answers no flush. A read of the same block and of one that is overwritten in place
/// all the time waited for the discard, although the device answers reads (seed 2200012396).
#[test]
fn a_read_does_not_wait_for_a_change_that_hangs() {
    let mut scenario = Scenario::new(1, Layout::with_checksums(CacheMode::Writeback), 0);
    scenario.boot(|b| async move {
        open(&b).await;
        b.cache.set_speed(Speed::even(100));
        let c = &b.clients[0];
        assert!(c.write(8, 1, true).await);
        b.backings[0].hold(Matching::all(Kind::Flush));
        b.tune(0, "writeback_delay", "0").await;
        b.tune(0, "writeback_percent", "0").await;
        b.tune(0, "writeback_running", "1").await;
        b.rt.sleep(Nanos::from_secs(1)).await;
        assert!(b.backings[0].dump().contains("flush"), "{}", b.backings[0].dump());
        assert!(c.write(9, 1, true).await);
        b.tune(0, "cache_mode", "none").await;
        let stop = Rc::new(Cell::new(false));
        let writer = overwrite_always(&b, (9, 1), &stop);
        b.backings[0].set_speed(Speed::even(10_000));
        let (discarding, reading) = (b.clients[0].clone(), b.clients[0].clone());
        let discard = b.rt.spawn(async move { discarding.discard(8, 1).await });
        b.rt.sleep(Nanos::from_ms(1)).await;
        let reading = b.rt.spawn(async move { reading.read(0, 64).await });
        b.rt.sleep(Nanos::from_ms(1000)).await;
        let (answer, discarded) = (reading.try_take(), discard.try_take());
        stop.set(true);
        writer.await;
        assert!(discarded.is_none(), "the discard was to wait for the flush");
        assert!(answer.is_some_and(|data| data.is_some()), "no answer of the read");
        b.backings[0].release();
        assert!(discard.await);
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}
