//! The service of a volume: tasks on its thread that carry out the requests of the file system.
//!
//! Owns the bounded queue from session threads to these tasks: while it is full, session threads wait and requests stay in the
//! kernel. A request needs no task of its own. There are long-lived slots: one at a time waits for the next request, and the
//! others carry out theirs. A slot writes the reply to `/dev/fuse` itself, because that call copies the data, wakes the caller
//! and does not wait.
//!
//! Invariants: a volume's operation that has begun is awaited to its end; every request is answered, with an I/O error if the
//! service ends before. Must not know files beyond their bytes.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use blockio::bridge::{self, Answer, RemoteReceiver, RemoteSender, Reply};
use fuser::{Errno, ReplyData, ReplyEmpty, ReplyWrite};
use io::sync::Mutex;
use io::{BlockVolume, Handle};

use crate::bytes::ByteVolume;
use crate::errno;
use crate::hole::PunchHole;
use crate::spare::Spare;

/// Number of requests that wait in the queue before session threads wait.
const QUEUE: usize = 64;

/// A request of the file system. Any range is allowed; it is cut at the end of the volume.
pub(crate) enum Job {
    Read { offset: u64, bytes: u32, reply: ReplyData },
    Write { offset: u64, data: Vec<u8>, durable: bool, reply: ReplyWrite },
    Flush { reply: ReplyEmpty },
    Punch { offset: u64, bytes: u64, reply: ReplyEmpty },
    Zero { offset: u64, bytes: u64, reply: ReplyEmpty },
}

/// Options of the service of a volume.
#[derive(Clone, Copy, Debug)]
pub struct ServeOptions {
    /// Number of requests under way at a time.
    pub slots: usize,
    /// The effect of "punch a hole".
    pub punch_hole: PunchHole,
}

impl Default for ServeOptions {
    fn default() -> Self {
        // The queue depth of Linux's loop driver.
        ServeOptions { slots: 128, punch_hole: PunchHole::default() }
    }
}

/// A volume that waits for requests; [`crate::Fuse::mount`] takes it, also on another thread.
///
/// Its tasks end after the requests under way, when this value, or the file system that took it, is dropped.
pub struct Served {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    pub(crate) block_bytes: u32,
    pub(crate) read_only: bool,
    pub(crate) punch_hole: PunchHole,
    pub(crate) jobs: RemoteSender<Job>,
    pub(crate) spare: Arc<Spare>,
    pub(crate) ended: Answer<()>,
}

/// Prepares `volume` to be a file. Its tasks run on `rt`, which is the runtime of the calling thread.
///
/// The thread should be marked as a flusher (`blockio::flusher`). Without the mark, the kernel could write to the device of
/// this very thread to free memory for it.
pub fn serve<V: BlockVolume>(rt: &Handle, volume: Rc<V>, options: ServeOptions) -> Served {
    let (jobs, receiver) = bridge::channel(QUEUE);
    let (ending, ended) = bridge::oneshot();
    let spare = Arc::new(Spare::default());
    let served = Served {
        name: volume.name(),
        bytes: volume.sectors().bytes(),
        block_bytes: volume.logical_block_bytes(),
        read_only: volume.read_only(),
        punch_hole: options.punch_hole,
        jobs,
        spare: spare.clone(),
        ended,
    };
    let service = Rc::new(Service {
        rt: rt.clone(),
        volume: ByteVolume::new(volume, rt.pool().clone()),
        spare,
        jobs: Cell::new(Some(receiver)),
        turn: Mutex::default(),
        limit: options.slots.max(1),
        slots: Cell::new(0),
        busy: Cell::new(0),
        _ending: ending,
    });
    service.start_slot();
    served
}

struct Service<V> {
    rt: Handle,
    volume: ByteVolume<V>,
    spare: Arc<Spare>,
    /// The queue. The slot with the turn takes it while it waits, and drops it at the end.
    jobs: Cell<Option<RemoteReceiver<Job>>>,
    turn: Mutex,
    limit: usize,
    slots: Cell<usize>,
    /// Number of slots that carry out a request.
    busy: Cell<usize>,
    /// Dropped last, after all slots have ended and the volume is released.
    _ending: Reply<()>,
}

impl<V: BlockVolume> Service<V> {
    fn start_slot(self: &Rc<Self>) {
        self.slots.set(self.slots.get() + 1);
        self.rt.spawn(self.clone().slot());
    }

    async fn slot(self: Rc<Self>) {
        loop {
            let turn = self.turn.lock().await;
            let Some(mut jobs) = self.jobs.take() else { return };
            // At the end of the queue, the receiver is dropped, and every other slot ends when it has its turn.
            let Some(job) = jobs.recv().await else { return };
            self.jobs.set(Some(jobs));
            drop(turn);
            self.busy.set(self.busy.get() + 1);
            if self.busy.get() == self.slots.get() && self.slots.get() < self.limit {
                self.start_slot();
            }
            self.carry_out(job).await;
            self.busy.set(self.busy.get() - 1);
        }
    }

    async fn carry_out(&self, job: Job) {
        match job {
            Job::Read { offset, bytes, reply } => match self.volume.read(offset, bytes).await {
                Ok((buffer, data)) => reply.data(&buffer.as_slice()[data]),
                Err(e) => reply.error(errno::of_volume_error(&e)),
            },
            Job::Write { offset, data, durable, reply } => {
                let asked = data.len();
                let staged = self.volume.stage(offset, &data);
                self.spare.give_back(data);
                let stored = staged.len();
                if stored == 0 && asked > 0 {
                    return reply.error(Errno::ENOSPC);
                }
                match self.volume.write(staged, durable).await {
                    // A request has fewer bytes than this number can hold.
                    Ok(()) => reply.written(u32::try_from(stored).unwrap_or(u32::MAX)),
                    Err(e) => reply.error(errno::of_volume_error(&e)),
                }
            }
            Job::Flush { reply } => finish(reply, self.volume.flush().await),
            Job::Punch { offset, bytes, reply } => {
                finish(reply, self.volume.zero(offset, bytes, true).await);
            }
            Job::Zero { offset, bytes, reply } => {
                finish(reply, self.volume.zero(offset, bytes, false).await);
            }
        }
    }
}

fn finish(reply: ReplyEmpty, result: Result<(), io::VolumeError>) {
    match result {
        Ok(()) => reply.ok(),
        Err(e) => reply.error(errno::of_volume_error(&e)),
    }
}
