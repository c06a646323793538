//! Where the dirty data of a backing device is in two sets (ubcache only, format section 17).
//!
//! Owns the bytes of a slot that name the other set, and the list of ranges in which two sets may differ after a crash. Must not know
//! when a copy is valid beyond one rule: the second set has a copy if its slot and the superblock of the backing device have the
//! same [`CopyNr`].

use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::bytes::as_u64;
use crate::checksum::crc64;
use crate::units::{CopyNr, Inode, Sector, Sectors, Uuid};

/// Bytes of a role in a slot.
pub const ROLE_BYTES: usize = 32;

/// The role of a set for the dirty data of the device in a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SlotRole {
    /// The backing superblock names this set, and another one may have a copy.
    Primary {
        /// UUID of the other set.
        secondary: Uuid,
        /// What [`crate::CacheSuper::other_uses`] of this set was when the copy was made.
        other_uses: u32,
    },
    /// This set may have a copy.
    Secondary {
        /// UUID of the set that has the data.
        primary: Uuid,
        /// The number of the copy.
        copy: CopyNr,
    },
}

/// A role as it lies in a slot.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawRole {
    /// UUID of the other set.
    other: [u8; 16],
    /// The number of the copy, or of the uses.
    number: U64,
    /// CRC-64 of the UUID of the device, the tag of the role, and the fields above. A kernel may give the padding of a slot to
    /// another device.
    check: U64,
}

const _: () = assert!(size_of::<RawRole>() == ROLE_BYTES);

const TAG_PRIMARY: &[u8; 8] = b"primary1";
const TAG_SECONDARY: &[u8; 8] = b"secondr1";

impl RawRole {
    fn new(tag: &[u8; 8], device: Uuid, other: Uuid, number: u64) -> RawRole {
        let role = RawRole { other: other.0, number: number.into(), check: 0.into() };
        RawRole { check: role.expected_check(tag, device).into(), ..role }
    }

    fn expected_check(&self, tag: &[u8; 8], device: Uuid) -> u64 {
        let number = self.number.get().to_le_bytes();
        crc64(&[&device.0[..], tag, &self.other, &number].concat())
    }
}

impl SlotRole {
    /// The role in the padding of the slot of a device; `None` if there is none.
    pub(crate) fn parse(padding: &[u8; ROLE_BYTES], device: Uuid) -> Option<SlotRole> {
        let raw: RawRole = zerocopy::transmute!(*padding);
        let (other, number) = (Uuid(raw.other), raw.number.get());
        if raw.check.get() == raw.expected_check(TAG_PRIMARY, device) {
            let other_uses = u32::try_from(number).ok()?;
            return Some(SlotRole::Primary { secondary: other, other_uses });
        }
        let is_secondary = raw.check.get() == raw.expected_check(TAG_SECONDARY, device);
        is_secondary.then_some(SlotRole::Secondary { primary: other, copy: CopyNr::from_word(number) })
    }

    /// The bytes for the padding of the slot of a device.
    pub(crate) fn encode(self, device: Uuid) -> [u8; ROLE_BYTES] {
        let raw = match self {
            SlotRole::Primary { secondary, other_uses } => {
                RawRole::new(TAG_PRIMARY, device, secondary, other_uses.into())
            }
            SlotRole::Secondary { primary, copy } => {
                RawRole::new(TAG_SECONDARY, device, primary, copy.to_word())
            }
        };
        zerocopy::transmute!(raw)
    }
}

/// The first sector of the list of unsettled ranges on a cache device: behind the superblock, where a kernel writes nothing.
pub const UNSETTLED_SECTOR: Sector = Sector(16);
/// Bytes of a copy of the list. Writes go to the two copies in turn, so that a torn write leaves the other one.
pub const UNSETTLED_BYTES: usize = 2048;
/// Most ranges of a list.
pub const MOST_UNSETTLED: usize = (UNSETTLED_BYTES - size_of::<RawHeader>()) / size_of::<RawRange>();

/// A range of a slot in which the two sets of a device may differ after a crash.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct UnsettledRange {
    /// The slot in this set.
    pub inode: Inode,
    /// The first position.
    pub start: Sector,
    /// The end.
    pub end: Sector,
}

/// A list of unsettled ranges as it lies on the device.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawHeader {
    /// CRC-64 of the other bytes of the copy.
    check: U64,
    magic: U64,
    set_uuid: [u8; 16],
    /// The copy with the larger number is the newer one.
    seq: U64,
    count: U64,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawRange {
    inode: U64,
    start: U64,
    end: U64,
}

const UNSETTLED_MAGIC: u64 = u64::from_le_bytes(*b"unsettl1");

/// A list of unsettled ranges, and its number.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct UnsettledList {
    /// Which of two lists is newer.
    pub seq: u64,
    /// The ranges.
    pub ranges: Vec<UnsettledRange>,
}

impl UnsettledList {
    /// The newer of the lists in the area of a set, which begins at [`UNSETTLED_SECTOR`] and has two copies.
    pub fn parse(area: &[u8], set_uuid: Uuid) -> UnsettledList {
        let copies = area.chunks_exact(UNSETTLED_BYTES).take(2);
        let lists = copies.filter_map(|copy| UnsettledList::parse_copy(copy, set_uuid));
        lists.max_by_key(|list| list.seq).unwrap_or_default()
    }

    fn parse_copy(copy: &[u8], set_uuid: Uuid) -> Option<UnsettledList> {
        let (header, ranges) = RawHeader::ref_from_prefix(copy).ok()?;
        let is_sound = header.magic.get() == UNSETTLED_MAGIC
            && Uuid(header.set_uuid) == set_uuid
            && header.check.get() == crc64(copy.get(8..)?);
        let count = usize::try_from(header.count.get()).ok().filter(|_| is_sound)?;
        let (ranges, _) = <[RawRange]>::ref_from_prefix_with_elems(ranges, count).ok()?;
        let range = |r: &RawRange| {
            let inode = Inode(u32::try_from(r.inode.get()).ok()?);
            Some(UnsettledRange { inode, start: Sector(r.start.get()), end: Sector(r.end.get()) })
        };
        Some(UnsettledList {
            seq: header.seq.get(),
            ranges: ranges.iter().map(range).collect::<Option<_>>()?,
        })
    }

    /// The place of the copy for this list, in sectors behind [`UNSETTLED_SECTOR`].
    pub fn place(&self) -> Sectors {
        if self.seq.is_multiple_of(2) {
            Sectors::ZERO
        } else {
            Sectors::from_bytes_floor(as_u64(UNSETTLED_BYTES))
        }
    }

    /// The bytes of a copy. Ranges behind the first [`MOST_UNSETTLED`] are left out.
    pub fn encode(&self, set_uuid: Uuid) -> [u8; UNSETTLED_BYTES] {
        let mut bytes = [0; UNSETTLED_BYTES];
        let ranges = self.ranges.iter().take(MOST_UNSETTLED);
        let header = RawHeader {
            check: 0.into(),
            magic: UNSETTLED_MAGIC.into(),
            set_uuid: set_uuid.0,
            seq: self.seq.into(),
            count: as_u64(ranges.len()).into(),
        };
        let raw = ranges.map(|r| RawRange {
            inode: u64::from(r.inode.0).into(),
            start: r.start.0.into(),
            end: r.end.0.into(),
        });
        let body: Vec<u8> = raw.flat_map(|r| r.as_bytes().to_vec()).collect();
        let parts = header.as_bytes().iter().chain(&body);
        bytes.iter_mut().zip(parts).for_each(|(to, from)| *to = *from);
        let check = crc64(bytes.get(8..).unwrap_or_default()).to_le_bytes();
        bytes.iter_mut().zip(check).for_each(|(to, from)| *to = from);
        bytes
    }
}
