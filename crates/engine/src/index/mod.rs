//! The index of the cached data: extents by (inode, sector).
//!
//! In memory the index is a tree of leaves with chunked extent lists ([`tree`], [`extents`]). On disk it is bcache's
//! btree, in which each node is a log of bsets. A change is made in memory and journaled ([`change`]). A leaf is
//! written later (`append`), replaced when it is full (`rewrite`) and read when it is needed (`load`). Clean copies
//! that are not journaled wait for their backing devices (`copies`).
//!
//! [`Index`] owns the tree, its memory, and the set of slots whose keys are invalid. It uses the allocator, the journal
//! and the devices. Must not know volumes.

mod append;
mod change;
mod copies;
mod dirty;
mod entry;
mod extents;
mod leaf_change;
mod load;
mod merged;
mod node;
mod rewrite;
mod tree;

pub(crate) use change::{Blocked, Change, Durability, Progress};
pub(crate) use entry::MAX_POSITION;
pub(crate) use leaf_change::{LeafChange, Via};
pub(crate) use load::{LoadedTree, READ_AHEAD, account_tree, claim_metadata, load_tree, names_data};
pub(crate) use node::{Bound, NodeId};
pub(crate) use rewrite::MAX_STALE_AGE;
pub(crate) use tree::{IndexSegment, Kind, NotLoaded, Survey, Tree};

pub(crate) use append::{evict_task, leaf_writer_task, reclaim_task, write_old_leaves_task};

use std::cell::{Cell, Ref, RefCell, RefMut};
use std::collections::BTreeSet;
use std::rc::Rc;

use format::{Geometry, Inode, Sector};
use io::Handle;
use io::sync::{Event, Mutex, Permit, Queue};

use crate::alloc::Allocator;
use crate::device::{BackingDevices, CacheDevice};
use crate::error::EngineError;
use crate::journal::Journal;
use crate::tasks::Tasks;

/// Counts of the index's own work.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct IndexCounters {
    /// Btree nodes read after the start.
    pub(crate) reads: u64,
    /// Leaves replaced by new nodes.
    pub(crate) rewrites: u64,
}

/// The components that the index uses.
pub(crate) struct IndexParts {
    pub(crate) device: Rc<CacheDevice>,
    pub(crate) backings: Rc<BackingDevices>,
    pub(crate) journal: Rc<Journal>,
    pub(crate) alloc: Rc<Allocator>,
    pub(crate) tasks: Rc<Tasks>,
}

/// The index of one cache set.
pub(crate) struct Index {
    rt: Handle,
    device: Rc<CacheDevice>,
    backings: Rc<BackingDevices>,
    journal: Rc<Journal>,
    alloc: Rc<Allocator>,
    geometry: Geometry,
    tree: RefCell<Tree>,
    /// Held while a task replaces btree nodes.
    structure: Mutex,
    /// The leaves that the writer tasks are to write.
    leaf_work: Queue<NodeId>,
    /// Notified when a node was loaded, written or replaced.
    changed: Event,
    /// Notified when leaves were loaded or may take more memory than the limit.
    memory_changed: Event,
    /// Notified when the set stops or has failed.
    stopped: Event,
    /// The limit for the memory of leaves (`btree_cache_limit`); the eviction task enforces it after the fact.
    memory_limit_bytes: Cell<usize>,
    /// Slots whose keys are invalid, until a walk of the index has removed these keys.
    invalid_slots: RefCell<BTreeSet<Inode>>,
    counters: Cell<IndexCounters>,
    tasks: Rc<Tasks>,
}

/// Construction, and the operations that other components use.
impl Index {
    /// Makes an index of the tree that recovery has built.
    pub(crate) fn new(tree: Tree, parts: IndexParts) -> Index {
        let IndexParts { device, backings, journal, alloc, tasks } = parts;
        Index {
            rt: device.disk().runtime().clone(),
            geometry: device.geometry(),
            tree: RefCell::new(tree),
            structure: Mutex::default(),
            leaf_work: Queue::default(),
            changed: Event::default(),
            memory_changed: Event::default(),
            stopped: Event::default(),
            memory_limit_bytes: Cell::new(usize::MAX),
            invalid_slots: RefCell::default(),
            counters: Cell::default(),
            tasks,
            device,
            backings,
            journal,
            alloc,
        }
    }

    /// Borrows the tree. The borrow must not be held across an await.
    pub(crate) fn tree(&self) -> Ref<'_, Tree> {
        self.tree.borrow()
    }

    /// Borrows the tree mutably. The borrow must not be held across an await.
    pub(crate) fn tree_mut(&self) -> RefMut<'_, Tree> {
        self.tree.borrow_mut()
    }

    /// Counts of the index's own work.
    pub(crate) fn counters(&self) -> IndexCounters {
        self.counters.get()
    }

    fn count(&self, change: impl FnOnce(&mut IndexCounters)) {
        let mut c = self.counters.get();
        change(&mut c);
        self.counters.set(c);
    }

    /// Sets how much memory leaves may take.
    pub(crate) fn set_memory_limit(&self, bytes: usize) {
        self.memory_limit_bytes.set(bytes);
        self.memory_changed.notify_all();
    }

    /// Wakes every task that waits for the index, so that it checks the state of the set. If the set stops or has
    /// failed, no further leaves are queued for writing.
    pub(crate) fn kick(&self) {
        if self.device.is_stopping() {
            self.leaf_work.close();
        }
        self.changed.notify_all();
        self.memory_changed.notify_all();
        self.stopped.notify_all();
    }

    /// Makes the keys of this slot invalid; a walk of the index removes them.
    pub(crate) fn invalidate_slot(&self, inode: Inode) {
        self.invalid_slots.borrow_mut().insert(inode);
    }

    /// Whether the keys of this slot are invalid.
    pub(crate) fn is_invalid_slot(&self, inode: Inode) -> bool {
        self.invalid_slots.borrow().contains(&inode)
    }

    /// The slots whose keys are invalid.
    pub(crate) fn invalid_slots(&self) -> BTreeSet<Inode> {
        self.invalid_slots.borrow().clone()
    }

    /// Records that no key of these slots is left in memory, on disk or in the journal.
    pub(crate) fn slots_are_empty(&self, slots: &BTreeSet<Inode>) {
        self.invalid_slots.borrow_mut().retain(|i| !slots.contains(i));
    }

    /// Reads a leaf that is not in memory; returns at once if it is.
    pub(crate) async fn load_leaf(&self, id: NodeId) -> Result<(), EngineError> {
        load::load_leaf(self, id).await
    }

    /// Replaces adjacent leaves of one parent by as few new ones as hold their extents.
    pub(crate) async fn rewrite(&self, ids: &[NodeId]) -> Result<(), EngineError> {
        rewrite::rewrite(self, ids).await
    }

    /// Writes every leaf that has unwritten changes, and waits until they are written.
    pub(crate) async fn write_all_leaves(self: &Rc<Self>) -> Result<(), EngineError> {
        append::write_all_leaves(self).await
    }

    /// Writes leaves for which no task waits, each after the journal has room for its new root.
    pub(crate) async fn write_leaves_in_background(&self, ids: Vec<NodeId>) -> Result<(), EngineError> {
        append::write_leaves_in_background(self, ids).await
    }

    /// Waits until the journal has room for a new root that is not urgent.
    pub(crate) async fn wait_room_for_roots(&self) -> Result<(), EngineError> {
        append::wait_room_for_roots(self).await
    }

    /// Keeps a node from being written or replaced until the guard is dropped; `None` if the node no longer exists.
    pub(crate) async fn claim_node(&self, id: NodeId) -> Result<Option<ClaimedNode<'_>>, EngineError> {
        let structure = self.structure.lock().await;
        loop {
            self.device.check()?;
            {
                let tree = &mut *self.tree.borrow_mut();
                match tree.try_node(id).map(|n| (n.busy, n.ptr.offset() + n.written)) {
                    None => return Ok(None),
                    Some((true, _)) => {}
                    Some((false, end)) => {
                        tree.node_mut(id).busy = true;
                        return Ok(Some(ClaimedNode { index: self, id, end, _structure: structure }));
                    }
                }
            }
            append::wait_idle(self, id).await?;
        }
    }
}

/// A node that no other task writes or replaces; see [`Index::claim_node`].
pub(crate) struct ClaimedNode<'a> {
    index: &'a Index,
    id: NodeId,
    /// The sector of the cache device at which the bsets of the node end.
    pub(crate) end: Sector,
    _structure: Permit,
}

impl Drop for ClaimedNode<'_> {
    fn drop(&mut self) {
        self.index.tree.borrow_mut().node_mut(self.id).busy = false;
        self.index.changed.notify_all();
    }
}
