//! What a written sector holds: 32 times {sector (u64), version (u32), tag (u32)}, little-endian. The tag says which
//! volume it belongs to. A sector that was never written is zero, which is version 0.

/// Bytes of a sector.
pub const SECTOR: usize = 512;

/// The version of a sector that holds nothing of ours.
pub const FOREIGN: u32 = u32::MAX;

fn piece(sector: u64, version: u32, tag: u32) -> [u8; 16] {
    let mut out = [0; 16];
    out[..8].copy_from_slice(&sector.to_le_bytes());
    out[8..12].copy_from_slice(&version.to_le_bytes());
    out[12..].copy_from_slice(&tag.to_le_bytes());
    out
}

/// Fills whole sectors from `first` on.
pub fn fill(bytes: &mut [u8], first: u64, version: u32, tag: u32) {
    for (sector, bytes) in (first..).zip(bytes.chunks_exact_mut(SECTOR)) {
        let piece = piece(sector, version, tag);
        bytes.chunks_exact_mut(16).for_each(|c| c.copy_from_slice(&piece));
    }
}

/// The version that a sector holds, [`FOREIGN`] if it is not a write of that volume to that sector, whole.
pub fn version(bytes: &[u8], sector: u64, tag: u32) -> u32 {
    let version = bytes.get(8..12).and_then(|b| b.first_chunk()).map_or(FOREIGN, |b| u32::from_le_bytes(*b));
    let expected = if version == 0 { [0; 16] } else { piece(sector, version, tag) };
    if bytes.chunks_exact(16).all(|c| c == expected) { version } else { FOREIGN }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sector_tells_what_it_is() {
        let mut two = vec![0; 2 * SECTOR];
        assert_eq!(version(&two[..SECTOR], 7, 1), 0);
        fill(&mut two, 7, 9, 1);
        let (first, second) = two.split_at_mut(SECTOR);
        assert_eq!((version(first, 7, 1), version(second, 8, 1)), (9, 9));
        assert_eq!((version(first, 8, 1), version(first, 7, 2)), (FOREIGN, FOREIGN));
        first[511] ^= 1;
        assert_eq!(version(first, 7, 1), FOREIGN, "torn");
    }
}
