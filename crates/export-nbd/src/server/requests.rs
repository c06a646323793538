//! The unanswered requests of a connection, and the assembly of their replies from pieces.
//!
//! A request is carried out in pieces of at most [`PIECE_BYTES`], cut at multiples of that size, so that memory and fairness
//! have a unit. This module owns the state of a request until its last piece is done: the number of missing pieces, the first
//! error, and the data of reads that are answered as a whole. Such reads have at most [`GATHER_BYTES`]; longer ones are
//! streamed. Must not know sockets or volumes.
//!
//! Invariant: every request is answered exactly once, when its last piece is done.

use std::cell::RefCell;

use io::{Buffer, VolumeError};

use crate::codec::{self, Command, Errno, Refusal};
use crate::server::memory::Memory;
use crate::server::outbox::{Outbox, Release};

/// Largest piece of a request that is passed to a volume.
pub(super) const PIECE_BYTES: u32 = 1 << 20;

/// Longest read that is answered as a whole from memory, so that an error in any piece becomes an error reply.
///
/// Linux's nbd driver, which does not know chunks, reads up to this length by default.
pub(super) const GATHER_BYTES: u32 = 4 << 20;

/// The first piece of `bytes` at `offset`: cut at a multiple of [`PIECE_BYTES`].
pub(super) fn first_piece(offset: u64, bytes: u32) -> u32 {
    let to_border = PIECE_BYTES - (offset % u64::from(PIECE_BYTES)) as u32;
    bytes.min(to_border)
}

/// The pieces of `bytes` at `offset`, in order.
pub(super) fn pieces(mut offset: u64, mut bytes: u32) -> impl Iterator<Item = (u64, u32)> {
    std::iter::from_fn(move || {
        let piece = (offset, first_piece(offset, bytes));
        offset += u64::from(piece.1);
        bytes -= piece.1;
        (piece.1 > 0).then_some(piece)
    })
}

/// Why a piece of a request was not carried out.
#[derive(Debug)]
pub(super) enum PieceError {
    Volume(VolumeError),
    /// The system has no memory for the piece's data.
    NoMemory,
    /// The client has disconnected: no more operations begin for it.
    ClientClosed,
}

impl From<VolumeError> for PieceError {
    fn from(e: VolumeError) -> PieceError {
        PieceError::Volume(e)
    }
}

impl PieceError {
    /// The error number and text for the client; `writing` is true if the request stores data.
    pub(super) fn in_protocol(&self, writing: bool) -> (Errno, String) {
        match self {
            PieceError::Volume(e) => (Errno::of_volume_error(e, writing), e.to_string()),
            PieceError::NoMemory => (Errno::NoMem, "the server has no memory for the request's data".into()),
            PieceError::ClientClosed => (Errno::Shutdown, "the client has disconnected".into()),
        }
    }
}

/// Number of a request in its connection.
pub(super) type RequestId = usize;

/// A piece of a read that is done.
pub(super) struct ReadPiece {
    /// Index of the piece in the request.
    pub(super) index: usize,
    /// Position in the volume.
    pub(super) offset: u64,
    /// Length of the piece.
    pub(super) bytes: u32,
}

#[derive(Default)]
struct Open {
    cookie: u64,
    offset: u64,
    bytes: u32,
    writing: bool,
    /// Whether the request is a read that is answered with one chunk, or with a simple reply.
    whole: bool,
    pieces_left: usize,
    failure: Option<(Errno, String)>,
    /// Data of a read that is answered as a whole, indexed by piece.
    gathered: Vec<Option<Buffer>>,
}

/// The unanswered requests of a connection.
pub(super) struct Requests {
    open: RefCell<Slab>,
    structured: bool,
}

#[derive(Default)]
struct Slab {
    slots: Vec<Open>,
    free: Vec<RequestId>,
}

impl Requests {
    pub(super) fn new(structured: bool) -> Requests {
        Requests { open: RefCell::default(), structured }
    }

    /// Whether the server answers reads in chunks.
    pub(super) fn is_structured(&self) -> bool {
        self.structured
    }

    /// Begins a request of `pieces` pieces.
    pub(super) fn open(&self, command: &Command, writing: bool, whole: bool, pieces: usize) -> RequestId {
        let slab = &mut *self.open.borrow_mut();
        let id = slab.free.pop().unwrap_or_else(|| {
            slab.slots.push(Open::default());
            slab.slots.len() - 1
        });
        // Keeps the storage of `gathered` for the next request.
        let slot = &mut slab.slots[id];
        slot.gathered.clear();
        if whole {
            slot.gathered.resize_with(pieces, || None);
        }
        (slot.cookie, slot.offset, slot.bytes) = (command.cookie, command.offset, command.bytes);
        (slot.writing, slot.whole) = (writing, whole);
        (slot.pieces_left, slot.failure) = (pieces, None);
        id
    }

    /// Answers a request that was not opened with success.
    pub(super) fn ack(&self, cookie: u64, read: bool, outbox: &Outbox) {
        let release = Release { requests: 1, bytes: 0 };
        if read && self.structured {
            outbox.push(&codec::done_chunk(cookie), None, release);
        } else {
            outbox.push(&codec::simple_reply(cookie, None), None, release);
        }
    }

    /// Answers a request that was not opened with an error.
    pub(super) fn refuse(&self, refusal: &Refusal, outbox: &Outbox) {
        self.push_error(refusal.cookie, refusal.errno, refusal.message, outbox);
    }

    /// Records that a piece of a read is done. Its memory was taken from `memory`.
    pub(super) fn read_done(
        &self,
        id: RequestId,
        piece: &ReadPiece,
        result: Result<Buffer, PieceError>,
        outbox: &Outbox,
        memory: &Memory,
    ) {
        let slab = &mut *self.open.borrow_mut();
        let slot = &mut slab.slots[id];
        slot.pieces_left -= 1;
        let last = slot.pieces_left == 0;
        let buffer = match result {
            Ok(buffer) => Some(buffer),
            Err(e) => {
                slot.fail(&e);
                None
            }
        };
        let bytes = u64::from(piece.bytes);
        if slot.whole {
            slot.gathered[piece.index] = buffer;
            if last {
                let total = u64::from(slot.bytes);
                match slot.failure.take() {
                    None => {
                        let release = Release { requests: 1, bytes: total };
                        let data = slot.gathered.drain(..).flatten();
                        if self.structured {
                            let head = codec::data_header(slot.cookie, slot.offset, slot.bytes, true);
                            outbox.push(&head, data, release);
                        } else {
                            outbox.push(&codec::simple_reply(slot.cookie, None), data, release);
                        }
                    }
                    Some((errno, message)) => {
                        slot.gathered.clear();
                        memory.give(total);
                        self.push_error(slot.cookie, errno, &message, outbox);
                    }
                }
            }
        } else {
            let answered = last && slot.failure.is_none();
            match buffer {
                Some(_) => {
                    let head = codec::data_header(slot.cookie, piece.offset, piece.bytes, answered);
                    outbox.push(&head, buffer, Release { requests: u64::from(answered), bytes });
                }
                None => memory.give(bytes),
            }
            if last && let Some((errno, message)) = slot.failure.take() {
                self.push_error(slot.cookie, errno, &message, outbox);
            }
        }
        if last {
            slab.free.push(id);
        }
    }

    /// Records that a piece of another request is done.
    pub(super) fn piece_done(&self, id: RequestId, result: Result<(), PieceError>, outbox: &Outbox) {
        let slab = &mut *self.open.borrow_mut();
        let slot = &mut slab.slots[id];
        slot.pieces_left -= 1;
        if let Err(e) = result {
            slot.fail(&e);
        }
        if slot.pieces_left > 0 {
            return;
        }
        match slot.failure.take() {
            None => self.ack(slot.cookie, false, outbox),
            Some((errno, message)) => self.push_error(slot.cookie, errno, &message, outbox),
        }
        slab.free.push(id);
    }

    /// Answers a request of one piece with `reply`, which is made from its cookie and length.
    ///
    /// The reply takes over `memory_bytes` that were taken for the request.
    pub(super) fn answered(
        &self,
        id: RequestId,
        outbox: &Outbox,
        memory_bytes: u64,
        reply: impl FnOnce(u64, u32) -> Vec<u8>,
    ) {
        let slab = &mut *self.open.borrow_mut();
        let slot = &mut slab.slots[id];
        slot.pieces_left -= 1;
        assert_eq!(slot.pieces_left, 0, "a request with an answer of its own has one piece");
        let head = reply(slot.cookie, slot.bytes);
        outbox.push(&head, None, Release { requests: 1, bytes: memory_bytes });
        slab.free.push(id);
    }

    /// Records that the last `pieces` pieces of a request do not begin, because the client has disconnected.
    pub(super) fn give_up(&self, id: RequestId, pieces: usize, outbox: &Outbox) {
        let slab = &mut *self.open.borrow_mut();
        let slot = &mut slab.slots[id];
        slot.pieces_left -= pieces;
        slot.failure.get_or_insert_with(|| (Errno::Inval, "the stream ended within the request".into()));
        if slot.pieces_left == 0
            && let Some((errno, message)) = slot.failure.take()
        {
            self.push_error(slot.cookie, errno, &message, outbox);
            slab.free.push(id);
        }
    }

    /// Answers a request with an error. The request was not opened, or its data was sent as one chunk.
    pub(super) fn push_error(&self, cookie: u64, errno: Errno, message: &str, outbox: &Outbox) {
        let release = Release { requests: 1, bytes: 0 };
        if self.structured {
            let mut chunk = Vec::with_capacity(codec::MAX_ERROR_CHUNK_BYTES);
            codec::error_chunk(cookie, errno, message, &mut chunk);
            outbox.push(&chunk, None, release);
        } else {
            outbox.push(&codec::simple_reply(cookie, Some(errno)), None, release);
        }
    }
}

impl Open {
    fn fail(&mut self, error: &PieceError) {
        let writing = self.writing;
        self.failure.get_or_insert_with(|| error.in_protocol(writing));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_a_range_once_and_stay_within_their_grain() {
        const MIB: u64 = 1 << 20;
        let cases = [(0, 512), (0, 1 << 20), (MIB - 512, 1024), (512, 32 << 20), (3 * MIB, 5 << 20)];
        for (offset, bytes) in cases {
            let mut at = offset;
            for (o, b) in pieces(offset, bytes) {
                assert_eq!(o, at);
                assert!(b > 0 && o / MIB == (o + u64::from(b) - 1) / MIB, "{b} bytes at {o}");
                at += u64::from(b);
            }
            assert_eq!(at, offset + u64::from(bytes));
        }
        assert_eq!(pieces(0, 0).count(), 0);
    }
}
