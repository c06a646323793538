//! What the operator should know, until somebody asks.
//!
//! Owns a queue with an end. Invariant: failing requests, of which there may be thousands in a moment, never push out anything
//! else.

use std::cell::RefCell;
use std::collections::VecDeque;

use format::{BucketNr, Gen};
use io::sync::Event;

/// Something that the operator should know. The shells log these.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SetEvent {
    /// The last set of a btree node was torn by a crash and has been dropped; the journal has its keys.
    TornSet {
        /// Bucket of the node.
        bucket: BucketNr,
        /// Its generation.
        generation: Gen,
        /// What was wrong with the set.
        what: String,
    },
    /// The journal was replayed.
    Replayed {
        /// Entries.
        entries: u64,
        /// Keys in them.
        keys: u64,
    },
    /// The set was initialised: it had never been used.
    Initialised,
    /// The set has been disabled.
    Failed {
        /// Why.
        why: String,
    },
    /// The crash log does not count any more: if this process is killed, writes that were answered and not flushed are lost.
    CrashLogInvalid {
        /// What the cache device failed.
        why: String,
    },
    /// A device failed a request.
    DeviceError {
        /// What failed.
        what: String,
    },
    /// A backing device changed its state.
    State {
        /// Name of the backing device.
        device: String,
        /// The new state, in the kernel's words.
        state: &'static str,
    },
    /// A backing device does not answer a flush: copies of its data are dropped from the cache instead of being waited for.
    FlushOverdue {
        /// Name of the backing device.
        device: String,
    },
    /// A backing device failed too often: every request for it fails until the next start.
    GivenUp {
        /// Name of the backing device.
        device: String,
        /// How often.
        errors: u64,
    },
}

/// Most events that wait.
const MOST: usize = 1024;

/// Events that nobody has asked for yet, the oldest first.
#[derive(Default)]
pub(crate) struct Events {
    queue: RefCell<VecDeque<SetEvent>>,
    arrived: Event,
}

impl Events {
    /// Adds one. If there are too many, the oldest failed request goes.
    pub(crate) fn push(&self, event: SetEvent) {
        {
            let events = &mut *self.queue.borrow_mut();
            if events.len() >= MOST {
                let failure = events.iter().position(|e| matches!(e, SetEvent::DeviceError { .. }));
                events.remove(failure.unwrap_or(0));
            }
            events.push_back(event);
        }
        self.arrived.notify_all();
    }

    /// Waits until there is one.
    pub(crate) async fn arrived(&self) {
        self.arrived.wait_until(|| !self.queue.borrow().is_empty()).await;
    }

    /// All of them.
    pub(crate) fn take(&self) -> Vec<SetEvent> {
        self.queue.borrow_mut().drain(..).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;
    use crate::testing::run;

    #[test]
    fn whoever_waits_is_told_of_the_first_event() {
        run(|rt| async move {
            let events = Rc::new(Events::default());
            let arrived = || {
                let events = events.clone();
                rt.spawn(async move { events.arrived().await })
            };
            let waits = arrived();
            for _ in 0..5 {
                rt.yield_now().await;
            }
            assert!(waits.try_take().is_none(), "nothing has happened");
            events.push(SetEvent::Initialised);
            waits.await;
            arrived().await;
            assert_eq!(events.take(), [SetEvent::Initialised]);
            let again = arrived();
            rt.yield_now().await;
            assert!(again.try_take().is_none(), "it was taken");
        });
    }

    /// A device was given up in the middle of a flood of errors, and the flood had washed the message away.
    #[test]
    fn a_flood_of_failures_leaves_what_else_happened() {
        let events = Events::default();
        let given_up = SetEvent::GivenUp { device: "hdd".into(), errors: 64 };
        let failure = |n: usize| SetEvent::DeviceError { what: n.to_string() };
        for n in 0..10 * MOST {
            if n == 64 {
                events.push(given_up.clone());
            }
            events.push(failure(n));
        }
        let all = events.take();
        assert_eq!(all.len(), MOST);
        assert_eq!(all.iter().filter(|e| **e == given_up).count(), 1);
        assert_eq!(all.last(), Some(&failure(10 * MOST - 1)));
        assert!(events.take().is_empty());

        let given_up = |n: usize| SetEvent::GivenUp { device: n.to_string(), errors: 64 };
        (0..2 * MOST).for_each(|n| events.push(given_up(n)));
        assert_eq!(events.take(), (MOST..2 * MOST).map(given_up).collect::<Vec<_>>());
    }
}
