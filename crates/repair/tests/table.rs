//! Each structure of each image set is destroyed alone, and repaired: what came back is a table in docs/repair.md.
//! `UBCACHE_REPAIR=write` writes it.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "test code")]

mod common;

use std::collections::BTreeMap;

use common::{DAMAGES, Set, check_table, damaged, fixtures, structures};
use format::Uuid;
use inspect::{CheckOptions, SliceSource, check_set};
use repair::plan;

/// What became of one kind of damage in all sets.
#[derive(Default)]
struct Row {
    sets: usize,
    mended: usize,
    unnoticed: usize,
    refused: usize,
    dirty: usize,
    right: usize,
    uncertain: bool,
}

fn one(set: &Set, structure: &common::Structure, damage: &str, row: &mut Row) {
    let (mut cache, mut backing) = (set.cache.clone(), set.backing.clone());
    let image = if structure.on_cache { &mut cache } else { &mut backing };
    damaged(&mut image[structure.range.clone()], structure.used - structure.range.start, damage);
    let (c, b) = (SliceSource::new("cache", &cache), SliceSource::new("backing", &backing));
    let plan = plan(&c, &[&b], Uuid([3; 16]));
    let report = plan.report();
    let (right, wrong) = set.compare(plan.cache(), &plan.backings()[0]);
    let what = format!(
        "{} of {} by {damage}: {right} of {} dirty sectors, {wrong} wrong\n{report}",
        structure.name,
        set.dir,
        set.dirty_sectors()
    );
    println!("{what}");
    row.sets += 1;
    row.dirty += set.dirty_sectors();
    row.right += right;
    row.uncertain |= report.steps.iter().any(|s| !s.uncertain.is_empty());
    if !plan.is_complete() {
        row.refused += 1;
        assert!(!report.refused.is_empty() || !report.remaining.is_empty(), "{what}");
        return;
    }
    let checked = check_set(plan.cache(), &[&plan.backings()[0]], CheckOptions::default());
    assert!(checked.is_ok(), "{what}{checked}");
    if plan.is_empty() {
        row.unnoticed += 1;
        return;
    }
    row.mended += 1;
    // What is said to be certain is right in every byte.
    let is_certain = report.steps.iter().all(|s| s.uncertain.is_empty());
    assert!(!is_certain || wrong == 0, "{what}");
}

fn text(rows: &BTreeMap<(usize, usize), (String, Row)>) -> String {
    let mut out = String::from(
        "| structure | damage | sets | mended | refused | not noticed | dirty sectors that came back | steps say that something is uncertain |\n|---|---|---|---|---|---|---|---|\n",
    );
    for ((_, damage), (name, row)) in rows {
        let Row { sets, mended, refused, unnoticed, right, dirty, .. } = row;
        let uncertain = if row.uncertain { "yes" } else { "no" };
        let damage = DAMAGES[*damage];
        out += &format!(
            "| {name} | {damage} | {sets} | {mended} | {refused} | {unnoticed} | {right} of {dirty} | {uncertain} |\n"
        );
    }
    out
}

#[test]
fn every_structure_destroyed_alone() {
    let mut rows: BTreeMap<(usize, usize), (String, Row)> = BTreeMap::new();
    for dir in fixtures::initialised() {
        let set = Set::new(dir);
        for structure in structures(&set) {
            for (n, damage) in DAMAGES.iter().enumerate() {
                let place = common::ORDER.iter().position(|name| *name == structure.name).unwrap();
                let (_, row) =
                    rows.entry((place, n)).or_insert_with(|| (structure.name.to_owned(), Row::default()));
                one(&set, &structure, damage, row);
            }
        }
    }
    check_table("repair", &text(&rows));
    // What has the information must bring everything back.
    for ((structure, damage), (name, row)) in &rows {
        if DAMAGES[*damage] == "one bit" && name != "UUID table" {
            assert_eq!((row.mended, row.right), (row.sets, row.dirty), "{name}: one bit");
        }
        if *structure < 2 || name == "prio set" {
            assert_eq!((row.mended, row.right), (row.sets, row.dirty), "{name}: {}", DAMAGES[*damage]);
        }
    }
}

/// An intact set is not changed.
#[test]
fn nothing_is_mended_in_an_intact_set() {
    for dir in fixtures::initialised() {
        let set = Set::new(dir);
        let (c, b) = (SliceSource::new("cache", &set.cache), SliceSource::new("backing", &set.backing));
        let plan = plan(&c, &[&b], Uuid([3; 16]));
        assert!(plan.is_empty() && plan.is_complete(), "{dir}: {}", plan.report());
        assert_eq!(plan.report().to_string(), "nothing to mend\n");
    }
}
