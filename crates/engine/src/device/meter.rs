//! Requests of data to a device, as its cost model sees them.
//!
//! Owns the model of one device in use. A request counts from the moment that it is sent until its answer is looked at,
//! which is the driver's next turn. Must not know what the costs are used for.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use format::{Sector, Sectors};
use io::{Buffer, Completion, Disk, Handle, IoFuture};

use crate::policy::cost::{CostModel, Costs, Observed};

/// The model of a device. See the module head.
pub(crate) struct Meter {
    rt: Handle,
    model: RefCell<CostModel>,
}

impl Meter {
    pub(crate) fn new(disk: &Disk) -> Rc<Meter> {
        let model = CostModel::new(Costs::usual(disk.info().rotational));
        Rc::new(Meter { rt: disk.runtime().clone(), model: RefCell::new(model) })
    }

    /// What `read` finds in the model.
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

    /// The device is busy with something that is no request for data until the guard is dropped: a flush.
    pub(crate) fn busy(self: &Rc<Self>) -> Busy {
        Busy(self.begin(Sector(0), Sectors::ZERO))
    }
}

/// A request that the model knows about.
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

/// A request that the model knows about, to be awaited.
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
