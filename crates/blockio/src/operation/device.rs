//! A request of a device, in the reactor's slot.
//!
//! Owns the request from its submission to its completion: the commands that carry it out, the continuation of short
//! transfers, `EINTR` and `EAGAIN`, and the writes that go to the kernel together with it (module `gather`). The table in
//! module `file` says what becomes of each kind of request. Must not know the reactor.

use std::cell::{Cell, RefCell};
use std::os::fd::{AsRawFd, RawFd};
use std::rc::Rc;

use ::io::{Buffer, Completer, IoError, Op as What, Request};

use super::zeroing::{ZeroWays, Zeroing};
use super::{Fate, Op, Operation, Step, kind};
use crate::claim::Opened;
use crate::cmd::{Cmd, MAX_TRANSFER_BYTES};
use crate::gather::{self, Gathered};
use crate::registered::BufferNumbers;
use crate::workers::DeviceThreads;

/// Number of zero bytes that are written at once if the kernel has no better operation.
const ZEROS_BYTES: usize = 1 << 20;

pub(crate) const ZERO_RANGE: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
pub(crate) const PUNCH_HOLE: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;

/// Largest transfer of a file in memory that is carried out on the driver's thread: about 20 µs of copying.
const HERE_BYTES: u64 = 128 << 10;

/// An open device with what all its operations share.
pub(crate) struct DeviceFile {
    /// Helper threads of a block device on a ring. They are named by the descriptor, so they are dropped before it.
    threads: Option<DeviceThreads>,
    /// Whether reads and writes on the ring carry `RWF_NOWAIT`.
    nowait: Cell<bool>,
    pub(crate) opened: Opened,
    pub(crate) zero_ways: Cell<ZeroWays>,
    zeros: RefCell<Option<Buffer>>,
    gathers: gather::Spare,
    numbers: Rc<BufferNumbers>,
}

impl DeviceFile {
    /// A file whose operations use these threads, if there are any, and memory that the ring knows by these numbers.
    pub(crate) fn new(
        opened: Opened,
        threads: Option<DeviceThreads>,
        numbers: Rc<BufferNumbers>,
    ) -> DeviceFile {
        DeviceFile {
            // Through the page cache, the ring waits for reads without a thread, so the flag is not needed.
            nowait: Cell::new(threads.is_some() && opened.direct),
            threads,
            opened,
            zero_ways: Cell::new(ZeroWays::ALL),
            zeros: RefCell::new(None),
            gathers: gather::Spare::default(),
            numbers,
        }
    }
}

/// A request on its way through the kernel.
pub(crate) struct DeviceOp {
    file: Rc<DeviceFile>,
    request: Request,
    completer: Completer,
    /// Bytes that are done.
    done: u64,
    /// How zeros are written, for a write-zeroes.
    zeroing: Zeroing,
    /// Stands in for the request's buffer where that is not aligned enough, or holds zeros.
    stand_in: Option<Buffer>,
    /// Writes that are part of this command; each begins where the one before ends.
    gathered: Option<Box<Gathered>>,
    /// The last command was a transfer on the ring that does not wait.
    nowait: bool,
    errno: Option<i32>,
}

impl DeviceOp {
    /// The operation that carries out `request`.
    pub(crate) fn new(
        file: Rc<DeviceFile>,
        mut request: Request,
        completer: Completer,
        pool: &::io::BufferPool,
    ) -> DeviceOp {
        let range = request.byte_range();
        let stand_in = match (request.op, &mut request.buffer) {
            (What::WriteZeroes { .. }, _) => {
                Some(file.zeros.borrow_mut().get_or_insert_with(|| pool.zeroed(ZEROS_BYTES)).clone())
            }
            // Buffers are aligned to a page, so only the offset in a buffer can break the alignment.
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
        let may_unmap = matches!(request.op, What::WriteZeroes { may_unmap: true });
        let zeroing = file.zero_ways.get().best(may_unmap, file.opened.is_block);
        DeviceOp {
            file,
            request,
            completer,
            done: 0,
            zeroing,
            stand_in,
            gathered: None,
            nowait: false,
            errno: None,
        }
    }

    fn left(&self) -> u64 {
        self.request.sectors.bytes() - self.done
    }

    /// Whether this may wait for neighbours until the end of the turn.
    pub(crate) fn may_be_gathered(&self) -> bool {
        matches!(self.request.op, What::Write { .. })
            && self.stand_in.is_none()
            && !self.file.opened.in_memory
            && self.left() < gather::MAX_BYTES
    }

    /// Adds `next` to this operation's command if it is adjacent to it, else gives it back.
    ///
    /// Both operations may be gathered, and no command of either has gone to the kernel.
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
            nowait: false,
            errno: None,
        };
        let ops = gathered.drain().map(alone).collect();
        file.gathers.put_back(gathered);
        ops
    }

    /// The command that continues the request at `done`.
    fn command(&mut self) -> Cmd {
        let fd: RawFd = self.file.opened.file.as_raw_fd();
        let offset = self.request.sector.bytes() + self.done;
        let nowait = self.nowait;
        if let (Some(gathered), What::Write { fua: durable }) = (&mut self.gathered, self.request.op) {
            let (iovecs, count) = gathered.iovecs(&self.request);
            return Cmd::WriteGathered { fd, iovecs, count, offset, durable, nowait };
        }
        let left = self.left();
        let len = left.min(MAX_TRANSFER_BYTES) as u32;
        // `submit` has checked that offset plus length lie in the buffer, which fits into memory.
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
                Cmd::Read { fd, ptr, len, offset, number, nowait }
            }
            What::Write { fua } => {
                let ptr = match (&self.stand_in, &self.request.buffer) {
                    (Some(b), _) => b.as_slice()[at..][..len as usize].as_ptr(),
                    (None, Some(b)) => {
                        b.as_slice()[self.request.buffer_offset_bytes + at..][..len as usize].as_ptr()
                    }
                    (None, None) => unreachable!("checked on submission"),
                };
                Cmd::Write { fd, ptr, len, offset, durable: fua, number, nowait }
            }
            What::Flush => Cmd::Flush { fd },
            What::Discard if self.file.opened.is_block => Cmd::Discard { fd, offset, len: left },
            What::Discard => Cmd::Fallocate { fd, mode: PUNCH_HOLE, offset, len: left },
            What::WriteZeroes { .. } => match (self.zeroing, &self.stand_in) {
                (Zeroing::ZeroRange, _) => Cmd::Fallocate { fd, mode: ZERO_RANGE, offset, len: left },
                (Zeroing::PunchHole, _) => Cmd::Fallocate { fd, mode: PUNCH_HOLE, offset, len: left },
                (Zeroing::Write, Some(zeros)) => {
                    let len = left.min(zeros.len() as u64) as u32;
                    let ptr = zeros.as_slice().as_ptr();
                    Cmd::Write { fd, ptr, len, offset, durable: false, number: None, nowait }
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

    /// Whether the next command moves data, rather than telling the device something.
    fn transfers(&self) -> bool {
        match self.request.op {
            What::Read | What::Write { .. } => true,
            What::WriteZeroes { .. } => self.zeroing == Zeroing::Write,
            What::Flush | What::Discard => false,
        }
    }

    fn failed(&mut self, errno: i32) -> Step {
        let refused = matches!(errno, libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::ENODEV);
        if let What::WriteZeroes { may_unmap } = self.request.op
            && self.zeroing != Zeroing::Write
            && refused
        {
            let left = self.file.zero_ways.get().without(self.zeroing);
            self.file.zero_ways.set(left);
            self.zeroing = left.best(may_unmap, self.file.opened.is_block);
            return self.next();
        }
        self.errno = Some(errno);
        Step::Done
    }

    fn moved(&mut self, n: u64) -> Step {
        if !self.transfers() || n >= self.left() {
            return Step::Done;
        }
        // Direct I/O continues only at whole blocks. If the kernel moves no byte, the file was truncated or the device is
        // broken.
        let block = u64::from(self.file.opened.info.logical_block_bytes);
        let whole = n / block * block;
        if whole == 0 {
            self.errno = Some(libc::EIO);
            return Step::Done;
        }
        self.done += whole;
        self.next()
    }

    /// The operation could not be started: it ends with this error.
    pub(crate) fn refuse(mut self, errno: i32) {
        self.errno = Some(errno);
        self.finish();
    }
}

impl Operation for DeviceOp {
    kind!(Device);

    fn next(&mut self) -> Step {
        let here = self.file.opened.in_memory
            && match self.request.op {
                What::Read | What::Write { .. } => self.left() <= HERE_BYTES,
                What::Flush => true,
                What::Discard | What::WriteZeroes { .. } => false,
            };
        let transfers = self.transfers();
        self.nowait = transfers && self.file.nowait.get();
        let cmd = self.command();
        // The ring would give a command that is no transfer, such as a flush, to a kernel thread.
        let by_threads = self.file.threads.is_some() && !transfers;
        match (here, self.file.opened.served_by_others || by_threads) {
            (true, _) => Step::NextHere(cmd),
            (false, true) => Step::NextBlocking(cmd),
            (false, false) => Step::Next(cmd),
        }
    }

    fn advance(&mut self, result: i32) -> Step {
        match result {
            e if e == -libc::EINTR => self.next(),
            // The device has no room or has to split the request, or the kernel lacks a resource. The command is repeated where
            // it may wait.
            e if e == -libc::EAGAIN => {
                self.nowait = false;
                Step::NextBlocking(self.command())
            }
            // The device does not support `RWF_NOWAIT`.
            e if e == -libc::EOPNOTSUPP && self.nowait => {
                self.file.nowait.set(false);
                self.next()
            }
            n if self.gathered.as_ref().is_some_and(|g| n as i64 != g.bytes_with(&self.request)) => {
                Step::Apart
            }
            e if e < 0 => self.failed(-e),
            n => self.moved(n as u64),
        }
    }

    fn fate(&mut self) -> Fate {
        Fate::Leaves
    }

    fn finish(self) {
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
        // The gathered writes succeeded or failed as a whole. A partial result has split them before.
        let Some(mut gathered) = gathered else { return };
        for (request, completer) in gathered.drain() {
            let result = match errno {
                None => Ok(()),
                Some(e) => Err(IoError::of(&file.opened.info.name, &request, e)),
            };
            completer.complete(result, request.buffer);
        }
        file.gathers.put_back(gathered);
    }

    fn is_under_way(&self) -> bool {
        true
    }
}
