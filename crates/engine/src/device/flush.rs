//! The flushes of one device, shared by all tasks that wait for one.
//!
//! Owns the knowledge which writes the flushes of a device have made durable. Each completed write takes a *tick*; a
//! flush that begins after the tick covers the write. One flush of the device serves all tasks that wait.
//!
//! Invariants: `flushed` is never a tick that was taken after the flush was sent. After a failed flush every later one
//! fails, too, because the device may have dropped the data and a repeated flush could hide that. Therefore each flush
//! is a separate task, whose result is recorded even if no task waits for it any more.

use std::cell::{Cell, OnceCell, RefCell};
use std::rc::Rc;

use io::sync::Event;
use io::{Disk, IoError};

use crate::canary::{Bug, bug};

/// A moment in the sequence of writes to a device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub(crate) struct Tick(u64);

/// Sends the flushes of one device, and records which writes they have made durable.
pub(crate) struct FlushGate {
    state: Rc<FlushState>,
}

/// Is called with the error of a flush.
type OnFailure = dyn Fn(&IoError);

/// The state that the task of a flush shares with the tasks that wait.
struct FlushState {
    disk: Disk,
    /// The tick of the latest write.
    now: Cell<Tick>,
    /// Every write up to and including this tick is durable.
    flushed: Cell<Tick>,
    running: Cell<bool>,
    failed: RefCell<Option<IoError>>,
    /// Called with the error of the first flush that fails, also if no task waits for it any more.
    on_failure: OnceCell<Box<OnFailure>>,
    done: Event,
    count: Cell<u64>,
}

impl FlushGate {
    pub(crate) fn new(disk: Disk) -> FlushGate {
        let state = FlushState {
            disk,
            now: Cell::new(Tick(1)),
            flushed: Cell::new(Tick(0)),
            running: Cell::new(false),
            failed: RefCell::default(),
            on_failure: OnceCell::new(),
            done: Event::default(),
            count: Cell::new(0),
        };
        FlushGate { state: Rc::new(state) }
    }

    /// Sets the function that is called when a flush fails. It is called once, when the set is assembled.
    pub(crate) fn set_on_failure(&self, call: impl Fn(&IoError) + 'static) {
        assert!(self.state.on_failure.set(Box::new(call)).is_ok(), "a set is assembled once");
    }

    /// Records a write that has completed or may have reached the device; flushes that begin later cover it.
    pub(crate) fn wrote(&self) -> Tick {
        let t = Tick(self.state.now.get().0 + 1);
        self.state.now.set(t);
        t
    }

    /// The tick of the latest write.
    pub(crate) fn latest(&self) -> Tick {
        self.state.now.get()
    }

    pub(crate) fn is_durable(&self, tick: Tick) -> bool {
        self.state.flushed.get() >= tick
    }

    /// Whether a flush has failed: the device may have dropped data that was not flushed.
    pub(crate) fn has_failed(&self) -> bool {
        self.state.failed.borrow().is_some()
    }

    /// The number of flushes sent to the device.
    pub(crate) fn count(&self) -> u64 {
        self.state.count.get()
    }

    /// Waits until every write up to `tick` is durable; sends a flush if none that covers it is under way.
    pub(crate) async fn ensure(&self, tick: Tick) -> Result<(), IoError> {
        loop {
            if self.is_durable(tick) {
                return Ok(());
            }
            if let Some(e) = self.state.failed.borrow().clone() {
                return Err(e);
            }
            if !self.state.running.replace(true) {
                self.begin();
            }
            // A flush under way may have begun too early for this tick; check again when it has ended.
            self.state.done.wait_until(|| !self.state.running.get()).await;
        }
    }

    /// Sends a flush, which covers the writes that have ended before.
    fn begin(&self) {
        let state = self.state.clone();
        state.count.set(state.count.get() + 1);
        let covers = state.now.get();
        self.state.disk.runtime().spawn(async move {
            let result = state.disk.flush().await;
            let covers = if bug(Bug::FlushCoversLateWrites) { state.now.get() } else { covers };
            match result {
                Ok(()) => state.flushed.set(state.flushed.get().max(covers)),
                Err(e) => {
                    *state.failed.borrow_mut() = Some(e.clone());
                    if let Some(call) = state.on_failure.get() {
                        call(&e);
                    }
                }
            }
            state.running.set(false);
            state.done.notify_all();
        });
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;
    use crate::testing::{TestDisk, run};

    impl Tick {
        pub(crate) fn nth(n: u64) -> Tick {
            Tick(n)
        }
    }

    #[test]
    fn waiters_share_a_flush_and_late_ones_get_their_own() {
        run(|rt| async move {
            let disk = TestDisk::new(64);
            let gate = Rc::new(FlushGate::new(Disk::new(disk.clone(), rt.clone())));
            disk.hold(true);
            let first = gate.wrote();
            let waits: Vec<_> = (0..5)
                .map(|_| {
                    let g = gate.clone();
                    rt.spawn(async move { g.ensure(first).await })
                })
                .collect();
            disk.held(1, &rt).await;
            // This write completes after the flush began: that flush does not cover it.
            let late = gate.wrote();
            let g = gate.clone();
            let late = rt.spawn(async move { g.ensure(late).await });
            disk.hold(false);
            for w in waits {
                assert_eq!(w.await, Ok(()));
            }
            assert_eq!(late.await, Ok(()));
            assert_eq!(gate.count(), 2);
        });
    }

    /// Writes before a flush begins are covered, later ones are not; a flush is sent for each that is not covered.
    #[test]
    fn a_flush_covers_what_was_written_before_it() {
        run(|rt| async move {
            let disk = TestDisk::new(64);
            let gate = Rc::new(FlushGate::new(Disk::new(disk.clone(), rt.clone())));
            assert_eq!((gate.count(), gate.has_failed()), (0, false));
            assert!(gate.is_durable(Tick::default()), "nothing was written");
            assert!(!gate.is_durable(gate.latest()), "what another process wrote may not be durable");
            let (first, second) = (gate.wrote(), gate.wrote());
            assert!(first < second && gate.latest() == second);
            gate.ensure(first).await.unwrap();
            assert!(gate.is_durable(first) && gate.is_durable(second));
            gate.ensure(second).await.unwrap();
            assert_eq!(gate.count(), 1);
            let third = gate.wrote();
            assert!(!gate.is_durable(third) && gate.is_durable(second));
            disk.hold(true);
            let waiting = gate.clone();
            let waiting = rt.spawn(async move { waiting.ensure(third).await });
            disk.held(1, &rt).await;
            let fourth = gate.wrote();
            disk.hold(false);
            waiting.await.unwrap();
            assert!(gate.is_durable(third) && !gate.is_durable(fourth));
            assert_eq!((gate.count(), gate.has_failed()), (2, false));
            disk.fail_flushes(1);
            assert!(gate.ensure(fourth).await.is_err());
            assert!(gate.has_failed() && gate.is_durable(third) && !gate.is_durable(fourth));
            assert_eq!(gate.ensure(third).await, Ok(()), "it was durable before");
            assert_eq!(gate.count(), 3);
        });
    }

    /// Begins to wait for a flush, and drops the future while the flush is under way.
    async fn give_up(disk: &Rc<TestDisk>, gate: &FlushGate, tick: Tick, rt: &io::Handle) {
        disk.hold(true);
        let given_up = std::pin::pin!(gate.ensure(tick));
        let first = io::sync::select(given_up, std::pin::pin!(disk.held(1, rt))).await;
        assert!(matches!(first, io::sync::Either::Right(())));
    }

    /// Regression: a caller that was dropped in the middle of a flush left the flush under way for ever, and every
    /// later caller waited for it.
    #[test]
    fn a_flush_whose_caller_is_dropped_ends() {
        run(|rt| async move {
            let disk = TestDisk::new(64);
            let gate = Rc::new(FlushGate::new(Disk::new(disk.clone(), rt.clone())));
            let tick = gate.wrote();
            give_up(&disk, &gate, tick, &rt).await;
            disk.hold(false);
            assert_eq!(gate.ensure(tick).await, Ok(()));
            assert_eq!(gate.count(), 1);
        });
    }

    /// Regression: the caller of a failed flush was dropped, so the error was lost. The next flush succeeded, and data
    /// that the device had dropped was acknowledged.
    #[test]
    fn a_failed_flush_whose_caller_is_dropped_stays_failed() {
        run(|rt| async move {
            let disk = TestDisk::new(64);
            let gate = Rc::new(FlushGate::new(Disk::new(disk.clone(), rt.clone())));
            let tick = gate.wrote();
            disk.fail_flushes(1);
            give_up(&disk, &gate, tick, &rt).await;
            disk.hold(false);
            assert!(gate.ensure(tick).await.is_err());
            assert_eq!(gate.count(), 1);
        });
    }

    #[test]
    fn a_failed_flush_stays_failed() {
        run(|rt| async move {
            let disk = TestDisk::new(64);
            let gate = FlushGate::new(Disk::new(disk.clone(), rt));
            let t = gate.wrote();
            disk.fail_flushes(1);
            assert!(gate.ensure(t).await.is_err());
            assert!(gate.ensure(t).await.is_err(), "the device would say yes now, but the data may be gone");
            assert_eq!(gate.count(), 1);
        });
    }
}
