//! The index of what is cached: extents by (inode, sector).
//!
//! In memory a tree of leaves with chunked extent lists ([`tree`], [`extents`]); on disk bcache's btree, a log of
//! bsets in each node. Changes are made in memory and journaled ([`change`]); leaves are written behind (`append`), replaced
//! when they are full (`rewrite`) and read when they are needed (`load`). Clean copies that are not journaled wait for their
//! backing devices (`copies`).
//!
//! [`Index`] owns the tree, its memory, and the slots whose keys must not be used any more. It names the allocator, the
//! journal and the devices. Must not know volumes, nor who asks.

mod append;
mod change;
mod copies;
mod dirty;
mod entry;
mod extents;
mod load;
mod merged;
mod node;
mod rewrite;
mod tree;

pub(crate) use change::{Blocked, Change, Durability, Progress};
pub(crate) use entry::MAX_POSITION;
pub(crate) use load::{READ_AHEAD, Reader, account_tree, claim_metadata, load_tree, names_data};
pub(crate) use node::{Bound, NodeId};
pub(crate) use rewrite::MAX_STALE_AGE;
pub(crate) use tree::{Kind, NotLoaded, Segment, Survey, Tree, Via};

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

/// What the index is wired to.
pub(crate) struct Wiring {
    pub(crate) device: Rc<CacheDevice>,
    pub(crate) backings: Rc<BackingDevices>,
    pub(crate) journal: Rc<Journal>,
    pub(crate) alloc: Rc<Allocator>,
    pub(crate) tasks: Rc<Tasks>,
}

/// See the module head.
pub(crate) struct Index {
    rt: Handle,
    device: Rc<CacheDevice>,
    backings: Rc<BackingDevices>,
    journal: Rc<Journal>,
    alloc: Rc<Allocator>,
    geometry: Geometry,
    tree: RefCell<Tree>,
    /// Held while btree nodes are replaced.
    structure: Mutex,
    /// Leaves to be written.
    leaf_work: Queue<NodeId>,
    /// A node was loaded, written or replaced.
    changed: Event,
    /// Leaves were loaded, or have grown.
    memory_changed: Event,
    /// Leaves in memory take more than this only for a moment (`btree_cache_limit`).
    memory_limit_bytes: Cell<usize>,
    /// Slots whose keys must not be used: a walk removes them.
    invalid_slots: RefCell<BTreeSet<Inode>>,
    counters: Cell<IndexCounters>,
    tasks: Rc<Tasks>,
}

/// Wiring, and what others look at and ask for.
impl Index {
    /// An index over the tree that recovery made.
    pub(crate) fn new(tree: Tree, wiring: Wiring) -> Index {
        let Wiring { device, backings, journal, alloc, tasks } = wiring;
        Index {
            rt: device.disk().runtime().clone(),
            geometry: device.geometry(),
            tree: RefCell::new(tree),
            structure: Mutex::default(),
            leaf_work: Queue::default(),
            changed: Event::default(),
            memory_changed: Event::default(),
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

    /// The tree. Not to be held across an await.
    pub(crate) fn tree(&self) -> Ref<'_, Tree> {
        self.tree.borrow()
    }

    /// The tree, to change it. Not to be held across an await.
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

    /// Wakes everybody who waits, to look at the state of the set. Leaves are written until the set stops or fails.
    pub(crate) fn kick(&self) {
        if self.device.is_stopping() {
            self.leaf_work.close();
        }
        self.changed.notify_all();
        self.memory_changed.notify_all();
    }

    /// Keys of this slot are not used any more; a walk of the index removes them.
    pub(crate) fn invalidate_slot(&self, inode: Inode) {
        self.invalid_slots.borrow_mut().insert(inode);
    }

    /// Whether keys of this slot must not be used.
    pub(crate) fn is_invalid_slot(&self, inode: Inode) -> bool {
        self.invalid_slots.borrow().contains(&inode)
    }

    /// The slots whose keys must not be used.
    pub(crate) fn invalid_slots(&self) -> BTreeSet<Inode> {
        self.invalid_slots.borrow().clone()
    }

    /// No key of these slots is left, in memory, on disk or in the journal.
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

    /// Writes every leaf that has something unwritten, and waits for it.
    pub(crate) async fn write_all_leaves(self: &Rc<Self>) -> Result<(), EngineError> {
        append::write_all_leaves(self).await
    }

    /// Writes leaves that nothing waits for, each when the journal has room for its new root.
    pub(crate) async fn write_leaves_in_background(&self, ids: Vec<NodeId>) -> Result<(), EngineError> {
        append::write_leaves_in_background(self, ids).await
    }

    /// Waits until the journal has room for roots that can wait.
    pub(crate) async fn wait_room_for_roots(&self) -> Result<(), EngineError> {
        append::wait_room_for_roots(self).await
    }

    /// Keeps a node from being written or replaced until the guard is dropped; `None` if it is gone.
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
    /// Where its sets end on the cache device.
    pub(crate) end: Sector,
    _structure: Permit,
}

impl Drop for ClaimedNode<'_> {
    fn drop(&mut self) {
        self.index.tree.borrow_mut().node_mut(self.id).busy = false;
        self.index.changed.notify_all();
    }
}
