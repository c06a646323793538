//! The backing devices of a set, by slot, and the record of those that have failed a flush.
//!
//! A device that failed a flush may have lost writes past the cache, and a later successful flush does not bring them
//! back. A clean copy of such a write would be newer than the data on the device: reads would return the copy until its
//! bucket is evicted, and older data after that. Therefore from the failure until the next start no new clean copy of
//! data of the device is made, and copies whose keys are in no bset yet become holes (`index::copies`). Copies on disk
//! stay, because the device had flushed the copied data before their keys were written.
//!
//! A set that is the second one of a volume may have clean data of its device. It knows the device as *copied*: the same rules hold, but
//! another set writes its dirty data back.
//!
//! Must not know why a flush failed.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use format::{Inode, Sectors};

use super::{BackingDevice, Tick};
use crate::canary::{Bug, bug};
use crate::policy::cost::Costs;

/// The backing device of a slot.
struct InSlot {
    device: Rc<BackingDevice>,
    /// Whether another set writes the dirty data of the device back.
    is_copied: bool,
}

/// The backing devices of a set, by slot.
#[derive(Default)]
pub(crate) struct BackingDevices {
    by_slot: RefCell<BTreeMap<Inode, InSlot>>,
    failed_flushes: RefCell<BTreeSet<Inode>>,
}

impl BackingDevices {
    /// Adds a device that was registered in this slot, and forgets failed flushes of an earlier device of the slot.
    pub(crate) fn add(&self, inode: Inode, device: Rc<BackingDevice>) {
        self.failed_flushes.borrow_mut().remove(&inode);
        self.by_slot.borrow_mut().insert(inode, InSlot { device, is_copied: false });
    }

    /// Adds a device that another set writes back; see [`BackingDevices::add`].
    pub(crate) fn add_copied(&self, inode: Inode, device: Rc<BackingDevice>) {
        self.failed_flushes.borrow_mut().remove(&inode);
        self.by_slot.borrow_mut().insert(inode, InSlot { device, is_copied: true });
    }

    /// Removes this device from the slot, if the slot still has it.
    pub(crate) fn remove(&self, inode: Inode, device: &Rc<BackingDevice>) {
        let by_slot = &mut *self.by_slot.borrow_mut();
        if by_slot.get(&inode).is_some_and(|d| Rc::ptr_eq(&d.device, device)) {
            by_slot.remove(&inode);
        }
    }

    /// Removes all devices.
    pub(crate) fn clear(&self) {
        self.by_slot.borrow_mut().clear();
    }

    /// The device in this slot.
    pub(crate) fn get(&self, inode: Inode) -> Option<Rc<BackingDevice>> {
        self.by_slot.borrow().get(&inode).map(|d| d.device.clone())
    }

    /// All devices, in the order of their slots.
    pub(crate) fn all(&self) -> Vec<Rc<BackingDevice>> {
        self.by_slot.borrow().values().map(|d| d.device.clone()).collect()
    }

    /// Whether this set writes the dirty data of the slot back.
    pub(crate) fn writes_back(&self, inode: Inode) -> bool {
        self.by_slot.borrow().get(&inode).is_some_and(|d| !d.is_copied)
    }

    /// The number of devices that this set writes back, and the sum of their data sectors.
    pub(crate) fn written_back(&self) -> (usize, Sectors) {
        let by_slot = self.by_slot.borrow();
        let own = by_slot.values().filter(|d| !d.is_copied);
        own.fold((0, Sectors::ZERO), |(n, sectors), d| (n + 1, sectors + d.device.data_sectors()))
    }

    /// Whether `worth` is true for the known costs of any device with the tunable `admission` set to `cost`.
    pub(crate) fn any_by_cost(&self, worth: impl Fn(Costs) -> bool) -> bool {
        self.by_slot.borrow().values().filter(|d| d.device.admits_by_cost()).any(|d| {
            let (known, costs) = d.device.model(|m| (m.is_known(), m.costs()));
            known && worth(costs)
        })
    }

    /// The tick up to which a device must have flushed before a bset names a copy of its present content.
    pub(crate) fn content_tick(&self, inode: Inode) -> Option<Tick> {
        self.by_slot.borrow().get(&inode).map(|d| d.device.content_tick())
    }

    /// Whether a device has flushed every write up to `tick`; true if the slot has no device, because a device is
    /// flushed before it is removed.
    pub(crate) fn is_durable(&self, inode: Inode, tick: Tick) -> bool {
        self.by_slot.borrow().get(&inode).is_none_or(|d| d.device.is_durable(tick))
    }

    /// Whether the device in this slot failed a flush.
    pub(crate) fn flush_has_failed(&self, inode: Inode) -> bool {
        let reported = self.by_slot.borrow().get(&inode).is_some_and(|d| d.device.flush_has_failed());
        let failed = self.failed_flushes.borrow();
        reported && !bug(Bug::WritebackFlushUnknownToCopies) || !failed.is_empty() && failed.contains(&inode)
    }

    /// Records that a flush of the device in this slot failed.
    pub(crate) fn flush_failed(&self, inode: Inode) {
        self.failed_flushes.borrow_mut().insert(inode);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{TestDisk, backing_device, run};

    #[test]
    fn a_failed_flush_is_remembered_until_the_slot_has_another_device() {
        run(|rt| async move {
            let devices = BackingDevices::default();
            let failed = || [1, 2, 3].map(|n| devices.flush_has_failed(Inode(n)));
            assert_eq!(failed(), [false; 3]);
            devices.flush_failed(Inode(2));
            assert_eq!(failed(), [false, true, false]);
            devices.flush_failed(Inode(3));
            devices.flush_failed(Inode(2));
            assert_eq!(failed(), [false, true, true]);
            devices.add(Inode(2), backing_device(&TestDisk::new(2048), &rt));
            assert_eq!(failed(), [false, false, true], "another device has the slot");
        });
    }
}
