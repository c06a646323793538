//! Keys and pointers, which journal entries and bsets consist of.
//!
//! Owns the bit layout of [`Bkey`] and [`Ptr`] and the iterator over packed key lists. A key names the
//! range `[offset - size, offset)` of a device: **its offset is the end of the range**. What a key
//! *means* (extent, invalidation, child node, freed node) depends on the structure it is in; the btree
//! knows that, this module does not.
//!
//! *Invariant:* a [`Bkey`] has at most one pointer (a set has one cache device); without a pointer, the
//! pointer word is zero.

use crate::bytes::{as_u64, u64_at};
use crate::error::{Corrupt, Structure, Value};
use crate::units::{Gen, Inode, Sector, Sectors};

/// Bytes of a word, the unit in which key lists are counted.
pub const WORD_BYTES: usize = 8;

/// A pointer word: cache device, sector on it, and the generation of the sector's bucket.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct Ptr(pub u64);

impl Ptr {
    /// Bits 0–7: generation of the bucket when the pointer was made.
    pub const GEN_MASK: u64 = 0xff;
    /// First bit of the offset.
    pub const OFFSET_SHIFT: u32 = 8;
    /// The 43 bits of the offset, shifted down.
    pub const OFFSET_MASK: u64 = (1 << 43) - 1;
    /// First bit of the device index.
    pub const DEV_SHIFT: u32 = 51;
    /// The 12 bits of the device index, shifted down.
    pub const DEV_MASK: u64 = (1 << 12) - 1;
    /// Device index of the placeholder that a cache miss inserts. It points nowhere.
    pub const CHECK_DEV: u16 = 4095;
    /// Device indexes from here on can never name a cache device of a set.
    pub const MAX_DEVS: u16 = 8;

    /// A pointer to sector `offset` of cache device `dev`.
    ///
    /// `offset` must be below 2^43 and `dev` below 4096; larger values are cut to those bits.
    pub const fn new(dev: u16, offset: Sector, generation: Gen) -> Ptr {
        let dev = (dev as u64 & Ptr::DEV_MASK) << Ptr::DEV_SHIFT;
        let offset = (offset.0 & Ptr::OFFSET_MASK) << Ptr::OFFSET_SHIFT;
        Ptr(dev | offset | generation.0 as u64)
    }

    /// Generation of the bucket when the pointer was made.
    pub const fn generation(self) -> Gen {
        Gen((self.0 & Ptr::GEN_MASK) as u8)
    }

    /// Sector on the cache device.
    pub const fn offset(self) -> Sector {
        Sector((self.0 >> Ptr::OFFSET_SHIFT) & Ptr::OFFSET_MASK)
    }

    /// Index of the cache device in the set.
    pub const fn dev(self) -> u16 {
        ((self.0 >> Ptr::DEV_SHIFT) & Ptr::DEV_MASK) as u16
    }

    /// True for the placeholder of a cache miss: such a pointer points nowhere, and its other bits are
    /// random.
    pub const fn is_check(self) -> bool {
        self.dev() == Ptr::CHECK_DEV
    }

    /// True if the device index can name a cache device at all.
    pub const fn is_available(self) -> bool {
        self.dev() < Ptr::MAX_DEVS
    }

    /// This pointer `n` sectors further on the same device. The offset wraps at 2^43.
    #[must_use]
    pub const fn advanced(self, n: Sectors) -> Ptr {
        let offset = self.offset().0.wrapping_add(n.0) & Ptr::OFFSET_MASK;
        let others = self.0 & !(Ptr::OFFSET_MASK << Ptr::OFFSET_SHIFT);
        Ptr(others | (offset << Ptr::OFFSET_SHIFT))
    }

    /// The pointer `n` sectors before this one.
    #[must_use]
    pub const fn rewound(self, n: Sectors) -> Ptr {
        let offset = self.offset().0.wrapping_sub(n.0) & Ptr::OFFSET_MASK;
        let others = self.0 & !(Ptr::OFFSET_MASK << Ptr::OFFSET_SHIFT);
        Ptr(others | (offset << Ptr::OFFSET_SHIFT))
    }

    /// This pointer with another generation.
    #[must_use]
    pub const fn with_generation(self, generation: Gen) -> Ptr {
        Ptr((self.0 & !Ptr::GEN_MASK) | generation.0 as u64)
    }
}

/// A key with at most one pointer, as its words are on disk.
///
/// Two keys are equal if their words are equal. Keys are ordered by [`Bkey::position`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct Bkey {
    /// Header word. The accessors name its fields.
    pub high: u64,
    /// End of the range, in sectors.
    pub low: u64,
    /// The pointer; zero if there is none.
    pub ptr: Ptr,
}

const _: () = assert!(size_of::<Bkey>() == 24);

impl Bkey {
    /// Bits 0–19 of `high`: inode.
    pub const INODE_MASK: u64 = (1 << 20) - 1;
    /// First bit of the size.
    pub const SIZE_SHIFT: u32 = 20;
    /// The 16 bits of the size, shifted down.
    pub const SIZE_MASK: u64 = (1 << 16) - 1;
    /// Bit of the dirty flag.
    pub const DIRTY_BIT: u64 = 1 << 36;
    /// First bit of the data-checksum field, which must be zero.
    pub const CSUM_SHIFT: u32 = 56;
    /// The two bits of the data-checksum field, shifted down.
    pub const CSUM_MASK: u64 = 3;
    /// First bit of the pointer count.
    pub const NPTRS_SHIFT: u32 = 60;
    /// The three bits of the pointer count, shifted down.
    pub const NPTRS_MASK: u64 = 7;
    /// Bit 63 of `high`: always written as one, ignored on read.
    pub const HEADER_BIT: u64 = 1 << 63;

    /// Largest size a key can have, in sectors.
    pub const MAX_SIZE: Sectors = Sectors(0xffff);
    /// The greatest inode. Only the position [`Bkey::MAX_POSITION`] uses it.
    pub const MAX_INODE: Inode = Inode(0xf_ffff);
    /// The greatest offset.
    pub const MAX_OFFSET: Sector = Sector((1 << 63) - 1);
    /// Position of the root's key: no key lies behind it.
    pub const MAX_POSITION: (Inode, Sector) = (Bkey::MAX_INODE, Bkey::MAX_OFFSET);
    /// Position of freeing keys and of the UUID table's key.
    pub const ZERO_POSITION: (Inode, Sector) = (Inode(0), Sector(0));

    /// Bytes of the longest key.
    pub const MAX_BYTES: usize = 3 * WORD_BYTES;

    const fn header(inode: Inode, size: Sectors, dirty: bool, nptrs: u64) -> u64 {
        assert!(inode.0 as u64 <= Bkey::INODE_MASK, "inode beyond 20 bits");
        assert!(size.0 <= Bkey::SIZE_MASK, "key longer than 65535 sectors");
        Bkey::HEADER_BIT
            | (nptrs << Bkey::NPTRS_SHIFT)
            | if dirty { Bkey::DIRTY_BIT } else { 0 }
            | (size.0 << Bkey::SIZE_SHIFT)
            | inode.0 as u64
    }

    /// The extent `[end - size, end)` of `inode`, cached at `ptr`.
    ///
    /// # Panics
    /// If `inode` exceeds 20 bits or `size` exceeds 65535 sectors. The caller cuts longer extents.
    pub const fn extent(inode: Inode, end: Sector, size: Sectors, dirty: bool, ptr: Ptr) -> Bkey {
        Bkey { high: Bkey::header(inode, size, dirty, 1), low: end.0, ptr }
    }

    /// An invalidation: `[end - size, end)` of `inode` is not cached.
    ///
    /// # Panics
    /// If `inode` exceeds 20 bits or `size` exceeds 65535 sectors.
    pub const fn hole(inode: Inode, end: Sector, size: Sectors) -> Bkey {
        Bkey { high: Bkey::header(inode, size, false, 0), low: end.0, ptr: Ptr(0) }
    }

    /// Key of a btree node of `size` sectors at `ptr`, holding keys up to `(inode, end)`.
    ///
    /// # Panics
    /// If `inode` exceeds 20 bits or `size` exceeds 65535 sectors.
    pub const fn node(inode: Inode, end: Sector, size: Sectors, ptr: Ptr) -> Bkey {
        Bkey::extent(inode, end, size, false, ptr)
    }

    /// Key of a root node: a node key at [`Bkey::MAX_POSITION`].
    ///
    /// # Panics
    /// If `size` exceeds 65535 sectors.
    pub const fn root(size: Sectors, ptr: Ptr) -> Bkey {
        Bkey::node(Bkey::MAX_INODE, Bkey::MAX_OFFSET, size, ptr)
    }

    /// Key of the UUID table: `size` sectors at `ptr`, at position zero.
    ///
    /// # Panics
    /// If `size` exceeds 65535 sectors.
    pub const fn uuid_bucket(size: Sectors, ptr: Ptr) -> Bkey {
        Bkey::node(Inode(0), Sector(0), size, ptr)
    }

    /// Key that a parent node gets when a child is replaced; it makes older pointers to the bucket stale.
    ///
    /// Every pointer of an older generation to the bucket is stale. The pointer is the old node's
    /// **with its generation already incremented**; `size` is the old node's size.
    ///
    /// # Panics
    /// If `size` exceeds 65535 sectors.
    pub const fn freeing(ptr_with_incremented_gen: Ptr, size: Sectors) -> Bkey {
        Bkey::node(Inode(0), Sector(0), size, ptr_with_incremented_gen)
    }

    /// Index of the device in the UUID table.
    pub const fn inode(&self) -> Inode {
        Inode((self.high & Bkey::INODE_MASK) as u32)
    }

    /// Length of the range. A reader skips a key of length zero.
    pub const fn size(&self) -> Sectors {
        Sectors((self.high >> Bkey::SIZE_SHIFT) & Bkey::SIZE_MASK)
    }

    /// True if the backing device need not have this data.
    pub const fn dirty(&self) -> bool {
        self.high & Bkey::DIRTY_BIT != 0
    }

    /// **End** of the range (exclusive).
    pub const fn offset(&self) -> Sector {
        Sector(self.low)
    }

    /// Start of the range; `None` if the size exceeds the offset.
    ///
    /// The size of a valid extent never exceeds its offset. The size of a node key or a freeing key may: it
    /// is not the length of a range.
    pub const fn start(&self) -> Option<Sector> {
        match self.low.checked_sub(self.size().0) {
            Some(start) => Some(Sector(start)),
            None => None,
        }
    }

    /// Number of pointers, 0 or 1. A raw header may have a larger number; the parsers refuse it.
    pub const fn nptrs(&self) -> u32 {
        ((self.high >> Bkey::NPTRS_SHIFT) & Bkey::NPTRS_MASK) as u32
    }

    /// The data-checksum field; the parsers refuse anything but zero.
    pub const fn csum(&self) -> u32 {
        ((self.high >> Bkey::CSUM_SHIFT) & Bkey::CSUM_MASK) as u32
    }

    /// The pointer, if there is one.
    pub const fn pointer(&self) -> Option<Ptr> {
        if self.nptrs() == 0 { None } else { Some(self.ptr) }
    }

    /// Length on disk in words.
    pub const fn words(&self) -> usize {
        if self.nptrs() == 0 { 2 } else { 3 }
    }

    /// Length on disk in bytes.
    pub const fn len_bytes(&self) -> usize {
        if self.nptrs() == 0 { 2 * WORD_BYTES } else { 3 * WORD_BYTES }
    }

    /// The order of keys: inode, then end of the range.
    pub const fn position(&self) -> (Inode, Sector) {
        (self.inode(), self.offset())
    }

    /// Inode and start of the range: the order of extents in a leaf set.
    ///
    /// `None` if the size exceeds the offset.
    pub const fn start_position(&self) -> Option<(Inode, Sector)> {
        match self.start() {
            Some(start) => Some((self.inode(), start)),
            None => None,
        }
    }

    /// True at position zero. In an internal node, such a key denotes no child.
    pub const fn is_zero_position(&self) -> bool {
        self.inode().0 == 0 && self.low == 0
    }

    /// True at the position of a root's key.
    pub const fn is_max_position(&self) -> bool {
        self.inode().0 == Bkey::MAX_INODE.0 && self.low == Bkey::MAX_OFFSET.0
    }

    /// Sets the inode.
    ///
    /// # Panics
    /// If it exceeds 20 bits.
    pub const fn set_inode(&mut self, inode: Inode) {
        assert!(inode.0 as u64 <= Bkey::INODE_MASK, "inode beyond 20 bits");
        self.high = (self.high & !Bkey::INODE_MASK) | inode.0 as u64;
    }

    /// Sets the length of the range; the end stays.
    ///
    /// # Panics
    /// If it exceeds 65535 sectors.
    pub const fn set_size(&mut self, size: Sectors) {
        assert!(size.0 <= Bkey::SIZE_MASK, "key longer than 65535 sectors");
        let mask = Bkey::SIZE_MASK << Bkey::SIZE_SHIFT;
        self.high = (self.high & !mask) | (size.0 << Bkey::SIZE_SHIFT);
    }

    /// Sets or clears the dirty flag.
    pub const fn set_dirty(&mut self, dirty: bool) {
        if dirty {
            self.high |= Bkey::DIRTY_BIT;
        } else {
            self.high &= !Bkey::DIRTY_BIT;
        }
    }

    /// Sets the end of the range; the length stays.
    pub const fn set_offset(&mut self, end: Sector) {
        self.low = end.0;
    }

    /// Sets the pointer, or removes it if `ptr` is `None`.
    pub const fn set_pointer(&mut self, ptr: Option<Ptr>) {
        let (nptrs, ptr) = match ptr {
            Some(ptr) => (1, ptr),
            None => (0, Ptr(0)),
        };
        let mask = Bkey::NPTRS_MASK << Bkey::NPTRS_SHIFT;
        self.high = (self.high & !mask) | (nptrs << Bkey::NPTRS_SHIFT);
        self.ptr = ptr;
    }

    /// Removes `n` sectors from the front and advances the pointer by as many.
    ///
    /// If `n` exceeds the size, the size becomes 0.
    pub const fn cut_front(&mut self, n: Sectors) {
        let size = self.size().0;
        let cut = if n.0 < size { n.0 } else { size };
        if self.nptrs() != 0 {
            self.ptr = self.ptr.advanced(Sectors(cut));
        }
        self.set_size(Sectors(size.saturating_sub(cut)));
    }

    /// Removes `n` sectors from the back.
    ///
    /// If `n` exceeds the size, the size becomes 0 and the end becomes the start.
    pub const fn cut_back(&mut self, n: Sectors) {
        let size = self.size().0;
        let cut = if n.0 < size { n.0 } else { size };
        self.set_size(Sectors(size.saturating_sub(cut)));
        self.low = self.low.saturating_sub(cut);
    }

    /// The key's words as bytes, and how many of the bytes belong to the key.
    pub const fn to_bytes(&self) -> ([u8; Bkey::MAX_BYTES], usize) {
        let words = [self.high.to_le_bytes(), self.low.to_le_bytes(), self.ptr.0.to_le_bytes()];
        (zerocopy::transmute!(words), self.len_bytes())
    }

    /// Appends the key's words to `out`.
    pub fn encode_into(&self, out: &mut Vec<u8>) {
        let (bytes, len) = self.to_bytes();
        out.extend(bytes.iter().take(len));
    }

    /// Writes the key's words to the front of `out` and returns their length in bytes.
    ///
    /// Returns `None` and writes nothing if they do not fit.
    #[inline]
    pub fn encode_to(&self, out: &mut [u8]) -> Option<usize> {
        let (bytes, len) = self.to_bytes();
        out.get_mut(..len)?.copy_from_slice(bytes.get(..len)?);
        Some(len)
    }

    /// Reads the key at the front of `bytes`; its length is [`Bkey::len_bytes`].
    ///
    /// # Errors
    /// If the key reaches past `bytes`. Several pointers and a data checksum are of the family
    /// `Unsupported`. The error names byte `at` of `structure`, where `bytes` begin.
    #[inline]
    pub fn decode(bytes: &[u8], structure: Structure, at: u64) -> Result<Bkey, Corrupt> {
        let (Some(high), Some(low)) = (u64_at(bytes, 0), u64_at(bytes, WORD_BYTES)) else {
            return Err(Corrupt::new(
                structure,
                "key",
                at,
                Value::Text("two words"),
                Value::Text("the end of the key list"),
            ));
        };
        let mut key = Bkey { high, low, ptr: Ptr(0) };
        if key.csum() != 0 {
            return Err(Corrupt::unsupported(
                structure,
                "key data-checksum type",
                at,
                Value::Num(0),
                Value::Num(u64::from(key.csum())),
            ));
        }
        match key.nptrs() {
            0 => {}
            1 => match u64_at(bytes, 2 * WORD_BYTES) {
                Some(ptr) => key.ptr = Ptr(ptr),
                None => {
                    return Err(Corrupt::new(
                        structure,
                        "key pointer",
                        at,
                        Value::Text("a pointer word"),
                        Value::Text("the end of the key list"),
                    ));
                }
            },
            n => {
                return Err(Corrupt::unsupported(
                    structure,
                    "key pointer count",
                    at,
                    Value::AtMost(1),
                    Value::Num(u64::from(n)),
                ));
            }
        }
        Ok(key)
    }
}

/// The keys of a packed list, in order.
///
/// Yields an error at the first key that reaches past the list or is not supported, and ends there.
#[derive(Clone, Debug)]
pub struct Keys<'a> {
    rest: &'a [u8],
    structure: Structure,
    at: u64,
}

impl<'a> Keys<'a> {
    /// The keys in `bytes`, which hold exactly the list.
    pub const fn new(bytes: &'a [u8]) -> Keys<'a> {
        Keys::inside(bytes, Structure::Keys, 0)
    }

    /// The keys in `bytes`, a list that begins at byte `at` of `structure`. Errors name both.
    pub const fn inside(bytes: &'a [u8], structure: Structure, at: u64) -> Keys<'a> {
        Keys { rest: bytes, structure, at }
    }

    /// Bytes not yet read.
    pub const fn remaining_bytes(&self) -> usize {
        self.rest.len()
    }
}

impl Iterator for Keys<'_> {
    type Item = Result<Bkey, Corrupt>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let result = Bkey::decode(self.rest, self.structure, self.at);
        match result {
            Ok(key) => {
                let len = key.len_bytes();
                self.rest = self.rest.get(len..).unwrap_or_default();
                self.at = self.at.saturating_add(as_u64(len));
            }
            Err(_) => self.rest = &[],
        }
        Some(result)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        // The shortest key has two words; a broken list yields one error.
        let most = self.rest.len().div_ceil(2 * WORD_BYTES);
        (usize::from(most > 0), Some(most))
    }
}

impl std::iter::FusedIterator for Keys<'_> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worked_bytes() {
        let root = Bkey::root(Sectors(128), Ptr::new(0, Sector(2688), Gen(1)));
        assert_eq!(root.high, 0x9000_0000_080f_ffff);
        assert_eq!(root.low, 0x7fff_ffff_ffff_ffff);
        assert_eq!(root.ptr.0, 0x0000_0000_000a_8001);
        assert!(root.is_max_position());

        let uuid = Bkey::uuid_bucket(Sectors(128), Ptr(0x50001));
        assert_eq!((uuid.high, uuid.low), (0x9000_0000_0800_0000, 0));
        assert_eq!((uuid.ptr.offset(), uuid.ptr.generation()), (Sector(1280), Gen(1)));
        assert!(uuid.is_zero_position());

        let check = Bkey { high: 0x9000_0000_0000_0000, low: 0x10, ptr: Ptr(0xfffa_6209_e40a_fd6f) };
        assert!(check.ptr.is_check());
        assert!(!check.ptr.is_available());
        assert_eq!(check.size(), Sectors(0));

        let extent = Bkey { high: 0x9000_0000_0080_0000, low: 0x18, ptr: Ptr(0xd8001) };
        assert_eq!(
            extent,
            Bkey::extent(Inode(0), Sector(24), Sectors(8), false, Ptr::new(0, Sector(3456), Gen(1)))
        );
        assert_eq!(extent.start(), Some(Sector(16)));
    }

    #[test]
    fn cutting_moves_the_pointer_only_at_the_front() {
        let key = Bkey::extent(Inode(3), Sector(100), Sectors(20), true, Ptr::new(0, Sector(500), Gen(7)));
        let mut front = key;
        front.cut_front(Sectors(5));
        assert_eq!(
            (front.start(), front.offset(), front.ptr.offset()),
            (Some(Sector(85)), Sector(100), Sector(505))
        );
        let mut back = key;
        back.cut_back(Sectors(5));
        assert_eq!(
            (back.start(), back.offset(), back.ptr.offset()),
            (Some(Sector(80)), Sector(95), Sector(500))
        );
        let mut gone = key;
        gone.cut_front(Sectors(21));
        assert_eq!((gone.size(), gone.offset()), (Sectors(0), Sector(100)));
        assert_eq!(gone.ptr.generation(), Gen(7));
    }

    #[test]
    fn several_pointers_and_data_checksums_are_unsupported() {
        let mut key = Bkey::hole(Inode(0), Sector(8), Sectors(8));
        key.high |= 2 << Bkey::NPTRS_SHIFT;
        let mut bytes = Vec::new();
        for word in [key.high, key.low, 1, 2] {
            bytes.extend(word.to_le_bytes());
        }
        let e = Keys::new(&bytes).next().unwrap().unwrap_err();
        assert!(e.is_unsupported(), "{e}");

        let mut key = Bkey::hole(Inode(0), Sector(8), Sectors(8));
        key.high |= 1 << Bkey::CSUM_SHIFT;
        let mut bytes = Vec::new();
        key.encode_into(&mut bytes);
        let mut keys = Keys::new(&bytes);
        assert!(keys.next().unwrap().unwrap_err().is_unsupported());
        assert!(keys.next().is_none(), "ends at the first error");
    }

    #[test]
    fn truncated_lists_are_errors_at_the_right_place() {
        let mut bytes = Vec::new();
        Bkey::hole(Inode(1), Sector(8), Sectors(8)).encode_into(&mut bytes);
        Bkey::extent(Inode(1), Sector(16), Sectors(8), true, Ptr(0)).encode_into(&mut bytes);
        assert_eq!(bytes.len(), 40);
        for cut in [17, 24, 32, 39] {
            let e = Keys::inside(&bytes[..cut], Structure::Jset, 240).last().unwrap().unwrap_err();
            assert_eq!((e.structure, e.offset_bytes), (Structure::Jset, 256), "{cut}");
        }
    }
}
