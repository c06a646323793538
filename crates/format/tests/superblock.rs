//! Every rule for superblocks, broken one at a time; formatting; both encodings of large buckets.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

mod common;

use common::Image;
use format::checksum::crc64;
use format::superblock::{
    BackingFormat, BackingState, BackingSuper, CacheFormat, CacheMode, CacheSuper, Identity, RawSuperblock,
    Replacement, identify, label_bytes, label_text,
};
use format::{BucketNr, CopyNr, Corrupt, RegistrationNr, ScrubState, Sector, Sectors, Uuid};

const DEVICE: Sectors = Sectors(131_072);

fn cache_format() -> CacheFormat {
    CacheFormat {
        uuid: Uuid([1; 16]),
        set_uuid: Uuid([2; 16]),
        device_sectors: DEVICE,
        block_sectors: Sectors(1),
        bucket_sectors: Sectors(128),
        replacement: Replacement::Lru,
        discard: false,
    }
}

fn backing_format() -> BackingFormat {
    BackingFormat {
        uuid: Uuid([3; 16]),
        set_uuid: Uuid([2; 16]),
        device_sectors: DEVICE,
        block_sectors: Sectors(1),
        bucket_sectors: Sectors(128),
        data_offset: Sector(16),
        cache_mode: CacheMode::Writeback,
        label: label_bytes("label").unwrap(),
    }
}

/// Overwrites bytes and makes the checksum right again.
fn patched(bytes: &[u8; 4096], changes: &[(usize, &[u8])]) -> [u8; 4096] {
    let mut bytes = *bytes;
    for (at, new) in changes {
        bytes[*at..at + new.len()].copy_from_slice(new);
    }
    let keys = usize::from(u16::from_le_bytes([bytes[206], bytes[207]]));
    if keys <= 256 {
        let csum = crc64(&bytes[8..208 + 8 * keys]);
        bytes[..8].copy_from_slice(&csum.to_le_bytes());
    }
    bytes
}

fn check_cache(bytes: &[u8; 4096]) -> Result<CacheSuper, Corrupt> {
    RawSuperblock::from_prefix(bytes).unwrap().check_cache(DEVICE, 512)
}

fn check_backing(bytes: &[u8; 4096]) -> Result<BackingSuper, Corrupt> {
    RawSuperblock::from_prefix(bytes).unwrap().check_backing(DEVICE, 512)
}

/// A cache superblock with eight journal buckets from bucket 1 on.
fn cache_bytes() -> [u8; 4096] {
    let mut sb = CacheSuper::format(&cache_format()).unwrap();
    sb.set_journal_buckets(8).unwrap();
    sb.prepare_write(1_700_000_000);
    sb.encode()
}

#[test]
fn every_rule_of_cache_superblocks() {
    let good = cache_bytes();
    check_cache(&good).unwrap();
    let rules: &[(&str, usize, &[u8])] = &[
        ("magic", 24, &[0]),
        ("offset", 8, &[9]),
        ("uuid", 40, &[0; 16]),
        ("set_uuid", 56, &[0; 16]),
        ("keys (journal buckets)", 206, &[1, 1]),
        ("nbuckets", 184, &[127, 0]),
        ("nbuckets * bucket_size (sectors, limited by the size of the device)", 184, &[1, 4]),
        ("nbuckets", 184, &[0, 0, 0, 0, 0, 0, 0, 1]),
        ("block_size", 192, &[0, 0]),
        ("block_size", 192, &[3, 0]),
        ("block_size", 192, &[16, 0]),
        ("bucket_size", 194, &[0, 0]),
        ("bucket_size", 194, &[4, 0]),
        ("bucket_size", 194, &[96, 0]),
        ("nr_in_set", 196, &[0, 0]),
        ("nr_in_set", 196, &[9, 0]),
        ("nr_this_dev", 198, &[1, 0]),
        ("first_bucket", 204, &[0, 0]),
        ("first_bucket + keys", 204, &[0xff, 0x03]),
        ("journal bucket", 204, &[2, 0]),
        ("journal bucket", 208 + 24, &[5, 0, 0, 0, 0, 0, 0, 1]),
    ];
    for (field, at, new) in rules {
        let e = check_cache(&patched(&good, &[(*at, new)])).unwrap_err();
        assert_eq!(e.field, *field, "{e}");
    }
    let mut bytes = good;
    bytes[104] ^= 1;
    let e = check_cache(&bytes).unwrap_err();
    assert_eq!((e.field, e.offset_bytes), ("checksum", 0));
    // A device whose logical blocks are larger than the set's.
    let raw = RawSuperblock::from_prefix(&good).unwrap();
    assert_eq!(
        raw.check_cache(DEVICE, 4096).unwrap_err().to_string(),
        "cache superblock, block_size (at byte 192): expected at least 4096 bytes, the logical block of the device, found 512 bytes"
    );
    // A device that shrank.
    let e = raw.check_cache(Sectors(DEVICE.0 - 1), 512).unwrap_err();
    assert_eq!(
        e.to_string(),
        "cache superblock, nbuckets * bucket_size (sectors, limited by the size of the device) (at byte 184): expected at most 131071, \
         found 131072"
    );
    assert!(RawSuperblock::from_prefix(&good[..4095]).is_err());
}

#[test]
fn every_rule_of_backing_superblocks() {
    let offset = BackingFormat { data_offset: Sector(2048), ..backing_format() };
    let good = BackingSuper::format(&offset).unwrap().encode();
    check_backing(&good).unwrap();
    let rules: &[(&str, usize, &[u8])] = &[
        ("magic", 24, &[0]),
        ("offset", 8, &[9]),
        ("uuid", 40, &[0; 16]),
        ("keys (journal buckets)", 206, &[1, 1]),
        ("block_size", 192, &[0, 0]),
        ("block_size", 192, &[3, 0]),
        ("data_offset", 184, &[15, 0]),
        ("data_offset", 184, &131_072u64.to_le_bytes()),
        ("data_offset", 184, &[0xff; 8]),
    ];
    for (field, at, new) in rules {
        let e = check_backing(&patched(&good, &[(*at, new)])).unwrap_err();
        assert_eq!(e.field, *field, "{e}");
    }
    let raw = RawSuperblock::from_prefix(&good).unwrap();
    assert_eq!(raw.check_backing(DEVICE, 4096).unwrap_err().field, "block_size");
    // Blocks beyond a page are allowed here, a set UUID is not needed, and fields that kernels fill
    // from uninitialised memory do not matter.
    let odd: &[(usize, &[u8])] = &[
        (192, &[128, 0]),
        (56, &[0; 16]),
        (16, &[6]),
        (120, &[0xff; 24]),
        (194, &[0, 0]),
        (196, &[0xff; 4]),
        (204, &[0xff; 2]),
    ];
    check_backing(&patched(&good, odd)).unwrap();
}

#[test]
fn versions_say_which_kind_of_device_it_is() {
    let cache = cache_bytes();
    let backing = BackingSuper::format(&backing_format()).unwrap().encode();
    for version in 0..10u8 {
        let (c, b) =
            (patched(&cache, &[(16, &[version])]), patched(&backing, &[(16, &[version]), (184, &[16])]));
        let (kind, is_cache, is_backing) = match version {
            0 | 3 | 5 => (Identity::Cache, true, false),
            1 | 4 | 6 => (Identity::Backing, false, true),
            _ => (Identity::UnknownVersion(u64::from(version)), false, false),
        };
        assert_eq!(identify(&c), kind);
        assert_eq!(check_cache(&c).is_ok(), is_cache, "{version}");
        assert_eq!(check_backing(&b).is_ok(), is_backing, "{version}");
        if !is_cache {
            assert!(check_cache(&c).unwrap_err().is_unsupported());
        }
        if !is_backing {
            assert!(check_backing(&b).unwrap_err().is_unsupported());
        }
    }
    assert_eq!(identify(&[0; 4096]), Identity::NotBcache);
    assert_eq!(identify(&cache[..4095]), Identity::NotBcache);
    assert_eq!(identify(&patched(&cache, &[(23, &[1])])), Identity::UnknownVersion(3 | 1 << 56));
}

#[test]
fn version_one_has_its_data_at_sector_16_whatever_it_says() {
    let bytes = BackingSuper::format(&backing_format()).unwrap().encode();
    let sb = check_backing(&patched(&bytes, &[(184, &[1, 2, 3, 4, 5, 6, 7, 8])])).unwrap();
    assert_eq!((sb.version(), sb.data_offset(), sb.data_sectors().0), (1, Sector(16), DEVICE.0 - 16));
    let offset = BackingFormat { data_offset: Sector(2048), ..backing_format() };
    let sb = BackingSuper::format(&offset).unwrap();
    assert_eq!((sb.version(), sb.data_offset(), sb.data_sectors().0), (4, Sector(2048), DEVICE.0 - 2048));
}

#[test]
fn feature_bits_count_in_version_five_only() {
    let bytes = cache_bytes();
    for at in [120, 128, 136] {
        for bit in 0..64 {
            let word = (1u64 << bit).to_le_bytes();
            let old = check_cache(&patched(&bytes, &[(at, &word)])).unwrap();
            assert_eq!(old.geometry().bucket_sectors, Sectors(128));
            let new = check_cache(&patched(&bytes, &[(16, &[5]), (at, &word), (194, &[7, 0])]));
            // 7 is no bucket size, but 1 << 7 is.
            match (at, bit) {
                (128, 0) => assert_eq!(new.unwrap_err().field, "bucket_size"),
                (128, 1) => assert_eq!(new.unwrap().geometry().bucket_sectors, Sectors(128)),
                _ => assert!(new.unwrap_err().is_unsupported(), "{at} {bit}"),
            }
        }
    }
}

#[test]
fn both_encodings_of_large_buckets() {
    let device = Sectors(131_072 * 256);
    let want = CacheFormat { device_sectors: device, bucket_sectors: Sectors(131_072), ..cache_format() };
    let sb = CacheSuper::format(&want).unwrap();
    assert_eq!((sb.version(), sb.geometry().nbuckets), (5, 256));
    assert!(sb.has_large_bucket() && !sb.has_obsolete_large_bucket());
    assert_eq!(sb.geometry().bucket_sectors, Sectors(131_072));
    let bytes = sb.encode();
    assert_eq!(bytes[128..136], 2u64.to_le_bytes());
    assert_eq!(bytes[194..196], 17u16.to_le_bytes());

    // The same size the old way, its high half outside of the checksum.
    let old = patched(&bytes, &[(128, &[1]), (194, &[0, 0]), (2256, &[2, 0])]);
    let old = RawSuperblock::from_prefix(&old).unwrap().check_cache(device, 512).unwrap();
    assert_eq!(old.geometry(), sb.geometry());
    assert!(old.has_obsolete_large_bucket() && !old.has_large_bucket());
    // Both bits: the logarithm counts.
    let both = patched(&bytes, &[(128, &[3]), (2256, &[9, 0])]);
    let both = RawSuperblock::from_prefix(&both).unwrap().check_cache(device, 512).unwrap();
    assert_eq!(both.geometry(), sb.geometry());
    for log2 in [32u16, 63, 64, 65_535] {
        let bytes = patched(&bytes, &[(194, &log2.to_le_bytes())]);
        let e = RawSuperblock::from_prefix(&bytes).unwrap().check_cache(device, 512).unwrap_err();
        assert_eq!(e.field, "bucket_size (log2)");
    }
    // 32768 sectors still fit 16 bits.
    let fits = CacheFormat { bucket_sectors: Sectors(32768), ..want };
    assert_eq!(CacheSuper::format(&fits).unwrap().version(), 0);
}

#[test]
fn more_buckets_than_can_be_addressed_are_refused_by_name() {
    let bytes = patched(&cache_bytes(), &[(184, &(1u64 << 32).to_le_bytes())]);
    let raw = RawSuperblock::from_prefix(&bytes).unwrap();
    let e = raw.check_cache(Sectors(u64::MAX), 512).unwrap_err();
    assert!(e.is_unsupported() && e.field == "nbuckets", "{e}");
}

#[test]
fn formatting_writes_what_the_formatter_wrote() {
    let image = Image::cache("01-fresh");
    let raw = RawSuperblock::from_prefix(image.superblock()).unwrap();
    let theirs = raw.check_cache(image.sectors(), 512).unwrap();
    let ours = CacheSuper::format(&CacheFormat {
        uuid: theirs.uuid(),
        set_uuid: theirs.set_uuid(),
        device_sectors: image.sectors(),
        ..cache_format()
    });
    assert!(ours.unwrap().encode()[..] == *image.superblock());

    let image = Image::backing("01-fresh");
    let raw = RawSuperblock::from_prefix(image.superblock()).unwrap();
    let theirs = raw.check_backing(image.sectors(), 512).unwrap();
    let ours = BackingSuper::format(&BackingFormat {
        uuid: theirs.uuid(),
        set_uuid: theirs.set_uuid(),
        device_sectors: image.sectors(),
        label: [0; 32],
        ..backing_format()
    });
    assert!(ours.unwrap().encode()[..] == *image.superblock());
}

#[test]
fn formatting_refuses_what_a_reader_would() {
    let refused = |change: fn(&mut CacheFormat)| {
        let mut want = cache_format();
        change(&mut want);
        CacheSuper::format(&want).unwrap_err().field
    };
    assert_eq!(refused(|w| w.uuid = Uuid::NIL), "uuid");
    assert_eq!(refused(|w| w.set_uuid = Uuid::NIL), "set_uuid");
    assert_eq!(refused(|w| w.device_sectors = Sectors(128 * 127)), "nbuckets");
    assert_eq!(refused(|w| w.bucket_sectors = Sectors(0)), "bucket_size");
    assert_eq!(refused(|w| w.bucket_sectors = Sectors(100)), "bucket_size");
    assert_eq!(refused(|w| w.bucket_sectors = Sectors(100_000)), "bucket_size");
    assert_eq!(refused(|w| w.bucket_sectors = Sectors(1 << 40)), "bucket_size (log2)");
    assert_eq!(refused(|w| w.block_sectors = Sectors(16)), "block_size");
    assert_eq!(refused(|w| w.block_sectors = Sectors(1 << 20)), "block_size");
    let small = BackingFormat { data_offset: Sector(8), ..backing_format() };
    assert_eq!(BackingSuper::format(&small).unwrap_err().field, "data_offset");
}

#[test]
fn small_buckets_leave_room_for_the_superblock() {
    for (bucket, first) in [(8, 3), (16, 2), (32, 1), (128, 1)] {
        let want = CacheFormat { bucket_sectors: Sectors(bucket), ..cache_format() };
        let sb = CacheSuper::format(&want).unwrap();
        assert_eq!(sb.geometry().first_bucket, BucketNr(first), "{bucket}");
    }
}

#[test]
fn cache_flags_and_counters() {
    let mut sb = CacheSuper::format(&cache_format()).unwrap();
    assert_eq!((sb.sync(), sb.discard(), sb.replacement()), (false, false, Some(Replacement::Lru)));
    sb.set_sync(true);
    assert_eq!(sb.flags(), 1);
    sb.set_discard(true);
    assert_eq!(sb.flags(), 3);
    for (policy, flags) in [(Replacement::Fifo, 7), (Replacement::Random, 11), (Replacement::Lru, 3)] {
        sb.set_replacement(policy);
        assert_eq!((sb.replacement(), sb.flags()), (Some(policy), flags));
    }
    sb.set_discard(false);
    assert_eq!((sb.flags(), sb.sync()), (1, true));
    let undefined = patched(&sb.encode(), &[(104, &[0x1d])]);
    assert_eq!(check_cache(&undefined).unwrap().replacement(), None);

    assert_eq!(sb.default_journal_buckets(), 8);
    sb.set_journal_buckets(8).unwrap();
    assert_eq!(sb.journal_buckets().map(|b| b.0).collect::<Vec<_>>(), (1..9).collect::<Vec<_>>());
    sb.prepare_write(0x1_2345_6789);
    assert_eq!((sb.version(), sb.seq(), sb.last_mount()), (3, 1, 0x2345_6789));
    let again = check_cache(&sb.encode()).unwrap();
    assert_eq!(again.geometry(), sb.geometry());
    assert_eq!(again.geometry().njournal, 8);
    sb.set_journal_buckets(2).unwrap();
    assert_eq!(check_cache(&sb.encode()).unwrap().geometry().njournal, 2);
    assert_eq!(sb.encode()[208 + 16..2256], [0; 2256 - 224]);
    assert!(sb.set_journal_buckets(257).is_err());
    sb.set_journal_buckets(256).unwrap();
    assert_eq!(check_cache(&sb.encode()).unwrap().geometry().njournal, 256);
}

#[test]
fn backing_flags_label_and_set() {
    let mut sb = BackingSuper::format(&backing_format()).unwrap();
    for (mode, bits) in [
        (CacheMode::Writethrough, 0),
        (CacheMode::Writeback, 1),
        (CacheMode::Writearound, 2),
        (CacheMode::None, 3),
    ] {
        sb.set_cache_mode(mode);
        assert_eq!((sb.cache_mode(), sb.flags()), (Some(mode), bits), "{}", mode.name());
    }
    for (state, bits) in [
        (BackingState::Clean, 1u64),
        (BackingState::Dirty, 2),
        (BackingState::Stale, 3),
        (BackingState::None, 0),
    ] {
        sb.set_state(state);
        assert_eq!((sb.state(), sb.flags()), (state, bits << 61 | 3), "{}", state.name());
    }
    let undefined = patched(&sb.encode(), &[(104, &[15])]);
    assert_eq!(check_backing(&undefined).unwrap().cache_mode(), None);

    assert_eq!(sb.label(), "label");
    sb.set_label([b'x'; 32]);
    sb.set_set_uuid(Uuid([9; 16]));
    sb.set_last_mount(77);
    assert_eq!(sb.registration(), None);
    let number = RegistrationNr::from_random(5);
    sb.set_registered_sectors(Sectors(70));
    assert_eq!((sb.registration(), sb.registered_sectors()), (None, None));
    sb.set_registration(Some(number));
    assert_eq!((sb.registration(), sb.registered_sectors()), (Some(number), Some(Sectors(70))));
    let again = check_backing(&sb.encode()).unwrap();
    assert_eq!((again.label(), again.set_uuid(), again.last_mount()), ("x".repeat(32), Uuid([9; 16]), 77));
}

/// Setters leave the padding alone, and the padding them; the checksum covers it.
#[test]
fn superblocks_preserve_their_padding() {
    let mut cache = check_cache(&cache_bytes()).unwrap();
    assert_eq!(cache.padding(), [0; 40]);
    let padding: [u8; 40] = std::array::from_fn(|i| i as u8 + 1);
    cache.set_padding(padding);
    cache.set_sync(true);
    cache.prepare_write(1);
    let bytes = cache.encode();
    assert_eq!(bytes[144..184], padding);
    assert_eq!(check_cache(&bytes).unwrap().padding(), padding);
    let mut damaged = bytes;
    damaged[183] ^= 1;
    assert!(check_cache(&damaged).is_err());

    let mut backing = BackingSuper::format(&backing_format()).unwrap();
    let padding: [u8; 16] = std::array::from_fn(|i| i as u8 + 1);
    let number = RegistrationNr::from_random(5);
    backing.set_padding(padding);
    backing.set_registration(Some(number));
    backing.set_registered_sectors(Sectors(7));
    backing.set_state(BackingState::Dirty);
    let bytes = backing.encode();
    assert_eq!(bytes[160..176], padding);
    assert_eq!(bytes[176..184], 7_u64.to_le_bytes());
    let again = check_backing(&bytes).unwrap();
    assert_eq!((again.padding(), again.registration()), (padding, Some(number)));
}

/// The record belongs to the set: a device that is formatted for another one does not inherit it.
#[test]
fn a_cache_superblock_names_the_group_of_its_set() {
    let mut cache = check_cache(&cache_bytes()).unwrap();
    assert_eq!(cache.group(), None);
    let (before, group) = (cache.encode(), Uuid([7; 16]));
    cache.set_group(None);
    assert_eq!(cache.encode(), before);
    cache.set_group(Some(group));
    let bytes = cache.encode();
    assert_eq!(bytes[..4064], before[..4064]);
    assert_eq!(check_cache(&bytes).unwrap().group(), Some(group));
    let mut raw = RawSuperblock::from_prefix(&bytes).unwrap().clone();
    raw.set_uuid[3] ^= 1;
    raw.csum = raw.computed_csum().unwrap().into();
    assert_eq!(raw.check_cache(Sectors(1 << 40), 512).unwrap().group(), None);
    for at in 4064..4096 {
        let mut damaged = bytes;
        damaged[at] ^= 4;
        assert_eq!(check_cache(&damaged).unwrap().group(), None, "{at}");
    }
    cache.set_group(None);
    assert_eq!(cache.encode(), before);
}

/// A kernel preserves the padding and raises `seq`.
#[test]
fn writes_of_a_cache_superblock_by_others_are_counted() {
    let mut cache = check_cache(&cache_bytes()).unwrap();
    cache.prepare_write(1);
    assert_eq!(cache.other_uses(), None, "the count has not begun");
    cache.count_other_uses();
    let scrub = ScrubState { completed_unix_seconds: 5, next: BucketNr(6) };
    cache.set_scrub_state(scrub);
    let mut expected = 0;
    for by_other in [false, true, false, false, true, true] {
        if by_other {
            let bytes = cache.encode();
            let mut raw = RawSuperblock::from_prefix(&bytes).unwrap().clone();
            raw.seq = (raw.seq.get() + 3).into();
            raw.csum = raw.computed_csum().unwrap().into();
            cache = raw.check_cache(Sectors(1 << 40), 512).unwrap();
            expected += 1;
        }
        assert_eq!(cache.other_uses(), Some(expected));
        cache.prepare_write(2);
        assert_eq!(cache.other_uses(), Some(expected));
        cache.count_other_uses();
    }
    assert_eq!((cache.other_uses(), cache.scrub_state()), (Some(3), scrub));
}

#[test]
fn the_number_of_a_copy_is_void_after_a_write_by_a_kernel() {
    let mut backing = BackingSuper::format(&backing_format()).unwrap();
    assert_eq!(backing.copy(), None);
    for number in [0, u64::MAX, 77].map(CopyNr::from_random) {
        backing.set_copy(Some(number));
        let again = check_backing(&backing.encode()).unwrap();
        assert_eq!((again.copy(), again.registration()), (Some(number), None));
        backing.set_last_mount(backing.last_mount() + 5);
        let bytes = backing.encode();
        assert_eq!(check_backing(&bytes).unwrap().copy(), Some(number), "our own write");
        let mut raw = RawSuperblock::from_prefix(&bytes).unwrap().clone();
        raw.last_mount = (raw.last_mount.get() + 1).into();
        raw.csum = raw.computed_csum().unwrap().into();
        assert_eq!(raw.check_backing(Sectors(1 << 40), 512).unwrap().copy(), None);
        let mut padding = backing.padding();
        padding[3] ^= 1;
        backing.set_padding(padding);
        assert_eq!(backing.copy(), None);
    }
    // Bytes that are no number may be another program's.
    let padding = backing.padding();
    backing.set_copy(None);
    assert_eq!((backing.copy(), backing.padding()), (None, padding));
    backing.set_copy(Some(CopyNr::from_random(5)));
    backing.set_copy(None);
    assert_eq!((backing.copy(), backing.padding()), (None, [0; 16]));
}

#[test]
fn labels_have_at_most_32_bytes_and_no_nul() {
    assert_eq!(label_text(&label_bytes("data").unwrap()), "data");
    assert_eq!(label_bytes(&"x".repeat(33)), None);
    assert_eq!(label_bytes("a\0b"), None);
    let mut label = [0xff; 32];
    label[..6].copy_from_slice(b"disk\n\0");
    assert_eq!(label_text(&label), "disk", "a newline at the end is not part of it");
    assert_eq!(label_text(&[0; 32]), "");
    assert_eq!(label_text(&[0xff; 32]), "\u{fffd}".repeat(32));
}
