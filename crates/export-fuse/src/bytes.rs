//! A volume as a file sees it: any range of bytes, cut at the volume's end.
//!
//! Owns the way from bytes to whole sectors: reads fetch the sectors around the range; a write that
//! begins or ends within a sector reads that sector first and keeps everybody else from writing meanwhile
//! (module `gate`). Runs on the thread of the volume. Must not know files, handles or who asks.
//!
//! Invariant: a byte that is not in a request's range never changes.

use std::ops::Range;
use std::rc::Rc;

use format::{SECTOR_BYTES, Sector, Sectors};
use io::{BlockVolume, Buffer, BufferPool, VolumeError, WriteFlags, ZeroFlags};

use crate::gate::Gate;

/// See the module head.
pub(crate) struct ByteVolume<V> {
    volume: Rc<V>,
    pool: BufferPool,
    bytes: u64,
    gate: Gate,
}

/// Data on its way to the volume, in memory of the volume's thread.
pub(crate) struct Staged {
    sector: Sector,
    /// Whole sectors; those at the ends may be incomplete.
    buffer: Buffer,
    /// Where in the buffer the data lies.
    data: Range<usize>,
}

impl Staged {
    /// Bytes of data. Fewer than were given if the volume ended before.
    pub(crate) fn len(&self) -> usize {
        self.data.len()
    }

    fn sectors(&self) -> Sectors {
        sectors_of(self.buffer.len())
    }
}

fn sectors_of(bytes: usize) -> Sectors {
    Sectors(bytes as u64 / SECTOR_BYTES)
}

const SECTOR: usize = SECTOR_BYTES as usize;

impl<V: BlockVolume> ByteVolume<V> {
    pub(crate) fn new(volume: Rc<V>, pool: BufferPool) -> ByteVolume<V> {
        let bytes = volume.sectors().bytes();
        ByteVolume { volume, pool, bytes, gate: Gate::default() }
    }

    /// How much of `bytes` at `offset` lies in the volume.
    fn cut(&self, offset: u64, bytes: u64) -> u64 {
        bytes.min(self.bytes.saturating_sub(offset))
    }

    /// The sectors around a range, and where the range lies in them.
    fn around(offset: u64, bytes: usize) -> (Sector, usize, Range<usize>) {
        let head = (offset % SECTOR_BYTES) as usize;
        let whole = (head + bytes).next_multiple_of(SECTOR);
        (Sector(offset / SECTOR_BYTES), whole, head..head + bytes)
    }

    /// Reads; the answer is the part of the buffer that holds the data, shorter than `bytes` if the volume
    /// ends before.
    pub(crate) async fn read(&self, offset: u64, bytes: u32) -> Result<(Buffer, Range<usize>), VolumeError> {
        let bytes = self.cut(offset, u64::from(bytes)) as usize;
        if bytes == 0 {
            return Ok((self.pool.take(0), 0..0));
        }
        let (sector, whole, data) = Self::around(offset, bytes);
        let buffer = self.pool.take(whole);
        let (buffer, result) = self.volume.read(sector, sectors_of(whole), buffer, 0).await;
        result.map(|()| (buffer, data))
    }

    /// Copies `data` for a write at `offset`, so that its memory can go back to where it came from.
    pub(crate) fn stage(&self, offset: u64, data: &[u8]) -> Staged {
        let bytes = self.cut(offset, data.len() as u64) as usize;
        let (sector, whole, at) = Self::around(offset, bytes);
        let mut buffer = self.pool.take(if bytes == 0 { 0 } else { whole });
        if bytes > 0 {
            buffer.as_mut()[at.clone()].copy_from_slice(&data[..bytes]);
        }
        Staged { sector, buffer, data: at }
    }

    /// Writes what was staged.
    pub(crate) async fn write(&self, staged: Staged, durable: bool) -> Result<(), VolumeError> {
        let flags = WriteFlags { fua: durable };
        let sectors = staged.sectors();
        if sectors == Sectors::ZERO {
            return Ok(());
        }
        if staged.data == (0..staged.buffer.len()) {
            let _shared = self.gate.shared().await;
            return self.volume.write(staged.sector, sectors, staged.buffer, 0, flags).await;
        }
        let _alone = self.gate.alone().await;
        let staged = self.complete_ends(staged).await?;
        self.volume.write(staged.sector, sectors, staged.buffer, 0, flags).await
    }

    /// Fills what is missing of the first and the last sector from the volume.
    async fn complete_ends(&self, mut staged: Staged) -> Result<Staged, VolumeError> {
        let Range { start, end } = staged.data.clone();
        let last = (end - 1) / SECTOR * SECTOR;
        if start > 0 {
            let sector = self.read_sector(staged.sector).await?;
            staged.buffer.as_mut()[..start].copy_from_slice(&sector.as_slice()[..start]);
        }
        if end < last + SECTOR {
            let sector = self.read_sector(staged.sector + sectors_of(last)).await?;
            staged.buffer.as_mut()[end..].copy_from_slice(&sector.as_slice()[end - last..]);
        }
        Ok(staged)
    }

    async fn read_sector(&self, sector: Sector) -> Result<Buffer, VolumeError> {
        let (buffer, result) = self.volume.read(sector, Sectors(1), self.pool.take(SECTOR), 0).await;
        result.map(|()| buffer)
    }

    /// Makes a range read as zeros.
    pub(crate) async fn zero(&self, offset: u64, bytes: u64, may_unmap: bool) -> Result<(), VolumeError> {
        let end = offset.saturating_add(self.cut(offset, bytes));
        let first = offset.next_multiple_of(SECTOR_BYTES).min(end);
        let last = (end / SECTOR_BYTES * SECTOR_BYTES).max(first);
        for (from, to) in [(offset, first), (last, end)] {
            if from < to {
                // Shorter than a sector.
                let zeros = [0; SECTOR];
                self.write(self.stage(from, &zeros[..(to - from) as usize]), false).await?;
            }
        }
        if first == last {
            return Ok(());
        }
        let _shared = self.gate.shared().await;
        let (sector, sectors) = (Sector(first / SECTOR_BYTES), Sectors((last - first) / SECTOR_BYTES));
        self.volume.write_zeroes(sector, sectors, ZeroFlags { fua: false, may_unmap }).await
    }

    /// Makes everything that completed before durable.
    pub(crate) async fn flush(&self) -> Result<(), VolumeError> {
        self.volume.flush().await
    }
}
