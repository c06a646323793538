//! Prio sets and the UUID table.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

mod common;

use common::set_magic;
use format::checksum::crc64;
use format::mirror::{MOST_UNSETTLED, UNSETTLED_BYTES, UnsettledList, UnsettledRange};
use format::superblock::label_bytes;
use format::uuid_table::{SLOT_PADDING_BYTES, check_uuid_table, encode_uuid_table, parse_uuid_table, used};
use format::{
    BucketPrio, CopyNr, Gen, INVALID_UUID, Inode, PrioHeader, RegistrationNr, Sector, Sectors, SetMagic,
    SlotRole, Uuid, UuidEntry, encode_prio_set, parse_prio_set,
};

fn prio_set() -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    let entries = [BucketPrio { prio: 65535, generation: Gen(7) }; 1000];
    encode_prio_set(&mut bytes, set_magic(), PrioHeader { seq: 3, next_bucket: 9 }, &entries);
    bytes
}

#[test]
fn prio_sets_are_refused_for_the_right_reason() {
    let good = prio_set();
    let mut table = vec![BucketPrio::default(); 1000];
    let mut refused = |bytes: &[u8], magic, len| {
        table.fill(BucketPrio { prio: 1, generation: Gen(1) });
        table.resize(len, BucketPrio { prio: 1, generation: Gen(1) });
        let e = parse_prio_set(bytes, magic, &mut table).unwrap_err();
        assert!(table.iter().all(|b| b.prio == 1), "nothing was stored");
        e
    };
    assert_eq!(refused(&good, SetMagic(1), 1000).field, "magic");
    assert_eq!(refused(&good[..39], set_magic(), 0).field, "length");
    assert_eq!(refused(&good[..2048], set_magic(), 10).field, "checksum", "half a set");
    assert_eq!(refused(&good, set_magic(), 1353).field, "entries");
    let mut tail = good.clone();
    tail[4095] ^= 1;
    assert_eq!(refused(&tail, set_magic(), 1).field, "checksum", "the unused tail is covered");
    let mut version = good.clone();
    version[24] = 1;
    let csum = crc64(&version[8..]);
    version[..8].copy_from_slice(&csum.to_le_bytes());
    assert!(refused(&version, set_magic(), 1).is_unsupported());
    table.resize(1000, BucketPrio::default());
    let header = parse_prio_set(&good, set_magic(), &mut table).unwrap();
    assert_eq!(header, PrioHeader { seq: 3, next_bucket: 9 });
    assert_eq!(table[999], BucketPrio { prio: 65535, generation: Gen(7) });
}

#[test]
#[should_panic(expected = "do not fit into a prio set")]
fn too_many_prios_are_a_bug() {
    let entries = [BucketPrio::default(); 1353];
    encode_prio_set(&mut [0; 4096], set_magic(), PrioHeader::default(), &entries);
}

#[test]
fn the_life_of_a_uuid_slot() {
    let label = label_bytes("vol").unwrap();
    let mut slot = UuidEntry::volume(Uuid([7; 16]), label, Sectors(8192), 1000);
    assert!(slot.is_live() && slot.is_flash_only() && !slot.is_free());
    assert_eq!((slot.label(), slot.first_reg, slot.last_reg), ("vol".into(), 1000, 1000));
    slot.invalidate(2000);
    assert!(slot.is_invalidated() && !slot.is_live() && !slot.is_free());
    assert_eq!((slot.uuid, slot.invalidated, slot.is_flash_only()), (INVALID_UUID, 2000, false));
    assert_eq!(INVALID_UUID.to_string(), "a03ef8ed-3ee1-b878-c850-fc5ecb16cd99");
    let backing = UuidEntry::backing(Uuid([8; 16]), label, 1);
    assert!(backing.is_live() && !backing.is_flash_only());
    assert!(UuidEntry::FREE.is_free() && !UuidEntry::FREE.is_live());
    assert_eq!(UuidEntry::FREE.to_bytes(), [0; 128]);
}

#[test]
fn a_slot_keeps_the_numbers_of_two_registrations() {
    let mut slot = UuidEntry::backing(Uuid([8; 16]), label_bytes("disk").unwrap(), 1);
    assert_eq!(slot.registrations(), [None, None]);
    let numbers = [1, 2].map(RegistrationNr::from_random);
    slot.register(numbers[0], None);
    assert_eq!(slot.registrations(), [Some(numbers[0]), None]);
    slot.register(numbers[1], Some(numbers[0]));
    let bytes = slot.to_bytes();
    assert_eq!(bytes[72..80], [2, 0, 0, 0, 0, 0, 0, 0x80]);
    assert_eq!(bytes[80..88], [1, 0, 0, 0, 0, 0, 0, 0x80]);
    assert_eq!(bytes[88..96], [!3, 255, 255, 255, 255, 255, 255, 255]);
    let mut again = UuidEntry::from_bytes(&bytes);
    assert_eq!(again.registrations(), [Some(numbers[1]), Some(numbers[0])]);
    // Whatever else is in the padding is no number.
    for byte in 0..24 {
        let mut damaged = again;
        damaged.reserved[byte] ^= 1;
        assert_eq!(damaged.registrations(), [None, None], "byte {byte}");
    }
    again.reserved[..24].fill(0);
    assert_eq!(again.registrations(), [None, None]);
}

/// Numbers of registrations, padding and invalidation leave each other alone.
#[test]
fn a_slot_preserves_its_padding() {
    let mut slot = UuidEntry::backing(Uuid([8; 16]), label_bytes("disk").unwrap(), 1);
    assert_eq!(slot.padding(), [0; SLOT_PADDING_BYTES]);
    let number = RegistrationNr::from_random(1);
    slot.register(number, None);
    let padding = std::array::from_fn(|i| i as u8 + 1);
    slot.set_padding(padding);
    assert_eq!(slot.registrations(), [Some(number), None]);
    let next = RegistrationNr::from_random(2);
    slot.register(next, Some(number));
    slot.invalidate(2);
    let bytes = slot.to_bytes();
    assert_eq!(bytes[96..128], padding);
    let again = UuidEntry::from_bytes(&bytes);
    assert_eq!((again.padding(), again.registrations()), (padding, [Some(next), Some(number)]));
    // The next device in the slot does not inherit the padding.
    assert_eq!(UuidEntry::backing(Uuid([9; 16]), again.label, 3).padding(), [0; SLOT_PADDING_BYTES]);
}

/// A kernel gives the padding of a free slot to another device, and any byte may be damaged: then there is no role.
#[test]
fn the_role_of_a_slot_counts_only_for_its_device() {
    let (one, other) = (Uuid([8; 16]), Uuid([9; 16]));
    for role in [
        SlotRole::Primary { secondary: Uuid([1; 16]), other_uses: 7 },
        SlotRole::Secondary { primary: Uuid([2; 16]), copy: CopyNr::from_random(3) },
    ] {
        let mut slot = UuidEntry::backing(one, label_bytes("disk").unwrap(), 1);
        assert_eq!(slot.role(), None);
        slot.register(RegistrationNr::from_random(1), None);
        slot.set_role(Some(role));
        let again = UuidEntry::from_bytes(&slot.to_bytes());
        assert_eq!((again.role(), again.registrations()), (Some(role), slot.registrations()));
        assert_eq!(UuidEntry { uuid: other, ..again }.role(), None);
        for byte in 96..128 {
            let mut bytes = slot.to_bytes();
            bytes[byte] ^= 1;
            assert_eq!(UuidEntry::from_bytes(&bytes).role(), None, "byte {byte}");
        }
        slot.set_role(None);
        assert_eq!((slot.role(), slot.padding()), (None, [0; SLOT_PADDING_BYTES]));
    }
}

/// A write that was torn by a power loss leaves the list before it.
#[test]
fn one_of_the_two_lists_of_unsettled_ranges_survives_a_torn_write() {
    let (set, other) = (Uuid([8; 16]), Uuid([9; 16]));
    let range =
        |n: u64| UnsettledRange { inode: Inode(n as u32), start: Sector(n * 8), end: Sector(n * 8 + 4) };
    let mut area = vec![0; 2 * UNSETTLED_BYTES];
    let mut before = UnsettledList::parse(&area, set);
    assert_eq!(before, UnsettledList::default());
    for (seq, count) in [(1, 3), (2, MOST_UNSETTLED as u64), (3, 0), (4, 1)] {
        let list = UnsettledList { seq, ranges: (0..count).map(range).collect() };
        let bytes = list.encode(set);
        let at = list.place().bytes() as usize;
        let whole = area.clone();
        for torn in [0, 8, 512, 1024, 1536] {
            area[at..at + torn].copy_from_slice(&bytes[..torn]);
            let found = UnsettledList::parse(&area, set);
            assert!(found == before || found == list, "{seq}, {torn}: {found:?}");
            area.clone_from(&whole);
        }
        area[at..at + UNSETTLED_BYTES].copy_from_slice(&bytes);
        assert_eq!(UnsettledList::parse(&area, set), list);
        assert_eq!(UnsettledList::parse(&area, other), UnsettledList::default());
        before = list;
    }
    let too_many = UnsettledList { seq: 5, ranges: (0..200).map(range).collect() };
    area[2048..].copy_from_slice(&too_many.encode(set));
    assert_eq!(UnsettledList::parse(&area, set).ranges, too_many.ranges[..MOST_UNSETTLED]);
    assert_eq!(UnsettledList::parse(&[], set), UnsettledList::default());
}

#[test]
fn tables_of_journal_version_zero_are_converted() {
    let mut bytes = vec![0; 4096];
    for slot in 0..2u8 {
        let old = &mut bytes[64 * usize::from(slot)..][..64];
        old[..16].fill(slot + 1);
        old[16..21].copy_from_slice(b"label");
        old[48] = 10 + slot;
        old[52] = 20 + slot;
        old[56] = 30 + slot;
        old[60..].fill(0xff);
    }
    let table = parse_uuid_table(&bytes, 0).unwrap();
    assert_eq!(table.len(), 32, "as many slots as in the new form");
    let mut expected = UuidEntry::backing(Uuid([2; 16]), label_bytes("label").unwrap(), 11);
    (expected.last_reg, expected.invalidated) = (21, 31);
    assert_eq!(table[1], expected, "padding is not taken for flags");
    assert_eq!(used(&table).map(|(inode, _)| inode).collect::<Vec<_>>(), [Inode(0), Inode(1)]);
    assert!(parse_uuid_table(&bytes[..100], 0).is_err());
    assert!(parse_uuid_table(&bytes[..100], 1).is_err());
    assert_eq!(parse_uuid_table(&[], 1).unwrap(), []);
    assert_eq!(parse_uuid_table(&[], 0).unwrap(), []);
}

#[test]
fn uuid_tables_are_checked() {
    let label = [0; 32];
    let a = UuidEntry::backing(Uuid([1; 16]), label, 1);
    let volume = UuidEntry::volume(Uuid([2; 16]), label, Sectors(8), 1);
    let mut gone = a;
    gone.invalidate(5);
    check_uuid_table(&[a, volume, gone, gone, UuidEntry::FREE, UuidEntry::FREE]).unwrap();
    let e = check_uuid_table(&[a, volume, a]).unwrap_err();
    assert_eq!((e.field, e.offset_bytes), ("uuid", 256));
    let e = check_uuid_table(&[a, UuidEntry { sectors: Sectors(0), ..volume }]).unwrap_err();
    assert_eq!((e.field, e.offset_bytes), ("sectors", 128 + 64));
}

#[test]
#[should_panic(expected = "slots do not fit")]
fn too_many_slots_are_a_bug() {
    encode_uuid_table(&mut [0; 256], &[UuidEntry::FREE; 3]);
}
