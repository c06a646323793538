//! A connection as the server sees it, from accept to close: what it takes to stop it.
//!
//! Owns the socket and the count of requests under way. Graceful stop in one rule: once stopping, the
//! socket is shut down whenever no request is under way, that is, when the last reply was sent.

use std::cell::{Cell, RefCell};

use crate::server::gate::Gate;
use crate::socket::Socket;

/// A connection that can be stopped.
pub(super) trait Peer {
    /// Refuses new requests, and closes once what is under way is answered.
    fn stop(&self);

    /// Closes the socket now. Requests under way end in the volume, unanswered.
    fn cut(&self);

    /// Whether the connection serves the export of this name.
    fn serves(&self, export: &str) -> bool;
}

/// See the module head.
pub(super) struct Link<S> {
    pub(super) socket: S,
    /// Requests that are accepted and whose reply was not sent.
    pub(super) admission: Gate,
    stopping: Cell<bool>,
    dead: Cell<bool>,
    export: RefCell<Option<String>>,
}

impl<S: Socket> Link<S> {
    pub(super) fn new(socket: S, requests: u64) -> Link<S> {
        Link {
            socket,
            admission: Gate::new(requests),
            stopping: Cell::new(false),
            dead: Cell::new(false),
            export: RefCell::default(),
        }
    }

    pub(super) fn set_export(&self, name: String) {
        *self.export.borrow_mut() = Some(name);
    }

    /// Whether new requests are refused.
    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.get()
    }

    /// Whether sending has become pointless.
    pub(super) fn is_dead(&self) -> bool {
        self.dead.get()
    }

    /// The replies of `n` requests were sent, or have nobody to be sent to.
    pub(super) fn answered(&self, n: u64) {
        self.admission.give(n);
        self.close_if_done();
    }

    fn close_if_done(&self) {
        if self.stopping.get() && self.admission.used() == 0 {
            self.socket.shutdown();
        }
    }
}

impl<S: Socket> Peer for Link<S> {
    fn stop(&self) {
        self.stopping.set(true);
        self.close_if_done();
    }

    fn cut(&self) {
        self.dead.set(true);
        self.socket.shutdown();
    }

    fn serves(&self, export: &str) -> bool {
        self.export.borrow().as_deref() == Some(export)
    }
}
