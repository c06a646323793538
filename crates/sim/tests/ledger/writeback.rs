//! Writeback of dirty data to the backing device.

use engine::SetOptions;
use engine::figures::VolumeFigures;
use engine::tunables::Overwrite;
use format::CacheMode;
use io::ZeroFlags;
use sim::disk::{Fault, Kind, Matching, Speed};
use sim::hardware::Layout;
use sim::scenario::Boot;

use crate::page::{Detail, page, sums};

async fn open(b: &Boot, batch: u32) {
    let mut options = SetOptions::default();
    options.tunables.writeback_batch_sectors = batch;
    b.open_with(options).await;
    b.stay_dirty(0).await;
}

/// Neighbours, gaps of all lengths, and data that is overwritten on its way.
#[test]
fn runs_of_dirty_data() {
    for bridge in ["off", "auto", "always"] {
        page(
            &format!("runs_{bridge}"),
            Detail::Requests,
            (Layout::small(CacheMode::Writeback), 0),
            move |b| async move {
                open(&b, 256).await;
                b.tune(0, "writeback_bridge", bridge).await;
                b.tune(0, "writeback_bridge_limit", "8192").await;
                let c = &b.clients[0];
                for start in [0, 8, 16, 28, 40, 60, 92, 94, 300, 2040] {
                    assert!(c.write(start, if start == 92 { 2 } else { 8 }, false).await);
                }
                assert!(c.write_zeroes(68, 4, ZeroFlags::default()).await);
                b.volume(0).drained().await.unwrap();
                for n in 0..40 {
                    assert!(c.write(n * 50, 3 + n % 7, false).await);
                }
                assert!(c.write(104, 300, false).await);
                b.volume(0).drained().await.unwrap();
            },
        );
    }
}

/// Writeback that is not urgent: the delay, the rate, its updates, and an idle set.
#[test]
fn the_rate_of_writeback() {
    page("rate", Detail::Requests, (Layout::small(CacheMode::Writeback), 0), |b| async move {
        open(&b, 16).await;
        b.tune(0, "writeback_delay", "7").await;
        b.tune(0, "writeback_running", "1").await;
        for n in 0..24 {
            assert!(b.clients[0].write(n * 24, 8, false).await);
        }
        b.sleep_ms(20_000).await;
        b.tune(0, "writeback_rate", "4").await;
        b.sleep_ms(20_000).await;
        assert!(b.clients[0].write(1500, 8, false).await);
        b.sleep_ms(100_000).await;
    });
}

/// Writeback gives clients their turn, as long as there is room.
#[test]
fn clients_come_first() {
    for controller in ["kernel", "yield"] {
        page(
            &format!("clients_first_{controller}"),
            Detail::Sums,
            (Layout::small(CacheMode::Writeback), 0),
            move |b| async move {
                open(&b, 16).await;
                b.backings[0].set_speed(Speed::even(20_000));
                b.tune(0, "writeback_controller", controller).await;
                b.tune(0, "writeback_delay", "0").await;
                for n in 0..150 {
                    assert!(b.clients[0].write(n * 13, 8, false).await);
                }
                b.tune(0, "writeback_running", "1").await;
                for second in 0..4 {
                    for n in 0..100 {
                        assert!(b.clients[0].read((n * 53 + second * 7) % 2000, 4).await.is_some());
                        b.sleep_ms(5).await;
                    }
                    sums(&b, &format!("second {second}"));
                    let w = VolumeFigures::of(&b.volume(0)).writeback;
                    b.world.log(|| format!("= {:?}, share {:.3}, {:?}", w.rate_reason, w.share, w.rate));
                }
            },
        );
    }
}

/// A device that is written in stripes.
#[test]
fn stripes_are_written_whole() {
    let mut layout = Layout::small(CacheMode::Writeback);
    layout.backings[0].stripe_bytes = 16 * 512;
    page("stripes", Detail::Requests, (layout, 0), |b| async move {
        open(&b, 64).await;
        let c = &b.clients[0];
        for (start, sectors) in [(4, 8), (32, 16), (50, 10), (64, 40), (200, 7), (512, 64)] {
            assert!(c.write(start, sectors, false).await);
        }
        // Past the cache by its length, and into a stripe that is dirty.
        b.tune(0, "sequential_cutoff", "4096").await;
        for start in [36, 1000] {
            assert!(c.write(start, 8, false).await && c.write(start + 8, 8, false).await);
        }
        b.tune(0, "writeback_delay", "0").await;
        b.tune(0, "writeback_running", "1").await;
        b.sleep_ms(30_000).await;
        assert!(c.write(48, 16, false).await);
        b.sleep_ms(30_000).await;
    });
}

/// All that is dirty is being written over when it is due: writeback waits until it is not.
#[test]
fn writeback_waits_for_what_is_being_changed() {
    page("changed_when_due", Detail::Requests, (Layout::small(CacheMode::Writeback), 0), |b| async move {
        let mut options = SetOptions::default();
        options.tunables.overwrite_in_place = Overwrite::Off;
        b.open_with(options).await;
        b.stay_dirty(0).await;
        b.tune(0, "writeback_delay", "0").await;
        assert!(b.clients[0].write(0, 8, false).await);
        for held_ms in [20, 3000] {
            b.cache.hold(Matching::all(Kind::Write));
            let changing = b.write_beside(0, 4, 8, false);
            b.sleep_ms(5).await;
            b.tune(0, "writeback_running", "1").await;
            b.sleep_ms(held_ms).await;
            b.cache.release();
            assert!(changing.await);
            b.sleep_ms(2000).await;
            b.tune(0, "writeback_running", "0").await;
            assert!(b.clients[0].write(0, 8, false).await);
        }
    });
}

/// Errors of both devices: a batch is tried again, and a drain that waits gets the error.
#[test]
fn writeback_that_fails() {
    page("writeback_fails", Detail::Requests, (Layout::small(CacheMode::Writeback), 0), |b| async move {
        open(&b, 32).await;
        for n in 0..8 {
            assert!(b.clients[0].write(n * 16, 8, false).await);
        }
        let fault = |kind, skip, count| Fault { matching: Matching::all(kind), skip, count };
        b.backings[0].set_faults(vec![fault(Kind::Write, 1, 1)]);
        b.volume(0).drained().await.unwrap();
        for n in 0..8 {
            assert!(b.clients[0].write(n * 16, 8, false).await);
        }
        b.backings[0].set_faults(vec![fault(Kind::Write, 0, 100)]);
        let drained = b.volume(0).drained().await.unwrap_err();
        b.world.log(|| format!("drained: {drained}"));
        b.backings[0].set_faults(Vec::new());
        b.cache.set_faults(vec![fault(Kind::Read, 0, 1)]);
        b.sleep_ms(60_000).await;
        b.volume(0).drained().await.unwrap();
        assert!(b.clients[0].write(0, 8, false).await);
        b.backings[0].set_faults(vec![fault(Kind::Flush, 0, 1)]);
        let drained = b.volume(0).drained().await;
        b.world.log(|| format!("drained: {drained:?}"));
        b.sleep_ms(60_000).await;
    });
}
