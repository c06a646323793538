//! Step 3: the chain of prio sets.
//!
//! Owns the walk along the chain. A set that cannot be read hides all later sets. With best effort, the generations of their
//! buckets come from pointers that are found later.

use std::collections::BTreeSet;

use format::geometry::prios_in;
use format::{BucketNr, BucketPrio, CacheSuper, Jset, PrioHeader, Sectors, parse_prio_set};

use super::gens::Gens;
use super::scan::{Scan, Stop};
use crate::device::unreadable_at;
use crate::finding::{Finding, Invariant, Mismatch, Place, Severity};

/// The chain of prio sets.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PrioView {
    /// Buckets of the sets that were read, in order.
    pub chain: Vec<BucketNr>,
    /// Number of the write to which the sets belong.
    pub seq: u64,
    /// Size of each set, in sectors.
    pub set_sectors: Sectors,
    /// Whether all sets were read.
    pub complete: bool,
}

/// A set of the chain that was read.
struct PrioSet {
    bucket: BucketNr,
    place: Place,
    header: PrioHeader,
    size: Sectors,
    entries: Vec<BucketPrio>,
}

/// The chain, as far as it was followed.
struct Chain<'a> {
    superblock: &'a CacheSuper,
    view: PrioView,
    /// The buckets that the chain has led to.
    visited: BTreeSet<BucketNr>,
    /// Number of buckets that the read sets describe.
    described: u32,
}

/// Reads the chain that starts at the bucket in the newest journal entry.
pub(super) fn open(
    scan: &mut Scan<'_>,
    superblock: &CacheSuper,
    newest: &Jset,
    gens: &mut Gens,
) -> Result<PrioView, Stop> {
    let geometry = superblock.geometry();
    let view = PrioView { set_sectors: geometry.meta_sectors, ..PrioView::default() };
    let mut chain = Chain { superblock, view, visited: BTreeSet::new(), described: 0 };
    let mut next = newest.prio_bucket.get(usize::from(superblock.nr_this_dev())).copied().unwrap_or(0);
    while chain.described < geometry.nbuckets {
        match chain.read_next(scan, next) {
            Ok(set) => {
                next = set.header.next_bucket;
                chain.add(scan, set, gens)?;
            }
            Err(finding) => {
                scan.report(*finding)?;
                let (described, last) = (chain.described, geometry.nbuckets - 1);
                scan.assume(format!(
                    "generations of buckets {described} to {last} are those of the newest pointers found: data of \
                     buckets that were reused since may appear"
                ));
                return Ok(chain.view);
            }
        }
    }
    chain.view.complete = true;
    Ok(chain.view)
}

impl Chain<'_> {
    /// Reads the set in the bucket `next`, which the chain must not have visited.
    fn read_next(&mut self, scan: &Scan<'_>, next: u64) -> Result<PrioSet, Box<Finding>> {
        let geometry = self.superblock.geometry();
        let item =
            format!("set {} of the chain, for buckets from {} on", self.view.chain.len(), self.described);
        let place = Place::new(scan.source.name(), "prio set").item(item);
        let bad = |place, expected: String, found: String| {
            Box::new(Finding::new(
                Severity::Fatal,
                Invariant::PrioChain,
                place,
                Mismatch::new("bucket", expected, found),
            ))
        };
        let dynamic = geometry.first_dynamic().0..geometry.nbuckets;
        let bucket = u32::try_from(next).ok().filter(|bucket| dynamic.contains(bucket)).map(BucketNr);
        let Some(bucket) = bucket else {
            let expected = format!("{} to {}", geometry.first_dynamic(), geometry.nbuckets - 1);
            return Err(bad(place, expected, next.to_string()));
        };
        if !self.visited.insert(bucket) {
            let expected = "a bucket that is not yet in the chain".to_owned();
            return Err(bad(place, expected, bucket.to_string()));
        }
        self.read(scan, bucket, place.sector(geometry.bucket_start(bucket)).bucket(bucket))
    }

    /// Reads the set in `bucket`. The checksum of the first set shows the size of all sets.
    fn read(&self, scan: &Scan<'_>, bucket: BucketNr, place: Place) -> Result<PrioSet, Box<Finding>> {
        let geometry = self.superblock.geometry();
        let view = &self.view;
        let first = view.chain.is_empty();
        let mut failure = None;
        for size in geometry.prio_set_sizes().filter(|&size| first || size == view.set_sectors) {
            let mut bytes = vec![0; usize::try_from(size.bytes()).unwrap_or(0)];
            if let Err(e) = scan.source.read_at(geometry.bucket_start(bucket), &mut bytes) {
                let finding = unreadable_at(Invariant::PrioChain, Severity::Fatal, place, &e);
                return Err(Box::new(failure.unwrap_or(finding)));
            }
            let left = geometry.nbuckets.saturating_sub(self.described).min(prios_in(size));
            let mut entries = vec![BucketPrio::default(); usize::try_from(left).unwrap_or(0)];
            match parse_prio_set(&bytes, self.superblock.set_magic(), &mut entries) {
                Ok(header) => return Ok(PrioSet { bucket, place, header, size, entries }),
                // The operator gets the error of the usual size.
                Err(e) => {
                    let place = place.clone();
                    let finding = || Finding::corrupt(Severity::Fatal, Invariant::PrioChain, place, &e);
                    failure = failure.or_else(|| Some(finding()));
                }
            }
        }
        Err(Box::new(failure.unwrap_or_else(|| {
            let (expected, found) = ("a size that fits into a bucket", view.set_sectors);
            Finding::new(Severity::Fatal, Invariant::PrioChain, place, Mismatch::new("size", expected, found))
        })))
    }

    /// Adds a set and takes its generations. Its number must be that of the sets before it.
    fn add(&mut self, scan: &mut Scan<'_>, set: PrioSet, gens: &mut Gens) -> Result<(), Stop> {
        let view = &mut self.view;
        if !view.chain.is_empty() && set.header.seq != view.seq {
            let (severity, invariant) = (Severity::Error, Invariant::PrioChain);
            let expected = format!("{}, as in the sets before", view.seq);
            scan.report(Finding::new(
                severity,
                invariant,
                set.place,
                Mismatch::new("seq", expected, set.header.seq),
            ))?;
        } else {
            view.seq = set.header.seq;
        }
        for (n, entry) in (self.described..).zip(&set.entries) {
            gens.store(BucketNr(n), entry.generation, entry.prio);
        }
        view.set_sectors = set.size;
        view.chain.push(set.bucket);
        self.described = self.described.saturating_add(prios_in(set.size));
        Ok(())
    }
}
