//! Step 2: reads the whole journal ring and selects the entries to replay.
//!
//! Owns the scan of all journal buckets (format section 9.3) and the findings about entries that are missing, doubled or
//! unreadable. `format::replay` decides which entries are replayed.
//!
//! Invariants: buckets are read through a window, so memory does not grow with the bucket size; only the keys of entries that
//! may still be needed stay in memory.

use format::journal::MAX_FOREIGN_JSET_BYTES;
use format::{
    BucketNr, CacheSuper, Corrupt, JournalSeq, Jset, ScanStop, Sector, Sectors, parse_bucket, parse_entry,
    select_replay,
};

use super::scan::{Scan, Stop};
use crate::device::unreadable_at;
use crate::finding::{Finding, Invariant, Mismatch, Place, Severity};
use crate::source::ReadAt;

/// A valid entry, at any place in the ring and of any age.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EntryInfo {
    /// Number of the entry.
    pub seq: JournalSeq,
    /// Number of the oldest entry that was needed when this entry was written.
    pub last_seq: JournalSeq,
    /// Version of the entry: 1, or 0 with the old UUID table.
    pub version: u32,
    /// Number of keys.
    pub keys: u64,
    /// Index in the ring of the entry's bucket.
    pub journal_index: u32,
    /// Bucket of the entry.
    pub bucket: BucketNr,
    /// First sector of the entry on the device.
    pub sector: Sector,
    /// Length of the entry, padded to blocks.
    pub sectors: Sectors,
}

/// Why the entries of a journal bucket end.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum JournalStop {
    /// The bucket is full.
    EndOfBucket,
    /// The following bytes are not an entry.
    NoEntry {
        /// Sector at which the scan ended.
        sector: Sector,
        /// The reason.
        why: Corrupt,
        /// Sequence number in those bytes, if they have the magic of an entry.
        claimed_seq: Option<JournalSeq>,
    },
    /// The following bytes are an entry that cannot be parsed.
    NotUnderstood {
        /// Sector of the entry.
        sector: Sector,
        /// The reason.
        why: Corrupt,
    },
    /// The device failed.
    Unreadable,
}

/// One bucket of the ring.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct JournalBucket {
    /// Index in the ring.
    pub index: u32,
    /// Bucket number.
    pub bucket: BucketNr,
    /// Number of valid entries in the bucket.
    pub entries: u64,
    /// Lowest and highest sequence number in the bucket.
    pub seqs: Option<(JournalSeq, JournalSeq)>,
    /// Why the entries of the bucket end.
    pub stop: JournalStop,
}

impl JournalBucket {
    /// Counts a valid entry of this bucket.
    fn add(&mut self, jset: &Jset, sector: Sector, sectors: Sectors) -> EntryInfo {
        let (lowest, highest) = self.seqs.unwrap_or((jset.seq, jset.seq));
        self.seqs = Some((lowest.min(jset.seq), highest.max(jset.seq)));
        self.entries += 1;
        EntryInfo {
            seq: jset.seq,
            last_seq: jset.last_seq,
            version: jset.version,
            keys: count(jset.keys.len()),
            journal_index: self.index,
            bucket: self.bucket,
            sector,
            sectors,
        }
    }
}

/// The journal.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct JournalView {
    /// All valid entries, by sequence number.
    pub entries: Vec<EntryInfo>,
    /// The ring.
    pub buckets: Vec<JournalBucket>,
    /// The entries to replay, in order; the roots of the last one are valid. Never empty.
    pub replay: Vec<Jset>,
    /// Number of the newest entry.
    pub newest: JournalSeq,
    /// Number of the oldest entry that the newest one needs.
    pub oldest: JournalSeq,
    /// Number of entries missing before the first entry to replay, which is legal with discard.
    pub missing_at_start: u64,
}

impl JournalView {
    /// The entry with this number. If several entries have it, one of them.
    pub fn entry(&self, seq: JournalSeq) -> Option<&EntryInfo> {
        let at = self.entries.binary_search_by_key(&seq, |e| e.seq).ok()?;
        self.entries.get(at)
    }

    /// The newest entry.
    pub fn newest_info(&self) -> Option<&EntryInfo> {
        self.entry(self.newest)
    }

    /// Number of keys to replay.
    pub fn replay_keys(&self) -> u64 {
        self.replay.iter().fold(0, |n, jset| n + count(jset.keys.len()))
    }
}

fn count(n: usize) -> u64 {
    u64::try_from(n).unwrap_or(u64::MAX)
}

/// Entries found so far, without the keys of entries that the newest one does not need.
#[derive(Default)]
struct Found {
    infos: Vec<EntryInfo>,
    candidates: Vec<Jset>,
    newest: Option<(JournalSeq, JournalSeq)>,
}

impl Found {
    fn add(&mut self, info: EntryInfo, jset: Jset) {
        self.infos.push(info);
        if self.newest.is_none_or(|(seq, _)| jset.seq > seq) {
            self.newest = Some((jset.seq, jset.last_seq));
            self.candidates.retain(|old| old.seq >= jset.last_seq);
            self.candidates.push(jset);
        } else if self.newest.is_some_and(|(_, oldest)| jset.seq >= oldest) {
            self.candidates.push(jset);
        }
    }
}

/// Reads the journal and chooses the entries to replay.
pub(super) fn open(scan: &mut Scan<'_>, superblock: &CacheSuper) -> Result<JournalView, Stop> {
    let mut found = Found::default();
    let mut buckets = Vec::new();
    for (index, bucket) in (0..).zip(superblock.journal_buckets()) {
        buckets.push(scan_bucket(scan, superblock, index, bucket, &mut found)?);
    }
    found.infos.sort_by_key(|e| e.seq);
    let Some((newest, oldest)) = found.newest else {
        let place = Place::new(scan.source.name(), "journal");
        let (expected, found) = ("a valid entry, as the set is initialised", "none");
        return Err(scan.give_up(Finding::new(
            Severity::Fatal,
            Invariant::JournalContiguous,
            place,
            Mismatch::new("entries", expected, found),
        )));
    };
    report_torn(scan, superblock, &buckets, newest, &found.infos)?;
    check_order(scan, &found.infos)?;
    let mut replay = found.candidates;
    replay.sort_by_key(|jset| jset.seq);
    let missing_at_start = select(scan, superblock, &mut replay)?;
    let view = JournalView { entries: found.infos, buckets, replay, newest, oldest, missing_at_start };
    check_entries(scan, superblock, &view)?;
    Ok(view)
}

/// Bytes read at a time; at least two of the longest entries.
const WINDOW: usize = 1 << 20;

fn scan_bucket(
    scan: &mut Scan<'_>,
    superblock: &CacheSuper,
    index: u32,
    bucket: BucketNr,
    found: &mut Found,
) -> Result<JournalBucket, Stop> {
    let geometry = superblock.geometry();
    let (magic, block) = (superblock.set_magic(), geometry.block_sectors);
    let start = geometry.bucket_start(bucket);
    let mut result = JournalBucket { index, bucket, entries: 0, seqs: None, stop: JournalStop::EndOfBucket };
    let mut at = Sectors(0);
    let mut window = Vec::new();
    'windows: while at < geometry.bucket_sectors {
        let left = usize::try_from(geometry.bucket_sectors.0.saturating_sub(at.0).saturating_mul(512));
        window.resize(left.unwrap_or(usize::MAX).min(WINDOW), 0);
        let last = left == Ok(window.len());
        let window_at = Sector(start.0 + at.0);
        if let Err(e) = scan.source.read_at(window_at, &mut window) {
            let place = Place::new(scan.source.name(), "journal bucket").sector(start).bucket(bucket);
            scan.report(unreadable_at(Invariant::JournalContiguous, Severity::Fatal, place, &e))?;
            result.stop = JournalStop::Unreadable;
            return Ok(result);
        }
        let mut pos = 0;
        loop {
            let rest = window.get(pos..).unwrap_or_default();
            if rest.is_empty() || (rest.len() < MAX_FOREIGN_JSET_BYTES && !last) {
                // The next entry may reach beyond the window. All lengths are whole sectors.
                at.0 += count(pos) / 512;
                continue 'windows;
            }
            let sector = Sector(window_at.0 + count(pos) / 512);
            match parse_entry(rest, magic, block) {
                Ok((jset, padded)) => {
                    let info = result.add(&jset, sector, Sectors::from_bytes_ceil(count(padded)));
                    found.add(info, jset);
                    pos += padded;
                }
                Err(why) => {
                    result.stop = classify_stop(rest, superblock, sector, why);
                    report_not_understood(scan, &result)?;
                    return Ok(result);
                }
            }
        }
    }
    Ok(result)
}

/// Reports an entry with a correct checksum that cannot be parsed, if the entries of the bucket end there.
fn report_not_understood(scan: &mut Scan<'_>, ended: &JournalBucket) -> Result<(), Stop> {
    let JournalStop::NotUnderstood { sector, why } = &ended.stop else { return Ok(()) };
    let place = Place::new(scan.source.name(), "journal entry").sector(*sector).bucket(ended.bucket);
    let finding = Finding::corrupt(Severity::Fatal, Invariant::JournalContiguous, place, why)
        .note("its checksum is right, so it was written like this");
    scan.report(finding)?;
    scan.assume(format!("nothing behind sector {sector} in journal bucket {} counts", ended.index));
    Ok(())
}

/// Classifies why there is no entry at the front of `rest`, which lies at `sector`.
fn classify_stop(rest: &[u8], superblock: &CacheSuper, sector: Sector, why: Corrupt) -> JournalStop {
    let magic = superblock.set_magic();
    match parse_bucket(rest, magic, superblock.geometry().block_sectors) {
        // Magic, size and checksum are correct.
        Err(why) => JournalStop::NotUnderstood { sector, why },
        Ok(scan) if scan.why == ScanStop::EndOfBucket => JournalStop::EndOfBucket,
        Ok(_) => {
            let claimed_seq = (u64_at(rest, 8) == Some(magic.jset())).then(|| u64_at(rest, 16));
            JournalStop::NoEntry { sector, why, claimed_seq: claimed_seq.flatten().map(JournalSeq) }
        }
    }
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk::<8>().map(|b| u64::from_le_bytes(*b))
}

/// Reports where an entry that is newer than the newest valid one begins, or lies after a damaged one.
///
/// The scan ends there without a finding, as it must at a torn write. A damaged end of the journal looks the same, and
/// acknowledged writes are lost with it.
fn report_torn(
    scan: &mut Scan<'_>,
    superblock: &CacheSuper,
    buckets: &[JournalBucket],
    newest: JournalSeq,
    infos: &[EntryInfo],
) -> Result<(), Stop> {
    let current = infos.last().map(|e| e.bucket);
    for bucket in buckets {
        let JournalStop::NoEntry { sector, why, claimed_seq } = &bucket.stop else { continue };
        let is_current = Some(bucket.bucket) == current;
        let claims_newer = claimed_seq.is_some_and(|seq| seq > newest || is_current);
        let place = || Place::new(scan.source.name(), "journal entry").sector(*sector).bucket(bucket.bucket);
        let mut findings = Vec::new();
        if let Some(seq) = claimed_seq.filter(|_| claims_newer) {
            findings.push(
                Finding::corrupt(Severity::Notice, Invariant::JournalContiguous, place(), why).note(format!(
                    "claims to be entry {seq}, behind the newest valid one, {newest}: torn by a crash (no \
                     acknowledged write is lost), or damaged (acknowledged writes are lost)"
                )),
            );
        }
        if (claims_newer || is_current)
            && let Some((at, seq)) = valid_behind(scan.source, superblock, bucket, *sector, newest)
        {
            findings.push(
                Finding::new(
                    Severity::Error,
                    Invariant::JournalContiguous,
                    place(),
                    Mismatch::new(
                        "entry",
                        format!("entry {}, as entry {seq} lies behind it at sector {at}", newest.next()),
                        "no valid entry",
                    ),
                )
                .note("it is damaged; it and all later entries are ignored"),
            );
        }
        for finding in findings {
            scan.report(finding)?;
        }
    }
    Ok(())
}

/// Number of bytes after the end of the entries in which more entries are searched.
const SEARCH: usize = 256 << 10;

/// The first valid entry in the bucket after `from` that is newer than `newest`.
fn valid_behind(
    source: &dyn ReadAt,
    superblock: &CacheSuper,
    bucket: &JournalBucket,
    from: Sector,
    newest: JournalSeq,
) -> Option<(Sector, JournalSeq)> {
    let geometry = superblock.geometry();
    let end = geometry.bucket_start(bucket.bucket).checked_add(geometry.bucket_sectors)?;
    let left = usize::try_from(end.checked_since(from)?.bytes()).unwrap_or(usize::MAX);
    let mut bytes = vec![0; left.min(SEARCH)];
    source.read_at(from, &mut bytes).ok()?;
    let magic = superblock.set_magic();
    let block = usize::try_from(geometry.block_bytes()).ok()?;
    (block..bytes.len()).step_by(block.max(512)).find_map(|at| {
        let rest = bytes.get(at..)?;
        // The cheap checks come first: a checksum over every block of a hostile bucket would take long.
        if u64_at(rest, 8) != Some(magic.jset()) || u64_at(rest, 16).is_none_or(|seq| seq <= newest.0) {
            return None;
        }
        let (jset, _) = parse_entry(rest, magic, geometry.block_sectors).ok()?;
        (jset.seq > newest).then_some((Sector(from.0 + count(at) / 512), jset.seq))
    })
}

/// Checks invariant 3 over all valid entries. Doubled entries among those to replay are fatal; `select` reports them.
fn check_order(scan: &mut Scan<'_>, infos: &[EntryInfo]) -> Result<(), Stop> {
    let mut before: Option<&EntryInfo> = None;
    for e in infos {
        let place = || {
            Place::new(scan.source.name(), "journal entry")
                .sector(e.sector)
                .bucket(e.bucket)
                .item(format!("seq {}", e.seq))
        };
        let mut wrong = Vec::new();
        let least = before.map_or(JournalSeq(0), |b| b.last_seq);
        if before.is_some_and(|b| b.seq == e.seq) {
            let other = before.map_or(Sector(0), |b| b.sector);
            wrong.push((
                "seq",
                "a number that no other entry has".to_owned(),
                format!("that of sector {other} too"),
            ));
        }
        if e.last_seq > e.seq || e.last_seq < least {
            wrong.push(("last_seq", format!("{least} to {}", e.seq), e.last_seq.to_string()));
        }
        for (field, expected, found) in wrong {
            let finding = Finding::new(
                Severity::Error,
                Invariant::JournalOrder,
                place(),
                Mismatch::new(field, expected, found),
            );
            scan.report(finding)?;
        }
        before = Some(e);
    }
    Ok(())
}

/// Reduces `replay`, which is sorted, to the entries to replay. Returns the number of entries that are missing at the start.
fn select(scan: &mut Scan<'_>, superblock: &CacheSuper, replay: &mut Vec<Jset>) -> Result<u64, Stop> {
    let bare = |jset: &Jset| Jset { seq: jset.seq, last_seq: jset.last_seq, ..Jset::default() };
    match select_replay(replay.iter().map(bare), superblock.discard()) {
        Ok(chosen) => {
            replay.retain(|jset| jset.seq >= chosen.oldest);
            Ok(chosen.missing_at_start)
        }
        Err(e) => {
            let place = Place::new(scan.source.name(), "journal");
            let invariant = match e.field {
                "seq (entries missing)" => Invariant::JournalContiguous,
                _ => Invariant::JournalOrder,
            };
            scan.report(Finding::corrupt(Severity::Fatal, invariant, place, &e))?;
            if let Some((newest, oldest)) = replay.last().map(|jset| (jset.seq, jset.last_seq)) {
                replay.retain(|jset| jset.seq >= oldest || jset.seq == newest);
            }
            replay.dedup_by_key(|jset| jset.seq);
            let present = replay.len();
            scan.assume(format!("the journal is replayed from the {present} entries that are there"));
            Ok(0)
        }
    }
}

/// Checks invariants 4 and 5 over the entries to replay.
fn check_entries(scan: &mut Scan<'_>, superblock: &CacheSuper, view: &JournalView) -> Result<(), Stop> {
    let geometry = superblock.geometry();
    let place = |scan: &Scan<'_>, jset: &Jset| {
        let place = Place::new(scan.source.name(), "journal entry").item(format!("seq {}", jset.seq));
        match view.entry(jset.seq) {
            Some(info) => place.sector(info.sector).bucket(info.bucket),
            None => place,
        }
    };
    for jset in &view.replay {
        if let Err(e) = jset.check_keys(geometry) {
            let place = place(scan, jset);
            scan.report(Finding::corrupt(Severity::Error, Invariant::JournalKeys, place, &e))?;
        }
    }
    let Some(newest) = view.replay.last() else { return Ok(()) };
    if let Err(e) = newest.check_roots(geometry, superblock.nr_this_dev()) {
        let place = place(scan, newest);
        scan.report(Finding::corrupt(Severity::Fatal, Invariant::JournalRoots, place, &e))?;
    }
    let (expected, found) = (geometry.meta_sectors, newest.uuid_bucket.size());
    if expected != found {
        let place = place(scan, newest);
        // A kernel with other pages writes tables of other sizes into large buckets, as it does with prio sets.
        let is_foreign = geometry.prio_set_sizes().any(|size| size == found);
        let finding = Finding::new(
            if is_foreign { Severity::Notice } else { Severity::Error },
            Invariant::JournalRoots,
            place,
            Mismatch::new("uuid_bucket size", expected, found),
        );
        scan.report(finding)?;
    }
    Ok(())
}
