//! Damaged structures on the cache device: the place of each, and the broken rule.
//!
//! Owns one variant for each rule that only the engine can check, because it compares several structures; a rule of one
//! structure is checked by `format`, and its error is the source. Must not know how a structure is read.

use std::sync::Arc;

use format::{BucketNr, Corrupt, Gen, Inode, JournalSeq, Sector, Sectors};

/// A damaged structure: its place and the damage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// Name of the cache device.
    pub device: Arc<str>,
    /// UUID of the set.
    pub set: String,
    /// The sector on the device.
    pub sector: Sector,
    /// The bucket, and its generation where the structure has one.
    pub bucket: Option<(BucketNr, Option<Gen>)>,
    /// The buckets of the btree nodes above the structure, from the root on.
    pub path: Vec<BucketNr>,
    /// The broken rule, with the expected and the found value.
    pub flaw: Flaw,
}

impl std::error::Error for Damage {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.flaw)
    }
}

impl std::fmt::Display for Damage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (cache set {}): sector {}", self.device, self.set, self.sector)?;
        if let Some((bucket, generation)) = self.bucket {
            write!(f, ", bucket {bucket}")?;
            if let Some(g) = generation {
                write!(f, " gen {g}")?;
            }
        }
        if !self.path.is_empty() {
            let path: Vec<String> = self.path.iter().map(ToString::to_string).collect();
            write!(f, ", path {}", path.join("→"))?;
        }
        write!(f, ": {}", self.flaw)
    }
}

/// The rule that a structure breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Flaw {
    /// A field breaks a rule of the format.
    #[error("{0}")]
    Field(#[source] Corrupt),
    /// An initialised set has no journal.
    #[error(
        "journal: expected at least one valid entry in {buckets} journal buckets of an initialised set, found none"
    )]
    NoEntry {
        /// The number of journal buckets.
        buckets: usize,
    },
    /// The replay has no entry.
    #[error("journal: expected a newest entry, found none")]
    NoNewestEntry,
    /// The crash log was written beside a newer state of the device.
    #[error(
        "journal: expected entry {} or a newer one, because the crash log has entry {recorded}, found {newest} as the newest: \
         the device has an older state than at the end of the last process, as after the restore of a copy; restore its newest \
         state, or remove the crash log to serve the older one",
        recorded.0.saturating_sub(io::RECORDED_ENTRIES as u64)
    )]
    OlderThanCrashLog {
        /// The entry in the crash log.
        recorded: JournalSeq,
        /// The newest entry on the device.
        newest: JournalSeq,
    },
    /// A key of the journal.
    #[error("journal entry {entry}: key {inode}:{end}: {why}")]
    JournalKey {
        /// The number of the entry.
        entry: JournalSeq,
        /// The inode of the key.
        inode: Inode,
        /// The end of the key.
        end: Sector,
        /// The broken rule.
        #[source]
        why: KeyFlaw,
    },
    /// The index cannot name the end of a flash-only volume.
    #[error("UUID table: slot {slot}: flash-only volume: expected at most {most} sectors, found {found}")]
    VolumeSize {
        /// The slot.
        slot: usize,
        /// The greatest end.
        most: Sector,
        /// The size of the volume.
        found: Sectors,
    },
    /// The table does not say whose dirty data it is.
    #[error(
        "UUID table: slot {slot}: expected a device or a volume, because the index has {sectors} sectors of its dirty data, found a \
         free slot; the table is damaged: run `ubcache repair`, or copy the data out with `ubcache salvage`"
    )]
    DirtyWithoutOwner {
        /// The slot.
        slot: Inode,
        /// The dirty data.
        sectors: Sectors,
    },
    /// A slot that the UUID table of this machine does not have.
    #[error(
        "UUID table: slot {slot} is in use, and a table that this program writes has {slots} slots: the set is of a kernel with \
         larger pages; detach the device of this slot, or delete the volume, there"
    )]
    SlotBehindTable {
        /// The slot.
        slot: usize,
        /// The number of slots that a table has here.
        slots: usize,
    },
    /// The chain of prio sets leads to a bucket outside of the set, or to one of its own.
    #[error(
        "prio set {index} of {sets}: bucket number: expected an unused one in {first}..{end}, found {found}"
    )]
    PrioBucket {
        /// The prio set, from 0.
        index: usize,
        /// The number of prio sets.
        sets: usize,
        /// The first bucket that it may have.
        first: BucketNr,
        /// All buckets are below this one.
        end: u32,
        /// The number on the device.
        found: u64,
    },
    /// A prio set is of another chain.
    #[error("prio set {index} of {sets}: seq: expected {expected}, found {found}")]
    PrioSeq {
        /// The prio set, from 0.
        index: usize,
        /// The number of prio sets.
        sets: usize,
        /// The number of the first prio set.
        expected: u64,
        /// The number of this prio set.
        found: u64,
    },
    /// A bucket has no room for a prio set of any size.
    #[error("prio set: expected a size that fits into a bucket, found none")]
    NoPrioSize,
    /// The position of the root.
    #[error("btree root key: expected position {expected:?}, found {found:?}")]
    RootPosition {
        /// The end of all positions.
        expected: (Inode, Sector),
        /// The position of the key.
        found: (Inode, Sector),
    },
    /// No root was read.
    #[error("btree: no root")]
    NoRoot,
    /// The key that names a btree node.
    #[error("btree node key: {0}")]
    NodeKey(#[source] NodeKeyFlaw),
    /// A btree node, or a key in it.
    #[error("btree node: {0}")]
    Node(#[source] NodeFlaw),
    /// Two structures of metadata lie in one bucket.
    #[error("{structure}: expected a bucket of its own, found one that other metadata uses")]
    SharedBucket {
        /// The structure that was read later.
        structure: &'static str,
    },
    /// An extent lies outside of the range of its leaf.
    #[error(
        "leaf: expected extents inside {}:{}..{}:{}, found {inode}:{start}..{end}",
        lower.0, lower.1, upper.0, upper.1
    )]
    OutsideLeaf {
        /// The end of the leaf before.
        lower: (Inode, Sector),
        /// The end of the leaf.
        upper: (Inode, Sector),
        /// The inode of the extent.
        inode: Inode,
        /// The first sector of the extent.
        start: Sector,
        /// The end of the extent.
        end: Sector,
    },
    /// The leaves are not in ascending order.
    #[error("leaf: expected a bound behind {}:{}, found {}:{}", lower.0, lower.1, found.0, found.1)]
    LeafOrder {
        /// The bound of the leaf before.
        lower: (Inode, Sector),
        /// The bound of the leaf.
        found: (Inode, Sector),
    },
    /// A key of data in a leaf.
    #[error("key {inode}:{end}: {why}")]
    LeafKey {
        /// The inode of the key.
        inode: Inode,
        /// The end of the key.
        end: Sector,
        /// The broken rule.
        #[source]
        why: KeyFlaw,
    },
}

/// The rule that a key of data breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyFlaw {
    /// The index cannot name its end.
    #[error("expected an offset of at most {most}")]
    TooFar {
        /// The greatest end.
        most: Sector,
    },
    /// It points to a bucket of metadata.
    #[error("pointer: expected a bucket of data, found bucket {bucket}, which holds metadata")]
    InMetadata {
        /// The bucket.
        bucket: BucketNr,
    },
    /// The bucket would have more live sectors than it can count.
    #[error("pointer: expected at most {most} live sectors in bucket {bucket}, found {live} and {size} more")]
    TooMuch {
        /// The greatest count.
        most: Sectors,
        /// The bucket.
        bucket: BucketNr,
        /// The count before.
        live: Sectors,
        /// The length of the key.
        size: Sectors,
    },
}

/// The rule that a key breaks that names a btree node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NodeKeyFlaw {
    /// It has no pointer, or several.
    #[error("expected one pointer, found none")]
    NoPointer,
    /// The node lies outside of the buckets of the set, or in two.
    #[error("expected {size} sectors inside one bucket of {first}..{end}, found sector {found}")]
    Outside {
        /// The length of the node.
        size: Sectors,
        /// The first bucket of the set.
        first: BucketNr,
        /// All buckets are below this one.
        end: u32,
        /// The first sector of the node.
        found: Sector,
    },
    /// The node does not begin where its bucket begins.
    #[error("expected the start of bucket {bucket}, found sector {found}")]
    NotAtStart {
        /// The bucket.
        bucket: BucketNr,
        /// The first sector of the node.
        found: Sector,
    },
}

/// The rule that a btree node breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NodeFlaw {
    /// It is its own ancestor.
    #[error("expected a bucket that is not its own ancestor")]
    OwnAncestor,
    /// Another node has its bucket.
    #[error("expected a bucket of its own, found one that another node uses")]
    SharedBucket,
    /// It was read or written before, and has other bsets now.
    #[error("expected bsets in {expected} sectors, as were written, found them in {found}")]
    ChangedBsets {
        /// The sectors that were written.
        expected: Sectors,
        /// The sectors with valid bsets.
        found: Sectors,
    },
    /// It could not be read, because the device was closed.
    #[error("the device was closed")]
    Closed,
    /// A key of data in it.
    #[error("key {inode}:{end}: {why}")]
    Key {
        /// The inode of the key.
        inode: Inode,
        /// The end of the key.
        end: Sector,
        /// The broken rule.
        #[source]
        why: KeyFlaw,
    },
    /// A pointer leads out of the buckets of the set.
    #[error("key {inode}:{end}: pointer: expected {size} sectors inside one bucket, found sector {found}")]
    Pointer {
        /// The inode of the key.
        inode: Inode,
        /// The end of the key.
        end: Sector,
        /// The length of the key.
        size: Sectors,
        /// The sector of the pointer.
        found: Sector,
    },
    /// The generation of a child is too old.
    #[error("key {inode}:{end}: generation age: expected at most {most}, found {found}")]
    Age {
        /// The inode of the key.
        inode: Inode,
        /// The end of the key.
        end: Sector,
        /// The greatest age.
        most: u8,
        /// The age of the pointer.
        found: u8,
    },
    /// Two children end at one position.
    #[error("expected one live child per position, found two at {}:{}", at.0, at.1)]
    TwoChildren {
        /// The position.
        at: (Inode, Sector),
    },
    /// The children do not cover the range of the node.
    #[error("last child: expected position {}:{}, found {}", expected.0, expected.1, position(*found))]
    LastChild {
        /// The position of the node.
        expected: (Inode, Sector),
        /// The position of the last child, if there is one.
        found: Option<(Inode, Sector)>,
    },
}

fn position(of: Option<(Inode, Sector)>) -> String {
    of.map_or_else(|| "no live child".to_owned(), |(inode, offset)| format!("{inode}:{offset}"))
}
