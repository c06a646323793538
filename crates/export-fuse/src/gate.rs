//! The gate of writes: writes of whole sectors run concurrently, a write of a part of a sector runs alone.
//!
//! Owns the count of running writes. A write of a part of a sector reads the sector, changes it and writes it back. Another
//! write to that sector in between would be lost, even if it covered the whole sector and had completed. Partial writes are
//! rare: a block device never sends any. So one of them excludes every other write to the volume, not only writes to the same
//! sector. Must not know sectors or volumes.
//!
//! Invariant: the gate is fair. A write that arrives while another one waits to be alone waits behind that one.

use std::cell::Cell;

use io::sync::{Event, Mutex, Permit};

#[derive(Default)]
pub(crate) struct Gate {
    sharing: Cell<usize>,
    alone: Mutex,
    left: Event,
}

/// The permit of a write of whole sectors.
pub(crate) struct Shared<'a>(&'a Gate);

impl Drop for Shared<'_> {
    fn drop(&mut self) {
        let sharing = self.0.sharing.get() - 1;
        self.0.sharing.set(sharing);
        if sharing == 0 {
            self.0.left.notify_all();
        }
    }
}

impl Gate {
    /// Waits until no write runs alone or waits to be alone.
    pub(crate) async fn shared(&self) -> Shared<'_> {
        let turn = match self.alone.try_lock() {
            Some(turn) => turn,
            None => self.alone.lock().await,
        };
        self.sharing.set(self.sharing.get() + 1);
        drop(turn);
        Shared(self)
    }

    /// Waits until no other write runs. Other writes wait until the permit is dropped.
    pub(crate) async fn alone(&self) -> Permit {
        let turn = self.alone.lock().await;
        self.left.wait_until(|| self.sharing.get() == 0).await;
        turn
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::{Pin, pin};
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn poll<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn whole_sectors_side_by_side_parts_alone_and_in_turn() {
        let gate = Gate::default();
        let mut first = pin!(gate.shared());
        let mut second = pin!(gate.shared());
        let (Poll::Ready(one), Poll::Ready(two)) = (poll(first.as_mut()), poll(second.as_mut())) else {
            panic!("no task waits to be alone");
        };
        let mut alone = pin!(gate.alone());
        assert!(poll(alone.as_mut()).is_pending());
        let mut late = pin!(gate.shared());
        assert!(poll(late.as_mut()).is_pending(), "comes after who waits to be alone");
        drop(one);
        assert!(poll(alone.as_mut()).is_pending());
        drop(two);
        let Poll::Ready(permit) = poll(alone.as_mut()) else { panic!("alone now") };
        assert!(poll(late.as_mut()).is_pending());
        drop(permit);
        assert!(poll(late.as_mut()).is_ready());
    }
}
