//! Tests of the table of checksums: comparison, blocks that are being overwritten, and the limit of its memory.

use format::Sector;

use super::*;
use crate::testing::{TestDisk, cache_device, run};

fn table(most: usize) -> SumsTable {
    let geometry = Geometry::new(Sectors(16), Sectors(1), 200, 2, 8).unwrap();
    let layout = FooterLayout::of(&geometry).unwrap();
    assert_eq!(layout.blocks(), 15);
    SumsTable::with_limit(&geometry, &layout, most).unwrap()
}

fn ptr(bucket: u64, block: u64, generation: u8) -> Ptr {
    Ptr::new(0, Sector(bucket * 16 + block), Gen(generation))
}

#[test]
fn blocks_are_compared_with_what_was_written() {
    let mut t = table(64);
    let data: Vec<u8> = (0..3 * 512).map(|i| (i / 512 + i) as u8).collect();
    assert_eq!(t.check(ptr(20, 4, 7), &data), Checked::NoSums);
    t.appended(ptr(20, 4, 7), &data);
    assert_eq!(t.check(ptr(20, 4, 7), &data), Checked::Compared { unknown: 0 });
    assert_eq!(t.check(ptr(20, 5, 7), &data[512..]), Checked::Compared { unknown: 0 });
    assert_eq!(t.check(ptr(20, 6, 7), &data[1024..]), Checked::Compared { unknown: 0 });
    assert_eq!(t.check(ptr(20, 7, 7), &data), Checked::Compared { unknown: 3 });
    assert_eq!(t.check(ptr(20, 4, 8), &data), Checked::NoSums, "another generation");
    assert_eq!(t.check(ptr(21, 4, 7), &data), Checked::NoSums, "another bucket");
    let mut wrong = data.clone();
    wrong[1030] ^= 1;
    let Checked::Mismatch(Mismatch { at, expected, found }) = t.check(ptr(20, 4, 7), &wrong) else {
        panic!("a flipped bit was not noticed")
    };
    assert_eq!(at, Sectors(2));
    assert_eq!(expected, format::checksum::crc32c(&data[1024..]));
    assert_eq!(found, format::checksum::crc32c(&wrong[1024..]));
    // The next generation of the bucket starts anew.
    t.appended(ptr(20, 0, 8), &data[..512]);
    assert_eq!(t.check(ptr(20, 4, 7), &data), Checked::NoSums);
    assert_eq!(t.check(ptr(20, 0, 8), &data), Checked::Compared { unknown: 2 });
    assert_eq!(t.len, 1);
}

/// A reader got damaged data, because the checksum of a block was unknown while a client overwrote the block.
#[test]
fn blocks_that_are_being_overwritten_are_compared_with_the_data_before_and_after() {
    run(|rt| async move {
        let mut t = table(64);
        let (old, new, torn) = ([1; 1024], [2; 512], [3; 512]);
        let (at, one) = (ptr(20, 1, 1), Sectors(1));
        t.appended(ptr(20, 0, 1), &old);
        t.overwrites(at, &new);
        let now = t.now();
        assert!(t.is_being_overwritten(ptr(20, 0, 1), Sectors(2), now));
        assert!(!t.is_being_overwritten(ptr(20, 0, 1), one, now));
        assert!(!t.is_being_overwritten(ptr(20, 0, 1), Sectors(2), ReadToken(0)), "it begins later");
        assert_eq!(t.sum_of(at), None, "a footer would not match");
        assert_eq!(t.check(ptr(20, 0, 1), &old), Checked::Compared { unknown: 0 });
        assert_eq!(t.check(at, &new), Checked::Compared { unknown: 0 });
        assert_eq!(t.check(at, &torn), Checked::Overwriting);
        t.overwrote(at, one, Overwritten::NotBegun);
        assert!(matches!(t.check(at, &new), Checked::Mismatch(_)), "the old data is there");
        t.overwrites(at, &new);
        t.overwrote(at, one, Overwritten::Failed);
        assert_eq!(t.check(ptr(20, 0, 1), &old), Checked::Compared { unknown: 1 }, "the write failed");
        t.overwrites(at, &new);
        assert_eq!(t.check(at, &torn), Checked::Compared { unknown: 1 }, "the data before is not known");
        let tick = cache_device(&TestDisk::new(4096), &rt, Sectors(16)).wrote();
        t.overwrote(at, one, Overwritten::Written(tick));
        assert_eq!(t.check(at, &new), Checked::Compared { unknown: 0 });
        assert!(matches!(t.check(ptr(20, 0, 1), &old), Checked::Mismatch(m) if m.at == Sectors(1)));
        assert_eq!(t.of_ptr(at).unwrap().overwritten, tick);
    });
}

/// A read of a damaged block began again for ever while clients overwrote many other blocks of its bucket.
#[test]
fn a_block_has_not_changed_because_others_were_overwritten() {
    let mut t = table(64);
    t.appended(ptr(20, 0, 1), &[1; 15 * 512]);
    let began = t.now();
    for _ in 0..RECENT / 2 {
        t.overwrites(ptr(20, 0, 1), &[2; 10 * 512]);
        t.overwrote(ptr(20, 0, 1), Sectors(10), Overwritten::Failed);
    }
    assert!(t.was_overwritten(ptr(20, 9, 1), began));
    assert!(!t.was_overwritten(ptr(20, 10, 1), began));
    // The oldest moments are forgotten, so it may have been any block.
    t.overwrites(ptr(20, 0, 1), &[2; 512]);
    assert!(t.was_overwritten(ptr(20, 10, 1), began));
}

/// A scrub computes the checksums of blocks that it has read. Blocks that are overwritten meanwhile get none.
#[test]
fn checksums_are_learnt_of_blocks_that_nobody_overwrites() {
    let mut t = table(64);
    t.put(BucketNr(20), Gen(1), BlockSums::unknown(15), FooterState::Absent);
    let read = |block, sum, began| [ReadSum { at: ptr(20, block, 1), sum, began }];
    let state = |t: &mut SumsTable| t.of_ptr(ptr(20, 0, 1)).map(|e| e.footer);
    let before = t.now();
    t.overwrites(ptr(20, 3, 1), &[5; 512]);
    let during = t.now();
    assert_eq!(t.learn(&read(3, 7, during), false), Some((FooterState::Absent, 0)), "under way");
    t.overwrote(ptr(20, 3, 1), Sectors(1), Overwritten::Failed);
    for began in [before, during] {
        assert_eq!(t.learn(&read(3, 7, began), false), Some((FooterState::Absent, 0)));
    }
    let now = t.now();
    assert_eq!(t.learn(&read(3, 7, now), false), Some((FooterState::Absent, 1)));
    assert_eq!(t.sum_of(ptr(20, 3, 1)), Some(7));
    assert_eq!(t.learn(&read(3, 8, now), false), Some((FooterState::Absent, 0)), "it is known");
    assert_eq!(t.learn(&read(3, 8, now), true), Some((FooterState::Absent, 1)), "it is replaced");
    assert_eq!(t.learn(&read(3, 8, now), true), Some((FooterState::Absent, 0)), "it is the same");
    t.of_ptr(ptr(20, 0, 1)).unwrap().footer = FooterState::Written;
    assert_eq!(t.learn(&read(3, 8, now), false), Some((FooterState::Written, 0)));
    assert_eq!(state(&mut t), Some(FooterState::Written));
    assert_eq!(t.learn(&read(4, 9, now), false), Some((FooterState::Written, 1)));
    assert_eq!(state(&mut t), Some(FooterState::Changing), "the caller writes the footer");
    assert_eq!(t.learn(&read(5, 9, now), false), None);
    assert_eq!(t.known(BucketNr(20), Gen(1)), Known::Blocks(2));
    assert_eq!(t.known(BucketNr(20), Gen(2)), Known::NotRead);
}

#[test]
fn the_table_drops_what_it_can_read_again_and_was_not_used() {
    let mut t = table(3);
    let sums = || BlockSums::unknown(15);
    let has = |t: &mut SumsTable| {
        (10..20).filter(|b| t.get_mut(BucketNr(*b), Gen(0)).is_some()).collect::<Vec<_>>()
    };
    for (bucket, footer) in [
        (10, FooterState::Absent),
        (11, FooterState::Changing),
        (12, FooterState::Written),
        (13, FooterState::Absent),
    ] {
        t.put(BucketNr(bucket), Gen(0), sums(), footer);
    }
    assert_eq!(has(&mut t), [10, 11, 13], "only the footer can be read again");
    t.put(BucketNr(14), Gen(0), sums(), FooterState::Written);
    assert_eq!(has(&mut t), [10, 11, 13, 14], "the limit gives way");
    t.get_mut(BucketNr(13), Gen(0)).unwrap().reopened = true;
    t.put(BucketNr(15), Gen(0), sums(), FooterState::Written);
    assert_eq!(has(&mut t), [10, 11, 15]);
    t.put(BucketNr(15), Gen(1), sums(), FooterState::Written);
    assert_eq!((has(&mut t), t.len), (vec![10, 11], 3));
}

#[test]
fn sums_of_data_that_is_being_overwritten_stay() {
    let mut t = table(1);
    t.put(BucketNr(10), Gen(0), BlockSums::unknown(15), FooterState::Absent);
    t.of_ptr(ptr(10, 0, 0)).unwrap().reopened = true;
    let before = t.now();
    t.overwrites(ptr(10, 3, 0), &[0; 512]);
    t.overwrites(ptr(10, 5, 0), &[0; 512]);
    t.put(BucketNr(11), Gen(0), BlockSums::unknown(15), FooterState::Written);
    assert!(t.of_ptr(ptr(10, 0, 0)).is_some());
    let during = t.now();
    t.overwrote(ptr(10, 5, 0), Sectors(1), Overwritten::Failed);
    t.put(BucketNr(12), Gen(0), BlockSums::unknown(15), FooterState::Written);
    assert!(t.of_ptr(ptr(10, 0, 0)).is_some(), "one of two is over");
    t.overwrote(ptr(10, 3, 0), Sectors(1), Overwritten::Failed);
    let now = t.now();
    assert!([before, during].iter().all(|began| t.was_overwritten(ptr(10, 3, 0), *began)));
    assert!(!t.was_overwritten(ptr(10, 3, 0), now));
    t.put(BucketNr(13), Gen(0), BlockSums::unknown(15), FooterState::Written);
    assert_eq!((t.len, t.of_ptr(ptr(13, 0, 0)).is_some()), (1, true));
    assert!(t.was_overwritten(ptr(10, 3, 0), now), "the table has forgotten it");
}

/// The last place of a search can be the only one whose sums may be dropped.
#[test]
fn a_search_passes_each_bucket_twice() {
    let mut t = table(1);
    t.put(BucketNr(199), Gen(0), BlockSums::unknown(15), FooterState::Written);
    t.put(BucketNr(10), Gen(0), BlockSums::unknown(15), FooterState::Absent);
    assert_eq!((t.len, t.of_ptr(ptr(199, 0, 0)).is_none()), (1, true));
    t.put(BucketNr(11), Gen(0), BlockSums::unknown(15), FooterState::Absent);
    t.remove(BucketNr(10));
    t.remove(BucketNr(12));
    assert_eq!(t.len, 1);
}

#[test]
fn the_memory_of_a_table_is_known_before() {
    for (bucket, nbuckets, all) in [(16, 200, true), (1024, 1 << 20, false)] {
        let geometry = Geometry::new(Sectors(bucket), Sectors(1), nbuckets, 2, 8).unwrap();
        let layout = FooterLayout::of(&geometry).unwrap();
        let t = SumsTable::new(&geometry, &layout).unwrap();
        let sums = SumsTable::bytes_each(&layout) as u64;
        assert_eq!(sums, (size_of::<BucketSums>() + BlockSums::memory_bytes(layout.blocks())) as u64);
        assert_eq!(t.most as u64, MOST_BYTES as u64 / sums);
        let places = (size_of_val(&t.table[..]) + size_of_val(&t.dropped[..])) as u64;
        let full = if all { nbuckets * sums } else { MOST_BYTES as u64 };
        assert_eq!(SumsTable::most_bytes(&geometry, &layout), places + full);
    }
}

#[test]
fn sums_that_were_used_stay() {
    let mut t = table(2);
    let put = |t: &mut SumsTable, bucket: u32| {
        let mut sums = BlockSums::unknown(15);
        sums.set(3, Some(7));
        t.put(BucketNr(bucket), Gen(0), sums, FooterState::Written);
    };
    (10..13).for_each(|bucket| put(&mut t, bucket));
    assert!(t.of_ptr(ptr(10, 0, 0)).is_none(), "the first one");
    assert_eq!(t.check(ptr(11, 0, 0), &[0; 512]), Checked::Compared { unknown: 1 });
    put(&mut t, 13);
    assert!(t.of_ptr(ptr(11, 0, 0)).is_some() && t.of_ptr(ptr(12, 0, 0)).is_none());
    // The number of dropped sums is known, of their generation only.
    assert_eq!(t.known(BucketNr(12), Gen(0)), Known::Blocks(1));
    assert_eq!(t.known(BucketNr(12), Gen(1)), Known::NotRead);
    assert_eq!(t.known(BucketNr(14), Gen(0)), Known::NotRead);
}
