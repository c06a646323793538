//! Structures of a set as documents, which `super` and `dump` print.
//!
//! Owns the documents: plain data that serialises to JSON and displays as text, one file per document. The JSON is stable
//! within a `schema_version`; the text is for operators. All sizes and positions are in sectors unless a name has "bytes".
//! Module `check` judges the structures.

mod btree;
mod buckets;
mod extents;
mod journal;
mod superblock;
mod uuids;

pub use btree::{BsetDoc, BtreeDoc, BtreeQuery, NodeDoc, PathError, btree, parse_path};
pub use buckets::{BucketDoc, BucketsDoc, buckets};
pub use extents::{ExtentDoc, ExtentsDoc, extents};
pub use journal::{EntryDoc, JournalBucketDoc, JournalDoc, journal};
pub use superblock::{BackingDoc, CacheDoc, SuperblockDoc, superblock};
pub use uuids::{SlotDoc, UuidsDoc, uuids};

use std::fmt;

use format::Bkey;
use serde::Serialize;

use crate::view::SetView;

/// A document as JSON text, indented.
pub fn to_json(doc: &impl Serialize) -> String {
    // Documents have only text keys and plain values, which always serialise, so the error text is never used.
    serde_json::to_string_pretty(doc).unwrap_or_else(|e| format!("{{\"error\": {:?}}}", e.to_string()))
}

/// A key.
#[derive(Clone, Debug, Serialize)]
pub struct KeyDoc {
    /// Slot of the device.
    pub inode: u32,
    /// End of the range (exclusive); the position of the key.
    pub end: u64,
    /// Length of the range. For the key of a node or table, its size.
    pub size: u64,
    /// Whether the cached data is newer than the backing device.
    pub dirty: bool,
    /// Place of the data, node or table; absent if the key is a hole.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pointer: Option<PtrDoc>,
}

/// A pointer.
#[derive(Clone, Debug, Serialize)]
pub struct PtrDoc {
    /// Cache device; 4095 is the placeholder of a cache miss, whose other fields are random.
    pub dev: u16,
    /// Sector on the cache device.
    pub sector: u64,
    /// Bucket of the sector; absent if the pointer does not point into a bucket of this device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bucket: Option<u32>,
    /// Generation of the bucket when the pointer was made.
    pub generation: u8,
    /// Number of generations by which the bucket is newer than the pointer. A pointer with an age above 0 is stale.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub age: Option<u8>,
}

impl KeyDoc {
    fn of(view: &SetView, key: &Bkey) -> KeyDoc {
        let pointer = key.pointer().map(|ptr| PtrDoc {
            dev: ptr.dev(),
            sector: ptr.offset().0,
            bucket: view.gens.bucket_of(ptr, key.size()).map(|b| b.0),
            generation: ptr.generation().0,
            age: view.gens.age(ptr, key.size()),
        });
        KeyDoc { inode: key.inode().0, end: key.offset().0, size: key.size().0, dirty: key.dirty(), pointer }
    }
}

impl fmt::Display for PtrDoc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PtrDoc { dev, sector, generation, .. } = self;
        match self.bucket {
            _ if *dev == format::Ptr::CHECK_DEV => f.write_str("check"),
            None => write!(f, "invalid: device {dev} sector {sector} gen {generation}"),
            Some(bucket) => {
                write!(f, "sector {sector} bucket {bucket} gen {generation}")?;
                match self.age {
                    None | Some(0) => Ok(()),
                    Some(age) => write!(f, " stale by {age}"),
                }
            }
        }
    }
}

impl fmt::Display for KeyDoc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let KeyDoc { inode, end, size, .. } = self;
        if (*inode, *end) == (Bkey::MAX_INODE.0, Bkey::MAX_OFFSET.0) {
            write!(f, "end of keys, {size} sectors")?;
        } else {
            write!(f, "{inode}:{end}, {size} sectors")?;
        }
        if self.dirty {
            f.write_str(", dirty")?;
        }
        match &self.pointer {
            Some(ptr) => write!(f, " → {ptr}"),
            None => f.write_str(" → not cached"),
        }
    }
}
