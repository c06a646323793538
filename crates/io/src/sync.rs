//! Synchronization of the tasks of one thread: events, a mutex, a semaphore, a queue.
//!
//! Single-threaded: none of these is `Send`. All are fair (first come, first served) unless the executor's
//! schedule says otherwise, and all are safe to drop while waiting.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Poll, Waker};

/// Wakes all tasks that wait for a change. A wake-up guarantees nothing, so waiters check their condition again.
#[derive(Default)]
pub struct Event {
    version: Cell<u64>,
    next_id: Cell<u64>,
    waiters: RefCell<Vec<(u64, Waker)>>,
}

/// A waiter's entry in an event. It is valid until the event changes.
struct Place<'a> {
    event: &'a Event,
    /// Number of the entry, and the version of the event for which the entry is valid.
    held: Option<(u64, u64)>,
}

impl Place<'_> {
    fn take(&mut self, waker: &Waker) {
        let event = self.event;
        let mut waiters = event.waiters.borrow_mut();
        let mut known = None;
        if let Some((id, version)) = self.held
            && version == event.version.get()
        {
            known = waiters.iter_mut().find(|(other, _)| *other == id);
        }
        match known {
            Some((_, w)) if w.will_wake(waker) => {}
            Some((_, w)) => *w = waker.clone(),
            None => {
                let id = event.next_id.get();
                event.next_id.set(id + 1);
                self.held = Some((id, event.version.get()));
                waiters.push((id, waker.clone()));
            }
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        // Without this, waits with a timeout for an event that never comes would accumulate wakers.
        if let Some((id, version)) = self.held
            && version == self.event.version.get()
        {
            let waker = {
                let mut waiters = self.event.waiters.borrow_mut();
                waiters.iter().position(|(other, _)| *other == id).map(|at| waiters.remove(at))
            };
            drop(waker);
        }
    }
}

impl Event {
    /// Announces a change and wakes all waiters.
    #[inline]
    pub fn notify_all(&self) {
        self.version.set(self.version.get() + 1);
        // In most cases no task waits.
        if !self.waiters.borrow().is_empty() {
            self.wake_all();
        }
    }

    fn wake_all(&self) {
        // Taken out and put back, so that the storage is kept and a waker may use this event.
        let mut waiters = std::mem::take(&mut *self.waiters.borrow_mut());
        for (_, w) in waiters.drain(..) {
            w.wake();
        }
        let mut slot = self.waiters.borrow_mut();
        if slot.is_empty() {
            *slot = waiters;
        }
    }

    /// Waits until `condition` holds; it is checked now and after every change.
    pub async fn wait_until(&self, mut condition: impl FnMut() -> bool) {
        let mut place = Place { event: self, held: None };
        poll_fn(|cx| {
            if condition() {
                return Poll::Ready(());
            }
            place.take(cx.waker());
            Poll::Pending
        })
        .await;
    }

    /// Waits for the next change after this call.
    pub fn changed(&self) -> impl Future<Output = ()> {
        let start = self.version.get();
        self.wait_until(move || self.version.get() != start)
    }
}

/// Counts permits; waits while there are none.
///
/// A returned permit goes to the task that has waited longest, and no other task can take it before that
/// one runs. So no task waits while a permit is free.
pub struct Semaphore {
    permits: Cell<usize>,
    waiters: RefCell<VecDeque<Rc<Waiter>>>,
}

#[derive(Default)]
struct Waiter {
    granted: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

/// A waiter's place in the queue. Its drop returns a permit that was granted to it.
struct Waiting<'a> {
    semaphore: &'a Rc<Semaphore>,
    waiter: Rc<Waiter>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.waiter.granted.get() {
            self.semaphore.release();
        } else {
            self.semaphore.waiters.borrow_mut().retain(|w| !Rc::ptr_eq(w, &self.waiter));
        }
    }
}

impl Semaphore {
    /// A semaphore with `permits` free permits.
    pub fn new(permits: usize) -> Rc<Semaphore> {
        Rc::new(Semaphore { permits: Cell::new(permits), waiters: RefCell::default() })
    }

    /// Takes a permit if one is free.
    pub fn try_acquire(self: &Rc<Self>) -> Option<Permit> {
        let n = self.permits.get();
        if n == 0 {
            return None;
        }
        self.permits.set(n - 1);
        Some(Permit { semaphore: self.clone() })
    }

    /// Waits for a permit.
    pub async fn acquire(self: &Rc<Self>) -> Permit {
        if let Some(p) = self.try_acquire() {
            return p;
        }
        let place = Waiting { semaphore: self, waiter: Rc::default() };
        self.waiters.borrow_mut().push_back(place.waiter.clone());
        poll_fn(|cx| {
            if place.waiter.granted.get() {
                return Poll::Ready(());
            }
            let old = place.waiter.waker.borrow_mut().replace(cx.waker().clone());
            drop(old);
            Poll::Pending
        })
        .await;
        // The `Permit` releases the grant when it is dropped, so `place` must no longer release it.
        place.waiter.granted.set(false);
        Permit { semaphore: self.clone() }
    }

    fn release(&self) {
        let next = self.waiters.borrow_mut().pop_front();
        match next {
            Some(waiter) => {
                waiter.granted.set(true);
                let waker = waiter.waker.borrow_mut().take();
                if let Some(w) = waker {
                    w.wake();
                }
            }
            None => self.permits.set(self.permits.get() + 1),
        }
    }

    /// Permits that are free.
    pub fn available(&self) -> usize {
        self.permits.get()
    }
}

/// A permit. Dropping it returns it to the semaphore.
pub struct Permit {
    semaphore: Rc<Semaphore>,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.semaphore.release();
    }
}

/// Mutual exclusion across await points.
#[derive(Clone)]
pub struct Mutex {
    semaphore: Rc<Semaphore>,
}

impl Default for Mutex {
    fn default() -> Self {
        Mutex { semaphore: Semaphore::new(1) }
    }
}

impl Mutex {
    /// Waits for the lock; it is held until the permit is dropped.
    pub async fn lock(&self) -> Permit {
        self.semaphore.acquire().await
    }

    /// Takes the lock if it is free.
    pub fn try_lock(&self) -> Option<Permit> {
        self.semaphore.try_acquire()
    }
}

/// An unbounded queue between tasks of one thread.
pub struct Queue<T> {
    items: RefCell<VecDeque<T>>,
    closed: Cell<bool>,
    event: Event,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Queue { items: RefCell::default(), closed: Cell::new(false), event: Event::default() }
    }
}

impl<T> Queue<T> {
    /// Adds an item.
    pub fn push(&self, item: T) {
        self.items.borrow_mut().push_back(item);
        self.event.notify_all();
    }

    /// Closes the queue: no more items will be added.
    pub fn close(&self) {
        self.closed.set(true);
        self.event.notify_all();
    }

    /// The next item; `None` once the queue is closed and empty.
    pub async fn pop(&self) -> Option<T> {
        loop {
            if let Some(item) = self.try_pop() {
                return Some(item);
            }
            if self.closed.get() {
                return None;
            }
            self.event.wait_until(|| self.closed.get() || !self.items.borrow().is_empty()).await;
        }
    }

    /// The next item, if there is one now.
    pub fn try_pop(&self) -> Option<T> {
        self.items.borrow_mut().pop_front()
    }

    /// Items waiting.
    pub fn len(&self) -> usize {
        self.items.borrow().len()
    }

    /// Whether no item waits.
    pub fn is_empty(&self) -> bool {
        self.items.borrow().is_empty()
    }
}

/// Which of two futures was ready first.
pub enum Either<A, B> {
    /// The output of the first future.
    Left(A),
    /// The output of the second future.
    Right(B),
}

/// Waits for the one of two futures that is ready first, and drops the other.
///
/// If both are ready, the result is the first future's.
pub async fn select<A, B>(
    a: impl Future<Output = A> + Unpin,
    b: impl Future<Output = B> + Unpin,
) -> Either<A, B> {
    let (mut a, mut b) = (a, b);
    poll_fn(move |cx| {
        if let Poll::Ready(v) = Pin::new(&mut a).poll(cx) {
            return Poll::Ready(Either::Left(v));
        }
        Pin::new(&mut b).poll(cx).map(Either::Right)
    })
    .await
}

/// Waits for all futures; returns their outputs in the order of the futures.
pub async fn join_all<F: Future + Unpin>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    let mut waiting: Vec<(Option<F>, Option<F::Output>)> =
        futures.into_iter().map(|f| (Some(f), None)).collect();
    poll_fn(|cx| {
        let mut waits = false;
        for (future, output) in &mut waiting {
            let Some(f) = future else { continue };
            match Pin::new(f).poll(cx) {
                Poll::Ready(v) => (*future, *output) = (None, Some(v)),
                Poll::Pending => waits = true,
            }
        }
        if waits { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
    waiting.into_iter().filter_map(|(_, output)| output).collect()
}

/// Waits for both futures.
pub async fn join<A, B>(a: impl Future<Output = A>, b: impl Future<Output = B>) -> (A, B) {
    let (mut a, mut b) = (std::pin::pin!(a), std::pin::pin!(b));
    let (mut done_a, mut done_b) = (None, None);
    poll_fn(move |cx| {
        if done_a.is_none()
            && let Poll::Ready(v) = a.as_mut().poll(cx)
        {
            done_a = Some(v);
        }
        if done_b.is_none()
            && let Poll::Ready(v) = b.as_mut().poll(cx)
        {
            done_b = Some(v);
        }
        match (done_a.take(), done_b.take()) {
            (Some(a), Some(b)) => Poll::Ready((a, b)),
            (a, b) => {
                (done_a, done_b) = (a, b);
                Poll::Pending
            }
        }
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Nanos;
    use crate::testing::{Bench, bench};

    #[test]
    fn an_event_wakes_all_who_wait_and_conditions_are_checked_again() {
        let Bench { rt, step, .. } = &bench();
        let event = Rc::new(Event::default());
        let level = Rc::new(Cell::new(0));
        let tasks: Vec<_> = (1..4)
            .map(|n| {
                let (event, level) = (event.clone(), level.clone());
                rt.spawn(async move { event.wait_until(|| level.get() >= n).await })
            })
            .collect();
        let ended = || tasks.iter().map(|t| t.try_take().is_some()).collect::<Vec<_>>();
        step();
        assert_eq!(ended(), [false, false, false]);
        level.set(2);
        step();
        assert_eq!(ended(), [false, false, false], "a change that nobody tells is not seen");
        event.notify_all();
        step();
        assert_eq!(ended(), [true, true, false]);
    }

    #[test]
    fn a_change_between_the_call_and_the_first_poll_is_seen() {
        let Bench { rt, step, .. } = &bench();
        let event: &'static Event = Box::leak(Box::default());
        let changed = event.changed();
        event.notify_all();
        let task = rt.spawn(changed);
        step();
        assert!(task.try_take().is_some());
    }

    #[test]
    fn giving_up_leaves_no_waker_behind() {
        let Bench { rt, step, advance, .. } = &bench();
        let event = Rc::new(Event::default());
        let theirs = event.clone();
        let task = rt.spawn({
            let rt = rt.clone();
            async move {
                for _ in 0..100 {
                    let never = std::pin::pin!(theirs.wait_until(|| false));
                    let _ = select(never, rt.sleep(Nanos(1))).await;
                }
            }
        });
        for _ in 0..100 {
            step();
            assert!(event.waiters.borrow().len() <= 1);
            advance();
        }
        step();
        assert!(task.try_take().is_some());
        assert!(event.waiters.borrow().is_empty());
    }

    #[test]
    fn permits_go_to_who_waited_longest_and_nobody_jumps_the_queue() {
        let Bench { rt, step, .. } = &bench();
        let semaphore = Semaphore::new(1);
        let order = Rc::new(RefCell::new(Vec::new()));
        let first = semaphore.try_acquire().unwrap();
        for n in 0..3 {
            let (semaphore, order) = (semaphore.clone(), order.clone());
            rt.spawn(async move {
                let _permit = semaphore.acquire().await;
                order.borrow_mut().push(n);
            });
        }
        step();
        drop(first);
        assert!(semaphore.try_acquire().is_none(), "the permit is the first waiter's already");
        step();
        assert_eq!(*order.borrow(), [0, 1, 2]);
        assert_eq!(semaphore.available(), 1);
    }

    #[test]
    fn a_waiter_that_goes_away_passes_its_permit_on() {
        let Bench { rt, step, .. } = &bench();
        let semaphore = Semaphore::new(1);
        let held = semaphore.try_acquire().unwrap();
        let mut quitter = Box::pin({
            let semaphore = semaphore.clone();
            async move { semaphore.acquire().await }
        });
        let mut early = Box::pin({
            let semaphore = semaphore.clone();
            async move { semaphore.acquire().await }
        });
        let mut cx = std::task::Context::from_waker(Waker::noop());
        assert!(early.as_mut().poll(&mut cx).is_pending());
        assert!(quitter.as_mut().poll(&mut cx).is_pending());
        let patient = rt.spawn({
            let semaphore = semaphore.clone();
            async move { drop(semaphore.acquire().await) }
        });
        step();
        drop(early);
        drop(held);
        // Granted, but it never looks.
        drop(quitter);
        step();
        assert!(patient.try_take().is_some());
        assert_eq!(semaphore.available(), 1);
    }

    #[test]
    fn a_mutex_excludes() {
        let Bench { rt, step, .. } = &bench();
        let mutex = Mutex::default();
        let held = mutex.try_lock().unwrap();
        assert!(mutex.try_lock().is_none());
        let task = rt.spawn({
            let mutex = mutex.clone();
            async move { drop(mutex.lock().await) }
        });
        step();
        assert!(task.try_take().is_none());
        drop(held);
        step();
        assert!(task.try_take().is_some());
    }

    #[test]
    fn a_queue_hands_over_in_order_and_ends_when_closed() {
        let Bench { rt, step, .. } = &bench();
        let queue = Rc::new(Queue::default());
        let theirs = queue.clone();
        let task = rt.spawn(async move {
            let mut got = Vec::new();
            while let Some(item) = theirs.pop().await {
                got.push(item);
            }
            got
        });
        step();
        queue.push(1);
        queue.push(2);
        assert_eq!(queue.len(), 2);
        step();
        assert!(queue.is_empty());
        queue.push(3);
        queue.close();
        step();
        assert_eq!(task.try_take(), Some(vec![1, 2, 3]));
    }

    #[test]
    fn select_takes_the_first_and_drops_the_other() {
        let Bench { rt, step, .. } = &bench();
        let dropped = Rc::new(());
        let theirs = dropped.clone();
        let task = rt.spawn(async move {
            let never = Box::pin(async move {
                let _kept = theirs;
                std::future::pending::<()>().await;
            });
            matches!(select(never, std::future::ready(5)).await, Either::Right(5))
        });
        step();
        assert_eq!(task.try_take(), Some(true));
        assert_eq!(Rc::strong_count(&dropped), 1);
    }

    #[test]
    fn join_waits_for_both_in_any_order() {
        let Bench { rt, step, advance, .. } = &bench();
        for (first, second) in [(1, 2), (2, 1), (0, 0)] {
            let (a, b) = (rt.sleep(Nanos(first)), rt.sleep(Nanos(second)));
            let task = rt.spawn(join(
                async move {
                    a.await;
                    'a'
                },
                async move {
                    b.await;
                    'b'
                },
            ));
            step();
            assert_eq!(task.try_take(), None);
            while advance() {
                step();
            }
            assert_eq!(task.try_take(), Some(('a', 'b')));
        }
    }
    /// Each future is polled when it is ready, not after those before it.
    #[test]
    fn join_all_waits_for_all_at_the_same_time() {
        let Bench { rt, step, advance, .. } = &bench();
        let ended = Rc::new(std::cell::RefCell::new(Vec::new()));
        let sleep = |ns: u64| {
            let (sleep, ended) = (rt.sleep(Nanos(ns)), ended.clone());
            Box::pin(async move {
                sleep.await;
                ended.borrow_mut().push(ns);
                ns
            })
        };
        let task = rt.spawn(join_all([sleep(2), sleep(1), sleep(0), sleep(3)]));
        step();
        while advance() {
            step();
        }
        assert_eq!(task.try_take(), Some(vec![2, 1, 0, 3]));
        assert_eq!(*ended.borrow(), [0, 1, 2, 3]);
        let none = rt.spawn(join_all(Vec::<std::future::Ready<()>>::new()));
        step();
        assert_eq!(none.try_take(), Some(Vec::new()));
    }
}
