//! Delayed writes of leaves: the unwritten keys of a leaf become its next bset.
//!
//! Owns the tasks that decide when a leaf is written: when it has enough unwritten keys, when these are too old, when
//! the journal needs its space, when memory is short, and when the set stops.
//!
//! Order (format section 12.1): the journal entries of all keys in the bset become durable first, which makes their
//! data durable, too. For keys that are not journaled, the cache device is flushed, and the backing devices whose data
//! they copy. Then the bset is written with FUA. Then the journal entries are released.

use std::rc::Rc;

use format::bset::{BsetBuilder, appendable_words};
use format::{Bkey, Inode, JournalSeq, Sector};
use io::{Buffer, Nanos};

use super::Index;
use super::copies::{Copies, drop_unsettled, settle_copies};
use super::entry::Entry;
use super::load::load_leaf;
use super::merged::{Merged, words_of};
use super::node::NodeId;
use super::rewrite::rewrite;
use super::tree::Tree;
use crate::canary::{Bug, bug};
use crate::error::EngineError;
use crate::journal::Urgency;

/// A leaf is written when its oldest unwritten key is this old (semantics section 9).
const WRITE_AGE: Nanos = Nanos::from_secs(30);

/// A bset that is to be written.
struct Snapshot {
    buffer: Buffer,
    sector: Sector,
    newest_seq: JournalSeq,
    copies: Copies,
    merged: Merged,
    has_holes: bool,
}

/// The key that stands for an entry in a bset.
pub(super) fn key_of(inode: Inode, e: Entry) -> Bkey {
    if e.is_hole() {
        Bkey::hole(inode, e.end(), e.size())
    } else {
        Bkey::extent(inode, e.end(), e.size(), e.dirty(), e.ptr())
    }
}

/// Queues a leaf for the writer tasks, unless it is queued already.
pub(crate) fn queue_leaf(index: &Index, tree: &mut Tree, id: NodeId) {
    let leaf = tree.node_mut(id).leaf_mut();
    if !leaf.queued {
        leaf.queued = true;
        index.leaf_work.push(id);
    }
}

/// Writes all changes of a leaf that are not on disk yet.
pub(crate) async fn write_leaf(index: &Index, id: NodeId) -> Result<(), EngineError> {
    let mut loaded = false;
    loop {
        index.device.check()?;
        settle_copies(index, id).await;
        enum Next {
            Done,
            Wait,
            Load,
            Rewrite,
            Append(Snapshot),
        }
        let next = {
            let tree = &mut *index.tree.borrow_mut();
            if tree.try_node(id).is_some_and(|n| n.level == 0 && !n.busy) {
                drop_unsettled(index, tree, id);
            }
            match tree.try_node(id) {
                Some(n) if n.level == 0 => {
                    if n.busy {
                        Next::Wait
                    } else if n.leaf().is_clean() {
                        Next::Done
                    } else if n.leaf().extents.is_none() {
                        Next::Load
                    } else if n.leaf().must_rewrite {
                        Next::Rewrite
                    } else {
                        snapshot(index, tree, id).map_or(Next::Rewrite, Next::Append)
                    }
                }
                _ => Next::Done,
            }
        };
        match next {
            Next::Done => return Ok(()),
            Next::Wait => wait_idle(index, id).await?,
            Next::Load => {
                load_leaf(index, id).await?;
                loaded = true;
            }
            Next::Rewrite => return rewrite(index, &[id]).await,
            Next::Append(s) => {
                append(index, id, s).await?;
                if loaded {
                    drop_written(index, id);
                }
                return Ok(());
            }
        }
    }
}

/// Waits until no task writes or replaces the node.
pub(crate) async fn wait_idle(index: &Index, id: NodeId) -> Result<(), EngineError> {
    let idle = || index.device.check().is_err() || index.tree.borrow().try_node(id).is_none_or(|n| !n.busy);
    index.changed.wait_until(idle).await;
    index.device.check()
}

/// Takes the unwritten keys for the next bset. Returns `None` if the node has no room for them, or for the merged keys
/// of all its bsets.
fn snapshot(index: &Index, tree: &mut Tree, id: NodeId) -> Option<Snapshot> {
    let block = index.geometry.block_sectors;
    let node = tree.node_mut(id);
    let written_bytes = node.written.bytes() as usize;
    let room = appendable_words(node.sectors, written_bytes, block)?;
    let (set_seq, ptr) = (node.set_seq, node.ptr);
    let sector = ptr.offset() + node.written;
    let extents = node.leaf().extents.as_ref()?;
    let new = extents.count_unwritten();
    let merged = node.leaf().merged.with_set(new, extents.len());
    let words = words_of(new);
    if words > room {
        return None;
    }
    let bytes = format::bset::padded_bytes(words.max(1), block)?;
    if words > 0 && !merged.fits(written_bytes + bytes) {
        return None;
    }
    // Header, keys and padding fill the whole buffer.
    let mut buffer = index.rt.pool().take(bytes);
    if words > 0 {
        let mut set = BsetBuilder::begin(buffer.as_mut(), set_seq, block);
        for (inode, e) in extents.iter_unwritten() {
            assert!(set.push_key(&key_of(inode, e)), "the words were counted");
        }
        let len = set.finish(index.device.magic(), ptr);
        assert_eq!(len, bytes, "a bset is as large as its keys");
    } else {
        // All unwritten keys were replaced in memory before they were written: only the journal entries are to be
        // released.
        buffer.set_len(0);
    }
    node.busy = true;
    let leaf = node.leaf_mut();
    if let Some(x) = leaf.extents.as_mut() {
        x.mark_all_written();
    }
    leaf.unwritten_words = 0;
    assert!(leaf.pin_inflight.is_none(), "a leaf is written by one task at a time");
    leaf.pin_inflight = leaf.pin_pending.take();
    if bug(Bug::PinsReleasedEarly)
        && let Some(seq) = leaf.pin_inflight.take()
    {
        index.journal.unpin(seq);
    }
    let (newest_seq, copies) = (leaf.newest_seq, std::mem::take(&mut leaf.copies));
    Some(Snapshot { buffer, sector, newest_seq, copies, merged, has_holes: new.holes > 0 })
}

/// Makes the journal entries up to `newest` durable, and the data of `copies`: a bset that names them may be written
/// then.
pub(super) async fn settle(index: &Index, newest: JournalSeq, copies: &Copies) -> Result<(), EngineError> {
    if newest > index.journal.durable() {
        index.journal.commit(newest).await?;
    }
    match copies.data() {
        Some(tick) => index.device.flush(tick).await,
        None => Ok(()),
    }
}

/// Writes the next bset of a leaf.
async fn append(index: &Index, id: NodeId, s: Snapshot) -> Result<(), EngineError> {
    let sectors = format::Sectors::from_bytes_floor(s.buffer.len() as u64);
    let result = match settle(index, s.newest_seq, &s.copies).await {
        Ok(()) if !s.buffer.is_empty() => index.device.write_metadata(s.sector, s.buffer).await,
        other => other,
    };
    let mut tree = index.tree.borrow_mut();
    // A node is replaced only while no task writes it, so it still exists.
    let node = tree.node_mut(id);
    node.busy = false;
    match &result {
        Ok(()) => {
            node.written += sectors;
            let leaf = node.leaf_mut();
            if sectors > format::Sectors::ZERO {
                leaf.merged = s.merged;
            }
            let used = leaf.last_used;
            if let Some(seq) = leaf.pin_inflight.take() {
                index.journal.unpin(seq);
                index.journal.pins_released();
            }
            if s.has_holes
                && let Some(mut x) = tree.take_extents(id)
            {
                // From now on the bset on disk hides the keys that these holes hide.
                x.retain(|_, e| !e.is_hole() || e.is_unwritten());
                tree.set_extents(id, x);
                tree.node_mut(id).leaf_mut().last_used = used;
            }
        }
        Err(_) => {
            // The content of the disk behind the last bset is unknown, so the keys must go into a new node.
            let leaf = node.leaf_mut();
            leaf.must_rewrite = true;
            leaf.copies.merge(&s.copies);
            match (leaf.pin_inflight.take(), leaf.pin_pending) {
                (Some(old), Some(newer)) => {
                    index.journal.unpin(newer);
                    leaf.pin_pending = Some(old);
                }
                (old, newer) => leaf.pin_pending = old.or(newer),
            }
        }
    }
    drop(tree);
    leaves_changed(index);
    result
}

/// Wakes the tasks that wait for a change of leaves, and the eviction task if the leaves in memory exceed their limit.
pub(super) fn leaves_changed(index: &Index) {
    index.changed.notify_all();
    if index.tree.borrow().loaded_bytes() > index.memory_limit_bytes.get() {
        index.memory_changed.notify_all();
    }
}

/// Writes every leaf that has unwritten changes, and waits until they are written.
pub(crate) async fn write_all_leaves(index: &Rc<Index>) -> Result<(), EngineError> {
    loop {
        let next = index.tree.borrow().changed_leaves();
        if next.is_empty() {
            return Ok(());
        }
        write_leaves(index, next).await?;
    }
}

/// Writes leaves, up to 16 at the same time.
pub(crate) async fn write_leaves(index: &Rc<Index>, ids: Vec<NodeId>) -> Result<(), EngineError> {
    for group in ids.chunks(16) {
        let tasks: Vec<_> = group
            .iter()
            .map(|id| {
                let (theirs, id) = (index.clone(), *id);
                index.rt.spawn(async move { write_leaf(&theirs, id).await })
            })
            .collect();
        for t in tasks {
            t.await?;
        }
    }
    Ok(())
}

/// Drops a leaf that was read only to be written, if leaves take more memory than the limit. Replays leave such leaves.
fn drop_written(index: &Index, id: NodeId) {
    let tree = &mut *index.tree.borrow_mut();
    let over = tree.loaded_bytes() > index.memory_limit_bytes.get();
    if over && tree.try_node(id).is_some_and(|n| n.level == 0 && !n.busy && n.leaf().is_clean()) {
        tree.take_extents(id);
    }
}

/// Writes leaves for which no task waits, each after the journal has room for its new root.
pub(crate) async fn write_leaves_in_background(index: &Index, ids: Vec<NodeId>) -> Result<(), EngineError> {
    for id in ids {
        wait_room_for_roots(index).await?;
        write_leaf(index, id).await?;
    }
    Ok(())
}

/// Waits until the journal has room for a new root that is not urgent. The wait ends at once when the allocator has no
/// buckets: the leaf writes that free the journal need buckets, too, and the walk of the index that makes buckets
/// reclaimable must not be delayed.
pub(crate) async fn wait_room_for_roots(index: &Index) -> Result<(), EngineError> {
    let urgent = || index.alloc.is_starved() || index.alloc.is_short_of_btree();
    index.journal.wait_room_to_spare(urgent).await
}

/// Writes the leaves that were queued. Several of these tasks run at the same time.
pub(crate) async fn leaf_writer_task(index: Rc<Index>) {
    while let Some(id) = index.leaf_work.pop().await {
        {
            let tree = &mut *index.tree.borrow_mut();
            if tree.try_node(id).is_some_and(|n| n.level == 0) {
                tree.node_mut(id).leaf_mut().queued = false;
            }
        }
        if let Err(e) = write_leaf(&index, id).await {
            index.device.fail(e);
        }
    }
}

/// The leaves that keep the oldest bucket of the journal ring from being reused.
#[derive(PartialEq, Eq)]
struct Holders {
    target: JournalSeq,
    leaves: Vec<NodeId>,
}

impl Holders {
    fn now(index: &Index) -> Holders {
        let target = index.journal.reclaim_target();
        let tree = index.tree.borrow();
        let pins = |id: &NodeId| tree.node(*id).leaf().pins().any(|seq| seq <= target);
        Holders { target, leaves: tree.leaves().filter(pins).collect() }
    }
}

/// Frees journal space: writes the leaves that pin the oldest journal entries whenever the ring is more than half full.
pub(crate) async fn reclaim_task(index: Rc<Index>) {
    loop {
        index.journal.wait_pressed(|| index.device.is_stopping()).await;
        if index.device.is_stopping() {
            return;
        }
        let holders = Holders::now(&index);
        let result = async {
            write_leaves(&index, holders.leaves.clone()).await?;
            if index.journal.can_advance() {
                // Writes an entry whose `last_seq` says that the old entries are no longer needed.
                index.journal.commit_roots(|| Urgency::Frees, |_| ()).await?;
            } else if index.journal.is_pressed()
                && (Holders::now(&index) == holders || bug(Bug::ReclaimLooksOnce))
            {
                // No space can be freed until the journal changes. The comparison covers changes during the write: a
                // leaf that was replaced before it was written has passed its pins to its successor.
                index.journal.changed().await;
            }
            Ok::<(), EngineError>(())
        };
        if let Err(e) = result.await {
            index.device.fail(e);
            return;
        }
    }
}

/// Writes leaves whose oldest unwritten key is 30 seconds old, so that a crash loses only the newest keys that are not
/// journaled.
pub(crate) async fn write_old_leaves_task(index: Rc<Index>) {
    loop {
        // A sleep alone would keep the device of a stopped set open.
        let stopped = std::pin::pin!(index.memory_changed.wait_until(|| index.device.is_stopping()));
        io::sync::select(stopped, index.rt.sleep(Nanos::from_secs(10))).await;
        if index.device.is_stopping() {
            return;
        }
        let now = index.rt.now();
        let old: Vec<NodeId> = {
            let tree = index.tree.borrow();
            let is_old = |id: &NodeId| {
                let leaf = tree.node(*id).leaf();
                leaf.unwritten_words > 0 && now.since(leaf.unwritten_since) >= WRITE_AGE
            };
            tree.leaves().filter(is_old).collect()
        };
        if let Err(e) = write_leaves_in_background(&index, old).await {
            index.device.fail(e);
            return;
        }
    }
}

/// Drops leaves from memory while they take more than the limit.
pub(crate) async fn evict_task(index: Rc<Index>) {
    loop {
        let over = || index.tree.borrow().loaded_bytes() > index.memory_limit_bytes.get();
        index.memory_changed.wait_until(|| index.device.is_stopping() || over()).await;
        if index.device.is_stopping() {
            return;
        }
        while over() {
            let coldest = index.tree.borrow().coldest_clean();
            match coldest {
                Some(id) => drop(index.tree.borrow_mut().take_extents(id)),
                None => {
                    // Every leaf in memory has unwritten changes: write the least recently used one.
                    let coldest = index.tree.borrow().coldest_dirty();
                    let Some(id) = coldest else { break };
                    if let Err(e) = write_leaf(&index, id).await {
                        index.device.fail(e);
                        return;
                    }
                }
            }
        }
        index.rt.sleep(Nanos::from_ms(10)).await;
    }
}

#[cfg(test)]
mod tests {
    use format::{Gen, Ptr, Sectors};

    use super::*;
    use crate::index::extents::Extents;
    use crate::set::SetOptions;
    use crate::testing::{Watching, components, open_set, run};

    /// A leaf that a kernel could not merge is replaced when it has new keys. Without new keys, only its journal entries
    /// are released.
    #[test]
    fn a_snapshot_without_keys_needs_no_room() {
        run(|rt| async move {
            let set = open_set(&Watching::new(16_384), &rt, (16, false), SetOptions::default()).await;
            let index = components(set, &rt).index.clone();
            let tree = &mut *index.tree_mut();
            let id = tree.root();
            let written = tree.node(id).written;
            for (holes, room) in [(0, true), (1000, false)] {
                // The merged keys of the bsets on disk are the holes.
                let mut on_disk = Extents::new(Sectors(16));
                for n in 0..holes {
                    on_disk.push_back(Inode(1), Entry::hole(Sector(16 * n + 8), Sectors(8), JournalSeq(0)));
                }
                tree.node_mut(id).leaf_mut().merged = Merged::of_extents(&on_disk);
                let taken = snapshot(&index, tree, id).map(|s| (s.buffer.len(), s.has_holes));
                assert_eq!(taken, Some((0, false)));
                assert!(std::mem::take(&mut tree.node_mut(id).busy));

                let extents = tree
                    .node_mut(id)
                    .leaf_mut()
                    .extents
                    .as_mut()
                    .expect("the root of a new set is in memory");
                let e = Entry::extent(Sector(8), Sectors(8), true, Ptr::new(0, Sector(8000), Gen(0)));
                extents.replace(Inode(1), e.start(), e.end(), Some(e.unwritten()), |_| {});
                let taken = snapshot(&index, tree, id).map(|s| (s.buffer.len(), s.sector, s.has_holes));
                let sector = tree.node(id).ptr.offset() + written;
                assert_eq!(taken, room.then_some((512, sector, false)));
                assert_eq!(std::mem::take(&mut tree.node_mut(id).busy), room);
                let extents = tree.node_mut(id).leaf_mut().extents.as_mut().expect("nothing drops it");
                extents.replace(Inode(1), Sector(0), Sector(8), None, |_| {});
            }
        });
    }
}
