//! The fields of the undo file.
//!
//! Owns their reading from the front of a slice. Must not know what they mean.

/// Takes a number of 8 bytes, little endian.
pub(crate) fn number(bytes: &mut &[u8]) -> Option<u64> {
    let (front, rest) = bytes.split_first_chunk::<8>()?;
    *bytes = rest;
    Some(u64::from_le_bytes(*front))
}

/// Takes `n` bytes.
pub(crate) fn take<'a>(bytes: &mut &'a [u8], n: usize) -> Option<&'a [u8]> {
    let (front, rest) = bytes.split_at_checked(n)?;
    *bytes = rest;
    Some(front)
}
