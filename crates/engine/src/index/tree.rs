//! The btree of extents by (inode, sector), in memory.
//!
//! Owns the nodes, the directory of leaves and the dirty-sector counts; updates the bucket table with every change. All
//! functions are synchronous: between two await points of a caller the tree is consistent. `load`, `append` and
//! `rewrite` read and write the nodes. Must not know devices or the content of the journal.
//!
//! Invariants: the bounds of the leaves are ascending and the last one is the greatest position, so every position has
//! exactly one leaf; the extents of a leaf lie between the bound of the leaf before it and its own.

use format::{Gen, Inode, JournalSeq, Ptr, Sector, Sectors};

use super::dirty::DirtyDevices;
use super::entry::{Entry, MAX_POSITION};
use super::extents::{Extents, order};
use super::leaf_change::{LeafChange, Via};
use super::node::{Body, Bound, Node, NodeId};
use crate::alloc::Buckets;
use crate::canary::{Bug, bug};
use crate::policy::stripes::{DirtyStripes, StripeGeometry};

mod memory;

/// The greatest position, which is the bound of the last leaf and of the root.
pub(crate) const MAX_BOUND: Bound = (Inode(0xF_FFFF), Sector(i64::MAX as u64));

/// The error of a look-up in a leaf that must be read from disk first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct NotLoaded(pub(crate) NodeId);

/// The extent or hole at the beginning of a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct IndexSegment {
    /// The end of the extent or hole, at most the end of the range.
    pub(crate) end: Sector,
    pub(crate) kind: Kind,
}

/// Whether a segment is cached, and where.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// Not cached.
    Hole {
        /// The journal entry that made the hole, if it may not be durable yet.
        seq: Option<JournalSeq>,
    },
    /// Cached; `ptr` points to the data of the first sector.
    Hit {
        ptr: Ptr,
        dirty: bool,
        /// Whether a crash may bring this extent back.
        may_be_durable: bool,
    },
}

/// The fill of the nodes in memory.
pub(crate) struct TreeFill {
    pub(crate) extents: usize,
    pub(crate) root_words: usize,
    pub(crate) words: usize,
}

/// The nodes of the index in memory.
pub(crate) struct Tree {
    nodes: Vec<Option<Node>>,
    free: Vec<u32>,
    root: NodeId,
    leaves: Vec<(Bound, NodeId)>,
    dirty: DirtyDevices,
    clock: u64,
    next_birth: u64,
    loaded_bytes: usize,
}

/// The numbers of live and stale entries of one leaf.
pub(crate) struct Survey {
    pub(crate) live: usize,
    pub(crate) stale: usize,
    pub(crate) max_age: u8,
}

impl Tree {
    /// Makes a tree of one node.
    pub(crate) fn new(root: Node) -> Tree {
        let mut t = Tree {
            nodes: Vec::new(),
            free: Vec::new(),
            root: NodeId::NONE,
            leaves: Vec::new(),
            dirty: DirtyDevices::default(),
            clock: 0,
            next_birth: 0,
            loaded_bytes: 0,
        };
        assert_eq!(root.bound, MAX_BOUND, "the root covers everything");
        let leaf = root.level == 0;
        t.root = t.add_node(root);
        if leaf {
            t.leaves.push((MAX_BOUND, t.root));
        }
        t
    }

    pub(crate) fn root(&self) -> NodeId {
        self.root
    }

    /// Levels above the leaves.
    pub(crate) fn depth(&self) -> u32 {
        u32::from(self.node(self.root).level)
    }

    /// The number of extents in memory, and the words of the keys of the root and of all nodes.
    pub(crate) fn fill(&self) -> TreeFill {
        let words = |n: &Node| match &n.body {
            Body::Leaf(leaf) => leaf.extents.as_ref().map_or(0, Extents::len) * 3,
            Body::Internal(children) => children.len() * 3,
        };
        let mut fill = TreeFill { extents: 0, root_words: words(self.node(self.root)), words: 0 };
        for node in self.nodes.iter().flatten() {
            if let Body::Leaf(leaf) = &node.body {
                fill.extents += leaf.extents.as_ref().map_or(0, Extents::len);
            }
            fill.words += words(node);
        }
        fill
    }

    pub(crate) fn set_root(&mut self, root: NodeId) {
        self.root = root;
        self.node_mut(root).parent = None;
    }

    /// The birth number that the next node gets.
    pub(crate) fn next_birth(&self) -> u64 {
        self.next_birth
    }

    pub(crate) fn add_node(&mut self, mut node: Node) -> NodeId {
        node.birth = self.next_birth;
        self.next_birth += 1;
        let birth = node.birth;
        let slot = match self.free.pop() {
            Some(slot) => {
                self.nodes[slot as usize] = Some(node);
                slot
            }
            None => {
                self.nodes.push(Some(node));
                (self.nodes.len() - 1) as u32
            }
        };
        NodeId { slot, birth }
    }

    pub(crate) fn remove_node(&mut self, id: NodeId) -> Node {
        assert!(self.try_node(id).is_some(), "a node is removed once");
        self.free.push(id.slot);
        self.nodes[id.slot as usize].take().expect("the node was found above")
    }

    pub(crate) fn try_node(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(id.slot as usize)?.as_ref().filter(|n| n.birth == id.birth)
    }

    pub(crate) fn node(&self, id: NodeId) -> &Node {
        self.try_node(id).expect("a node id names a live node")
    }

    pub(crate) fn node_mut(&mut self, id: NodeId) -> &mut Node {
        let node = self.nodes.get_mut(id.slot as usize).and_then(Option::as_mut);
        node.filter(|n| n.birth == id.birth).expect("a node id names a live node")
    }

    pub(crate) fn node_count(&self) -> usize {
        self.nodes.len() - self.free.len()
    }

    /// The ids of all nodes.
    pub(crate) fn ids(&self) -> impl Iterator<Item = NodeId> + '_ {
        let nodes = (0..).zip(&self.nodes);
        nodes.filter_map(|(slot, n)| n.as_ref().map(|n| NodeId { slot, birth: n.birth }))
    }

    /// The leaves in order.
    pub(crate) fn leaves(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.leaves.iter().map(|(_, id)| *id)
    }

    /// Builds the directory of leaves from the internal nodes, after loading.
    pub(crate) fn rebuild_directory(&mut self) {
        let mut leaves = Vec::new();
        let mut stack = vec![self.root];
        while let Some(id) = stack.pop() {
            let node = self.node(id);
            match &node.body {
                Body::Leaf(_) => leaves.push((node.bound, id)),
                Body::Internal(children) => stack.extend(children.iter().rev()),
            }
        }
        self.leaves = leaves;
    }

    /// Replaces the adjacent leaves `old` in the directory by `new`.
    pub(crate) fn replace_leaves(&mut self, old: &[NodeId], new: &[NodeId]) {
        let first = self.leaves.iter().position(|(_, id)| Some(id) == old.first());
        let first = first.expect("the leaf is in the directory");
        let replaced: Vec<NodeId> =
            self.leaves.iter().skip(first).take(old.len()).map(|(_, id)| *id).collect();
        assert_eq!(replaced, old, "replaced leaves are adjacent");
        let new: Vec<(Bound, NodeId)> = new.iter().map(|id| (self.node(*id).bound, *id)).collect();
        self.leaves.splice(first..first + old.len(), new);
    }

    /// The number of the leaf that covers `position`, in the order of the leaves.
    pub(crate) fn leaf_number(&self, inode: Inode, position: Sector) -> usize {
        let wanted = order(inode, position);
        self.leaves.partition_point(|(bound, _)| order(bound.0, bound.1) <= wanted)
    }

    /// The leaf with a number, and the bound of the leaf before it.
    pub(crate) fn numbered_leaf(&self, number: usize) -> Option<(Bound, NodeId)> {
        let lower = number.checked_sub(1).and_then(|before| self.leaves.get(before));
        let lower = lower.map_or((Inode(0), Sector(0)), |(bound, _)| *bound);
        self.leaves.get(number).map(|(_, id)| (lower, *id))
    }

    /// The leaf that covers `position`.
    pub(crate) fn leaf_at(&self, inode: Inode, position: Sector) -> NodeId {
        let at = self.leaf_number(inode, position);
        self.leaves.get(at).expect("the last leaf covers the greatest position").1
    }

    /// The leaf behind the one whose bound is `bound`.
    pub(crate) fn leaf_after(&self, bound: Bound) -> Option<NodeId> {
        let at = self.leaves.partition_point(|(b, _)| *b <= bound);
        self.leaves.get(at).map(|(_, id)| *id)
    }

    /// The next leaf of a walk that has passed the leaf with the bound `passed`; the first leaf for `None`.
    pub(crate) fn next_leaf(&self, passed: Option<Bound>) -> Option<NodeId> {
        match passed {
            None => Some(self.leaf_at(Inode(0), Sector(0))),
            Some(bound) => self.leaf_after(bound),
        }
    }

    /// Looks up the extent or hole at `start`, up to `end`.
    pub(crate) fn segment(
        &mut self,
        inode: Inode,
        start: Sector,
        end: Sector,
        buckets: &Buckets,
    ) -> Result<IndexSegment, NotLoaded> {
        debug_assert!(start < end && end <= MAX_POSITION);
        let id = self.leaf_at(inode, start);
        self.clock += 1;
        let clock = self.clock;
        let node = self.node_mut(id);
        let end = node.clip(inode, end);
        let leaf = node.leaf_mut();
        leaf.last_used = clock;
        let extents = leaf.extents.as_ref().ok_or(NotLoaded(id))?;
        let Some(e) = extents.first_behind(inode, start).filter(|e| e.start() < end) else {
            return Ok(IndexSegment { end, kind: Kind::Hole { seq: None } });
        };
        if e.start() > start {
            return Ok(IndexSegment { end: e.start(), kind: Kind::Hole { seq: None } });
        }
        let here = e.clipped(start, end);
        let kind = if here.is_hole() {
            Kind::Hole { seq: Some(here.hole_seq()) }
        } else if buckets.is_current(here.ptr()) {
            Kind::Hit { ptr: here.ptr(), dirty: here.dirty(), may_be_durable: here.may_be_durable() }
        } else {
            Kind::Hole { seq: None }
        };
        Ok(IndexSegment { end: here.end(), kind })
    }

    /// Carries out a change. The leaf is in memory and covers the range. Returns the number of words of keys that the
    /// leaf then has to write. Calls `pins` with the journal entry if the leaf is to pin it.
    pub(crate) fn change(
        &mut self,
        change: &LeafChange,
        buckets: &mut Buckets,
        pins: &mut impl FnMut(JournalSeq),
    ) -> usize {
        let LeafChange { leaf: id, inode, start, end, new, via, now } = *change;
        let size = end - start;
        let node = self.nodes.get_mut(id.slot as usize).and_then(Option::as_mut);
        let node = node.filter(|n| n.birth == id.birth).expect("a node id names a live node");
        let Body::Leaf(leaf) = &mut node.body else { panic!("the directory names leaves") };
        let extents = leaf.extents.as_mut().expect("a leaf is in memory while it is changed");
        let device = self.dirty.device_mut(inode);
        let by = via.seq();
        let (before, entries) = (extents.memory_bytes_hint(), extents.len());
        extents.replace(inode, start, end, Some(change.entry()), |old| {
            if old.is_hole() {
                // The hole hides an older key. A look-up that finds the copy would not know for which entry to wait.
                let forgotten = matches!(via, Via::LeafOnly { durable, .. } if old.hole_seq() > durable);
                assert!(
                    !forgotten || bug(Bug::MissOverPendingHole),
                    "a copy replaces the hole of journal entry {}, which is not durable",
                    old.hole_seq()
                );
                return;
            }
            let was_current = buckets.sub(old.ptr(), old.size(), old.dirty());
            if was_current && old.dirty() {
                device.remove(old.start(), old.size(), by);
                leaf.dirty_sectors -= old.size().0;
            }
        });
        self.loaded_bytes = self.loaded_bytes + extents.memory_bytes_hint() - before;
        if let Some((ptr, dirty)) = new {
            assert!(buckets.add(ptr, size, dirty), "a new extent points to an invalidated bucket");
            if dirty {
                device.add(start, size);
                leaf.dirty_sectors += size.0;
            }
        }
        if leaf.unwritten_words == 0 {
            leaf.unwritten_since = now;
        }
        // If the change is inside an older entry, the part behind it is written again, too.
        leaf.unwritten_words += if extents.len() > entries + 1 { 6 } else { 3 };
        match via {
            Via::Journal(seq) => {
                leaf.newest_seq = leaf.newest_seq.max(seq);
                if leaf.pin_pending.is_none() {
                    leaf.pin_pending = Some(seq);
                    pins(seq);
                }
            }
            Via::LeafOnly { data, direct, .. } if new.is_some() => leaf.copies.add(inode, data, direct),
            Via::LeafOnly { .. } => {}
        }
        leaf.unwritten_words
    }

    /// The number of live dirty sectors of a device.
    pub(crate) fn dirty_sectors(&self, inode: Inode) -> Sectors {
        self.dirty.sectors(inode)
    }

    /// The newest journal entry by which sectors of a device ceased to be dirty.
    pub(crate) fn cleaned(&self, inode: Inode) -> JournalSeq {
        self.dirty.cleaned(inode)
    }

    /// Every device that has had dirty sectors, with their present number.
    pub(crate) fn all_dirty(&self) -> impl Iterator<Item = (Inode, Sectors)> + '_ {
        self.dirty.all()
    }

    /// The dirty stripes of a device for which they are counted.
    pub(crate) fn dirty_stripes(&self, inode: Inode) -> Option<&DirtyStripes> {
        self.dirty.stripes(inode)
    }

    /// Begins to count the dirty stripes of a device; [`Tree::count_stripes`] counts them.
    pub(crate) fn begin_stripes(&mut self, inode: Inode, geometry: StripeGeometry) {
        self.dirty.device_mut(inode).begin_stripes(geometry);
    }

    /// Counts stripes in the leaf that covers `from`; returns the start of the next leaf of the device, if any.
    pub(crate) fn count_stripes(
        &mut self,
        inode: Inode,
        from: Sector,
        buckets: &Buckets,
    ) -> Result<Option<Sector>, NotLoaded> {
        let id = self.leaf_at(inode, from);
        let node = self.node(id);
        let next = (node.bound.0 == inode).then_some(node.bound.1);
        let mut found = Vec::new();
        if node.leaf().dirty_sectors > 0 {
            let extents = node.leaf().extents.as_ref().ok_or(NotLoaded(id))?;
            let dirty = |e: &Entry| !e.is_hole() && e.dirty() && buckets.is_current(e.ptr());
            found.extend(extents.iter_from(inode, from).filter(dirty).map(|e| (e.start(), e.size())));
        }
        self.dirty.device_mut(inode).count_stripes(next.unwrap_or(Sector(u64::MAX)), found.into_iter());
        Ok(next)
    }

    /// Ends the count of the stripes of a device.
    pub(crate) fn drop_stripes(&mut self, inode: Inode) {
        self.dirty.device_mut(inode).drop_stripes();
    }

    /// Counts the extents of a leaf that was just read for the first time, in the bucket table and in the dirty counts.
    pub(crate) fn account_leaf(&mut self, id: NodeId, extents: &Extents, buckets: &mut Buckets) {
        let mut leaf_dirty = 0;
        for (inode, e) in extents.iter().filter(|(_, e)| !e.is_hole()) {
            buckets.note_footer_room(e.ptr(), e.size());
            if buckets.add(e.ptr(), e.size(), e.dirty()) && e.dirty() {
                self.dirty.device_mut(inode).add(e.start(), e.size());
                leaf_dirty += e.size().0;
            }
        }
        self.node_mut(id).leaf_mut().dirty_sectors = leaf_dirty;
    }

    /// The next dirty extent of `inode` at or behind `from`: start, size, pointer. Needs no leaf without dirty data in
    /// memory.
    pub(crate) fn next_dirty(
        &self,
        inode: Inode,
        from: Sector,
        buckets: &Buckets,
    ) -> Result<Option<(Sector, Sectors, Ptr)>, NotLoaded> {
        let mut at = self.leaves.partition_point(|(bound, _)| *bound <= (inode, from));
        while let Some((bound, id)) = self.leaves.get(at) {
            let leaf = self.node(*id).leaf();
            if leaf.dirty_sectors > 0 {
                let extents = leaf.extents.as_ref().ok_or(NotLoaded(*id))?;
                let found = extents
                    .iter_from(inode, from)
                    .find(|e| !e.is_hole() && e.dirty() && buckets.is_current(e.ptr()));
                if let Some(e) = found {
                    let e = if e.start() < from { e.clipped(from, e.end()) } else { e };
                    return Ok(Some((e.start(), e.size(), e.ptr())));
                }
            }
            if bound.0 > inode {
                return Ok(None);
            }
            at += 1;
        }
        Ok(None)
    }

    /// The part behind `from` of the next extent that is no hole, also of one in a bucket that was invalidated: such an extent
    /// counts again after a crash that loses the new generation of its bucket.
    pub(crate) fn next_mapped(
        &self,
        inode: Inode,
        from: Sector,
    ) -> Result<Option<(Sector, Sector)>, NotLoaded> {
        let at = self.leaves.partition_point(|(bound, _)| *bound <= (inode, from));
        for (bound, id) in self.leaves.get(at..).unwrap_or_default() {
            let extents = self.node(*id).leaf().extents.as_ref().ok_or(NotLoaded(*id))?;
            if let Some(e) = extents.iter_from(inode, from).find(|e| !e.is_hole()) {
                return Ok(Some((e.start().max(from), e.end())));
            }
            if bound.0 > inode {
                break;
            }
        }
        Ok(None)
    }
}

/// Operations of the garbage collector.
impl Tree {
    /// Counts the live and the stale entries of a leaf, and finds the greatest age of a stale one.
    pub(crate) fn survey(&self, id: NodeId, buckets: &Buckets) -> Survey {
        let mut s = Survey { live: 0, stale: 0, max_age: 0 };
        let extents = self.node(id).leaf().extents.as_ref();
        for (_, e) in extents.into_iter().flat_map(Extents::iter).filter(|(_, e)| !e.is_hole()) {
            let age = buckets.generation(buckets.bucket_of(e.ptr())).age_of(e.generation());
            if age == 0 {
                s.live += 1;
            } else {
                s.stale += 1;
                s.max_age = s.max_age.max(age);
            }
        }
        s
    }

    /// Lowers `oldest` to the generations of the pointers in a leaf.
    pub(crate) fn oldest_pointers(&self, id: NodeId, buckets: &Buckets, oldest: &mut [Gen]) {
        let extents = self.node(id).leaf().extents.as_ref();
        for (_, e) in extents.into_iter().flat_map(Extents::iter).filter(|(_, e)| !e.is_hole()) {
            let slot = oldest.get_mut(buckets.bucket_of(e.ptr()).0 as usize);
            if let Some(o) = slot.filter(|o| o.age_of(e.generation()) > 0) {
                *o = e.generation();
            }
        }
    }

    /// Lowers `oldest` to the generations of the pointers to former children that internal nodes have on disk.
    pub(crate) fn oldest_dead_pointers(&self, buckets: &Buckets, oldest: &mut [Gen]) {
        for ptr in self.nodes.iter().flatten().flat_map(|n| &n.dead) {
            let slot = oldest.get_mut(buckets.bucket_of(*ptr).0 as usize);
            if let Some(o) = slot.filter(|o| o.age_of(ptr.generation()) > 0) {
                *o = ptr.generation();
            }
        }
    }

    /// The greatest age of a pointer to a former child that an internal node has on disk.
    pub(crate) fn dead_age(&self, id: NodeId, buckets: &Buckets) -> u8 {
        let age = |p: &Ptr| buckets.generation(buckets.bucket_of(*p)).age_of(p.generation());
        self.node(id).dead.iter().map(age).max().unwrap_or(0)
    }

    /// The greatest [`Tree::dead_age`] of the nodes above a node.
    pub(crate) fn dead_age_above(&self, id: NodeId, buckets: &Buckets) -> u8 {
        let (mut age, mut at) = (0, self.node(id).parent);
        while let Some(parent) = at {
            age = age.max(self.dead_age(parent, buckets));
            at = self.node(parent).parent;
        }
        age
    }

    /// The leaves whose extents in memory differ from their bsets on disk.
    pub(crate) fn changed_leaves(&self) -> Vec<NodeId> {
        self.leaves().filter(|id| !self.node(*id).leaf().is_clean()).collect()
    }

    /// Removes the entries for which `wanted` is false from a leaf in memory, and marks it for a rewrite if it had any.
    pub(crate) fn purge(
        &mut self,
        id: NodeId,
        buckets: &mut Buckets,
        wanted: impl Fn(Inode, &Entry) -> bool,
    ) {
        let Some(mut extents) = self.take_extents(id) else { return };
        let before = extents.len();
        let mut dirty_removed = 0;
        let dirty = &mut self.dirty;
        extents.retain(|inode, e| {
            if wanted(inode, e) {
                return true;
            }
            if !e.is_hole() && buckets.sub(e.ptr(), e.size(), e.dirty()) && e.dirty() {
                dirty_removed += e.size().0;
                dirty.device_mut(inode).remove(e.start(), e.size(), JournalSeq(0));
            }
            false
        });
        let changed = extents.len() != before;
        self.set_extents(id, extents);
        let leaf = self.node_mut(id).leaf_mut();
        leaf.dirty_sectors -= dirty_removed;
        leaf.must_rewrite |= changed;
    }

    /// The live extents of a leaf: inode, start, size, pointer, dirty flag.
    pub(crate) fn live_extents<'a>(
        &'a self,
        id: NodeId,
        buckets: &'a Buckets,
    ) -> impl Iterator<Item = (Inode, Sector, Sectors, Ptr, bool)> + 'a {
        let extents = self.node(id).leaf().extents.as_ref();
        extents
            .into_iter()
            .flat_map(Extents::iter)
            .filter(|(_, e)| !e.is_hole() && buckets.is_current(e.ptr()))
            .map(|(inode, e)| (inode, e.start(), e.size(), e.ptr(), e.dirty()))
    }
}

#[cfg(test)]
mod tests;
