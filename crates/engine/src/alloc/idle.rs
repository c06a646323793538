//! The buckets whose last write has ended.
//!
//! Owns the list of buckets that were closed and that no write pins any more, for the component that writes footers.
//! Without such a component the list stays empty. Must not know footers.

use std::cell::{Cell, RefCell};

use format::BucketNr;
use io::sync::Event;

/// Buckets that are closed and not pinned, in the order in which that began. A bucket can be pinned again.
#[derive(Default)]
pub(crate) struct IdleBuckets {
    wanted: Cell<bool>,
    list: RefCell<Vec<BucketNr>>,
    arrived: Event,
}

impl IdleBuckets {
    /// Makes the list keep buckets from now on.
    pub(super) fn want(&self) {
        self.wanted.set(true);
    }

    /// Whether the list keeps buckets.
    pub(super) fn is_wanted(&self) -> bool {
        self.wanted.get()
    }

    /// Adds a bucket.
    pub(super) fn add(&self, bucket: BucketNr) {
        if self.wanted.get() {
            self.list.borrow_mut().push(bucket);
            self.arrived.notify_all();
        }
    }

    /// Waits until there is a bucket, or `give_up` is true.
    pub(crate) async fn wait_until(&self, give_up: impl Fn() -> bool) {
        self.arrived.wait_until(|| give_up() || !self.list.borrow().is_empty()).await;
    }

    /// Wakes the task that waits, so that it checks the state of the set.
    pub(super) fn kick(&self) {
        self.arrived.notify_all();
    }

    /// Takes all buckets.
    pub(crate) fn take(&self) -> Vec<BucketNr> {
        self.list.take()
    }
}
