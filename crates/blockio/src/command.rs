//! Commands to character devices that answer through the ring: io_uring's `URING_CMD`.
//!
//! A driver such as ublk takes a command with a buffer's address and answers it when it has a request, which
//! can be never. Owns the operation in the reactor's slot (with file and buffer, module
//! `reactor`) and the future that waits for it. Such a command can be cancelled only by making the
//! driver answer it; a reactor that is closed while one is outstanding leaves ring and buffers to the
//! kernel until the process ends. Must not know what commands mean.

use std::future::Future;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use ::io::Buffer;

use crate::cmd::Cmd;
use crate::reactor::{Op, OpId, Reactor, Step};

/// A character device that takes commands through the ring.
#[derive(Clone)]
pub struct CommandFile {
    file: Rc<OwnedFd>,
    reactor: Reactor,
    memory_bytes: usize,
}

impl CommandFile {
    /// Sends commands to `file` on the ring of `reactor`.
    ///
    /// # Errors
    /// `Unsupported` without io_uring, or if it has no such commands.
    ///
    /// # Safety
    /// Every command that will be sent must make the driver of `file` touch at most `memory_bytes` bytes
    /// at the address that the command carries, and none after the command was answered.
    pub unsafe fn new(reactor: &Reactor, file: OwnedFd, memory_bytes: usize) -> io::Result<CommandFile> {
        if !reactor.takes_commands() {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "io_uring with commands to devices is needed (Linux 5.19 or later)",
            ));
        }
        Ok(CommandFile { file: Rc::new(file), reactor: reactor.clone(), memory_bytes })
    }

    /// The device.
    pub fn file(&self) -> &OwnedFd {
        &self.file
    }

    /// See [`Reactor::register`].
    pub fn register(&self, buffer: &mut Buffer, bytes: usize) {
        self.reactor.register(buffer, bytes);
    }

    /// Sends the command `code` with `head` and, behind it, the address of `buffer`. The future gives the
    /// driver's result and the buffer; dropping it leaves both to the driver.
    ///
    /// # Panics
    /// If the buffer is shared or smaller than promised.
    pub fn send(&self, code: u32, head: [u8; 8], mut buffer: Buffer) -> CommandFuture {
        assert!(buffer.capacity() >= self.memory_bytes, "the driver may touch {} bytes", self.memory_bytes);
        assert!(buffer.get_mut().is_some(), "a shared buffer cannot be given to a driver");
        let op = CommandOp {
            file: self.file.clone(),
            code,
            head,
            buffer: Some(buffer),
            result: None,
            waker: None,
            abandoned: false,
        };
        let started = self.reactor.start(Op::Command(op), |op| match op {
            Op::Command(op) => Step::Next(op.command()),
            _ => unreachable!("made above"),
        });
        match started {
            Ok(id) => CommandFuture { reactor: self.reactor.clone(), state: State::Running(id) },
            Err(Op::Command(op)) => {
                CommandFuture { reactor: self.reactor.clone(), state: State::Refused(op.buffer) }
            }
            Err(_) => unreachable!("given back as it was"),
        }
    }
}

/// A command in its slot.
pub(crate) struct CommandOp {
    file: Rc<OwnedFd>,
    code: u32,
    head: [u8; 8],
    /// `Some` until the waiter takes it.
    buffer: Option<Buffer>,
    result: Option<i32>,
    waker: Option<Waker>,
    abandoned: bool,
}

impl CommandOp {
    fn command(&mut self) -> Cmd {
        let ptr = self.buffer.as_mut().map_or(std::ptr::null_mut(), |b| b.as_mut().as_mut_ptr());
        let mut payload = [0u8; 16];
        payload[..8].copy_from_slice(&self.head);
        payload[8..].copy_from_slice(&(ptr as u64).to_ne_bytes());
        Cmd::Command { fd: self.file.as_raw_fd(), code: self.code, payload }
    }

    /// Takes in the driver's answer.
    pub(crate) fn advance(&mut self, result: i32) -> Step {
        self.result = Some(result);
        Step::Done
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.result.is_some()
    }

    pub(crate) fn is_abandoned(&self) -> bool {
        self.abandoned
    }

    pub(crate) fn take_waker(&mut self) -> Option<Waker> {
        self.waker.take()
    }
}

enum State {
    Running(OpId),
    Refused(Option<Buffer>),
    Taken,
}

/// Waits for the answer to a command.
#[must_use = "a command that nobody waits for keeps its buffer"]
pub struct CommandFuture {
    reactor: Reactor,
    state: State,
}

impl Future for CommandFuture {
    /// The driver's result, a negated error number if negative, and the buffer. `-ECANCELED` if the
    /// reactor is closed.
    type Output = (i32, Option<Buffer>);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.state {
            State::Refused(buffer) => {
                let buffer = buffer.take();
                self.state = State::Taken;
                Poll::Ready((-libc::ECANCELED, buffer))
            }
            State::Running(id) => {
                let id = *id;
                let ended = self.reactor.with_command(id, |op| {
                    if op.has_ended() {
                        return true;
                    }
                    match &op.waker {
                        Some(w) if w.will_wake(cx.waker()) => {}
                        _ => op.waker = Some(cx.waker().clone()),
                    }
                    false
                });
                if !ended {
                    return Poll::Pending;
                }
                self.state = State::Taken;
                let op = self.reactor.take_command(id);
                Poll::Ready((op.result.unwrap_or(-libc::EIO), op.buffer))
            }
            State::Taken => panic!("polled after it was ready"),
        }
    }
}

impl Drop for CommandFuture {
    fn drop(&mut self) {
        let State::Running(id) = self.state else { return };
        let ended = self.reactor.with_command(id, |op| {
            op.abandoned = true;
            op.waker = None;
            op.has_ended()
        });
        if ended {
            drop(self.reactor.take_command(id));
        }
    }
}
