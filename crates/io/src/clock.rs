//! The source of time, and the time of one turn of the driver.

use std::cell::Cell;
use std::rc::Rc;

use crate::timer::Nanos;

/// A source of time.
pub trait Clock {
    /// The monotonic time.
    fn now(&self) -> Nanos;

    /// Seconds since 1970-01-01 UTC, for time stamps in superblocks.
    fn wall_seconds(&self) -> u64;
}

/// The clock, and its time in this turn if it was read in this turn.
pub(crate) struct TurnClock {
    clock: Rc<dyn Clock>,
    turn: Cell<Option<Nanos>>,
}

impl TurnClock {
    pub(crate) fn new(clock: Rc<dyn Clock>) -> TurnClock {
        TurnClock { clock, turn: Cell::new(None) }
    }

    /// Reads the clock.
    pub(crate) fn now(&self) -> Nanos {
        self.clock.now()
    }

    /// Seconds since 1970-01-01 UTC.
    pub(crate) fn wall_seconds(&self) -> u64 {
        self.clock.wall_seconds()
    }

    /// Ends the turn; the next call of `turn_time` reads the clock again.
    pub(crate) fn end_turn(&self) {
        self.turn.set(None);
    }

    /// The time of this turn of the driver. The first call in a turn reads the clock.
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
