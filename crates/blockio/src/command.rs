//! Commands to character devices that answer through the ring: io_uring's `URING_CMD`.
//!
//! A driver such as ublk takes a command that carries the address of a buffer. The driver answers the command when it has a
//! request, which may never happen. This module owns the device's file and the future that waits for an answer. Only the
//! driver can end such a command, by answering it. If the reactor is closed while a command is outstanding, the ring and the
//! buffers stay with the kernel until the process ends. Must not know what commands mean.

use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use ::io::Buffer;

use crate::operation::command::CommandOp;
use crate::reactor::{OpId, Reactor};

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
    /// `Unsupported` without io_uring, or if this kernel's io_uring cannot send commands to devices.
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

    /// The file of the device.
    pub fn file(&self) -> &OwnedFd {
        &self.file
    }

    /// Registers `buffer` with the ring; see [`Reactor::register`].
    pub fn register(&self, buffer: &mut Buffer, bytes: usize) {
        self.reactor.register(buffer, bytes);
    }

    /// Sends the command `code` with `head` followed by the address of `buffer`.
    ///
    /// The future gives the driver's result and the buffer. If the future is dropped, the buffer stays with the driver until the
    /// driver answers.
    ///
    /// # Panics
    /// If the buffer is shared, or smaller than the `memory_bytes` of [`CommandFile::new`].
    pub fn send(&self, code: u32, head: [u8; 8], mut buffer: Buffer) -> CommandFuture {
        assert!(buffer.capacity() >= self.memory_bytes, "the driver may touch {} bytes", self.memory_bytes);
        assert!(buffer.get_mut().is_some(), "a shared buffer cannot be given to a driver");
        let state = match self.reactor.start(CommandOp::new(self.file.clone(), code, head, buffer)) {
            Ok(id) => CommandState::Running(id),
            Err(op) => CommandState::Refused(op.into_answer().1),
        };
        CommandFuture { reactor: self.reactor.clone(), state }
    }
}

enum CommandState {
    Running(OpId),
    Refused(Option<Buffer>),
    Taken,
}

/// Waits for the answer to a command.
#[must_use = "a command that nobody waits for keeps its buffer"]
pub struct CommandFuture {
    reactor: Reactor,
    state: CommandState,
}

impl Future for CommandFuture {
    /// The driver's result (a negated error number if it is negative) and the buffer. The result is `-ECANCELED` if the
    /// reactor is closed.
    type Output = (i32, Option<Buffer>);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.state {
            CommandState::Refused(buffer) => {
                let buffer = buffer.take();
                self.state = CommandState::Taken;
                Poll::Ready((-libc::ECANCELED, buffer))
            }
            CommandState::Running(id) => {
                let id = *id;
                let ended = self.reactor.with(id, |op: &mut CommandOp| {
                    if !op.has_ended() {
                        op.set_waker(cx.waker());
                    }
                    op.has_ended()
                });
                if !ended {
                    return Poll::Pending;
                }
                self.state = CommandState::Taken;
                Poll::Ready(self.reactor.take::<CommandOp>(id).into_answer())
            }
            CommandState::Taken => panic!("polled after it was ready"),
        }
    }
}

impl Drop for CommandFuture {
    fn drop(&mut self) {
        let CommandState::Running(id) = self.state else { return };
        let ended = self.reactor.with(id, |op: &mut CommandOp| {
            op.abandon();
            op.has_ended()
        });
        if ended {
            drop(self.reactor.take::<CommandOp>(id));
        }
    }
}
