//! Replacing leaves: splitting a full one, compacting a fragmented one, packing several small ones together.
//!
//! In memory the new leaves replace the old ones at once, and requests use them. On disk the order is (format section
//! 12.3): the whole new nodes (FUA) → the bset of the parent with their keys and the freeing keys of the old nodes
//! (FUA), or a journal entry with the new root → the old buckets may be reused. The journal entries of the old leaves
//! stay pinned until the second step is durable.
//!
//! Invariant: the structure lock allows one replacement at a time, so two tasks never change the same parent.

use format::bset::{BsetBuilder, appendable_words, padded_bytes};
use format::{Bkey, BucketNr, Inode, JournalSeq, JsetRoots, Ptr, Sector, Sectors};

use super::Index;
use super::append::{key_of, leaves_changed, settle, wait_idle};
use super::copies::{Copies, drop_unsettled, settle_copies};
use super::entry::Entry;
use super::extents::Extents;
use super::load::load_leaf;
use super::merged::Merged;
use super::node::{Body, Bound, Leaf, Node, NodeId};
use super::tree::{MAX_BOUND, Tree};
use crate::canary::{Bug, bug};
use crate::error::EngineError;
use crate::journal::Urgency;

/// A node is rewritten when it has a stale pointer of more than this age (semantics section 8.4).
pub(crate) const MAX_STALE_AGE: u8 = 10;

/// The share of its words that a new node gets at most, so that it can take further bsets.
const FILL_NUMERATOR: usize = 5;
const FILL_DENOMINATOR: usize = 8;

/// A replacement that was made in memory and is still to be written to disk.
struct Replacement {
    old: Vec<NodeId>,
    new: Vec<NodeId>,
    writes: Vec<(Sector, io::Buffer)>,
    newest_seq: JournalSeq,
    copies: Copies,
}

/// Replaces adjacent leaves of one parent by the smallest number of new leaves that hold their extents.
pub(crate) async fn rewrite(index: &Index, ids: &[NodeId]) -> Result<(), EngineError> {
    let _structure = index.structure.lock().await;
    if !bug(Bug::JournalHoldersWait) {
        replace_holders(index, ids).await?;
    }
    claim_and_replace(index, ids).await
}

/// Replaces the leaves that pin the oldest journal entries, while the journal has no room beside them. A replacement may
/// need a new root and so a journal entry, but only the replacement of a leaf with the oldest pins frees entries: so
/// these leaves go before `ids`.
async fn replace_holders(index: &Index, ids: &[NodeId]) -> Result<(), EngineError> {
    while !index.journal.has_room_beside_holders() {
        let target = index.journal.reclaim_target();
        let holder = {
            let tree = index.tree.borrow();
            let holds = |id: &NodeId| tree.node(*id).leaf().pins().any(|seq| seq <= target);
            if ids.iter().any(|id| tree.try_node(*id).is_some_and(|n| n.level == 0) && holds(id)) {
                return Ok(());
            }
            tree.leaves().find(holds).map(|id| (id, tree.node(id).busy))
        };
        match holder {
            None => return Ok(()),
            Some((id, true)) => wait_idle(index, id).await?,
            Some((id, false)) => claim_and_replace(index, &[id]).await?,
        }
    }
    Ok(())
}

/// Replaces leaves like [`rewrite`]; the caller holds the structure lock.
async fn claim_and_replace(index: &Index, ids: &[NodeId]) -> Result<(), EngineError> {
    if !claim(index, ids).await? {
        return Ok(());
    }
    let result = replace_leaves(index, ids).await;
    if let Err(e) = &result {
        // The new leaves may be in use already, but on disk no parent points to them.
        index.device.fail(e.clone());
        let tree = &mut *index.tree.borrow_mut();
        for id in ids {
            if tree.try_node(*id).is_some() {
                tree.node_mut(*id).busy = false;
            }
        }
    }
    leaves_changed(index);
    result
}

/// Loads the leaves and marks them busy; returns false if they have been replaced or have different parents now.
async fn claim(index: &Index, ids: &[NodeId]) -> Result<bool, EngineError> {
    loop {
        index.device.check()?;
        let mut wait = None;
        let mut load = None;
        {
            let tree = &mut *index.tree.borrow_mut();
            for id in ids {
                match tree.try_node(*id) {
                    Some(n) if n.level == 0 && n.busy => wait = Some(*id),
                    Some(n) if n.level == 0 && n.leaf().extents.is_none() => load = Some(*id),
                    Some(n) if n.level == 0 => {}
                    _ => return Ok(false),
                }
            }
            let parent = ids.first().and_then(|id| tree.node(*id).parent);
            if !ids.iter().all(|id| tree.node(*id).parent == parent) {
                return Ok(false);
            }
            if wait.is_none() && load.is_none() {
                for id in ids {
                    tree.node_mut(*id).busy = true;
                }
                return Ok(true);
            }
        }
        if let Some(id) = wait {
            wait_idle(index, id).await?;
        } else if let Some(id) = load {
            load_leaf(index, id).await?;
        }
    }
}

async fn replace_leaves(index: &Index, ids: &[NodeId]) -> Result<(), EngineError> {
    let began = index.rt.now();
    // The new leaves need not have holes whose journal entries are durable.
    index.journal.commit_keys().await?;
    let mut buckets: Vec<BucketNr> = Vec::new();
    for id in ids {
        settle_copies(index, *id).await;
    }
    loop {
        let needed = nodes_needed(index, &index.tree.borrow(), ids);
        if buckets.len() >= needed {
            break;
        }
        match index.alloc.take_btree_bucket().await {
            Ok(b) => buckets.push(b),
            Err(e) => {
                index.alloc.give_back(&buckets);
                return Err(e);
            }
        }
    }
    let r = swap_leaves(index, ids, &mut buckets);
    index.alloc.give_back(&buckets);
    settle(index, r.newest_seq, &r.copies).await?;
    write_nodes(index, r.writes).await?;
    link(index, &r.new, &r.old).await?;
    finish(index, &r.old, &r.new);
    index.count(|c| c.rewrites += 1);
    index.tasks.times().borrow_mut().split.record(began, index.rt.now());
    Ok(())
}

/// Calls `visit` with each entry of these leaves that the new leaves take over.
fn each_carried(index: &Index, tree: &Tree, ids: &[NodeId], mut visit: impl FnMut(Inode, Entry)) {
    let durable = index.journal.durable();
    let (buckets, invalid) = (index.alloc.buckets(), index.invalid_slots.borrow());
    for id in ids {
        for (inode, e) in tree.node(*id).leaf().extents.iter().flat_map(Extents::iter) {
            let wanted = match e.is_hole() {
                true => e.hole_seq() > durable,
                false => buckets.is_current(e.ptr()) && (invalid.is_empty() || !invalid.contains(&inode)),
            };
            if wanted {
                visit(inode, e);
            }
        }
    }
}

fn fill_words(index: &Index) -> usize {
    index.leaf_words() * FILL_NUMERATOR / FILL_DENOMINATOR
}

fn nodes_needed(index: &Index, tree: &Tree, ids: &[NodeId]) -> usize {
    let mut carried = 0;
    each_carried(index, tree, ids, |_, _| carried += 1);
    nodes_for(index, carried)
}

fn nodes_for(index: &Index, keys: usize) -> usize {
    (3 * keys).div_ceil(fill_words(index)).max(1)
}

/// Replaces the leaves `ids` in memory by new leaves. Takes as many of `buckets` as it needs; the others stay in the
/// list.
fn swap_leaves(index: &Index, ids: &[NodeId], buckets: &mut Vec<BucketNr>) -> Replacement {
    let tree = &mut *index.tree.borrow_mut();
    // Keys of invalid slots are not carried over, so they must no longer be counted: a later user of the slot would
    // have dirty sectors for ever that no look-up finds.
    let invalid = index.invalid_slots.borrow();
    if !invalid.is_empty() && !bug(Bug::InvalidKeysCounted) {
        let buckets = &mut *index.alloc.buckets_mut();
        ids.iter().for_each(|id| tree.purge(*id, buckets, |inode, _| !invalid.contains(&inode)));
    }
    drop(invalid);
    ids.iter().for_each(|id| drop_unsettled(index, tree, *id));
    let mut carried: Vec<(Inode, Entry)> = Vec::new();
    each_carried(index, tree, ids, |inode, e| carried.push((inode, e)));
    let count = nodes_for(index, carried.len());
    let share = carried.len().div_ceil(count).max(1);
    let last = *ids.last().expect("at least one leaf is replaced");
    let (end, parent) = (tree.node(last).bound, tree.node(last).parent);
    let mut newest_seq = JournalSeq(0);
    let mut copies = Copies::default();
    let mut pin: Option<JournalSeq> = None;
    for id in ids {
        let leaf = tree.node(*id).leaf();
        newest_seq = newest_seq.max(leaf.newest_seq);
        copies.merge(&leaf.copies);
        for p in leaf.pins() {
            pin = Some(pin.map_or(p, |q: JournalSeq| q.min(p)));
        }
    }
    for id in ids {
        tree.take_extents(*id);
        tree.node_mut(*id).replaced = true;
    }
    let old = Inherited { parent, newest_seq, pin };
    let mut groups = carried.chunks(share);
    let mut new = Vec::with_capacity(count);
    let mut writes = Vec::with_capacity(count);
    for i in 0..count {
        let group = groups.next().unwrap_or(&[]);
        // The last new leaf has the bound of the last old one; each other new leaf ends behind its last extent.
        let bound = match group.last() {
            Some((inode, e)) if i + 1 < count => (*inode, e.end()),
            _ => end,
        };
        let bucket = buckets.pop().expect("enough buckets were taken");
        let (id, write) = new_leaf(index, tree, NewLeaf { bucket, bound, group }, &old);
        new.push(id);
        writes.push(write);
        if bound == end {
            break;
        }
    }
    tree.replace_leaves(ids, &new);
    if let Some(p) = parent {
        replace_children(tree.node_mut(p).children_mut(), ids, &new);
    }
    Replacement { old: ids.to_vec(), new, writes, newest_seq, copies }
}

/// The state that new leaves take over from the old ones.
struct Inherited {
    parent: Option<NodeId>,
    newest_seq: JournalSeq,
    /// The oldest journal entry that the old leaves pinned.
    pin: Option<JournalSeq>,
}

/// The place, the bound and the extents of a new leaf.
struct NewLeaf<'g> {
    bucket: BucketNr,
    bound: Bound,
    group: &'g [(Inode, Entry)],
}

/// Adds a leaf to the tree; returns its id, and the write that puts it on disk.
fn new_leaf(
    index: &Index,
    tree: &mut Tree,
    new: NewLeaf<'_>,
    old: &Inherited,
) -> (NodeId, (Sector, io::Buffer)) {
    let NewLeaf { bucket, bound, group } = new;
    let Inherited { parent, newest_seq, pin } = *old;
    let mut node = new_node(index, bucket, 0, bound, parent);
    let mut extents = Extents::new(index.geometry.bucket_sectors);
    let mut keys = Vec::with_capacity(group.len());
    let mut carried_holes = 0;
    let mut dirty_sectors = 0;
    for (inode, e) in group {
        let mut e = *e;
        if e.is_hole() {
            // The journal entry of the hole may not be durable yet, so look-ups must still find the hole. It is in no
            // bset, because the write of a bset waits for the journal entry.
            debug_assert!(e.is_unwritten());
            carried_holes += 1;
        } else {
            e.mark_written();
            keys.push(key_of(*inode, e));
            dirty_sectors += if e.dirty() { e.size().0 } else { 0 };
        }
        extents.push_back(*inode, e);
    }
    let (buffer, written) = encode_set(index, &node, &keys);
    node.written = written;
    if let Some(seq) = pin {
        index.journal.pin(seq);
    }
    node.body = Body::Leaf(Leaf {
        dirty_sectors,
        newest_seq,
        merged: Merged::of_set(keys.len()),
        unwritten_words: carried_holes * 3,
        unwritten_since: index.rt.now(),
        pin_inflight: pin,
        ..Leaf::default()
    });
    let sector = node.ptr.offset();
    let id = tree.add_node(node);
    tree.set_extents(id, extents);
    (id, (sector, buffer))
}

fn new_node(index: &Index, bucket: BucketNr, level: u16, bound: Bound, parent: Option<NodeId>) -> Node {
    let generation = index.alloc.buckets().generation(bucket);
    Node {
        level,
        bound,
        ptr: Ptr::new(0, index.geometry.bucket_start(bucket), generation),
        sectors: index.geometry.node_sectors,
        set_seq: index.rt.random() | 1,
        written: Sectors::ZERO,
        parent,
        busy: true,
        birth: 0,
        replaced: false,
        dead: Vec::new(),
        body: if level == 0 { Body::Leaf(Leaf::default()) } else { Body::Internal(Vec::new()) },
    }
}

/// Encodes the first bset of a new node; returns it and the number of its sectors.
fn encode_set(index: &Index, node: &Node, keys: &[Bkey]) -> (io::Buffer, Sectors) {
    let words = keys.iter().map(Bkey::words).sum();
    let block = index.geometry.block_sectors;
    let bytes = padded_bytes(words, block).expect("the keys of a node fit in memory");
    assert!(bytes as u64 <= node.sectors.bytes(), "{words} words in a node of {} sectors", node.sectors);
    // Header, keys and padding fill the whole buffer.
    let mut buffer = index.rt.pool().take(bytes);
    let mut set = BsetBuilder::begin(buffer.as_mut(), node.set_seq, block);
    for key in keys {
        assert!(set.push_key(key), "the words were counted");
    }
    let len = set.finish(index.device.magic(), node.ptr);
    assert_eq!(len, bytes, "a bset is as large as its keys");
    (buffer, Sectors::from_bytes_floor(bytes as u64))
}

async fn write_nodes(index: &Index, writes: Vec<(Sector, io::Buffer)>) -> Result<(), EngineError> {
    for (sector, buffer) in writes {
        index.device.write_metadata(sector, buffer).await?;
    }
    Ok(())
}

/// Makes the path from the root to `new` durable, in place of the path to `old`: by the next bset of their parent, by a
/// new parent, or by a new root in the journal.
async fn link(index: &Index, new: &[NodeId], old: &[NodeId]) -> Result<(), EngineError> {
    let (new_leaves, old_leaves) = (new, old);
    let (mut new, mut old) = (new.to_vec(), old.to_vec());
    // Internal nodes that were replaced on the way up; they are freed after the topmost change is durable.
    let mut replaced: Vec<NodeId> = Vec::new();
    loop {
        let parent = new.first().and_then(|id| index.tree.borrow().node(*id).parent);
        let Some(parent) = parent else {
            link_root(index, &new, new_leaves, old_leaves).await?;
            break;
        };
        if let Some((sector, buffer)) = parent_set(index, parent, &new, &old) {
            let sectors = Sectors::from_bytes_floor(buffer.len() as u64);
            if !bug(Bug::SplitWithoutParent) {
                index.device.write_metadata(sector, buffer).await?;
            }
            let tree = &mut *index.tree.borrow_mut();
            let removed: Vec<Ptr> = old.iter().map(|id| tree.node(*id).ptr).collect();
            let node = tree.node_mut(parent);
            node.written += sectors;
            node.dead.extend(removed);
            break;
        }
        let halves = replace_internal(index, parent).await?;
        replaced.push(parent);
        (new, old) = (halves, vec![parent]);
    }
    for id in replaced {
        let node = index.tree.borrow_mut().remove_node(id);
        index.alloc.free_metadata(node.ptr);
    }
    Ok(())
}

/// The next bset of a parent: the freeing keys of the old children and the keys of the new ones. `None` if the parent
/// has no room, or if its bsets have pointers that are too stale to stay.
fn parent_set(index: &Index, parent: NodeId, new: &[NodeId], old: &[NodeId]) -> Option<(Sector, io::Buffer)> {
    let tree = index.tree.borrow();
    if tree.dead_age(parent, &index.alloc.buckets()) > MAX_STALE_AGE {
        return None;
    }
    let node = tree.node(parent);
    let freeing = |id: &NodeId| {
        let n = tree.node(*id);
        Bkey::freeing(n.ptr.with_generation(n.ptr.generation().next()), n.sectors)
    };
    let mut keys: Vec<Bkey> = old.iter().map(freeing).collect();
    keys.extend(new.iter().map(|id| tree.node(*id).key()));
    let words: usize = keys.iter().map(Bkey::words).sum();
    let written_bytes = node.written.bytes() as usize;
    if words > appendable_words(node.sectors, written_bytes, index.geometry.block_sectors)? {
        return None;
    }
    let (buffer, _) = encode_set(index, node, &keys);
    Some((node.ptr.offset() + node.written, buffer))
}

/// Writes the keys of the children of a full internal node into new nodes, which replace it in memory.
async fn replace_internal(index: &Index, id: NodeId) -> Result<Vec<NodeId>, EngineError> {
    let (children, level, bound, parent) = {
        let tree = index.tree.borrow();
        let n = tree.node(id);
        (n.children().to_vec(), n.level, n.bound, n.parent)
    };
    let count = (children.len() * 3).div_ceil(fill_words(index)).max(1);
    let share = children.len().div_ceil(count);
    let mut new = Vec::with_capacity(count);
    let mut writes = Vec::with_capacity(count);
    for group in children.chunks(share.max(1)) {
        let bucket = index.alloc.take_btree_bucket().await?;
        let tree = &mut *index.tree.borrow_mut();
        let last = *group.last().expect("chunks are not empty");
        let group_bound = tree.node(last).bound;
        let mut node = new_node(index, bucket, level, group_bound, parent);
        let keys: Vec<Bkey> = group.iter().map(|c| tree.node(*c).key()).collect();
        let (buffer, written) = encode_set(index, &node, &keys);
        node.written = written;
        node.busy = false;
        node.body = Body::Internal(group.to_vec());
        writes.push((node.ptr.offset(), buffer));
        let new_id = tree.add_node(node);
        for c in group {
            tree.node_mut(*c).parent = Some(new_id);
        }
        new.push(new_id);
    }
    {
        let tree = &mut *index.tree.borrow_mut();
        assert_eq!(
            new.last().map(|n| tree.node(*n).bound),
            Some(bound),
            "the last child has its parent's bound"
        );
        if let Some(p) = parent {
            replace_children(tree.node_mut(p).children_mut(), &[id], &new);
        }
    }
    write_nodes(index, writes).await?;
    Ok(new)
}

/// Makes the topmost nodes `new` the top of the tree: a single node becomes the root, several get a new root above
/// them. One journal entry has the new root and releases the entries that the leaves pinned, because all their keys are
/// in durable nodes with this root. So a new root frees space even in the smallest journal.
async fn link_root(
    index: &Index,
    new: &[NodeId],
    new_leaves: &[NodeId],
    old_leaves: &[NodeId],
) -> Result<(), EngineError> {
    let root = match new {
        [one] => *one,
        several => {
            let bucket = index.alloc.take_btree_bucket().await?;
            let (root, write) = {
                let tree = &mut *index.tree.borrow_mut();
                let level = several.first().map_or(0, |id| tree.node(*id).level) + 1;
                let mut node = new_node(index, bucket, level, MAX_BOUND, None);
                let keys: Vec<Bkey> = several.iter().map(|id| tree.node(*id).key()).collect();
                let (buffer, written) = encode_set(index, &node, &keys);
                node.written = written;
                node.busy = false;
                node.body = Body::Internal(several.to_vec());
                let write = (node.ptr.offset(), buffer);
                let root = tree.add_node(node);
                for id in several {
                    tree.node_mut(*id).parent = Some(root);
                }
                (root, write)
            };
            write_nodes(index, vec![write]).await?;
            root
        }
    };
    let (key, level) = {
        let tree = &mut *index.tree.borrow_mut();
        tree.set_root(root);
        let n = tree.node(root);
        (n.key(), n.level)
    };
    release_pins(index, old_leaves, new_leaves);
    let change = |r: &mut JsetRoots| {
        r.btree_root = key;
        r.btree_level = level;
    };
    index.journal.commit_roots(|| Urgency::Frees, change).await
}

/// Releases the journal entries of replaced leaves. Entries with newer keys of the new leaves stay pinned.
fn release_pins(index: &Index, old: &[NodeId], new: &[NodeId]) {
    let tree = &mut *index.tree.borrow_mut();
    for id in new {
        if let Some(seq) = tree.node_mut(*id).leaf_mut().pin_inflight.take() {
            index.journal.unpin(seq);
        }
    }
    for id in old {
        let leaf = tree.node_mut(*id).leaf_mut();
        for seq in leaf.pin_pending.take().into_iter().chain(leaf.pin_inflight.take()) {
            index.journal.unpin(seq);
        }
    }
}

/// Ends a replacement whose new leaves are durable and reachable: releases the pins and buckets of the old leaves.
fn finish(index: &Index, old: &[NodeId], new: &[NodeId]) {
    release_pins(index, old, new);
    let tree = &mut *index.tree.borrow_mut();
    for id in new {
        tree.node_mut(*id).busy = false;
    }
    for id in old {
        let node = tree.remove_node(*id);
        index.alloc.free_metadata(node.ptr);
    }
    index.journal.pins_released();
}

/// Replaces the adjacent nodes `old` in `children` by `new`.
fn replace_children(children: &mut Vec<NodeId>, old: &[NodeId], new: &[NodeId]) {
    let first = children.iter().position(|c| Some(c) == old.first()).expect("a child is in its parent");
    assert_eq!(children.get(first..first + old.len()), Some(old), "replaced children are adjacent");
    children.splice(first..first + old.len(), new.iter().copied());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::change::Durability;
    use crate::set::SetOptions;
    use crate::testing::{Watching, components, open_set, run};

    /// A replacement commits the journal first, so the new leaf does not need the holes of the old leaf.
    #[test]
    fn a_new_leaf_has_no_holes() {
        run(|rt| async move {
            let set = open_set(&Watching::new(16_384), &rt, (16, false), SetOptions::default()).await;
            let index = components(set, &rt).index.clone();
            rt.sleep(io::Nanos::from_secs(60)).await;
            let holes = || {
                let tree = index.tree();
                let id = tree.next_leaf(None).expect("a tree has a leaf");
                let extents = tree.node(id).leaf().extents.iter().flat_map(Extents::iter);
                (id, extents.filter(|(_, e)| e.is_hole()).count())
            };
            for at in [0, 100, 200] {
                let change =
                    index.try_change(Inode(0), Sector(at), Sector(at + 8), None, Durability::Journaled);
                assert!(change.is_ok());
            }
            let (id, before) = holes();
            assert_eq!(before, 3);
            rewrite(&index, &[id]).await.unwrap();
            let (new, after) = holes();
            assert!(new != id && after == 0);
        });
    }
}
