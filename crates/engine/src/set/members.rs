//! The volumes of a set, those of other sets whose dirty data it also has, and the devices that are being attached to it.
//!
//! Owns the lists. Invariant: the load of a volume is part of the cache as long as the volume is in the list.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::{Rc, Weak};

use format::{Inode, Uuid};

use crate::volume::{Cache, Volume};

/// The volumes of a set, and the devices that are being attached to it.
pub(super) struct Members {
    cache: Rc<Cache>,
    volumes: RefCell<Vec<Rc<Volume>>>,
    /// Volumes of other sets whose dirty data is in this one, too.
    copies: RefCell<Vec<Weak<Volume>>>,
    /// UUIDs of the devices that are being attached.
    attaching: RefCell<BTreeSet<Uuid>>,
}

impl Members {
    pub(super) fn new(cache: Rc<Cache>) -> Members {
        Members {
            cache,
            volumes: RefCell::default(),
            copies: RefCell::default(),
            attaching: RefCell::default(),
        }
    }

    /// Every volume of the set.
    pub(super) fn volumes(&self) -> Vec<Rc<Volume>> {
        self.volumes.borrow().clone()
    }

    /// The volume of a slot.
    pub(super) fn volume_of(&self, inode: Inode) -> Option<Rc<Volume>> {
        self.volumes.borrow().iter().find(|v| v.inode() == Some(inode)).cloned()
    }

    /// The volume whose data is in a slot: one of this set, or of another one that has its dirty data here, too.
    pub(super) fn with_data_in(&self, inode: Inode) -> Option<Rc<Volume>> {
        let is_copy = |v: &Rc<Volume>| v.mirror().is_some_and(|mirror| mirror.inode == inode);
        self.volume_of(inode).or_else(|| self.copies().into_iter().find(is_copy))
    }

    /// Whether the volume of a backing device is in the set.
    pub(super) fn has_device(&self, device: Uuid) -> bool {
        self.volumes.borrow().iter().any(|v| v.backing_uuid() == Some(device))
    }

    /// Whether a device is being attached.
    pub(super) fn is_attaching(&self, device: Uuid) -> bool {
        self.attaching.borrow().contains(&device)
    }

    /// Keeps other callers from attaching a device with this UUID until the guard is dropped.
    pub(super) fn exclude_attach(self: &Rc<Self>, device: Uuid) -> Attaching {
        self.attaching.borrow_mut().insert(device);
        Attaching { members: self.clone(), device }
    }

    /// Adds a volume to the set.
    pub(super) fn add(&self, volume: Rc<Volume>) {
        // A volume that is opened after a change of the cutoff has the default limit.
        volume.set_cutoff_writeback(self.cache.tunables.borrow().cutoff_writeback);
        self.cache.add_load(volume.load().clone());
        self.volumes.borrow_mut().push(volume);
    }

    /// Adds a volume of another set whose dirty data is in this one, too.
    pub(super) fn add_copy(&self, volume: &Rc<Volume>) {
        let mut copies = self.copies.borrow_mut();
        copies.retain(|v| v.strong_count() > 0);
        copies.push(Rc::downgrade(volume));
    }

    /// Every volume of another set that has its dirty data in this one, too.
    pub(super) fn copies(&self) -> Vec<Rc<Volume>> {
        let all: Vec<Rc<Volume>> = self.copies.borrow().iter().filter_map(Weak::upgrade).collect();
        all.into_iter().filter(|v| v.mirror().is_some_and(|m| Rc::ptr_eq(&m.cache, &self.cache))).collect()
    }

    /// Whether the volume is in the set.
    pub(super) fn has(&self, volume: &Rc<Volume>) -> bool {
        self.volumes.borrow().iter().any(|v| Rc::ptr_eq(v, volume))
    }

    /// Removes a volume from the set.
    pub(super) fn remove(&self, volume: &Rc<Volume>) {
        self.cache.remove_load(volume.load());
        self.volumes.borrow_mut().retain(|v| !Rc::ptr_eq(v, volume));
    }

    /// Removes the volume in this slot and its backing device from the set.
    pub(super) fn remove_with_device(&self, volume: &Rc<Volume>, inode: Inode) {
        self.remove(volume);
        // The slot may have another device by now.
        if let Some(backing) = volume.backing() {
            self.cache.backings.remove(inode, &backing);
        }
    }

    /// Removes all volumes and devices, because they and the set hold references to each other.
    pub(super) fn clear(&self) {
        for v in self.volumes.take() {
            self.cache.remove_load(v.load());
        }
        self.cache.backings.clear();
    }

    /// Wakes every task of a volume that waits.
    pub(super) fn wake(&self) {
        for v in self.volumes.borrow().iter() {
            v.wake();
        }
    }
}

/// Keeps other callers from attaching a device until it is dropped.
pub(super) struct Attaching {
    members: Rc<Members>,
    device: Uuid,
}

impl Drop for Attaching {
    fn drop(&mut self) {
        self.members.attaching.borrow_mut().remove(&self.device);
    }
}
