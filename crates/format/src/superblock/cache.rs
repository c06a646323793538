//! Checked superblock of a cache device.

use std::mem::offset_of;

use zerocopy::little_endian::U64;

use super::{
    LABEL_BYTES, RawSuperblock, SUPERBLOCK_BYTES, SUPERBLOCK_PADDING_BYTES, VERSION_CACHE,
    VERSION_CACHE_FEATURES, VERSION_CACHE_FRESH, label_text,
};
use crate::bytes::{as_u64, u64_at};
use crate::error::{Corrupt, Structure, Value};
use crate::footer::FooterKey;
use crate::geometry::{Geometry, MAX_BUCKET_SECTORS};
use crate::magic::SetMagic;
use crate::units::{BucketNr, Sectors, Uuid};

/// The first padding word of a set whose data has checksums.
const CHECKSUMS_MAGIC: u64 = u64::from_le_bytes(*b"ubcksum1");
/// The first word of the record of a group.
const GROUP_MAGIC: u64 = u64::from_le_bytes(*b"ubgroup1");
/// Where the record of a group begins in the tail, which begins at byte 2258 of the superblock: the record is the last 32 bytes.
const GROUP_AT: usize = 1806;
/// The first word of the padding that counts uses by other programs.
const USES_MAGIC: u32 = u32::from_le_bytes(*b"uses");

const SYNC_BIT: u64 = 1 << 0;
const DISCARD_BIT: u64 = 1 << 1;
const REPLACEMENT_SHIFT: u32 = 2;
const REPLACEMENT_MASK: u64 = 7 << REPLACEMENT_SHIFT;

/// Bucket size is `u16@194 + (u16@2256 << 16)`.
const INCOMPAT_OBSO_LARGE_BUCKET: u64 = 1 << 0;
/// Bucket size is `1 << u16@194`.
const INCOMPAT_LARGE_BUCKET: u64 = 1 << 1;
const INCOMPAT_KNOWN: u64 = INCOMPAT_OBSO_LARGE_BUCKET | INCOMPAT_LARGE_BUCKET;

/// Most cache devices a superblock may claim for its set.
const MAX_CACHES: u16 = 8;

/// The replacement policy: which bucket is evicted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Replacement {
    /// The least recently used bucket.
    #[default]
    Lru,
    /// The bucket that was allocated first.
    Fifo,
    /// A random bucket.
    Random,
}

impl Replacement {
    const fn bits(self) -> u64 {
        match self {
            Replacement::Lru => 0,
            Replacement::Fifo => 1,
            Replacement::Random => 2,
        }
    }
}

/// A cache superblock that keeps every rule of the format.
///
/// Setters change the copy in memory only; [`CacheSuper::encode`] gives the bytes to write. A writer
/// calls [`CacheSuper::prepare_write`] before each write.
#[derive(Clone, PartialEq, Eq)]
pub struct CacheSuper {
    raw: Box<RawSuperblock>,
    geometry: Geometry,
}

impl std::fmt::Debug for CacheSuper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CacheSuper")
            .field("version", &self.version())
            .field("uuid", &self.uuid())
            .field("set_uuid", &self.set_uuid())
            .field("flags", &self.raw.flags.get())
            .field("seq", &self.seq())
            .field("geometry", &self.geometry)
            .finish_non_exhaustive()
    }
}

/// How far scrubs of a set have come.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ScrubState {
    /// The time at which the last complete scrub ended, in Unix seconds; 0 if there was none.
    pub completed_unix_seconds: u64,
    /// The bucket with which an unfinished scrub continues; bucket 0 if there is none.
    pub next: BucketNr,
}

/// The properties of a new cache device.
#[derive(Clone, Debug)]
pub struct CacheFormat {
    /// UUID of the device; not zero.
    pub uuid: Uuid,
    /// UUID of the cache set; not zero. A new UUID makes every old structure on the device invalid.
    pub set_uuid: Uuid,
    /// Size of the device.
    pub device_sectors: Sectors,
    /// Block size: the device's logical block size or a multiple, at most 8 sectors.
    pub block_sectors: Sectors,
    /// Bucket size; a power of two.
    pub bucket_sectors: Sectors,
    /// Replacement policy.
    pub replacement: Replacement,
    /// True if buckets are discarded before reuse.
    pub discard: bool,
}

/// Checks a cache superblock; see [`RawSuperblock::check_cache`].
pub(super) fn check(
    raw: &RawSuperblock,
    device_sectors: Sectors,
    logical_block_bytes: u32,
) -> Result<CacheSuper, Corrupt> {
    let what = Structure::CacheSuperblock;
    raw.check_magic(what)?;
    let version = raw.version.get();
    if !matches!(version, VERSION_CACHE_FRESH | VERSION_CACHE | VERSION_CACHE_FEATURES) {
        return Err(raw.wrong_version(what, "0, 3 or 5"));
    }
    raw.check_common(what, logical_block_bytes)?;
    check_features(raw)?;
    let geometry = Geometry::new(
        bucket_sectors(raw)?,
        Sectors(u64::from(raw.block_size.get())),
        raw.nbuckets.get(),
        raw.first_bucket.get(),
        raw.keys.get(),
    )?;
    if geometry.used_sectors() > device_sectors {
        return Err(Corrupt::new(
            what,
            "nbuckets * bucket_size (sectors, limited by the size of the device)",
            as_u64(offset_of!(RawSuperblock, nbuckets)),
            Value::AtMost(device_sectors.0),
            Value::Num(geometry.used_sectors().0),
        ));
    }
    check_membership(raw)?;
    check_journal_buckets(raw)?;
    Ok(CacheSuper { raw: Box::new(raw.clone()), geometry })
}

/// Checks that the set has a UUID and that the device has a valid index in the set.
fn check_membership(raw: &RawSuperblock) -> Result<(), Corrupt> {
    let bad = |field, at: usize, expected, found| {
        Err(Corrupt::new(Structure::CacheSuperblock, field, as_u64(at), expected, found))
    };
    if Uuid(raw.set_uuid).is_nil() {
        return bad(
            "set_uuid",
            offset_of!(RawSuperblock, set_uuid),
            Value::Text("a UUID other than zero"),
            Value::Uuid(Uuid::NIL),
        );
    }
    let (in_set, this) = (raw.nr_in_set.get(), raw.nr_this_dev.get());
    if in_set == 0 || in_set > MAX_CACHES {
        return bad(
            "nr_in_set",
            offset_of!(RawSuperblock, nr_in_set),
            Value::Range(1, u64::from(MAX_CACHES)),
            Value::Num(u64::from(in_set)),
        );
    }
    if this >= in_set {
        return bad(
            "nr_this_dev",
            offset_of!(RawSuperblock, nr_this_dev),
            Value::AtMost(u64::from(in_set.saturating_sub(1))),
            Value::Num(u64::from(this)),
        );
    }
    Ok(())
}

/// Checks that the journal buckets are consecutive, starting with the first bucket.
fn check_journal_buckets(raw: &RawSuperblock) -> Result<(), Corrupt> {
    let first = u64::from(raw.first_bucket.get());
    for (i, d) in (0..).zip(raw.d.iter().take(usize::from(raw.keys.get()))) {
        let expected = first.saturating_add(i);
        if d.get() != expected {
            return Err(Corrupt::new(
                Structure::CacheSuperblock,
                "journal bucket",
                as_u64(offset_of!(RawSuperblock, d)).saturating_add(i.saturating_mul(8)),
                Value::Num(expected),
                Value::Num(d.get()),
            ));
        }
    }
    Ok(())
}

/// Checks that all feature bits are known. Only version 5 has feature words.
fn check_features(raw: &RawSuperblock) -> Result<(), Corrupt> {
    if raw.version.get() != VERSION_CACHE_FEATURES {
        return Ok(());
    }
    let words = [
        ("feature_compat", offset_of!(RawSuperblock, feature_compat), raw.feature_compat, 0),
        (
            "feature_incompat",
            offset_of!(RawSuperblock, feature_incompat),
            raw.feature_incompat,
            INCOMPAT_KNOWN,
        ),
        ("feature_ro_compat", offset_of!(RawSuperblock, feature_ro_compat), raw.feature_ro_compat, 0),
    ];
    for (field, at, word, known) in words {
        if word.get() & !known != 0 {
            return Err(Corrupt::unsupported(
                Structure::CacheSuperblock,
                field,
                as_u64(at),
                Value::Hex(word.get() & known),
                Value::Hex(word.get()),
            ));
        }
    }
    Ok(())
}

fn incompat(raw: &RawSuperblock) -> u64 {
    // Only version 5 has feature words.
    if raw.version.get() == VERSION_CACHE_FEATURES { raw.feature_incompat.get() } else { 0 }
}

fn bucket_sectors(raw: &RawSuperblock) -> Result<Sectors, Corrupt> {
    let field = u64::from(raw.bucket_size.get());
    let features = incompat(raw);
    if features & INCOMPAT_LARGE_BUCKET != 0 {
        let largest = MAX_BUCKET_SECTORS.0.trailing_zeros();
        return match 1u64.checked_shl(u32::from(raw.bucket_size.get())) {
            Some(size) if size <= MAX_BUCKET_SECTORS.0 => Ok(Sectors(size)),
            _ => Err(Corrupt::new(
                Structure::CacheSuperblock,
                "bucket_size (log2)",
                as_u64(offset_of!(RawSuperblock, bucket_size)),
                Value::AtMost(u64::from(largest)),
                Value::Num(field),
            )),
        };
    }
    if features & INCOMPAT_OBSO_LARGE_BUCKET != 0 {
        return Ok(Sectors(field | (u64::from(raw.obso_bucket_size_hi.get()) << 16)));
    }
    Ok(Sectors(field))
}

impl CacheSuper {
    /// Makes the superblock of a new cache device.
    ///
    /// The caller need not write the rest of the device. Formatters usually zero sectors 0–7 too.
    ///
    /// # Errors
    /// If the wanted sizes break a rule of the format; the error names the field.
    pub fn format(want: &CacheFormat) -> Result<CacheSuper, Corrupt> {
        let nbuckets = want.device_sectors.0.checked_div(want.bucket_sectors.0).unwrap_or(0);
        let small = u16::try_from(want.bucket_sectors.0);
        let version = if small.is_ok() { VERSION_CACHE_FRESH } else { VERSION_CACHE_FEATURES };
        let mut raw = RawSuperblock::blank(version);
        raw.uuid = want.uuid.0;
        raw.set_uuid = want.set_uuid.0;
        raw.nbuckets = nbuckets.into();
        raw.block_size = u16::try_from(want.block_sectors.0).unwrap_or(u16::MAX).into();
        match small {
            Ok(sectors) => raw.bucket_size = sectors.into(),
            Err(_) => {
                if !want.bucket_sectors.0.is_power_of_two() {
                    return Err(Corrupt::new(
                        Structure::CacheSuperblock,
                        "bucket_size",
                        as_u64(offset_of!(RawSuperblock, bucket_size)),
                        Value::Text("a power of two"),
                        Value::Num(want.bucket_sectors.0),
                    ));
                }
                raw.feature_incompat = INCOMPAT_LARGE_BUCKET.into();
                let log2 = want.bucket_sectors.0.trailing_zeros();
                raw.bucket_size = u16::try_from(log2).unwrap_or(u16::MAX).into();
            }
        }
        raw.nr_in_set = 1.into();
        let first = 23u64.checked_div(want.bucket_sectors.0).unwrap_or(0).saturating_add(1);
        raw.first_bucket = u16::try_from(first).unwrap_or(u16::MAX).into();
        let mut flags = want.replacement.bits() << REPLACEMENT_SHIFT;
        if want.discard {
            flags |= DISCARD_BIT;
        }
        raw.flags = flags.into();
        raw.csum = raw.computed_csum().unwrap_or(0).into();
        raw.check_cache(want.device_sectors, 0)
    }

    /// The 4096 bytes to write, with a newly computed checksum.
    ///
    /// Fields that this code does not know have the bytes that were read.
    pub fn encode(&self) -> [u8; SUPERBLOCK_BYTES] {
        self.raw.sealed()
    }

    /// Updates version, `seq` and time for a write by a running set.
    ///
    /// Version 0 becomes 3, `seq` is incremented (it wraps), and `last_mount` becomes the low 32 bits of
    /// `now_unix_seconds`. A write by another program before this one is counted; see [`CacheSuper::other_uses`].
    pub fn prepare_write(&mut self, now_unix_seconds: u64) {
        let other_uses = self.other_uses();
        if self.raw.version.get() == VERSION_CACHE_FRESH {
            self.raw.version = VERSION_CACHE.into();
        }
        self.raw.seq = self.seq().wrapping_add(1).into();
        self.raw.last_mount = ((now_unix_seconds & 0xffff_ffff) as u32).into();
        if let Some(uses) = other_uses {
            self.put_other_uses(uses);
        }
    }

    /// The number of uses of the device by programs that do not count them, such as a kernel; it wraps. `None` if no program has begun
    /// to count.
    ///
    /// Bytes 172 to 183 of the superblock, in the padding: a magic, the number, and the low half of `seq` at the last write
    /// that was counted.
    pub fn other_uses(&self) -> Option<u32> {
        let (first, second) = (u64_at(&self.raw.padding, 28)?, u64_at(&self.raw.padding, 32)?);
        let (magic, uses) = ((first & 0xffff_ffff) as u32, (first >> 32) as u32);
        let by_other = (second >> 32) as u32 != self.seq_low();
        (magic == USES_MAGIC).then_some(uses.wrapping_add(u32::from(by_other)))
    }

    /// Whether another program has written this superblock since the last write that was counted.
    pub fn was_used_by_other(&self) -> bool {
        let seq = u64_at(&self.raw.padding, 32).map_or(0, |word| (word >> 32) as u32);
        self.other_uses().is_some() && seq != self.seq_low()
    }

    /// From the next write on, [`CacheSuper::other_uses`] are counted.
    pub fn count_other_uses(&mut self) {
        if self.other_uses().is_none() {
            self.put_other_uses(0);
        }
    }

    fn put_other_uses(&mut self, uses: u32) {
        let words = [USES_MAGIC, uses, self.seq_low()];
        let bytes = words.into_iter().flat_map(u32::to_le_bytes);
        for (place, byte) in self.raw.padding.iter_mut().skip(28).zip(bytes) {
            *place = byte;
        }
    }

    fn seq_low(&self) -> u32 {
        (self.seq() & 0xffff_ffff) as u32
    }

    /// The group of the set: sets with the same group have the dirty data of their volumes twice. `None` if it is in none.
    ///
    /// The last 32 bytes of the superblock, which no checksum of the kernel covers: a magic, the UUID of the group, and a CRC-64 of both
    /// and of the UUID of the set (format section 17).
    pub fn group(&self) -> Option<Uuid> {
        let record = self.raw.tail.get(GROUP_AT..)?;
        let group = Uuid(record.get(8..24)?.try_into().ok()?);
        (record == self.group_record(group)).then_some(group)
    }

    /// Sets [`CacheSuper::group`]. Bytes that are no record stay as they are if there is to be none.
    pub fn set_group(&mut self, to: Option<Uuid>) {
        let record = match to {
            Some(group) => self.group_record(group),
            None if self.group().is_some() => [0; 32],
            None => return,
        };
        self.raw.tail.iter_mut().skip(GROUP_AT).zip(record).for_each(|(place, byte)| *place = byte);
    }

    fn group_record(&self, group: Uuid) -> [u8; 32] {
        let parts = [&GROUP_MAGIC.to_le_bytes()[..], &group.0];
        let mut covered: Vec<u8> = parts.concat();
        covered.extend(self.raw.set_uuid);
        let sum = crate::checksum::crc64(&covered).to_le_bytes();
        let mut record = [0; 32];
        let bytes = parts.concat().into_iter().chain(sum);
        record.iter_mut().zip(bytes).for_each(|(place, byte)| *place = byte);
        record
    }

    /// The checked sizes.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Version: 0 (never used), 3, or 5 (with feature words).
    pub fn version(&self) -> u64 {
        self.raw.version.get()
    }

    /// UUID of the device.
    pub fn uuid(&self) -> Uuid {
        Uuid(self.raw.uuid)
    }

    /// UUID of the cache set.
    pub fn set_uuid(&self) -> Uuid {
        Uuid(self.raw.set_uuid)
    }

    /// The label of the set, up to the first NUL. The kernel preserves these bytes and does not read them.
    pub fn label(&self) -> String {
        label_text(&self.raw.label)
    }

    /// Sets the label; [`super::label_bytes`] makes one from text.
    pub fn set_label(&mut self, label: [u8; LABEL_BYTES]) {
        self.raw.label = label;
    }

    /// The key of the footers if data has checksums ([`crate::footer`]): the first 16 bytes of the padding, a magic and
    /// the key.
    pub fn checksum_key(&self) -> Option<FooterKey> {
        let magic = u64_at(&self.raw.padding, 0)?;
        let key = u64_at(&self.raw.padding, 8)?;
        (magic == CHECKSUMS_MAGIC).then_some(FooterKey(key))
    }

    /// Sets [`CacheSuper::checksum_key`]. The key should be random; `None` switches checksums off.
    pub fn set_checksum_key(&mut self, key: Option<FooterKey>) {
        let words = key.map_or([0, 0], |key| [CHECKSUMS_MAGIC, key.0]);
        for (place, word) in self.raw.padding.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&u64::to_le_bytes(word));
        }
    }

    /// How far scrubs of the set have come: bytes 160 to 171 of the superblock, in the padding.
    pub fn scrub_state(&self) -> ScrubState {
        let next = u64_at(&self.raw.padding, 24).unwrap_or(0);
        ScrubState {
            completed_unix_seconds: u64_at(&self.raw.padding, 16).unwrap_or(0),
            next: BucketNr((next & 0xffff_ffff) as u32),
        }
    }

    /// Sets [`CacheSuper::scrub_state`].
    pub fn set_scrub_state(&mut self, to: ScrubState) {
        let completed = to.completed_unix_seconds.to_le_bytes();
        let bytes = completed.into_iter().chain(to.next.0.to_le_bytes());
        for (place, byte) in self.raw.padding.iter_mut().skip(16).zip(bytes) {
            *place = byte;
        }
    }

    /// The part of the set's UUID that the magics of its structures contain.
    pub fn set_magic(&self) -> SetMagic {
        SetMagic::of(self.set_uuid())
    }

    /// Number of writes so far.
    pub fn seq(&self) -> u64 {
        self.raw.seq.get()
    }

    /// Number of cache devices in the set. Sets of several were never usable; this crate supports only one.
    pub fn nr_in_set(&self) -> u16 {
        self.raw.nr_in_set.get()
    }

    /// Index of this device in the set, as in pointers and in `prio_bucket` of journal entries.
    pub fn nr_this_dev(&self) -> u16 {
        self.raw.nr_this_dev.get()
    }

    /// Unix seconds of the last write, low 32 bits.
    pub fn last_mount(&self) -> u32 {
        self.raw.last_mount.get()
    }

    /// The padding: bytes 144 to 183 of the superblock. The kernel preserves it and does not read it (format section 15).
    ///
    /// It is zero on a device that no newer version has used. The superblock's checksum covers it.
    pub fn padding(&self) -> [u8; SUPERBLOCK_PADDING_BYTES] {
        self.raw.padding
    }

    /// Sets [`CacheSuper::padding`].
    pub fn set_padding(&mut self, to: [u8; SUPERBLOCK_PADDING_BYTES]) {
        self.raw.padding = to;
    }

    /// The checksum as read, or as computed by formatting. Setters do not change it.
    pub fn stored_csum(&self) -> u64 {
        self.raw.csum.get()
    }

    /// The raw flag word.
    pub fn flags(&self) -> u64 {
        self.raw.flags.get()
    }

    /// True if journal, prios, UUIDs and btree are valid and must be used.
    ///
    /// False on a device that was never initialised; its contents mean nothing.
    pub fn sync(&self) -> bool {
        self.flags() & SYNC_BIT != 0
    }

    /// Sets [`CacheSuper::sync`].
    pub fn set_sync(&mut self, on: bool) {
        self.set_flag(SYNC_BIT, on);
    }

    /// True if buckets are discarded before reuse.
    ///
    /// Entries may then be missing at the start of the journal.
    pub fn discard(&self) -> bool {
        self.flags() & DISCARD_BIT != 0
    }

    /// Sets [`CacheSuper::discard`].
    pub fn set_discard(&mut self, on: bool) {
        self.set_flag(DISCARD_BIT, on);
    }

    /// Replacement policy; `None` for a value that is not defined.
    pub fn replacement(&self) -> Option<Replacement> {
        match (self.flags() & REPLACEMENT_MASK) >> REPLACEMENT_SHIFT {
            0 => Some(Replacement::Lru),
            1 => Some(Replacement::Fifo),
            2 => Some(Replacement::Random),
            _ => None,
        }
    }

    /// Sets [`CacheSuper::replacement`].
    pub fn set_replacement(&mut self, to: Replacement) {
        let flags = self.flags() & !REPLACEMENT_MASK;
        self.raw.flags = (flags | (to.bits() << REPLACEMENT_SHIFT)).into();
    }

    /// True if the bucket size uses the obsolete encoding.
    ///
    /// The kernel then makes every device of the set read-only.
    pub fn has_obsolete_large_bucket(&self) -> bool {
        incompat(&self.raw) & INCOMPAT_OBSO_LARGE_BUCKET != 0
    }

    /// True if the bucket size is stored as its logarithm.
    pub fn has_large_bucket(&self) -> bool {
        incompat(&self.raw) & INCOMPAT_LARGE_BUCKET != 0
    }

    /// Bucket numbers of the journal, in ring order.
    pub fn journal_buckets(&self) -> impl Iterator<Item = BucketNr> + use<> {
        let first = self.geometry.first_bucket.0;
        (0..self.geometry.njournal).map(move |i| BucketNr(first.saturating_add(i)))
    }

    /// Lays out a journal of `count` buckets from `first_bucket` on, as initialisation does.
    ///
    /// The usual number is [`CacheSuper::default_journal_buckets`].
    ///
    /// # Errors
    /// If `count` exceeds 256 or the number of buckets behind the superblock area.
    pub fn set_journal_buckets(&mut self, count: u16) -> Result<(), Corrupt> {
        let geometry = Geometry::new(
            self.geometry.bucket_sectors,
            self.geometry.block_sectors,
            u64::from(self.geometry.nbuckets),
            self.raw.first_bucket.get(),
            count,
        )?;
        let first = u64::from(self.raw.first_bucket.get());
        let used = usize::from(count);
        for (slot, nr) in self.raw.d.iter_mut().zip(first..) {
            *slot = nr.into();
        }
        for slot in self.raw.d.iter_mut().skip(used) {
            *slot = U64::ZERO;
        }
        self.raw.keys = count.into();
        self.geometry = geometry;
        Ok(())
    }

    /// Number of journal buckets that initialisation gives this device: nbuckets / 128, from 2 to 256.
    pub fn default_journal_buckets(&self) -> u16 {
        u16::try_from((self.geometry.nbuckets / 128).clamp(2, 256)).unwrap_or(256)
    }

    fn set_flag(&mut self, bit: u64, on: bool) {
        let flags = self.flags() & !bit;
        self.raw.flags = (if on { flags | bit } else { flags }).into();
    }
}
