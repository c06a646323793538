//! The heart of a cache set: everything its parts share.
//!
//! Owns the one instance of each part (index, journal, bucket table, allocator) and the set's state (running,
//! stopping, failed). The parts' work is in their own modules. Single-threaded: a `RefCell` is never borrowed across
//! an await point.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

use format::{Geometry, Inode, Sectors, Uuid};
use io::sync::Mutex;
use io::{Handle, Reservation};

use crate::alloc::{Aged, Allocator};
use crate::device::{BackingDevices, CacheDevice};
use crate::gc::Gc;
use crate::index::Index;
use crate::journal::Journal;
use crate::policy::congestion::Congestion;
use crate::policy::writeback_rate::IdleCounter;
use crate::policy::yielding::Pace;
use crate::stats::CacheStats;
use crate::tasks::Tasks;
use crate::tunables::SetTunables;
use crate::uuids::UuidTable;
use crate::volume::Volume;
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
    /// Extents that were copied to another bucket because they were read.
    pub kept_extents: u64,
    /// Writes over dirty data in its place.
    pub overwrites: u64,
    /// Times that a new btree node had to wait for a bucket.
    pub btree_waits: u64,
    /// Buckets whose generation went around.
    pub gen_wraps: u64,
}

/// Everything that the parts of a set share.
pub(crate) struct Core {
    pub(crate) rt: Handle,
    pub(crate) device: Rc<CacheDevice>,
    pub(crate) backings: Rc<BackingDevices>,
    pub(crate) geometry: Geometry,
    /// What the tables of the set take.
    pub(crate) _memory: Reservation,
    /// Serialises writes of the cache superblock and the UUID table.
    pub(crate) config_lock: Mutex,
    pub(crate) journal: Rc<Journal>,
    pub(crate) alloc: Rc<Allocator>,
    pub(crate) index: Rc<Index>,
    pub(crate) uuids: Rc<UuidTable>,
    pub(crate) gc: Rc<Gc>,
    pub(crate) tasks: Rc<Tasks>,
    /// Devices that are being attached.
    pub(crate) attaching: RefCell<BTreeSet<Uuid>>,
    pub(crate) volumes: RefCell<Vec<Rc<Volume>>>,
    /// Holds writes back while the cache is nearly full.
    pub(crate) pace: Cell<Pace>,
    pub(crate) idle: RefCell<IdleCounter>,
    pub(crate) congestion: RefCell<Congestion>,
    pub(crate) tunables: RefCell<SetTunables>,
    pub(crate) stats: RefCell<CacheStats>,
    /// Writes over dirty data in its place.
    pub(crate) overwrites: Cell<u64>,
    pub(crate) wiper: Wiper,
}

impl Core {
    /// Ends every wait whose condition looks at the set's state.
    pub(crate) fn wake_everybody(&self) {
        if let Err(e) = self.device.check() {
            self.journal.fail(e);
        }
        self.index.kick();
        self.alloc.walks().look_again();
        self.alloc.kick();
        for v in self.volumes.borrow().iter() {
            v.wake();
        }
    }

    /// Foreground sectors that were not bypassed age the priorities (semantics section 7.5).
    pub(crate) fn count_for_aging(&self, sectors: Sectors) {
        if self.alloc.count_for_aging(sectors) == Aged::ByReuse {
            self.volumes.borrow().iter().for_each(|v| v.measure_saving(self));
        }
    }

    /// The volume behind a slot.
    pub(crate) fn volume_of(&self, inode: Inode) -> Option<Rc<Volume>> {
        self.volumes.borrow().iter().find(|v| v.inode() == Some(inode)).cloned()
    }

    /// The volume in this slot is no part of the set any more.
    pub(crate) fn let_go(&self, volume: &Rc<Volume>, inode: Inode) {
        self.volumes.borrow_mut().retain(|v| !Rc::ptr_eq(v, volume));
        // The slot may have another device by now.
        if let Some(backing) = volume.backing() {
            self.backings.remove(inode, &backing);
        }
    }
}
