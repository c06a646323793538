//! Waiting for each other inside one thread: events, a mutex, a semaphore, a queue.
//!
//! Single-threaded: none of these is `Send`. All are fair (first come, first served) unless the executor's
//! schedule says otherwise, and all are safe to drop while waiting.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};

/// Wakes everybody who waits for a change. Waiters re-check their condition: a wake-up promises nothing.
#[derive(Default)]
pub struct Event {
    version: Cell<u64>,
    waiters: RefCell<Vec<Waker>>,
}

impl Event {
    /// Something changed.
    pub fn notify_all(&self) {
        self.version.set(self.version.get() + 1);
        if self.waiters.borrow().is_empty() {
            return;
        }
        // Taken out and put back, so that the storage is kept and a waker may come back here.
        let mut waiters = std::mem::take(&mut *self.waiters.borrow_mut());
        for w in waiters.drain(..) {
            w.wake();
        }
        let mut slot = self.waiters.borrow_mut();
        if slot.is_empty() {
            *slot = waiters;
        }
    }

    /// Waits until `condition` holds; it is looked at now and after every change.
    pub async fn wait_until(&self, mut condition: impl FnMut() -> bool) {
        let mut seen = u64::MAX;
        poll_fn(|cx| {
            if condition() {
                return Poll::Ready(());
            }
            // A waker is stored once for each change, so polls in between do not pile up.
            if seen != self.version.get() {
                seen = self.version.get();
                self.waiters.borrow_mut().push(cx.waker().clone());
            }
            Poll::Pending
        })
        .await;
    }

    /// Waits for the next change.
    pub async fn changed(&self) {
        let start = self.version.get();
        self.wait_until(|| self.version.get() != start).await;
    }
}

/// Counts permits; waits while there are none.
pub struct Semaphore {
    permits: Cell<usize>,
    event: Event,
}

impl Semaphore {
    /// A semaphore with `permits` to give.
    pub fn new(permits: usize) -> Rc<Semaphore> {
        Rc::new(Semaphore { permits: Cell::new(permits), event: Event::default() })
    }

    /// Takes a permit if one is there.
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
        loop {
            if let Some(p) = self.try_acquire() {
                return p;
            }
            self.event.wait_until(|| self.permits.get() > 0).await;
        }
    }

    /// Permits that are free.
    pub fn available(&self) -> usize {
        self.permits.get()
    }
}

/// A permit; gives itself back when dropped.
pub struct Permit {
    semaphore: Rc<Semaphore>,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.semaphore.permits.set(self.semaphore.permits.get() + 1);
        self.semaphore.event.notify_all();
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

    /// No more items will come.
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
