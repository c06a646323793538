//! Footers on the device: reading, writing, and replacing them by zeros.
//!
//! Owns the order of a footer and the data that it describes (decision 034). Must not know why data is overwritten.

use std::rc::Rc;

use format::{BlockSums, BucketNr, FooterId, Gen, Ptr, Sectors, encode_footer, parse_footer};

use super::sums::{BucketSums, FooterState, ReadSum, SumsTable};
use super::{CachedData, Checksums};
use crate::alloc::Buckets;
use crate::canary::{Bug, bug};
use crate::error::EngineError;

/// The number of footers that a stop writes at the same time.
const AT_ONCE: usize = 64;

/// Writes the footers of buckets whose last write has ended.
pub(crate) async fn footer_task(data: Rc<CachedData>) {
    loop {
        data.alloc.idle_buckets().wait_until(|| data.device.is_stopping()).await;
        if data.device.is_stopping() {
            return;
        }
        for bucket in data.alloc.idle_buckets().take() {
            data.write_footer(bucket, false).await;
        }
    }
}

impl CachedData {
    /// Closes the open buckets, and writes all footers that the device does not have. No data is written meanwhile or
    /// afterwards.
    pub(crate) async fn write_all_footers(self: &Rc<Self>) {
        let Some(sums) = &self.sums else { return };
        self.alloc.close_all();
        let missing: Vec<BucketNr> = sums.table.borrow().without_footer().collect();
        let rt = self.device.disk().runtime();
        for some in missing.chunks(AT_ONCE) {
            let write = |bucket: &BucketNr| {
                let (data, bucket) = (self.clone(), *bucket);
                rt.spawn(async move { data.write_footer(bucket, true).await })
            };
            let writes: Vec<_> = some.iter().map(write).collect();
            for write in writes {
                write.await;
            }
            if self.device.is_failed() {
                return;
            }
        }
    }

    /// Writes the footer of a bucket if it is due ([`Self::due_footer`]) and the generation of the bucket is durable or can be made
    /// durable. The device counts a write that fails.
    ///
    /// Without a durable generation, the bucket could lose its keys and have the generation before it at the next start. A kernel,
    /// which ignores footers, would then fill it with the generation of the footer.
    async fn write_footer(&self, bucket: BucketNr, last: bool) {
        let Some(sums) = &self.sums else { return };
        if self.due_footer(sums, bucket, last).is_none() || !self.alloc.store_generation(bucket).await {
            return;
        }
        if let Some(generation) = self.begin_footer(sums, bucket, last) {
            let id = FooterId { set_uuid: sums.set_uuid, bucket, generation };
            let _ = self.put_footer(sums, id, (FooterState::Absent, false)).await;
        }
    }

    /// Writes the footer of a bucket whose state is [`FooterState::Changing`], and was `before`, behind a flush of its last
    /// overwriting in place.
    ///
    /// A footer that it replaces is right about the data, too, and a torn one is not valid, so a crash at any moment is harmless.
    async fn put_footer(
        &self,
        sums: &Checksums,
        id: FooterId,
        (before, durable): (FooterState, bool),
    ) -> Result<(), EngineError> {
        // A pinned bucket is not reused, so the footer cannot end in the data of a later use.
        self.alloc.pin(id.bucket);
        let entry = |table: &mut SumsTable| table.get_mut(id.bucket, id.generation).map(|e| e.overwritten);
        let overwritten = entry(&mut sums.table.borrow_mut()).unwrap_or_default();
        // An overwriting in place may still be in the volatile cache of the device, and the data before it durable.
        let flushed = match bug(Bug::FooterBeforeOverwrite) {
            true => Ok(()),
            false => self.device.flush(overwritten).await,
        };
        let bytes = {
            let mut table = sums.table.borrow_mut();
            let entry = table.get_mut(id.bucket, id.generation).filter(|_| flushed.is_ok());
            entry.map(|e| encode_footer(&sums.layout, sums.key, id, &e.sums))
        };
        let is_flushed = flushed.is_ok();
        let mut result = flushed;
        if let Some(bytes) = bytes {
            let (sector, _) = sums.layout.place(self.device.geometry().bucket_start(id.bucket));
            let buffer = self.device.disk().runtime().pool().copy_of(&bytes);
            let written = self.device.disk().write(sector, buffer, durable).await;
            self.device.wrote();
            self.device.observe_data(&written);
            sums.count(|c| c.footers_written += 1);
            result = written.map_err(EngineError::from);
        }
        if let Some(entry) = sums.table.borrow_mut().get_mut(id.bucket, id.generation) {
            // A write that has failed may have reached the device.
            entry.footer = if is_flushed { FooterState::Written } else { before };
            entry.reopened &= !is_flushed;
        }
        self.alloc.unpin(id.bucket);
        result
    }

    /// Writes the footer of a bucket that has none, if a block of it is known to be damaged: without it a crash would make that
    /// unknown.
    pub(crate) async fn write_footer_of_damaged(&self, at: Ptr) {
        if self.is_damaged_beside(at, Sectors::ZERO) {
            let bucket = self.alloc.buckets().bucket_of(at);
            self.write_footer(bucket, true).await;
        }
    }

    /// Whether a footer is to be written: the device has none, no write to the bucket is under way, and it has live data.
    /// Returns the generation of the bucket. A bucket that was reopened gets its footer only at a stop (`last`): otherwise each
    /// overwriting in place could cost two more requests.
    fn due_footer(&self, sums: &Checksums, bucket: BucketNr, last: bool) -> Option<Gen> {
        let buckets = self.alloc.buckets();
        let mut table = sums.table.borrow_mut();
        if buckets.pins(bucket) > 0 || !has_room(&buckets, bucket) {
            return None;
        }
        if buckets.live(bucket) == Sectors::ZERO {
            table.remove(bucket);
            return None;
        }
        let generation = buckets.generation(bucket);
        let is_due = |e: &&mut BucketSums| {
            e.footer == FooterState::Absent && (last || !e.reopened) && e.sums.known() > 0
        };
        table.get_mut(bucket, generation).filter(is_due).map(|_| generation)
    }

    /// Begins the write of a footer that is due.
    fn begin_footer(&self, sums: &Checksums, bucket: BucketNr, last: bool) -> Option<Gen> {
        let generation = self.due_footer(sums, bucket, last)?;
        if !self.alloc.is_stored(bucket) {
            return None;
        }
        sums.table.borrow_mut().get_mut(bucket, generation)?.footer = FooterState::Changing;
        Some(generation)
    }

    /// Reads the footer of the bucket of `ptr` into the table. A bucket without a footer has no known checksums. After an error
    /// the table has nothing.
    pub(super) async fn load_footer(&self, sums: &Checksums, ptr: Ptr) {
        let id = sums.id(&self.alloc, ptr);
        if !has_room(&self.alloc.buckets(), id.bucket) {
            sums.without_footer(id, ptr);
            return;
        }
        let (sector, size) = sums.layout.place(self.device.geometry().bucket_start(id.bucket));
        loop {
            let (changes, drops) = (sums.changes.get(), sums.table.borrow().drops());
            let buffer = self.device.disk().runtime().pool().take(size.bytes() as usize);
            let (bytes, read) = self.device.disk().read(sector, buffer).await;
            sums.count(|c| c.footers_read += 1);
            self.device.observe_data(&read);
            let is_known = sums.table.borrow_mut().of_ptr(ptr).is_some();
            if read.is_err() || is_known || !self.alloc.buckets().is_current(ptr) {
                return;
            }
            // A footer that is changed has its sums in the table. If the table has dropped none since then, another footer was
            // changed.
            if sums.changes.get() == changes || sums.table.borrow().drops() == drops {
                return sums.loaded(id, bytes.as_slice());
            }
        }
    }

    /// Makes the checksums of blocks of one bucket known that a reader has computed, and writes the footer if the bucket can
    /// have one now. `replaces`: also replaces known checksums, and the footer that replaces another one is durable afterwards.
    /// Returns the number of new checksums, which is 0 if the blocks may have been overwritten since they were read.
    ///
    /// # Errors
    /// If the footer cannot be written. Without it, the checksums are known as long as the process runs.
    pub(crate) async fn learn(&self, found: &[ReadSum], replaces: bool) -> Result<u64, EngineError> {
        let (Some(sums), Some(first)) = (&self.sums, found.first()) else { return Ok(0) };
        if !self.alloc.buckets().is_current(first.at) {
            return Ok(0);
        }
        let id = sums.id(&self.alloc, first.at);
        let is_stored = self.alloc.store_generation(id.bucket).await;
        if !self.alloc.buckets().is_current(first.at) {
            return Ok(0);
        }
        match sums.learn(found, replaces, is_stored) {
            None => Ok(0),
            Some((FooterState::Written, 0)) => Ok(0),
            Some((before @ FooterState::Written, new)) => {
                sums.changes.set(sums.changes.get() + 1);
                self.put_footer(sums, id, (before, replaces)).await.map(|()| new)
            }
            Some((_, new)) => {
                self.write_footer(id.bucket, true).await;
                Ok(new)
            }
        }
    }
}

/// Whether the last blocks of a bucket are free for a footer. A kernel that has filled the bucket has put data there.
fn has_room(buckets: &Buckets, bucket: BucketNr) -> bool {
    buckets.has_footer_room(bucket) || bug(Bug::FooterOverData)
}

impl Checksums {
    /// See [`CachedData::begin_overwrite`].
    pub(super) async fn prepare_overwrite(&self, data: &CachedData, at: Ptr, new: &[u8]) -> bool {
        let id = self.id(&data.alloc, at);
        if self.table.borrow_mut().of_ptr(at).is_none() {
            // Otherwise the other blocks of the bucket would lose their checksums with the footer.
            data.load_footer(self, at).await;
        }
        let state = self.table.borrow_mut().of_ptr(at).map(|e| e.footer);
        match state {
            Some(FooterState::Absent) => {}
            None if !has_room(&data.alloc.buckets(), id.bucket) => self.without_footer(id, at),
            Some(FooterState::Changing) => return false,
            Some(FooterState::Written) | None if bug(Bug::FooterLeftAtOverwrite) => {}
            Some(FooterState::Written) | None => {
                if !self.erase(data, id, at).await {
                    return false;
                }
            }
        }
        let mut table = self.table.borrow_mut();
        if let Some(entry) = table.of_ptr(at) {
            if bug(Bug::FooterLeftAtOverwrite) {
                entry.footer = FooterState::Absent;
            }
            if entry.footer != FooterState::Absent {
                return false;
            }
        }
        table.overwrites(at, new);
        true
    }

    /// Learns checksums ([`SumsTable::learn`]). A footer that may be on the device cannot follow if `is_stored` is false; then
    /// nothing is learnt.
    fn learn(&self, found: &[ReadSum], replaces: bool, is_stored: bool) -> Option<(FooterState, u64)> {
        let table = &mut *self.table.borrow_mut();
        let footer = table.of_ptr(found.first()?.at)?.footer;
        if footer == FooterState::Written && !is_stored { None } else { table.learn(found, replaces) }
    }

    /// Puts what the device has returned in the place of a footer into the table.
    fn loaded(&self, id: FooterId, bytes: &[u8]) {
        let (sums, footer) = match parse_footer(&self.layout, self.key, id, bytes) {
            Ok(found) => (found, FooterState::Written),
            // The device may still have an older state of this block durably, with a footer that a wipe has overwritten. The
            // first overwriting in place replaces it by zeros, durably.
            Err(_) => {
                let unknown = BlockSums::unknown(self.layout.blocks());
                let footer = match bug(Bug::MissingFooterTakenForAbsent) {
                    true => FooterState::Absent,
                    false => FooterState::Written,
                };
                (unknown, footer)
            }
        };
        self.table.borrow_mut().put(id.bucket, id.generation, sums, footer);
    }

    /// Puts into the table that a bucket has no footer, and no known checksum. That is no reason to write a footer before the
    /// stop.
    fn without_footer(&self, id: FooterId, at: Ptr) {
        let mut table = self.table.borrow_mut();
        table.put(id.bucket, id.generation, BlockSums::unknown(self.layout.blocks()), FooterState::Absent);
        if let Some(entry) = table.of_ptr(at) {
            entry.reopened = true;
        }
    }

    /// Replaces the footer of a bucket by zeros, durably. Returns whether the device has done so.
    async fn erase(&self, data: &CachedData, id: FooterId, at: Ptr) -> bool {
        {
            let mut table = self.table.borrow_mut();
            if table.of_ptr(at).is_none() {
                let unknown = BlockSums::unknown(self.layout.blocks());
                table.put(id.bucket, id.generation, unknown, FooterState::Changing);
            }
            if let Some(entry) = table.of_ptr(at) {
                entry.footer = FooterState::Changing;
            }
        }
        self.changes.set(self.changes.get() + 1);
        let (sector, _) = self.layout.place(data.device.geometry().bucket_start(id.bucket));
        // The first block has the checksum of the footer.
        let bytes = self.layout.block_sectors().bytes() as usize;
        let zeros = data.device.disk().runtime().pool().zeroed(bytes);
        let written = data.device.disk().write(sector, zeros, true).await;
        data.device.observe_data(&written);
        self.count(|c| c.footers_erased += 1);
        if let Some(entry) = self.table.borrow_mut().of_ptr(at) {
            entry.footer = if written.is_ok() { FooterState::Absent } else { FooterState::Written };
            entry.reopened = true;
        }
        written.is_ok()
    }
}

#[cfg(test)]
mod tests;
