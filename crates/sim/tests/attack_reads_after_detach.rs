//! Reads that are under way while their volume is detached.
#![allow(clippy::unwrap_used)]

use engine::SetOptions;
use format::{CacheMode, Sectors, Uuid};
use sim::disk::{Kind, Matching, Retained};
use sim::hardware::Layout;
use sim::scenario::{Boot, Scenario};
use sim::stamp::Content;

/// Where data begins on a backing device.
const OFFSET: u64 = 16;

async fn wait_until(b: &Boot, done: impl Fn() -> bool) {
    for _ in 0..100_000 {
        if done() {
            return;
        }
        b.sleep_ms(1).await;
    }
    panic!("the wait has not ended");
}

/// A read of a cached and a missing part is under way. The missing part takes long on the backing device. Meanwhile the volume
/// is detached and the cache is wiped, while an older walk of the index has not ended. The read looks its keys up again in the
/// slot that the volume no longer has, and returns the zeros of the wipe.
#[test]
fn a_read_does_not_return_the_zeros_of_a_wipe_after_its_volume_was_detached() {
    let mut layout = Layout::small(CacheMode::Writethrough);
    let second = layout.backings[0].clone();
    layout.backings.push(second);
    let mut scenario = Scenario::new(1, layout, 0);
    scenario.boot(|b| async move {
        b.open_with(SetOptions::default()).await;
        for i in [0, 1] {
            b.tune(i, "sequential_cutoff", "0").await;
        }
        assert!(b.clients[0].write(0, 8, false).await && b.clients[0].flush().await);
        // The walk waits for the second device, whose flush takes long.
        assert!(b.clients[1].write(0, 8, false).await);
        b.backings[1].hold(Matching::all(Kind::Flush));
        let set = b.set();
        let walk = b.rt.spawn(async move { set.gc().await });
        wait_until(&b, || b.backings[1].held() == 1).await;

        b.backings[0].hold(Matching { kind: Kind::Read, range: OFFSET + 8..OFFSET + 16 });
        let reader = b.clients[0].clone();
        let reading = b.rt.spawn(async move { reader.read(0, 16).await });
        wait_until(&b, || b.backings[0].held() == 1).await;
        b.set().detach(&b.volume(0)).await.unwrap();
        b.set().wipe().await.unwrap();
        b.backings[0].release();
        assert!(reading.await.is_some());
        b.backings[1].release();
        walk.await.unwrap();
    });
    scenario.power_cut(Retained::Nothing);
}

/// The slot of the detached volume is that of a new volume when the read looks up again. It returns the data of that volume.
#[test]
fn a_read_does_not_return_data_of_the_next_volume_in_its_slot() {
    let mut scenario = Scenario::new(2, Layout::small(CacheMode::Writethrough), 256);
    scenario.boot(|b| async move {
        b.open_with(SetOptions::default()).await;
        b.tune(0, "sequential_cutoff", "0").await;
        let (set, slot) = (b.set(), b.volume(0).inode().unwrap());
        // No slot is free that was never used.
        let mut made = Vec::new();
        while let Ok(v) = set.create_volume(Uuid([made.len() as u8 + 1; 16]), Sectors(256), "other").await {
            made.push(v);
        }
        assert!(b.clients[0].write(0, 8, false).await && b.clients[0].flush().await);
        b.backings[0].hold(Matching { kind: Kind::Read, range: OFFSET + 8..OFFSET + 16 });
        let reader = b.clients[0].clone();
        let reading = b.rt.spawn(async move { reader.read(0, 16).await });
        wait_until(&b, || b.backings[0].held() == 1).await;
        set.detach(&b.volume(0)).await.unwrap();
        // A slot is free when no key of it is left.
        set.gc().await.unwrap();
        set.gc().await.unwrap();
        let next = set.create_volume(Uuid([200; 16]), Sectors(256), "next").await.unwrap();
        assert_eq!(next.inode(), Some(slot), "the scenario needs the same slot");
        b.clients[1].set_volume(Some(next));
        assert!(b.clients[1].write(OFFSET, 8, true).await);
        set.wipe().await.unwrap();
        b.backings[0].release();
        let read = reading.await.unwrap();
        assert!(read.iter().all(|c| matches!(c, Content::Data { volume: 0, .. })), "{read:?}");
    });
}
