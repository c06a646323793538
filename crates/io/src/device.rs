//! The device trait, and the handle through which the engine uses a device.
//!
//! Must not know how a device is implemented. Every implementation keeps this contract (`blockio` and `sim` run
//! the conformance suite against theirs):
//!
//! * `submit` never blocks and never calls back into the caller while the caller holds borrows. It may
//!   complete at once, which only marks the waiter ready.
//! * A write is durable after a flush that was submitted after the write completed, or at its own
//!   completion if it carries `fua`. Nothing else is durable; writes may reach the medium in any order.
//! * A read that starts after a write completed returns that write.
//! * Positions and lengths are multiples of `logical_block_bytes` and inside the device; anything else
//!   is refused with `EINVAL`. Buffers are large enough or the request is refused.
//! * The implementation handles short transfers, `EINTR` and `EAGAIN` itself.

use std::rc::Rc;

use format::{SECTOR_BYTES, Sector, Sectors};

use crate::buffer::Buffer;
use crate::completion::{Completer, IoFuture};
use crate::meter::{DeviceFigures, InFlight, Meter};
use crate::request::{DeviceInfo, IoError, Op, Request};
use crate::runtime::Handle;
use crate::timer::Nanos;
use crate::trace::{Purpose, TraceFigures};

/// A block device. Every implementation keeps the contract at the head of this module.
pub trait Device {
    /// Properties of the device.
    fn info(&self) -> &DeviceInfo;

    /// Starts `request`; the outcome goes to `completer`.
    fn submit(&self, request: Request, completer: Completer);
}

/// The engine's handle of a device: the device, and the runtime whose tasks wait for it.
#[derive(Clone)]
pub struct Disk {
    device: Rc<dyn Device>,
    rt: Handle,
    meter: Rc<Meter>,
    purpose: Purpose,
}

impl Disk {
    /// Wraps a device for use by tasks of `rt`.
    pub fn new(device: Rc<dyn Device>, rt: Handle) -> Disk {
        Disk { device, rt, meter: Rc::default(), purpose: Purpose::default() }
    }

    /// Counts of the requests through this handle and all its clones.
    pub fn figures(&self) -> DeviceFigures {
        self.meter.figures()
    }

    /// The requests through this handle and all its clones that the device has not answered. It costs requests nothing; a call
    /// reads the table of all requests of the thread.
    pub fn in_flight(&self) -> InFlight {
        self.rt.completions().in_flight(&self.meter, self.rt.now())
    }

    /// A handle of the same disk whose requests have another purpose. Only traces show the purpose.
    #[must_use]
    pub fn with_purpose(&self, purpose: Purpose) -> Disk {
        Disk { purpose, ..self.clone() }
    }

    /// Requests that were started through any clone of this handle, from the number `since` on.
    ///
    /// Requests are recorded from a call of this function until `lease` after it.
    pub fn trace(&self, since: u64, lease: Nanos) -> TraceFigures {
        self.meter.trace().requests_since(since, self.rt.now(), lease)
    }

    /// Properties of the device.
    pub fn info(&self) -> &DeviceInfo {
        self.device.info()
    }

    /// The runtime whose tasks may wait on this disk.
    pub fn runtime(&self) -> &Handle {
        &self.rt
    }

    /// Starts any request.
    pub fn start(&self, request: Request) -> IoFuture {
        let trace = self.meter.trace();
        if trace.is_on() {
            trace.record(&request, self.purpose, self.rt.turn_time());
        }
        let (completer, future) = self.rt.completions().start(self.meter.clone(), &request);
        if self.meter.is_given_up() {
            let Request { op, sector, sectors, buffer, .. } = request;
            let error = IoError::given_up(&self.info().name, op, (sector, sectors));
            completer.complete(Err(error), buffer);
            return future;
        }
        self.device.submit(request, completer);
        future
    }

    /// Answers the requests through this handle and all its clones with errors, those under way and all later ones, because the device
    /// does not answer. A request that the device carries out after all may still change the device, and its buffer belongs to it until
    /// then.
    pub fn give_up(&self) {
        self.meter.give_up();
        self.rt.completions().give_up(&self.meter, &self.info().name);
    }

    /// Starts a read of `sectors` at `sector` into `buffer` from byte `offset_bytes` on.
    pub fn start_read(
        &self,
        sector: Sector,
        sectors: Sectors,
        buffer: Buffer,
        offset_bytes: usize,
    ) -> IoFuture {
        self.start(Request {
            op: Op::Read,
            sector,
            sectors,
            buffer: Some(buffer),
            buffer_offset_bytes: offset_bytes,
        })
    }

    /// Starts a write of `sectors` at `sector` from `buffer`, byte `offset_bytes` on.
    pub fn start_write(
        &self,
        sector: Sector,
        sectors: Sectors,
        buffer: Buffer,
        offset_bytes: usize,
        fua: bool,
    ) -> IoFuture {
        let op = Op::Write { fua };
        self.start(Request { op, sector, sectors, buffer: Some(buffer), buffer_offset_bytes: offset_bytes })
    }

    /// Starts a flush.
    pub fn start_flush(&self) -> IoFuture {
        self.start_plain(Op::Flush, Sector(0), Sectors(0))
    }

    /// Starts a discard or write-zeroes.
    pub fn start_plain(&self, op: Op, sector: Sector, sectors: Sectors) -> IoFuture {
        self.start(Request { op, sector, sectors, buffer: None, buffer_offset_bytes: 0 })
    }

    /// Reads the whole of `buffer` from `sector`.
    pub async fn read(&self, sector: Sector, buffer: Buffer) -> (Buffer, Result<(), IoError>) {
        let sectors = whole_sectors(&buffer);
        let spare = buffer.len();
        let done = self.start_read(sector, sectors, buffer, 0).await;
        // A device returns the buffer unless it was closed during the request.
        (done.buffer.unwrap_or_else(|| self.rt.pool().take(spare)), done.result)
    }

    /// Writes the whole of `buffer` at `sector`.
    pub async fn write(&self, sector: Sector, buffer: Buffer, fua: bool) -> Result<(), IoError> {
        let sectors = whole_sectors(&buffer);
        self.start_write(sector, sectors, buffer, 0, fua).await.result
    }

    /// Makes all operations that completed before the call durable.
    pub async fn flush(&self) -> Result<(), IoError> {
        self.start_flush().await.result
    }

    /// Tells the device that a range is no longer needed.
    pub async fn discard(&self, sector: Sector, sectors: Sectors) -> Result<(), IoError> {
        self.start_plain(Op::Discard, sector, sectors).await.result
    }

    /// Makes a range read as zeros, whose space stays allocated.
    pub async fn write_zeroes(&self, sector: Sector, sectors: Sectors) -> Result<(), IoError> {
        self.start_plain(Op::WriteZeroes { may_unmap: false }, sector, sectors).await.result
    }
}

fn whole_sectors(buffer: &Buffer) -> Sectors {
    let bytes = buffer.len() as u64;
    assert!(bytes.is_multiple_of(SECTOR_BYTES), "a buffer of {bytes} bytes is no whole number of sectors");
    Sectors(bytes / SECTOR_BYTES)
}
