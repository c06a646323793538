//! The driver: runs a runtime on this thread.
//!
//! Owns the loop. It runs ready tasks in a batch, submits all their requests with one system call, collects completions, and
//! fires timers. It waits only when nothing is ready, in the same system call. A thread without work sleeps in the kernel until
//! a completion, a timer or a wake-up. If polling is enabled and recent waits were very short, the thread polls before it sleeps
//! (module `busy_poll`). Also owns the order of shutdown: tasks are dropped first (their operations become orphans), then the
//! reactor is closed (module `reactor`), and then memory and ring are freed. Must not know what tasks do.

use std::cell::Cell;
use std::future::Future;
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};

use ::io::{Fifo, Handle, Nanos, Runtime};

use crate::busy_poll::{BusyPoll, PollPredictor};
use crate::clock::SystemClock;
use crate::reactor::Reactor;
use crate::uring::Uring;
use crate::wake::Wake;

/// Maximum number of task polls between two checks for completions. It bounds the wait of a completion behind ready tasks.
const BATCH: usize = 256;

/// The mechanism that does the I/O.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Backend {
    /// io_uring if it is available, else the pool.
    #[default]
    Auto,
    /// io_uring, or an error if it is not available.
    Uring,
    /// Helper threads and poll(2).
    Pool,
}

/// Options of a driver.
#[derive(Clone, Debug)]
pub struct DriverOptions {
    /// The mechanism that does the I/O.
    pub backend: Backend,
    /// Seed of the runtime's random source.
    pub seed: u64,
    /// Number of entries of the submission queue. More operations may be in flight.
    pub ring_entries: u32,
    /// Maximum number of helper threads. They carry out all device I/O of the pool backend, and ioctls of the ring backend.
    pub max_threads: usize,
    /// Whether the driver polls for work before it sleeps. Only io_uring polls.
    pub busy_poll: BusyPoll,
}

impl Default for DriverOptions {
    fn default() -> Self {
        DriverOptions {
            backend: Backend::Auto,
            seed: 0,
            ring_entries: 256,
            max_threads: 16,
            busy_poll: BusyPoll::Never,
        }
    }
}

/// Runs tasks and their I/O on the thread that made it.
pub struct Driver {
    runtime: Runtime,
    reactor: Reactor,
    running: Cell<bool>,
    note: String,
}

impl Driver {
    /// A driver for this thread.
    ///
    /// # Errors
    /// If io_uring is required and not available (the message has the reason), or no descriptor is free.
    pub fn new(options: DriverOptions) -> io::Result<Driver> {
        let (uring, note) = match options.backend {
            Backend::Pool => (None, format!("a pool of up to {} threads, as asked", options.max_threads)),
            wanted => match Uring::new(options.ring_entries.max(8)) {
                Ok(u) => {
                    let note = format!("io_uring ({})", u.granted);
                    (Some(u), note)
                }
                Err(refusal) if wanted == Backend::Uring => {
                    return Err(io::Error::new(refusal.error.kind(), refusal));
                }
                Err(refusal) => {
                    let note = format!(
                        "a pool of up to {} threads, which is slower, because io_uring cannot be used: {}",
                        options.max_threads, refusal.reason
                    );
                    (None, note)
                }
            },
        };
        let wake = Arc::new(Wake::new(uring.is_none())?);
        let runtime = Runtime::new(Rc::new(SystemClock), options.seed);
        runtime.set_unpark(wake.clone());
        let pool = runtime.handle().pool().clone();
        let predictor = PollPredictor::new(if uring.is_some() { options.busy_poll } else { BusyPoll::Never });
        let note = if predictor.is_on() { format!("{note}, {predictor}") } else { note };
        let reactor = Reactor::new(uring, wake, options.max_threads, pool, predictor);
        Ok(Driver { runtime, reactor, running: Cell::new(false), note })
    }

    /// The handle for tasks.
    pub fn handle(&self) -> Handle {
        self.runtime.handle()
    }

    /// The reactor, through which devices and sockets do their I/O on this driver.
    pub fn reactor(&self) -> &Reactor {
        &self.reactor
    }

    /// Names the mechanism that does the I/O and, if it is not io_uring, the reason; for the log.
    pub fn backend_note(&self) -> &str {
        &self.note
    }

    /// Runs tasks until `future` is ready, and returns its value. Other tasks continue in the next call.
    ///
    /// # Panics
    /// If a task of this driver calls it.
    pub fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        assert!(!self.running.replace(true), "a task must not call block_on of its own driver");
        let _guard = Running(&self.running);
        let mut future = pin!(future);
        let root = Arc::new(Root { woken: AtomicBool::new(true), wake: self.reactor.wake().clone() });
        let waker = Waker::from(root.clone());
        let mut cx = Context::from_waker(&waker);
        let wake = self.reactor.wake();
        loop {
            self.runtime.begin_turn();
            if root.woken.swap(false, Ordering::AcqRel)
                && let Poll::Ready(value) = future.as_mut().poll(&mut cx)
            {
                // Sends the last requests to the kernel, although no task of this call waits for them.
                self.reactor.turn();
                return value;
            }
            self.runtime.run(&mut Fifo, BATCH);
            if self.runtime.has_ready() || root.woken.load(Ordering::Acquire) {
                self.reactor.turn();
            } else {
                // The driver announces its sleep before its last check for work: see module `wake`.
                wake.announce_sleep();
                let deadline = self.runtime.next_deadline();
                let now = deadline.map_or(Nanos(0), |_| self.handle().now());
                let due = deadline.is_some_and(|d| d <= now);
                let idle = !due
                    && self.runtime.park()
                    && !root.woken.load(Ordering::SeqCst)
                    && !self.reactor.has_results();
                if idle {
                    self.reactor.wait(deadline, now);
                } else {
                    wake.awake();
                    self.reactor.turn();
                }
                self.runtime.unparked();
            }
            if self.runtime.next_deadline().is_some() {
                self.runtime.fire_timers();
            }
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.runtime.drop_tasks();
        self.reactor.close();
    }
}

/// Records that no task runs any more when it is dropped, also after a panic.
struct Running<'a>(&'a Cell<bool>);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

/// The waker of the future that `block_on` waits for.
struct Root {
    woken: AtomicBool,
    wake: Arc<Wake>,
}

impl std::task::Wake for Root {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.woken.swap(true, Ordering::SeqCst) {
            self.wake.notify();
        }
    }
}
