//! Writeback: dirty data goes to the backing device, in LBA order, at the rate of the controller.
//!
//! Owns a cached device's writeback task, its position and its rate; `batch` does the work. Order (durability
//! contract 4): read from the cache → write to the backing device → flush the backing device → only then the keys
//! say clean, journaled together.
//!
//! Unlike the kernel, new dirty data never waits behind a completed scan for longer than `writeback_delay` after it
//! became dirty, and the device's state says clean as soon as nothing is dirty.

mod batch;
mod runs;

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use format::{BackingState, Inode, Sector, Sectors};
use io::Nanos;
use io::sync::{Either, Event, select};

use crate::figures::{Pace, WritebackFigures};
use crate::index::NotLoaded;
use crate::policy::writeback_rate::{IdleInputs, RateDebug, RateInputs, WritebackRate};
use crate::policy::yielding::{self, Pressure};
use crate::set::Core;
use crate::tunables::Controller;
use crate::volume::Volume;

/// Pause after a failed batch.
const RETRY_DELAY: Nanos = Nanos::from_secs(1);
/// Batches that fail in a row before whoever waits for the drain is told.
const GIVE_UP_AFTER: u32 = 3;
/// How long writeback that is not due yet waits before it looks whether room is short.
const LOOK_AGAIN: Nanos = Nanos::from_secs(1);
/// Smallest share of a second's worth of data in one batch.
const MIN_BATCH: Sectors = Sectors(8);
/// Share of the largest batch that a batch has at least, whatever share of the time writeback gets.
const LEAST_BATCH_PART: f64 = 0.01;

/// The writeback state of one volume.
pub(crate) struct Writeback {
    rate: RefCell<WritebackRate>,
    /// Where the sweep goes on.
    cursor: Cell<Sector>,
    /// Where the search for full stripes goes on.
    stripe_cursor: Cell<Sector>,
    /// When the oldest data that is dirty now became dirty.
    dirty_since: Cell<Option<Nanos>>,
    /// Waits for everything to be written back, without regard to rate and delay.
    draining: Cell<u32>,
    failures: Cell<u32>,
    written: Cell<Sectors>,
    /// Sectors that a batch made clean in a second, of late.
    cleaned_per_second: Cell<f64>,
    last_error: RefCell<Option<String>>,
    running: Cell<bool>,
    wake: Event,
    /// Keys were cleaned, or the task gave up or ended.
    pub(crate) progress: Event,
}

impl Writeback {
    pub(crate) fn new(now: Nanos) -> Writeback {
        Writeback {
            rate: RefCell::new(WritebackRate::new(now)),
            cursor: Cell::new(Sector(0)),
            stripe_cursor: Cell::new(Sector(0)),
            dirty_since: Cell::new(None),
            draining: Cell::new(0),
            failures: Cell::new(0),
            written: Cell::new(Sectors::ZERO),
            cleaned_per_second: Cell::new(0.0),
            last_error: RefCell::default(),
            running: Cell::new(false),
            wake: Event::default(),
            progress: Event::default(),
        }
    }

    pub(crate) fn wake(&self) {
        self.wake.notify_all();
        self.progress.notify_all();
    }

    /// Dirty data was written.
    pub(crate) fn dirtied(&self) {
        if self.dirty_since.get().is_none() {
            self.wake.notify_all();
        }
    }

    /// A client's request: idle devices slow down their writeback.
    pub(crate) fn foreground(&self, core: &Core) {
        if core.idle.borrow_mut().foreground_request() {
            for v in core.volumes.borrow().iter() {
                v.writeback.rate.borrow_mut().leave_idle();
            }
        }
    }

    pub(crate) fn rate(&self) -> u32 {
        self.rate.borrow().rate()
    }

    pub(crate) fn set_rate(&self, rate: u32) {
        self.rate.borrow_mut().set_rate(rate);
    }

    /// Everything is written back as fast as possible until the guard is dropped.
    pub(crate) fn drain(&self) -> Draining<'_> {
        self.draining.set(self.draining.get() + 1);
        self.failures.set(0);
        self.wake();
        Draining(self)
    }

    /// A batch made so much clean in so much time.
    fn took(&self, written: Sectors, span: Nanos) {
        if written > Sectors::ZERO && span > Nanos(0) {
            let (before, now) = (self.cleaned_per_second.get(), written.0 as f64 / span.as_seconds());
            self.cleaned_per_second.set(if before == 0.0 { now } else { before + (now - before) / 4.0 });
        }
    }

    /// Sectors that writeback makes clean in a second while it runs; 0 if that is not known.
    pub(crate) fn cleaned_per_second(&self) -> f64 {
        self.cleaned_per_second.get()
    }

    pub(crate) fn gave_up(&self) -> bool {
        self.failures.get() >= GIVE_UP_AFTER
    }

    pub(crate) fn last_error(&self) -> Option<String> {
        self.last_error.borrow().clone()
    }

    /// Waits until the task has ended. `never_ran`: there is none.
    pub(crate) async fn stopped(&self, never_ran: bool) {
        if never_ran && !self.running.get() {
            return;
        }
        self.progress.wait_until(|| !self.running.get()).await;
    }
}

/// Somebody waits for all dirty data to be written back.
pub(crate) struct Draining<'a>(&'a Writeback);

impl Drop for Draining<'_> {
    fn drop(&mut self) {
        self.0.draining.set(self.0.draining.get() - 1);
    }
}

impl Volume {
    /// The terms behind the writeback rate.
    pub fn writeback_debug(&self) -> RateDebug {
        let running = self.tunables.borrow().writeback_running;
        self.writeback.rate.borrow().debug(self.dirty_sectors(), running, self.rt.now())
    }

    /// How much dirty data there should be: as the controller would see it now.
    pub(crate) fn dirty_target(&self) -> Sectors {
        let (Some((core, inode)), Some(_)) = (self.attached(), self.backing()) else { return Sectors::ZERO };
        Sectors(rate_inputs(self, &core, inode).target(self.tunables.borrow().writeback_percent))
    }

    /// The state of the writeback in figures.
    pub(crate) fn writeback_figures(&self) -> WritebackFigures {
        WritebackFigures {
            pace: self.pace(),
            share: self.attached().map_or(1.0, |(core, _)| self.writeback_share(&core)),
            rate: self.writeback_debug(),
            written: self.writeback.written.get(),
            failures: self.writeback.failures.get(),
            last_error: self.writeback.last_error(),
        }
    }

    /// Why writeback goes at its rate; in the order in which the task looks at things.
    fn pace(&self) -> Pace {
        let (Some((core, inode)), Some(_)) = (self.attached(), self.backing()) else { return Pace::Never };
        let dirty = core.index.tree().dirty_sectors(inode);
        let rate = self.writeback.rate.borrow();
        let (running, percent) = {
            let t = self.tunables.borrow();
            (t.writeback_running, t.writeback_percent)
        };
        if dirty == Sectors::ZERO {
            Pace::NothingDirty
        } else if self.is_detaching() {
            Pace::Detaching
        } else if self.writeback.draining.get() > 0 {
            Pace::Draining
        } else if !running {
            Pace::Stopped
        } else if core.alloc.is_starved() {
            Pace::CacheStarved
        } else if self.hurries(&core) {
            Pace::Filling
        } else if self.writeback_due(&core, dirty).is_some_and(|due| due > self.rt.now()) {
            Pace::Delayed
        } else if percent == 0 {
            Pace::Unthrottled
        } else if rate.is_idle() {
            Pace::Idle
        } else if rate.is_fragmented() {
            Pace::Fragmented
        } else {
            Pace::Controlled
        }
    }

    fn unlimited(&self, core: &Core) -> bool {
        self.is_detaching()
            || self.writeback.draining.get() > 0
            || self.tunables.borrow().writeback_percent == 0
            || self.hurries(core)
    }

    /// The share of the time that writeback gets: of clients, the busiest volume of the set counts.
    pub(crate) fn writeback_share(&self, core: &Core) -> f64 {
        if self.unlimited(core) || self.tunables.borrow().writeback_controller == Controller::Kernel {
            return 1.0;
        }
        let dirty: u64 = core.index.tree().all_dirty().map(|(_, n)| n.0).sum();
        let capacity = u64::from(core.geometry.nbuckets).saturating_mul(core.geometry.bucket_sectors.0);
        let t = core.tunables.borrow();
        let pressure = Pressure {
            dirty_percent: dirty as f64 * 100.0 / capacity as f64,
            in_use_percent: core.alloc.buckets().in_use_percent() as f64,
            cutoffs: (t.cutoff_writeback, t.cutoff_writeback_sync),
        };
        let busy = core.volumes.borrow().iter().map(|v| v.busy_share()).fold(0.0, f64::max);
        yielding::share(busy, &pressure)
    }

    /// The cache needs room: whatever the rate says, it is made as fast as the devices can.
    fn hurries(&self, core: &Core) -> bool {
        let by_kernel = self.tunables.borrow().writeback_controller == Controller::Kernel;
        let filling = || core.alloc.is_filling(self.rt.turn_time());
        core.alloc.is_starved() || !by_kernel && filling()
    }

    /// When writeback may begin; `None`: not before something changes.
    fn writeback_due(&self, core: &Core, dirty: Sectors) -> Option<Nanos> {
        if dirty == Sectors::ZERO {
            return None;
        }
        let t = self.tunables.borrow();
        let urgent = self.is_detaching() || self.writeback.draining.get() > 0;
        if !t.writeback_running && !urgent {
            return None;
        }
        if urgent || self.hurries(core) {
            return Some(Nanos(0));
        }
        let since = self.writeback.dirty_since.get().unwrap_or(Nanos(0));
        Some(since.after(Nanos::from_secs(u64::from(t.writeback_delay))))
    }
}

/// The writeback task of a volume; it ends when the volume is stopped or has no cache any more.
pub(crate) async fn run(volume: Rc<Volume>) {
    let wb = &volume.writeback;
    wb.running.set(true);
    while let Some((core, inode)) = volume.attached() {
        if core.device.is_stopping() || volume.is_stopping() {
            break;
        }
        count_stripes(&volume, &core, inode).await;
        sweep(&volume, &core, inode).await;
        core.index.tree_mut().forget_stripes(inode);
    }
    wb.running.set(false);
    wb.progress.notify_all();
}

/// Counts the stripes of a device that wants to be written in whole ones. An index that cannot be read is found by
/// everybody else as well.
async fn count_stripes(volume: &Volume, core: &Core, inode: Inode) {
    let Some(geometry) = volume.expensive_stripes() else { return };
    core.index.tree_mut().begin_stripes(inode, geometry);
    let mut from = Some(Sector(0));
    while let Some(at) = from
        && core.device.check().is_ok()
    {
        let counted = core.index.tree_mut().count_stripes(inode, at, &core.alloc.buckets());
        match counted {
            Ok(next) => from = next,
            Err(NotLoaded(id)) if core.index.load_leaf(id).await.is_ok() => {}
            Err(NotLoaded(_)) => return,
        }
        core.rt.yield_now().await;
    }
}

/// Writes back what is due, for as long as the volume is attached to this set.
async fn sweep(volume: &Rc<Volume>, core: &Rc<Core>, inode: Inode) {
    let wb = &volume.writeback;
    while volume.attached().is_some_and(|(c, i)| Rc::ptr_eq(&c, core) && i == inode) {
        if core.device.is_stopping() || volume.is_stopping() {
            break;
        }
        let now = volume.rt.now();
        let dirty = core.index.tree().dirty_sectors(inode);
        if dirty == Sectors::ZERO {
            nothing_dirty(volume, core).await;
        } else if wb.dirty_since.get().is_none() {
            wb.dirty_since.set(Some(now));
        }
        let due = volume.writeback_due(core, dirty);
        if due.is_none_or(|due| due > now) {
            wait_until_due(volume, core, inode, due, dirty > Sectors::ZERO).await;
            wb.rate.borrow_mut().reset_clock(volume.rt.now());
            continue;
        }
        let limit = batch_limit(volume, core);
        let began = volume.rt.now();
        match batch::write_back(volume, core, inode, limit).await {
            Ok(batch) => {
                wb.failures.set(0);
                wb.written.set(wb.written.get() + batch.written);
                core.tasks.times().borrow_mut().writeback_batches.record(volume.rt.now().since(began));
                wb.progress.notify_all();
                rest(volume, core, &batch, began).await;
            }
            Err(e) => {
                core.device.emit(crate::events::SetEvent::DeviceError { what: format!("writeback: {e}") });
                *wb.last_error.borrow_mut() = Some(e.to_string());
                wb.failures.set(wb.failures.get().saturating_add(1));
                wb.progress.notify_all();
                volume.rt.sleep(RETRY_DELAY).await;
            }
        }
    }
}

/// A device without dirty data says so.
async fn nothing_dirty(volume: &Volume, core: &Core) {
    let wb = &volume.writeback;
    wb.dirty_since.set(None);
    if volume.state() != Some(BackingState::Dirty) || volume.dirty_in_flight.get() > 0 {
        return;
    }
    if let Err(e) = volume.mark_clean().await {
        *wb.last_error.borrow_mut() = Some(e.to_string());
        volume.rt.sleep(RETRY_DELAY).await;
    }
    wb.progress.notify_all();
    if core.tunables.borrow().gc_after_writeback && core.alloc.in_use_percent() >= 50 {
        core.alloc.walks().request();
    }
}

/// Waits until writeback may be due: until then, or until something may have changed the answer.
async fn wait_until_due(volume: &Volume, core: &Core, inode: Inode, due: Option<Nanos>, seen_dirty: bool) {
    let changed = || {
        let dirty = core.index.tree().dirty_sectors(inode);
        core.device.is_stopping()
            || volume.is_stopping()
            || volume.attached().is_none()
            || (dirty > Sectors::ZERO) != seen_dirty
            || volume.writeback_due(core, dirty).is_some_and(|d| due.is_none_or(|old| d < old))
    };
    let wait = std::pin::pin!(volume.writeback.wake.wait_until(changed));
    match due {
        Some(at) => {
            // Nobody tells when room becomes short.
            let at = at.min(volume.rt.now().after(LOOK_AGAIN));
            let (Either::Left(()) | Either::Right(())) = select(wait, volume.rt.sleep_until(at)).await;
        }
        None => wait.await,
    }
}

/// After a batch that began then: as long as the rate and others' share of the time demand.
async fn rest(volume: &Volume, core: &Core, batch: &batch::Batch, began: Nanos) {
    let wb = &volume.writeback;
    let (written, now) = (batch.written, volume.rt.now());
    wb.took(written, now.since(began));
    // What is clean now may leave buckets that are worth packing.
    core.alloc.walks().look_again();
    let delay = wb.rate.borrow_mut().delay_after(written, volume.unlimited(core), now);
    // Its cost may come later than it: see `Batch::cost`.
    let took = now.since(began).max(batch.cost(core));
    let delay = delay.max(yielding::pause(took, volume.writeback_share(core)));
    if written == Sectors::ZERO {
        // Everything dirty is being changed just now: once something no longer is, it is looked at again.
        let released = std::pin::pin!(volume.ranges.released());
        match select(released, volume.rt.sleep(RETRY_DELAY)).await {
            Either::Left(()) => volume.rt.sleep(Nanos::from_ms(1)).await,
            Either::Right(()) => {}
        }
    } else if delay > Nanos(0) {
        let urgent = || core.device.is_stopping() || volume.is_stopping() || volume.unlimited(core);
        let wait = std::pin::pin!(wb.wake.wait_until(urgent));
        match select(wait, volume.rt.sleep(delay)).await {
            Either::Left(()) | Either::Right(()) => {}
        }
    }
}

/// How much one batch may write: about a second's worth, so that the flush at its end is shared by as much as the
/// rate allows.
fn batch_limit(volume: &Volume, core: &Core) -> Sectors {
    let most = Sectors(u64::from(core.tunables.borrow().writeback_batch_sectors).max(MIN_BATCH.0));
    if volume.unlimited(core) {
        return most;
    }
    batch_at(volume.writeback.rate.borrow().rate(), volume.writeback_share(core), most)
}

/// A batch of at most `most`, at so many sectors a second, in a share of the time.
fn batch_at(rate: u32, share: f64, most: Sectors) -> Sectors {
    // Short batches with short rests between them, instead of long ones; but each ends with a flush.
    let part = share.powi(2).max(LEAST_BATCH_PART);
    let most = (most.0 as f64 * part) as u64;
    Sectors(u64::from(rate).min(most).max(MIN_BATCH.0))
}

/// Updates the rate every `writeback_rate_update_seconds`.
pub(crate) async fn update_rate(volume: Rc<Volume>) {
    loop {
        let seconds = u64::from(volume.tunables.borrow().writeback_rate_update_seconds).max(1);
        {
            let stop = || volume.is_stopping() || volume.attached().is_none();
            let wait = std::pin::pin!(volume.writeback.wake.wait_until(stop));
            if let Either::Left(()) = select(wait, volume.rt.sleep(Nanos::from_secs(seconds))).await {
                return;
            }
        }
        let Some((core, inode)) = volume.attached() else { return };
        if core.device.is_stopping() {
            return;
        }
        let inputs = rate_inputs(&volume, &core, inode);
        let idle = IdleInputs {
            attached_devices: core.backings.len() as u32,
            enabled: core.tunables.borrow().idle_max_writeback_rate,
            gc_running: core.gc.is_walking(),
        };
        let params = volume.tunables.borrow().rate_params();
        let now = volume.rt.now();
        volume.writeback.rate.borrow_mut().update(&inputs, &params, &mut core.idle.borrow_mut(), &idle, now);
    }
}

fn rate_inputs(volume: &Volume, core: &Core, inode: format::Inode) -> RateInputs {
    let tree = core.index.tree();
    let volumes_dirty =
        tree.all_dirty().filter(|(i, _)| !core.backings.has(*i)).fold(Sectors::ZERO, |n, (_, s)| n + s);
    let buckets = core.alloc.buckets();
    RateInputs {
        nbuckets: u64::from(core.geometry.nbuckets),
        available_buckets: u64::from(buckets.available()),
        bucket: core.geometry.bucket_sectors,
        in_use_percent: buckets.in_use_percent() as u8,
        volumes_dirty,
        backing: volume.size(),
        all_backing: core.backings.data_sectors(),
        has_dirty: tree.dirty_sectors(inode) > Sectors::ZERO,
        dirty: tree.dirty_sectors(inode),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_is_a_second_of_the_rate_or_the_share_of_the_largest() {
        let batch = |rate, share| batch_at(rate, share, Sectors(10_000)).0;
        assert_eq!([0, 7, 8, 9, 9_999, 20_000].map(|rate| batch(rate, 1.0)), [8, 8, 8, 9, 9_999, 10_000]);
        // A share twice as small takes four times as short a batch, and a hundredth at least.
        assert_eq!([0.5, 0.2, 0.1, 0.05].map(|share| batch(20_000, share)), [2500, 400, 100, 100]);
        assert_eq!(batch(90, 0.05), 90);
        assert_eq!(batch_at(20_000, 0.05, Sectors(100)).0, 8);
    }

    /// The speed of writeback follows what batches do, a quarter of the way each time.
    #[test]
    fn how_fast_writeback_is() {
        let w = Writeback::new(Nanos(1));
        let speed = |sectors, ms| {
            w.took(Sectors(sectors), Nanos::from_ms(ms));
            w.cleaned_per_second()
        };
        assert_eq!([speed(0, 10), speed(10, 0)], [0.0, 0.0]);
        assert_eq!(speed(100, 500), 200.0);
        assert_eq!([speed(100, 100), speed(0, 100), speed(5, 0)], [400.0; 3]);
        assert_eq!(speed(1, 1000), 300.25);
    }

    #[test]
    fn the_rate_is_what_was_set() {
        let w = Writeback::new(Nanos(1));
        w.set_rate(4711);
        assert_eq!(w.rate(), 4711);
    }

    /// Whoever waits for a drain is told after three failures in a row; a new drain begins to count anew.
    #[test]
    fn writeback_gives_up_after_three_failures() {
        let w = Writeback::new(Nanos(1));
        for (failures, gave_up) in [(0, false), (2, false), (3, true), (4, true)] {
            w.failures.set(failures);
            assert_eq!(w.gave_up(), gave_up);
        }
        let (one, other) = (w.drain(), w.drain());
        assert!(!w.gave_up() && w.draining.get() == 2);
        drop(one);
        assert_eq!(w.draining.get(), 1);
        drop(other);
        assert_eq!(w.draining.get(), 0);
    }
}
