//! The clocks of the system, as the runtime and the reactor read them.
//!
//! Owns the calls of clock_gettime(2). Must not know the use of the time.

use ::io::{Clock, Nanos};
use rustix::time::{ClockId, clock_gettime};

/// The system's clocks.
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Nanos {
        let t = clock_gettime(ClockId::Monotonic);
        // The monotonic clock counts from boot, so neither part is negative.
        Nanos((t.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(t.tv_nsec as u64))
    }

    fn wall_seconds(&self) -> u64 {
        u64::try_from(clock_gettime(ClockId::Realtime).tv_sec).unwrap_or(0)
    }
}
