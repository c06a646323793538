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

    fn begin(self: &Rc<Self>, start: Sector, sectors: Sectors) -> Watch {
        let observed = self.model.borrow_mut().begin(start, sectors, self.rt.turn_time());
        Watch { meter: self.clone(), observed: Some(observed) }
    }

    /// Starts a read of `disk`, the device of this meter.
    pub(crate) fn read(
        self: &Rc<Self>,
        disk: &Disk,
        start: Sector,
        sectors: Sectors,
        buffer: Buffer,
        offset_bytes: usize,
    ) -> Watched {
        let watch = self.begin(start, sectors);
        Watched { future: disk.start_read(start, sectors, buffer, offset_bytes), watch }
    }

    /// Starts a write to `disk`, the device of this meter.
    pub(crate) fn write(
        self: &Rc<Self>,
        disk: &Disk,
        (start, sectors): (Sector, Sectors),
        buffer: Buffer,
        offset_bytes: usize,
        fua: bool,
    ) -> Watched {
        let watch = self.begin(start, sectors);
        Watched { future: disk.start_write(start, sectors, buffer, offset_bytes, fua), watch }
    }

    /// Makes the device count as busy until the guard is dropped, for a flush, which is not a request for data.
    pub(crate) fn busy(self: &Rc<Self>) -> Busy {
        Busy(self.begin(Sector(0), Sectors::ZERO))
    }
}

/// Counts a request in the model until it is dropped.
struct Watch {
    meter: Rc<Meter>,
    observed: Option<Observed>,
}

impl Watch {
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

impl Drop for Watch {
    fn drop(&mut self) {
        self.end(false);
    }
}

/// See [`Meter::busy`].
pub(crate) struct Busy(Watch);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.end(true);
    }
}

/// A request whose costs are measured; its future has the result.
#[must_use = "an operation that nobody waits for has no ordering"]
pub(crate) struct Watched {
    future: IoFuture,
    watch: Watch,
}

impl Future for Watched {
    type Output = Completion;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Completion> {
        let done = Pin::new(&mut self.future).poll(cx);
        if let Poll::Ready(completion) = &done {
            self.watch.end(completion.result.is_ok());
        }
        done
    }
}

#[cfg(test)]
mod tests;
