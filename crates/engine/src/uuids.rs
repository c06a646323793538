//! The UUID table: which device has which slot.
//!
//! Owns the table in memory and its writing: as a whole, into a bucket of its own, effective with the next journal entry
//! (format section 7). Slots of devices that are gone are used again once no key of theirs is left in the index, which the
//! caller knows. Changes are made one at a time ([`UuidTable::lock`]).

use std::cell::{Ref, RefCell};
use std::rc::Rc;

use format::{Bkey, BucketNr, Inode, Ptr, Uuid, UuidEntry};
use io::sync::{Mutex, Permit};

use crate::alloc::Allocator;
use crate::device::CacheDevice;
use crate::error::EngineError;
use crate::journal::{Journal, Urgency};

/// See the module head.
pub(crate) struct UuidTable {
    device: Rc<CacheDevice>,
    journal: Rc<Journal>,
    alloc: Rc<Allocator>,
    entries: RefCell<Vec<UuidEntry>>,
    lock: Mutex,
}

impl UuidTable {
    /// The table that recovery found.
    pub(crate) fn new(
        device: Rc<CacheDevice>,
        journal: Rc<Journal>,
        alloc: Rc<Allocator>,
        entries: Vec<UuidEntry>,
    ) -> UuidTable {
        UuidTable { device, journal, alloc, entries: RefCell::new(entries), lock: Mutex::default() }
    }

    /// Changes of the table, and of the cache superblock, are made one at a time: while the permit is held.
    pub(crate) async fn lock(&self) -> Permit {
        self.lock.lock().await
    }

    /// Every slot, in order.
    pub(crate) fn entries(&self) -> Ref<'_, Vec<UuidEntry>> {
        self.entries.borrow()
    }

    /// The slot of a device.
    pub(crate) fn slot_of(&self, uuid: Uuid) -> Option<Inode> {
        let entries = self.entries.borrow();
        entries.iter().position(|u| u.is_live() && u.uuid == uuid).map(|i| Inode(i as u32))
    }

    /// Whether a device or volume has the slot.
    pub(crate) fn is_live(&self, inode: Inode) -> bool {
        self.entries.borrow().get(inode.0 as usize).is_some_and(UuidEntry::is_live)
    }

    /// A slot that nothing uses: never used, or given up and without keys. `has_keys` tells the latter.
    pub(crate) fn free_slot(&self, has_keys: impl Fn(Inode) -> bool) -> Option<Inode> {
        let entries = self.entries.borrow();
        let reusable = |i: usize| entries[i].is_invalidated() && !has_keys(Inode(i as u32));
        let free = (0..entries.len()).find(|i| entries[*i].is_free());
        free.or_else(|| (0..entries.len()).find(|i| reusable(*i))).map(|i| Inode(i as u32))
    }

    /// Changes the table and waits until it is durable.
    pub(crate) async fn update(&self, change: impl FnOnce(&mut Vec<UuidEntry>)) -> Result<(), EngineError> {
        let bucket = self.alloc.take_btree_bucket().await?;
        self.write(bucket, change).await
    }

    /// Changes the table if there is a bucket for it now; false if there is none.
    pub(crate) async fn update_if_room(
        &self,
        change: impl FnOnce(&mut Vec<UuidEntry>),
    ) -> Result<bool, EngineError> {
        self.device.check()?;
        let Some(bucket) = self.alloc.try_take_btree_bucket() else { return Ok(false) };
        self.write(bucket, change).await?;
        Ok(true)
    }

    async fn write(
        &self,
        bucket: BucketNr,
        change: impl FnOnce(&mut Vec<UuidEntry>),
    ) -> Result<(), EngineError> {
        let g = self.device.geometry();
        let mut buffer = self.device.disk().runtime().pool().zeroed(g.meta_sectors.bytes() as usize);
        {
            let entries = &mut *self.entries.borrow_mut();
            change(entries);
            format::uuid_table::encode_uuid_table(buffer.as_mut(), entries);
        }
        let ptr = Ptr::new(0, g.bucket_start(bucket), self.alloc.buckets().generation(bucket));
        self.device.write_metadata(ptr.offset(), buffer).await?;
        let old = self.journal.roots().uuid_bucket;
        let key = Bkey::uuid_bucket(g.meta_sectors, ptr);
        self.journal.commit_roots(|| Urgency::CanWait, |r| r.uuid_bucket = key).await?;
        match old.pointer() {
            Some(p) => self.alloc.free_metadata(p),
            None => self.alloc.recheck(),
        }
        Ok(())
    }
}
