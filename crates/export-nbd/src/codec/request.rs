//! The client's half of the transmission phase: from bytes to commands that are safe to carry out.
//!
//! Owns the state of one client's request stream. Must not know sockets or volumes. A [`Command`] that
//! leaves this module is well-formed: it lies inside the export, is sector-aligned, fits the payload
//! limit, and uses only flags that were offered. Everything else becomes a [`Refusal`], which is answered,
//! or a [`StreamError`], after which nothing in the stream can be trusted and the connection ends.
//!
//! Invariants: holds at most one request header; what comes out does not depend on how the bytes were
//! cut into pieces, except that payload comes out in the pieces in which it came in.

use format::{SECTOR_BYTES, Sector, Sectors};

use super::errno::Errno;
use super::export::MAX_PAYLOAD_BYTES;
use super::negotiation::Session;
use super::wire::{REQUEST_HEADER_BYTES, REQUEST_MAGIC, command, command_flag, take_u16, take_u32, take_u64};

/// The operation of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// Send data.
    Read {
        /// As one piece.
        whole: bool,
    },
    /// Store the payload that follows in the stream.
    Write {
        /// Durable when answered.
        fua: bool,
    },
    /// Make everything durable that was answered before.
    Flush,
    /// The range is no longer needed.
    Trim {
        /// Durable when answered.
        fua: bool,
    },
    /// The range will be needed soon.
    Cache,
    /// The range shall read as zeros.
    WriteZeroes {
        /// Durable when answered.
        fua: bool,
        /// The space must stay allocated.
        no_hole: bool,
    },
    /// Query the state of the range.
    BlockStatus {
        /// One extent will do.
        one: bool,
    },
}

/// A request that passed every check.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Command {
    /// The client's name for it.
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

/// A request that is answered with an error without being tried.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Refusal {
    /// The client's name for it.
    pub cookie: u64,
    /// The error number for the client.
    pub errno: Errno,
    /// The error text for the client.
    pub message: &'static str,
}

/// The stream makes no sense any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum StreamError {
    /// A request does not begin with its magic.
    #[error("bad request magic {0:#010x}")]
    BadMagic(u32),
}

/// The meaning of the next bytes of the stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StreamStep {
    /// The bytes just used mean nothing by themselves: go on with what follows.
    Nothing,
    /// Begin this. If it is a write, [`StreamStep::Payload`] follows until all of its bytes have come.
    Begin(Command),
    /// The bytes just used belong to the write that began last.
    Payload,
    /// Answer with an error.
    Refuse(Refusal),
    /// The client disconnects in order: finish the requests under way, then close. Nothing comes after this.
    Disconnect,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Header,
    /// Bytes of an accepted write are to come.
    Payload {
        bytes_left: u32,
    },
    /// Bytes of a refused write are to come, then it is answered.
    Drain {
        bytes_left: u32,
        refusal: Refusal,
    },
    Over,
}

/// The negotiated parameters that requests are checked against.
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
    state: State,
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
            state: State::Header,
            shutting_down: false,
            header: [0; REQUEST_HEADER_BYTES],
            header_len: 0,
        }
    }

    /// From now on every request is refused because the server goes away. A write that has begun goes on.
    pub fn shut_down(&mut self) {
        self.shutting_down = true;
    }

    /// Payload that the current write still misses.
    pub fn payload_left(&self) -> u32 {
        match self.state {
            State::Payload { bytes_left } => bytes_left,
            _ => 0,
        }
    }

    /// Whether the stream stands between two requests.
    pub fn at_boundary(&self) -> bool {
        matches!(self.state, State::Header | State::Over) && self.header_len == 0
    }

    /// Records that `bytes` of payload were received past the parser.
    ///
    /// The caller must not claim more than [`RequestStream::payload_left`]; the excess is ignored.
    pub fn payload_received(&mut self, bytes: u32) {
        if let State::Payload { bytes_left } = self.state {
            let left = bytes_left.saturating_sub(bytes);
            self.state = if left == 0 { State::Header } else { State::Payload { bytes_left: left } };
        }
    }

    /// Uses some of `input`, at least one byte if there is any, and returns how many, and what they mean.
    ///
    /// # Errors
    /// If the stream makes no sense any more.
    pub fn step(&mut self, input: &[u8]) -> Result<(usize, StreamStep), StreamError> {
        match self.state {
            // Whatever comes after the end is not looked at.
            State::Over => Ok((input.len(), StreamStep::Nothing)),
            State::Header => self.header(input),
            State::Payload { bytes_left } => {
                let used = clamp(input.len(), bytes_left);
                self.payload_received(used);
                Ok((used as usize, StreamStep::Payload))
            }
            State::Drain { bytes_left, refusal } => {
                let used = clamp(input.len(), bytes_left);
                let left = bytes_left.saturating_sub(used);
                if left > 0 {
                    self.state = State::Drain { bytes_left: left, refusal };
                    return Ok((used as usize, StreamStep::Nothing));
                }
                self.state = State::Header;
                Ok((used as usize, StreamStep::Refuse(refusal)))
            }
        }
    }

    fn header(&mut self, input: &[u8]) -> Result<(usize, StreamStep), StreamError> {
        // Nearly always the whole header is there and is read where it lies.
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

    /// Decides what a header means and what comes after it in the stream.
    fn judge(&mut self, header: &[u8; REQUEST_HEADER_BYTES]) -> Result<StreamStep, StreamError> {
        let mut rest = header.as_slice();
        // The array is exactly as long as these fields.
        let magic = take_u32(&mut rest).unwrap_or(0);
        let flags = take_u16(&mut rest).unwrap_or(0);
        let kind = take_u16(&mut rest).unwrap_or(u16::MAX);
        let cookie = take_u64(&mut rest).unwrap_or(0);
        let offset = take_u64(&mut rest).unwrap_or(u64::MAX);
        let bytes = take_u32(&mut rest).unwrap_or(u32::MAX);
        if magic != REQUEST_MAGIC {
            self.state = State::Over;
            return Err(StreamError::BadMagic(magic));
        }
        if kind == command::DISCONNECT {
            self.state = State::Over;
            return Ok(StreamStep::Disconnect);
        }
        let payload = if kind == command::WRITE { bytes } else { 0 };
        match self.check(flags, kind, offset, bytes) {
            Ok(action) => {
                if payload > 0 {
                    self.state = State::Payload { bytes_left: payload };
                }
                Ok(StreamStep::Begin(Command { cookie, action, offset, bytes }))
            }
            Err((errno, message)) => {
                let refusal = Refusal { cookie, errno, message };
                if payload > 0 {
                    self.state = State::Drain { bytes_left: payload, refusal };
                    return Ok(StreamStep::Nothing);
                }
                Ok(StreamStep::Refuse(refusal))
            }
        }
    }

    /// The action of a command, and the flags that it takes beside FUA.
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
        // Durability may be asked of any command and means nothing to those that store nothing.
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
