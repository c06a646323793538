//! The figures of a volume's writeback.
//!
//! Owns the plain structs. Units are in the names or the types. Must not know how anything is shown.

use format::Sectors;

use crate::policy::writeback_rate::RateDebug;

/// Why writeback goes at the rate it does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RateReason {
    /// The volume lives in the cache alone, or has no cache.
    Never,
    /// Nothing is dirty.
    NothingDirty,
    /// `writeback_running` is 0.
    Stopped,
    /// The device is being detached: as fast as possible.
    Detaching,
    /// Somebody waits for everything to be written back: as fast as possible.
    Draining,
    /// The cache has no bucket left to take: as fast as possible.
    CacheStarved,
    /// The cache fills up: as fast as possible.
    Filling,
    /// `writeback_percent` is 0: as fast as possible.
    Unthrottled,
    /// Dirty data is younger than `writeback_delay`.
    Delayed,
    /// The set had no requests for a while: as fast as possible.
    Idle,
    /// By the controller, and its fragmentation term decides.
    Fragmented,
    /// By the controller.
    Controlled,
}

/// A volume's writeback.
#[derive(Clone, Debug)]
pub struct WritebackFigures {
    /// Why it goes at its rate.
    pub rate_reason: RateReason,
    /// The share of the time that it takes at most, because clients wait; 1 is all.
    pub share: f64,
    /// The rate and its terms.
    pub rate: RateDebug,
    /// Sectors written back since the start.
    pub written: Sectors,
    /// Batches that failed in a row.
    pub failures: u32,
    /// What the last failure was.
    pub last_error: Option<String>,
}
