//! What the requests to a device amount to: how many, how large, how long, how many failed.
//!
//! Owns the figures of one device. They are taken where a request is answered, not where somebody looks at the answer:
//! who waits for many requests looks at the last ones late. A trace of the requests is kept beside them.

use std::cell::RefCell;

use crate::histogram::Histogram;
use crate::request::{Op, Request};
use crate::timer::Nanos;
use crate::trace::Trace;

/// Requests of one kind to a device.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct OpFigures {
    /// Bytes of the requests that succeeded.
    pub bytes: u64,
    /// Requests that failed.
    pub errors: u64,
    /// How long each took, failed ones too.
    pub latency: Histogram,
}

/// Counts of the requests to a device since it was opened.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct DeviceFigures {
    /// Reads.
    pub reads: OpFigures,
    /// Writes, and writes of zeros.
    pub writes: OpFigures,
    /// Flushes.
    pub flushes: OpFigures,
    /// Discards.
    pub discards: OpFigures,
}

impl DeviceFigures {
    /// Each kind with its name.
    pub fn ops(&self) -> [(&'static str, &OpFigures); 4] {
        [
            ("read", &self.reads),
            ("write", &self.writes),
            ("flush", &self.flushes),
            ("discard", &self.discards),
        ]
    }
}

/// The figures of a device in use.
#[derive(Default)]
pub(crate) struct Meter {
    figures: RefCell<DeviceFigures>,
    trace: Trace,
}

impl Meter {
    pub(crate) fn figures(&self) -> DeviceFigures {
        *self.figures.borrow()
    }

    pub(crate) fn trace(&self) -> &Trace {
        &self.trace
    }

    fn answered(&self, request: &Pending, now: Nanos, failed: bool) {
        let figures = &mut *self.figures.borrow_mut();
        let op = match request.op {
            Op::Read => &mut figures.reads,
            Op::Write { .. } | Op::WriteZeroes => &mut figures.writes,
            Op::Flush => &mut figures.flushes,
            Op::Discard => &mut figures.discards,
        };
        op.latency.record(now.since(request.began));
        if failed {
            op.errors += 1;
        } else {
            op.bytes = op.bytes.saturating_add(request.bytes);
        }
    }
}

struct Pending {
    op: Op,
    bytes: u64,
    began: Nanos,
}

/// A request under way and where it is counted.
pub(crate) struct Measured {
    meter: std::rc::Rc<Meter>,
    request: Pending,
}

impl Measured {
    pub(crate) fn begin(meter: std::rc::Rc<Meter>, request: &Request, now: Nanos) -> Measured {
        let request = Pending { op: request.op, bytes: request.sectors.bytes(), began: now };
        Measured { meter, request }
    }

    pub(crate) fn end(&self, now: Nanos, failed: bool) {
        self.meter.answered(&self.request, now, failed);
    }
}
