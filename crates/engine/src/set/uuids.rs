//! The UUID table: which device has which slot.
//!
//! Owns writing the table: as a whole, into a bucket of its own, effective with the next journal entry
//! (format section 7). Slots of devices that are gone are used again once no key of theirs is left in the index.

use std::rc::Rc;

use format::{Bkey, BucketNr, Inode, Ptr, Uuid, UuidEntry};

use super::core::Core;
use crate::error::EngineError;
use crate::journal::Urgency;

impl Core {
    /// The slot of a device.
    pub(crate) fn slot_of(&self, uuid: Uuid) -> Option<Inode> {
        let uuids = self.uuids.borrow();
        uuids.iter().position(|u| u.is_live() && u.uuid == uuid).map(|i| Inode(i as u32))
    }

    /// Whether the slot is that of a device of the set. Data of others is not copied: a wipe may have passed the bucket to
    /// which it would go.
    pub(crate) fn is_in_use(&self, inode: Inode) -> bool {
        let is_live = self.uuids.borrow().get(inode.0 as usize).is_some_and(UuidEntry::is_live);
        is_live && !self.index.is_invalid_slot(inode)
    }

    /// A slot that nothing uses: never used, or given up and without keys.
    pub(crate) fn free_slot(&self) -> Option<Inode> {
        let uuids = self.uuids.borrow();
        let reusable = |i: usize| uuids[i].is_invalidated() && !self.index.is_invalid_slot(Inode(i as u32));
        let free = (0..uuids.len()).find(|i| uuids[*i].is_free());
        free.or_else(|| (0..uuids.len()).find(|i| reusable(*i))).map(|i| Inode(i as u32))
    }

    /// The same, after a walk of the index if need be: at first every slot that was given up counts as used, because
    /// keys of it may be left.
    pub(crate) async fn free_slot_after_walk(self: &Rc<Self>) -> Result<Option<Inode>, EngineError> {
        if let Some(inode) = self.free_slot() {
            return Ok(Some(inode));
        }
        crate::gc::collect(self).await?;
        Ok(self.free_slot())
    }

    /// Changes the table and waits until it is durable. The caller holds the config lock.
    pub(crate) async fn update_uuids(
        &self,
        change: impl FnOnce(&mut Vec<UuidEntry>),
    ) -> Result<(), EngineError> {
        let bucket = self.alloc.take_btree_bucket().await?;
        self.write_uuids(bucket, change).await
    }

    /// The same, if there is a bucket for the table now; false if there is none.
    pub(crate) async fn update_uuids_if_room(
        &self,
        change: impl FnOnce(&mut Vec<UuidEntry>),
    ) -> Result<bool, EngineError> {
        self.device.check()?;
        let taken = self.alloc.try_take_btree_bucket();
        let Some(bucket) = taken else { return Ok(false) };
        self.write_uuids(bucket, change).await?;
        Ok(true)
    }

    async fn write_uuids(
        &self,
        bucket: BucketNr,
        change: impl FnOnce(&mut Vec<UuidEntry>),
    ) -> Result<(), EngineError> {
        let mut buffer = self.rt.pool().zeroed(self.geometry.meta_sectors.bytes() as usize);
        {
            let uuids = &mut *self.uuids.borrow_mut();
            change(uuids);
            format::uuid_table::encode_uuid_table(buffer.as_mut(), uuids);
        }
        let ptr = Ptr::new(0, self.geometry.bucket_start(bucket), self.alloc.buckets().generation(bucket));
        self.device.write_metadata(ptr.offset(), buffer).await?;
        let old = self.journal.roots().uuid_bucket;
        let key = Bkey::uuid_bucket(self.geometry.meta_sectors, ptr);
        self.journal.commit_roots(|| Urgency::CanWait, |r| r.uuid_bucket = key).await?;
        if let Some(p) = old.pointer() {
            self.alloc.free_metadata(p);
        }
        Ok(())
    }
}
