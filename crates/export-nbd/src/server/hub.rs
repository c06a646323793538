//! One endpoint for the volumes of several servers, which run on threads of their own.
//!
//! Owns the listening socket, the list of all exports, and the transfer of clients between servers. Every server accepts clients
//! on the same socket. If a client asks for an export of another server, the server transfers the client to that server, with
//! the bytes that it has received and the state of TLS. Must not know the requests.
//!
//! Invariants: The empty name stands for the first export of the member that owns it, and for no other. So a client that names
//! no export never gets another volume while that member is absent. The last member that leaves closes the socket.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use blockio::bridge::{RemoteReceiver, RemoteSender, channel};
use blockio::{Listener, Reactor, SharedListener};

use crate::codec::{ExportInfo, Session};
use crate::endpoint::{Endpoint, EndpointError, Reach};
use crate::server::exports::ExportError;
use crate::tls::{TlsConfig, TlsParts};

/// Clients that wait for the server of their volume.
const QUEUE: usize = 64;

/// A client that has chosen an export of another server.
pub(super) struct Client {
    pub(super) socket: OwnedFd,
    pub(super) tls: Option<TlsParts>,
    pub(super) session: Session,
    /// The bytes that were received after the handshake.
    pub(super) rest: Vec<u8>,
}

/// A server that has joined the endpoint.
struct Member {
    id: u64,
    exports: Vec<ExportInfo>,
    owns_default: bool,
    clients: RemoteSender<Client>,
}

#[derive(Default)]
struct State {
    members: Vec<Member>,
    last_id: u64,
    tls: Option<TlsConfig>,
}

struct Hub {
    endpoint: Endpoint,
    listener: SharedListener,
    state: Mutex<State>,
}

impl Hub {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The endpoints of a process that several servers share. All clones are the same list.
#[derive(Clone, Default)]
pub struct Hubs(Arc<Mutex<Vec<Weak<Hub>>>>);

impl std::fmt::Debug for Hubs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hubs")
    }
}

/// The exports with which a server joins an endpoint.
pub struct Joining {
    /// The hosts that may connect to the endpoint.
    pub reach: Reach,
    /// TLS for clients over TCP, of all servers at the endpoint from now on.
    pub tls: Option<TlsConfig>,
    /// A client that names no export gets the first of these.
    pub owns_default: bool,
}

/// Why a server cannot join an endpoint.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The socket cannot be bound.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    /// The endpoint has an export of the same name.
    #[error(transparent)]
    Export(#[from] ExportError),
    /// The listening socket could not be shared.
    #[error("the listening socket cannot be shared: {0}")]
    Share(#[from] std::io::Error),
}

/// The membership of a server. Its drop removes the server's exports from the list; the drop of the last one closes the socket.
pub(super) struct Membership {
    hubs: Hubs,
    /// Absent only while it is dropped.
    hub: Option<Arc<Hub>>,
    id: u64,
}

impl Hubs {
    fn lock(&self) -> MutexGuard<'_, Vec<Weak<Hub>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Joins an endpoint, which is created for its first member.
    pub(super) fn join(
        &self,
        endpoint: &Endpoint,
        reactor: &Reactor,
        exports: Vec<ExportInfo>,
        joining: Joining,
    ) -> Result<(Membership, RemoteReceiver<Client>), JoinError> {
        // The lock is held to the end, because a socket is bound and removed under it.
        let mut hubs = self.lock();
        hubs.retain(|hub| hub.strong_count() > 0);
        let there = hubs.iter().filter_map(Weak::upgrade).find(|hub| hub.endpoint.is_same(endpoint));
        let hub = match there {
            Some(hub) => hub,
            None => {
                let listener = endpoint.bind(reactor, joining.reach)?.share()?;
                let state = Mutex::default();
                let hub = Arc::new(Hub { endpoint: endpoint.clone(), listener, state });
                hubs.push(Arc::downgrade(&hub));
                hub
            }
        };
        let (sender, receiver) = channel(QUEUE);
        let mut state = hub.lock();
        let taken = |name: &str| state.members.iter().any(|m| m.exports.iter().any(|e| e.name == name));
        if let Some(twice) = exports.iter().find(|e| taken(&e.name)) {
            return Err(ExportError::Duplicate(twice.name.clone()).into());
        }
        state.last_id += 1;
        let id = state.last_id;
        state.tls = joining.tls;
        state.members.push(Member { id, exports, owns_default: joining.owns_default, clients: sender });
        drop(state);
        Ok((Membership { hubs: self.clone(), hub: Some(hub), id }, receiver))
    }
}

impl Membership {
    fn state(&self) -> Option<MutexGuard<'_, State>> {
        self.hub.as_ref().map(|hub| hub.lock())
    }

    /// A descriptor of the listening socket for one more thread.
    pub(super) fn listener(&self, reactor: &Reactor) -> std::io::Result<Listener> {
        match &self.hub {
            Some(hub) => hub.listener.listener(reactor),
            None => Err(std::io::ErrorKind::NotConnected.into()),
        }
    }

    /// TLS for new clients.
    pub(super) fn tls(&self) -> Option<TlsConfig> {
        self.state().and_then(|state| state.tls.clone())
    }

    /// Every export of the endpoint.
    pub(super) fn list(&self) -> Vec<ExportInfo> {
        let mut all: Vec<ExportInfo> = self
            .state()
            .map(|state| state.members.iter().flat_map(|m| m.exports.clone()).collect())
            .unwrap_or_default();
        all.sort_by(|a, b| (a.name.len(), &a.name).cmp(&(b.name.len(), &b.name)));
        all
    }

    /// The export that a client means by a name.
    pub(super) fn find(&self, name: &[u8]) -> Option<ExportInfo> {
        let state = self.state()?;
        if name.is_empty() {
            return state.members.iter().find(|m| m.owns_default)?.exports.first().cloned();
        }
        state.members.iter().flat_map(|m| &m.exports).find(|e| e.name.as_bytes() == name).cloned()
    }

    /// Transfers a client to the server that has its export. The client is disconnected if that server has left.
    pub(super) fn hand_over(&self, client: Client) -> bool {
        let name = client.session.export.name.clone();
        let Some(state) = self.state() else { return false };
        let other = state.members.iter().find(|m| m.exports.iter().any(|e| e.name == name));
        other.is_some_and(|other| other.clients.try_send(client).is_ok())
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        let _bound_or_removed_by_one = self.hubs.lock();
        if let Some(hub) = self.hub.take() {
            hub.lock().members.retain(|m| m.id != self.id);
        }
    }
}
