//! The components of a cache set, as `open` connects them.
//!
//! Owns the reservation of the set's memory, and the order in which the components learn of a failure and of changed
//! tunables. Must not know how a component does its work. All of it runs on one thread; no `RefCell` is borrowed across
//! an await point.

use std::rc::Rc;

use format::Uuid;
use io::{Nanos, Reservation};

use super::members::Members;
use super::unsettled::Unsettled;
use crate::device::ErrorLimits;
use crate::error::EngineError;
use crate::gc::GcSettings;
use crate::refusal::Refusal;
use crate::scrub::Scrubber;
use crate::volume::Cache;
use crate::wipe::Wiper;

/// The components behind a [`CacheSet`](super::CacheSet).
pub(super) struct Components {
    /// The components that volumes use, too.
    pub(super) cache: Rc<Cache>,
    pub(super) members: Rc<Members>,
    pub(super) wiper: Rc<Wiper>,
    pub(super) scrubber: Rc<Scrubber>,
    pub(super) unsettled: Unsettled,
    /// The reservation for the memory of the set's tables.
    _memory: Reservation,
}

impl Components {
    pub(super) fn new(cache: Rc<Cache>, unsettled: Unsettled, memory: Reservation) -> Components {
        Components {
            members: Rc::new(Members::new(cache.clone())),
            wiper: Rc::default(),
            scrubber: Rc::new(Scrubber::new(cache.clone())),
            unsettled,
            cache,
            _memory: memory,
        }
    }

    /// UUID of the set.
    pub(super) fn uuid(&self) -> Uuid {
        self.cache.device.superblock().set_uuid()
    }

    /// Wakes every task of the set that waits, so that it checks whether the set is stopping or has failed.
    pub(super) fn wake_all(&self) {
        let cache = &self.cache;
        if let Err(e) = cache.device.check() {
            cache.journal.fail(e);
        }
        cache.index.kick();
        cache.alloc.walks().recheck();
        cache.alloc.kick();
        self.scrubber.kick();
        self.members.wake();
    }

    /// Sets a tunable that the superblock does not store.
    pub(super) fn set_tunable(&self, name: &str, value: &str) -> Result<(), EngineError> {
        Ok(self.cache.tunables.borrow_mut().set(name, value).map_err(Refusal::from)?)
    }

    /// Writes a tunable to the superblock, then sets it.
    pub(super) async fn store_tunable(&self, name: &str, value: &str) -> Result<(), EngineError> {
        let cache = &self.cache;
        let _config = cache.uuids.lock().await;
        cache.device.check()?;
        let mut next = cache.tunables.borrow().clone();
        next.set(name, value).map_err(Refusal::from)?;
        cache.device.change_superblock(|sb| {
            sb.set_discard(next.discard);
            sb.set_replacement(next.cache_replacement_policy);
        });
        cache.device.write_superblock().await?;
        // Other tunables may have been set meanwhile, so only this one is set.
        self.set_tunable(name, value)?;
        cache.alloc.eviction().set_policy(cache.tunables.borrow().policy());
        Ok(())
    }

    /// Passes the tunables to the components that have their own copies.
    pub(super) fn tunables_changed(&self) {
        let cache = &self.cache;
        let t = cache.tunables.borrow();
        cache.journal.set_delay(Nanos::from_ms(u64::from(t.journal_delay_ms)));
        cache.gc.set(GcSettings { packs: t.copy_gc_enabled, always_rewrites: t.gc_always_rewrite });
        cache.alloc.eviction().set_policy(t.policy());
        cache.device.set_error_limits(ErrorLimits { limit: t.io_error_limit, halflife: t.io_error_halflife });
        cache.congestion().set_thresholds(t.congested_read_threshold_us, t.congested_write_threshold_us);
        for v in self.members.volumes().iter() {
            v.set_cutoff_writeback(t.cutoff_writeback);
        }
        cache.index.set_memory_limit(usize::try_from(t.btree_cache_limit).unwrap_or(usize::MAX));
        cache.alloc.walks().recheck();
    }
}
