//! The damaged dirty data of a set over a restart: its buckets are stored in the state directory, and read again at a start.
//!
//! Owns the list that is stored. A list of the engine ends with its process, and damage is noticed only when data is read: without
//! the stored list, `status` would not name it before the next scrub. Must not know how a block is verified.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;

use format::BucketNr;
use io::Nanos;
use io::sync::{Either, select};
use serve::{message, plain};

use super::Host;
use crate::shared::Shared;

/// Limit of the buckets that are stored; a scrub finds damage in others.
const MOST_BUCKETS: usize = 4096;
/// Interval between checks whether the thread is stopping.
const TICK: Nanos = Nanos::from_ms(100);
/// Time for which the buckets wait for the disks whose data they have. After a start disks come one after the other, and the
/// sector of a volume is not known before its disk is there.
const WAITS_FOR_DISKS: Nanos = Nanos::from_secs(10);

/// The buckets with damaged dirty data that were stored at the start.
pub(super) struct DamagedBuckets {
    /// Buckets that are not read yet.
    unread: RefCell<Option<Vec<u32>>>,
    /// The newest list.
    newest: RefCell<Vec<u32>>,
}

impl DamagedBuckets {
    pub(super) fn new(shared: &Arc<Shared>, set: &str) -> DamagedBuckets {
        let stored = shared.state().damaged(set);
        let unread = RefCell::new((!stored.is_empty()).then(|| stored.clone()));
        DamagedBuckets { unread, newest: RefCell::new(stored) }
    }

    /// The buckets that are to be read again.
    fn unread(&self) -> Option<Vec<u32>> {
        self.unread.borrow().clone()
    }
}

/// Reads the buckets again in which there was damage before the restart.
pub(super) async fn read_damaged_again(host: &Host<'_>) {
    let Some(buckets) = host.damaged.unread() else { return };
    let Some(set) = host.session.set.as_ref().filter(|set| set.has_checksums()) else { return };
    let deadline = host.driver.handle().now().after(WAITS_FOR_DISKS);
    while !set.dirty_without_volume().is_empty() && host.driver.handle().now() < deadline {
        if host.stopping.get() {
            return;
        }
        host.driver.handle().sleep(TICK).await;
    }
    let mut read = pin!(set.read_again(buckets.into_iter().map(BucketNr).collect()));
    let result = loop {
        match select(read.as_mut(), host.driver.handle().sleep(TICK)).await {
            Either::Left(result) => break result,
            Either::Right(()) if host.stopping.get() => return,
            Either::Right(()) => {}
        }
    };
    if let Err(e) = result {
        message::warn(format!(
            "cannot check the buckets that were damaged in the last run: {e}; `ubcache scrub {}` finds damaged data",
            plain::typed(&set.status().label, &set.uuid().to_string())
        ));
        return;
    }
    host.damaged.unread.take();
    note_damaged(host);
}

/// Stores the list if it has changed. Buckets of the last run that are not read again yet stay in it.
pub(super) fn note_damaged(host: &Host<'_>) {
    let Some(set) = host.session.set.as_ref().filter(|set| set.has_checksums()) else { return };
    let found = set.damaged_buckets().into_iter().map(|bucket| bucket.0);
    let all: BTreeSet<u32> = found.chain(host.damaged.unread().unwrap_or_default()).collect();
    let now: Vec<u32> = all.into_iter().take(MOST_BUCKETS).collect();
    if host.damaged.newest.replace(now.clone()) != now {
        host.shared.state().set_damaged(&host.plan.id, now);
    }
}
