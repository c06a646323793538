//! The superblock: byte 4096 of every cache and backing device.
//!
//! Owns the raw 4096-byte struct, what both kinds of device have in common, and [`identify`]. Callers use
//! the checked types [`CacheSuper`] and [`BackingSuper`]. Only formatting and a check against every rule
//! of the format make one. Both keep the bytes that they were made from, so that a rewrite preserves
//! fields that this code does not know.
//!
//! A device has one superblock, without a second copy. Not every device writes its 4096 bytes atomically,
//! so only the checksum detects a torn write.

mod backing;
mod cache;

pub use backing::{BACKING_PADDING_BYTES, BackingFormat, BackingState, BackingSuper, CacheMode};
pub use cache::{CacheFormat, CacheSuper, Replacement, ScrubState};

use std::mem::{offset_of, size_of};

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::bytes::{as_u64, u64_at};
use crate::checksum::crc64;
use crate::error::{Corrupt, Structure, Value};
use crate::magic::SUPERBLOCK_MAGIC;
use crate::units::{Sector, Sectors, Uuid};

/// Sector of the superblock on its device.
pub const SUPERBLOCK_SECTOR: Sector = Sector(8);
/// Bytes of a superblock; read and written as a unit.
pub const SUPERBLOCK_BYTES: usize = 4096;
/// First data sector of a backing device whose superblock does not store one.
pub const DEFAULT_DATA_OFFSET: Sector = Sector(16);
/// Number of slots for journal bucket numbers.
pub const JOURNAL_SLOTS: usize = 256;
/// Bytes of a device label.
pub const LABEL_BYTES: usize = 32;
/// Bytes of padding behind the feature words of a superblock, from byte 144 on.
pub const SUPERBLOCK_PADDING_BYTES: usize = 40;

/// A superblock as it lies on the device, unchecked.
///
/// The meaning of some fields depends on the kind of device; the checked types define it.
#[derive(Clone, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RawSuperblock {
    /// Checksum over bytes `[8, 208 + 8 * keys)`.
    pub csum: U64,
    /// Sector of this superblock: 8.
    pub offset: U64,
    /// Kind of device and layout of the rest.
    pub version: U64,
    /// [`SUPERBLOCK_MAGIC`].
    pub magic: [u8; 16],
    /// UUID of this device.
    pub uuid: [u8; 16],
    /// UUID of the cache set.
    pub set_uuid: [u8; 16],
    /// Label of a backing device, NUL padded.
    pub label: [u8; LABEL_BYTES],
    /// Flag bits, different for cache and backing devices.
    pub flags: U64,
    /// Incremented by every write of a cache superblock.
    pub seq: U64,
    /// Compatible features (versions 5 and 6).
    pub feature_compat: U64,
    /// Incompatible features (versions 5 and 6).
    pub feature_incompat: U64,
    /// Features that forbid writing (versions 5 and 6).
    pub feature_ro_compat: U64,
    /// Bytes that the kernel preserves and does not read, under the checksum: see [`CacheSuper::padding`],
    /// [`BackingSuper::registration`], [`BackingSuper::registered_sectors`] and [`BackingSuper::padding`].
    pub padding: [u8; SUPERBLOCK_PADDING_BYTES],
    /// Cache: number of buckets. Backing: first data sector (versions 4 and 6).
    pub nbuckets: U64,
    /// Block size in sectors.
    pub block_size: U16,
    /// Bucket size in sectors, or its logarithm.
    pub bucket_size: U16,
    /// Cache devices in the set.
    pub nr_in_set: U16,
    /// Index of this cache device in the set.
    pub nr_this_dev: U16,
    /// Time of the last write in Unix seconds, low 32 bits.
    pub last_mount: U32,
    /// First bucket behind the superblock area.
    pub first_bucket: U16,
    /// Number of valid entries of `d`.
    pub keys: U16,
    /// Bucket numbers of the journal.
    pub d: [U64; JOURNAL_SLOTS],
    /// High half of the bucket size, used only with the obsolete large-bucket feature. Not checksummed.
    pub obso_bucket_size_hi: U16,
    /// Unused bytes, zero in every known superblock; preserved.
    pub tail: [u8; 1838],
}

const _: () = {
    assert!(size_of::<RawSuperblock>() == SUPERBLOCK_BYTES);
    assert!(align_of::<RawSuperblock>() == 1);
    assert!(offset_of!(RawSuperblock, csum) == 0);
    assert!(offset_of!(RawSuperblock, offset) == 8);
    assert!(offset_of!(RawSuperblock, version) == 16);
    assert!(offset_of!(RawSuperblock, magic) == 24);
    assert!(offset_of!(RawSuperblock, uuid) == 40);
    assert!(offset_of!(RawSuperblock, set_uuid) == 56);
    assert!(offset_of!(RawSuperblock, label) == 72);
    assert!(offset_of!(RawSuperblock, flags) == 104);
    assert!(offset_of!(RawSuperblock, seq) == 112);
    assert!(offset_of!(RawSuperblock, feature_compat) == 120);
    assert!(offset_of!(RawSuperblock, feature_incompat) == 128);
    assert!(offset_of!(RawSuperblock, feature_ro_compat) == 136);
    assert!(offset_of!(RawSuperblock, padding) == 144);
    assert!(offset_of!(RawSuperblock, nbuckets) == 184);
    assert!(offset_of!(RawSuperblock, block_size) == 192);
    assert!(offset_of!(RawSuperblock, bucket_size) == 194);
    assert!(offset_of!(RawSuperblock, nr_in_set) == 196);
    assert!(offset_of!(RawSuperblock, nr_this_dev) == 198);
    assert!(offset_of!(RawSuperblock, last_mount) == 200);
    assert!(offset_of!(RawSuperblock, first_bucket) == 204);
    assert!(offset_of!(RawSuperblock, keys) == 206);
    assert!(offset_of!(RawSuperblock, d) == 208);
    assert!(offset_of!(RawSuperblock, obso_bucket_size_hi) == 2256);
    assert!(offset_of!(RawSuperblock, tail) == 2258);
};

/// Version of a cache device that was formatted and never used.
pub const VERSION_CACHE_FRESH: u64 = 0;
/// Version of a backing device whose data starts at sector 16.
pub const VERSION_BACKING: u64 = 1;
/// Version of a cache device in use.
pub const VERSION_CACHE: u64 = 3;
/// Version of a backing device with an explicit data offset.
pub const VERSION_BACKING_OFFSET: u64 = 4;
/// Version of a cache device with feature words.
pub const VERSION_CACHE_FEATURES: u64 = 5;
/// Version of a backing device with an explicit data offset and feature words.
pub const VERSION_BACKING_FEATURES: u64 = 6;

impl RawSuperblock {
    /// Borrows the superblock in the first 4096 bytes of `bytes`, unchecked.
    ///
    /// # Errors
    /// If `bytes` has fewer than 4096 bytes.
    pub fn from_prefix(bytes: &[u8]) -> Result<&RawSuperblock, Corrupt> {
        match RawSuperblock::ref_from_prefix(bytes) {
            Ok((raw, _)) => Ok(raw),
            Err(_) => Err(Corrupt::new(
                Structure::CacheSuperblock,
                "length",
                0,
                Value::AtLeast(as_u64(SUPERBLOCK_BYTES)),
                Value::Num(as_u64(bytes.len())),
            )),
        }
    }

    /// Checks a cache superblock against every rule of the format.
    ///
    /// `device_sectors` is the size of the device it was read from, `logical_block_bytes` that
    /// device's logical block size.
    ///
    /// # Errors
    /// The first rule that is broken. Unknown versions, unknown feature bits, and sizes beyond what
    /// this code can address are of the family `Unsupported`.
    pub fn check_cache(
        &self,
        device_sectors: Sectors,
        logical_block_bytes: u32,
    ) -> Result<CacheSuper, Corrupt> {
        cache::check(self, device_sectors, logical_block_bytes)
    }

    /// Checks a backing superblock against every rule of the format.
    ///
    /// `device_sectors` is the size of the device it was read from, `logical_block_bytes` that
    /// device's logical block size. Fields that kernels write from memory they never initialised
    /// (`first_bucket`, the feature words) are ignored.
    ///
    /// # Errors
    /// The first rule that is broken; unknown versions are of the family `Unsupported`.
    pub fn check_backing(
        &self,
        device_sectors: Sectors,
        logical_block_bytes: u32,
    ) -> Result<BackingSuper, Corrupt> {
        backing::check(self, device_sectors, logical_block_bytes)
    }

    /// Computes the checksum of the other fields; `None` if `keys` is out of range.
    pub fn computed_csum(&self) -> Option<u64> {
        let keys = usize::from(self.keys.get());
        if keys > JOURNAL_SLOTS {
            return None;
        }
        let end = keys.checked_mul(8)?.checked_add(offset_of!(RawSuperblock, d))?;
        Some(crc64(self.as_bytes().get(8..end)?))
    }

    /// A superblock that is zero except for sector, version and magic.
    fn blank(version: u64) -> Box<RawSuperblock> {
        let mut raw = Box::new(RawSuperblock::new_zeroed_value());
        raw.offset = SUPERBLOCK_SECTOR.0.into();
        raw.version = version.into();
        raw.magic = SUPERBLOCK_MAGIC;
        raw
    }

    fn new_zeroed_value() -> RawSuperblock {
        <RawSuperblock as zerocopy::FromZeros>::new_zeroed()
    }

    /// The bytes with a newly computed checksum. Only for values whose `keys` was checked.
    fn sealed(&self) -> [u8; SUPERBLOCK_BYTES] {
        let mut raw = self.clone();
        if let Some(csum) = raw.computed_csum() {
            raw.csum = csum.into();
        }
        zerocopy::transmute!(raw)
    }

    /// Checks the rules that every superblock must keep. The caller has checked the version.
    fn check_common(&self, what: Structure, logical_block_bytes: u32) -> Result<(), Corrupt> {
        let bad =
            |field, at: usize, expected, found| Err(Corrupt::new(what, field, as_u64(at), expected, found));
        let keys = self.keys.get();
        let Some(csum) = self.computed_csum() else {
            return bad(
                "keys (journal buckets)",
                offset_of!(RawSuperblock, keys),
                Value::AtMost(as_u64(JOURNAL_SLOTS)),
                Value::Num(u64::from(keys)),
            );
        };
        if csum != self.csum.get() {
            return bad("checksum", 0, Value::Hex(csum), Value::Hex(self.csum.get()));
        }
        if self.offset.get() != SUPERBLOCK_SECTOR.0 {
            return bad(
                "offset",
                offset_of!(RawSuperblock, offset),
                Value::Num(SUPERBLOCK_SECTOR.0),
                Value::Num(self.offset.get()),
            );
        }
        if Uuid(self.uuid).is_nil() {
            return bad(
                "uuid",
                offset_of!(RawSuperblock, uuid),
                Value::Text("a UUID other than zero"),
                Value::Uuid(Uuid::NIL),
            );
        }
        let block_bytes = Sectors(u64::from(self.block_size.get())).bytes();
        if block_bytes < u64::from(logical_block_bytes) {
            return bad(
                "block_size",
                offset_of!(RawSuperblock, block_size),
                Value::LogicalBlock(logical_block_bytes),
                Value::Bytes(block_bytes),
            );
        }
        Ok(())
    }

    fn check_magic(&self, what: Structure) -> Result<(), Corrupt> {
        if self.magic == SUPERBLOCK_MAGIC {
            return Ok(());
        }
        Err(Corrupt::new(
            what,
            "magic",
            as_u64(offset_of!(RawSuperblock, magic)),
            Value::Uuid(Uuid(SUPERBLOCK_MAGIC)),
            Value::Uuid(Uuid(self.magic)),
        ))
    }

    fn wrong_version(&self, what: Structure, expected: &'static str) -> Corrupt {
        Corrupt::unsupported(
            what,
            "version",
            as_u64(offset_of!(RawSuperblock, version)),
            Value::Text(expected),
            Value::Num(self.version.get()),
        )
    }
}

/// The kind of device that a superblock names. Only its magic and version were checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Identity {
    /// A cache device.
    Cache,
    /// A backing device.
    Backing,
    /// bcache's magic with a version that no known software writes.
    UnknownVersion(u64),
    /// No bcache superblock, or fewer than 4096 bytes.
    NotBcache,
}

/// Finds the kind of device from the superblock in the first 4096 bytes of `bytes`.
pub fn identify(bytes: &[u8]) -> Identity {
    let at = offset_of!(RawSuperblock, magic);
    let magic = bytes.get(at..).and_then(|b| b.first_chunk::<16>());
    if bytes.len() < SUPERBLOCK_BYTES || magic != Some(&SUPERBLOCK_MAGIC) {
        return Identity::NotBcache;
    }
    match u64_at(bytes, offset_of!(RawSuperblock, version)) {
        Some(VERSION_CACHE_FRESH | VERSION_CACHE | VERSION_CACHE_FEATURES) => Identity::Cache,
        Some(VERSION_BACKING | VERSION_BACKING_OFFSET | VERSION_BACKING_FEATURES) => Identity::Backing,
        Some(version) => Identity::UnknownVersion(version),
        None => Identity::NotBcache,
    }
}

/// The text of a label, up to the first NUL and without a trailing newline.
///
/// Bytes that are not UTF-8 are replaced.
pub fn label_text(label: &[u8; LABEL_BYTES]) -> String {
    let text = label.split(|&b| b == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text.strip_suffix(b"\n").unwrap_or(text)).into_owned()
}

/// `text` as label bytes, NUL padded; `None` if it is longer than 32 bytes or contains a NUL.
pub fn label_bytes(text: &str) -> Option<[u8; LABEL_BYTES]> {
    let mut label = [0; LABEL_BYTES];
    if text.as_bytes().contains(&0) {
        return None;
    }
    label.get_mut(..text.len())?.copy_from_slice(text.as_bytes());
    Some(label)
}
