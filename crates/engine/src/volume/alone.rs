//! Backing devices without their cache: served alone, or taken out of their set.
//!
//! Owns the rule that a device with dirty data in a cache is not separated from it by accident. Must not know requests.

use std::rc::Rc;

use format::{BackingState, BackingSuper, Uuid};
use io::Disk;

use super::{Area, Volume};
use crate::canary::{Mark, mark};
use crate::device::BackingDevice;
use crate::error::EngineError;
use crate::refusal::DeviceRefusal;

/// See [`Volume::pass_through`].
pub(super) async fn pass_through(disk: Disk, lose_dirty: bool) -> Result<Rc<Volume>, EngineError> {
    let backing = BackingDevice::open(disk).await?;
    let name = backing.disk().info().name.clone();
    match backing.state() {
        BackingState::Dirty if !lose_dirty => {
            mark(Mark::AloneRefused);
            return Err(DeviceRefusal::dirty_in_set(backing.set_uuid(), &name).into());
        }
        BackingState::Clean | BackingState::Dirty => {
            mark(Mark::AloneStale);
            backing.update(|sb| sb.set_state(BackingState::Stale)).await?;
        }
        BackingState::None | BackingState::Stale => mark(Mark::AloneFree),
    }
    let (area, label) = (Area::of(&backing), backing.label());
    Ok(Volume::new(backing.disk().runtime().clone(), area, None, Some(backing), &label))
}

/// See [`Volume::leave_set`].
pub(super) async fn leave_set(disk: Disk) -> Result<Uuid, EngineError> {
    let backing = BackingDevice::open(disk).await?;
    let set = backing.set_uuid();
    if backing.state() == BackingState::Dirty {
        return Err(DeviceRefusal::dirty_in_set(set, &backing.disk().info().name).into());
    }
    let free = |sb: &mut BackingSuper| {
        sb.set_set_uuid(Uuid::NIL);
        sb.set_state(BackingState::None);
    };
    backing.update(free).await?;
    Ok(set)
}
