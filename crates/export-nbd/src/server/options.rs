//! Limits of a server.

use io::{MemoryBudget, Nanos};

use super::events::Observer;

/// Limits of a server.
#[derive(Clone)]
pub struct ServerOptions {
    /// Clients at a time.
    pub max_connections: usize,
    /// Clients at a time of one peer: a user of this host, or another host.
    pub max_connections_per_peer: usize,
    /// Requests of a connection that are under way at a time; also its number of workers.
    pub requests_per_connection: usize,
    /// Bytes of data that a connection may have under way, at least a piece of 1 MiB.
    pub bytes_per_connection: u64,
    /// Memory of all connections of the process. Each one reserves room for its buffers and for one piece.
    pub memory: MemoryBudget,
    /// How long a client may take to choose an export.
    pub handshake_timeout: Nanos,
    /// How long a client that has not asked for anything must have been idle to give its place to another one, when
    /// places are short.
    pub unused_gives_way: Nanos,
    /// How long any other client must have been idle, or must have left a reply unread, for the same. Long enough for
    /// whatever file system is on it to have come round.
    pub idle_gives_way: Nanos,
    /// How long [`super::Server::stop`] waits for clients to take their replies.
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
