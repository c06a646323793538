//! Prio sets: the table of generations and priorities of all buckets.
//!
//! Owns the bytes of one set. The table is a chain of [`crate::Geometry::prio_buckets`] sets, each
//! naming the next. The caller follows the chain and writes it in the right order. The stored
//! generations are *lower bounds*: pointers found elsewhere may be newer.

use std::mem::{offset_of, size_of};

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::bytes::as_u64;
use crate::checksum::crc64;
use crate::error::{Corrupt, Structure, Value};
use crate::magic::SetMagic;
use crate::units::Gen;

/// Bytes before the entries.
pub const PRIO_HEADER_BYTES: usize = 40;
/// Bytes of an entry.
pub const PRIO_ENTRY_BYTES: usize = 3;
/// Priority of buckets with metadata.
pub const PRIO_METADATA: u16 = 65535;
/// Priority of a bucket that was just used.
pub const PRIO_INITIAL: u16 = 32768;

/// Header of a prio set as it lies on the device.
#[derive(Clone, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawPrioSet {
    csum: U64,
    magic: U64,
    seq: U64,
    version: U32,
    pad: U32,
    next_bucket: U64,
}

/// Entry of a prio set as it lies on the device.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawPrioEntry {
    prio: U16,
    generation: u8,
}

const _: () = {
    assert!(size_of::<RawPrioSet>() == PRIO_HEADER_BYTES);
    assert!(align_of::<RawPrioSet>() == 1);
    assert!(size_of::<RawPrioEntry>() == PRIO_ENTRY_BYTES);
    assert!(offset_of!(RawPrioSet, magic) == 8);
    assert!(offset_of!(RawPrioSet, seq) == 16);
    assert!(offset_of!(RawPrioSet, version) == 24);
    assert!(offset_of!(RawPrioSet, next_bucket) == 32);
    assert!(offset_of!(RawPrioEntry, generation) == 2);
};

/// The stored priority and generation of one bucket.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BucketPrio {
    /// Hint for replacement: a bucket of higher priority stays in the cache longer.
    pub prio: u16,
    /// Generation of the bucket; pointers of an older generation are stale.
    pub generation: Gen,
}

/// The header fields of a prio set.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PrioHeader {
    /// Number of the write; all sets of a chain have the same.
    pub seq: u64,
    /// Bucket number of the next set. **Meaningless in the last set of the chain.**
    pub next_bucket: u64,
}

/// Entries that fit into a set of `bytes` bytes.
pub const fn prio_capacity(bytes: usize) -> usize {
    bytes.saturating_sub(PRIO_HEADER_BYTES) / PRIO_ENTRY_BYTES
}

/// Reads a prio set into `out` and returns its header.
///
/// `bytes` are the whole set (metadata-bucket size), because the checksum covers all of it. The first
/// entry of the set becomes the first of `out`.
///
/// # Errors
/// If the set is damaged, has an unknown version (`Unsupported`), or has fewer entries than `out`. `out`
/// is then unchanged.
pub fn parse_prio_set(
    bytes: &[u8],
    set_magic: SetMagic,
    out: &mut [BucketPrio],
) -> Result<PrioHeader, Corrupt> {
    let bad = |field, at: usize, expected, found| {
        Err(Corrupt::new(Structure::PrioSet, field, as_u64(at), expected, found))
    };
    let Ok((header, rest)) = RawPrioSet::ref_from_prefix(bytes) else {
        let expected = Value::AtLeast(as_u64(PRIO_HEADER_BYTES));
        return bad("length", 0, expected, Value::Num(as_u64(bytes.len())));
    };
    let magic = header.magic.get();
    if magic != set_magic.pset() {
        let at = offset_of!(RawPrioSet, magic);
        return bad("magic", at, Value::Hex(set_magic.pset()), Value::Hex(magic));
    }
    let csum = crc64(bytes.get(8..).unwrap_or_default());
    if csum != header.csum.get() {
        return bad("checksum", 0, Value::Hex(csum), Value::Hex(header.csum.get()));
    }
    let version = header.version.get();
    if version != 0 {
        return Err(Corrupt::unsupported(
            Structure::PrioSet,
            "version",
            as_u64(offset_of!(RawPrioSet, version)),
            Value::Num(0),
            Value::Num(u64::from(version)),
        ));
    }
    let Ok((entries, _)) = <[RawPrioEntry]>::ref_from_prefix_with_elems(rest, out.len()) else {
        let expected = Value::AtLeast(as_u64(out.len()));
        return bad("entries", 0, expected, Value::Num(as_u64(prio_capacity(bytes.len()))));
    };
    for (to, from) in out.iter_mut().zip(entries) {
        *to = BucketPrio { prio: from.prio.get(), generation: Gen(from.generation) };
    }
    Ok(PrioHeader { seq: header.seq.get(), next_bucket: header.next_bucket.get() })
}

/// Writes a prio set over all of `bytes`, which have the size of a metadata bucket.
///
/// # Panics
/// If `bytes` cannot hold a header and all `entries`.
pub fn encode_prio_set(bytes: &mut [u8], set_magic: SetMagic, header: PrioHeader, entries: &[BucketPrio]) {
    assert!(
        bytes.len() >= PRIO_HEADER_BYTES && entries.len() <= prio_capacity(bytes.len()),
        "{} entries do not fit into a prio set of {} bytes",
        entries.len(),
        bytes.len()
    );
    bytes.fill(0);
    let mut raw = RawPrioSet::new_zeroed();
    raw.magic = set_magic.pset().into();
    raw.seq = header.seq.into();
    raw.next_bucket = header.next_bucket.into();
    let Some((front, rest)) = bytes.split_first_chunk_mut::<PRIO_HEADER_BYTES>() else { return };
    front.copy_from_slice(raw.as_bytes());
    for (to, from) in rest.chunks_exact_mut(PRIO_ENTRY_BYTES).zip(entries) {
        let raw = RawPrioEntry { prio: from.prio.into(), generation: from.generation.0 };
        to.copy_from_slice(raw.as_bytes());
    }
    let csum = crc64(bytes.get(8..).unwrap_or_default());
    if let Some(front) = bytes.get_mut(..8) {
        front.copy_from_slice(&csum.to_le_bytes());
    }
}
