//! A btree node: where it is on disk, what it pins, and for a leaf its extents in memory.
//!
//! Must not know how nodes are found or written; see `tree`, `append` and `rewrite`.

use format::{Bkey, Inode, JournalSeq, Ptr, Sector, Sectors};
use io::Nanos;

use super::copies::Copies;
use super::extents::Extents;
use super::merged::Merged;

/// Names a node in memory. The name of a node that is gone never names another one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct NodeId {
    pub(super) slot: u32,
    /// Order in which nodes were made.
    pub(super) birth: u64,
}

impl NodeId {
    /// The name of no node.
    pub(super) const NONE: NodeId = NodeId { slot: u32::MAX, birth: 0 };
}

/// The greatest position that a node covers; the position of its key.
pub(crate) type Bound = (Inode, Sector);

pub(crate) struct Node {
    pub(crate) level: u16,
    pub(crate) bound: Bound,
    pub(crate) ptr: Ptr,
    pub(crate) sectors: Sectors,
    /// `seq` of all its bsets.
    pub(crate) set_seq: u64,
    /// Sectors of the node that hold sets.
    pub(crate) written: Sectors,
    pub(crate) parent: Option<NodeId>,
    /// Order in which nodes were made; given by the tree.
    pub(crate) birth: u64,
    /// A write of the node is in flight, or it is being replaced: no second writer.
    pub(crate) busy: bool,
    /// Another node has taken its place in memory: it lives on only until that one is durable.
    pub(crate) replaced: bool,
    /// Pointers that the sets of an internal node have on disk to children that it has no more.
    pub(crate) dead: Vec<Ptr>,
    pub(crate) body: Body,
}

pub(crate) enum Body {
    Leaf(Leaf),
    /// Children, ascending by bound.
    Internal(Vec<NodeId>),
}

/// A leaf in memory.
#[derive(Default)]
pub(crate) struct Leaf {
    /// `None` while the leaf is only on disk.
    pub(crate) extents: Option<Extents>,
    pub(crate) loading: bool,
    /// What the sets on disk amount to.
    pub(crate) merged: Merged,
    /// Live dirty sectors (kept while the leaf is not in memory).
    pub(crate) dirty_sectors: u64,
    /// Words of keys that no set holds yet (an upper bound).
    pub(crate) unwritten_words: usize,
    /// When the first of them came.
    pub(crate) unwritten_since: Nanos,
    /// Newest journal entry with a key of this leaf.
    pub(crate) newest_seq: JournalSeq,
    /// Oldest journal entry with a key that no set holds yet.
    pub(crate) pin_pending: Option<JournalSeq>,
    /// The same for keys in a set that is being written.
    pub(crate) pin_inflight: Option<JournalSeq>,
    /// Clean copies that are in no set yet, nor in the journal.
    pub(crate) copies: Copies,
    /// Must be replaced by a new node: an append failed, or entries were dropped in memory only.
    pub(crate) must_rewrite: bool,
    pub(crate) last_used: u64,
    pub(crate) queued: bool,
}

impl Node {
    /// The key by which the parent (or the journal) names this node.
    pub(crate) fn key(&self) -> Bkey {
        Bkey::node(self.bound.0, self.bound.1, self.sectors, self.ptr)
    }

    /// The part of `[…, end)` of a device that a leaf covers in which the range begins.
    pub(crate) fn clip(&self, inode: Inode, end: Sector) -> Sector {
        if self.bound.0 == inode { end.min(self.bound.1) } else { end }
    }

    pub(crate) fn leaf(&self) -> &Leaf {
        match &self.body {
            Body::Leaf(l) => l,
            Body::Internal(_) => panic!("node at level {} is no leaf", self.level),
        }
    }

    pub(crate) fn leaf_mut(&mut self) -> &mut Leaf {
        match &mut self.body {
            Body::Leaf(l) => l,
            Body::Internal(_) => panic!("node at level {} is no leaf", self.level),
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
    /// Nothing would be lost if the extents were dropped from memory.
    pub(crate) fn is_clean(&self) -> bool {
        self.unwritten_words == 0
            && !self.must_rewrite
            && self.pin_pending.is_none()
            && self.pin_inflight.is_none()
    }

    /// Journal entries that the leaf holds.
    pub(crate) fn pins(&self) -> impl Iterator<Item = JournalSeq> + use<> {
        self.pin_pending.into_iter().chain(self.pin_inflight)
    }
}
