//! Real images: every structure on them is read, compared with what is known, written again, and
//! compared byte for byte.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

mod common;

use std::collections::BTreeSet;

use common::{ALL, Image, expected};
use format::journal::JSET_HEADER_BYTES;
use format::replay::check_last_seq;
use format::superblock::{BackingState, CacheMode, CacheSuper, RawSuperblock};
use format::uuid_table::{check_uuid_table, encode_uuid_table, parse_uuid_table};
use format::{
    Bkey, BsetBuilder, BsetKind, BucketNr, BucketPrio, Gen, Geometry, Identity, Inode, Jset, JsetBuilder,
    Node, PrioHeader, Ptr, Replay, Sector, Sectors, SetMagic, check_bset_order, encode_prio_set,
    for_each_bset, identify, parse_bucket, parse_entry, parse_node, parse_prio_set, select_replay,
};
use serde_json::Value as Json;

fn open_cache(image: &Image) -> CacheSuper {
    let raw = RawSuperblock::from_prefix(image.superblock()).unwrap();
    raw.check_cache(image.sectors(), 512).unwrap()
}

fn scan_journal(image: &Image, sb: &CacheSuper) -> (Vec<(Jset, usize)>, Replay) {
    let g = sb.geometry();
    let mut found = Vec::new();
    for (index, bucket) in sb.journal_buckets().enumerate() {
        let bytes = image.at(g.bucket_start(bucket), g.bucket_sectors);
        let scan = parse_bucket(bytes, sb.set_magic(), g.block_sectors).unwrap();
        assert_eq!(scan.max_seq(), scan.entries.iter().map(|(_, j)| j.seq).max());
        for (at, jset) in scan.entries {
            let (again, padded) = parse_entry(&bytes[at..], sb.set_magic(), g.block_sectors).unwrap();
            assert_eq!(again, jset);
            rewrite_jset(&bytes[at..at + padded], &jset, sb.set_magic(), g.block_sectors);
            found.push((jset, index));
        }
    }
    let replay = select_replay(found.iter().map(|(j, _)| j.clone()), sb.discard()).unwrap();
    (found, replay)
}

fn rewrite_jset(bytes: &[u8], jset: &Jset, magic: SetMagic, block: Sectors) {
    let mut builder = JsetBuilder::begin(vec![0xa5; bytes.len()], block);
    for key in &jset.keys {
        assert!(builder.push_key(key));
    }
    let padded = builder.finish(magic, jset.seq, jset.last_seq, &jset.roots());
    assert_eq!(padded, bytes.len());
    let len = JSET_HEADER_BYTES + 8 * builder.words();
    let written = builder.into_inner();
    assert_eq!(parse_entry(&written, magic, block).unwrap(), (jset.clone(), padded));
    // The spare words behind the keys of table and root may hold anything; the rest is fixed.
    for (from, to) in [(8, 64), (104, 128), (168, len)] {
        assert_eq!(written[from..to], bytes[from..to], "seq {} bytes {from}..{to}", jset.seq);
    }
}

fn gens(image: &Image, sb: &CacheSuper, first: u64) -> (Vec<BucketPrio>, usize) {
    let g = sb.geometry();
    let mut table = vec![BucketPrio::default(); g.nbuckets as usize];
    let (mut next, mut seq, mut seen) = (first, None, BTreeSet::new());
    for part in table.chunks_mut(g.prios_per_bucket as usize) {
        assert!(seen.insert(next), "bucket {next} twice");
        let start = g.bucket_start(BucketNr(u32::try_from(next).unwrap()));
        let bytes = image.at(start, g.meta_sectors);
        let header = parse_prio_set(bytes, sb.set_magic(), part).unwrap();
        assert_eq!(*seq.get_or_insert(header.seq), header.seq);
        let mut written = vec![0xa5; bytes.len()];
        encode_prio_set(&mut written, sb.set_magic(), header, part);
        // What stands behind the last entry has no meaning, but is checksummed.
        let end = 40 + 3 * part.len();
        assert!(written[8..end] == bytes[8..end], "bucket {next} is written differently");
        let mut again = vec![BucketPrio::default(); part.len()];
        assert_eq!(parse_prio_set(&written, sb.set_magic(), &mut again), Ok(header));
        assert!(again == *part);
        next = header.next_bucket;
    }
    assert_eq!(seen.len(), g.prio_buckets as usize);
    (table, seen.len())
}

/// The nodes of the tree and what is counted in them.
#[derive(Default)]
struct Tree {
    nodes: usize,
    bsets: usize,
    max_bsets: usize,
    freeing: usize,
    stale_children: usize,
}

struct Walk<'a> {
    image: &'a Image,
    sb: &'a CacheSuper,
    geometry: Geometry,
    gens: Vec<BucketPrio>,
    tree: Tree,
}

impl Walk<'_> {
    fn raise(&mut self, key: &Bkey) {
        let Some(ptr) = key.pointer().filter(|_| key.size() > Sectors::ZERO) else { return };
        if let Some(bucket) = self.geometry.ptr_bucket(ptr, key.size()) {
            let generation = &mut self.gens[bucket.0 as usize].generation;
            *generation = generation.raised_by(ptr.generation());
        }
    }

    fn is_stale(&self, ptr: Ptr) -> bool {
        let bucket = self.geometry.bucket_of(ptr.offset()).unwrap();
        self.gens[bucket.0 as usize].generation.age_of(ptr.generation()) > 0
    }

    fn node(&mut self, key: &Bkey, level: u16) {
        let bytes = self.image.of_key(key);
        let (magic, block) = (self.sb.set_magic(), self.geometry.block_sectors);
        let node = parse_node(bytes, key, magic, block).unwrap();
        self.tree.nodes += 1;
        self.tree.bsets += node.bsets.len();
        self.tree.max_bsets = self.tree.max_bsets.max(node.bsets.len());
        for set in &node.bsets {
            check_bset_order(BsetKind::of_level(level), set.keys.iter().copied()).unwrap();
        }
        rewrite_node(bytes, key, &node, magic, block);
        let keys = || node.bsets.iter().flat_map(|set| &set.keys);
        keys().for_each(|key| self.raise(key));
        if level == 0 {
            return;
        }
        self.tree.freeing += keys().filter(|key| key.is_zero_position()).count();
        let mut live = BTreeSet::new();
        for child in keys().filter(|key| !key.is_zero_position()) {
            if self.is_stale(child.ptr) {
                self.tree.stale_children += 1;
                continue;
            }
            assert!(live.insert(child.position()), "two children at one position");
            self.node(child, level - 1);
        }
        assert_eq!(live.last(), Some(&key.position()), "the last child ends where the node ends");
    }
}

fn rewrite_node(bytes: &[u8], key: &Bkey, node: &Node, magic: SetMagic, block: Sectors) {
    let mut visited = vec![Vec::new(); node.bsets.len()];
    let summary = for_each_bset(bytes, key, magic, block, |i, key| visited[i].push(key)).unwrap();
    assert_eq!((summary.seq, summary.bsets), (node.seq, node.bsets.len()));
    assert_eq!(summary.written_bytes, node.written_bytes);
    let mut at = 0;
    for (set, visited) in node.bsets.iter().zip(visited) {
        assert_eq!(set.keys, visited);
        assert_eq!(set.offset_bytes, at);
        let mut builder = BsetBuilder::begin(vec![0xa5; bytes.len() - at], node.seq, block);
        for key in &set.keys {
            assert!(builder.push_key(key));
        }
        let padded = builder.finish(magic, key.ptr);
        let len = 32 + 8 * builder.words();
        assert_eq!(builder.into_inner()[..len], bytes[at..at + len]);
        at += padded;
    }
    assert_eq!(at, node.written_bytes);
}

fn num(json: &Json, path: &str) -> u64 {
    json.pointer(path).and_then(Json::as_u64).unwrap_or_else(|| panic!("no {path}"))
}

fn text<'a>(json: &'a Json, path: &str) -> &'a str {
    json.pointer(path).and_then(Json::as_str).unwrap_or_else(|| panic!("no {path}"))
}

#[test]
fn superblocks_are_read_and_rewritten() {
    for dir in ALL {
        let image = Image::cache(dir);
        assert_eq!(identify(image.superblock()), Identity::Cache, "{dir}");
        let sb = open_cache(&image);
        assert!(sb.encode()[..] == *image.superblock(), "{dir}: rewritten differently");

        let image = Image::backing(dir);
        assert_eq!(identify(image.superblock()), Identity::Backing, "{dir}");
        let raw = RawSuperblock::from_prefix(image.superblock()).unwrap();
        let backing = raw.check_backing(image.sectors(), 512).unwrap();
        assert!(backing.encode()[..] == *image.superblock(), "{dir}: rewritten differently");
        assert_eq!(backing.data_offset(), Sector(16));

        let json = expected(dir);
        if dir == "01-fresh" {
            assert_eq!((sb.version(), sb.sync(), sb.geometry().njournal), (0, false, 0));
            assert_eq!((backing.version(), backing.state()), (1, BackingState::None));
            assert_eq!(backing.cache_mode(), Some(CacheMode::Writeback));
            assert_eq!(backing.set_uuid(), sb.set_uuid());
            continue;
        }
        let g = sb.geometry();
        assert!(sb.sync(), "{dir}");
        for (found, field) in [
            (sb.version(), "version"),
            (u64::from(g.nbuckets), "nbuckets"),
            (g.bucket_sectors.0, "bucket_size"),
            (g.block_sectors.0, "block_size"),
            (u64::from(g.first_bucket.0), "first_bucket"),
            (u64::from(g.njournal), "njournal"),
        ] {
            assert_eq!(found, num(&json, &format!("/cache/{field}")), "{dir} {field}");
        }
        assert_eq!(sb.uuid().to_string(), text(&json, "/cache/uuid"), "{dir}");
        assert_eq!(sb.set_uuid().to_string(), text(&json, "/cache/set_uuid"), "{dir}");
        let csum = format!("{:016x}", sb.stored_csum());
        assert_eq!(csum, text(&json, "/cache/superblock_csum"), "{dir}");
        let devices = json["devices"].as_array().unwrap();
        let device = devices.iter().find(|d| d["kind"] == "cached").unwrap();
        assert_eq!(backing.data_sectors().0, num(device, "/sectors"), "{dir}");
        assert_eq!(backing.uuid().to_string(), text(device, "/uuid"), "{dir}");
        assert_eq!(backing.state().name(), text(device, "/state"), "{dir}");
        assert_eq!(backing.cache_mode().unwrap().name(), text(device, "/mode"), "{dir}");
        assert_eq!(backing.set_uuid(), sb.set_uuid(), "{dir}");
    }
}

#[test]
fn everything_behind_the_superblock_is_read_and_rewritten() {
    for dir in &ALL[1..] {
        let (image, json) = (Image::cache(dir), expected(dir));
        let sb = open_cache(&image);
        let (found, replay) = scan_journal(&image, &sb);
        for (value, field) in [
            (replay.newest.0, "newest_seq"),
            (replay.oldest.0, "last_seq"),
            (replay.entries.len() as u64, "replay_entries"),
            (replay.entries.iter().map(|j| j.keys.len() as u64).sum(), "replay_key_count"),
        ] {
            assert_eq!(value, num(&json, &format!("/journal/{field}")), "{dir} {field}");
        }
        let index = found.iter().find(|(j, _)| j.seq == replay.newest).unwrap().1 as u64;
        assert_eq!(index, num(&json, "/journal/newest_in_journal_index"), "{dir}");
        check_last_seq(&replay).unwrap();
        let newest = replay.newest_entry().unwrap();
        newest.check_roots(sb.geometry(), sb.nr_this_dev()).unwrap();
        for jset in &replay.entries {
            jset.check_keys(sb.geometry()).unwrap();
        }

        let (gens, prio_buckets) = gens(&image, &sb, newest.prio_bucket[0]);
        assert_eq!(prio_buckets as u64, num(&json, "/buckets/prio"), "{dir}");
        let stored = gens.clone();

        let bytes = image.of_key(&newest.uuid_bucket);
        let table = parse_uuid_table(bytes, newest.version).unwrap();
        assert_eq!(table.len(), sb.geometry().nr_uuids as usize, "{dir}");
        check_uuid_table(&table).unwrap();
        let mut written = vec![0xa5; bytes.len()];
        encode_uuid_table(&mut written, &table);
        assert!(written == bytes, "{dir}: uuid table is written differently");
        let slots = json["uuid_slots"].as_object().unwrap();
        assert_eq!(format::uuid_table::used(&table).count(), slots.len(), "{dir}");
        for (Inode(slot), entry) in format::uuid_table::used(&table) {
            let known = &slots[&slot.to_string()];
            assert_eq!(entry.uuid.to_string(), text(known, "/uuid"), "{dir}");
            assert_eq!(known["volume"], entry.is_flash_only(), "{dir}");
            assert_eq!(known["invalidated"], entry.is_invalidated(), "{dir}");
            assert_eq!(entry.sectors.0, num(known, "/sectors"), "{dir}");
        }

        let geometry = *sb.geometry();
        let mut walk = Walk { image: &image, sb: &sb, geometry, gens, tree: Tree::default() };
        walk.raise(&newest.btree_root);
        walk.node(&newest.btree_root, newest.btree_level);
        replay.entries.iter().flat_map(|j| &j.keys).for_each(|key| walk.raise(key));
        assert_eq!(u64::from(newest.btree_level), num(&json, "/btree/root_level"), "{dir}");
        let tree = &walk.tree;
        for (value, field) in [
            (tree.nodes, "nodes"),
            (tree.bsets, "bsets"),
            (tree.max_bsets, "max_bsets"),
            (tree.freeing, "freeing_keys"),
            (tree.stale_children, "stale_child_keys"),
        ] {
            assert_eq!(value as u64, num(&json, &format!("/btree/{field}")), "{dir} {field}");
        }
        let raised = walk.gens.iter().zip(&stored).filter(|(a, b)| a != b).count() as u64;
        assert_eq!(raised, num(&json, "/gens_newer_than_prio_sets"), "{dir}");
    }
}

/// The numbers that `docs/format.md` quotes.
#[test]
fn worked_bytes() {
    let image = Image::cache("02-attached-empty");
    let sb = open_cache(&image);
    assert_eq!((sb.stored_csum(), sb.flags(), sb.seq()), (0x8482_394f_071c_4cf6, 1, 1));
    assert_eq!(sb.set_magic().jset(), 0x2f1c_b16d_98b3_3c9f);

    let bucket = image.at(Sector(256), Sectors(128));
    let scan = parse_bucket(bucket, sb.set_magic(), Sectors(1)).unwrap();
    let (at, first) = &scan.entries[0];
    assert_eq!((*at, first.seq.0, first.last_seq.0, first.version), (0, 1, 1, 1));
    assert_eq!(first.uuid_bucket, Bkey::uuid_bucket(Sectors(128), Ptr(0x50001)));
    assert_eq!(first.btree_root, Bkey::root(Sectors(128), Ptr(0xa8001)));
    assert_eq!((first.btree_level, first.prio_bucket[0]), (0, 9));
    assert_eq!(bucket[..8], 0xf3cf_d888_0ebb_e4a2_u64.to_le_bytes());
    let (at, second) = &scan.entries[1];
    assert_eq!((*at, second.seq.0, second.last_seq.0), (512, 2, 1));
    assert_eq!(second.uuid_bucket.ptr, Ptr(0xe0001));

    let node = image.of_key(&first.btree_root);
    let node = parse_node(node, &first.btree_root, sb.set_magic(), Sectors(1)).unwrap();
    assert_eq!(node.seq, 0x3c29_6f86_db80_f327);
    assert_eq!(node.bsets.len(), 2);
    assert!(node.bsets[0].keys.is_empty());
    let remains = node.bsets[1].keys[0];
    assert!(remains.ptr.is_check() && remains.size() == Sectors::ZERO);
    let extent = Bkey::extent(Inode(0), Sector(24), Sectors(8), false, Ptr(0xd8001));
    assert_eq!(node.bsets[1].keys[1], extent);

    let mut table = vec![BucketPrio::default(); 1024];
    let set = image.at(Sector(9 * 128), Sectors(128));
    let header = parse_prio_set(set, sb.set_magic(), &mut table).unwrap();
    assert_eq!(header, PrioHeader { seq: 1, next_bucket: 0 });
    let used = BucketPrio { prio: 32768, generation: Gen(1) };
    assert!(table[..9].iter().all(|b| *b == BucketPrio::default()));
    assert!(table[9..17].iter().all(|b| *b == used));
    assert!(table[17..].iter().all(|b| *b == BucketPrio::default()));
}
