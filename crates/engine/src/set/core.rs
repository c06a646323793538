//! The state of a cache set other than the components that its volumes use.
//!
//! Owns the volumes of the set, the list of devices that are being attached, the wipe and the scrub. All of it runs on one
//! thread; no `RefCell` is borrowed across an await point.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;

use format::{Inode, Uuid};
use io::Reservation;

use crate::scrub::Scrubber;
use crate::volume::{Cache, Volume};
use crate::wipe::Wiper;

/// Counts of the engine's own work, for tests, benches and metrics.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct EngineCounters {
    /// Btree nodes read after the start.
    pub btree_reads: u64,
    /// Leaves replaced by new nodes.
    pub btree_rewrites: u64,
    /// Priority chains written.
    pub prio_writes: u64,
    /// Walks of the index by the garbage collector.
    pub gc_runs: u64,
    /// Extents moved by the moving garbage collector.
    pub moved_extents: u64,
    /// Extents that were promoted: copied to another bucket because they were read.
    pub promoted_extents: u64,
    /// Writes that overwrote dirty data in place.
    pub overwrites: u64,
    /// The number of times that a new btree node had to wait for a bucket.
    pub btree_waits: u64,
    /// Buckets whose generation wrapped around.
    pub gen_wraps: u64,
}

/// The state behind a [`CacheSet`](super::CacheSet).
pub(crate) struct Core {
    pub(super) cache: Rc<Cache>,
    /// The reservation for the memory of the set's tables.
    _memory: Reservation,
    /// Devices that are being attached.
    pub(super) attaching: RefCell<BTreeSet<Uuid>>,
    volumes: RefCell<Vec<Rc<Volume>>>,
    pub(super) wiper: Rc<Wiper>,
    pub(super) scrubber: Rc<Scrubber>,
}

impl Core {
    pub(crate) fn new(cache: Rc<Cache>, memory: Reservation) -> Core {
        Core {
            scrubber: Rc::new(Scrubber::new(cache.clone())),
            cache,
            _memory: memory,
            attaching: RefCell::default(),
            volumes: RefCell::default(),
            wiper: Rc::default(),
        }
    }

    /// UUID of the set.
    pub(crate) fn uuid(&self) -> Uuid {
        self.cache.device.superblock().set_uuid()
    }

    /// Wakes every task of the set that waits, so that it checks whether the set is stopping or has failed.
    pub(crate) fn wake_all(&self) {
        let cache = &self.cache;
        if let Err(e) = cache.device.check() {
            cache.journal.fail(e);
        }
        cache.index.kick();
        cache.alloc.walks().recheck();
        cache.alloc.kick();
        self.scrubber.kick();
        for v in self.volumes.borrow().iter() {
            v.wake();
        }
    }

    /// Every volume of the set.
    pub(crate) fn volumes(&self) -> Vec<Rc<Volume>> {
        self.volumes.borrow().clone()
    }

    /// The volume of a slot.
    pub(crate) fn volume_of(&self, inode: Inode) -> Option<Rc<Volume>> {
        self.volumes.borrow().iter().find(|v| v.inode() == Some(inode)).cloned()
    }

    /// Adds a volume to the set.
    pub(crate) fn add(&self, volume: Rc<Volume>) {
        // A volume that is opened after a change of the cutoff has the default limit.
        volume.set_cutoff_writeback(self.cache.tunables.borrow().cutoff_writeback);
        self.cache.add_load(volume.load().clone());
        self.volumes.borrow_mut().push(volume);
    }

    /// Removes a volume from the set.
    pub(crate) fn remove(&self, volume: &Rc<Volume>) {
        self.cache.remove_load(volume.load());
        self.volumes.borrow_mut().retain(|v| !Rc::ptr_eq(v, volume));
    }

    /// Removes the volume in this slot and its backing device from the set.
    pub(crate) fn remove_with_device(&self, volume: &Rc<Volume>, inode: Inode) {
        self.remove(volume);
        // The slot may have another device by now.
        if let Some(backing) = volume.backing() {
            self.cache.backings.remove(inode, &backing);
        }
    }

    /// Removes all volumes and devices, because they and the set hold references to each other.
    pub(crate) fn clear(&self) {
        for v in self.volumes.take() {
            self.cache.remove_load(v.load());
        }
        self.cache.backings.clear();
    }
}
