//! Reads, scrubs and updates of superblocks that outlast the detach, the deletion or the release of their volume.
#![allow(clippy::unwrap_used)]

use std::pin::pin;

use engine::SetOptions;
use format::{CacheMode, Sectors, Uuid};
use io::Nanos;
use io::sync::{Either, select};
use sim::disk::{Kind, Matching, Retained, Speed};
use sim::hardware::Layout;
use sim::scenario::Scenario;
use sim::stamp::Content;

/// Where data begins on a backing device.
const OFFSET: u64 = 16;

/// A read of a cached and a missing part is under way. The missing part takes long on the backing device. Meanwhile the volume
/// is detached and the cache is wiped, while an older walk of the index has not ended. The read looks its keys up again in the
/// slot that the volume no longer has, and returns the zeros of the wipe.
#[test]
pub fn a_read_does_not_return_the_zeros_of_a_wipe_after_its_volume_was_detached() {
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
        b.wait_until(|| b.backings[1].held() == 1).await;

        b.backings[0].hold(Matching { kind: Kind::Read, range: OFFSET + 8..OFFSET + 16 });
        let reader = b.clients[0].clone();
        let reading = b.rt.spawn(async move { reader.read(0, 16).await });
        b.wait_until(|| b.backings[0].held() == 1).await;
        b.set().detach(&b.volume(0)).await.unwrap();
        b.set().wipe().await.unwrap();
        b.backings[0].release();
        assert!(reading.await.is_some());
        b.backings[1].release();
        walk.await.unwrap();
    });
    scenario.power_loss(Retained::Nothing);
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
        b.wait_until(|| b.backings[0].held() == 1).await;
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

/// Slow enough for everything else to come first.
const SLOW: Nanos = Nanos::from_secs(20);

/// An operator gives up a change of the label while the superblock is on its way, then releases the device and registers it again.
/// A write makes the device dirty, and the old superblock comes last: the device is clean with dirty data in the cache.
#[test]
pub fn a_release_waits_for_the_update_of_the_superblock() {
    for retained in [Retained::Everything, Retained::Nothing] {
        let mut scenario = Scenario::new(1, Layout::small(CacheMode::Writeback), 0);
        scenario.boot(|b| async move {
            b.open().await;
            b.tune(0, "sequential_cutoff", "0").await;
            b.backings[0].set_speed(Speed { base: SLOW, ..Speed::even(0) });
            let volume = b.volume(0);
            {
                let labelled = pin!(volume.set("label", "new"));
                let given_up = select(labelled, b.rt.sleep(Nanos(SLOW.0 / 2))).await;
                assert!(matches!(given_up, Either::Right(())));
            }
            b.backings[0].set_speed(Speed::even(10));
            b.set().release(&volume).await.unwrap();
            b.clients[0].set_volume(None);
            drop(volume);
            let again = b.set().register(b.parts.backings[0].clone()).await.unwrap();
            b.clients[0].set_volume(Some(again));
            b.stay_dirty(0).await;
            assert!(b.clients[0].write(64, 8, true).await);
            b.rt.sleep(SLOW).await;
        });
        scenario.power_loss(retained).judge().happy_end();
    }
}

/// A scrub has found the extents of a flash-only volume. The volume is deleted and wiped, while an older walk of the index has not
/// ended, so the index still has the keys. The scrub reads zeros, and reports damaged dirty data of a volume that does not exist.
#[test]
fn a_scrub_does_not_report_damage_of_a_volume_that_was_deleted_and_wiped() {
    let layout = Layout { checksums: true, ..Layout::small(CacheMode::Writethrough) };
    let mut scenario = Scenario::new(1, layout, 256);
    scenario.boot(|b| async move {
        let mut options = SetOptions::default();
        options.tunables.scrub_share = 100;
        b.open_with(options).await;
        b.tune(0, "sequential_cutoff", "0").await;
        let (set, flash) = (b.set(), b.volume(1).inode().unwrap());
        assert!(b.clients[1].write(0, 7, true).await);
        b.sleep_ms(1000).await;
        // The walk waits for the backing device, whose flush takes long.
        assert!(b.clients[0].write(0, 7, false).await);
        b.backings[0].hold(Matching::all(Kind::Flush));
        let walking = b.set();
        let walk = b.rt.spawn(async move { walking.gc().await });
        b.wait_until(|| b.backings[0].held() == 1).await;

        b.cache.hold(Matching::all(Kind::Read));
        let scrubbing = b.set();
        let scrub = b.rt.spawn(async move { scrubbing.scrub().await });
        b.wait_until(|| b.cache.held() == 1).await;
        b.clients[1].set_volume(None);
        set.delete_volume(flash).await.unwrap();
        set.wipe().await.unwrap();
        b.cache.release();
        let report = scrub.await.unwrap();
        assert_eq!((report.damaged_dirty_blocks, report.damaged_clean_blocks), (0, 0), "{report:?}");
        assert!(set.damaged().is_empty(), "{:?}", set.damaged());
        b.backings[0].release();
        walk.await.unwrap();
    });
}
