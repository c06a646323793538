//! Events of connections, for a log.
//!
//! Owns the texts about clients. Must not know the listener or the rate limit of messages.

use std::fmt;
use std::rc::Rc;

use blockio::PeerId;
use io::OverBudget;

use crate::codec::{Errno, HandshakeEnd, StreamError};
use crate::tls::TlsError;

/// An event of a connection, for a log.
#[derive(Debug)]
pub enum ConnectionEvent {
    /// The server accepted a client.
    Accepted {
        /// Number of the connection, counted from the start of the server.
        id: u64,
        /// The peer.
        peer: PeerId,
    },
    /// The server refused a client.
    TurnedAway {
        /// The peer.
        peer: PeerId,
        /// The reason.
        why: TurnedAway,
    },
    /// Accepting failed; the server tries again.
    AcceptFailed(std::io::Error),
    /// A client chose an export.
    Opened {
        /// Number of the connection.
        id: u64,
        /// Name of the export.
        export: String,
    },
    /// A connection ended.
    Closed {
        /// Number of the connection.
        id: u64,
        /// The peer.
        peer: PeerId,
        /// The reason.
        end: ConnectionEnd,
    },
}

/// Why a client was not served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TurnedAway {
    /// The server is being stopped.
    Stopping,
    /// All connection slots are taken by clients that are active or were active recently.
    Slots {
        /// Number of connection slots.
        limit: usize,
    },
    /// The peer has as many connection slots as one peer may have.
    PeerSlots {
        /// Number of connection slots of one peer.
        limit: usize,
    },
    /// The budget has no room for the minimum memory of a connection.
    Memory(OverBudget),
}

impl fmt::Display for TurnedAway {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TurnedAway::Stopping => f.write_str("the server is being stopped"),
            TurnedAway::Slots { limit } => write!(f, "all {limit} connection slots are taken"),
            TurnedAway::PeerSlots { limit } => {
                write!(f, "it has all {limit} connection slots that one peer may have")
            }
            TurnedAway::Memory(e) => e.fmt(f),
        }
    }
}

/// Why a connection ended.
#[derive(Debug)]
pub enum ConnectionEnd {
    /// The client sent a disconnect request.
    Goodbye,
    /// The client closed the connection between two requests, without a disconnect request.
    ClientClosed,
    /// The client closed the connection within a handshake or a request.
    Truncated,
    /// The handshake ended without an export.
    Handshake(HandshakeEnd),
    /// The handshake took too long.
    HandshakeTimeout,
    /// The TLS handshake failed.
    Tls(TlsError),
    /// The client broke the protocol.
    Violation(StreamError),
    /// The socket failed.
    Socket(std::io::Error),
    /// The system had no memory for the connection's buffers.
    NoMemory,
    /// A read failed after a part of its data was sent in a simple reply, which cannot report the error.
    BrokenReply(Errno),
    /// All connection slots were taken, and this client had been idle for the longest time.
    GaveWay,
    /// The server or the export was stopped.
    Stopped,
    /// Another server of this process has the export and serves the client from here on.
    HandedOver,
}

impl fmt::Display for ConnectionEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConnectionEnd::Goodbye => f.write_str("the client disconnected"),
            ConnectionEnd::ClientClosed => f.write_str("the client closed the connection"),
            ConnectionEnd::Truncated => f.write_str("the client closed the connection within a message"),
            ConnectionEnd::Handshake(e) => write!(f, "no export was opened: {e}"),
            ConnectionEnd::HandshakeTimeout => f.write_str("no export was opened in time"),
            ConnectionEnd::Tls(e) => write!(f, "TLS was not established: {e}"),
            ConnectionEnd::Violation(e) => write!(f, "the client broke the protocol: {e}"),
            ConnectionEnd::Socket(e) => write!(f, "the socket failed: {e}"),
            ConnectionEnd::NoMemory => f.write_str("the system has no memory for a connection"),
            ConnectionEnd::BrokenReply(e) => write!(
                f,
                "a read failed after a part of its data was sent (error {}): disconnected, because a simple \
                 reply cannot report this error",
                e.code()
            ),
            ConnectionEnd::GaveWay => f.write_str(
                "closed to make room for another client: this client was idle for the longest time",
            ),
            ConnectionEnd::Stopped => f.write_str("the server was stopped"),
            ConnectionEnd::HandedOver => f.write_str("another server of this process serves the client"),
        }
    }
}

/// The receiver of events of connections.
pub type Observer = Rc<dyn Fn(&ConnectionEvent)>;
