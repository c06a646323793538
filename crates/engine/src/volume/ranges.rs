//! Ranges of a volume that an operation holds.
//!
//! Owns the rules by which operations on overlapping ranges exclude each other:
//!
//! * *changes* (writes, discards) of overlapping ranges wait for each other;
//! * *writeback* of a range is refused while a change overlaps it. A change that goes to the backing device waits for
//!   overlapping writeback, which would overwrite the change with older data;
//! * a *miss* that is being inserted into the cache becomes invalid when a change overlaps it at any time between the
//!   begin and the end of the change. So no read can insert data that a write has replaced (the check-key rule).
//!
//! Must not know why an operation holds a range. There are as few ranges as requests in flight, so the module searches
//! a list.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use format::Sector;
use io::sync::Event;

use crate::canary::{Bug, bug};

/// The kind of operation that holds a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Class {
    Change,
    Writeback,
    Miss,
}

/// A range that an operation holds.
struct Held {
    id: u64,
    start: Sector,
    end: Sector,
    class: Class,
    valid: bool,
}

impl Held {
    fn overlaps(&self, start: Sector, end: Sector) -> bool {
        self.start < end && start < self.end
    }
}

/// The ranges of one volume that operations hold.
#[derive(Default)]
pub(crate) struct Ranges {
    held: RefCell<Vec<Held>>,
    next_id: Cell<u64>,
    /// A caller of `hold_all_for_change` waits: no new change begins, because the wait might never end otherwise.
    closing: Cell<bool>,
    changed: Event,
}

/// Holds a range until the guard is dropped.
pub(crate) struct RangeGuard {
    ranges: Rc<Ranges>,
    id: u64,
}

impl Ranges {
    fn hold(self: &Rc<Self>, start: Sector, end: Sector, class: Class, valid: bool) -> RangeGuard {
        let id = self.next_id.get();
        self.next_id.set(id + 1);
        self.held.borrow_mut().push(Held { id, start, end, class, valid });
        RangeGuard { ranges: self.clone(), id }
    }

    fn any(&self, class: Class, start: Sector, end: Sector) -> bool {
        self.held.borrow().iter().any(|h| h.class == class && h.overlaps(start, end))
    }

    /// Begins a change unless another change overlaps it.
    pub(crate) fn try_hold_for_change(self: &Rc<Self>, start: Sector, end: Sector) -> Option<RangeGuard> {
        let overlaps = || self.any(Class::Change, start, end) && !bug(Bug::ChangesOverlap);
        (!self.closing.get() && !overlaps()).then(|| self.begin_change(start, end))
    }

    /// Waits until no other change overlaps the range, then begins a change.
    pub(crate) async fn hold_for_change(self: &Rc<Self>, start: Sector, end: Sector) -> RangeGuard {
        let mut begun = None;
        self.changed
            .wait_until(|| {
                begun = self.try_hold_for_change(start, end);
                begun.is_some()
            })
            .await;
        begun.expect("the wait ends after the change has begun")
    }

    /// Lets no further change of the range begin, for an operation that changes nothing. Changes under way go on: a caller that
    /// waited for them could wait for a backing device that hangs.
    pub(crate) fn exclude_changes(self: &Rc<Self>, start: Sector, end: Sector) -> RangeGuard {
        self.begin_change(start, end)
    }

    /// Begins a change of the whole volume: lets no new change begin, and waits until all others have ended.
    pub(crate) async fn hold_all_for_change(self: &Rc<Self>) -> RangeGuard {
        let (start, end) = (Sector(0), Sector(u64::MAX));
        self.changed.wait_until(|| !self.closing.get()).await;
        self.closing.set(true);
        let reopen = Reopen(self.clone());
        self.changed.wait_until(|| !self.any(Class::Change, start, end)).await;
        let guard = self.begin_change(start, end);
        drop(reopen);
        guard
    }

    fn begin_change(self: &Rc<Self>, start: Sector, end: Sector) -> RangeGuard {
        for h in self.held.borrow_mut().iter_mut() {
            if h.class == Class::Miss && h.overlaps(start, end) && !bug(Bug::FirstInvalidationSkipped) {
                h.valid = false;
            }
        }
        self.hold(start, end, Class::Change, true)
    }

    /// Waits until no writeback overlaps the range. The caller holds the range as a change, so no new writeback begins.
    pub(crate) async fn writeback_done(&self, start: Sector, end: Sector) {
        if self.any(Class::Writeback, start, end) && !bug(Bug::WritebackNotAwaited) {
            self.changed.wait_until(|| !self.any(Class::Writeback, start, end)).await;
        }
    }

    /// Whether writeback overlaps the range.
    pub(crate) fn is_written_back(&self, start: Sector, end: Sector) -> bool {
        self.any(Class::Writeback, start, end)
    }

    /// Whether writeback of the range would be refused.
    pub(crate) fn is_busy(&self, start: Sector, end: Sector) -> bool {
        self.any(Class::Change, start, end) || self.any(Class::Writeback, start, end)
    }

    /// Waits until every change and writeback that overlaps the range now has ended.
    pub(crate) async fn present_ended(&self, start: Sector, end: Sector) {
        let next = self.next_id.get();
        let is_present = |h: &Held| h.id < next && h.class != Class::Miss && h.overlaps(start, end);
        let any = || self.held.borrow().iter().any(is_present);
        if any() {
            self.changed.wait_until(|| !any()).await;
        }
    }

    /// Waits until any range is released.
    pub(crate) async fn released(&self) {
        self.changed.changed().await;
    }

    /// Begins writeback of a range, unless a change or other writeback overlaps it.
    pub(crate) fn try_hold_for_writeback(self: &Rc<Self>, start: Sector, end: Sector) -> Option<RangeGuard> {
        if self.is_busy(start, end) {
            return None;
        }
        Some(self.hold(start, end, Class::Writeback, true))
    }

    /// Holds the range of a miss that begins to read the backing device.
    pub(crate) fn hold_for_miss(self: &Rc<Self>, start: Sector, end: Sector) -> RangeGuard {
        let valid = bug(Bug::SecondInvalidationSkipped) || !self.any(Class::Change, start, end);
        self.hold(start, end, Class::Miss, valid)
    }

    /// Invalidates every miss that has begun, so that none of them is inserted into the cache.
    pub(crate) fn invalidate_misses(&self) {
        for h in self.held.borrow_mut().iter_mut() {
            h.valid &= h.class != Class::Miss;
        }
    }
}

/// Lets changes begin again when it is dropped, also if the future of `hold_all_for_change` is dropped.
struct Reopen(Rc<Ranges>);

impl Drop for Reopen {
    fn drop(&mut self) {
        self.0.closing.set(false);
        self.0.changed.notify_all();
    }
}

impl RangeGuard {
    /// Whether no change has overlapped the range of this miss since it was held.
    pub(crate) fn is_valid(&self) -> bool {
        self.ranges.held.borrow().iter().any(|h| h.id == self.id && h.valid)
    }
}

impl Drop for RangeGuard {
    fn drop(&mut self) {
        let mut held = self.ranges.held.borrow_mut();
        if let Some(i) = held.iter().position(|h| h.id == self.id) {
            held.swap_remove(i);
        }
        drop(held);
        self.ranges.changed.notify_all();
    }
}

#[cfg(test)]
mod properties;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::run;

    #[test]
    fn a_change_invalidates_misses_from_its_begin_to_its_end() {
        run(|_| async {
            let r = Rc::new(Ranges::default());
            let before = r.hold_for_miss(Sector(0), Sector(8));
            let beside = r.hold_for_miss(Sector(8), Sector(16));
            let change = r.hold_for_change(Sector(0), Sector(4)).await;
            let during = r.hold_for_miss(Sector(0), Sector(8));
            drop(change);
            let after = r.hold_for_miss(Sector(0), Sector(8));
            assert!(!before.is_valid() && !during.is_valid());
            assert!(beside.is_valid() && after.is_valid());
        });
    }

    #[test]
    fn a_wait_for_the_present_operations_is_not_prolonged_by_later_ones() {
        run(|rt| async move {
            let r = Rc::new(Ranges::default());
            let _miss = r.hold_for_miss(Sector(0), Sector(64));
            let elsewhere = r.hold_for_change(Sector(16), Sector(24)).await;
            r.present_ended(Sector(0), Sector(16)).await;
            let change = r.hold_for_change(Sector(0), Sector(8)).await;
            let writeback = r.try_hold_for_writeback(Sector(12), Sector(16));
            assert!(writeback.is_some());
            let theirs = r.clone();
            let wait = rt.spawn(async move { theirs.present_ended(Sector(7), Sector(13)).await });
            rt.yield_now().await;
            drop(change);
            let _later = r.hold_for_change(Sector(0), Sector(8)).await;
            rt.yield_now().await;
            assert!(wait.try_take().is_none(), "the writeback has not ended");
            drop(writeback);
            wait.await;
            drop(elsewhere);
        });
    }

    /// A task that changes a range all the time does not keep another from it for ever.
    #[test]
    fn no_further_change_begins_in_a_range_that_excludes_them() {
        run(|_| async move {
            let r = Rc::new(Ranges::default());
            let first = r.hold_for_change(Sector(0), Sector(8)).await;
            let miss = r.hold_for_miss(Sector(8), Sector(16));
            let reader = r.exclude_changes(Sector(4), Sector(12));
            assert!(!miss.is_valid());
            drop(first);
            assert!(r.try_hold_for_change(Sector(0), Sector(8)).is_none(), "the reader has not ended");
            let elsewhere = r.try_hold_for_change(Sector(12), Sector(16));
            assert!(elsewhere.is_some());
            drop(reader);
            assert!(r.try_hold_for_change(Sector(0), Sector(12)).is_some());
        });
    }

    #[test]
    fn overlapping_changes_wait_for_each_other_and_writeback_is_refused() {
        run(|rt| async move {
            let r = Rc::new(Ranges::default());
            let first = r.hold_for_change(Sector(0), Sector(8)).await;
            assert!(r.try_hold_for_writeback(Sector(4), Sector(6)).is_none());
            let elsewhere = r.try_hold_for_writeback(Sector(8), Sector(16));
            assert!(elsewhere.is_some());
            let theirs = r.clone();
            let second = rt.spawn(async move {
                let g = theirs.hold_for_change(Sector(4), Sector(12)).await;
                theirs.writeback_done(Sector(4), Sector(12)).await;
                drop(g);
            });
            rt.yield_now().await;
            assert!(second.try_take().is_none());
            drop(first);
            rt.yield_now().await;
            assert!(second.try_take().is_none(), "the writeback is still under way");
            drop(elsewhere);
            second.await;
        });
    }
}
