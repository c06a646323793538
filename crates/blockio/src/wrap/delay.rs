//! A device whose requests take a fixed time at least. Any number of requests run at the same time.
//!
//! The wrapper starts a request at once, and answers it when both the request and its time have ended. So the order of effects
//! is that of the inner device.
//!
//! Owns the delays of requests. Must not know what requests are for.

use std::rc::Rc;

use ::io::{Completer, Device, DeviceInfo, Disk, Handle, Nanos, Op, Request};

/// How long requests take.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Delays {
    /// Reads.
    pub read: Nanos,
    /// Writes, discards and write-zeroes.
    pub write: Nanos,
    /// Flushes; also the additional time of a durable write.
    pub flush: Nanos,
}

/// A device whose requests take at least the times of [`Delays`].
pub struct DelayDisk {
    inner: Disk,
    delays: Delays,
}

impl DelayDisk {
    /// Delays the requests of `inner`; `rt` keeps the time.
    pub fn new(inner: Rc<dyn Device>, rt: Handle, delays: Delays) -> DelayDisk {
        DelayDisk { inner: Disk::new(inner, rt), delays }
    }
}

impl Device for DelayDisk {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn submit(&self, request: Request, completer: Completer) {
        let delay = match request.op {
            Op::Read => self.delays.read,
            Op::Write { fua: true } => self.delays.write.after(self.delays.flush),
            Op::Write { fua: false } | Op::Discard | Op::WriteZeroes { .. } => self.delays.write,
            Op::Flush => self.delays.flush,
        };
        let rt = self.inner.runtime();
        let over = rt.sleep(delay);
        let inner = self.inner.start(request);
        rt.spawn(async move {
            over.await;
            let done = inner.await;
            completer.complete(done.result, done.buffer);
        });
    }
}
