//! Whether data that was read from the cache device may be believed.
//!
//! Owns the number that tells two moments apart. What reads cached data takes the [`Turn`] before it looks the key up, and
//! again when the data is there. If the two differ, the data may be zeros of a wipe, or what was there before the device
//! lost its volatile cache: it looks the key up again, and finds out whether the set has failed.

use std::cell::Cell;

use super::Core;

/// A moment; between two different ones dead sectors may have been overwritten, or the cache device may have failed.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Turn {
    number: u64,
    /// The device failed a flush, and the set may not know it yet: tasks that wait for the flush run one after the other.
    flush_failed: bool,
}

/// The number of the turn.
#[derive(Default)]
pub(crate) struct Turns(Cell<u64>);

impl Turns {
    /// Makes every read of cached data that is under way look its key up again.
    pub(crate) fn next(&self) {
        self.0.set(self.0.get() + 1);
    }
}

impl Core {
    /// The turn of this moment.
    pub(crate) fn turn(&self) -> Turn {
        Turn { number: self.turns.0.get(), flush_failed: self.gate.has_failed() }
    }
}

#[cfg(test)]
mod tests {
    use io::Op;

    use crate::set::SetOptions;
    use crate::testing::{Watching, open_set, run};

    #[test]
    fn moments_differ_after_each_turn_and_after_a_failed_flush() {
        run(|rt| async move {
            let device = Watching::new(1024 * 16);
            let core = open_set(&device, &rt, (16, false), SetOptions::default()).await.core;
            let first = core.turn();
            assert_eq!(core.turn(), first);
            core.turns.next();
            let second = core.turn();
            core.turns.next();
            let third = core.turn();
            assert!(first != second && second != third && third != first);
            assert_eq!(core.turn(), third);
            device.refuses.set(|r| (r.op == Op::Flush).then_some(5));
            assert!(core.gate.ensure(core.gate.wrote()).await.is_err());
            assert!(core.turn() != third, "nobody has told the set yet");
        });
    }
}
