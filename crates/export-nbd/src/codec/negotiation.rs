//! The handshake: a state machine from the greeting to the choice of an export.
//!
//! Owns the state of one client's handshake. Bytes come in, bytes and a verdict go out. Must not know sockets, time or volumes.
//! Invariants: it holds at most [`MAX_OPTION_BYTES`] of a client's bytes and answers at most [`MAX_OPTIONS`] options. Its answers
//! do not depend on how the bytes are cut into pieces, with one exception: plain text in the same piece as STARTTLS is detected.
//! If TLS is required, a client without TLS learns nothing about the exports, and all that it sent in plain text is invalid
//! after STARTTLS, except its flags.

use super::export::{Catalogue, ExportInfo, MAX_PAYLOAD_BYTES, MIN_BLOCK_BYTES};
use super::option::{GoRequest, MetaRequest};
use super::wire::{
    ALLOCATION_CONTEXT, ALLOCATION_CONTEXT_ID, EXPORT_NAME_PADDING_BYTES, MAX_STRING_BYTES, NBD_MAGIC,
    OPTION_HEADER_BYTES, OPTION_MAGIC, OPTION_REPLY_MAGIC, client_flag, handshake_flag, info, option,
    option_reply, take_u32, take_u64,
};

/// Longest data of an option that is parsed: enough for a name and a few hundred queries.
pub const MAX_OPTION_BYTES: u32 = 64 << 10;

/// Longest data of an option that is skipped with an error reply. If the data is longer, the connection is closed.
pub const MAX_SKIPPED_OPTION_BYTES: u32 = 1 << 20;

/// Maximum number of options before the client must have chosen an export.
pub const MAX_OPTIONS: u32 = 256;

/// The negotiated parameters.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Session {
    /// The export, as described to the client.
    pub export: ExportInfo,
    /// Whether the server answers reads in chunks.
    pub structured: bool,
    /// Whether the client selected [`ALLOCATION_CONTEXT`].
    pub block_status: bool,
}

/// Why a handshake ended without a session.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HandshakeEnd {
    /// The client ended the handshake with `NBD_OPT_ABORT`.
    #[error("the client ended the handshake")]
    Aborted,
    /// The client set flags that were not offered.
    #[error("unknown client flags {0:#010x}")]
    UnknownFlags(u32),
    /// An option does not begin with its magic.
    #[error("bad option magic {0:#018x}")]
    BadMagic(u64),
    /// The client asked for an unknown export with an option that has no error reply.
    #[error("no export is named {0:?}")]
    NoSuchExport(String),
    /// The data of an option is too long to be skipped.
    #[error("option {option} has {bytes} bytes of data, at most {MAX_SKIPPED_OPTION_BYTES} are accepted")]
    Oversized {
        /// Number of the option.
        option: u32,
        /// Announced length.
        bytes: u32,
    },
    /// The client sent too many options.
    #[error("more than {MAX_OPTIONS} options")]
    TooManyOptions,
    /// The server shuts down.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// The client chose an export in plain text with an option that has no error reply.
    #[error("the client asked for an export without TLS")]
    WithoutTls,
    /// The client sent plain text after STARTTLS. An attacker may have put it in front of the client's stream.
    #[error("the client sent plain text after STARTTLS")]
    PlainAfterStartTls,
}

/// Outcome of one step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum HandshakeStep {
    /// All input was used; the handshake needs more.
    NeedMore,
    /// Send the answer, if there is one, and call `step` again with the rest of the input.
    Continue,
    /// Send the answer and perform the TLS handshake. Then call [`Negotiation::encrypted`], and `step` with the decrypted
    /// input. All input was used.
    StartTls,
    /// The handshake is complete: send the answer. The rest of the input is requests.
    Agreed(Session),
    /// Send the answer, then close the connection.
    Ended(HandshakeEnd),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum NegotiationState {
    ClientFlags,
    OptionHeader,
    OptionData { option: u32, bytes: u32 },
    Skip { option: u32, bytes_left: u32 },
    Over,
}

/// The state of a handshake with regard to TLS.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Security {
    /// The server does not use TLS on this connection.
    Plain,
    /// TLS is required and not started: only STARTTLS is answered.
    Wanted,
    /// TLS is started.
    Encrypted,
}

/// One client's handshake.
#[derive(Debug)]
pub struct Negotiation {
    state: NegotiationState,
    /// Bytes of the current element that have arrived.
    held: Vec<u8>,
    options_received: u32,
    no_zeroes: bool,
    security: Security,
    structured: bool,
    /// Name of the export for which the client selected [`ALLOCATION_CONTEXT`].
    context_of: Option<String>,
}

impl Negotiation {
    /// Begins a handshake without TLS; appends the server's greeting to `out`.
    pub fn begin(out: &mut Vec<u8>) -> Negotiation {
        out.extend(NBD_MAGIC.to_be_bytes());
        out.extend(OPTION_MAGIC.to_be_bytes());
        out.extend((handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES).to_be_bytes());
        Negotiation {
            state: NegotiationState::ClientFlags,
            held: Vec::new(),
            options_received: 0,
            no_zeroes: false,
            security: Security::Plain,
            structured: false,
            context_of: None,
        }
    }

    /// Begins a handshake that requires TLS; appends the server's greeting to `out`.
    pub fn begin_with_tls(out: &mut Vec<u8>) -> Negotiation {
        Negotiation { security: Security::Wanted, ..Negotiation::begin(out) }
    }

    /// Continues under TLS. Everything that was negotiated in plain text is dropped.
    pub fn encrypted(&mut self) {
        self.security = Security::Encrypted;
        (self.structured, self.context_of) = (false, None);
    }

    /// Uses some of `input`, appends answers to `out`, and returns the number of bytes that were used.
    ///
    /// A step answers one option at most, which bounds `out`.
    pub fn step(
        &mut self,
        input: &[u8],
        exports: &dyn Catalogue,
        out: &mut Vec<u8>,
    ) -> (usize, HandshakeStep) {
        let (used, element) = match self.state {
            NegotiationState::Over => return (0, HandshakeStep::NeedMore),
            NegotiationState::Skip { option, bytes_left } => {
                return self.skip(option, bytes_left, input, out);
            }
            NegotiationState::ClientFlags => self.gather(input, 4),
            NegotiationState::OptionHeader => self.gather(input, OPTION_HEADER_BYTES),
            // The length was checked against MAX_OPTION_BYTES when the header was read.
            NegotiationState::OptionData { bytes, .. } => self.gather(input, bytes as usize),
        };
        let Some(element) = element else { return (used, HandshakeStep::NeedMore) };
        let step = match self.state {
            NegotiationState::OptionData { option, .. } => self.answer(option, &element, exports, out),
            NegotiationState::ClientFlags => self.client_flags(&element),
            _ => self.option_header(&element, exports, out),
        };
        // Keeps the storage for the next element.
        self.held = element;
        self.held.clear();
        let step = match step {
            HandshakeStep::StartTls if used < input.len() => {
                HandshakeStep::Ended(HandshakeEnd::PlainAfterStartTls)
            }
            other => other,
        };
        if matches!(step, HandshakeStep::Agreed(_) | HandshakeStep::Ended(_)) {
            self.state = NegotiationState::Over;
        }
        (used, step)
    }

    /// Moves input to `held` until it has `need` bytes. Returns the number of bytes used, and `held` once it is complete.
    fn gather(&mut self, input: &[u8], need: usize) -> (usize, Option<Vec<u8>>) {
        let missing = need.saturating_sub(self.held.len());
        let used = missing.min(input.len());
        self.held.extend(input.iter().take(used));
        (used, (used == missing).then(|| std::mem::take(&mut self.held)))
    }

    fn skip(
        &mut self,
        option: u32,
        bytes_left: u32,
        input: &[u8],
        out: &mut Vec<u8>,
    ) -> (usize, HandshakeStep) {
        let used = u32::try_from(input.len()).unwrap_or(u32::MAX).min(bytes_left);
        let left = bytes_left.saturating_sub(used);
        if left > 0 {
            self.state = NegotiationState::Skip { option, bytes_left: left };
            return (used as usize, HandshakeStep::NeedMore);
        }
        self.state = NegotiationState::OptionHeader;
        error(out, option, option_reply::ERR_TOO_BIG, "the option has too much data");
        (used as usize, HandshakeStep::Continue)
    }

    fn client_flags(&mut self, element: &[u8]) -> HandshakeStep {
        let flags = take_u32(&mut &*element).unwrap_or(u32::MAX);
        if flags & !(client_flag::FIXED_NEWSTYLE | client_flag::NO_ZEROES) != 0 {
            return HandshakeStep::Ended(HandshakeEnd::UnknownFlags(flags));
        }
        self.no_zeroes = flags & client_flag::NO_ZEROES != 0;
        self.state = NegotiationState::OptionHeader;
        HandshakeStep::Continue
    }

    fn option_header(
        &mut self,
        mut element: &[u8],
        exports: &dyn Catalogue,
        out: &mut Vec<u8>,
    ) -> HandshakeStep {
        let magic = take_u64(&mut element).unwrap_or(0);
        if magic != OPTION_MAGIC {
            return HandshakeStep::Ended(HandshakeEnd::BadMagic(magic));
        }
        let option = take_u32(&mut element).unwrap_or(0);
        let bytes = take_u32(&mut element).unwrap_or(u32::MAX);
        self.options_received = self.options_received.saturating_add(1);
        if self.options_received > MAX_OPTIONS {
            return HandshakeStep::Ended(HandshakeEnd::TooManyOptions);
        }
        if bytes > MAX_SKIPPED_OPTION_BYTES {
            return HandshakeStep::Ended(HandshakeEnd::Oversized { option, bytes });
        }
        if bytes > MAX_OPTION_BYTES {
            if option == option::EXPORT_NAME {
                return HandshakeStep::Ended(HandshakeEnd::Oversized { option, bytes });
            }
            self.state = NegotiationState::Skip { option, bytes_left: bytes };
            return HandshakeStep::Continue;
        }
        if bytes > 0 {
            self.state = NegotiationState::OptionData { option, bytes };
            return HandshakeStep::Continue;
        }
        // An option without data is answered here, because no more input may come before the client has the answer.
        self.answer(option, &[], exports, out)
    }

    fn answer(
        &mut self,
        option: u32,
        data: &[u8],
        exports: &dyn Catalogue,
        out: &mut Vec<u8>,
    ) -> HandshakeStep {
        self.state = NegotiationState::OptionHeader;
        if exports.shutting_down() && option != option::ABORT {
            if option == option::EXPORT_NAME {
                return HandshakeStep::Ended(HandshakeEnd::ShuttingDown);
            }
            error(out, option, option_reply::ERR_SHUTDOWN, "the server is shutting down");
            return HandshakeStep::Continue;
        }
        if self.security == Security::Wanted && option != option::ABORT && option != option::STARTTLS {
            return without_tls(option, out);
        }
        match option {
            option::EXPORT_NAME => return self.export_name(data, exports, out),
            option::ABORT => {
                reply(out, option, option_reply::ACK, &[]);
                return HandshakeStep::Ended(HandshakeEnd::Aborted);
            }
            option::INFO | option::GO => return self.info_or_go(option, data, exports, out),
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                self.meta_context(option, data, exports, out);
            }
            option::LIST | option::STRUCTURED_REPLY | option::STARTTLS if !data.is_empty() => {
                error(out, option, option_reply::ERR_INVALID, "the option takes no data");
            }
            option::LIST => {
                for export in exports.list() {
                    let mut entry = string(&export.name);
                    entry.extend(export.description.as_bytes());
                    reply(out, option, option_reply::SERVER, &entry);
                }
                reply(out, option, option_reply::ACK, &[]);
            }
            option::STRUCTURED_REPLY => {
                self.structured = true;
                reply(out, option, option_reply::ACK, &[]);
            }
            option::STARTTLS => return self.start_tls(out),
            _ => error(out, option, option_reply::ERR_UNSUP, "unknown option"),
        }
        HandshakeStep::Continue
    }

    fn start_tls(&self, out: &mut Vec<u8>) -> HandshakeStep {
        let (kind, why) = match self.security {
            Security::Wanted => {
                reply(out, option::STARTTLS, option_reply::ACK, &[]);
                return HandshakeStep::StartTls;
            }
            Security::Plain => (option_reply::ERR_UNSUP, "this server has no TLS"),
            Security::Encrypted => (option_reply::ERR_INVALID, "the connection is encrypted already"),
        };
        error(out, option::STARTTLS, kind, why);
        HandshakeStep::Continue
    }

    fn export_name(&mut self, name: &[u8], exports: &dyn Catalogue, out: &mut Vec<u8>) -> HandshakeStep {
        let found = if name.len() > MAX_STRING_BYTES { None } else { exports.find(name) };
        let Some(export) = found else {
            let shown = String::from_utf8_lossy(name).chars().take(100).collect();
            return HandshakeStep::Ended(HandshakeEnd::NoSuchExport(shown));
        };
        out.extend(export.size_bytes.to_be_bytes());
        out.extend(export.transmission_flags(self.structured).to_be_bytes());
        if !self.no_zeroes {
            out.extend([0; EXPORT_NAME_PADDING_BYTES]);
        }
        HandshakeStep::Agreed(self.session(export))
    }

    fn info_or_go(
        &mut self,
        option: u32,
        data: &[u8],
        exports: &dyn Catalogue,
        out: &mut Vec<u8>,
    ) -> HandshakeStep {
        let Some(request) = GoRequest::parse(data) else {
            error(out, option, option_reply::ERR_INVALID, "malformed request for an export");
            return HandshakeStep::Continue;
        };
        let Some(export) = exports.find(request.name) else {
            error(out, option, option_reply::ERR_UNKNOWN, "no export has this name");
            return HandshakeStep::Continue;
        };
        let mut piece = info::EXPORT.to_be_bytes().to_vec();
        piece.extend(export.size_bytes.to_be_bytes());
        piece.extend(export.transmission_flags(self.structured).to_be_bytes());
        reply(out, option, option_reply::INFO, &piece);
        // Sent to every client: a client that did not ask for it could otherwise send unaligned requests.
        let mut piece = info::BLOCK_SIZE.to_be_bytes().to_vec();
        for bytes in [MIN_BLOCK_BYTES, export.preferred_block_bytes, MAX_PAYLOAD_BYTES] {
            piece.extend(bytes.to_be_bytes());
        }
        reply(out, option, option_reply::INFO, &piece);
        for (kind, text) in [(info::NAME, &export.name), (info::DESCRIPTION, &export.description)] {
            if request.wants(kind) {
                let mut piece = kind.to_be_bytes().to_vec();
                piece.extend(text.as_bytes());
                reply(out, option, option_reply::INFO, &piece);
            }
        }
        reply(out, option, option_reply::ACK, &[]);
        if option == option::GO {
            return HandshakeStep::Agreed(self.session(export));
        }
        HandshakeStep::Continue
    }

    fn meta_context(&mut self, option: u32, data: &[u8], exports: &dyn Catalogue, out: &mut Vec<u8>) {
        let setting = option == option::SET_META_CONTEXT;
        if setting {
            // A new selection replaces the old one even if it fails.
            self.context_of = None;
        }
        if !self.structured {
            error(out, option, option_reply::ERR_INVALID, "structured replies were not negotiated");
            return;
        }
        let Some(request) = MetaRequest::parse(data) else {
            error(out, option, option_reply::ERR_INVALID, "malformed query for metadata contexts");
            return;
        };
        let Some(export) = exports.find(request.name) else {
            error(out, option, option_reply::ERR_UNKNOWN, "no export has this name");
            return;
        };
        let matched = if setting { request.selects_allocation() } else { request.lists_allocation() };
        if matched {
            // In a list the number has no meaning.
            let id = if setting { ALLOCATION_CONTEXT_ID } else { 0 };
            let mut context = id.to_be_bytes().to_vec();
            context.extend(ALLOCATION_CONTEXT.as_bytes());
            reply(out, option, option_reply::META_CONTEXT, &context);
            if setting {
                self.context_of = Some(export.name);
            }
        }
        reply(out, option, option_reply::ACK, &[]);
    }

    fn session(&self, export: ExportInfo) -> Session {
        // A selection is valid only for the export for which it was made.
        let block_status = self.structured && self.context_of.as_ref() == Some(&export.name);
        Session { export, structured: self.structured, block_status }
    }
}

/// Answers an option that is available under TLS only.
fn without_tls(option: u32, out: &mut Vec<u8>) -> HandshakeStep {
    if option == option::EXPORT_NAME {
        return HandshakeStep::Ended(HandshakeEnd::WithoutTls);
    }
    error(out, option, option_reply::ERR_TLS_REQD, "this server wants TLS: send STARTTLS first");
    HandshakeStep::Continue
}

fn string(text: &str) -> Vec<u8> {
    let mut bytes = u32::try_from(text.len()).unwrap_or(u32::MAX).to_be_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes
}

fn reply(out: &mut Vec<u8>, option: u32, kind: u32, data: &[u8]) {
    out.extend(OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend(option.to_be_bytes());
    out.extend(kind.to_be_bytes());
    // The data consists of a few strings of at most MAX_STRING_BYTES each.
    out.extend(u32::try_from(data.len()).unwrap_or(u32::MAX).to_be_bytes());
    out.extend(data);
}

fn error(out: &mut Vec<u8>, option: u32, kind: u32, message: &str) {
    reply(out, option, kind, message.as_bytes());
}
