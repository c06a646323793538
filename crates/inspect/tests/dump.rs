//! What `super` and `dump` show of images of real devices.
#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use common::{backing, backing_source, cache, cache_source, expected, initialised, open};
use format::Inode;
use inspect::dump::{self, BtreeQuery, parse_path, to_json};
use serde_json::Value as Json;

fn json(doc: &impl serde::Serialize) -> Json {
    let json: Json = serde_json::from_str(&to_json(doc)).unwrap();
    assert_eq!(json["schema_version"], 1);
    json
}

/// bcache-super-show prints no zeros in front of a checksum.
#[test]
fn a_checksum_that_begins_with_zeros() {
    let image = cache("03-writeback-clean-stop");
    let mut doc = dump::superblock(&cache_source(&image)).unwrap();
    doc.csum = "007C4E1D35AB7A44".into();
    doc.csum_expected = Some(doc.csum.clone());
    assert!(doc.to_string().contains("sb.csum\t\t\t7C4E1D35AB7A44 [match]\n"), "{doc}");
    assert_eq!(json(&doc)["csum"], "007C4E1D35AB7A44");
}

#[test]
fn super_of_a_cache_device() {
    let image = cache("03-writeback-clean-stop");
    let doc = dump::superblock(&cache_source(&image)).unwrap();
    assert_eq!(
        doc.to_string(),
        "sb.magic\t\tok\n\
         sb.first_sector\t\t8 [match]\n\
         sb.csum\t\t\t5132ACBE660A3762 [match]\n\
         sb.version\t\t3 [cache device]\n\
         \n\
         dev.label\t\t(empty)\n\
         dev.uuid\t\t6b028f93-9737-46b6-a93c-abcb56e4f988\n\
         dev.sectors_per_block\t1\n\
         dev.sectors_per_bucket\t128\n\
         dev.cache.first_sector\t128\n\
         dev.cache.cache_sectors\t130944\n\
         dev.cache.total_sectors\t131072\n\
         dev.cache.ordered\tyes\n\
         dev.cache.discard\tno\n\
         dev.cache.pos\t\t0\n\
         dev.cache.replacement\t0 [lru]\n\
         \n\
         cset.uuid\t\td026c362-5bc8-4b03-a9aa-8f178c90c20f\n"
    );
    assert_eq!(json(&doc)["cache"]["journal_buckets"], 8);
}

#[test]
fn super_of_a_backing_device() {
    let image = backing("05-clean-only");
    let doc = dump::superblock(&backing_source(&image)).unwrap();
    let text = doc.to_string();
    for line in [
        "sb.version\t\t1 [backing device]",
        "dev.label\t\tdata-label",
        "dev.sectors_per_block\t8",
        "dev.data.first_sector\t16",
        "dev.data.cache_mode\t0 [writethrough]",
        "dev.data.cache_state\t1 [clean]",
        "cset.uuid\t\t11111111-2222-3333-4444-555555555555",
    ] {
        assert!(text.lines().any(|l| l == line), "{line} in {text}");
    }
    assert_eq!(json(&doc)["backing"]["data_sectors"], 32752);
}

#[test]
fn super_shows_what_it_can_of_a_damaged_one() {
    let mut image = backing("05-clean-only");
    image[4096 + 104] ^= 2;
    let doc = dump::superblock(&backing_source(&image)).unwrap();
    assert!(doc.to_string().contains(" [expected "), "{doc}");
    assert_eq!(json(&doc)["problem"]["field"], "checksum");
    image[4096 + 24] = 0;
    let doc = dump::superblock(&backing_source(&image)).unwrap();
    assert!(doc.to_string().starts_with("sb.magic\t\tbad magic\n"), "{doc}");
    assert_eq!(json(&doc)["problem"]["field"], "magic");
    assert!(dump::superblock(&backing_source(&image[..8000])).is_err());
}

#[test]
fn journal_shows_the_ring_and_what_is_replayed() {
    for dir in initialised() {
        let image = cache(dir);
        let (view, expected) = (open(&image), expected(dir));
        let doc = dump::journal(&view).unwrap();
        let json = json(&doc);
        assert_eq!(json["newest_seq"], expected["journal"]["newest_seq"]);
        assert_eq!(doc.buckets.len() as u64, expected["cache"]["njournal"].as_u64().unwrap());
        let replayed: Vec<_> = doc.entries.iter().filter(|e| e.replay).collect();
        assert_eq!(replayed.len() as u64, expected["journal"]["replay_entries"].as_u64().unwrap());
        assert!(replayed.iter().all(|e| e.keys.len() as u64 == e.key_count));
        assert!(doc.to_string().contains(&format!("entry {}", doc.newest_seq)));
        assert_eq!(doc.btree_root.to_string().split(',').next(), Some("end of keys"));
    }
    assert!(dump::journal(&open(&cache("01-fresh"))).is_none());
}

#[test]
fn btree_shows_nodes_by_path() {
    let image = cache("09-small-buckets-killed");
    let source = cache_source(&image);
    let view = open(&image);
    let all = dump::btree(&view, &source, &BtreeQuery { keys: true, ..BtreeQuery::default() }).unwrap();
    assert_eq!(all.nodes.len(), 64);
    assert_eq!(all.nodes.iter().map(|n| n.bsets.len()).sum::<usize>(), 86);
    for node in &all.nodes {
        assert!(node.bsets.iter().all(|set| set.keys.len() as u64 == set.key_count));
        assert_eq!(node.path.len(), 2 - usize::from(node.level));
    }
    let leaf = all.nodes.last().unwrap();
    let text: Vec<String> = leaf.path.iter().map(u32::to_string).collect();
    for text in [text.join("→"), text.join("/")] {
        let query = BtreeQuery { path: parse_path(&text).unwrap(), keys: false };
        let one = dump::btree(&view, &source, &query).unwrap();
        assert_eq!(one.nodes.len(), 1);
        assert_eq!(one.nodes[0].path, leaf.path);
        assert!(
            one.to_string().contains(&leaf.path.iter().map(u32::to_string).collect::<Vec<_>>().join("→"))
        );
    }
    assert_eq!(json(&all)["nodes"][0]["level"], 1);
    assert!(parse_path("12→x").is_err());
}

#[test]
fn extents_say_where_their_keys_stand() {
    let image = cache("06-volume-and-backing-killed");
    let view = open(&image);
    let doc = dump::extents(&view, Some(Inode(1)));
    let dirty: u64 = doc.extents.iter().filter(|e| e.kind == "dirty").map(|e| e.sectors).sum();
    assert_eq!(dirty, 1376);
    assert!(doc.extents.iter().all(|e| e.inode == 1 && e.path.is_empty() == e.journal_seq.is_some()));
    assert!(json(&dump::extents(&view, None))["extents"].as_array().unwrap().len() > doc.extents.len());
}

#[test]
fn buckets_and_slots() {
    for dir in initialised() {
        let image = cache(dir);
        let view = open(&image);
        let (doc, expected) = (dump::buckets(&view), expected(dir));
        assert_eq!(doc.counts.data, expected["buckets"]["data"].as_u64().unwrap());
        let shown = doc.buckets.iter().filter(|b| b.what == inspect::usage::Use::Data);
        assert_eq!(shown.count() as u64, doc.counts.data);
        let dirty: u64 = doc.buckets.iter().map(|b| b.dirty_sectors).sum();
        assert_eq!(dirty, view.totals().dirty_sectors);
        json(&doc);
        let slots = dump::uuids(&view);
        assert_eq!(slots.slots.len(), expected["uuid_slots"].as_object().unwrap().len());
        json(&slots);
    }
    let view = open(&cache("06-volume-and-backing-killed"));
    let text = dump::uuids(&view).to_string();
    assert!(text.contains("slot 0: volume 79d868a2-34eb-5441-61e5-756404522307"), "{text}");
    assert!(text.contains("8192 sectors"), "{text}");
}
