//! Look-ups in the index and changes of it, for the request paths.
//!
//! [`Index::try_change`] is one synchronous step: it changes the open entry of the journal and the tree together, or it
//! changes nothing and returns what the change must wait for ([`Blocked`]). The caller waits with [`Index::unblock`]
//! and then decides again, because the index may have changed meanwhile. Must not know volumes.

use format::{Bkey, Inode, JournalSeq, Ptr, Sector, Sectors};

use super::Index;
use super::extents::Extents;
use super::leaf_change::{LeafChange, Via};
use super::node::NodeId;
use super::tree::{IndexSegment, NotLoaded};
use crate::device::Tick;
use crate::error::EngineError;

/// Largest range of one key without a pointer (format section 4.2).
const MAX_HOLE: Sectors = Sectors(32768);

/// How a change becomes durable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Durability {
    /// Through the journal: the change is durable when its journal entry is.
    Journaled,
    /// With its leaf only, for clean copies, whose loss costs a miss. The data was complete on the cache device at the
    /// tick.
    LeafOnly(Tick),
}

/// The event for which a change has to wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Blocked {
    NotLoaded(NodeId),
    JournalFull,
    LeafFull(NodeId),
    /// This journal entry must be durable first.
    NotDurable(JournalSeq),
}

/// A change of a range that is not empty and may span several leaves.
pub(crate) struct Change {
    inode: Inode,
    start: Sector,
    end: Sector,
    new: Option<(Ptr, bool)>,
    durability: Durability,
    newest: JournalSeq,
}

impl Change {
    /// A change that puts `[start, end)` at `new` (pointer and dirty flag), or makes it a hole.
    pub(crate) fn new(
        inode: Inode,
        start: Sector,
        end: Sector,
        new: Option<(Ptr, bool)>,
        durability: Durability,
    ) -> Change {
        Change { inode, start, end, new, durability, newest: JournalSeq(0) }
    }
}

/// The state of a change after a call of [`Index::advance`].
pub(crate) enum Progress {
    /// The change is complete; this is the newest journal entry with a key of it.
    Done(JournalSeq),
    /// The change has to wait.
    Blocked(Blocked),
}

impl From<NotLoaded> for Blocked {
    fn from(n: NotLoaded) -> Blocked {
        Blocked::NotLoaded(n.0)
    }
}

/// Most words of a key.
const KEY_WORDS: usize = 3;

impl Index {
    /// Looks up the extent or hole at the beginning of `[start, end)`.
    pub(crate) fn segment(
        &self,
        inode: Inode,
        start: Sector,
        end: Sector,
    ) -> Result<IndexSegment, NotLoaded> {
        self.tree.borrow_mut().segment(inode, start, end, &self.alloc.buckets())
    }

    /// Looks up the extent or hole at the beginning of `[start, end)`, and reads the leaf if it is not in memory.
    pub(crate) async fn segment_loaded(
        &self,
        inode: Inode,
        start: Sector,
        end: Sector,
    ) -> Result<IndexSegment, EngineError> {
        loop {
            match self.segment(inode, start, end) {
                Ok(s) => return Ok(s),
                Err(NotLoaded(id)) => super::load::load_leaf(self, id).await?,
            }
        }
    }

    /// Puts `[start, end)` at `new` (pointer and dirty flag), or makes it a hole. Returns the end of the changed part,
    /// which the leaf and the size of a key limit, and the journal entry. A clean copy becomes a hole if its backing
    /// device has failed a flush, because the device may have lost the data that was copied.
    pub(crate) fn try_change(
        &self,
        inode: Inode,
        start: Sector,
        end: Sector,
        new: Option<(Ptr, bool)>,
        durability: Durability,
    ) -> Result<(Sector, JournalSeq), Blocked> {
        let now = self.rt.turn_time();
        let unwanted = matches!((new, durability), (Some((_, false)), Durability::LeafOnly(_)))
            && self.backings.flush_has_failed(inode);
        let new = new.filter(|_| !unwanted);
        let tree = &mut *self.tree.borrow_mut();
        let id = tree.leaf_at(inode, start);
        let node = tree.node(id);
        let end = if new.is_none() { end.min(start + MAX_HOLE) } else { end };
        let end = node.clip(inode, end);
        let leaf = node.leaf();
        let Some(extents) = &leaf.extents else { return Err(Blocked::NotLoaded(id)) };
        if self.is_full(extents) {
            super::append::queue_leaf(self, tree, id);
            return Err(Blocked::LeafFull(id));
        }
        let (via, seq) = match durability {
            Durability::Journaled => {
                let key = match new {
                    Some((ptr, dirty)) => Bkey::extent(inode, end, end - start, dirty, ptr),
                    None => Bkey::hole(inode, end, end - start),
                };
                let seq = self.journal.try_add(&key, now).ok_or(Blocked::JournalFull)?;
                (Via::Journal(seq), seq)
            }
            Durability::LeafOnly(data) => {
                let (direct, durable) = (super::copies::content_tick(self, inode), self.journal.durable());
                (Via::LeafOnly { data, direct, durable }, JournalSeq(0))
            }
        };
        let buckets = &mut *self.alloc.buckets_mut();
        let reclaimable = buckets.reclaimable();
        let pin = &mut |seq| self.journal.pin(seq);
        let change = LeafChange { leaf: id, inode, start, end, new, via, now };
        let unwritten_words = tree.change(&change, buckets, pin);
        if buckets.reclaimable() > reclaimable {
            self.alloc.recheck_if_wanted();
        }
        if unwritten_words >= self.leaf_write_words() {
            super::append::queue_leaf(self, tree, id);
        }
        Ok((end, seq))
    }

    /// The end of the first part of a change through the journal that [`Index::try_change`] can carry out now, or what it has to wait
    /// for. `is_hole`: the change has no data.
    pub(crate) fn first_part(
        &self,
        inode: Inode,
        (start, end): (Sector, Sector),
        is_hole: bool,
    ) -> Result<Sector, Blocked> {
        let tree = &mut *self.tree.borrow_mut();
        let id = tree.leaf_at(inode, start);
        let node = tree.node(id);
        let Some(extents) = &node.leaf().extents else { return Err(Blocked::NotLoaded(id)) };
        if self.is_full(extents) {
            super::append::queue_leaf(self, tree, id);
            return Err(Blocked::LeafFull(id));
        }
        if !self.journal.has_room_for(KEY_WORDS) {
            return Err(Blocked::JournalFull);
        }
        let most = if is_hole { end.min(start + MAX_HOLE) } else { end };
        Ok(node.clip(inode, most))
    }

    fn is_full(&self, extents: &Extents) -> bool {
        extents.len() * 3 >= self.leaf_words() * 2
    }

    /// Waits for the event that blocks a change.
    pub(crate) async fn unblock(&self, blocked: Blocked) -> Result<(), EngineError> {
        self.device.check()?;
        match blocked {
            Blocked::NotLoaded(id) => super::load::load_leaf(self, id).await,
            Blocked::JournalFull => self.journal.wait_room().await,
            Blocked::NotDurable(seq) => self.journal.commit(seq).await,
            Blocked::LeafFull(id) => {
                // The wait ends when the leaf is replaced, and also when its extents take fewer words than two nodes
                // have.
                self.changed
                    .wait_until(|| {
                        self.device.check().is_err()
                            || self.tree.borrow().try_node(id).is_none_or(|n| {
                                n.level != 0 || n.leaf().extents.as_ref().is_none_or(|x| !self.is_full(x))
                            })
                    })
                    .await;
                self.device.check()
            }
        }
    }

    /// Continues a change until it is complete or has to wait. A disabled set takes no more dirty data, because its
    /// volumes may be served without it.
    pub(crate) fn advance(&self, change: &mut Change) -> Result<Progress, EngineError> {
        loop {
            self.device.check()?;
            let Change { inode, start, end, new, durability, .. } = *change;
            let (done, seq) = match self.try_change(inode, start, end, new, durability) {
                Ok(done) => done,
                Err(blocked) => return Ok(Progress::Blocked(blocked)),
            };
            change.newest = change.newest.max(seq);
            if done >= end {
                return Ok(Progress::Done(change.newest));
            }
            change.new = new.map(|(ptr, dirty)| (ptr.advanced(done - start), dirty));
            change.start = done;
        }
    }

    /// Carries out a whole change and waits where it must. Returns the newest journal entry with a key of it.
    pub(crate) async fn change(
        &self,
        inode: Inode,
        start: Sector,
        end: Sector,
        new: Option<(Ptr, bool)>,
        durability: Durability,
    ) -> Result<JournalSeq, EngineError> {
        if start >= end {
            return Ok(JournalSeq(0));
        }
        let mut change = Change::new(inode, start, end, new, durability);
        match self.advance(&mut change)? {
            Progress::Done(seq) => Ok(seq),
            Progress::Blocked(blocked) => self.complete(change, blocked).await,
        }
    }

    /// Carries out the rest of a change that has to wait for `blocked`. Returns the newest journal entry with a key of
    /// it.
    pub(crate) async fn complete(
        &self,
        mut change: Change,
        mut blocked: Blocked,
    ) -> Result<JournalSeq, EngineError> {
        loop {
            self.unblock(blocked).await?;
            match self.advance(&mut change)? {
                Progress::Done(seq) => return Ok(seq),
                Progress::Blocked(again) => blocked = again,
            }
        }
    }

    /// The number of words of keys that fit into one node.
    pub(crate) fn leaf_words(&self) -> usize {
        self.geometry.node_sectors.bytes() as usize / 8 - 4
    }

    /// The number of unwritten words at which a leaf is queued for writing. It is large enough that the padding of a
    /// bset is a small part of it, and small enough that a node takes several bsets before it is rewritten.
    fn leaf_write_words(&self) -> usize {
        (self.leaf_words() / 8).clamp(48, 2048)
    }
}

#[cfg(test)]
mod tests {
    use format::Gen;
    use io::Nanos;

    use super::*;
    use crate::set::SetOptions;
    use crate::testing::{Watching, components, open_set, run};

    #[test]
    fn a_node_has_room_for_its_words_and_no_more() {
        run(|rt| async move {
            for bucket_sectors in [8, 16, 128] {
                let device = Watching::new(bucket_sectors * 1024);
                let set = open_set(&device, &rt, (bucket_sectors, false), SetOptions::default()).await;
                let index = components(set, &rt).index.clone();
                let node = index.geometry.node_sectors.bytes() as usize;
                let size = |words| format::bset::padded_bytes(words, index.geometry.block_sectors).unwrap();
                assert!(size(index.leaf_words()) <= node && size(index.leaf_words() + 1) > node);
            }
        });
    }

    /// The key of a hole covers 32768 sectors at most, as that of a kernel does.
    #[test]
    fn a_large_hole_takes_several_keys() {
        run(|rt| async move {
            let set = open_set(&Watching::new(16_384), &rt, (16, false), SetOptions::default()).await;
            let index = components(set, &rt).index.clone();
            let hole = |start, end| {
                let durability = Durability::Journaled;
                index.try_change(Inode(1), Sector(start), Sector(end), None, durability).unwrap().0
            };
            assert_eq!(hole(100, 40_000), Sector(100 + 32_768));
            assert_eq!(hole(32_868, 40_000), Sector(40_000));
        });
    }

    /// A smaller limit counts at once, also while no client uses the set.
    #[test]
    fn a_smaller_limit_takes_leaves_from_memory() {
        run(|rt| async move {
            let set = open_set(&Watching::new(16_384), &rt, (16, false), SetOptions::default()).await;
            let index = components(set, &rt).index.clone();
            let (ptr, durability) = (Ptr::new(0, Sector(8000), Gen(0)), Durability::Journaled);
            index.try_change(Inode(1), Sector(0), Sector(8), Some((ptr, true)), durability).unwrap();
            index.journal.commit_keys().await.unwrap();
            index.write_all_leaves().await.unwrap();
            rt.sleep(Nanos::from_secs(60)).await;
            assert!(index.tree.borrow().loaded_bytes() > 0);
            index.set_memory_limit(0);
            rt.sleep(Nanos::from_secs(1)).await;
            assert_eq!(index.tree.borrow().loaded_bytes(), 0);
        });
    }
}
