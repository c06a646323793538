//! The state of a volume's writeback, which its requests and the writeback task share.
//!
//! Owns what the task has done and failed to do, who waits for it, and the events that wake either. The task itself is
//! `crate::writeback`. Must not know how data is written back.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use format::{Sector, Sectors};
use io::Nanos;
use io::sync::Event;

use super::VolumeLoad;

/// Failed batches in a row after which a wait for a drain ends with the error.
const GIVE_UP_AFTER: u32 = 3;

/// The writeback state of one volume.
pub(crate) struct WritebackState {
    /// The controller, which other volumes of the set may have to wake.
    load: Rc<VolumeLoad>,
    /// Where the sweep goes on.
    pub(crate) cursor: Cell<Sector>,
    /// Where the search for full stripes goes on.
    pub(crate) stripe_cursor: Cell<Sector>,
    /// When the oldest data that is dirty now became dirty.
    pub(crate) dirty_since: Cell<Option<Nanos>>,
    /// Waits for everything to be written back, without regard to rate and delay.
    pub(crate) draining: Cell<u32>,
    pub(crate) failures: Cell<u32>,
    pub(crate) written: Cell<Sectors>,
    /// Sectors that a batch made clean in a second, of late.
    pub(crate) cleaned_per_second: Cell<f64>,
    pub(crate) last_error: RefCell<Option<String>>,
    pub(crate) running: Cell<bool>,
    pub(crate) wake: Event,
    /// Keys were cleaned, or the task gave up or ended.
    pub(crate) progress: Event,
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

    pub(crate) fn rate(&self) -> u32 {
        self.load.rate.borrow().rate()
    }

    pub(crate) fn set_rate(&self, rate: u32) {
        self.load.rate.borrow_mut().set_rate(rate);
    }

    /// Everything is written back as fast as possible until the guard is dropped.
    pub(crate) fn drain(&self) -> Draining<'_> {
        self.draining.set(self.draining.get() + 1);
        self.failures.set(0);
        self.wake();
        Draining(self)
    }

    /// A batch made so much clean in so much time.
    pub(crate) fn took(&self, written: Sectors, span: Nanos) {
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

/// A wait for all dirty data to be written back.
pub(crate) struct Draining<'a>(&'a WritebackState);

impl Drop for Draining<'_> {
    fn drop(&mut self) {
        self.0.draining.set(self.0.draining.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::writeback_rate::WritebackRate;

    fn state() -> WritebackState {
        WritebackState::new(VolumeLoad::new(None, WritebackRate::new(Nanos(1))))
    }

    /// The speed of writeback follows what batches do, a quarter of the way each time.
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
    fn the_rate_is_what_was_set() {
        let w = state();
        w.set_rate(4711);
        assert_eq!(w.rate(), 4711);
    }

    /// Whoever waits for a drain is told after three failures in a row; a new drain begins to count anew.
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
