//! Small readers over untrusted bytes, shared by the parsers. Nothing here can panic.

use crate::units::Sectors;

/// The eight bytes at `at` as a little-endian number; `None` if they reach past the end.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    let end = at.checked_add(8)?;
    bytes.get(at..end)?.first_chunk::<8>().map(|b| u64::from_le_bytes(*b))
}

/// `len` rounded up to a multiple of the block; `None` on overflow or a block of zero.
pub(crate) fn pad_to_block(len: usize, block_sectors: Sectors) -> Option<usize> {
    len.checked_next_multiple_of(block_bytes(block_sectors)?)
}

/// `len` rounded down to a multiple of the block; `None` for a block of zero.
pub(crate) fn floor_to_block(len: usize, block_sectors: Sectors) -> Option<usize> {
    let block = block_bytes(block_sectors)?;
    len.checked_div(block)?.checked_mul(block)
}

/// Bytes of a block; `None` if it is zero or does not fit into memory.
pub(crate) fn block_bytes(block_sectors: Sectors) -> Option<usize> {
    usize::try_from(block_sectors.bytes()).ok().filter(|&b| b != 0)
}

/// `n` as a 64-bit number. On every supported machine it fits; elsewhere the result saturates.
pub(crate) fn as_u64(n: usize) -> u64 {
    u64::try_from(n).unwrap_or(u64::MAX)
}
