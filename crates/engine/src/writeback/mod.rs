//! Writeback: the task that writes dirty data to the backing device, in LBA order, at the rate of the controller.
//!
//! Owns the writeback task of a cached device: when it runs, how much it writes, and how long it pauses. `runs` selects
//! the extents of a batch, and `batch` writes them. Order (durability contract 4): read from the cache → write to the
//! backing device → flush the backing device → mark the keys clean, together in the journal.
//!
//! Two things differ from the kernel: new dirty data is due `writeback_delay` after it became dirty, also after a
//! complete scan, and the state of the device becomes clean as soon as nothing is dirty.

mod batch;
mod figures;
mod runs;

pub use self::figures::{RateReason, WritebackFigures};

use std::rc::Rc;

use format::{BackingState, Inode, Sector, Sectors};
use io::Nanos;
use io::sync::{Either, select};

use crate::events::SetEvent;
use crate::index::NotLoaded;
use crate::policy::writeback_rate::{IdleInputs, RateInputs};
use crate::policy::yielding::{self, Pressure};
use crate::stats::Work;
use crate::tunables::Controller;
use crate::volume::{Cache, Volume};

/// The pause after a failed batch.
const RETRY_DELAY: Nanos = Nanos::from_secs(1);
/// How often writeback that is not due yet checks whether room is short.
const RECHECK_INTERVAL: Nanos = Nanos::from_secs(1);
/// The smallest batch, at whatever rate.
const MIN_BATCH: Sectors = Sectors(8);
/// The smallest batch as a part of the largest batch, at whatever share of the time.
const LEAST_BATCH_PART: f64 = 0.01;

/// The target for the amount of dirty data of a volume, as the controller computes it.
pub(crate) fn dirty_target(volume: &Volume) -> Sectors {
    let (Some((cache, inode)), Some(_)) = (volume.attached(), volume.backing()) else { return Sectors::ZERO };
    Sectors(rate_inputs(volume, &cache, inode).target(volume.settings().writeback_percent))
}

/// The present figures of the writeback of a volume.
pub(crate) fn writeback_figures(volume: &Volume) -> WritebackFigures {
    WritebackFigures {
        rate_reason: rate_reason(volume),
        share: volume.attached().map_or(1.0, |(cache, _)| writeback_share(volume, &cache)),
        rate: volume.writeback_debug(),
        written: volume.writeback().written(),
        failures: volume.writeback().failures(),
        last_error: volume.writeback().last_error().map(|e| e.to_string()),
    }
}

/// The reason for the present rate of writeback, in the order in which the task checks the conditions.
fn rate_reason(volume: &Volume) -> RateReason {
    let (Some((cache, inode)), Some(_)) = (volume.attached(), volume.backing()) else {
        return RateReason::Never;
    };
    let dirty = cache.index.tree().dirty_sectors(inode);
    let (is_idle, is_fragmented) = volume.load().with_rate(|rate| (rate.is_idle(), rate.is_fragmented()));
    let (running, percent) = {
        let t = volume.settings();
        (t.writeback_running, t.writeback_percent)
    };
    if dirty == Sectors::ZERO {
        RateReason::NothingDirty
    } else if volume.is_detaching() {
        RateReason::Detaching
    } else if volume.writeback().is_draining() {
        RateReason::Draining
    } else if !running {
        RateReason::Stopped
    } else if cache.alloc.is_starved() {
        RateReason::CacheStarved
    } else if is_room_urgent(volume, &cache) {
        RateReason::Filling
    } else if writeback_due(volume, &cache, dirty).is_some_and(|due| due > volume.rt().now()) {
        RateReason::Delayed
    } else if percent == 0 {
        RateReason::Unthrottled
    } else if is_idle {
        RateReason::Idle
    } else if is_fragmented {
        RateReason::Fragmented
    } else {
        RateReason::Controlled
    }
}

fn unlimited(volume: &Volume, cache: &Cache) -> bool {
    volume.is_detaching()
        || volume.writeback().is_draining()
        || volume.settings().writeback_percent == 0
        || is_room_urgent(volume, cache)
}

/// The share of the time that writeback gets. It depends on the busiest volume of the set.
pub(crate) fn writeback_share(volume: &Volume, cache: &Cache) -> f64 {
    if unlimited(volume, cache) || volume.settings().writeback_controller == Controller::Kernel {
        return 1.0;
    }
    let dirty: u64 = cache.index.tree().all_dirty().map(|(_, n)| n.0).sum();
    let capacity = u64::from(cache.geometry.nbuckets).saturating_mul(cache.geometry.bucket_sectors.0);
    let t = cache.tunables.borrow();
    let pressure = Pressure {
        dirty_percent: dirty as f64 * 100.0 / capacity as f64,
        in_use_percent: cache.alloc.buckets().in_use_percent() as f64,
        cutoffs: (t.cutoff_writeback, t.cutoff_writeback_sync),
    };
    let busy = cache.busiest_share();
    yielding::share(busy, &pressure)
}

/// Whether the cache needs room so soon that writeback must run at the speed of the devices, whatever the rate is.
fn is_room_urgent(volume: &Volume, cache: &Cache) -> bool {
    let by_kernel = volume.settings().writeback_controller == Controller::Kernel;
    let filling = || cache.alloc.is_filling(volume.rt().turn_time());
    let second_starved = || volume.mirror().is_some_and(|m| m.cache.alloc.is_starved());
    cache.alloc.is_starved() || !by_kernel && filling() || second_starved()
}

/// The time at which writeback may begin; `None` if it may not begin before something changes.
fn writeback_due(volume: &Volume, cache: &Cache, dirty: Sectors) -> Option<Nanos> {
    if dirty == Sectors::ZERO {
        return None;
    }
    let t = volume.settings();
    let urgent = volume.is_detaching() || volume.writeback().is_draining();
    if !t.writeback_running && !urgent {
        return None;
    }
    if urgent || is_room_urgent(volume, cache) {
        return Some(Nanos(0));
    }
    let since = volume.writeback().dirty_since().unwrap_or(Nanos(0));
    Some(since.after(Nanos::from_secs(u64::from(t.writeback_delay))))
}

/// Starts the writeback task and the rate updates of a cached device that was attached.
pub(crate) fn start(volume: &Rc<Volume>, cache: &Rc<Cache>, inode: Inode) {
    volume.writeback().task_began();
    cache.tasks.spawn(Work::Writeback, run(volume.clone(), cache.clone(), inode));
    volume.rt().spawn(update_rate(volume.clone(), cache.clone(), inode));
}

/// The writeback task of a volume. It ends when the volume is stopped or is no longer attached to this set.
async fn run(volume: Rc<Volume>, cache: Rc<Cache>, inode: Inode) {
    let wb = &volume.writeback();
    while is_of(&volume, &cache, inode) {
        if cache.device.is_stopping() || volume.is_stopping() {
            break;
        }
        count_stripes(&volume, &cache, inode).await;
        sweep(&volume, &cache, inode).await;
        cache.index.tree_mut().drop_stripes(inode);
    }
    wb.task_ended();
}

/// Whether the volume is attached to this set in this slot.
fn is_of(volume: &Volume, cache: &Rc<Cache>, inode: Inode) -> bool {
    volume.attached().is_some_and(|(c, i)| Rc::ptr_eq(&c, cache) && i == inode)
}

/// Counts the dirty stripes of a device on which partial stripes are expensive. It ends if a leaf cannot be read, which
/// fails the whole set.
async fn count_stripes(volume: &Volume, cache: &Cache, inode: Inode) {
    let Some(geometry) = volume.expensive_stripes() else { return };
    cache.index.tree_mut().begin_stripes(inode, geometry);
    let mut from = Some(Sector(0));
    while let Some(at) = from
        && cache.device.check().is_ok()
    {
        let counted = cache.index.tree_mut().count_stripes(inode, at, &cache.alloc.buckets());
        match counted {
            Ok(next) => from = next,
            Err(NotLoaded(id)) if cache.index.load_leaf(id).await.is_ok() => {}
            Err(NotLoaded(_)) => return,
        }
        cache.rt.yield_now().await;
    }
}

/// Writes back dirty data when it is due, while the volume is attached to this set.
async fn sweep(volume: &Rc<Volume>, cache: &Rc<Cache>, inode: Inode) {
    let wb = &volume.writeback();
    while is_of(volume, cache, inode) {
        if cache.device.is_stopping() || volume.is_stopping() {
            break;
        }
        let now = volume.rt().now();
        let dirty = cache.index.tree().dirty_sectors(inode);
        if dirty == Sectors::ZERO {
            nothing_dirty(volume, cache).await;
        } else {
            wb.saw_dirty(now, true);
        }
        let due = writeback_due(volume, cache, dirty);
        if due.is_none_or(|due| due > now) {
            wait_until_due(volume, cache, inode, due, dirty > Sectors::ZERO).await;
            volume.load().with_rate(|rate| rate.reset_clock(volume.rt().now()));
            continue;
        }
        let limit = batch_limit(volume, cache);
        let began = volume.rt().now();
        match batch::write_back(volume, cache, inode, limit).await {
            Ok(batch) => {
                cache.tasks.times().borrow_mut().writeback_batches.record(volume.rt().now().since(began));
                wb.batch_done(batch.written);
                rest(volume, cache, &batch, began).await;
            }
            // The second set has taken over during the batch, and writes the data back.
            Err(_) if !is_of(volume, cache, inode) => {}
            Err(e) => {
                cache.device.emit(SetEvent::WritebackFailed { error: e.clone() });
                wb.batch_failed(e);
                volume.rt().sleep(RETRY_DELAY).await;
            }
        }
    }
}

/// Sets the state of a device without dirty data to clean.
async fn nothing_dirty(volume: &Volume, cache: &Cache) {
    let wb = &volume.writeback();
    wb.saw_dirty(volume.rt().now(), false);
    if volume.state() != Some(BackingState::Dirty) || volume.dirty_in_flight() > 0 {
        return;
    }
    if let Err(e) = volume.mark_clean().await {
        wb.failed(e);
        volume.rt().sleep(RETRY_DELAY).await;
    }
    wb.progressed();
    if cache.tunables.borrow().gc_after_writeback && cache.alloc.in_use_percent() >= 50 {
        cache.alloc.walks().request();
    }
}

/// Waits until writeback may be due: until `due`, or until a change may have made it due earlier.
async fn wait_until_due(volume: &Volume, cache: &Cache, inode: Inode, due: Option<Nanos>, was_dirty: bool) {
    let changed = || {
        let dirty = cache.index.tree().dirty_sectors(inode);
        cache.device.is_stopping()
            || volume.is_stopping()
            || volume.attached().is_none_or(|(c, i)| !std::ptr::eq(&*c, cache) || i != inode)
            || (dirty > Sectors::ZERO) != was_dirty
            || writeback_due(volume, cache, dirty).is_some_and(|d| due.is_none_or(|old| d < old))
    };
    let wait = std::pin::pin!(volume.writeback().woken_when(changed));
    match due {
        Some(at) => {
            // No event is sent when room becomes short.
            let at = at.min(volume.rt().now().after(RECHECK_INTERVAL));
            let (Either::Left(()) | Either::Right(())) = select(wait, volume.rt().sleep_until(at)).await;
        }
        None => wait.await,
    }
}

/// Pauses after a batch that began at `began`, for as long as the rate and the share of the time demand.
async fn rest(volume: &Volume, cache: &Cache, batch: &batch::Batch, began: Nanos) {
    let wb = &volume.writeback();
    let (written, now) = (batch.written, volume.rt().now());
    wb.took(written, now.since(began));
    // Buckets with the cleaned data may be worth packing now.
    cache.alloc.walks().recheck();
    let delay = volume.load().with_rate(|rate| rate.delay_after(written, unlimited(volume, cache), now));
    // The device may still be busy after the end of the batch; see `Batch::cost`.
    let took = now.since(began).max(batch.cost(cache));
    let delay = delay.max(yielding::pause(took, writeback_share(volume, cache)));
    if written == Sectors::ZERO {
        // Changes hold all dirty ranges: the task tries again when one of them is released.
        let released = std::pin::pin!(volume.ranges().released());
        match select(released, volume.rt().sleep(RETRY_DELAY)).await {
            Either::Left(()) => volume.rt().sleep(Nanos::from_ms(1)).await,
            Either::Right(()) => {}
        }
    } else if delay > Nanos(0) {
        let urgent = || cache.device.is_stopping() || volume.is_stopping() || unlimited(volume, cache);
        let wait = std::pin::pin!(wb.woken_when(urgent));
        match select(wait, volume.rt().sleep(delay)).await {
            Either::Left(()) | Either::Right(()) => {}
        }
    }
}

/// The largest size of the next batch: about what the rate allows in one second, so that one flush serves as much data
/// as possible.
fn batch_limit(volume: &Volume, cache: &Cache) -> Sectors {
    let most = Sectors(u64::from(cache.tunables.borrow().writeback_batch_sectors).max(MIN_BATCH.0));
    if unlimited(volume, cache) {
        return most;
    }
    batch_at(volume.writeback().rate(), writeback_share(volume, cache), most)
}

/// The size of a batch at `rate` sectors per second in a share of the time, at most `most`.
fn batch_at(rate: u32, share: f64, most: Sectors) -> Sectors {
    // A small share makes short batches with short pauses, not long batches with long pauses. But each batch ends with
    // a flush.
    let part = share.powi(2).max(LEAST_BATCH_PART);
    let most = (most.0 as f64 * part) as u64;
    Sectors(u64::from(rate).min(most).max(MIN_BATCH.0))
}

/// Updates the rate every `writeback_rate_update_seconds`.
async fn update_rate(volume: Rc<Volume>, cache: Rc<Cache>, inode: Inode) {
    loop {
        let seconds = u64::from(volume.settings().writeback_rate_update_seconds).max(1);
        {
            let stop = || volume.is_stopping() || !is_of(&volume, &cache, inode);
            let wait = std::pin::pin!(volume.writeback().woken_when(stop));
            if let Either::Left(()) = select(wait, volume.rt().sleep(Nanos::from_secs(seconds))).await {
                return;
            }
        }
        if cache.device.is_stopping() || !is_of(&volume, &cache, inode) {
            return;
        }
        let inputs = rate_inputs(&volume, &cache, inode);
        let idle = IdleInputs {
            attached_devices: cache.backings.written_back().0 as u32,
            enabled: cache.tunables.borrow().idle_max_writeback_rate,
            gc_running: cache.gc.is_walking(),
        };
        let params = volume.settings().rate_params();
        let now = volume.rt().now();
        volume.load().with_rate(|rate| rate.update(&inputs, &params, &mut cache.idle(), &idle, now));
    }
}

fn rate_inputs(volume: &Volume, cache: &Cache, inode: format::Inode) -> RateInputs {
    let tree = cache.index.tree();
    let volumes_dirty = tree
        .all_dirty()
        .filter(|(i, _)| !cache.backings.writes_back(*i))
        .fold(Sectors::ZERO, |n, (_, s)| n + s);
    let buckets = cache.alloc.buckets();
    RateInputs {
        nbuckets: u64::from(cache.geometry.nbuckets),
        available_buckets: u64::from(buckets.available()),
        bucket: cache.geometry.bucket_sectors,
        in_use_percent: buckets.in_use_percent() as u8,
        volumes_dirty,
        backing: volume.size(),
        all_backing: cache.backings.written_back().1,
        has_dirty: tree.dirty_sectors(inode) > Sectors::ZERO,
        dirty: tree.dirty_sectors(inode),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::EngineError;
    use crate::refusal::Refusal;
    use crate::set::SetOptions;
    use crate::testing::{TestDisk, Watching, backing_device, components, open_set, run};

    /// A walk follows only a change of the state from dirty to clean, and the state changes only if no dirty write is in
    /// flight.
    #[test]
    fn a_walk_follows_the_state_clean() {
        run(|rt| async move {
            let set = open_set(&Watching::new(16_384), &rt, (16, false), SetOptions::default()).await;
            let backing = backing_device(&TestDisk::new(4096), &rt);
            let volume = set.attached(backing.clone()).await.unwrap();
            let cache = components(set, &rt);
            cache.tunables.borrow_mut().gc_after_writeback = true;
            let free: Vec<_> = {
                let buckets = cache.alloc.buckets();
                buckets.all().filter(|b| buckets.may_invalidate(*b)).take(700).collect()
            };
            free.iter().for_each(|b| cache.alloc.pin(*b));
            rt.sleep(Nanos::from_secs(60)).await;
            assert!(cache.alloc.in_use_percent() >= 50 && !cache.alloc.walks().is_wanted());

            assert_eq!(volume.state(), Some(BackingState::Clean));
            nothing_dirty(&volume, &cache).await;
            assert!(!cache.alloc.walks().is_wanted(), "the device was clean");

            assert!(backing.ensure_dirty(|| Ok(())).await.unwrap());
            volume.set_dirty_in_flight(1);
            nothing_dirty(&volume, &cache).await;
            assert_eq!(volume.state(), Some(BackingState::Dirty));
            assert!(!cache.alloc.walks().is_wanted(), "a dirty write is in flight");

            volume.set_dirty_in_flight(0);
            nothing_dirty(&volume, &cache).await;
            assert_eq!(volume.state(), Some(BackingState::Clean));
            assert!(cache.alloc.walks().is_wanted());
        });
    }

    /// A drain counts every dirty extent once, and counts an extent again that was overwritten while it was written back.
    #[test]
    fn a_drain_counts_the_keys_that_it_makes_clean() {
        run(|rt| async move {
            let set = open_set(&Watching::new(16_384), &rt, (16, false), SetOptions::default()).await;
            let disk = TestDisk::new(4096);
            let volume = set.attached(backing_device(&disk, &rt)).await.unwrap();
            volume.settings_mut().writeback_running = false;
            let cache = components(set, &rt);
            rt.sleep(Nanos::from_secs(60)).await;
            let write = async |at, sectors: u64, byte| {
                let data = rt.pool().copy_of(&vec![byte; sectors as usize * 512]);
                let flags = io::WriteFlags::default();
                volume.write(Sector(at), Sectors(sectors), data, 0, flags).await.unwrap();
            };
            let mut expected = vec![0; 4096 * 512];
            for (n, sectors) in [1, 8, 3, 4, 16].into_iter().enumerate() {
                write(n as u64 * 100, sectors, n as u8 + 1).await;
                expected[(16 + n * 100) * 512..][..sectors as usize * 512].fill(n as u8 + 1);
            }
            disk.hold(true);
            let drained = rt.spawn({
                let volume = volume.clone();
                async move { volume.drained().await }
            });
            disk.held(5, &rt).await;
            write(102, 3, 9).await;
            expected[(16 + 102) * 512..][..3 * 512].fill(9);
            disk.hold(false);
            drained.await.unwrap();
            let counters = *cache.device.counters();
            assert_eq!((counters.writeback_keys_done, counters.writeback_keys_failed), (5, 1));
            assert_eq!(volume.dirty_sectors(), Sectors::ZERO);
            let (found, result) =
                volume.backing().unwrap().disk().read(Sector(16), rt.pool().take(4080 * 512)).await;
            result.unwrap();
            assert!(found.as_slice() == &expected[16 * 512..]);
        });
    }

    /// A drain that gives up says why, and so does the state of writeback.
    #[test]
    fn a_drain_that_fails_has_the_error_of_the_device() {
        run(|rt| async move {
            let set = open_set(&Watching::new(16_384), &rt, (16, false), SetOptions::default()).await;
            let disk = TestDisk::new(4096);
            let volume = set.attached(backing_device(&disk, &rt)).await.unwrap();
            volume.settings_mut().writeback_running = false;
            let data = rt.pool().zeroed(512);
            volume.write(Sector(0), Sectors(1), data, 0, io::WriteFlags::default()).await.unwrap();
            assert!(volume.writeback().last_error().is_none());
            disk.fail_flushes(100);
            let failure = volume.drained().await.unwrap_err();
            let EngineError::Refused(refusal) = &failure else { panic!("{failure}") };
            assert!(matches!(&**refusal, Refusal::NotWrittenBack { source: Some(_), .. }), "{failure}");
            assert!(volume.writeback().last_error().is_some());
        });
    }

    #[test]
    fn a_batch_is_a_second_of_the_rate_or_the_share_of_the_largest() {
        let batch = |rate, share| batch_at(rate, share, Sectors(10_000)).0;
        assert_eq!([0, 7, 8, 9, 9_999, 20_000].map(|rate| batch(rate, 1.0)), [8, 8, 8, 9, 9_999, 10_000]);
        // Half the share makes a batch a quarter as long, and at least a hundredth of the full batch.
        assert_eq!([0.5, 0.2, 0.1, 0.05].map(|share| batch(20_000, share)), [2500, 400, 100, 100]);
        assert_eq!(batch(90, 0.05), 90);
        assert_eq!(batch_at(20_000, 0.05, Sectors(100)).0, 8);
    }
}
