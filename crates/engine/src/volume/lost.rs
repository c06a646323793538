//! What happens to a volume when its cache fails (semantics section 15.1, without the defects 1 and 18
//! of docs/compat.md).
//!
//! A device without dirty data goes on alone, but only after its superblock durably says stale: should the cache come
//! back later, its old content is void. A device with dirty data, or a flash-only volume, fails every request.

use format::{BackingState, BackingSuper, Sectors};

use super::Target;
use crate::canary::{Bug, Mark, bug, mark};
use crate::error::EngineError;
use crate::events::SetEvent;
use crate::tunables::StopWhenFailed;

/// The set has failed. `Ok`: the volume is served without it from now on.
pub(super) async fn cache_lost(target: Target<'_>) -> Result<(), EngineError> {
    let Target { volume, cache, inode } = target;
    let _one = volume.lost.lock().await;
    if volume.attached().is_none() {
        // Another request has done it.
        return Ok(());
    }
    let failure =
        cache.device.check().err().unwrap_or_else(|| EngineError::Invalid("the set has failed".into()));
    let Some(backing) = volume.backing() else { return Err(failure) };
    let dirty = cache.index.tree().dirty_sectors(inode);
    let always = volume.tunables.borrow().stop_when_cache_set_failed == StopWhenFailed::Always;
    if dirty > Sectors::ZERO || always {
        mark(Mark::LostDirty);
        return Err(failure);
    }
    // Data written back may still be on its way to the medium, and it counts as clean from now on.
    backing.gate.ensure(backing.gate.latest()).await?;
    let changed = |sb: &mut BackingSuper| {
        // One that was being detached may already be free of the set.
        if sb.state() == BackingState::None {
            mark(Mark::LostDetached);
        } else if !bug(Bug::LostButNotStale) {
            mark(Mark::LostClean);
            sb.set_state(BackingState::Stale);
        }
    };
    backing.update(changed).await?;
    let state = if backing.state() == BackingState::None { "no cache" } else { "inconsistent" };
    cache.device.emit(SetEvent::State { device: backing.disk.info().name.to_string(), state });
    volume.detached();
    Ok(())
}
