//! A cache device of a group that does not answer counts as lost (decision 037): no client waits for it longer than the other set, and
//! what it carries out later does no harm.
#![allow(clippy::unwrap_used)]

use format::CacheMode;
use sim::disk::Retained;
use sim::hardware::Layout;
use sim::scenario::{Boot, Scenario};

fn copied(seed: u64, layout: Layout) -> Scenario {
    let devices = layout.backings.len();
    let mut scenario = Scenario::with_second(seed, layout);
    scenario.boot_and_stop(move |b| async move {
        b.open_both().await;
        for i in 0..devices {
            b.make_copy(i).await.unwrap();
        }
        b.stop().await;
    });
    scenario
}

/// Requests of every kind; none may fail.
async fn requests(b: &Boot) {
    let c = b.clients[0].clone();
    assert!(c.write(0, 64, false).await && c.flush().await && c.write(20, 8, true).await);
    assert!(c.read(0, 128).await.is_some());
    b.tune(0, "cache_mode", "writethrough").await;
    assert!(c.write(32, 16, true).await && c.discard(48, 16).await);
    b.tune(0, "cache_mode", "writeback").await;
    assert!(c.write(200, 64, false).await && c.flush().await);
    b.tune(0, "writeback_percent", "0").await;
    let _ = b.volume(0).drained().await;
    assert!(c.write(8, 8, true).await && c.read(0, 300).await.is_some());
}

/// One of the cache devices hangs from each of its requests on. Later it carries out what it had got.
#[test]
pub fn a_cache_device_hangs_at_any_request() {
    for first in [true, false] {
        let (mut after, mut has_hung) = (0, true);
        while has_hung {
            let mut scenario = copied(after, Layout::small(CacheMode::Writeback));
            let hung = match first {
                true => scenario.hardware.cache.clone(),
                false => scenario.hardware.second.clone().unwrap(),
            };
            let theirs = hung.clone();
            scenario.boot(move |b| async move {
                b.open_both().await;
                theirs.hang_after(after, false);
                requests(&b).await;
                b.read_all(0).await;
                assert!(b.clients[0].flush().await);
            });
            has_hung = hung.held() > 0;
            hung.release();
            let outcome = [Retained::Nothing, Retained::Everything][after as usize % 2];
            scenario.power_loss(outcome).judge().happy_end();
            after += 1 + after / 16;
        }
        assert!(after > 30, "{after}");
    }
}

/// A device that answers late, but in time, stays. So does one that hangs while only it has some data, and one of two that both hang.
#[test]
fn a_set_stays_if_it_answers_in_time_or_no_other_set_can_go_on() {
    let mut scenario = copied(3, Layout::pair());
    scenario.boot(|b| async move {
        b.open_both().await;
        let (c, second) = (b.clients[0].clone(), b.second.clone().unwrap());
        let stays = || (0..2).all(|i| matches!(b.volume(i).copy_state(), engine::CopyState::Complete { .. }));
        // The default of the timeout is 20 s.
        for disks in [vec![b.cache.clone()], vec![second.clone()]] {
            disks.iter().for_each(|d| d.hang_after(0, false));
            let write = b.write_beside(0, 0, 8, true);
            b.sleep_ms(19_000).await;
            disks.iter().for_each(|d| d.release());
            assert!(write.await && stays());
        }
        // A common cause.
        for disk in [&b.cache, &second] {
            disk.hang_after(0, false);
        }
        let write = b.write_beside(0, 8, 8, true);
        b.sleep_ms(300_000).await;
        assert!(stays());
        for disk in [&b.cache, &second] {
            disk.release();
        }
        assert!(write.await && stays());
        // Never.
        for set in [b.sets_of(&b.volume(0)).0, b.sets_of(&b.volume(0)).1] {
            set.set("group_timeout_ms", "0").await.unwrap();
        }
        second.hang_after(0, false);
        let write = b.write_beside(0, 16, 8, true);
        b.sleep_ms(300_000).await;
        assert!(stays());
        second.release();
        assert!(write.await && c.flush().await);
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// A volume has its only dirty data in a set whose device hangs: its requests wait, and return when the device does.
#[test]
pub fn a_set_with_the_only_dirty_data_of_a_volume_is_not_given_up() {
    let mut scenario = Scenario::with_second(4, Layout::pair());
    scenario.boot(|b| async move {
        b.open_both().await;
        b.make_copy(0).await.unwrap();
        b.stay_dirty(1).await;
        assert!(b.clients[0].write(0, 8, true).await && b.clients[1].write(0, 8, true).await);
        b.cache.hang_after(0, false);
        let writes = [b.write_beside(0, 8, 8, true), b.write_beside(1, 8, 8, true)];
        b.sleep_ms(300_000).await;
        b.cache.release();
        for write in writes {
            assert!(write.await);
        }
        assert!(matches!(b.volume(0).copy_state(), engine::CopyState::Complete { .. }));
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}
