//! The bucket table: what every bucket of the cache device holds.
//!
//! Owns generations, priorities, uses and the exact count of live and dirty sectors of each bucket. Every change of
//! the index is accounted here, so the table is right at any moment and nothing has to be marked by a walk. Must not
//! know the index or any device.
//!
//! Invariants: `dirty <= live`; a bucket with dirty sectors or pins is never reclaimable; `available` is the number
//! of reclaimable and ready buckets.

use format::{BucketNr, Gen, Geometry, Ptr, Sectors};

/// What a bucket is used for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Use {
    /// Superblock area and journal: never allocated.
    Reserved,
    /// Invalidated, on its way to or in the list of buckets ready for allocation.
    Ready,
    /// Btree node, prio set or UUID table.
    Metadata,
    /// Cached data, or nothing at all.
    Data,
}

/// What a bucket holds, for figures.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Holds {
    Nothing,
    Clean,
    Dirty,
    Metadata,
}

/// Priority of metadata buckets (format section 5).
pub(crate) const PRIO_METADATA: u16 = u16::MAX;
/// Priority of a bucket that was just used (format section 5).
pub(crate) const PRIO_INITIAL: u16 = 32768;
/// A bucket whose oldest pointer is this far behind must not be invalidated (format section 5, `GC_GEN_MAX`).
pub(crate) const GEN_AGE_LIMIT: u8 = 96;

/// Mark: what is in the bucket is being copied elsewhere.
const MOVING: u8 = 1;
/// Mark: the bucket ages slowly, since it holds file systems' metadata.
const SLOW: u8 = 2;
/// Mark: it may hold data that nothing refers to, and a wipe is under way.
const TO_WIPE: u8 = 4;
/// Such buckets age with every so many agings of the others.
const SLOW_AGING: u32 = 8;

#[derive(Clone, Copy)]
struct Bucket {
    generation: Gen,
    /// Oldest generation of any pointer to the bucket that may still be in the index.
    oldest: Gen,
    used: Use,
    prio: u16,
    /// Reads do not pin; allocations in progress and open buckets do.
    pins: u16,
    /// [`MOVING`], [`SLOW`], [`TO_WIPE`].
    marks: u8,
    live_sectors: u32,
    dirty_sectors: u32,
}

impl Bucket {
    fn reclaimable(&self) -> bool {
        self.used == Use::Data && self.dirty_sectors == 0 && self.pins == 0
    }

    /// Nothing is in it, and nothing is on its way there.
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

pub(crate) struct Buckets {
    table: Vec<Bucket>,
    bucket_shift: u32,
    available: u32,
    /// What `available` says about how full the cache is: asked for far more often than it changes.
    in_use_percent: u32,
    reclaimable: u32,
    unused: u32,
    live_sectors: u64,
    /// Buckets invalidated since the last walk of the index.
    invalidated_since_gc: u64,
    /// Agings so far.
    agings: u32,
}

impl Buckets {
    /// Bytes of memory for each bucket.
    pub(crate) const BYTES_EACH: u64 = size_of::<Bucket>() as u64;

    pub(crate) fn new(geometry: &Geometry, first_usable: BucketNr, nbuckets: u32) -> Buckets {
        let fresh = |i: u32| Bucket {
            generation: Gen(0),
            oldest: Gen(0),
            used: if i < first_usable.0 { Use::Reserved } else { Use::Data },
            prio: 0,
            pins: 0,
            marks: 0,
            live_sectors: 0,
            dirty_sectors: 0,
        };
        let usable = nbuckets - first_usable.0;
        let mut buckets = Buckets {
            table: (0..nbuckets).map(fresh).collect(),
            bucket_shift: geometry.bucket_sectors.0.trailing_zeros(),
            available: usable,
            in_use_percent: 0,
            reclaimable: usable,
            unused: usable,
            live_sectors: 0,
            invalidated_since_gc: 0,
            agings: 0,
        };
        buckets.in_use_percent = buckets.percent_in_use();
        buckets
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

    /// Changes a bucket and keeps the counts right.
    fn change(&mut self, b: BucketNr, f: impl FnOnce(&mut Bucket)) {
        let bucket = &mut self.table[b.0 as usize];
        let before = *bucket;
        f(bucket);
        let after = *bucket;
        assert!(after.dirty_sectors <= after.live_sectors, "bucket {b}: more dirty than live sectors");
        self.live_sectors =
            self.live_sectors - u64::from(before.live_sectors) + u64::from(after.live_sectors);
        // Most changes are of buckets that stay dirty or pinned, which counts among the same before and after.
        if before.used != after.used || before.reclaimable() || after.reclaimable() {
            self.recount(&before, &after);
        }
    }

    /// A bucket that was like `before` is like `after`.
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
        self.get(b).prio
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

    /// Whether data behind `ptr` is still what it was when the pointer was made.
    pub(crate) fn is_current(&self, ptr: Ptr) -> bool {
        let b = self.bucket_of(ptr);
        self.table.get(b.0 as usize).is_some_and(|x| x.generation == ptr.generation())
    }

    /// Holds nothing that anybody needs.
    pub(crate) fn is_reclaimable(&self, b: BucketNr) -> bool {
        self.get(b).reclaimable()
    }

    /// May be invalidated now: reclaimable, and its generation has not run too far ahead.
    pub(crate) fn may_invalidate(&self, b: BucketNr) -> bool {
        let x = self.get(b);
        x.reclaimable() && x.generation.0.wrapping_sub(x.oldest.0) < GEN_AGE_LIMIT
    }

    pub(crate) fn reclaimable(&self) -> u32 {
        self.reclaimable
    }

    /// Buckets that hold nothing at all: using one costs nobody a hit.
    pub(crate) fn unused(&self) -> u32 {
        self.unused
    }

    /// Percent of all buckets that hold dirty data or metadata or are being filled.
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

    /// State as read from the prio sets.
    pub(crate) fn load(&mut self, b: BucketNr, generation: Gen, prio: u16) {
        self.change(b, |x| {
            x.generation = generation;
            x.oldest = generation;
            x.prio = prio;
        });
    }

    /// A pointer of this generation exists: the bucket's generation is at least that (format section 5).
    pub(crate) fn raise(&mut self, b: BucketNr, pointer: Gen) {
        self.change(b, |x| {
            x.generation = x.generation.raised_by(pointer);
            if x.oldest.age_of(pointer) > 0 {
                x.oldest = pointer;
            }
        });
    }

    /// Live data behind `ptr` appeared in the index. Nothing happens for a stale pointer.
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

    /// Data behind `ptr` left the index. Returns whether the pointer was current.
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

    /// Whether what is in the bucket is being copied elsewhere.
    pub(crate) fn is_moving(&self, b: BucketNr) -> bool {
        self.get(b).marks & MOVING != 0
    }

    /// Begins or ends copying what is in a bucket; false if that is so already.
    pub(crate) fn set_moving(&mut self, b: BucketNr, moving: bool) -> bool {
        let marks = &mut self.table[b.0 as usize].marks;
        let before = *marks & MOVING != 0;
        *marks = if moving { *marks | MOVING } else { *marks & !MOVING };
        before != moving
    }

    /// A wipe begins: every bucket but the reserved ones may hold data that nothing refers to.
    pub(crate) fn mark_for_wipe(&mut self) {
        self.table.iter_mut().filter(|x| x.used != Use::Reserved).for_each(|x| x.marks |= TO_WIPE);
    }

    /// Whether the wipe that is under way has this bucket before it.
    pub(crate) fn is_to_wipe(&self, b: BucketNr) -> bool {
        self.get(b).marks & TO_WIPE != 0
    }

    /// How many buckets the wipe has before it.
    pub(crate) fn to_wipe(&self) -> u32 {
        self.table.iter().filter(|x| x.marks & TO_WIPE != 0).count() as u32
    }

    /// The wipe is done with a bucket.
    pub(crate) fn wiped(&mut self, b: BucketNr) {
        self.table[b.0 as usize].marks &= !TO_WIPE;
    }

    pub(crate) fn pin(&mut self, b: BucketNr) {
        let more =
            |x: &mut Bucket| x.pins = x.pins.checked_add(1).expect("fewer than 65536 pins on a bucket");
        match &mut self.table[b.0 as usize] {
            // Mostly the bucket is open: a pin more changes no count.
            x if x.pins > 0 => more(x),
            _ => self.change(b, more),
        }
    }

    pub(crate) fn unpin(&mut self, b: BucketNr) {
        let less =
            |x: &mut Bucket| x.pins = x.pins.checked_sub(1).expect("a bucket is unpinned as often as pinned");
        match &mut self.table[b.0 as usize] {
            x if x.pins > 1 => less(x),
            _ => self.change(b, less),
        }
    }

    /// The bucket was just read or written.
    pub(crate) fn touch(&mut self, ptr: Ptr) {
        let b = self.bucket_of(ptr);
        let x = &mut self.table[b.0 as usize];
        if x.used == Use::Data {
            x.prio = PRIO_INITIAL;
        }
    }

    /// Makes every pointer to the bucket stale. It may be written again once the new generation is durable.
    pub(crate) fn invalidate(&mut self, b: BucketNr) {
        assert!(self.may_invalidate(b), "bucket {b} is not reclaimable");
        self.change(b, |x| {
            x.generation = x.generation.next();
            x.live_sectors = 0;
            x.used = Use::Ready;
            x.prio = PRIO_INITIAL;
            x.marks &= !SLOW;
        });
        self.invalidated_since_gc += 1;
    }

    /// The bucket is kept longer than others, until it is reused.
    pub(crate) fn age_slowly(&mut self, b: BucketNr) {
        self.table[b.0 as usize].marks |= SLOW;
    }

    /// A ready bucket is taken into use.
    pub(crate) fn take(&mut self, b: BucketNr, metadata: bool) {
        self.change(b, |x| {
            assert!(x.used == Use::Ready, "bucket {b} is allocated twice");
            x.used = if metadata { Use::Metadata } else { Use::Data };
            x.prio = if metadata { PRIO_METADATA } else { PRIO_INITIAL };
        });
    }

    /// A metadata bucket that nothing durable refers to any more is ready for use as it is: no pointer with its
    /// generation was ever made.
    pub(crate) fn make_ready(&mut self, b: BucketNr) {
        self.change(b, |x| {
            assert!(x.used == Use::Metadata, "bucket {b} is no metadata");
            x.used = Use::Ready;
            x.prio = PRIO_INITIAL;
        });
    }

    /// A btree node, or a UUID table, is gone: pointers to it become stale.
    pub(crate) fn free_metadata(&mut self, b: BucketNr) {
        self.change(b, |x| {
            assert!(x.used == Use::Metadata, "bucket {b} is no metadata");
            x.generation = x.generation.next();
            x.used = Use::Data;
            x.prio = 0;
        });
    }

    /// The bucket holds metadata (found while loading).
    pub(crate) fn mark_metadata(&mut self, b: BucketNr) {
        self.change(b, |x| {
            x.used = Use::Metadata;
            x.prio = PRIO_METADATA;
        });
    }

    /// A walk of the whole index found `oldest` as the oldest pointers.
    pub(crate) fn finish_gc(&mut self, oldest: &[Gen]) {
        for (x, o) in self.table.iter_mut().zip(oldest) {
            x.oldest = *o;
        }
        self.invalidated_since_gc = 0;
    }

    pub(crate) fn generations(&self) -> Vec<Gen> {
        self.table.iter().map(|x| x.generation).collect()
    }

    /// (prio, gen) of all buckets, for the prio sets.
    pub(crate) fn prios(&self) -> impl Iterator<Item = (u16, Gen)> + '_ {
        self.table.iter().map(|x| (x.prio, x.generation))
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = BucketNr> {
        (0..self.len()).map(BucketNr)
    }

    /// Shows some buckets, as far as there are any: what they hold, and their live sectors.
    pub(crate) fn visit_range(&self, some: std::ops::Range<usize>, mut visit: impl FnMut(Holds, Sectors)) {
        let end = some.end.min(self.table.len());
        for x in self.table.get(some.start..end).into_iter().flatten() {
            visit(x.holds(), Sectors(u64::from(x.live_sectors)));
        }
    }

    /// Shows every bucket: what it holds, and how long it was not used, in units of priority, if it has a priority.
    pub(crate) fn visit_all(&self, mut visit: impl FnMut(Holds, Option<u16>)) {
        for x in &self.table {
            let holds = x.holds();
            let aged = x.prio != 0 && x.prio != PRIO_METADATA;
            visit(holds, aged.then(|| PRIO_INITIAL.saturating_sub(x.prio)));
        }
    }

    /// Age all data priorities by one (the kernel's rescaling), those that age slowly once in [`SLOW_AGING`] times;
    /// returns the smallest that is left.
    pub(crate) fn age(&mut self) -> u16 {
        self.agings = self.agings.wrapping_add(1);
        let all = self.agings.is_multiple_of(SLOW_AGING);
        let mut min = PRIO_INITIAL;
        for x in &mut self.table {
            if x.prio != 0 && x.prio != PRIO_METADATA && x.pins == 0 {
                x.prio -= u16::from(all || x.marks & SLOW == 0);
                min = min.min(x.prio);
            }
        }
        min
    }
}
