//! The clock of the host, for the times that clients see.
//!
//! Owns the reading of the clock. An operator can set it, so nothing measures a duration with it. Must not know who asks.

use std::time::{SystemTime, UNIX_EPOCH};

/// The time in milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
