//! Measurement of the costs of a device's requests, by its cost model.
//!
//! Owns the cost model of one device. A request counts as in flight from the moment at which it is sent until its
//! completion is polled, in the next turn of the driver. Must not know what the costs are used for.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use format::{Sector, Sectors};
use io::{Buffer, Completion, Disk, Handle, IoFuture};

use crate::policy::cost::{CostModel, Costs, Observed};

/// Measures the costs of the requests of one device.
pub(crate) struct Meter {
    rt: Handle,
    model: RefCell<CostModel>,
}

impl Meter {
    pub(crate) fn new(disk: &Disk) -> Rc<Meter> {
        let model = CostModel::new(Costs::usual(disk.info().rotational));
        Rc::new(Meter { rt: disk.runtime().clone(), model: RefCell::new(model) })
    }

    /// Calls `read` with the cost model.
    pub(crate) fn model<T>(&self, read: impl FnOnce(&CostModel) -> T) -> T {
        read(&self.model.borrow())
    }

    fn begin(self: &Rc<Self>, start: Sector, sectors: Sectors) -> MeterGuard {
        let observed = self.model.borrow_mut().begin(start, sectors, self.rt.turn_time());
        MeterGuard { meter: self.clone(), observed: Some(observed) }
    }

    /// Starts a read of `disk`, the device of this meter.
    pub(crate) fn read(
        self: &Rc<Self>,
        disk: &Disk,
        start: Sector,
        sectors: Sectors,
        buffer: Buffer,
        offset_bytes: usize,
    ) -> MeteredIo {
        let guard = self.begin(start, sectors);
        MeteredIo { future: disk.start_read(start, sectors, buffer, offset_bytes), guard }
    }

    /// Starts a write to `disk`, the device of this meter.
    pub(crate) fn write(
        self: &Rc<Self>,
        disk: &Disk,
        (start, sectors): (Sector, Sectors),
        buffer: Buffer,
        offset_bytes: usize,
        fua: bool,
    ) -> MeteredIo {
        let guard = self.begin(start, sectors);
        MeteredIo { future: disk.start_write(start, sectors, buffer, offset_bytes, fua), guard }
    }

    /// Makes the device count as busy until the guard is dropped, for a flush, which is not a request for data.
    pub(crate) fn busy(self: &Rc<Self>) -> BusyGuard {
        BusyGuard(self.begin(Sector(0), Sectors::ZERO))
    }
}

/// Counts a request in the model until it is dropped.
struct MeterGuard {
    meter: Rc<Meter>,
    observed: Option<Observed>,
}

impl MeterGuard {
    fn end(&mut self, well: bool) {
        if let Some(observed) = self.observed.take() {
            let model = &mut *self.meter.model.borrow_mut();
            match well {
                true => model.end(observed, self.meter.rt.turn_time()),
                false => model.cancel(observed),
            }
        }
    }
}

impl Drop for MeterGuard {
    fn drop(&mut self) {
        self.end(false);
    }
}

/// See [`Meter::busy`].
pub(crate) struct BusyGuard(MeterGuard);

impl Drop for BusyGuard {
    fn drop(&mut self) {
        self.0.end(true);
    }
}

/// A request whose costs are measured; its future has the result.
#[must_use = "an operation that nobody waits for has no ordering"]
pub(crate) struct MeteredIo {
    future: IoFuture,
    guard: MeterGuard,
}

impl Future for MeteredIo {
    type Output = Completion;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Completion> {
        let done = Pin::new(&mut self.future).poll(cx);
        if let Poll::Ready(completion) = &done {
            self.guard.end(completion.result.is_ok());
        }
        done
    }
}

#[cfg(test)]
mod tests;
