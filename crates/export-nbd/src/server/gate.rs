//! A count with a limit, on which one task waits.
//!
//! Owns the count of requests that a connection has under way. Invariant: only the connection's receiver waits, so the gate
//! holds one waker.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// A count with a limit.
pub(super) struct Gate {
    used: Cell<u64>,
    limit: u64,
    waiter: RefCell<Option<Waker>>,
}

impl Gate {
    pub(super) fn new(limit: u64) -> Gate {
        Gate { used: Cell::new(0), limit, waiter: RefCell::default() }
    }

    /// Waits until the count plus `n` is within the limit, and adds `n`. An `n` above the limit is added when the count is 0.
    pub(super) async fn take(&self, n: u64) {
        self.wait(|used| used == 0 || used.saturating_add(n) <= self.limit).await;
        self.used.set(self.used.get() + n);
    }

    /// Releases `n`.
    pub(super) fn give(&self, n: u64) {
        if n == 0 {
            return;
        }
        assert!(n <= self.used.get(), "more is given back than was taken");
        self.used.set(self.used.get() - n);
        let waiter = self.waiter.borrow_mut().take();
        if let Some(w) = waiter {
            w.wake();
        }
    }

    /// The limit.
    pub(super) fn limit(&self) -> u64 {
        self.limit
    }

    /// The current count.
    pub(super) fn used(&self) -> u64 {
        self.used.get()
    }

    /// Waits until the count is 0.
    pub(super) async fn until_empty(&self) {
        self.until_at_most(0).await;
    }

    /// Waits until the count is `n` at most.
    pub(super) async fn until_at_most(&self, n: u64) {
        self.wait(|used| used <= n).await;
    }

    async fn wait(&self, condition: impl Fn(u64) -> bool) {
        poll_fn(|cx| {
            if condition(self.used.get()) {
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

    fn ready(future: impl Future<Output = ()>) -> bool {
        pin!(future).poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    #[test]
    fn the_limit_holds_except_for_what_never_fits() {
        let gate = Gate::new(10);
        assert!(ready(gate.take(25)), "alone, anything gets in");
        assert!(!ready(gate.take(1)));
        gate.give(25);
        assert!(ready(gate.take(6)));
        assert!(ready(gate.take(4)));
        assert!(!ready(gate.take(1)));
        assert!(!ready(gate.until_empty()));
        gate.give(10);
        assert!(ready(gate.until_empty()));
    }
}
