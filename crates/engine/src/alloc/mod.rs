//! The allocator: hands out buckets, and places inside open buckets.
//!
//! [`Allocator`] owns the table of all buckets ([`Buckets`]), the list of ready buckets ([`pool`]), the open buckets
//! ([`open`]), the choice of the buckets that are evicted next ([`eviction`]), and the priorities on disk (`prio`). Its
//! task (`refill`) keeps the list full: it invalidates buckets and makes their new generations durable.
//!
//! The allocator uses the journal, because the entry that names a prio chain makes the chain take effect. Must not know
//! the index: the index borrows the table to account its keys ([`Allocator::buckets_mut`]).

mod buckets;
mod eviction;
mod idle;
mod open;
mod pool;
mod prio;
mod priorities;
mod refill;
#[cfg(test)]
mod tests;
mod walks;

use std::cell::{Cell, Ref, RefCell, RefMut};
use std::rc::Rc;

use format::{BucketNr, BucketPrio, Gen, Geometry, Ptr, Sectors};
use io::Nanos;
use io::sync::Permit;

pub(crate) use buckets::{Buckets, GEN_AGE_LIMIT, Holds, Use};
pub(crate) use eviction::{Aged, Eviction};
pub(crate) use idle::IdleBuckets;
pub(crate) use open::{DataKind, OpenBuckets, Placed};
use pool::Pool;
pub(crate) use pool::Purpose;
use prio::PrioChain;
pub(crate) use prio::{LoadedPrios, apply_prios, load_prios};
pub(crate) use refill::refill_task;
pub(crate) use walks::WalkRequests;

use crate::canary::{Bug, bug};
use crate::device::CacheDevice;
use crate::error::EngineError;
use crate::journal::Journal;
use crate::policy::replacement::{FillKind, Saving};

/// Counts of the allocator's own work.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct AllocCounters {
    /// Priority chains written.
    pub(crate) prio_writes: u64,
    /// Buckets whose generation wrapped around.
    pub(crate) gen_wraps: u64,
    /// The number of times that a new btree node had to wait for a bucket.
    pub(crate) btree_waits: u64,
}

/// The allocator of one cache set.
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
    idle: IdleBuckets,
    counters: Cell<AllocCounters>,
}

/// Construction, and read access for other components.
impl Allocator {
    /// Makes an allocator of the bucket table and the prio chain that recovery has read.
    pub(crate) fn new(
        device: Rc<CacheDevice>,
        journal: Rc<Journal>,
        buckets: Buckets,
        prios: LoadedPrios,
        eviction: Eviction,
    ) -> Allocator {
        let geometry = device.geometry();
        Allocator {
            pool: Pool::new(geometry.nbuckets, geometry.prio_buckets),
            open: RefCell::new(OpenBuckets::of_set(&geometry)),
            buckets: RefCell::new(buckets),
            eviction: RefCell::new(eviction),
            prios: PrioChain::found(prios),
            walks: WalkRequests::default(),
            idle: IdleBuckets::default(),
            counters: Cell::default(),
            geometry,
            journal,
            device,
        }
    }

    /// Borrows the bucket table. The borrow must not be held across an await.
    pub(crate) fn buckets(&self) -> Ref<'_, Buckets> {
        self.buckets.borrow()
    }

    /// Borrows the bucket table to account keys in it. The borrow must not be held across an await.
    pub(crate) fn buckets_mut(&self) -> RefMut<'_, Buckets> {
        self.buckets.borrow_mut()
    }

    /// The state that decides which buckets are evicted next.
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

    /// The percentage of buckets that cannot be reclaimed at once.
    pub(crate) fn in_use_percent(&self) -> u8 {
        self.buckets.borrow().in_use_percent() as u8
    }

    /// Whether the last refill found no bucket to invalidate.
    pub(crate) fn is_starved(&self) -> bool {
        self.pool.starved.get()
    }

    /// Sets the state after a refill that found no bucket to invalidate.
    #[cfg(test)]
    pub(crate) fn starve(&self) {
        self.pool.starved.set(true);
    }

    /// Whether there are more than twice as many unused buckets as are kept ready.
    pub(crate) fn has_plenty(&self) -> bool {
        self.pool.is_plenty(self.buckets.borrow().unused())
    }

    /// Whether new dirty data will soon fill the buckets that can be reused.
    pub(crate) fn is_filling(&self, now: Nanos) -> bool {
        self.pool.is_filling(&self.buckets.borrow(), now)
    }

    /// Whether no bucket is ready for a btree node.
    pub(crate) fn is_short_of_btree(&self) -> bool {
        self.pool.is_short_of_btree()
    }

    /// The sectors of a bucket that data may use.
    pub(crate) fn data_sectors(&self) -> Sectors {
        self.open.borrow().data_sectors()
    }

    /// The space that the moving garbage collector can take at once.
    pub(crate) fn moving_reserve(&self) -> Sectors {
        Sectors(self.pool.reserves.moving as u64 * self.data_sectors().0)
    }

    /// Makes buckets ready at the start. Buckets without a live pointer may be used at once, because every pointer to
    /// them is stale by the stored generation (format section 12.2, exception). Returns the number of ready buckets,
    /// and the number that priorities need.
    pub(crate) fn prime(&self) -> (usize, usize) {
        refill::prime(self, self.pool.reserves.total() + self.pool.batch);
        (self.pool.ready_len(), self.pool.reserves.prio)
    }
}

/// Taking buckets and giving them back.
impl Allocator {
    /// Takes a bucket for a btree node or the UUID table; waits until there is one.
    pub(crate) async fn take_btree_bucket(&self) -> Result<BucketNr, EngineError> {
        loop {
            self.device.check()?;
            if let Some(b) = self.try_take_btree_bucket() {
                return Ok(b);
            }
            self.btree_bucket_ready(|| self.device.check().is_err()).await;
        }
    }

    /// Waits until a bucket for a btree node or the UUID table may be ready, or `give_up` is true.
    pub(crate) async fn btree_bucket_ready(&self, give_up: impl Fn() -> bool) {
        self.count(|c| c.btree_waits += 1);
        // The write of priorities may wait for the journal, and must not wait while buckets are short.
        let _waits = self.journal.begin_bucket_wait();
        self.wait(Purpose::Btree, give_up).await;
    }

    /// Takes a bucket for a btree node or the UUID table if one is ready.
    pub(crate) fn try_take_btree_bucket(&self) -> Option<BucketNr> {
        self.pool.try_take(Purpose::Btree, &mut self.buckets.borrow_mut())
    }

    /// Gives back metadata buckets that were never written.
    pub(crate) fn give_back(&self, buckets: &[BucketNr]) {
        for b in buckets {
            self.buckets.borrow_mut().make_ready(*b);
        }
        if !buckets.is_empty() {
            self.pool.put_ready(buckets.iter().copied());
        }
    }

    /// Frees a metadata bucket to which nothing durable refers any more.
    pub(crate) fn free_metadata(&self, ptr: Ptr) {
        let buckets = &mut *self.buckets.borrow_mut();
        let b = buckets.bucket_of(ptr);
        buckets.free_metadata(b);
        self.pool.wanted.notify_all();
    }

    /// Waits until a bucket for `purpose` may be ready, or `give_up` is true; it is evaluated whenever buckets change.
    pub(crate) async fn wait(&self, purpose: Purpose, give_up: impl Fn() -> bool) {
        self.pool.wait(purpose, give_up).await;
    }

    /// Waits until no crash can bring back a pointer to a bucket that was invalidated before this call, or `give_up` is
    /// true.
    pub(crate) async fn generations_durable(&self, give_up: impl Fn() -> bool) {
        self.pool.generations_durable(give_up).await;
    }

    /// Makes the refill task check again, because buckets may have become reclaimable.
    pub(crate) fn recheck(&self) {
        self.pool.wanted.notify_all();
    }

    /// Makes the refill task check again, if a task waits for buckets.
    pub(crate) fn recheck_if_wanted(&self) {
        if self.pool.is_wanted() {
            self.pool.wanted.notify_all();
        }
    }

    /// Wakes every task that waits for buckets, so that it checks the state of the set.
    pub(crate) fn kick(&self) {
        self.pool.kick();
        self.idle.kick();
    }

    /// Takes a place in an open bucket, if there is room now. The bucket stays pinned until [`Allocator::release`].
    pub(crate) fn try_place(&self, kind: DataKind, want: Sectors) -> Option<Placed> {
        let buckets = &mut *self.buckets.borrow_mut();
        let purpose = if kind == DataKind::Moving { Purpose::Moving } else { Purpose::Data };
        let open = &mut *self.open.borrow_mut();
        let placed = open.place(kind, want, buckets, |b| {
            let taken = self.pool.try_take(purpose, b)?;
            if kind == DataKind::Dirty {
                self.pool.fills();
            }
            // Metadata of file systems is worth more than the data of other read misses.
            let fill = if kind == DataKind::Clean { FillKind::FirstRead } else { FillKind::Lasting };
            self.eviction.borrow_mut().on_fill(taken, fill);
            if kind == DataKind::Meta {
                b.age_slowly(taken);
            }
            Some(taken)
        });
        if open.has_closed() {
            self.report_idle(open, buckets);
        }
        placed
    }

    /// Reports buckets that were closed and have no write under way; the others are reported when their last write ends.
    #[cold]
    fn report_idle(&self, open: &mut OpenBuckets, buckets: &Buckets) {
        let idle = open.take_closed().into_iter().filter(|b| buckets.pins(*b) == 0);
        idle.for_each(|b| self.idle.add(b));
    }

    /// Releases a place whose key is in the index, or will never be.
    pub(crate) fn release(&self, placed: Placed) {
        let bucket = self.buckets.borrow().bucket_of(placed.ptr);
        self.unpin(bucket);
    }

    /// Removes the pin of a write to a bucket that has ended.
    pub(crate) fn unpin(&self, b: BucketNr) {
        let buckets = &mut *self.buckets.borrow_mut();
        buckets.unpin(b);
        if self.idle.is_wanted() && buckets.pins(b) == 0 {
            self.idle.add(b);
        }
        if buckets.is_reclaimable(b) {
            self.recheck_if_wanted();
        }
    }

    /// Records a hit of this length; `saving` is the time that a hit saves. Returns true if the data should be
    /// promoted, because its bucket will be evicted soon.
    pub(crate) fn used(&self, ptr: Ptr, sectors: Sectors, saving: Saving) -> bool {
        let buckets = &mut *self.buckets.borrow_mut();
        buckets.touch(ptr);
        let eviction = &mut *self.eviction.borrow_mut();
        eviction.observes() && eviction.on_hit(buckets, ptr, saving.of(sectors))
    }

    /// Counts foreground sectors that were not bypassed; they age the priorities (semantics section 7.5).
    pub(crate) fn count_for_aging(&self, sectors: Sectors) -> Aged {
        let cache_sectors = self.geometry.used_sectors().0;
        let eviction = &mut *self.eviction.borrow_mut();
        match eviction.is_due(sectors, cache_sectors) {
            false => Aged::No,
            true => eviction.age(self.buckets.borrow_mut().age()),
        }
    }

    /// Keeps priorities from being written until the permit is dropped.
    pub(crate) async fn hold_prios(&self) -> Permit {
        self.prios.hold().await
    }

    /// Writes a prio chain, unless this run has written the newest one. The caller holds the permit of
    /// [`Self::hold_prios`].
    pub(crate) async fn own_prios(&self) -> Result<(), EngineError> {
        if self.prios.is_ours() { Ok(()) } else { prio::write_prios(self).await }
    }

    /// Makes the generation of a bucket durable if it is not, so that every later start knows it. A bucket that was ready at the
    /// start, or of which a key in journal or index had a newer generation than the prio chain, is used before its generation is
    /// durable. The refill task writes the chain. Returns whether the generation is durable: it is not if buckets or the journal
    /// are short, or the set stops or fails.
    pub(crate) async fn store_generation(&self, b: BucketNr) -> bool {
        if self.is_stored(b) || !self.may_store() {
            return self.is_stored(b);
        }
        self.prios.want();
        self.pool.wanted.notify_all();
        let is_over = || !self.prios.is_wanted() || self.device.is_stopping() || self.device.check().is_err();
        self.pool.wanted.wait_until(is_over).await;
        self.is_stored(b)
    }

    /// Whether the generation of a bucket is durable.
    pub(crate) fn is_stored(&self, b: BucketNr) -> bool {
        self.buckets.borrow().is_stored(b) || bug(Bug::FooterBeforeGeneration)
    }

    /// Records that a chain with these generations is durable. Reports the buckets whose footers waited for it.
    fn stored(&self, chain: &[BucketPrio]) {
        let buckets = &mut *self.buckets.borrow_mut();
        let waited = buckets.stored(chain.iter().map(|p| p.generation));
        waited.into_iter().filter(|b| buckets.pins(*b) == 0).for_each(|b| self.idle.add(b));
        self.prios.end_request();
        self.pool.wanted.notify_all();
    }

    /// Whether a further prio chain leaves the reserves of btree nodes and of the next chain, and the journal has room for the
    /// entry that names it.
    fn may_store(&self) -> bool {
        let reserves = &self.pool.reserves;
        let left = self.pool.ready_len().checked_sub(reserves.prio);
        left.is_some_and(|left| left >= reserves.below(Purpose::Moving)) && self.journal.has_room_to_spare()
    }

    /// The buckets of the newest prio chain.
    pub(crate) fn prio_chain(&self) -> Vec<BucketNr> {
        self.prios.buckets()
    }

    /// Takes ready buckets for which `wanted` is true out of the list, at most `most` and at most a quarter of the
    /// list. [`Self::put_ready`] puts them back.
    pub(crate) fn take_ready(&self, most: usize, wanted: impl Fn(BucketNr) -> bool) -> Vec<BucketNr> {
        let most = (self.pool.ready_len() / 4).clamp(1, most);
        self.pool.take_out(most, wanted)
    }

    /// Puts buckets whose generations are durable into the list of ready buckets.
    pub(crate) fn put_ready(&self, buckets: Vec<BucketNr>) {
        self.pool.put_ready(buckets);
    }

    /// Closes the open buckets that a wipe has not finished yet, so that no more data goes there.
    pub(crate) fn close_marked(&self) {
        let (open, buckets) = (&mut *self.open.borrow_mut(), &mut *self.buckets.borrow_mut());
        open.close_marked(buckets);
        self.report_idle(open, buckets);
    }

    /// Closes all open buckets. The caller knows that no data follows.
    pub(crate) fn close_all(&self) {
        let (open, buckets) = (&mut *self.open.borrow_mut(), &mut *self.buckets.borrow_mut());
        open.close_all(buckets);
        self.report_idle(open, buckets);
    }

    /// Pins a bucket until [`Allocator::unpin`]: it is not reused meanwhile.
    pub(crate) fn pin(&self, b: BucketNr) {
        self.buckets.borrow_mut().pin(b);
    }

    /// Leaves the end of each bucket free for its footer: data uses the first `data_sectors` only. Called before data is
    /// placed. Reports idle buckets from now on.
    pub(crate) fn leave_room_for_footers(&self, data_sectors: Sectors) {
        self.open.borrow_mut().limit_data(data_sectors);
        self.idle.want();
    }

    /// Pins a bucket of data that still has this generation and no other pins. Returns whether it did.
    pub(crate) fn pin_idle(&self, b: BucketNr, generation: Gen) -> bool {
        let buckets = &mut *self.buckets.borrow_mut();
        let is_same = buckets.generation(b) == generation && buckets.used(b) == Use::Data;
        let pins = is_same && buckets.pins(b) == 0;
        if pins {
            buckets.pin(b);
        }
        pins
    }

    /// Removes the pin of [`Self::pin_idle`]. Nothing was added to the bucket, so nothing follows.
    pub(crate) fn unpin_idle(&self, b: BucketNr) {
        self.buckets.borrow_mut().unpin(b);
    }

    /// Resets the priority of the bucket of data that was just written.
    pub(crate) fn touch(&self, ptr: Ptr) {
        self.buckets.borrow_mut().touch(ptr);
    }

    /// Marks all buckets for a wipe.
    pub(crate) fn mark_for_wipe(&self) {
        self.buckets.borrow_mut().mark_for_wipe();
    }

    /// Records that a wipe has finished a bucket.
    pub(crate) fn wiped(&self, b: BucketNr) {
        self.buckets.borrow_mut().wiped(b);
    }

    /// Marks a bucket as being emptied by packing, or not; returns whether that is a change.
    pub(crate) fn set_moving(&self, b: BucketNr, moving: bool) -> bool {
        self.buckets.borrow_mut().set_moving(b, moving)
    }

    /// Records that a walk of the index ended, with the oldest generation of a pointer to each bucket.
    pub(crate) fn finish_gc(&self, oldest: &[Gen]) {
        self.buckets.borrow_mut().finish_gc(oldest);
    }

    /// The buckets whose last write has ended.
    pub(crate) fn idle_buckets(&self) -> &IdleBuckets {
        &self.idle
    }
}
