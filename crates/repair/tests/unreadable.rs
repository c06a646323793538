//! A destroyed root of the btree on a device that cannot be read everywhere: what may be missing is said, or nothing is rebuilt.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "test code")]

mod common;

use std::ops::Range;

use common::{Set, fixtures, structures};
use format::{Sector, Sectors, Uuid};
use inspect::{ReadAt, ReadError, ReadFailure, SliceSource};
use repair::{Report, plan};

/// A device that fails every read of some sectors.
struct Unreadable<'a> {
    image: SliceSource<'a>,
    sectors: Range<u64>,
}

impl ReadAt for Unreadable<'_> {
    fn read_at(&self, at: Sector, into: &mut [u8]) -> Result<(), ReadError> {
        let end = at.0 + into.len() as u64 / 512;
        if at.0 < self.sectors.end && self.sectors.start < end {
            let reason = ReadFailure::Io(std::io::ErrorKind::Other.into());
            let sectors = Sectors::from_bytes_ceil(into.len() as u64);
            return Err(ReadError { device: self.name().to_owned(), at, sectors, reason });
        }
        self.image.read_at(at, into)
    }

    fn sectors(&self) -> Sectors {
        self.image.sectors()
    }

    fn name(&self) -> &str {
        self.image.name()
    }
}

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
