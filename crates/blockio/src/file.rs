//! A device on a block device or a regular file.
//!
//! Owns the open file with its claim, refuses what the device cannot do, and starts an operation for each request (module
//! `operation::device`). Uses direct I/O if the file supports it. Otherwise the I/O is buffered and a flush calls
//! fdatasync(2), which keeps the same promises through the page cache. The driver's thread makes small transfers to and from
//! a file in memory (tmpfs) itself: io_uring would pass each to a kernel thread, which costs several times the copy. Requests
//! to a file of a file system that another process or host serves (FUSE, NFS) go to helper threads, because io_uring may wait
//! for such a file system on the driver's thread. Adjacent writes that are submitted in the same turn go to the kernel as one
//! command (module `gather`).
//!
//! A block device on a ring has its own helper threads (module `workers`), so that the kernel never creates a thread for it:
//! creating one takes memory (decision 028). Requests to the ring carry `RWF_NOWAIT`. The helper threads carry out what the
//! ring cannot do without waiting: transfers for which the device has no room, transfers that the device has to split, and
//! all requests that are not transfers. If a device does not support the flag, requests do not carry it, and the kernel
//! creates threads as it needs them.
//!
//! The system calls of requests:
//!
//! | request | block device | regular file |
//! |---|---|---|
//! | durable write | `RWF_DSYNC` (the kernel uses FUA or a flush) | `RWF_DSYNC` |
//! | flush | fdatasync(2); nothing on a device without a write cache | fdatasync(2) |
//! | discard | `BLKDISCARD` on a helper thread | punches a hole |
//! | write zeroes | `FALLOC_FL_ZERO_RANGE`, else writes | `ZERO_RANGE`, else a hole, else writes |
//! | write zeroes that may free the space | a hole, else as above | a hole, else as above |

use std::os::fd::AsRawFd;
use std::path::Path;
use std::rc::Rc;

use ::io::{Completer, Device, DeviceInfo, IoError, Op as What, Request};

use crate::claim::{OpenError, OpenOptions, Opened, open};
use crate::operation::device::{DeviceFile, DeviceOp};
use crate::reactor::Reactor;
use crate::workers::DeviceThreads;
use crate::write_cache::WriteCache;

/// A device on a block device or a regular file.
///
/// The file is closed, and its claim ends, when the last handle is dropped and the last operation has ended.
#[derive(Clone)]
pub struct FileDevice {
    inner: Rc<DeviceFile>,
    reactor: Reactor,
}

impl FileDevice {
    /// Opens and claims `path`. It blocks the thread during open(2) and the queries of the device's properties.
    ///
    /// # Errors
    /// [`OpenError`] if the path is in use (with the holder, if one is found), is no device or file, or cannot be
    /// opened.
    pub fn open(reactor: &Reactor, path: &Path, options: &OpenOptions) -> Result<FileDevice, OpenError> {
        Ok(Self::from_opened(reactor, open(path, options)?))
    }

    pub(crate) fn from_opened(reactor: &Reactor, opened: Opened) -> FileDevice {
        let threads = if opened.is_block { reactor.start_threads_for(opened.file.as_raw_fd()) } else { None };
        Self::with_threads(reactor, opened, threads)
    }

    fn with_threads(reactor: &Reactor, opened: Opened, threads: Option<DeviceThreads>) -> FileDevice {
        let inner = Rc::new(DeviceFile::new(opened, threads, reactor.numbers().clone()));
        FileDevice { inner, reactor: reactor.clone() }
    }

    /// Unusual properties of this device (no direct I/O, for example), for the log.
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
        let started = if op.may_be_gathered() { self.reactor.hold(op) } else { self.reactor.start(op) };
        if let Err(op) = started {
            op.refuse(libc::ECANCELED);
        }
    }
}

#[cfg(test)]
mod tests;
