//! The view agrees with everything that is known about images of real devices.
#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use common::{ALL, cache, expected, initialised, open};
use format::{Inode, Sector, Uuid};
use inspect::view::SlotKind;
use serde_json::{Value as Json, json};

/// Compares the part of `expected` with this name, member by member.
fn same(dir: &str, name: &str, found: &Json) {
    let expected = expected(dir);
    for (field, value) in expected[name].as_object().unwrap() {
        assert_eq!(&found[field], value, "{dir}: {name}.{field}");
    }
}

#[test]
fn superblock_and_sizes_are_those_of_the_kernel() {
    for dir in initialised() {
        let view = open(&cache(dir));
        let (sb, g) = (&view.superblock, view.geometry());
        let found = json!({
            "version": sb.version(), "nbuckets": g.nbuckets, "bucket_size": g.bucket_sectors.0,
            "block_size": g.block_sectors.0, "first_bucket": g.first_bucket.0, "njournal": g.njournal,
            "set_uuid": sb.set_uuid().to_string(), "uuid": sb.uuid().to_string(),
            "superblock_csum": format!("{:x}", sb.stored_csum()),
        });
        same(dir, "cache", &found);
    }
}

#[test]
fn the_journal_has_the_entries_of_the_kernel() {
    for dir in initialised() {
        let view = open(&cache(dir));
        let j = view.journal.as_ref().unwrap();
        let found = json!({
            "newest_seq": j.newest.0, "last_seq": j.oldest.0, "replay_entries": j.replay.len(),
            "replay_key_count": j.replay_keys(),
            "newest_in_journal_index": j.newest_info().unwrap().journal_index,
        });
        same(dir, "journal", &found);
        assert_eq!(expected(dir)["gens_newer_than_prio_sets"], view.gens.raised(), "{dir}");
    }
}

#[test]
fn nodes_and_extents_are_counted_as_expected() {
    for dir in initialised() {
        let view = open(&cache(dir));
        let (b, t) = (&view.btree, view.totals());
        let found = json!({
            "root_level": b.root_level, "nodes": b.nodes, "bsets": b.bsets, "max_bsets": b.max_bsets,
            "freeing_keys": b.freeing_keys, "stale_child_keys": b.stale_child_keys,
            "live_extents": t.live_extents(), "dirty_extents": t.dirty_extents,
            "stale_extents": t.stale_extents, "holes": t.holes,
        });
        same(dir, "btree", &found);
        assert_eq!(view.nodes.len() as u64, b.nodes, "{dir}");
    }
}

#[test]
fn slots_have_their_kinds_and_uuids() {
    for dir in initialised() {
        let view = open(&cache(dir));
        let expected = expected(dir);
        let slots = expected["uuid_slots"].as_object().unwrap();
        assert_eq!(slots.len(), view.slots.len(), "{dir}");
        for (inode, slot) in slots {
            let found = &view.slots[&Inode(inode.parse().unwrap())];
            let kind = match (slot["volume"].as_bool().unwrap(), slot["invalidated"].as_bool().unwrap()) {
                (true, _) => SlotKind::Volume(format::Sectors(slot["sectors"].as_u64().unwrap())),
                (false, true) => SlotKind::Invalidated,
                (false, false) => SlotKind::Cached,
            };
            assert_eq!(
                (found.kind, found.uuid),
                (kind, slot["uuid"].as_str().unwrap().parse::<Uuid>().unwrap())
            );
        }
        for device in expected["devices"].as_array().unwrap() {
            let t = view.totals_of(Inode(device["inode"].as_u64().unwrap() as u32));
            assert_eq!(
                (device["dirty_sectors"].as_u64(), device["clean_sectors"].as_u64()),
                (Some(t.dirty_sectors), Some(t.clean_sectors)),
                "{dir}"
            );
        }
    }
}

/// Every live extent after replay, with position, state, place in the cache and data.
#[test]
fn every_live_extent_is_where_it_is_expected() {
    let mut compared = 0;
    for dir in initialised().filter(|dir| *dir != "02-attached-empty") {
        let image = cache(dir);
        let view = open(&image);
        let devices = expected(dir)["devices"].as_array().unwrap().clone();
        let mut found = String::from("inode\tstart_sector\tsectors\tstate\tcache_sector\tsha256_first16\n");
        for (inode, piece, kind) in view.pieces().filter(|(_, _, kind)| kind.is_live()) {
            let device = devices.iter().find(|d| d["inode"] == inode.0).unwrap();
            let start = piece.start.0 - device["data_offset"].as_u64().unwrap();
            let at = piece.ptr.unwrap().offset();
            let range = at.bytes() as usize..Sector(at.0 + piece.len.0).bytes() as usize;
            let digest: String = common::sha256(&image[range])[..16].into();
            found += &format!("{inode}\t{start}\t{}\t{}\t{at}\t{digest}\n", piece.len, kind.name());
            compared += 1;
        }
        let expected = String::from_utf8(common::file(dir, "regions.tsv.zst")).unwrap();
        let sorted = |text: &str| {
            let mut lines: Vec<String> = text.lines().map(String::from).collect();
            lines.sort();
            lines
        };
        assert_eq!(sorted(&found), sorted(&expected), "{dir}");
    }
    assert!(compared > 15_000, "{compared}");
}

#[test]
fn nothing_is_found_wrong_with_them() {
    for dir in ALL {
        let view = open(&cache(dir));
        assert_eq!(view.findings.list(), [], "{dir}");
        assert_eq!(view.is_initialised(), dir != "01-fresh");
    }
}
