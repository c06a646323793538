//! Footers: the checksums of the data of a bucket, in the last blocks of the bucket.
//!
//! Owns the bytes of a footer and its place. The kernel's format has no such structure: no key names the blocks of a
//! footer, so a kernel neither reads them nor relies on them (decision 034). A footer counts only for the generation
//! that it names. Must not know when a footer is written, or the data.
//!
//! Layout, little endian: checksum `u64`; magic `u64`; version `u32`; bucket `u32`; UUID of the set, 16 bytes;
//! generation `u8` and 3 bytes of zeros; number of blocks `u32`; a bit for each block, in words of `u64`, that says
//! whether the checksum of the block is known; a `u32` for each block.

use std::mem::size_of;

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::checksum::{crc32c, crc64_seeded};
use crate::error::{Corrupt, Structure, Value};
use crate::geometry::Geometry;
use crate::magic::SetMagic;
use crate::units::{BucketNr, Gen, Sector, Sectors, Uuid};

/// The version of the layout.
const VERSION: u32 = 1;
const WORD_BITS: usize = 64;

/// The start of a footer as it lies on the device.
#[derive(Clone, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawFooter {
    csum: U64,
    magic: U64,
    version: U32,
    bucket: U32,
    set_uuid: [u8; 16],
    generation: u8,
    zeros: [u8; 3],
    blocks: U32,
}

const HEADER_BYTES: usize = size_of::<RawFooter>();
const _: () = assert!(HEADER_BYTES == 48);

/// The number from which the checksum of a footer starts. It is random and secret: a client that does not know it
/// cannot write data that looks like a footer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct FooterKey(pub u64);

impl std::fmt::Debug for FooterKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FooterKey(..)")
    }
}

/// The footer that a place expects: of which set, bucket and generation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FooterId {
    /// UUID of the cache set.
    pub set_uuid: Uuid,
    /// The bucket.
    pub bucket: BucketNr,
    /// The generation of the bucket.
    pub generation: Gen,
}

/// The division of a bucket into data and footer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FooterLayout {
    block_sectors: Sectors,
    bucket_sectors: Sectors,
    /// The blocks of data.
    blocks: usize,
}

impl FooterLayout {
    /// The layout of a set; `None` if a bucket is too small to have a footer and data.
    pub fn of(geometry: &Geometry) -> Option<FooterLayout> {
        let block_bytes = usize::try_from(geometry.block_bytes()).ok()?;
        let all = usize::try_from(geometry.bucket_sectors.0.checked_div(geometry.block_sectors.0)?).ok()?;
        let fits = |footer: &usize| {
            let blocks = all.saturating_sub(*footer);
            footer_bytes(blocks).is_some_and(|b| b <= footer.saturating_mul(block_bytes))
        };
        let footer = (1..all).find(fits)?;
        let blocks = all.checked_sub(footer)?;
        let Geometry { block_sectors, bucket_sectors, .. } = *geometry;
        Some(FooterLayout { block_sectors, bucket_sectors, blocks })
    }

    /// The number of blocks of data in a bucket.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// The size of a block.
    pub fn block_sectors(&self) -> Sectors {
        self.block_sectors
    }

    /// The sectors of a bucket that data may use.
    pub fn data_sectors(&self) -> Sectors {
        Sectors(self.block_sectors.0.saturating_mul(self.blocks as u64))
    }

    /// The place and the size of the footer of the bucket that begins at `bucket_start`.
    pub fn place(&self, bucket_start: Sector) -> (Sector, Sectors) {
        let size = Sectors(self.bucket_sectors.0.saturating_sub(self.data_sectors().0));
        (Sector(bucket_start.0.saturating_add(self.data_sectors().0)), size)
    }

    fn footer_bytes(&self) -> usize {
        let sectors = self.bucket_sectors.0.saturating_sub(self.data_sectors().0);
        usize::try_from(Sectors(sectors).bytes()).unwrap_or(usize::MAX)
    }
}

/// Bytes that a footer for so many blocks needs.
fn footer_bytes(blocks: usize) -> Option<usize> {
    let words = blocks.div_ceil(WORD_BITS);
    words.checked_mul(8)?.checked_add(blocks.checked_mul(4)?)?.checked_add(HEADER_BYTES)
}

/// The checksums of the blocks of a bucket. A block whose checksum is not known has none.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BlockSums {
    sums: Box<[U32]>,
    known: Box<[U64]>,
}

impl BlockSums {
    /// The sums of a bucket with so many blocks, none of which is known.
    pub fn unknown(blocks: usize) -> BlockSums {
        let words = blocks.div_ceil(WORD_BITS);
        BlockSums {
            sums: vec![U32::ZERO; blocks].into_boxed_slice(),
            known: vec![U64::ZERO; words].into_boxed_slice(),
        }
    }

    /// Bytes of memory that the sums of so many blocks take.
    pub fn memory_bytes(blocks: usize) -> usize {
        footer_bytes(blocks).unwrap_or(usize::MAX)
    }

    /// The number of blocks.
    pub fn blocks(&self) -> usize {
        self.sums.len()
    }

    /// The number of blocks whose checksum is known.
    pub fn known(&self) -> usize {
        self.known.iter().map(|w| w.get().count_ones() as usize).sum()
    }

    /// The checksum of a block, if it is known.
    pub fn get(&self, block: usize) -> Option<u32> {
        let word = self.known.get(block / WORD_BITS)?.get();
        let is_known = word >> (block % WORD_BITS) & 1 == 1;
        self.sums.get(block).filter(|_| is_known).map(|s| s.get())
    }

    /// Sets the checksum of a block, or makes it unknown. A block that the bucket does not have is ignored.
    pub fn set(&mut self, block: usize, sum: Option<u32>) {
        let (Some(place), Some(word)) = (self.sums.get_mut(block), self.known.get_mut(block / WORD_BITS))
        else {
            return;
        };
        let bit = 1u64 << (block % WORD_BITS);
        place.set(sum.unwrap_or(0));
        word.set(if sum.is_some() { word.get() | bit } else { word.get() & !bit });
    }

    /// Sets the checksums of the whole blocks `data`, the first of which is `block`.
    pub fn set_data(&mut self, block: usize, data: &[u8], block_bytes: usize) {
        for (i, bytes) in (block..).zip(data.chunks_exact(block_bytes)) {
            self.set(i, Some(crc32c(bytes)));
        }
    }
}

/// The bytes of a footer, as many as the layout has room for.
pub fn encode_footer(layout: &FooterLayout, key: FooterKey, id: FooterId, sums: &BlockSums) -> Vec<u8> {
    let header = RawFooter {
        csum: U64::ZERO,
        magic: U64::new(SetMagic::of(id.set_uuid).footer()),
        version: U32::new(VERSION),
        bucket: U32::new(id.bucket.0),
        set_uuid: id.set_uuid.0,
        generation: id.generation.0,
        zeros: [0; 3],
        blocks: U32::new(u32::try_from(sums.blocks()).unwrap_or(u32::MAX)),
    };
    let mut bytes = Vec::with_capacity(layout.footer_bytes());
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(sums.known.as_bytes());
    bytes.extend_from_slice(sums.sums.as_bytes());
    let csum = crc64_seeded(key.0, bytes.get(8..).unwrap_or_default());
    if let Some(place) = bytes.first_chunk_mut::<8>() {
        *place = csum.to_le_bytes();
    }
    bytes.resize(layout.footer_bytes(), 0);
    bytes
}

/// Reads the footer that a bucket should have.
///
/// # Errors
/// If the bytes are not the footer of this set, bucket and generation, with this key. A bucket without a footer is no
/// damage: the bytes may be anything.
pub fn parse_footer(
    layout: &FooterLayout,
    key: FooterKey,
    id: FooterId,
    bytes: &[u8],
) -> Result<BlockSums, Corrupt> {
    let bad = |field, at, expected, found| Err(Corrupt::new(Structure::Footer, field, at, expected, found));
    let Ok((header, rest)) = RawFooter::ref_from_prefix(bytes) else {
        return bad("size", 0, Value::AtLeast(HEADER_BYTES as u64), Value::Num(bytes.len() as u64));
    };
    let magic = SetMagic::of(id.set_uuid).footer();
    if header.magic.get() != magic {
        return bad("magic", 8, Value::Hex(magic), Value::Hex(header.magic.get()));
    }
    let blocks = layout.blocks;
    let found = (header.version.get(), header.bucket.get(), header.generation, header.set_uuid);
    if found != (VERSION, id.bucket.0, id.generation.0, id.set_uuid.0) {
        let what = Value::Text("this version, bucket, generation and set");
        return bad("identity", 16, what, Value::Text("another one"));
    }
    if header.blocks.get() as usize != blocks {
        let (expected, found) = (Value::Num(blocks as u64), Value::Num(header.blocks.get().into()));
        return bad("blocks", 44, expected, found);
    }
    let len = footer_bytes(blocks).unwrap_or(usize::MAX);
    let Some(covered) = bytes.get(8..len) else {
        return bad("size", 0, Value::AtLeast(len as u64), Value::Num(bytes.len() as u64));
    };
    let csum = crc64_seeded(key.0, covered);
    if csum != header.csum.get() {
        return bad("checksum", 0, Value::Hex(csum), Value::Hex(header.csum.get()));
    }
    let words = blocks.div_ceil(WORD_BITS);
    let read = <[U64]>::ref_from_prefix_with_elems(rest, words)
        .ok()
        .and_then(|(known, rest)| Some((known, <[U32]>::ref_from_prefix_with_elems(rest, blocks).ok()?.0)));
    match read {
        Some((known, sums)) => Ok(BlockSums { sums: sums.into(), known: known.into() }),
        None => bad("size", 0, Value::AtLeast(len as u64), Value::Num(bytes.len() as u64)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn geometry(bucket: u64, block: u64) -> Geometry {
        Geometry::new(Sectors(bucket), Sectors(block), 1024, 4, 8).unwrap()
    }

    fn id(bucket: u32, generation: u8) -> FooterId {
        FooterId { set_uuid: Uuid([7; 16]), bucket: BucketNr(bucket), generation: Gen(generation) }
    }

    #[test]
    fn a_footer_takes_the_fewest_blocks_that_hold_it() {
        // bucket and block (sectors), blocks of data, sectors of the footer
        for (bucket, block, blocks, footer) in
            [(1024, 8, 127, 8), (1024, 1, 1015, 9), (128, 8, 15, 8), (16, 8, 1, 8), (16, 1, 15, 1)]
        {
            let g = geometry(bucket, block);
            let layout = FooterLayout::of(&g).unwrap();
            assert_eq!(layout.blocks(), blocks, "{bucket} {block}");
            assert_eq!(layout.place(Sector(bucket * 5)), (Sector(bucket * 6 - footer), Sectors(footer)));
            assert_eq!(layout.data_sectors(), Sectors(bucket - footer));
        }
        assert_eq!(FooterLayout::of(&geometry(8, 8)), None, "one block cannot be both");
    }

    #[test]
    fn every_bit_of_a_footer_counts() {
        let layout = FooterLayout::of(&geometry(64, 8)).unwrap();
        let mut sums = BlockSums::unknown(layout.blocks());
        sums.set(0, Some(5));
        sums.set(6, Some(0));
        let key = FooterKey(99);
        let bytes = encode_footer(&layout, key, id(9, 3), &sums);
        assert_eq!(bytes.len(), 4096);
        assert_eq!(parse_footer(&layout, key, id(9, 3), &bytes), Ok(sums));
        for (wrong, key) in [
            (id(8, 3), key),
            (id(9, 4), key),
            (FooterId { set_uuid: Uuid([8; 16]), ..id(9, 3) }, key),
            (id(9, 3), FooterKey(98)),
        ] {
            assert!(parse_footer(&layout, key, wrong, &bytes).is_err());
        }
        let len = footer_bytes(layout.blocks()).unwrap();
        for bit in 0..len * 8 {
            let mut bytes = bytes.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(parse_footer(&layout, key, id(9, 3), &bytes).is_err(), "bit {bit}");
        }
        for short in 0..len {
            assert!(parse_footer(&layout, key, id(9, 3), &bytes[..short]).is_err(), "{short}");
        }
    }

    proptest! {
        #[test]
        fn footers_are_read_as_they_were_written(
            (bucket, block) in prop::sample::select(vec![(1024, 8), (1024, 1), (16, 1), (16, 8), (8192, 2)]),
            known in prop::collection::vec((any::<prop::sample::Index>(), any::<Option<u32>>()), 0..200),
        ) {
            let layout = FooterLayout::of(&geometry(bucket, block)).unwrap();
            let mut sums = BlockSums::unknown(layout.blocks());
            let mut expected = vec![None; layout.blocks()];
            for (at, sum) in known {
                let at = at.index(layout.blocks());
                sums.set(at, sum);
                expected[at] = sum;
            }
            let bytes = encode_footer(&layout, FooterKey(1), id(77, 200), &sums);
            prop_assert_eq!(Sectors::from_bytes_floor(bytes.len() as u64), layout.place(Sector(0)).1);
            let read = parse_footer(&layout, FooterKey(1), id(77, 200), &bytes).unwrap();
            let sums: Vec<_> = (0..layout.blocks() + 1).map(|i| read.get(i)).collect();
            expected.push(None);
            prop_assert_eq!(read.known(), expected.iter().flatten().count());
            prop_assert_eq!(sums, expected);
        }
    }
}
