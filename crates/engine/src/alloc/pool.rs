//! The list of buckets that are ready for use.
//!
//! Owns the list, the reserves for each purpose, the count of tasks that wait for a bucket, and the knowledge which
//! rounds of invalidation are durable. Must not know how buckets become ready.
//!
//! Invariants: a bucket in the list has a durable generation, or one that no durable pointer can match, so it may be
//! written at once; data leaves the reserves for metadata, and btree nodes leave those for priorities, so that writes
//! that free space always find room.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

use format::BucketNr;
use io::Nanos;
use io::sync::Event;

use crate::policy::yielding::{self, RateEstimator};

use super::Buckets;

/// The purpose of a bucket. A purpose may use the reserves of those before it in this list.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Purpose {
    /// Cached data.
    Data,
    /// Data that the moving garbage collector packs together.
    Moving,
    /// Btree nodes and the UUID table.
    Btree,
    /// Prio sets.
    Prio,
}

/// The number of buckets that are reserved for each purpose.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reserves {
    pub(crate) moving: usize,
    pub(crate) btree: usize,
    pub(crate) prio: usize,
}

impl Reserves {
    pub(crate) fn new(nbuckets: u32, prio_buckets: u32) -> Reserves {
        let n = nbuckets as usize;
        Reserves {
            moving: (n / 128).clamp(1, 256),
            btree: (n / 128).clamp(6, 64),
            prio: prio_buckets as usize,
        }
    }

    /// Buckets that must stay in the list when one is taken for `purpose`.
    pub(super) fn below(&self, purpose: Purpose) -> usize {
        match purpose {
            Purpose::Data => self.prio + self.btree + self.moving,
            Purpose::Moving => self.prio + self.btree,
            Purpose::Btree => self.prio,
            Purpose::Prio => 0,
        }
    }

    pub(crate) fn total(&self) -> usize {
        self.below(Purpose::Data)
    }
}

/// Counts a task that waits for a bucket, until the wait ends or its future is dropped.
struct Waiting<'a>(&'a Cell<usize>);

impl<'a> Waiting<'a> {
    fn begin(count: &'a Cell<usize>) -> Waiting<'a> {
        count.set(count.get() + 1);
        Waiting(count)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// The ready buckets and the tasks that wait for them.
pub(crate) struct Pool {
    ready: RefCell<VecDeque<BucketNr>>,
    pub(crate) reserves: Reserves,
    /// The number of buckets to keep ready beyond the reserves.
    pub(crate) batch: usize,
    /// The number of buckets that were taken for new dirty data, and its rate per second. Data of read misses does not
    /// count, because it can be evicted again at once.
    taken: Cell<u64>,
    demand: Cell<RateEstimator>,
    /// The number of tasks that wait for a bucket.
    pub(super) waiting: Cell<usize>,
    /// Notified when buckets became ready.
    refilled: Event,
    /// Notified when buckets were taken or became reclaimable; wakes the refill task.
    pub(crate) wanted: Event,
    /// Whether the last refill found no bucket to invalidate.
    pub(crate) starved: Cell<bool>,
    /// The number of rounds of invalidation, and of those whose generations are durable.
    invalidated: Cell<u64>,
    settled: Cell<u64>,
    settling: Event,
}

impl Pool {
    pub(crate) fn new(nbuckets: u32, prio_buckets: u32) -> Pool {
        Pool {
            ready: RefCell::default(),
            reserves: Reserves::new(nbuckets, prio_buckets),
            batch: (nbuckets as usize / 32).clamp(4, 1024),
            taken: Cell::default(),
            demand: Cell::default(),
            waiting: Cell::default(),
            refilled: Event::default(),
            wanted: Event::default(),
            starved: Cell::new(false),
            invalidated: Cell::default(),
            settled: Cell::default(),
            settling: Event::default(),
        }
    }

    pub(crate) fn ready_len(&self) -> usize {
        self.ready.borrow().len()
    }

    /// The number of buckets that the refill task should make ready now.
    pub(crate) fn missing(&self) -> usize {
        let target = self.reserves.total() + self.batch;
        let have = self.ready_len();
        let low = self.reserves.total() + self.batch / 2;
        if have < low || (self.waiting.get() > 0 && have < target) { target - have } else { 0 }
    }

    /// Whether this number of unused buckets is more than twice the number that is kept ready.
    pub(crate) fn is_plenty(&self, unused: u32) -> bool {
        unused as usize > 2 * (self.reserves.total() + self.batch)
    }

    /// Counts a bucket that was taken for new dirty data.
    pub(crate) fn fills(&self) {
        self.taken.set(self.taken.get() + 1);
    }

    /// Whether new dirty data will soon fill the buckets that can be reused.
    pub(crate) fn is_filling(&self, buckets: &Buckets, now: Nanos) -> bool {
        let mut demand = self.demand.get();
        let per_second = demand.observe(self.taken.get(), now);
        self.demand.set(demand);
        let spare = buckets.available().saturating_sub(self.reserves.total() as u32);
        yielding::is_room_urgent(spare, per_second, buckets.in_use_percent())
    }

    /// Whether no bucket is ready for a btree node.
    pub(crate) fn is_short_of_btree(&self) -> bool {
        self.ready_len() <= self.reserves.below(Purpose::Btree)
    }

    /// Puts buckets whose generations are durable into the list.
    pub(crate) fn put_ready(&self, buckets: impl IntoIterator<Item = BucketNr>) {
        self.ready.borrow_mut().extend(buckets);
        self.refilled.notify_all();
    }

    /// Moves the newest `n` buckets to the front of the list, so that they are taken next.
    pub(crate) fn put_first(&self, n: usize) {
        self.ready.borrow_mut().rotate_right(n);
    }

    /// Takes at most `most` buckets for which `wanted` is true out of the list. The caller puts them back.
    pub(crate) fn take_out(&self, most: usize, wanted: impl Fn(BucketNr) -> bool) -> Vec<BucketNr> {
        let mut taken = Vec::with_capacity(most);
        self.ready.borrow_mut().retain(|b| {
            let takes = taken.len() < most && wanted(*b);
            if takes {
                taken.push(*b);
            }
            !takes
        });
        taken
    }

    /// Takes a bucket if the reserves allow it.
    pub(crate) fn try_take(&self, purpose: Purpose, buckets: &mut Buckets) -> Option<BucketNr> {
        let allowed = self.ready_len() > self.reserves.below(purpose);
        let taken = if allowed { self.ready.borrow_mut().pop_front() } else { None };
        if let Some(b) = taken {
            buckets.take(b, matches!(purpose, Purpose::Btree | Purpose::Prio));
        }
        self.wanted.notify_all();
        taken
    }

    /// Waits until a bucket for `purpose` may be ready, or `give_up` is true; it is evaluated whenever buckets change.
    pub(crate) async fn wait(&self, purpose: Purpose, give_up: impl Fn() -> bool) {
        let _waiting = Waiting::begin(&self.waiting);
        self.wanted.notify_all();
        let below = self.reserves.below(purpose);
        self.refilled.wait_until(|| give_up() || self.ready.borrow().len() > below).await;
    }

    /// Counts a round of invalidation, whose new generations are not durable yet.
    pub(crate) fn invalidated(&self) {
        self.invalidated.set(self.invalidated.get() + 1);
    }

    /// Records that the generations of all rounds so far are durable.
    pub(crate) fn settled(&self) {
        self.settled.set(self.invalidated.get());
        self.settling.notify_all();
    }

    /// Waits until no crash can bring back a pointer to a bucket that was invalidated before this call, or `give_up` is
    /// true.
    pub(crate) async fn generations_durable(&self, give_up: impl Fn() -> bool) {
        let round = self.invalidated.get();
        if self.settled.get() < round {
            self.settling.wait_until(|| give_up() || self.settled.get() >= round).await;
        }
    }

    /// Whether a task waits for buckets.
    pub(crate) fn is_wanted(&self) -> bool {
        self.waiting.get() > 0
    }

    /// Wakes every waiting task, so that it evaluates its condition again.
    pub(crate) fn kick(&self) {
        self.refilled.notify_all();
        self.wanted.notify_all();
        self.settling.notify_all();
    }
}

#[cfg(test)]
mod tests;
