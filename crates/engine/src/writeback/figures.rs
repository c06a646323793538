//! The figures of a volume's writeback.
//!
//! Owns plain structs whose units are in the names or the types. Must not know how the figures are shown.

use format::Sectors;

use crate::policy::writeback_rate::RateDebug;

/// The reason for the rate of writeback.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RateReason {
    /// The volume has no backing device or no cache: there is no writeback.
    Never,
    /// The volume has no dirty data.
    NothingDirty,
    /// `writeback_running` is 0.
    Stopped,
    /// The device is being detached: as fast as possible.
    Detaching,
    /// A drain waits until all data is written back: as fast as possible.
    Draining,
    /// The cache has no bucket to invalidate: as fast as possible.
    CacheStarved,
    /// The cache fills up: as fast as possible.
    Filling,
    /// `writeback_percent` is 0: as fast as possible.
    Unthrottled,
    /// All dirty data is younger than `writeback_delay`.
    Delayed,
    /// The set has been idle: as fast as possible.
    Idle,
    /// The controller sets the rate by its fragmentation term.
    Fragmented,
    /// The controller sets the rate.
    Controlled,
}

/// The figures of a volume's writeback.
#[derive(Clone, Debug)]
pub struct WritebackFigures {
    /// The reason for the rate.
    pub rate_reason: RateReason,
    /// The share of the time that writeback takes at most, because clients wait; 1 is all of the time.
    pub share: f64,
    /// The rate and the terms of the controller.
    pub rate: RateDebug,
    /// Sectors written back since the start.
    pub written: Sectors,
    /// The number of batches that failed in a row.
    pub failures: u32,
    /// The last failure.
    pub last_error: Option<String>,
}
