//! A connection as the server sees it, from accept to close: what it takes to stop it, and whether it is idle.
//!
//! Owns the stream, the count of requests under way, and the times by which idleness is measured. Graceful stop in one
//! rule: once stopping, the socket is shut down whenever no request is under way, that is, when the last reply was sent.

use std::cell::{Cell, RefCell};

use blockio::PeerId;
use io::{Handle, Nanos};

use crate::channel::Channel;
use crate::codec::Errno;
use crate::server::gate::Gate;
use crate::socket::Socket;

/// Why the server itself ends a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Cut {
    /// The client takes no replies any more, or a stop took too long.
    Closed,
    /// Another client gets the place.
    GaveWay,
    /// A reply could not be finished.
    BrokenReply(Errno),
}

/// Since when a connection waits for its client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Idle {
    pub(super) since: Nanos,
    /// The client has not asked for anything yet.
    pub(super) unused: bool,
}

/// A connection that can be stopped.
pub(super) trait Peer {
    /// Refuses new requests, and closes once the requests under way are answered.
    fn stop(&self);

    /// Closes the socket now. Requests under way end in the volume, unanswered.
    fn cut(&self, why: Cut);

    /// Whether the connection serves the export of this name.
    fn serves(&self, export: &str) -> bool;

    /// Whether the connection was cut: its tasks only wait for the volume.
    fn is_dead(&self) -> bool;

    /// The peer.
    fn who(&self) -> PeerId;

    /// Since when the client has neither asked for anything nor taken anything; `None` while the volume is at work for it.
    fn idle(&self) -> Option<Idle>;
}

/// See the module head.
pub(super) struct Link<S> {
    pub(super) channel: Channel<S>,
    /// Requests that are accepted and whose reply was not sent.
    pub(super) admission: Gate,
    rt: Handle,
    who: PeerId,
    stopping: Cell<bool>,
    cut: Cell<Option<Cut>>,
    export: RefCell<Option<String>>,
    /// When the client was last sent something, or came.
    active: Cell<Nanos>,
    unused: Cell<bool>,
    /// Since when a send has waited for the client.
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

    /// Whether working for the client has become pointless.
    pub(super) fn is_dead(&self) -> bool {
        self.cut.get().is_some()
    }

    /// Why the connection was cut, if it was.
    pub(super) fn cut_for(&self) -> Option<Cut> {
        self.cut.get()
    }

    /// Replies are on their way to the client.
    pub(super) fn sending(&self) {
        self.unused.set(false);
        self.sending.set(Some(self.rt.turn_time()));
    }

    /// The replies of `n` requests were sent, or have nobody to be sent to.
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
