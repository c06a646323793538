//! A device that cannot be read everywhere: if the root of the btree is destroyed, what may be missing is said, or nothing is rebuilt;
//! a salvage calls data lost, and metadata uncertain. The same of a superblock that names far more buckets than have data.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "test code")]

mod common;

use std::cell::Cell;
use std::ops::Range;

use common::salvaged::{disks, salvaged, wrong};
use common::{Set, Unreadable, fixtures, structures};
use format::superblock::SUPERBLOCK_SECTOR;
use format::{RawSuperblock, Sector, Sectors, Uuid};
use inspect::{PieceKind, ReadAt, ReadError, SliceSource};
use repair::{MapLine, Report, SalvageTarget, State, plan};

/// A set whose root is above leaves, with the root destroyed.
fn without_root() -> (Set, Vec<u8>) {
    let sets = fixtures::initialised().map(Set::new);
    let root = |set: &Set| structures(set).into_iter().find(|s| s.name == "root node above leaves");
    let (set, root) = sets.filter_map(|set| root(&set).map(|root| (set, root))).next().unwrap();
    let mut cache = set.cache.clone();
    cache[root.range].fill(0);
    (set, cache)
}

fn repaired(set: &Set, cache: &[u8], sectors: Range<u64>) -> Report {
    let device = Unreadable { image: SliceSource::new("cache", cache), sectors };
    let backing = SliceSource::new("backing", &set.backing);
    plan(&device, &[&backing], Uuid([3; 16])).report().clone()
}

fn uncertain(report: &Report) -> Vec<&String> {
    report.steps.iter().filter(|s| s.structure == "btree").flat_map(|s| &s.uncertain).collect()
}

#[test]
fn buckets_that_cannot_be_read_may_be_leaves() {
    let (set, cache) = without_root();
    let report = repaired(&set, &cache, 0..0);
    assert_eq!(uncertain(&report).len(), 1, "{report}");
    // A bucket that has neither metadata nor data.
    let g = set.view.geometry();
    let is_zero = |b: &u32| {
        let start = g.bucket_start(format::BucketNr(*b)).bytes() as usize;
        cache[start..start + g.bucket_sectors.bytes() as usize].iter().all(|byte| *byte == 0)
    };
    let unused = (g.first_dynamic().0..g.nbuckets).rev().find(is_zero).unwrap();
    let start = g.bucket_start(format::BucketNr(unused)).0;
    let report = repaired(&set, &cache, start..start + 8);
    let said = uncertain(&report);
    assert!(said.iter().any(|s| s.starts_with("1 bucket cannot be read")), "{report}");
}

#[test]
fn no_root_is_rebuilt_without_the_whole_journal() {
    let (set, cache) = without_root();
    let g = set.view.geometry();
    let journal = set.view.journal.as_ref().unwrap();
    let used: Vec<_> = journal.replay.iter().filter_map(|e| journal.entry(e.seq)).map(|e| e.bucket).collect();
    // The newest entries stay readable.
    let other = journal.buckets.iter().map(|b| b.bucket).find(|b| !used.contains(b)).unwrap();
    let start = g.bucket_start(other).0;
    let report = repaired(&set, &cache, start..start + g.bucket_sectors.0);
    assert!(report.steps.iter().all(|s| s.structure != "btree"), "{report}");
    let why = format!("journal bucket {other} cannot be read");
    assert!(report.refused.iter().any(|r| r.contains(&why)), "{report}");
}

/// The lines of a map that touch a sector.
fn around(map: &[MapLine], sector: u64) -> Vec<&MapLine> {
    map.iter().filter(|l| (l.start_sector..l.start_sector + l.sectors).contains(&sector)).collect()
}

#[test]
fn data_that_cannot_be_read_is_lost() {
    let set = Set::new("04-writeback-killed");
    let [(disk, good)] = &disks(&set)[..] else { panic!("one disk") };
    let (slot, _, _) = &set.dirty[0];
    let (piece, _) = set.view.live(*slot).find(|(_, kind)| *kind == PieceKind::Dirty).unwrap();
    let at = piece.ptr.unwrap().offset().0;
    let cache = Unreadable { image: SliceSource::new("cache", &set.cache), sectors: at..at + 1 };
    let sound = SliceSource::new("backing", &set.backing);
    let got = salvaged(&cache, &sound, *disk, true).unwrap();
    let first = piece.start.0 - 16;
    let line = around(&got.map, first)[0];
    assert_eq!((line.state, line.from), (State::Lost, "cache dirty"), "{line:?}");
    assert!(line.why.as_deref().unwrap().contains("cannot be read"));
    assert!((1..=8).contains(&got.summary.lost.sectors), "{}", got.summary);
    assert!(got.image[first as usize * 512..][..512].iter().all(|b| *b == 0));
    assert!(wrong(&got, good).is_empty());

    // A sector of the backing device that no key covers.
    let line = got.map.iter().find(|l| l.from == "backing" && l.sectors >= 8).unwrap();
    let at = line.start_sector + 16;
    let sound = SliceSource::new("cache", &set.cache);
    let backing = Unreadable { image: SliceSource::new("backing", &set.backing), sectors: at..at + 1 };
    let got = salvaged(&sound, &backing, *disk, true).unwrap();
    let line = around(&got.map, at - 16)[0];
    assert_eq!((line.state, line.from), (State::Lost, "backing"), "{line:?}");
    assert!(wrong(&got, good).is_empty());
}

#[test]
fn a_journal_that_cannot_be_read_makes_all_uncertain() {
    let set = Set::new("04-writeback-killed");
    let g = set.view.geometry();
    let info = set.view.journal.as_ref().unwrap().newest_info().unwrap();
    let start = g.bucket_start(info.bucket).0;
    let sound = SliceSource::new("backing", &set.backing);
    for sectors in [start..start + 1, g.bucket_start(g.first_bucket).0..g.bucket_start(g.first_dynamic()).0] {
        let cache = Unreadable { image: SliceSource::new("cache", &set.cache), sectors: sectors.clone() };
        let got = salvaged(&cache, &sound, SalvageTarget::Backing(0), true).unwrap();
        assert_eq!(got.summary.certain.sectors, 0, "{}", got.summary);
        if sectors.end > start + 1 {
            // Nothing is known of the set: the image has the data of the backing device.
            assert!(got.image == set.backing[16 * 512..][..got.image.len()]);
            assert_eq!((got.map.len(), got.map[0].from), (1, "backing"), "{}", got.summary);
        }
    }
}

/// Each structure of each set, and each of its first and last sectors alone.
#[test]
fn nothing_wrong_is_certain_whichever_structure_cannot_be_read() {
    for dir in fixtures::initialised() {
        let set = Set::new(dir);
        let disks = disks(&set);
        for structure in structures(&set) {
            let (start, end) = (structure.range.start as u64 / 512, structure.range.end as u64 / 512);
            for sectors in [start..end, start..start + 1, end - 1..end] {
                let nothing = 0..0;
                let (on_cache, on_backing) =
                    if structure.on_cache { (sectors, nothing) } else { (nothing, sectors) };
                let cache =
                    Unreadable { image: SliceSource::new("cache", &set.cache), sectors: on_cache.clone() };
                let image = SliceSource::new("backing", &set.backing);
                let backing = Unreadable { image, sectors: on_backing.clone() };
                for (disk, good) in &disks {
                    // The option is wrong if the end of the journal is damaged.
                    let trust = structure.name != "newest journal entry";
                    let Ok(got) = salvaged(&cache, &backing, *disk, trust) else { continue };
                    let wrong = wrong(&got, good);
                    let place = (structure.name, &on_cache, &on_backing);
                    assert!(wrong.is_empty(), "{dir}, {place:?}, {disk:?}: {wrong:?}: {}", got.summary);
                }
            }
        }
    }
}

/// A device of which all behind an image is a hole.
struct Huge<'a> {
    image: &'a [u8],
    sectors: u64,
    reads: Cell<u64>,
}

impl ReadAt for Huge<'_> {
    fn read_at(&self, at: Sector, into: &mut [u8]) -> Result<(), ReadError> {
        self.reads.set(self.reads.get() + 1);
        into.fill(0);
        let from = self.image.get(at.bytes() as usize..).unwrap_or_default();
        let n = from.len().min(into.len());
        into[..n].copy_from_slice(&from[..n]);
        Ok(())
    }

    fn sectors(&self) -> Sectors {
        Sectors(self.sectors)
    }

    fn name(&self) -> &str {
        "cache"
    }

    fn next_data(&self, from: Sector) -> Sector {
        if from.0 < self.image.len() as u64 / 512 { from } else { Sector(self.sectors) }
    }
}

#[test]
fn a_superblock_with_far_too_many_buckets_takes_no_longer() {
    let set = Set::new("04-writeback-killed");
    let [(disk, good)] = &disks(&set)[..] else { panic!("one disk") };
    let with_buckets = |buckets: u64| {
        let mut cache = set.cache.clone();
        let superblock = &mut cache[SUPERBLOCK_SECTOR.bytes() as usize..];
        superblock[184..192].copy_from_slice(&buckets.to_le_bytes());
        let checksum = RawSuperblock::from_prefix(superblock).unwrap().computed_csum().unwrap();
        superblock[..8].copy_from_slice(&checksum.to_le_bytes());
        cache
    };
    let sound = SliceSource::new("backing", &set.backing);
    let bucket = set.view.geometry().bucket_sectors.0;
    for (buckets, sectors) in [(1 << 40, set.cache.len() as u64 / 512), (1 << 28, bucket << 28)] {
        let image = with_buckets(buckets);
        let cache = Huge { image: &image, sectors, reads: Cell::new(0) };
        let got = salvaged(&cache, &sound, *disk, true).unwrap();
        assert!(wrong(&got, good).is_empty(), "{}", got.summary);
        // The first number cannot be right. The superblock is rebuilt, and the search for the journal reads all of the image.
        let is_rebuilt = sectors == set.cache.len() as u64 / 512;
        assert!(is_rebuilt || cache.reads.get() < 100_000, "{} reads", cache.reads.get());
        assert!(
            is_rebuilt
                || got.summary.refused.iter().any(|why| why.contains("expected at most 16777216 buckets"))
        );
        assert!(got.image == *good, "the contents do not depend on the number of buckets");
    }
}
