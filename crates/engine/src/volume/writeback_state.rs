//! The state of a volume's writeback, which the requests of the volume and the writeback task share.
//!
//! Owns the progress and the failures of the task, the number of drains that wait for it, and the events that wake the
//! task and its waiters. The task itself is in `crate::writeback`. Must not know how data is written back.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use format::{Sector, Sectors};
use io::Nanos;
use io::sync::Event;

use super::VolumeLoad;
use crate::error::EngineError;

/// The number of failed batches in a row after which a drain ends with the error.
const GIVE_UP_AFTER: u32 = 3;

/// The writeback state of one volume.
pub(crate) struct WritebackState {
    /// Has the rate controller, which the other volumes of the set also use.
    load: Rc<VolumeLoad>,
    /// The position at which the sweep continues.
    cursor: Cell<Sector>,
    /// The position at which the search for full stripes continues.
    stripe_cursor: Cell<Sector>,
    /// The time at which the oldest dirty data became dirty.
    dirty_since: Cell<Option<Nanos>>,
    /// The number of drains: while it is not 0, writeback ignores rate and delay.
    draining: Cell<u32>,
    /// The number of batches that failed in a row.
    failures: Cell<u32>,
    /// All data that was written back since the start.
    written: Cell<Sectors>,
    /// The recent number of sectors that a batch makes clean in a second.
    cleaned_per_second: Cell<f64>,
    last_error: RefCell<Option<Arc<EngineError>>>,
    /// The number of tasks that run: two, while the task of a lost set ends.
    running: Cell<u32>,
    /// Notified when writeback may have become due.
    wake: Event,
    /// Notified when keys became clean, a batch failed, or the task ended.
    progress: Event,
}

impl WritebackState {
    pub(crate) fn new(load: Rc<VolumeLoad>) -> WritebackState {
        WritebackState {
            load,
            cursor: Cell::new(Sector(0)),
            stripe_cursor: Cell::new(Sector(0)),
            dirty_since: Cell::new(None),
            draining: Cell::new(0),
            failures: Cell::new(0),
            written: Cell::new(Sectors::ZERO),
            cleaned_per_second: Cell::new(0.0),
            last_error: RefCell::default(),
            running: Cell::new(0),
            wake: Event::default(),
            progress: Event::default(),
        }
    }

    pub(crate) fn wake(&self) {
        self.wake.notify_all();
        self.progress.notify_all();
    }

    /// Wakes the task if the volume had no dirty data before.
    pub(crate) fn dirtied(&self) {
        if self.dirty_since.get().is_none() {
            self.wake.notify_all();
        }
    }

    /// Wakes the tasks that wait for clean keys or for the end of the last dirty write.
    pub(crate) fn progressed(&self) {
        self.progress.notify_all();
    }

    /// Waits until `done`, which is checked again whenever keys became clean, a batch failed, or the task ended.
    pub(crate) async fn progress_until(&self, done: impl Fn() -> bool) {
        self.progress.wait_until(done).await;
    }

    /// Waits until `due`, which is checked again whenever writeback may have become due.
    pub(crate) async fn woken_when(&self, due: impl Fn() -> bool) {
        self.wake.wait_until(due).await;
    }

    /// The place where the sweep continues.
    pub(crate) fn cursor(&self) -> Sector {
        self.cursor.get()
    }

    /// Sets the place where the sweep continues.
    pub(crate) fn move_cursor(&self, to: Sector) {
        self.cursor.set(to);
    }

    /// The place where the search for full stripes continues.
    pub(crate) fn stripe_cursor(&self) -> Sector {
        self.stripe_cursor.get()
    }

    /// Sets the place where the search for full stripes continues.
    pub(crate) fn move_stripe_cursor(&self, to: Sector) {
        self.stripe_cursor.set(to);
    }

    /// The time at which the oldest dirty data became dirty, as far as the task has seen.
    pub(crate) fn dirty_since(&self) -> Option<Nanos> {
        self.dirty_since.get()
    }

    /// Records at `now` whether the volume has dirty data.
    pub(crate) fn saw_dirty(&self, now: Nanos, is_dirty: bool) {
        let since = self.dirty_since.get().unwrap_or(now);
        self.dirty_since.set(is_dirty.then_some(since));
    }

    /// Whether a drain is under way.
    pub(crate) fn is_draining(&self) -> bool {
        self.draining.get() > 0
    }

    /// Records that a task was started.
    pub(crate) fn task_began(&self) {
        self.running.set(self.running.get() + 1);
    }

    /// Records that the task ended.
    pub(crate) fn task_ended(&self) {
        self.running.set(self.running.get() - 1);
        self.progressed();
    }

    /// Records that a batch has made `written` clean.
    pub(crate) fn batch_done(&self, written: Sectors) {
        self.failures.set(0);
        self.written.set(self.written.get() + written);
        self.progressed();
    }

    /// Records that a batch has failed.
    pub(crate) fn batch_failed(&self, error: EngineError) {
        self.failed(error);
        self.failures.set(self.failures.get().saturating_add(1));
        self.progressed();
    }

    /// Records an error that does not count against a drain.
    pub(crate) fn failed(&self, error: EngineError) {
        *self.last_error.borrow_mut() = Some(Arc::new(error));
    }

    /// The number of batches that failed in a row.
    pub(crate) fn failures(&self) -> u32 {
        self.failures.get()
    }

    /// All data that was written back since the start.
    pub(crate) fn written(&self) -> Sectors {
        self.written.get()
    }

    pub(crate) fn rate(&self) -> u32 {
        self.load.with_rate(|rate| rate.rate())
    }

    pub(crate) fn set_rate(&self, rate: u32) {
        self.load.with_rate(|r| r.set_rate(rate));
    }

    /// Makes the task write back as fast as possible until the guard is dropped.
    pub(crate) fn drain(&self) -> Draining<'_> {
        self.draining.set(self.draining.get() + 1);
        self.failures.set(0);
        self.wake();
        Draining(self)
    }

    /// Records that a batch made `written` sectors clean in the time `span`.
    pub(crate) fn took(&self, written: Sectors, span: Nanos) {
        if written > Sectors::ZERO && span > Nanos(0) {
            let (before, now) = (self.cleaned_per_second.get(), written.0 as f64 / span.as_seconds());
            self.cleaned_per_second.set(if before == 0.0 { now } else { before + (now - before) / 4.0 });
        }
    }

    /// The number of sectors that writeback makes clean in a second while it runs; 0 if it is unknown.
    pub(crate) fn cleaned_per_second(&self) -> f64 {
        self.cleaned_per_second.get()
    }

    pub(crate) fn gave_up(&self) -> bool {
        self.failures.get() >= GIVE_UP_AFTER
    }

    pub(crate) fn last_error(&self) -> Option<Arc<EngineError>> {
        self.last_error.borrow().clone()
    }

    /// Waits until the task of the set that the volume has left has ended.
    pub(crate) async fn earlier_task_ended(&self) {
        self.progress_until(|| self.running.get() <= 1).await;
    }

    /// Waits until the task has ended.
    pub(crate) async fn stopped(&self) {
        self.progress_until(|| self.running.get() == 0).await;
    }
}

/// A drain that is under way; it ends when this is dropped.
pub(crate) struct Draining<'a>(&'a WritebackState);

impl Drop for Draining<'_> {
    fn drop(&mut self) {
        self.0.draining.set(self.0.draining.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    use io::sync::{Either, select};

    use super::*;
    use crate::policy::writeback_rate::WritebackRate;
    use crate::testing::run;

    fn state() -> WritebackState {
        WritebackState::new(VolumeLoad::new(None, WritebackRate::new(Nanos(1))))
    }

    /// The speed of writeback moves a quarter of the way to that of each batch.
    #[test]
    fn how_fast_writeback_is() {
        let w = state();
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
    fn a_stop_waits_for_the_task_and_for_nothing_else() {
        run(|rt| async move {
            let w = state();
            w.stopped().await;
            w.running.set(1);
            let (stopped, second) = (std::pin::pin!(w.stopped()), rt.sleep(Nanos::from_secs(1)));
            assert!(matches!(select(stopped, second).await, Either::Right(())), "the task runs");
            w.running.set(0);
            w.stopped().await;
        });
    }

    #[test]
    fn the_rate_is_what_was_set() {
        let w = state();
        w.set_rate(4711);
        assert_eq!(w.rate(), 4711);
    }

    /// A drain ends after three failures in a row; a new drain begins to count from 0.
    #[test]
    fn writeback_gives_up_after_three_failures() {
        let w = state();
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
