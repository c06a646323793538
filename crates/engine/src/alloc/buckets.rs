//! The bucket table: the use and the content of every bucket of the cache device.
//!
//! Owns the generation, use, and exact count of live and dirty sectors of each bucket, and its priority ([`Priorities`]). Every change of the
//! index is accounted here, so the table is always exact and no walk has to mark anything. Must not know the index or
//! any device.
//!
//! Invariants: a bucket has at most as many dirty as live sectors; a bucket with dirty sectors or pins is never
//! reclaimable; `available` is the number of reclaimable and ready buckets.

use format::{BucketNr, Gen, Geometry, PRIO_INITIAL, PRIO_METADATA, Ptr, Sectors};
use io::{NoMemory, try_table};

use super::priorities::Priorities;

/// The use of a bucket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Use {
    /// The superblock area or the journal: the bucket is never allocated.
    Reserved,
    /// Invalidated: the bucket is in the list of ready buckets, or will be.
    Ready,
    /// A btree node, prio set or UUID table.
    Metadata,
    /// Cached data, or nothing.
    Data,
}

/// The content of a bucket, for figures.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Holds {
    Nothing,
    Clean,
    Dirty,
    Metadata,
}

/// A bucket must not be invalidated if its oldest pointer is this many generations behind (format section 5,
/// `GC_GEN_MAX`).
pub(crate) const GEN_AGE_LIMIT: u8 = 96;

/// Mark: the data in the bucket is being copied to other buckets.
const MOVING: u8 = 1;
/// Mark: a wipe is under way, and the bucket may have data to which nothing refers.
const TO_WIPE: u8 = 2;
/// Mark: no durable prio chain has the generation of the bucket.
const UNSTORED: u8 = 4;
/// Mark: the bucket has data, or had some of its generation, in the place of a footer. A kernel fills buckets to their end.
const NO_FOOTER: u8 = 8;

/// The state of one bucket.
#[derive(Clone, Copy)]
struct Bucket {
    generation: Gen,
    /// The oldest generation of a pointer to the bucket that may still be in the index.
    oldest: Gen,
    used: Use,
    /// Pins of open buckets and of writes to the bucket under way. Reads do not pin.
    pins: u16,
    /// Bits: [`MOVING`], [`TO_WIPE`], [`UNSTORED`], [`NO_FOOTER`].
    marks: u8,
    live_sectors: u32,
    dirty_sectors: u32,
}

impl Bucket {
    fn reclaimable(&self) -> bool {
        self.used == Use::Data && self.dirty_sectors == 0 && self.pins == 0
    }

    /// Whether the bucket has no live data and no write to it is under way.
    fn unused(&self) -> bool {
        self.used == Use::Ready || (self.reclaimable() && self.live_sectors == 0)
    }

    fn available(&self) -> bool {
        self.used == Use::Ready || self.reclaimable()
    }

    fn holds(&self) -> Holds {
        match self.used {
            Use::Reserved | Use::Metadata => Holds::Metadata,
            Use::Ready | Use::Data if self.live_sectors == 0 => Holds::Nothing,
            Use::Ready | Use::Data if self.dirty_sectors > 0 => Holds::Dirty,
            Use::Ready | Use::Data => Holds::Clean,
        }
    }
}

/// The table of all buckets, with counts over all of them.
pub(crate) struct Buckets {
    table: Vec<Bucket>,
    priorities: Priorities,
    bucket_shift: u32,
    available: u32,
    /// The percentage of buckets that are not available; kept because it is read far more often than it changes.
    in_use_percent: u32,
    reclaimable: u32,
    unused: u32,
    live_sectors: u64,
    /// Buckets that were invalidated since the last walk of the index.
    invalidated_since_gc: u64,
    /// The sectors of a bucket before the place of its footer; all of them without checksums.
    data_sectors: Sectors,
}

impl Buckets {
    /// Bytes of memory for each bucket.
    pub(crate) const BYTES_EACH: u64 = size_of::<Bucket>() as u64 + Priorities::BYTES_EACH;

    /// # Errors
    /// If the allocator has no memory for the table.
    pub(crate) fn new(
        geometry: &Geometry,
        first_usable: BucketNr,
        nbuckets: u32,
    ) -> Result<Buckets, NoMemory> {
        let fresh = |used: Use| Bucket {
            generation: Gen(0),
            oldest: Gen(0),
            used,
            pins: 0,
            marks: 0,
            live_sectors: 0,
            dirty_sectors: 0,
        };
        let usable = nbuckets - first_usable.0;
        let mut table = try_table(nbuckets as usize, || fresh(Use::Data))?;
        table.iter_mut().take(first_usable.0 as usize).for_each(|b| *b = fresh(Use::Reserved));
        let mut buckets = Buckets {
            table,
            priorities: Priorities::new(nbuckets)?,
            bucket_shift: geometry.bucket_sectors.0.trailing_zeros(),
            available: usable,
            in_use_percent: 0,
            reclaimable: usable,
            unused: usable,
            live_sectors: 0,
            invalidated_since_gc: 0,
            data_sectors: geometry.bucket_sectors,
        };
        buckets.in_use_percent = buckets.percent_in_use();
        Ok(buckets)
    }

    pub(crate) fn len(&self) -> u32 {
        self.table.len() as u32
    }

    pub(crate) fn bucket_of(&self, ptr: Ptr) -> BucketNr {
        BucketNr((ptr.offset().0 >> self.bucket_shift) as u32)
    }

    fn get(&self, b: BucketNr) -> &Bucket {
        &self.table[b.0 as usize]
    }

    /// Changes a bucket and updates the counts.
    fn change(&mut self, b: BucketNr, f: impl FnOnce(&mut Bucket)) {
        let bucket = &mut self.table[b.0 as usize];
        let before = *bucket;
        f(bucket);
        let after = *bucket;
        assert!(after.dirty_sectors <= after.live_sectors, "bucket {b}: more dirty than live sectors");
        self.live_sectors =
            self.live_sectors - u64::from(before.live_sectors) + u64::from(after.live_sectors);
        // Most changes leave the bucket dirty or pinned, which changes none of the counts below.
        if before.used != after.used || before.reclaimable() || after.reclaimable() {
            self.recount(&before, &after);
        }
    }

    /// Updates the counts for a bucket that changed from `before` to `after`.
    fn recount(&mut self, before: &Bucket, after: &Bucket) {
        self.available = self.available - u32::from(before.available()) + u32::from(after.available());
        self.reclaimable =
            self.reclaimable - u32::from(before.reclaimable()) + u32::from(after.reclaimable());
        self.unused = self.unused - u32::from(before.unused()) + u32::from(after.unused());
        self.in_use_percent = self.percent_in_use();
    }

    fn percent_in_use(&self) -> u32 {
        (u64::from(self.len() - self.available) * 100 / u64::from(self.len())) as u32
    }

    pub(crate) fn generation(&self, b: BucketNr) -> Gen {
        self.get(b).generation
    }

    pub(crate) fn prio(&self, b: BucketNr) -> u16 {
        self.priorities.get(b)
    }

    pub(crate) fn used(&self, b: BucketNr) -> Use {
        self.get(b).used
    }

    pub(crate) fn live(&self, b: BucketNr) -> Sectors {
        Sectors(u64::from(self.get(b).live_sectors))
    }

    pub(crate) fn dirty(&self, b: BucketNr) -> Sectors {
        Sectors(u64::from(self.get(b).dirty_sectors))
    }

    pub(crate) fn pins(&self, b: BucketNr) -> u16 {
        self.get(b).pins
    }

    /// Whether `ptr` is current: its bucket still has the generation of the pointer.
    pub(crate) fn is_current(&self, ptr: Ptr) -> bool {
        let b = self.bucket_of(ptr);
        self.table.get(b.0 as usize).is_some_and(|x| x.generation == ptr.generation())
    }

    /// Whether the bucket can be invalidated without a loss, apart from the age of its generation.
    pub(crate) fn is_reclaimable(&self, b: BucketNr) -> bool {
        self.get(b).reclaimable()
    }

    /// Whether the bucket may be invalidated now: it is reclaimable, and its oldest pointer is not too old.
    pub(crate) fn may_invalidate(&self, b: BucketNr) -> bool {
        let x = self.get(b);
        x.reclaimable() && x.generation.0.wrapping_sub(x.oldest.0) < GEN_AGE_LIMIT
    }

    pub(crate) fn reclaimable(&self) -> u32 {
        self.reclaimable
    }

    /// The number of buckets without any data: using one of them costs no hit.
    pub(crate) fn unused(&self) -> u32 {
        self.unused
    }

    /// The percentage of buckets that have dirty data or metadata or are being filled.
    pub(crate) fn in_use_percent(&self) -> u32 {
        self.in_use_percent
    }

    pub(crate) fn available(&self) -> u32 {
        self.available
    }

    pub(crate) fn live_total(&self) -> Sectors {
        Sectors(self.live_sectors)
    }

    pub(crate) fn invalidated_since_gc(&self) -> u64 {
        self.invalidated_since_gc
    }

    /// Sets the state of a bucket as read from the prio sets.
    pub(crate) fn load(&mut self, b: BucketNr, generation: Gen, prio: u16) {
        self.change(b, |x| {
            x.generation = generation;
            x.oldest = generation;
            x.marks &= !UNSTORED;
        });
        self.priorities.set(b, prio);
    }

    /// Raises the generation of a bucket to that of a pointer that was found (format section 5).
    pub(crate) fn raise(&mut self, b: BucketNr, pointer: Gen) {
        self.change(b, |x| {
            let raised = x.generation.raised_by(pointer);
            if raised != x.generation {
                x.marks |= UNSTORED;
            }
            x.generation = raised;
            if x.oldest.age_of(pointer) > 0 {
                x.oldest = pointer;
            }
        });
    }

    /// Counts live data that was inserted into the index. Returns false, and counts nothing, if the pointer is stale.
    pub(crate) fn add(&mut self, ptr: Ptr, size: Sectors, dirty: bool) -> bool {
        if !self.is_current(ptr) {
            return false;
        }
        let n = size.0 as u32;
        self.change(self.bucket_of(ptr), |x| {
            x.live_sectors += n;
            if dirty {
                x.dirty_sectors += n;
            }
        });
        true
    }

    /// Counts data that was removed from the index. Returns false, and counts nothing, if the pointer is stale.
    pub(crate) fn sub(&mut self, ptr: Ptr, size: Sectors, dirty: bool) -> bool {
        if !self.is_current(ptr) {
            return false;
        }
        let n = size.0 as u32;
        self.change(self.bucket_of(ptr), |x| {
            x.live_sectors = x.live_sectors.checked_sub(n).expect("more live sectors removed than added");
            if dirty {
                x.dirty_sectors =
                    x.dirty_sectors.checked_sub(n).expect("more dirty sectors removed than added");
            }
        });
        true
    }

    /// Sets the sectors of a bucket that data may use. Called before data is found.
    pub(crate) fn leave_footer_room(&mut self, data_sectors: Sectors) {
        self.data_sectors = data_sectors;
    }

    /// Notes whether data that was found at the start lies in the place of the footer of its bucket.
    pub(crate) fn note_footer_room(&mut self, ptr: Ptr, size: Sectors) {
        let inside = Sectors(ptr.offset().0 & ((1 << self.bucket_shift) - 1));
        if inside + size > self.data_sectors && self.is_current(ptr) {
            let b = self.bucket_of(ptr);
            self.table[b.0 as usize].marks |= NO_FOOTER;
        }
    }

    /// Whether a footer can be written to the bucket without overwriting data.
    pub(crate) fn has_footer_room(&self, b: BucketNr) -> bool {
        self.get(b).marks & NO_FOOTER == 0
    }

    /// Whether the data in the bucket is being copied to other buckets.
    pub(crate) fn is_moving(&self, b: BucketNr) -> bool {
        self.get(b).marks & MOVING != 0
    }

    /// Sets or clears the mark that the data of a bucket is being copied; returns false if that changes nothing.
    pub(crate) fn set_moving(&mut self, b: BucketNr, moving: bool) -> bool {
        let marks = &mut self.table[b.0 as usize].marks;
        let before = *marks & MOVING != 0;
        *marks = if moving { *marks | MOVING } else { *marks & !MOVING };
        before != moving
    }

    /// Marks every bucket except the reserved ones for a wipe, because it may have data to which nothing refers.
    pub(crate) fn mark_for_wipe(&mut self) {
        self.table.iter_mut().filter(|x| x.used != Use::Reserved).for_each(|x| x.marks |= TO_WIPE);
    }

    /// Whether the wipe under way has not finished this bucket yet.
    pub(crate) fn is_to_wipe(&self, b: BucketNr) -> bool {
        self.get(b).marks & TO_WIPE != 0
    }

    /// The number of buckets that the wipe has not finished yet.
    pub(crate) fn to_wipe(&self) -> u32 {
        self.table.iter().filter(|x| x.marks & TO_WIPE != 0).count() as u32
    }

    /// Records that the wipe has finished a bucket.
    pub(crate) fn wiped(&mut self, b: BucketNr) {
        self.table[b.0 as usize].marks &= !TO_WIPE;
    }

    pub(crate) fn pin(&mut self, b: BucketNr) {
        let more =
            |x: &mut Bucket| x.pins = x.pins.checked_add(1).expect("fewer than 65536 pins on a bucket");
        match &mut self.table[b.0 as usize] {
            // Usually the bucket is open: a further pin changes no count.
            x if x.pins > 0 => more(x),
            _ => {
                self.change(b, more);
                self.priorities.hold(b, true);
            }
        }
    }

    pub(crate) fn unpin(&mut self, b: BucketNr) {
        let less =
            |x: &mut Bucket| x.pins = x.pins.checked_sub(1).expect("a bucket is unpinned as often as pinned");
        match &mut self.table[b.0 as usize] {
            x if x.pins > 1 => less(x),
            _ => {
                self.change(b, less);
                self.priorities.hold(b, false);
            }
        }
    }

    /// Resets the priority of a data bucket that was just read or written.
    pub(crate) fn touch(&mut self, ptr: Ptr) {
        let b = self.bucket_of(ptr);
        if self.get(b).used == Use::Data {
            self.priorities.set(b, PRIO_INITIAL);
        }
    }

    /// Whether a durable prio chain has the generation of the bucket.
    pub(crate) fn is_stored(&self, b: BucketNr) -> bool {
        self.get(b).marks & UNSTORED == 0
    }

    /// Records that a chain with these generations is durable. Returns the buckets with live data whose present generation was
    /// not durable before.
    pub(crate) fn stored(&mut self, chain: impl Iterator<Item = Gen>) -> Vec<BucketNr> {
        let mut with_data = Vec::new();
        for ((x, generation), b) in self.table.iter_mut().zip(chain).zip(0..) {
            if x.marks & UNSTORED != 0 && x.generation == generation {
                x.marks &= !UNSTORED;
                if x.used == Use::Data && x.live_sectors > 0 {
                    with_data.push(BucketNr(b));
                }
            }
        }
        with_data
    }

    /// Invalidates a bucket: every pointer to it becomes stale. It may be written again after the new generation is
    /// durable. Returns whether the generation wrapped around.
    pub(crate) fn invalidate(&mut self, b: BucketNr) -> bool {
        assert!(self.may_invalidate(b), "bucket {b} is not reclaimable");
        let before = self.generation(b);
        self.change(b, |x| {
            x.generation = x.generation.next();
            x.live_sectors = 0;
            x.used = Use::Ready;
            x.marks = (x.marks | UNSTORED) & !NO_FOOTER;
        });
        self.priorities.set(b, PRIO_INITIAL);
        self.priorities.age_slowly(b, false);
        self.invalidated_since_gc += 1;
        self.generation(b).0 < before.0
    }

    /// Makes the bucket age slowly until it is reused.
    pub(crate) fn age_slowly(&mut self, b: BucketNr) {
        self.priorities.age_slowly(b, true);
    }

    /// Takes a ready bucket into use.
    pub(crate) fn take(&mut self, b: BucketNr, metadata: bool) {
        self.change(b, |x| {
            assert!(x.used == Use::Ready, "bucket {b} is allocated twice");
            x.used = if metadata { Use::Metadata } else { Use::Data };
        });
        self.priorities.set(b, if metadata { PRIO_METADATA } else { PRIO_INITIAL });
    }

    /// Makes a metadata bucket ready for use with its present generation: nothing durable refers to it, and no pointer
    /// to data in it with this generation was ever made.
    pub(crate) fn make_ready(&mut self, b: BucketNr) {
        self.change(b, |x| {
            assert!(x.used == Use::Metadata, "bucket {b} is not metadata");
            x.used = Use::Ready;
        });
        self.priorities.set(b, PRIO_INITIAL);
    }

    /// Frees the bucket of a btree node or a UUID table: pointers to it become stale.
    pub(crate) fn free_metadata(&mut self, b: BucketNr) {
        self.change(b, |x| {
            assert!(x.used == Use::Metadata, "bucket {b} is not metadata");
            x.generation = x.generation.next();
            x.used = Use::Data;
            x.marks |= UNSTORED;
        });
        self.priorities.set(b, 0);
    }

    /// Marks a bucket in which metadata was found at the start.
    pub(crate) fn mark_metadata(&mut self, b: BucketNr) {
        self.change(b, |x| x.used = Use::Metadata);
        self.priorities.set(b, PRIO_METADATA);
    }

    /// Records the oldest pointer to each bucket, which a walk of the whole index has found.
    pub(crate) fn finish_gc(&mut self, oldest: &[Gen]) {
        for (x, o) in self.table.iter_mut().zip(oldest) {
            x.oldest = *o;
        }
        self.invalidated_since_gc = 0;
    }

    pub(crate) fn generations(&self) -> Vec<Gen> {
        self.table.iter().map(|x| x.generation).collect()
    }

    /// Priority and generation of all buckets, for the prio sets.
    pub(crate) fn prios(&self) -> impl Iterator<Item = (u16, Gen)> + '_ {
        self.priorities.all().zip(&self.table).map(|(prio, x)| (prio, x.generation))
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = BucketNr> {
        (0..self.len()).map(BucketNr)
    }

    /// Calls `visit` with the content and the live sectors of each bucket of a range; numbers beyond the last bucket
    /// are skipped.
    pub(crate) fn visit_range(&self, some: std::ops::Range<usize>, mut visit: impl FnMut(Holds, Sectors)) {
        let end = some.end.min(self.table.len());
        for x in self.table.get(some.start..end).into_iter().flatten() {
            visit(x.holds(), Sectors(u64::from(x.live_sectors)));
        }
    }

    /// Calls `visit` with the content and the age of every bucket. The age is in units of priority; a bucket without a
    /// priority has none.
    pub(crate) fn visit_all(&self, mut visit: impl FnMut(Holds, Option<u16>)) {
        for (x, prio) in self.table.iter().zip(self.priorities.all()) {
            let aged = prio != 0 && prio != PRIO_METADATA;
            visit(x.holds(), aged.then(|| PRIO_INITIAL.saturating_sub(prio)));
        }
    }

    /// Ages the priorities of data buckets without pins; returns the smallest that is left ([`Priorities::age`]).
    pub(crate) fn age(&mut self) -> u16 {
        self.priorities.age()
    }
}
