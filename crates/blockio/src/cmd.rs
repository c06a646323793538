//! One command for the kernel, in a form for both backends.
//!
//! A [`Cmd`] has plain numbers and addresses and owns nothing. Invariant, on which every SAFETY line in this module and in the
//! backends relies: the operation from which a command was made owns the memory and the file that the command names, and stays
//! in its slot of the reactor until the command's result has been taken in. So an address in a `Cmd` is valid from the making of
//! the command to its result. Must not know operations.

use std::os::fd::RawFd;

use io_uring::{opcode, squeue, types};

/// The largest piece that is handed to the kernel at once. Linux stops at 2 GiB less one page.
pub(crate) const MAX_TRANSFER_BYTES: u64 = 1 << 30;

/// `_IO(0x12, 119)`, `include/uapi/linux/fs.h`.
const BLKDISCARD: libc::c_ulong = 0x1277;

/// A system call to be made. It owns neither the memory nor the file that it names.
///
/// With `nowait` the ring answers `-EAGAIN` if it would have to wait. Without it, the ring then passes the command to a
/// kernel thread, which the kernel may have to create first.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Cmd {
    Read {
        fd: RawFd,
        ptr: *mut u8,
        len: u32,
        offset: u64,
        /// The number under which the memory is registered with the ring, if it is registered.
        number: Option<u16>,
        nowait: bool,
    },
    Write {
        fd: RawFd,
        ptr: *const u8,
        len: u32,
        offset: u64,
        durable: bool,
        /// The number under which the memory is registered with the ring, if it is registered.
        number: Option<u16>,
        nowait: bool,
    },
    /// Writes several pieces of memory one behind the other; `iovecs` belongs to the operation like the memory.
    WriteGathered {
        fd: RawFd,
        iovecs: *const libc::iovec,
        count: u32,
        offset: u64,
        durable: bool,
        nowait: bool,
    },
    Flush {
        fd: RawFd,
    },
    Fallocate {
        fd: RawFd,
        mode: i32,
        offset: u64,
        len: u64,
    },
    /// Discard on a block device: an ioctl, so it always runs on a helper thread.
    Discard {
        fd: RawFd,
        offset: u64,
        len: u64,
    },
    Accept {
        fd: RawFd,
    },
    Recv {
        fd: RawFd,
        ptr: *mut u8,
        len: u32,
        all: bool,
    },
    Send {
        fd: RawFd,
        msg: *const libc::msghdr,
    },
    /// A command for the driver of a character device. Only the ring has it.
    Command {
        fd: RawFd,
        code: u32,
        payload: [u8; 16],
    },
}

// SAFETY: while a helper thread has a command, the operation that owns the command's memory and file stays in a slot of the
// reactor, and the driver's thread does not access that memory before the result is back.
unsafe impl Send for Cmd {}

fn rw_flags(durable: bool, nowait: bool) -> i32 {
    (if durable { libc::RWF_DSYNC } else { 0 }) | (if nowait { libc::RWF_NOWAIT } else { 0 })
}

impl Cmd {
    /// Whether the command waits for a peer and not for a device.
    pub(crate) fn is_socket(self) -> bool {
        matches!(self, Cmd::Accept { .. } | Cmd::Recv { .. } | Cmd::Send { .. })
    }

    /// Whether the command reads from or writes to a device.
    pub(crate) fn is_transfer(self) -> bool {
        matches!(self, Cmd::Read { .. } | Cmd::Write { .. } | Cmd::WriteGathered { .. })
    }

    /// The file.
    pub(crate) fn fd(self) -> RawFd {
        self.readiness().0
    }

    /// The file and the readiness to wait for before a socket command can make progress.
    pub(crate) fn readiness(self) -> (RawFd, libc::c_short) {
        match self {
            Cmd::Accept { fd } | Cmd::Recv { fd, .. } => (fd, libc::POLLIN),
            Cmd::Send { fd, .. } => (fd, libc::POLLOUT),
            Cmd::Read { fd, .. }
            | Cmd::Write { fd, .. }
            | Cmd::WriteGathered { fd, .. }
            | Cmd::Flush { fd }
            | Cmd::Fallocate { fd, .. }
            | Cmd::Discard { fd, .. }
            | Cmd::Command { fd, .. } => (fd, 0),
        }
    }

    /// The entry for the submission queue; `None` if io_uring has no such operation.
    pub(crate) fn entry(self) -> Option<squeue::Entry> {
        Some(match self {
            Cmd::Read { fd, ptr, len, offset, number, nowait } => {
                let flags = rw_flags(false, nowait);
                let fd = types::Fd(fd);
                match number {
                    Some(number) => {
                        opcode::ReadFixed::new(fd, ptr, len, number).offset(offset).rw_flags(flags).build()
                    }
                    None => opcode::Read::new(fd, ptr, len).offset(offset).rw_flags(flags).build(),
                }
            }
            Cmd::Write { fd, ptr, len, offset, durable, number, nowait } => {
                let flags = rw_flags(durable, nowait);
                let fd = types::Fd(fd);
                match number {
                    Some(number) => {
                        opcode::WriteFixed::new(fd, ptr, len, number).offset(offset).rw_flags(flags).build()
                    }
                    None => opcode::Write::new(fd, ptr, len).offset(offset).rw_flags(flags).build(),
                }
            }
            Cmd::WriteGathered { fd, iovecs, count, offset, durable, nowait } => {
                let flags = rw_flags(durable, nowait);
                opcode::Writev::new(types::Fd(fd), iovecs, count).offset(offset).rw_flags(flags).build()
            }
            Cmd::Flush { fd } => opcode::Fsync::new(types::Fd(fd)).flags(types::FsyncFlags::DATASYNC).build(),
            Cmd::Fallocate { fd, mode, offset, len } => {
                opcode::Fallocate::new(types::Fd(fd), len).offset(offset).mode(mode).build()
            }
            Cmd::Discard { .. } => return None,
            Cmd::Accept { fd } => {
                opcode::Accept::new(types::Fd(fd), std::ptr::null_mut(), std::ptr::null_mut())
                    .flags(libc::SOCK_CLOEXEC)
                    .build()
            }
            Cmd::Recv { fd, ptr, len, all } => {
                let flags = if all { libc::MSG_WAITALL } else { 0 };
                opcode::Recv::new(types::Fd(fd), ptr, len).flags(flags).build()
            }
            Cmd::Send { fd, msg } => {
                let flags = (libc::MSG_NOSIGNAL | libc::MSG_WAITALL) as u32;
                opcode::SendMsg::new(types::Fd(fd), msg).flags(flags).build()
            }
            Cmd::Command { fd, code, payload } => {
                opcode::UringCmd16::new(types::Fd(fd), code).cmd(payload).build()
            }
        })
    }

    /// Makes the system call on this thread, and returns what io_uring would: a count or a negated error number.
    ///
    /// A socket command does not wait for its peer but returns `-EAGAIN`. Every other command waits, for any `nowait`.
    pub(crate) fn call(self) -> i32 {
        // SAFETY: the operation stays in its slot until the result is taken in. Until then it keeps the command's file open and
        // its memory alive and untouched, so every address below is valid for the length beside it. The kernel checks
        // descriptors and ranges.
        let result = unsafe {
            match self {
                Cmd::Read { fd, ptr, len, offset, .. } => {
                    libc::pread64(fd, ptr.cast(), len as usize, offset as i64)
                }
                Cmd::Write { fd, ptr, len, offset, durable, .. } => {
                    let iov = libc::iovec { iov_base: ptr.cast_mut().cast(), iov_len: len as usize };
                    let flags = rw_flags(durable, false);
                    libc::pwritev2(fd, &raw const iov, 1, offset as i64, flags)
                }
                Cmd::WriteGathered { fd, iovecs, count, offset, durable, .. } => {
                    let flags = rw_flags(durable, false);
                    libc::pwritev2(fd, iovecs, count as i32, offset as i64, flags)
                }
                Cmd::Flush { fd } => libc::fdatasync(fd) as isize,
                Cmd::Fallocate { fd, mode, offset, len } => {
                    libc::fallocate64(fd, mode, offset as i64, len as i64) as isize
                }
                Cmd::Discard { fd, offset, len } => {
                    let range = [offset, len];
                    libc::ioctl(fd, BLKDISCARD, range.as_ptr()) as isize
                }
                Cmd::Accept { fd } => libc::accept4(
                    fd,
                    std::ptr::null_mut(),
                    std::ptr::null_mut(),
                    libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK,
                ) as isize,
                Cmd::Recv { fd, ptr, len, .. } => {
                    libc::recv(fd, ptr.cast(), len as usize, libc::MSG_DONTWAIT)
                }
                // Not reached: such commands are made only if the ring supports them.
                Cmd::Command { .. } => return -libc::EOPNOTSUPP,
                Cmd::Send { fd, msg } => libc::sendmsg(fd, msg, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL),
            }
        };
        if result < 0 {
            -std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
        } else {
            // The result is MAX_TRANSFER_BYTES at most, or a descriptor, so it fits.
            result as i32
        }
    }
}
