//! Compares ranges with a list of the held ranges.

use proptest::prelude::*;

use super::*;
use crate::testing::run;

/// A held range: its class, its bounds, and for a miss whether it is valid.
struct KnownRange {
    class: Class,
    start: u64,
    end: u64,
    valid: bool,
    guard: RangeGuard,
}

impl KnownRange {
    fn overlaps(&self, class: Class, start: u64, end: u64) -> bool {
        self.class == class && (start..end).any(|at| (self.start..self.end).contains(&at))
    }
}

#[derive(Default)]
struct RangesAndModel {
    ranges: Rc<Ranges>,
    known: Vec<KnownRange>,
}

impl RangesAndModel {
    fn any(&self, class: Class, start: u64, end: u64) -> bool {
        self.known.iter().any(|k| k.overlaps(class, start, end))
    }

    fn take(&mut self, what: u8, (start, size): (u64, u64)) {
        let end = start + size;
        let (first, last) = (Sector(start), Sector(end));
        let changed = self.any(Class::Change, start, end);
        let written_back = self.any(Class::Writeback, start, end);
        assert_eq!(self.ranges.is_busy(first, last), changed || written_back);
        assert_eq!(self.ranges.is_written_back(first, last), written_back);
        let (class, valid, guard) = match what {
            0 | 1 => (Class::Change, true, self.ranges.try_hold_for_change(first, last)),
            2 | 3 => (Class::Writeback, true, self.ranges.try_hold_for_writeback(first, last)),
            4 | 5 => (Class::Miss, !changed, Some(self.ranges.hold_for_miss(first, last))),
            6 => {
                self.ranges.invalidate_misses();
                self.known.iter_mut().filter(|k| k.class == Class::Miss).for_each(|k| k.valid = false);
                return;
            }
            _ => {
                if !self.known.is_empty() {
                    drop(self.known.remove(start as usize % self.known.len()));
                }
                return;
            }
        };
        let refused =
            class == Class::Change && changed || class == Class::Writeback && (changed || written_back);
        assert_eq!(guard.is_none(), refused);
        let Some(guard) = guard else { return };
        if class == Class::Change {
            let misses = self.known.iter_mut().filter(|k| k.overlaps(Class::Miss, start, end));
            misses.for_each(|k| k.valid = false);
        }
        self.known.push(KnownRange { class, start, end, valid, guard });
    }

    fn compare(&self) {
        for k in &self.known {
            assert_eq!(k.guard.is_valid(), k.valid);
        }
        assert_eq!(self.ranges.held.borrow().len(), self.known.len());
    }
}

proptest! {
    #[test]
    fn ranges_agree_with_a_list(steps in prop::collection::vec((0u8..10, (0u64..12, 1u64..5)), 1..60)) {
        let mut both = RangesAndModel::default();
        for (what, range) in steps {
            both.take(what, range);
            both.compare();
        }
    }
}

/// A change of everything waits for the others, and no new change begins meanwhile. If its future is dropped, changes
/// may begin again.
#[test]
fn a_change_of_everything_excludes_others() {
    run(|rt| async move {
        let r = Rc::new(Ranges::default());
        let first = r.hold_for_change(Sector(5), Sector(6)).await;
        let writeback = r.try_hold_for_writeback(Sector(90), Sector(95));
        let theirs = r.clone();
        let all = rt.spawn(async move { theirs.hold_all_for_change().await });
        rt.yield_now().await;
        assert!(r.try_hold_for_change(Sector(50), Sector(51)).is_none(), "it would have to be waited for");
        let theirs = r.clone();
        let second = rt.spawn(async move { theirs.hold_for_change(Sector(50), Sector(51)).await });
        let theirs = r.clone();
        let all_again = rt.spawn(async move { theirs.hold_all_for_change().await });
        rt.yield_now().await;
        assert!(all.try_take().is_none() && second.try_take().is_none());
        drop(first);
        let all = all.await;
        assert!(r.is_busy(Sector(1 << 40), Sector(1 << 41)) && writeback.is_some());
        rt.yield_now().await;
        assert!(second.try_take().is_none() && all_again.try_take().is_none());
        drop(all);
        // The second change of all waits for the others to end before the change can begin.
        drop(all_again.await);
        drop(second.await);
        assert!(r.try_hold_for_change(Sector(50), Sector(51)).is_some());
        // The future of this wait is dropped.
        let first = r.hold_for_change(Sector(5), Sector(6)).await;
        {
            let wait = std::pin::pin!(r.hold_all_for_change());
            let sleep = std::pin::pin!(rt.sleep(io::Nanos::from_ms(1)));
            io::sync::select(wait, sleep).await;
        }
        assert!(r.try_hold_for_change(Sector(50), Sector(51)).is_some());
        drop(first);
    });
}

/// A wait for a release ends with the next release of any range.
#[test]
fn a_release_ends_a_wait() {
    run(|rt| async move {
        let r = Rc::new(Ranges::default());
        for class in 0..3 {
            let guard = match class {
                0 => r.hold_for_miss(Sector(0), Sector(1)),
                1 => r.hold_for_change(Sector(0), Sector(1)).await,
                _ => r.try_hold_for_writeback(Sector(0), Sector(1)).unwrap(),
            };
            let theirs = r.clone();
            let release = rt.spawn(async move { theirs.released().await });
            rt.yield_now().await;
            assert!(release.try_take().is_none());
            drop(guard);
            release.await;
        }
    });
}
