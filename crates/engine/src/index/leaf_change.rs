//! A change of one leaf, as [`Tree::change`](super::tree::Tree::change) carries it out.
//!
//! Owns the way in which the change gets to disk, and the entry that it puts into the leaf. Must not know the tree.

use format::{Inode, JournalSeq, Ptr, Sector};
use io::Nanos;

use super::entry::Entry;
use super::node::NodeId;
use crate::device::Tick;

/// How a change of the index gets to disk, with the numbers that the tree records.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Via {
    /// The key is in this journal entry.
    Journal(JournalSeq),
    /// The key goes to its leaf only.
    LeafOnly {
        /// The data was complete at this tick of the cache device.
        data: Tick,
        /// The data may be that of any write to the backing device up to this tick.
        direct: Option<Tick>,
        /// The newest durable journal entry: a hole that a later entry made must not be replaced.
        durable: JournalSeq,
    },
}

impl Via {
    /// The journal entry of the change; 0 if the key goes to its leaf only.
    #[inline]
    pub(super) fn seq(self) -> JournalSeq {
        match self {
            Via::Journal(seq) => seq,
            Via::LeafOnly { .. } => JournalSeq(0),
        }
    }
}

/// A change of `[start, end)` in one leaf.
#[derive(Clone, Copy)]
pub(crate) struct LeafChange {
    pub(crate) leaf: NodeId,
    pub(crate) inode: Inode,
    pub(crate) start: Sector,
    pub(crate) end: Sector,
    /// The pointer of the new extent and whether it is dirty; `None` makes a hole.
    pub(crate) new: Option<(Ptr, bool)>,
    pub(crate) via: Via,
    /// The time of the change.
    pub(crate) now: Nanos,
}

impl LeafChange {
    /// The extent or hole that the change puts into the leaf.
    #[inline]
    pub(super) fn entry(&self) -> Entry {
        let (end, size) = (self.end, self.end - self.start);
        match (self.new, self.via) {
            (Some((ptr, dirty)), Via::Journal(_)) => {
                Entry::extent(end, size, dirty, ptr).unwritten().journaled()
            }
            (Some((ptr, dirty)), Via::LeafOnly { .. }) => Entry::extent(end, size, dirty, ptr).unwritten(),
            (None, Via::Journal(seq)) => Entry::hole(end, size, seq).unwritten().journaled(),
            (None, Via::LeafOnly { .. }) => Entry::hole(end, size, JournalSeq(0)).unwritten(),
        }
    }
}
