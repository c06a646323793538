//! The ranges in which two sets with the same dirty data may differ after a crash (decision 037).
//!
//! The journals of the two sets wait for each other, so these are the ranges of the keys in the newest entry of each, and in its crash
//! log. The next entry of a start is the newest one then, so a start stores the ranges before it writes to the journal.
//!
//! Owns the list on the cache device. Invariant: a range is removed only after both sets have the same dirty data there, durably.

use std::cell::RefCell;
use std::rc::Rc;

use format::mirror::{MOST_UNSETTLED, UNSETTLED_BYTES, UNSETTLED_SECTOR, UnsettledList, UnsettledRange};
use format::{Bkey, Inode, Sector, Sectors, UuidEntry};
use io::sync::Mutex;

use crate::canary::{Bug, bug};
use crate::device::CacheDevice;
use crate::error::EngineError;
use crate::index::MAX_POSITION;

/// The slot of a range that stands for all slots: the list was too long.
const EVERY_SLOT: Inode = Inode(u32::MAX);

/// The list of one set.
pub(super) struct Unsettled {
    device: Rc<CacheDevice>,
    list: RefCell<UnsettledList>,
    /// Both copies of the list, as they are on the device.
    area: RefCell<Vec<u8>>,
    lock: Mutex,
}

impl Unsettled {
    /// Reads the list, and adds the ranges of these keys if their slots have a role. The list is durable when the call ends.
    pub(super) async fn open<'a>(
        device: &Rc<CacheDevice>,
        uuids: &[UuidEntry],
        keys: impl Iterator<Item = &'a Bkey>,
    ) -> Result<Unsettled, EngineError> {
        let has_role =
            |inode: Inode| uuids.get(inode.0 as usize).is_some_and(|u| u.is_live() && u.role().is_some());
        let mut unsettled = Unsettled {
            device: device.clone(),
            list: RefCell::default(),
            area: RefCell::default(),
            lock: Mutex::default(),
        };
        if !(0..uuids.len()).any(|i| has_role(Inode(i as u32))) {
            return Ok(unsettled);
        }
        let disk = device.disk();
        let buffer = disk.runtime().pool().take(2 * UNSETTLED_BYTES);
        let (buffer, result) = disk.read(UNSETTLED_SECTOR, buffer).await;
        result?;
        let set_uuid = device.superblock().set_uuid();
        let list = UnsettledList::parse(buffer.as_slice(), set_uuid);
        let (known, mut ranges) = (list.ranges.clone(), list.ranges.clone());
        ranges.extend(keys.filter(|k| has_role(k.inode())).filter_map(range_of));
        if device.superblock().was_used_by_other() && !bug(Bug::OtherUseIgnored) {
            // Its entries are newer than those that this program has written.
            let whole = |i| UnsettledRange { inode: Inode(i), start: Sector(0), end: MAX_POSITION };
            ranges.extend((0..uuids.len() as u32).filter(|i| has_role(Inode(*i))).map(whole));
        }
        let ranges = joined(ranges);
        unsettled.list = RefCell::new(list);
        unsettled.area = RefCell::new(buffer.as_slice().to_vec());
        if ranges != known && !bug(Bug::UnsettledForgotten) {
            unsettled.store(ranges).await?;
        }
        Ok(unsettled)
    }

    /// The unsettled ranges of a slot.
    pub(super) fn of(&self, inode: Inode) -> Vec<(Sector, Sector)> {
        let list = self.list.borrow();
        let of_slot = list.ranges.iter().filter(|r| r.inode == inode || r.inode == EVERY_SLOT);
        of_slot.map(|r| (r.start, r.end)).collect()
    }

    /// From now on the two sets may differ anywhere in a slot.
    pub(super) async fn unsettle(&self, inode: Inode) -> Result<(), EngineError> {
        let _one = self.lock.lock().await;
        let whole = UnsettledRange { inode, start: Sector(0), end: MAX_POSITION };
        let mut ranges = self.list.borrow().ranges.clone();
        ranges.push(whole);
        let ranges = joined(ranges);
        let is_known = ranges == self.list.borrow().ranges;
        if is_known { Ok(()) } else { self.store(ranges).await }
    }

    /// The ranges of a slot are settled.
    pub(super) async fn settle(&self, inode: Inode) -> Result<(), EngineError> {
        let _one = self.lock.lock().await;
        let ranges: Vec<UnsettledRange> =
            self.list.borrow().ranges.iter().filter(|r| r.inode != inode).copied().collect();
        if ranges.len() == self.list.borrow().ranges.len() {
            return Ok(());
        }
        self.store(ranges).await
    }

    async fn store(&self, ranges: Vec<UnsettledRange>) -> Result<(), EngineError> {
        let list = UnsettledList { seq: self.list.borrow().seq + 1, ranges };
        let mut area = self.area.borrow().clone();
        area.resize(2 * UNSETTLED_BYTES, 0);
        let place = list.place().bytes() as usize;
        let bytes = list.encode(self.device.superblock().set_uuid());
        area.iter_mut().skip(place).zip(bytes).for_each(|(to, from)| *to = from);
        let disk = self.device.disk();
        // Whole blocks of every device. The bytes of the other copy are those on the device, so a torn write leaves it.
        disk.write(UNSETTLED_SECTOR, disk.runtime().pool().copy_of(&area), true).await?;
        (*self.list.borrow_mut(), *self.area.borrow_mut()) = (list, area);
        Ok(())
    }
}

fn range_of(key: &Bkey) -> Option<UnsettledRange> {
    let start = key.start().filter(|s| *s < key.offset())?;
    Some(UnsettledRange { inode: key.inode(), start, end: key.offset() })
}

/// Sorts the ranges and joins those that touch, and then those with the smallest gaps until the list has room for all.
fn joined(mut ranges: Vec<UnsettledRange>) -> Vec<UnsettledRange> {
    ranges.sort_unstable();
    let mut gap = Sectors::ZERO;
    loop {
        let mut all: Vec<UnsettledRange> = Vec::with_capacity(ranges.len());
        let mut next_gap: Option<Sectors> = None;
        for range in ranges {
            match all.last_mut().filter(|last| last.inode == range.inode) {
                Some(last) if range.start <= last.end + gap => last.end = last.end.max(range.end),
                Some(last) => {
                    let here = range.start - last.end;
                    next_gap = Some(next_gap.map_or(here, |g| g.min(here)));
                    all.push(range);
                }
                None => all.push(range),
            }
        }
        if all.len() <= MOST_UNSETTLED {
            return all;
        }
        let Some(next) = next_gap else {
            return vec![UnsettledRange { inode: EVERY_SLOT, start: Sector(0), end: MAX_POSITION }];
        };
        (gap, ranges) = (next, all);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn range((inode, start, len): (u32, u64, u64)) -> UnsettledRange {
        UnsettledRange { inode: Inode(inode), start: Sector(start), end: Sector(start + len) }
    }

    #[test]
    fn ranges_of_too_many_slots_become_one_of_every_slot() {
        let of_slots = |n: usize| joined((0..n as u32).map(|i| range((i, 8, 8))).collect());
        assert_eq!(of_slots(MOST_UNSETTLED).len(), MOST_UNSETTLED);
        let one = of_slots(MOST_UNSETTLED + 1);
        assert_eq!(one.len(), 1);
        assert!(one.iter().all(|r| r.inode == EVERY_SLOT && r.start == Sector(0)));
    }

    proptest! {
        /// Joining never loses a sector, and joins no more than it must.
        #[test]
        fn every_sector_stays_in_the_list(all in prop::collection::vec((0u32..3, 0u64..5000, 1u64..20), 0..300)) {
            let ranges: Vec<_> = all.into_iter().map(range).collect();
            let few = joined(ranges.clone());
            prop_assert!(few.len() <= MOST_UNSETTLED);
            let is_within = |r: &UnsettledRange| {
                few.iter().any(|f| f.inode == r.inode && f.start <= r.start && r.end <= f.end)
            };
            prop_assert!(ranges.iter().all(is_within));
            prop_assert!(few.is_sorted());
            if ranges.len() <= MOST_UNSETTLED {
                let covers = |sector: u64, r: &UnsettledRange| r.start.0 <= sector && sector < r.end.0;
                for f in &few {
                    for sector in f.start.0..f.end.0 {
                        prop_assert!(ranges.iter().any(|r| r.inode == f.inode && covers(sector, r)));
                    }
                }
            }
        }
    }
}
