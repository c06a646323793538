//! Helper threads for what would block the driver's thread.
//!
//! Owns the threads and their queues: ioctls that io_uring does not have, every device operation of the
//! pool backend, operations on file systems that wait where they should not, and closures of callers.
//! Each device has a queue and a share of threads of its own: one that stands still holds up nobody
//! else. Threads start when there is work for them and end after the last handle is gone. A command's
//! memory belongs to its operation in the reactor (module `cmd`); results are collected in a list that
//! the driver empties, with a wake-up for each sleep of the driver.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::cmd::Cmd;
use crate::wake::Wake;

enum Job {
    Cmd(u64, Cmd),
    Closure(Box<dyn FnOnce() + Send>),
}

/// Jobs of one device, or closures.
struct Class {
    device: Option<RawFd>,
    queue: VecDeque<Job>,
    running: usize,
}

impl Class {
    /// Jobs that may begin if there are threads for them.
    fn startable(&self, max_threads: usize) -> usize {
        self.queue.len().min(max_threads.saturating_sub(self.running))
    }
}

#[derive(Default)]
struct State {
    /// Each that ever had a job; the first was served least recently.
    classes: Vec<Class>,
    threads: usize,
    /// Threads that will look at the queues.
    idle: usize,
    stop: bool,
}

impl State {
    fn startable(&self, max_threads: usize) -> usize {
        self.classes.iter().map(|c| c.startable(max_threads)).sum()
    }

    fn push(&mut self, device: Option<RawFd>, job: Job) {
        match self.classes.iter_mut().find(|c| c.device == device) {
            Some(class) => class.queue.push_back(job),
            None => self.classes.push(Class { device, queue: VecDeque::from([job]), running: 0 }),
        }
    }

    /// A job that may begin now.
    fn pop(&mut self, max_threads: usize) -> Option<(Option<RawFd>, Job)> {
        let at = self.classes.iter().position(|c| c.startable(max_threads) > 0)?;
        let mut class = self.classes.remove(at);
        let job = class.queue.pop_front();
        class.running += 1;
        let device = class.device;
        self.classes.push(class);
        job.map(|job| (device, job))
    }

    /// A job of this class has ended.
    fn ended(&mut self, device: Option<RawFd>) {
        if let Some(class) = self.classes.iter_mut().find(|c| c.device == device) {
            class.running -= 1;
        }
    }
}

struct Shared {
    state: Mutex<State>,
    work: Condvar,
    done: Mutex<Vec<(u64, i32)>>,
    wake: Arc<Wake>,
    /// For each class.
    max_threads: usize,
}

/// The pool; dropping it lets the threads end once their queues are empty.
pub(crate) struct Workers {
    shared: Arc<Shared>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code that can panic runs under these locks, so a poisoned one is still whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Workers {
    /// `max_threads` for each device.
    pub(crate) fn new(max_threads: usize, wake: Arc<Wake>) -> Workers {
        let shared = Shared {
            state: Mutex::default(),
            work: Condvar::new(),
            done: Mutex::default(),
            wake,
            max_threads: max_threads.max(1),
        };
        Workers { shared: Arc::new(shared) }
    }

    /// Runs a command; its result comes back by [`Workers::take_done`] under `user_data`.
    pub(crate) fn run_cmd(&self, user_data: u64, cmd: Cmd) {
        self.push(Some(cmd.fd()), Job::Cmd(user_data, cmd));
    }

    /// Runs a closure, which reports by its own means.
    pub(crate) fn run_closure(&self, closure: Box<dyn FnOnce() + Send>) {
        self.push(None, Job::Closure(closure));
    }

    fn push(&self, device: Option<RawFd>, job: Job) {
        let mut state = lock(&self.shared.state);
        state.push(device, job);
        let start = state.startable(self.shared.max_threads) > state.idle;
        if start {
            state.threads += 1;
            // It is on its way to the queue.
            state.idle += 1;
        }
        drop(state);
        if !start {
            self.shared.work.notify_one();
            return;
        }
        let shared = self.shared.clone();
        let started = std::thread::Builder::new().name("ubcache-io".into()).spawn(move || serve(&shared));
        if started.is_err() {
            let mut state = lock(&self.shared.state);
            state.threads -= 1;
            state.idle -= 1;
            if state.threads == 0 {
                // No thread can be had at all: slow, but the operation must end.
                while let Some((device, job)) = state.pop(self.shared.max_threads) {
                    drop(state);
                    run(&self.shared, job);
                    state = lock(&self.shared.state);
                    state.ended(device);
                }
            }
        }
    }

    /// Moves the results that have come in to `out`.
    pub(crate) fn take_done(&self, out: &mut Vec<(u64, i32)>) {
        out.append(&mut lock(&self.shared.done));
    }

    /// Whether results wait to be taken.
    pub(crate) fn has_done(&self) -> bool {
        !lock(&self.shared.done).is_empty()
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        lock(&self.shared.state).stop = true;
        self.shared.work.notify_all();
    }
}

fn run(shared: &Shared, job: Job) {
    match job {
        Job::Cmd(user_data, cmd) => {
            let result = cmd.call();
            lock(&shared.done).push((user_data, result));
            shared.wake.notify();
        }
        Job::Closure(closure) => closure(),
    }
}

fn serve(shared: &Shared) {
    let mut state = lock(&shared.state);
    state.idle -= 1;
    loop {
        if let Some((device, job)) = state.pop(shared.max_threads) {
            drop(state);
            run(shared, job);
            state = lock(&shared.state);
            state.ended(device);
        } else if state.stop {
            state.threads -= 1;
            return;
        } else {
            state.idle += 1;
            state = shared.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
        }
    }
}
