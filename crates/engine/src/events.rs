//! The events for the operator, queued until they are taken.
//!
//! Owns a queue of limited length. Invariant: events of failed requests, of which there may be thousands in a second,
//! never displace other events while the queue has any of them.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;

use format::{BucketNr, Corrupt, Gen, Sector, Sectors};
use io::sync::Event;

use crate::error::EngineError;
use crate::stats::ScrubReport;

/// An event for the operator, which the program logs.
#[derive(Clone, Debug)]
pub enum SetEvent {
    /// The last bset of a btree node was torn by a crash and has been dropped; the journal has its keys.
    TornBset {
        /// Bucket of the node.
        bucket: BucketNr,
        /// Its generation.
        generation: Gen,
        /// The damage of the bset.
        damage: Corrupt,
    },
    /// The journal was replayed.
    Replayed {
        /// The number of entries.
        entries: u64,
        /// The number of keys in them.
        keys: u64,
    },
    /// The set was initialised: it had never been used.
    Initialised,
    /// The set has been disabled.
    Failed {
        /// The reason.
        why: Arc<EngineError>,
    },
    /// The crash log is invalid: if this process is killed, writes that were answered and not flushed are lost.
    CrashLogInvalid {
        /// The failed request to the cache device.
        why: Arc<EngineError>,
    },
    /// A device failed a request.
    DeviceError {
        /// The failed request.
        error: EngineError,
    },
    /// Writeback failed, and tries again later.
    WritebackFailed {
        /// The failed request.
        error: EngineError,
    },
    /// A backing device changed its state.
    State {
        /// Name of the backing device.
        device: String,
        /// The new state, by the kernel's name.
        state: &'static str,
    },
    /// A backing device does not answer a flush: copies of its data are dropped from the cache, so that other devices
    /// need not wait.
    FlushOverdue {
        /// Name of the backing device.
        device: String,
    },
    /// Cached data does not match its checksum. Clean data was dropped from the cache; a read of dirty data fails until
    /// it is overwritten.
    DamagedData {
        /// Label or name of the volume.
        volume: String,
        /// Position on the volume.
        sector: Sector,
        /// The size of the block.
        sectors: Sectors,
        /// Position on the cache device.
        at: Sector,
        /// Whether only the cache had the data.
        dirty: bool,
        /// The checksum of the data that was written.
        expected: u32,
        /// The checksum of the data that was read.
        found: u32,
    },
    /// A damaged block of dirty data was accepted or dropped by the operator.
    DamageResolved {
        /// Label or name of the volume.
        volume: String,
        /// Position on the volume.
        sector: Sector,
        /// The damaged sectors.
        sectors: Sectors,
        /// The decision.
        decision: Resolution,
    },
    /// A scrub has ended.
    Scrubbed {
        /// What it has found.
        report: ScrubReport,
    },
    /// The second set that had the dirty data of a backing device has failed: the data is in one set only.
    CopyLost {
        /// Name of the backing device.
        device: String,
        /// Name of the failed cache device.
        cache: String,
    },
    /// The set of a backing device has failed, and the second one serves the device.
    TookOver {
        /// Name of the backing device.
        device: String,
        /// Name of the cache device of the second set.
        cache: String,
    },
    /// A backing device failed too often: every request for it fails until the next start.
    GivenUp {
        /// Name of the backing device.
        device: String,
        /// The number of failed requests.
        errors: u64,
    },
}

/// The operator's decision about damaged dirty data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Resolution {
    /// The damaged bytes are valid from now on.
    Accepted,
    /// The data was dropped: reads return the older data of the backing device.
    Dropped,
}

impl SetEvent {
    /// Whether the event is that of a failed request, of which there may be thousands in a second.
    pub fn is_failed_request(&self) -> bool {
        matches!(self, SetEvent::DeviceError { .. } | SetEvent::WritebackFailed { .. })
    }
}

/// The largest number of queued events.
const MOST: usize = 1024;

/// Events that were not taken yet, the oldest first.
#[derive(Default)]
pub(crate) struct Events {
    queue: RefCell<VecDeque<SetEvent>>,
    arrived: Event,
}

impl Events {
    /// Adds an event. If the queue is full, the oldest event of a failed request is dropped, or the oldest event if
    /// there is none.
    pub(crate) fn push(&self, event: SetEvent) {
        {
            let events = &mut *self.queue.borrow_mut();
            if events.len() >= MOST {
                let failure = events.iter().position(SetEvent::is_failed_request);
                events.remove(failure.unwrap_or(0));
            }
            events.push_back(event);
        }
        self.arrived.notify_all();
    }

    /// Waits until there is an event.
    pub(crate) async fn arrived(&self) {
        self.arrived.wait_until(|| !self.queue.borrow().is_empty()).await;
    }

    /// Takes all events.
    pub(crate) fn take(&self) -> Vec<SetEvent> {
        self.queue.borrow_mut().drain(..).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;
    use crate::refusal::Refusal;
    use crate::testing::run;

    #[test]
    fn the_first_event_ends_a_wait() {
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
            assert!(matches!(events.take().as_slice(), [SetEvent::Initialised]));
            let again = arrived();
            rt.yield_now().await;
            assert!(again.try_take().is_none(), "it was taken");
        });
    }

    /// Regression: a device was disabled during thousands of failed requests, whose events displaced the event of the
    /// disabled device.
    #[test]
    fn a_flood_of_failures_leaves_what_else_happened() {
        let events = Events::default();
        let given_up = SetEvent::GivenUp { device: "hdd".into(), errors: 64 };
        let refusal = |n: usize| Refusal::IoDisabled { volume: n.to_string() };
        let failure = |n: usize| SetEvent::DeviceError { error: refusal(n).into() };
        let text = |e: &SetEvent| format!("{e:?}");
        for n in 0..10 * MOST {
            if n == 64 {
                events.push(given_up.clone());
            }
            events.push(failure(n));
        }
        let all = events.take();
        assert_eq!(all.len(), MOST);
        assert_eq!(all.iter().filter(|e| matches!(e, SetEvent::GivenUp { .. })).count(), 1);
        assert_eq!(all.last().map(text), Some(text(&failure(10 * MOST - 1))));
        assert!(events.take().is_empty());

        let given_up = |n: usize| SetEvent::GivenUp { device: n.to_string(), errors: 64 };
        (0..2 * MOST).for_each(|n| events.push(given_up(n)));
        let expected: Vec<_> = (MOST..2 * MOST).map(|n| text(&given_up(n))).collect();
        assert_eq!(events.take().iter().map(text).collect::<Vec<_>>(), expected);
    }
}
