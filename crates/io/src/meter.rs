//! Figures of the requests to a device: count, bytes, latency and failures.
//!
//! Owns the figures of one device and the trace of its requests. A request is measured when the device answers it, not
//! when its waiter takes the answer: a task that waits for many requests takes some answers late.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use format::{Sector, Sectors};

use crate::histogram::Histogram;
use crate::request::{IoError, Op, Request};
use crate::timer::Nanos;
use crate::trace::Trace;

/// Requests of one kind to a device.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct OpFigures {
    /// Bytes of the requests that succeeded.
    pub bytes: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Latency of each request, failed ones included.
    pub latency: Histogram,
}

/// Figures of the requests to a device since it was opened.
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

/// The requests to a device that it has not answered.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct InFlight {
    /// Number of the requests.
    pub requests: u64,
    /// Age of the oldest one.
    pub oldest: Nanos,
}

/// The figures of a device in use.
#[derive(Default)]
pub(crate) struct Meter {
    figures: RefCell<DeviceFigures>,
    trace: Trace,
    is_given_up: Cell<bool>,
}

impl Meter {
    pub(crate) fn figures(&self) -> DeviceFigures {
        *self.figures.borrow()
    }

    pub(crate) fn trace(&self) -> &Trace {
        &self.trace
    }

    /// Whether the device gets no requests any more, because it does not answer.
    pub(crate) fn is_given_up(&self) -> bool {
        self.is_given_up.get()
    }

    pub(crate) fn give_up(&self) {
        self.is_given_up.set(true);
    }

    fn answered(&self, request: &Pending, now: Nanos, failed: bool) {
        let figures = &mut *self.figures.borrow_mut();
        let op = match request.op {
            Op::Read => &mut figures.reads,
            Op::Write { .. } | Op::WriteZeroes { .. } => &mut figures.writes,
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
    sector: Sector,
    bytes: u64,
    began: Nanos,
}

/// A request in flight and the meter that counts it.
pub(crate) struct Measured {
    meter: std::rc::Rc<Meter>,
    request: Pending,
}

impl Measured {
    pub(crate) fn begin(meter: std::rc::Rc<Meter>, request: &Request, now: Nanos) -> Measured {
        let request =
            Pending { op: request.op, sector: request.sector, bytes: request.sectors.bytes(), began: now };
        Measured { meter, request }
    }

    /// The start of the request, if it is one of this meter.
    pub(crate) fn began_at(&self, meter: &std::rc::Rc<Meter>) -> Option<Nanos> {
        std::rc::Rc::ptr_eq(&self.meter, meter).then_some(self.request.began)
    }

    /// The error of the request if it is given up, if it is one of this meter. `device`: the name of the device.
    pub(crate) fn given_up(&self, meter: &std::rc::Rc<Meter>, device: &Arc<str>) -> Option<IoError> {
        let Pending { op, sector, bytes, .. } = self.request;
        std::rc::Rc::ptr_eq(&self.meter, meter)
            .then(|| IoError::given_up(device, op, (sector, Sectors::from_bytes_floor(bytes))))
    }

    pub(crate) fn end(&self, now: Nanos, failed: bool) {
        self.meter.answered(&self.request, now, failed);
    }
}
