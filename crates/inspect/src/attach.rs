//! The attachment of a backing device to a set.
//!
//! Owns the decision whether the extents of a slot belong to a backing device (step 4 of format section 10).

use format::{BackingState, BackingSuper, Inode};

use crate::view::SetView;

/// The attachment of a backing device to a set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Attachment {
    /// Attached: the extents of the device's slot are its data.
    Attached,
    /// The set has a slot for the device, but the device was detached or ran without its cache. The data of the slot is out of
    /// date and must not be used.
    Invalid,
    /// Attached and dirty, and the cache device does not know the device's last registration: one of the two was restored from
    /// an older copy. The extents of the slot are the data that this cache device has of the device.
    OlderDirty,
    /// Clean, and the cache device does not know the device's last registration: the device ran without its cache. The data of
    /// the slot is out of date and must not be used.
    OlderClean,
    /// The device's superblock names this set, which has no slot for the device: its data in the cache is lost.
    NoSlot,
    /// The device is attached to another set.
    OtherSet,
    /// The device is attached to no set.
    Unattached,
}

/// A backing device and its slot in a set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Relation {
    /// The attachment to the set.
    pub attachment: Attachment,
    /// The slot with the device's UUID, whether or not its extents may be used.
    pub slot: Option<Inode>,
}

impl Relation {
    /// Finds the slot of a backing device, and whether the slot's extents may be used.
    pub fn of(view: &SetView, backing: &BackingSuper) -> Relation {
        let slots = &mut view.slots.iter().filter(|(_, s)| s.is_backing() && s.uuid == backing.uuid());
        let found = slots.next();
        let slot = found.map(|(inode, _)| *inode);
        let older = found.is_some_and(|(_, slot)| slot.is_of_another_registration(backing));
        let ours = backing.set_uuid() == view.superblock.set_uuid();
        let attachment = match (backing.state(), slot) {
            (BackingState::Clean | BackingState::Dirty, _) if !ours => Attachment::OtherSet,
            (BackingState::Dirty, Some(_)) if older => Attachment::OlderDirty,
            (BackingState::Clean, Some(_)) if older => Attachment::OlderClean,
            (BackingState::Clean | BackingState::Dirty, Some(_)) => Attachment::Attached,
            (BackingState::Clean | BackingState::Dirty, None) => Attachment::NoSlot,
            (BackingState::None | BackingState::Stale, Some(_)) => Attachment::Invalid,
            (BackingState::Stale, None) if ours => Attachment::NoSlot,
            (BackingState::Stale, None) => Attachment::OtherSet,
            (BackingState::None, None) => Attachment::Unattached,
        };
        Relation { attachment, slot }
    }

    /// The inode whose extents are the device's data; `None` if none are.
    pub fn attached(&self) -> Option<Inode> {
        self.slot.filter(|_| matches!(self.attachment, Attachment::Attached | Attachment::OlderDirty))
    }
}
