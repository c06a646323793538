//! Clean copies whose keys are not in the journal, and the data that must be durable before a bset names them.
//!
//! The key of such a copy goes to disk with its leaf only. Before the leaf is written, the cache device must have
//! flushed the copy, and the backing device must have flushed the data that was copied. Otherwise a power loss can
//! leave a copy that is newer than the data on the backing device.
//!
//! A leaf waits only for the backing devices of which it has such copies, and for each at most [`FLUSH_DEADLINE`],
//! because the leaf pins journal entries of all devices of the set. If a device exceeds the deadline or has failed a
//! flush, its copies in the leaf become holes. Each hole costs a miss.
//!
//! Invariant: between [`drop_unsettled`] and the encoding of the leaf's keys into a bset there is no await point.

use std::rc::Rc;

use format::{Inode, JournalSeq, Sector};
use io::Nanos;

use super::Index;
use super::entry::Entry;
use super::extents::Extents;
use super::leaf_change::{LeafChange, Via};
use super::node::NodeId;
use super::tree::Tree;
use crate::canary::{Bug, bug};
use crate::device::BackingDevice;
use crate::device::Tick;

/// The time after which a backing device that has not answered a flush is late. A longer deadline would delay the other
/// devices for more than the copies are worth.
const FLUSH_DEADLINE: Nanos = Nanos::from_secs(5);

/// The deadline for a flush while requests wait for room in the journal.
const PRESSED_FLUSH_DEADLINE: Nanos = Nanos::from_ms(500);

/// How often a wait for a flush checks the deadlines.
const RECHECK_INTERVAL: Nanos = Nanos::from_ms(100);

/// The largest number of flushes before a leaf is written. A copy that is added during a flush needs another flush;
/// after the last one the leaf is written without such copies.
const MOST_FLUSHES: usize = 4;

/// The clean copies of one leaf whose keys are not in the journal.
#[derive(Clone, Default, Debug)]
pub(crate) struct Copies {
    /// The tick up to which the cache device must have flushed.
    data: Option<Tick>,
    /// For each backing device, the tick up to which it must have flushed. Few entries, in no order.
    devices: Vec<(Inode, Tick)>,
}

impl Copies {
    /// Records a new copy of data of `inode`. The copy was complete at tick `data` of the cache device, and it may have
    /// the data of any write to the backing device up to tick `direct`.
    pub(super) fn add(&mut self, inode: Inode, data: Tick, direct: Option<Tick>) {
        self.data = self.data.max(Some(data));
        let Some(direct) = direct else { return };
        match self.devices.iter_mut().find(|(i, _)| *i == inode) {
            Some((_, tick)) => *tick = direct.max(*tick),
            None => self.devices.push((inode, direct)),
        }
    }

    /// Records the copies of another leaf.
    pub(super) fn merge(&mut self, other: &Copies) {
        self.data = self.data.max(other.data);
        for (inode, direct) in &other.devices {
            if let Some(data) = other.data {
                self.add(*inode, data, Some(*direct));
            }
        }
    }

    /// The tick up to which the cache device must have flushed, if there are copies.
    pub(super) fn data(&self) -> Option<Tick> {
        self.data.filter(|_| !bug(Bug::LeafBeforeData))
    }
}

/// The tick up to which a backing device must have flushed before a bset names a copy of its present content.
pub(super) fn content_tick(index: &Index, inode: Inode) -> Option<Tick> {
    index.backings.content_tick(inode)
}

/// Waits until each backing device has flushed the data that the leaf has copies of, or is late, or has failed.
pub(super) async fn settle_copies(index: &Index, id: NodeId) {
    for _ in 0..MOST_FLUSHES {
        let pending = unsettled(index, &index.tree.borrow(), id);
        let mut late = true;
        for (inode, tick) in pending {
            late &= !settle_backing(index, inode, tick).await;
        }
        if late {
            return;
        }
    }
}

/// The devices that have not flushed the data that the leaf has copies of, each with its tick.
fn unsettled(index: &Index, tree: &Tree, id: NodeId) -> Vec<(Inode, Tick)> {
    let Some(node) = tree.try_node(id).filter(|n| n.level == 0) else { return Vec::new() };
    let devices = &node.leaf().copies.devices;
    if devices.is_empty() || bug(Bug::LeafBeforeData) {
        return Vec::new();
    }
    let settled = |(inode, tick): &(Inode, Tick)| index.backings.is_durable(*inode, *tick);
    devices.iter().filter(|d| !settled(d)).copied().collect()
}

/// Waits until a backing device has flushed up to `tick`. Returns false if the device is late, or has failed a flush
/// now or earlier.
pub(crate) async fn settle_backing(index: &Index, inode: Inode, tick: Tick) -> bool {
    let Some(backing) = index.backings.get(inode) else { return true };
    if index.backings.flush_has_failed(inode) {
        return false;
    }
    let began = index.rt.now();
    let late = || {
        if bug(Bug::HungFlushAwaited) {
            return false;
        }
        let waited = index.rt.now().since(began);
        waited >= FLUSH_DEADLINE || waited >= PRESSED_FLUSH_DEADLINE && index.journal.is_refusing()
    };
    match settle_in_time(&backing, tick, late).await {
        Ok(settled) => settled,
        Err(_) if bug(Bug::FailedFlushTrusted) => true,
        Err(_) => {
            index.backings.flush_failed(inode);
            false
        }
    }
}

/// Replaces by holes the copies in the leaf whose backing device has not flushed the copied data. The leaf is in
/// memory, and no task writes it.
pub(super) fn drop_unsettled(index: &Index, tree: &mut Tree, id: NodeId) {
    let unsettled = unsettled(index, tree, id);
    let late = |(inode, _): &(Inode, Tick)| !index.backings.flush_has_failed(*inode);
    let trusted = bug(Bug::LateFlushTrusted) && unsettled.iter().all(late);
    if unsettled.is_empty() || bug(Bug::FailedFlushTrusted) || trusted {
        return;
    }
    let is_copy = |inode: &Inode, e: &Entry| {
        !e.is_hole() && !e.dirty() && !e.may_be_durable() && unsettled.iter().any(|(late, _)| late == inode)
    };
    let node = tree.node(id);
    let found: Vec<(Inode, Sector, Sector)> = node
        .leaf()
        .extents
        .iter()
        .flat_map(Extents::iter)
        .filter(|(inode, e)| is_copy(inode, e))
        .map(|(inode, e)| (inode, e.start(), e.end()))
        .collect();
    let via = Via::LeafOnly { data: Tick::default(), direct: None, durable: index.journal.durable() };
    let now = index.rt.turn_time();
    let buckets = &mut *index.alloc.buckets_mut();
    let pin = &mut |_: JournalSeq| ();
    for (inode, start, end) in found {
        let change = LeafChange { leaf: id, inode, start, end, new: None, via, now };
        tree.change(&change, buckets, pin);
    }
    let devices = &mut tree.node_mut(id).leaf_mut().copies.devices;
    devices.retain(|d| !unsettled.contains(d));
}

/// Waits until a backing device has flushed up to `tick`. Returns false as soon as `late` is true: the flush then
/// continues, and the device is late until it ends.
async fn settle_in_time(
    backing: &Rc<BackingDevice>,
    tick: Tick,
    late: impl Fn() -> bool,
) -> Result<bool, io::IoError> {
    if backing.is_durable(tick) {
        return Ok(true);
    }
    if backing.is_late() {
        return Ok(false);
    }
    let rt = backing.disk().runtime().clone();
    let theirs = backing.clone();
    let mut flush = rt.spawn(async move { theirs.settle_content().await });
    loop {
        match io::sync::select(&mut flush, rt.sleep(RECHECK_INTERVAL)).await {
            io::sync::Either::Left(result) => return result.map(|()| true),
            io::sync::Either::Right(()) if late() => {
                backing.late_until(flush);
                return Ok(false);
            }
            io::sync::Either::Right(()) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    type Added = Vec<(u32, u64, Option<u64>)>;

    fn added() -> impl Strategy<Value = Added> {
        prop::collection::vec((0_u32..3, 0_u64..9, prop::option::of(0_u64..9)), 0..8)
    }

    fn copies(added: &Added) -> Copies {
        let mut copies = Copies::default();
        for (inode, data, direct) in added {
            copies.add(Inode(*inode), Tick::nth(*data), direct.map(Tick::nth));
        }
        copies
    }

    proptest! {
        /// The ticks are the newest of all copies, with one entry for each device.
        #[test]
        fn each_device_is_waited_for_once(one in added(), other in added()) {
            let mut both = copies(&one);
            both.merge(&copies(&other));
            let all: Added = one.into_iter().chain(other).collect();
            prop_assert_eq!(both.data(), all.iter().map(|(_, data, _)| Tick::nth(*data)).max());
            let mut newest: BTreeMap<u32, u64> = BTreeMap::new();
            for (inode, _, direct) in &all {
                if let Some(direct) = direct {
                    newest.entry(*inode).and_modify(|n| *n = (*n).max(*direct)).or_insert(*direct);
                }
            }
            let mut devices = both.devices;
            devices.sort_unstable();
            let newest = newest.into_iter().map(|(inode, tick)| (Inode(inode), Tick::nth(tick)));
            prop_assert_eq!(devices, newest.collect::<Vec<_>>());
        }
    }
}
