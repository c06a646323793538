//! The executor: polls the tasks of one thread.
//!
//! Owns the tasks and the queue of those that are ready. Which ready task runs next is a decision of
//! the caller ([`Schedule`]): first come first served in production, seeded in simulation. Wakers may be
//! used from any thread; a wake-up from outside unparks the driver.
//!
//! Invariants: a task is polled by one caller at a time and never after it ended; a task that is woken
//! while it runs runs again.

use std::cell::RefCell;
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

/// First come, first served.
pub struct Fifo;

impl Schedule for Fifo {
    fn pick(&mut self, _ready: usize) -> usize {
        0
    }
}

/// Ends the wait of a driver that has parked, from any thread.
pub trait Unpark: Send + Sync {
    /// Makes the driver look at the ready queue again.
    fn unpark(&self);
}

type TaskId = u32;
type TaskFuture = Pin<Box<dyn Future<Output = ()>>>;

#[derive(Default)]
struct ReadyQueue {
    queue: Mutex<VecDeque<TaskId>>,
    /// The driver waits outside: a wake-up must unpark it.
    parked: AtomicBool,
    unpark: Mutex<Option<Arc<dyn Unpark>>>,
}

impl ReadyQueue {
    fn lock(&self) -> MutexGuard<'_, VecDeque<TaskId>> {
        // Nothing panics while the lock is held, and a queue of numbers cannot be half-changed.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, id: TaskId) {
        self.lock().push_back(id);
        if self.parked.swap(false, Ordering::SeqCst) {
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
    /// Belongs to the slot, not to the task: a late wake-up of an ended task is spurious for the next.
    flag: Arc<TaskWaker>,
    waker: Waker,
    live: bool,
}

#[derive(Default)]
pub(crate) struct Executor {
    tasks: RefCell<Vec<Task>>,
    free: RefCell<Vec<TaskId>>,
    ready: Arc<ReadyQueue>,
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
                let waker = Waker::from(flag.clone());
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
            let id = {
                let mut queue = self.ready.lock();
                if queue.is_empty() {
                    break;
                }
                let at = schedule.pick(queue.len());
                if at == 0 { queue.pop_front() } else { queue.swap_remove_back(at) }
            };
            let Some(id) = id else { break };
            polls += 1;
            self.poll_task(id);
        }
        polls
    }

    fn poll_task(&self, id: TaskId) {
        let (future, waker) = {
            let mut tasks = self.tasks.borrow_mut();
            let task = &mut tasks[id as usize];
            task.flag.queued.store(false, Ordering::Release);
            (task.future.take(), task.waker.clone())
        };
        // Absent: the task ended and this wake-up was late.
        let Some(mut future) = future else { return };
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Pending => self.tasks.borrow_mut()[id as usize].future = Some(future),
            Poll::Ready(()) => {
                self.tasks.borrow_mut()[id as usize].live = false;
                // Dropping may wake or spawn, so it happens outside of every borrow.
                drop(future);
                self.free.borrow_mut().push(id);
            }
        }
    }

    /// Announces that the driver is about to wait; false if a task became ready meanwhile.
    pub(crate) fn park(&self) -> bool {
        self.ready.parked.store(true, Ordering::SeqCst);
        if self.ready.lock().is_empty() {
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
        !self.ready.lock().is_empty()
    }

    pub(crate) fn live_tasks(&self) -> usize {
        self.tasks.borrow().iter().filter(|t| t.live).count()
    }

    /// Drops every task where it stands: what a power cut does to them.
    pub(crate) fn clear(&self) {
        let tasks = std::mem::take(&mut *self.tasks.borrow_mut());
        drop(tasks);
        // Dropping tasks may have woken or spawned others: those go the same way.
        let more = std::mem::take(&mut *self.tasks.borrow_mut());
        drop(more);
        self.free.borrow_mut().clear();
        self.ready.lock().clear();
    }
}

struct JoinState<T> {
    value: Option<T>,
    waiter: Option<Waker>,
}

/// Waits for a task's result. Dropping it lets the task run on.
pub struct JoinHandle<T> {
    state: Rc<RefCell<JoinState<T>>>,
}

impl<T> JoinHandle<T> {
    /// The result, if the task has ended and nobody took it yet.
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
