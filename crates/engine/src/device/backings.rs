//! The backing devices of a set, by slot, and which of them failed a flush.
//!
//! A device that failed a flush may have dropped what clients wrote past the cache, and a later flush that succeeds does
//! not bring it back. A clean copy of such a write would be newer than the device: reads would return it until its bucket
//! is reused, and older data after that. From the failure until the next start, no new clean copy of the device is made, and
//! the copies whose keys no set of a leaf has yet become holes (`index::copies`). Copies on disk stay: the device had
//! flushed what they are copies of before their keys were written.
//!
//! Must not know why a flush failed.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use format::{Inode, Sectors};

use super::{BackingDevice, Tick};
use crate::policy::cost::Costs;

/// See the module head.
#[derive(Default)]
pub(crate) struct BackingDevices {
    by_slot: RefCell<BTreeMap<Inode, Rc<BackingDevice>>>,
    failed_flushes: RefCell<BTreeSet<Inode>>,
}

impl BackingDevices {
    /// A device was registered in this slot. Its first flush is still to come, whatever another device in the slot, or the
    /// same one before, did.
    pub(crate) fn add(&self, inode: Inode, device: Rc<BackingDevice>) {
        self.failed_flushes.borrow_mut().remove(&inode);
        self.by_slot.borrow_mut().insert(inode, device);
    }

    /// The slot has no device any more, if it still has this one.
    pub(crate) fn remove(&self, inode: Inode, device: &Rc<BackingDevice>) {
        let by_slot = &mut *self.by_slot.borrow_mut();
        if by_slot.get(&inode).is_some_and(|d| Rc::ptr_eq(d, device)) {
            by_slot.remove(&inode);
        }
    }

    /// The set is gone.
    pub(crate) fn clear(&self) {
        self.by_slot.borrow_mut().clear();
    }

    /// The device in this slot.
    pub(crate) fn get(&self, inode: Inode) -> Option<Rc<BackingDevice>> {
        self.by_slot.borrow().get(&inode).cloned()
    }

    /// All devices, in the order of their slots.
    pub(crate) fn all(&self) -> Vec<Rc<BackingDevice>> {
        self.by_slot.borrow().values().cloned().collect()
    }

    /// Whether the slot has a device.
    pub(crate) fn has(&self, inode: Inode) -> bool {
        self.by_slot.borrow().contains_key(&inode)
    }

    /// What they can hold together.
    pub(crate) fn data_sectors(&self) -> Sectors {
        self.by_slot.borrow().values().fold(Sectors::ZERO, |n, d| n + d.data_sectors())
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.by_slot.borrow().len()
    }

    /// Whether the costs of any device are known, whose data is admitted by its costs, and `worth` holds for them.
    pub(crate) fn any_by_cost(&self, worth: impl Fn(Costs) -> bool) -> bool {
        self.by_slot.borrow().values().filter(|d| d.admits_by_cost()).any(|d| {
            let (known, costs) = d.meter.model(|m| (m.is_known(), m.costs()));
            known && worth(costs)
        })
    }

    /// Up to where a device must have been flushed before a copy of its present contents is named on disk.
    pub(crate) fn direct_tick(&self, inode: Inode) -> Option<Tick> {
        self.by_slot.borrow().get(&inode).map(|d| d.direct_tick())
    }

    /// Whether a device has flushed everything up to `tick`. A device that is gone was settled before it went.
    pub(crate) fn is_durable(&self, inode: Inode, tick: Tick) -> bool {
        self.by_slot.borrow().get(&inode).is_none_or(|d| d.is_durable(tick))
    }

    /// Whether the device in this slot failed a flush.
    pub(crate) fn flush_has_failed(&self, inode: Inode) -> bool {
        let failed = self.failed_flushes.borrow();
        !failed.is_empty() && failed.contains(&inode)
    }

    /// A flush of the device in this slot failed.
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
