//! One client after the handshake: receives requests, passes them to workers, sends replies.
//!
//! Three kinds of tasks share a [`Connection`]. The receiver, which is the task that calls [`Connection::run`], parses requests
//! and gives their pieces to workers. Workers call the volume and put replies into the outbox. The sender sends what is in the
//! outbox. This module owns their common state and its limits: requests under way (`Link::admission`) and bytes in data buffers
//! (`memory`). Both are released only after the reply is sent, so the server stops reading from a client that does not read its
//! replies.
//!
//! Invariants: an operation of the volume is awaited to its end, even if the client disconnects; no operation is started for a
//! client that has disconnected; when `run` returns, every task of the connection has ended.

use std::cell::Cell;
use std::rc::Rc;

use format::{SECTOR_BYTES, Sector, Sectors};
use io::{BlockVolume, Buffer, Handle, RangeStatus, VolumeError, WriteFlags, ZeroFlags};

use crate::codec::{self, MAX_EXTENTS, Session, StreamError};
use crate::server::link::{Cut, Link, Peer};
use crate::server::memory::Memory;
use crate::server::outbox::Outbox;
use crate::server::receiver::Receiver;
use crate::server::requests::{PIECE_BYTES, PieceError, ReadPiece, RequestId, Requests, pieces};
use crate::server::workers::Workers;
use crate::socket::{Part, Socket};

/// Longest range of one status query to the volume. A list of its single sectors takes the memory of a piece.
const STATUS_BYTES: u64 = 16 << 20;

/// How the stream of a client's requests ended.
#[derive(Debug)]
pub(super) enum StreamEnd {
    /// The client sent a disconnect request.
    Goodbye,
    /// The stream ended between two requests.
    Closed,
    /// The stream ended within a request.
    Truncated,
    Violation(StreamError),
    Socket(std::io::Error),
}

/// The job of a worker.
pub(super) enum Task {
    Read { index: usize },
    Write { buffer: Buffer, fua: bool },
    Flush,
    Trim { fua: bool },
    Cache,
    WriteZeroes { flags: ZeroFlags },
    Status { one: bool },
}

/// A piece of a request.
pub(super) struct Job {
    pub(super) request: RequestId,
    pub(super) offset: u64,
    pub(super) bytes: u32,
    pub(super) task: Task,
}

/// One client's connection after the handshake.
pub(super) struct Connection<V, S> {
    pub(super) rt: Handle,
    pub(super) volume: Rc<V>,
    pub(super) link: Rc<Link<S>>,
    pub(super) requests: Requests,
    pub(super) memory: Memory,
    pub(super) workers: Workers<Job>,
    pub(super) outbox: Outbox,
    /// The stream of requests ended without a disconnect request. No further write begins; other replies are still sent.
    lost: Cell<bool>,
}

impl<V: BlockVolume, S: Socket> Connection<V, S> {
    pub(super) fn new(
        rt: Handle,
        volume: Rc<V>,
        link: Rc<Link<S>>,
        structured: bool,
        memory: Memory,
    ) -> Rc<Connection<V, S>> {
        Rc::new(Connection {
            requests: Requests::new(structured),
            memory,
            workers: Workers::new(usize::try_from(link.admission.limit()).unwrap_or(usize::MAX)),
            outbox: Outbox::new(rt.pool().clone()),
            lost: Cell::new(false),
            rt,
            volume,
            link,
        })
    }

    /// Serves the client until the connection ends. The first bytes of its stream are `received` of `buffer`.
    pub(super) async fn run(
        self: Rc<Self>,
        session: &Session,
        buffer: Buffer,
        received: std::ops::Range<usize>,
    ) -> StreamEnd {
        let sender = self.rt.spawn(self.clone().send_replies());
        let mut receiver = Receiver::new(&self, session);
        let end = receiver.run(buffer, received).await;
        let tasks = receiver.end();
        // Without a disconnect request, the client may have lost its connection and may have connected again.
        self.lost.set(matches!(end, StreamEnd::Closed | StreamEnd::Truncated | StreamEnd::Socket(_)));
        self.link.admission.until_empty().await;
        self.memory.until_empty().await;
        self.workers.close();
        self.outbox.close();
        for worker in tasks {
            worker.await;
        }
        sender.await;
        if matches!(end, StreamEnd::Goodbye) {
            self.link.channel.finish().await;
        }
        self.link.channel.shutdown();
        end
    }

    async fn send_replies(self: Rc<Self>) {
        let mut parts: Vec<Part> = Vec::new();
        while let Some(release) = self.outbox.take(&mut parts).await {
            if !self.link.is_dead() {
                self.link.sending();
                let (storage, result) = self.link.channel.send(parts).await;
                parts = storage;
                if result.is_err() {
                    // The client takes no more replies, so no more requests are received.
                    self.link.cut(Cut::Closed);
                }
            }
            parts.clear();
            self.memory.give(release.bytes);
            self.link.answered(release.requests);
        }
    }

    pub(super) async fn work(self: Rc<Self>, id: usize) {
        while let Some(job) = self.workers.next(id).await {
            self.carry_out(job).await;
        }
    }

    async fn carry_out(&self, job: Job) {
        let Job { request, offset, bytes, task } = job;
        let (sector, sectors) = range(offset, bytes);
        let (volume, outbox) = (&self.volume, &self.outbox);
        let is_closed = self.link.is_dead() || self.lost.get();
        let result = match task {
            Task::Read { index } => {
                let result = self.read(offset, bytes).await;
                let piece = ReadPiece { index, offset, bytes };
                self.requests.read_done(request, &piece, result, outbox, &self.memory);
                return;
            }
            // The client may have connected again, repeated this write, and after its answer written newer data to the same
            // place. This write must not follow the newer one.
            Task::Write { .. } if is_closed => {
                self.memory.give(u64::from(bytes));
                Err(PieceError::ClientClosed)
            }
            Task::Write { buffer, fua } => {
                let flags = WriteFlags { fua, ..WriteFlags::default() };
                let result = volume.write(sector, sectors, buffer, 0, flags).await;
                self.memory.give(u64::from(bytes));
                result.map_err(PieceError::Volume)
            }
            Task::Status { one } => {
                let result = self.status(offset, bytes, one).await;
                let Ok(runs) = result else {
                    self.memory.give(u64::from(PIECE_BYTES));
                    return self.requests.piece_done(request, result.map(drop), outbox);
                };
                return self.requests.answered(request, outbox, u64::from(PIECE_BYTES), |cookie, bytes| {
                    let mut chunk = Vec::new();
                    codec::block_status_chunk(cookie, bytes, &runs, one, &mut chunk);
                    chunk
                });
            }
            Task::Cache => {
                let result = self.cache(offset, bytes).await;
                self.memory.give(u64::from(bytes.min(PIECE_BYTES)));
                result
            }
            _ if is_closed => Err(PieceError::ClientClosed),
            Task::Flush => volume.flush().await.map_err(PieceError::Volume),
            Task::Trim { fua } => trim(&**volume, sector, sectors, fua).await.map_err(PieceError::Volume),
            Task::WriteZeroes { flags } => {
                volume.write_zeroes(sector, sectors, flags).await.map_err(PieceError::Volume)
            }
        };
        self.requests.piece_done(request, result, outbox);
    }

    /// Reads a piece, unless the connection is closed.
    pub(super) async fn read(&self, offset: u64, bytes: u32) -> Result<Buffer, PieceError> {
        if self.link.is_dead() {
            return Err(PieceError::ClientClosed);
        }
        let buffer = self.rt.pool().try_take(bytes as usize).ok_or(PieceError::NoMemory)?;
        let (sector, sectors) = range(offset, bytes);
        let (buffer, result) = self.volume.read(sector, sectors, buffer, 0).await;
        result.map(|()| buffer).map_err(PieceError::Volume)
    }

    /// Queries the state of a range, or of the part of it that fits into an answer.
    async fn status(&self, offset: u64, bytes: u32, one: bool) -> Result<Vec<RangeStatus>, PieceError> {
        let mut runs: Vec<RangeStatus> = Vec::new();
        let (mut at, end) = (offset, offset + u64::from(bytes));
        while at < end {
            if self.link.is_dead() {
                return Err(PieceError::ClientClosed);
            }
            let step = (end - at).min(STATUS_BYTES);
            let found = self.volume.status(Sector(at / SECTOR_BYTES), Sectors(step / SECTOR_BYTES)).await?;
            for run in found {
                let full = runs.len() > MAX_EXTENTS || (one && !runs.is_empty());
                match runs.last_mut() {
                    Some(last) if (last.hole, last.zero) == (run.hole, run.zero) => {
                        last.sectors = Sectors(last.sectors.0.saturating_add(run.sectors.0));
                    }
                    _ if full => return Ok(runs),
                    _ => runs.push(run),
                }
            }
            at += step;
        }
        Ok(runs)
    }

    /// Reads a range so that the volume caches it.
    async fn cache(&self, offset: u64, bytes: u32) -> Result<(), PieceError> {
        for (offset, bytes) in pieces(offset, bytes) {
            // The range may have gigabytes. The request is only a hint, so it ends with the connection.
            if self.link.is_stopping() {
                break;
            }
            drop(self.read(offset, bytes).await?);
        }
        Ok(())
    }
}

fn range(offset: u64, bytes: u32) -> (Sector, Sectors) {
    (Sector(offset / SECTOR_BYTES), Sectors(u64::from(bytes) / SECTOR_BYTES))
}

async fn trim<V: BlockVolume>(
    volume: &V,
    sector: Sector,
    sectors: Sectors,
    fua: bool,
) -> Result<(), VolumeError> {
    match volume.discard(sector, sectors).await {
        Ok(()) if fua => volume.flush().await,
        result => result,
    }
}
