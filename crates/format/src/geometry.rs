//! Sizes that follow from a cache superblock.
//!
//! Owns [`Geometry`] and the rules by which sizes of metadata are derived from the bucket size. A
//! geometry made by [`Geometry::new`] is safe to compute with: the whole device has fewer than 2^43
//! sectors, so neither bucket starts nor byte offsets overflow. Must not know the superblock's bytes.

use crate::error::{Corrupt, Structure, Value};
use crate::key::Ptr;
use crate::units::{BucketNr, SECTOR_BYTES, Sector, Sectors};

/// Sectors of a page (4 KiB) of the machines whose limits the format inherited.
pub const PAGE_SECTORS: u64 = 8;
/// Largest block of a cache device, in sectors.
pub const MAX_BLOCK_SECTORS: Sectors = Sectors(PAGE_SECTORS);
/// Pages of the largest metadata bucket: 4 MiB, the largest allocation on a machine with 4 KiB pages.
const MAX_META_PAGES: u64 = 1024;
/// Largest size of a metadata bucket, in pages, at which a btree node is as large as the bucket.
const FULL_NODE_PAGES: u64 = 64;
/// Bytes before the first entry of a prio set.
const PRIO_HEADER_BYTES: u64 = 40;
/// Bytes of an entry of a prio set.
const PRIO_ENTRY_BYTES: u64 = 3;
/// Bytes of a slot of the UUID table.
const UUID_SLOT_BYTES: u64 = 128;
/// Fewest buckets of a cache device.
pub const MIN_BUCKETS: u32 = 128;
/// Fewest buckets that a running kernel registers.
pub const MIN_BUCKETS_KERNEL: u32 = 513;
/// Most journal buckets of a cache device.
pub const MAX_JOURNAL_BUCKETS: u32 = 256;
/// Smallest bucket, in sectors.
pub const MIN_BUCKET_SECTORS: Sectors = Sectors(PAGE_SECTORS);
/// Largest bucket that either encoding can express, in sectors.
pub const MAX_BUCKET_SECTORS: Sectors = Sectors(1 << 31);

/// The checked sizes of a cache device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Size of a bucket; a power of two.
    pub bucket_sectors: Sectors,
    /// Size of a block, to which journal entries and bsets are aligned; a power of two, at most 8 sectors.
    pub block_sectors: Sectors,
    /// Number of buckets, including the reserved ones at the start.
    pub nbuckets: u32,
    /// First bucket usable for anything but the superblock; the first journal bucket.
    pub first_bucket: BucketNr,
    /// Number of journal buckets; 0 on a device that was never initialised.
    pub njournal: u32,
    /// Size of a prio set and of the UUID table.
    pub meta_sectors: Sectors,
    /// Size of new btree nodes. The key of an existing node has the size of that node.
    pub node_sectors: Sectors,
    /// Buckets described by one prio set.
    pub prios_per_bucket: u32,
    /// Prio sets that describe all buckets.
    pub prio_buckets: u32,
    /// Slots of the UUID table.
    pub nr_uuids: u32,
}

impl Geometry {
    /// The geometry of a cache device with these superblock fields.
    ///
    /// # Errors
    /// The first number that breaks a rule of the format. A number of buckets that does not fit into 32
    /// bits is of the family `Unsupported`.
    pub fn new(
        bucket_sectors: Sectors,
        block_sectors: Sectors,
        nbuckets: u64,
        first_bucket: u16,
        njournal: u16,
    ) -> Result<Geometry, Corrupt> {
        check_sizes(bucket_sectors, block_sectors)?;
        let count = check_count(nbuckets, bucket_sectors)?;
        check_reserved(count, bucket_sectors, first_bucket, njournal)?;
        let pages = (bucket_sectors.0 / PAGE_SECTORS).min(MAX_META_PAGES);
        let node_pages = if pages <= FULL_NODE_PAGES { pages } else { (pages / 4).max(FULL_NODE_PAGES) };
        let meta_sectors = Sectors(pages.saturating_mul(PAGE_SECTORS));
        let prios = prios_in(meta_sectors);
        Ok(Geometry {
            bucket_sectors,
            block_sectors,
            nbuckets: count,
            first_bucket: BucketNr(u32::from(first_bucket)),
            njournal: u32::from(njournal),
            meta_sectors,
            node_sectors: Sectors(node_pages.saturating_mul(PAGE_SECTORS)),
            prios_per_bucket: prios,
            prio_buckets: count.div_ceil(prios.max(1)),
            nr_uuids: u32::try_from(meta_sectors.bytes() / UUID_SLOT_BYTES).unwrap_or(u32::MAX),
        })
    }

    /// The bucket that holds `sector`; `None` behind the last bucket.
    pub fn bucket_of(&self, sector: Sector) -> Option<BucketNr> {
        let nr = u32::try_from(sector.0 >> self.bucket_shift()).ok()?;
        (nr < self.nbuckets).then_some(BucketNr(nr))
    }

    /// First sector of a bucket.
    pub fn bucket_start(&self, bucket: BucketNr) -> Sector {
        Sector(u64::from(bucket.0) << self.bucket_shift())
    }

    /// How far `sector` lies from the start of its bucket.
    pub fn offset_in_bucket(&self, sector: Sector) -> Sectors {
        Sectors(sector.0 & self.bucket_sectors.0.wrapping_sub(1))
    }

    /// Bucket number of journal bucket `index`; `None` if there are fewer.
    pub fn journal_bucket(&self, index: u32) -> Option<BucketNr> {
        (index < self.njournal).then(|| BucketNr(self.first_bucket.0.saturating_add(index)))
    }

    /// First bucket behind superblock and journal; the allocator uses the buckets from here on.
    pub fn first_dynamic(&self) -> BucketNr {
        BucketNr(self.first_bucket.0.saturating_add(self.njournal))
    }

    /// Number of sectors used by buckets; the rest of the device is ignored.
    pub fn used_sectors(&self) -> Sectors {
        Sectors(u64::from(self.nbuckets) << self.bucket_shift())
    }

    /// Bytes of a block.
    pub fn block_bytes(&self) -> u64 {
        self.block_sectors.bytes()
    }

    /// The bucket that holds the `size` sectors at `ptr`; `None` if the pointer is not usable.
    ///
    /// A usable pointer names a device that can exist and a bucket behind the superblock area, and its
    /// range stays inside that bucket. Only usable pointers raise generations.
    pub fn ptr_bucket(&self, ptr: Ptr, size: Sectors) -> Option<BucketNr> {
        let bucket = self.bucket_of(ptr.offset())?;
        let end = self.offset_in_bucket(ptr.offset()).0.saturating_add(size.0);
        (ptr.is_available() && bucket >= self.first_bucket && end <= self.bucket_sectors.0).then_some(bucket)
    }

    /// Sizes that a prio set may have, the usual one first.
    ///
    /// The size of a prio set is not stored. In buckets above 4 MiB, a machine with another page size or
    /// allocation limit writes larger sets. The checksum matches only at the right size.
    pub fn prio_set_sizes(&self) -> impl Iterator<Item = Sectors> + use<> {
        let usual = self.meta_sectors;
        let largest = self.bucket_sectors.0.min(MAX_FOREIGN_META_SECTORS);
        std::iter::successors(Some(usual), move |s| {
            let next = s.0.checked_mul(2)?;
            (next <= largest).then_some(Sectors(next))
        })
    }

    /// The size of a bucket as a power of two, in sectors.
    pub fn bucket_shift(&self) -> u32 {
        self.bucket_sectors.0.trailing_zeros()
    }
}

/// 16 MiB: the largest metadata bucket of any machine that the kernel runs on.
const MAX_FOREIGN_META_SECTORS: u64 = 4096 * PAGE_SECTORS;

/// Entries of a prio set of this size.
pub fn prios_in(meta_sectors: Sectors) -> u32 {
    let entries = meta_sectors.bytes().saturating_sub(PRIO_HEADER_BYTES) / PRIO_ENTRY_BYTES;
    u32::try_from(entries).unwrap_or(u32::MAX)
}

/// Byte offsets in the superblock of the fields that are checked here, for the messages.
mod field_offset {
    pub(super) const NBUCKETS: u64 = 184;
    pub(super) const BLOCK_SIZE: u64 = 192;
    pub(super) const BUCKET_SIZE: u64 = 194;
    pub(super) const FIRST_BUCKET: u64 = 204;
    pub(super) const KEYS: u64 = 206;
}

/// Checks the sizes of buckets and blocks.
fn check_sizes(bucket_sectors: Sectors, block_sectors: Sectors) -> Result<(), Corrupt> {
    use field_offset as at;
    if !block_sectors.0.is_power_of_two() || block_sectors > MAX_BLOCK_SECTORS {
        let expected = Value::Text("a power of two up to 8 sectors");
        return Err(bad("block_size", at::BLOCK_SIZE, expected, Value::Num(block_sectors.0)));
    }
    if !bucket_sectors.0.is_power_of_two() || bucket_sectors < MIN_BUCKET_SECTORS {
        let expected = Value::Text("a power of two of at least 8 sectors");
        return Err(bad("bucket_size", at::BUCKET_SIZE, expected, Value::Num(bucket_sectors.0)));
    }
    if bucket_sectors > MAX_BUCKET_SECTORS {
        let expected = Value::AtMost(MAX_BUCKET_SECTORS.0);
        return Err(bad("bucket_size", at::BUCKET_SIZE, expected, Value::Num(bucket_sectors.0)));
    }
    Ok(())
}

/// Checks the number of buckets. `bucket_sectors` was checked before.
fn check_count(nbuckets: u64, bucket_sectors: Sectors) -> Result<u32, Corrupt> {
    use field_offset as at;
    let refuse = |expected| Err(bad("nbuckets", at::NBUCKETS, expected, Value::Num(nbuckets)));
    if nbuckets < u64::from(MIN_BUCKETS) {
        return refuse(Value::AtLeast(u64::from(MIN_BUCKETS)));
    }
    let Ok(count) = u32::try_from(nbuckets) else {
        let most = Value::AtMost(u64::from(u32::MAX));
        let found = Value::Num(nbuckets);
        return Err(Corrupt::unsupported(Structure::CacheSuperblock, "nbuckets", at::NBUCKETS, most, found));
    };
    // A pointer has 43 bits for the sector, so no pointer reaches a later sector.
    let end = nbuckets.checked_mul(bucket_sectors.0);
    if end.is_none_or(|end| end > Ptr::OFFSET_MASK.saturating_add(1)) {
        return refuse(Value::Text("a cache of at most 2^43 sectors"));
    }
    Ok(count)
}

/// Checks the superblock area and the journal, which lie before the buckets that are allocated.
fn check_reserved(
    count: u32,
    bucket_sectors: Sectors,
    first_bucket: u16,
    njournal: u16,
) -> Result<(), Corrupt> {
    use field_offset as at;
    if u32::from(njournal) > MAX_JOURNAL_BUCKETS {
        let (most, found) = (Value::AtMost(u64::from(MAX_JOURNAL_BUCKETS)), Value::Num(u64::from(njournal)));
        return Err(bad("keys (journal buckets)", at::KEYS, most, found));
    }
    let dynamic = u32::from(first_bucket).saturating_add(u32::from(njournal));
    if dynamic > count {
        let (most, found) = (Value::AtMost(u64::from(count)), Value::Num(u64::from(dynamic)));
        return Err(bad("first_bucket + keys", at::FIRST_BUCKET, most, found));
    }
    let reserved = u64::from(first_bucket).saturating_mul(bucket_sectors.0);
    if reserved < 2 * PAGE_SECTORS {
        let expected = Value::Text("a bucket behind the superblock");
        return Err(bad("first_bucket", at::FIRST_BUCKET, expected, Value::Num(u64::from(first_bucket))));
    }
    Ok(())
}

fn bad(field: &'static str, at: u64, expected: Value, found: Value) -> Corrupt {
    Corrupt::new(Structure::CacheSuperblock, field, at, expected, found)
}

const _: () = assert!(SECTOR_BYTES == 512);

#[cfg(any(test, kani))]
mod model;
#[cfg(kani)]
mod proofs;
#[cfg(test)]
mod properties;

#[cfg(test)]
mod tests {
    use super::*;

    fn of(bucket_kib: u64) -> Geometry {
        Geometry::new(Sectors(bucket_kib * 2), Sectors(1), 1024, 4, 8).unwrap()
    }

    #[test]
    fn derived_sizes() {
        // bucket, meta, node (KiB), uuid slots, prios
        for (bucket, meta, node, slots, prios) in [
            (64, 64, 64, 512, 21832),
            (256, 256, 256, 2048, 87368),
            (512, 512, 256, 4096, 174_749),
            (1024, 1024, 256, 8192, 349_512),
            (4096, 4096, 1024, 32768, 1_398_088),
            (32768, 4096, 1024, 32768, 1_398_088),
        ] {
            let g = of(bucket);
            assert_eq!(g.meta_sectors, Sectors(meta * 2), "{bucket}");
            assert_eq!(g.node_sectors, Sectors(node * 2), "{bucket}");
            assert_eq!((g.nr_uuids, g.prios_per_bucket), (slots, prios), "{bucket}");
            assert_eq!(g.prio_buckets, 1, "{bucket}");
        }
        let small = Geometry::new(Sectors(8), Sectors(1), 16384, 3, 128).unwrap();
        assert_eq!((small.prios_per_bucket, small.prio_buckets), (1352, 13));
    }

    #[test]
    fn buckets_and_sectors() {
        let g = of(64);
        assert_eq!(g.bucket_of(Sector(127)), Some(BucketNr(0)));
        assert_eq!(g.bucket_of(Sector(128)), Some(BucketNr(1)));
        assert_eq!(g.bucket_of(Sector(128 * 1024)), None);
        assert_eq!(g.bucket_of(Sector(u64::MAX)), None);
        assert_eq!(g.bucket_start(BucketNr(3)), Sector(384));
        assert_eq!(g.bucket_start(BucketNr(u32::MAX)), Sector(u64::from(u32::MAX) * 128));
        assert_eq!(g.offset_in_bucket(Sector(130)), Sectors(2));
        assert_eq!(g.journal_bucket(7), Some(BucketNr(11)));
        assert_eq!(g.journal_bucket(8), None);
        assert_eq!(g.first_dynamic(), BucketNr(12));
    }

    #[test]
    fn pointers_outside_the_usable_area_name_no_bucket() {
        let g = of(64);
        let ptr = |dev, sector| Ptr::new(dev, Sector(sector), Gen(1));
        use crate::units::Gen;
        assert_eq!(g.ptr_bucket(ptr(0, 512 + 120), Sectors(8)), Some(BucketNr(4)));
        assert_eq!(g.ptr_bucket(ptr(0, 512 + 120), Sectors(9)), None, "crosses the bucket");
        assert_eq!(g.ptr_bucket(ptr(0, 500), Sectors(1)), None, "superblock area");
        assert_eq!(g.ptr_bucket(ptr(8, 512), Sectors(1)), None, "no such device");
        assert_eq!(g.ptr_bucket(ptr(4095, 512), Sectors(1)), None);
        assert_eq!(g.ptr_bucket(ptr(0, 128 * 1024), Sectors(1)), None, "behind the end");
    }

    #[test]
    fn prio_sets_of_other_machines() {
        let sizes = |kib| of(kib).prio_set_sizes().map(|s| s.0 / 2).collect::<Vec<_>>();
        assert_eq!(sizes(64), [64]);
        assert_eq!(sizes(4096), [4096]);
        assert_eq!(sizes(8192), [4096, 8192]);
        assert_eq!(sizes(65536), [4096, 8192, 16384]);
    }

    #[test]
    fn numbers_that_break_the_rules_are_refused() {
        let ok = |bucket, block, n, first, journal| {
            Geometry::new(Sectors(bucket), Sectors(block), n, first, journal)
        };
        assert!(ok(128, 1, 128, 1, 0).is_ok());
        for (bucket, block, n, first, journal) in [
            (0, 1, 1024, 1, 8),
            (96, 1, 1024, 1, 8),
            (4, 1, 1024, 4, 8),
            (1 << 32, 1, 1024, 1, 8),
            (128, 0, 1024, 1, 8),
            (128, 3, 1024, 1, 8),
            (128, 16, 1024, 1, 8),
            (128, 1, 127, 1, 8),
            (128, 1, 1024, 0, 8),
            (8, 1, 1024, 1, 8),
            (128, 1, 1024, 1, 257),
            (128, 1, 128, 100, 29),
            (1 << 31, 1, 1 << 20, 1, 8),
        ] {
            let e = ok(bucket, block, n, first, journal).unwrap_err();
            assert!(!e.is_unsupported(), "{e}");
        }
        let e = ok(128, 1, 1 << 32, 1, 8).unwrap_err();
        assert!(e.is_unsupported());
        assert_eq!(
            e.to_string(),
            "cache superblock, nbuckets (at byte 184): not supported: expected at most 4294967295, \
             found 4294967296"
        );
    }
}
