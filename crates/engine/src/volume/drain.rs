//! Draining and stopping a volume: its dirty data is written back, and the backing superblock gets the state clean.
//!
//! Owns the decision when a volume is clean. Must not know how data is written back; `crate::writeback` does that.
//!
//! Invariant: the superblock has the state clean only while no dirty key is left, also after a crash (contract 6).

use std::rc::Rc;

use format::{BackingState, Inode, Sectors};

use super::Volume;
use super::cache::Cache;
use crate::canary::{Bug, bug};
use crate::error::EngineError;
use crate::refusal::{Cause, Refusal};

/// Stops a volume; see [`Volume::stop`].
pub(super) async fn stop(volume: &Volume) -> Result<(), EngineError> {
    volume.stopping.set(true);
    volume.writeback.wake();
    volume.idle.wait_until(|| volume.in_flight.get() == 0).await;
    volume.writeback.stopped().await;
    let Some(backing) = &volume.backing else { return Ok(()) };
    // The next owner of the device must not find its superblock changed afterwards.
    backing.updates_ended().await;
    if volume.attached().is_none() {
        backing.flush_all().await?;
    }
    Ok(())
}

/// Waits until no dirty data is left; see [`Volume::drained`].
pub(super) async fn drained(volume: &Volume) -> Result<(), EngineError> {
    loop {
        let (Some((cache, inode)), Some(_)) = (volume.attached(), &volume.backing) else { return Ok(()) };
        let drained = drained_in(volume, &cache, inode).await;
        // If the second set has taken over, it has the dirty data.
        if volume.attached().is_none() || volume.links.is_as(&cache, inode) {
            return drained;
        }
    }
}

/// Waits until no dirty data is left in a set of the volume, or the volume has another set.
async fn drained_in(volume: &Volume, cache: &Rc<Cache>, inode: Inode) -> Result<(), EngineError> {
    let draining = volume.writeback.drain();
    let dirty =
        || cache.index.tree().dirty_sectors(inode) > Sectors::ZERO || volume.dirty_in_flight.get() > 0;
    let is_over = || {
        let is_lost = cache.device.is_failed() || !volume.links.is_as(cache, inode);
        is_lost || volume.stopping.get() || volume.writeback.gave_up() || !dirty()
    };
    volume.writeback.progress_until(is_over).await;
    drop(draining);
    cache.device.check()?;
    if dirty() {
        let left = cache.index.tree().dirty_sectors(inode);
        let source = volume.writeback.last_error().map(Cause::of);
        return Err(Refusal::NotWrittenBack { volume: volume.label_or_name(), left, source }.into());
    }
    mark_clean(volume).await
}

/// Sets the state in the backing superblock to clean if nothing is dirty.
pub(super) async fn mark_clean(volume: &Volume) -> Result<(), EngineError> {
    let (Some((cache, inode)), Some(backing)) = (volume.attached(), volume.backing.clone()) else {
        return Ok(());
    };
    let is_clean = || {
        let is_dirty = cache.index.tree().dirty_sectors(inode) > Sectors::ZERO;
        // The second set may have taken over.
        !is_dirty && volume.dirty_in_flight.get() == 0 && volume.links.is_as(&cache, inode)
    };
    let ignored = bug(Bug::CleanStateBeforeCleanKeys);
    let is_durable = || {
        let second = volume.mirror().is_none_or(|m| m.is_clean_durable() || bug(Bug::CleanStateBeforeSecond));
        second && cache.index.tree().cleaned(inode) <= cache.journal.durable() || ignored
    };
    while backing.state() == BackingState::Dirty && is_clean() {
        // The keys that mark data as clean are durable before the superblock is. During the wait for another update
        // of the superblock, new keys may be added.
        let cleaned = cache.index.tree().cleaned(inode);
        if !is_durable() {
            cache.journal.commit(cleaned).await?;
            if let Some(mirror) = volume.mirror().filter(|_| !bug(Bug::CleanStateBeforeSecond)) {
                mirror.commit_clean().await?;
            }
        }
        if backing.ensure_clean(|| is_clean() && is_durable()).await? {
            backing.emit_state(BackingState::Clean, &cache.device);
        }
    }
    Ok(())
}
