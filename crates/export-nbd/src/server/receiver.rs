//! The receiving half of a connection: from bytes to jobs.
//!
//! Owns the client's request stream and the write whose payload is arriving. It takes a request's share of the connection's
//! limits before the request begins, so requests beyond the limits wait in the client's socket. This task itself streams reads
//! that are longer than [`GATHER_BYTES`] and must be answered in one piece.
//!
//! Invariants: no request begins for a client that has disconnected; every request that has begun is handed over or given up.
//! Must not know how jobs are carried out.

use std::rc::Rc;

use io::{BlockVolume, Buffer, JoinHandle, ZeroFlags};

use crate::codec::{Action, Command, RequestStream, Session, StreamStep};
use crate::server::connection::{Connection, Job, StreamEnd, Task};
use crate::server::requests::{GATHER_BYTES, PIECE_BYTES, PieceError, RequestId, first_piece, pieces};
use crate::socket::Socket;

/// Payload of at least this length is received directly into the write's buffer, without a copy.
const DIRECT_BYTES: u32 = 64 << 10;

/// A write whose payload is arriving.
struct IncomingWrite {
    request: RequestId,
    fua: bool,
    /// Position of the current piece in the volume.
    offset: u64,
    /// Bytes from there to the end of the request.
    bytes_left: u32,
    piece: Option<Piece>,
}

/// The part of a write's payload that is arriving.
struct Piece {
    /// `None` if the system has no memory for it: the payload is received and dropped.
    buffer: Option<Buffer>,
    bytes: usize,
    filled: usize,
}

/// The receiving half of a connection.
pub(super) struct Receiver<'a, V, S> {
    conn: &'a Rc<Connection<V, S>>,
    stream: RequestStream,
    incoming: Option<IncomingWrite>,
    /// The workers that were started.
    tasks: Vec<JoinHandle<()>>,
}

impl<'a, V: BlockVolume, S: Socket> Receiver<'a, V, S> {
    pub(super) fn new(conn: &'a Rc<Connection<V, S>>, session: &Session) -> Receiver<'a, V, S> {
        Receiver { conn, stream: RequestStream::new(session), incoming: None, tasks: Vec::new() }
    }

    /// Gives incomplete requests up. Returns the workers that were started.
    pub(super) fn end(mut self) -> Vec<JoinHandle<()>> {
        self.give_up_incoming();
        self.tasks
    }

    pub(super) async fn run(&mut self, mut buffer: Buffer, received: std::ops::Range<usize>) -> StreamEnd {
        let (mut at, mut end) = (received.start, received.end);
        loop {
            while at < end {
                if self.conn.link.is_dead() {
                    return StreamEnd::Closed;
                }
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
            while self.stream.payload_left() >= DIRECT_BYTES && self.prepare_piece().await {
                match self.receive_direct().await {
                    Ok(0) => return StreamEnd::Truncated,
                    Ok(_) => {}
                    Err(e) => return StreamEnd::Socket(e),
                }
            }
            let whole = 0..buffer.len();
            let (back, result) = self.conn.link.channel.recv(buffer, whole).await;
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
                self.incoming = Some(IncomingWrite { request, fua, offset, bytes_left: bytes, piece: None });
                return;
            }
            Action::Flush => Task::Flush,
            Action::Trim { fua } => Task::Trim { fua },
            Action::Cache => {
                conn.memory.take(u64::from(bytes.min(PIECE_BYTES))).await;
                Task::Cache
            }
            Action::BlockStatus { one } => {
                conn.memory.take(u64::from(PIECE_BYTES)).await;
                Task::Status { one }
            }
            Action::WriteZeroes { fua, no_hole } => {
                Task::WriteZeroes { flags: ZeroFlags { fua, may_unmap: !no_hole } }
            }
        };
        let writing = matches!(task, Task::Trim { .. } | Task::WriteZeroes { .. });
        let request = conn.requests.open(command, writing, false, 1);
        self.submit(Job { request, offset, bytes, task });
    }

    async fn begin_read(&mut self, command: &Command, one_chunk: bool) {
        let conn = self.conn;
        let (offset, bytes) = (command.offset, command.bytes);
        let whole = one_chunk || !conn.requests.is_structured();
        // All memory at once: two such reads that each hold a part and wait for more would wait forever.
        if whole && (bytes > GATHER_BYTES || !conn.memory.take_if_possible(u64::from(bytes)).await) {
            return conn.stream_read(command).await;
        }
        let count = pieces(offset, bytes).count();
        let request = conn.requests.open(command, false, whole, count);
        for (index, (offset, bytes)) in pieces(offset, bytes).enumerate() {
            if !whole {
                conn.memory.take(u64::from(bytes)).await;
                if conn.link.is_dead() {
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

    /// Copies received payload into the current write.
    async fn payload(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            self.prepare_piece().await;
            let Some(piece) = self.incoming.as_mut().and_then(|i| i.piece.as_mut()) else { return };
            let n = bytes.len().min(piece.bytes - piece.filled);
            let (now, later) = bytes.split_at(n);
            if let Some(buffer) = &mut piece.buffer {
                buffer.as_mut()[piece.filled..piece.filled + n].copy_from_slice(now);
            }
            piece.filled += n;
            bytes = later;
            self.hand_over_piece();
        }
    }

    /// Receives payload directly into the buffer of the current write.
    async fn receive_direct(&mut self) -> std::io::Result<usize> {
        let piece = self.incoming.as_mut().and_then(|i| i.piece.as_mut());
        let Some((piece, buffer)) = piece.and_then(|p| p.buffer.take().map(|b| (p, b))) else {
            return Ok(0);
        };
        let range = piece.filled..piece.bytes;
        let (buffer, result) = self.conn.link.channel.recv(buffer, range).await;
        let n = *result.as_ref().unwrap_or(&0);
        piece.buffer = Some(buffer);
        piece.filled += n;
        // Not more than a piece.
        self.stream.payload_received(n as u32);
        self.hand_over_piece();
        result
    }

    /// Ensures that the current write has a piece for the next payload. Returns whether the piece has a buffer.
    async fn prepare_piece(&mut self) -> bool {
        let Some(incoming) = self.incoming.as_mut() else { return false };
        if incoming.piece.is_none() {
            let bytes = first_piece(incoming.offset, incoming.bytes_left);
            self.conn.memory.take(u64::from(bytes)).await;
            let bytes = bytes as usize;
            incoming.piece = Some(Piece { buffer: self.conn.rt.pool().try_take(bytes), bytes, filled: 0 });
        }
        incoming.piece.as_ref().is_some_and(|p| p.buffer.is_some())
    }

    /// Hands the current piece to a worker if it is complete.
    fn hand_over_piece(&mut self) {
        let Some(incoming) = self.incoming.as_mut() else { return };
        let Some(piece) = incoming.piece.take_if(|p| p.filled == p.bytes) else { return };
        // A piece has PIECE_BYTES at most.
        let bytes = piece.bytes as u32;
        let (request, offset, fua) = (incoming.request, incoming.offset, incoming.fua);
        incoming.offset += u64::from(bytes);
        incoming.bytes_left -= bytes;
        if incoming.bytes_left == 0 {
            self.incoming = None;
        }
        match piece.buffer {
            Some(buffer) => self.submit(Job { request, offset, bytes, task: Task::Write { buffer, fua } }),
            None => {
                self.conn.memory.give(u64::from(bytes));
                self.conn.requests.piece_done(request, Err(PieceError::NoMemory), &self.conn.outbox);
            }
        }
    }

    /// Gives the current write up, because the client disconnected within its payload.
    ///
    /// Complete pieces of the write are still written, as with a disk that loses power.
    fn give_up_incoming(&mut self) {
        if let Some(incoming) = self.incoming.take() {
            if let Some(Piece { buffer, bytes, .. }) = incoming.piece {
                drop(buffer);
                self.conn.memory.give(bytes as u64);
            }
            let missing = pieces(incoming.offset, incoming.bytes_left).count();
            self.conn.requests.give_up(incoming.request, missing, &self.conn.outbox);
        }
    }
}
