//! Adjacent writes to a device that were submitted in one turn, combined into one command.
//!
//! A cache that writes to free space sends small adjacent writes, and a device serves a limited number of requests per second.
//! Owns the list of writes that follow the first one, and the vector that names their memory. The vector's heap block does
//! not move while the operation sits in the reactor's slot. If a gathered write does not succeed as a whole, each of its
//! writes is repeated alone, so that an error is reported for the write that caused it. Must not know about slots and turns
//! (module `reactor`).

use std::cell::RefCell;

use format::Sectors;
use io::{Completer, Request};

/// Maximum bytes of one command: about the largest size that block devices take as one request.
pub(crate) const MAX_BYTES: u64 = 1 << 20;
/// Maximum number of pieces of one command.
pub(crate) const MAX_PIECES: usize = 64;
/// Number of empty lists that a device keeps for later operations.
const SPARES: usize = 16;

/// The writes of a command that follow its first write.
pub(crate) struct Gathered {
    others: Vec<(Request, Completer)>,
    sectors: Sectors,
    iovecs: Vec<libc::iovec>,
}

impl Gathered {
    fn new() -> Box<Gathered> {
        Box::new(Gathered {
            others: Vec::with_capacity(MAX_PIECES - 1),
            sectors: Sectors::ZERO,
            iovecs: Vec::with_capacity(MAX_PIECES),
        })
    }

    /// Total length of the writes that follow the first one.
    pub(crate) fn sectors(&self) -> Sectors {
        self.sectors
    }

    pub(crate) fn is_full(&self) -> bool {
        self.others.len() == MAX_PIECES - 1
    }

    /// Adds a write, which must begin where the last one ends.
    pub(crate) fn push(&mut self, request: Request, completer: Completer) {
        self.sectors += request.sectors;
        self.others.push((request, completer));
    }

    /// Takes all writes out.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = (Request, Completer)> {
        self.sectors = Sectors::ZERO;
        self.others.drain(..)
    }

    /// Bytes of `first` and of all writes in the list: [`MAX_BYTES`] at most.
    pub(crate) fn bytes_with(&self, first: &Request) -> i64 {
        (first.sectors + self.sectors).bytes() as i64
    }

    /// The memory of `first` and of the writes in the list. The pointer is valid until this list is used again.
    pub(crate) fn iovecs(&mut self, first: &Request) -> (*const libc::iovec, u32) {
        self.iovecs.clear();
        for request in std::iter::once(first).chain(self.others.iter().map(|(request, _)| request)) {
            // `submit` has checked that the range lies in the buffer.
            let memory = request.buffer.as_ref().map_or(&[][..], |b| &b.as_slice()[request.byte_range()]);
            self.iovecs
                .push(libc::iovec { iov_base: memory.as_ptr().cast_mut().cast(), iov_len: memory.len() });
        }
        (self.iovecs.as_ptr(), self.iovecs.len() as u32)
    }
}

/// Empty lists for later operations.
#[derive(Default)]
#[allow(clippy::vec_box, reason = "an operation holds one as a pointer, so that it stays small")]
pub(crate) struct Spare(RefCell<Vec<Box<Gathered>>>);

impl Spare {
    pub(crate) fn take(&self) -> Box<Gathered> {
        self.0.borrow_mut().pop().unwrap_or_else(Gathered::new)
    }

    /// Takes back an empty list, for the next operation.
    pub(crate) fn put_back(&self, gathered: Box<Gathered>) {
        let mut spares = self.0.borrow_mut();
        if spares.len() < SPARES {
            spares.push(gathered);
        }
    }
}
