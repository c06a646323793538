//! The server: a task for each tag fetches a request, passes it to the volume, and answers it with the next fetch.
//!
//! Owns the tasks of one device and their common state: how many requests are under way, and whether requests are carried out,
//! failed (the device is removed by force) or left for the next process (it is handed over). A request
//! costs no allocation and no task of its own. Each tag has a buffer of the largest request: the driver copies what is
//! written there before it completes the fetch, and what was read from there with the answer.
//!
//! Invariants: a request that was given to the volume is awaited to its end and then answered; one that is left for the
//! next process was not begun. A buffer that the volume still holds is not given to the driver.

use std::cell::Cell;
use std::future::Future;
use std::rc::Rc;

use blockio::flusher::{self, Held};
use io::sync::Event;
use io::{BlockVolume, Buffer, Handle, JoinHandle, ZeroFlags};

use crate::abi::{self, IoDescriptor};
use crate::request::{Request, failure};

/// The driver, as tags see it.
pub(crate) trait Requests: 'static {
    /// Waits for the driver's result, then gives it and the buffer.
    type Next: Future<Output = (i32, Option<Buffer>)> + 'static;

    /// Makes descriptors readable; called when every tag was asked for, before the device is in service.
    ///
    /// # Errors
    /// The error of the system.
    fn prepare(&self) -> std::io::Result<()>;

    /// Answers the request of a tag, if there is one, and asks for its next, at once: not when the future is polled.
    fn next(&self, queue: u16, tag: u16, answer: Option<i32>, buffer: Buffer) -> Self::Next;

    /// The request.
    fn descriptor(&self, queue: u16, tag: u16) -> IoDescriptor;
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Serving,
    /// Everything is an I/O error.
    Failing,
    /// Nothing is begun or answered any more.
    Leaving,
}

/// Buffers of each size that are ready for the engine's own requests: journal, leaves, writeback.
const SPARES: usize = 8;
/// The largest of them.
const LARGEST_SPARE_BYTES: usize = 1 << 20;

/// Gives the pool of this thread buffers whose memory is there.
fn touch_spares(rt: &Handle) {
    let sizes =
        std::iter::successors(Some(4096), |bytes| Some(bytes * 2)).take_while(|b| *b <= LARGEST_SPARE_BYTES);
    for bytes in sizes {
        let spares: Vec<Buffer> = (0..SPARES).map(|_| rt.pool().zeroed(bytes)).collect();
        drop(spares);
    }
}

/// See the module head.
pub(crate) struct Server<V, R> {
    rt: Handle,
    volume: Rc<V>,
    requests: R,
    max_io_bytes: u32,
    mode: Cell<Mode>,
    busy: Cell<usize>,
    idle: Event,
    /// The first result of a fetch that was neither a request nor the device's end.
    broken: Cell<Option<i32>>,
    /// The memory of all buffers is there from the start. A device with swap on it needs that: when its requests come, there
    /// is no memory.
    held: Option<Held>,
}

/// The tasks of a device.
pub(crate) struct Tags(Vec<JoinHandle<()>>);

impl Tags {
    /// Waits until all have ended.
    pub(crate) async fn ended(self) {
        for task in self.0 {
            task.await;
        }
    }
}

impl<V: BlockVolume, R: Requests> Server<V, R> {
    /// Starts to fetch requests on the runtime of this thread.
    pub(crate) fn start(
        rt: Handle,
        volume: Rc<V>,
        requests: R,
        (queues, depth): (u16, u16),
        max_io_bytes: u32,
    ) -> (Rc<Server<V, R>>, Tags) {
        let server = Rc::new(Server {
            rt: rt.clone(),
            volume,
            requests,
            max_io_bytes,
            mode: Cell::new(Mode::Serving),
            busy: Cell::new(0),
            idle: Event::default(),
            broken: Cell::new(None),
            held: flusher::hold(u64::from(queues) * u64::from(depth) * u64::from(max_io_bytes)),
        });
        let all = (0..queues).flat_map(|queue| (0..depth).map(move |tag| (queue, tag)));
        if flusher::memory_is_locked() {
            touch_spares(&rt);
        }
        // All are asked for before any task runs, so that they go to the driver together: of a process that dies when
        // some were fetched and others not, Linux 6.12 cannot recover a device again.
        let asked: Vec<_> = all
            .map(|(queue, tag)| {
                let mut buffer = server.buffer();
                if server.holds_buffers() {
                    buffer.as_mut().fill(0);
                }
                (queue, tag, server.requests.next(queue, tag, None, buffer))
            })
            .collect();
        let serve = |(queue, tag, first)| rt.spawn(server.clone().serve(queue, tag, first));
        let tasks = asked.into_iter().map(serve).collect();
        (server, Tags(tasks))
    }

    /// See [`Requests::prepare`].
    pub(crate) fn prepare(&self) -> std::io::Result<()> {
        self.requests.prepare()
    }

    /// Whether the memory of all buffers is there, and stays.
    pub(crate) fn holds_buffers(&self) -> bool {
        self.held.is_some()
    }

    /// From now on every request is answered with an I/O error.
    pub(crate) fn fail_everything(&self) {
        self.mode.set(Mode::Failing);
    }

    /// From now on requests are left alone; returns when those under way are answered.
    pub(crate) async fn leave(&self) {
        self.mode.set(Mode::Leaving);
        self.idle.wait_until(|| self.busy.get() == 0).await;
        // The tasks that answered have asked for it; the driver's thread tells the kernel on its next turn, which comes
        // before this task goes on.
        self.rt.yield_now().await;
    }

    /// The error number with which the driver ended a fetch, if that ever happened.
    pub(crate) fn broken(&self) -> Option<i32> {
        self.broken.get()
    }

    fn buffer(&self) -> Buffer {
        self.rt.pool().take(self.max_io_bytes as usize)
    }

    async fn serve(self: Rc<Self>, queue: u16, tag: u16, first: R::Next) {
        let mut next = first;
        loop {
            let mut buffer = match next.await {
                (abi::RESULT_OK, Some(buffer)) => buffer,
                (abi::RESULT_OK | abi::RESULT_ABORT, _) => return,
                (error, _) => {
                    self.broken.set(self.broken.get().or(Some(-error)));
                    return;
                }
            };
            let descriptor = self.requests.descriptor(queue, tag);
            let answer = match (self.mode.get(), Request::decode(&descriptor, self.max_io_bytes)) {
                (Mode::Leaving, _) => return std::future::pending().await,
                (Mode::Failing, _) => -libc::EIO,
                (Mode::Serving, Err(errno)) => -errno,
                (Mode::Serving, Ok(request)) => {
                    self.busy.set(self.busy.get() + 1);
                    let (back, result) = self.carry_out(request, buffer).await;
                    buffer = back;
                    self.busy.set(self.busy.get() - 1);
                    if self.busy.get() == 0 {
                        self.idle.notify_all();
                    }
                    result
                }
            };
            next = self.requests.next(queue, tag, Some(answer), buffer);
        }
    }

    async fn carry_out(&self, request: Request, buffer: Buffer) -> (Buffer, i32) {
        let volume = &*self.volume;
        let mut buffer = buffer;
        let result = match request {
            Request::Read { sector, sectors, flags } => {
                let (back, result) = volume.read_as(sector, sectors, buffer, 0, flags).await;
                buffer = back;
                if buffer.is_shared() || buffer.capacity() < self.max_io_bytes as usize {
                    // The driver takes the data from the buffer into which it puts the next request's.
                    let mut other = self.buffer();
                    let data = ..sectors.bytes() as usize;
                    if result.is_ok() {
                        other.as_mut()[data].copy_from_slice(&buffer.as_slice()[data]);
                    }
                    buffer = other;
                }
                result
            }
            Request::Write { sector, sectors, flags } => {
                let result = volume.write(sector, sectors, buffer.clone(), 0, flags).await;
                if buffer.is_shared() {
                    buffer = self.buffer();
                }
                result
            }
            Request::Flush => volume.flush().await,
            Request::Discard { sector, sectors } => volume.discard(sector, sectors).await,
            Request::WriteZeroes { sector, sectors, fua, may_unmap } => {
                volume.write_zeroes(sector, sectors, ZeroFlags { fua, may_unmap }).await
            }
        };
        (buffer, result.map_or_else(|e| failure(&e), |()| request.success()))
    }
}
