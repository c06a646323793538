//! Long reads that are answered in one piece: by a simple reply, or by one chunk for a client that wants no fragments.
//!
//! The data of such a read is sent while later pieces are still being read, so that no request holds 32 MiB. No other bytes may
//! be sent between the header and the end of the data. So the read has the connection for itself: it waits until all earlier
//! replies are sent, and later requests wait for it. This module owns the order of the pieces and the handling of errors:
//!
//! * An error before the header is sent is answered with an error reply.
//! * In a chunk, zeros stand for the piece, and the chunk that ends the reply has the error.
//! * After the header of a simple reply, the client is disconnected, as other servers do it: the reply cannot say that its data
//!   is not the volume's. Linux's nbd driver sends shorter reads, so it is not affected.
//!
//! Invariant: a piece that was begun is awaited, and its memory is released at once or with the reply.

use std::collections::VecDeque;
use std::rc::Rc;

use io::{BlockVolume, Buffer, JoinHandle};

use crate::codec::{self, Command, Errno};
use crate::server::connection::Connection;
use crate::server::link::{Cut, Peer};
use crate::server::outbox::Release;
use crate::server::requests::{PieceError, pieces};
use crate::socket::Socket;

/// Number of pieces that are read at a time, if there is memory.
const AHEAD: usize = 4;

/// A piece that is being read.
struct Reading {
    bytes: u32,
    result: JoinHandle<Result<Buffer, PieceError>>,
}

/// The state of a streamed read.
#[derive(Default)]
struct Progress {
    /// Whether the header was sent, with some data.
    begun: bool,
    /// Whether the rest of the data is not needed.
    ended: bool,
    failure: Option<(Errno, String)>,
}

impl<V: BlockVolume, S: Socket> Connection<V, S> {
    /// Answers a read whose data must be sent in one piece.
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

    /// Sends a piece that was read. The header goes before the first piece.
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
                // A chunk that has begun must have its full length, so zeros take the place of the piece.
                if progress.begun && structured { self.zeros(bytes) } else { None }
            }
        };
        match data {
            Some(data) if !progress.ended && (progress.begun || progress.failure.is_none()) => {
                // Another chunk, which ends the reply, follows this one.
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
