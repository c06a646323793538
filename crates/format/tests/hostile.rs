//! Parsers get arbitrary bytes. None may panic, and nothing that a checksum covers may be
//! changed by one bit without notice.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

mod common;

use common::{extent, keys_strategy, set_magic};
use format::checksum::{crc64, crc64_seeded};
use format::replay::check_last_seq;
use format::superblock::{BackingFormat, BackingSuper, CacheFormat, CacheMode, CacheSuper};
use format::uuid_table::{check_uuid_table, parse_uuid_table};
use format::{
    Bkey, BsetBuilder, BsetKind, BucketPrio, Gen, Geometry, JournalSeq, JsetBuilder, JsetRoots, Keys,
    PrioHeader, Ptr, RawSuperblock, Replacement, Sector, Sectors, Uuid, check_bset_order, encode_prio_set,
    for_each_bset, identify, parse_bucket, parse_entry, parse_node, parse_prio_set, select_replay,
};
use proptest::collection::vec;
use proptest::prelude::*;

const BLOCK: Sectors = Sectors(1);

fn geometry() -> Geometry {
    Geometry::new(Sectors(128), BLOCK, 1024, 1, 8).unwrap()
}

/// Everything that can be asked of bytes whatever they are.
fn feed_all(bytes: &[u8], node_key: &Bkey, block: Sectors) {
    let _ = identify(bytes);
    if let Ok(raw) = RawSuperblock::from_prefix(bytes) {
        let _ = raw.check_cache(Sectors(1 << 20), 512);
        let _ = raw.check_backing(Sectors(1 << 20), 512);
    }
    let list = Keys::new(bytes);
    let most = list.size_hint().1.unwrap();
    assert!(list.count() <= most);
    let _ = parse_entry(bytes, set_magic(), block);
    if let Ok(scan) = parse_bucket(bytes, set_magic(), block) {
        assert!(scan.stopped_at <= bytes.len());
        for (_, jset) in &scan.entries {
            let _ = jset.check_roots(&geometry(), 0);
            let _ = jset.check_roots(&geometry(), u16::MAX);
            let _ = jset.check_keys(&geometry());
        }
        let entries = || scan.entries.iter().map(|(_, j)| j.clone());
        for discard in [false, true] {
            if let Ok(replay) = select_replay(entries(), discard) {
                let _ = check_last_seq(&replay);
            }
        }
    }
    let mut visited = 0;
    let streamed = for_each_bset(bytes, node_key, set_magic(), block, |_, _| visited += 1);
    match (parse_node(bytes, node_key, set_magic(), block), streamed) {
        (Ok(node), Ok(summary)) => {
            assert_eq!((node.seq, node.bsets.len()), (summary.seq, summary.bsets));
            assert_eq!(node.written_bytes, summary.written_bytes);
            for set in node.bsets {
                let _ = check_bset_order(BsetKind::Leaf, set.keys.iter().copied());
                let _ = check_bset_order(BsetKind::Internal, set.keys);
            }
        }
        (Err(node), Err(streamed)) => {
            assert_eq!((node.kind, node.error), (streamed.kind, streamed.error));
            assert_eq!(node.before.bsets.len(), streamed.before.bsets);
            let keys: usize = node.before.bsets.iter().map(|s| s.keys.len()).sum();
            assert_eq!(keys, visited, "keys of the intact sets and no others");
        }
        (node, streamed) => panic!("{node:?} but {streamed:?}"),
    }
    let mut table = [BucketPrio::default(); 64];
    let _ = parse_prio_set(bytes, set_magic(), &mut table);
    for version in [0, 1] {
        if let Ok(slots) = parse_uuid_table(bytes, version) {
            assert!(slots.len() * 128 <= bytes.len());
            let _ = check_uuid_table(&slots);
            slots.iter().for_each(|slot| drop(slot.label()));
        }
    }
}

/// A node of two sets; returns bytes, key, and where the second set begins and ends.
fn node(first: &[Bkey], second: &[Bkey]) -> (Vec<u8>, Bkey, usize, usize) {
    let key = Bkey::root(Sectors(128), Ptr::new(0, Sector(2688), Gen(1)));
    let mut bytes = vec![0; 65536];
    let mut at = 0;
    let mut starts = Vec::new();
    for keys in [first, second] {
        starts.push(at);
        let mut builder = BsetBuilder::begin(&mut bytes[at..], 0x5eed, BLOCK);
        assert!(keys.iter().all(|key| builder.push_key(key)));
        at += builder.finish(set_magic(), key.ptr);
    }
    (bytes, key, starts[1], at)
}

fn jset(keys: &[Bkey]) -> (Vec<u8>, usize) {
    let mut builder = JsetBuilder::begin(vec![0; 32768], BLOCK);
    assert!(keys.iter().all(|key| builder.push_key(key)));
    let covered = 240 + 8 * builder.words();
    let roots = JsetRoots::default();
    let len = builder.finish(set_magic(), JournalSeq(7), JournalSeq(7), &roots);
    let mut bytes = builder.into_inner();
    bytes.truncate(len);
    (bytes, covered)
}

fn cache_super() -> CacheSuper {
    CacheSuper::format(&CacheFormat {
        uuid: Uuid([1; 16]),
        set_uuid: Uuid([2; 16]),
        device_sectors: Sectors(131_072),
        block_sectors: Sectors(1),
        bucket_sectors: Sectors(128),
        replacement: Replacement::Lru,
        discard: false,
    })
    .unwrap()
}

fn backing_super() -> BackingSuper {
    BackingSuper::format(&BackingFormat {
        uuid: Uuid([3; 16]),
        set_uuid: Uuid([2; 16]),
        device_sectors: Sectors(131_072),
        block_sectors: Sectors(1),
        bucket_sectors: Sectors(128),
        data_offset: Sector(2048),
        cache_mode: CacheMode::Writeback,
        label: [0; 32],
    })
    .unwrap()
}

fn flip(bytes: &mut [u8], bit: usize) {
    bytes[bit / 8] ^= 1 << (bit % 8);
}

/// Gives `bytes` the header of a structure that passes magic and checksum, so that what lies behind
/// those checks is reached.
fn seal(bytes: &mut [u8], words: u32, kind: u8, node_ptr: Ptr) {
    let put = |bytes: &mut [u8], at: usize, value: u64| {
        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
    };
    let header: usize = match kind {
        0 => 240,
        1 => 32,
        _ => 0,
    };
    let magics = [set_magic().jset(), set_magic().bset(), set_magic().pset()];
    put(bytes, 8, magics[usize::from(kind % 3)]);
    let words = words as usize % ((bytes.len() - header) / 8 + 1);
    let end = if header == 0 { bytes.len() } else { header + 8 * words };
    if header != 0 {
        bytes[24] &= 1;
        bytes[25..28].fill(0);
        bytes[28..32].copy_from_slice(&u32::try_from(words).unwrap().to_le_bytes());
    }
    let covered = &bytes[8..end];
    let seeded = kind == 1 && bytes[24] != 0;
    let csum = if seeded { crc64_seeded(node_ptr.0, covered) } else { crc64(covered) };
    put(bytes, 0, csum);
}

proptest! {
    #[test]
    fn random_bytes(
        bytes in vec(any::<u8>(), 0..9000), size in 0u64..20, block in 0u64..9,
    ) {
        let key = Bkey::root(Sectors(size), Ptr(1));
        feed_all(&bytes, &key, Sectors(block));
    }

    #[test]
    fn random_bytes_behind_a_right_checksum(
        mut bytes in vec(any::<u8>(), 512..9000), words: u32, kind in 0u8..3, block in 1u64..9,
    ) {
        let size = bytes.len() as u64 / 512;
        let key = Bkey::root(Sectors(size), Ptr(1));
        seal(&mut bytes, words, kind, key.ptr);
        feed_all(&bytes, &key, Sectors(block));
        bytes.resize(bytes.len() / 512 * 512, 0);
        feed_all(&bytes, &key, Sectors(block));
    }

    #[test]
    fn headers_of_any_key(high: u64, low: u64, ptr: u64, bytes in vec(any::<u8>(), 0..2048)) {
        let key = Bkey { high, low, ptr: Ptr(ptr) };
        feed_all(&bytes, &key, BLOCK);
        let _ = (key.start(), key.start_position(), key.position(), key.pointer(), key.csum());
        let _ = geometry().ptr_bucket(key.ptr, key.size());
        for n in [0, 1, 65_535, u64::MAX] {
            let mut cut = key;
            cut.cut_front(Sectors(n));
            cut.cut_back(Sectors(n));
            prop_assert!(cut.size() <= key.size());
        }
        let mut list = Vec::new();
        key.encode_into(&mut list);
        feed_all(&list, &key, BLOCK);
    }

    #[test]
    fn numbers_of_any_geometry(
        bucket: u64, shift in 0u32..64, block in 0u64..20, nbuckets: u64, small in 0u64..1 << 20,
        first: u16, njournal: u16, sector: u64, ptr: u64,
    ) {
        for bucket in [bucket, 1 << shift] {
            for nbuckets in [nbuckets, small] {
                let made = Geometry::new(Sectors(bucket), Sectors(block), nbuckets, first, njournal % 300);
                let Ok(g) = made else { continue };
                let _ = (g.bucket_of(Sector(sector)), g.ptr_bucket(Ptr(ptr), Sectors(sector)));
                prop_assert!(g.prio_set_sizes().count() <= 3);
                prop_assert!(u64::from(g.prios_per_bucket) * u64::from(g.prio_buckets) >= nbuckets);
                prop_assert!(g.bucket_start(format::BucketNr(g.nbuckets - 1)).bytes() < 1 << 52);
            }
        }
    }

    #[test]
    fn a_flipped_bit_in_a_journal_entry_is_noticed(keys in keys_strategy(40), at: prop::sample::Index) {
        let (mut bytes, covered) = jset(&keys);
        flip(&mut bytes, at.index(covered * 8));
        prop_assert!(parse_entry(&bytes, set_magic(), BLOCK).is_err());
        let scan = parse_bucket(&bytes, set_magic(), BLOCK).unwrap();
        prop_assert!(scan.entries.is_empty());
        feed_all(&bytes, &Bkey::root(Sectors(1), Ptr(1)), BLOCK);
    }

    #[test]
    fn a_flipped_bit_in_a_node_is_noticed(
        first in keys_strategy(40), second in vec(extent(), 1..40), at: prop::sample::Index,
    ) {
        let (mut bytes, key, start, _) = node(&first, &second);
        let covered = [(0, 32 + 8 * first.iter().map(Bkey::words).sum::<usize>()),
            (start, 32 + 8 * second.iter().map(Bkey::words).sum::<usize>())];
        let bit = at.index((covered[0].1 + covered[1].1) * 8);
        let in_first = bit < covered[0].1 * 8;
        let bit = if in_first { bit } else { bit - covered[0].1 * 8 + start * 8 };
        flip(&mut bytes, bit);
        let seq_of_second = (start + 16) * 8..(start + 24) * 8;
        match parse_node(&bytes, &key, set_magic(), BLOCK) {
            // Then the node looks as if the set had never been appended: no reader can tell.
            Ok(node) => prop_assert!(seq_of_second.contains(&bit) && node.bsets.len() == 1),
            Err(damage) => prop_assert_eq!(damage.before.bsets.len(), usize::from(!in_first)),
        }
        feed_all(&bytes, &key, BLOCK);
    }

    #[test]
    fn a_flipped_bit_in_a_prio_set_is_noticed(at: prop::sample::Index, seq: u64) {
        let mut bytes = vec![0; 4096];
        let header = PrioHeader { seq, next_bucket: 77 };
        encode_prio_set(&mut bytes, set_magic(), header, &[BucketPrio::default(); 1352]);
        flip(&mut bytes, at.index(4096 * 8));
        let mut table = [BucketPrio::default(); 1352];
        prop_assert!(parse_prio_set(&bytes, set_magic(), &mut table).is_err());
        feed_all(&bytes, &Bkey::root(Sectors(8), Ptr(1)), BLOCK);
    }

    #[test]
    fn a_flipped_bit_in_a_superblock_is_noticed(at: prop::sample::Index, behind: prop::sample::Index) {
        let mut sb = cache_super();
        sb.set_journal_buckets(8).unwrap();
        for (bytes, covered) in [(sb.encode(), 208 + 64), (backing_super().encode(), 208)] {
            let mut broken = bytes;
            flip(&mut broken, at.index(covered * 8));
            let raw = RawSuperblock::from_prefix(&broken).unwrap();
            prop_assert!(raw.check_cache(Sectors(131_072), 512).is_err());
            prop_assert!(raw.check_backing(Sectors(131_072), 512).is_err());
            // Behind the checksummed range nothing is looked at, and everything is preserved.
            let mut kept = bytes;
            flip(&mut kept, covered * 8 + behind.index((4096 - covered) * 8));
            let raw = RawSuperblock::from_prefix(&kept).unwrap();
            let again = match raw.check_cache(Sectors(131_072), 512) {
                Ok(sb) => sb.encode(),
                Err(_) => raw.check_backing(Sectors(131_072), 512).unwrap().encode(),
            };
            prop_assert!(again == kept);
        }
    }

    #[test]
    fn a_damaged_superblock_with_a_right_checksum_never_panics(
        changes in vec((0usize..2300, any::<u8>()), 1..6), device: u64, logical: u32,
    ) {
        for bytes in [cache_super().encode(), backing_super().encode()] {
            let mut bytes = bytes;
            for (at, value) in &changes {
                bytes[*at] = *value;
            }
            bytes[207] &= 1;
            let keys = usize::from(u16::from_le_bytes([bytes[206], bytes[207]]));
            if keys <= 256 {
                let csum = crc64(&bytes[8..208 + 8 * keys]);
                bytes[..8].copy_from_slice(&csum.to_le_bytes());
            }
            let raw = RawSuperblock::from_prefix(&bytes).unwrap();
            for (device, logical) in [(131_072, 512), (device, logical)] {
                let _ = raw.check_cache(Sectors(device), logical).map(|sb| sb.encode());
                let _ = raw.check_backing(Sectors(device), logical).map(|sb| sb.encode());
            }
        }
    }
}
