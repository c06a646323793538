//! Which copy of the dirty data is trusted (decision 037): the one that has missed nothing.
#![allow(clippy::unwrap_used)]

use std::cell::Cell;
use std::rc::Rc;

use engine::{CacheSet, SetOptions};
use format::{CacheMode, RawSuperblock, Sector, Sectors};
use sim::disk::Retained;
use sim::group::Present;
use sim::hardware::Layout;
use sim::scenario::{Boot, Scenario};

fn scenario(seed: u64) -> Scenario {
    Scenario::with_second(seed, Layout::small(CacheMode::Writeback))
}

/// Dirty data in both sets after a stop.
async fn dirty_in_both(b: Boot) {
    b.open_both().await;
    b.make_copy(0).await.unwrap();
    assert!(b.clients[0].write(0, 64, true).await && b.clients[0].write(200, 8, true).await);
    b.stop().await;
}

/// Whether the second set takes over at a start without the first one. If not, the devices are as before.
fn takes_over(scenario: &mut Scenario) -> bool {
    let devices =
        |s: &Scenario| s.hardware.backings.iter().map(|d| d.image().fingerprint()).collect::<Vec<_>>();
    let before = devices(scenario);
    let taken = Rc::new(Cell::new(false));
    let result = taken.clone();
    scenario.boot(|b| async move {
        let second = CacheSet::open(b.parts.second.clone().unwrap(), SetOptions::default()).await.unwrap();
        let volume = second.take_over(b.parts.backings[0].clone()).await;
        if let Err(e) = &volume {
            assert!(e.to_string().contains("no valid copy"), "{e}");
        }
        result.set(volume.is_ok());
        if let Ok(volume) = volume {
            b.clients[0].set_volume(Some(volume.clone()));
            b.read_all(0).await;
            volume.stop().await.unwrap();
        }
        second.stop().await.unwrap();
    });
    scenario.kill();
    assert!(taken.get() || devices(scenario) == before, "a refused start changed the device");
    taken.get()
}

#[test]
fn the_second_set_takes_over_at_a_start_without_the_first_one() {
    let mut scenario = scenario(1);
    scenario.boot_and_stop(dirty_in_both);
    assert!(takes_over(&mut scenario));
}

/// The second set fails, and the first one goes on. Then the first one fails for ever, and the second one is back.
#[test]
pub(crate) fn a_set_that_was_lost_does_not_take_over() {
    let mut scenario = scenario(1);
    scenario.boot_and_stop(dirty_in_both).boot(|b| async move {
        b.open_both().await;
        b.lose(false, 0);
        assert!(b.clients[0].write(0, 8, true).await);
    });
    scenario.power_loss(Retained::Everything);
    assert!(!takes_over(&mut scenario));
    scenario.happy_end();
}

/// The device was served without its second set, which is not told.
#[test]
fn a_set_that_has_missed_a_start_does_not_take_over() {
    let mut scenario = scenario(1);
    scenario.boot_and_stop(dirty_in_both).boot_and_stop(|b| async move {
        b.open_group(Present::First, SetOptions::default()).await;
        b.stop().await;
    });
    assert!(!takes_over(&mut scenario));
    scenario.happy_end();
}

/// The second cache device was restored from a backup: it has the number of the copy, but not what was written since.
#[test]
pub(crate) fn a_copy_that_was_restored_from_a_backup_does_not_take_over() {
    let mut scenario = scenario(1);
    scenario.boot_and_stop(dirty_in_both);
    let backup = scenario.hardware.second.as_ref().unwrap().image();
    for _ in 0..2 {
        scenario.boot_and_stop(|b| async move {
            b.open_both().await;
            assert!(b.clients[0].write(0, 8, true).await);
            b.stop().await;
        });
    }
    scenario.hardware.second.as_ref().unwrap().load(backup);
    assert!(!takes_over(&mut scenario));
    scenario.happy_end();
}

/// A kernel registers the first set and writes to the device. It preserves all padding, and raises the number of the superblock.
#[test]
pub(crate) fn a_copy_is_void_after_another_program_has_used_the_first_set() {
    let mut scenario = scenario(1);
    scenario.boot_and_stop(dirty_in_both);
    let (cache, backing) = (scenario.hardware.cache.clone(), scenario.hardware.backings[0].clone());
    let before = [&cache, &backing].map(|d| d.image().read_vec(Sector(8), Sectors(8)));
    scenario.boot_and_stop(|b| async move {
        b.open_group(Present::First, SetOptions::default()).await;
        b.stay_dirty(0).await;
        assert!(b.clients[0].write(0, 8, true).await && b.clients[0].write(300, 8, true).await);
        b.stop().await;
    });
    // The state is dirty, so a kernel does not write the superblock of the device.
    backing.put_durably(Sector(8), &before[1]);
    let size = cache.image().size();
    let superblock =
        |bytes: &[u8]| RawSuperblock::from_prefix(bytes).unwrap().check_cache(size, 512).unwrap();
    let mut used = superblock(&cache.image().read_vec(Sector(8), Sectors(8)));
    used.set_padding(superblock(&before[0]).padding());
    cache.put_durably(Sector(8), &used.encode());
    scenario.end_with_loss(true);
}
