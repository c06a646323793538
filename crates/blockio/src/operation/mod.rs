//! Operations in flight: each turns results of the kernel into its next command.
//!
//! Owns what a reactor needs to know of an operation ([`Operation`]) and the list of the kinds ([`Op`]). Invariant: an
//! operation owns the buffers, files and kernel structures that its commands name. Must not know the reactor, which keeps
//! the operation in a slot, carries out its commands and gives it their results.

pub(crate) mod command;
pub(crate) mod device;
pub(crate) mod socket;
pub(crate) mod zeroing;

use std::task::Waker;

use crate::cmd::Cmd;
use command::CommandOp;
use device::DeviceOp;
use socket::SocketOp;

/// The next step of an operation after a result.
pub(crate) enum Step {
    /// Another command.
    Next(Cmd),
    /// The command again, on a thread that may wait, because the kernel lacked a resource.
    NextBlocking(Cmd),
    /// Another command, which the kernel carries out at once without waiting for any device.
    ///
    /// This thread makes the call, because handing it to another thread would cost more than the call.
    NextHere(Cmd),
    /// A gathered write did not succeed as a whole, so each piece is written again by itself.
    Apart,
    /// The operation has ended.
    Done,
}

/// The next state of an operation that has ended.
pub(crate) enum Fate {
    /// The operation leaves its slot and reports to its waiter ([`Operation::finish`]), or is dropped if it has none.
    Leaves,
    /// The operation stays in its slot until its waiter, which is woken, takes it.
    Stays(Option<Waker>),
}

/// The interface of an operation for the reactor.
pub(crate) trait Operation: Into<Op> + Sized {
    /// The operation in a slot, if it is of this kind.
    fn of(op: &mut Op) -> Option<&mut Self>;

    /// The operation that was in a slot, if it is of this kind.
    fn taken_from(op: Op) -> Option<Self>;

    /// The command that begins or continues the operation.
    fn next(&mut self) -> Step;

    /// Takes in a result of the kernel.
    fn advance(&mut self, result: i32) -> Step;

    /// The next state of the operation after [`Step::Done`].
    fn fate(&mut self) -> Fate;

    /// Reports to the waiter of an operation that left its slot.
    fn finish(self) {}

    /// Whether the kernel still has a command of the operation.
    fn is_under_way(&self) -> bool;

    /// Prepares for the close of the reactor. Returns whether the reactor must cancel the command in the kernel, because it may
    /// wait for a peer for ever.
    fn cancel(&mut self) -> bool {
        false
    }

    /// Whether a reactor that closes waits for the operation. It does not wait for commands, which a driver may never answer.
    const AWAITED: bool = true;
}

/// An operation of any kind, as a slot holds it: without an allocation for each request.
pub(crate) enum Op {
    Device(DeviceOp),
    Socket(SocketOp),
    Command(CommandOp),
}

macro_rules! each_kind {
    ($op:expr, $o:ident => $what:expr) => {
        match $op {
            Op::Device($o) => $what,
            Op::Socket($o) => $what,
            Op::Command($o) => $what,
        }
    };
}

impl Op {
    /// The next command; see [`Operation::next`].
    pub(crate) fn next(&mut self) -> Step {
        each_kind!(self, o => o.next())
    }

    /// Takes in a result; see [`Operation::advance`].
    pub(crate) fn advance(&mut self, result: i32) -> Step {
        each_kind!(self, o => o.advance(result))
    }

    /// The next state after the end; see [`Operation::fate`].
    pub(crate) fn fate(&mut self) -> Fate {
        each_kind!(self, o => o.fate())
    }

    /// Reports to the waiter; see [`Operation::finish`].
    pub(crate) fn finish(self) {
        each_kind!(self, o => o.finish());
    }

    /// Whether the kernel has a command; see [`Operation::is_under_way`].
    pub(crate) fn is_under_way(&self) -> bool {
        each_kind!(self, o => o.is_under_way())
    }

    /// Prepares for the close of the reactor; see [`Operation::cancel`].
    pub(crate) fn cancel(&mut self) -> bool {
        each_kind!(self, o => o.cancel())
    }

    /// Whether a reactor that closes waits for it; see [`Operation::AWAITED`].
    pub(crate) fn is_awaited(&self) -> bool {
        fn of<O: Operation>(_: &O) -> bool {
            O::AWAITED
        }
        each_kind!(self, o => of(o))
    }
}

/// The conversions between an operation of one kind and one of any kind.
macro_rules! kind {
    ($kind:ident) => {
        fn of(op: &mut Op) -> Option<&mut Self> {
            match op {
                Op::$kind(op) => Some(op),
                _ => None,
            }
        }

        fn taken_from(op: Op) -> Option<Self> {
            match op {
                Op::$kind(op) => Some(op),
                _ => None,
            }
        }
    };
}
use kind;

impl From<DeviceOp> for Op {
    fn from(op: DeviceOp) -> Op {
        Op::Device(op)
    }
}

impl From<SocketOp> for Op {
    fn from(op: SocketOp) -> Op {
        Op::Socket(op)
    }
}

impl From<CommandOp> for Op {
    fn from(op: CommandOp) -> Op {
        Op::Command(op)
    }
}
