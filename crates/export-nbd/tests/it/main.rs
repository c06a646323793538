//! Tests of the NBD server: the protocol's state machines on their own, the server over pipes in memory
//! with virtual time, and the whole of it with real clients over real sockets.

mod clients;
mod codec_handshake;
mod codec_stream;
mod endpoints;
mod hostile;
mod pipe;
mod server_limits;
mod server_requests;
mod server_stop;
mod tls;
mod tools;
mod wire;
mod world;
