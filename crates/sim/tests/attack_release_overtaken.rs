//! The update of a superblock that outlasts the release of its device.
#![allow(clippy::unwrap_used)]

use std::pin::pin;

use format::CacheMode;
use io::Nanos;
use io::sync::{Either, select};
use sim::disk::{Retained, Speed};
use sim::hardware::Layout;
use sim::scenario::Scenario;

/// Slow enough for everything else to come first.
const SLOW: Nanos = Nanos::from_secs(20);

/// An operator gives up a change of the label while the superblock is on its way, then releases the device and registers it again.
/// A write makes the device dirty, and the old superblock comes last: the device is clean with dirty data in the cache.
#[test]
fn a_release_waits_for_the_update_of_the_superblock() {
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
            b.tune(0, "sequential_cutoff", "0").await;
            b.tune(0, "writeback_running", "0").await;
            assert!(b.clients[0].write(64, 8, true).await);
            b.rt.sleep(SLOW).await;
        });
        scenario.power_cut(retained).judge().happy_end();
    }
}
