//! Checksums as error-correcting codes: the one flipped bit that explains a wrong checksum, and the start value that explains a
//! right one.
//!
//! Owns the arithmetic of CRC-64/WE. The checksum of a structure changes by a value that depends on the place of a flipped bit
//! alone, so the difference names the place. Random damage looks like one bit of a structure of n bits with a probability of n /
//! 2^64. Must not know any structure but where its checksum ends.

use format::checksum::crc64_seeded;

const POLYNOMIAL: u64 = 0x42F0_E1EB_A9EA_3693;

/// How far the checksum of a structure reaches.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Extent {
    /// Over all bytes.
    Whole,
    /// Over a header and as many words of eight bytes as a field of the header says.
    Words {
        /// Bytes of the header.
        header: usize,
        /// Offset of the field.
        at: usize,
        /// Bytes of the field.
        width: usize,
    },
}

impl Extent {
    /// A superblock, whose field counts the journal buckets.
    pub(crate) const SUPERBLOCK: Extent = Extent::Words { header: 208, at: 206, width: 2 };
    /// A journal entry.
    pub(crate) const JSET: Extent = Extent::Words { header: 240, at: 28, width: 4 };
    /// A bset of a btree node.
    pub(crate) const BSET: Extent = Extent::Words { header: 32, at: 28, width: 4 };

    /// The end of the bytes that the checksum covers; `None` if it is not inside of `bytes`.
    fn end(self, bytes: &[u8]) -> Option<usize> {
        let Extent::Words { header, at, width } = self else { return Some(bytes.len()) };
        let field = bytes.get(at..at.checked_add(width)?)?;
        let words = field.iter().rev().fold(0usize, |n, b| n << 8 | usize::from(*b));
        let end = words.checked_mul(8)?.checked_add(header)?;
        (end <= bytes.len()).then_some(end)
    }
}

/// Finds the one bit of the front of `bytes` that makes its checksum right, and flips it. Returns the number of the bit.
///
/// The checksum is in the first eight bytes and starts from `seed`. Returns `None`, and changes nothing, if the checksum is right
/// or no single bit explains it.
pub(crate) fn correct_bit(bytes: &mut [u8], extent: Extent, seed: u64) -> Option<usize> {
    if let Some(bit) = extent.end(bytes).and_then(|end| bit_in(bytes.get(..end)?, seed)) {
        flip(bytes, bit)?;
        return Some(bit);
    }
    // The wrong bit may be in the field that says how far the checksum reaches.
    let Extent::Words { at, width, .. } = extent else { return None };
    for bit in at.checked_mul(8)?..at.checked_add(width)?.checked_mul(8)? {
        flip(bytes, bit)?;
        if extent.end(bytes).and_then(|end| difference(bytes.get(..end)?, seed)) == Some(0) {
            return Some(bit);
        }
        flip(bytes, bit)?;
    }
    None
}

fn flip(bytes: &mut [u8], bit: usize) -> Option<()> {
    *bytes.get_mut(bit / 8)? ^= 1 << (bit % 8);
    Some(())
}

/// The difference between the checksum that is stored and the one that the bytes have.
fn difference(bytes: &[u8], seed: u64) -> Option<u64> {
    let (stored, covered) = bytes.split_first_chunk::<8>()?;
    Some(u64::from_le_bytes(*stored) ^ crc64_seeded(seed, covered))
}

/// The bit that explains the checksum of `bytes`.
fn bit_in(bytes: &[u8], seed: u64) -> Option<usize> {
    let wanted = difference(bytes, seed)?;
    if wanted.is_power_of_two() {
        return usize::try_from(wanted.trailing_zeros()).ok();
    }
    if wanted == 0 {
        return None;
    }
    // The effect of the last bit, then of each bit before it.
    let mut effect = POLYNOMIAL;
    let covered = bytes.len().checked_sub(8)?;
    for from_end in 0..covered.checked_mul(8)? {
        if effect == wanted {
            let byte = bytes.len().checked_sub(1)?.checked_sub(from_end / 8)?;
            return Some(byte * 8 + from_end % 8);
        }
        effect = effect << 1 ^ if effect >> 63 == 1 { POLYNOMIAL } else { 0 };
    }
    None
}

/// The start value with which `covered` has the checksum `stored`.
pub(crate) fn seed_of(stored: u64, covered: &[u8]) -> u64 {
    let mut state = !stored;
    for byte in covered.iter().rev() {
        for _ in 0..8 {
            state = if state & 1 == 1 { (state ^ POLYNOMIAL) >> 1 | 1 << 63 } else { state >> 1 };
        }
        state ^= u64::from(*byte) << 56;
    }
    state
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(words: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..240 + 8 * words).map(|i| (i * i % 251) as u8).collect();
        bytes[28..32].copy_from_slice(&(words as u32).to_le_bytes());
        let sum = crc64_seeded(u64::MAX, &bytes[8..]);
        bytes[..8].copy_from_slice(&sum.to_le_bytes());
        bytes.resize(4096, 0xaa);
        bytes
    }

    #[test]
    fn every_bit_is_found_and_nothing_else_is_changed() {
        let whole = entry(20);
        for bit in 0..8 * (240 + 160) {
            let mut bytes = whole.clone();
            flip(&mut bytes, bit);
            assert_eq!(correct_bit(&mut bytes, Extent::JSET, u64::MAX), Some(bit));
            assert_eq!(bytes, whole);
        }
        let mut bytes = whole.clone();
        assert_eq!(correct_bit(&mut bytes, Extent::JSET, u64::MAX), None, "nothing is wrong");
        for (a, b) in [(70, 500), (3, 900), (230, 231)] {
            flip(&mut bytes, a);
            flip(&mut bytes, b);
            let damaged = bytes.clone();
            assert_eq!(correct_bit(&mut bytes, Extent::JSET, u64::MAX), None);
            assert_eq!(bytes, damaged);
            bytes = whole.clone();
        }
        assert_eq!(correct_bit(&mut [0; 512], Extent::Whole, u64::MAX), None);
        assert_eq!(correct_bit(&mut [0; 5], Extent::JSET, 0), None);
    }

    #[test]
    fn the_start_value_follows_from_the_checksum() {
        let bytes: Vec<u8> = (0..577u32).map(|i| (i * 7 % 256) as u8).collect();
        for seed in [0, 1, u64::MAX, 0x1234_5678_9abc_def0] {
            assert_eq!(seed_of(crc64_seeded(seed, &bytes), &bytes), seed);
        }
    }
}
