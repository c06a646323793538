//! A connection from accept to close, as the server sees it: how to stop it, and whether it is idle.
//!
//! Owns the stream, the count of requests under way, and the times from which idleness is computed. Invariant: while the
//! connection stops, the socket is shut down as soon as no request is under way, that is, when the last reply is sent.

use std::cell::{Cell, RefCell};

use blockio::PeerId;
use io::{Handle, Nanos};

use crate::channel::Channel;
use crate::codec::Errno;
use crate::server::gate::Gate;
use crate::socket::Socket;

/// Why the server ends a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Cut {
    /// The client takes no more replies, or a stop took too long.
    Closed,
    /// Another client gets the connection slot of this one.
    GaveWay,
    /// A reply could not be completed.
    BrokenReply(Errno),
}

/// How long a connection has waited for its client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Idle {
    pub(super) since: Nanos,
    /// Whether the client has not sent a request yet.
    pub(super) unused: bool,
}

/// A connection that can be stopped.
pub(super) trait Peer {
    /// Refuses new requests, and closes the connection once the requests under way are answered.
    fn stop(&self);

    /// Closes the socket at once. The volume ends requests under way, and they stay unanswered.
    fn cut(&self, why: Cut);

    /// Whether the connection serves the export of this name.
    fn serves(&self, export: &str) -> bool;

    /// Whether the connection was cut: its tasks only wait for the volume.
    fn is_dead(&self) -> bool;

    /// The peer.
    fn who(&self) -> PeerId;

    /// Time since when the client has neither sent a request nor taken a reply; `None` while the volume works for it.
    fn idle(&self) -> Option<Idle>;
}

/// A connection, with what the server needs to stop it.
pub(super) struct Link<S> {
    pub(super) channel: Channel<S>,
    /// Requests that are accepted and whose reply is not sent.
    pub(super) admission: Gate,
    rt: Handle,
    who: PeerId,
    stopping: Cell<bool>,
    cut: Cell<Option<Cut>>,
    export: RefCell<Option<String>>,
    /// Time of the last reply to the client, or of its accept.
    active: Cell<Nanos>,
    unused: Cell<bool>,
    /// Start of a send that waits for the client.
    sending: Cell<Option<Nanos>>,
}

impl<S: Socket> Link<S> {
    pub(super) fn new(rt: Handle, channel: Channel<S>, requests: u64) -> Link<S> {
        Link {
            who: channel.peer(),
            channel,
            admission: Gate::new(requests),
            stopping: Cell::new(false),
            cut: Cell::new(None),
            export: RefCell::default(),
            active: Cell::new(rt.now()),
            unused: Cell::new(true),
            sending: Cell::new(None),
            rt,
        }
    }

    pub(super) fn set_export(&self, name: String) {
        *self.export.borrow_mut() = Some(name);
    }

    /// Whether new requests are refused.
    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.get()
    }

    /// Whether the connection was cut, so that work for its client is useless.
    pub(super) fn is_dead(&self) -> bool {
        self.cut.get().is_some()
    }

    /// Why the connection was cut, if it was cut.
    pub(super) fn cut_for(&self) -> Option<Cut> {
        self.cut.get()
    }

    /// Records that a send of replies begins.
    pub(super) fn sending(&self) {
        self.unused.set(false);
        self.sending.set(Some(self.rt.turn_time()));
    }

    /// Records that the replies of `n` requests were sent, or dropped because the client is gone.
    pub(super) fn answered(&self, n: u64) {
        self.sending.set(None);
        self.active.set(self.rt.turn_time());
        self.admission.give(n);
        self.close_if_done();
    }

    fn close_if_done(&self) {
        if self.stopping.get() && self.admission.used() == 0 {
            self.channel.shutdown();
        }
    }
}

impl<S: Socket> Peer for Link<S> {
    fn stop(&self) {
        self.stopping.set(true);
        self.close_if_done();
    }

    fn cut(&self, why: Cut) {
        if self.cut.get().is_none() {
            self.cut.set(Some(why));
        }
        self.channel.shutdown();
    }

    fn serves(&self, export: &str) -> bool {
        self.export.borrow().as_deref() == Some(export)
    }

    fn is_dead(&self) -> bool {
        Link::is_dead(self)
    }

    fn who(&self) -> PeerId {
        self.who
    }

    fn idle(&self) -> Option<Idle> {
        let unused = self.unused.get();
        match self.sending.get() {
            Some(since) => Some(Idle { since, unused }),
            None if self.admission.used() == 0 => Some(Idle { since: self.active.get(), unused }),
            None => None,
        }
    }
}
