//! The journal.
//!
//! Owns its repair: a flipped bit of an entry, and entries that are needed and destroyed. Empty entries take the place of those, so
//! that the entries before and behind them count again; the keys of destroyed entries are lost. Damage of the newest entry alone
//! looks like the end of the journal, so it is not noticed.

use std::collections::BTreeMap;

use format::journal::{JsetBuilder, MAX_FOREIGN_JSET_BYTES, MAX_JSET_BYTES, ring};
use format::{CacheSuper, JournalSeq, Jset, JsetRoots, Sector, Sectors, SetMagic, counted, parse_entry};
use inspect::{Invariant, ReadAt, Severity};

use crate::bits::{self, Extent};
use crate::work::{Doubt, Work};

const STRUCTURE: &str = "journal";

/// Mends the journal of an initialised set.
pub(crate) fn mend(work: &mut Work<'_>) {
    let Some(superblock) = work.superblock().filter(CacheSuper::sync) else { return };
    let device = work.cache.name().to_owned();
    let geometry = *superblock.geometry();
    let mut buckets = Vec::new();
    let mut corrected = 0;
    for (_, start) in ring(&geometry) {
        let Some(mut bucket) = RingBucket::read(work, &superblock, start) else {
            work.refuse(format!("{device}: a bucket of the journal at sector {start} cannot be read"));
            return;
        };
        corrected += bucket.correct_bits();
        buckets.push(bucket);
    }
    if corrected > 0 {
        for bucket in &buckets {
            work.cache.write(bucket.start, &bucket.bytes);
        }
        let action = format!("{} had one flipped bit; it is flipped back", counted(corrected, "entry"));
        work.step(STRUCTURE, device.clone(), action, Vec::new());
    }
    if !is_broken(work) {
        return;
    }
    match fill(&mut buckets) {
        Some(lost) if !lost.is_empty() => {
            for bucket in &buckets {
                work.cache.write(bucket.start, &bucket.bytes);
            }
            let numbers: Vec<String> = lost.iter().map(ToString::to_string).collect();
            let action = format!(
                "entries {} are destroyed; empty ones take their place, so that all others count again",
                numbers.join(", ")
            );
            let uncertain = "the keys of these entries are lost: writes of that time may be missing, and which sectors they \
                             were is not known; check the file systems";
            work.step(STRUCTURE, device, action, vec![uncertain.into()]);
            work.doubts.extend(lost.iter().max().copied().map(Doubt::Entries));
        }
        _ => work.refuse(format!(
            "{device}: entries of the journal that are needed are missing, and there is no place for them between the others"
        )),
    }
}

/// Whether entries that are needed are missing.
fn is_broken(work: &Work<'_>) -> bool {
    let contiguous =
        |f: &inspect::Finding| f.invariant == Invariant::JournalContiguous && f.severity > Severity::Notice;
    match inspect::SetView::open(&work.cache, inspect::Mode::BestEffort) {
        Ok(view) => view.findings.list().iter().any(contiguous),
        Err(e) => contiguous(&e.fatal),
    }
}

/// An entry and its place in a bucket.
#[derive(Clone)]
struct Placed {
    at: usize,
    len: usize,
    jset: Jset,
}

/// A bucket of the ring.
struct RingBucket {
    start: Sector,
    bytes: Vec<u8>,
    magic: SetMagic,
    block: Sectors,
}

impl RingBucket {
    fn read(work: &Work<'_>, superblock: &CacheSuper, start: Sector) -> Option<RingBucket> {
        let geometry = superblock.geometry();
        let mut bytes = vec![0; usize::try_from(geometry.bucket_sectors.bytes()).ok()?];
        work.cache.read_at(start, &mut bytes).ok()?;
        Some(RingBucket { start, bytes, magic: superblock.set_magic(), block: geometry.block_sectors })
    }

    fn block_bytes(&self) -> usize {
        usize::try_from(self.block.bytes()).unwrap_or(512).max(512)
    }

    fn entry_at(&self, at: usize) -> Option<Placed> {
        let (jset, len) = parse_entry(self.bytes.get(at..)?, self.magic, self.block).ok()?;
        Some(Placed { at, len, jset })
    }

    /// The entries that follow each other from `at` on.
    fn entries_from(&self, mut at: usize) -> Vec<Placed> {
        let mut all = Vec::new();
        while let Some(entry) = self.entry_at(at) {
            at += entry.len;
            all.push(entry);
        }
        all
    }

    /// Corrects entries with one flipped bit that follow the others. Returns their number.
    fn correct_bits(&mut self) -> u64 {
        let mut corrected = 0;
        loop {
            let before = self.entries_from(0);
            let at = before.last().map_or(0, |e| e.at + e.len);
            let Some(rest) = self.bytes.get(at..) else { return corrected };
            let mut trial = rest.get(..MAX_FOREIGN_JSET_BYTES.min(rest.len())).unwrap_or_default().to_vec();
            if bits::correct_bit(&mut trial, Extent::JSET, u64::MAX).is_none() {
                return corrected;
            }
            let Ok((jset, _)) = parse_entry(&trial, self.magic, self.block) else { return corrected };
            if before.last().is_some_and(|last| jset.seq <= last.jset.seq) {
                return corrected;
            }
            let Some(place) = self.bytes.get_mut(at..at + trial.len()) else { return corrected };
            place.copy_from_slice(&trial);
            corrected += 1;
        }
    }

    /// The first entry behind `from` that is no part of the list before it.
    fn next_behind(&self, from: usize) -> Option<Placed> {
        (from..self.bytes.len()).step_by(self.block_bytes()).find_map(|at| self.entry_at(at))
    }

    /// Writes entries from the start of the bucket on, and zeros behind them. `None` if there is no room.
    fn replace(&mut self, entries: &[Jset]) -> Option<()> {
        let mut bytes = Vec::with_capacity(self.bytes.len());
        for jset in entries {
            let mut builder = JsetBuilder::begin(vec![0; MAX_JSET_BYTES], self.block);
            jset.keys.iter().all(|key| builder.push_key(key)).then_some(())?;
            let len = builder.finish(self.magic, jset.seq, jset.last_seq, &jset.roots());
            bytes.extend_from_slice(builder.into_inner().get(..len)?);
        }
        (bytes.len() <= self.bytes.len()).then_some(())?;
        bytes.resize(self.bytes.len(), 0);
        self.bytes = bytes;
        Some(())
    }
}

/// Fills the places of destroyed entries. Returns their numbers; `None` if that is not possible.
fn fill(buckets: &mut [RingBucket]) -> Option<Vec<JournalSeq>> {
    let mut lost = Vec::new();
    // Each pass closes a gap, and a bucket has at most as many gaps as blocks.
    for _ in 0..4096 {
        let mut all: BTreeMap<JournalSeq, (usize, Jset)> = BTreeMap::new();
        for (i, bucket) in buckets.iter().enumerate() {
            let mut from = 0;
            while let Some(first) = bucket.next_behind(from) {
                for entry in bucket.entries_from(first.at) {
                    from = entry.at + entry.len;
                    all.insert(entry.jset.seq, (i, entry.jset));
                }
            }
        }
        let (newest, (_, last)) = all.last_key_value()?;
        let needed = last.last_seq.0..newest.0;
        let missing = needed.clone().map(JournalSeq).find(|seq| !all.contains_key(seq));
        let unreachable = |bucket: &RingBucket| {
            let reached = bucket.entries_from(0).last().map_or(0, |e| e.at + e.len);
            let behind = bucket.next_behind(reached)?;
            (behind.jset.seq.0 >= needed.start).then_some(())
        };
        let torn = buckets.iter().position(|b| unreachable(b).is_some());
        match (torn, missing) {
            (None, None) => return Some(lost),
            (Some(i), _) => lost.extend(close(buckets.get_mut(i)?, &all)?),
            (None, Some(seq)) => lost.extend(refill(buckets, &all, seq)?),
        }
    }
    None
}

/// An entry without keys in the place of a destroyed one.
fn filler(seq: JournalSeq, last_seq: JournalSeq, roots: JsetRoots) -> Jset {
    let JsetRoots { uuid_bucket, btree_root, btree_level, prio_bucket } = roots;
    Jset { seq, last_seq, version: 1, uuid_bucket, btree_root, btree_level, prio_bucket, keys: Vec::new() }
}

/// Closes the first gap in a bucket: fillers, then the entries behind the gap.
fn close(bucket: &mut RingBucket, all: &BTreeMap<JournalSeq, (usize, Jset)>) -> Option<Vec<JournalSeq>> {
    let before = bucket.entries_from(0);
    let reached = before.last().map_or(0, |e| e.at + e.len);
    let first = bucket.next_behind(reached)?;
    let behind = bucket.entries_from(first.at);
    let (previous, last_seq) = match all.range(..first.jset.seq).next_back() {
        Some((seq, (_, jset))) => (*seq, jset.last_seq),
        // Nothing before it is left, or needed.
        None => (JournalSeq(first.jset.seq.0.checked_sub(1)?), first.jset.last_seq),
    };
    let mut entries: Vec<Jset> = before.into_iter().map(|e| e.jset).collect();
    let mut lost = Vec::new();
    let mut seq = previous.next();
    while seq < first.jset.seq {
        let needed = all.last_key_value().is_some_and(|(_, (_, newest))| seq >= newest.last_seq);
        if needed {
            entries.push(filler(seq, last_seq.min(seq), first.jset.roots()));
            lost.push(seq);
        }
        seq = seq.next();
    }
    entries.extend(behind.into_iter().map(|e| e.jset));
    bucket.replace(&entries)?;
    Some(lost)
}

/// Fills the place of entries with nothing behind them in their bucket: at the end of the bucket of the entry before, or, if that is
/// full, in the bucket between it and the next entry.
fn refill(
    buckets: &mut [RingBucket],
    all: &BTreeMap<JournalSeq, (usize, Jset)>,
    seq: JournalSeq,
) -> Option<Vec<JournalSeq>> {
    let (next, (behind, jset)) = all.range(seq..).next()?;
    let previous = all.range(..seq).next_back();
    let last_seq = previous.map_or(jset.last_seq, |(_, (_, before))| before.last_seq);
    let numbers: Vec<JournalSeq> = (seq.0..next.0).map(JournalSeq).collect();
    let fillers: Vec<Jset> = numbers.iter().map(|n| filler(*n, last_seq.min(*n), jset.roots())).collect();
    if let Some(bucket) = previous.and_then(|(_, (i, _))| buckets.get_mut(*i)) {
        let entries = bucket.entries_from(0).into_iter().map(|e| e.jset).filter(|e| e.seq < seq);
        let entries: Vec<Jset> = entries.chain(fillers.iter().cloned()).collect();
        if entries.is_sorted_by_key(|e| e.seq) && bucket.replace(&entries).is_some() {
            return Some(numbers);
        }
    }
    let empty = behind.checked_add(buckets.len())?.checked_sub(1)? % buckets.len().max(1);
    let bucket = buckets.get_mut(empty)?;
    let oldest = all.last_key_value()?.1.1.last_seq;
    if bucket.entries_from(0).iter().any(|e| e.jset.seq >= oldest) {
        return None;
    }
    bucket.replace(&fillers)?;
    Some(numbers)
}
