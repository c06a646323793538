//! The checksums that are in memory, by bucket.
//!
//! Owns the table, and for each bucket in it what is known of its footer on the device. Must not know the device.
//!
//! Invariants: sums belong to one generation of their bucket; sums whose footer may be on the device do not change.

use std::collections::VecDeque;
use std::ops::Range;

use format::{BlockSums, BucketNr, FooterLayout, Gen, Geometry, Ptr, Sectors};
use io::{NoMemory, try_table};

use super::{Mismatch, ReadToken};
use crate::device::Tick;

/// The footer of a bucket on the device, for the generation of the sums in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FooterState {
    /// No valid footer is on the device.
    Absent,
    /// A footer is on the device, or may be. If the device returned one, it has the sums in memory; otherwise none is known.
    Written,
    /// A request that changes the footer is under way.
    Changing,
}

/// The result of a comparison with the sums in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Checked {
    /// The table has no sums of the bucket.
    NoSums,
    /// Every block with a known checksum matches; `unknown` blocks have none.
    Compared { unknown: u64 },
    /// A block does not match.
    Mismatch(Mismatch),
    /// A block that is being overwritten in place matches neither its old nor its new checksum: the device may have written a
    /// part of it, or the old data is damaged.
    Overwriting,
}

/// A block that is being overwritten in place.
struct OverwrittenBlock {
    block: usize,
    /// The checksum of the data before, if it was known.
    old: Option<u32>,
    new: u32,
    /// The moment at which the overwriting began.
    began: ReadToken,
}

/// When blocks of a bucket were overwritten in place. A read of one block does not start again because another is overwritten.
struct Changes {
    /// The last blocks, and the moments at which their overwriting began or ended.
    recent: VecDeque<(Range<usize>, ReadToken)>,
    /// The last moment of all others.
    earlier: ReadToken,
}

/// The largest number of beginnings and ends whose blocks are known.
const RECENT: usize = 64;

impl Changes {
    fn add(&mut self, blocks: Range<usize>, now: ReadToken) {
        if self.recent.len() >= RECENT
            && let Some((_, at)) = self.recent.pop_front()
        {
            self.earlier = self.earlier.max(at);
        }
        self.recent.push_back((blocks, now));
    }

    /// Whether the block may have been overwritten after `began`.
    fn has_one_after(&self, block: usize, began: ReadToken) -> bool {
        self.earlier > began || self.recent.iter().any(|(b, at)| b.contains(&block) && *at > began)
    }

    fn last(&self) -> ReadToken {
        self.recent.back().map_or(self.earlier, |(_, at)| *at)
    }
}

/// What remains of sums that were dropped from memory: sums that are read again later may be of buckets with such changes.
#[derive(Default)]
struct Forgotten {
    changed: ReadToken,
    overwritten: Tick,
}

impl Forgotten {
    fn add(&mut self, sums: &BucketSums) {
        self.changed = self.changed.max(sums.changes.last());
        self.overwritten = self.overwritten.max(sums.overwritten);
    }
}

/// The sums of one bucket.
pub(super) struct BucketSums {
    generation: Gen,
    pub(super) sums: BlockSums,
    pub(super) footer: FooterState,
    /// The last overwriting in place of dirty data; a footer waits for a flush that covers it.
    pub(super) overwritten: Tick,
    /// When blocks were overwritten in place.
    changes: Changes,
    /// Whether the sums are not complete, because the data was overwritten, or the device had no footer. They get a footer
    /// only when the set stops.
    pub(super) reopened: bool,
    /// The blocks that are being overwritten in place. Their checksum is unknown meanwhile.
    overwriting: Vec<OverwrittenBlock>,
    /// Set by each use, cleared by a search for sums to drop.
    used: bool,
}

/// The end of an overwriting in place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Overwritten {
    /// The device has written the data. A flush covers it that begins at this moment or later.
    Written(Tick),
    /// The device has failed the write, so the content of the place is not known.
    Failed,
    /// Nothing was sent to the device.
    NotBegun,
}

/// The checksum of a block that was read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ReadSum {
    /// The place of the block.
    pub(crate) at: Ptr,
    pub(crate) sum: u32,
    /// The moment before the read began.
    pub(crate) began: ReadToken,
}

/// How many checksums of a bucket are known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Known {
    /// The footer was not read since the start.
    NotRead,
    /// So many blocks have a known checksum.
    Blocks(usize),
}

/// What is left of sums that the table has dropped.
#[derive(Clone, Copy)]
struct Dropped {
    generation: Gen,
    known: u16,
}

/// No sums of the bucket were dropped.
const NOTHING_DROPPED: Dropped = Dropped { generation: Gen(0), known: u16::MAX };

/// The sums of all buckets that are in memory.
pub(crate) struct SumsTable {
    table: Vec<Option<Box<BucketSums>>>,
    bucket_sectors: u64,
    block_sectors: u64,
    blocks: usize,
    /// The number of buckets in the table, and its limit.
    len: usize,
    most: usize,
    /// Counts sums that were dropped from memory.
    drops: u64,
    forgotten: Forgotten,
    /// The bucket at which the next search for sums to drop begins.
    hand: usize,
    /// Counts beginnings and ends of overwriting in place.
    now: ReadToken,
    /// For each bucket, how many checksums its dropped sums had.
    dropped: Vec<Dropped>,
}

/// Memory for the sums of buckets with a footer.
const MOST_BYTES: usize = 64 << 20;

impl SumsTable {
    pub(super) fn new(geometry: &Geometry, layout: &FooterLayout) -> Result<SumsTable, NoMemory> {
        SumsTable::with_limit(geometry, layout, (MOST_BYTES / SumsTable::bytes_each(layout)).max(64))
    }

    pub(super) fn with_limit(
        geometry: &Geometry,
        layout: &FooterLayout,
        most: usize,
    ) -> Result<SumsTable, NoMemory> {
        let nbuckets = geometry.nbuckets as usize;
        Ok(SumsTable {
            table: try_table(nbuckets, || None)?,
            bucket_sectors: geometry.bucket_sectors.0,
            block_sectors: geometry.block_sectors.0.max(1),
            blocks: layout.blocks(),
            len: 0,
            most,
            drops: 0,
            forgotten: Forgotten::default(),
            hand: 0,
            now: ReadToken(0),
            dropped: try_table(nbuckets, || NOTHING_DROPPED)?,
        })
    }

    /// The largest number of bytes that the table of such a set takes.
    pub(crate) fn most_bytes(geometry: &Geometry, layout: &FooterLayout) -> u64 {
        let places = u64::from(geometry.nbuckets)
            * (size_of::<Option<Box<BucketSums>>>() + size_of::<Dropped>()) as u64;
        let all = u64::from(geometry.nbuckets).saturating_mul(SumsTable::bytes_each(layout) as u64);
        places + all.min(MOST_BYTES as u64)
    }

    /// Bytes of memory for the sums of a bucket.
    fn bytes_each(layout: &FooterLayout) -> usize {
        BlockSums::memory_bytes(layout.blocks()) + size_of::<BucketSums>()
    }

    fn bucket(&self, ptr: Ptr) -> BucketNr {
        BucketNr((ptr.offset().0 / self.bucket_sectors) as u32)
    }

    fn block(&self, ptr: Ptr) -> usize {
        (ptr.offset().0 % self.bucket_sectors / self.block_sectors) as usize
    }

    fn block_bytes(&self) -> usize {
        Sectors(self.block_sectors).bytes() as usize
    }

    /// The sums of this generation of a bucket, if the table has them.
    pub(super) fn get_mut(&mut self, bucket: BucketNr, generation: Gen) -> Option<&mut BucketSums> {
        let entry = self.table.get_mut(bucket.0 as usize)?.as_deref_mut()?;
        (entry.generation == generation).then_some(entry)
    }

    /// The sums to which a pointer refers, if the table has them.
    pub(super) fn of_ptr(&mut self, ptr: Ptr) -> Option<&mut BucketSums> {
        self.get_mut(self.bucket(ptr), ptr.generation())
    }

    /// Puts sums into the table, in the place of those of another generation.
    pub(super) fn put(&mut self, bucket: BucketNr, generation: Gen, sums: BlockSums, footer: FooterState) {
        let new = BucketSums {
            generation,
            sums,
            footer,
            overwritten: self.forgotten.overwritten,
            changes: Changes { earlier: self.forgotten.changed, recent: VecDeque::new() },
            reopened: false,
            overwriting: Vec::new(),
            used: true,
        };
        let Some(place) = self.table.get_mut(bucket.0 as usize) else { return };
        if place.replace(Box::new(new)).is_none() {
            self.len += 1;
            self.make_room(bucket);
        }
    }

    /// Removes the sums of a bucket.
    pub(super) fn remove(&mut self, bucket: BucketNr) {
        if let Some(entry) = self.table.get_mut(bucket.0 as usize).and_then(Option::take) {
            self.forgotten.add(&entry);
            self.len -= 1;
            self.drops += 1;
        }
    }

    /// A count that changes whenever sums are dropped from memory.
    pub(super) fn drops(&self) -> u64 {
        self.drops
    }

    /// The buckets whose sums have no footer on the device.
    pub(super) fn without_footer(&self) -> impl Iterator<Item = BucketNr> {
        let is_absent =
            |e: &Option<Box<BucketSums>>| e.as_deref().is_some_and(|e| e.footer == FooterState::Absent);
        self.table.iter().zip(0..).filter(move |(e, _)| is_absent(e)).map(|(_, bucket)| BucketNr(bucket))
    }

    /// Drops sums that the device has, too, if the table is over its limit: those that were not used since the last
    /// search passed them. Sums without a footer are dropped only if their bucket was reopened.
    fn make_room(&mut self, but: BucketNr) {
        let mut left = 2 * self.table.len();
        while self.len > self.most && left > 0 {
            left -= 1;
            let bucket = self.hand;
            self.hand = (self.hand + 1) % self.table.len().max(1);
            let Some(place) = self.table.get_mut(bucket) else { continue };
            let Some(entry) = place.as_deref_mut() else { continue };
            let is_spare = match entry.footer {
                FooterState::Written => true,
                FooterState::Absent => entry.reopened,
                FooterState::Changing => false,
            };
            if is_spare
                && entry.overwriting.is_empty()
                && !std::mem::take(&mut entry.used)
                && bucket != but.0 as usize
            {
                if let Some(dropped) = self.dropped.get_mut(bucket) {
                    let known = u16::try_from(entry.sums.known()).unwrap_or(u16::MAX - 1);
                    *dropped = Dropped { generation: entry.generation, known };
                }
                self.forgotten.add(entry);
                *place = None;
                self.len -= 1;
                self.drops += 1;
            }
        }
    }

    /// Records the checksums of data that is being written behind all other data of an open bucket.
    pub(super) fn appended(&mut self, to: Ptr, data: &[u8]) {
        let (bucket, generation) = (self.bucket(to), to.generation());
        let (block, block_bytes) = (self.block(to), self.block_bytes());
        if self.get_mut(bucket, generation).is_none() {
            self.put(bucket, generation, BlockSums::unknown(self.blocks), FooterState::Absent);
        }
        if let Some(entry) = self.get_mut(bucket, generation) {
            assert!(
                entry.footer == FooterState::Absent,
                "data was added to bucket {bucket} behind its footer"
            );
            entry.sums.set_data(block, data, block_bytes);
        }
    }

    /// Compares the blocks that were read from `from`. Parts of blocks count as unknown.
    pub(super) fn check(&mut self, from: Ptr, data: &[u8]) -> Checked {
        let (block_bytes, block_sectors) = (self.block_bytes(), self.block_sectors);
        let skip = Sectors(from.offset().0.next_multiple_of(block_sectors) - from.offset().0);
        let block = self.block(from.advanced(skip));
        let Some(entry) = self.of_ptr(from) else { return Checked::NoSums };
        entry.used = true;
        let whole = data.get(skip.bytes() as usize..).unwrap_or_default();
        let mut unknown = u64::from(skip > Sectors::ZERO);
        for (i, bytes) in whole.chunks(block_bytes).enumerate() {
            let is_whole = bytes.len() == block_bytes;
            let Some(expected) = entry.sums.get(block + i).filter(|_| is_whole) else {
                match entry.overwriting.iter().find(|b| b.block == block + i && is_whole) {
                    Some(OverwrittenBlock { old: Some(old), new, .. }) => {
                        let found = format::checksum::crc32c(bytes);
                        if found != *old && found != *new {
                            return Checked::Overwriting;
                        }
                    }
                    _ => unknown += 1,
                }
                continue;
            };
            let found = format::checksum::crc32c(bytes);
            if found != expected {
                let at = skip + Sectors(i as u64 * block_sectors);
                return Checked::Mismatch(Mismatch { at, expected, found });
            }
        }
        Checked::Compared { unknown }
    }

    /// The present moment in the sequence of writes in place.
    pub(super) fn now(&self) -> ReadToken {
        self.now
    }

    /// Whether a block of the bucket may have been overwritten in place after `began`.
    pub(super) fn was_overwritten(&mut self, ptr: Ptr, began: ReadToken) -> bool {
        let block = self.block(ptr);
        self.of_ptr(ptr).is_none_or(|e| e.changes.has_one_after(block, began))
    }

    /// The next moment: overwriting in place begins or ends.
    fn next_moment(&mut self) -> ReadToken {
        self.now = ReadToken(self.now.0 + 1);
        self.now
    }

    /// Whether an overwriting of the blocks in place is under way that had begun at the moment `until`.
    pub(super) fn is_being_overwritten(&mut self, at: Ptr, sectors: Sectors, until: ReadToken) -> bool {
        let blocks = self.blocks(at, sectors);
        let is_meant = |b: &OverwrittenBlock| blocks.contains(&b.block) && b.began <= until;
        self.of_ptr(at).is_some_and(|e| e.overwriting.iter().any(is_meant))
    }

    /// The numbers of blocks in their bucket.
    fn blocks(&self, at: Ptr, sectors: Sectors) -> Range<usize> {
        let first = self.block(at);
        first..first + sectors.0.div_ceil(self.block_sectors) as usize
    }

    /// Makes the checksums of blocks unknown that will be overwritten in place with `data`.
    pub(super) fn overwrites(&mut self, at: Ptr, data: &[u8]) {
        let (first, block_bytes) = (self.block(at), self.block_bytes());
        let now = self.next_moment();
        let Some(entry) = self.of_ptr(at) else { return };
        assert!(entry.footer == FooterState::Absent, "data with a footer is overwritten in place");
        entry.changes.add(first..first + data.len().div_ceil(block_bytes), now);
        for (block, bytes) in (first..).zip(data.chunks(block_bytes)) {
            let (old, new) = (entry.sums.get(block), format::checksum::crc32c(bytes));
            entry.overwriting.push(OverwrittenBlock { block, old, new, began: now });
            entry.sums.set(block, None);
        }
    }

    /// Ends the overwriting in place of blocks.
    pub(super) fn overwrote(&mut self, at: Ptr, sectors: Sectors, end: Overwritten) {
        let blocks = self.blocks(at, sectors);
        let now = self.next_moment();
        let Some(entry) = self.of_ptr(at) else { return };
        for b in entry.overwriting.extract_if(.., |b| blocks.contains(&b.block)) {
            let sum = match end {
                Overwritten::Written(_) => Some(b.new),
                Overwritten::Failed => None,
                Overwritten::NotBegun => b.old,
            };
            entry.sums.set(b.block, sum);
        }
        entry.changes.add(blocks, now);
        if let Overwritten::Written(tick) = end {
            entry.overwritten = entry.overwritten.max(tick);
        }
    }

    /// Makes checksums known that a reader of blocks of one bucket has computed, except those of blocks that may have been
    /// overwritten since. `replaces`: also those of blocks that have another one. Returns the state of the footer before the
    /// change, and the number of new checksums. If that state is [`FooterState::Written`], it is [`FooterState::Changing`] now,
    /// and the caller writes the footer.
    pub(super) fn learn(&mut self, found: &[ReadSum], replaces: bool) -> Option<(FooterState, u64)> {
        let places: Vec<usize> = found.iter().map(|f| self.block(f.at)).collect();
        let entry = self.of_ptr(found.first()?.at)?;
        let before = entry.footer;
        if before == FooterState::Changing {
            return None;
        }
        let mut new = 0;
        for (f, block) in found.iter().zip(places) {
            let is_stable = !entry.overwriting.iter().any(|b| b.block == block)
                && !entry.changes.has_one_after(block, f.began);
            let is_new = match entry.sums.get(block) {
                None => true,
                Some(known) => replaces && known != f.sum,
            };
            if is_stable && is_new {
                entry.sums.set(block, Some(f.sum));
                new += 1;
            }
        }
        if new > 0 && before == FooterState::Written {
            entry.footer = FooterState::Changing;
        }
        Some((before, new))
    }

    /// The checksum of a block, if it is known.
    pub(super) fn sum_of(&mut self, at: Ptr) -> Option<u32> {
        let block = self.block(at);
        self.of_ptr(at)?.sums.get(block)
    }

    /// How many checksums of this generation of a bucket are known.
    pub(super) fn known(&self, bucket: BucketNr, generation: Gen) -> Known {
        let i = bucket.0 as usize;
        let entry = self.table.get(i).and_then(Option::as_deref).filter(|e| e.generation == generation);
        let dropped = || self.dropped.get(i).filter(|d| d.generation == generation && d.known != u16::MAX);
        match (entry, entry.is_none().then(dropped).flatten()) {
            (Some(entry), _) => Known::Blocks(entry.sums.known()),
            (None, Some(dropped)) => Known::Blocks(usize::from(dropped.known)),
            (None, None) => Known::NotRead,
        }
    }
}

#[cfg(test)]
mod tests;
