//! The target of the load: a volume over NBD, or a file on a file system.
//!
//! Owns the requests in flight. A file is opened for direct I/O, so it bypasses the page cache of this host, and a thread
//! waits for each request. Must not know which blocks are used.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use ::io::BufferPool;

use crate::nbd_client::{Ask, Client};

/// Number of requests in flight.
pub(super) const DEPTH: usize = 8;
/// Time limit of a request, after which the demonstration fails.
const ANSWER_WITHIN: Duration = Duration::from_secs(20);

/// A request.
pub(super) enum Request {
    Read(usize),
    Write(Vec<u8>),
}

/// The outcome of a request.
pub(super) struct DemoReply {
    pub(super) tag: u64,
    /// The data of a read.
    pub(super) data: io::Result<Vec<u8>>,
}

pub(super) struct Job {
    request: Request,
    position: u64,
    tag: u64,
}

/// The target of requests.
pub(super) enum RequestTarget {
    Nbd(Box<Client>),
    File(Workers),
}

/// Threads that carry out requests on a file. On drop they end and release the file.
pub(super) struct Workers {
    /// `None` at the end, which ends the threads.
    jobs: Option<Sender<Job>>,
    replies: Receiver<DemoReply>,
    pending: usize,
    threads: Vec<JoinHandle<()>>,
}

impl Drop for Workers {
    fn drop(&mut self) {
        drop(self.jobs.take());
        for thread in self.threads.drain(..) {
            // A thread that panicked has printed a message.
            let _ = thread.join();
        }
    }
}

impl RequestTarget {
    /// Connects to the only volume of the server on a socket.
    pub(super) fn nbd(socket: &Path) -> io::Result<RequestTarget> {
        let client = Client::connect(socket, "")?;
        client.set_timeout(Some(ANSWER_WITHIN))?;
        Ok(RequestTarget::Nbd(Box::new(client)))
    }

    /// Opens a file, and starts the threads for its requests.
    pub(super) fn file(path: &Path) -> io::Result<RequestTarget> {
        let direct = rustix::fs::OFlags::DIRECT.bits().cast_signed();
        let file = OpenOptions::new().read(true).write(true).custom_flags(direct).open(path)?;
        let (file, (jobs, waiting), (sender, replies)) = (Arc::new(file), channel(), channel());
        let waiting = Arc::new(Mutex::new(waiting));
        let mut workers = Workers { jobs: Some(jobs), replies, pending: 0, threads: Vec::new() };
        for _ in 0..DEPTH {
            let (file, waiting, sender) = (file.clone(), waiting.clone(), sender.clone());
            let builder = std::thread::Builder::new().name("ubcache-load".into());
            workers.threads.push(builder.spawn(move || work(&file, &waiting, &sender))?);
        }
        Ok(RequestTarget::File(workers))
    }

    pub(super) fn pending(&self) -> usize {
        match self {
            RequestTarget::Nbd(client) => client.pending(),
            RequestTarget::File(workers) => workers.pending,
        }
    }

    pub(super) fn ask(&mut self, request: Request, position: u64, tag: u64) -> io::Result<()> {
        match (self, request) {
            (RequestTarget::Nbd(client), Request::Read(bytes)) => {
                client.ask(Ask::Read(u32::try_from(bytes).unwrap_or(u32::MAX)), position, tag)
            }
            (RequestTarget::Nbd(client), Request::Write(data)) => {
                client.ask_write(position, &data, false, tag)
            }
            (RequestTarget::File(workers), request) => {
                workers.pending += 1;
                let jobs = workers.jobs.as_ref().ok_or_else(workers_ended)?;
                jobs.send(Job { request, position, tag }).map_err(|_| workers_ended())
            }
        }
    }

    pub(super) fn receive(&mut self) -> io::Result<DemoReply> {
        match self {
            RequestTarget::Nbd(client) => {
                let reply = client.receive()?;
                let errno = i32::try_from(reply.error).unwrap_or(5);
                let data = if errno == 0 { Ok(reply.data) } else { Err(io::Error::from_raw_os_error(errno)) };
                Ok(DemoReply { tag: reply.tag, data })
            }
            RequestTarget::File(workers) => {
                let reply = workers.replies.recv_timeout(ANSWER_WITHIN).map_err(|_| workers_ended())?;
                workers.pending -= 1;
                Ok(reply)
            }
        }
    }
}

fn workers_ended() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "requests are not answered any more")
}

/// Carries out requests on a file, on one of the threads, until the target is dropped.
fn work(file: &File, waiting: &Mutex<Receiver<Job>>, replies: &Sender<DemoReply>) {
    // Direct I/O needs aligned buffers.
    let pool = BufferPool::default();
    loop {
        let job = waiting.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(Job { request, position, tag }) = job else { return };
        let data = match request {
            Request::Read(bytes) => {
                let mut buffer = pool.take(bytes);
                file.read_exact_at(buffer.as_mut(), position).map(|()| buffer.as_slice().to_vec())
            }
            Request::Write(data) => {
                file.write_all_at(pool.copy_of(&data).as_slice(), position).map(|()| Vec::new())
            }
        };
        if replies.send(DemoReply { tag, data }).is_err() {
            return;
        }
    }
}
