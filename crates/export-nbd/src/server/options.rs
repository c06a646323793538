//! Limits of a server.
//!
//! Owns the limits and their default values.

use io::{MemoryBudget, Nanos};

use super::events::Observer;

/// Limits of a server.
#[derive(Clone)]
pub struct ServerOptions {
    /// Maximum number of clients.
    pub max_connections: usize,
    /// Maximum number of clients of one peer: a user of this host, or another host.
    pub max_connections_per_peer: usize,
    /// Maximum number of requests of a connection under way; also its number of workers.
    pub requests_per_connection: usize,
    /// Maximum bytes of data that a connection has under way; at least a piece of 1 MiB.
    pub bytes_per_connection: u64,
    /// Memory of all connections of the process. Each connection reserves room for its buffers and for one piece.
    pub memory: MemoryBudget,
    /// Time limit for a client to choose an export.
    pub handshake_timeout: Nanos,
    /// Idle time after which a client that has not sent a request may lose its connection slot to a new client.
    pub unused_gives_way: Nanos,
    /// Idle time, or time with an unread reply, after which any other client may lose its connection slot to a new client.
    ///
    /// Longer than the longest interval at which a file system on the export does I/O.
    pub idle_gives_way: Nanos,
    /// Time that [`super::Server::stop`] waits for clients to take their replies.
    pub stop_timeout: Nanos,
    /// The receiver of events of connections.
    pub observer: Option<Observer>,
}

impl Default for ServerOptions {
    fn default() -> Self {
        ServerOptions {
            max_connections: 64,
            max_connections_per_peer: 48,
            // The queue depth of Linux's nbd driver.
            requests_per_connection: 128,
            bytes_per_connection: 16 << 20,
            memory: MemoryBudget::unlimited(),
            handshake_timeout: Nanos::from_secs(10),
            unused_gives_way: Nanos::from_secs(10),
            idle_gives_way: Nanos::from_secs(300),
            stop_timeout: Nanos::from_secs(10),
            observer: None,
        }
    }
}
