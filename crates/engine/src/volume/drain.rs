//! Draining and stopping a volume: its dirty data is written back, and the backing superblock gets the state clean.
//!
//! Owns the decision when a volume is clean. Must not know how data is written back; `crate::writeback` does that.
//!
//! Invariant: the superblock has the state clean only while no dirty key is left, also after a crash (contract 6).

use format::{BackingState, Sectors};

use super::Volume;
use crate::canary::{Bug, bug};
use crate::error::EngineError;
use crate::events::SetEvent;

impl Volume {
    /// Stops the volume: refuses new requests, and waits for the requests under way and for the writeback task. On a
    /// volume without a cache every answered write is durable afterwards, so a client may rely on a stop instead of a
    /// flush. On a volume with a cache the stop of the set, or [`crate::CacheSet::release`], makes them durable.
    ///
    /// # Errors
    /// If the device could not be flushed: writes that were answered and not flushed may be lost. The volume is stopped
    /// in this case, too.
    pub async fn stop(&self) -> Result<(), EngineError> {
        self.stopping.set(true);
        self.writeback.wake();
        self.idle.wait_until(|| self.in_flight.get() == 0).await;
        self.writeback.stopped(self.backing.is_none() || self.attached().is_none()).await;
        match &self.backing {
            Some(b) if self.attached().is_none() => Ok(b.gate.ensure(b.gate.latest()).await?),
            _ => Ok(()),
        }
    }

    pub(crate) fn begin_detach(&self) {
        self.detaching.set(self.detaching.get() + 1);
        self.writeback.wake();
    }

    pub(crate) fn cancel_detach(&self) {
        // The count is 0 if the volume was detached meanwhile.
        self.detaching.set(self.detaching.get().saturating_sub(1));
    }

    /// Whether the volume is being detached and takes no new dirty data.
    pub(crate) fn is_detaching(&self) -> bool {
        self.detaching.get() > 0
    }

    /// Waits until no dirty data is left. On a flash-only volume it returns at once, because that data has no other
    /// device to go to. Dropping the future cancels the wait.
    ///
    /// # Errors
    /// If the set fails, or the volume is stopped.
    pub async fn drained(&self) -> Result<(), EngineError> {
        let (Some((cache, inode)), Some(_)) = (self.attached(), &self.backing) else { return Ok(()) };
        let draining = self.writeback.drain();
        let dirty =
            || cache.index.tree().dirty_sectors(inode) > Sectors::ZERO || self.dirty_in_flight.get() > 0;
        self.writeback
            .progress
            .wait_until(|| {
                cache.device.is_failed() || self.stopping.get() || self.writeback.gave_up() || !dirty()
            })
            .await;
        drop(draining);
        cache.device.check()?;
        if dirty() {
            let left = cache.index.tree().dirty_sectors(inode);
            let why = self.writeback.last_error().unwrap_or_else(|| "the volume was stopped".into());
            return Err(EngineError::Invalid(format!(
                "{}: {left} dirty sectors could not be written back: {why}",
                self.label_or_name()
            )));
        }
        self.mark_clean().await
    }

    /// Sets the state in the backing superblock to clean if nothing is dirty.
    pub(crate) async fn mark_clean(&self) -> Result<(), EngineError> {
        let (Some((cache, inode)), Some(backing)) = (self.attached(), self.backing.clone()) else {
            return Ok(());
        };
        let is_clean =
            || cache.index.tree().dirty_sectors(inode) == Sectors::ZERO && self.dirty_in_flight.get() == 0;
        let ignored = bug(Bug::CleanStateBeforeCleanKeys);
        let is_durable = || cache.index.tree().cleaned(inode) <= cache.journal.durable() || ignored;
        while backing.state() == BackingState::Dirty && is_clean() {
            // The keys that mark data as clean are durable before the superblock is. During the wait for another update
            // of the superblock, new keys may be added.
            let cleaned = cache.index.tree().cleaned(inode);
            if !is_durable() {
                cache.journal.commit(cleaned).await?;
            }
            if backing.ensure_clean(|| is_clean() && is_durable()).await? {
                let device = backing.disk.info().name.to_string();
                cache.device.emit(SetEvent::State { device, state: "clean" });
            }
        }
        Ok(())
    }
}
