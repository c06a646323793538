//! The journal: its ring, its entries, and the keys to replay.

use std::fmt;

use format::counted;
use serde::Serialize;

use super::KeyDoc;
use crate::SCHEMA_VERSION;
use crate::view::{JournalStop, SetView};

/// The journal of a set.
#[derive(Clone, Debug, Serialize)]
pub struct JournalDoc {
    /// Version of this document's layout.
    pub schema_version: u32,
    /// Cache device.
    pub device: String,
    /// Number of the newest entry, whose roots are valid.
    pub newest_seq: u64,
    /// Number of the oldest entry to replay.
    pub last_seq: u64,
    /// Number of entries missing before the first entry to replay, which is legal with discard.
    pub missing_at_start: u64,
    /// Level of the root node.
    pub btree_level: u16,
    /// The root node.
    pub btree_root: KeyDoc,
    /// The UUID table.
    pub uuid_bucket: KeyDoc,
    /// First bucket of the prio chain.
    pub prio_bucket: u64,
    /// The ring.
    pub buckets: Vec<JournalBucketDoc>,
    /// All valid entries, by number. Entries to replay have their keys.
    pub entries: Vec<EntryDoc>,
}

/// A bucket of the ring.
#[derive(Clone, Debug, Serialize)]
pub struct JournalBucketDoc {
    /// Index in the ring.
    pub index: u32,
    /// Bucket number.
    pub bucket: u32,
    /// Number of valid entries in the bucket.
    pub entries: u64,
    /// Lowest number of an entry in the bucket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_seq: Option<u64>,
    /// Highest number of an entry in the bucket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_seq: Option<u64>,
    /// Sector at which the entries end; absent if the bucket is full or could not be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stopped_at: Option<u64>,
    /// Why the entries end there.
    pub stop: String,
}

/// An entry.
#[derive(Clone, Debug, Serialize)]
pub struct EntryDoc {
    /// Number of the entry.
    pub seq: u64,
    /// Number of the oldest entry that was needed when this entry was written.
    pub last_seq: u64,
    /// Index in the ring of the entry's bucket.
    pub journal_index: u32,
    /// First sector of the entry.
    pub sector: u64,
    /// Length of the entry.
    pub sectors: u64,
    /// Number of keys.
    pub key_count: u64,
    /// Whether it is replayed.
    pub replay: bool,
    /// The keys, if the entry is replayed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub keys: Vec<KeyDoc>,
}

/// Dumps the journal; `None` if the device was never initialised.
pub fn journal(view: &SetView) -> Option<JournalDoc> {
    let journal = view.journal.as_ref()?;
    let newest = journal.replay.last()?;
    let buckets = journal.buckets.iter().map(|b| {
        let (stopped_at, stop) = match &b.stop {
            JournalStop::EndOfBucket => (None, "end of bucket".to_owned()),
            JournalStop::NoEntry { sector, why, .. } => (Some(sector.0), format!("no entry: {why}")),
            JournalStop::NotUnderstood { sector, why } => (Some(sector.0), format!("not understood: {why}")),
            JournalStop::Unreadable => (None, "cannot be read".to_owned()),
        };
        JournalBucketDoc {
            index: b.index,
            bucket: b.bucket.0,
            entries: b.entries,
            min_seq: b.seqs.map(|s| s.0.0),
            max_seq: b.seqs.map(|s| s.1.0),
            stopped_at,
            stop,
        }
    });
    let entries = journal.entries.iter().map(|e| {
        let replayed = journal.replay.binary_search_by_key(&e.seq, |jset| jset.seq).ok();
        let keys = replayed.and_then(|at| journal.replay.get(at)).map(|jset| jset.keys.as_slice());
        EntryDoc {
            seq: e.seq.0,
            last_seq: e.last_seq.0,
            journal_index: e.journal_index,
            sector: e.sector.0,
            sectors: e.sectors.0,
            key_count: e.keys,
            replay: replayed.is_some(),
            keys: keys.unwrap_or_default().iter().map(|key| KeyDoc::of(view, key)).collect(),
        }
    });
    let this_dev = usize::from(view.superblock.nr_this_dev());
    Some(JournalDoc {
        schema_version: SCHEMA_VERSION,
        device: view.device.clone(),
        newest_seq: journal.newest.0,
        last_seq: journal.oldest.0,
        missing_at_start: journal.missing_at_start,
        btree_level: newest.btree_level,
        btree_root: KeyDoc::of(view, &newest.btree_root),
        uuid_bucket: KeyDoc::of(view, &newest.uuid_bucket),
        prio_bucket: newest.prio_bucket.get(this_dev).copied().unwrap_or(0),
        buckets: buckets.collect(),
        entries: entries.collect(),
    })
}

impl fmt::Display for JournalDoc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "newest entry: {}, needs those from {} on", self.newest_seq, self.last_seq)?;
        if self.missing_at_start > 0 {
            writeln!(f, "missing at the start of that range: {}", counted(self.missing_at_start, "entry"))?;
        }
        writeln!(f, "root: level {}, {}", self.btree_level, self.btree_root)?;
        writeln!(f, "uuid table: {}", self.uuid_bucket)?;
        writeln!(f, "first prio set: bucket {}", self.prio_bucket)?;
        for b in &self.buckets {
            write!(f, "bucket {} (index {}): {}", b.bucket, b.index, counted(b.entries, "entry"))?;
            if let (Some(min), Some(max)) = (b.min_seq, b.max_seq) {
                write!(f, ", {min} to {max}")?;
            }
            match b.stopped_at {
                Some(at) => writeln!(f, "; ends at sector {at}: {}", b.stop)?,
                None => writeln!(f, "; {}", b.stop)?,
            }
        }
        for e in &self.entries {
            write!(f, "entry {} (needs {}): sector {}", e.seq, e.last_seq, e.sector)?;
            write!(f, ", {}", counted(e.sectors, "sector"))?;
            let replayed = if e.replay { ", replayed" } else { "" };
            writeln!(f, ", {}{replayed}", counted(e.key_count, "key"))?;
            for key in &e.keys {
                writeln!(f, "  {key}")?;
            }
        }
        Ok(())
    }
}
