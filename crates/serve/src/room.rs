//! The room of a set for flash-only volumes.
//!
//! Owns the rule: all flash-only volumes together may have the share `cutoff_writeback_sync` of the buckets. Their data is never
//! written back, and above this share every request of the other volumes bypasses the cache. Must not know whether the set is
//! served.

use std::fmt::Display;

use format::Sectors;
use serde::Serialize;

use crate::amount::human;
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
        let room = match left / 1024 {
            0 => "no room is left".to_owned(),
            kib => format!("{} are left, give at most {kib}k", human(left)),
        };
        Err(Failure::Failed(format!(
            "set {set}: a volume of {} does not fit: {room}; flash-only volumes may have {} % of the cache \
             (cutoff_writeback_sync), which are {}, and have {}",
            human(bytes),
            self.percent,
            human(self.most_bytes),
            human(self.taken_bytes)
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes were numbers of KiB, unlike everywhere else.
    #[test]
    fn sizes_are_as_elsewhere_and_the_largest_can_be_typed() {
        let room = Room { most_bytes: 91_648 << 10, taken_bytes: 0, percent: 70 };
        let said = room.check("s", 1000 << 20).expect_err("too large").to_string();
        let expected = "set s: a volume of 1000.0 MiB does not fit: 89.5 MiB are left, give at most 91648k;";
        assert!(said.starts_with(expected), "{said}");
        room.check("s", 91_648 << 10).expect("what it says fits");
        let full = Room { taken_bytes: 91_648 << 10, ..room };
        let said = full.check("s", 1 << 20).expect_err("no room").to_string();
        assert!(
            said.starts_with("set s: a volume of 1.0 MiB does not fit: no room is left; flash-only"),
            "{said}"
        );
    }
}
