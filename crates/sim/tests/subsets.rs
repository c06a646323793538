//! Short tales with the power cut at every effect of a device, and every subset of what was not durable surviving.
#![allow(clippy::unwrap_used)]

use format::CacheMode;
use sim::rig::Layout;
use sim::story::{Boot, Story, every_outcome};

/// Writes of a device of which every subset is tried.
const MOST: usize = 6;

fn story() -> Story {
    let mut layout = Layout::small(CacheMode::Writeback);
    layout.nbuckets = 128;
    layout.backings[0].data_sectors = 64;
    Story::new(1, layout, 0)
}

async fn open(b: &Boot) {
    b.open().await;
    b.tune(0, "sequential_cutoff", "0").await;
    b.tune(0, "writeback_percent", "0").await;
    b.tune(0, "writeback_delay", "0").await;
}

/// Everything is cached, clean, and durable.
async fn prologue(b: Boot) {
    open(&b).await;
    b.read_all(0).await;
    b.stop().await;
}

fn tell<T: Future<Output = ()> + 'static>(tale: impl Fn(Boot) -> T) {
    let (crashes, outcomes) = every_outcome(story, prologue, tale, MOST);
    println!("{crashes} crashes, {outcomes} outcomes");
    assert!(crashes > 20 && outcomes > crashes, "{crashes} crashes, {outcomes} outcomes");
}

#[test]
fn write_and_flush() {
    tell(|b| async move {
        open(&b).await;
        b.tune(0, "writeback_running", "0").await;
        assert!(b.clients[0].write(0, 8, false).await);
        assert!(b.clients[0].write(4, 8, false).await && b.clients[0].flush().await);
        assert!(b.clients[0].write(6, 2, true).await);
    });
}

#[test]
fn overwrite_and_writeback() {
    tell(|b| async move {
        open(&b).await;
        assert!(b.clients[0].write(0, 8, false).await);
        b.volume(0).drained().await.unwrap();
        assert!(b.clients[0].write(0, 4, false).await);
        b.volume(0).drained().await.unwrap();
        b.stop().await;
    });
}

#[test]
fn modes_and_discards() {
    tell(|b| async move {
        open(&b).await;
        b.tune(0, "writeback_running", "0").await;
        assert!(b.clients[0].write(0, 8, false).await);
        for mode in ["writethrough", "none"] {
            b.tune(0, "cache_mode", mode).await;
            assert!(b.clients[0].write(4, 8, false).await);
        }
        assert!(b.clients[0].discard(2, 16).await && b.clients[0].flush().await);
    });
}

#[test]
fn detach_and_attach() {
    tell(|b| async move {
        open(&b).await;
        assert!(b.clients[0].write(0, 8, false).await);
        b.set().detach(&b.volume(0)).await.unwrap();
        assert!(b.clients[0].write(4, 8, false).await);
        b.volume(0).stop().await;
        let volume = b.set().register(b.parts.backings[0].clone()).await.unwrap();
        b.clients[0].set_volume(Some(volume));
        assert!(b.clients[0].read(0, 16).await.is_some());
    });
}

#[test]
fn a_walk_that_rewrites_everything() {
    tell(|b| async move {
        open(&b).await;
        b.tune(0, "writeback_running", "0").await;
        for i in 0..6 {
            assert!(b.clients[0].write(i * 3, 1, false).await);
        }
        b.set().set("gc_always_rewrite", "1").await.unwrap();
        b.set().gc().await.unwrap();
        b.stop().await;
    });
}
