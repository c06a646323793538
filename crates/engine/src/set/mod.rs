//! A cache set: one cache device, the backing devices attached to it, and its flash-only volumes.
//!
//! [`CacheSet`] is what shells hold: open (register) a cache device, attach and detach backing devices, create and
//! delete volumes, stop. What it does is in `open` and `attach`; what the parts share is in `core`.

mod attach;
mod core;
mod open;
mod stop;
mod weigh;

use std::rc::Rc;

use format::{Inode, Sectors, Uuid};

pub(crate) use self::core::Core;
pub use self::core::EngineCounters;
pub use attach::Detaching;
pub use open::SetOptions;

use crate::device::ErrorLimits;
use crate::error::EngineError;
use crate::events::SetEvent;
use crate::gc::GcSettings;
use crate::volume::Volume;
use crate::wipe::Wiped;

/// A running cache set. Cheap to clone; it runs until [`CacheSet::stop`].
#[derive(Clone)]
pub struct CacheSet {
    pub(crate) core: Rc<Core>,
}

/// A summary of a set's state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetStatus {
    /// UUID of the set.
    pub set_uuid: Uuid,
    /// Name of the cache device.
    pub device: String,
    /// Size of a bucket.
    pub bucket_sectors: Sectors,
    /// Number of buckets.
    pub nbuckets: u32,
    /// Percent of buckets that cannot be reclaimed at once.
    pub in_use_percent: u8,
    /// Live data in the cache.
    pub cached_sectors: Sectors,
    /// Live dirty data, per slot.
    pub dirty: Vec<(Inode, Sectors)>,
    /// Btree nodes.
    pub btree_nodes: usize,
    /// Bytes of index in memory.
    pub index_bytes: usize,
    /// Free journal buckets, and how many there are.
    pub journal_free: (usize, usize),
    /// Journal entries and bytes written since the start.
    pub journal_written: (u64, u64),
    /// Why the set is disabled, if it is.
    pub failed: Option<String>,
}

impl CacheSet {
    /// UUID of the set.
    pub fn uuid(&self) -> Uuid {
        self.core.cache.device.superblock().set_uuid()
    }

    /// State in numbers.
    pub fn status(&self) -> SetStatus {
        let core = &self.core;
        let buckets = core.cache.alloc.buckets();
        let tree = core.cache.index.tree();
        SetStatus {
            set_uuid: self.uuid(),
            device: core.cache.device.place().device.to_string(),
            bucket_sectors: core.cache.geometry.bucket_sectors,
            nbuckets: core.cache.geometry.nbuckets,
            in_use_percent: buckets.in_use_percent() as u8,
            cached_sectors: buckets.live_total(),
            dirty: tree.all_dirty().filter(|(_, n)| *n > Sectors::ZERO).collect(),
            btree_nodes: tree.node_count(),
            index_bytes: tree.loaded_bytes(),
            journal_free: core.cache.journal.free_buckets(),
            journal_written: core.cache.journal.written(),
            failed: core.cache.device.failure(),
        }
    }

    /// Statistics of all devices of the set together, by the views of the kernel.
    pub fn with_stats<T>(&self, f: impl FnOnce(&mut crate::stats::CacheStats) -> T) -> T {
        let stats = &mut *self.core.cache.stats.borrow_mut();
        stats.tick(self.core.cache.rt.now());
        f(stats)
    }

    /// Zeroes the totals of the set: statistics, and what was counted about writeback (`clear_stats`).
    pub fn clear_stats(&self) {
        self.core.cache.stats.borrow_mut().clear_total();
        self.core.cache.device.counters().clear_for_set();
    }

    /// Zeroes what the cache device counts: what was written to it, and its errors (its own `clear_stats`).
    pub fn clear_device_stats(&self) {
        self.core.cache.device.counters().clear_for_cache_device();
        self.core.cache.device.clear_errors();
    }

    /// What was written to the cache device, and what became of its keys.
    pub fn set_counters(&self) -> crate::stats::SetCounters {
        *self.core.cache.device.counters()
    }

    /// Counts of the engine's own work.
    pub fn counters(&self) -> EngineCounters {
        let core = &self.core;
        let (alloc, index, gc) =
            (core.cache.alloc.counters(), core.cache.index.counters(), core.cache.gc.counters());
        EngineCounters {
            prio_writes: alloc.prio_writes,
            gen_wraps: alloc.gen_wraps,
            btree_waits: alloc.btree_waits,
            btree_reads: index.reads,
            btree_rewrites: index.rewrites,
            gc_runs: gc.walks,
            moved_extents: gc.moved,
            kept_extents: gc.promoted,
            overwrites: core.cache.overwrites(),
        }
    }

    /// Flushes sent to the cache device.
    pub fn cache_flushes(&self) -> u64 {
        self.core.cache.device.gate().count()
    }

    /// Every volume of the set: cached devices and flash-only ones.
    pub fn volumes(&self) -> Vec<Rc<Volume>> {
        self.core.volumes()
    }

    /// What happened since the last call.
    pub fn take_events(&self) -> Vec<SetEvent> {
        self.core.cache.device.events().take()
    }

    /// Waits until [`CacheSet::take_events`] has something to say.
    pub async fn events_arrived(&self) {
        self.core.cache.device.events().arrived().await;
    }

    /// Whether the set has been disabled by a failure.
    pub fn failure(&self) -> Option<EngineError> {
        self.core.cache.device.check().err()
    }

    /// Walks the index now: drops what is stale, packs small leaves together.
    pub async fn gc(&self) -> Result<(), EngineError> {
        let gc = self.core.cache.gc.clone();
        self.core.cache.tasks.to_the_end(async move { crate::gc::collect(&gc).await }).await
    }

    /// Overwrites with zeros whatever no volume of the set needs, durably. Dropping the future gives it up; what is done
    /// stays done.
    ///
    /// # Errors
    /// If the device refuses, or the set fails or is stopped: some of the data is still there, and another wipe removes it.
    pub async fn wipe(&self) -> Result<Wiped, EngineError> {
        crate::wipe::wipe(&self.core.cache, &self.core.wiper).await
    }

    /// How many buckets the wipe that is under way has done, and how many there are.
    pub fn wipe_progress(&self) -> (u32, u32) {
        self.core.wiper.progress()
    }

    /// Live dirty sectors of a slot.
    pub fn dirty_sectors(&self, inode: Inode) -> Sectors {
        self.core.cache.index.tree().dirty_sectors(inode)
    }

    /// Value of a tunable of the set, by the kernel's name.
    pub fn get(&self, name: &str) -> Option<String> {
        self.core.cache.tunables.borrow().get(name).ok()
    }

    /// Every tunable of the set.
    pub fn tunables(&self) -> crate::tunables::SetTunables {
        self.core.cache.tunables.borrow().clone()
    }

    /// Sets a tunable of the set, by the kernel's name. What the superblock stores is written there.
    ///
    /// # Errors
    /// If the name is unknown, the value makes no sense, or the superblock cannot be written.
    pub async fn set(&self, name: &str, value: &str) -> Result<(), EngineError> {
        let core = &self.core;
        let mut next = core.cache.tunables.borrow().clone();
        next.set(name, value).map_err(|e| EngineError::Invalid(e.to_string()))?;
        if !next.synchronous {
            return Err(EngineError::Invalid(
                "synchronous: 0 would throw the cache away at the next start, dirty data included; detach the \
                 devices and format the cache instead"
                    .into(),
            ));
        }
        let stored = {
            let old = core.cache.tunables.borrow();
            (old.discard, old.cache_replacement_policy) != (next.discard, next.cache_replacement_policy)
        };
        if stored {
            let (core, name, value) = (core.clone(), name.to_owned(), value.to_owned());
            self.core.cache.tasks.to_the_end(async move { core.store_tunable(&name, &value).await }).await?;
        } else {
            core.set_tunable(name, value)?;
        }
        core.tunables_changed();
        Ok(())
    }
}

impl Core {
    fn set_tunable(&self, name: &str, value: &str) -> Result<(), EngineError> {
        self.cache.tunables.borrow_mut().set(name, value).map_err(|e| EngineError::Invalid(e.to_string()))
    }

    /// Sets a tunable that the superblock stores, once it is there.
    async fn store_tunable(&self, name: &str, value: &str) -> Result<(), EngineError> {
        let _config = self.cache.uuids.lock().await;
        let mut next = self.cache.tunables.borrow().clone();
        next.set(name, value).map_err(|e| EngineError::Invalid(e.to_string()))?;
        self.cache.device.change_superblock(|sb| {
            sb.set_discard(next.discard);
            sb.set_replacement(next.cache_replacement_policy);
        });
        self.cache.device.write_superblock().await?;
        // Others may have been set meanwhile.
        self.set_tunable(name, value)?;
        self.cache.alloc.eviction().set_policy(self.cache.tunables.borrow().policy());
        Ok(())
    }

    /// Carries tunables to the parts that keep their own copy.
    pub(crate) fn tunables_changed(&self) {
        let t = self.cache.tunables.borrow();
        self.cache.journal.set_delay(io::Nanos::from_ms(u64::from(t.journal_delay_ms)));
        self.cache.gc.set(GcSettings { packs: t.copy_gc_enabled, always_rewrites: t.gc_always_rewrite });
        self.cache.alloc.eviction().set_policy(t.policy());
        self.cache
            .device
            .set_error_limits(ErrorLimits { limit: t.io_error_limit, halflife: t.io_error_halflife });
        self.cache.congestion().set_thresholds(t.congested_read_threshold_us, t.congested_write_threshold_us);
        for v in self.volumes().iter() {
            v.tunables.borrow_mut().set_cutoff_writeback(t.cutoff_writeback);
        }
        let memory_limit = usize::try_from(t.btree_cache_limit).unwrap_or(usize::MAX);
        drop(t);
        self.cache.index.set_memory_limit(memory_limit);
        self.cache.alloc.walks().recheck();
    }
}
