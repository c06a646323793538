//! A scrub that is under way while a volume is deleted and its data is wiped.
#![allow(clippy::unwrap_used)]

use engine::SetOptions;
use format::CacheMode;
use sim::disk::{Kind, Matching};
use sim::hardware::Layout;
use sim::scenario::{Boot, Scenario};

async fn wait_until(b: &Boot, done: impl Fn() -> bool) {
    for _ in 0..100_000 {
        if done() {
            return;
        }
        b.sleep_ms(1).await;
    }
    panic!("the wait has not ended");
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
        wait_until(&b, || b.backings[0].held() == 1).await;

        b.cache.hold(Matching::all(Kind::Read));
        let scrubbing = b.set();
        let scrub = b.rt.spawn(async move { scrubbing.scrub().await });
        wait_until(&b, || b.cache.held() == 1).await;
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
