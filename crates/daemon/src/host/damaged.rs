//! The damaged dirty data of a set over a restart: its buckets are stored in the state directory, and read again at a start.
//!
//! Owns the list that is stored. A list of the engine ends with its process, and damage is noticed only when data is read: without
//! the stored list, `status` would not name it before the next scrub. Must not know how a block is verified.

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};

use format::BucketNr;
use io::Nanos;
use io::sync::{Either, select};
use serve::{message, plain};

use super::{Host, Tasks};
use crate::shared::Shared;

/// Limit of the buckets that are stored; a scrub finds damage in others.
const MOST_BUCKETS: usize = 4096;
/// Interval between checks whether the thread is stopping.
const TICK: Nanos = Nanos::from_ms(100);
/// Time for which the buckets wait for the disks whose data they have. After a start disks come one after the other, and the
/// sector of a volume is not known before its disk is there.
const WAITS_FOR_DISKS: Nanos = Nanos::from_secs(10);

/// The buckets with damaged dirty data, as they are stored or being stored.
pub(super) struct DamagedBuckets {
    shared: Arc<Shared>,
    set: String,
    /// The newest list. A task that stores takes it under the lock of the state, so that an older task stores no older list.
    newest: Arc<Mutex<Vec<u32>>>,
    /// Buckets that were stored at the start and are not read yet.
    unread: Mutex<Option<Vec<u32>>>,
}

impl DamagedBuckets {
    pub(super) fn new(shared: &Arc<Shared>, set: &str) -> DamagedBuckets {
        let stored = shared.state().damaged(set);
        let unread = Mutex::new((!stored.is_empty()).then(|| stored.clone()));
        let newest = Arc::new(Mutex::new(stored));
        DamagedBuckets { shared: shared.clone(), set: set.to_owned(), newest, unread }
    }

    /// The buckets that are to be read again.
    fn unread(&self) -> Option<Vec<u32>> {
        self.unread.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Takes a new list; returns the work that stores it, or `None` if it is stored already. The work waits for the disk.
    fn update(&self, now: Vec<u32>) -> Option<impl FnOnce() + Send + use<>> {
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        if *newest == now {
            return None;
        }
        *newest = now;
        let (shared, set, newest) = (self.shared.clone(), self.set.clone(), self.newest.clone());
        Some(move || {
            let mut state = shared.state();
            let list = newest.lock().unwrap_or_else(PoisonError::into_inner).clone();
            state.set_damaged(&set, list);
        })
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
    *host.damaged.unread.lock().unwrap_or_else(PoisonError::into_inner) = None;
    store_damaged(host).await;
}

/// The work that stores the list; `None` if it has not changed. Buckets of the last run that are not read again yet stay in it.
fn changed_damage(host: &Host<'_>) -> Option<impl FnOnce() + Send + use<>> {
    let set = host.session.set.as_ref().filter(|set| set.has_checksums())?;
    let found = set.damaged_buckets().into_iter().map(|bucket| bucket.0);
    let all: BTreeSet<u32> = found.chain(host.damaged.unread().unwrap_or_default()).collect();
    host.damaged.update(all.into_iter().take(MOST_BUCKETS).collect())
}

/// Stores the list if it has changed.
pub(super) async fn store_damaged(host: &Host<'_>) {
    if let Some(work) = changed_damage(host) {
        host.driver.reactor().blocking(work).await;
    }
}

/// Begins to store the list if it has changed.
pub(super) fn note_damaged<'t>(host: &'t Host<'_>, tasks: &mut Tasks<'t>) {
    if let Some(work) = changed_damage(host) {
        tasks.0.push(Box::pin(host.driver.reactor().blocking(work)));
    }
}
