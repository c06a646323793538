//! What is written is read back the same, field by field, against bit positions written down here
//! once more.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

mod common;

use common::{extent, keys_strategy, set_magic};
use format::prio::prio_capacity;
use format::uuid_table::{encode_uuid_table, parse_uuid_table};
use format::{
    Bkey, BsetBuilder, BucketPrio, Gen, Inode, JournalSeq, JsetBuilder, JsetRoots, Keys, PrioHeader, Ptr,
    Sector, Sectors, Uuid, UuidEntry, encode_prio_set, for_each_bset, parse_bucket, parse_entry, parse_node,
    parse_prio_set,
};
use proptest::array::{uniform8, uniform16, uniform32};
use proptest::collection::vec;
use proptest::prelude::*;

/// Bits `[first, first + width)` of a word.
fn bits(word: u64, first: u32, width: u32) -> u64 {
    (word >> first) & ((1 << width) - 1)
}

fn block() -> impl Strategy<Value = Sectors> {
    (0u32..4).prop_map(|shift| Sectors(1 << shift))
}

proptest! {
    #[test]
    fn pointer_fields_stand_where_they_belong(
        dev in 0u16..4096, offset in 0u64..1 << 43, generation: u8, other: u8, n in 0u64..1 << 42,
    ) {
        let ptr = Ptr::new(dev, Sector(offset), Gen(generation));
        prop_assert_eq!(bits(ptr.0, 0, 8), u64::from(generation));
        prop_assert_eq!(bits(ptr.0, 8, 43), offset);
        prop_assert_eq!(bits(ptr.0, 51, 12), u64::from(dev));
        prop_assert_eq!(ptr.0 >> 63, 0);
        prop_assert_eq!((ptr.dev(), ptr.offset(), ptr.generation()), (dev, Sector(offset), Gen(generation)));
        prop_assert_eq!(ptr.is_check(), dev == 4095);
        prop_assert_eq!(ptr.with_generation(Gen(other)), Ptr::new(dev, Sector(offset), Gen(other)));
        let low = Ptr::new(dev, Sector(offset >> 1), Gen(generation));
        prop_assert_eq!(low.advanced(Sectors(n)).0, low.0 + (n << 8), "one sector is 1 << 8");
    }

    #[test]
    fn key_fields_stand_where_they_belong(
        inode in 0u32..1 << 20, size in 0u64..1 << 16, end in 0u64..1 << 63, dirty: bool, ptr: u64,
    ) {
        let key = Bkey::extent(Inode(inode), Sector(end), Sectors(size), dirty, Ptr(ptr));
        prop_assert_eq!(bits(key.high, 0, 20), u64::from(inode));
        prop_assert_eq!(bits(key.high, 20, 16), size);
        prop_assert_eq!(bits(key.high, 36, 1), u64::from(dirty));
        prop_assert_eq!(bits(key.high, 37, 23), 0);
        prop_assert_eq!(bits(key.high, 60, 3), 1);
        prop_assert_eq!(key.high >> 63, 1);
        prop_assert_eq!(key.low, end);
        prop_assert_eq!((key.words(), key.len_bytes()), (3, 24));
        let hole = Bkey::hole(Inode(inode), Sector(end), Sectors(size));
        prop_assert_eq!(hole.high, key.high & !(1 << 36) & !(7 << 60));
        prop_assert_eq!((hole.words(), hole.len_bytes(), hole.ptr), (2, 16, Ptr(0)));
    }

    #[test]
    fn a_setter_changes_its_field_and_no_other(
        high: u64, low: u64, ptr: u64,
        inode in 0u32..1 << 20, size in 0u64..1 << 16, end: u64, dirty: bool,
    ) {
        let before = Bkey { high, low, ptr: Ptr(ptr) };
        let masks = [0xf_ffff, 0xffff << 20, 1 << 36, 7 << 60, 3u64 << 56];
        let kept = |after: &Bkey, field: usize| {
            masks.iter().enumerate().all(|(i, m)| i == field || after.high & m == high & m)
                && (after.high ^ high) & !masks[field] == 0
        };
        let mut key = before;
        key.set_inode(Inode(inode));
        prop_assert_eq!(key.inode(), Inode(inode));
        prop_assert!(kept(&key, 0) && key.low == low && key.ptr.0 == ptr);
        let mut key = before;
        key.set_size(Sectors(size));
        prop_assert_eq!(key.size(), Sectors(size));
        prop_assert!(kept(&key, 1) && key.low == low && key.ptr.0 == ptr);
        let mut key = before;
        key.set_dirty(dirty);
        prop_assert_eq!(key.dirty(), dirty);
        prop_assert!(kept(&key, 2) && key.low == low && key.ptr.0 == ptr);
        let mut key = before;
        key.set_offset(Sector(end));
        prop_assert_eq!(key.offset(), Sector(end));
        prop_assert!(key.high == high && key.ptr.0 == ptr);
        for to in [None, Some(Ptr(ptr ^ 5))] {
            let mut key = before;
            key.set_pointer(to);
            prop_assert_eq!(key.pointer(), to);
            prop_assert!(kept(&key, 3) && key.low == low);
        }
    }

    #[test]
    fn cutting_keeps_what_remains_where_it_was(key in extent(), n in 0u64..70_000) {
        let (start, end) = (key.start().unwrap().0, key.offset().0);
        let cut = n.min(key.size().0);
        let mut front = key;
        front.cut_front(Sectors(n));
        prop_assert_eq!((front.start().unwrap().0, front.offset().0), (start + cut, end));
        let mut back = key;
        back.cut_back(Sectors(n));
        prop_assert_eq!((back.start().unwrap().0, back.offset().0), (start, end - cut));
        prop_assert_eq!(back.ptr, key.ptr);
        let moved = (key.ptr.offset().0 + if key.nptrs() == 0 { 0 } else { cut }) % (1 << 43);
        prop_assert_eq!(front.ptr.offset().0, moved);
        prop_assert_eq!(front.ptr.0 & !(((1 << 43) - 1) << 8), key.ptr.0 & !(((1 << 43) - 1) << 8));
    }

    #[test]
    fn key_lists_round_trip(keys in keys_strategy(200)) {
        let mut bytes = Vec::new();
        for key in &keys {
            let before = bytes.len();
            key.encode_into(&mut bytes);
            prop_assert_eq!(bytes.len() - before, key.len_bytes());
            let mut fixed = [0xff; 24];
            prop_assert_eq!(key.encode_to(&mut fixed), Some(key.len_bytes()));
            prop_assert_eq!(&fixed[..key.len_bytes()], &bytes[before..]);
            let mut short = vec![0xff; key.len_bytes() - 1];
            prop_assert_eq!(key.encode_to(&mut short), None);
            prop_assert!(short.iter().all(|&b| b == 0xff));
        }
        let list = Keys::new(&bytes);
        let (least, most) = list.size_hint();
        prop_assert!(least <= keys.len() && keys.len() <= most.unwrap());
        prop_assert_eq!(list.collect::<Result<Vec<_>, _>>().unwrap(), keys);
    }

    #[test]
    fn journal_entries_round_trip(
        keys in keys_strategy(300), block in block(), junk: u8,
        seq: u64, last_seq: u64, level: u16, prio_bucket in uniform8(any::<u64>()),
        uuid_bucket in extent(), btree_root in extent(),
    ) {
        let mut builder = JsetBuilder::begin(vec![junk; 32768 + 100], block);
        prop_assert!(keys.iter().all(|key| builder.push_key(key)));
        let words: usize = keys.iter().map(Bkey::words).sum();
        prop_assert_eq!(builder.words(), words);
        let roots = JsetRoots { uuid_bucket, btree_root, btree_level: level, prio_bucket };
        let len = builder.finish(set_magic(), JournalSeq(seq), JournalSeq(last_seq), &roots);
        prop_assert_eq!(len as u64, (240 + 8 * words as u64).next_multiple_of(block.bytes()));
        let bytes = builder.into_inner();
        prop_assert!(bytes[240 + 8 * words..len].iter().all(|&b| b == 0), "padding is clean");

        let (jset, padded) = parse_entry(&bytes[..len], set_magic(), block).unwrap();
        prop_assert_eq!(padded, len);
        prop_assert_eq!((jset.seq.0, jset.last_seq.0, jset.version), (seq, last_seq, 1));
        prop_assert_eq!(jset.roots(), roots);
        prop_assert_eq!(jset.keys, keys);
    }

    #[test]
    fn journal_buckets_round_trip(
        lists in vec(keys_strategy(40), 0..8), block in block(), junk in vec(any::<u8>(), 0..3000),
    ) {
        let mut bucket = Vec::new();
        let mut expected = Vec::new();
        for (seq, keys) in (5..).zip(&lists) {
            let mut builder = JsetBuilder::begin(vec![0; 32768], block);
            prop_assert!(keys.iter().all(|key| builder.push_key(key)));
            let roots = JsetRoots::default();
            let len = builder.finish(set_magic(), JournalSeq(seq), JournalSeq(5), &roots);
            expected.push((bucket.len(), seq, keys.clone()));
            bucket.extend_from_slice(&builder.into_inner()[..len]);
        }
        let end = bucket.len();
        bucket.extend(junk);
        let scan = parse_bucket(&bucket, set_magic(), block).unwrap();
        prop_assert_eq!(scan.stopped_at, end);
        prop_assert_eq!(scan.max_seq().map(|s| s.0), expected.last().map(|e| e.1));
        let found: Vec<_> = scan.entries.into_iter().map(|(at, j)| (at, j.seq.0, j.keys)).collect();
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn nodes_round_trip(
        lists in vec(keys_strategy(60), 1..6), block in block(), seq in 1u64.., ptr: u64, junk: u8,
    ) {
        let size = Sectors(128);
        let node_key = Bkey::root(size, Ptr(ptr));
        let mut node = vec![junk; 65536];
        if bits(seq, 0, 8) == u64::from(junk) {
            node.fill(!junk);
        }
        let mut at = 0;
        let mut written = Vec::new();
        for keys in lists.iter().enumerate().filter(|(i, keys)| *i == 0 || !keys.is_empty()) {
            let keys = keys.1;
            let words: usize = keys.iter().map(Bkey::words).sum();
            let most = format::bset::appendable_words(size, at, block).unwrap();
            prop_assert!(words <= most);
            let mut builder = BsetBuilder::begin(&mut node[at..], seq, block);
            prop_assert!(keys.iter().all(|key| builder.push_key(key)));
            prop_assert_eq!(builder.words(), words);
            let len = builder.finish(set_magic(), node_key.ptr);
            prop_assert_eq!(Some(len), format::bset::padded_bytes(words, block));
            written.push((at, keys.clone()));
            at += len;
        }
        let read = parse_node(&node, &node_key, set_magic(), block).unwrap();
        prop_assert_eq!((read.seq, read.written_bytes), (seq, at));
        let found: Vec<_> = read.bsets.into_iter().map(|s| (s.offset_bytes, s.keys)).collect();
        prop_assert_eq!(&found, &written);

        let mut streamed: Vec<Vec<Bkey>> = vec![Vec::new(); written.len()];
        let visit = |set: usize, key| streamed[set].push(key);
        let summary = for_each_bset(&node, &node_key, set_magic(), block, visit).unwrap();
        prop_assert_eq!((summary.seq, summary.bsets, summary.written_bytes), (seq, written.len(), at));
        prop_assert!(streamed.iter().zip(&written).all(|(a, b)| *a == b.1));

        // The same bytes under any other pointer are not a node.
        let other = Bkey::root(size, Ptr(ptr ^ 1));
        prop_assert!(parse_node(&node, &other, set_magic(), block).is_err());
    }

    #[test]
    fn prio_sets_round_trip(
        entries in vec((any::<u16>(), any::<u8>()), 0..1352), seq: u64, next_bucket: u64, junk: u8,
    ) {
        let entries: Vec<_> = entries
            .into_iter()
            .map(|(prio, generation)| BucketPrio { prio, generation: Gen(generation) })
            .collect();
        prop_assert_eq!(prio_capacity(4096), 1352);
        let mut bytes = vec![junk; 4096];
        let header = PrioHeader { seq, next_bucket };
        encode_prio_set(&mut bytes, set_magic(), header, &entries);
        let mut read = vec![BucketPrio::default(); entries.len()];
        prop_assert_eq!(parse_prio_set(&bytes, set_magic(), &mut read).unwrap(), header);
        prop_assert_eq!(&read, &entries);
        for (i, entry) in entries.iter().enumerate() {
            let raw = &bytes[40 + 3 * i..43 + 3 * i];
            prop_assert_eq!(u16::from_le_bytes([raw[0], raw[1]]), entry.prio);
            prop_assert_eq!(raw[2], entry.generation.0);
        }
    }

    #[test]
    fn uuid_slots_round_trip(
        uuid in uniform16(any::<u8>()), label in uniform32(any::<u8>()),
        times in any::<[u32; 3]>(), flags: u32, sectors: u64, rest in vec(any::<u8>(), 56), slot in 0usize..32,
    ) {
        let entry = UuidEntry {
            uuid: Uuid(uuid),
            label,
            first_reg: times[0],
            last_reg: times[1],
            invalidated: times[2],
            flags,
            sectors: Sectors(sectors),
            reserved: rest.try_into().unwrap(),
        };
        prop_assert_eq!(UuidEntry::from_bytes(&entry.to_bytes()), entry);
        let mut table = vec![UuidEntry::FREE; slot];
        table.push(entry);
        let mut bytes = vec![0xff; 4096];
        encode_uuid_table(&mut bytes, &table);
        table.resize(32, UuidEntry::FREE);
        prop_assert_eq!(parse_uuid_table(&bytes, 1).unwrap(), table);
        let raw = &bytes[128 * slot..][..128];
        prop_assert_eq!(&raw[..16], &uuid);
        prop_assert_eq!(&raw[16..48], &label);
        prop_assert_eq!(&raw[56..60], &times[2].to_le_bytes());
        prop_assert_eq!(&raw[60..64], &flags.to_le_bytes());
        prop_assert_eq!(&raw[64..72], &sectors.to_le_bytes());
    }
}
