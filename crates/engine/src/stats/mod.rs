//! Figures about the work of the engine.
//!
//! Owns the counters, averages and error counts of devices and sets. All values
//! have 64 bits and saturate. (The kernel shifts in 32 bits, so its views lose multiples of 65 536 events per tick.)
//! Must not know the readers: metrics, control files and the command line all use the same values.

pub mod counters;
pub mod errors;
pub mod latency;
pub mod scrub;
pub mod time;
pub mod views;
pub mod work;

pub use crate::human::Human;
pub use counters::{OpCount, RequestCounters, SetCounters};
pub use errors::{BackingErrors, CacheErrors, ErrorVerdict};
pub use io::{DeviceFigures, Histogram, OpFigures};
pub use latency::{Latencies, OpKind, Outcome, RequestStats, Tallies, Tally};
pub use scrub::ScrubReport;
pub use time::{TimeStats, TimeUnit};
pub use views::{CacheStats, ReasonCount, View, ViewValues};
pub(crate) use work::Sliced;
pub use work::{Work, WorkStats};
