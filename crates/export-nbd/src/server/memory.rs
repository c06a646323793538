//! Memory of one connection within the budget of the process.
//!
//! Owns the count of bytes in data buffers, and the connection's part of the [`MemoryBudget`]. A connection reserves its
//! minimum when it is accepted: its fixed buffers, and room for one piece. A client is refused if the budget does not have this
//! minimum. Beyond it, a connection takes memory for more pieces as the budget permits.
//!
//! A client waits for memory and gets no ENOMEM, because most clients pass ENOMEM on to a file system, which takes it for a
//! disk error. The wait is safe, because no connection waits for memory of another one. With its reserved piece, a connection
//! always makes progress, with fewer requests at a time. So a waiter needs no wake-up from other connections or threads. The
//! answer is ENOMEM only if the system refuses an allocation within the budget.
//!
//! Invariants: `used` never exceeds the bytes that are reserved for data; to take a piece at most succeeds if no other memory is
//! taken. Only the connection's receiver waits, so this holds one waker. Must not know what the memory holds.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::task::{Poll, Waker};

use io::{MemoryBudget, OverBudget, Reservation};

/// Counts the memory of a connection within the budget of the process.
pub(super) struct Memory {
    reservation: RefCell<Reservation>,
    /// Bytes of the reservation that are for fixed buffers, not for data.
    fixed_bytes: u64,
    /// Bytes for data that are reserved for as long as the connection exists.
    own_bytes: u64,
    /// Maximum bytes of data at a time, for any budget.
    limit_bytes: u64,
    used: Cell<u64>,
    waiter: RefCell<Option<Waker>>,
}

impl Memory {
    /// Reserves `fixed_bytes`, and `own_bytes` for data. The bytes for data may grow to `limit_bytes`.
    pub(super) fn reserve(
        budget: &MemoryBudget,
        fixed_bytes: u64,
        own_bytes: u64,
        limit_bytes: u64,
    ) -> Result<Memory, OverBudget> {
        let reservation = RefCell::new(budget.try_reserve(fixed_bytes.saturating_add(own_bytes))?);
        let (used, waiter) = (Cell::new(0), RefCell::default());
        Ok(Memory {
            reservation,
            fixed_bytes,
            own_bytes,
            limit_bytes: limit_bytes.max(own_bytes),
            used,
            waiter,
        })
    }

    /// Takes `n` bytes if the connection's limit and the budget permit.
    pub(super) fn try_take(&self, n: u64) -> bool {
        let after = self.used.get().saturating_add(n);
        if after > self.limit_bytes {
            return false;
        }
        if after > self.own_bytes {
            let mut reservation = self.reservation.borrow_mut();
            let missing = (self.fixed_bytes + after).saturating_sub(reservation.bytes());
            if missing > 0 && reservation.try_grow(missing).is_err() {
                return false;
            }
        }
        self.used.set(after);
        true
    }

    /// Waits until `n` bytes can be taken, and takes them; `n` is at most what the connection has reserved.
    pub(super) async fn take(&self, n: u64) {
        debug_assert!(n <= self.own_bytes, "{n} bytes at once, {} are reserved", self.own_bytes);
        self.wait(|| self.try_take(n)).await;
    }

    /// Waits until `n` bytes can be taken, and takes them; or until no other bytes are taken, and then takes none.
    ///
    /// Returns whether it took them.
    pub(super) async fn take_if_possible(&self, n: u64) -> bool {
        let mut taken = false;
        self.wait(|| {
            taken = self.try_take(n);
            taken || self.used.get() == 0
        })
        .await;
        taken
    }

    /// Releases `n` bytes. The caller has freed the memory.
    pub(super) fn give(&self, n: u64) {
        if n == 0 {
            return;
        }
        assert!(n <= self.used.get(), "more is given back than was taken");
        let left = self.used.get() - n;
        self.used.set(left);
        self.reservation.borrow_mut().shrink_to(self.fixed_bytes + left.max(self.own_bytes));
        let waiter = self.waiter.borrow_mut().take();
        if let Some(w) = waiter {
            w.wake();
        }
    }

    /// Waits until all bytes are released.
    pub(super) async fn until_empty(&self) {
        self.wait(|| self.used.get() == 0).await;
    }

    async fn wait(&self, mut condition: impl FnMut() -> bool) {
        poll_fn(|cx| {
            if condition() {
                return Poll::Ready(());
            }
            *self.waiter.borrow_mut() = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::Context;

    use super::*;

    fn poll<T>(future: impl Future<Output = T>) -> Poll<T> {
        pin!(future).poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn a_connection_keeps_its_own_part_when_the_budget_is_exhausted() {
        let budget = MemoryBudget::new(100);
        let a = Memory::reserve(&budget, 10, 20, 60).expect("room");
        let b = Memory::reserve(&budget, 10, 20, 60).expect("room");
        assert!(poll(a.take(20)).is_ready());
        assert!(poll(a.take(20)).is_ready(), "the budget has 40 more");
        assert!(!a.try_take(21), "the connection's limit");
        assert!(poll(a.take(20)).is_ready());
        assert_eq!(budget.used(), 100);
        assert!(Memory::reserve(&budget, 0, 1, 1).is_err());
        assert!(poll(b.take(20)).is_ready(), "its own part");
        assert!(poll(b.take(1)).is_pending());
        assert_eq!(poll(b.take_if_possible(1)), Poll::Pending);
        b.give(20);
        assert_eq!(
            poll(b.take_if_possible(21)),
            Poll::Ready(false),
            "nothing of its own is left to wait for"
        );
        a.give(60);
        assert_eq!(budget.used(), 60);
        assert_eq!(poll(b.take_if_possible(21)), Poll::Ready(true));
        assert!(poll(b.until_empty()).is_pending());
        drop((a, b));
        assert_eq!(budget.figures().used, 0);
    }
}
