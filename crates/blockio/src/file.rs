//! A device on a block device or a regular file.
//!
//! Owns the open file with its claim, and turns requests into commands of the reactor. Short transfers,
//! `EINTR` and `EAGAIN` are continued here. Direct I/O where the file takes it, else buffered with
//! fdatasync(2) for flushes, which keeps the same promises through the page cache. A file in memory
//! (tmpfs) is read, written and flushed on the driver's thread, as long as the transfer is small: io_uring
//! would hand each to a kernel thread, which costs several times the copy. A file of a file system that another
//! process or host serves (FUSE, NFS) goes to helper threads: there io_uring may wait on the driver's thread. Writes
//! that lie side by side and were submitted in the same turn go to the kernel as one (module `gather`).
//!
//! What becomes of a request:
//!
//! | request | block device | regular file |
//! |---|---|---|
//! | durable write | `RWF_DSYNC` (the kernel uses FUA or a flush) | `RWF_DSYNC` |
//! | flush | fdatasync(2); nothing on a device without a write cache | fdatasync(2) |
//! | discard | `BLKDISCARD` on a helper thread | punches a hole |
//! | write zeroes | `FALLOC_FL_ZERO_RANGE`, else writes | `ZERO_RANGE`, else a hole, else writes |

use std::cell::{Cell, RefCell};
use std::os::fd::{AsRawFd, RawFd};
use std::path::Path;
use std::rc::Rc;

use ::io::{Buffer, Completer, Device, DeviceInfo, IoError, Op as What, Request};

use crate::claim::{OpenError, OpenOptions, Opened, open};
use crate::cmd::{Cmd, MAX_TRANSFER_BYTES};
use crate::gather::{self, Gathered};
use crate::reactor::{Op, Reactor, Step};
use crate::registered::Numbers;
use crate::write_cache::WriteCache;

/// Zeros that are written at once where the kernel has no better way.
const ZEROS_BYTES: usize = 1 << 20;

const ZERO_RANGE: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
const PUNCH_HOLE: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;

/// Largest transfer of a file in memory that is carried out on the driver's thread: about 20 µs of copying.
const HERE_BYTES: u64 = 128 << 10;

/// How zeros get to the medium; goes down the list when the kernel refuses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Zeroing {
    ZeroRange,
    PunchHole,
    Write,
}

pub(crate) struct FileInner {
    opened: Opened,
    zeroing: Cell<Zeroing>,
    zeros: RefCell<Option<Buffer>>,
    gathers: gather::Spare,
    numbers: Rc<Numbers>,
}

/// A device on a block device or a regular file. Closing happens when the last handle and the last
/// operation are gone, and gives up the claim.
#[derive(Clone)]
pub struct FileDevice {
    inner: Rc<FileInner>,
    reactor: Reactor,
}

impl FileDevice {
    /// Opens and claims `path`. Blocks for as long as open(2) and a few look-ups take.
    ///
    /// # Errors
    /// [`OpenError`]: in use (by whom, where that can be found), not a device or file, or refused.
    pub fn open(reactor: &Reactor, path: &Path, options: &OpenOptions) -> Result<FileDevice, OpenError> {
        Ok(Self::from_opened(reactor, open(path, options)?))
    }

    pub(crate) fn from_opened(reactor: &Reactor, opened: Opened) -> FileDevice {
        let inner = FileInner {
            opened,
            zeroing: Cell::new(Zeroing::ZeroRange),
            zeros: RefCell::new(None),
            gathers: gather::Spare::default(),
            numbers: reactor.numbers().clone(),
        };
        FileDevice { inner: Rc::new(inner), reactor: reactor.clone() }
    }

    /// What is unusual about this device (no direct I/O, for example), for the log.
    pub fn note(&self) -> Option<&str> {
        self.inner.opened.note.as_deref()
    }

    /// Whether writes are refused.
    pub fn read_only(&self) -> bool {
        self.inner.opened.read_only
    }

    /// Whether this is a block device, not a file.
    pub fn is_block_device(&self) -> bool {
        self.inner.opened.is_block
    }
}

impl Device for FileDevice {
    fn info(&self) -> &DeviceInfo {
        &self.inner.opened.info
    }

    fn submit(&self, mut request: Request, completer: Completer) {
        let refused = match self.inner.opened.info.check(&mut request) {
            Err(e) => Some(e),
            Ok(()) if self.inner.opened.read_only && !matches!(request.op, What::Read | What::Flush) => {
                Some(IoError::of(&self.inner.opened.info.name, &request, libc::EROFS))
            }
            Ok(()) if request.op == What::Discard && !self.inner.opened.info.discard => {
                Some(IoError::of(&self.inner.opened.info.name, &request, libc::EOPNOTSUPP))
            }
            Ok(()) => None,
        };
        if let Some(e) = refused {
            completer.complete(Err(e), request.buffer);
            return;
        }
        let nothing_to_do = match request.op {
            What::Flush => self.inner.opened.write_cache.as_ref().is_some_and(WriteCache::is_absent),
            _ => request.sectors.0 == 0,
        };
        if nothing_to_do {
            completer.complete(Ok(()), request.buffer);
            return;
        }
        let op = DeviceOp::new(self.inner.clone(), request, completer, self.reactor.pool());
        let started = if op.may_be_gathered() {
            self.reactor.hold(op)
        } else {
            self.reactor.start(Op::Device(op), |op| match op {
                Op::Device(op) => op.next(),
                Op::Socket(_) | Op::Command(_) => unreachable!("made above"),
            })
        };
        if let Err(Op::Device(mut op)) = started.map(|_| ()) {
            op.errno = Some(libc::ECANCELED);
            op.finish();
        }
    }
}

/// A request on its way through the kernel.
pub(crate) struct DeviceOp {
    file: Rc<FileInner>,
    request: Request,
    completer: Completer,
    /// Bytes that are done.
    done: u64,
    /// How zeros are written, for a write-zeroes.
    zeroing: Zeroing,
    /// Stands in for the request's buffer where that is not aligned enough, or holds zeros.
    stand_in: Option<Buffer>,
    /// Writes that go with this one, right behind it.
    gathered: Option<Box<Gathered>>,
    errno: Option<i32>,
}

impl DeviceOp {
    fn new(
        file: Rc<FileInner>,
        mut request: Request,
        completer: Completer,
        pool: &::io::BufferPool,
    ) -> DeviceOp {
        let range = request.byte_range();
        let stand_in = match (request.op, &mut request.buffer) {
            (What::WriteZeroes, _) => {
                Some(file.zeros.borrow_mut().get_or_insert_with(|| pool.zeroed(ZEROS_BYTES)).clone())
            }
            // Buffers are aligned to a page; what may be wrong is the offset in them.
            (op @ (What::Read | What::Write { .. }), Some(buffer))
                if !range.start.is_multiple_of(file.opened.memory_align_bytes) =>
            {
                Some(match op {
                    What::Read => pool.take(range.len()),
                    _ => pool.copy_of(&buffer.as_slice()[range]),
                })
            }
            _ => None,
        };
        let zeroing = file.zeroing.get();
        DeviceOp { file, request, completer, done: 0, zeroing, stand_in, gathered: None, errno: None }
    }

    fn left(&self) -> u64 {
        self.request.sectors.bytes() - self.done
    }

    /// Whether this may wait for neighbours until the end of the turn.
    fn may_be_gathered(&self) -> bool {
        matches!(self.request.op, What::Write { .. })
            && self.stand_in.is_none()
            && !self.file.opened.in_memory
            && self.left() < gather::MAX_BYTES
    }

    /// Takes `next` along if it belongs right behind this one, else gives it back. Both may be gathered and none has
    /// gone to the kernel.
    ///
    /// # Errors
    /// The operation, as it was.
    #[allow(clippy::result_large_err, reason = "boxing would allocate")]
    pub(crate) fn take_along(&mut self, next: DeviceOp) -> Result<(), DeviceOp> {
        let beside = Rc::ptr_eq(&self.file, &next.file) && self.request.op == next.request.op;
        let behind =
            self.gathered.as_ref().map_or(self.request.sectors, |g| self.request.sectors + g.sectors());
        let fits = (behind + next.request.sectors).bytes() <= gather::MAX_BYTES
            && self.gathered.as_ref().is_none_or(|g| !g.is_full());
        if !beside || !fits || self.request.sector.checked_add(behind) != Some(next.request.sector) {
            return Err(next);
        }
        let DeviceOp { request, completer, .. } = next;
        self.gathered.get_or_insert_with(|| self.file.gathers.take()).push(request, completer);
        Ok(())
    }

    /// After [`Step::Apart`]: the writes that were taken along, each by itself.
    pub(crate) fn apart(&mut self) -> Vec<DeviceOp> {
        let Some(mut gathered) = self.gathered.take() else { return Vec::new() };
        let (file, zeroing) = (&self.file, self.zeroing);
        let alone = |(request, completer)| DeviceOp {
            file: file.clone(),
            request,
            completer,
            done: 0,
            zeroing,
            stand_in: None,
            gathered: None,
            errno: None,
        };
        let ops = gathered.drain().map(alone).collect();
        file.gathers.keep(gathered);
        ops
    }

    /// The command that goes on from `done`.
    fn command(&mut self) -> Cmd {
        let fd: RawFd = self.file.opened.file.as_raw_fd();
        let offset = self.request.sector.bytes() + self.done;
        if let (Some(gathered), What::Write { fua: durable }) = (&mut self.gathered, self.request.op) {
            let (iovecs, count) = gathered.iovecs(&self.request);
            return Cmd::WriteGathered { fd, iovecs, count, offset, durable };
        }
        let left = self.left();
        let len = left.min(MAX_TRANSFER_BYTES) as u32;
        // Checked on submission: offset plus length lie in the buffer, which fits into memory.
        let at = self.done as usize;
        let number = self.number(at + len as usize);
        match self.request.op {
            What::Read => {
                let ptr = match (&mut self.stand_in, &mut self.request.buffer) {
                    (Some(b), _) => b.as_mut()[at..][..len as usize].as_mut_ptr(),
                    (None, Some(b)) => {
                        b.as_mut()[self.request.buffer_offset_bytes + at..][..len as usize].as_mut_ptr()
                    }
                    (None, None) => unreachable!("checked on submission"),
                };
                Cmd::Read { fd, ptr, len, offset, number }
            }
            What::Write { fua } => {
                let ptr = match (&self.stand_in, &self.request.buffer) {
                    (Some(b), _) => b.as_slice()[at..][..len as usize].as_ptr(),
                    (None, Some(b)) => {
                        b.as_slice()[self.request.buffer_offset_bytes + at..][..len as usize].as_ptr()
                    }
                    (None, None) => unreachable!("checked on submission"),
                };
                Cmd::Write { fd, ptr, len, offset, durable: fua, number }
            }
            What::Flush => Cmd::Flush { fd },
            What::Discard if self.file.opened.is_block => Cmd::Discard { fd, offset, len: left },
            What::Discard => Cmd::Fallocate { fd, mode: PUNCH_HOLE, offset, len: left },
            What::WriteZeroes => match (self.zeroing, &self.stand_in) {
                (Zeroing::ZeroRange, _) => Cmd::Fallocate { fd, mode: ZERO_RANGE, offset, len: left },
                (Zeroing::PunchHole, _) => Cmd::Fallocate { fd, mode: PUNCH_HOLE, offset, len: left },
                (Zeroing::Write, Some(zeros)) => {
                    let len = left.min(zeros.len() as u64) as u32;
                    let ptr = zeros.as_slice().as_ptr();
                    Cmd::Write { fd, ptr, len, offset, durable: false, number: None }
                }
                (Zeroing::Write, None) => unreachable!("a write-zeroes carries zeros"),
            },
        }
    }

    /// The number by which the ring knows the memory up to `end` of the request.
    fn number(&self, end: usize) -> Option<u16> {
        if self.stand_in.is_some() {
            return None;
        }
        let (number, known) = self.file.numbers.number_of(self.request.buffer.as_ref()?)?;
        (self.request.buffer_offset_bytes + end <= known).then_some(number)
    }

    /// The step that goes on from `done`.
    pub(crate) fn next(&mut self) -> Step {
        let here = self.file.opened.in_memory
            && match self.request.op {
                What::Read | What::Write { .. } => self.left() <= HERE_BYTES,
                What::Flush => true,
                What::Discard | What::WriteZeroes => false,
            };
        let cmd = self.command();
        match (here, self.file.opened.served_by_others) {
            (true, _) => Step::NextHere(cmd),
            (false, true) => Step::NextBlocking(cmd),
            (false, false) => Step::Next(cmd),
        }
    }

    /// Takes in a result of the kernel.
    pub(crate) fn advance(&mut self, result: i32) -> Step {
        match result {
            e if e == -libc::EINTR => self.next(),
            // Short of memory or requests: again, where the kernel may wait for them.
            e if e == -libc::EAGAIN => Step::NextBlocking(self.command()),
            n if self.gathered.as_ref().is_some_and(|g| n as i64 != g.bytes_with(&self.request)) => {
                Step::Apart
            }
            e if e < 0 => self.failed(-e),
            n => self.moved(n as u64),
        }
    }

    fn failed(&mut self, errno: i32) -> Step {
        let refused = matches!(errno, libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::ENODEV);
        if self.request.op == What::WriteZeroes && self.zeroing != Zeroing::Write && refused {
            self.zeroing = match self.zeroing {
                Zeroing::ZeroRange if !self.file.opened.is_block => Zeroing::PunchHole,
                _ => Zeroing::Write,
            };
            self.file.zeroing.set(self.zeroing);
            return self.next();
        }
        self.errno = Some(errno);
        Step::Done
    }

    fn moved(&mut self, n: u64) -> Step {
        let transfers = match self.request.op {
            What::Read | What::Write { .. } => true,
            What::WriteZeroes => self.zeroing == Zeroing::Write,
            What::Flush | What::Discard => false,
        };
        if !transfers || n >= self.left() {
            return Step::Done;
        }
        // Direct I/O goes on at whole blocks only. Nothing at all moves behind the end of a file that
        // somebody truncated, or on a device that broke.
        let block = u64::from(self.file.opened.info.logical_block_bytes);
        let whole = n / block * block;
        if whole == 0 {
            self.errno = Some(libc::EIO);
            return Step::Done;
        }
        self.done += whole;
        self.next()
    }

    /// Tells the waiter.
    pub(crate) fn finish(self) {
        let DeviceOp { file, mut request, completer, stand_in, gathered, errno, .. } = self;
        let result = match errno {
            None => Ok(()),
            Some(e) => Err(IoError::of(&file.opened.info.name, &request, e)),
        };
        if let (What::Read, Ok(()), Some(from)) = (request.op, &result, &stand_in) {
            let range = request.byte_range();
            if let Some(to) = &mut request.buffer {
                to.as_mut()[range].copy_from_slice(from.as_slice());
            }
        }
        completer.complete(result, request.buffer);
        // They ended as a whole: what did not was taken apart.
        let Some(mut gathered) = gathered else { return };
        for (request, completer) in gathered.drain() {
            let result = match errno {
                None => Ok(()),
                Some(e) => Err(IoError::of(&file.opened.info.name, &request, e)),
            };
            completer.complete(result, request.buffer);
        }
        file.gathers.keep(gathered);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance;
    use crate::{Backend, Driver, DriverOptions};
    use ::io::Disk;
    use format::{Sector, Sectors};

    /// Keeps what was submitted instead of doing it.
    struct Capture {
        info: DeviceInfo,
        taken: RefCell<Option<(Request, Completer)>>,
    }

    impl Device for Capture {
        fn info(&self) -> &DeviceInfo {
            &self.info
        }

        fn submit(&self, request: Request, completer: Completer) {
            *self.taken.borrow_mut() = Some((request, completer));
        }
    }

    fn opened(dir: &Path, sectors: Sectors) -> Opened {
        let path = dir.join(format!("{}", std::fs::read_dir(dir).unwrap().count()));
        std::fs::File::create(&path).unwrap().set_len(sectors.bytes()).unwrap();
        open(&path, &OpenOptions::default()).unwrap()
    }

    /// An operation as it is before its first command, and the future that waits for it.
    fn operation(driver: &Driver, what: What, sectors: u64) -> (DeviceOp, ::io::IoFuture) {
        let dir = tempfile::tempdir().unwrap();
        let device = FileDevice::from_opened(driver.reactor(), opened(dir.path(), Sectors(4096)));
        let capture = Rc::new(Capture { info: device.info().clone(), taken: RefCell::new(None) });
        let disk = Disk::new(capture.clone(), driver.handle());
        let pool = driver.handle().pool().clone();
        let buffer = what.has_buffer().then(|| pool.take((sectors * 512) as usize));
        let future = disk.start(Request {
            op: what,
            sector: Sector(8),
            sectors: Sectors(sectors),
            buffer,
            buffer_offset_bytes: 0,
        });
        let (request, completer) = capture.taken.borrow_mut().take().unwrap();
        (DeviceOp::new(device.inner.clone(), request, completer, &pool), future)
    }

    /// Offset and length of the next command.
    fn next(step: Step) -> (u64, u64) {
        match step {
            Step::Next(Cmd::Read { offset, len, .. } | Cmd::Write { offset, len, .. })
            | Step::NextHere(Cmd::Read { offset, len, .. } | Cmd::Write { offset, len, .. }) => {
                (offset, len.into())
            }
            Step::Next(Cmd::Fallocate { offset, len, .. }) => (offset, len),
            _ => panic!("expected another command"),
        }
    }

    #[test]
    fn short_transfers_and_interruptions_are_continued() {
        let driver = Driver::new(DriverOptions::default()).unwrap();
        let (mut op, future) = operation(&driver, What::Read, 64);
        assert_eq!(next(op.advance(-libc::EINTR)), (4096, 32768));
        assert_eq!(next(op.advance(8192)), (4096 + 8192, 24576));
        assert!(matches!(op.advance(-libc::EAGAIN), Step::NextBlocking(Cmd::Read { .. })));
        assert_eq!(next(op.advance(512 + 100)), (4096 + 8704, 24064), "goes on at a whole block");
        assert!(matches!(op.advance(24064), Step::Done));
        op.finish();
        assert_eq!(driver.block_on(future).result, Ok(()));
    }

    #[test]
    fn a_transfer_that_makes_no_progress_is_an_error() {
        let driver = Driver::new(DriverOptions::default()).unwrap();
        for moved in [0, 100] {
            let (mut op, future) = operation(&driver, What::Write { fua: true }, 64);
            assert!(matches!(op.advance(moved), Step::Done));
            op.finish();
            let done = driver.block_on(future);
            assert_eq!(done.result.unwrap_err().errno, libc::EIO);
            assert!(done.buffer.is_some());
        }
    }

    #[test]
    fn zeroing_goes_down_the_ladder_and_remembers() {
        let driver = Driver::new(DriverOptions::default()).unwrap();
        let (mut op, future) = operation(&driver, What::WriteZeroes, 4000);
        assert!(matches!(op.command(), Cmd::Fallocate { mode: ZERO_RANGE, .. }));
        let Step::Next(Cmd::Fallocate { mode: PUNCH_HOLE, .. }) = op.advance(-libc::EOPNOTSUPP) else {
            panic!("expected a hole")
        };
        assert_eq!(next(op.advance(-libc::EOPNOTSUPP)), (4096, 1 << 20), "as much as there are zeros");
        assert_eq!(op.file.zeroing.get(), Zeroing::Write);
        assert_eq!(next(op.advance(1 << 20)), (4096 + (1 << 20), 4000 * 512 - (1 << 20)));
        assert!(matches!(op.advance(4000 * 512 - (1 << 20)), Step::Done));
        op.finish();
        assert_eq!(driver.block_on(future).result, Ok(()));

        let (mut op, future) = operation(&driver, What::WriteZeroes, 8);
        assert!(matches!(op.advance(-libc::ENOSPC), Step::Done), "an error that no other way avoids");
        op.finish();
        assert_eq!(driver.block_on(future).result.unwrap_err().errno, libc::ENOSPC);
    }

    fn write_of(byte: u8, sector: u64, sectors: u64, pool: &::io::BufferPool) -> Request {
        let mut buffer = pool.take((sectors * 512) as usize);
        buffer.as_mut().fill(byte);
        Request {
            op: What::Write { fua: false },
            sector: Sector(sector),
            sectors: Sectors(sectors),
            buffer: Some(buffer),
            buffer_offset_bytes: 0,
        }
    }

    /// On a file system in memory writes would be made at once.
    fn on_a_disk(opened: Opened) -> Opened {
        Opened { in_memory: false, ..opened }
    }

    #[test]
    fn neighbours_of_one_turn_are_one_command() {
        for backend in [Backend::Auto, Backend::Pool] {
            let driver = Driver::new(DriverOptions { backend, ..DriverOptions::default() }).unwrap();
            let dir = tempfile::tempdir().unwrap();
            let device =
                FileDevice::from_opened(driver.reactor(), on_a_disk(opened(dir.path(), Sectors(4096))));
            let disk = Disk::new(Rc::new(device), driver.handle());
            let pool = driver.handle().pool().clone();
            let before = driver.reactor().counts();
            // Two rows that grow by turns, one piece that belongs to neither, and one that is durable.
            let writes: Vec<_> = [(1, 0, 8), (2, 800, 16), (3, 8, 8), (4, 816, 1), (5, 100, 8), (6, 16, 24)]
                .map(|(byte, sector, sectors)| disk.start(write_of(byte, sector, sectors, &pool)))
                .into_iter()
                .collect();
            let durable = disk.start(Request { op: What::Write { fua: true }, ..write_of(7, 40, 8, &pool) });
            driver.block_on(async {
                for write in writes {
                    let done = write.await;
                    assert_eq!(done.result, Ok(()));
                    assert!(done.buffer.is_some(), "the buffer comes back");
                }
                assert_eq!(durable.await.result, Ok(()));
            });
            let after = driver.reactor().counts();
            assert_eq!(after.operations - before.operations, 7);
            assert_eq!(after.commands - before.commands, 4);
            driver.block_on(async {
                for (byte, sector, sectors) in
                    [(1, 0, 8), (3, 8, 8), (6, 16, 24), (7, 40, 8), (2, 800, 16), (4, 816, 1), (5, 100, 8)]
                {
                    let done = disk
                        .start_read(Sector(sector), Sectors(sectors), pool.take((sectors * 512) as usize), 0)
                        .await;
                    assert_eq!(done.result, Ok(()));
                    let buffer = done.buffer.unwrap();
                    assert!(buffer.as_slice().iter().all(|b| *b == byte), "sector {sector}");
                }
            });
        }
    }

    /// The kernel refuses the whole, and then each piece; with its own sector in the error.
    #[test]
    fn what_fails_together_is_repeated_apart() {
        let driver = Driver::new(DriverOptions::default()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        let read_only = OpenOptions { access: crate::Access::ReadOnly, ..OpenOptions::default() };
        let opened = Opened { read_only: false, ..on_a_disk(open(&path, &read_only).unwrap()) };
        let device = FileDevice::from_opened(driver.reactor(), opened);
        let disk = Disk::new(Rc::new(device), driver.handle());
        let pool = driver.handle().pool().clone();
        let before = driver.reactor().counts();
        let writes: Vec<_> = (0..3).map(|n| disk.start(write_of(1, n * 8, 8, &pool))).collect();
        driver.block_on(async {
            for (n, write) in (0..).zip(writes) {
                let e = write.await.result.unwrap_err();
                assert_eq!((e.errno, e.sector), (libc::EBADF, Sector(n * 8)));
            }
        });
        assert_eq!(driver.reactor().counts().commands - before.commands, 1 + 3);
    }

    #[test]
    fn a_command_of_many_writes_has_an_end() {
        let driver = Driver::new(DriverOptions::default()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let device = FileDevice::from_opened(driver.reactor(), on_a_disk(opened(dir.path(), Sectors(8192))));
        let disk = Disk::new(Rc::new(device), driver.handle());
        let pool = driver.handle().pool().clone();
        for (sectors, commands) in [(1, 2), (256, 4)] {
            let before = driver.reactor().counts();
            let pieces = if sectors == 1 { 100 } else { 28 };
            let writes: Vec<_> =
                (0..pieces).map(|n| disk.start(write_of(9, n * sectors, sectors, &pool))).collect();
            driver.block_on(async {
                for write in writes {
                    assert_eq!(write.await.result, Ok(()));
                }
            });
            assert_eq!(driver.reactor().counts().commands - before.commands, commands);
        }
    }

    /// A device that wants whole pages in memory, and one that can only be written to.
    #[test]
    fn devices_with_other_needs_conform() {
        for backend in [Backend::Auto, Backend::Pool] {
            let driver = Driver::new(DriverOptions { backend, ..DriverOptions::default() }).unwrap();
            let dir = tempfile::tempdir().unwrap();
            for zeroing in [Zeroing::ZeroRange, Zeroing::PunchHole, Zeroing::Write] {
                driver.block_on(conformance::check(|sectors| {
                    let opened = Opened { memory_align_bytes: 4096, ..opened(dir.path(), sectors) };
                    let device = FileDevice::from_opened(driver.reactor(), opened);
                    device.inner.zeroing.set(zeroing);
                    Disk::new(Rc::new(device), driver.handle())
                }));
            }
        }
    }
}
