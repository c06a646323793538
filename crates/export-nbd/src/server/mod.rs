//! The server: accepts clients, brings each to its volume, and stops in good order.
//!
//! Owns the list of connections and the order of events from accept to close. Everything runs on the
//! thread of the volumes' runtime. Must not know what a volume is made of, nor, beyond two small traits,
//! what a socket is.
//!
//! Invariants: a volume's operation that has begun is awaited to its end; a client can hold no more than
//! the limits in [`ServerOptions`], and not even its socket for longer than the handshake's time limit
//! without having chosen an export.

mod connection;
mod exports;
mod gate;
mod link;
mod outbox;
mod requests;
mod workers;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::pin::pin;
use std::rc::Rc;

use io::sync::{Either, Event, select};
use io::{BlockVolume, Buffer, Handle, Nanos};

use crate::codec::{Catalogue, ExportInfo, HandshakeEnd, HandshakeStep, Negotiation, Session, StreamError};
use crate::socket::{Listen, Part, Socket};
use connection::{Connection, StreamEnd};
pub use exports::{ExportError, Exports};
use link::{Link, Peer};

/// Size of a connection's receive buffer: several hundred small requests are received at once.
const RECEIVE_BYTES: usize = 256 << 10;

/// How long to wait before accepting again when the system is out of descriptors.
const ACCEPT_PAUSE: Nanos = Nanos::from_ms(100);

/// What happens to connections, for a log.
#[derive(Debug)]
pub enum ConnectionEvent {
    /// A client came.
    Accepted {
        /// Number of the connection, counted from the server's start.
        id: u64,
    },
    /// A client was turned away because there are too many.
    TurnedAway,
    /// Accepting failed; it is tried again.
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
        /// Why.
        end: ConnectionEnd,
    },
}

/// Why a connection ended.
#[derive(Debug)]
pub enum ConnectionEnd {
    /// The client said goodbye.
    Goodbye,
    /// The client closed the connection between two requests without saying goodbye.
    ClientClosed,
    /// The client closed the connection within a handshake or a request.
    Truncated,
    /// The handshake came to nothing.
    Handshake(HandshakeEnd),
    /// The handshake took too long.
    HandshakeTimeout,
    /// The client broke the protocol.
    Violation(StreamError),
    /// The socket failed.
    Socket(std::io::Error),
    /// The server or the export was stopped.
    Stopped,
}

impl fmt::Display for ConnectionEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConnectionEnd::Goodbye => f.write_str("the client disconnected"),
            ConnectionEnd::ClientClosed => f.write_str("the client closed the connection"),
            ConnectionEnd::Truncated => f.write_str("the client closed the connection within a message"),
            ConnectionEnd::Handshake(e) => write!(f, "no export was opened: {e}"),
            ConnectionEnd::HandshakeTimeout => f.write_str("no export was opened in time"),
            ConnectionEnd::Violation(e) => write!(f, "the client broke the protocol: {e}"),
            ConnectionEnd::Socket(e) => write!(f, "the socket failed: {e}"),
            ConnectionEnd::Stopped => f.write_str("the server was stopped"),
        }
    }
}

/// Is told what happens to connections.
pub type Observer = Rc<dyn Fn(&ConnectionEvent)>;

/// Limits of a server.
#[derive(Clone)]
pub struct ServerOptions {
    /// Clients at a time; more are turned away.
    pub max_connections: usize,
    /// Requests of a connection that are under way at a time; also its number of workers.
    pub requests_per_connection: usize,
    /// Bytes of data that a connection may have under way. A larger single request is served alone.
    pub bytes_per_connection: u64,
    /// How long a client may take to choose an export.
    pub handshake_timeout: Nanos,
    /// How long [`Server::stop`] waits for clients to take their replies.
    pub stop_timeout: Nanos,
    /// Is told what happens to connections.
    pub observer: Option<Observer>,
}

impl Default for ServerOptions {
    fn default() -> Self {
        ServerOptions {
            max_connections: 64,
            // The queue depth of Linux's nbd driver.
            requests_per_connection: 128,
            bytes_per_connection: 16 << 20,
            handshake_timeout: Nanos::from_secs(10),
            stop_timeout: Nanos::from_secs(10),
            observer: None,
        }
    }
}

/// An NBD server on one thread. Cheap to clone: clones are the same server.
pub struct Server<V> {
    shared: Rc<Shared<V>>,
}

struct Shared<V> {
    rt: Handle,
    exports: Exports<V>,
    options: ServerOptions,
    peers: RefCell<BTreeMap<u64, Rc<dyn Peer>>>,
    next_id: Cell<u64>,
    listeners: Cell<usize>,
    stopping: Cell<bool>,
    /// A connection or listener ended, or stopping began.
    changed: Event,
}

impl<V> Clone for Server<V> {
    fn clone(&self) -> Self {
        Server { shared: self.shared.clone() }
    }
}

impl<V: BlockVolume> Server<V> {
    /// A server for `exports`, which may change later. Its tasks run on `rt`.
    pub fn new(rt: Handle, exports: Exports<V>, options: ServerOptions) -> Server<V> {
        Server {
            shared: Rc::new(Shared {
                rt,
                exports,
                options,
                peers: RefCell::default(),
                next_id: Cell::new(0),
                listeners: Cell::new(0),
                stopping: Cell::new(false),
                changed: Event::default(),
            }),
        }
    }

    /// Serves whoever comes to `listener` until the server is stopped, which drops the listener.
    pub fn serve_listener<L: Listen>(&self, listener: L) {
        let server = self.clone();
        self.shared.listeners.set(self.shared.listeners.get() + 1);
        self.shared.rt.spawn(async move {
            server.accept_all(listener).await;
            server.shared.listeners.set(server.shared.listeners.get() - 1);
            server.shared.changed.notify_all();
        });
    }

    /// Serves one client.
    pub fn serve_socket<S: Socket>(&self, socket: S) {
        let shared = &self.shared;
        if shared.stopping.get() || shared.peers.borrow().len() >= shared.options.max_connections {
            shared.tell(&ConnectionEvent::TurnedAway);
            socket.shutdown();
            return;
        }
        let id = shared.next_id.get();
        shared.next_id.set(id + 1);
        let link = Rc::new(Link::new(socket, shared.options.requests_per_connection.max(1) as u64));
        shared.peers.borrow_mut().insert(id, link.clone());
        shared.tell(&ConnectionEvent::Accepted { id });
        let server = self.clone();
        shared.rt.spawn(async move {
            let end = server.serve(id, &link).await;
            link.socket.shutdown();
            let end = if link.is_stopping() { ConnectionEnd::Stopped } else { end };
            // The socket closes before anybody is told.
            server.shared.peers.borrow_mut().remove(&id);
            drop(link);
            server.shared.tell(&ConnectionEvent::Closed { id, end });
            server.shared.changed.notify_all();
        });
    }

    /// Stops accepting clients, refuses new requests with `ESHUTDOWN`, and waits until those under way are
    /// answered. A client that does not take its replies in time is cut off; its requests still end.
    pub async fn stop(&self) {
        self.shared.stopping.set(true);
        self.shared.changed.notify_all();
        self.stop_peers(|_| true, || self.shared.listeners.get() == 0).await;
    }

    /// Ends the offer of a volume, and stops the connections to it in the way of [`Server::stop`]. Returns
    /// the volume when nobody uses it through this server any more; `None` if there is none of this name.
    pub async fn remove_export(&self, name: &str) -> Option<Rc<V>> {
        let volume = self.shared.exports.remove(name)?;
        self.stop_peers(|p| p.serves(name), || true).await;
        Some(volume)
    }

    /// The volumes that are offered.
    pub fn exports(&self) -> &Exports<V> {
        &self.shared.exports
    }

    /// How many clients are connected.
    pub fn connections(&self) -> usize {
        self.shared.peers.borrow().len()
    }

    /// Stops the connections that are there now and chosen by `which`, and waits until they are gone and
    /// `also` holds.
    async fn stop_peers(&self, which: impl Fn(&dyn Peer) -> bool, also: impl Fn() -> bool) {
        let shared = &self.shared;
        // By number: an export that comes back under its old name has clients of its own.
        let chosen: Vec<(u64, Rc<dyn Peer>)> = shared
            .peers
            .borrow()
            .iter()
            .filter(|(_, p)| which(&***p))
            .map(|(id, p)| (*id, p.clone()))
            .collect();
        let gone = || also() && !chosen.iter().any(|(id, _)| shared.peers.borrow().contains_key(id));
        chosen.iter().for_each(|(_, p)| p.stop());
        let deadline = shared.rt.sleep(shared.options.stop_timeout);
        if let Either::Right(()) = select(pin!(shared.changed.wait_until(gone)), pin!(deadline)).await {
            chosen.iter().filter(|(id, _)| shared.peers.borrow().contains_key(id)).for_each(|(_, p)| p.cut());
            shared.changed.wait_until(gone).await;
        }
    }

    async fn accept_all<L: Listen>(&self, listener: L) {
        let shared = &self.shared;
        loop {
            let stopping = shared.changed.wait_until(|| shared.stopping.get());
            match select(pin!(stopping), pin!(listener.accept())).await {
                Either::Left(()) => return,
                Either::Right(Ok(socket)) => self.serve_socket(socket),
                Either::Right(Err(e)) => {
                    shared.tell(&ConnectionEvent::AcceptFailed(e));
                    let stopping = shared.changed.wait_until(|| shared.stopping.get());
                    select(pin!(stopping), pin!(shared.rt.sleep(ACCEPT_PAUSE))).await;
                }
            }
        }
    }

    async fn serve<S: Socket>(&self, id: u64, link: &Rc<Link<S>>) -> ConnectionEnd {
        let shared = &self.shared;
        let deadline = shared.rt.sleep(shared.options.handshake_timeout);
        let agreed = match select(pin!(self.handshake(link)), pin!(deadline)).await {
            Either::Left(Ok(agreed)) => agreed,
            Either::Left(Err(end)) => return end,
            Either::Right(()) => return ConnectionEnd::HandshakeTimeout,
        };
        let Agreed { session, buffer, rest } = agreed;
        let name = session.export.name.clone();
        let Some(volume) = shared.exports.get(&name) else {
            // It was removed since the client was told of it.
            return ConnectionEnd::Stopped;
        };
        link.set_export(name.clone());
        shared.tell(&ConnectionEvent::Opened { id, export: name });
        let connection = Connection::new(
            shared.rt.clone(),
            volume,
            link.clone(),
            &session,
            shared.options.requests_per_connection,
            shared.options.bytes_per_connection,
        );
        match connection.run(&session, buffer, rest).await {
            StreamEnd::Goodbye => ConnectionEnd::Goodbye,
            StreamEnd::Closed => ConnectionEnd::ClientClosed,
            StreamEnd::Truncated => ConnectionEnd::Truncated,
            StreamEnd::Violation(e) => ConnectionEnd::Violation(e),
            StreamEnd::Socket(e) => ConnectionEnd::Socket(e),
        }
    }

    async fn handshake<S: Socket>(&self, link: &Link<S>) -> Result<Agreed, ConnectionEnd> {
        let pool = self.shared.rt.pool();
        let mut out = Vec::new();
        let mut negotiation = Negotiation::begin(&mut out);
        let mut buffer = pool.take(RECEIVE_BYTES);
        let (mut at, mut end) = (0, 0);
        loop {
            let (used, step) = negotiation.step(&buffer.as_slice()[at..end], &*self.shared, &mut out);
            at += used;
            if !out.is_empty() {
                let reply = pool.copy_of(&out);
                out.clear();
                let range = 0..reply.len();
                let parts = vec![Part { buffer: reply, range }];
                let (_, sent) = link.socket.send(parts).await;
                sent.map_err(ConnectionEnd::Socket)?;
            }
            match step {
                HandshakeStep::Continue => {}
                HandshakeStep::Agreed(session) => return Ok(Agreed { session, buffer, rest: at..end }),
                HandshakeStep::Ended(why) => return Err(ConnectionEnd::Handshake(why)),
                HandshakeStep::NeedMore => {
                    let whole = 0..buffer.len();
                    let (back, received) = link.socket.recv(buffer, whole).await;
                    buffer = back;
                    match received {
                        Ok(0) => return Err(ConnectionEnd::Truncated),
                        Ok(n) => (at, end) = (0, n),
                        Err(e) => return Err(ConnectionEnd::Socket(e)),
                    }
                }
            }
        }
    }
}

struct Agreed {
    session: Session,
    /// The receive buffer, and the bytes in it that came after the handshake.
    buffer: Buffer,
    rest: std::ops::Range<usize>,
}

impl<V> Shared<V> {
    fn tell(&self, event: &ConnectionEvent) {
        if let Some(observer) = &self.options.observer {
            observer(event);
        }
    }
}

impl<V: BlockVolume> Catalogue for Shared<V> {
    fn list(&self) -> Vec<ExportInfo> {
        self.exports.describe_all()
    }

    fn find(&self, name: &[u8]) -> Option<ExportInfo> {
        self.exports.resolve(name)
    }

    fn shutting_down(&self) -> bool {
        self.stopping.get()
    }
}
