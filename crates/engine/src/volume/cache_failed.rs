//! The handling of a failed cache by a volume (semantics section 15.1, without the defects 1 and 18 of docs/compat.md).
//!
//! A device without dirty data is served without its cache, but only after the state stale is durable in its
//! superblock: if the cache comes back later, its old content is invalid. It is not served if
//! `stop_when_cache_set_failed` is `always`. A device with dirty data, and a flash-only
//! volume, fail every request.

use format::{BackingState, BackingSuper, Sectors};

use super::Target;
use crate::canary::{Bug, Mark, bug, mark};
use crate::error::EngineError;
use crate::refusal::Refusal;
use crate::tunables::StopWhenFailed;

/// Handles the failure of the set. `Ok`: from now on the volume is served without the set.
pub(super) async fn handle_failed_cache(target: Target<'_>) -> Result<(), EngineError> {
    let Target { volume, cache, inode } = target;
    let _one = volume.failure_handling.lock().await;
    if volume.attached().is_none() {
        // Another request has handled it.
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
    };
    backing.update(changed).await?;
    backing.emit_state(backing.state(), &cache.device);
    volume.detached();
    Ok(())
}
