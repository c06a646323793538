//! The server: accepts clients, connects each to its volume, and stops in order.
//!
//! Owns the order of events from accept to close. All tasks run on the thread of the volumes' runtime. Must not know how a
//! volume works or, beyond two small traits, what a socket is.
//!
//! Invariants: a volume's operation that has begun is awaited to its end; a client holds no more than the limits in
//! [`ServerOptions`]; a client that has not chosen an export holds its socket no longer than the time limit of the handshake;
//! all clients together hold no more memory than the budget has.

mod connection;
mod connection_slots;
mod events;
mod exports;
mod gate;
mod handshake;
mod hub;
mod link;
mod memory;
mod options;
mod outbox;
mod receiver;
mod requests;
mod stream;
mod workers;

use std::cell::{Cell, RefCell};
use std::pin::pin;
use std::rc::Rc;

use io::sync::{Either, Event, select};
use io::{BlockVolume, Handle, Nanos, OverBudget};

use blockio::bridge::RemoteReceiver;
use blockio::{Address, PeerId, Reactor};

use crate::channel::Channel;
use crate::codec::{Catalogue, ExportInfo};
use crate::endpoint::Endpoint;
use crate::socket::{Listen, Socket, StreamSocket};
use crate::tls::{TLS_BYTES, TlsConfig};
use connection::{Connection, StreamEnd};
use connection_slots::{ConnectionSlots, TakenSlot};
pub use events::{ConnectionEnd, ConnectionEvent, Observer, TurnedAway};
pub use exports::{ExportError, Exports};
use handshake::{Agreed, RECEIVE_BYTES};
use hub::{Client, Membership};
pub use hub::{Hubs, JoinError, Joining};
use link::{Cut, Link, Peer};
use memory::Memory;
pub use options::ServerOptions;
use requests::PIECE_BYTES;

/// Pause before the next accept if the system has no free descriptor.
const ACCEPT_PAUSE: Nanos = Nanos::from_ms(100);

/// Memory of a connection without data and TLS: its receive buffer, and headers and errors that wait to be sent.
const CONNECTION_BYTES: u64 = RECEIVE_BYTES as u64 + (128 << 10);

/// An NBD server on one thread. Cheap to clone; all clones are the same server.
pub struct Server<V> {
    shared: Rc<Shared<V>>,
}

struct Shared<V> {
    rt: Handle,
    exports: Exports<V>,
    options: ServerOptions,
    connection_slots: ConnectionSlots,
    /// The endpoint that this server shares with others.
    membership: RefCell<Option<Membership>>,
    listeners: Cell<usize>,
    stopping: Cell<bool>,
    /// Announces that a connection or listener has ended, or that the stop has begun.
    changed: Event,
}

impl<V> Clone for Server<V> {
    fn clone(&self) -> Self {
        Server { shared: self.shared.clone() }
    }
}

impl<V: BlockVolume> Server<V> {
    /// A server for `exports`, which may change later. The server's tasks run on `rt`.
    pub fn new(rt: Handle, exports: Exports<V>, options: ServerOptions) -> Server<V> {
        Server {
            shared: Rc::new(Shared {
                rt,
                exports,
                options,
                connection_slots: ConnectionSlots::default(),
                membership: RefCell::default(),
                listeners: Cell::new(0),
                stopping: Cell::new(false),
                changed: Event::default(),
            }),
        }
    }

    /// Serves the clients of `listener` until the server stops, which drops the listener.
    pub fn serve_listener<L: Listen>(&self, listener: L) {
        self.until_stopped(|server| async move { server.accept_all(listener, || None).await });
    }

    /// Serves the clients of `listener` under TLS. In plain text, the server answers only STARTTLS.
    pub fn serve_listener_with_tls<L: Listen>(&self, listener: L, tls: TlsConfig) {
        self.until_stopped(|server| async move { server.accept_all(listener, || Some(tls.clone())).await });
    }

    /// Joins an endpoint, which offers its clients the exports of all its servers.
    ///
    /// The endpoint gets the volumes that this server offers now. Returns the address of the endpoint.
    ///
    /// # Errors
    /// If the endpoint cannot be joined: its socket cannot be bound, or it has an export of the same name.
    pub fn serve_shared(
        &self,
        hubs: &Hubs,
        endpoint: &Endpoint,
        reactor: &Reactor,
        joining: Joining,
    ) -> Result<Address, JoinError> {
        let shared = &self.shared;
        let (membership, clients) = hubs.join(endpoint, reactor, shared.exports.describe_all(), joining)?;
        let listener = membership.listener(reactor)?;
        let address = listener.address().clone();
        *shared.membership.borrow_mut() = Some(membership);
        self.until_stopped(|server| async move {
            let tls = || server.shared.membership.borrow().as_ref().and_then(Membership::tls);
            server.accept_all(listener, tls).await;
        });
        let reactor = reactor.clone();
        self.until_stopped(|server| async move { server.take_over_all(&reactor, clients).await });
        Ok(address)
    }

    /// Runs a task that ends when the server is stopped.
    fn until_stopped<W: Future<Output = ()> + 'static>(&self, work: impl FnOnce(Server<V>) -> W) {
        let (server, work) = (self.clone(), work(self.clone()));
        self.shared.listeners.set(self.shared.listeners.get() + 1);
        self.shared.rt.spawn(async move {
            work.await;
            server.shared.listeners.set(server.shared.listeners.get() - 1);
            server.shared.changed.notify_all();
        });
    }

    /// Serves clients that other servers of the endpoint transfer to this one.
    async fn take_over_all(&self, reactor: &Reactor, mut clients: RemoteReceiver<Client>) {
        let shared = &self.shared;
        loop {
            let stopping = shared.changed.wait_until(|| shared.stopping.get());
            match select(pin!(stopping), pin!(clients.recv())).await {
                Either::Right(Some(client)) => self.take_over(reactor, client),
                Either::Left(()) | Either::Right(None) => return,
            }
        }
    }

    fn take_over(&self, reactor: &Reactor, client: Client) {
        let shared = &self.shared;
        let Client { socket, tls, session, rest } = client;
        // The drop of its socket disconnects a client that cannot be served.
        let Ok(connection) = blockio::Connection::from_fd(reactor, socket) else { return };
        let has_tls = tls.is_some();
        let Ok(channel) = Channel::resume(StreamSocket::new(connection), tls, shared.rt.pool()) else {
            return;
        };
        let Some(agreed) = Agreed::resume(&shared.rt, session, &rest) else { return };
        self.admit(channel, has_tls, |server, id, link, memory| async move {
            server.carry(id, &link, memory, agreed).await
        });
    }

    /// Serves one client.
    pub fn serve_socket<S: Socket>(&self, socket: S) {
        self.welcome(socket, None);
    }

    /// Serves one client under TLS.
    pub fn serve_socket_with_tls<S: Socket>(&self, socket: S, tls: TlsConfig) {
        self.welcome(socket, Some(tls));
    }

    fn welcome<S: Socket>(&self, socket: S, tls: Option<TlsConfig>) {
        self.admit(Channel::new(socket), tls.is_some(), |server, id, link, memory| async move {
            server.serve(id, &link, memory, tls.as_ref()).await
        });
    }

    /// Gives a client a connection slot, and has `work` serve it to its end.
    fn admit<S: Socket, W: Future<Output = ConnectionEnd> + 'static>(
        &self,
        channel: Channel<S>,
        tls: bool,
        work: impl FnOnce(Server<V>, u64, Rc<Link<S>>, Memory) -> W,
    ) {
        let shared = &self.shared;
        let peer = channel.peer();
        let memory = match shared.admit(peer, tls) {
            Ok(memory) => memory,
            Err(why) => {
                shared.tell(&ConnectionEvent::TurnedAway { peer, why });
                channel.shutdown();
                return;
            }
        };
        let requests = shared.options.requests_per_connection.max(1) as u64;
        let link = Rc::new(Link::new(shared.rt.clone(), channel, requests));
        let id = shared.connection_slots.add(link.clone());
        shared.tell(&ConnectionEvent::Accepted { id, peer });
        let (server, work) = (self.clone(), work(self.clone(), id, link.clone(), memory));
        shared.rt.spawn(async move {
            let end = work.await;
            // The server that takes the client has a descriptor of the same socket.
            if !matches!(end, ConnectionEnd::HandedOver) {
                link.channel.shutdown();
            }
            let end = match link.cut_for() {
                Some(Cut::GaveWay) => ConnectionEnd::GaveWay,
                Some(Cut::BrokenReply(errno)) => ConnectionEnd::BrokenReply(errno),
                _ if matches!(end, ConnectionEnd::HandedOver) => end,
                _ if link.is_stopping() => ConnectionEnd::Stopped,
                _ => end,
            };
            // The socket is closed before the observer is called.
            server.shared.connection_slots.remove(id);
            drop(link);
            server.shared.tell(&ConnectionEvent::Closed { id, peer, end });
            server.shared.changed.notify_all();
        });
    }

    /// Stops accepting clients, refuses new requests with `ESHUTDOWN`, and waits until requests under way are answered.
    ///
    /// A client that does not take its replies in time is disconnected; the volume still ends its requests.
    pub async fn stop(&self) {
        self.shared.stopping.set(true);
        self.shared.changed.notify_all();
        // From here on the endpoint offers these volumes to no client, and transfers no client to this server.
        let left = self.shared.membership.borrow_mut().take();
        drop(left);
        self.stop_peers(|_| true, || self.shared.listeners.get() == 0).await;
    }

    /// Removes the export `name`, and stops the connections to it as [`Server::stop`] does.
    ///
    /// Returns the volume once this server does not use it any more; `None` if there is no such export.
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
        self.shared.connection_slots.len()
    }

    /// Stops the connections that `which` selects now, and waits until they have ended and `also` holds.
    async fn stop_peers(&self, which: impl Fn(&dyn Peer) -> bool, also: impl Fn() -> bool) {
        let shared = &self.shared;
        // Connections are selected by number, because an export that is added again under its old name has new clients.
        let chosen: Vec<TakenSlot> = shared.connection_slots.choose(which);
        let have_ended = || also() && !chosen.iter().any(|(id, _)| shared.connection_slots.contains(*id));
        chosen.iter().for_each(|(_, p)| p.stop());
        let deadline = shared.rt.sleep(shared.options.stop_timeout);
        if let Either::Right(()) = select(pin!(shared.changed.wait_until(have_ended)), pin!(deadline)).await {
            chosen
                .iter()
                .filter(|(id, _)| shared.connection_slots.contains(*id))
                .for_each(|(_, p)| p.cut(Cut::Closed));
            shared.changed.wait_until(have_ended).await;
        }
    }

    async fn accept_all<L: Listen>(&self, listener: L, tls: impl Fn() -> Option<TlsConfig>) {
        let shared = &self.shared;
        loop {
            let stopping = shared.changed.wait_until(|| shared.stopping.get());
            match select(pin!(stopping), pin!(listener.accept())).await {
                Either::Left(()) => return,
                Either::Right(Ok(socket)) => self.welcome(socket, tls()),
                Either::Right(Err(e)) => {
                    shared.tell(&ConnectionEvent::AcceptFailed(e));
                    let stopping = shared.changed.wait_until(|| shared.stopping.get());
                    select(pin!(stopping), pin!(shared.rt.sleep(ACCEPT_PAUSE))).await;
                }
            }
        }
    }

    async fn serve<S: Socket>(
        &self,
        id: u64,
        link: &Rc<Link<S>>,
        memory: Memory,
        tls: Option<&TlsConfig>,
    ) -> ConnectionEnd {
        let shared = &self.shared;
        let deadline = shared.rt.sleep(shared.options.handshake_timeout);
        let handshake = handshake::run(&shared.rt, &**shared, &link.channel, tls);
        let agreed = match select(pin!(handshake), pin!(deadline)).await {
            Either::Left(Ok(agreed)) => agreed,
            Either::Left(Err(end)) => return end,
            Either::Right(()) => return ConnectionEnd::HandshakeTimeout,
        };
        if shared.exports.get(&agreed.session.export.name).is_none() {
            return self.hand_over(link, agreed);
        }
        self.carry(id, link, memory, agreed).await
    }

    /// Transfers a client to the server that has its export.
    fn hand_over<S: Socket>(&self, link: &Link<S>, agreed: Agreed) -> ConnectionEnd {
        let Agreed { session, buffer, rest } = agreed;
        let membership = self.shared.membership.borrow();
        // The export was removed after the client had seen it in the list.
        let Some(membership) = membership.as_ref() else { return ConnectionEnd::Stopped };
        let Some((socket, tls)) = link.channel.take() else { return ConnectionEnd::Stopped };
        let rest = buffer.as_slice().get(rest).unwrap_or_default().to_vec();
        match membership.hand_over(Client { socket, tls, session, rest }) {
            true => ConnectionEnd::HandedOver,
            false => ConnectionEnd::Stopped,
        }
    }

    /// Serves a client that has chosen an export.
    async fn carry<S: Socket>(
        &self,
        id: u64,
        link: &Rc<Link<S>>,
        memory: Memory,
        agreed: Agreed,
    ) -> ConnectionEnd {
        let shared = &self.shared;
        let Agreed { session, buffer, rest } = agreed;
        let name = session.export.name.clone();
        let Some(volume) = shared.exports.get(&name) else { return ConnectionEnd::Stopped };
        link.set_export(name.clone());
        shared.tell(&ConnectionEvent::Opened { id, export: name });
        let rt = shared.rt.clone();
        let connection = Connection::new(rt, volume, link.clone(), session.structured, memory);
        match connection.run(&session, buffer, rest).await {
            StreamEnd::Goodbye => ConnectionEnd::Goodbye,
            StreamEnd::Closed => ConnectionEnd::ClientClosed,
            StreamEnd::Truncated => ConnectionEnd::Truncated,
            StreamEnd::Violation(e) => ConnectionEnd::Violation(e),
            StreamEnd::Socket(e) => ConnectionEnd::Socket(e),
        }
    }
}

impl<V> Shared<V> {
    /// Reserves the memory of a new connection. If the budget is exhausted, an idle client is disconnected.
    fn admit(&self, peer: PeerId, tls: bool) -> Result<Memory, TurnedAway> {
        if self.stopping.get() {
            return Err(TurnedAway::Stopping);
        }
        let memory = || -> Result<Memory, OverBudget> {
            let fixed = CONNECTION_BYTES + if tls { TLS_BYTES } else { 0 };
            let options = &self.options;
            Memory::reserve(&options.memory, fixed, PIECE_BYTES.into(), options.bytes_per_connection)
        };
        let gives_way = self.connection_slots.admit(peer, self.rt.now(), &self.options)?;
        // Memory comes first, so that no client is disconnected for one that cannot be served.
        let memory = memory().map_err(TurnedAway::Memory)?;
        if let Some(other) = gives_way {
            other.cut(Cut::GaveWay);
        }
        Ok(memory)
    }

    fn tell(&self, event: &ConnectionEvent) {
        if let Some(observer) = &self.options.observer {
            observer(event);
        }
    }
}

impl<V: BlockVolume> Catalogue for Shared<V> {
    fn list(&self) -> Vec<ExportInfo> {
        match &*self.membership.borrow() {
            Some(membership) => membership.list(),
            None => self.exports.describe_all(),
        }
    }

    fn find(&self, name: &[u8]) -> Option<ExportInfo> {
        match &*self.membership.borrow() {
            Some(membership) => membership.find(name),
            None => self.exports.resolve(name),
        }
    }

    fn shutting_down(&self) -> bool {
        self.stopping.get()
    }
}
