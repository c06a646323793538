//! Each structure of each image set is destroyed alone, and the contents are salvaged: no sector that the map calls certain has other
//! bytes than the intact set. The figures are a table in docs/repair.md. `UBCACHE_REPAIR=write` writes it.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "test code")]

mod common;

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::PathBuf;

use common::{Set, Structure, damaged, fixtures, structures};
use format::Uuid;
use inspect::{ExtractOptions, Extraction, SliceSource, StreamSink, Target};
use repair::{MapLine, Salvage, SalvageError, SalvageOptions, SalvageTarget, Salvaged, State, plan};

const DAMAGES: [&str; 3] = ["zeros", "garbage", "one bit"];

/// The options without and with trust in the end of the journal.
const TRUST: [bool; 2] = [false, true];

/// The disks of a set, with the contents that the intact set gives.
fn disks(set: &Set) -> Vec<(SalvageTarget, Vec<u8>)> {
    let (c, b) = (SliceSource::new("cache", &set.cache), SliceSource::new("backing", &set.backing));
    let volumes = set.view.volumes().map(|(inode, _)| (SalvageTarget::Volume(inode), Target::Volume(inode)));
    let all = std::iter::once((SalvageTarget::Backing(0), Target::Cached(&b))).chain(volumes);
    all.map(|(disk, target)| {
        let extraction = Extraction::new(&set.view, &c, target, ExtractOptions::default()).unwrap();
        let mut sink = StreamSink::new(Vec::new());
        extraction.run(&mut sink, &mut |_| ControlFlow::Continue(())).unwrap();
        (disk, sink.into_inner())
    })
    .collect()
}

/// The result of a salvage.
struct Got {
    image: Vec<u8>,
    map: Vec<MapLine>,
    summary: Salvaged,
}

fn salvaged(cache: &[u8], backing: &[u8], disk: SalvageTarget, trust: bool) -> Result<Got, SalvageError> {
    let (c, b) = (SliceSource::new("cache", cache), SliceSource::new("backing", backing));
    let plan = plan(&c, &[&b], Uuid([3; 16]));
    let options = SalvageOptions { trust_journal_end: trust, ..SalvageOptions::default() };
    let salvage = Salvage::new(&plan, disk, options)?;
    let (mut sink, mut map) = (StreamSink::new(Vec::new()), Vec::new());
    let mut line = |line: &MapLine| {
        map.push(line.clone());
        Ok(())
    };
    let summary = salvage.run(&mut sink, &mut line, &mut |_| ControlFlow::Continue(()))?;
    let image = sink.into_inner();
    well_formed(&map, &summary, image.len() as u64 / 512);
    Ok(Got { image, map, summary })
}

/// The map covers the disk without gaps, in order, with equal lines merged, and the summary has its sums.
fn well_formed(map: &[MapLine], summary: &Salvaged, sectors: u64) {
    let mut at = 0;
    for line in map {
        assert_eq!(line.start_sector, at);
        assert!(line.sectors > 0);
        assert_eq!(line.why.is_none(), line.state == State::Certain, "{line:?}");
        at += line.sectors;
    }
    assert_eq!((at, summary.sectors), (sectors, sectors));
    let differ = |a: &MapLine, b: &MapLine| (a.state, a.from, &a.why) != (b.state, b.from, &b.why);
    assert!(map.windows(2).all(|pair| differ(&pair[0], &pair[1])));
    for (state, part) in [
        (State::Certain, summary.certain),
        (State::Uncertain, summary.uncertain),
        (State::Lost, summary.lost),
    ] {
        let of_state = map.iter().filter(|l| l.state == state);
        assert_eq!(of_state.clone().map(|l| l.sectors).sum::<u64>(), part.sectors, "{state:?}");
        assert_eq!(of_state.count() as u64, part.ranges, "{state:?}");
    }
}

/// The sectors that the map calls certain and that have other bytes than `good`.
fn wrong(got: &Got, good: &[u8]) -> Vec<u64> {
    let certain = got.map.iter().filter(|l| l.state == State::Certain);
    let sector = |s: u64| s as usize * 512..(s as usize + 1) * 512;
    let each = certain.flat_map(|l| l.start_sector..l.start_sector + l.sectors);
    each.filter(|s| good.get(sector(*s)) != got.image.get(sector(*s))).collect()
}

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
    for (disk, good) in disks(set) {
        row.disks += 1;
        row.all += good.len() as u64 / 512;
        for (n, trust) in TRUST.into_iter().enumerate() {
            let what = format!("{} of {} by {damage}, {disk:?}, trust {trust}", structure.name, set.dir);
            match salvaged(&cache, &backing, disk, trust) {
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
        for structure in structures(&set) {
            for (n, damage) in DAMAGES.iter().enumerate() {
                let place = 1 + common::ORDER.iter().position(|name| *name == structure.name).unwrap();
                let (_, row) =
                    rows.entry((place, n)).or_insert_with(|| (structure.name.to_owned(), Row::default()));
                one(&set, &structure, damage, row);
            }
        }
    }
    let table = text(&rows);
    println!("{table}");
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/repair.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = page.split_once("<!-- salvage -->\n").unwrap();
    let (old, after) = rest.split_once("<!-- end of salvage -->\n").unwrap();
    if std::env::var("UBCACHE_REPAIR").is_ok_and(|v| v == "write") {
        let page = format!("{before}<!-- salvage -->\n{table}<!-- end of salvage -->\n{after}");
        std::fs::write(&path, page).unwrap();
    } else {
        assert_eq!(old, table, "run with UBCACHE_REPAIR=write");
    }
}
