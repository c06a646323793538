//! Requests to devices, their errors, and the properties of a device that a request must fit.
//!
//! Must not know how a request is carried out.

use std::fmt;
use std::sync::Arc;

use format::{SECTOR_BYTES, Sector, Sectors};

use crate::buffer::Buffer;

/// Properties of a device. They do not change while it is open.
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
    /// Preferred I/O size (RAID stripe width, for example); 0 if the device states none.
    pub optimal_io_bytes: u32,
    /// Whether seeks are expensive.
    pub rotational: bool,
    /// Whether the device supports discard.
    pub discard: bool,
    /// Whether it is a sparse file: ranges that were never written take no space, but written zeroes do.
    pub sparse: bool,
    /// Whether partial-stripe writes cost a read-modify-write (RAID 5/6).
    pub partial_stripes_expensive: bool,
}

impl DeviceInfo {
    /// Checks a request against the contract in module `device`, as every device does first.
    ///
    /// A request of zero sectors is valid.
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
    /// Read from the device into the buffer.
    Read,
    /// Write the buffer to the device; with `fua` it is durable at completion.
    Write {
        /// Durable at completion.
        fua: bool,
    },
    /// Make all operations that completed before the flush durable.
    Flush,
    /// The contents are no longer needed; later reads return unspecified contents.
    Discard,
    /// The contents become zeros.
    WriteZeroes {
        /// The device may free the space instead of writing zeros.
        may_unmap: bool,
    },
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
            Op::WriteZeroes { .. } => "write zeroes",
        })
    }
}

/// One request to a device.
#[derive(Debug)]
pub struct Request {
    /// The operation.
    pub op: Op,
    /// First sector; zero for a flush.
    pub sector: Sector,
    /// Length; zero for a flush.
    pub sectors: Sectors,
    /// Destination of a read or source of a write. The completion returns it.
    pub buffer: Option<Buffer>,
    /// First byte of the buffer that the request uses. A multiple of 512.
    pub buffer_offset_bytes: usize,
}

impl Request {
    /// Bytes of the buffer that the request uses.
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
///
/// It is one pointer, because every request carries a result, and results are copied often.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IoError(Arc<FailedOperation>);

/// The content of an [`IoError`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FailedOperation {
    /// Name of the device.
    pub device: Arc<str>,
    /// The operation.
    pub op: Op,
    /// First sector.
    pub sector: Sector,
    /// Length.
    pub sectors: Sectors,
    /// The error number of the system, positive.
    pub errno: i32,
}

impl From<FailedOperation> for IoError {
    fn from(failed: FailedOperation) -> IoError {
        IoError(Arc::new(failed))
    }
}

impl std::ops::Deref for IoError {
    type Target = FailedOperation;

    fn deref(&self) -> &FailedOperation {
        &self.0
    }
}

impl IoError {
    /// The error of `request` on a device named `device`.
    pub fn of(device: &Arc<str>, request: &Request, errno: i32) -> IoError {
        let Request { op, sector, sectors, .. } = *request;
        FailedOperation { device: device.clone(), op, sector, sectors, errno }.into()
    }

    /// Whether the device works but has no space left (a sparse file on a full file system, or a quota).
    pub fn is_out_of_room(&self) -> bool {
        const ENOSPC: i32 = 28;
        const EDQUOT: i32 = 122;
        matches!(self.errno, ENOSPC | EDQUOT)
    }

    /// Whether the device does not support this kind of request.
    pub fn is_unsupported(&self) -> bool {
        const EINVAL: i32 = 22;
        const ENOTTY: i32 = 25;
        const EOPNOTSUPP: i32 = 95;
        matches!(self.errno, EINVAL | ENOTTY | EOPNOTSUPP)
    }

    /// The error of an operation that was given up, because the device named `device` does not answer.
    pub(crate) fn given_up(device: &Arc<str>, op: Op, (sector, sectors): (Sector, Sectors)) -> IoError {
        const ETIMEDOUT: i32 = 110;
        FailedOperation { device: device.clone(), op, sector, sectors, errno: ETIMEDOUT }.into()
    }

    /// The error of an operation whose device dropped it without an answer.
    pub(crate) fn dropped() -> IoError {
        const ECANCELED: i32 = 125;
        let (device, op) = (Arc::from("(closed device)"), Op::Flush);
        FailedOperation { device, op, sector: Sector(0), sectors: Sectors(0), errno: ECANCELED }.into()
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
