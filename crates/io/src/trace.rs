//! A trace of the requests that are sent to a device, recorded while a reader has a lease.
//!
//! Owns a ring of the latest requests of one device. Each call of a reader extends the recording by the reader's lease.
//! Without a lease, a request costs one comparison and the ring takes no memory. Must not know the readers.
//!
//! Invariants: at most [`TRACE_REQUESTS`] are kept; numbers count up by one without a gap, so that a reader knows how
//! many requests it missed since its last call.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

use format::{Sector, Sectors};

use crate::request::{Op, Request};
use crate::timer::Nanos;

/// Number of requests that are kept.
pub const TRACE_REQUESTS: usize = 8192;

/// The purpose of a request.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Purpose {
    /// A client waits for it.
    #[default]
    Client,
    /// Dirty data is written back.
    Writeback,
    /// A superblock or other metadata is read or written.
    Metadata,
}

/// A request as it was sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Traced {
    /// Time of submission, by the clock of the runtime.
    pub at: Nanos,
    /// The operation.
    pub op: Op,
    /// The purpose.
    pub purpose: Purpose,
    /// First sector on the device; zero for a flush.
    pub sector: Sector,
    /// Length; zero for a flush.
    pub sectors: Sectors,
}

/// The requests since an earlier call.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct TraceFigures {
    /// Time of the call, by the clock of the runtime.
    pub now: Nanos,
    /// Number of the next request: the parameter of the next call.
    pub next: u64,
    /// Number of requests since the earlier call that are not kept any more.
    pub missed: u64,
    /// The requests that are still kept, oldest first.
    pub requests: Vec<Traced>,
}

/// A ring of the latest requests of one device.
#[derive(Default)]
pub(crate) struct Trace {
    /// The trace stops recording at this time.
    until: Cell<Nanos>,
    ring: RefCell<VecDeque<Traced>>,
    /// Number of requests recorded since the device was opened.
    recorded: Cell<u64>,
}

impl Trace {
    /// Whether the trace records. This is the only check for each request.
    pub(crate) fn is_on(&self) -> bool {
        self.until.get() != Nanos(0)
    }

    /// Records a request; if the lease has ended, stops recording and frees the ring instead.
    pub(crate) fn record(&self, request: &Request, purpose: Purpose, now: Nanos) {
        let ring = &mut *self.ring.borrow_mut();
        if now >= self.until.get() {
            self.until.set(Nanos(0));
            *ring = VecDeque::new();
            return;
        }
        if ring.len() >= TRACE_REQUESTS {
            ring.pop_front();
        }
        let Request { op, sector, sectors, .. } = *request;
        ring.push_back(Traced { at: now, op, purpose, sector, sectors });
        self.recorded.set(self.recorded.get() + 1);
    }

    /// Requests from the number `since` on. The trace records further requests until `lease` has passed.
    pub(crate) fn requests_since(&self, since: u64, now: Nanos, lease: Nanos) -> TraceFigures {
        self.until.set(self.until.get().max(now.after(lease)));
        let ring = self.ring.borrow();
        let next = self.recorded.get();
        let first = next - ring.len() as u64;
        // A larger number is from an earlier trace, of a device that was closed since then.
        let since = if since > next { first } else { since };
        let skip = usize::try_from(since.saturating_sub(first)).unwrap_or(usize::MAX);
        TraceFigures {
            now,
            next,
            missed: first.saturating_sub(since),
            requests: ring.iter().skip(skip).copied().collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn send(trace: &Trace, n: u64, purpose: Purpose, now: u64) {
        let (sector, sectors) = (Sector(n), Sectors(8));
        let request = Request { op: Op::Read, sector, sectors, buffer: None, buffer_offset_bytes: 0 };
        if trace.is_on() {
            trace.record(&request, purpose, Nanos(now));
        }
    }

    #[test]
    fn only_what_is_looked_at_is_recorded() {
        let trace = Trace::default();
        send(&trace, 1, Purpose::Client, 5);
        let begin = trace.requests_since(0, Nanos(10), Nanos(100));
        assert_eq!((begin.next, begin.missed, begin.requests.len()), (0, 0, 0));
        send(&trace, 2, Purpose::Writeback, 20);
        send(&trace, 3, Purpose::Client, 30);
        let all = trace.requests_since(begin.next, Nanos(40), Nanos(100));
        let second = Traced {
            at: Nanos(20),
            op: Op::Read,
            purpose: Purpose::Writeback,
            sector: Sector(2),
            sectors: Sectors(8),
        };
        assert_eq!((all.next, all.requests.len(), all.requests[0]), (2, 2, second));
        assert_eq!(trace.requests_since(all.next, Nanos(50), Nanos(1)).requests, []);
        // The lease that ends last counts.
        send(&trace, 4, Purpose::Client, 139);
        assert_eq!(trace.ring.borrow().len(), 3);
        send(&trace, 5, Purpose::Client, 140);
        assert!(!trace.is_on() && trace.ring.borrow().capacity() == 0, "nobody looks, and it costs nothing");
        let late = trace.requests_since(2, Nanos(200), Nanos(100));
        assert_eq!((late.next, late.missed, late.requests.len()), (3, 1, 0));
        assert_eq!(trace.requests_since(77, Nanos(200), Nanos(100)).missed, 0, "a number of another device");
    }

    #[test]
    fn the_oldest_are_forgotten_and_counted() {
        let trace = Trace::default();
        trace.requests_since(0, Nanos(0), Nanos(u64::MAX));
        for n in 0..TRACE_REQUESTS as u64 + 10 {
            send(&trace, n, Purpose::Client, n);
        }
        let seen = trace.requests_since(0, Nanos(0), Nanos(1));
        assert_eq!((seen.missed, seen.requests.len()), (10, TRACE_REQUESTS));
        assert_eq!(seen.requests[0].sector, Sector(10));
        let rest = trace.requests_since(seen.next - 1, Nanos(0), Nanos(1));
        assert_eq!((rest.missed, rest.requests.len()), (0, 1));
    }
}
