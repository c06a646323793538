//! The allocator: hands out buckets, and sectors inside open buckets.
//!
//! [`Allocator`] owns the table of all buckets ([`Buckets`]), the list of those that are ready ([`pool`]), the open ones
//! ([`open`]), the choice of those that are given up next ([`eviction`]), and the priorities on disk (`prio`). Its task
//! (`refill`) keeps the list full: it invalidates buckets and makes their new generations durable.
//!
//! Names the journal, whose entries make a prio chain take effect. Must not know the index: what accounts keys in the table
//! borrows it ([`Allocator::buckets_mut`]).

mod buckets;
mod eviction;
mod open;
mod pool;
mod prio;
mod refill;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod waits;
mod walks;

use std::cell::{Cell, Ref, RefCell, RefMut};
use std::rc::Rc;

use format::{BucketNr, Geometry, Inode, Ptr, Sector, Sectors};
use io::Nanos;
use io::sync::Permit;

pub(crate) use buckets::{Buckets, GEN_AGE_LIMIT, Holds, Use};
pub(crate) use eviction::{Aged, Eviction};
pub(crate) use open::{OpenBuckets, Placed, Stream};
use pool::Pool;
pub(crate) use pool::Purpose;
use prio::PrioChain;
pub(crate) use prio::{LoadedPrios, apply_prios, load_prios};
pub(crate) use refill::refill_task;
pub(crate) use walks::WalkRequests;

use crate::device::CacheDevice;
use crate::error::EngineError;
use crate::journal::Journal;
use crate::policy::replacement::{Fill, Saving};

/// Counts of the allocator's own work.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct AllocCounters {
    /// Priority chains written.
    pub(crate) prio_writes: u64,
    /// Buckets whose generation went around.
    pub(crate) gen_wraps: u64,
    /// Times that a new btree node had to wait for a bucket.
    pub(crate) btree_waits: u64,
}

/// See the module head.
pub(crate) struct Allocator {
    device: Rc<CacheDevice>,
    journal: Rc<Journal>,
    geometry: Geometry,
    buckets: RefCell<Buckets>,
    pool: Pool,
    open: RefCell<OpenBuckets>,
    eviction: RefCell<Eviction>,
    prios: PrioChain,
    walks: WalkRequests,
    counters: Cell<AllocCounters>,
}

/// Wiring, and what others look at.
impl Allocator {
    /// An allocator over the table that recovery made, with the prio chain that it found.
    pub(crate) fn new(
        device: Rc<CacheDevice>,
        journal: Rc<Journal>,
        buckets: Buckets,
        prios: LoadedPrios,
        eviction: Eviction,
    ) -> Allocator {
        let geometry = device.geometry();
        Allocator {
            pool: Pool::new(&geometry, geometry.nbuckets, geometry.prio_buckets),
            open: RefCell::new(OpenBuckets::of_set(geometry.nbuckets)),
            buckets: RefCell::new(buckets),
            eviction: RefCell::new(eviction),
            prios: PrioChain::found(prios),
            walks: WalkRequests::default(),
            counters: Cell::default(),
            geometry,
            journal,
            device,
        }
    }

    /// The bucket table. Not to be held across an await.
    pub(crate) fn buckets(&self) -> Ref<'_, Buckets> {
        self.buckets.borrow()
    }

    /// The bucket table, to account keys in it. Not to be held across an await.
    pub(crate) fn buckets_mut(&self) -> RefMut<'_, Buckets> {
        self.buckets.borrow_mut()
    }

    /// Which buckets are given up next.
    pub(crate) fn eviction(&self) -> RefMut<'_, Eviction> {
        self.eviction.borrow_mut()
    }

    /// Requests for walks of the index, which make buckets reclaimable.
    pub(crate) fn walks(&self) -> &WalkRequests {
        &self.walks
    }

    /// Counts of the allocator's own work.
    pub(crate) fn counters(&self) -> AllocCounters {
        self.counters.get()
    }

    fn count(&self, change: impl FnOnce(&mut AllocCounters)) {
        let mut c = self.counters.get();
        change(&mut c);
        self.counters.set(c);
    }

    /// Percent of the cache that cannot be reclaimed at once.
    pub(crate) fn in_use_percent(&self) -> u8 {
        self.buckets.borrow().in_use_percent() as u8
    }

    /// The last refill found nothing to invalidate.
    pub(crate) fn is_starved(&self) -> bool {
        self.pool.starved.get()
    }

    /// As if the last refill had found nothing.
    #[cfg(test)]
    pub(crate) fn starve(&self) {
        self.pool.starved.set(true);
    }

    /// The unused buckets are well above what is kept ready for what comes next.
    pub(crate) fn has_plenty(&self) -> bool {
        self.pool.is_plenty(self.buckets.borrow().unused())
    }

    /// Whether new dirty data will soon have filled the buckets that can be reused.
    pub(crate) fn is_filling(&self, now: Nanos) -> bool {
        self.pool.is_filling(&self.buckets.borrow(), now)
    }

    /// No bucket is ready for a btree node.
    pub(crate) fn is_short_of_btree(&self) -> bool {
        self.pool.is_short_of_btree()
    }

    /// What moving gc can take at once.
    pub(crate) fn moving_reserve(&self) -> Sectors {
        Sectors(self.pool.reserves.moving as u64 * self.geometry.bucket_sectors.0)
    }

    /// At start, buckets without any live pointer may be used at once: whatever still points to them was stale by the
    /// stored generation (format section 12.2, exception). Returns how many are ready, and how many priorities need.
    pub(crate) fn prime(&self) -> (usize, usize) {
        refill::prime(self, self.pool.reserves.total() + self.pool.batch);
        (self.pool.ready_len(), self.pool.reserves.prio)
    }
}

/// Taking buckets and giving them back.
impl Allocator {
    /// A bucket for a btree node or the UUID table, waiting for one.
    pub(crate) async fn take_btree_bucket(&self) -> Result<BucketNr, EngineError> {
        loop {
            self.device.check()?;
            if let Some(b) = self.try_take_btree_bucket() {
                return Ok(b);
            }
            self.count(|c| c.btree_waits += 1);
            // Priorities that wait for the journal must not wait any more.
            self.journal.recheck();
            self.wait(Purpose::Btree, || self.device.check().is_err()).await;
        }
    }

    /// A bucket for a btree node or the UUID table, if one is ready.
    pub(crate) fn try_take_btree_bucket(&self) -> Option<BucketNr> {
        self.pool.try_take(Purpose::Btree, &mut self.buckets.borrow_mut())
    }

    /// Returns metadata buckets that were never written.
    pub(crate) fn give_back(&self, buckets: &[BucketNr]) {
        for b in buckets {
            self.buckets.borrow_mut().reuse(*b);
        }
        if !buckets.is_empty() {
            self.pool.put_ready(buckets.iter().copied());
        }
    }

    /// A metadata bucket is not needed any more: nothing durable names it.
    pub(crate) fn free_metadata(&self, ptr: Ptr) {
        let buckets = &mut *self.buckets.borrow_mut();
        let b = buckets.bucket_of(ptr);
        buckets.free_metadata(b);
        self.pool.wanted.notify_all();
    }

    /// Waits until a bucket for `purpose` may be there, or `give_up` holds (looked at whenever something changes).
    pub(crate) async fn wait(&self, purpose: Purpose, give_up: impl Fn() -> bool) {
        self.pool.wait(purpose, give_up).await;
    }

    /// Waits until no crash can bring back a pointer to a bucket that was invalidated before this call, or `give_up` holds.
    pub(crate) async fn generations_durable(&self, give_up: impl Fn() -> bool) {
        self.pool.generations_durable(give_up).await;
    }

    /// Makes the refill check again: buckets may have become reclaimable.
    pub(crate) fn recheck(&self) {
        self.pool.wanted.notify_all();
    }

    /// Makes the refill check again, if a task waits for buckets.
    pub(crate) fn recheck_if_wanted(&self) {
        if self.pool.is_wanted() {
            self.pool.wanted.notify_all();
        }
    }

    /// Wakes everybody who waits, to look at the state of the set.
    pub(crate) fn kick(&self) {
        self.pool.kick();
    }

    /// Room in an open bucket, if there is any now. The bucket stays pinned until [`Allocator::release`].
    pub(crate) fn try_place(&self, stream: Stream, at: (Inode, Sector), want: Sectors) -> Option<Placed> {
        let buckets = &mut *self.buckets.borrow_mut();
        let purpose = if stream == Stream::Moving { Purpose::Moving } else { Purpose::Data };
        self.open.borrow_mut().place(
            stream,
            at,
            want,
            0,
            self.geometry.bucket_sectors,
            self.geometry.block_sectors,
            buckets,
            |b| {
                let taken = self.pool.try_take(purpose, b)?;
                if stream == Stream::Dirty {
                    self.pool.fills();
                }
                // What is read of a file system's metadata is worth more than what other reads bring in.
                let fill = if stream == Stream::Clean { Fill::FirstRead } else { Fill::Lasting };
                self.eviction.borrow_mut().on_fill(taken, fill);
                if stream == Stream::Meta {
                    b.age_slowly(taken);
                }
                Some(taken)
            },
        )
    }

    /// The key of a placed piece is in the index, or will never be.
    pub(crate) fn release(&self, placed: Placed) {
        let bucket = self.buckets.borrow().bucket_of(placed.ptr);
        self.unpin(bucket);
    }

    /// Nothing is on its way to the bucket any more.
    pub(crate) fn unpin(&self, b: BucketNr) {
        let buckets = &mut *self.buckets.borrow_mut();
        buckets.unpin(b);
        if buckets.is_reclaimable(b) {
            self.recheck_if_wanted();
        }
    }

    /// Records a hit of this length, which saved what `saving` says. True if the data should be copied elsewhere, because its
    /// bucket will be reused soon.
    pub(crate) fn used(&self, ptr: Ptr, sectors: Sectors, saving: Saving) -> bool {
        let buckets = &mut *self.buckets.borrow_mut();
        buckets.touch(ptr);
        let eviction = &mut *self.eviction.borrow_mut();
        eviction.observes() && eviction.on_hit(buckets, ptr, saving.of(sectors))
    }

    /// Foreground sectors that were not bypassed age the priorities (semantics section 7.5).
    pub(crate) fn count_for_aging(&self, sectors: Sectors) -> Aged {
        let cache_sectors = self.geometry.used_sectors().0;
        let eviction = &mut *self.eviction.borrow_mut();
        match eviction.is_due(sectors, cache_sectors) {
            false => Aged::No,
            true => eviction.age(self.buckets.borrow_mut().age()),
        }
    }

    /// Keeps priorities from being written while the permit is held.
    pub(crate) async fn hold_prios(&self) -> Permit {
        self.prios.hold().await
    }

    /// Writes priorities and generations as they are, unless the newest chain was written by this run. The caller holds
    /// the permit of [`Self::hold_prios`].
    pub(crate) async fn own_prios(&self) -> Result<(), EngineError> {
        if self.prios.is_ours() { Ok(()) } else { prio::write_prios(self).await }
    }

    /// Buckets of the newest prio chain.
    pub(crate) fn prio_chain(&self) -> Vec<BucketNr> {
        self.prios.buckets()
    }

    /// Takes ready buckets out of the list that are `wanted`, at most `most` and a quarter of the list;
    /// [`Self::put_ready`] puts them back.
    pub(crate) fn take_ready(&self, most: usize, wanted: impl Fn(BucketNr) -> bool) -> Vec<BucketNr> {
        let most = (self.pool.ready_len() / 4).clamp(1, most);
        self.pool.take_out(most, wanted)
    }

    /// Puts buckets into the list of ready ones. Their generations are durable.
    pub(crate) fn put_ready(&self, buckets: Vec<BucketNr>) {
        self.pool.put_ready(buckets);
    }

    /// Closes the open buckets that a wipe has before it: nothing more goes there.
    pub(crate) fn close_marked(&self) {
        self.open.borrow_mut().close_marked(&mut self.buckets.borrow_mut());
    }
}
