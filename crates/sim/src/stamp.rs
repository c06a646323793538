//! The contents of sectors in a simulation: every sector identifies its owner.
//!
//! Owns the encoding. A data sector names its volume, its position and its write, in all of its 512 bytes. So the bytes
//! distinguish old, foreign, torn and invented contents. Garbage (which a device returns for a discarded block) is marked
//! too, so that it is never taken for damage. Must not know which contents are allowed.

/// Number of bytes of a sector.
pub const SECTOR: usize = 512;

const DATA: u64 = 0x5a31_6d1f_0b75_c0de;
const GARBAGE: u64 = 0x6a72_6261_6765_0001;

/// The contents of a sector.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Content {
    /// Zeros.
    Zero,
    /// A sector of a volume, as written by a client.
    Data {
        /// The volume.
        volume: u8,
        /// The position in the volume.
        sector: u64,
        /// Number of the write.
        write: u32,
    },
    /// The garbage that a device returns for a discarded block.
    Garbage {
        /// The number of the garbage.
        number: u64,
    },
    /// Contents that no write ever had.
    Unknown {
        /// Its first 8 bytes.
        begin: u64,
    },
}

/// A sector has contents that the oracle does not allow.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "volume {volume} sector {sector}: {reader} found {found:?}{}; expected one of: {}; last changes of the sector: {}",
    origin.as_ref().map(|o| format!(" = {o}")).unwrap_or_default(),
    expected.join(", "),
    history.join(", ")
)]
pub struct WrongContents {
    /// The number of the volume.
    pub volume: u8,
    /// The sector.
    pub sector: u64,
    /// What found the contents: a read, or the disks after a crash.
    pub reader: &'static str,
    /// The contents.
    pub found: Content,
    /// The change that has written the contents, if it is known.
    pub origin: Option<String>,
    /// The changes whose contents are allowed.
    pub expected: Vec<String>,
    /// The last changes of the sector.
    pub history: Vec<String>,
}

impl Content {
    /// A fingerprint, which is equal for equal contents.
    pub fn fingerprint(self) -> u64 {
        let words = match self {
            Content::Zero => [1, 0, 0],
            Content::Data { volume, sector, write } => [u64::from(volume) + 4, sector, u64::from(write)],
            Content::Garbage { number } => [2, number, 0],
            Content::Unknown { begin } => [3, begin, 0],
        };
        words.into_iter().fold(0, |sum, w| (sum ^ w).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(31))
    }
}

/// Number of 64-bit words of a sector.
const WORDS: usize = SECTOR / 8;
/// Number of words of the header: kind, owner and position.
const HEADER_WORDS: usize = 3;
/// Number of words that are compared in parallel, so that the check of a sector takes a few vector instructions.
const LANES: usize = 8;

/// The arithmetic progression of the words after the header: its element 0, and its step.
fn body(kind: u64, id: u64, place: u64) -> (u64, u64) {
    let x = id.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ place.wrapping_mul(0xD6E8_FEB8_6659_FD93) ^ kind;
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (x ^ (x >> 31), x | 1)
}

fn fill(into: &mut [u8], kind: u64, id: u64, place: u64) {
    let (mut word, step) = body(kind, id, place);
    for bytes in into.chunks_exact_mut(8) {
        bytes.copy_from_slice(&word.to_le_bytes());
        word = word.wrapping_add(step);
    }
    for (bytes, w) in into.chunks_exact_mut(8).zip([kind, id, place]) {
        bytes.copy_from_slice(&w.to_le_bytes());
    }
}

fn word_of(bytes: &[u8], i: usize) -> u64 {
    let mut w = [0; 8];
    w.copy_from_slice(&bytes[8 * i..8 * i + 8]);
    u64::from_le_bytes(w)
}

/// Whether every word after the header is correct.
fn is_whole(bytes: &[u8], first: u64, step: u64) -> bool {
    let mut different = 0;
    for i in HEADER_WORDS..LANES {
        different |= word_of(bytes, i) ^ first.wrapping_add(step.wrapping_mul(i as u64));
    }
    let mut expected: [u64; LANES] =
        std::array::from_fn(|lane| first.wrapping_add(step.wrapping_mul((LANES + lane) as u64)));
    let stride = step.wrapping_mul(LANES as u64);
    let mut lanes = [0; LANES];
    for chunk in bytes[8 * LANES..8 * WORDS].chunks_exact(8 * LANES) {
        for lane in 0..LANES {
            lanes[lane] |= word_of(chunk, lane) ^ expected[lane];
            expected[lane] = expected[lane].wrapping_add(stride);
        }
    }
    lanes.iter().fold(different, |all, lane| all | lane) == 0
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks_exact(8).fold(0, |all, w| all | word_of(w, 0)) == 0
}

/// Fills a sector with the stamp of a write.
pub fn fill_data(into: &mut [u8], volume: u8, sector: u64, write: u32) {
    fill(into, DATA, u64::from(volume) << 32 | u64::from(write), sector);
}

/// Fills a sector with marked garbage.
pub fn fill_garbage(into: &mut [u8], number: u64) {
    fill(into, GARBAGE, number, 0);
}

/// Decodes the contents of a sector. Every byte counts.
pub fn decode(bytes: &[u8]) -> Content {
    let (kind, id, place) = (word_of(bytes, 0), word_of(bytes, 1), word_of(bytes, 2));
    if kind == 0 && is_zero(bytes) {
        return Content::Zero;
    }
    let known = kind == DATA || kind == GARBAGE;
    let (first, step) = body(kind, id, place);
    if !known || !is_whole(bytes, first, step) {
        return Content::Unknown { begin: kind };
    }
    if kind == GARBAGE {
        return Content::Garbage { number: id };
    }
    Content::Data { volume: (id >> 32) as u8, sector: place, write: id as u32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_counts() {
        let mut s = [0; SECTOR];
        assert_eq!(decode(&s), Content::Zero);
        fill_data(&mut s, 2, 77, 123_456);
        assert_eq!(decode(&s), Content::Data { volume: 2, sector: 77, write: 123_456 });
        for i in 0..SECTOR {
            let mut t = s;
            t[i] ^= 1;
            assert!(matches!(decode(&t), Content::Unknown { .. }), "byte {i}");
        }
        fill_garbage(&mut s, 9);
        assert_eq!(decode(&s), Content::Garbage { number: 9 });
    }
}
