//! Copies of the dirty data of a device in a second set (format section 17).
//!
//! Owns the rule which copy is valid, as far as the devices tell. Must not know how a copy is made.

use format::{BackingSuper, SlotRole};

use crate::view::SetView;
use crate::view::Slot;

/// Whether a set has a valid copy of all dirty data of a device that belongs to another set. `primary`: that set, if its cache device is
/// there; it knows whether another program has used it alone since.
pub fn has_copy(view: &SetView, primary: Option<&SetView>, backing: &BackingSuper) -> bool {
    let Some(slot) = slot_of(view, backing) else { return false };
    let Some(SlotRole::Secondary { primary: named, copy }) = slot.role else { return false };
    let is_newest = backing.copy() == Some(copy) && slot.registrations.contains(&backing.registration());
    named == backing.set_uuid() && is_newest && primary.is_none_or(|p| is_unused_by_others(p, backing))
}

fn is_unused_by_others(primary: &SetView, backing: &BackingSuper) -> bool {
    match slot_of(primary, backing).and_then(|slot| slot.role) {
        Some(SlotRole::Primary { other_uses, .. }) => primary.superblock.other_uses() == Some(other_uses),
        _ => false,
    }
}

fn slot_of<'a>(view: &'a SetView, backing: &BackingSuper) -> Option<&'a Slot> {
    view.slots.values().find(|slot| slot.is_backing() && slot.uuid == backing.uuid())
}
