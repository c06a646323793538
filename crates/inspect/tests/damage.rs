//! One generator per class of corruption, and the finding that names it.
//!
//! Each case breaks one rule in a copy of an image that is in order, with all checksums right unless
//! the checksum is the point.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "test code")]

mod common;
#[path = "damage/data.rs"]
mod data;

use common::edit::Edit;
use common::{backing_source, cache_source};
use format::{Bkey, Gen, Inode, JournalSeq, Ptr, Sector, Sectors, Uuid};
use inspect::{CheckOptions, Finding, Invariant, Mode, NodeId, SetReport, SetView, Severity, check_set};

const SINGLE_LEAF: &str = "04-writeback-killed";
const TWO_LEVELS: &str = "03-writeback-clean-stop";
const SMALL_BUCKETS: &str = "09-small-buckets-killed";
const BUSY: &str = "07-busy-killed";
const VOLUME: &str = "06-volume-and-backing-killed";

/// The root is always the first node.
const ROOT: NodeId = NodeId(0);

fn report(edit: &Edit) -> SetReport {
    let (cache, backing) = (cache_source(&edit.cache), backing_source(&edit.backing));
    check_set(&cache, &[&backing], CheckOptions::default())
}

/// The finding of this invariant and severity, whose text has all of `words`.
#[track_caller]
fn expect(edit: &Edit, invariant: Invariant, severity: Severity, words: &[&str]) -> Finding {
    let report = report(edit);
    let mut matching = report.findings.iter().filter(|f| (f.invariant, f.severity) == (invariant, severity));
    let found = matching.find(|f| words.iter().all(|w| f.to_string().contains(w)));
    let Some(found) = found else { panic!("no {severity} of {invariant} with {words:?} in\n{report}") };
    assert_eq!(report.is_ok(), severity == Severity::Notice && report.errors == 0);
    // A strict view ends at fatal damage, one that makes do does not.
    let strict = SetView::open(&cache_source(&edit.cache), Mode::Strict);
    if severity == Severity::Fatal && found.place.device == "cache" {
        assert_eq!(strict.unwrap_err().fatal.severity, Severity::Fatal);
    }
    println!("{found}");
    found.clone()
}

use Invariant as I;
use Severity::{Error, Fatal, Notice};

// 1: superblock

#[test]
fn superblock_bit_flip() {
    let mut e = Edit::new(SINGLE_LEAF);
    e.flip(Sector(8), 112);
    expect(&e, I::Superblock, Fatal, &["cache superblock (sector 8)", "checksum"]);
    let view = SetView::open(&cache_source(&e.cache), Mode::BestEffort).unwrap();
    assert_eq!(view.totals(), e.view.totals());
    assert!(view.assumptions[0].contains("checksum"), "{:?}", view.assumptions);
}

#[test]
fn superblock_zeroed() {
    let mut e = Edit::new(SINGLE_LEAF);
    e.cache[4096..8192].fill(0);
    expect(&e, I::Superblock, Fatal, &["magic", "not a bcache device"]);
    assert!(report(&e).summary.is_none());
}

#[test]
fn superblock_with_a_rule_broken() {
    let mut e = Edit::new(SINGLE_LEAF);
    e.superblock(|sb| sb.d[3] = 77.into());
    expect(&e, I::Superblock, Fatal, &["journal bucket", "expected 4, found 77"]);
    let mut e = Edit::new(SINGLE_LEAF);
    e.superblock(|sb| sb.version = 9.into());
    expect(&e, I::Superblock, Fatal, &["version", "not supported"]);
}

#[test]
fn truncated_image() {
    let mut e = Edit::new(SINGLE_LEAF);
    let len = e.cache.len() / 2;
    e.cache.truncate(len);
    expect(&e, I::Superblock, Fatal, &["nbuckets", "at most 65536", "found 131072"]);
}

#[test]
fn backing_superblock_bit_flip() {
    let mut e = Edit::new(SINGLE_LEAF);
    e.backing[4096 + 72] ^= 1;
    expect(&e, I::Superblock, Fatal, &["backing: backing superblock (sector 8)", "checksum"]);
}

// 2: journal is complete

#[test]
fn journal_newest_entry_torn() {
    let mut e = Edit::new(SINGLE_LEAF);
    let newest = e.newest();
    e.flip(newest.sector, 300);
    let sector = format!("sector {}", newest.sector);
    expect(&e, I::JournalContiguous, Notice, &[&sector, "checksum", "claims to be entry 1624"]);
}

#[test]
fn journal_entry_decayed_in_front_of_others() {
    let mut e = Edit::new(BUSY);
    let journal = e.view.journal.clone().unwrap();
    let newest = e.newest();
    let same_bucket = |i: &&inspect::view::EntryInfo| i.bucket == newest.bucket && i.seq < newest.seq;
    let info = *journal.entries.iter().rev().filter(same_bucket).nth(1).unwrap();
    e.flip(info.sector, 300);
    let words = [format!("sector {}", info.sector), format!("entry {}", info.seq), "is damaged".into()];
    expect(&e, I::JournalContiguous, Error, &words.each_ref().map(String::as_str));
}

#[test]
fn journal_entry_missing() {
    let mut e = Edit::new(SMALL_BUCKETS);
    let info = e.replayed(20);
    e.cache[info.sector.bytes() as usize..][..512].fill(0);
    let missing = info.seq.to_string();
    expect(&e, I::JournalContiguous, Fatal, &["entries missing", &missing]);
    let view = SetView::open(&cache_source(&e.cache), Mode::BestEffort).unwrap();
    assert!(view.journal.unwrap().replay.len() > 60);
    assert!(view.assumptions[0].contains("replayed from"), "{:?}", view.assumptions);
}

#[test]
fn journal_zeroed() {
    let mut e = Edit::new(SINGLE_LEAF);
    e.cache[0x1_0000..9 * 0x1_0000].fill(0);
    expect(&e, I::JournalContiguous, Fatal, &["a valid entry", "found none"]);
}

#[test]
fn journal_entry_that_cannot_be_understood() {
    let mut e = Edit::new(SINGLE_LEAF);
    e.append_entry(|jset| jset.keys.push(Bkey::hole(Inode(0), Sector(100), Sectors(8))));
    // One key of two words becomes one of three: it now overruns the count.
    let newest = e.newest();
    let at = (newest.sector.0 + newest.sectors.0) as usize * 512;
    e.cache[at + 247] |= 0x10;
    let csum = format::checksum::crc64(&e.cache[at + 8..at + 240 + 16]);
    e.cache[at..at + 8].copy_from_slice(&csum.to_le_bytes());
    expect(&e, I::JournalContiguous, Fatal, &["key pointer", "it was written like this"]);
}

// 3: order

#[test]
fn journal_number_twice() {
    let mut e = Edit::new(SINGLE_LEAF);
    e.append_entry(|jset| jset.seq = JournalSeq(jset.seq.0 - 1));
    expect(&e, I::JournalOrder, Fatal, &["seq"]);
    expect(&e, I::JournalOrder, Error, &["seq 1624", "a number that no other entry has"]);
}

#[test]
fn journal_last_seq_goes_back() {
    let mut e = Edit::new(SMALL_BUCKETS);
    let info = e.replayed(40);
    e.entry(info, |jset| jset.last_seq = JournalSeq(5));
    expect(&e, I::JournalOrder, Error, &["last_seq", "found 5"]);
}

#[test]
fn journal_last_seq_ahead() {
    let mut e = Edit::new(SINGLE_LEAF);
    let newest = e.newest();
    e.entry(newest, |jset| jset.last_seq = JournalSeq(9999));
    expect(&e, I::JournalOrder, Fatal, &["last_seq", "at most 1624", "9999"]);
}

// 4: roots

#[test]
fn root_key_not_at_the_end() {
    let mut e = Edit::new(SINGLE_LEAF);
    let newest = e.newest();
    e.entry(newest, |jset| jset.btree_root.low = 12345);
    expect(&e, I::JournalRoots, Fatal, &["btree_root offset", "12345"]);
}

#[test]
fn roots_that_point_nowhere() {
    let mut e = Edit::new(SINGLE_LEAF);
    let newest = e.newest();
    e.entry(newest, |jset| jset.uuid_bucket.ptr = Ptr::new(0, Sector(1 << 40), Gen(0)));
    expect(&e, I::JournalRoots, Fatal, &["uuid_bucket", "allocated bucket"]);
    expect(&e, I::ExtentValid, Error, &["slot 0"]);
    let mut e = Edit::new(SINGLE_LEAF);
    e.entry(newest, |jset| jset.prio_bucket[0] = 4);
    expect(&e, I::JournalRoots, Fatal, &["prio_bucket", "found 4"]);
    expect(&e, I::PrioChain, Fatal, &["bucket", "found 4"]);
    let mut e = Edit::new(SINGLE_LEAF);
    e.entry(newest, |jset| jset.uuid_bucket.set_size(Sectors(64)));
    expect(&e, I::JournalRoots, Error, &["uuid_bucket size", "expected 128, found 64"]);
}

// 5: journaled keys

#[test]
fn journal_keys_broken() {
    let ptr = Ptr::new(0, Sector(20_000), Gen(0));
    let keys = [
        (Bkey::extent(Inode(0), Sector(100), Sectors(200), true, ptr), "key size"),
        (Bkey::extent(Inode(0), Sector(1000), Sectors(200), true, ptr), "key pointer"),
        (
            Bkey::extent(Inode(0), Sector(1000), Sectors(8), true, Ptr::new(0, Sector(8), Gen(0))),
            "key pointer",
        ),
        (Bkey::hole(Inode(0), Sector(1000), Sectors(0)), "key size"),
    ];
    for (key, word) in keys {
        let mut e = Edit::new(SINGLE_LEAF);
        e.append_entry(|jset| jset.keys.push(key));
        expect(&e, I::JournalKeys, Error, &["seq 1625", word]);
    }
}

// 6: prio chain

#[test]
fn prio_set_bit_flip() {
    let mut e = Edit::new(SMALL_BUCKETS);
    let bucket = e.view.prio.chain[5];
    let sector = e.view.geometry().bucket_start(bucket);
    e.flip(sector, 99);
    let words = ["set 5 of the chain".to_owned(), format!("bucket {bucket}"), "checksum".into()];
    expect(&e, I::PrioChain, Fatal, &words.each_ref().map(String::as_str));
    let view = SetView::open(&cache_source(&e.cache), Mode::BestEffort).unwrap();
    assert_eq!(view.prio.chain.len(), 5);
    assert!(view.assumptions[0].contains("generations of buckets 6760 to 16383"), "{:?}", view.assumptions);
}

#[test]
fn prio_sets_of_two_writes() {
    let mut e = Edit::new(SMALL_BUCKETS);
    e.prio(7, |header, _| header.seq += 1);
    expect(&e, I::PrioChain, Error, &["set 7", "as in the sets before"]);
}

#[test]
fn prio_chain_with_a_cycle() {
    let mut e = Edit::new(SMALL_BUCKETS);
    let first = u64::from(e.view.prio.chain[0].0);
    e.prio(3, |header, _| header.next_bucket = first);
    expect(&e, I::PrioChain, Fatal, &["set 4", "not yet in the chain"]);
}

// 7: slots

#[test]
fn uuid_twice() {
    let mut e = Edit::new(VOLUME);
    let other = e.view.slots[&Inode(1)].uuid;
    e.slot(0, |slot| slot.uuid = other);
    expect(&e, I::UuidTable, Error, &["slot 1", "another one than slot 0"]);
}

#[test]
fn volume_without_size() {
    let mut e = Edit::new(VOLUME);
    e.slot(0, |slot| slot.sectors = Sectors(0));
    expect(&e, I::UuidTable, Error, &["slot 0", "sectors"]);
    expect(&e, I::ExtentValid, Error, &["inside the device, sectors 0+0 of it"]);
}

#[test]
fn uuid_table_zeroed_or_flipped() {
    let mut e = Edit::new(VOLUME);
    e.slot(1, |slot| slot.uuid = Uuid::NIL);
    expect(&e, I::ExtentValid, Error, &["slot 1", "uuid"]);
    // Without a checksum a flipped bit shows only in that the device is not found.
    let mut e = Edit::new(VOLUME);
    e.slot(1, |slot| slot.uuid.0[3] ^= 1);
    expect(&e, I::BackingState, Error, &["a slot for", "dirty data of this device is lost"]);
}

// 8: nodes can be read

#[test]
fn node_first_set_bit_flip() {
    let mut e = Edit::new(SINGLE_LEAF);
    let at = e.set_byte(ROOT, 0, 1);
    e.cache[at] ^= 1;
    let f = expect(&e, I::NodeReadable, Fatal, &["btree node", "checksum", "level 0"]);
    assert_eq!(f.place.path.len(), 1);
    let view = SetView::open(&cache_source(&e.cache), Mode::BestEffort).unwrap();
    assert_eq!((view.btree.missing, view.btree.nodes), (1, 0));
    // What is in the journal is there still.
    assert!(view.totals().dirty_extents > 0);
}

#[test]
fn node_middle_set_bit_flip() {
    let mut e = Edit::new(SINGLE_LEAF);
    let at = e.set_byte(ROOT, 5, 40);
    e.cache[at] ^= 1;
    expect(&e, I::NodeReadable, Fatal, &["bset 5", "checksum", "are lost"]);
}

#[test]
fn node_last_set_torn() {
    let mut e = Edit::new(SINGLE_LEAF);
    let last = e.view.nodes[0].bsets.len() - 1;
    let at = e.set_byte(ROOT, last, 40);
    e.cache[at] ^= 1;
    expect(&e, I::NodeReadable, Fatal, &["bset 11", "an incomplete append"]);
    let view = SetView::open(&cache_source(&e.cache), Mode::BestEffort).unwrap();
    assert_eq!(view.nodes[0].bsets.len(), last);
    assert!(view.assumptions[0].contains("the first 11 bsets"), "{:?}", view.assumptions);
}

#[test]
fn node_set_lost() {
    let mut e = Edit::new(SINGLE_LEAF);
    let at = e.set_byte(ROOT, 4, 16);
    e.cache[at..at + 8].fill(0);
    expect(&e, I::NodeReadable, Fatal, &["lost bset"]);
}

#[test]
fn node_zeroed() {
    let mut e = Edit::new(TWO_LEVELS);
    let node = e.leaf();
    let at = e.set_byte(node, 0, 0);
    e.cache[at..at + 65536].fill(0);
    let f = expect(&e, I::NodeReadable, Fatal, &["seq"]);
    assert_eq!(f.place.path, e.view.path(node));
    let view = SetView::open(&cache_source(&e.cache), Mode::BestEffort).unwrap();
    assert_eq!((view.btree.missing, view.btree.nodes), (1, 3));
}

// 9: shape

#[test]
fn node_pointer_inside_a_bucket() {
    let mut e = Edit::new(TWO_LEVELS);
    e.set(ROOT, 0, |keys| {
        keys[0].ptr = keys[0].ptr.advanced(Sectors(8));
        keys[0].set_size(Sectors(64));
    });
    expect(&e, I::NodeShape, Fatal, &["pointer", "the start of bucket"]);
}

#[test]
fn node_pointer_out_of_range() {
    let mut e = Edit::new(TWO_LEVELS);
    e.set(ROOT, 0, |keys| keys[0].ptr = Ptr::new(0, Sector(1 << 42), Gen(0)));
    expect(&e, I::NodeShape, Fatal, &["level 0", "inside one of buckets 9 to 1023"]);
    let mut e = Edit::new(TWO_LEVELS);
    e.set(ROOT, 0, |keys| keys[0].set_pointer(None));
    expect(&e, I::NodeShape, Fatal, &["a clean key with size and pointer"]);
}

#[test]
fn btree_with_a_cycle() {
    let mut e = Edit::new(TWO_LEVELS);
    let root = e.view.nodes[0].key.ptr;
    e.set(ROOT, 0, |keys| keys[1].ptr = root);
    expect(&e, I::NodeShape, Fatal, &["no other btree node"]);
}

#[test]
fn btree_node_used_twice() {
    let mut e = Edit::new(TWO_LEVELS);
    e.set(ROOT, 0, |keys| keys[1].ptr = keys[0].ptr);
    expect(&e, I::NodeShape, Fatal, &["no other btree node"]);
}

#[test]
fn btree_with_a_wrong_level() {
    let mut e = Edit::new(SINGLE_LEAF);
    let newest = e.newest();
    e.entry(newest, |jset| jset.btree_level = 3);
    // Extents taken for nodes.
    assert!(report(&e).count_of(I::NodeShape) > 0);
}

// 10: sets

#[test]
fn set_unsorted() {
    let mut e = Edit::new(SINGLE_LEAF);
    e.set(ROOT, 1, |keys| {
        let sized: Vec<usize> = (0..keys.len()).filter(|&i| keys[i].size().0 > 0).collect();
        keys.swap(sized[0], sized[1]);
    });
    expect(&e, I::BsetOrder, Error, &["bset 1", "key order"]);
}

#[test]
fn set_with_overlapping_extents() {
    let mut e = Edit::new(SINGLE_LEAF);
    let key = e.extent(0, true, 4);
    let mut second = key;
    second.cut_front(Sectors(2));
    e.append_set(ROOT, &[key, second]);
    expect(&e, I::BsetOrder, Error, &["bset 12", "key order"]);
}

// 11: ranges

#[test]
fn key_outside_the_node() {
    let e = Edit::new(TWO_LEVELS);
    let leaves: Vec<_> = (0..).map(NodeId).zip(&e.view.nodes).filter(|(_, n)| n.level == 0).collect();
    let (first, last) = (leaves[0].0, leaves[leaves.len() - 1].0);
    let end = leaves[0].1.key.offset();
    let hole = |at: u64| Bkey::hole(Inode(0), Sector(at), Sectors(8));
    for (leaf, key) in [(first, hole(end.0 + 4)), (last, hole(24)), (last, hole(leaves[2].1.after.1.0 + 4))] {
        let mut e = Edit::new(TWO_LEVELS);
        e.append_set(leaf, &[key]);
        expect(&e, I::NodeRange, Error, &["inside the node's range"]);
    }
}

// 12: partition

#[test]
fn last_child_missing() {
    let mut e = Edit::new(TWO_LEVELS);
    e.set(ROOT, 0, |keys| {
        // At another set's position, so that no key is left at the end.
        let last = keys.len() - 1;
        keys[last].low -= 1;
    });
    let report = report(&e);
    let f = report.findings.iter().find(|f| f.invariant == I::NodePartition).unwrap();
    assert_eq!((f.severity, f.expected.as_str()), (Fatal, "the end"));
}

#[test]
fn two_children_for_one_range() {
    let mut e = Edit::new(TWO_LEVELS);
    e.set(ROOT, 0, |keys| keys[0].low = keys[1].low);
    expect(&e, I::NodePartition, Fatal, &["child", "a second one"]);
}

#[test]
fn internal_node_without_children() {
    let mut e = Edit::new(TWO_LEVELS);
    let freed: Vec<Bkey> = e.view.nodes[1..]
        .iter()
        .map(|n| Bkey::freeing(n.key.ptr.with_generation(n.key.ptr.generation().next()), n.key.size()))
        .collect();
    e.append_set(ROOT, &freed);
    expect(&e, I::NodePartition, Fatal, &["no child at all"]);
}

// 19, 20: backing devices

#[test]
fn backing_states() {
    let state = |flags: u64, state: u64| (flags & !(3 << 61)) | (state << 61);
    let cases = [
        (1, Notice, "dirty, as slot 0 has 5997 dirty sectors"),
        (0, Notice, "the slot is invalid"),
        (3, Notice, "found inconsistent"),
    ];
    for (to, severity, words) in cases {
        let mut e = Edit::new(SINGLE_LEAF);
        e.backing_superblock(|sb| sb.flags = state(sb.flags.get(), to).into());
        expect(&e, I::BackingState, severity, &[words]);
    }
    let mut e = Edit::new(SINGLE_LEAF);
    e.backing_superblock(|sb| sb.set_uuid[0] ^= 1);
    expect(&e, I::BackingState, Notice, &["set_uuid", "belongs to another set"]);
    let mut e = Edit::new(SINGLE_LEAF);
    e.backing_superblock(|sb| sb.uuid[0] ^= 1);
    expect(&e, I::BackingState, Error, &["a slot for"]);
}

#[test]
fn clean_data_differs() {
    let mut e = Edit::new(TWO_LEVELS);
    let key = e.extent(0, false, 2);
    e.backing[key.start().unwrap().bytes() as usize + 513] ^= 1;
    // Sectors of the volume: the data offset is 16.
    let sector = key.start().unwrap().0 + 1 - 16;
    expect(&e, I::CleanEqual, Notice, &[&format!("something else at sectors {sector}+1 of the volume")]);
}

// Everything at once

#[test]
fn random_and_zeroed_images() {
    let mut e = Edit::new(SINGLE_LEAF);
    e.cache.fill(0);
    expect(&e, I::Superblock, Fatal, &["not a bcache device"]);
    // The superblock survives, nothing else does.
    let mut e = Edit::new(SINGLE_LEAF);
    let mut seed = 1u64;
    for byte in &mut e.cache[8192..] {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1);
        *byte = (seed >> 56) as u8;
    }
    expect(&e, I::JournalContiguous, Fatal, &["a valid entry"]);
}
