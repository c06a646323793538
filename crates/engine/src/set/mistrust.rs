//! Backing devices of which a flush failed.
//!
//! Such a device may have dropped what clients wrote past the cache, and a later flush that succeeds does not bring it
//! back. Clean copies of these writes would then be newer than the device: they could be read until their bucket is
//! used again, and the older data after that. So from the failure on until the set starts again no clean copy of the
//! device enters a leaf on disk, and what leaves in memory have of it is dropped when they are written.
//!
//! Dropped from memory, such copies may still be on disk, with their keys in a leaf or in the journal: before such a device is
//! written to past the cache, a hole goes through the journal, whatever the index says.
//!
//! Invariant: a set of a leaf that has keys which are not journaled is written only if [`Mistrust::epoch`] did not
//! change between the moment when its keys were taken and the end of the flushes.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;

use format::Inode;

/// The devices, by slot.
#[derive(Default)]
pub(crate) struct Mistrust {
    inodes: RefCell<BTreeSet<Inode>>,
    epoch: Cell<Epoch>,
}

/// Changes whenever a device loses the trust.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Epoch(u64);

impl Mistrust {
    pub(crate) fn epoch(&self) -> Epoch {
        self.epoch.get()
    }

    pub(crate) fn contains(&self, inode: Inode) -> bool {
        let inodes = self.inodes.borrow();
        !inodes.is_empty() && inodes.contains(&inode)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.inodes.borrow().is_empty()
    }

    /// A flush of the device failed.
    pub(crate) fn add(&self, inode: Inode) {
        if self.inodes.borrow_mut().insert(inode) {
            self.epoch.set(Epoch(self.epoch.get().0 + 1));
        }
    }

    /// Another device has the slot, or the same one anew: its first flush is still to come.
    pub(crate) fn forget(&self, inode: Inode) {
        self.inodes.borrow_mut().remove(&inode);
    }
}
