//! Journal entries: one entry, and the run of entries inside one journal bucket.
//!
//! Owns [`Jset`], how it is read and written, and the scan of a bucket. [`crate::replay`] decides which
//! entries count after a crash. The writer of the journal owns the ring of buckets and decides when a
//! bucket is reused.
//!
//! An entry holds the state of the set that nothing else points to (root, UUID table, prio chain) and
//! the leaf keys inserted since the entry before it. *Invariant of a scan:* it ends at the first position
//! that fails magic, size or checksum, because entries behind that position may be older.

use std::mem::{offset_of, size_of};

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::bytes::{as_u64, pad_to_block};
use crate::checksum::crc64;
use crate::error::{Corrupt, Structure, Value};
use crate::geometry::Geometry;
use crate::key::{Bkey, Keys, WORD_BYTES};
use crate::key_buffer::KeyBuffer;
use crate::magic::SetMagic;
use crate::units::{BucketNr, JournalSeq, Sector, Sectors};

/// Most bytes of an entry that this code writes, padding included: the limit of a kernel with pages of 4 KiB.
pub const MAX_JSET_BYTES: usize = 32768;
/// Most bytes of an entry that is read, padding included: the limit of a kernel with pages of 64 KiB.
pub const MAX_FOREIGN_JSET_BYTES: usize = 512 << 10;
/// Bytes before the keys.
pub const JSET_HEADER_BYTES: usize = 240;
/// Most key words of an entry that this code writes.
pub const MAX_JSET_WORDS: usize = (MAX_JSET_BYTES - JSET_HEADER_BYTES) / WORD_BYTES;
/// Maximum level of the root of a btree.
///
/// A tree that covers the largest possible cache with two children per node has 43 levels, and no writer makes
/// nodes that small. The limit keeps paths short.
pub const MAX_BTREE_LEVEL: u16 = 63;
/// Version of the entries that this code writes. With version 0 the UUID table has shorter slots.
pub const JSET_VERSION: u32 = 1;

/// Header of an entry as it lies on the device.
#[derive(Clone, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawJset {
    csum: U64,
    magic: U64,
    seq: U64,
    version: U32,
    keys: U32,
    last_seq: U64,
    uuid_bucket: [u8; 64],
    btree_root: [u8; 64],
    btree_level: U16,
    pad: [u8; 6],
    prio_bucket: [U64; 8],
}

const _: () = {
    assert!(size_of::<RawJset>() == JSET_HEADER_BYTES);
    assert!(align_of::<RawJset>() == 1);
    assert!(offset_of!(RawJset, magic) == 8);
    assert!(offset_of!(RawJset, seq) == 16);
    assert!(offset_of!(RawJset, version) == 24);
    assert!(offset_of!(RawJset, keys) == 28);
    assert!(offset_of!(RawJset, last_seq) == 32);
    assert!(offset_of!(RawJset, uuid_bucket) == 40);
    assert!(offset_of!(RawJset, btree_root) == 104);
    assert!(offset_of!(RawJset, btree_level) == 168);
    assert!(offset_of!(RawJset, prio_bucket) == 176);
};

/// The roots in a journal entry: root node, UUID table and prio chain.
///
/// Only the roots of the newest entry count.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct JsetRoots {
    /// Key of the UUID table.
    pub uuid_bucket: Bkey,
    /// Key of the root node.
    pub btree_root: Bkey,
    /// Level of the root; 0 is a leaf.
    pub btree_level: u16,
    /// Bucket number of the first prio set, per cache device.
    pub prio_bucket: [u64; 8],
}

/// A journal entry.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Jset {
    /// Number of the entry.
    pub seq: JournalSeq,
    /// Oldest entry that may hold keys not yet in the btree on disk.
    pub last_seq: JournalSeq,
    /// Version of the entry: 1, or 0 if the UUID table has the old, shorter slots.
    pub version: u32,
    /// Key of the UUID table.
    pub uuid_bucket: Bkey,
    /// Key of the root node.
    pub btree_root: Bkey,
    /// Level of the root; 0 is a leaf.
    pub btree_level: u16,
    /// Bucket number of the first prio set, per cache device.
    pub prio_bucket: [u64; 8],
    /// Leaf keys, in insertion order.
    pub keys: Vec<Bkey>,
}

impl Jset {
    /// The entry's roots.
    pub fn roots(&self) -> JsetRoots {
        JsetRoots {
            uuid_bucket: self.uuid_bucket,
            btree_root: self.btree_root,
            btree_level: self.btree_level,
            prio_bucket: self.prio_bucket,
        }
    }

    /// Checks that the roots can be followed.
    ///
    /// Both keys must be clean, have a size, and point to the start of a bucket behind the journal. The
    /// root's key must be at the end of the key space. The prio chain's first bucket must lie behind the
    /// journal.
    ///
    /// # Errors
    /// The first rule that is broken.
    pub fn check_roots(&self, geometry: &Geometry, nr_this_dev: u16) -> Result<(), Corrupt> {
        let uuid_at = offset_of!(RawJset, uuid_bucket);
        let root_at = offset_of!(RawJset, btree_root);
        check_root_key("uuid_bucket", uuid_at, &self.uuid_bucket, geometry)?;
        check_root_key("btree_root", root_at, &self.btree_root, geometry)?;
        if !self.btree_root.is_max_position() {
            return Err(bad(
                "btree_root offset",
                root_at,
                Value::Num(Bkey::MAX_OFFSET.0),
                Value::Num(self.btree_root.offset().0),
            ));
        }
        let prio = self.prio_bucket.get(usize::from(nr_this_dev)).copied().unwrap_or(0);
        if prio < u64::from(geometry.first_dynamic().0) || prio >= u64::from(geometry.nbuckets) {
            return Err(bad(
                "prio_bucket",
                offset_of!(RawJset, prio_bucket),
                dynamic_buckets(geometry),
                Value::Num(prio),
            ));
        }
        Ok(())
    }

    /// Checks that the level of the root is at most [`MAX_BTREE_LEVEL`].
    ///
    /// # Errors
    /// If the level is higher.
    pub fn check_level(&self) -> Result<(), Corrupt> {
        if self.btree_level <= MAX_BTREE_LEVEL {
            return Ok(());
        }
        let (most, found) = (u64::from(MAX_BTREE_LEVEL), u64::from(self.btree_level));
        Err(bad(
            "level of the root",
            offset_of!(RawJset, btree_level),
            Value::Range(0, most),
            Value::Num(found),
        ))
    }

    /// Checks that each key has a size, begins at sector 0 or later, and points into one usable bucket.
    ///
    /// A key without a pointer needs no bucket. A usable bucket lies behind the superblock area.
    ///
    /// # Errors
    /// The first rule that is broken, with the key's place in the entry.
    pub fn check_keys(&self, geometry: &Geometry) -> Result<(), Corrupt> {
        let mut at = JSET_HEADER_BYTES;
        for key in &self.keys {
            if key.size() == Sectors::ZERO || key.start().is_none() {
                let most = key.offset().0;
                let expected = Value::Range(1, most);
                return Err(bad("key size", at, expected, Value::Num(key.size().0)));
            }
            if let Some(ptr) = key.pointer()
                && geometry.ptr_bucket(ptr, key.size()).is_none()
            {
                let expected = Value::Text("a range inside one usable bucket");
                return Err(bad("key pointer", at, expected, Value::Hex(ptr.0)));
            }
            at = at.saturating_add(key.len_bytes());
        }
        Ok(())
    }
}

fn check_root_key(field: &'static str, at: usize, key: &Bkey, geometry: &Geometry) -> Result<(), Corrupt> {
    let Some(ptr) = key.pointer().filter(|_| key.size() > Sectors::ZERO && !key.dirty()) else {
        return Err(bad(field, at, Value::Text("a clean key with size and pointer"), Value::Hex(key.high)));
    };
    let bucket = geometry.ptr_bucket(ptr, key.size()).filter(|&b| b >= geometry.first_dynamic());
    if bucket.is_none_or(|b| geometry.bucket_start(b) != ptr.offset()) {
        return Err(bad(
            field,
            at,
            Value::Text("a pointer to the start of an allocated bucket"),
            Value::Hex(ptr.0),
        ));
    }
    Ok(())
}

fn dynamic_buckets(geometry: &Geometry) -> Value {
    let last = geometry.nbuckets.saturating_sub(1);
    Value::Range(u64::from(geometry.first_dynamic().0), u64::from(last))
}

fn bad(field: &'static str, at: usize, expected: Value, found: Value) -> Corrupt {
    Corrupt::new(Structure::Jset, field, as_u64(at), expected, found)
}

/// An entry whose magic, size and checksum are right and whose keys are not yet decoded.
struct Frame<'a> {
    header: &'a RawJset,
    keys: &'a [u8],
    padded: usize,
}

impl<'a> Frame<'a> {
    fn find(bytes: &'a [u8], set_magic: SetMagic, block_sectors: Sectors) -> Result<Frame<'a>, Corrupt> {
        let Ok((header, rest)) = RawJset::ref_from_prefix(bytes) else {
            return Err(bad(
                "length",
                0,
                Value::AtLeast(as_u64(JSET_HEADER_BYTES)),
                Value::Num(as_u64(bytes.len())),
            ));
        };
        let magic = header.magic.get();
        if magic != set_magic.jset() {
            let at = offset_of!(RawJset, magic);
            return Err(bad("magic", at, Value::Hex(set_magic.jset()), Value::Hex(magic)));
        }
        let room = MAX_FOREIGN_JSET_BYTES.min(bytes.len());
        let words = header.keys.get();
        let size = usize::try_from(words)
            .ok()
            .and_then(|words| words.checked_mul(WORD_BYTES)?.checked_add(JSET_HEADER_BYTES))
            .and_then(|len| Some((len, pad_to_block(len, block_sectors)?)))
            .filter(|&(len, padded)| len <= MAX_FOREIGN_JSET_BYTES && padded <= bytes.len());
        let Some((len, padded)) = size else {
            let most = room.saturating_sub(JSET_HEADER_BYTES) / WORD_BYTES;
            return Err(bad(
                "keys (words)",
                offset_of!(RawJset, keys),
                Value::AtMost(as_u64(most)),
                Value::Num(u64::from(words)),
            ));
        };
        let csum = crc64(bytes.get(8..len).unwrap_or_default());
        if csum != header.csum.get() {
            return Err(bad("checksum", 0, Value::Hex(csum), Value::Hex(header.csum.get())));
        }
        let keys = rest.get(..len.saturating_sub(JSET_HEADER_BYTES)).unwrap_or_default();
        Ok(Frame { header, keys, padded })
    }

    fn decode(&self) -> Result<Jset, Corrupt> {
        let h = self.header;
        let version = h.version.get();
        if version > JSET_VERSION {
            return Err(Corrupt::unsupported(
                Structure::Jset,
                "version",
                as_u64(offset_of!(RawJset, version)),
                Value::AtMost(u64::from(JSET_VERSION)),
                Value::Num(u64::from(version)),
            ));
        }
        let uuid_at = as_u64(offset_of!(RawJset, uuid_bucket));
        let root_at = as_u64(offset_of!(RawJset, btree_root));
        Ok(Jset {
            seq: JournalSeq(h.seq.get()),
            last_seq: JournalSeq(h.last_seq.get()),
            version,
            uuid_bucket: Bkey::decode(&h.uuid_bucket, Structure::Jset, uuid_at)?,
            btree_root: Bkey::decode(&h.btree_root, Structure::Jset, root_at)?,
            btree_level: h.btree_level.get(),
            prio_bucket: h.prio_bucket.map(U64::get),
            keys: Keys::inside(self.keys, Structure::Jset, as_u64(JSET_HEADER_BYTES))
                .collect::<Result<_, _>>()?,
        })
    }
}

/// Reads the entry at the front of `bytes` and returns it with its padded length in bytes.
///
/// `bytes` reach to the end of the journal bucket. The next entry begins behind the padded length.
///
/// # Errors
/// If magic, size or checksum are wrong, there is no entry. If they are right and the contents cannot be
/// decoded, the error is of the family `Unsupported`, or says that the last key reaches past the end of
/// the key list.
pub fn parse_entry(
    bytes: &[u8],
    set_magic: SetMagic,
    block_sectors: Sectors,
) -> Result<(Jset, usize), Corrupt> {
    let frame = Frame::find(bytes, set_magic, block_sectors)?;
    Ok((frame.decode()?, frame.padded))
}

/// Why a scan of a journal bucket ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ScanStop {
    /// The bucket is full of entries.
    EndOfBucket,
    /// The bytes that follow are no entry, for this reason. This is normal behind the last entry; the scan
    /// cannot distinguish it from an entry that was torn or damaged later.
    NoEntry(Corrupt),
}

/// The entries of one journal bucket.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BucketScan {
    /// Entries with their byte offsets in the bucket, in ascending order of offset.
    pub entries: Vec<(usize, Jset)>,
    /// Byte offset at which the scan ended.
    pub stopped_at: usize,
    /// Why the scan ended there.
    pub why: ScanStop,
}

impl BucketScan {
    /// The highest sequence number in the bucket; `None` if the bucket has no entry.
    ///
    /// The bucket may be reused once the oldest needed entry is newer than this.
    pub fn max_seq(&self) -> Option<JournalSeq> {
        self.entries.iter().map(|(_, jset)| jset.seq).max()
    }
}

/// Reads the entries of a journal bucket. `bytes` are the whole bucket.
///
/// # Errors
/// If magic, size and checksum of an entry are right and its contents cannot be decoded. Such an entry is
/// not torn, so ending the scan there would silently drop writes.
pub fn parse_bucket(
    bytes: &[u8],
    set_magic: SetMagic,
    block_sectors: Sectors,
) -> Result<BucketScan, Corrupt> {
    let mut scan = BucketScan { entries: Vec::new(), stopped_at: 0, why: ScanStop::EndOfBucket };
    loop {
        let at = scan.stopped_at;
        let rest = bytes.get(at..).unwrap_or_default();
        if rest.is_empty() {
            return Ok(scan);
        }
        match Frame::find(rest, set_magic, block_sectors) {
            Ok(frame) => {
                let jset = frame.decode().map_err(|e| e.moved_by(as_u64(at)))?;
                scan.entries.push((at, jset));
                scan.stopped_at = at.saturating_add(frame.padded);
            }
            Err(e) => {
                scan.why = ScanStop::NoEntry(e.moved_by(as_u64(at)));
                return Ok(scan);
            }
        }
    }
}

/// Builds an entry in a buffer of the caller, key by key, without allocating.
///
/// The buffer may be borrowed (`&mut [u8]`) or owned; [`JsetBuilder::into_inner`] returns it. Its
/// length and [`MAX_JSET_BYTES`] limit the entry.
#[derive(Debug)]
pub struct JsetBuilder<B> {
    keys: KeyBuffer<B>,
}

impl<B: AsMut<[u8]>> JsetBuilder<B> {
    /// Begins an entry without keys in `buf`.
    ///
    /// # Panics
    /// If the buffer cannot hold an entry without keys, padded to whole blocks.
    pub fn begin(buf: B, block_sectors: Sectors) -> JsetBuilder<B> {
        let keys = KeyBuffer::begin(buf, MAX_JSET_BYTES, JSET_HEADER_BYTES, block_sectors, "journal entry");
        JsetBuilder { keys }
    }

    /// Removes all keys from the entry.
    pub fn clear(&mut self) {
        self.keys.clear();
    }

    /// Appends a key; returns false and changes nothing if there is no room.
    #[inline]
    #[must_use]
    pub fn push_key(&mut self, key: &Bkey) -> bool {
        self.keys.push(key)
    }

    /// True if a key with a pointer fits.
    pub fn has_room(&self) -> bool {
        self.keys.has_room()
    }

    /// Words of keys so far.
    pub fn words(&self) -> usize {
        self.keys.words()
    }

    /// Length in bytes that [`JsetBuilder::finish`] would return now.
    pub fn padded_bytes(&self) -> usize {
        self.keys.padded_bytes()
    }

    /// Writes header, padding and checksum, and returns the padded length in bytes.
    ///
    /// The caller writes that many bytes of the buffer to the journal. The caller may then append more keys
    /// and finish the entry again.
    pub fn finish(
        &mut self,
        set_magic: SetMagic,
        seq: JournalSeq,
        last_seq: JournalSeq,
        roots: &JsetRoots,
    ) -> usize {
        let mut header = RawJset::new_zeroed();
        header.magic = set_magic.jset().into();
        header.seq = seq.0.into();
        header.version = JSET_VERSION.into();
        header.keys = u32::try_from(self.words()).unwrap_or(u32::MAX).into();
        header.last_seq = last_seq.0.into();
        roots.uuid_bucket.encode_to(&mut header.uuid_bucket);
        roots.btree_root.encode_to(&mut header.btree_root);
        header.btree_level = roots.btree_level.into();
        header.prio_bucket = roots.prio_bucket.map(U64::new);
        self.keys.finish(header.as_bytes(), crc64)
    }

    /// Returns the buffer.
    pub fn into_inner(self) -> B {
        self.keys.into_inner()
    }
}

/// Number and first sector of each journal bucket of a device, in ring order.
pub fn ring(geometry: &Geometry) -> impl Iterator<Item = (BucketNr, Sector)> + '_ {
    (0..geometry.njournal)
        .filter_map(|i| geometry.journal_bucket(i))
        .map(|nr| (nr, geometry.bucket_start(nr)))
}
