//! A command to a character device, in the reactor's slot.
//!
//! Owns file and buffer from the sending of the command to the driver's answer, which may never come. Must not know what the
//! command means.

use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;
use std::task::Waker;

use ::io::Buffer;

use super::{Fate, Op, Operation, Step, kind};
use crate::cmd::Cmd;

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
    /// Sends the command `code` with `head` followed by the address of `buffer`.
    pub(crate) fn new(file: Rc<OwnedFd>, code: u32, head: [u8; 8], buffer: Buffer) -> CommandOp {
        let buffer = Some(buffer);
        CommandOp { file, code, head, buffer, result: None, waker: None, abandoned: false }
    }

    fn command(&mut self) -> Cmd {
        let ptr = self.buffer.as_mut().map_or(std::ptr::null_mut(), |b| b.as_mut().as_mut_ptr());
        let mut payload = [0u8; 16];
        payload[..8].copy_from_slice(&self.head);
        payload[8..].copy_from_slice(&(ptr as u64).to_ne_bytes());
        Cmd::Command { fd: self.file.as_raw_fd(), code: self.code, payload }
    }

    /// The driver has answered.
    pub(crate) fn has_ended(&self) -> bool {
        self.result.is_some()
    }

    /// Names the task to wake when the driver answers.
    pub(crate) fn set_waker(&mut self, waker: &Waker) {
        match &self.waker {
            Some(w) if w.will_wake(waker) => {}
            _ => self.waker = Some(waker.clone()),
        }
    }

    /// No task waits for the answer any more.
    pub(crate) fn abandon(&mut self) {
        self.abandoned = true;
        self.waker = None;
    }

    /// The driver's answer, and the buffer.
    pub(crate) fn into_answer(self) -> (i32, Option<Buffer>) {
        (self.result.unwrap_or(-libc::EIO), self.buffer)
    }
}

impl Operation for CommandOp {
    const AWAITED: bool = false;

    kind!(Command);

    fn next(&mut self) -> Step {
        Step::Next(self.command())
    }

    fn advance(&mut self, result: i32) -> Step {
        self.result = Some(result);
        Step::Done
    }

    fn fate(&mut self) -> Fate {
        if self.abandoned { Fate::Leaves } else { Fate::Stays(self.waker.take()) }
    }

    fn is_under_way(&self) -> bool {
        !self.has_ended()
    }
}
