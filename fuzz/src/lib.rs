//! What the fuzz targets share.
//!
//! A checksum stops a fuzzer at the door: it will not guess 64 bits. Each target therefore runs every
//! input twice, as it is and with magic and checksum put right, so that what lies behind them is
//! reached as well. How to run them: README.md.
#![forbid(unsafe_code)]

use format::checksum::{crc64, crc64_seeded};
use format::{Bkey, Gen, Geometry, Ptr, Sector, Sectors, SetMagic};

/// Magic of the set that all inputs belong to.
pub const MAGIC: SetMagic = SetMagic(0);
/// Block size of that set.
pub const BLOCK: Sectors = Sectors(1);

/// Sizes of that set.
pub fn geometry() -> Geometry {
    Geometry::new(Sectors(128), BLOCK, 1024, 1, 8).expect("constants that keep the rules")
}

/// Key of a node that takes all of `bytes`.
pub fn node_key(bytes: &[u8]) -> Bkey {
    let sectors = Sectors((bytes.len() as u64 / 512).min(65535));
    Bkey::root(sectors, Ptr::new(0, Sector(2688), Gen(1)))
}

fn put(bytes: &mut [u8], at: usize, value: u64) {
    if let Some(to) = bytes.get_mut(at..at + 8) {
        to.copy_from_slice(&value.to_le_bytes());
    }
}

/// Where a list of `words` at `header` ends, cut to what there is.
fn end(bytes: &[u8], header: usize, words: u32) -> usize {
    (header + 8 * words as usize).min(bytes.len())
}

fn words(bytes: &[u8]) -> u32 {
    bytes.get(28..32).map_or(0, |b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
}

/// A journal entry at the front of `bytes`, with magic and checksum put right.
pub fn sealed_jset(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    put(&mut bytes, 8, MAGIC.jset());
    let end = end(&bytes, 240, words(&bytes));
    let csum = bytes.get(8..end).map_or(0, crc64);
    put(&mut bytes, 0, csum);
    bytes
}

/// A node whose sets, as far as they follow from each other, have magic, seq and checksum put right.
pub fn sealed_node(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let seed = node_key(&bytes).ptr.0;
    let mut at = 0;
    // The first byte behind a set says whether another one follows.
    while at + 32 <= bytes.len() && (at == 0 || bytes[at] & 1 != 0) {
        let set = &mut bytes[at..];
        put(set, 8, MAGIC.bset());
        put(set, 16, 1);
        let end = end(set, 32, words(set)).max(32);
        let seeded = set[24] != 0;
        let covered = &set[8..end];
        let csum = if seeded { crc64_seeded(seed, covered) } else { crc64(covered) };
        put(set, 0, csum);
        at += end.next_multiple_of(512);
    }
    bytes
}

/// A prio set with magic and checksum put right.
pub fn sealed_prio_set(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    put(&mut bytes, 8, MAGIC.pset());
    let csum = bytes.get(8..).map_or(0, crc64);
    put(&mut bytes, 0, csum);
    bytes
}

/// A superblock with magic and checksum put right.
pub fn sealed_superblock(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes.resize(4096, 0);
    bytes[24..40].copy_from_slice(&format::magic::SUPERBLOCK_MAGIC);
    let keys = usize::from(u16::from_le_bytes([bytes[206], bytes[207]]));
    let csum = bytes.get(8..208 + 8 * keys).map_or(0, crc64);
    put(&mut bytes, 0, csum);
    bytes
}
