//! The device trait, its requests and errors, and the handle through which the engine uses a device.
//!
//! Must not know what a device is made of. Contract of every implementation (the conformance suite in
//! `blockio` and `sim` runs against it):
//!
//! * `submit` never blocks and never calls back synchronously into the caller's borrows: it may
//!   complete at once, which only marks the waiter ready.
//! * A write is durable after a flush that was submitted after the write completed, or at its own
//!   completion if it carries `fua`. Nothing else is durable; writes may reach the medium in any order.
//! * A read that starts after a write completed returns that write.
//! * Positions and lengths are multiples of `logical_block_bytes` and inside the device; anything else
//!   is refused with `EINVAL`. Buffers are large enough or the request is refused.
//! * Short transfers, `EINTR` and `EAGAIN` are the implementation's business.

use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use format::{SECTOR_BYTES, Sector, Sectors};

use crate::buffer::Buffer;
use crate::completion::{Completer, IoFuture};
use crate::meter::{DeviceFigures, Meter};
use crate::runtime::Handle;
use crate::timer::Nanos;
use crate::trace::{Purpose, TraceFigures};

/// Properties of a device. Fixed while it is open.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Path or other name, as the operator knows it.
    pub name: Arc<str>,
    /// Usable size.
    pub sectors: Sectors,
    /// Smallest unit of I/O: 512 or 4096.
    pub logical_block_bytes: u32,
    /// Unit that the medium writes without read-modify-write.
    pub physical_block_bytes: u32,
    /// Preferred I/O size (RAID stripe width, for example); 0 if the device has no opinion.
    pub optimal_io_bytes: u32,
    /// Whether seeks are expensive.
    pub rotational: bool,
    /// Whether discard does anything.
    pub discard: bool,
    /// Whether it is a file with holes: ranges that were never written take no space, but written zeroes do.
    pub sparse: bool,
    /// Whether partial-stripe writes cost a read-modify-write (RAID 5/6).
    pub partial_stripes_expensive: bool,
}

impl DeviceInfo {
    /// Checks a request against the contract in the module head, as every device does first. A request
    /// of no sectors is fine.
    ///
    /// # Errors
    /// `EINVAL` for a range outside of the device or not in whole logical blocks, for a buffer that is
    /// missing or too small, and for a read into a shared buffer.
    pub fn check(&self, request: &mut Request) -> Result<(), IoError> {
        const EINVAL: i32 = 22;
        let fits = match request.op {
            Op::Flush => true,
            op => {
                self.range_fits(request.sector, request.sectors)
                    && (!op.has_buffer() || request.buffer_fits())
            }
        };
        if fits { Ok(()) } else { Err(IoError::of(&self.name, request, EINVAL)) }
    }

    fn range_fits(&self, sector: Sector, sectors: Sectors) -> bool {
        let block_sectors = (u64::from(self.logical_block_bytes) / SECTOR_BYTES).max(1);
        sector.0.is_multiple_of(block_sectors)
            && sectors.0.is_multiple_of(block_sectors)
            && sector.checked_add(sectors).is_some_and(|end| end.0 <= self.sectors.0)
    }
}

/// The operation of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    /// Fill the buffer from the device.
    Read,
    /// Store the buffer; with `fua` it is durable at completion.
    Write {
        /// Durable at completion.
        fua: bool,
    },
    /// Make everything that completed before durable.
    Flush,
    /// The contents are no longer needed; later reads return anything.
    Discard,
    /// The contents become zeros.
    WriteZeroes,
}

impl Op {
    /// Whether the request carries a buffer.
    pub const fn has_buffer(self) -> bool {
        matches!(self, Op::Read | Op::Write { .. })
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Op::Read => "read",
            Op::Write { fua: false } => "write",
            Op::Write { fua: true } => "durable write",
            Op::Flush => "flush",
            Op::Discard => "discard",
            Op::WriteZeroes => "write zeroes",
        })
    }
}

/// One request to a device.
#[derive(Debug)]
pub struct Request {
    /// The operation.
    pub op: Op,
    /// Where; zero for a flush.
    pub sector: Sector,
    /// How much; zero for a flush.
    pub sectors: Sectors,
    /// Source or destination of reads and writes; comes back with the completion.
    pub buffer: Option<Buffer>,
    /// First byte of the buffer that takes part. Multiple of 512.
    pub buffer_offset_bytes: usize,
}

impl Request {
    /// Bytes of the buffer that take part.
    pub fn byte_range(&self) -> std::ops::Range<usize> {
        let len = usize::try_from(self.sectors.bytes()).unwrap_or(usize::MAX);
        self.buffer_offset_bytes..self.buffer_offset_bytes.saturating_add(len)
    }

    fn buffer_fits(&mut self) -> bool {
        let range = self.byte_range();
        let reads = self.op == Op::Read;
        let aligned = (range.start as u64).is_multiple_of(SECTOR_BYTES);
        self.buffer
            .as_mut()
            .is_some_and(|b| aligned && range.end <= b.len() && (!reads || b.get_mut().is_some()))
    }
}

/// A failed operation: device, operation, range, and the error of the system.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IoError {
    /// Name of the device.
    pub device: Arc<str>,
    /// The operation.
    pub op: Op,
    /// Where.
    pub sector: Sector,
    /// How much.
    pub sectors: Sectors,
    /// The error number of the system, positive.
    pub errno: i32,
}

impl IoError {
    /// The error of `request` on a device named `device`.
    pub fn of(device: &Arc<str>, request: &Request, errno: i32) -> IoError {
        IoError {
            device: device.clone(),
            op: request.op,
            sector: request.sector,
            sectors: request.sectors,
            errno,
        }
    }

    /// Whether the device is whole and has no room: a sparse file on a full file system, or a quota.
    pub fn is_out_of_room(&self) -> bool {
        const ENOSPC: i32 = 28;
        const EDQUOT: i32 = 122;
        matches!(self.errno, ENOSPC | EDQUOT)
    }

    /// Whether the device does not do such requests at all.
    pub fn is_unsupported(&self) -> bool {
        const EINVAL: i32 = 22;
        const ENOTTY: i32 = 25;
        const EOPNOTSUPP: i32 = 95;
        matches!(self.errno, EINVAL | ENOTTY | EOPNOTSUPP)
    }

    /// The answer to an operation whose device went away without answering.
    pub(crate) fn dropped() -> IoError {
        const ECANCELED: i32 = 125;
        IoError {
            device: Arc::from("(closed device)"),
            op: Op::Flush,
            sector: Sector(0),
            sectors: Sectors(0),
            errno: ECANCELED,
        }
    }
}

impl fmt::Display for IoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Formats the number through the standard library's table of system messages.
        let system = std::io::Error::from_raw_os_error(self.errno);
        match self.op {
            Op::Flush => write!(f, "{}: flush failed: {system}", self.device),
            op => write!(
                f,
                "{}: {op} of {} sectors at sector {} failed: {system}",
                self.device, self.sectors, self.sector
            ),
        }
    }
}

impl std::error::Error for IoError {}

/// A block device. See the module head for the contract.
pub trait Device {
    /// Properties of the device.
    fn info(&self) -> &DeviceInfo;

    /// Starts `request`; the outcome goes to `completer`.
    fn submit(&self, request: Request, completer: Completer);
}

/// A device with the runtime to wait for it: the handle of the engine.
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

    /// Counts of its requests, of all clones of this handle together.
    pub fn figures(&self) -> DeviceFigures {
        self.meter.figures()
    }

    /// The same disk; what is started through this handle is for something else. That shows in traces only.
    #[must_use]
    pub fn with_purpose(&self, purpose: Purpose) -> Disk {
        Disk { purpose, ..self.clone() }
    }

    /// Requests that were started through any clone of this handle, from the number `since` on. They are recorded while
    /// somebody looks: from a call of this until `lease` after it.
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
        self.device.submit(request, completer);
        future
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
        // Only a device that was closed under the request keeps the buffer.
        (done.buffer.unwrap_or_else(|| self.rt.pool().take(spare)), done.result)
    }

    /// Writes the whole of `buffer` at `sector`.
    pub async fn write(&self, sector: Sector, buffer: Buffer, fua: bool) -> Result<(), IoError> {
        let sectors = whole_sectors(&buffer);
        self.start_write(sector, sectors, buffer, 0, fua).await.result
    }

    /// Makes everything that completed before durable.
    pub async fn flush(&self) -> Result<(), IoError> {
        self.start_flush().await.result
    }

    /// Tells the device that a range is no longer needed.
    pub async fn discard(&self, sector: Sector, sectors: Sectors) -> Result<(), IoError> {
        self.start_plain(Op::Discard, sector, sectors).await.result
    }

    /// Makes a range read as zeros.
    pub async fn write_zeroes(&self, sector: Sector, sectors: Sectors) -> Result<(), IoError> {
        self.start_plain(Op::WriteZeroes, sector, sectors).await.result
    }
}

fn whole_sectors(buffer: &Buffer) -> Sectors {
    let bytes = buffer.len() as u64;
    assert!(bytes.is_multiple_of(SECTOR_BYTES), "a buffer of {bytes} bytes is no whole number of sectors");
    Sectors(bytes / SECTOR_BYTES)
}
