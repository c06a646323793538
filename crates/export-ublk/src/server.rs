//! The server: a task for each tag fetches a request, passes it to the volume, and answers it with the next fetch.
//!
//! Owns the tasks of one device and their common state: the number of requests under way, and the mode. Requests are carried
//! out, or fail (the device is removed by force), or are left to the next process (the device is handed over). A request needs
//! no allocation and no task of its own. Each tag has a buffer of the largest request. The driver copies written data to the
//! buffer before it completes the fetch, and copies read data from it with the answer.
//!
//! Invariants: a request that was passed to the volume is awaited to its end and then answered; a request that is left to the
//! next process was not begun; a buffer that the volume still holds is not passed to the driver.

use std::cell::Cell;
use std::future::Future;
use std::rc::Rc;

use blockio::flusher::{self, Held};
use io::sync::Event;
use io::{BlockVolume, Buffer, Handle, JoinHandle, ZeroFlags};

use crate::abi::{self, IoDescriptor};
use crate::request::{Request, failure};
use crate::shape::Shape;

/// The driver, as the tasks of tags use it.
pub(crate) trait Requests: 'static {
    /// Waits for the end of a fetch; gives the driver's result and the buffer.
    type Next: Future<Output = (i32, Option<Buffer>)> + 'static;

    /// Makes descriptors readable. Called after every tag has been fetched for the first time, before the device is in service.
    ///
    /// # Errors
    /// The error of the system.
    fn prepare(&self) -> std::io::Result<()>;

    /// Answers the request of a tag, if there is one, and fetches the next one. Acts at once, not when the future is polled.
    fn next(&self, queue: u16, tag: u16, answer: Option<i32>, buffer: Buffer) -> Self::Next;

    /// The descriptor of a tag's request.
    fn descriptor(&self, queue: u16, tag: u16) -> IoDescriptor;
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Serving,
    /// Every request fails with an I/O error.
    Failing,
    /// No request begins, and no request that has not begun is answered.
    Leaving,
}

/// Number of buffers of each size that are ready for the engine's own requests: journal, leaves, writeback.
const SPARES: usize = 8;
/// Largest size of these buffers.
const LARGEST_SPARE_BYTES: usize = 1 << 20;

/// Puts buffers whose memory is resident into the pool of this thread.
fn touch_spares(rt: &Handle) {
    let sizes =
        std::iter::successors(Some(4096), |bytes| Some(bytes * 2)).take_while(|b| *b <= LARGEST_SPARE_BYTES);
    for bytes in sizes {
        let spares: Vec<Buffer> = (0..SPARES).map(|_| rt.pool().zeroed(bytes)).collect();
        drop(spares);
    }
}

/// The state that the tasks of a device share.
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
    /// The memory of all buffers is resident from the start. A device with swap on it needs this, because no memory is free
    /// when its requests come.
    held: Option<Held>,
}

/// The tasks of a device.
pub(crate) struct Tags(Vec<JoinHandle<()>>);

impl Tags {
    /// Waits until all tasks have ended.
    pub(crate) async fn ended(self) {
        for task in self.0 {
            task.await;
        }
    }
}

impl<V: BlockVolume, R: Requests> Server<V, R> {
    /// Starts the tasks that fetch requests, on the runtime of this thread.
    pub(crate) fn start(
        rt: Handle,
        volume: Rc<V>,
        requests: R,
        shape: Shape,
        max_io_bytes: u32,
    ) -> (Rc<Server<V, R>>, Tags) {
        let Shape { queues, depth } = shape;
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
        // All tags are fetched before any task runs, so that the fetches go to the driver together. If a process ends after it
        // fetched only some tags, Linux 6.12 cannot recover the device again.
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

    /// Makes descriptors readable; see [`Requests::prepare`].
    pub(crate) fn prepare(&self) -> std::io::Result<()> {
        self.requests.prepare()
    }

    /// Whether the memory of all buffers is resident and stays resident.
    pub(crate) fn holds_buffers(&self) -> bool {
        self.held.is_some()
    }

    /// Answers every later request with an I/O error.
    pub(crate) fn fail_everything(&self) {
        self.mode.set(Mode::Failing);
    }

    /// Begins no more requests, and returns when those under way are answered.
    pub(crate) async fn leave(&self) {
        self.mode.set(Mode::Leaving);
        self.idle.wait_until(|| self.busy.get() == 0).await;
        // The tasks have queued the answers. The driver's thread passes them to the kernel in its next turn, which is before
        // this task continues.
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
                    // The driver reads the data from the buffer into which it then puts the next request's data.
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
