//! Long reads that are answered in one piece: a simple reply, or a chunk for a client that wants no fragments.
//!
//! Their data go out while the rest is still being read, so that no request holds 32 MiB. Nothing else may go out between
//! the header and the end of the data, so such a read has the connection for itself: it waits until everything before it was
//! sent, and what comes after waits for it. Owns the order of the pieces and what becomes of a failure:
//!
//! * before the header was sent, the read is answered with the error;
//! * in a chunk, zeros stand for the piece, and the chunk that ends the reply has the error;
//! * after the header of a simple reply, the client is disconnected, as by other servers: the reply has no other way to say
//!   that its data are not those of the volume. So Linux's nbd driver, whose reads are shorter, never gets here.
//!
//! Invariant: a piece that was begun is awaited, and its memory is given back or travels with the reply.

use std::collections::VecDeque;
use std::rc::Rc;

use io::{BlockVolume, Buffer, JoinHandle};

use crate::codec::{self, Command, Errno};
use crate::server::connection::Connection;
use crate::server::link::{Cut, Peer};
use crate::server::outbox::Release;
use crate::server::requests::{PieceError, pieces};
use crate::socket::Socket;

/// Pieces that are read at a time, if there is memory.
const AHEAD: usize = 4;

/// A piece that is being read.
struct Reading {
    bytes: u32,
    result: JoinHandle<Result<Buffer, PieceError>>,
}

/// How far a streamed read has come.
#[derive(Default)]
struct Progress {
    /// The header was sent, with some data.
    begun: bool,
    /// The rest of the data is of no use.
    ended: bool,
    failure: Option<(Errno, String)>,
}

impl<V: BlockVolume, S: Socket> Connection<V, S> {
    /// Answers a read whose data must go out in one piece.
    pub(super) async fn stream_read(self: &Rc<Self>, command: &Command) {
        self.link.admission.until_at_most(1).await;
        let mut todo = pieces(command.offset, command.bytes).peekable();
        let mut ahead: VecDeque<Reading> = VecDeque::new();
        let mut progress = Progress::default();
        loop {
            while !progress.ended && ahead.len() < AHEAD {
                let Some(&(offset, bytes)) = todo.peek() else { break };
                if ahead.is_empty() {
                    self.memory.take(u64::from(bytes)).await;
                } else if !self.memory.try_take(u64::from(bytes)) {
                    break;
                }
                todo.next();
                let conn = self.clone();
                let result = self.rt.spawn(async move { conn.read(offset, bytes).await });
                ahead.push_back(Reading { bytes, result });
            }
            let Some(Reading { bytes, result }) = ahead.pop_front() else { break };
            let result = result.await;
            let last = ahead.is_empty() && todo.peek().is_none();
            self.pass_on(command, &mut progress, (bytes, last), result);
            progress.ended |= self.link.is_dead();
        }
        self.end_stream(command, progress);
    }

    /// Sends a piece that was read, and before the first one the header.
    fn pass_on(
        &self,
        command: &Command,
        progress: &mut Progress,
        (bytes, last): (u32, bool),
        result: Result<Buffer, PieceError>,
    ) {
        let structured = self.requests.is_structured();
        let data = match result {
            Ok(buffer) => Some(buffer),
            Err(e) => {
                progress.failure.get_or_insert_with(|| e.in_protocol(false));
                // In a chunk that has begun, something has to stand for what could not be read.
                if progress.begun && structured { self.zeros(bytes) } else { None }
            }
        };
        match data {
            Some(data) if !progress.ended && (progress.begun || progress.failure.is_none()) => {
                // A chunk is followed by the one that ends the reply.
                let requests = u64::from(last && !structured);
                let release = Release { requests, bytes: u64::from(bytes) };
                let (cookie, offset, length) = (command.cookie, command.offset, command.bytes);
                if progress.begun {
                    self.outbox.push(&[], Some(data), release);
                } else if structured {
                    let head = codec::data_header(cookie, offset, length, false);
                    self.outbox.push(&head, Some(data), release);
                } else {
                    self.outbox.push(&codec::simple_reply(cookie, None), Some(data), release);
                }
                progress.begun = true;
            }
            unused => {
                drop(unused);
                progress.ended = true;
                self.memory.give(u64::from(bytes));
            }
        }
    }

    fn end_stream(&self, command: &Command, progress: Progress) {
        let Progress { begun, ended, failure } = progress;
        let structured = self.requests.is_structured();
        match failure {
            _ if self.link.is_dead() => self.link.answered(u64::from(ended || structured)),
            Some((errno, message)) if !begun || (structured && !ended) => {
                self.requests.push_error(command.cookie, errno, &message, &self.outbox);
            }
            Some((errno, _)) => {
                self.link.cut(Cut::BrokenReply(errno));
                self.link.answered(1);
            }
            None if structured => {
                let release = Release { requests: 1, bytes: 0 };
                self.outbox.push(&codec::done_chunk(command.cookie), None, release);
            }
            None => {}
        }
    }

    fn zeros(&self, bytes: u32) -> Option<Buffer> {
        let mut buffer = self.rt.pool().try_take(bytes as usize)?;
        buffer.as_mut().fill(0);
        Some(buffer)
    }
}
