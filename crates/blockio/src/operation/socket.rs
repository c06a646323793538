//! Socket operations in the reactor's slots: accept, receive, send.
//!
//! Owns buffers and kernel structures of one operation from its start to its last result, continues
//! short transfers, and keeps the outcome until the waiter takes it. If the waiter is dropped, the operation is abandoned: it
//! is cancelled. A connection that was accepted, or bytes that were received, before the cancellation are dropped.

use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::rc::Rc;
use std::task::Waker;

use ::io::Buffer;

use super::{Fate, Op, Operation, Step, kind};
use crate::cmd::{Cmd, MAX_TRANSFER_BYTES};
use crate::message::Message;

/// Pieces that are handed to the kernel at once.
const IOVECS: usize = 64;

/// The structures that sendmsg(2) reads besides the payload; boxed, because their address must not move.
pub(crate) struct MsgBlock {
    header: libc::msghdr,
    iovecs: [libc::iovec; IOVECS],
}

impl MsgBlock {
    pub(crate) fn new() -> Box<MsgBlock> {
        const EMPTY: libc::iovec = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        // SAFETY: `msghdr` is a plain C struct of integers and pointers, for which all zeros is a valid value.
        let header = unsafe { std::mem::zeroed() };
        Box::new(MsgBlock { header, iovecs: [EMPTY; IOVECS] })
    }
}

pub(crate) enum SocketKind {
    Accept {
        accepted: Option<OwnedFd>,
    },
    /// Receives into `range` of the buffer: all of it, or what is there.
    Recv {
        buffer: Buffer,
        range: Range<usize>,
        all: bool,
    },
    Send {
        message: Message,
        block: Box<MsgBlock>,
    },
}

pub(crate) struct SocketOp {
    socket: Rc<OwnedFd>,
    pub(crate) kind: SocketKind,
    /// Bytes moved so far.
    done: usize,
    /// `Some` when it has ended: bytes moved, or an error number.
    outcome: Option<Result<usize, i32>>,
    waker: Option<Waker>,
    abandoned: bool,
    cancelled: bool,
}

impl SocketOp {
    pub(crate) fn new(socket: Rc<OwnedFd>, kind: SocketKind) -> SocketOp {
        SocketOp { socket, kind, done: 0, outcome: None, waker: None, abandoned: false, cancelled: false }
    }

    /// An operation that ends without having begun.
    pub(crate) fn fail(&mut self, errno: i32) {
        self.outcome = Some(Err(errno));
    }

    pub(crate) fn outcome(&self) -> Option<Result<usize, i32>> {
        self.outcome
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.outcome.is_some()
    }

    /// No task waits for the outcome any more.
    pub(crate) fn abandon(&mut self) {
        self.abandoned = true;
        self.waker = None;
        self.cancelled = true;
    }

    pub(crate) fn set_waker(&mut self, waker: &Waker) {
        match &self.waker {
            Some(w) if w.will_wake(waker) => {}
            _ => self.waker = Some(waker.clone()),
        }
    }

    /// The command that continues the operation at `done`.
    fn command(&mut self) -> Cmd {
        let fd = self.socket.as_raw_fd();
        match &mut self.kind {
            SocketKind::Accept { .. } => Cmd::Accept { fd },
            SocketKind::Recv { buffer, range, all } => {
                let at = range.start + self.done;
                let part = &mut buffer.as_mut()[at..range.end];
                let len = part.len().min(MAX_TRANSFER_BYTES as usize) as u32;
                Cmd::Recv { fd, ptr: part.as_mut_ptr(), len, all: *all }
            }
            SocketKind::Send { message, block } => {
                let mut skip = self.done;
                let mut n = 0;
                for piece in message.pieces() {
                    let bytes = piece.as_slice();
                    if skip >= bytes.len() {
                        skip -= bytes.len();
                        continue;
                    }
                    let bytes = &bytes[skip..];
                    skip = 0;
                    block.iovecs[n] =
                        libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
                    n += 1;
                    if n == IOVECS {
                        break;
                    }
                }
                block.header.msg_iov = block.iovecs.as_mut_ptr();
                block.header.msg_iovlen = n as _;
                Cmd::Send { fd, msg: &raw const block.header }
            }
        }
    }

    fn end(&mut self, outcome: Result<usize, i32>) -> Step {
        self.outcome = Some(outcome);
        Step::Done
    }
}

impl Operation for SocketOp {
    kind!(Socket);

    fn next(&mut self) -> Step {
        Step::Next(self.command())
    }

    fn advance(&mut self, result: i32) -> Step {
        if let (SocketKind::Accept { accepted }, 0..) = (&mut self.kind, result) {
            // SAFETY: accept(2) has just returned this descriptor, so no other value owns it.
            *accepted = Some(unsafe { OwnedFd::from_raw_fd(result) });
            return self.end(Ok(0));
        }
        if self.cancelled {
            return self.end(Err(libc::ECANCELED));
        }
        // `EAGAIN` is not repeated. The fallback waits for readiness itself. The ring returns `EAGAIN` only if
        // another process that shares the socket made it non-blocking; a repetition would loop without waiting.
        if result == -libc::EINTR {
            return Step::Next(self.command());
        }
        if result < 0 {
            return self.end(Err(-result));
        }
        let n = result as usize;
        self.done += n;
        let done = self.done;
        match &self.kind {
            SocketKind::Accept { .. } => self.end(Ok(0)),
            SocketKind::Recv { range, all, .. } => {
                if *all && n > 0 && done < range.len() {
                    return Step::Next(self.command());
                }
                self.end(Ok(done))
            }
            SocketKind::Send { message, .. } => {
                if done < message.len() && n > 0 {
                    return Step::Next(self.command());
                }
                if done < message.len() {
                    return self.end(Err(libc::EPIPE));
                }
                self.end(Ok(done))
            }
        }
    }

    fn fate(&mut self) -> Fate {
        if self.abandoned { Fate::Leaves } else { Fate::Stays(self.waker.take()) }
    }

    fn is_under_way(&self) -> bool {
        !self.has_ended()
    }

    /// Makes the operation end with its next result, success or error.
    fn cancel(&mut self) -> bool {
        self.cancelled |= !self.has_ended();
        !self.has_ended()
    }
}
