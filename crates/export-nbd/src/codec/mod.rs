//! The NBD protocol without I/O: bytes come in, bytes and decisions go out.
//!
//! Owns the wire format, the handshake, the request stream, the reply headers, and the mapping of a volume's errors to error
//! numbers. Must not know sockets, tasks or time. Invariant: everything that a client sends is hostile until a checked type
//! holds it. No input makes this code panic, or hold more memory than the limits in its constants.
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
