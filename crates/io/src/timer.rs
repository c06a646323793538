//! Timers of one thread.
//!
//! Owns the sleeping tasks and their deadlines. Must not know the source of time. Equal deadlines fire in
//! the order in which they were set.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// A point on the monotonic clock, or a span of it, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct Nanos(pub u64);

impl Nanos {
    /// `us` microseconds.
    pub const fn from_us(us: u64) -> Nanos {
        Nanos(us.saturating_mul(1_000))
    }

    /// `ms` milliseconds.
    pub const fn from_ms(ms: u64) -> Nanos {
        Nanos(ms.saturating_mul(1_000_000))
    }

    /// `s` seconds.
    pub const fn from_secs(s: u64) -> Nanos {
        Nanos(s.saturating_mul(1_000_000_000))
    }

    /// Whole milliseconds.
    pub const fn as_ms(self) -> u64 {
        self.0 / 1_000_000
    }

    /// Seconds, for figures that people or programs read.
    pub fn as_seconds(self) -> f64 {
        self.0 as f64 / 1e9
    }

    /// This point `span` later.
    #[must_use]
    pub const fn after(self, span: Nanos) -> Nanos {
        Nanos(self.0.saturating_add(span.0))
    }

    /// The span since `earlier`; zero if `earlier` is after this point.
    #[must_use]
    pub const fn since(self, earlier: Nanos) -> Nanos {
        Nanos(self.0.saturating_sub(earlier.0))
    }
}

/// Number of deadlines of dropped sleeps up to which they are not cleared away.
const MANY: usize = 64;

#[derive(Default)]
struct Inner {
    heap: BinaryHeap<Reverse<(Nanos, u64)>>,
    waiting: BTreeMap<u64, Option<Waker>>,
    next_id: u64,
}

/// The timers of a runtime. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct Timers {
    inner: Rc<RefCell<Inner>>,
}

impl Timers {
    pub(crate) fn sleep_until(&self, deadline: Nanos) -> Sleep {
        let mut t = self.inner.borrow_mut();
        let t = &mut *t;
        let id = t.next_id;
        t.next_id += 1;
        // A dropped sleep leaves its deadline in the list. Such deadlines must not accumulate until they are due.
        if t.heap.len() > 2 * t.waiting.len() + MANY {
            t.heap.retain(|Reverse((_, id))| t.waiting.contains_key(id));
        }
        t.heap.push(Reverse((deadline, id)));
        t.waiting.insert(id, None);
        Sleep { timers: self.clone(), id }
    }

    /// The earliest deadline of a waiting task.
    pub(crate) fn next_deadline(&self) -> Option<Nanos> {
        let mut t = self.inner.borrow_mut();
        while let Some(Reverse((deadline, id))) = t.heap.peek().copied() {
            if t.waiting.contains_key(&id) {
                return Some(deadline);
            }
            t.heap.pop();
        }
        None
    }

    /// Wakes all tasks that wait for a deadline up to `now`.
    pub(crate) fn fire(&self, now: Nanos) {
        loop {
            let mut t = self.inner.borrow_mut();
            match t.heap.peek().copied() {
                Some(Reverse((deadline, id))) if deadline <= now => {
                    t.heap.pop();
                    let waker = t.waiting.remove(&id).flatten();
                    drop(t);
                    if let Some(w) = waker {
                        w.wake();
                    }
                }
                _ => return,
            }
        }
    }
}

/// Waits for a deadline.
#[must_use = "a sleep does nothing until awaited"]
pub struct Sleep {
    timers: Timers,
    id: u64,
}

impl Future for Sleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        match self.timers.inner.borrow_mut().waiting.get_mut(&self.id) {
            Some(waker) => {
                *waker = Some(cx.waker().clone());
                Poll::Pending
            }
            None => Poll::Ready(()),
        }
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        let waker = self.timers.inner.borrow_mut().waiting.remove(&self.id);
        drop(waker);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Bench, bench};

    #[test]
    fn sleeps_end_at_their_deadline_in_order() {
        let Bench { rt, step, advance, now } = &bench();
        let order = Rc::new(RefCell::new(Vec::new()));
        for (n, ms) in [(0, 3), (1, 1), (2, 3), (3, 2)] {
            let (rt2, order) = (rt.clone(), order.clone());
            rt.spawn(async move {
                rt2.sleep(Nanos::from_ms(ms)).await;
                order.borrow_mut().push((n, rt2.now().as_ms()));
            });
        }
        step();
        while advance() {
            step();
        }
        assert_eq!(
            *order.borrow(),
            [(1, 1), (3, 2), (0, 3), (2, 3)],
            "equal deadlines in order of their setting"
        );
        assert_eq!(now.get(), 3_000_000);
    }

    #[test]
    fn a_dropped_sleep_wakes_nobody_and_leaves_nothing() {
        let timers = Timers::default();
        let far = timers.sleep_until(Nanos::from_secs(100));
        for i in 0..10_000 {
            drop(timers.sleep_until(Nanos(1 + i)));
        }
        assert!(timers.inner.borrow().heap.len() <= 2 + MANY + 1);
        assert_eq!(timers.next_deadline(), Some(Nanos::from_secs(100)));
        drop(far);
        assert_eq!(timers.next_deadline(), None);
        timers.fire(Nanos(u64::MAX));
    }

    #[test]
    fn spans_do_not_overflow() {
        assert_eq!(Nanos(u64::MAX).after(Nanos(1)), Nanos(u64::MAX));
        assert_eq!(Nanos(1).since(Nanos(2)), Nanos(0));
        assert_eq!(Nanos::from_secs(u64::MAX), Nanos(u64::MAX));
    }
}
