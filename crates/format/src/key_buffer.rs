//! Keys behind a header in a buffer of the caller: what bsets and journal entries are made of.
//!
//! Owns the room for keys and the padding to whole blocks. Must not know what a header says, only that its first word is
//! the checksum of everything behind that word.

use crate::bytes::{floor_to_block, pad_to_block};
use crate::key::{Bkey, WORD_BYTES};
use crate::units::Sectors;

/// The checksum at the beginning.
const SUM_BYTES: usize = 8;

/// See the module head.
#[derive(Debug)]
pub(crate) struct KeyBuffer<B> {
    buf: B,
    block_sectors: Sectors,
    header_bytes: usize,
    /// Bytes that the padded structure may have.
    limit: usize,
    /// Bytes of header and keys so far.
    len: usize,
}

impl<B: AsMut<[u8]>> KeyBuffer<B> {
    /// No keys, in `buf` of which at most `most_bytes` are used.
    ///
    /// # Panics
    /// If there is no room for `what` without keys, padded to whole blocks.
    pub(crate) fn begin(
        mut buf: B,
        most_bytes: usize,
        header_bytes: usize,
        block_sectors: Sectors,
        what: &str,
    ) -> KeyBuffer<B> {
        let room = buf.as_mut().len().min(most_bytes);
        let limit = floor_to_block(room, block_sectors).unwrap_or(0);
        assert!(limit >= header_bytes, "buffer of {room} bytes holds no {what}");
        KeyBuffer { buf, block_sectors, header_bytes, limit, len: header_bytes }
    }

    /// Forgets the keys.
    pub(crate) fn clear(&mut self) {
        self.len = self.header_bytes;
    }

    /// Appends a key. False, and nothing done, if there is no room.
    #[inline]
    #[must_use]
    pub(crate) fn push(&mut self, key: &Bkey) -> bool {
        let room = self.buf.as_mut().get_mut(self.len..self.limit).unwrap_or_default();
        match key.encode_to(room) {
            Some(bytes) => {
                self.len = self.len.saturating_add(bytes);
                true
            }
            None => false,
        }
    }

    /// True if a key with a pointer fits.
    pub(crate) fn has_room(&self) -> bool {
        self.limit.saturating_sub(self.len) >= Bkey::MAX_BYTES
    }

    /// Words of keys so far.
    pub(crate) fn words(&self) -> usize {
        self.len.saturating_sub(self.header_bytes) / WORD_BYTES
    }

    /// Length in bytes with the padding.
    pub(crate) fn padded_bytes(&self) -> usize {
        pad_to_block(self.len, self.block_sectors).unwrap_or(self.limit).min(self.limit)
    }

    /// Writes header, padding and the checksum that `sum` makes of header and keys. Returns the padded length.
    pub(crate) fn finish(&mut self, header: &[u8], sum: impl FnOnce(&[u8]) -> u64) -> usize {
        let padded = self.padded_bytes();
        let (len, buf) = (self.len, self.buf.as_mut());
        if let Some(front) = buf.get_mut(..self.header_bytes) {
            front.copy_from_slice(header);
        }
        // Zeroed, so that the padding shows nothing of what the buffer held before.
        buf.get_mut(len..padded).unwrap_or_default().fill(0);
        let csum = sum(buf.get(SUM_BYTES..len).unwrap_or_default());
        if let Some(front) = buf.get_mut(..SUM_BYTES) {
            front.copy_from_slice(&csum.to_le_bytes());
        }
        padded
    }

    /// The buffer.
    pub(crate) fn into_inner(self) -> B {
        self.buf
    }
}
