//! One client after the handshake: receive requests, have them carried out, send replies.
//!
//! Three kinds of tasks share a [`Connection`]: the receiver (the task that calls [`Connection::run`])
//! parses requests and hands pieces of them to workers; workers call the volume and put replies into the
//! outbox; the sender sends whatever the outbox holds. Owns their common state and its limits: requests
//! under way (`Link::admission`), bytes in data buffers (`memory`). Both are given back only after the
//! reply was sent, so a client that does not read its replies stops being read from.
//!
//! Invariants: what was handed to the volume is awaited to its end, whatever happens to the client; when
//! `run` returns, every task of the connection has ended.

use std::rc::Rc;

use format::{SECTOR_BYTES, Sector, Sectors};
use io::{BlockVolume, Buffer, Handle, JoinHandle, VolumeError, WriteFlags, ZeroFlags};

use crate::codec::{self, Action, Command, RequestStream, Session, StreamError, StreamStep};
use crate::server::gate::Gate;
use crate::server::link::{Link, Peer};
use crate::server::outbox::Outbox;
use crate::server::requests::{PIECE_BYTES, ReadPiece, RequestId, Requests, first_piece, pieces};
use crate::server::workers::Workers;
use crate::socket::{Part, Socket};

/// Payload of at least this length is received where the volume wants it instead of being copied there.
const DIRECT_BYTES: u32 = 64 << 10;

/// How a client's requests came to an end.
#[derive(Debug)]
pub(super) enum StreamEnd {
    /// The client said goodbye.
    Goodbye,
    /// The stream ended between two requests.
    Closed,
    /// The stream ended within a request.
    Truncated,
    Violation(StreamError),
    Socket(std::io::Error),
}

enum Task {
    Read { index: usize },
    Write { buffer: Buffer, fua: bool },
    Flush,
    Trim { fua: bool },
    Cache,
    WriteZeroes { flags: ZeroFlags },
    Status { one: bool },
}

/// A piece of a request.
struct Job {
    request: RequestId,
    offset: u64,
    bytes: u32,
    task: Task,
}

/// A write whose payload is still coming.
struct Incoming {
    request: RequestId,
    fua: bool,
    /// Where the current piece lies.
    offset: u64,
    /// From there to the end of the request.
    bytes_left: u32,
    piece: Option<(Buffer, usize)>,
}

/// See the module head.
pub(super) struct Connection<V, S> {
    rt: Handle,
    volume: Rc<V>,
    link: Rc<Link<S>>,
    requests: Requests,
    memory: Gate,
    workers: Workers<Job>,
    outbox: Outbox,
}

impl<V: BlockVolume, S: Socket> Connection<V, S> {
    pub(super) fn new(
        rt: Handle,
        volume: Rc<V>,
        link: Rc<Link<S>>,
        session: &Session,
        workers: usize,
        memory_bytes: u64,
    ) -> Rc<Connection<V, S>> {
        Rc::new(Connection {
            requests: Requests::new(session.structured),
            memory: Gate::new(memory_bytes),
            workers: Workers::new(workers),
            outbox: Outbox::new(rt.pool().clone()),
            rt,
            volume,
            link,
        })
    }

    /// Serves the client to the end. The first bytes of its stream are `received` of `buffer`.
    pub(super) async fn run(
        self: Rc<Self>,
        session: &Session,
        buffer: Buffer,
        received: std::ops::Range<usize>,
    ) -> StreamEnd {
        let sender = self.rt.spawn(self.clone().send_replies());
        let mut receiver =
            Receiver { conn: &self, stream: RequestStream::new(session), incoming: None, tasks: Vec::new() };
        let end = receiver.run(buffer, received).await;
        receiver.give_up_incoming();
        let tasks = receiver.tasks;
        self.link.admission.until_empty().await;
        self.memory.until_empty().await;
        self.workers.close();
        self.outbox.close();
        for worker in tasks {
            worker.await;
        }
        sender.await;
        self.link.socket.shutdown();
        end
    }

    async fn send_replies(self: Rc<Self>) {
        let mut parts: Vec<Part> = Vec::new();
        while let Some(release) = self.outbox.take(&mut parts).await {
            if !self.link.is_dead() {
                let (storage, result) = self.link.socket.send(parts).await;
                parts = storage;
                if result.is_err() {
                    // Nobody reads any more: nothing new is to be received either.
                    self.link.cut();
                }
            }
            parts.clear();
            self.memory.give(release.bytes);
            self.link.answered(release.requests);
        }
    }

    async fn work(self: Rc<Self>, id: usize) {
        while let Some(job) = self.workers.next(id).await {
            self.carry_out(job).await;
        }
    }

    async fn carry_out(&self, job: Job) {
        let Job { request, offset, bytes, task } = job;
        let sector = Sector(offset / SECTOR_BYTES);
        let sectors = Sectors(u64::from(bytes) / SECTOR_BYTES);
        let (volume, outbox) = (&self.volume, &self.outbox);
        let result = match task {
            Task::Read { index } => {
                let buffer = self.rt.pool().take(bytes as usize);
                let (buffer, result) = volume.read(sector, sectors, buffer, 0).await;
                let piece = ReadPiece { index, offset, bytes };
                self.requests.read_done(request, &piece, buffer, result, outbox, &self.memory);
                return;
            }
            Task::Status { one } => match volume.status(sector, sectors).await {
                Ok(runs) => {
                    self.requests.answered(request, outbox, |cookie, bytes| {
                        let mut chunk = Vec::new();
                        codec::block_status_chunk(cookie, bytes, &runs, one, &mut chunk);
                        chunk
                    });
                    return;
                }
                Err(e) => Err(e),
            },
            Task::Write { buffer, fua } => {
                let result = volume
                    .write(sector, sectors, buffer, 0, WriteFlags { fua, ..WriteFlags::default() })
                    .await;
                self.memory.give(u64::from(bytes));
                result
            }
            Task::Flush => volume.flush().await,
            Task::Trim { fua } => match volume.discard(sector, sectors).await {
                Ok(()) if fua => volume.flush().await,
                result => result,
            },
            Task::Cache => self.cache(offset, bytes).await,
            Task::WriteZeroes { flags } => volume.write_zeroes(sector, sectors, flags).await,
        };
        self.requests.piece_done(request, result, outbox);
    }

    /// Reads a range for the sake of the volume's cache.
    async fn cache(&self, offset: u64, bytes: u32) -> Result<(), VolumeError> {
        let mut buffer = self.rt.pool().take(bytes.min(PIECE_BYTES) as usize);
        let mut outcome = Ok(());
        for (offset, bytes) in pieces(offset, bytes) {
            // The range may be gigabytes: it is only a hint, so it ends with the connection.
            if self.link.is_dead() || self.link.is_stopping() {
                break;
            }
            buffer.set_len(bytes as usize);
            let sectors = Sectors(u64::from(bytes) / SECTOR_BYTES);
            let (back, result) = self.volume.read(Sector(offset / SECTOR_BYTES), sectors, buffer, 0).await;
            buffer = back;
            if result.is_err() {
                outcome = result;
                break;
            }
        }
        drop(buffer);
        self.memory.give(u64::from(bytes.min(PIECE_BYTES)));
        outcome
    }
}

/// The receiving task's own state.
struct Receiver<'a, V, S> {
    conn: &'a Rc<Connection<V, S>>,
    stream: RequestStream,
    incoming: Option<Incoming>,
    /// The workers that were started.
    tasks: Vec<JoinHandle<()>>,
}

impl<V: BlockVolume, S: Socket> Receiver<'_, V, S> {
    async fn run(&mut self, mut buffer: Buffer, received: std::ops::Range<usize>) -> StreamEnd {
        let (mut at, mut end) = (received.start, received.end);
        loop {
            while at < end {
                if self.conn.link.is_stopping() {
                    self.stream.shut_down();
                }
                let input = &buffer.as_slice()[at..end];
                let (used, step) = match self.stream.step(input) {
                    Ok(step) => step,
                    Err(e) => return StreamEnd::Violation(e),
                };
                match step {
                    StreamStep::Nothing => {}
                    StreamStep::Payload => self.payload(&input[..used]).await,
                    StreamStep::Begin(command) => self.begin(&command).await,
                    StreamStep::Refuse(refusal) => {
                        self.conn.link.admission.take(1).await;
                        self.conn.requests.refuse(&refusal, &self.conn.outbox);
                    }
                    StreamStep::Disconnect => return StreamEnd::Goodbye,
                }
                at += used;
            }
            while self.stream.payload_left() >= DIRECT_BYTES {
                match self.receive_direct().await {
                    Ok(0) => return StreamEnd::Truncated,
                    Ok(_) => {}
                    Err(e) => return StreamEnd::Socket(e),
                }
            }
            let whole = 0..buffer.len();
            let (back, result) = self.conn.link.socket.recv(buffer, whole).await;
            buffer = back;
            match result {
                Ok(0) if self.stream.at_boundary() => return StreamEnd::Closed,
                Ok(0) => return StreamEnd::Truncated,
                Ok(n) => (at, end) = (0, n),
                Err(e) => return StreamEnd::Socket(e),
            }
        }
    }

    async fn begin(&mut self, command: &Command) {
        let conn = self.conn;
        conn.link.admission.take(1).await;
        let (offset, bytes) = (command.offset, command.bytes);
        if bytes == 0 && command.action != Action::Flush {
            let read = matches!(command.action, Action::Read { .. });
            conn.requests.ack(command.cookie, read, &conn.outbox);
            return;
        }
        let task = match command.action {
            Action::Read { whole } => return self.begin_read(command, whole).await,
            Action::Write { fua } => {
                let request = conn.requests.open(command, true, false, pieces(offset, bytes).count());
                self.incoming = Some(Incoming { request, fua, offset, bytes_left: bytes, piece: None });
                return;
            }
            Action::Flush => Task::Flush,
            Action::Trim { fua } => Task::Trim { fua },
            Action::Cache => {
                conn.memory.take(u64::from(bytes.min(PIECE_BYTES))).await;
                Task::Cache
            }
            Action::WriteZeroes { fua, no_hole } => {
                Task::WriteZeroes { flags: ZeroFlags { fua, may_unmap: !no_hole } }
            }
            Action::BlockStatus { one } => Task::Status { one },
        };
        let writing = matches!(task, Task::Trim { .. } | Task::WriteZeroes { .. });
        let request = conn.requests.open(command, writing, false, 1);
        self.submit(Job { request, offset, bytes, task });
    }

    async fn begin_read(&mut self, command: &Command, whole: bool) {
        let conn = self.conn;
        let whole = whole || !conn.requests.is_structured();
        let (offset, bytes) = (command.offset, command.bytes);
        let count = pieces(offset, bytes).count();
        let request = conn.requests.open(command, false, whole, count);
        if whole {
            // All at once: two such reads that each held a part and waited for more would wait forever.
            conn.memory.take(u64::from(bytes)).await;
        }
        for (index, (offset, bytes)) in pieces(offset, bytes).enumerate() {
            if !whole {
                conn.memory.take(u64::from(bytes)).await;
                if index > 0 && conn.link.is_dead() {
                    conn.memory.give(u64::from(bytes));
                    conn.requests.give_up(request, count - index, &conn.outbox);
                    return;
                }
            }
            self.submit(Job { request, offset, bytes, task: Task::Read { index } });
        }
    }

    fn submit(&mut self, job: Job) {
        if let Some(id) = self.conn.workers.submit(job) {
            self.tasks.push(self.conn.rt.spawn(self.conn.clone().work(id)));
        }
    }

    /// Takes in payload of the current write.
    async fn payload(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let Some((mut buffer, filled)) = self.take_piece().await else { return };
            let n = bytes.len().min(buffer.len() - filled);
            let (now, later) = bytes.split_at(n);
            buffer.as_mut()[filled..filled + n].copy_from_slice(now);
            bytes = later;
            self.put_piece(buffer, filled + n);
        }
    }

    /// Receives payload of the current write to where the volume wants it.
    async fn receive_direct(&mut self) -> std::io::Result<usize> {
        let Some((buffer, filled)) = self.take_piece().await else { return Ok(0) };
        let range = filled..buffer.len();
        let (buffer, result) = self.conn.link.socket.recv(buffer, range).await;
        let n = *result.as_ref().unwrap_or(&0);
        // At most a piece.
        self.stream.payload_received(n as u32);
        self.put_piece(buffer, filled + n);
        result
    }

    /// The buffer of the current piece of the current write, and how much of it has come.
    async fn take_piece(&mut self) -> Option<(Buffer, usize)> {
        let incoming = self.incoming.as_mut()?;
        if let Some(piece) = incoming.piece.take() {
            return Some(piece);
        }
        let bytes = first_piece(incoming.offset, incoming.bytes_left);
        self.conn.memory.take(u64::from(bytes)).await;
        Some((self.conn.rt.pool().take(bytes as usize), 0))
    }

    /// Puts a piece back, or hands it to a worker if it is complete.
    fn put_piece(&mut self, buffer: Buffer, filled: usize) {
        let Some(incoming) = self.incoming.as_mut() else { return };
        if filled < buffer.len() {
            incoming.piece = Some((buffer, filled));
            return;
        }
        // At most PIECE_BYTES.
        let bytes = buffer.len() as u32;
        let (request, offset, fua) = (incoming.request, incoming.offset, incoming.fua);
        incoming.offset += u64::from(bytes);
        incoming.bytes_left -= bytes;
        if incoming.bytes_left == 0 {
            self.incoming = None;
        }
        self.submit(Job { request, offset, bytes, task: Task::Write { buffer, fua } });
    }

    /// The client went away in the middle of a write: what has come of it in whole pieces is written, as
    /// with a disk that loses power.
    fn give_up_incoming(&mut self) {
        if let Some(incoming) = self.incoming.take() {
            if let Some((buffer, _)) = incoming.piece {
                self.conn.memory.give(buffer.len() as u64);
            }
            let missing = pieces(incoming.offset, incoming.bytes_left).count();
            self.conn.requests.give_up(incoming.request, missing, &self.conn.outbox);
        }
    }
}
