//! Counts the requests to a device.
//!
//! Owns the counters. Does not change requests. A request is counted at submission, so a request that fails counts too.

use std::cell::Cell;
use std::ops::Sub;
use std::rc::Rc;

use ::io::{Completer, Device, DeviceInfo, Op, Request};

/// Counts of requests to a device so far. Lengths are in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Counts {
    /// Reads.
    pub reads: u64,
    /// Bytes that reads asked for.
    pub read_bytes: u64,
    /// Writes, durable ones included.
    pub writes: u64,
    /// Writes that are durable at completion.
    pub durable_writes: u64,
    /// Bytes that writes gave.
    pub written_bytes: u64,
    /// Flushes.
    pub flushes: u64,
    /// Discards.
    pub discards: u64,
    /// Bytes in the ranges of discards.
    pub discarded_bytes: u64,
    /// Write-zeroes requests.
    pub zeroes: u64,
    /// Bytes in the ranges of write-zeroes requests.
    pub zeroed_bytes: u64,
}

impl Counts {
    /// Requests of every kind.
    pub fn operations(&self) -> u64 {
        self.reads + self.writes + self.flushes + self.discards + self.zeroes
    }
}

impl Sub for Counts {
    type Output = Counts;

    /// The difference to an earlier count.
    fn sub(self, earlier: Counts) -> Counts {
        Counts {
            reads: self.reads - earlier.reads,
            read_bytes: self.read_bytes - earlier.read_bytes,
            writes: self.writes - earlier.writes,
            durable_writes: self.durable_writes - earlier.durable_writes,
            written_bytes: self.written_bytes - earlier.written_bytes,
            flushes: self.flushes - earlier.flushes,
            discards: self.discards - earlier.discards,
            discarded_bytes: self.discarded_bytes - earlier.discarded_bytes,
            zeroes: self.zeroes - earlier.zeroes,
            zeroed_bytes: self.zeroed_bytes - earlier.zeroed_bytes,
        }
    }
}

/// A device that counts the requests to the device inside.
pub struct CountingDisk {
    inner: Rc<dyn Device>,
    counts: Cell<Counts>,
}

impl CountingDisk {
    /// Counts the requests to `inner`.
    pub fn new(inner: Rc<dyn Device>) -> CountingDisk {
        CountingDisk { inner, counts: Cell::default() }
    }

    /// The counts so far.
    pub fn counts(&self) -> Counts {
        self.counts.get()
    }
}

impl Device for CountingDisk {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn submit(&self, request: Request, completer: Completer) {
        let mut c = self.counts.get();
        let bytes = request.sectors.bytes();
        match request.op {
            Op::Read => {
                c.reads += 1;
                c.read_bytes += bytes;
            }
            Op::Write { fua } => {
                c.writes += 1;
                c.durable_writes += u64::from(fua);
                c.written_bytes += bytes;
            }
            Op::Flush => c.flushes += 1,
            Op::Discard => {
                c.discards += 1;
                c.discarded_bytes += bytes;
            }
            Op::WriteZeroes { .. } => {
                c.zeroes += 1;
                c.zeroed_bytes += bytes;
            }
        }
        self.counts.set(c);
        self.inner.submit(request, completer);
    }
}
