//! One set of keys inside a btree node: its header, how it is built, and the order of its keys.
//!
//! A bset is written once and never changed. Its checksum starts from the first pointer word of the
//! key that leads to the node, so a set is valid only where that key points. Reading a node's sets in
//! sequence is [`crate::node`].

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
/// Version of the sets written now. Version 0 has the checksum start from all ones.
pub const BSET_VERSION: u32 = 1;

/// Header of a set as it lies on the device.
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

/// Checksum of a set, from its header's second field to the end of its keys.
pub(crate) fn bset_csum(version: u32, node_ptr: Ptr, covered: &[u8]) -> u64 {
    if version == 0 { crc64(covered) } else { crc64_seeded(node_ptr.0, covered) }
}

/// Most key words of a set in so many bytes.
pub const fn max_words(bytes: usize) -> usize {
    bytes.saturating_sub(BSET_HEADER_BYTES) / WORD_BYTES
}

/// Bytes that a set of so many key words takes on disk, padded to whole blocks; `None` if that
/// overflows or the block is zero.
pub fn padded_bytes(words: usize, block_sectors: Sectors) -> Option<usize> {
    pad_to_block(words.checked_mul(WORD_BYTES)?.checked_add(BSET_HEADER_BYTES)?, block_sectors)
}

/// Key words that one more set can have in a node of `node_sectors` of which `written_bytes` are
/// written; `None` if not even one block is left.
pub fn appendable_words(
    node_sectors: Sectors,
    written_bytes: usize,
    block_sectors: Sectors,
) -> Option<usize> {
    let node = usize::try_from(node_sectors.bytes()).ok()?;
    let left = floor_to_block(node.checked_sub(written_bytes)?, block_sectors)?;
    (left > BSET_HEADER_BYTES).then(|| max_words(left))
}

/// Builds a set in a buffer of the caller, key by key, without allocating.
///
/// The buffer may be borrowed (`&mut [u8]`) or owned; [`BsetBuilder::into_inner`] gives it back. Its
/// length bounds the set: give it no more than what is left of the node.
#[derive(Debug)]
pub struct BsetBuilder<B> {
    keys: KeyBuffer<B>,
    seq: u64,
}

impl<B: AsMut<[u8]>> BsetBuilder<B> {
    /// A set without keys in `buf`. `seq` is the node's: random and not zero for the first set, the
    /// same for all that follow.
    ///
    /// # Panics
    /// If `seq` is zero, or the buffer is shorter than a block.
    pub fn begin(buf: B, seq: u64, block_sectors: Sectors) -> BsetBuilder<B> {
        let keys = KeyBuffer::begin(buf, usize::MAX, BSET_HEADER_BYTES, block_sectors, "bset");
        assert!(seq != 0, "a node's seq is not zero");
        BsetBuilder { keys, seq }
    }

    /// Forgets the keys.
    pub fn clear(&mut self) {
        self.keys.clear();
    }

    /// Appends a key. Keys must come in the order that [`check_set_order`] asks for. False, and nothing
    /// done, if there is no room.
    #[inline]
    #[must_use]
    pub fn push_key(&mut self, key: &Bkey) -> bool {
        self.keys.push(key)
    }

    /// True if a key with a pointer fits.
    pub fn has_room(&self) -> bool {
        self.keys.has_room()
    }

    /// Words of keys so far. A set without keys is valid only as the first of its node.
    pub fn words(&self) -> usize {
        self.keys.words()
    }

    /// Length in bytes that [`BsetBuilder::finish`] would return now.
    pub fn padded_bytes(&self) -> usize {
        self.keys.padded_bytes()
    }

    /// Writes header, padding and checksum. Returns the padded length in bytes: so many bytes of the
    /// buffer go into the node. `node_ptr` is the pointer of the key that leads to the node, generation
    /// included; it seeds the checksum.
    pub fn finish(&mut self, set_magic: SetMagic, node_ptr: Ptr) -> usize {
        let mut header = RawBset::new_zeroed();
        header.magic = set_magic.bset().into();
        header.seq = self.seq.into();
        header.version = BSET_VERSION.into();
        header.keys = u32::try_from(self.words()).unwrap_or(u32::MAX).into();
        self.keys.finish(header.as_bytes(), |bytes| bset_csum(BSET_VERSION, node_ptr, bytes))
    }

    /// The buffer.
    pub fn into_inner(self) -> B {
        self.keys.into_inner()
    }
}

/// Where a set stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SetKind {
    /// In a leaf: keys are extents.
    Leaf,
    /// In an internal node: keys denote children or freed nodes.
    Internal,
}

impl SetKind {
    /// The kind of the sets of a node of this level.
    pub const fn of_level(level: u16) -> SetKind {
        if level == 0 { SetKind::Leaf } else { SetKind::Internal }
    }
}

/// Checks the order of the keys of one set: extents ascending and disjoint in a leaf (keys of size 0
/// mean nothing and are skipped), positions not descending in an internal node.
///
/// # Errors
/// The first key out of order; `offset_bytes` counts from the start of the set.
pub fn check_set_order(kind: SetKind, keys: impl IntoIterator<Item = Bkey>) -> Result<(), Corrupt> {
    let mut at = BSET_HEADER_BYTES;
    let mut before: (Inode, Sector) = Bkey::ZERO_POSITION;
    for key in keys {
        let here = as_u64(at);
        at = at.saturating_add(key.len_bytes());
        let bad = |field, expected, found: u64| {
            Err(Corrupt::new(Structure::Bset, field, here, expected, Value::Num(found)))
        };
        let position = match kind {
            SetKind::Internal => key.position(),
            SetKind::Leaf if key.size() == Sectors::ZERO => continue,
            SetKind::Leaf => match key.start_position() {
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
