//! What the server needs of a socket, so that it can be served over a pipe in memory as well.
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

/// Part of a buffer that is to be sent.
#[derive(Debug)]
pub struct Part {
    /// The memory; several parts may share it.
    pub buffer: Buffer,
    /// Which bytes of it.
    pub range: Range<usize>,
}

/// A connected stream socket. One task receives while another one sends.
pub trait Socket: 'static {
    /// Receives what is there, at least one byte, into `range` of `buffer`, which is not empty. 0 is the
    /// end of the stream.
    fn recv(&self, buffer: Buffer, range: Range<usize>) -> impl Future<Output = (Buffer, io::Result<usize>)>;

    /// Sends all of `parts` in order. The empty vector comes back, so that its storage is used again.
    fn send(&self, parts: Vec<Part>) -> impl Future<Output = (Vec<Part>, io::Result<()>)>;

    /// The peer: limits for each peer count by this.
    fn peer(&self) -> PeerId {
        PeerId::Unknown
    }

    /// The socket once more, for another server of this process that goes on with the client; `None` if it has none.
    fn duplicate(&self) -> Option<OwnedFd> {
        None
    }

    /// Ends both directions: a receive that waits gets 0, a send fails. What was sent still arrives.
    fn shutdown(&self);
}

/// Where connections come from.
pub trait Listen: 'static {
    /// A connection.
    type Socket: Socket;

    /// The next connection.
    fn accept(&self) -> impl Future<Output = io::Result<Self::Socket>>;
}

/// A socket of `blockio`.
pub struct StreamSocket {
    connection: Connection,
    /// Kept between two sends for its storage.
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
        // Fails only if the peer is gone, which is what was wanted.
        let _ = self.connection.shutdown(Shutdown::Both);
    }
}

impl Listen for Listener {
    type Socket = StreamSocket;

    async fn accept(&self) -> io::Result<StreamSocket> {
        Listener::accept(self).await.map(StreamSocket::new)
    }
}
