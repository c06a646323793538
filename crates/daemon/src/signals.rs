//! The signals of the daemon: SIGTERM and SIGINT stop it, SIGHUP makes it read its configuration again.
//!
//! Owns the registration of these signals. Must not know what a signal leads to.

use serve::Failure;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// The signals that the daemon listens for.
pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    pub(crate) fn new() -> Result<Signals, Failure> {
        let listen = |kind| signal(kind).map_err(|e| Failure::because("cannot listen for signals", e));
        Ok(Signals {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hangup: listen(SignalKind::hangup())?,
        })
    }

    /// Waits for the next signal that stops the daemon.
    pub(crate) async fn stop(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
    /// Waits for the next signal: the name of one that stops the daemon, or a hangup.
    pub(crate) async fn next(&mut self) -> Received {
        loop {
            let hangup = tokio::select! {
                _ = self.terminate.recv() => return Received::Stop("SIGTERM"),
                _ = self.interrupt.recv() => return Received::Stop("SIGINT"),
                hangup = self.hangup.recv() => hangup,
            };
            if hangup.is_some() {
                return Received::Hangup;
            }
        }
    }
}

/// A signal that was received.
pub(crate) enum Received {
    /// SIGTERM or SIGINT, by its name.
    Stop(&'static str),
    /// SIGHUP.
    Hangup,
}
