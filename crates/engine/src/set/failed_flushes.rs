//! Backing devices that failed a flush.
//!
//! Such a device may have dropped what clients wrote past the cache, and a later flush that succeeds does not bring it
//! back. A clean copy of such a write would be newer than the device: reads would return it until its bucket is reused,
//! and older data after that. From the failure until the next start, no new clean copy of the device is made, and the
//! copies whose keys no set of a leaf has yet become holes (`index::copies`). Copies on disk stay: the device had flushed
//! what they are copies of before their keys were written.
//!
//! Must not know why a flush failed.

use std::cell::RefCell;
use std::collections::BTreeSet;

use format::Inode;

/// The devices, by slot.
#[derive(Default)]
pub(crate) struct FailedFlushes {
    inodes: RefCell<BTreeSet<Inode>>,
}

impl FailedFlushes {
    /// Whether the device failed a flush.
    pub(crate) fn contains(&self, inode: Inode) -> bool {
        let inodes = self.inodes.borrow();
        !inodes.is_empty() && inodes.contains(&inode)
    }

    /// A flush of the device failed.
    pub(crate) fn add(&self, inode: Inode) {
        self.inodes.borrow_mut().insert(inode);
    }

    /// Another device has the slot, or the same device was registered again: its first flush is still to come.
    pub(crate) fn forget(&self, inode: Inode) {
        self.inodes.borrow_mut().remove(&inode);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_device_is_remembered_until_it_is_forgotten() {
        let failed = FailedFlushes::default();
        let are = || [1, 2, 3].map(|n| failed.contains(Inode(n)));
        assert_eq!(are(), [false; 3]);
        failed.add(Inode(2));
        assert_eq!(are(), [false, true, false]);
        failed.forget(Inode(1));
        failed.add(Inode(3));
        failed.add(Inode(2));
        assert_eq!(are(), [false, true, true]);
        failed.forget(Inode(2));
        assert_eq!(are(), [false, false, true], "another device has the slot");
    }
}
