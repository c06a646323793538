//! Figures about what the engine does.
//!
//! Owns the counters, averages and error counts of devices and sets, and the human-readable form of
//! sizes. Everything is 64 bits wide and saturates. (The kernel shifts in 32 bits, so its views lose
//! multiples of 65 536 events per tick.) Must not know who reads them: metrics, control files and the
//! command line all take the same values.

pub mod counters;
pub mod errors;
pub mod latency;
pub mod time;
pub mod views;
pub mod work;

pub use crate::human::Human;
pub use counters::{OpCount, RequestCounters, SetCounters};
pub use errors::{BackingErrors, CacheErrors, ErrorVerdict};
pub use io::{DeviceFigures, Histogram, OpFigures};
pub use latency::{Latencies, OpKind, Outcome, RequestStats, Tallies, Tally};
pub use time::{TimeStats, TimeUnit};
pub use views::{CacheStats, ReasonCount, View, ViewValues};
pub(crate) use work::Sliced;
pub use work::{Work, WorkStats};
