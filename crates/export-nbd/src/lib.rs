//! The NBD server: serves volumes to hosts, VMs and containers with an NBD client.
//!
//! Three layers, each of which knows only the one before it: [`codec`] is the protocol as pure state machines; [`Server`] runs
//! it for many clients over any [`Socket`], under TLS if it has a [`TlsConfig`]; [`Endpoint`] binds the server to unix sockets
//! and TCP ports. The server serves any `io::BlockVolume`.
//!
//! Invariants: everything that a client can make the server hold is bounded; an error answers the request that caused it and
//! ends at most that client's connection; a volume's operation that has begun is awaited to its end. Must not know the cache.
#![forbid(unsafe_code)]

mod channel;
pub mod codec;
mod endpoint;
mod server;
mod socket;
mod tls;

pub use blockio::PeerId;
pub use endpoint::{Endpoint, EndpointError, NotASocket, Reach, uri};
pub use server::{
    ConnectionEnd, ConnectionEvent, ExportError, Exports, Hubs, JoinError, Joining, Observer, Server,
    ServerOptions, TurnedAway,
};
pub use socket::{Listen, Part, Socket, StreamSocket};
pub use tls::{PemError, TlsConfig, TlsConfigError, TlsError};
