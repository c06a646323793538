//! Notifications of the service manager: ready, reloading, stopping, alive.
//!
//! Owns their order: nothing is sent before "ready", and "ready" follows every "reloading". Must not know when the daemon is
//! ready.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Limit of the wait for room in the socket of the service manager.
const SEND_WITHIN: Duration = Duration::from_secs(1);

static READY: AtomicBool = AtomicBool::new(false);

/// Sends one notification; does nothing without a service manager.
pub(crate) fn say(what: &str) {
    let Some(place) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let address = match place.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(&place),
    };
    if let (Ok(address), Ok(socket)) = (address, UnixDatagram::unbound()) {
        // A service manager that does not read must not delay the daemon for long.
        let _ = socket.set_write_timeout(Some(SEND_WITHIN));
        let _ = socket.send_to_addr(what.as_bytes(), &address);
    }
}

/// Tells the service manager that every device that can be served is served.
pub(crate) fn ready() {
    READY.store(true, Ordering::SeqCst);
    say("READY=1");
}

/// Announces a reload, and its end when it is dropped.
pub(crate) struct Reloading(bool);

impl Reloading {
    pub(crate) fn begin() -> Reloading {
        let ready = READY.load(Ordering::SeqCst);
        if ready {
            let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
            let micros = now.tv_sec.saturating_mul(1_000_000) + now.tv_nsec / 1000;
            say(&format!("RELOADING=1\nMONOTONIC_USEC={micros}"));
        }
        Reloading(ready)
    }
}

impl Drop for Reloading {
    fn drop(&mut self) {
        if self.0 && READY.load(Ordering::SeqCst) {
            say("READY=1");
        }
    }
}

/// Tells the service manager that the daemon stops.
pub(crate) fn stopping() {
    READY.store(false, Ordering::SeqCst);
    say("STOPPING=1");
}

/// Interval of watchdog notifications, if the service manager expects them: half of its time limit.
pub(crate) fn watchdog() -> Option<Duration> {
    if let Ok(pid) = std::env::var("WATCHDOG_PID")
        && pid.parse() != Ok(std::process::id())
    {
        return None;
    }
    every(&std::env::var("WATCHDOG_USEC").ok()?)
}

fn every(micros: &str) -> Option<Duration> {
    let micros: u64 = micros.parse().ok()?;
    (micros > 0).then(|| Duration::from_micros(micros / 2).max(Duration::from_millis(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn twice_as_often_as_it_is_waited_for() {
        assert_eq!(every("60000000"), Some(Duration::from_secs(30)));
        assert_eq!(every("100000"), Some(Duration::from_millis(50)));
        assert_eq!((every("0"), every("x"), every("-5")), (None, None, None));
    }
}
