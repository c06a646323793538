//! A volume in memory: sparse, countable, breakable, stoppable.
//!
//! Invariants: an operation takes effect at one moment, right before it completes; a held operation has
//! had no effect yet.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use format::{SECTOR_BYTES, Sector, Sectors};
use io::sync::Event;
use io::{BlockVolume, Buffer, IoError, Op, RangeStatus, VolumeError, WriteFlags, ZeroFlags};

/// Unit of allocation.
const CHUNK_BYTES: usize = 64 << 10;

/// Operations so far, by kind.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Counts {
    pub reads: u64,
    pub writes: u64,
    pub durable: u64,
    pub flushes: u64,
    pub discards: u64,
    pub zeroes: u64,
    pub unmaps: u64,
    pub largest_bytes: u64,
    /// Longest range whose status was asked for.
    pub largest_status_bytes: u64,
}

/// See the module head.
pub struct RamVolume {
    name: String,
    sectors: Sectors,
    optimal_io_bytes: u32,
    read_only: bool,
    chunks: RefCell<Vec<Option<Box<[u8]>>>>,
    counts: RefCell<Counts>,
    /// Reads and writes that touch these sectors fail with this error number.
    faults: RefCell<Vec<(Range<u64>, i32)>>,
    stopped: Cell<bool>,
    /// Kinds of operations that wait.
    held: RefCell<Vec<&'static str>>,
    released: Event,
    in_flight: Cell<usize>,
}

struct InFlight<'a>(&'a Cell<usize>);

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

#[allow(dead_code, reason = "each test program uses a part of it")]
impl RamVolume {
    /// A volume of `bytes` holes.
    pub fn new(name: &str, bytes: u64) -> RamVolume {
        RamVolume {
            name: name.to_string(),
            sectors: Sectors(bytes / SECTOR_BYTES),
            optimal_io_bytes: 0,
            read_only: false,
            chunks: RefCell::new(vec![None; (bytes as usize).div_ceil(CHUNK_BYTES)]),
            counts: RefCell::default(),
            faults: RefCell::default(),
            stopped: Cell::new(false),
            held: RefCell::default(),
            released: Event::default(),
            in_flight: Cell::new(0),
        }
    }

    pub fn with_read_only(mut self) -> RamVolume {
        self.read_only = true;
        self
    }

    pub fn with_optimal_io(mut self, bytes: u32) -> RamVolume {
        self.optimal_io_bytes = bytes;
        self
    }

    pub fn shared(self) -> Rc<RamVolume> {
        Rc::new(self)
    }

    pub fn counts(&self) -> Counts {
        self.counts.borrow().clone()
    }

    pub fn fail(&self, sectors: Range<u64>, errno: i32) {
        self.faults.borrow_mut().push((sectors, errno));
    }

    pub fn set_stopped(&self) {
        self.stopped.set(true);
    }

    /// Operations of this kind ("read", "write", "flush", "discard", "zeroes", "status") wait from now on.
    pub fn hold(&self, kind: &'static str) {
        self.held.borrow_mut().push(kind);
    }

    /// Lets everything go on.
    pub fn release(&self) {
        self.held.borrow_mut().clear();
        self.released.notify_all();
    }

    /// Operations that have begun and not ended.
    pub fn in_flight(&self) -> usize {
        self.in_flight.get()
    }

    /// The contents of a range.
    pub fn contents(&self, offset: usize, bytes: usize) -> Vec<u8> {
        let mut out = vec![0; bytes];
        self.copy_out(offset, &mut out);
        out
    }

    pub fn fill(&self, offset: usize, bytes: &[u8]) {
        self.copy_in(offset, bytes);
    }

    async fn begin(
        &self,
        kind: &'static str,
        sector: Sector,
        sectors: Sectors,
    ) -> Result<InFlight<'_>, VolumeError> {
        self.in_flight.set(self.in_flight.get() + 1);
        let guard = InFlight(&self.in_flight);
        if !self.held.borrow().is_empty() {
            self.released.wait_until(|| !self.held.borrow().contains(&kind)).await;
        }
        if self.stopped.get() {
            return Err(VolumeError::Stopped(self.name.clone()));
        }
        if sector.0.checked_add(sectors.0).is_none_or(|end| end > self.sectors.0) {
            return Err(VolumeError::OutOfRange { sector, sectors, capacity: self.sectors });
        }
        let hit = |f: &&(Range<u64>, i32)| f.0.start < sector.0 + sectors.0 && sector.0 < f.0.end;
        if let Some((_, errno)) = self.faults.borrow().iter().find(hit) {
            let device = Arc::from("ram");
            return Err(IoError { device, op: Op::Read, sector, sectors, errno: *errno }.into());
        }
        let mut counts = self.counts.borrow_mut();
        counts.largest_bytes = counts.largest_bytes.max(sectors.bytes());
        Ok(guard)
    }

    fn writable(&self) -> Result<(), VolumeError> {
        if self.read_only { Err(VolumeError::ReadOnly(self.name.clone())) } else { Ok(()) }
    }

    fn copy_out(&self, mut offset: usize, mut out: &mut [u8]) {
        let chunks = self.chunks.borrow();
        while !out.is_empty() {
            let at = offset % CHUNK_BYTES;
            let n = out.len().min(CHUNK_BYTES - at);
            let (now, later) = out.split_at_mut(n);
            match &chunks[offset / CHUNK_BYTES] {
                Some(chunk) => now.copy_from_slice(&chunk[at..at + n]),
                None => now.fill(0),
            }
            out = later;
            offset += n;
        }
    }

    fn copy_in(&self, mut offset: usize, mut bytes: &[u8]) {
        let mut chunks = self.chunks.borrow_mut();
        while !bytes.is_empty() {
            let at = offset % CHUNK_BYTES;
            let n = bytes.len().min(CHUNK_BYTES - at);
            let chunk = chunks[offset / CHUNK_BYTES].get_or_insert_with(|| vec![0; CHUNK_BYTES].into());
            chunk[at..at + n].copy_from_slice(&bytes[..n]);
            bytes = &bytes[n..];
            offset += n;
        }
    }

    fn clear(&self, sector: Sector, sectors: Sectors, unmap: bool) {
        let mut chunks = self.chunks.borrow_mut();
        let (mut offset, end) = (sector.bytes() as usize, (sector.bytes() + sectors.bytes()) as usize);
        while offset < end {
            let at = offset % CHUNK_BYTES;
            let n = (end - offset).min(CHUNK_BYTES - at);
            let chunk = &mut chunks[offset / CHUNK_BYTES];
            match chunk {
                Some(_) if unmap && n == CHUNK_BYTES => *chunk = None,
                Some(c) => c[at..at + n].fill(0),
                None if unmap => {}
                None => *chunk = Some(vec![0; CHUNK_BYTES].into()),
            }
            offset += n;
        }
    }
}

impl BlockVolume for RamVolume {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn sectors(&self) -> Sectors {
        self.sectors
    }

    fn logical_block_bytes(&self) -> u32 {
        512
    }

    fn optimal_io_bytes(&self) -> u32 {
        self.optimal_io_bytes
    }

    fn read_only(&self) -> bool {
        self.read_only
    }

    async fn read(
        &self,
        sector: Sector,
        sectors: Sectors,
        mut buffer: Buffer,
        offset_bytes: usize,
    ) -> (Buffer, Result<(), VolumeError>) {
        let result = self.begin("read", sector, sectors).await.map(drop);
        if result.is_ok() {
            self.counts.borrow_mut().reads += 1;
            let end = offset_bytes + sectors.bytes() as usize;
            self.copy_out(sector.bytes() as usize, &mut buffer.as_mut()[offset_bytes..end]);
        }
        (buffer, result)
    }

    async fn write(
        &self,
        sector: Sector,
        sectors: Sectors,
        buffer: Buffer,
        offset_bytes: usize,
        flags: WriteFlags,
    ) -> Result<(), VolumeError> {
        self.writable()?;
        let _guard = self.begin("write", sector, sectors).await?;
        let mut counts = self.counts.borrow_mut();
        counts.writes += 1;
        counts.durable += u64::from(flags.fua);
        let end = offset_bytes + sectors.bytes() as usize;
        self.copy_in(sector.bytes() as usize, &buffer.as_slice()[offset_bytes..end]);
        Ok(())
    }

    async fn flush(&self) -> Result<(), VolumeError> {
        let _guard = self.begin("flush", Sector(0), Sectors(0)).await?;
        self.counts.borrow_mut().flushes += 1;
        Ok(())
    }

    async fn discard(&self, sector: Sector, sectors: Sectors) -> Result<(), VolumeError> {
        self.writable()?;
        let _guard = self.begin("discard", sector, sectors).await?;
        self.counts.borrow_mut().discards += 1;
        self.clear(sector, sectors, true);
        Ok(())
    }

    async fn write_zeroes(
        &self,
        sector: Sector,
        sectors: Sectors,
        flags: ZeroFlags,
    ) -> Result<(), VolumeError> {
        self.writable()?;
        let _guard = self.begin("zeroes", sector, sectors).await?;
        let mut counts = self.counts.borrow_mut();
        counts.zeroes += 1;
        counts.durable += u64::from(flags.fua);
        counts.unmaps += u64::from(flags.may_unmap);
        self.clear(sector, sectors, flags.may_unmap);
        Ok(())
    }

    async fn status(&self, sector: Sector, sectors: Sectors) -> Result<Vec<RangeStatus>, VolumeError> {
        let _guard = self.begin("status", sector, sectors).await?;
        let largest = self.counts.borrow().largest_status_bytes.max(sectors.bytes());
        self.counts.borrow_mut().largest_status_bytes = largest;
        let chunks = self.chunks.borrow();
        let (mut offset, end) = (sector.bytes(), sector.bytes() + sectors.bytes());
        let mut runs: Vec<RangeStatus> = Vec::new();
        while offset < end {
            let at = offset % CHUNK_BYTES as u64;
            let n = (end - offset).min(CHUNK_BYTES as u64 - at);
            let hole = chunks[offset as usize / CHUNK_BYTES].is_none();
            runs.push(RangeStatus { sectors: Sectors(n / SECTOR_BYTES), hole, zero: hole });
            offset += n;
        }
        Ok(runs)
    }
}
