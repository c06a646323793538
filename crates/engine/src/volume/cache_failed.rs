//! The handling of a failed cache by a volume (semantics section 15.1, without the defects 1 and 18 of docs/compat.md).
//!
//! A device without dirty data is served without its cache, but only after the state stale is durable in its
//! superblock: if the cache comes back later, its old content is invalid. It is not served if
//! `stop_when_cache_set_failed` is `always`. A device with dirty data, and a flash-only
//! volume, fail every request.

use std::rc::Rc;

use format::{BackingState, BackingSuper, Sectors};
use io::Nanos;

use super::mirror::{Which, handle_lost_copy, take_over};
use super::{Cache, Target, Volume};
use crate::canary::{Bug, Mark, bug, mark};
use crate::error::EngineError;
use crate::refusal::Refusal;
use crate::tunables::StopWhenFailed;

/// The pause after the superblock of the backing device could not be written.
const RETRY_DELAY: Nanos = Nanos::from_secs(1);

/// Whether the set of the volume, or the second set that has its dirty data, has failed since the count of losses was `losses`.
pub(super) fn has_lost_set(volume: &Volume, cache: &Cache, losses: u32) -> bool {
    cache.device.is_failed()
        || volume.links.losses() != losses
        || volume.mirror().is_some_and(|m| m.cache.device.is_failed())
}

/// Handles the failure of one of the two sets that have the dirty data of a volume, when no request does. If the backing device cannot
/// record the loss, the other set does, whose journal waits for that; then it tries the backing device again.
pub(crate) async fn handle_failed_sets(volume: Rc<Volume>) {
    while let (Some((cache, inode)), Some(mirror)) = (volume.attached(), volume.mirror()) {
        let both = cache.device.is_failed() && mirror.cache.device.is_failed();
        if both || !has_lost_set(&volume, &cache, volume.links.losses()) {
            return;
        }
        if handle_failed_cache(volume.target(&cache, inode)).await.is_err() {
            let remaining = if cache.device.is_failed() { Which::Secondary } else { Which::Primary };
            // If the remaining set fails as well, nothing waits for its journal any more.
            let _ = mirror.leave_unsettled(inode, remaining).await;
            drop(mirror);
            // A volume that is being stopped has no requests that would try again.
            if volume.stopping.get() {
                return;
            }
            volume.rt.sleep(RETRY_DELAY).await;
        }
    }
}

/// Makes the dirty data of the second set durable, and removes the link to that set. The volume is stopped.
pub(crate) async fn release_mirror(volume: &Rc<Volume>) {
    let Some(mirror) = volume.mirror() else { return };
    if mirror.commit_keys().await.is_err() {
        handle_failed_sets(volume.clone()).await;
    }
    volume.links.clear_second();
}

/// Writes the leaves of the second set, which may have clean copies of data that the backing device has not flushed. If that fails, the set
/// has failed, and its slot does not count any more.
pub(crate) async fn write_leaves_of_second(volume: &Rc<Volume>) {
    let Some(mirror) = volume.mirror() else { return };
    if mirror.cache.index.write_all_leaves().await.is_err() {
        handle_failed_sets(volume.clone()).await;
    }
}

/// Ends the copy in a set that is about to stop; the volume goes on without it.
pub(crate) async fn end_copy(volume: &Rc<Volume>, second: &Rc<Cache>) -> Result<(), EngineError> {
    let _one = volume.failure_handling.lock().await;
    match volume.mirror().filter(|m| Rc::ptr_eq(&m.cache, second)) {
        // The copy is all that there is.
        Some(mirror) if mirror.is_copy() && volume.attached().is_some_and(|(c, _)| c.device.is_failed()) => {
            Err(Refusal::SetFailed.into())
        }
        Some(mirror) => handle_lost_copy(volume, &mirror).await,
        None => Ok(()),
    }
}

/// One of the two sets is stopped, and its keys are durable. Its journal and that of the other set need not wait for each other any
/// more, and a task that finds its journal ended is no loss of the set. The volume is stopped.
pub(crate) fn uncouple_stopped(volume: &Volume) {
    volume.mirror().iter().for_each(|mirror| mirror.uncouple());
}

/// Has the second set take the volume over although the first one works: it cannot read or store data of this volume.
pub(crate) async fn leave_to_second(volume: &Rc<Volume>, cache: &Rc<Cache>) -> Result<(), EngineError> {
    let _one = volume.failure_handling.lock().await;
    match volume.mirror().filter(|_| volume.links.is_to(cache)) {
        Some(mirror) if mirror.is_copy() && !mirror.cache.device.is_failed() => {
            take_over(volume, &mirror).await
        }
        // Another request has handled it.
        _ => Ok(()),
    }
}

/// Handles the failure of the set, or of the second one. `Ok`: from now on the volume is served without the failed set.
pub(super) async fn handle_failed_cache(target: Target<'_>) -> Result<(), EngineError> {
    let Target { volume, cache, inode } = target;
    let _one = volume.failure_handling.lock().await;
    if !volume.links.is_to(cache) {
        // Another request has handled it.
        return Ok(());
    }
    if let Some(mirror) = volume.mirror() {
        let has_copy = mirror.is_copy() && !mirror.cache.device.is_failed();
        match (cache.device.is_failed(), mirror.cache.device.is_failed()) {
            (false, false) => return Ok(()),
            (false, true) => return handle_lost_copy(volume, &mirror).await,
            (true, _) if has_copy => return take_over(volume, &mirror).await,
            // No number names an incomplete copy. The journal of its set must not wait for this one.
            (true, _) => mirror.end(volume, volume.attached()),
        }
    } else if !cache.device.is_failed() {
        return Ok(());
    }
    let failure = cache.device.check().err().unwrap_or_else(|| Refusal::SetFailed.into());
    let Some(backing) = volume.backing() else { return Err(failure) };
    let dirty = cache.index.tree().dirty_sectors(inode);
    let always = volume.tunables.borrow().stop_when_cache_set_failed == StopWhenFailed::Always;
    if dirty > Sectors::ZERO || always {
        mark(Mark::CacheFailedDirty);
        return Err(failure);
    }
    // Data that was written back may still be in the volatile cache of the device, and counts as clean from now on.
    backing.flush_all().await?;
    let changed = |sb: &mut BackingSuper| {
        // A device that was being detached may no longer belong to the set.
        if sb.state() == BackingState::None {
            mark(Mark::CacheFailedDetached);
        } else if !bug(Bug::FailedButNotStale) {
            mark(Mark::CacheFailedClean);
            sb.set_state(BackingState::Stale);
        }
        sb.set_copy(None);
    };
    backing.update(changed).await?;
    backing.emit_state(backing.state(), &cache.device);
    volume.detached();
    Ok(())
}
