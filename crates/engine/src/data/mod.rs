//! The cached data on the cache device: every read and write of it, with checksums if the set has them.
//!
//! Each block that is written gets a checksum in memory ([`sums`]). When the last write to a closed bucket has ended, its
//! checksums are written to the device as a footer ([`footers`]); decision 034 has the rules. A reader checks its data with
//! [`CachedData::verify`].
//!
//! Owns the checksums and the requests for cached data. Must not know the index: the caller decides what becomes of
//! damaged data.
//!
//! Invariants: a footer on the device, valid for the present generation of its bucket, never has a checksum that the
//! durable data of a durable key does not match; while a footer may be on the device, no block of the bucket is
//! overwritten; no valid footer on the device has a generation that is newer than that in the durable prio chain.

mod damaged;
mod footers;
mod sums;

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use format::{BucketNr, FooterId, FooterKey, FooterLayout, Ptr, Sector, Sectors, Uuid};
use io::sync::Event;
use io::{Buffer, IoError, Nanos};

use crate::alloc::{Allocator, Use};
use crate::canary::{Bug, bug};
use crate::device::{CacheDevice, MeteredIo};
use crate::error::EngineError;

use damaged::DamagedBlocks;
pub(crate) use damaged::{DamagedBlock, Part};
pub(crate) use footers::footer_task;
use sums::{Checked, Known, Overwritten};
pub(crate) use sums::{ReadSum, SumsTable};

/// What the checksum says about data that was read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// Every block matches its checksum.
    Verified,
    /// The checksum of a block is not known, and the blocks whose checksum is known match.
    Unverified,
    /// The data must be looked up and read again: it was overwritten meanwhile, its bucket was reused, or the device has
    /// corrected itself.
    ReadAgain,
    /// A block does not match its checksum, also when it is read a second time.
    Damaged(Mismatch),
}

/// A moment in the sequence of writes in place. A reader takes it before it reads.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub(crate) struct ReadToken(u64);

/// A block whose data does not match its checksum.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Mismatch {
    /// The position of the block in the data that was read.
    pub(crate) at: Sectors,
    /// The checksum of the block.
    pub(crate) expected: u32,
    /// The checksum of the data that was read.
    pub(crate) found: u32,
}

/// Counts of checksums since the start of the set.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ChecksumCounters {
    /// Blocks that matched their checksum when they were read.
    pub verified_blocks: u64,
    /// Blocks that were read and have no known checksum.
    pub unverified_blocks: u64,
    /// Blocks of live data that did not match, also when they were read a second time. A block counts once for each event.
    pub damaged_blocks: u64,
    /// Blocks that did not match, and matched when they were read a second time.
    pub corrected_blocks: u64,
    /// Footers that were written.
    pub footers_written: u64,
    /// Footers that were read.
    pub footers_read: u64,
    /// Footers that were replaced by zeros before their bucket was overwritten.
    pub footers_erased: u64,
    /// Blocks without a known checksum that got one, because a scrub has read them.
    pub learnt_blocks: u64,
}

/// How much of the live data in the cache can be verified. A block of live data counts in at most one of the two numbers.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ChecksumCoverage {
    /// Blocks of live data without a known checksum, in buckets whose footer was read or written since the start. It is the
    /// live blocks of each such bucket less its known checksums. A checksum of a block that is not live any more makes the
    /// number smaller than it is.
    pub unverified_blocks: u64,
    /// Blocks of live data in buckets whose footer was neither read nor written since the start. Reads and scrubs read it.
    pub unread_blocks: u64,
}

/// The checksums of a set that has them.
struct Checksums {
    layout: FooterLayout,
    key: FooterKey,
    set_uuid: Uuid,
    table: RefCell<SumsTable>,
    counters: Cell<ChecksumCounters>,
    /// Counts footers that were replaced. A footer that was read before the count changed is not used.
    changes: Cell<u64>,
    damaged: RefCell<DamagedBlocks>,
    /// An overwriting in place has ended.
    overwrite_ended: Event,
    /// The coverage when it was counted last.
    coverage: Cell<Option<(Nanos, ChecksumCoverage)>>,
}

/// A set with more buckets is large: counting its coverage takes more than a millisecond.
const LARGE_SET: u32 = 1 << 16;
/// How often the coverage of a large set is counted at most.
const COUNT_INTERVAL: Nanos = Nanos::from_secs(10);

/// The cached data of one set.
pub(crate) struct CachedData {
    device: Rc<CacheDevice>,
    alloc: Rc<Allocator>,
    sums: Option<Checksums>,
}

impl CachedData {
    /// Makes the access to the data of a set; checksums are on if the superblock says so.
    ///
    /// # Errors
    /// If the allocator has no memory for the checksums.
    pub(crate) fn new(device: Rc<CacheDevice>, alloc: Rc<Allocator>) -> Result<CachedData, EngineError> {
        let (geometry, key, set_uuid) = {
            let sb = device.superblock();
            (*sb.geometry(), sb.checksum_key(), sb.set_uuid())
        };
        let with_sums = |(key, layout): (_, FooterLayout)| {
            let table = SumsTable::new(&geometry, &layout);
            let table = table.map_err(|e| device.place().no_memory(&geometry, e))?;
            alloc.leave_room_for_footers(layout.data_sectors());
            Ok::<_, EngineError>(Checksums {
                layout,
                key,
                set_uuid,
                table: RefCell::new(table),
                counters: Cell::default(),
                changes: Cell::new(0),
                damaged: RefCell::default(),
                overwrite_ended: Event::default(),
                coverage: Cell::default(),
            })
        };
        let sums = key.zip(FooterLayout::of(&geometry)).map(with_sums).transpose()?;
        Ok(CachedData { device, alloc, sums })
    }

    /// Whether data has checksums. A reader then reads whole blocks of the cache.
    #[inline]
    pub(crate) fn has_checksums(&self) -> bool {
        self.sums.is_some()
    }

    /// Counts of checksums.
    pub(crate) fn counters(&self) -> ChecksumCounters {
        self.sums.as_ref().map(|s| s.counters.get()).unwrap_or_default()
    }

    /// Starts a read of cached data.
    #[inline]
    pub(crate) fn read(
        &self,
        at: Sector,
        sectors: Sectors,
        buffer: Buffer,
        offset_bytes: usize,
    ) -> MeteredIo {
        self.device.read_data(at, sectors, buffer, offset_bytes)
    }

    /// Starts a write of whole blocks to a place that the allocator has just given out.
    #[inline]
    pub(crate) fn write(&self, to: Ptr, sectors: Sectors, buffer: Buffer, offset_bytes: usize) -> MeteredIo {
        if let Some(sums) = &self.sums {
            sums.append(to, sectors, &buffer, offset_bytes);
        }
        self.device.write_data((to.offset(), sectors), buffer, offset_bytes, false)
    }

    /// How much of the live data can be verified. In a large set it is counted at most every ten seconds, because that takes
    /// some ns for each bucket.
    pub(crate) fn coverage(&self) -> ChecksumCoverage {
        let Some(sums) = &self.sums else { return ChecksumCoverage::default() };
        let (now, is_large) = (self.device.disk().runtime().now(), self.alloc.buckets().len() > LARGE_SET);
        match sums.coverage.get() {
            Some((at, known)) if is_large && now.since(at) < COUNT_INTERVAL => known,
            _ => {
                let coverage = self.count_coverage(sums);
                sums.coverage.set(Some((now, coverage)));
                coverage
            }
        }
    }

    fn count_coverage(&self, sums: &Checksums) -> ChecksumCoverage {
        let mut coverage = ChecksumCoverage::default();
        let (table, buckets) = (sums.table.borrow(), self.alloc.buckets());
        let block = sums.layout.block_sectors().0.max(1);
        for bucket in (0..buckets.len()).map(BucketNr) {
            let live = buckets.live(bucket).0.div_ceil(block);
            if live == 0 || buckets.used(bucket) != Use::Data {
                continue;
            }
            match table.known(bucket, buckets.generation(bucket)) {
                Known::NotRead => coverage.unread_blocks += live,
                Known::Blocks(known) => coverage.unverified_blocks += live.saturating_sub(known as u64),
            }
        }
        coverage
    }

    /// Whether the checksum of a block is known.
    pub(crate) fn knows(&self, at: Ptr) -> bool {
        self.sums.as_ref().is_some_and(|s| s.table.borrow_mut().sum_of(at).is_some())
    }

    /// Whether this is the known checksum of a block.
    pub(crate) fn has_sum(&self, at: Ptr, sum: u32) -> bool {
        self.sums.as_ref().is_some_and(|s| s.table.borrow_mut().sum_of(at) == Some(sum))
    }

    /// Counts blocks that got a checksum because a scrub has read them.
    pub(crate) fn count_learnt(&self, blocks: u64) {
        if let Some(sums) = &self.sums {
            sums.count(|c| c.learnt_blocks += blocks);
        }
    }

    /// The present moment; see [`ReadToken`].
    pub(crate) fn read_token(&self) -> ReadToken {
        self.sums.as_ref().map_or(ReadToken(0), |s| s.table.borrow().now())
    }

    /// Compares whole blocks that were read from `from` with their checksums; reads the footer of the bucket if they are
    /// not in memory. `began`: the moment before the read began. The caller checks afterwards that the pointer is still
    /// valid, as after every wait.
    pub(crate) async fn verify(&self, from: Ptr, data: &[u8], began: ReadToken) -> Verdict {
        let Some(sums) = &self.sums else { return Verdict::Unverified };
        let checked = match sums.check(from, data) {
            Checked::NoSums => {
                self.load_footer(sums, from).await;
                sums.check(from, data)
            }
            checked => checked,
        };
        match checked {
            _ if !self.alloc.buckets().is_current(from) => Verdict::ReadAgain,
            Checked::Mismatch(mismatch) => self.read_second(sums, from, mismatch, began).await,
            Checked::Compared { unknown } => sums.count_compared(data.len(), unknown),
            Checked::NoSums => sums.count_compared(data.len(), u64::MAX),
            Checked::Overwriting => {
                sums.overwrites_ended(from, Sectors::from_bytes_floor(data.len() as u64)).await;
                Verdict::ReadAgain
            }
        }
    }

    /// Decides whether a block that did not match is damaged: reads it a second time, unless it may have been
    /// overwritten since the read began.
    async fn read_second(
        &self,
        sums: &Checksums,
        from: Ptr,
        mismatch: Mismatch,
        began: ReadToken,
    ) -> Verdict {
        let block = from.advanced(mismatch.at);
        if sums.table.borrow_mut().was_overwritten(block, began) {
            return Verdict::ReadAgain;
        }
        let size = sums.layout.block_sectors();
        let again = self.read_token();
        let buffer = self.device.disk().runtime().pool().take(size.bytes() as usize);
        let done = self.read(block.offset(), size, buffer, 0).await;
        self.device.observe_data(&done.result);
        if !self.alloc.buckets().is_current(from) {
            return Verdict::ReadAgain;
        }
        // A block that cannot be read a second time has only the data that did not match.
        let second = match (done.result, done.buffer) {
            (Ok(()), Some(buffer)) => sums.check(block, buffer.as_slice()),
            _ => Checked::Mismatch(mismatch),
        };
        match second {
            Checked::Mismatch(second) if !sums.table.borrow_mut().was_overwritten(block, again) => {
                Verdict::Damaged(Mismatch { at: mismatch.at, ..second })
            }
            Checked::Compared { unknown: 0 } => {
                sums.count(|c| c.corrected_blocks += 1);
                Verdict::ReadAgain
            }
            Checked::Mismatch(_) | Checked::Compared { .. } | Checked::NoSums | Checked::Overwriting => {
                Verdict::ReadAgain
            }
        }
    }

    /// Counts a block as damaged.
    pub(crate) fn count_damaged(&self) {
        if let Some(sums) = &self.sums {
            sums.count(|c| c.damaged_blocks += 1);
        }
    }

    /// Adds a damaged block of dirty data to the list; returns whether it is new.
    pub(crate) fn add_damaged(&self, block: DamagedBlock) -> bool {
        self.sums.as_ref().is_some_and(|s| s.damaged.borrow_mut().add(block))
    }

    /// Removes a block from the list, because its data was replaced.
    pub(crate) fn remove_damaged(&self, block: &DamagedBlock) {
        if let Some(sums) = &self.sums {
            sums.damaged.borrow_mut().remove(block);
        }
    }

    /// The damaged blocks of dirty data. Some may have been replaced meanwhile.
    pub(crate) fn damaged(&self) -> Vec<DamagedBlock> {
        self.sums.as_ref().map_or(Vec::new(), |s| s.damaged.borrow().all())
    }

    /// The first part of an extent that is listed as damaged, or that is not, as a whole.
    pub(crate) fn first_part(&self, ptr: Ptr, size: Sectors) -> Part {
        let whole = Part { sectors: size, is_damaged: false };
        self.sums.as_ref().map_or(whole, |s| s.damaged.borrow().first_part(ptr, size))
    }

    /// Prepares the overwriting of dirty data in place: no footer for the present data may be on the device. Returns
    /// false if the data must go to a new place instead. The caller holds the range, and has pinned the bucket.
    pub(crate) async fn begin_overwrite(&self, at: Ptr, new: &[u8]) -> bool {
        let Some(sums) = &self.sums else { return true };
        let sectors = Sectors::from_bytes_floor(new.len() as u64);
        // The footer is what makes damage known after a crash.
        if self.is_damaged_beside(at, sectors) || !sums.prepare_overwrite(self, at, new).await {
            return false;
        }
        // A read may have found damage while the footer was replaced by zeros.
        let found = self.is_damaged_beside(at, sectors);
        if found {
            sums.overwrote(at, sectors, Overwritten::NotBegun);
        }
        !found
    }

    /// Whether blocks of the bucket are known to be damaged, other than these.
    pub(crate) fn is_damaged_beside(&self, at: Ptr, sectors: Sectors) -> bool {
        let Some(sums) = &self.sums else { return false };
        let geometry = self.device.geometry();
        let start = geometry.bucket_start(self.alloc.buckets().bucket_of(at));
        let bucket = (start, start + geometry.bucket_sectors);
        sums.damaged.borrow().has_other(bucket, (at.offset(), at.offset() + sectors))
    }

    /// Ends an overwriting in place that was prepared and not begun.
    pub(crate) fn give_up_overwrite(&self, at: Ptr, sectors: Sectors) {
        if let Some(sums) = &self.sums {
            sums.overwrote(at, sectors, Overwritten::NotBegun);
        }
    }

    /// Starts to overwrite data in place, after [`CachedData::begin_overwrite`].
    #[inline]
    pub(crate) fn overwrite(
        &self,
        (at, sectors): (Ptr, Sectors),
        buffer: Buffer,
        offset_bytes: usize,
        fua: bool,
    ) -> MeteredIo {
        self.device.write_data((at.offset(), sectors), buffer, offset_bytes, fua)
    }

    /// Ends the overwriting of data in place: unless it was durable, the next flush covers it. After an error the content of
    /// the place is not known.
    #[inline]
    pub(crate) fn end_overwrite(&self, at: Ptr, sectors: Sectors, written: &Result<(), IoError>, fua: bool) {
        if !fua && !bug(Bug::OverwriteNotFlushed) {
            self.device.overwrote();
        }
        if let Some(sums) = &self.sums {
            let end = match written {
                Ok(()) => Overwritten::Written(self.device.latest_write()),
                Err(_) => Overwritten::Failed,
            };
            sums.overwrote(at, sectors, end);
            if written.is_ok() {
                sums.damaged.borrow_mut().overwrote(at, sectors);
            }
        }
    }
}

impl Checksums {
    fn id(&self, alloc: &Allocator, ptr: Ptr) -> FooterId {
        let bucket = alloc.buckets().bucket_of(ptr);
        FooterId { set_uuid: self.set_uuid, bucket, generation: ptr.generation() }
    }

    /// Records the checksums of data that is being written to a new place.
    #[cold]
    fn append(&self, to: Ptr, sectors: Sectors, buffer: &Buffer, offset_bytes: usize) {
        let data = buffer.as_slice().get(offset_bytes..).unwrap_or_default();
        let data = data.get(..sectors.bytes() as usize).unwrap_or_default();
        self.table.borrow_mut().appended(to, data);
    }

    /// Ends an overwriting in place, and wakes the readers that wait for it.
    fn overwrote(&self, at: Ptr, sectors: Sectors, end: Overwritten) {
        self.table.borrow_mut().overwrote(at, sectors, end);
        self.overwrite_ended.notify_all();
    }

    /// Waits until each overwriting of the blocks in place that is under way now has ended. Later ones do not prolong the wait.
    async fn overwrites_ended(&self, at: Ptr, sectors: Sectors) {
        let now = self.table.borrow().now();
        let ended = || !self.table.borrow_mut().is_being_overwritten(at, sectors, now);
        self.overwrite_ended.wait_until(ended).await;
    }

    fn check(&self, from: Ptr, data: &[u8]) -> Checked {
        self.table.borrow_mut().check(from, data)
    }

    fn count(&self, change: impl FnOnce(&mut ChecksumCounters)) {
        let mut c = self.counters.get();
        change(&mut c);
        self.counters.set(c);
    }

    /// Counts the blocks of data that was compared, at most `unknown` of which have no known checksum.
    fn count_compared(&self, bytes: usize, unknown: u64) -> Verdict {
        let blocks = (bytes as u64).div_ceil(self.layout.block_sectors().bytes());
        let unknown = unknown.min(blocks);
        self.count(|c| {
            c.unverified_blocks += unknown;
            c.verified_blocks += blocks.saturating_sub(unknown);
        });
        if unknown == 0 { Verdict::Verified } else { Verdict::Unverified }
    }
}
