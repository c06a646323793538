//! Helper threads for calls that would block the driver's thread.
//!
//! Owns the threads and their queues. Helper threads carry out ioctls that io_uring does not have, every device operation of
//! the pool backend, operations on file systems where io_uring may wait on the driver's thread, and closures of callers.
//! Each device has its own queue and its own limit of threads, so that a device that hangs does not delay another one.
//! Threads start when there is work for them and end after the last handle is dropped. A command's memory belongs to its
//! operation in the reactor (module `cmd`). Results are collected in a list that the driver empties; one wake-up is sent for
//! each sleep of the driver.
//!
//! A block device that is served through a ring has its own threads for as long as it is open ([`DeviceThreads`]). To start a
//! thread while memory is short waits for memory, and the memory may wait for the device (decision 028). Invariant: to give a
//! command to such threads starts no thread and allocates only from the heap.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::rc::Rc;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::cmd::Cmd;
use crate::heap;
use crate::wake::Wake;

/// Number of threads of a block device that is served through a ring.
///
/// One thread suffices for progress. More threads keep the device busy with the requests that the ring does not carry out:
/// requests that the device has to split, and requests for which it has no room.
const THREADS_OF_DEVICE: usize = 8;

/// Bytes of the stack of a thread of such a device. These threads only make system calls.
const STACK_BYTES: usize = 256 << 10;

/// Number of commands for which these threads, and the list of results, have room from the start.
const ROOM: usize = 256;

enum Job {
    Cmd(u64, Cmd),
    Closure(Box<dyn FnOnce() + Send>),
}

impl Job {
    /// Whether a device may take minutes for the job. A flush must not wait behind many such jobs.
    fn may_last(&self) -> bool {
        matches!(self, Job::Cmd(_, Cmd::Discard { .. } | Cmd::Fallocate { .. }))
    }
}

/// The jobs of one device, or all closures.
struct Class {
    device: Option<RawFd>,
    queue: VecDeque<Job>,
    running: usize,
    /// Discards and write-zeroes, which may use half of the threads at most.
    long: VecDeque<Job>,
    long_running: usize,
}

impl Class {
    fn new(device: Option<RawFd>, room: usize) -> Class {
        let queue = || VecDeque::with_capacity(room);
        Class { device, queue: queue(), running: 0, long: queue(), long_running: 0 }
    }

    /// Number of jobs that may begin if there are threads for them.
    fn startable(&self, max_threads: usize) -> usize {
        let long = self.long.len().min((max_threads / 2).max(1).saturating_sub(self.long_running));
        (self.queue.len() + long).min(max_threads.saturating_sub(self.running))
    }

    fn push(&mut self, job: Job) {
        if job.may_last() { self.long.push_back(job) } else { self.queue.push_back(job) }
    }

    /// Takes a job that may begin.
    fn pop(&mut self) -> Option<Job> {
        let job = self.queue.pop_front().or_else(|| self.long.pop_front())?;
        self.running += 1;
        self.long_running += usize::from(job.may_last());
        Some(job)
    }
}

#[derive(Default)]
struct JobQueues {
    /// A class for each device that ever had a job, and one for closures; the first was served least recently.
    classes: Vec<Class>,
    threads: usize,
    /// Threads that are about to check the queues.
    idle: usize,
    /// Threads that have begun.
    begun: usize,
    stop: bool,
}

impl JobQueues {
    fn startable(&self, max_threads: usize) -> usize {
        self.classes.iter().map(|c| c.startable(max_threads)).sum()
    }

    fn push(&mut self, device: Option<RawFd>, job: Job) {
        match self.classes.iter_mut().find(|c| c.device == device) {
            Some(class) => class.push(job),
            None => {
                let mut class = Class::new(device, 0);
                class.push(job);
                self.classes.push(class);
            }
        }
    }

    /// A job that may begin now.
    fn pop(&mut self, max_threads: usize) -> Option<(Option<RawFd>, Job)> {
        let at = self.classes.iter().position(|c| c.startable(max_threads) > 0)?;
        let mut class = self.classes.remove(at);
        let job = class.pop();
        let device = class.device;
        self.classes.push(class);
        job.map(|job| (device, job))
    }

    /// Records that a job of the class `device` has ended; `lasted` is [`Job::may_last`] of the job.
    fn ended(&mut self, device: Option<RawFd>, lasted: bool) {
        if let Some(class) = self.classes.iter_mut().find(|c| c.device == device) {
            class.running -= 1;
            class.long_running -= usize::from(lasted);
        }
    }
}

struct SharedQueues {
    state: Mutex<JobQueues>,
    work: Condvar,
    /// Announces that a thread has begun.
    begun: Condvar,
    done: Arc<Done>,
    /// Maximum number of threads for each class.
    max_threads: usize,
}

/// Results of commands, for the driver.
struct Done {
    list: Mutex<Vec<(u64, i32)>>,
    wake: Arc<Wake>,
}

/// A group of threads. If it is dropped, the threads end once their queues are empty.
struct Pool {
    shared: Arc<SharedQueues>,
}

/// Devices that have threads of their own.
type Own = Rc<RefCell<Vec<(RawFd, Pool)>>>;

/// All helper threads of a driver.
pub(crate) struct Workers {
    common: Pool,
    own: Own,
    done: Arc<Done>,
}

/// Proof that a device has threads of its own. If it is dropped, the threads end.
pub(crate) struct DeviceThreads {
    device: RawFd,
    own: Own,
}

impl Drop for DeviceThreads {
    fn drop(&mut self) {
        self.own.borrow_mut().retain(|(device, _)| *device != self.device);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code that can panic runs under these locks, so the data of a poisoned lock is consistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Workers {
    /// Creates helper threads on demand, `max_threads` for each device at most.
    pub(crate) fn new(max_threads: usize, wake: Arc<Wake>) -> Workers {
        let done = Arc::new(Done { list: Mutex::new(Vec::with_capacity(ROOM)), wake });
        Workers { common: Pool::new(max_threads, done.clone()), own: Own::default(), done }
    }

    /// Runs a command; [`Workers::take_done`] returns its result with `user_data`.
    pub(crate) fn run_cmd(&self, user_data: u64, cmd: Cmd) {
        let own = self.own.borrow();
        let pool = own.iter().find(|(device, _)| *device == cmd.fd()).map_or(&self.common, |(_, pool)| pool);
        pool.push(Some(cmd.fd()), Job::Cmd(user_data, cmd));
    }

    /// Runs a closure. The closure itself reports its result.
    pub(crate) fn run_closure(&self, closure: Box<dyn FnOnce() + Send>) {
        self.common.push(None, Job::Closure(closure));
    }

    /// Starts threads for `device`, which carry out all of its commands from now on.
    ///
    /// `None` if the system refuses them; the other threads then carry out its commands.
    pub(crate) fn start_for(&self, device: RawFd) -> Option<DeviceThreads> {
        let pool = Pool::new(THREADS_OF_DEVICE, self.done.clone());
        pool.start_all(device)?;
        self.own.borrow_mut().push((device, pool));
        Some(DeviceThreads { device, own: self.own.clone() })
    }

    /// Moves the results that have come in to `out`.
    pub(crate) fn take_done(&self, out: &mut Vec<(u64, i32)>) {
        out.append(&mut lock(&self.done.list));
    }

    /// Whether results wait to be taken.
    pub(crate) fn has_done(&self) -> bool {
        !lock(&self.done.list).is_empty()
    }
}

impl Pool {
    fn new(max_threads: usize, done: Arc<Done>) -> Pool {
        let shared = SharedQueues {
            state: Mutex::default(),
            work: Condvar::new(),
            begun: Condvar::new(),
            done,
            max_threads: max_threads.max(1),
        };
        Pool { shared: Arc::new(shared) }
    }

    /// Starts as many threads as `device` may have, and waits until all of them have begun.
    fn start_all(&self, device: RawFd) -> Option<()> {
        let mut state = lock(&self.shared.state);
        state.classes.push(Class::new(Some(device), ROOM));
        for _ in 0..self.shared.max_threads {
            let shared = self.shared.clone();
            let work = move || {
                heap::touch_stack_of_helper();
                serve(&shared);
            };
            let thread = std::thread::Builder::new().name("ubcache-io".into()).stack_size(STACK_BYTES);
            thread.spawn(work).ok()?;
            state.threads += 1;
            state.idle += 1;
        }
        while state.begun < self.shared.max_threads {
            state = self.shared.begun.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Some(())
    }

    fn push(&self, device: Option<RawFd>, job: Job) {
        let mut state = lock(&self.shared.state);
        state.push(device, job);
        let start = state.startable(self.shared.max_threads) > state.idle;
        if start {
            state.threads += 1;
            // Counts the new thread, which is about to check the queue.
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
                // The system refuses the first thread. The calling thread runs the jobs, because each must end.
                while let Some((device, job)) = state.pop(self.shared.max_threads) {
                    drop(state);
                    let lasted = job.may_last();
                    run(&self.shared, job);
                    state = lock(&self.shared.state);
                    state.ended(device, lasted);
                }
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        lock(&self.shared.state).stop = true;
        self.shared.work.notify_all();
    }
}

fn run(shared: &SharedQueues, job: Job) {
    match job {
        Job::Cmd(user_data, cmd) => {
            let result = cmd.call();
            lock(&shared.done.list).push((user_data, result));
            shared.done.wake.notify();
        }
        Job::Closure(closure) => closure(),
    }
}

fn serve(shared: &SharedQueues) {
    let mut state = lock(&shared.state);
    state.begun += 1;
    shared.begun.notify_one();
    state.idle -= 1;
    loop {
        if let Some((device, job)) = state.pop(shared.max_threads) {
            drop(state);
            let lasted = job.may_last();
            run(shared, job);
            state = lock(&shared.state);
            state.ended(device, lasted);
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

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    use super::*;

    /// Takes results until there are `many`.
    fn results(workers: &Workers, many: usize) -> Vec<(u64, i32)> {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut found = Vec::new();
        while found.len() < many {
            assert!(Instant::now() < deadline, "expected {many} results, found {found:?}");
            workers.take_done(&mut found);
            std::thread::yield_now();
        }
        found
    }

    fn threads(workers: &Workers) -> usize {
        let of = |pool: &Pool| lock(&pool.shared.state).threads;
        of(&workers.common) + workers.own.borrow().iter().map(|(_, pool)| of(pool)).sum::<usize>()
    }

    /// A flush does not wait behind the discards of a hundred buckets.
    ///
    /// These discards begin at once when the buckets become free. Before, a flush of the journal waited for all of them.
    #[test]
    fn a_flush_does_not_wait_behind_discards() {
        let (mut state, fd) = (JobQueues::default(), 7);
        for n in 0..100 {
            state.push(Some(fd), Job::Cmd(n, Cmd::Discard { fd, offset: n * 4096, len: 4096 }));
        }
        let mut begun = Vec::new();
        while let Some((_, Job::Cmd(n, _))) = state.pop(THREADS_OF_DEVICE) {
            begun.push(n);
        }
        assert_eq!(begun, [0, 1, 2, 3], "half of the threads");
        state.push(Some(fd), Job::Cmd(100, Cmd::Flush { fd }));
        assert!(matches!(state.pop(THREADS_OF_DEVICE), Some((_, Job::Cmd(100, Cmd::Flush { .. })))));
        state.ended(Some(fd), false);
        assert!(state.pop(THREADS_OF_DEVICE).is_none());
        state.ended(Some(fd), true);
        assert!(matches!(state.pop(THREADS_OF_DEVICE), Some((_, Job::Cmd(4, Cmd::Discard { .. })))));
        assert!(state.pop(1).is_none());
    }

    /// A device that hangs does not delay the flushes of another device.
    ///
    /// All threads of the first device hang, and 1000 more flushes wait for them. No further thread starts.
    #[test]
    fn a_device_that_hangs_holds_up_its_own_requests_alone() {
        let workers = Workers::new(16, Arc::new(Wake::new(false).unwrap()));
        let [hung, healthy] = [(); 2].map(|()| tempfile::tempfile().unwrap());
        let fd = |file: &File| file.as_raw_fd();
        let own = [&hung, &healthy].map(|file| workers.start_for(fd(file)).unwrap());
        assert_eq!(threads(&workers), 2 * THREADS_OF_DEVICE);
        let (release, stuck): (Vec<_>, Vec<_>) =
            (0..THREADS_OF_DEVICE).map(|_| mpsc::channel::<()>()).unzip();
        for end in stuck {
            let wait = Box::new(move || assert!(end.recv().is_err(), "nobody sends"));
            workers.own.borrow()[0].1.push(Some(fd(&hung)), Job::Closure(wait));
        }
        for n in 0..1000 {
            workers.run_cmd(n, Cmd::Flush { fd: fd(&hung) });
        }
        for n in 1000..1100 {
            workers.run_cmd(n, Cmd::Flush { fd: fd(&healthy) });
            assert_eq!(results(&workers, 1), [(n, 0)]);
        }
        assert_eq!(threads(&workers), 2 * THREADS_OF_DEVICE);
        drop(release);
        assert_eq!(results(&workers, 1000).len(), 1000);
        drop(own);
        assert_eq!(threads(&workers), 0, "they are not known any more");
        // Without its own threads, the device uses the common ones.
        workers.run_cmd(1, Cmd::Flush { fd: fd(&hung) });
        assert_eq!(results(&workers, 1), [(1, 0)]);
        assert_eq!(threads(&workers), 1);
    }
}
