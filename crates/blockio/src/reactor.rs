//! The I/O side of a driver: operations in flight, on io_uring or on the fallback.
//!
//! Owns the operations in flight (in the slots of module `slots`) and their `user_data`. Invariant, which keeps the kernel from
//! access to freed memory: **an operation owns its buffers, files and kernel structures, and stays in its slot from its first
//! command to its last result**. If the waiter of an operation is dropped, the operation is an orphan: a socket operation is
//! cancelled, a device operation runs to its end, and in both cases the result frees the slot. [`Reactor::close`], which the
//! driver's drop calls, cancels operations that wait for a peer and waits for all others except commands to devices (module
//! `command`). Later operations fail with `ECANCELED`.
//!
//! Must not know the modules that start operations (`file`, `net` and `command`).

use std::cell::{Cell, RefCell};
use std::os::fd::RawFd;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;

use ::io::{Clock, Nanos};

use crate::busy_poll::PollPredictor;
use crate::clock::SystemClock;
use crate::operation::device::DeviceOp;
use crate::operation::socket::{MsgBlock, SocketOp};
use crate::operation::{Fate, Op, Operation, Step};
use crate::polled::Polled;
use crate::registered::BufferNumbers;
pub(crate) use crate::slots::OpId;
use crate::slots::Slots;
use crate::uring::Uring;
use crate::wake::Wake;
use crate::workers::{DeviceThreads, Workers};

/// Number of blocks of 1 KiB that are kept for later sends.
const SPARE_BLOCKS: usize = 64;

/// Number of held operations that are checked for a neighbour: about as many as a cache has places where it writes at the
/// same time.
const NEIGHBOURS: usize = 8;

enum RunningBackend {
    Uring(Box<Uring>),
    Polled(Polled),
}

struct ReactorState {
    slots: Slots,
    backend: RunningBackend,
    /// Results that were taken from a backend and are not processed yet. The field keeps its storage between two turns.
    results: Vec<(u64, i32)>,
    /// Results of calls on this thread. They wait for the next turn like all other results, so that a task whose operations
    /// never wait does not occupy the thread.
    here: Vec<(u64, i32)>,
    /// Writes that go to the kernel at the end of the turn. Adjacent writes join them until then.
    held: Vec<OpId>,
    closed: bool,
    /// The reactor is closed, and the kernel has no command of it.
    quiet: bool,
}

/// Counters of a reactor, for metrics and for tests of batching.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ReactorCounts {
    /// Operations started.
    pub operations: u64,
    /// Commands given to the kernel. An operation with a short transfer needs more than one.
    pub commands: u64,
    /// Calls that submitted to the ring or waited for results.
    pub kernel_calls: u64,
    /// Waits: turns in which nothing was ready.
    pub waits: u64,
    /// Waits that began with a poll of the ring (module `busy_poll`).
    pub looks: u64,
    /// Waits that a poll of the ring ended, without a sleep.
    pub found: u64,
}

/// The interface through which devices and sockets do their I/O. Cheap to clone; belongs to one driver's thread.
#[derive(Clone)]
pub struct Reactor {
    shared: Rc<SharedReactor>,
}

struct SharedReactor {
    inner: RefCell<ReactorState>,
    workers: Workers,
    wake: Arc<Wake>,
    is_uring: bool,
    counts: Cell<ReactorCounts>,
    predictor: RefCell<PollPredictor>,
    /// Blocks of ended sends, for later sends.
    #[allow(clippy::vec_box, reason = "the kernel knows the block's address while it is in use")]
    spare_blocks: RefCell<Vec<Box<MsgBlock>>>,
    pool: ::io::BufferPool,
    numbers: Rc<BufferNumbers>,
}

/// The end of an operation, which is reported when the slots are no longer borrowed.
enum Ended {
    Operation(Op),
    Waker(Waker),
}

impl Reactor {
    pub(crate) fn new(
        uring: Option<Uring>,
        wake: Arc<Wake>,
        max_threads: usize,
        pool: ::io::BufferPool,
        predictor: PollPredictor,
    ) -> Reactor {
        let is_uring = uring.is_some();
        let numbers = BufferNumbers::new(uring.as_ref());
        let backend = match uring {
            Some(u) => RunningBackend::Uring(Box::new(u)),
            None => RunningBackend::Polled(Polled::default()),
        };
        let inner = ReactorState {
            slots: Slots::default(),
            backend,
            results: Vec::new(),
            here: Vec::new(),
            held: Vec::new(),
            closed: false,
            quiet: false,
        };
        Reactor {
            shared: Rc::new(SharedReactor {
                inner: RefCell::new(inner),
                workers: Workers::new(max_threads, wake.clone()),
                wake,
                is_uring,
                counts: Cell::default(),
                predictor: RefCell::new(predictor),
                spare_blocks: RefCell::default(),
                pool,
                numbers,
            }),
        }
    }

    /// Whether io_uring is used.
    pub fn is_uring(&self) -> bool {
        self.shared.is_uring
    }

    /// Registers the first `bytes` of `buffer` with the kernel, if possible. Each request inside them then costs less.
    ///
    /// It is meant for buffers that are used many times.
    pub fn register(&self, buffer: &mut ::io::Buffer, bytes: usize) {
        if let RunningBackend::Uring(u) = &mut self.shared.inner.borrow_mut().backend {
            self.shared.numbers.register(u, buffer, bytes);
        }
    }

    /// The numbers of registered memory.
    pub(crate) fn numbers(&self) -> &Rc<BufferNumbers> {
        &self.shared.numbers
    }

    /// Starts helper threads for `device`, which replace the threads that the kernel would create for the ring.
    ///
    /// They also carry out all commands that the ring does not have. `None` without a ring, or if the system refuses threads.
    pub(crate) fn start_threads_for(&self, device: RawFd) -> Option<DeviceThreads> {
        self.shared.is_uring.then(|| self.shared.workers.start_for(device)).flatten()
    }

    /// The buffers of the driver's thread.
    pub(crate) fn pool(&self) -> &::io::BufferPool {
        &self.shared.pool
    }

    /// Runs `work` on a helper thread and waits for its value.
    ///
    /// `work` may block, and has no access to this thread's data. If the future is dropped, `work` still runs to its end.
    ///
    /// # Panics
    /// If `work` panics, with its message.
    pub async fn blocking<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let (reply, answer) = crate::bridge::oneshot();
        self.shared.workers.run_closure(Box::new(move || {
            reply.send(std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)));
        }));
        match answer.await {
            Ok(Ok(value)) => value,
            Ok(Err(payload)) => std::panic::resume_unwind(payload),
            Err(_) => unreachable!("a helper thread always replies"),
        }
    }

    /// Puts `op` into a slot and starts its first command.
    ///
    /// # Errors
    /// Gives the operation back if the reactor is closed.
    #[allow(clippy::result_large_err, reason = "the error is the rare case, and boxing would allocate")]
    pub(crate) fn start<O: Operation>(&self, op: O) -> Result<OpId, O> {
        let inner = &mut *self.shared.inner.borrow_mut();
        if inner.closed {
            return Err(op);
        }
        self.count(|c| c.operations += 1);
        let id = inner.slots.place(op.into());
        let step = inner.slots.get(id).next();
        assert!(!matches!(step, Step::Done | Step::Apart), "an operation starts with a command");
        self.issue(&mut inner.backend, &mut inner.here, id, step);
        Ok(id)
    }

    /// Starts a write at the end of this turn, in one command with adjacent writes if there are any.
    ///
    /// # Errors
    /// Gives the operation back if the reactor is closed.
    #[allow(clippy::result_large_err, reason = "the error is the rare case, and boxing would allocate")]
    pub(crate) fn hold(&self, mut op: DeviceOp) -> Result<OpId, DeviceOp> {
        let inner = &mut *self.shared.inner.borrow_mut();
        if inner.closed {
            return Err(op);
        }
        self.count(|c| c.operations += 1);
        for at in (0..inner.held.len()).rev().take(NEIGHBOURS) {
            let id = inner.held[at];
            let Some(first) = DeviceOp::of(inner.slots.get(id)) else { continue };
            match first.take_along(op) {
                Ok(()) => return Ok(id),
                Err(back) => op = back,
            }
        }
        let id = inner.slots.place(op.into());
        inner.held.push(id);
        Ok(id)
    }

    /// Passes the held writes to the kernel.
    fn release_held(&self) {
        let inner = &mut *self.shared.inner.borrow_mut();
        for at in 0..inner.held.len() {
            let id = inner.held[at];
            let step = inner.slots.get(id).next();
            self.issue(&mut inner.backend, &mut inner.here, id, step);
        }
        inner.held.clear();
    }

    /// Carries out `step`: passes its command, if it has one, to the backend or a helper thread, or calls it on this thread.
    fn issue(&self, backend: &mut RunningBackend, here: &mut Vec<(u64, i32)>, id: OpId, step: Step) {
        let (cmd, taken) = match (step, backend) {
            (Step::Done | Step::Apart, _) => return,
            (Step::NextHere(cmd), _) => {
                here.push((id.0, cmd.call()));
                (cmd, true)
            }
            (Step::Next(cmd), RunningBackend::Uring(u)) => (cmd, u.push_cmd(id.0, cmd)),
            (Step::Next(cmd), RunningBackend::Polled(p)) if cmd.is_socket() => {
                p.push_socket(id.0, cmd);
                (cmd, true)
            }
            (Step::Next(cmd) | Step::NextBlocking(cmd), _) => (cmd, false),
        };
        self.count(|c| c.commands += 1);
        if !taken {
            self.shared.workers.run_cmd(id.0, cmd);
        }
    }

    /// Takes a block for a send.
    pub(crate) fn take_block(&self) -> Box<MsgBlock> {
        self.shared.spare_blocks.borrow_mut().pop().unwrap_or_else(MsgBlock::new)
    }

    /// Takes back the block of a send that has ended.
    pub(crate) fn recycle_block(&self, block: Box<MsgBlock>) {
        let mut spare = self.shared.spare_blocks.borrow_mut();
        if spare.len() < SPARE_BLOCKS {
            spare.push(block);
        }
    }

    /// Gives `f` access to the operation `id`. The caller must be its waiter.
    pub(crate) fn with<O: Operation, R>(&self, id: OpId, f: impl FnOnce(&mut O) -> R) -> R {
        let inner = &mut *self.shared.inner.borrow_mut();
        match O::of(inner.slots.get(id)) {
            Some(op) => f(op),
            None => unreachable!("the waiter of an operation knows its kind"),
        }
    }

    /// Takes an operation that has ended out of its slot. The caller must be its waiter.
    pub(crate) fn take<O: Operation>(&self, id: OpId) -> O {
        match O::taken_from(self.shared.inner.borrow_mut().slots.release(id)) {
            Some(op) => op,
            None => unreachable!("the waiter of an operation knows its kind"),
        }
    }

    /// Whether the backend can send commands to devices.
    pub(crate) fn takes_commands(&self) -> bool {
        match &self.shared.inner.borrow().backend {
            RunningBackend::Uring(u) => u.takes_commands,
            RunningBackend::Polled(_) => false,
        }
    }

    /// Drops the waiter of socket operation `id`: cancels the operation, or frees its slot if it has ended.
    pub(crate) fn abandon_socket(&self, id: OpId) {
        let ended = self.with(id, |op: &mut SocketOp| {
            op.abandon();
            op.has_ended()
        });
        let mut inner = self.shared.inner.borrow_mut();
        if ended {
            let op = inner.slots.release(id);
            drop(inner);
            drop(op);
        } else {
            inner.backend.cancel(id);
        }
    }

    /// Submits all queued entries without waiting, and takes in the results that have arrived. Returns their number.
    pub(crate) fn turn(&self) -> usize {
        self.release_held();
        if let RunningBackend::Uring(u) = &mut self.shared.inner.borrow_mut().backend {
            self.shared.numbers.tell(u);
            if u.wants_call() {
                self.count(|c| c.kernel_calls += 1);
                u.submit();
            }
        }
        self.take_in()
    }

    /// Whether results of this thread's calls, of helper threads or of sockets wait to be taken in.
    pub(crate) fn has_results(&self) -> bool {
        let inner = self.shared.inner.borrow();
        let polled = match &inner.backend {
            RunningBackend::Uring(_) => false,
            RunningBackend::Polled(p) => p.has_done(),
        };
        polled || !inner.here.is_empty() || self.shared.workers.has_done()
    }

    /// Submits all queued entries, waits for a result or a wake-up, until `deadline` at most, and takes the results in.
    pub(crate) fn wait(&self, deadline: Option<Nanos>, now: Nanos) -> usize {
        self.release_held();
        self.count(|c| c.waits += 1);
        match &mut self.shared.inner.borrow_mut().backend {
            RunningBackend::Uring(u) => {
                u.arm(&self.shared.wake, deadline, now);
                self.wait_on_ring(u);
            }
            RunningBackend::Polled(p) => {
                self.count(|c| c.kernel_calls += 1);
                p.wait(&self.shared.wake, deadline.map(|d| d.since(now)));
            }
        }
        self.shared.wake.awake();
        self.take_in()
    }

    /// Polls for a completion if the predictor advises it, then sleeps until there is one.
    fn wait_on_ring(&self, u: &mut Uring) {
        let predictor = &mut *self.shared.predictor.borrow_mut();
        if !predictor.is_on() {
            self.count(|c| c.kernel_calls += 1);
            return u.wait();
        }
        let began = SystemClock.now();
        if let Some(window) = predictor.window()
            && self.poll(u, predictor, began, window)
        {
            self.count(|c| c.found += 1);
            return predictor.waited(SystemClock.now().since(began), false);
        }
        self.count(|c| c.kernel_calls += 1);
        u.wait();
        predictor.waited(SystemClock.now().since(began), true);
    }

    /// Submits all queued entries and polls for a completion until `window` has passed. Returns whether there is one.
    ///
    /// Other threads get the processor between two checks, because the client that sends the next request may be one of them
    /// (decision 019).
    fn poll(&self, u: &mut Uring, predictor: &mut PollPredictor, began: Nanos, window: Nanos) -> bool {
        self.count(|c| c.looks += 1);
        let mut now = began;
        while now.since(began) < window {
            // A call is made only if entries or work of the kernel wait for one.
            if u.wants_call() {
                self.count(|c| c.kernel_calls += 1);
                u.submit();
            }
            if u.has_completions() {
                return true;
            }
            std::thread::yield_now();
            let then = std::mem::replace(&mut now, SystemClock.now());
            predictor.checked(now.since(then));
        }
        false
    }

    fn take_in(&self) -> usize {
        let mut results = {
            let inner = &mut *self.shared.inner.borrow_mut();
            let mut results = std::mem::take(&mut inner.results);
            // Results of helper threads come first, and with them flushes of block devices. If a flush failed, reads that end in
            // the same turn may not be trusted.
            self.shared.workers.take_done(&mut results);
            results.append(&mut inner.here);
            match &mut inner.backend {
                RunningBackend::Uring(u) => u.reap(&mut results),
                RunningBackend::Polled(p) => p.take_done(&mut results),
            }
            results
        };
        let n = results.len();
        for (user_data, result) in results.drain(..) {
            self.one_result(OpId(user_data), result);
        }
        self.shared.inner.borrow_mut().results = results;
        n
    }

    fn one_result(&self, id: OpId, result: i32) {
        let mut inner = self.shared.inner.borrow_mut();
        let ended = inner.advance(self, id, result);
        drop(inner);
        // The slots must not be borrowed here: completers wake tasks, and buffers, files and sockets are dropped, which may
        // call this reactor again.
        match ended {
            Some(Ended::Operation(op)) => op.finish(),
            Some(Ended::Waker(w)) => w.wake(),
            None => {}
        }
    }

    /// Cancels operations that wait for a peer, waits for all others, and refuses new operations.
    pub(crate) fn close(&self) {
        {
            let inner = &mut *self.shared.inner.borrow_mut();
            inner.closed = true;
            for (id, op) in inner.slots.busy_mut() {
                if op.cancel() {
                    inner.backend.cancel(id);
                }
            }
        }
        loop {
            let inner = self.shared.inner.borrow();
            let unfinished = inner.slots.busy().any(|(_, op)| op.is_awaited() && op.is_under_way());
            drop(inner);
            if !unfinished {
                break;
            }
            self.shared.wake.announce_sleep();
            if self.has_results() {
                self.shared.wake.awake();
                self.turn();
            } else {
                self.wait(None, Nanos(0));
            }
        }
        let inner = &mut *self.shared.inner.borrow_mut();
        if inner.slots.busy().any(|(_, op)| op.is_under_way()) {
            // A driver returns these commands only when the process ends. Ring, files and buffers stay in memory until then
            // (`SharedReactor::drop`).
            return;
        }
        if let RunningBackend::Uring(u) = &mut inner.backend {
            let mut late = Vec::new();
            u.quiesce(&mut late);
            debug_assert!(late.is_empty(), "every operation had ended");
        }
        inner.quiet = true;
    }

    pub(crate) fn wake(&self) -> &Arc<Wake> {
        &self.shared.wake
    }

    /// The counters since the start.
    pub fn counts(&self) -> ReactorCounts {
        self.shared.counts.get()
    }

    fn count(&self, f: impl FnOnce(&mut ReactorCounts)) {
        let mut c = self.shared.counts.get();
        f(&mut c);
        self.shared.counts.set(c);
    }
}

impl RunningBackend {
    fn cancel(&mut self, id: OpId) {
        match self {
            RunningBackend::Uring(u) => u.cancel(id.0),
            RunningBackend::Polled(p) => p.cancel(id.0),
        }
    }
}

impl ReactorState {
    fn advance(&mut self, reactor: &Reactor, id: OpId, result: i32) -> Option<Ended> {
        let op = self.slots.get(id);
        let step = op.advance(result);
        match step {
            Step::Next(_) | Step::NextBlocking(_) | Step::NextHere(_) => {
                reactor.issue(&mut self.backend, &mut self.here, id, step);
                None
            }
            Step::Apart => {
                let Some(op) = DeviceOp::of(op) else { unreachable!("only writes are gathered") };
                let mut again = vec![id];
                again.extend(op.apart().into_iter().map(|alone| self.slots.place(alone.into())));
                for id in again {
                    let step = self.slots.get(id).next();
                    reactor.issue(&mut self.backend, &mut self.here, id, step);
                }
                None
            }
            Step::Done => match op.fate() {
                Fate::Leaves => Some(Ended::Operation(self.slots.release(id))),
                Fate::Stays(waker) => waker.map(Ended::Waker),
            },
        }
    }
}

impl Drop for SharedReactor {
    fn drop(&mut self) {
        let inner = self.inner.get_mut();
        if !inner.quiet {
            // A driver did not answer a command, or a panic came before the reactor was closed. The kernel may still write to
            // the memory of the slots and the ring, so that memory is leaked.
            std::mem::forget(std::mem::take(&mut inner.slots));
            std::mem::forget(std::mem::replace(
                &mut inner.backend,
                RunningBackend::Polled(Polled::default()),
            ));
        }
    }
}
