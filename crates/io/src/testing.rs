//! A runtime for the unit tests of this crate, on a clock that the test advances.

use std::cell::Cell;
use std::rc::Rc;

use crate::{Clock, Fifo, Handle, Nanos, Runtime};

struct ByHand(Rc<Cell<u64>>);

impl Clock for ByHand {
    fn now(&self) -> Nanos {
        Nanos(self.0.get())
    }

    fn wall_seconds(&self) -> u64 {
        0
    }
}

/// A runtime that is driven by the test.
pub(crate) struct Bench {
    pub(crate) rt: Handle,
    /// Runs everything that is ready.
    pub(crate) step: Box<dyn Fn()>,
    /// Moves the clock to the next timer and fires it; false if there is none.
    pub(crate) advance: Box<dyn Fn() -> bool>,
    /// The clock, in nanoseconds.
    pub(crate) now: Rc<Cell<u64>>,
}

pub(crate) fn bench() -> Bench {
    let now = Rc::new(Cell::new(0));
    let runtime = Rc::new(Runtime::new(Rc::new(ByHand(now.clone())), 1));
    let rt = runtime.handle();
    let (stepping, advancing, clock) = (runtime.clone(), runtime, now.clone());
    Bench {
        rt,
        step: Box::new(move || {
            stepping.run(&mut Fifo, usize::MAX);
        }),
        advance: Box::new(move || {
            let Some(next) = advancing.next_deadline() else { return false };
            clock.set(next.0);
            advancing.fire_timers();
            true
        }),
        now,
    }
}

impl Handle {
    pub(crate) fn clear_for_test(&self) {
        self.executor_for_test().clear();
    }

    pub(crate) fn live_for_test(&self) -> usize {
        self.executor_for_test().live_tasks()
    }
}
