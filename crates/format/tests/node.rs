//! Damage to btree nodes: what may be a torn append is distinguished from everything that cannot be one.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

mod common;

use common::set_magic;
use format::bset::{BSET_HEADER_BYTES, appendable_words, max_words, padded_bytes};
use format::checksum::{crc64, crc64_seeded};
use format::{
    Bkey, BsetBuilder, BsetKind, DamageKind, Gen, Inode, NodeDamage, Ptr, Sector, Sectors, check_bset_order,
    parse_node,
};

const BLOCK: Sectors = Sectors(1);
const SEQ: u64 = 0x3c29_6f86_db80_f327;

fn node_key() -> Bkey {
    Bkey::root(Sectors(128), Ptr::new(0, Sector(2688), Gen(1)))
}

fn extent(start: u64, len: u64) -> Bkey {
    let end = Sector(start + len);
    Bkey::extent(Inode(0), end, Sectors(len), false, Ptr::new(0, Sector(6400), Gen(1)))
}

/// A node with these numbers of keys in its sets.
fn node(counts: &[u64]) -> (Vec<u8>, Vec<usize>) {
    let mut bytes = vec![0xcc; 65536];
    let mut starts = vec![0];
    for &count in counts {
        let at = *starts.last().unwrap();
        let mut builder = BsetBuilder::begin(&mut bytes[at..], SEQ, BLOCK);
        for i in 0..count {
            assert!(builder.push_key(&extent(8 * i, 8)));
        }
        starts.push(at + builder.finish(set_magic(), node_key().ptr));
    }
    (bytes, starts)
}

fn damage(bytes: &[u8]) -> NodeDamage {
    *parse_node(bytes, &node_key(), set_magic(), BLOCK).unwrap_err()
}

fn reseal(bytes: &mut [u8], at: usize) {
    let words = u32::from_le_bytes(bytes[at + 28..at + 32].try_into().unwrap()) as usize;
    let covered = &bytes[at + 8..at + BSET_HEADER_BYTES + 8 * words];
    let csum = crc64_seeded(node_key().ptr.0, covered);
    bytes[at..at + 8].copy_from_slice(&csum.to_le_bytes());
}

#[test]
fn an_empty_first_set_is_a_node_and_an_empty_later_one_is_not() {
    let (bytes, starts) = node(&[0, 3, 50]);
    let read = parse_node(&bytes, &node_key(), set_magic(), BLOCK).unwrap();
    assert_eq!(read.bsets.iter().map(|s| s.keys.len()).collect::<Vec<_>>(), [0, 3, 50]);
    assert_eq!(read.written_bytes, starts[3]);
    let (bytes, _) = node(&[0, 0]);
    let found = damage(&bytes);
    assert_eq!((found.kind, found.error.field), (DamageKind::Other, "keys (words)"));
    assert_eq!(found.before.bsets.len(), 1);
}

#[test]
fn a_torn_last_append_is_told_apart() {
    let (whole, starts) = node(&[3, 40, 60]);
    // Its first block arrived, the others did not.
    let mut bytes = whole.clone();
    bytes[starts[2] + 512..starts[3]].fill(0x11);
    let found = damage(&bytes);
    assert_eq!((found.kind, found.error.field), (DamageKind::TornLastBset, "checksum"));
    assert_eq!(found.error.offset_bytes, starts[2] as u64);
    assert_eq!(found.before.bsets.len(), 2);
    assert_eq!((found.before.written_bytes, found.before.seq), (starts[2], SEQ));
    assert!(found.to_string().ends_with("(in the last bset of the node)"), "{found}");
    // Its first block did not arrive: the append never happened.
    let mut bytes = whole.clone();
    bytes[starts[2]..starts[2] + 512].fill(0xcc);
    let read = parse_node(&bytes, &node_key(), set_magic(), BLOCK).unwrap();
    assert_eq!((read.bsets.len(), read.written_bytes), (2, starts[2]));
    // Any other harm to the header of the last set, as long as the seq is right.
    for at in [0, 8, 24, 28] {
        let mut bytes = whole.clone();
        bytes[starts[2] + at] ^= 0xff;
        assert_eq!(damage(&bytes).kind, DamageKind::TornLastBset, "{at}");
    }
}

#[test]
fn other_damage_is_never_called_torn() {
    let (whole, starts) = node(&[3, 40, 60]);
    // A set in the middle: the one behind it proves that it was complete.
    let mut bytes = whole.clone();
    bytes[starts[1] + 100] ^= 1;
    let found = damage(&bytes);
    assert_eq!((found.kind, found.before.bsets.len()), (DamageKind::Other, 1));
    // The same if its length is lost, so that the next one must be searched for.
    let mut bytes = whole.clone();
    bytes[starts[1] + 31] = 0xff;
    assert_eq!(damage(&bytes).kind, DamageKind::Other);
    // A set in the middle that is gone.
    let mut bytes = whole.clone();
    bytes[starts[1]..starts[2]].fill(0xcc);
    let found = damage(&bytes);
    assert_eq!((found.kind, found.error.field), (DamageKind::Other, "lost bset (seq)"));
    assert_eq!(found.error.offset_bytes, starts[2] as u64 + 16);
    assert_eq!(found.before.bsets.len(), 1);
    // The first set of a node is complete before anything points to it.
    let (mut bytes, _) = node(&[40]);
    bytes[100] ^= 1;
    let found = damage(&bytes);
    assert_eq!((found.kind, found.before.bsets.len()), (DamageKind::Other, 0));
    bytes[16..24].fill(0);
    assert_eq!(damage(&bytes).error.field, "seq");
}

#[test]
fn the_checksum_belongs_to_the_pointer() {
    let (mut bytes, _) = node(&[3]);
    let mut moved = node_key();
    moved.ptr = moved.ptr.with_generation(Gen(2));
    assert!(parse_node(&bytes, &moved, set_magic(), BLOCK).is_err());
    // Sets of version 0 are the same wherever they lie.
    bytes[24] = 0;
    let csum = crc64(&bytes[8..BSET_HEADER_BYTES + 72]);
    bytes[..8].copy_from_slice(&csum.to_le_bytes());
    for key in [node_key(), moved] {
        assert_eq!(parse_node(&bytes, &key, set_magic(), BLOCK).unwrap().bsets[0].version, 0);
    }
}

#[test]
fn an_unsupported_bset_is_not_a_torn_last_bset() {
    let (whole, starts) = node(&[3, 4]);
    let at = starts[1];
    let mut version = whole.clone();
    version[at + 24] = 2;
    reseal(&mut version, at);
    let mut nptrs = whole.clone();
    nptrs[at + 32 + 7] = 0xa0;
    reseal(&mut nptrs, at);
    for (bytes, field) in [(version, "version"), (nptrs, "key pointer count")] {
        let found = damage(&bytes);
        assert_eq!((found.kind, found.error.field), (DamageKind::Other, field));
        assert!(found.error.is_unsupported());
        assert_eq!((found.before.bsets.len(), found.before.written_bytes), (1, at));
    }
    // The key list ends inside of a key.
    let mut count = whole.clone();
    count[at + 28] -= 1;
    reseal(&mut count, at);
    let found = damage(&count);
    assert_eq!((found.kind, found.error.field), (DamageKind::Other, "key pointer"));
    assert_eq!(found.error.offset_bytes, at as u64 + 32 + 72);
    // A set of another cache set.
    let mut magic = whole;
    magic[at + 8] ^= 1;
    reseal(&mut magic, at);
    let found = damage(&magic);
    assert_eq!((found.kind, found.error.field), (DamageKind::Other, "magic"));
}

#[test]
fn a_node_needs_a_key_with_pointer_and_size_and_all_its_bytes() {
    let (bytes, _) = node(&[3]);
    let refused =
        |bytes: &[u8], key: &Bkey, block| parse_node(bytes, key, set_magic(), block).unwrap_err().error.field;
    let hole = Bkey::hole(Inode(0), Sector(128), Sectors(128));
    assert_eq!(refused(&bytes, &hole, BLOCK), "pointers of the node's key");
    let empty = Bkey::root(Sectors(0), node_key().ptr);
    assert_eq!(refused(&bytes, &empty, BLOCK), "size in the node's key");
    assert_eq!(refused(&bytes[..65024], &node_key(), BLOCK), "size in the node's key");
    assert_eq!(refused(&bytes, &node_key(), Sectors(0)), "block size");
    // What is behind the node in its bucket does not matter.
    let longer = [bytes.clone(), bytes].concat();
    assert!(parse_node(&longer, &node_key(), set_magic(), BLOCK).is_ok());
}

#[test]
fn a_node_can_be_filled_to_the_last_block() {
    let mut bytes = vec![0; 4096];
    let key = Bkey::root(Sectors(8), Ptr(1));
    let mut at = 0;
    while let Some(words) = appendable_words(Sectors(8), at, BLOCK) {
        assert_eq!(words, max_words(4096 - at));
        let mut builder = BsetBuilder::begin(&mut bytes[at..], SEQ, BLOCK);
        assert!(builder.push_key(&extent(0, 8)));
        at += builder.finish(set_magic(), key.ptr);
    }
    assert_eq!(at, 4096);
    assert_eq!(appendable_words(Sectors(8), 4097, BLOCK), None);
    let read = parse_node(&bytes, &key, set_magic(), BLOCK).unwrap();
    assert_eq!((read.bsets.len(), read.written_bytes), (8, 4096));

    let mut builder = BsetBuilder::begin(&mut bytes[..], SEQ, BLOCK);
    while builder.push_key(&extent(0, 8)) {}
    assert!(!builder.has_room());
    assert_eq!(builder.words(), max_words(4096) / 3 * 3);
    assert_eq!(builder.padded_bytes(), 4096);
    builder.clear();
    assert_eq!((builder.words(), builder.padded_bytes()), (0, 512));
    assert_eq!(padded_bytes(60, BLOCK), Some(512));
    assert_eq!(padded_bytes(61, BLOCK), Some(1024));
    assert_eq!(padded_bytes(usize::MAX, BLOCK), None);
}

#[test]
fn order_of_extents_in_a_leaf_set() {
    let leaf = |keys: &[Bkey]| check_bset_order(BsetKind::Leaf, keys.iter().copied());
    let other = Bkey::extent(Inode(1), Sector(8), Sectors(8), true, Ptr(1));
    leaf(&[extent(0, 8), extent(8, 8), extent(100, 1), other]).unwrap();
    leaf(&[]).unwrap();
    // Remains of size 0 stand anywhere.
    leaf(&[extent(8, 8), extent(3, 0), extent(16, 8)]).unwrap();
    let overlap = leaf(&[extent(0, 8), extent(7, 8)]).unwrap_err();
    assert_eq!((overlap.field, overlap.offset_bytes), ("key order", 56));
    assert!(leaf(&[extent(8, 8), extent(0, 8)]).is_err());
    assert_eq!(leaf(&[other, extent(100, 8)]).unwrap_err().field, "key order (inode)");
    let long = Bkey::hole(Inode(0), Sector(4), Sectors(8));
    assert_eq!(leaf(&[long]).unwrap_err().field, "key size");
}

#[test]
fn order_of_keys_in_an_internal_set() {
    let internal = |keys: &[Bkey]| check_bset_order(BsetKind::Internal, keys.iter().copied());
    let child = |inode, end| Bkey::node(Inode(inode), Sector(end), Sectors(128), Ptr(1));
    let freed = Bkey::freeing(Ptr::new(0, Sector(2688), Gen(2)), Sectors(128));
    internal(&[freed, freed, child(0, 100), child(0, 100), child(1, 8), child(1, 20)]).unwrap();
    assert!(internal(&[child(0, 100), freed]).is_err());
    assert!(internal(&[child(1, 100), child(0, 200)]).is_err());
    assert_eq!((BsetKind::of_level(0), BsetKind::of_level(2)), (BsetKind::Leaf, BsetKind::Internal));
}
