//! Reads, writes, flushes, discards and zeros, one after the other.

use engine::SetOptions;
use engine::tunables::Overwrite;
use format::{CacheMode, Sector, Sectors};
use io::{ReadFlags, WriteFlags, ZeroFlags};
use sim::hardware::Layout;

use crate::page::{Detail, page};

fn wide(mode: CacheMode) -> Layout {
    let mut layout = Layout::small(mode);
    layout.bucket_sectors = 64;
    (layout.block_sectors, layout.backings[0].block_sectors) = (8, 8);
    layout
}

#[test]
fn reads_and_writes_in_writeback_mode() {
    page("writeback_mode", Detail::Requests, (Layout::small(CacheMode::Writeback), 0), |b| async move {
        b.open().await;
        b.stay_dirty(0).await;
        let c = &b.clients[0];
        for (start, sectors, fua) in
            [(0, 8, false), (8, 4, true), (4, 8, false), (100, 40, false), (110, 1, false)]
        {
            assert!(c.write(start, sectors, fua).await);
        }
        assert!(c.flush().await && c.flush().await);
        for (start, sectors) in [(0, 8), (2, 12), (90, 20), (90, 20), (1000, 8), (996, 16), (2040, 8)] {
            assert!(c.read(start, sectors).await.is_some());
            b.sleep_ms(1).await;
        }
        assert!(c.write(1000, 4, false).await && c.write(0, 1, true).await);
        b.sleep_ms(300).await;
        b.set().set("journal_delay_ms", "700").await.unwrap();
        assert!(c.write(200, 8, false).await);
        b.sleep_ms(1000).await;
        c.check_status().await;
    });
}

#[test]
fn reads_and_writes_in_writethrough_mode() {
    page(
        "writethrough_mode",
        Detail::Requests,
        (Layout::small(CacheMode::Writethrough), 0),
        |b| async move {
            b.open().await;
            b.stay_dirty(0).await;
            let c = &b.clients[0];
            for (start, sectors, fua) in [(0, 8, false), (8, 4, true), (4, 8, false), (100, 40, false)] {
                assert!(c.write(start, sectors, fua).await);
            }
            for (start, sectors) in [(0, 16), (90, 20), (500, 64), (504, 8)] {
                assert!(c.read(start, sectors).await.is_some());
            }
            assert!(c.flush().await);
            b.sleep_ms(40_000).await;
        },
    );
}

#[test]
fn reads_and_writes_past_the_cache() {
    page("past_the_cache", Detail::Requests, (Layout::small(CacheMode::Writearound), 0), |b| async move {
        b.open().await;
        b.stay_dirty(0).await;
        let c = &b.clients[0];
        assert!(c.read(0, 32).await.is_some() && c.read(64, 8).await.is_some());
        assert!(c.write(4, 8, false).await && c.write(40, 8, true).await);
        assert!(c.read(0, 32).await.is_some());
        b.tune(0, "cache_mode", "writeback").await;
        assert!(c.write(16, 8, false).await);
        b.tune(0, "cache_mode", "none").await;
        assert!(c.read(8, 16).await.is_some() && c.read(128, 8).await.is_some());
        // Over dirty data, half over it, and beside it.
        assert!(c.write(18, 2, false).await && c.write(20, 8, false).await && c.write(32, 8, true).await);
        assert!(c.flush().await);
        // A stream, by the length that is a stream.
        b.tune(0, "cache_mode", "writeback").await;
        b.tune(0, "sequential_cutoff", "8192").await;
        for n in 0..6 {
            assert!(c.write(512 + n * 8, 8, false).await && c.read(1024 + n * 8, 8).await.is_some());
        }
    });
}

#[test]
fn discards_and_zeros() {
    page("discards_and_zeros", Detail::Requests, (wide(CacheMode::Writeback), 1024), |b| async move {
        b.open().await;
        b.stay_dirty(0).await;
        for c in &b.clients[..2] {
            assert!(c.write(0, 128, false).await);
            for (start, sectors) in [(8, 8), (20, 40), (3, 2), (60, 8), (127, 10), (1000, 24)] {
                assert!(c.discard(start, sectors).await);
            }
            for (start, sectors) in [(64, 8), (66, 3), (60, 300), (61, 257), (8, 128), (8, 129)] {
                for (fua, may_unmap) in [(false, false), (true, false), (false, true), (true, true)] {
                    assert!(c.write_zeroes(start, sectors, ZeroFlags { fua, may_unmap }).await);
                }
            }
            assert!(c.read(0, 128).await.is_some() && c.flush().await);
            c.check_status().await;
        }
        // Zeros past the cache, where there is none to be had.
        b.tune(0, "cache_mode", "none").await;
        assert!(b.clients[0].write_zeroes(512, 8, ZeroFlags::default()).await);
        assert!(b.clients[0].write_zeroes(512, 256, ZeroFlags { fua: true, may_unmap: true }).await);
    });
}

#[test]
fn parts_of_blocks() {
    page("parts_of_blocks", Detail::Requests, (wide(CacheMode::Writeback), 0), |b| async move {
        b.open().await;
        b.stay_dirty(0).await;
        let c = &b.clients[0];
        for (start, sectors) in [(3, 1), (3, 2), (5, 8), (6, 20), (64, 4), (68, 4), (79, 2)] {
            assert!(c.write(start, sectors, false).await && c.read(start, sectors).await.is_some());
        }
        for mode in ["writethrough", "writearound", "none"] {
            b.tune(0, "cache_mode", mode).await;
            for (start, sectors) in [(4, 1), (130, 3), (133, 9), (136, 8)] {
                assert!(c.write(start, sectors, start == 4).await && c.read(start, sectors).await.is_some());
            }
        }
    });
}

#[test]
fn writes_over_dirty_data_in_its_place() {
    page("in_its_place", Detail::Requests, (Layout::small(CacheMode::Writeback), 0), |b| async move {
        let mut options = SetOptions::default();
        options.tunables.overwrite_in_place = Overwrite::Always;
        b.open_with(options).await;
        b.stay_dirty(0).await;
        let c = &b.clients[0];
        assert!(c.write(0, 16, false).await && c.flush().await);
        for (start, sectors, fua) in
            [(0, 8, false), (4, 2, true), (7, 2, false), (14, 4, false), (0, 20, false)]
        {
            assert!(c.write(start, sectors, fua).await);
            assert!(c.read(start, sectors).await.is_some());
        }
        assert!(c.flush().await);
        // While it is read, and while it is written.
        let other = b.write_beside(0, 2, 2, false);
        assert!(c.write(2, 2, false).await && other.await && c.flush().await);
        assert!(c.write_zeroes(0, 4, ZeroFlags::default()).await);
    });
}

/// Several requests at the same moment, over each other and beside each other.
#[test]
fn requests_that_overlap_in_time() {
    page("overlapping", Detail::Requests, (Layout::small(CacheMode::Writeback), 0), |b| async move {
        b.open().await;
        b.stay_dirty(0).await;
        for mode in ["writeback", "writethrough", "writearound"] {
            b.tune(0, "cache_mode", mode).await;
            let writes: Vec<_> = (0..4).map(|n| b.write_beside(0, 64 + n * 2, 4, n == 3)).collect();
            let reads: Vec<_> = (0..3)
                .map(|n| {
                    let c = b.clients[0].clone();
                    b.rt.spawn(async move { c.read(60 + n * 4, 8).await.is_some() })
                })
                .collect();
            for done in writes.into_iter().chain(reads) {
                assert!(done.await);
            }
            let (one, two) = (b.clients[0].clone(), b.clients[0].clone());
            let flushes =
                [b.rt.spawn(async move { one.flush().await }), b.rt.spawn(async move { two.flush().await })];
            for done in flushes {
                assert!(done.await);
            }
            b.sleep_ms(10).await;
        }
    });
}

/// What the sender says about a request.
#[test]
fn hints_of_the_sender() {
    page("hints", Detail::Requests, (Layout::small(CacheMode::Writeback), 0), |b| async move {
        b.open().await;
        b.tune(0, "writeback_running", "0").await;
        b.tune(0, "sequential_cutoff", "4096").await;
        let v = b.volume(0);
        for meta in [false, true] {
            for start in [100, 108, 116] {
                let buffer = b.rt.pool().take(8 * 512);
                let flags = ReadFlags { meta };
                let (buffer, result) = v.read_as(Sector(start), Sectors(8), buffer, 0, flags).await;
                result.unwrap();
                // What was read is written again, so the oracle has nothing to say.
                v.write(Sector(start), Sectors(8), buffer, 0, WriteFlags { fua: meta, meta }).await.unwrap();
            }
        }
        b.tune(0, "admission", "cost").await;
        assert!(b.clients[0].read(300, 64).await.is_some() && b.clients[0].read(300, 64).await.is_some());
    });
}
