//! A volume in memory whose contents outlive the server: a [`RamDisk`] is shared by the test's thread and
//! the server's, a [`RamVolume`] is the server's end of it.
//!
//! A discard leaves garbage behind, as a device may: whoever takes it for zeros is found out.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use format::{SECTOR_BYTES, Sector, Sectors};
use io::{BlockVolume, Buffer, IoError, Op, RangeStatus, VolumeError, WriteFlags, ZeroFlags};

/// Operations so far.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Counts {
    pub reads: u64,
    pub writes: u64,
    pub durable: u64,
    pub flushes: u64,
    pub discards: u64,
    pub zeroes: u64,
    pub unmaps: u64,
    pub unmapped_sectors: u64,
    pub largest_sectors: u64,
}

struct State {
    bytes: Vec<u8>,
    counts: Counts,
    faults: Vec<(Range<u64>, i32)>,
}

/// See the module head.
pub struct RamDisk {
    name: String,
    block_bytes: u32,
    read_only: bool,
    state: Mutex<State>,
}

#[allow(dead_code, reason = "each program that includes this uses a part of it")]
impl RamDisk {
    pub fn new(name: &str, bytes: u64) -> Arc<RamDisk> {
        Self::with(name, bytes, 512, false)
    }

    pub fn with(name: &str, bytes: u64, block_bytes: u32, read_only: bool) -> Arc<RamDisk> {
        let bytes = vec![0; usize::try_from(bytes).expect("a size that fits")];
        let state = State { bytes, counts: Counts::default(), faults: Vec::new() };
        Arc::new(RamDisk { name: name.into(), block_bytes, read_only, state: Mutex::new(state) })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn counts(&self) -> Counts {
        self.lock().counts
    }

    /// Contents of a range.
    pub fn contents(&self, range: Range<usize>) -> Vec<u8> {
        self.lock().bytes[range].to_vec()
    }

    pub fn fill(&self, at: usize, bytes: &[u8]) {
        self.lock().bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// What touches these sectors from now on fails with this error number.
    pub fn fail(&self, sectors: Range<u64>, errno: i32) {
        self.lock().faults.push((sectors, errno));
    }

    fn begin(&self, op: Op, sector: Sector, sectors: Sectors) -> Result<MutexGuard<'_, State>, VolumeError> {
        let mut state = self.lock();
        if op != Op::Read && op != Op::Flush && self.read_only {
            return Err(VolumeError::ReadOnly(self.name.clone()));
        }
        let capacity = Sectors(state.bytes.len() as u64 / SECTOR_BYTES);
        let end = sector.0.checked_add(sectors.0).filter(|end| *end <= capacity.0);
        let Some(end) = end else { return Err(VolumeError::OutOfRange { sector, sectors, capacity }) };
        let hit = state.faults.iter().find(|(range, _)| range.start < end && sector.0 < range.end);
        if let Some((_, errno)) = hit {
            let errno = *errno;
            return Err(IoError { device: Arc::from("ram"), op, sector, sectors, errno }.into());
        }
        state.counts.largest_sectors = state.counts.largest_sectors.max(sectors.0);
        Ok(state)
    }
}

fn bytes_of(sector: Sector, sectors: Sectors) -> Range<usize> {
    let start = sector.bytes() as usize;
    start..start + sectors.bytes() as usize
}

/// See the module head.
pub struct RamVolume(pub Arc<RamDisk>);

impl BlockVolume for RamVolume {
    fn name(&self) -> String {
        self.0.name.clone()
    }

    fn sectors(&self) -> Sectors {
        Sectors(self.0.lock().bytes.len() as u64 / SECTOR_BYTES)
    }

    fn logical_block_bytes(&self) -> u32 {
        self.0.block_bytes
    }

    fn optimal_io_bytes(&self) -> u32 {
        0
    }

    fn read_only(&self) -> bool {
        self.0.read_only
    }

    async fn read(
        &self,
        sector: Sector,
        sectors: Sectors,
        mut buffer: Buffer,
        offset_bytes: usize,
    ) -> (Buffer, Result<(), VolumeError>) {
        let result = self.0.begin(Op::Read, sector, sectors).map(|mut state| {
            state.counts.reads += 1;
            let range = bytes_of(sector, sectors);
            buffer.as_mut()[offset_bytes..offset_bytes + range.len()].copy_from_slice(&state.bytes[range]);
        });
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
        let mut state = self.0.begin(Op::Write { fua: flags.fua }, sector, sectors)?;
        state.counts.writes += 1;
        state.counts.durable += u64::from(flags.fua);
        let range = bytes_of(sector, sectors);
        let data = &buffer.as_slice()[offset_bytes..offset_bytes + range.len()];
        state.bytes[range].copy_from_slice(data);
        Ok(())
    }

    async fn flush(&self) -> Result<(), VolumeError> {
        self.0.begin(Op::Flush, Sector(0), Sectors(0))?.counts.flushes += 1;
        Ok(())
    }

    async fn discard(&self, sector: Sector, sectors: Sectors) -> Result<(), VolumeError> {
        let mut state = self.0.begin(Op::Discard, sector, sectors)?;
        state.counts.discards += 1;
        state.bytes[bytes_of(sector, sectors)].fill(0xdd);
        Ok(())
    }

    async fn write_zeroes(
        &self,
        sector: Sector,
        sectors: Sectors,
        flags: ZeroFlags,
    ) -> Result<(), VolumeError> {
        let mut state = self.0.begin(Op::WriteZeroes, sector, sectors)?;
        state.counts.zeroes += 1;
        state.counts.unmaps += u64::from(flags.may_unmap);
        if flags.may_unmap {
            state.counts.unmapped_sectors += sectors.0;
        }
        state.bytes[bytes_of(sector, sectors)].fill(0);
        Ok(())
    }

    async fn status(&self, _sector: Sector, sectors: Sectors) -> Result<Vec<RangeStatus>, VolumeError> {
        Ok(vec![RangeStatus { sectors, hole: false, zero: false }])
    }
}
