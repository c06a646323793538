//! Step 3: the chain of prio sets.
//!
//! Owns following the chain. A set that cannot be read hides all behind it; in best effort their
//! generations come from the pointers found later.

use std::collections::BTreeSet;

use format::geometry::prios_in;
use format::{BucketNr, BucketPrio, CacheSuper, Jset, PrioHeader, Sectors, parse_prio_set};

use super::gens::Gens;
use super::scan::{Scan, Stop};
use crate::device::unreadable_at;
use crate::finding::{Finding, Invariant, Place, Severity};

/// The chain of prio sets.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PrioView {
    /// Buckets of the sets that were read, in order.
    pub chain: Vec<BucketNr>,
    /// Number of the write they belong to.
    pub seq: u64,
    /// Size of each set, in sectors.
    pub set_sectors: Sectors,
    /// All sets were read.
    pub complete: bool,
}

/// Reads the chain that starts at the bucket in the newest journal entry.
pub(super) fn open(
    scan: &mut Scan<'_>,
    superblock: &CacheSuper,
    newest: &Jset,
    gens: &mut Gens,
) -> Result<PrioView, Stop> {
    let geometry = superblock.geometry();
    let mut view = PrioView { set_sectors: geometry.meta_sectors, ..PrioView::default() };
    let mut seen = BTreeSet::new();
    let mut described = 0u32;
    let mut next = newest.prio_bucket.get(usize::from(superblock.nr_this_dev())).copied().unwrap_or(0);
    while described < geometry.nbuckets {
        let index = view.chain.len();
        let item = format!("set {index} of the chain, for buckets from {described} on");
        let place = Place::new(scan.source.name(), "prio set").item(item);
        let bucket = u32::try_from(next).ok().map(BucketNr);
        let bucket = bucket.filter(|b| (geometry.first_dynamic().0..geometry.nbuckets).contains(&b.0));
        let finding = match bucket {
            None => Finding::new(
                Severity::Fatal,
                Invariant::PrioChain,
                place,
                "bucket",
                format!("{} to {}", geometry.first_dynamic(), geometry.nbuckets - 1),
                next,
            ),
            Some(bucket) if !seen.insert(bucket) => Finding::new(
                Severity::Fatal,
                Invariant::PrioChain,
                place,
                "bucket",
                "a bucket that is not yet in the chain",
                bucket,
            ),
            Some(bucket) => {
                let place = place.sector(geometry.bucket_start(bucket)).bucket(bucket);
                match read_set(scan, superblock, bucket, described, &view, place.clone()) {
                    Ok((header, size, entries)) => {
                        if index > 0 && header.seq != view.seq {
                            scan.report(Finding::new(
                                Severity::Error,
                                Invariant::PrioChain,
                                place,
                                "seq",
                                format!("{}, as in the sets before", view.seq),
                                header.seq,
                            ))?;
                        } else {
                            view.seq = header.seq;
                        }
                        for (n, entry) in (described..).zip(&entries) {
                            gens.store(BucketNr(n), entry.generation, entry.prio);
                        }
                        view.set_sectors = size;
                        view.chain.push(bucket);
                        described = described.saturating_add(prios_in(size));
                        next = header.next_bucket;
                        continue;
                    }
                    Err(finding) => *finding,
                }
            }
        };
        scan.report(finding)?;
        let last = geometry.nbuckets - 1;
        scan.assume(format!(
            "generations of buckets {described} to {last} are those of the newest pointers found: data of \
             buckets that were reused since may appear"
        ));
        return Ok(view);
    }
    view.complete = true;
    Ok(view)
}

/// Reads one set. The checksum of the first set shows their size.
fn read_set(
    scan: &Scan<'_>,
    superblock: &CacheSuper,
    bucket: BucketNr,
    described: u32,
    view: &PrioView,
    place: Place,
) -> Result<(PrioHeader, Sectors, Vec<BucketPrio>), Box<Finding>> {
    let geometry = superblock.geometry();
    let first = view.chain.is_empty();
    let mut failure = None;
    for size in geometry.prio_set_sizes().filter(|&size| first || size == view.set_sectors) {
        let mut bytes = vec![0; usize::try_from(size.bytes()).unwrap_or(0)];
        if let Err(e) = scan.source.read_at(geometry.bucket_start(bucket), &mut bytes) {
            let finding = unreadable_at(Invariant::PrioChain, Severity::Fatal, place.clone(), &e);
            return Err(Box::new(failure.unwrap_or(finding)));
        }
        let left = geometry.nbuckets.saturating_sub(described).min(prios_in(size));
        let mut entries = vec![BucketPrio::default(); usize::try_from(left).unwrap_or(0)];
        match parse_prio_set(&bytes, superblock.set_magic(), &mut entries) {
            Ok(header) => return Ok((header, size, entries)),
            // That of the usual size is what the operator should read.
            Err(e) => {
                let finding = || Finding::corrupt(Severity::Fatal, Invariant::PrioChain, place.clone(), &e);
                failure = failure.or_else(|| Some(finding()));
            }
        }
    }
    Err(Box::new(failure.unwrap_or_else(|| {
        let (expected, found) = ("a size that fits into a bucket", view.set_sectors);
        Finding::new(Severity::Fatal, Invariant::PrioChain, place, "size", expected, found)
    })))
}
