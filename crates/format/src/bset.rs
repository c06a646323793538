//! The bset: a sorted array of keys inside a btree node: its header, how it is built, and the order of its keys.
//!
//! A bset is written once and never changed. Its checksum starts from the first pointer word of the
//! key that leads to the node, so a bset is valid only where that key points. [`crate::node`] reads the
//! bsets of a node in sequence.

use std::mem::{offset_of, size_of};

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::bytes::{as_u64, floor_to_block, pad_to_block};
use crate::checksum::{crc64, crc64_seeded};
use crate::error::{Corrupt, Structure, Value};
use crate::key::{Bkey, Ptr, WORD_BYTES};
use crate::key_buffer::KeyBuffer;
use crate::magic::SetMagic;
use crate::units::{Inode, Sector, Sectors};

/// Bytes before the keys.
pub const BSET_HEADER_BYTES: usize = 32;
/// Version of the bsets that this code writes. The checksum of a bset of version 0 starts from all ones.
pub const BSET_VERSION: u32 = 1;

/// Header of a bset as it lies on the device.
#[derive(Clone, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawBset {
    pub(crate) csum: U64,
    pub(crate) magic: U64,
    pub(crate) seq: U64,
    pub(crate) version: U32,
    pub(crate) keys: U32,
}

const _: () = {
    assert!(size_of::<RawBset>() == BSET_HEADER_BYTES);
    assert!(align_of::<RawBset>() == 1);
    assert!(offset_of!(RawBset, magic) == 8);
    assert!(offset_of!(RawBset, seq) == 16);
    assert!(offset_of!(RawBset, version) == 24);
    assert!(offset_of!(RawBset, keys) == 28);
};

/// Checksum of a bset. `covered` reaches from the second field of its header to the end of its keys.
pub(crate) fn bset_csum(version: u32, node_ptr: Ptr, covered: &[u8]) -> u64 {
    if version == 0 { crc64(covered) } else { crc64_seeded(node_ptr.0, covered) }
}

/// Most key words of a bset of `bytes` bytes, header included.
pub const fn max_words(bytes: usize) -> usize {
    bytes.saturating_sub(BSET_HEADER_BYTES) / WORD_BYTES
}

/// Bytes that a bset of `words` key words takes on disk, padded to whole blocks.
///
/// `None` if the length overflows or the block size is zero.
pub fn padded_bytes(words: usize, block_sectors: Sectors) -> Option<usize> {
    pad_to_block(words.checked_mul(WORD_BYTES)?.checked_add(BSET_HEADER_BYTES)?, block_sectors)
}

/// Key words that one more bset can have in a node of `node_sectors` of which `written_bytes` are
/// written.
///
/// `None` if less than one block is left, or the block size is zero.
pub fn appendable_words(
    node_sectors: Sectors,
    written_bytes: usize,
    block_sectors: Sectors,
) -> Option<usize> {
    let node = usize::try_from(node_sectors.bytes()).ok()?;
    let left = floor_to_block(node.checked_sub(written_bytes)?, block_sectors)?;
    (left > BSET_HEADER_BYTES).then(|| max_words(left))
}

/// Builds a bset in a buffer of the caller, key by key, without allocating.
///
/// The buffer may be borrowed (`&mut [u8]`) or owned; [`BsetBuilder::into_inner`] returns it. Its
/// length limits the bset: the caller passes at most the bytes that are left in the node.
#[derive(Debug)]
pub struct BsetBuilder<B> {
    keys: KeyBuffer<B>,
    seq: u64,
}

impl<B: AsMut<[u8]>> BsetBuilder<B> {
    /// Begins a bset without keys in `buf`.
    ///
    /// `seq` is the number that all bsets of the node share: random and not zero.
    ///
    /// # Panics
    /// If `seq` is zero, or the buffer is shorter than a block.
    pub fn begin(buf: B, seq: u64, block_sectors: Sectors) -> BsetBuilder<B> {
        let keys = KeyBuffer::begin(buf, usize::MAX, BSET_HEADER_BYTES, block_sectors, "bset");
        assert!(seq != 0, "a node's seq is not zero");
        BsetBuilder { keys, seq }
    }

    /// Removes all keys from the bset.
    pub fn clear(&mut self) {
        self.keys.clear();
    }

    /// Appends a key; returns false and changes nothing if there is no room.
    ///
    /// The caller appends keys in the order that [`check_bset_order`] requires.
    #[inline]
    #[must_use]
    pub fn push_key(&mut self, key: &Bkey) -> bool {
        self.keys.push(key)
    }

    /// True if a key with a pointer fits.
    pub fn has_room(&self) -> bool {
        self.keys.has_room()
    }

    /// Words of keys so far. A bset without keys is valid only as the first of its node.
    pub fn words(&self) -> usize {
        self.keys.words()
    }

    /// Length in bytes that [`BsetBuilder::finish`] would return now.
    pub fn padded_bytes(&self) -> usize {
        self.keys.padded_bytes()
    }

    /// Writes header, padding and checksum, and returns the padded length in bytes.
    ///
    /// The caller writes that many bytes of the buffer into the node. `node_ptr` is the pointer of the
    /// key that leads to the node, generation included; the checksum starts from it.
    pub fn finish(&mut self, set_magic: SetMagic, node_ptr: Ptr) -> usize {
        let mut header = RawBset::new_zeroed();
        header.magic = set_magic.bset().into();
        header.seq = self.seq.into();
        header.version = BSET_VERSION.into();
        header.keys = u32::try_from(self.words()).unwrap_or(u32::MAX).into();
        self.keys.finish(header.as_bytes(), |bytes| bset_csum(BSET_VERSION, node_ptr, bytes))
    }

    /// Returns the buffer.
    pub fn into_inner(self) -> B {
        self.keys.into_inner()
    }
}

/// The kind of node that a bset belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BsetKind {
    /// The bset is in a leaf; its keys are extents.
    Leaf,
    /// The bset is in an internal node; its keys denote children or freed nodes.
    Internal,
}

impl BsetKind {
    /// The kind of the bsets of a node of this level.
    pub const fn of_level(level: u16) -> BsetKind {
        if level == 0 { BsetKind::Leaf } else { BsetKind::Internal }
    }
}

/// Checks the order of the keys of one bset.
///
/// In a leaf, extents must be ascending and disjoint; keys of size 0 mean nothing and are skipped. In an
/// internal node, positions must not descend.
///
/// # Errors
/// The first key that is out of order or, in a leaf, begins before sector 0. `offset_bytes` counts from
/// the start of the bset.
pub fn check_bset_order(kind: BsetKind, keys: impl IntoIterator<Item = Bkey>) -> Result<(), Corrupt> {
    let mut at = BSET_HEADER_BYTES;
    let mut before: (Inode, Sector) = Bkey::ZERO_POSITION;
    for key in keys {
        let here = as_u64(at);
        at = at.saturating_add(key.len_bytes());
        let bad = |field, expected, found: u64| {
            Err(Corrupt::new(Structure::Bset, field, here, expected, Value::Num(found)))
        };
        let position = match kind {
            BsetKind::Internal => key.position(),
            BsetKind::Leaf if key.size() == Sectors::ZERO => continue,
            BsetKind::Leaf => match key.start_position() {
                Some(start) => start,
                None => {
                    return bad("key size", Value::AtMost(key.offset().0), key.size().0);
                }
            },
        };
        if position.0 < before.0 {
            let least = Value::AtLeast(u64::from(before.0.0));
            return bad("key order (inode)", least, u64::from(position.0.0));
        }
        if position < before {
            return bad("key order", Value::AtLeast(before.1.0), position.1.0);
        }
        before = key.position();
    }
    Ok(())
}
