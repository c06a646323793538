//! A btree node: its place on disk, the journal entries that it pins, and the extents of a leaf.
//!
//! Must not know how nodes are found or written; `tree`, `append` and `rewrite` do that.

use format::{Bkey, Inode, JournalSeq, Ptr, Sector, Sectors};
use io::Nanos;

use super::copies::Copies;
use super::entry::Entry;
use super::extents::Extents;
use super::merged::Merged;

/// The id of a node in memory. The id of a removed node is never given to another node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct NodeId {
    pub(super) slot: u32,
    /// The birth number: the position in the order in which nodes were made.
    pub(super) birth: u64,
}

impl NodeId {
    /// The id that no node has.
    pub(super) const NONE: NodeId = NodeId { slot: u32::MAX, birth: 0 };
}

/// The greatest position that a node covers, which is the position of its key.
pub(crate) type Bound = (Inode, Sector);

/// A btree node in memory.
pub(crate) struct Node {
    pub(crate) level: u16,
    pub(crate) bound: Bound,
    pub(crate) ptr: Ptr,
    pub(crate) sectors: Sectors,
    /// The `seq` of all bsets of the node.
    pub(crate) set_seq: u64,
    /// The sectors of the node that have bsets.
    pub(crate) written: Sectors,
    pub(crate) parent: Option<NodeId>,
    /// The birth number, which the tree assigns.
    pub(crate) birth: u64,
    /// Whether a task writes or replaces the node; no other task may begin to.
    pub(crate) busy: bool,
    /// Whether another node has replaced this one in memory; it stays until that one is durable.
    pub(crate) replaced: bool,
    /// Pointers to former children that the bsets of an internal node still have on disk.
    pub(crate) dead: Vec<Ptr>,
    pub(crate) body: Body,
}

/// The content of a node, by its kind.
pub(crate) enum Body {
    /// A leaf, which has the keys of data.
    Leaf(Leaf),
    /// An internal node with its children, ascending by bound.
    Internal(Vec<NodeId>),
}

/// A leaf in memory.
#[derive(Default)]
pub(crate) struct Leaf {
    /// The extents; `None` while the leaf is only on disk.
    pub(crate) extents: Option<Extents>,
    /// The unwritten entries, ascending, while the extents are only on disk. Only a replay leaves some.
    pub(crate) unwritten: Box<[(Inode, Entry)]>,
    pub(crate) loading: bool,
    /// The merged size of the bsets on disk.
    pub(crate) merged: Merged,
    /// The number of live dirty sectors, also while the extents are not in memory.
    pub(crate) dirty_sectors: u64,
    /// An upper bound for the words of the keys that are in no bset yet.
    pub(crate) unwritten_words: usize,
    /// The time of the first of these keys.
    pub(crate) unwritten_since: Nanos,
    /// The newest journal entry with a key of this leaf.
    pub(crate) newest_seq: JournalSeq,
    /// The oldest journal entry with a key that is in no bset yet.
    pub(crate) pin_pending: Option<JournalSeq>,
    /// The oldest journal entry with a key in the bset that is being written.
    pub(crate) pin_inflight: Option<JournalSeq>,
    /// The clean copies whose keys are in no bset yet and not in the journal.
    pub(crate) copies: Copies,
    /// Whether a new node must replace the leaf: an append failed, or entries were removed in memory only.
    pub(crate) must_rewrite: bool,
    pub(crate) last_used: u64,
    pub(crate) queued: bool,
}

impl Node {
    /// The key that points to this node, in its parent or in the journal.
    pub(crate) fn key(&self) -> Bkey {
        Bkey::node(self.bound.0, self.bound.1, self.sectors, self.ptr)
    }

    /// The end of the part of a range that this leaf covers; the range begins in this leaf and ends at `end`.
    pub(crate) fn clip(&self, inode: Inode, end: Sector) -> Sector {
        if self.bound.0 == inode { end.min(self.bound.1) } else { end }
    }

    pub(crate) fn leaf(&self) -> &Leaf {
        match &self.body {
            Body::Leaf(l) => l,
            Body::Internal(_) => panic!("the node at level {} is not a leaf", self.level),
        }
    }

    pub(crate) fn leaf_mut(&mut self) -> &mut Leaf {
        match &mut self.body {
            Body::Leaf(l) => l,
            Body::Internal(_) => panic!("the node at level {} is not a leaf", self.level),
        }
    }

    pub(crate) fn children(&self) -> &[NodeId] {
        match &self.body {
            Body::Internal(c) => c,
            Body::Leaf(_) => &[],
        }
    }

    pub(crate) fn children_mut(&mut self) -> &mut Vec<NodeId> {
        match &mut self.body {
            Body::Internal(c) => c,
            Body::Leaf(_) => panic!("a leaf has no children"),
        }
    }
}

impl Leaf {
    /// Whether the extents can be dropped from memory without a loss.
    pub(crate) fn is_clean(&self) -> bool {
        self.unwritten_words == 0
            && !self.must_rewrite
            && self.pin_pending.is_none()
            && self.pin_inflight.is_none()
    }

    /// The journal entries that the leaf pins.
    pub(crate) fn pins(&self) -> impl Iterator<Item = JournalSeq> + use<> {
        self.pin_pending.into_iter().chain(self.pin_inflight)
    }
}
