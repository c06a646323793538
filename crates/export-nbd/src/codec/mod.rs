//! The NBD protocol without I/O: bytes in, bytes and decisions out.
//!
//! Owns the format on the wire, the handshake, the request stream, the reply headers and the mapping of
//! a volume's failures to error numbers. Must not know sockets, tasks or time. Everything a client sends
//! is hostile until a checked type holds it: no input makes this code panic or hold more than the bounds
//! that its constants name.
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::expect_used, clippy::panic, clippy::arithmetic_side_effects)
)]

mod errno;
mod export;
mod negotiation;
mod option;
mod reply;
mod request;
pub mod wire;

pub use errno::Errno;
pub use export::{Catalogue, ExportInfo, MAX_PAYLOAD_BYTES, MIN_BLOCK_BYTES};
pub use negotiation::{
    HandshakeEnd, HandshakeStep, MAX_OPTION_BYTES, MAX_OPTIONS, MAX_SKIPPED_OPTION_BYTES, Negotiation,
    Session,
};
pub use reply::{
    MAX_ERROR_CHUNK_BYTES, MAX_EXTENTS, MAX_MESSAGE_BYTES, block_status_chunk, chunk_header, data_header,
    done_chunk, error_chunk, simple_reply,
};
pub use request::{Action, Command, Refusal, RequestStream, StreamError, StreamStep};
