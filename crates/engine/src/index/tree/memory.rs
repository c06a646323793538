//! Which leaves are in memory.
//!
//! Owns the count of the bytes that extents take. A leaf whose extents are not in memory has at most some unwritten
//! entries there. Must not know how leaves are read or written.

use super::Tree;
use crate::canary::{Bug, bug};
use crate::index::extents::Extents;
use crate::index::node::NodeId;

impl Tree {
    /// Puts the extents of a leaf into memory, with the unwritten entries that [`Tree::unload_changed`] has kept.
    pub(crate) fn set_extents(&mut self, id: NodeId, mut extents: Extents) {
        self.clock += 1;
        let clock = self.clock;
        let leaf = self.node_mut(id).leaf_mut();
        assert!(leaf.extents.is_none(), "a leaf is loaded once");
        for (inode, e) in std::mem::take(&mut leaf.unwritten) {
            if !bug(Bug::UnloadedKeysForgotten) {
                extents.replace(inode, e.start(), e.end(), Some(e), |_| ());
            }
        }
        let bytes = extents.memory_bytes_hint();
        leaf.extents = Some(extents);
        leaf.last_used = clock;
        self.loaded_bytes += bytes;
    }

    /// Takes the extents of a leaf with unwritten changes out of memory. The leaf keeps its unwritten entries: they and its
    /// bsets on disk are the whole leaf.
    pub(crate) fn unload_changed(&mut self, id: NodeId) {
        let node = self.node(id);
        assert!(
            !node.busy && !node.leaf().must_rewrite,
            "the bsets on disk have the entries that are written"
        );
        let Some(extents) = self.take_extents(id) else { return };
        self.node_mut(id).leaf_mut().unwritten = extents.iter_unwritten().collect();
    }

    /// Takes the extents of a leaf out of memory.
    pub(crate) fn take_extents(&mut self, id: NodeId) -> Option<Extents> {
        let x = self.node_mut(id).leaf_mut().extents.take();
        self.loaded_bytes -= x.as_ref().map_or(0, Extents::memory_bytes_hint);
        x
    }

    /// The bytes of memory that extents take.
    pub(crate) fn loaded_bytes(&self) -> usize {
        self.loaded_bytes
    }

    /// The least recently used leaf that can be dropped from memory.
    pub(crate) fn coldest_clean(&self) -> Option<NodeId> {
        let candidates = self.leaves().filter(|id| {
            let n = self.node(*id);
            n.leaf().extents.is_some() && n.leaf().is_clean() && !n.busy
        });
        candidates.min_by_key(|id| self.node(*id).leaf().last_used)
    }

    /// The least recently used leaf in memory, with or without unwritten changes.
    pub(crate) fn coldest_dirty(&self) -> Option<NodeId> {
        let loaded =
            self.leaves().filter(|id| self.node(*id).leaf().extents.is_some() && !self.node(*id).busy);
        loaded.min_by_key(|id| self.node(*id).leaf().last_used)
    }
}
