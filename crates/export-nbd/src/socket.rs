//! The interface of a socket that the server uses, so that it can also serve over a pipe in memory.
//!
//! Owns the two traits and their implementation for the sockets of `blockio`. Must not know the protocol.

use std::cell::RefCell;
use std::future::Future;
use std::io;
use std::net::Shutdown;
use std::ops::Range;
use std::os::fd::OwnedFd;

use ::io::Buffer;
use blockio::{Connection, Listener, Message, PeerId};

/// Part of a buffer to be sent.
#[derive(Debug)]
pub struct Part {
    /// The memory; several parts may share it.
    pub buffer: Buffer,
    /// The bytes to be sent.
    pub range: Range<usize>,
}

/// A connected stream socket. One task receives while another one sends.
pub trait Socket: 'static {
    /// Receives the bytes that have arrived, at least one, into `range` of `buffer`, which is not empty.
    ///
    /// The result 0 is the end of the stream.
    fn recv(&self, buffer: Buffer, range: Range<usize>) -> impl Future<Output = (Buffer, io::Result<usize>)>;

    /// Sends all of `parts` in order. Returns the empty vector, so that the caller can reuse its storage.
    fn send(&self, parts: Vec<Part>) -> impl Future<Output = (Vec<Part>, io::Result<()>)>;

    /// The peer. Limits for each peer count by it.
    fn peer(&self) -> PeerId {
        PeerId::Unknown
    }

    /// A second descriptor of the socket, for the server of this process that serves the client from here on.
    ///
    /// `None` if the socket has no descriptor.
    fn duplicate(&self) -> Option<OwnedFd> {
        None
    }

    /// Ends both directions: a receive that waits gets 0, a send fails. What was sent still arrives.
    fn shutdown(&self);
}

/// The source of connections.
pub trait Listen: 'static {
    /// A connection.
    type Socket: Socket;

    /// The next connection.
    fn accept(&self) -> impl Future<Output = io::Result<Self::Socket>>;
}

/// A socket of `blockio`.
pub struct StreamSocket {
    connection: Connection,
    /// Reused storage of the last message.
    spare: RefCell<Option<Message>>,
}

impl StreamSocket {
    /// Wraps a connection.
    pub fn new(connection: Connection) -> StreamSocket {
        StreamSocket { connection, spare: RefCell::default() }
    }
}

impl Socket for StreamSocket {
    async fn recv(&self, buffer: Buffer, range: Range<usize>) -> (Buffer, io::Result<usize>) {
        self.connection.recv_some(buffer, range).await
    }

    async fn send(&self, mut parts: Vec<Part>) -> (Vec<Part>, io::Result<()>) {
        let mut message = self.spare.borrow_mut().take().unwrap_or_default();
        for part in parts.drain(..) {
            message.push(part.buffer, part.range);
        }
        let (mut message, result) = self.connection.send(message).await;
        message.clear();
        *self.spare.borrow_mut() = Some(message);
        (parts, result)
    }

    fn peer(&self) -> PeerId {
        self.connection.peer_id()
    }

    fn duplicate(&self) -> Option<OwnedFd> {
        self.connection.duplicate().ok()
    }

    fn shutdown(&self) {
        // This fails only if the peer has disconnected, which has the same effect.
        let _ = self.connection.shutdown(Shutdown::Both);
    }
}

impl Listen for Listener {
    type Socket = StreamSocket;

    async fn accept(&self) -> io::Result<StreamSocket> {
        Listener::accept(self).await.map(StreamSocket::new)
    }
}
