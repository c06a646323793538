//! The sets of a volume: the one that caches it, and a second one that also has its dirty data (decision 037).
//!
//! Owns both links and the count of lost sets. Must not know what is recorded on the devices.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use format::{Inode, Sector, Sectors, Uuid};

use super::cache::Cache;
use super::mirror::Mirror;
use crate::canary::{Bug, bug};
use crate::error::EngineError;
use crate::refusal::Refusal;

/// Whether the dirty data of a volume is in a second set, too.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CopyState {
    /// It is in one set only.
    None,
    /// It is being copied.
    Making {
        /// The second set.
        set: Uuid,
        /// The part of the volume, from its beginning on, whose dirty data is in both sets.
        done: Sectors,
        /// The dirty data that is in both sets.
        copied: Sectors,
    },
    /// All of it is in two sets.
    Complete {
        /// The second set.
        set: Uuid,
    },
}

/// The links of a volume to its sets.
pub(super) struct Links {
    /// The set and the slot there, while the volume is attached.
    first: RefCell<Option<(Rc<Cache>, Inode)>>,
    second: RefCell<Option<Rc<Mirror>>>,
    losses: Cell<u32>,
}

impl Links {
    pub(super) fn new(first: Option<(Rc<Cache>, Inode)>) -> Links {
        Links { first: RefCell::new(first), second: RefCell::default(), losses: Cell::new(0) }
    }

    #[inline]
    pub(super) fn first(&self) -> Option<(Rc<Cache>, Inode)> {
        self.first.borrow().clone()
    }

    #[inline]
    pub(super) fn inode(&self) -> Option<Inode> {
        self.first.borrow().as_ref().map(|(_, inode)| *inode)
    }

    pub(super) fn second(&self) -> Option<Rc<Mirror>> {
        self.second.borrow().clone()
    }

    #[inline]
    pub(super) fn has_second(&self) -> bool {
        self.second.borrow().is_some()
    }

    pub(super) fn set_second(&self, mirror: Option<Rc<Mirror>>) {
        *self.second.borrow_mut() = mirror;
    }

    /// How often one of two sets was lost. A request that failed begins again if it has changed meanwhile.
    #[inline]
    pub(super) fn losses(&self) -> u32 {
        self.losses.get()
    }

    /// One of two sets is lost: `first` is the set and slot that remain.
    pub(super) fn lost(&self, first: Option<(Rc<Cache>, Inode)>) {
        *self.first.borrow_mut() = first;
        *self.second.borrow_mut() = None;
        self.losses.set(self.losses.get().wrapping_add(1));
    }

    /// Whether the first set is this one.
    #[inline]
    pub(super) fn is_to(&self, cache: &Rc<Cache>) -> bool {
        self.first.borrow().as_ref().is_some_and(|(c, _)| Rc::ptr_eq(c, cache))
    }

    /// Whether the first set is this one, with this slot.
    #[inline]
    pub(super) fn is_as(&self, cache: &Rc<Cache>, inode: Inode) -> bool {
        self.first.borrow().as_ref().is_some_and(|(c, i)| Rc::ptr_eq(c, cache) && *i == inode)
    }

    /// Refuses a request through a set that the volume does not have any more, if it has another one: the second set has taken over.
    /// Without any set the volume is served from its backing device.
    #[cold]
    pub(super) fn refuse_other(&self, cache: &Rc<Cache>) -> Result<(), EngineError> {
        match &*self.first.borrow() {
            Some((present, _)) if !Rc::ptr_eq(present, cache) && !bug(Bug::TakenOverSetBypassed) => {
                Err(cache.device.check().err().unwrap_or_else(|| Refusal::SetFailed.into()))
            }
            _ => Ok(()),
        }
    }

    /// Whether the operator has disabled the first set.
    pub(super) fn is_disabled(&self) -> bool {
        self.first.borrow().as_ref().is_some_and(|(cache, _)| cache.tunables.borrow().io_disable)
    }

    /// Whether the dirty data of a volume with these positions is in a second set, too.
    pub(super) fn copy_state(&self, (begin, end): (Sector, Sector)) -> CopyState {
        let Some(mirror) = self.second() else { return CopyState::None };
        let set = mirror.cache.device.superblock().set_uuid();
        match mirror.is_copy() {
            true => CopyState::Complete { set },
            false => {
                let copied = mirror.cache.index.tree().dirty_sectors(mirror.inode);
                CopyState::Making { set, done: mirror.copied().min(end).max(begin) - begin, copied }
            }
        }
    }

    /// Removes both links.
    pub(super) fn clear(&self) {
        *self.first.borrow_mut() = None;
        self.clear_second();
    }

    /// Removes the link to the second set.
    pub(super) fn clear_second(&self) {
        let second = self.second.take();
        second.iter().for_each(|mirror| {
            mirror.uncouple();
            mirror.forget_device();
        });
    }
}
