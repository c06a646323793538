//! What sectors hold in a simulation: every one says whose it is.
//!
//! Owns the encoding. A data sector names its volume, its place and the write it came from, over all of its 512
//! bytes: old, foreign, torn and invented contents are told apart by looking. Garbage (what a device returns for a
//! discarded block) is marked too, so that it is never taken for damage.

/// Bytes of a sector.
pub const SECTOR: usize = 512;

const DATA: u64 = 0x5a31_6d1f_0b75_c0de;
const GARBAGE: u64 = 0x6a72_6261_6765_0001;

/// What a sector holds.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Content {
    /// Zeros.
    Zero,
    /// A sector of a volume, as a write left it.
    Data {
        /// The volume.
        volume: u8,
        /// The place in the volume.
        sector: u64,
        /// Number of the write.
        write: u32,
    },
    /// What a device made of a discarded block.
    Garbage {
        /// A number of its own.
        number: u64,
    },
    /// Something that no write ever contained.
    Unknown {
        /// Its first 8 bytes.
        begin: u64,
    },
}

/// The words behind the header: a progression, so that checking a sector is a few vector instructions.
fn body(kind: u64, id: u64, place: u64) -> (u64, u64) {
    let x = id.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ place.wrapping_mul(0xD6E8_FEB8_6659_FD93) ^ kind;
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (x ^ (x >> 31), x | 1)
}

fn fill(into: &mut [u8], kind: u64, id: u64, place: u64) {
    let (mut word, step) = body(kind, id, place);
    let (head, rest) = into.split_at_mut(24);
    for (bytes, w) in head.chunks_exact_mut(8).zip([kind, id, place]) {
        bytes.copy_from_slice(&w.to_le_bytes());
    }
    for bytes in rest.chunks_exact_mut(8) {
        bytes.copy_from_slice(&word.to_le_bytes());
        word = word.wrapping_add(step);
    }
}

/// Fills a sector with the stamp of a write.
pub fn fill_data(into: &mut [u8], volume: u8, sector: u64, write: u32) {
    fill(into, DATA, u64::from(volume) << 32 | u64::from(write), sector);
}

/// Fills a sector with marked garbage.
pub fn fill_garbage(into: &mut [u8], number: u64) {
    fill(into, GARBAGE, number, 0);
}

/// What a sector holds. Every byte of it counts.
pub fn decode(bytes: &[u8]) -> Content {
    let word = |i: usize| {
        let mut w = [0; 8];
        w.copy_from_slice(&bytes[8 * i..8 * i + 8]);
        u64::from_le_bytes(w)
    };
    let (kind, id, place) = (word(0), word(1), word(2));
    if kind == 0 && bytes.iter().all(|b| *b == 0) {
        return Content::Zero;
    }
    let known = kind == DATA || kind == GARBAGE;
    let whole = || {
        let (mut expected, step) = body(kind, id, place);
        let mut different = 0;
        for bytes in bytes[24..].chunks_exact(8) {
            let mut w = [0; 8];
            w.copy_from_slice(bytes);
            different |= u64::from_le_bytes(w) ^ expected;
            expected = expected.wrapping_add(step);
        }
        different == 0
    };
    if !known || !whole() {
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
