//! A volume with the operations of a file: any range of bytes, cut at the volume's end.
//!
//! Owns the conversion of byte ranges to whole sectors. A read fetches the sectors around the range. A write that begins or ends
//! within a sector reads that sector first, and excludes all other writes meanwhile (module `gate`). Runs on the thread of the
//! volume. Must not know files, handles or clients.
//!
//! Invariant: a byte outside of a request's range never changes.

use std::ops::Range;
use std::rc::Rc;

use format::{SECTOR_BYTES, Sector, Sectors};
use io::{BlockVolume, Buffer, BufferPool, VolumeError, WriteFlags, ZeroFlags};

use crate::gate::Gate;

/// A volume with reads and writes of byte ranges.
pub(crate) struct ByteVolume<V> {
    volume: Rc<V>,
    pool: BufferPool,
    bytes: u64,
    gate: Gate,
}

/// Data of a write, in memory of the volume's thread.
pub(crate) struct Staged {
    sector: Sector,
    /// Whole sectors. The first and the last may be incomplete.
    buffer: Buffer,
    /// Range of the data in the buffer.
    data: Range<usize>,
}

impl Staged {
    /// Length of the data. It is shorter than the given data if the volume ends before.
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

    /// Number of bytes of the range that lie in the volume.
    fn cut(&self, offset: u64, bytes: u64) -> u64 {
        bytes.min(self.bytes.saturating_sub(offset))
    }

    /// The sectors around a range, and the position of the range in them.
    fn around(offset: u64, bytes: usize) -> (Sector, usize, Range<usize>) {
        let head = (offset % SECTOR_BYTES) as usize;
        let whole = (head + bytes).next_multiple_of(SECTOR);
        (Sector(offset / SECTOR_BYTES), whole, head..head + bytes)
    }

    /// Reads a range. Returns a buffer and the range of the data in it, which is shorter than `bytes` if the volume ends before.
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

    /// Copies `data` for a write at `offset`, so that the caller can reuse the memory of `data`.
    pub(crate) fn stage(&self, offset: u64, data: &[u8]) -> Staged {
        let bytes = self.cut(offset, data.len() as u64) as usize;
        let (sector, whole, at) = Self::around(offset, bytes);
        let mut buffer = self.pool.take(if bytes == 0 { 0 } else { whole });
        if bytes > 0 {
            buffer.as_mut()[at.clone()].copy_from_slice(&data[..bytes]);
        }
        Staged { sector, buffer, data: at }
    }

    /// Writes the staged data.
    pub(crate) async fn write(&self, staged: Staged, durable: bool) -> Result<(), VolumeError> {
        let flags = WriteFlags { fua: durable, ..WriteFlags::default() };
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

    /// Fills the missing parts of the first and the last sector from the volume.
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

    /// Makes a range read as zeros; `may_unmap` permits the volume to free its space.
    pub(crate) async fn zero(&self, offset: u64, bytes: u64, may_unmap: bool) -> Result<(), VolumeError> {
        let bytes = self.cut(offset, bytes);
        if bytes == 0 {
            return Ok(());
        }
        let end = offset + bytes;
        let first = offset.next_multiple_of(SECTOR_BYTES).min(end);
        let last = (end / SECTOR_BYTES * SECTOR_BYTES).max(first);
        for (from, to) in [(offset, first), (last, end)] {
            if from < to {
                // This part is shorter than a sector, so its zeros are written as data.
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

    /// Makes all operations durable that were acknowledged before the call.
    pub(crate) async fn flush(&self) -> Result<(), VolumeError> {
        self.volume.flush().await
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use io::{Clock, Handle, Nanos, RangeStatus, Rng, Runtime, Schedule};

    use super::*;

    struct Still;

    impl Clock for Still {
        fn now(&self) -> Nanos {
            Nanos(0)
        }

        fn wall_seconds(&self) -> u64 {
            0
        }
    }

    struct Shuffled(Rng);

    impl Schedule for Shuffled {
        fn pick(&mut self, ready: usize) -> usize {
            self.0.below(ready as u64) as usize
        }
    }

    /// A volume that yields to other tasks before and after each operation takes effect.
    struct Slow {
        rt: Handle,
        bytes: RefCell<Vec<u8>>,
        broken: Cell<bool>,
    }

    impl Slow {
        async fn at<T>(&self, f: impl FnOnce(&mut Vec<u8>) -> T) -> Result<T, VolumeError> {
            for _ in 0..self.rt.random() % 4 {
                self.rt.yield_now().await;
            }
            let value = f(&mut self.bytes.borrow_mut());
            for _ in 0..self.rt.random() % 4 {
                self.rt.yield_now().await;
            }
            if self.broken.get() { Err(VolumeError::failed("broken")) } else { Ok(value) }
        }
    }

    fn bytes_of(sector: Sector, sectors: Sectors) -> Range<usize> {
        sector.bytes() as usize..(sector.bytes() + sectors.bytes()) as usize
    }

    impl BlockVolume for Slow {
        fn name(&self) -> String {
            "slow".into()
        }

        fn sectors(&self) -> Sectors {
            sectors_of(self.bytes.borrow().len())
        }

        fn logical_block_bytes(&self) -> u32 {
            512
        }

        fn optimal_io_bytes(&self) -> u32 {
            0
        }

        fn read_only(&self) -> bool {
            false
        }

        async fn read(
            &self,
            sector: Sector,
            sectors: Sectors,
            mut buffer: Buffer,
            _offset_bytes: usize,
        ) -> (Buffer, Result<(), VolumeError>) {
            let got = self.at(|b| b[bytes_of(sector, sectors)].to_vec()).await;
            let result = got.map(|b| buffer.as_mut().copy_from_slice(&b));
            (buffer, result)
        }

        async fn write(
            &self,
            sector: Sector,
            sectors: Sectors,
            buffer: Buffer,
            _offset_bytes: usize,
            _flags: WriteFlags,
        ) -> Result<(), VolumeError> {
            self.at(|b| b[bytes_of(sector, sectors)].copy_from_slice(buffer.as_slice())).await
        }

        async fn flush(&self) -> Result<(), VolumeError> {
            Ok(())
        }

        async fn discard(&self, _sector: Sector, _sectors: Sectors) -> Result<(), VolumeError> {
            unreachable!("a discard leaves anything behind")
        }

        async fn write_zeroes(
            &self,
            sector: Sector,
            sectors: Sectors,
            _flags: ZeroFlags,
        ) -> Result<(), VolumeError> {
            self.at(|b| b[bytes_of(sector, sectors)].fill(0)).await
        }

        async fn status(&self, _sector: Sector, _sectors: Sectors) -> Result<Vec<RangeStatus>, VolumeError> {
            unreachable!("no test asks for the state of a range of this volume")
        }
    }

    const SIZE: u64 = 8 * 512;

    fn world(seed: u64) -> (Runtime, Rc<Slow>, Rc<ByteVolume<Slow>>) {
        let runtime = Runtime::new(Rc::new(Still), seed);
        let rt = runtime.handle();
        let bytes = RefCell::new(vec![0xee; SIZE as usize]);
        let slow = Rc::new(Slow { rt: rt.clone(), bytes, broken: Cell::new(false) });
        (runtime, slow.clone(), Rc::new(ByteVolume::new(slow, rt.pool().clone())))
    }

    /// Writers with adjacent ranges, in any order: every range ends with the data of its own last write.
    #[test]
    fn neighbours_do_not_undo_each_other() {
        for seed in 0..200 {
            let (runtime, slow, volume) = world(seed);
            let mut rng = Rng::new(seed);
            let mut ends: Vec<u64> = (0..7).map(|_| rng.below(SIZE)).chain([512, 1024, SIZE]).collect();
            ends.sort_unstable();
            let mut start = 0;
            let mut owners = Vec::new();
            for end in ends {
                let volume = volume.clone();
                let mut rng = rng.fork();
                owners.push((
                    start,
                    end,
                    runtime.handle().spawn(async move {
                        let mut last = 0xee;
                        for _ in 0..4 {
                            last = rng.next_u64() as u8;
                            if rng.chance(1, 4) {
                                last = 0;
                                volume.zero(start, end - start, true).await.unwrap();
                            } else {
                                let staged = volume.stage(start, &vec![last; (end - start) as usize]);
                                volume.write(staged, false).await.unwrap();
                            }
                            let (buffer, data) = volume.read(start, (end - start) as u32).await.unwrap();
                            assert!(buffer.as_slice()[data].iter().all(|b| *b == last), "seed {seed}");
                        }
                        last
                    }),
                ));
                start = end;
            }
            runtime.run(&mut Shuffled(Rng::new(seed)), usize::MAX);
            for (start, end, owner) in owners {
                let last = owner.try_take().unwrap_or_else(|| panic!("seed {seed}: a writer hangs"));
                let bytes = slow.bytes.borrow();
                assert!(bytes[start as usize..end as usize].iter().all(|b| *b == last), "seed {seed}");
            }
        }
    }

    /// A write of a few bytes does not undo an acknowledged write, or zeros, of whole sectors around them.
    #[test]
    fn a_part_does_not_bring_back_what_the_whole_replaced() {
        for seed in 0..200 {
            let (runtime, slow, volume) = world(seed);
            let (whole, part) = (volume.clone(), volume);
            runtime.handle().spawn(async move {
                for value in 1..6 {
                    whole.write(whole.stage(0, &[value; 1024]), false).await.unwrap();
                    whole.zero(512, 512, true).await.unwrap();
                }
            });
            runtime.handle().spawn(async move {
                for _ in 0..6 {
                    part.write(part.stage(500, &[9; 24]), false).await.unwrap();
                }
            });
            runtime.run(&mut Shuffled(Rng::new(seed)), usize::MAX);
            let bytes = slow.bytes.borrow();
            assert!(bytes[..500].iter().all(|b| *b == 5), "seed {seed}");
            assert!(bytes[524..1024].iter().all(|b| *b == 0), "seed {seed}");
        }
    }

    #[test]
    fn the_end_cuts_and_failures_are_passed_on() {
        let (runtime, slow, volume) = world(1);
        let task = runtime.handle().spawn(async move {
            assert_eq!(volume.stage(SIZE - 3, &[1; 10]).len(), 3);
            assert_eq!(volume.stage(SIZE, &[1; 10]).len(), 0);
            assert_eq!(volume.stage(u64::MAX, &[1; 10]).len(), 0);
            assert_eq!(volume.read(SIZE - 3, 10).await.unwrap().1.len(), 3);
            assert_eq!(volume.read(u64::MAX, 10).await.unwrap().1.len(), 0);
            volume.zero(SIZE - 3, u64::MAX, false).await.unwrap();
            volume.zero(u64::MAX, u64::MAX, false).await.unwrap();
            slow.broken.set(true);
            assert!(volume.read(5, 5).await.is_err());
            assert!(volume.write(volume.stage(5, &[1; 5]), false).await.is_err());
            assert!(volume.zero(5, 1500, false).await.is_err());
            slow.broken.set(false);
            volume.write(volume.stage(5, &[1; 5]), false).await.unwrap();
        });
        runtime.run(&mut io::Fifo, usize::MAX);
        assert_eq!(task.try_take(), Some(()), "no request waits for a lock that a failure left");
    }
}
