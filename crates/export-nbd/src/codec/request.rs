//! The client's half of the transmission phase: from bytes to commands that are safe to carry out.
//!
//! Owns the state of one client's request stream. Must not know sockets or volumes. Every [`Command`] that this module returns
//! is well-formed: it lies inside the export, is sector-aligned, is within the payload limit, and has only flags that the server
//! offered. Any other request becomes a [`Refusal`], which is answered, or a [`StreamError`], after which the rest of the stream
//! cannot be parsed and the connection ends.
//!
//! Invariants: it holds at most one request header. Its results do not depend on how the bytes are cut into pieces, except that
//! payload is returned in the pieces in which it arrives.

use format::{SECTOR_BYTES, Sector, Sectors};

use super::errno::Errno;
use super::export::MAX_PAYLOAD_BYTES;
use super::negotiation::Session;
use super::wire::{REQUEST_HEADER_BYTES, REQUEST_MAGIC, command, command_flag, take_u16, take_u32, take_u64};

/// The operation of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// Reads data.
    Read {
        /// The client wants the data in one chunk.
        whole: bool,
    },
    /// Stores the payload that follows in the stream.
    Write {
        /// The write is durable when it is acknowledged.
        fua: bool,
    },
    /// Makes every write durable that was acknowledged before.
    Flush,
    /// Discards the range.
    Trim {
        /// The discard is durable when it is acknowledged.
        fua: bool,
    },
    /// Reads the range into the cache.
    Cache,
    /// Makes the range read as zeros.
    WriteZeroes {
        /// The zeros are durable when the request is acknowledged.
        fua: bool,
        /// The space of the range must stay allocated.
        no_hole: bool,
    },
    /// Queries the state of the range.
    BlockStatus {
        /// The client wants one extent.
        one: bool,
    },
}

/// A request that passed every check.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Command {
    /// The client's identifier of the request.
    pub cookie: u64,
    /// The operation.
    pub action: Action,
    /// First byte, a multiple of 512.
    pub offset: u64,
    /// Length in bytes, a multiple of 512.
    pub bytes: u32,
}

impl Command {
    /// First sector.
    pub fn sector(&self) -> Sector {
        Sector(self.offset / SECTOR_BYTES)
    }

    /// Length in sectors.
    pub fn sectors(&self) -> Sectors {
        Sectors(u64::from(self.bytes) / SECTOR_BYTES)
    }
}

/// A request that is answered with an error and is not carried out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Refusal {
    /// The client's identifier of the request.
    pub cookie: u64,
    /// The error number for the client.
    pub errno: Errno,
    /// The error text for the client.
    pub message: &'static str,
}

/// An error after which the stream cannot be parsed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum StreamError {
    /// A request does not begin with its magic.
    #[error("bad request magic {0:#010x}")]
    BadMagic(u32),
}

/// The meaning of the next bytes of the stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StreamStep {
    /// The used bytes complete nothing; call `step` with the bytes that follow.
    Nothing,
    /// Begin this command. After a write, [`StreamStep::Payload`] follows until all of its bytes have arrived.
    Begin(Command),
    /// The used bytes are payload of the last write.
    Payload,
    /// Answer with an error.
    Refuse(Refusal),
    /// The client disconnects: end the requests under way, then close. No later bytes are used.
    Disconnect,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum StreamState {
    Header,
    /// Payload of an accepted write follows.
    Payload {
        bytes_left: u32,
    },
    /// Payload of a refused write follows; the refusal is answered after it.
    Drain {
        bytes_left: u32,
        refusal: Refusal,
    },
    Over,
}

/// The negotiated parameters against which requests are checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Rules {
    size_bytes: u64,
    read_only: bool,
    structured: bool,
    block_status: bool,
}

/// One client's request stream.
#[derive(Debug)]
pub struct RequestStream {
    rules: Rules,
    state: StreamState,
    shutting_down: bool,
    header: [u8; REQUEST_HEADER_BYTES],
    header_len: usize,
}

impl RequestStream {
    /// The stream of a client that agreed on `session`.
    pub fn new(session: &Session) -> RequestStream {
        RequestStream {
            rules: Rules {
                size_bytes: session.export.size_bytes,
                read_only: session.export.read_only,
                structured: session.structured,
                block_status: session.block_status,
            },
            state: StreamState::Header,
            shutting_down: false,
            header: [0; REQUEST_HEADER_BYTES],
            header_len: 0,
        }
    }

    /// Refuses every later request because the server shuts down. A write that has begun continues.
    pub fn shut_down(&mut self) {
        self.shutting_down = true;
    }

    /// Number of payload bytes that the current write still needs.
    pub fn payload_left(&self) -> u32 {
        match self.state {
            StreamState::Payload { bytes_left } => bytes_left,
            _ => 0,
        }
    }

    /// Whether the stream stands between two requests.
    pub fn at_boundary(&self) -> bool {
        matches!(self.state, StreamState::Header | StreamState::Over) && self.header_len == 0
    }

    /// Records that the caller received `bytes` of payload without [`RequestStream::step`].
    ///
    /// The caller must not claim more than [`RequestStream::payload_left`]; the excess is ignored.
    pub fn payload_received(&mut self, bytes: u32) {
        if let StreamState::Payload { bytes_left } = self.state {
            let left = bytes_left.saturating_sub(bytes);
            self.state =
                if left == 0 { StreamState::Header } else { StreamState::Payload { bytes_left: left } };
        }
    }

    /// Uses some of `input`, at least one byte if there is any; returns the number of bytes and their meaning.
    ///
    /// # Errors
    /// If the stream cannot be parsed any more.
    pub fn step(&mut self, input: &[u8]) -> Result<(usize, StreamStep), StreamError> {
        match self.state {
            // Bytes after the disconnect request are ignored.
            StreamState::Over => Ok((input.len(), StreamStep::Nothing)),
            StreamState::Header => self.header(input),
            StreamState::Payload { bytes_left } => {
                let used = clamp(input.len(), bytes_left);
                self.payload_received(used);
                Ok((used as usize, StreamStep::Payload))
            }
            StreamState::Drain { bytes_left, refusal } => {
                let used = clamp(input.len(), bytes_left);
                let left = bytes_left.saturating_sub(used);
                if left > 0 {
                    self.state = StreamState::Drain { bytes_left: left, refusal };
                    return Ok((used as usize, StreamStep::Nothing));
                }
                self.state = StreamState::Header;
                Ok((used as usize, StreamStep::Refuse(refusal)))
            }
        }
    }

    fn header(&mut self, input: &[u8]) -> Result<(usize, StreamStep), StreamError> {
        // In most cases the whole header has arrived, and is parsed in place.
        if self.header_len == 0
            && let Some(header) = input.first_chunk::<REQUEST_HEADER_BYTES>()
        {
            return Ok((REQUEST_HEADER_BYTES, self.judge(header)?));
        }
        let mut used = 0usize;
        for (to, from) in self.header.iter_mut().skip(self.header_len).zip(input) {
            *to = *from;
            used = used.saturating_add(1);
        }
        self.header_len = self.header_len.saturating_add(used);
        if self.header_len < REQUEST_HEADER_BYTES {
            return Ok((used, StreamStep::Nothing));
        }
        self.header_len = 0;
        let header = self.header;
        Ok((used, self.judge(&header)?))
    }

    /// Decides what a header means and what follows it in the stream.
    fn judge(&mut self, header: &[u8; REQUEST_HEADER_BYTES]) -> Result<StreamStep, StreamError> {
        let mut rest = header.as_slice();
        // The array is exactly as long as its fields, so the defaults are never used.
        let magic = take_u32(&mut rest).unwrap_or(0);
        let flags = take_u16(&mut rest).unwrap_or(0);
        let kind = take_u16(&mut rest).unwrap_or(u16::MAX);
        let cookie = take_u64(&mut rest).unwrap_or(0);
        let offset = take_u64(&mut rest).unwrap_or(u64::MAX);
        let bytes = take_u32(&mut rest).unwrap_or(u32::MAX);
        if magic != REQUEST_MAGIC {
            self.state = StreamState::Over;
            return Err(StreamError::BadMagic(magic));
        }
        if kind == command::DISCONNECT {
            self.state = StreamState::Over;
            return Ok(StreamStep::Disconnect);
        }
        let payload = if kind == command::WRITE { bytes } else { 0 };
        match self.check(flags, kind, offset, bytes) {
            Ok(action) => {
                if payload > 0 {
                    self.state = StreamState::Payload { bytes_left: payload };
                }
                Ok(StreamStep::Begin(Command { cookie, action, offset, bytes }))
            }
            Err((errno, message)) => {
                let refusal = Refusal { cookie, errno, message };
                if payload > 0 {
                    self.state = StreamState::Drain { bytes_left: payload, refusal };
                    return Ok(StreamStep::Nothing);
                }
                Ok(StreamStep::Refuse(refusal))
            }
        }
    }

    /// The action of a command, and the flags that it accepts besides FUA.
    fn action(&self, kind: u16, flags: u16, fua: bool) -> Result<(Action, u16), (Errno, &'static str)> {
        Ok(match kind {
            command::READ => {
                let allowed = if self.rules.structured { command_flag::DF } else { 0 };
                (Action::Read { whole: flags & command_flag::DF != 0 }, allowed)
            }
            command::WRITE => (Action::Write { fua }, 0),
            command::FLUSH => (Action::Flush, 0),
            command::TRIM => (Action::Trim { fua }, 0),
            command::CACHE => (Action::Cache, 0),
            command::WRITE_ZEROES => {
                let no_hole = flags & command_flag::NO_HOLE != 0;
                (Action::WriteZeroes { fua, no_hole }, command_flag::NO_HOLE)
            }
            command::BLOCK_STATUS => {
                let one = flags & command_flag::REQ_ONE != 0;
                (Action::BlockStatus { one }, command_flag::REQ_ONE)
            }
            _ => return Err((Errno::Inval, "unknown command")),
        })
    }

    fn check(&self, flags: u16, kind: u16, offset: u64, bytes: u32) -> Result<Action, (Errno, &'static str)> {
        let fua = flags & command_flag::FUA != 0;
        // The protocol allows FUA on every command. It has no effect on commands that store nothing.
        let flags = flags & !command_flag::FUA;
        let (action, allowed) = self.action(kind, flags, fua)?;
        if self.shutting_down {
            return Err((Errno::Shutdown, "the server is shutting down"));
        }
        if flags & !allowed != 0 {
            return Err((Errno::Inval, "the command does not take these flags"));
        }
        let stores =
            matches!(action, Action::Write { .. } | Action::Trim { .. } | Action::WriteZeroes { .. });
        if self.rules.read_only && stores {
            return Err((Errno::Perm, "the export is read-only"));
        }
        let carries_payload = matches!(action, Action::Read { .. } | Action::Write { .. });
        if carries_payload && bytes > MAX_PAYLOAD_BYTES {
            return Err((Errno::Inval, "the request is larger than 32 MiB"));
        }
        match action {
            Action::Flush if offset != 0 || bytes != 0 => {
                return Err((Errno::Inval, "a flush takes no range"));
            }
            Action::BlockStatus { .. } if !self.rules.block_status => {
                return Err((Errno::Inval, "no metadata context was selected"));
            }
            Action::BlockStatus { .. } if bytes == 0 => {
                return Err((Errno::Inval, "the range is empty"));
            }
            _ => {}
        }
        if !offset.is_multiple_of(SECTOR_BYTES) || !u64::from(bytes).is_multiple_of(SECTOR_BYTES) {
            return Err((Errno::Inval, "the range is not made of whole 512-byte sectors"));
        }
        let inside = offset.checked_add(u64::from(bytes)).is_some_and(|end| end <= self.rules.size_bytes);
        if !inside {
            let grows = matches!(action, Action::Write { .. } | Action::WriteZeroes { .. });
            let errno = if grows { Errno::NoSpace } else { Errno::Inval };
            return Err((errno, "the range ends beyond the export"));
        }
        Ok(action)
    }
}

fn clamp(available: usize, limit: u32) -> u32 {
    u32::try_from(available).unwrap_or(u32::MAX).min(limit)
}
