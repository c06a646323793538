//! Ends the wait of a driver's thread from another thread.
//!
//! Owns the eventfd on which a sleeping driver waits. Invariant: another thread first publishes work for
//! the driver, then calls [`Wake::notify`]; the driver first announces its sleep, then checks for
//! work. So either the driver sees the work or the other thread sees the announcement.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, eventfd};

pub(crate) struct Wake {
    fd: OwnedFd,
    sleeping: AtomicBool,
}

impl Wake {
    /// `nonblocking` is true for a driver that polls the descriptor and false for one that reads it through the ring.
    pub(crate) fn new(nonblocking: bool) -> io::Result<Wake> {
        let mut flags = EventfdFlags::CLOEXEC;
        flags.set(EventfdFlags::NONBLOCK, nonblocking);
        Ok(Wake { fd: eventfd(0, flags)?, sleeping: AtomicBool::new(false) })
    }

    pub(crate) fn raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Announces the driver's sleep. The driver calls it before its last check for work.
    pub(crate) fn announce_sleep(&self) {
        self.sleeping.store(true, Ordering::SeqCst);
    }

    /// Announces that the driver is awake and checks for work itself.
    pub(crate) fn awake(&self) {
        self.sleeping.store(false, Ordering::SeqCst);
    }

    /// Announces work, and wakes the driver if it sleeps.
    pub(crate) fn notify(&self) {
        if self.sleeping.swap(false, Ordering::SeqCst) {
            // The counter cannot overflow: it is written once for each sleep.
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        }
    }
}

impl ::io::Unpark for Wake {
    fn unpark(&self) {
        self.notify();
    }
}
