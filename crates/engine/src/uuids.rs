//! The UUID table, which maps devices to slots.
//!
//! Owns the table in memory and writes it: as a whole, to a new bucket, effective with the next journal entry (format
//! section 7). An invalid slot is reused when the index has no key of it any more, which the caller tells. Changes are
//! made one at a time ([`UuidTable::begin_change`]).
//!
//! Invariant: a task that waits for a bucket or for room in the journal does not hold the lock. The registration of a
//! device with dirty data needs the lock, and in a full cache only the writeback of this data makes a bucket free.

use std::cell::{Ref, RefCell};
use std::rc::Rc;

use format::{Bkey, BucketNr, Inode, Ptr, Uuid, UuidEntry};
use io::sync::{Mutex, Permit};

use crate::alloc::Allocator;
use crate::device::CacheDevice;
use crate::error::EngineError;
use crate::journal::{Journal, Urgency};
use crate::refusal::Refusal;

/// The lock of the table, and the bucket for the next table.
pub(crate) struct TableChange<'a> {
    table: &'a UuidTable,
    /// `None` after the bucket was used.
    bucket: Option<BucketNr>,
    _lock: Permit,
}

impl TableChange<'_> {
    /// Changes the table and waits until it is durable. The lock is held until `self` is dropped.
    pub(crate) async fn apply(
        &mut self,
        change: impl FnOnce(&mut Vec<UuidEntry>),
    ) -> Result<(), EngineError> {
        let bucket = self.bucket.take().expect("a change is applied once");
        self.table.write(bucket, change).await
    }
}

impl Drop for TableChange<'_> {
    fn drop(&mut self) {
        if let Some(bucket) = self.bucket {
            self.table.alloc.give_back(&[bucket]);
        }
    }
}

/// The UUID table of one cache set.
pub(crate) struct UuidTable {
    device: Rc<CacheDevice>,
    journal: Rc<Journal>,
    alloc: Rc<Allocator>,
    entries: RefCell<Vec<UuidEntry>>,
    lock: Mutex,
}

impl UuidTable {
    /// Makes the table that recovery has read.
    pub(crate) fn new(
        device: Rc<CacheDevice>,
        journal: Rc<Journal>,
        alloc: Rc<Allocator>,
        entries: Vec<UuidEntry>,
    ) -> UuidTable {
        UuidTable { device, journal, alloc, entries: RefCell::new(entries), lock: Mutex::default() }
    }

    /// Takes the lock under which the table and the cache superblock are changed, one change at a time.
    pub(crate) async fn lock(&self) -> Permit {
        self.lock.lock().await
    }

    /// Every slot, in order.
    pub(crate) fn entries(&self) -> Ref<'_, Vec<UuidEntry>> {
        self.entries.borrow()
    }

    /// Label of the device or volume in a slot, or its UUID.
    pub(crate) fn name_of(&self, inode: Inode) -> String {
        let entries = self.entries.borrow();
        let entry = entries.get(inode.0 as usize);
        let label = entry.map(UuidEntry::label).filter(|label| !label.is_empty());
        label.or_else(|| entry.map(|e| e.uuid.to_string())).unwrap_or_default()
    }

    /// The slot of a device.
    pub(crate) fn slot_of(&self, uuid: Uuid) -> Option<Inode> {
        let entries = self.entries.borrow();
        entries.iter().position(|u| u.is_live() && u.uuid == uuid).map(|i| Inode(i as u32))
    }

    /// The UUID of the device or volume that has a slot.
    pub(crate) fn uuid_of(&self, inode: Inode) -> Option<Uuid> {
        let entries = self.entries.borrow();
        entries.get(inode.0 as usize).filter(|u| u.is_live()).map(|u| u.uuid)
    }

    /// Whether a device or volume has the slot.
    pub(crate) fn is_live(&self, inode: Inode) -> bool {
        self.entries.borrow().get(inode.0 as usize).is_some_and(UuidEntry::is_live)
    }

    /// A free slot: one that was never used, or an invalid one without keys. `has_keys` tells whether the index may
    /// have keys of a slot.
    pub(crate) fn free_slot(&self, has_keys: impl Fn(Inode) -> bool) -> Option<Inode> {
        let entries = self.entries.borrow();
        let reusable = |i: usize| entries[i].is_invalidated() && !has_keys(Inode(i as u32));
        let free = (0..entries.len()).find(|i| entries[*i].is_free());
        free.or_else(|| (0..entries.len()).find(|i| reusable(*i))).map(|i| Inode(i as u32))
    }

    /// Waits until a bucket for a new table is ready and the journal has room for the entry that names it, and takes the bucket
    /// together with the lock. The table may have changed since the call.
    ///
    /// # Errors
    /// If the set stops or has failed.
    pub(crate) async fn begin_change(&self) -> Result<TableChange<'_>, EngineError> {
        let gives_up = || self.device.is_stopping();
        loop {
            let lock = self.lock.lock().await;
            self.device.check()?;
            if gives_up() {
                return Err(Refusal::Stopping.into());
            }
            if !self.journal.has_room_for_roots() {
                drop(lock);
                self.journal.wait_room_for_roots(gives_up).await;
                continue;
            }
            if let Some(bucket) = self.alloc.try_take_btree_bucket() {
                return Ok(TableChange { table: self, bucket: Some(bucket), _lock: lock });
            }
            drop(lock);
            self.alloc.btree_bucket_ready(gives_up).await;
        }
    }

    /// Changes the table if a bucket for it is ready and the journal has room; returns false otherwise.
    pub(crate) async fn update_if_room(
        &self,
        change: impl FnOnce(&mut Vec<UuidEntry>),
    ) -> Result<bool, EngineError> {
        self.device.check()?;
        if !self.journal.has_room_for_roots() {
            return Ok(false);
        }
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
        // The journal had room before the table was written. If other entries have taken it since, this entry uses a block of
        // the reserve, because a wait under the lock could last for ever.
        self.journal.commit_roots(|| Urgency::Frees, |r| r.uuid_bucket = key).await?;
        match old.pointer() {
            Some(p) => self.alloc.free_metadata(p),
            None => self.alloc.recheck(),
        }
        Ok(())
    }
}
