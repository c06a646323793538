//! A header and keys in a buffer of the caller. A bset or a journal entry is built in one.
//!
//! Owns the space for keys and the padding to whole blocks. Must not know the fields of a header, only that the first
//! word is the checksum of the rest of the header and the keys.

use crate::bytes::{floor_to_block, pad_to_block};
use crate::key::{Bkey, WORD_BYTES};
use crate::units::Sectors;

/// Bytes of the checksum at the beginning.
const SUM_BYTES: usize = 8;

/// A header and packed keys in a buffer, padded to whole blocks.
#[derive(Debug)]
pub(crate) struct KeyBuffer<B> {
    buf: B,
    block_sectors: Sectors,
    header_bytes: usize,
    /// Most bytes of the padded structure.
    limit: usize,
    /// Bytes of header and keys so far.
    len: usize,
}

impl<B: AsMut<[u8]>> KeyBuffer<B> {
    /// Begins without keys in `buf`, of which at most `most_bytes` are used.
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

    /// Removes all keys.
    pub(crate) fn clear(&mut self) {
        self.len = self.header_bytes;
    }

    /// Appends a key; returns false and changes nothing if there is no room.
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

    /// Length in bytes, padding included.
    pub(crate) fn padded_bytes(&self) -> usize {
        pad_to_block(self.len, self.block_sectors).unwrap_or(self.limit).min(self.limit)
    }

    /// Writes header, padding and the checksum, and returns the padded length in bytes.
    ///
    /// `sum` computes the checksum of the header behind its first word and the keys.
    pub(crate) fn finish(&mut self, header: &[u8], sum: impl FnOnce(&[u8]) -> u64) -> usize {
        let padded = self.padded_bytes();
        let (len, buf) = (self.len, self.buf.as_mut());
        if let Some(front) = buf.get_mut(..self.header_bytes) {
            front.copy_from_slice(header);
        }
        // Zeroed, so that the padding does not contain earlier contents of the buffer.
        buf.get_mut(len..padded).unwrap_or_default().fill(0);
        let csum = sum(buf.get(SUM_BYTES..len).unwrap_or_default());
        if let Some(front) = buf.get_mut(..SUM_BYTES) {
            front.copy_from_slice(&csum.to_le_bytes());
        }
        padded
    }

    /// Returns the buffer.
    pub(crate) fn into_inner(self) -> B {
        self.buf
    }
}
