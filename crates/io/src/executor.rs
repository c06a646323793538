//! The executor: polls the tasks of one thread.
//!
//! Owns the tasks and the queue of those that are ready. The caller decides which ready task runs next
//! ([`Schedule`]): first come, first served in production, seeded in simulation. Any thread may use a
//! waker; a wake-up from another thread unparks the driver.
//!
//! Invariants: a task is polled by one caller at a time and never after it ended; a task that is woken
//! during its poll is polled again.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

/// Chooses which ready task runs next.
pub trait Schedule {
    /// An index below `ready`, which is at least 1.
    fn pick(&mut self, ready: usize) -> usize;
}

/// Runs ready tasks in the order in which they became ready.
pub struct Fifo;

impl Schedule for Fifo {
    fn pick(&mut self, _ready: usize) -> usize {
        0
    }
}

/// Ends the wait of a driver that has parked, from any thread.
pub trait Unpark: Send + Sync {
    /// Makes the driver check the ready queue again.
    fn unpark(&self);
}

type TaskId = u32;
type TaskFuture = Pin<Box<dyn Future<Output = ()>>>;

#[derive(Default)]
struct ReadyQueue {
    queue: Mutex<VecDeque<TaskId>>,
    /// Whether `queue` has entries. It is read without the lock.
    filled: AtomicBool,
    /// True while the driver waits outside of the executor; a wake-up must then unpark it.
    parked: AtomicBool,
    unpark: Mutex<Option<Arc<dyn Unpark>>>,
}

impl ReadyQueue {
    fn lock(&self) -> MutexGuard<'_, VecDeque<TaskId>> {
        // No code panics while it holds the lock, and no change of a queue of numbers can stay incomplete.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, id: TaskId) {
        let mut queue = self.lock();
        queue.push_back(id);
        self.filled.store(true, Ordering::Release);
        drop(queue);
        // A plain load first, because in most cases the driver is not parked. A driver that parks after this load takes
        // the lock and finds the queue filled.
        if self.parked.load(Ordering::SeqCst) && self.parked.swap(false, Ordering::SeqCst) {
            let unpark = self.unpark.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(u) = unpark.as_ref() {
                u.unpark();
            }
        }
    }
}

struct TaskWaker {
    id: TaskId,
    queued: AtomicBool,
    ready: Arc<ReadyQueue>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.queued.swap(true, Ordering::AcqRel) {
            self.ready.push(self.id);
        }
    }
}

struct Task {
    future: Option<TaskFuture>,
    /// Belongs to the slot, not to the task. A late wake-up of an ended task wakes the slot's next task without need.
    flag: Arc<TaskWaker>,
    /// The flag as a waker; `None` during a poll of the task.
    waker: Option<Waker>,
    live: bool,
}

#[derive(Default)]
pub(crate) struct Executor {
    tasks: RefCell<Vec<Task>>,
    free: RefCell<Vec<TaskId>>,
    ready: Arc<ReadyQueue>,
    /// The contents of the ready queue at the last check, in its order.
    taken: RefCell<VecDeque<TaskId>>,
    /// How often all tasks were dropped.
    cleared: Cell<u64>,
}

impl Executor {
    pub(crate) fn spawn_boxed(&self, future: TaskFuture) {
        let id = self.free.borrow_mut().pop();
        let mut tasks = self.tasks.borrow_mut();
        let id = match id {
            Some(id) => id,
            None => {
                let id = TaskId::try_from(tasks.len()).expect("fewer than 2^32 tasks");
                let flag =
                    Arc::new(TaskWaker { id, queued: AtomicBool::new(false), ready: self.ready.clone() });
                let waker = Some(Waker::from(flag.clone()));
                tasks.push(Task { future: None, flag, waker, live: false });
                id
            }
        };
        let task = &mut tasks[id as usize];
        task.future = Some(future);
        task.live = true;
        let flag = task.flag.clone();
        drop(tasks);
        flag.wake_by_ref();
    }

    pub(crate) fn spawn<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> JoinHandle<T> {
        let state = Rc::new(RefCell::new(JoinState { value: None, waiter: None }));
        let theirs = state.clone();
        self.spawn_boxed(Box::pin(async move {
            let value = future.await;
            let mut s = theirs.borrow_mut();
            s.value = Some(value);
            let waiter = s.waiter.take();
            drop(s);
            if let Some(w) = waiter {
                w.wake();
            }
        }));
        JoinHandle { state }
    }

    /// Polls ready tasks, at most `limit` polls. Returns how many polls were made.
    pub(crate) fn run(&self, schedule: &mut dyn Schedule, limit: usize) -> usize {
        let mut polls = 0;
        while polls < limit {
            self.take_ready();
            let id = {
                let mut taken = self.taken.borrow_mut();
                if taken.is_empty() {
                    break;
                }
                let at = schedule.pick(taken.len());
                if at == 0 { taken.pop_front() } else { taken.swap_remove_back(at) }
            };
            let Some(id) = id else { break };
            polls += 1;
            self.poll_task(id);
        }
        polls
    }

    /// Moves ready tasks to the list of this thread.
    fn take_ready(&self) {
        if self.ready.filled.load(Ordering::Acquire) {
            let mut queue = self.ready.lock();
            self.ready.filled.store(false, Ordering::Relaxed);
            self.taken.borrow_mut().append(&mut queue);
        }
    }

    fn poll_task(&self, id: TaskId) {
        let (mut future, waker) = {
            let mut tasks = self.tasks.borrow_mut();
            // Absent after a late wake-up, from another thread, of a task that was dropped.
            let Some(task) = tasks.get_mut(id as usize) else { return };
            task.flag.queued.store(false, Ordering::Release);
            // Absent if the task ended before this late wake-up.
            let Some(future) = task.future.take() else { return };
            (future, task.waker.take().unwrap_or_else(|| Waker::from(task.flag.clone())))
        };
        let cleared = self.cleared.get();
        let poll = future.as_mut().poll(&mut Context::from_waker(&waker));
        let mut tasks = self.tasks.borrow_mut();
        let task = match tasks.get_mut(id as usize) {
            Some(task) if self.cleared.get() == cleared => task,
            // The task dropped all tasks, itself included. A drop may wake or spawn, so it happens
            // outside of every borrow, here and below.
            _ => {
                drop(tasks);
                drop(future);
                return;
            }
        };
        task.waker = Some(waker);
        match poll {
            Poll::Pending => task.future = Some(future),
            Poll::Ready(()) => {
                task.live = false;
                drop(tasks);
                drop(future);
                self.free.borrow_mut().push(id);
            }
        }
    }

    /// Announces that the driver is about to wait; false if a task became ready meanwhile.
    pub(crate) fn park(&self) -> bool {
        self.ready.parked.store(true, Ordering::SeqCst);
        if self.taken.borrow().is_empty() && self.ready.lock().is_empty() {
            return true;
        }
        self.ready.parked.store(false, Ordering::SeqCst);
        false
    }

    pub(crate) fn unparked(&self) {
        self.ready.parked.store(false, Ordering::SeqCst);
    }

    pub(crate) fn set_unpark(&self, unpark: Arc<dyn Unpark>) {
        *self.ready.unpark.lock().unwrap_or_else(PoisonError::into_inner) = Some(unpark);
    }

    pub(crate) fn has_ready(&self) -> bool {
        !self.taken.borrow().is_empty() || self.ready.filled.load(Ordering::Acquire)
    }

    pub(crate) fn live_tasks(&self) -> usize {
        self.tasks.borrow().iter().filter(|t| t.live).count()
    }

    /// Drops every task at its current await point, as a power loss would end it.
    pub(crate) fn clear(&self) {
        self.cleared.set(self.cleared.get() + 1);
        loop {
            // The numbers first: a task that a drop below spawns must not get the number of a dropped slot.
            self.free.borrow_mut().clear();
            let tasks = std::mem::take(&mut *self.tasks.borrow_mut());
            if tasks.is_empty() {
                break;
            }
            // A dropped task may wake or spawn others; the next pass of this loop drops those.
            drop(tasks);
        }
        self.take_ready();
        self.taken.borrow_mut().clear();
    }
}

struct JoinState<T> {
    value: Option<T>,
    waiter: Option<Waker>,
}

/// Waits for a task's result. If it is dropped, the task continues.
pub struct JoinHandle<T> {
    state: Rc<RefCell<JoinState<T>>>,
}

impl<T> JoinHandle<T> {
    /// The result, if the task has ended and the result was not taken.
    pub fn try_take(&self) -> Option<T> {
        self.state.borrow_mut().value.take()
    }
}

impl<T> Future for JoinHandle<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let mut s = self.state.borrow_mut();
        match s.value.take() {
            Some(v) => Poll::Ready(v),
            None => {
                s.waiter = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::testing::{Bench, bench};

    struct CountingUnpark(std::sync::atomic::AtomicUsize);

    impl Unpark for CountingUnpark {
        fn unpark(&self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// A future that is never ready and shows its waker.
    fn show_waker(to: &Rc<RefCell<Option<Waker>>>) -> impl Future<Output = ()> + use<> {
        let to = to.clone();
        std::future::poll_fn(move |cx| {
            *to.borrow_mut() = Some(cx.waker().clone());
            Poll::Pending
        })
    }

    #[test]
    fn tasks_run_in_the_order_in_which_they_became_ready() {
        let executor = Executor::default();
        let order = Rc::new(RefCell::new(Vec::new()));
        for n in 0..4 {
            let order = order.clone();
            executor.spawn(async move { order.borrow_mut().push(n) });
        }
        assert_eq!(executor.run(&mut Fifo, 3), 3, "the limit counts polls");
        assert!(executor.has_ready());
        assert_eq!(executor.run(&mut Fifo, 3), 1);
        assert_eq!(*order.borrow(), [0, 1, 2, 3]);
        assert_eq!(executor.live_tasks(), 0);
    }

    #[test]
    fn the_schedule_decides() {
        struct Last;
        impl Schedule for Last {
            fn pick(&mut self, ready: usize) -> usize {
                ready - 1
            }
        }
        let executor = Executor::default();
        let order = Rc::new(RefCell::new(Vec::new()));
        for n in 0..4 {
            let order = order.clone();
            executor.spawn(async move { order.borrow_mut().push(n) });
        }
        executor.run(&mut Last, usize::MAX);
        assert_eq!(*order.borrow(), [3, 2, 1, 0]);
    }

    #[test]
    fn a_task_woken_twice_runs_once_and_one_woken_while_it_runs_runs_again() {
        let executor = Executor::default();
        let waker = Rc::new(RefCell::new(None));
        executor.spawn(show_waker(&waker));
        assert_eq!(executor.run(&mut Fifo, usize::MAX), 1);
        let woken: Waker = waker.borrow().clone().unwrap();
        woken.wake_by_ref();
        woken.wake_by_ref();
        assert_eq!(executor.run(&mut Fifo, usize::MAX), 1);

        let polls = Rc::new(Cell::new(0));
        let theirs = polls.clone();
        let own = executor.spawn(std::future::poll_fn(move |cx| {
            theirs.set(theirs.get() + 1);
            if theirs.get() == 3 {
                return Poll::Ready(());
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        }));
        executor.run(&mut Fifo, usize::MAX);
        assert!(own.try_take().is_some());
        assert_eq!(polls.get(), 3);
    }

    #[test]
    fn a_waker_of_an_ended_task_does_no_harm_to_the_next_in_its_place() {
        let executor = Executor::default();
        let waker = Rc::new(RefCell::new(None));
        let theirs = waker.clone();
        let done = executor.spawn(std::future::poll_fn(move |cx| {
            *theirs.borrow_mut() = Some(cx.waker().clone());
            Poll::Ready(())
        }));
        executor.run(&mut Fifo, usize::MAX);
        assert!(done.try_take().is_some());
        let late: Waker = waker.borrow().clone().unwrap();
        let polls = Rc::new(Cell::new(0));
        let counter = polls.clone();
        let _next = executor.spawn(async move {
            std::future::poll_fn(|_| {
                counter.set(counter.get() + 1);
                Poll::<()>::Pending
            })
            .await;
        });
        executor.run(&mut Fifo, usize::MAX);
        late.wake();
        executor.run(&mut Fifo, usize::MAX);
        assert_eq!(polls.get(), 2, "a spurious poll");
        assert_eq!(executor.live_tasks(), 1);
    }

    #[test]
    fn a_wake_up_from_another_thread_unparks_once() {
        let executor = Executor::default();
        let unpark = Arc::new(CountingUnpark(Default::default()));
        executor.set_unpark(unpark.clone());
        let waker = Rc::new(RefCell::new(None));
        executor.spawn(show_waker(&waker));
        assert!(!executor.park(), "a task is ready");
        executor.run(&mut Fifo, usize::MAX);
        assert!(executor.park());
        let woken: Waker = waker.borrow().clone().unwrap();
        std::thread::spawn(move || {
            woken.wake_by_ref();
            woken.wake_by_ref();
        })
        .join()
        .unwrap();
        assert_eq!(unpark.0.load(Ordering::SeqCst), 1);
        executor.unparked();
        assert_eq!(executor.run(&mut Fifo, usize::MAX), 1);
    }

    /// What a driver's end did with threads that still held wakers: an index out of range.
    #[test]
    fn a_waker_of_a_cleared_task_does_no_harm() {
        let executor = Executor::default();
        let waker = Rc::new(RefCell::new(None));
        executor.spawn(show_waker(&waker));
        executor.run(&mut Fifo, usize::MAX);
        executor.clear();
        waker.borrow_mut().take().unwrap().wake();
        assert_eq!(executor.run(&mut Fifo, usize::MAX), 1);
        let task = executor.spawn(async { 5 });
        executor.run(&mut Fifo, usize::MAX);
        assert_eq!(task.try_take(), Some(5));
    }

    #[test]
    fn clearing_drops_tasks_where_they_stand_and_what_their_drop_spawns() {
        struct SpawnOnDrop(Handle, Rc<Cell<u32>>);
        impl Drop for SpawnOnDrop {
            fn drop(&mut self) {
                self.1.set(self.1.get() + 1);
                if self.1.get() < 5 {
                    let again = SpawnOnDrop(self.0.clone(), self.1.clone());
                    self.0.spawn(async move {
                        let _kept = again;
                        std::future::pending::<()>().await;
                    });
                }
            }
        }
        use crate::Handle;
        let Bench { rt, step, .. } = &bench();
        let drops = Rc::new(Cell::new(0));
        let first = SpawnOnDrop(rt.clone(), drops.clone());
        rt.spawn(async move {
            let _kept = first;
            std::future::pending::<()>().await;
        });
        step();
        assert_eq!(drops.get(), 0);
        rt.clear_for_test();
        assert_eq!(drops.get(), 5);
        assert_eq!(rt.live_for_test(), 0);
        let task = rt.spawn(async { 1 });
        step();
        assert_eq!(task.try_take(), Some(1));
    }

    #[test]
    fn a_task_may_clear_all_tasks_itself() {
        let Bench { rt, step, .. } = &bench();
        let other = rt.spawn(std::future::pending::<()>());
        let theirs = rt.clone();
        rt.spawn(async move {
            theirs.clear_for_test();
            std::future::pending::<()>().await;
        });
        step();
        assert_eq!(rt.live_for_test(), 0);
        assert!(other.try_take().is_none());
        let task = rt.spawn(async { 1 });
        step();
        assert_eq!(task.try_take(), Some(1));
    }

    #[test]
    fn a_join_handle_waits_and_dropping_it_lets_the_task_run() {
        let Bench { rt, step, .. } = &bench();
        let inner = rt.spawn({
            let rt = rt.clone();
            async move {
                rt.yield_now().await;
                7
            }
        });
        let outer = rt.spawn(async move { inner.await + 1 });
        let ran = Rc::new(Cell::new(false));
        let theirs = ran.clone();
        drop(rt.spawn(async move { theirs.set(true) }));
        step();
        assert_eq!(outer.try_take(), Some(8));
        assert!(ran.get());
    }
}
