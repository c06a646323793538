//! Helper threads for what would block the driver's thread.
//!
//! Owns the threads and their queue: ioctls that io_uring does not have, every device operation of the
//! pool backend, and closures of callers. Threads start when there is work for them and end after the
//! last handle is gone. A command's memory belongs to its operation in the reactor (module `cmd`);
//! results are collected in a list that the driver empties, with a wake-up for each sleep of the driver.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::cmd::Cmd;
use crate::wake::Wake;

enum Job {
    Cmd(u64, Cmd),
    Closure(Box<dyn FnOnce() + Send>),
}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    threads: usize,
    idle: usize,
    stop: bool,
}

struct Shared {
    state: Mutex<State>,
    work: Condvar,
    done: Mutex<Vec<(u64, i32)>>,
    wake: Arc<Wake>,
}

/// The pool; dropping it lets the threads end once their queue is empty.
pub(crate) struct Workers {
    shared: Arc<Shared>,
    max_threads: usize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code that can panic runs under these locks, so a poisoned one is still whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Workers {
    pub(crate) fn new(max_threads: usize, wake: Arc<Wake>) -> Workers {
        let shared = Shared { state: Mutex::default(), work: Condvar::new(), done: Mutex::default(), wake };
        Workers { shared: Arc::new(shared), max_threads: max_threads.max(1) }
    }

    /// Runs a command; its result comes back by [`Workers::take_done`] under `user_data`.
    pub(crate) fn run_cmd(&self, user_data: u64, cmd: Cmd) {
        self.push(Job::Cmd(user_data, cmd));
    }

    /// Runs a closure, which reports by its own means.
    pub(crate) fn run_closure(&self, closure: Box<dyn FnOnce() + Send>) {
        self.push(Job::Closure(closure));
    }

    fn push(&self, job: Job) {
        let mut state = lock(&self.shared.state);
        state.queue.push_back(job);
        let start = state.queue.len() > state.idle && state.threads < self.max_threads;
        if start {
            state.threads += 1;
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
            if state.threads == 0 {
                // No thread can be had at all: slow, but the operation must end.
                while let Some(job) = state.queue.pop_front() {
                    drop(state);
                    run(&self.shared, job);
                    state = lock(&self.shared.state);
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
    loop {
        if let Some(job) = state.queue.pop_front() {
            drop(state);
            run(shared, job);
            state = lock(&shared.state);
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
