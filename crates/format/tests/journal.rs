//! Journal entries and the runs of them in a bucket: where a scan stops, what it must not skip.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

mod common;

use common::set_magic;
use format::checksum::crc64;
use format::journal::{JSET_HEADER_BYTES, MAX_FOREIGN_JSET_BYTES, MAX_JSET_BYTES, MAX_JSET_WORDS, ring};
use format::{
    Bkey, Gen, Geometry, Inode, JournalSeq, Jset, JsetBuilder, JsetRoots, MAX_BTREE_LEVEL, Ptr, ScanStop,
    Sector, Sectors, SetMagic, parse_bucket, parse_entry,
};

const BLOCK: Sectors = Sectors(1);

fn roots() -> JsetRoots {
    JsetRoots {
        uuid_bucket: Bkey::uuid_bucket(Sectors(128), Ptr::new(0, Sector(1280), Gen(1))),
        btree_root: Bkey::root(Sectors(128), Ptr::new(0, Sector(2688), Gen(1))),
        btree_level: 0,
        prio_bucket: [9, 0, 0, 0, 0, 0, 0, 0],
    }
}

fn key(end: u64) -> Bkey {
    Bkey::extent(Inode(0), Sector(end), Sectors(8), true, Ptr::new(0, Sector(6400), Gen(3)))
}

fn entry(seq: u64, keys: usize) -> Vec<u8> {
    let mut builder = JsetBuilder::begin(vec![0xee; MAX_JSET_BYTES], BLOCK);
    for i in 0..keys {
        assert!(builder.push_key(&key(8 + 8 * i as u64)));
    }
    let len = builder.finish(set_magic(), JournalSeq(seq), JournalSeq(1), &roots());
    let mut bytes = builder.into_inner();
    bytes.truncate(len);
    bytes
}

fn reseal(bytes: &mut [u8], words: usize) {
    let csum = crc64(&bytes[8..JSET_HEADER_BYTES + 8 * words]);
    bytes[..8].copy_from_slice(&csum.to_le_bytes());
}

fn seqs(bucket: &[u8]) -> Vec<u64> {
    let scan = parse_bucket(bucket, set_magic(), BLOCK).unwrap();
    scan.entries.iter().map(|(_, j)| j.seq.0).collect()
}

#[test]
fn the_builder_fills_an_entry_to_the_last_word() {
    let mut builder = JsetBuilder::begin(vec![0; 100_000], BLOCK);
    let mut pushed = 0;
    while builder.push_key(&key(8)) {
        pushed += 1;
    }
    assert_eq!(pushed, MAX_JSET_WORDS / 3);
    assert!(!builder.has_room());
    // One word is left, which no key fits into.
    assert_eq!(builder.words(), MAX_JSET_WORDS - 1);
    assert!(!builder.push_key(&Bkey::hole(Inode(0), Sector(8), Sectors(8))));
    let len = builder.finish(set_magic(), JournalSeq(1), JournalSeq(1), &roots());
    assert_eq!((len, builder.padded_bytes()), (MAX_JSET_BYTES, MAX_JSET_BYTES));
    let (jset, padded) = parse_entry(&builder.into_inner(), set_magic(), BLOCK).unwrap();
    assert_eq!((jset.keys.len(), padded), (pushed, MAX_JSET_BYTES));
}

#[test]
fn the_buffer_bounds_an_entry_in_whole_blocks() {
    let mut small = [0; 1100];
    let mut builder = JsetBuilder::begin(&mut small[..], BLOCK);
    while builder.push_key(&key(8)) {}
    assert_eq!(builder.words(), (1024 - 240) / 24 * 3);
    assert_eq!(builder.finish(set_magic(), JournalSeq(1), JournalSeq(1), &roots()), 1024);
    builder.clear();
    assert_eq!((builder.words(), builder.padded_bytes()), (0, 512));
}

#[test]
#[should_panic(expected = "holds no journal entry")]
fn a_buffer_without_room_for_a_header_is_a_bug() {
    JsetBuilder::begin(&mut [0; 400][..], BLOCK);
}

#[test]
fn an_entry_can_be_finished_again_with_more_keys() {
    let mut bytes = vec![0; 4096];
    let mut builder = JsetBuilder::begin(&mut bytes[..], BLOCK);
    let mut last = 0;
    for n in 1..40 {
        assert!(builder.push_key(&key(8 * n)));
        last = builder.finish(set_magic(), JournalSeq(n), JournalSeq(1), &roots());
    }
    let (jset, padded) = parse_entry(&bytes, set_magic(), BLOCK).unwrap();
    assert_eq!((jset.seq.0, jset.keys.len(), padded), (39, 39, last));
}

#[test]
fn a_scan_ends_at_the_first_thing_that_is_no_entry() {
    let (a, b, c) = (entry(4, 2), entry(5, 100), entry(6, 0));
    assert_eq!((a.len(), b.len(), c.len()), (512, 3072, 512));
    let whole = [a.clone(), b.clone(), c.clone()].concat();
    let scan = parse_bucket(&whole, set_magic(), BLOCK).unwrap();
    assert_eq!(
        scan.entries.iter().map(|(at, j)| (*at, j.seq.0)).collect::<Vec<_>>(),
        [(0, 4), (512, 5), (3584, 6)]
    );
    assert_eq!((scan.stopped_at, scan.why), (4096, ScanStop::EndOfBucket));
    assert_eq!(scan.max_seq(), Some(JournalSeq(6)));

    // A torn entry hides what follows: that may be older.
    let mut torn = whole.clone();
    torn[2048..3584].fill(0);
    let scan = parse_bucket(&torn, set_magic(), BLOCK).unwrap();
    assert_eq!((scan.entries.len(), scan.stopped_at), (1, 512));
    match scan.why {
        ScanStop::NoEntry(e) => assert_eq!((e.field, e.offset_bytes), ("checksum", 512)),
        ScanStop::EndOfBucket => panic!("stopped for no reason"),
    }
    // Leftovers of the lap before follow directly and look valid.
    assert_eq!(seqs(&[c.clone(), a.clone(), vec![0; 512]].concat()), [6, 4]);
    // An entry cut off by the end of the bucket.
    assert_eq!(seqs(&[a.clone(), b[..2560].to_vec()].concat()), [4]);
    assert_eq!(seqs(&[a, b[..100].to_vec()].concat()), [4]);
    assert_eq!(seqs(&[]), [0; 0]);
    // Another set's journal.
    let scan = parse_bucket(&whole, SetMagic(1), BLOCK).unwrap();
    assert!(scan.entries.is_empty());
}

#[test]
fn padding_must_lie_inside_the_bucket_too() {
    let mut builder = JsetBuilder::begin(vec![0; 4096], Sectors(8));
    assert!(builder.push_key(&key(8)));
    let len = builder.finish(set_magic(), JournalSeq(1), JournalSeq(1), &roots());
    assert_eq!(len, 4096);
    let bytes = builder.into_inner();
    assert!(parse_entry(&bytes, set_magic(), Sectors(8)).is_ok());
    assert!(parse_entry(&bytes[..2048], set_magic(), Sectors(8)).is_err());
    assert!(parse_entry(&bytes[..2048], set_magic(), Sectors(1)).is_ok());
}

#[test]
fn an_intact_entry_that_means_something_else_is_an_error_and_no_end() {
    // A version from the future.
    let mut bytes = entry(4, 1);
    bytes[24] = 2;
    reseal(&mut bytes, 3);
    let e = parse_bucket(&bytes, set_magic(), BLOCK).unwrap_err();
    assert!(e.is_unsupported() && e.field == "version", "{e}");
    // Version 0 is known.
    bytes[24] = 0;
    reseal(&mut bytes, 3);
    assert_eq!(parse_entry(&bytes, set_magic(), BLOCK).unwrap().0.version, 0);

    // A key list that overruns its count.
    let mut bytes = entry(4, 1);
    bytes[28] = 2;
    reseal(&mut bytes, 2);
    let both = [entry(3, 0), bytes].concat();
    let e = parse_bucket(&both, set_magic(), BLOCK).unwrap_err();
    assert!(!e.is_unsupported());
    assert_eq!((e.field, e.offset_bytes), ("key pointer", 512 + 240));

    // Keys with two pointers, in the list and in the header.
    for (at, keys) in [(240, 1), (40, 0), (104, 0)] {
        let mut bytes = entry(4, keys);
        bytes[at + 7] = (bytes[at + 7] & 0x8f) | 0x20;
        reseal(&mut bytes, 3 * keys);
        let e = parse_entry(&bytes, set_magic(), BLOCK).unwrap_err();
        assert!(e.is_unsupported() && e.offset_bytes == at as u64, "{e}");
    }
}

/// An entry with more keys than this code writes.
fn long_entry(seq: u64, keys: usize) -> Vec<u8> {
    let mut bytes = entry(seq, 0)[..JSET_HEADER_BYTES].to_vec();
    for end in (1..=keys as u64).map(|n| 8 * n) {
        let key = key(end);
        bytes.extend([key.high, key.low].map(u64::to_le_bytes).concat());
        bytes.extend(key.pointer().unwrap().0.to_le_bytes());
    }
    bytes[28..32].copy_from_slice(&(3 * keys as u32).to_le_bytes());
    reseal(&mut bytes, 3 * keys);
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

/// A kernel with pages of 64 KiB writes entries of up to 512 KiB. An entry above 32 KiB counted as the end of the journal, so
/// all acknowledged writes from it on were lost without a word.
#[test]
fn an_entry_of_a_kernel_with_large_pages_is_read() {
    assert_eq!(long_entry(4, 1300), entry(4, 1300), "the test writes keys as the builder does");
    let most = (MAX_FOREIGN_JSET_BYTES - JSET_HEADER_BYTES) / 24;
    for keys in [1400, most] {
        let long = long_entry(5, keys);
        let (jset, padded) = parse_entry(&long, set_magic(), BLOCK).unwrap();
        assert_eq!((jset.keys.len(), jset.keys[keys - 1], padded), (keys, key(8 * keys as u64), long.len()));
        assert_eq!(seqs(&[entry(4, 1), long, entry(6, 1), vec![0; 512]].concat()), [4, 5, 6]);
    }
}

#[test]
fn a_size_beyond_the_limit_is_no_entry() {
    let mut bytes = vec![0; 2 * MAX_FOREIGN_JSET_BYTES];
    bytes[..512].copy_from_slice(&entry(4, 0));
    let most = ((MAX_FOREIGN_JSET_BYTES - JSET_HEADER_BYTES) / 8) as u32;
    for words in [most + 1, 1 << 29, u32::MAX] {
        bytes[28..32].copy_from_slice(&words.to_le_bytes());
        let e = parse_entry(&bytes, set_magic(), BLOCK).unwrap_err();
        assert_eq!((e.field, e.offset_bytes), ("keys (words)", 28));
    }
}

#[test]
fn roots_and_keys_must_point_somewhere_sensible() {
    let g = Geometry::new(Sectors(128), BLOCK, 1024, 1, 8).unwrap();
    assert_eq!(ring(&g).map(|(b, s)| (b.0, s.0)).last(), Some((8, 1024)));
    let good = parse_entry(&entry(4, 3), set_magic(), BLOCK).unwrap().0;
    good.check_roots(&g, 0).unwrap();
    good.check_keys(&g).unwrap();

    let wrong = |change: &dyn Fn(&mut Jset)| {
        let mut jset = good.clone();
        change(&mut jset);
        jset.check_roots(&g, 0).and(jset.check_keys(&g)).unwrap_err().field
    };
    assert_eq!(wrong(&|j| j.uuid_bucket.set_pointer(None)), "uuid_bucket");
    assert_eq!(wrong(&|j| j.uuid_bucket.set_size(Sectors(0))), "uuid_bucket");
    assert_eq!(wrong(&|j| j.uuid_bucket.ptr = Ptr::new(0, Sector(1281), Gen(1))), "uuid_bucket");
    assert_eq!(wrong(&|j| j.btree_root.ptr = Ptr::new(0, Sector(128), Gen(1))), "btree_root");
    assert_eq!(wrong(&|j| j.btree_root.ptr = Ptr::new(0, Sector(1 << 30), Gen(1))), "btree_root");
    assert_eq!(wrong(&|j| j.btree_root.set_dirty(true)), "btree_root");
    assert_eq!(wrong(&|j| j.btree_root.set_offset(Sector(5))), "btree_root offset");
    assert_eq!(wrong(&|j| j.prio_bucket[0] = 8), "prio_bucket");
    assert_eq!(wrong(&|j| j.prio_bucket[0] = 1024), "prio_bucket");
    assert_eq!(wrong(&|j| j.keys[1].set_size(Sectors(0))), "key size");
    assert_eq!(wrong(&|j| j.keys[1].set_size(Sectors(100))), "key size");
    assert_eq!(wrong(&|j| j.keys[2].ptr = Ptr::new(0, Sector(6400 + 127), Gen(1))), "key pointer");
    assert_eq!(wrong(&|j| j.keys[2].ptr = Ptr::new(4095, Sector(6400), Gen(1))), "key pointer");
    for (level, field) in [(MAX_BTREE_LEVEL, None), (MAX_BTREE_LEVEL + 1, Some("level of the root"))] {
        let jset = Jset { btree_level: level, ..good.clone() };
        assert_eq!(jset.check_level().err().map(|e| (e.field, e.offset_bytes)), field.map(|f| (f, 168)));
    }
    let mut jset = good.clone();
    jset.keys[0] = Bkey::hole(Inode(0), Sector(4096), Sectors(4096));
    jset.check_keys(&g).unwrap();
    jset.keys[2].set_size(Sectors(0));
    assert_eq!(jset.check_keys(&g).unwrap_err().offset_bytes, 240 + 16 + 24);
}
