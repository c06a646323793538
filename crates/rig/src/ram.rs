//! A volume in memory for tests of exports.
//!
//! The volume is sparse, counts operations, and can fail operations, hold them back, and stop. A [`RamDisk`] owns the contents;
//! threads can share it, and it outlives a server. A [`RamVolume`] is the part of the volume that belongs to one server.
//!
//! Invariants: an operation takes effect at one moment, immediately before it completes; an operation that is held back has had
//! no effect. Must not know exports.

use std::cell::{Cell, RefCell};
use std::ops::{Deref, Range};
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use format::{SECTOR_BYTES, Sector, Sectors};
use io::sync::Event;
use io::{
    BlockVolume, Buffer, FailedOperation, IoError, Op, RangeStatus, ReadFlags, VolumeError, WriteFlags,
    ZeroFlags,
};

/// Unit of allocation.
const CHUNK_BYTES: usize = 64 << 10;
/// The byte that a discard leaves if the disk leaves garbage.
const GARBAGE: u8 = 0xdd;

/// Number of operations so far, by kind.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Counts {
    /// Reads.
    pub reads: u64,
    /// Reads with the hint that they read metadata.
    pub meta_reads: u64,
    /// Writes.
    pub writes: u64,
    /// Writes with the hint that they write metadata.
    pub meta_writes: u64,
    /// Durable writes, those of zeros included.
    pub durable: u64,
    /// Flushes.
    pub flushes: u64,
    /// Discards.
    pub discards: u64,
    /// Writes of zeros.
    pub zeroes: u64,
    /// Writes of zeros that may free the space.
    pub unmaps: u64,
    /// Sectors of the writes of zeros that may free the space.
    pub unmapped_sectors: u64,
    /// Longest range of any operation.
    pub largest_bytes: u64,
    /// Longest range of a status query.
    pub largest_status_bytes: u64,
}

#[derive(Default)]
struct State {
    chunks: Vec<Option<Box<[u8]>>>,
    counts: Counts,
    /// Ranges of sectors, and the error number of every operation on them.
    faults: Vec<(Range<u64>, i32)>,
}

/// The contents of a volume in memory.
pub struct RamDisk {
    name: String,
    sectors: Sectors,
    logical_block_bytes: u32,
    physical_block_bytes: u32,
    optimal_io_bytes: u32,
    read_only: bool,
    leaves_garbage: bool,
    state: Mutex<State>,
}

impl RamDisk {
    /// A disk of `bytes` bytes that reads as zeros, with blocks of 512 bytes. Discards make holes, which read as zeros.
    pub fn new(name: &str, bytes: u64) -> RamDisk {
        let chunks = vec![None; (bytes as usize).div_ceil(CHUNK_BYTES)];
        RamDisk {
            name: name.to_owned(),
            sectors: Sectors(bytes / SECTOR_BYTES),
            logical_block_bytes: 512,
            physical_block_bytes: 512,
            optimal_io_bytes: 0,
            read_only: false,
            leaves_garbage: false,
            state: Mutex::new(State { chunks, ..State::default() }),
        }
    }

    /// Changes the block sizes.
    pub fn with_blocks(mut self, logical_bytes: u32, physical_bytes: u32) -> RamDisk {
        (self.logical_block_bytes, self.physical_block_bytes) = (logical_bytes, physical_bytes);
        self
    }

    /// Changes the preferred size of requests.
    pub fn with_optimal_io(mut self, bytes: u32) -> RamDisk {
        self.optimal_io_bytes = bytes;
        self
    }

    /// Makes the disk refuse writes.
    pub fn with_read_only(mut self) -> RamDisk {
        self.read_only = true;
        self
    }

    /// Makes discards leave garbage, as a device may, and makes the status of every range unknown.
    ///
    /// With it, a test finds an export that takes discarded data for zeros.
    pub fn with_garbage(mut self) -> RamDisk {
        self.leaves_garbage = true;
        self
    }

    /// Wraps the disk to be shared.
    pub fn shared(self) -> Arc<RamDisk> {
        Arc::new(self)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Name of the disk.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Number of operations so far.
    pub fn counts(&self) -> Counts {
        self.lock().counts
    }

    /// The contents of a range of bytes.
    pub fn contents(&self, range: Range<usize>) -> Vec<u8> {
        let mut out = vec![0; range.len()];
        self.lock().copy_out(range.start, &mut out);
        out
    }

    /// Writes bytes without counting the operation.
    pub fn fill(&self, at: usize, bytes: &[u8]) {
        self.lock().copy_in(at, bytes);
    }

    /// Makes every later operation on these sectors fail with this error number.
    pub fn fail(&self, sectors: Range<u64>, errno: i32) {
        self.lock().faults.push((sectors, errno));
    }

    fn begin(&self, op: Op, sector: Sector, sectors: Sectors) -> Result<MutexGuard<'_, State>, VolumeError> {
        let capacity = self.sectors;
        let end = sector.0.checked_add(sectors.0).filter(|end| *end <= capacity.0);
        let Some(end) = end else { return Err(VolumeError::OutOfRange { sector, sectors, capacity }) };
        let mut state = self.lock();
        if let Some((_, errno)) = state.faults.iter().find(|(bad, _)| bad.start < end && sector.0 < bad.end) {
            let errno = *errno;
            return Err(IoError::from(FailedOperation {
                device: Arc::from("ram"),
                op,
                sector,
                sectors,
                errno,
            })
            .into());
        }
        state.counts.largest_bytes = state.counts.largest_bytes.max(sectors.bytes());
        Ok(state)
    }
}

impl State {
    fn copy_out(&self, mut offset: usize, mut out: &mut [u8]) {
        while !out.is_empty() {
            let at = offset % CHUNK_BYTES;
            let n = out.len().min(CHUNK_BYTES - at);
            let (now, later) = out.split_at_mut(n);
            match &self.chunks[offset / CHUNK_BYTES] {
                Some(chunk) => now.copy_from_slice(&chunk[at..at + n]),
                None => now.fill(0),
            }
            out = later;
            offset += n;
        }
    }

    fn copy_in(&mut self, mut offset: usize, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let at = offset % CHUNK_BYTES;
            let n = bytes.len().min(CHUNK_BYTES - at);
            let chunk = self.chunks[offset / CHUNK_BYTES].get_or_insert_with(|| vec![0; CHUNK_BYTES].into());
            chunk[at..at + n].copy_from_slice(&bytes[..n]);
            bytes = &bytes[n..];
            offset += n;
        }
    }

    /// Sets every byte of a range to `byte`; `unmap` frees whole chunks.
    fn clear(&mut self, sector: Sector, sectors: Sectors, byte: u8, unmap: bool) {
        let (mut offset, end) = (sector.bytes() as usize, (sector + sectors).bytes() as usize);
        while offset < end {
            let at = offset % CHUNK_BYTES;
            let n = (end - offset).min(CHUNK_BYTES - at);
            match &mut self.chunks[offset / CHUNK_BYTES] {
                chunk @ Some(_) if unmap && n == CHUNK_BYTES => *chunk = None,
                Some(chunk) => chunk[at..at + n].fill(byte),
                None if unmap => {}
                chunk => chunk.insert(vec![0; CHUNK_BYTES].into())[at..at + n].fill(byte),
            }
            offset += n;
        }
    }
}

/// A kind of operation that can be held back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RamOp {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Flushes.
    Flush,
    /// Discards.
    Discard,
    /// Writes of zeros.
    Zeroes,
    /// Status queries.
    Status,
}

/// A volume in memory, as one server sees it.
pub struct RamVolume {
    disk: Arc<RamDisk>,
    stopped: Cell<bool>,
    /// Kinds of operations that are held back.
    held: RefCell<Vec<RamOp>>,
    released: Event,
    in_flight: Cell<usize>,
    retains: Cell<bool>,
    retained: RefCell<Vec<Buffer>>,
}

struct InFlight<'a>(&'a Cell<usize>);

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl Deref for RamVolume {
    type Target = RamDisk;

    fn deref(&self) -> &RamDisk {
        &self.disk
    }
}

impl RamVolume {
    /// A volume of `bytes` bytes on its own disk.
    pub fn new(name: &str, bytes: u64) -> RamVolume {
        RamVolume::on(RamDisk::new(name, bytes).shared())
    }

    /// A volume on `disk`.
    pub fn on(disk: Arc<RamDisk>) -> RamVolume {
        RamVolume {
            disk,
            stopped: Cell::new(false),
            held: RefCell::default(),
            released: Event::default(),
            in_flight: Cell::new(0),
            retains: Cell::new(false),
            retained: RefCell::default(),
        }
    }

    /// Wraps the volume to be shared.
    pub fn shared(self) -> Rc<RamVolume> {
        Rc::new(self)
    }

    /// Stops the volume: every later operation fails.
    pub fn set_stopped(&self) {
        self.stopped.set(true);
    }

    /// Holds every later operation of this kind back.
    pub fn hold(&self, kind: RamOp) {
        self.held.borrow_mut().push(kind);
    }

    /// Releases all operations that are held back.
    pub fn release(&self) {
        self.held.borrow_mut().clear();
        self.released.notify_all();
    }

    /// Number of operations that have begun and not ended.
    pub fn in_flight(&self) -> usize {
        self.in_flight.get()
    }

    /// Retains the buffers of later reads and writes, as a write-behind cache does.
    pub fn retain_buffers(&self) {
        self.retains.set(true);
    }

    /// The retained buffers.
    pub fn retained(&self) -> Vec<Buffer> {
        self.retained.borrow().clone()
    }

    async fn wait(&self, kind: RamOp) -> Result<InFlight<'_>, VolumeError> {
        self.in_flight.set(self.in_flight.get() + 1);
        let guard = InFlight(&self.in_flight);
        if !self.held.borrow().is_empty() {
            self.released.wait_until(|| !self.held.borrow().contains(&kind)).await;
        }
        if self.stopped.get() {
            return Err(VolumeError::Stopped(self.disk.name.clone()));
        }
        Ok(guard)
    }

    fn writable(&self) -> Result<(), VolumeError> {
        if self.disk.read_only { Err(VolumeError::ReadOnly(self.disk.name.clone())) } else { Ok(()) }
    }
}

impl BlockVolume for RamVolume {
    fn name(&self) -> String {
        self.disk.name.clone()
    }

    fn sectors(&self) -> Sectors {
        self.disk.sectors
    }

    fn logical_block_bytes(&self) -> u32 {
        self.disk.logical_block_bytes
    }

    fn physical_block_bytes(&self) -> u32 {
        self.disk.physical_block_bytes
    }

    fn optimal_io_bytes(&self) -> u32 {
        self.disk.optimal_io_bytes
    }

    fn read_only(&self) -> bool {
        self.disk.read_only
    }

    async fn read(
        &self,
        sector: Sector,
        sectors: Sectors,
        mut buffer: Buffer,
        offset_bytes: usize,
    ) -> (Buffer, Result<(), VolumeError>) {
        let result = match self.wait(RamOp::Read).await {
            Ok(_guard) => self.disk.begin(Op::Read, sector, sectors).map(|mut state| {
                state.counts.reads += 1;
                let end = offset_bytes + sectors.bytes() as usize;
                state.copy_out(sector.bytes() as usize, &mut buffer.as_mut()[offset_bytes..end]);
            }),
            Err(e) => Err(e),
        };
        if self.retains.get() {
            self.retained.borrow_mut().push(buffer.clone());
        }
        (buffer, result)
    }

    async fn read_as(
        &self,
        sector: Sector,
        sectors: Sectors,
        buffer: Buffer,
        offset_bytes: usize,
        flags: ReadFlags,
    ) -> (Buffer, Result<(), VolumeError>) {
        self.disk.lock().counts.meta_reads += u64::from(flags.meta);
        self.read(sector, sectors, buffer, offset_bytes).await
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
        let _guard = self.wait(RamOp::Write).await?;
        let mut state = self.disk.begin(Op::Write { fua: flags.fua }, sector, sectors)?;
        state.counts.writes += 1;
        state.counts.durable += u64::from(flags.fua);
        state.counts.meta_writes += u64::from(flags.meta);
        let end = offset_bytes + sectors.bytes() as usize;
        state.copy_in(sector.bytes() as usize, &buffer.as_slice()[offset_bytes..end]);
        if self.retains.get() {
            self.retained.borrow_mut().push(buffer);
        }
        Ok(())
    }

    async fn flush(&self) -> Result<(), VolumeError> {
        let _guard = self.wait(RamOp::Flush).await?;
        self.disk.begin(Op::Flush, Sector(0), Sectors(0))?.counts.flushes += 1;
        Ok(())
    }

    async fn discard(&self, sector: Sector, sectors: Sectors) -> Result<(), VolumeError> {
        self.writable()?;
        let _guard = self.wait(RamOp::Discard).await?;
        let mut state = self.disk.begin(Op::Discard, sector, sectors)?;
        state.counts.discards += 1;
        match self.disk.leaves_garbage {
            true => state.clear(sector, sectors, GARBAGE, false),
            false => state.clear(sector, sectors, 0, true),
        }
        Ok(())
    }

    async fn write_zeroes(
        &self,
        sector: Sector,
        sectors: Sectors,
        flags: ZeroFlags,
    ) -> Result<(), VolumeError> {
        self.writable()?;
        let _guard = self.wait(RamOp::Zeroes).await?;
        let mut state = self.disk.begin(Op::WriteZeroes { may_unmap: flags.may_unmap }, sector, sectors)?;
        state.counts.zeroes += 1;
        state.counts.durable += u64::from(flags.fua);
        if flags.may_unmap {
            state.counts.unmaps += 1;
            state.counts.unmapped_sectors += sectors.0;
        }
        state.clear(sector, sectors, 0, flags.may_unmap);
        Ok(())
    }

    async fn status(&self, sector: Sector, sectors: Sectors) -> Result<Vec<RangeStatus>, VolumeError> {
        let _guard = self.wait(RamOp::Status).await?;
        let mut state = self.disk.begin(Op::Read, sector, sectors)?;
        state.counts.largest_status_bytes = state.counts.largest_status_bytes.max(sectors.bytes());
        if self.disk.leaves_garbage {
            return Ok(vec![RangeStatus { sectors, hole: false, zero: false }]);
        }
        let (mut offset, end) = (sector.bytes(), (sector + sectors).bytes());
        let mut runs = Vec::new();
        while offset < end {
            let n = (end - offset).min(CHUNK_BYTES as u64 - offset % CHUNK_BYTES as u64);
            let hole = state.chunks[offset as usize / CHUNK_BYTES].is_none();
            runs.push(RangeStatus { sectors: Sectors(n / SECTOR_BYTES), hole, zero: hole });
            offset += n;
        }
        Ok(runs)
    }
}
