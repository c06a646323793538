//! Numbers of the NBD protocol, and their encoding on the wire.
//!
//! Owns every constant of the public protocol document of the NBD project, and the functions that read big-endian fields. Must
//! not know states, volumes or sockets.

/// First magic number of a server's greeting ("NBDMAGIC").
pub const NBD_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Begins the newstyle handshake and every option of a client ("IHAVEOPT").
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Begins every answer to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Begins every request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Begins a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Begins a chunk of a structured reply.
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;

/// Bytes of an option's header.
pub const OPTION_HEADER_BYTES: usize = 16;
/// Bytes of a request's header.
pub const REQUEST_HEADER_BYTES: usize = 28;
/// Bytes of a simple reply without its data.
pub const SIMPLE_REPLY_BYTES: usize = 16;
/// Bytes of a chunk's header.
pub const CHUNK_HEADER_BYTES: usize = 20;
/// Bytes of the header of a chunk of data: the chunk's header and the offset.
pub const DATA_HEADER_BYTES: usize = CHUNK_HEADER_BYTES + 8;
/// Reserved bytes that end the answer to `NBD_OPT_EXPORT_NAME` unless both sides agreed to leave them out.
pub const EXPORT_NAME_PADDING_BYTES: usize = 124;
/// Longest string that the protocol allows: names, descriptions, messages.
pub const MAX_STRING_BYTES: usize = 4096;

/// Flags of the server's greeting.
pub mod handshake_flag {
    /// The server accepts other options than the export's name.
    pub const FIXED_NEWSTYLE: u16 = 1;
    /// The padding after an export's description can be left out.
    pub const NO_ZEROES: u16 = 2;
}

/// Flags of the client's answer to the greeting.
pub mod client_flag {
    /// The client knows fixed newstyle.
    pub const FIXED_NEWSTYLE: u32 = 1;
    /// The client wants no padding.
    pub const NO_ZEROES: u32 = 2;
}

/// Options of a client.
pub mod option {
    /// Chooses an export and begins. It has no error reply.
    pub const EXPORT_NAME: u32 = 1;
    /// Ends the handshake.
    pub const ABORT: u32 = 2;
    /// Lists the exports.
    pub const LIST: u32 = 3;
    /// Starts TLS.
    pub const STARTTLS: u32 = 5;
    /// Describes an export.
    pub const INFO: u32 = 6;
    /// Describes an export and begins.
    pub const GO: u32 = 7;
    /// Asks for answers in chunks.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// Lists the metadata contexts of an export.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Selects metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
}

/// Answers to an option.
pub mod option_reply {
    /// The option was carried out.
    pub const ACK: u32 = 1;
    /// Name of an export.
    pub const SERVER: u32 = 2;
    /// A piece of information about an export.
    pub const INFO: u32 = 3;
    /// A metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// The server does not know the option.
    pub const ERR_UNSUP: u32 = 0x8000_0001;
    /// The option's data is not valid.
    pub const ERR_INVALID: u32 = 0x8000_0003;
    /// The option is available under TLS only.
    pub const ERR_TLS_REQD: u32 = 0x8000_0005;
    /// There is no such export.
    pub const ERR_UNKNOWN: u32 = 0x8000_0006;
    /// The server shuts down.
    pub const ERR_SHUTDOWN: u32 = 0x8000_0007;
    /// The option is too long.
    pub const ERR_TOO_BIG: u32 = 0x8000_0009;
}

/// Kinds of information about an export.
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// Name of the export on the server.
    pub const NAME: u16 = 1;
    /// Description for operators, one line.
    pub const DESCRIPTION: u16 = 2;
    /// Smallest, preferred and largest request.
    pub const BLOCK_SIZE: u16 = 3;
}

/// The features of an export.
pub mod transmission_flag {
    /// Always set.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// Writes are refused.
    pub const READ_ONLY: u16 = 1 << 1;
    /// The export accepts flushes.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// The export accepts writes that are durable when acknowledged.
    pub const SEND_FUA: u16 = 1 << 3;
    /// The export accepts trim requests.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// The export accepts write-zeroes requests.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// The export accepts reads that must be answered in one chunk.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection covers the writes of all connections.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// The export accepts requests to cache a range.
    pub const SEND_CACHE: u16 = 1 << 10;
}

/// Kinds of requests.
pub mod command {
    /// Reads a range.
    pub const READ: u16 = 0;
    /// Writes a range; the data follows the header.
    pub const WRITE: u16 = 1;
    /// Ends the requests under way and closes.
    pub const DISCONNECT: u16 = 2;
    /// Makes acknowledged writes durable.
    pub const FLUSH: u16 = 3;
    /// Discards a range.
    pub const TRIM: u16 = 4;
    /// Reads a range into the cache.
    pub const CACHE: u16 = 5;
    /// Makes a range read as zeros.
    pub const WRITE_ZEROES: u16 = 6;
    /// Queries the state of a range.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of a request.
pub mod command_flag {
    /// The request is durable when it is answered.
    pub const FUA: u16 = 1 << 0;
    /// The range of zeros must stay allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// The answer must have one chunk of data.
    pub const DF: u16 = 1 << 2;
    /// The answer must have one extent.
    pub const REQ_ONE: u16 = 1 << 3;
}

/// Chunks of a structured reply.
pub mod chunk {
    /// Flag: the last chunk of its reply.
    pub const DONE: u16 = 1;
    /// A chunk without payload.
    pub const NONE: u16 = 0;
    /// Data at an offset.
    pub const OFFSET_DATA: u16 = 1;
    /// Extents of a metadata context.
    pub const BLOCK_STATUS: u16 = 5;
    /// The request failed.
    pub const ERROR: u16 = 0x8001;
}

/// State flags of an extent in the context [`ALLOCATION_CONTEXT`].
pub mod state {
    /// No space is allocated.
    pub const HOLE: u32 = 1;
    /// Reads as zeros.
    pub const ZERO: u32 = 2;
}

/// The metadata context that the server supports.
pub const ALLOCATION_CONTEXT: &str = "base:allocation";
/// The number that stands for [`ALLOCATION_CONTEXT`] in answers.
pub const ALLOCATION_CONTEXT_ID: u32 = 1;

/// Takes the first `N` bytes off `input`; `None`, and `input` unchanged, if there are fewer.
pub(crate) fn take<const N: usize>(input: &mut &[u8]) -> Option<[u8; N]> {
    let (head, rest) = input.split_first_chunk::<N>()?;
    *input = rest;
    Some(*head)
}

/// Takes the first `len` bytes off `input`; `None`, and `input` unchanged, if there are fewer.
pub(crate) fn take_slice<'a>(input: &mut &'a [u8], len: usize) -> Option<&'a [u8]> {
    let (head, rest) = input.split_at_checked(len)?;
    *input = rest;
    Some(head)
}

/// Takes a big-endian 16-bit number off `input`.
pub(crate) fn take_u16(input: &mut &[u8]) -> Option<u16> {
    take(input).map(u16::from_be_bytes)
}

/// Takes a big-endian 32-bit number off `input`.
pub(crate) fn take_u32(input: &mut &[u8]) -> Option<u32> {
    take(input).map(u32::from_be_bytes)
}

/// Takes a big-endian 64-bit number off `input`.
pub(crate) fn take_u64(input: &mut &[u8]) -> Option<u64> {
    take(input).map(u64::from_be_bytes)
}
