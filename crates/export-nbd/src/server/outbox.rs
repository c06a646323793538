//! Replies that wait to be sent.
//!
//! Owns the order of the bytes that go to one client. Any task of the connection adds whole replies or whole chunks; the sender
//! of the connection takes all of them and sends them in one call. Headers are collected in shared buffers, and data is sent
//! from its own buffer. A reply carries its share of the connection's limits, which is released after the reply is sent.

use std::cell::RefCell;
use std::future::poll_fn;
use std::ops::Range;
use std::task::{Poll, Waker};

use io::{Buffer, BufferPool};

use crate::socket::Part;

/// Size of a buffer that collects headers: about 600 headers.
const HEAD_BYTES: usize = 16 << 10;

enum Item {
    /// A range of the numbered head buffer.
    Head {
        head: usize,
        range: Range<usize>,
    },
    Data(Part),
}

/// The shares of the limits to release after a send.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(super) struct Release {
    /// Requests that are answered.
    pub(super) requests: u64,
    /// Bytes of data buffers.
    pub(super) bytes: u64,
}

#[derive(Default)]
struct Pending {
    heads: Vec<Buffer>,
    /// Bytes used in the last head buffer.
    filled: usize,
    items: Vec<Item>,
    release: Release,
}

#[derive(Default)]
struct OutboxState {
    pending: Pending,
    closed: bool,
    sender: Option<Waker>,
}

/// Replies that wait to be sent.
pub(super) struct Outbox {
    inner: RefCell<OutboxState>,
    pool: BufferPool,
}

impl Outbox {
    pub(super) fn new(pool: BufferPool) -> Outbox {
        Outbox { inner: RefCell::default(), pool }
    }

    /// Adds `head`, which is copied, and after it `data`, which is not. No other bytes are sent between them.
    pub(super) fn push(&self, head: &[u8], data: impl IntoIterator<Item = Buffer>, release: Release) {
        let mut inner = self.inner.borrow_mut();
        if !head.is_empty() {
            inner.pending.push_head(head, &self.pool);
        }
        for buffer in data {
            let range = 0..buffer.len();
            inner.pending.items.push(Item::Data(Part { buffer, range }));
        }
        inner.pending.release.requests += release.requests;
        inner.pending.release.bytes += release.bytes;
        let sender = inner.sender.take();
        drop(inner);
        if let Some(w) = sender {
            w.wake();
        }
    }

    /// Waits for replies and moves all of them to `parts`; `None` once the outbox is closed and empty.
    pub(super) async fn take(&self, parts: &mut Vec<Part>) -> Option<Release> {
        poll_fn(|cx| {
            let inner = &mut *self.inner.borrow_mut();
            if !inner.pending.items.is_empty() {
                return Poll::Ready(Some(inner.pending.take(parts)));
            }
            if inner.closed {
                return Poll::Ready(None);
            }
            inner.sender = Some(cx.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// Closes the outbox: no more replies are added.
    pub(super) fn close(&self) {
        let mut inner = self.inner.borrow_mut();
        inner.closed = true;
        let sender = inner.sender.take();
        drop(inner);
        if let Some(w) = sender {
            w.wake();
        }
    }
}

impl Pending {
    fn push_head(&mut self, bytes: &[u8], pool: &BufferPool) {
        if bytes.len() > HEAD_BYTES {
            // A long list of extents does not fit into a head buffer.
            let buffer = pool.copy_of(bytes);
            self.items.push(Item::Data(Part { range: 0..buffer.len(), buffer }));
            return;
        }
        if self.heads.is_empty() || self.filled + bytes.len() > HEAD_BYTES {
            self.heads.push(pool.take(HEAD_BYTES));
            self.filled = 0;
        }
        let at = self.filled;
        let end = at + bytes.len();
        let head = self.heads.len() - 1;
        self.heads[head].as_mut()[at..end].copy_from_slice(bytes);
        self.filled = end;
        match self.items.last_mut() {
            // Headers without data between them become one part.
            Some(Item::Head { head: h, range }) if *h == head && range.end == at => range.end = end,
            _ => self.items.push(Item::Head { head, range: at..end }),
        }
    }

    fn take(&mut self, parts: &mut Vec<Part>) -> Release {
        for item in self.items.drain(..) {
            parts.push(match item {
                Item::Data(part) => part,
                Item::Head { head, range } => Part { buffer: self.heads[head].clone(), range },
            });
        }
        self.heads.clear();
        self.filled = 0;
        std::mem::take(&mut self.release)
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::Context;

    use super::*;

    fn take(outbox: &Outbox) -> Option<(Vec<usize>, Vec<u8>, Release)> {
        let mut parts = Vec::new();
        let polled = pin!(outbox.take(&mut parts)).poll(&mut Context::from_waker(Waker::noop()));
        let Poll::Ready(Some(release)) = polled else { return None };
        let bytes = parts.iter().flat_map(|p| p.buffer.as_slice()[p.range.clone()].to_vec()).collect();
        Some((parts.iter().map(|p| p.range.len()).collect(), bytes, release))
    }

    #[test]
    fn everything_that_waits_goes_out_in_order_in_few_parts() {
        let pool = BufferPool::default();
        let outbox = Outbox::new(pool.clone());
        assert!(take(&outbox).is_none());
        outbox.push(b"ab", None, Release { requests: 1, bytes: 0 });
        outbox.push(b"cd", Some(pool.copy_of(b"data")), Release { requests: 1, bytes: 4 });
        outbox.push(b"ef", None, Release { requests: 1, bytes: 0 });
        let (lens, bytes, release) = take(&outbox).expect("replies wait");
        assert_eq!(lens, [4, 4, 2]);
        assert_eq!(bytes, b"abcddataef");
        assert_eq!(release, Release { requests: 3, bytes: 4 });
        assert!(take(&outbox).is_none());
    }

    #[test]
    fn more_headers_than_a_buffer_holds_take_another() {
        let outbox = Outbox::new(BufferPool::default());
        let expected: Vec<u8> = (0..2000u32).flat_map(|i| [i as u8; 20]).collect();
        for header in expected.chunks(20) {
            outbox.push(header, None, Release::default());
        }
        outbox.push(&[7; HEAD_BYTES + 1], None, Release::default());
        let (lens, bytes, _) = take(&outbox).expect("replies wait");
        assert_eq!(lens.len(), 4);
        assert_eq!(bytes[..expected.len()], expected);
        assert_eq!(bytes.len(), expected.len() + HEAD_BYTES + 1);
    }
}
