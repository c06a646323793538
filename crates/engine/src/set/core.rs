//! The heart of a cache set: everything its parts share.
//!
//! Owns the one instance of each part (index, journal, bucket table, allocator) and the set's state (running,
//! stopping, failed). The parts' work is in their own modules. Single-threaded: a `RefCell` is never borrowed across
//! an await point.

use std::cell::{Cell, RefCell, RefMut};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

use format::{CacheSuper, Geometry, Inode, Ptr, Sector, Sectors, SetMagic, Uuid, UuidEntry};
use io::sync::{Event, Mutex, Queue};
use io::{Buffer, Disk, Handle, Reservation, Rng};

use super::events::{Events, SetEvent};
use super::failed_flushes::FailedFlushes;
use crate::alloc::{Allocator, Buckets};
use crate::error::{EngineError, Place};
use crate::flush::{FlushGate, Tick};
use crate::index::{NodeId, Tree};
use crate::journal::Journal;
use crate::policy::congestion::Congestion;
use crate::policy::replacement::{Aging, Selector};
use crate::policy::reuse::{Reuse, Saving};
use crate::policy::writeback_rate::IdleCounter;
use crate::policy::yielding::Pace;
use crate::set::{Backing, Meter, Turns, Watched};
use crate::stats::{CacheErrors, CacheStats, ErrorVerdict, SetCounters, Sliced, Work, WorkStats};
use crate::tunables::SetTunables;
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
    pub(crate) cache: Disk,
    /// What requests for data cost it.
    pub(crate) meter: Rc<Meter>,
    pub(crate) place: Place,
    pub(crate) geometry: Geometry,
    pub(crate) magic: SetMagic,
    pub(crate) nr_this_dev: usize,
    pub(crate) superblock: RefCell<CacheSuper>,
    /// What the tables of the set take.
    pub(crate) _memory: Reservation,
    /// Serialises writes of the cache superblock and the UUID table.
    pub(crate) config_lock: Mutex,
    pub(crate) gate: Rc<FlushGate>,
    /// The last write over dirty data in its place: no key says that it has to be flushed.
    pub(crate) overwritten: Cell<Tick>,
    pub(crate) buckets: RefCell<Buckets>,
    pub(crate) tree: RefCell<Tree>,
    pub(crate) journal: Journal,
    pub(crate) alloc: Allocator,
    /// Held while btree nodes are replaced.
    pub(crate) structure: Mutex,
    pub(crate) leaf_work: Queue<NodeId>,
    /// A node was loaded, written or replaced.
    pub(crate) index_changed: Event,
    /// Leaves were loaded, or have grown.
    pub(crate) memory_changed: Event,
    pub(crate) gc_wanted: Cell<bool>,
    pub(crate) gc_running: Cell<bool>,
    pub(crate) gc_event: Event,
    pub(crate) gc_lock: Mutex,
    pub(crate) uuids: RefCell<Vec<UuidEntry>>,
    /// Slots whose keys must not be used: they are removed by and by.
    pub(crate) void: RefCell<BTreeSet<Inode>>,
    /// Backing devices of which a flush failed.
    pub(crate) failed_flushes: FailedFlushes,
    /// Devices that are being attached.
    pub(crate) attaching: RefCell<BTreeSet<Uuid>>,
    pub(crate) backings: RefCell<BTreeMap<Inode, Rc<Backing>>>,
    pub(crate) volumes: RefCell<Vec<Rc<Volume>>>,
    pub(crate) selector: RefCell<Selector>,
    /// What replacement by reuse knows, while that is wanted.
    pub(crate) reuse: RefCell<Option<Reuse>>,
    pub(crate) aging: RefCell<Aging>,
    pub(crate) min_prio: Cell<u16>,
    pub(crate) rng: RefCell<Rng>,
    /// Holds writes back while the cache is nearly full.
    pub(crate) pace: Cell<Pace>,
    pub(crate) idle: RefCell<IdleCounter>,
    pub(crate) congestion: RefCell<Congestion>,
    pub(crate) tunables: RefCell<SetTunables>,
    pub(crate) stats: RefCell<CacheStats>,
    pub(crate) set_counters: RefCell<SetCounters>,
    pub(crate) errors: RefCell<CacheErrors>,
    pub(crate) counters: RefCell<EngineCounters>,
    /// Times of background work.
    pub(crate) work: Rc<RefCell<WorkStats>>,
    pub(crate) events: Events,
    pub(crate) failed: RefCell<Option<Arc<EngineError>>>,
    pub(crate) failure: Event,
    pub(crate) stopping: Cell<bool>,
    /// Background inserts of misses that are under way.
    pub(crate) background: Cell<usize>,
    pub(crate) background_done: Event,
    /// Memory that the data of these inserts holds.
    pub(crate) inserting_bytes: Cell<usize>,
    pub(crate) wiper: Wiper,
    pub(crate) turns: Turns,
}

impl Core {
    /// Fails if the set has been disabled.
    pub(crate) fn check(&self) -> Result<(), EngineError> {
        match &*self.failed.borrow() {
            None => Ok(()),
            Some(why) => Err(EngineError::Disabled { set: self.place.set.clone(), why: why.clone() }),
        }
    }

    pub(crate) fn is_failed(&self) -> bool {
        self.failed.borrow().is_some()
    }

    /// The set's tasks should end.
    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.get() || self.is_failed()
    }

    /// Tells the operator.
    pub(crate) fn emit(&self, event: SetEvent) {
        self.events.push(event);
    }

    /// Metadata could not be read or written: the set is disabled at once (semantics section 14.3).
    pub(crate) fn metadata_failed(&self, e: EngineError) {
        if self.is_failed() {
            // What failed first may have been no sign of a loss: a device without room has lost nothing.
            if let EngineError::Io(e) = e {
                self.cache_request_failed(&e);
            }
            return;
        }
        let why = match e {
            EngineError::Disabled { why, .. } => why,
            other => Arc::new(other),
        };
        self.emit(SetEvent::Failed { why: why.to_string() });
        if !why.is_out_of_room() {
            self.invalidate_crash_log(&why.to_string());
        }
        *self.failed.borrow_mut() = Some(why);
        // The device may have lost what it held: what is being read from it is not believed.
        self.turns.next();
        if let Err(e) = self.check() {
            self.journal.fail(e);
        }
        self.leaf_work.close();
        self.wake_everybody();
    }

    /// The cache device failed a request: it may have lost its power, and with it data that was answered and not
    /// flushed. Keys of such data must not be replayed over older data that was flushed.
    fn invalidate_crash_log(&self, why: &str) {
        if self.journal.invalidate_survivor() {
            self.emit(SetEvent::CrashLogInvalid { why: why.to_owned() });
        }
    }

    /// Ends every wait whose condition looks at the set's state.
    pub(crate) fn wake_everybody(&self) {
        self.failure.notify_all();
        self.index_changed.notify_all();
        self.memory_changed.notify_all();
        self.gc_event.notify_all();
        self.alloc.kick();
        for v in self.volumes.borrow().iter() {
            v.wake();
        }
    }

    /// Makes everything durable that the cache device was given up to this tick. If that fails, the device may have lost any
    /// of it, and the set is disabled.
    pub(crate) async fn flush_cache(&self, tick: Tick) -> Result<(), EngineError> {
        let flushed = self.gate.ensure(tick).await;
        if let Err(e) = &flushed {
            self.metadata_failed(e.clone().into());
        }
        Ok(flushed?)
    }

    /// A request to the cache device failed. The device may have lost what was not flushed, so the crash log is not believed
    /// any more. Whether the set is disabled is the caller's decision.
    pub(crate) fn cache_request_failed(&self, e: &io::IoError) {
        if !e.is_out_of_room() {
            self.invalidate_crash_log(&e.to_string());
        }
    }

    /// A data request to the cache device has ended: counts its error, and disables the set at the limit
    /// (semantics section 14.2).
    pub(crate) fn observe_cache_io(&self, result: &Result<(), io::IoError>) {
        let (limit, halflife) = {
            let t = self.tunables.borrow();
            (t.io_error_limit, t.io_error_halflife)
        };
        // A device without room is not broken: what it has can be read, and writes go past it meanwhile.
        let failed = result.as_ref().is_err_and(|e| !e.is_out_of_room());
        let verdict = self.errors.borrow_mut().observe(failed, limit, halflife);
        if let Err(e) = result {
            self.emit(SetEvent::DeviceError { what: e.to_string() });
            self.cache_request_failed(e);
            if verdict == ErrorVerdict::LimitReached {
                self.metadata_failed(e.clone().into());
            }
        }
    }

    /// Starts a read of cached data.
    pub(crate) fn read_data(
        &self,
        sector: Sector,
        sectors: Sectors,
        buffer: Buffer,
        offset_bytes: usize,
    ) -> Watched {
        self.meter.read(&self.cache, sector, sectors, buffer, offset_bytes)
    }

    /// Starts a write of data to be cached.
    pub(crate) fn write_data(
        &self,
        sector: Sector,
        sectors: Sectors,
        buffer: Buffer,
        offset_bytes: usize,
    ) -> Watched {
        self.meter.write(&self.cache, sector, sectors, buffer, offset_bytes, false)
    }

    /// Makes a change to its end, also if the caller gives up the wait for it: the next change could overtake what it has
    /// under way, and a part of it would stay.
    pub(crate) async fn to_the_end<T: 'static>(&self, change: impl Future<Output = T> + 'static) -> T {
        self.rt.spawn(change).await
    }

    /// Writes metadata durably; the set fails if that fails.
    pub(crate) async fn write_metadata(&self, sector: Sector, buffer: Buffer) -> Result<(), EngineError> {
        let sectors = Sectors::from_bytes_floor(buffer.len() as u64);
        let written = self.cache.write(sector, buffer, true).await.map_err(EngineError::from);
        if let Err(e) = written {
            // Memory is ahead of the device now, whoever asked for the write.
            self.metadata_failed(e.clone());
            return Err(e);
        }
        self.set_counters.borrow_mut().count_btree_written(sectors);
        Ok(())
    }

    /// Writes the cache superblock as it is in memory. The caller holds the config lock.
    pub(crate) async fn write_superblock(&self) -> Result<(), EngineError> {
        let (bytes, before, after) = {
            let sb = &mut *self.superblock.borrow_mut();
            let before = sb.seq();
            sb.prepare_write(self.rt.wall_seconds());
            (sb.encode(), before, sb.seq())
        };
        self.journal.tie_survivor([before, after]);
        self.write_metadata(SUPERBLOCK_SECTOR, self.rt.pool().copy_of(&bytes)).await?;
        self.journal.tie_survivor([after, after]);
        Ok(())
    }

    pub(crate) fn node_cache_limit_bytes(&self) -> usize {
        usize::try_from(self.tunables.borrow().btree_cache_limit).unwrap_or(usize::MAX)
    }

    /// Buckets are discarded before they are used again.
    pub(crate) fn discards_buckets(&self) -> bool {
        self.superblock.borrow().discard() && self.cache.info().discard
    }

    /// Asks for a walk of the index.
    pub(crate) fn request_gc(&self) {
        self.gc_wanted.set(true);
        self.gc_event.notify_all();
    }

    /// Percent of the cache that cannot be reclaimed at once.
    pub(crate) fn in_use_percent(&self) -> u8 {
        self.buckets.borrow().in_use_percent() as u8
    }

    /// Foreground sectors that were not bypassed age the priorities (semantics section 7.5).
    pub(crate) fn count_for_aging(&self, sectors: Sectors) {
        let cache_sectors = self.geometry.used_sectors().0;
        if self.aging.borrow_mut().count(sectors.0, cache_sectors) {
            self.age();
        }
    }

    #[cold]
    fn age(&self) {
        let min = self.buckets.borrow_mut().age();
        self.min_prio.set(min);
        match self.reuse() {
            Some(mut reuse) => {
                reuse.tick();
                self.volumes.borrow().iter().for_each(|v| v.measure_saving(self));
            }
            None => *self.reuse.borrow_mut() = None,
        }
    }

    /// Replacement by reuse, if that is wanted. It begins to learn when it is first asked for.
    pub(crate) fn reuse(&self) -> Option<RefMut<'_, Reuse>> {
        if !self.tunables.borrow().by_reuse() {
            return None;
        }
        let g = &self.geometry;
        let begin = || Reuse::new(g.first_dynamic(), g.nbuckets, g.bucket_sectors, g.block_sectors);
        Some(RefMut::map(self.reuse.borrow_mut(), |r| r.get_or_insert_with(begin)))
    }

    /// Cached data of this length was read, which saved what `saving` says. True if it had better be copied elsewhere,
    /// because its bucket will be reused.
    pub(crate) fn used(&self, ptr: Ptr, sectors: Sectors, saving: Saving) -> bool {
        let buckets = &mut *self.buckets.borrow_mut();
        buckets.touch(ptr);
        self.tunables.borrow().by_reuse() && self.used_by_reuse(buckets, ptr, sectors, saving)
    }

    /// The same for what replacement by reuse knows.
    #[cold]
    fn used_by_reuse(&self, buckets: &Buckets, ptr: Ptr, sectors: Sectors, saving: Saving) -> bool {
        let Some(mut reuse) = self.reuse() else { return false };
        let b = buckets.bucket_of(ptr);
        // What is still being filled is not reused soon.
        reuse.hit(b, saving.of(sectors)) && buckets.pins(b) == 0
    }

    /// The volume behind a slot.
    pub(crate) fn volume_of(&self, inode: Inode) -> Option<Rc<Volume>> {
        self.volumes.borrow().iter().find(|v| v.inode() == Some(inode)).cloned()
    }

    /// The volume in this slot is no part of the set any more.
    pub(crate) fn let_go(&self, volume: &Rc<Volume>, inode: Inode) {
        self.volumes.borrow_mut().retain(|v| !Rc::ptr_eq(v, volume));
        let backings = &mut *self.backings.borrow_mut();
        // The slot may have another device by now.
        if backings.get(&inode).zip(volume.backing()).is_some_and(|(a, b)| Rc::ptr_eq(a, &b)) {
            backings.remove(&inode);
        }
    }

    /// Starts a background task.
    pub(crate) fn spawn_work(&self, work: Work, task: impl Future<Output = ()> + 'static) {
        self.rt.spawn(Sliced::new(&self.rt, &self.work, work, task));
    }

    /// A background operation begins; it ends when the guard is dropped.
    pub(crate) fn background(self: &Rc<Self>) -> BackgroundGuard {
        self.background.set(self.background.get() + 1);
        BackgroundGuard(self.clone())
    }
}

/// The place of the superblock (format section 2).
pub(crate) const SUPERBLOCK_SECTOR: Sector = Sector(8);

/// See [`Core::background`].
pub(crate) struct BackgroundGuard(Rc<Core>);

impl Drop for BackgroundGuard {
    fn drop(&mut self) {
        self.0.background.set(self.0.background.get() - 1);
        self.0.background_done.notify_all();
    }
}
