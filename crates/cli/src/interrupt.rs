//! Signals in commands: the first signal stops the command in order, the second one ends the process.
//!
//! Owns the signals of the process. Must not know the command.

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use blockio::Signals;

use crate::failure::{self, Failure};
use crate::out;

/// Tells work that waits for nothing whether SIGINT or SIGTERM came. A second signal ends the process at once.
pub(crate) struct Interrupt {
    signals: Signals,
    first: Option<blockio::Signal>,
}

impl Interrupt {
    pub(crate) fn new() -> Result<Interrupt, Failure> {
        exit_at_second_signal(Duration::ZERO)?;
        Interrupt::without_exit()
    }

    /// An [`Interrupt`] that does not end the process at a second signal, for work that has to clean up after itself.
    pub(crate) fn without_exit() -> Result<Interrupt, Failure> {
        Ok(Interrupt { signals: signals()?, first: None })
    }

    pub(crate) fn came(&mut self) -> bool {
        self.first().is_some()
    }

    /// The first signal, if it came.
    pub(crate) fn first(&mut self) -> Option<blockio::Signal> {
        if self.first.is_none() {
            let next = pin!(self.signals.next());
            if let Poll::Ready(signal) = next.poll(&mut Context::from_waker(Waker::noop())) {
                self.first = Some(signal);
            }
        }
        self.first
    }
}

/// Registers for the signals, and returns them from now on.
pub(crate) fn signals() -> Result<Signals, Failure> {
    Signals::new().map_err(|e| Failure::because("cannot listen for signals", e))
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// The exit code that a shell reports for a program that this signal ended.
pub(crate) fn exit_code(signal: blockio::Signal) -> u8 {
    match signal {
        blockio::Signal::Interrupt => failure::INTERRUPTED,
        blockio::Signal::Terminate => failure::TERMINATED,
        blockio::Signal::HandOver => failure::HANDED_OVER,
    }
}

/// Ends the process after a second signal, even if its other threads hang.
///
/// The process has `grace` to end by itself after the second signal; a third signal ends it at once.
pub(crate) fn exit_at_second_signal(grace: Duration) -> Result<(), Failure> {
    let mut signals = signals()?;
    let watch = move || {
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        let mut wait = |deadline: Option<Instant>| {
            let mut next = pin!(signals.next());
            loop {
                match (next.as_mut().poll(&mut Context::from_waker(&waker)), deadline) {
                    (Poll::Ready(signal), _) => return Some(signal),
                    (Poll::Pending, None) => std::thread::park(),
                    (Poll::Pending, Some(at)) => match at.checked_duration_since(Instant::now()) {
                        Some(left) => std::thread::park_timeout(left),
                        None => return None,
                    },
                }
            }
        };
        wait(None);
        if let Some(second) = wait(None) {
            wait(Some(Instant::now() + grace));
            out::warn("ended at once by a second signal; flushed data is safe");
            std::process::exit(exit_code(second).into());
        }
    };
    let spawned = std::thread::Builder::new().name("ubcache-exit".into()).spawn(watch);
    spawned.map(drop).map_err(|e| Failure::because("cannot start a thread", e))
}
