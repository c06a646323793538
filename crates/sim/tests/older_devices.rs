//! A cache device that is older than at the process crash, or than its backing devices know: it lost its power while
//! the host stayed up, or an older copy of it was restored.
#![allow(clippy::unwrap_used)]

use std::pin::pin;
use std::rc::Rc;

use engine::{CacheSet, SetOptions};
use format::{CacheMode, Sector, Sectors};
use io::sync::select;
use io::{CrashLogMemory, CrashLogRef, Disk, Nanos};
use sim::crash_log::Memory;
use sim::disk::{Fault, Kind, Matching, Retained, WithHoles};
use sim::hardware::Layout;
use sim::image::Image;
use sim::scenario::{Boot, Scenario};

/// A set with this crash log, which names everything that was written and not flushed.
fn options(memory: &Rc<Memory>) -> SetOptions {
    let mut options = SetOptions { crash_log: Some(CrashLogRef(memory.clone())), ..SetOptions::default() };
    options.tunables.journal_delay_ms = 60_000;
    options
}

/// Opens the set. A write to sectors 64 to 128 is flushed, and another to the same sectors is not.
async fn write_twice(b: &Boot, options: SetOptions) {
    b.open_with(options).await;
    b.stay_dirty(0).await;
    assert!(b.clients[0].write(64, 64, false).await && b.clients[0].flush().await);
    assert!(b.clients[0].write(64, 64, false).await);
}

/// Starts the set and reads everything. Then the power fails, and the images are judged.
fn start_and_judge(scenario: &mut Scenario, options: SetOptions) {
    scenario.boot(move |b| async move {
        b.open_with(options).await;
        b.read_all(0).await;
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// The crash log outlives the process in the memory of the host. The device has failed a request, because its power was
/// gone for a moment, and with it a write that was answered and not flushed. Replaying the key of that write over data
/// that was flushed showed zeros.
#[test]
pub fn a_crash_log_does_not_count_after_the_device_failed() {
    let memory = Rc::new(Memory::default());
    for metadata in [false, true] {
        let mut scenario = Scenario::new(2, Layout::small(CacheMode::Writeback), 0);
        let first = options(&memory);
        scenario.boot(move |b| async move {
            write_twice(&b, first).await;
            b.clients[0].set_tolerant(true);
            let kind = if metadata { Kind::DurableWrite } else { Kind::Write };
            b.cache.set_faults(vec![Fault { matching: Matching::all(kind), skip: 0, count: 1 }]);
            assert_eq!(b.clients[0].write(512, 8, metadata).await, !metadata);
        });
        scenario.cache_power_loss(Retained::Nothing);
        start_and_judge(&mut scenario, options(&memory));
    }
}

/// A discard of invalidated buckets fails while other buckets are filled. The next start does not use the crash log.
#[test]
fn a_crash_log_does_not_count_after_a_discard_failed() {
    let memory = Rc::new(Memory::default());
    let layout = Layout { discard: true, ..Layout::small(CacheMode::Writeback) };
    let mut scenario = Scenario::new(2, layout, 0);
    let first = options(&memory);
    scenario.boot(move |b| async move {
        write_twice(&b, first).await;
        b.cache.set_faults(vec![Fault { matching: Matching::all(Kind::Discard), skip: 0, count: 1 }]);
        for sector in (128..2048).step_by(8) {
            assert!(b.clients[0].read(sector, 8).await.is_some());
        }
        assert!(b.set().failure().is_none(), "a discard is advice");
    });
    scenario.cache_power_loss(Retained::Nothing);
    assert!(memory.recorded().is_empty());
    start_and_judge(&mut scenario, options(&memory));
}

/// A wipe of a sparse device discards a bucket, or reads it to check the discard, and that request fails. The next start does not
/// use the crash log.
#[test]
fn a_crash_log_does_not_count_after_a_request_of_a_wipe_failed() {
    for kind in [Kind::Discard, Kind::Read] {
        let memory = Rc::new(Memory::default());
        let mut scenario = Scenario::new(2, Layout::small(CacheMode::Writeback), 0);
        let first = options(&memory);
        scenario.boot(move |mut b| async move {
            b.parts.cache = Disk::new(WithHoles::new(b.cache.clone()), b.rt.clone());
            write_twice(&b, first).await;
            b.cache.set_faults(vec![Fault { matching: Matching::all(kind), skip: 0, count: 1 }]);
            // The operator gives the wipe up.
            drop(select(pin!(b.set().wipe()), b.rt.sleep(Nanos(60_000))).await);
            b.sleep_ms(50).await;
            assert!(b.cache.counters().failed > 0, "no request of the wipe failed");
        });
        scenario.cache_power_loss(Retained::Nothing);
        assert!(memory.recorded().is_empty(), "after a failed {kind:?}");
        start_and_judge(&mut scenario, options(&memory));
    }
}

/// A client gives up its flush of data that was overwritten in place. The flush fails, and the device loses what another client
/// has written meanwhile. No task waits for that flush.
#[test]
pub fn a_crash_log_does_not_count_after_a_flush_failed_for_which_no_task_waits() {
    let memory = Rc::new(Memory::default());
    let mut scenario = Scenario::new(2, Layout::small(CacheMode::Writeback), 0);
    let mut first = options(&memory);
    first.tunables.overwrite_in_place = engine::tunables::Overwrite::Always;
    scenario.boot(move |b| async move {
        b.open_with(first).await;
        b.stay_dirty(0).await;
        let c = &b.clients[0];
        assert!(c.write(64, 2, false).await && c.write(128, 2, false).await && c.flush().await);
        b.sleep_ms(1000).await;
        assert!(c.write(64, 2, false).await, "in place");
        b.cache.lose_in_flush(0, Retained::Nothing);
        b.cache.hold(Matching::all(Kind::Flush));
        let volume = b.volume(0);
        drop(select(pin!(volume.flush()), b.rt.sleep(Nanos::from_ms(5))).await);
        assert_eq!(b.cache.held(), 1);
        // This write begins before the dirty data, so it does not overwrite it in place.
        assert!(c.write(127, 2, false).await);
        b.cache.release();
        b.sleep_ms(10).await;
        assert!(b.cache.counters().failed > 0);
    });
    assert!(memory.recorded().is_empty());
    scenario.kill();
    let second = options(&memory);
    scenario.boot(move |b| async move {
        b.open_with(second).await;
        b.read_all(0).await;
    });
}

/// The file system under the cache is full: neither data nor metadata can be written, and the set is disabled. Nothing was
/// lost, so what was answered is there when there is room again. Once the crash log was given up, as for a device that is broken.
#[test]
fn a_crash_log_counts_after_the_device_had_no_room() {
    const ENOSPC: i32 = 28;
    // A write that fails may have written everything, so one seed is not enough.
    for seed in 0..8 {
        let memory = Rc::new(Memory::default());
        let answered = Rc::new(std::cell::RefCell::new(None));
        let mut scenario = Scenario::new(seed, Layout::small(CacheMode::Writeback), 0);
        let (first, keep) = (options(&memory), answered.clone());
        scenario.boot(move |b| async move {
            write_twice(&b, first).await;
            *keep.borrow_mut() = b.clients[0].read(64, 64).await;
            b.clients[0].set_tolerant(true);
            b.cache.fail_with(ENOSPC);
            let all = Matching::all(Kind::DurableWrite);
            b.cache.set_faults(vec![Fault { matching: all, skip: 0, count: u32::MAX }]);
            assert!(!b.clients[0].write(512, 8, true).await, "its key has no room in the journal");
            assert!(b.set().failure().is_some());
        });
        scenario.kill();
        let second = options(&memory);
        scenario.boot(move |b| async move {
            b.open_with(second).await;
            let found = b.clients[0].read(64, 64).await;
            assert!(found.is_some() && found == *answered.borrow());
        });
        scenario.power_loss(Retained::Nothing).judge().happy_end();
    }
}

/// The set is disabled for want of room, which loses nothing. A write that was under way then fails with an I/O error, because
/// the device has lost its power for a moment. Once the crash log still counted, and zeros were read over what was flushed.
#[test]
fn a_crash_log_does_not_count_after_the_device_had_no_room_and_then_failed() {
    const ENOSPC: i32 = 28;
    const EIO: i32 = 5;
    let memory = Rc::new(Memory::default());
    let mut scenario = Scenario::new(2, Layout::small(CacheMode::Writeback), 0);
    let (first, log) = (options(&memory), memory.clone());
    scenario.boot(move |b| async move {
        write_twice(&b, first).await;
        b.clients[0].set_tolerant(true);
        let one = |kind| Fault { matching: Matching::all(kind), skip: 0, count: 1 };
        b.cache.hold(Matching::all(Kind::Write));
        b.cache.set_faults(vec![one(Kind::Write), one(Kind::DurableWrite)]);
        let write = b.write_beside(0, 1024, 8, false);
        b.sleep_ms(100).await;
        assert_eq!(b.cache.held(), 1, "the data of the write");
        b.cache.fail_with(ENOSPC);
        assert!(!b.clients[0].flush().await, "the journal entry has no room");
        assert!(b.set().failure().is_some() && !log.recorded().is_empty());
        b.cache.fail_with(EIO);
        b.cache.release();
        assert!(!write.await);
        assert!(log.recorded().is_empty());
    });
    scenario.cache_power_loss(Retained::Nothing);
    start_and_judge(&mut scenario, options(&memory));
}

/// The set fails because the device has no room. A flush that was under way then fails with an I/O error, so the device may have
/// lost data, and the crash log must not be used.
#[test]
fn a_crash_log_does_not_count_after_the_device_had_no_room_and_a_flush_failed() {
    const ENOSPC: i32 = 28;
    const EIO: i32 = 5;
    let memory = Rc::new(Memory::default());
    let mut scenario = Scenario::new(2, Layout::small(CacheMode::Writeback), 0);
    let (first, log) = (options(&memory), memory.clone());
    scenario.boot(move |b| async move {
        write_twice(&b, first).await;
        b.clients[0].set_tolerant(true);
        b.cache.lose_in_flush(0, Retained::Nothing);
        b.cache.hold(Matching::all(Kind::Flush));
        let client = b.clients[0].clone();
        let flush = b.rt.spawn(async move { client.flush().await });
        b.sleep_ms(100).await;
        assert_eq!(b.cache.held(), 1, "the flush before the journal entry");
        b.cache.fail_with(ENOSPC);
        b.cache.set_faults(vec![Fault { matching: Matching::all(Kind::DurableWrite), skip: 0, count: 1 }]);
        assert!(b.set().set("cache_replacement_policy", "fifo").await.is_err(), "the superblock has no room");
        assert!(b.set().failure().is_some() && !log.recorded().is_empty());
        b.cache.fail_with(EIO);
        b.cache.release();
        assert!(!flush.await);
        b.sleep_ms(100).await;
        assert_eq!(b.cache.counters().failed, 2);
        assert!(log.recorded().is_empty());
    });
    scenario.cache_power_loss(Retained::Nothing);
    start_and_judge(&mut scenario, options(&memory));
}

/// A process died, and the start after it was refused by a device that lost what was not durable. The crash log counted in
/// the start after that: zeros were read over what was flushed.
#[test]
fn a_crash_log_does_not_count_after_a_start_that_failed() {
    let memory = Rc::new(Memory::default());
    let mut scenario = Scenario::new(5, Layout::small(CacheMode::Writeback), 0);
    let first = options(&memory);
    scenario.boot(move |b| async move {
        write_twice(&b, first).await;
    });
    scenario.kill();
    let second = options(&memory);
    scenario.boot(move |b| async move {
        b.cache.lose_in_flush(0, Retained::Nothing);
        assert!(CacheSet::open(b.parts.cache.clone(), second).await.is_err());
    });
    scenario.kill();
    start_and_judge(&mut scenario, options(&memory));
}

/// What the cache device holds.
fn copy_of(b: &Boot) -> Vec<u8> {
    let image: Image = b.cache.image();
    image.read_vec(Sector(0), image.size())
}

/// The cache device is a file. While the set was served, the file was copied; after a process crash the copy was written over
/// the same file, so the crash log still belonged to it. Its keys were replayed and pointed to data that the copy did not have.
#[test]
pub fn a_crash_log_is_not_replayed_onto_an_older_copy() {
    let memory = Rc::new(Memory::default());
    let older = Rc::new(std::cell::RefCell::new(Vec::new()));
    let mut scenario = Scenario::new(6, Layout::small(CacheMode::Writeback), 0);
    let (keep, first) = (older.clone(), options(&memory));
    scenario.boot(move |b| async move {
        write_twice(&b, first).await;
        *keep.borrow_mut() = copy_of(&b);
        for sector in [128, 192, 256] {
            assert!(b.clients[0].write(sector, 64, false).await && b.clients[0].flush().await);
        }
        assert!(b.clients[0].write(64, 64, false).await);
    });
    scenario.kill();
    let newest = Rc::new(std::cell::RefCell::new(Vec::new()));
    let (keep, second) = (newest.clone(), options(&memory));
    scenario.boot(move |b| async move {
        *keep.borrow_mut() = copy_of(&b);
        b.cache.put(Sector(0), &older.borrow());
        let error = CacheSet::open(b.parts.cache.clone(), second).await.map(drop).unwrap_err().to_string();
        assert!(error.contains("because the crash log has entry"), "{error}");
        b.cache.put(Sector(0), &newest.borrow());
    });
    scenario.kill();
    start_and_judge(&mut scenario, options(&memory));
}

/// A scenario in which the cache device is in the end what it was two starts before.
fn with_an_older_cache(mode: &'static str) -> Scenario {
    let older = Rc::new(std::cell::RefCell::new(Vec::new()));
    let mut scenario = Scenario::new(3, Layout::small(CacheMode::Writeback), 0);
    async fn begin(b: &Boot, mode: &str) {
        b.open().await;
        b.tune(0, "cache_mode", mode).await;
        b.stay_dirty(0).await;
    }
    let keep = older.clone();
    scenario.boot_and_stop(move |b| async move {
        begin(&b, mode).await;
        assert!(b.clients[0].write(0, 64, false).await && b.clients[0].read(256, 64).await.is_some());
        b.stop().await;
        *keep.borrow_mut() = copy_of(&b);
    });
    scenario.boot_and_stop(move |b| async move {
        begin(&b, mode).await;
        assert!(b.clients[0].write(0, 64, false).await && b.clients[0].write(256, 64, false).await);
        b.stop().await;
        b.cache.put(Sector(0), &older.borrow());
    });
    scenario
}

/// The older copy lacks dirty data that was acknowledged, and the device would get what is older than that. It is refused at
/// every start, also after starts at which the device was not there. Once each start raised the number that was compared, so the
/// second start served the older data.
#[test]
pub fn an_older_cache_is_refused_by_a_dirty_device() {
    let mut scenario = with_an_older_cache("writeback");
    for start in 0..6 {
        scenario.boot(move |b| async move {
            if start % 3 == 2 {
                let set = CacheSet::open(b.parts.cache.clone(), SetOptions::default()).await.unwrap();
                set.stop().await.unwrap();
                return;
            }
            let error = b.parts.open(SetOptions::default()).await.map(drop).unwrap_err().to_string();
            assert!(error.contains("restored from an older copy"), "start {start}: {error}");
        });
        scenario.kill();
    }
}

/// A clean device whose cache is an older copy lets go of what the copy has of it, also if the copy was started without it.
#[test]
fn an_older_cache_that_was_started_alone_starts_empty_for_a_clean_device() {
    let mut scenario = with_an_older_cache("writethrough");
    for _ in 0..2 {
        scenario.boot(|b| async move {
            let set = CacheSet::open(b.parts.cache.clone(), SetOptions::default()).await.unwrap();
            set.stop().await.unwrap();
        });
        scenario.kill();
    }
    scenario.boot(|b| async move {
        b.open().await;
        b.read_all(0).await;
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// The backing device cannot be written while it registers. Its last number still counts, beside the new one.
#[test]
fn a_registration_that_was_not_noted_by_the_device_counts() {
    let mut scenario = Scenario::new(6, Layout::small(CacheMode::Writeback), 0);
    for fails in [false, true, true, false] {
        scenario.boot_and_stop(move |b| async move {
            let superblock = Matching { kind: Kind::DurableWrite, range: 8..16 };
            b.backings[0].set_faults(match fails {
                true => vec![Fault { matching: superblock, skip: 0, count: 1 }],
                false => Vec::new(),
            });
            b.open().await;
            b.tune(0, "writeback_running", "0").await;
            assert!(b.clients[0].write(0, 64, false).await);
            b.stop().await;
        });
    }
    scenario.judge().happy_end();
}

/// A device is detached, and attached again while its superblock can be written once. It used to be served without a number
/// then, and a copy of the cache from before the detach was believed: dirty data was lost without a word.
#[test]
fn a_device_that_is_attached_again_has_its_number_at_once() {
    let mut scenario = Scenario::new(7, Layout::small(CacheMode::Writeback), 0);
    let older = Rc::new(std::cell::RefCell::new(Vec::new()));
    let keep = older.clone();
    scenario.boot_and_stop(move |b| async move {
        b.open().await;
        assert!(b.clients[0].write(0, 64, false).await);
        b.stop().await;
        *keep.borrow_mut() = copy_of(&b);
    });
    scenario.boot_and_stop(move |b| async move {
        b.open().await;
        let volume = b.volume(0);
        b.clients[0].set_volume(None);
        b.set().detach(&volume).await.unwrap();
        drop(volume);
        let superblock = Matching { kind: Kind::DurableWrite, range: 8..16 };
        b.backings[0].set_faults(vec![Fault { matching: superblock, skip: 1, count: 1 }]);
        let again = b.set().register(b.parts.backings[0].clone()).await.unwrap();
        b.clients[0].set_volume(Some(again));
        b.backings[0].set_faults(Vec::new());
        b.tune(0, "writeback_running", "0").await;
        assert!(b.clients[0].write(0, 64, false).await);
        b.stop().await;
        b.cache.put(Sector(0), &older.borrow());
    });
    scenario.boot(|b| async move {
        let error = b.parts.open(SetOptions::default()).await.map(drop).unwrap_err().to_string();
        assert!(error.contains("restored from an older copy"), "{error}");
    });
    scenario.kill();
}

/// The clean copies of an older cache are older than the device. Nothing else is lost, so it starts empty.
#[test]
fn an_older_cache_starts_empty_for_a_clean_device() {
    let mut scenario = with_an_older_cache("writethrough");
    scenario.boot(|b| async move {
        b.open().await;
        assert_eq!(b.set().dirty_sectors(b.volume(0).inode().unwrap()), Sectors::ZERO);
        b.read_all(0).await;
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// Starts without a rollback, with devices that come and go in one run, are never taken for one.
#[test]
fn devices_that_are_released_and_registered_again_are_at_home() {
    let mut scenario = Scenario::new(4, Layout::small(CacheMode::Writeback), 0);
    for _ in 0..3 {
        scenario.boot_and_stop(|b| async move {
            b.open().await;
            b.tune(0, "writeback_running", "0").await;
            assert!(b.clients[0].write(0, 64, false).await);
            // Each raises the sequence number of the cache device's superblock.
            b.set().set("cache_replacement_policy", "fifo").await.unwrap();
            b.set().set("cache_replacement_policy", "lru").await.unwrap();
            let volume = b.volume(0);
            b.clients[0].set_volume(None);
            b.set().release(&volume).await.unwrap();
            drop(volume);
            let again = b.set().register(b.parts.backings[0].clone()).await.unwrap();
            b.clients[0].set_volume(Some(again));
            b.read_all(0).await;
            b.stop().await;
        });
    }
    scenario.judge().happy_end();
}
