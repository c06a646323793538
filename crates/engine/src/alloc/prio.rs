//! The priorities and generations of buckets on disk.
//!
//! Owns the prio chain: reading it at the start and writing a new one. A chain is written to buckets taken for it, the
//! last prio set first, and takes effect with the journal entry that names it. Then the buckets of the chain before are
//! ready for use with their generations, because no pointer to data in them was ever made.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;

use format::{BucketNr, BucketPrio, Gen, JsetRoots, PrioHeader, Sectors, encode_prio_set, parse_prio_set};
use io::sync::{Mutex, Permit};
use io::try_table;

use super::{Allocator, Buckets, Purpose};
use crate::canary::{Bug, bug};
use crate::damage::Flaw;
use crate::device::Reader;
use crate::error::{EngineError, NoSpace};
use crate::journal::Urgency;

/// The content of the newest chain.
pub(crate) struct LoadedPrios {
    pub(crate) prios: Vec<BucketPrio>,
    pub(crate) chain: Vec<BucketNr>,
    pub(crate) seq: u64,
}

/// The newest durable prio chain.
pub(super) struct PrioChain {
    pub(super) buckets: RefCell<Vec<BucketNr>>,
    pub(super) seq: Cell<u64>,
    /// Whether this run has written the chain, so that it has the present generations of its buckets.
    pub(super) is_ours: Cell<bool>,
    /// Whether a task waits for a chain with the present generations.
    wanted: Cell<bool>,
    /// Held from the invalidation of buckets until prio sets with their generations are durable.
    pub(super) lock: Mutex,
}

impl PrioChain {
    /// Makes the state for the chain that recovery has read.
    pub(super) fn found(loaded: LoadedPrios) -> PrioChain {
        PrioChain {
            buckets: RefCell::new(loaded.chain),
            seq: Cell::new(loaded.seq),
            is_ours: Cell::new(false),
            wanted: Cell::new(false),
            lock: Mutex::default(),
        }
    }

    pub(super) async fn hold(&self) -> Permit {
        self.lock.lock().await
    }

    pub(super) fn is_ours(&self) -> bool {
        self.is_ours.get()
    }

    /// Requests a chain. The refill task writes it or refuses, and ends the request.
    pub(super) fn want(&self) {
        self.wanted.set(true);
    }

    pub(super) fn is_wanted(&self) -> bool {
        self.wanted.get()
    }

    pub(super) fn end_request(&self) {
        self.wanted.set(false);
    }

    pub(super) fn buckets(&self) -> Vec<BucketNr> {
        self.buckets.borrow().clone()
    }
}

/// Reads the chain that begins in bucket `first`.
pub(crate) async fn load_prios(reader: &Reader<'_>, first: u64) -> Result<LoadedPrios, EngineError> {
    let Reader { place, geometry, .. } = *reader;
    let prios = try_table(geometry.nbuckets as usize, || BucketPrio { prio: 0, generation: Gen(0) })
        .map_err(|e| place.no_memory(geometry, e))?;
    let mut loaded = LoadedPrios { prios, chain: Vec::new(), seq: 0 };
    let mut next = first;
    let mut seen = BTreeSet::new();
    let mut size = None;
    let sets = geometry.prio_buckets as usize;
    let mut at = 0;
    for index in 0..sets {
        let Some(bucket) = u32::try_from(next)
            .ok()
            .map(BucketNr)
            .filter(|b| *b >= geometry.first_dynamic() && b.0 < geometry.nbuckets && seen.insert(*b))
        else {
            let (first, end) = (geometry.first_dynamic(), geometry.nbuckets);
            let flaw = Flaw::PrioBucket { index, sets, first, end, found: next };
            return Err(place.damage(format::Sector(0), flaw));
        };
        let sector = geometry.bucket_start(bucket);
        let (header, read) = read_set(reader, bucket, size).await?;
        if index > 0 && header.seq != loaded.seq {
            let flaw = Flaw::PrioSeq { index, sets, expected: loaded.seq, found: header.seq };
            return Err(place.damage_at(sector, Some((bucket, None)), Vec::new(), flaw));
        }
        size = Some(read.size);
        loaded.seq = header.seq;
        loaded.chain.push(bucket);
        for p in read.prios {
            if let Some(slot) = loaded.prios.get_mut(at) {
                *slot = p;
                at += 1;
            }
        }
        next = header.next_bucket;
    }
    Ok(loaded)
}

/// A prio set that was read, and its size.
struct ReadSet {
    prios: Vec<BucketPrio>,
    size: Sectors,
}

/// Reads one prio set. Its size is not stored, and other machines may have used another size (format section 3.2).
async fn read_set(
    reader: &Reader<'_>,
    bucket: BucketNr,
    known: Option<Sectors>,
) -> Result<(PrioHeader, ReadSet), EngineError> {
    let Reader { disk, place, geometry, magic } = *reader;
    let sector = geometry.bucket_start(bucket);
    let mut first_error = None;
    for size in geometry.prio_set_sizes() {
        if known.is_some_and(|k| k != size) {
            continue;
        }
        let buffer = disk.runtime().pool().take(size.bytes() as usize);
        let (buffer, result) = disk.read(sector, buffer).await;
        result?;
        // The last prio set may have more places than there are buckets left.
        let count = format::prio::prio_capacity(buffer.len());
        let mut prios = vec![BucketPrio { prio: 0, generation: Gen(0) }; count];
        match parse_prio_set(buffer.as_slice(), magic, &mut prios) {
            Ok(header) => return Ok((header, ReadSet { prios, size })),
            Err(c) => drop(first_error.get_or_insert(c)),
        }
    }
    let flaw = first_error.map_or(Flaw::NoPrioSize, Flaw::Field);
    Err(place.damage_at(sector, Some((bucket, None)), Vec::new(), flaw))
}

/// Writes the present priorities and generations, and waits until they are durable.
pub(super) async fn write_prios(alloc: &Allocator) -> Result<(), EngineError> {
    let geometry = &alloc.geometry;
    let sets = geometry.prio_buckets as usize;
    let chain: Vec<BucketNr> = {
        let buckets = &mut *alloc.buckets.borrow_mut();
        let mut chain = Vec::with_capacity(sets);
        while chain.len() < sets {
            match alloc.pool.try_take(Purpose::Prio, buckets) {
                Some(b) => chain.push(b),
                None => {
                    for b in &chain {
                        buckets.make_ready(*b);
                    }
                    alloc.pool.put_ready(chain);
                    let device = alloc.device.place().device.clone();
                    return Err(NoSpace::Priorities { device, buckets: sets }.into());
                }
            }
        }
        chain
    };
    let seq = alloc.prios.seq.get() + 1;
    // All prio sets have the state of this moment; a bucket that is invalidated later goes into the next chain.
    let prios: Vec<BucketPrio> =
        alloc.buckets.borrow().prios().map(|(prio, generation)| BucketPrio { prio, generation }).collect();
    let per_set = geometry.prios_per_bucket as usize;
    let groups: Vec<&[BucketPrio]> = prios.chunks(per_set).collect();
    let mut next_bucket = 0;
    for (bucket, group) in chain.iter().zip(&groups).rev() {
        let mut buffer = alloc.device.disk().runtime().pool().zeroed(geometry.meta_sectors.bytes() as usize);
        encode_prio_set(buffer.as_mut(), alloc.device.magic(), PrioHeader { seq, next_bucket }, group);
        alloc.device.write_metadata(geometry.bucket_start(*bucket), buffer).await?;
        next_bucket = u64::from(bucket.0);
    }
    let nr = usize::from(alloc.device.superblock().nr_this_dev());
    // Leaf writes that free the journal may wait for the buckets that this chain makes ready.
    let urgency = || if alloc.pool.is_short_of_btree() { Urgency::Frees } else { Urgency::CanWait };
    let change = |r: &mut JsetRoots| {
        if let Some(slot) = r.prio_bucket.get_mut(nr) {
            *slot = next_bucket;
        }
    };
    let early = bug(Bug::OldChainReusedEarly);
    if early {
        retire_chain(alloc, chain.clone());
    }
    alloc.journal.commit_roots(urgency, change).await?;
    alloc.prios.seq.set(seq);
    if !early {
        retire_chain(alloc, chain);
    }
    alloc.stored(&prios);
    alloc.count(|c| c.prio_writes += 1);
    Ok(())
}

/// Replaces the old chain by `chain`, which the journal names durably, and frees the buckets of the old one.
fn retire_chain(alloc: &Allocator, chain: Vec<BucketNr>) {
    let old = alloc.prios.buckets.replace(chain);
    if alloc.prios.is_ours.replace(true) {
        for b in &old {
            alloc.buckets.borrow_mut().make_ready(*b);
        }
        let n = old.len();
        alloc.pool.put_ready(old);
        if bug(Bug::OldChainReusedEarly) {
            // These buckets are taken next. Otherwise a crash would rarely find one of them in use.
            alloc.pool.put_first(n);
        }
    } else {
        // A chain that was read at the start may list its own buckets with older generations, which pointers may have.
        for b in &old {
            alloc.buckets.borrow_mut().free_metadata(*b);
        }
    }
}

/// Puts the content of a chain into the bucket table.
pub(crate) fn apply_prios(buckets: &mut Buckets, loaded: &LoadedPrios) {
    for (b, p) in loaded.prios.iter().enumerate() {
        buckets.load(BucketNr(b as u32), p.generation, p.prio);
    }
    for b in &loaded.chain {
        buckets.mark_metadata(*b);
    }
}

#[cfg(test)]
mod tests;
