//! The prio sets: generations and priorities of the buckets.
//!
//! Owns their repair: a flipped bit, or the rest of the chain from the keys. A generation is then that of the newest pointer
//! into the bucket. Clean data of such a bucket is given up, because an older pointer could lead to other data; the backing
//! devices have it. Dirty data is never in a bucket that was reused.

use std::collections::BTreeMap;

use format::{BucketNr, BucketPrio, Gen, PrioHeader, Sector, counted, encode_prio_set, form, parse_prio_set};
use inspect::usage::{Usage, Use};
use inspect::view::SlotKind;
use inspect::{PieceKind, ReadAt, SetView};

use crate::bits::{self, Extent};
use crate::reason::Unrepairable;
use crate::work::{Doubt, Work};

const STRUCTURE: &str = "prio sets";
/// The priority of a bucket that was just filled.
const INITIAL_PRIO: u16 = 32_768;
/// Number of buckets whose generations are rebuilt at most. Their sets take 200 MB of memory.
const MOST_BUCKETS: u32 = 1 << 24;

/// Mends the chain if it is not complete.
pub(crate) fn mend(work: &mut Work<'_>) {
    if work.superblock().is_none_or(|s| !s.sync()) {
        return;
    }
    let device = work.cache.name().to_owned();
    let mut corrected = 0u64;
    let view = loop {
        let Some(view) = work.view().filter(|v| v.journal.is_some() && !v.prio.complete) else {
            report_corrected(work, corrected);
            return;
        };
        match correct(work, &view) {
            Some((at, bytes)) => work.cache.write(at, &bytes),
            None => break view,
        }
        corrected += 1;
    };
    report_corrected(work, corrected);
    match rebuild(work, &view) {
        Ok(NewSets { first, sets, action, uncertain }) => {
            work.doubts.push(Doubt::Generations(first));
            sets.iter().for_each(|(at, bytes)| work.cache.write(*at, bytes));
            work.step(STRUCTURE, device, action, uncertain);
        }
        Err(why) => work.refuse(format!("{device}: the chain of prio sets is broken: {why}")),
    }
}

fn report_corrected(work: &mut Work<'_>, corrected: u64) {
    if corrected > 0 {
        let device = work.cache.name().to_owned();
        let action = format!("{} had one flipped bit; it is flipped back", counted(corrected, "prio set"));
        work.step(STRUCTURE, device, action, Vec::new());
    }
}

/// The bucket of the set at which the chain breaks.
fn broken(work: &Work<'_>, view: &SetView) -> Option<BucketNr> {
    let g = *view.geometry();
    let next = match view.prio.chain.last() {
        None => {
            let newest = view.journal.as_ref()?.replay.last()?;
            newest.prio_bucket.get(usize::from(view.superblock.nr_this_dev())).copied()?
        }
        Some(last) => {
            let mut bytes = vec![0; usize::try_from(view.prio.set_sectors.bytes()).ok()?];
            work.cache.read_at(g.bucket_start(*last), &mut bytes).ok()?;
            parse_prio_set(&bytes, view.superblock.set_magic(), &mut []).ok()?.next_bucket
        }
    };
    let bucket = BucketNr(u32::try_from(next).ok()?);
    (bucket >= g.first_dynamic() && bucket.0 < g.nbuckets).then_some(bucket)
}

/// The set at which the chain breaks, if one flipped bit explains the damage.
fn correct(work: &Work<'_>, view: &SetView) -> Option<(Sector, Vec<u8>)> {
    let at = view.geometry().bucket_start(broken(work, view)?);
    for size in view.geometry().prio_set_sizes() {
        let mut bytes = vec![0; usize::try_from(size.bytes()).ok()?];
        work.cache.read_at(at, &mut bytes).ok()?;
        if bits::correct_bit(&mut bytes, Extent::Whole, u64::MAX).is_some()
            && parse_prio_set(&bytes, view.superblock.set_magic(), &mut []).is_ok()
        {
            return Some((at, bytes));
        }
    }
    None
}

/// New prio sets.
struct NewSets {
    /// The first bucket whose generation is rebuilt.
    first: BucketNr,
    sets: Vec<(Sector, Vec<u8>)>,
    action: String,
    uncertain: Vec<String>,
}

/// The generations that pointers name.
#[derive(Clone, Copy, Default)]
struct Named {
    dirty: Option<Gen>,
    clean: Option<Gen>,
    /// Metadata: the pointer to it is certainly current.
    metadata: Option<Gen>,
}

fn raise(known: &mut Option<Gen>, by: Gen) {
    *known = Some(known.map_or(by, |g| g.raised_by(by)));
}

/// The first bucket whose generation is not known.
fn first_missing(view: &SetView, per_set: u32) -> Result<u32, Unrepairable> {
    let buckets = view.geometry().nbuckets;
    let done = u32::try_from(view.prio.chain.len()).unwrap_or(u32::MAX);
    let first = per_set.checked_mul(done).filter(|first| *first < buckets).ok_or("its length is wrong")?;
    match buckets - first {
        0..=MOST_BUCKETS => Ok(first),
        missing => Err(format!(
            "expected at most {MOST_BUCKETS} buckets without a generation, found {missing}: the number of buckets in the \
             superblock may be wrong"
        )
        .into()),
    }
}

fn rebuild(work: &Work<'_>, view: &SetView) -> Result<NewSets, Unrepairable> {
    let g = *view.geometry();
    let bucket = broken(work, view).ok_or("the place of the destroyed set is not known")?;
    let per_set = format::geometry::prios_in(view.prio.set_sectors);
    let first = first_missing(view, per_set)?;
    if view.btree.missing > 0 {
        return Err("nodes of the btree are missing, so not all pointers are known".into());
    }
    let named = named(view);
    let (mut entries, mut given_up) = (Vec::new(), 0u64);
    for n in (first..g.nbuckets).map(BucketNr) {
        let Named { dirty, clean, metadata } = named.get(&n).copied().unwrap_or_default();
        let generation = match (metadata.or(dirty), clean) {
            // Data that was written together with dirty data is as old as that.
            (Some(sure), Some(clean)) if sure.raised_by(clean) == sure => sure,
            (Some(sure), None) => sure,
            (_, Some(clean)) => {
                given_up += 1;
                clean.next()
            }
            (None, None) => Gen(0),
        };
        entries.push(BucketPrio { prio: INITIAL_PRIO, generation });
    }
    // The sets behind a destroyed one cannot be found, so they get new places.
    let mut places = vec![bucket];
    let (usage, _) = Usage::of(view);
    let unused = (g.first_dynamic().0..g.nbuckets).map(BucketNr);
    let unused = unused.filter(|b| *b != bucket && usage.get(*b).what == Use::Unused);
    let count = entries.len().div_ceil(usize::try_from(per_set).unwrap_or(1).max(1));
    places.extend(unused.take(count.saturating_sub(1)));
    if places.len() < count {
        return Err("there are not enough unused buckets for the sets behind a destroyed one".into());
    }
    let seq = if view.prio.chain.is_empty() { 1 } else { view.prio.seq };
    let size = usize::try_from(view.prio.set_sectors.bytes()).unwrap_or(0);
    let mut sets = Vec::new();
    for (n, entries) in entries.chunks(usize::try_from(per_set).unwrap_or(1).max(1)).enumerate() {
        let (Some(place), next) = (places.get(n), places.get(n + 1).or(places.first())) else { break };
        let mut bytes = vec![0; size];
        let next_bucket = next.map_or(0, |b| u64::from(b.0));
        encode_prio_set(&mut bytes, view.superblock.set_magic(), PrioHeader { seq, next_bucket }, entries);
        sets.push((g.bucket_start(*place), bytes));
    }
    let (from, end) = (BucketNr(first), g.nbuckets - 1);
    let action = format!(
        "generations of buckets {from} to {end} rebuilt from the keys; {} with clean data alone {} given up, the backing \
         devices have that data",
        counted(given_up, "bucket"),
        form(given_up, "is", "are")
    );
    let mut uncertain = vec!["which buckets were used last; it is learned anew".to_owned()];
    if named.values().any(|n| n.dirty.is_some()) {
        uncertain.push(
            "dirty data that was written back just before a crash, and whose bucket was freed then, would count again".to_owned(),
        );
    }
    Ok(NewSets { first: BucketNr(first), sets, action, uncertain })
}

/// The generations that live keys and roots name, by bucket.
fn named(view: &SetView) -> BTreeMap<BucketNr, Named> {
    let mut all: BTreeMap<BucketNr, Named> = BTreeMap::new();
    for (inode, piece, kind) in view.pieces() {
        let Some(ptr) = piece.ptr.filter(|_| kind.is_live() || kind == PieceKind::Stale) else { continue };
        let Some(bucket) = view.gens.bucket_of(ptr, piece.len) else { continue };
        let named = all.entry(bucket).or_default();
        // Data of a detached device is not used any more.
        let kind = view.slots.get(&inode).map(|slot| slot.kind);
        let used = kind != Some(SlotKind::Invalidated);
        let is_volume = matches!(kind, Some(SlotKind::Volume(_)));
        raise(
            if (piece.dirty || is_volume) && used { &mut named.dirty } else { &mut named.clean },
            ptr.generation(),
        );
    }
    let mut sure = |ptr: format::Ptr, size| {
        if let Some(bucket) = view.gens.bucket_of(ptr, size) {
            raise(&mut all.entry(bucket).or_default().metadata, ptr.generation());
        }
    };
    view.nodes.iter().for_each(|node| sure(node.key.ptr, node.key.size()));
    if let Some(newest) = view.journal.as_ref().and_then(|j| j.replay.last()) {
        for key in [&newest.uuid_bucket, &newest.btree_root] {
            if let Some(ptr) = key.pointer() {
                sure(ptr, key.size());
            }
        }
    }
    all
}
