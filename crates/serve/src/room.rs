//! The room of a set for flash-only volumes.
//!
//! Owns the rule: all flash-only volumes together may have the share `cutoff_writeback_sync` of the buckets. Their data is never
//! written back, and above this share every request of the other volumes bypasses the cache. Must not know whether the set is
//! served.

use std::fmt::Display;

use format::Sectors;
use serde::Serialize;

use crate::failure::Failure;

/// The room of a set for flash-only volumes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Room {
    /// What all flash-only volumes may have together.
    pub most_bytes: u64,
    /// What the present ones have.
    pub taken_bytes: u64,
    /// The share of the cache that they may have.
    #[serde(skip)]
    pub percent: u8,
}

/// Bytes as a number of KiB; the buckets of a set are at least that large.
fn kib(bytes: u64) -> String {
    format!("{} KiB", bytes.div_ceil(1024))
}

impl Room {
    /// The room of a set with this many buckets of this size, of which flash-only volumes may have a share.
    pub fn new(buckets: u32, bucket: Sectors, percent: u8, taken: Sectors) -> Room {
        let most = u64::from(buckets) * u64::from(percent) / 100;
        Room { most_bytes: most.saturating_mul(bucket.bytes()), taken_bytes: taken.bytes(), percent }
    }

    /// Refuses a volume that does not fit.
    ///
    /// # Errors
    /// If fewer bytes are left.
    pub fn check(self, set: impl Display, bytes: u64) -> Result<(), Failure> {
        let left = self.most_bytes.saturating_sub(self.taken_bytes);
        if bytes <= left {
            return Ok(());
        }
        Err(Failure::Failed(format!(
            "set {set}: a volume of {} does not fit: {} are left; flash-only volumes may have {} % of the cache \
             (cutoff_writeback_sync), which are {}, and have {}",
            kib(bytes),
            kib(left),
            self.percent,
            kib(self.most_bytes),
            kib(self.taken_bytes)
        )))
    }
}
