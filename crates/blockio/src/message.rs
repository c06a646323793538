//! Bytes that are sent as one message: pieces of several buffers.
//!
//! Owns the list of pieces. Must not know sockets.

use std::ops::Range;

use ::io::Buffer;

/// Part of a buffer to be sent.
#[derive(Debug)]
pub struct Piece {
    buffer: Buffer,
    range: Range<usize>,
}

impl Piece {
    pub(crate) fn as_slice(&self) -> &[u8] {
        &self.buffer.as_slice()[self.range.clone()]
    }
}

/// Bytes to be sent as one message, in order: pieces of any number of buffers. Reuse it, because it keeps its storage.
#[derive(Default, Debug)]
pub struct Message {
    pieces: Vec<Piece>,
    len_bytes: usize,
}

impl Message {
    /// An empty message.
    pub fn new() -> Message {
        Message::default()
    }

    /// Appends `range` of `buffer`. Several pieces may share one buffer (clones).
    ///
    /// # Panics
    /// If the range does not lie in the buffer.
    pub fn push(&mut self, buffer: Buffer, range: Range<usize>) {
        assert!(range.start <= range.end && range.end <= buffer.len(), "{range:?} of {} bytes", buffer.len());
        self.len_bytes += range.len();
        if !range.is_empty() {
            self.pieces.push(Piece { buffer, range });
        }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len_bytes
    }

    /// Whether there is nothing to send.
    pub fn is_empty(&self) -> bool {
        self.len_bytes == 0
    }

    /// Drops the pieces and keeps the storage.
    pub fn clear(&mut self) {
        self.pieces.clear();
        self.len_bytes = 0;
    }

    /// Number of pieces. One system call sends 64 pieces at most.
    pub fn pieces_len(&self) -> usize {
        self.pieces.len()
    }

    pub(crate) fn pieces(&self) -> &[Piece] {
        &self.pieces
    }
}
