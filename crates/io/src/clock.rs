//! Where time comes from, and the time of one turn of the driver.

use std::cell::Cell;
use std::rc::Rc;

use crate::timer::Nanos;

/// Where time comes from.
pub trait Clock {
    /// The monotonic time.
    fn now(&self) -> Nanos;

    /// Seconds since 1970, for time stamps in superblocks.
    fn wall_seconds(&self) -> u64;
}

/// The clock, and its time in this turn, if it was read.
pub(crate) struct TurnClock {
    clock: Rc<dyn Clock>,
    turn: Cell<Option<Nanos>>,
}

impl TurnClock {
    pub(crate) fn new(clock: Rc<dyn Clock>) -> TurnClock {
        TurnClock { clock, turn: Cell::new(None) }
    }

    /// The time of the clock now.
    pub(crate) fn now(&self) -> Nanos {
        self.clock.now()
    }

    /// Seconds since 1970.
    pub(crate) fn wall_seconds(&self) -> u64 {
        self.clock.wall_seconds()
    }

    /// The next look at the time of the turn reads the clock again.
    pub(crate) fn end_turn(&self) {
        self.turn.set(None);
    }

    /// The time of this turn of the driver: the clock is read once.
    pub(crate) fn turn_time(&self) -> Nanos {
        match self.turn.get() {
            Some(now) => now,
            None => {
                let now = self.clock.now();
                self.turn.set(Some(now));
                now
            }
        }
    }
}
