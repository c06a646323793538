//! The runtime of one thread: executor, timers, completions, buffers and a clock, in one place.
//!
//! The driver (crates `blockio` and `sim`) holds the [`Runtime`]: it runs ready tasks, reads the next
//! deadline, waits outside and fires timers. Tasks hold a [`Handle`].

use std::cell::RefCell;
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

use crate::buffer::BufferPool;
use crate::clock::{Clock, TurnClock};
use crate::completion::Completions;
use crate::executor::{Executor, JoinHandle, Schedule, Unpark};
use crate::rng::Rng;
use crate::timer::{Nanos, Sleep, Timers};

struct RuntimeParts {
    executor: Executor,
    timers: Timers,
    completions: Completions,
    pool: BufferPool,
    clock: Rc<TurnClock>,
    rng: RefCell<Rng>,
}

/// A runtime, as its driver uses it.
pub struct Runtime {
    shared: Rc<RuntimeParts>,
}

/// The handle of a runtime for tasks. Cheap to clone.
#[derive(Clone)]
pub struct Handle {
    shared: Rc<RuntimeParts>,
}

impl Runtime {
    /// A runtime on `clock`, whose random numbers depend on `seed`.
    pub fn new(clock: Rc<dyn Clock>, seed: u64) -> Runtime {
        let clock = Rc::new(TurnClock::new(clock));
        Runtime {
            shared: Rc::new(RuntimeParts {
                executor: Executor::default(),
                timers: Timers::default(),
                completions: Completions::new(clock.clone()),
                pool: BufferPool::default(),
                clock,
                rng: RefCell::new(Rng::new(seed)),
            }),
        }
    }

    /// A handle for tasks.
    pub fn handle(&self) -> Handle {
        Handle { shared: self.shared.clone() }
    }

    /// Ends the wait of the driver when a task is woken from another thread.
    pub fn set_unpark(&self, unpark: Arc<dyn Unpark>) {
        self.shared.executor.set_unpark(unpark);
    }

    /// Polls ready tasks in the order of `schedule`, at most `limit` polls; returns how many were made.
    pub fn run(&self, schedule: &mut dyn Schedule, limit: usize) -> usize {
        self.begin_turn();
        let polls = self.shared.executor.run(schedule, limit);
        // The driver may wait after this call, so completions that end the wait read the clock again.
        self.begin_turn();
        polls
    }

    /// Ends the turn: the next [`Handle::turn_time`] reads the clock again.
    pub fn begin_turn(&self) {
        self.shared.clock.end_turn();
    }

    /// Whether a task is ready.
    pub fn has_ready(&self) -> bool {
        self.shared.executor.has_ready()
    }

    /// Announces that the driver will wait outside; false if a task became ready and it must not wait.
    pub fn park(&self) -> bool {
        self.shared.executor.park()
    }

    /// Announces that the driver's wait has ended.
    pub fn unparked(&self) {
        self.shared.executor.unparked();
    }

    /// The deadline of the next timer, if there is one.
    pub fn next_deadline(&self) -> Option<Nanos> {
        self.shared.timers.next_deadline()
    }

    /// Wakes all tasks that wait for a time up to now.
    pub fn fire_timers(&self) {
        self.shared.timers.fire(self.shared.clock.now());
    }

    /// Tasks that have not ended.
    pub fn live_tasks(&self) -> usize {
        self.shared.executor.live_tasks()
    }

    /// Drops every task at its current await point.
    pub fn drop_tasks(&self) {
        self.shared.executor.clear();
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        // Tasks hold handles to the runtime. Without this, the cycle would keep both in memory.
        self.shared.executor.clear();
    }
}

impl Handle {
    /// Starts a task.
    pub fn spawn<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> JoinHandle<T> {
        self.shared.executor.spawn(future)
    }

    /// The monotonic time.
    pub fn now(&self) -> Nanos {
        self.shared.clock.now()
    }

    /// The monotonic time at one moment of this turn of the driver.
    ///
    /// Work that is done for each request uses it, because reading the clock costs as much as a lookup in the index.
    pub fn turn_time(&self) -> Nanos {
        self.shared.clock.turn_time()
    }

    /// Seconds since 1970-01-01 UTC.
    pub fn wall_seconds(&self) -> u64 {
        self.shared.clock.wall_seconds()
    }

    /// Waits until `deadline`.
    pub fn sleep_until(&self, deadline: Nanos) -> Sleep {
        self.shared.timers.sleep_until(deadline)
    }

    /// Waits for `span`.
    pub fn sleep(&self, span: Nanos) -> Sleep {
        self.sleep_until(self.now().after(span))
    }

    /// Lets the other ready tasks run first.
    pub async fn yield_now(&self) {
        let mut yielded = false;
        std::future::poll_fn(move |cx| {
            if std::mem::replace(&mut yielded, true) {
                return Poll::Ready(());
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
    }

    /// The buffers of this thread.
    pub fn pool(&self) -> &BufferPool {
        &self.shared.pool
    }

    /// 64 random bits from the runtime's seeded source.
    pub fn random(&self) -> u64 {
        self.shared.rng.borrow_mut().next_u64()
    }

    #[cfg(test)]
    pub(crate) fn executor_for_test(&self) -> &Executor {
        &self.shared.executor
    }

    pub(crate) fn completions(&self) -> &Completions {
        &self.shared.completions
    }
}
