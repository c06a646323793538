//! Each structure of each image set is destroyed alone, and the contents are salvaged: no sector that the map calls certain has other
//! bytes than the intact set. The figures are a table in docs/repair.md. `UBCACHE_REPAIR=write` writes it.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "test code")]

mod common;

use std::collections::BTreeMap;

use common::salvaged::{disks, salvaged, wrong};
use common::{DAMAGES, ORDER, Set, Structure, check_table, damaged, fixtures, structures};
use format::{Sector, Sectors};
use inspect::SliceSource;
use inspect::view::NodeView;
use repair::Salvaged;

/// A structure that a salvage notices by the journal alone.
const LAST_BSET: &str = "last bset of a leaf";

/// The options without and with trust in the end of the journal.
const TRUST: [bool; 2] = [false, true];

/// What became of one kind of damage in all sets.
#[derive(Default)]
struct Row {
    disks: usize,
    refused: usize,
    all: u64,
    /// Certain, uncertain and lost sectors, without and with trust in the end of the journal.
    states: [[u64; 3]; 2],
}

fn one(set: &Set, structure: &Structure, damage: &str, row: &mut Row) {
    let (mut cache, mut backing) = (set.cache.clone(), set.backing.clone());
    let image = if structure.on_cache { &mut cache } else { &mut backing };
    damaged(&mut image[structure.range.clone()], structure.used - structure.range.start, damage);
    let (c, b) = (SliceSource::new("cache", &cache), SliceSource::new("backing", &backing));
    for (disk, good) in disks(set) {
        row.disks += 1;
        row.all += good.len() as u64 / 512;
        for (n, trust) in TRUST.into_iter().enumerate() {
            let what = format!("{} of {} by {damage}, {disk:?}, trust {trust}", structure.name, set.dir);
            match salvaged(&c, &b, disk, trust) {
                Err(e) => {
                    println!("{what}: {e}");
                    row.refused += usize::from(!trust);
                }
                Ok(got) => {
                    println!("{what}:\n{}", got.summary);
                    let Salvaged { certain, uncertain, lost, .. } = got.summary;
                    for (sum, part) in row.states[n].iter_mut().zip([certain, uncertain, lost]) {
                        *sum += part.sectors;
                    }
                    // Trust in the end of the journal is misplaced if its end was destroyed.
                    let misplaced = trust && structure.name == "newest journal entry" && damage != "one bit";
                    let wrong = wrong(&got, &good);
                    assert!(
                        misplaced || wrong.is_empty(),
                        "{what}: {} sectors: {:?}",
                        wrong.len(),
                        &wrong[..10.min(wrong.len())]
                    );
                }
            }
        }
    }
}

fn text(rows: &BTreeMap<(usize, usize), (String, Row)>) -> String {
    let mut out = String::from(
        "| structure | damage | disks | not salvaged | sectors | certain | uncertain | lost | certain with `--trust-journal-end` |\n\
         |---|---|---|---|---|---|---|---|---|\n",
    );
    for ((_, damage), (name, row)) in rows {
        let Row { disks, refused, all, states: [[certain, uncertain, lost], [trusted, ..]] } = row;
        let damage = DAMAGES.get(*damage).unwrap_or(&"none");
        out += &format!(
            "| {name} | {damage} | {disks} | {refused} | {all} | {certain} | {uncertain} | {lost} | {trusted} |\n"
        );
    }
    out
}

#[test]
fn nothing_wrong_is_certain_whatever_structure_is_destroyed() {
    let mut rows: BTreeMap<(usize, usize), (String, Row)> = BTreeMap::new();
    for dir in fixtures::initialised() {
        let set = Set::new(dir);
        let nothing = Structure { name: "none", on_cache: true, range: 0..0, used: 0 };
        let (_, row) = rows.entry((0, 3)).or_insert_with(|| ("none".to_owned(), Row::default()));
        one(&set, &nothing, "nothing", row);
        for structure in structures(&set).into_iter().chain(last_bset(&set)) {
            for (n, damage) in DAMAGES.iter().enumerate() {
                let place = ORDER.iter().position(|name| *name == structure.name).unwrap_or(ORDER.len()) + 1;
                let (_, row) =
                    rows.entry((place, n)).or_insert_with(|| (structure.name.to_owned(), Row::default()));
                one(&set, &structure, damage, row);
            }
        }
    }
    check_table("salvage", &text(&rows));
}

/// The last bset of the leaf that has the most. Without it the leaf seems to end before.
fn last_bset(set: &Set) -> Option<Structure> {
    let leaves = set.view.nodes.iter().filter(|n| n.level == 0 && n.bsets.len() > 1);
    let range = last_bset_of(leaves.max_by_key(|n| n.bsets.len())?);
    Some(Structure { name: LAST_BSET, on_cache: true, used: range.start + 18, range })
}

fn last_bset_of(node: &NodeView) -> std::ops::Range<usize> {
    let start = node.key.ptr.offset().bytes() as usize;
    let last = node.bsets.last().unwrap().offset_bytes as usize;
    start + last..start + node.written.bytes() as usize
}

/// The table has one structure of a kind; here each node, bset, needed journal entry and prio set is destroyed.
#[test]
fn nothing_wrong_is_certain_whichever_node_or_entry_is_destroyed() {
    for dir in fixtures::initialised() {
        let set = Set::new(dir);
        let (g, disks) = (*set.view.geometry(), disks(&set));
        let bytes = |start: Sector, len: Sectors| start.bytes() as usize..(start.0 + len.0) as usize * 512;
        let journal = set.view.journal.as_ref().unwrap();
        let entries = journal.replay.iter().filter(|e| e.seq != journal.newest);
        let entries = entries.filter_map(|e| journal.entry(e.seq)).map(|e| bytes(e.sector, e.sectors));
        let nodes = set.view.nodes.iter().map(|n| bytes(n.key.ptr.offset(), n.key.size()));
        let prio = set.view.prio.chain.iter().map(|b| bytes(g.bucket_start(*b), g.meta_sectors));
        let bsets = set.view.nodes.iter().filter(|n| n.bsets.len() > 1).map(last_bset_of);
        let all: Vec<_> = entries.step_by(4).chain(nodes.step_by(2)).chain(prio).chain(bsets).collect();
        println!("{dir}: {} structures", all.len());
        for range in all {
            let mut cache = set.cache.clone();
            cache[range.clone()].fill(0);
            let (c, b) = (SliceSource::new("cache", &cache), SliceSource::new("backing", &set.backing));
            for (disk, good) in &disks {
                let Ok(got) = salvaged(&c, &b, *disk, true) else { continue };
                let wrong = wrong(&got, good);
                assert!(
                    wrong.is_empty(),
                    "{dir}, {range:?}, {disk:?}: {} sectors: {}",
                    wrong.len(),
                    got.summary
                );
            }
        }
    }
}
