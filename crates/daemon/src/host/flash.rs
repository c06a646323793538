//! The room of a set for flash-only volumes.
//!
//! Owns the rule: all flash-only volumes together may have the share `cutoff_writeback_sync` of the buckets. Their data is never
//! written back, and above this share every request of the other volumes bypasses the cache. Must not know the client.

use engine::CacheSet;
use format::SECTOR_BYTES;
use serve::Failure;

use crate::order::Room;

/// The room of the set now.
pub(super) fn room(set: &CacheSet) -> Room {
    let status = set.status();
    let buckets = u64::from(status.nbuckets) * u64::from(set.tunables().cutoff_writeback_sync) / 100;
    let flash_only = set.volumes().into_iter().filter(|v| v.is_flash_only());
    let taken: u64 = flash_only.map(|v| v.size().0).sum();
    Room {
        most_bytes: buckets.saturating_mul(status.bucket_sectors.bytes()),
        taken_bytes: taken.saturating_mul(SECTOR_BYTES),
    }
}

/// Bytes as a number of KiB; the buckets of a set are at least that large.
fn kib(bytes: u64) -> String {
    format!("{} KiB", bytes.div_ceil(1024))
}

impl Room {
    /// Refuses a volume that does not fit.
    pub(super) fn check(self, set: &CacheSet, bytes: u64) -> Result<(), Failure> {
        let left = self.most_bytes.saturating_sub(self.taken_bytes);
        if bytes <= left {
            return Ok(());
        }
        Err(Failure::Failed(format!(
            "set {}: a volume of {} does not fit: {} are left; flash-only volumes may have {} % of the cache \
             (cutoff_writeback_sync), which are {}, and have {}",
            set.uuid(),
            kib(bytes),
            kib(left),
            set.tunables().cutoff_writeback_sync,
            kib(self.most_bytes),
            kib(self.taken_bytes)
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A volume of any size could be made, whose writes fail when the cache is full.
    #[test]
    fn a_volume_that_does_not_fit_is_refused_with_figures() {
        rig::Shape::default().run(async |rig| {
            let before = room(&rig.set);
            assert_eq!(before.taken_bytes, 0);
            before.check(&rig.set, before.most_bytes).expect("it fits exactly");
            let said = before.check(&rig.set, before.most_bytes + 512).expect_err("too large").to_string();
            assert!(said.contains("70 % of the cache") && said.contains("does not fit"), "{said}");
            let made = rig.set.create_volume(format::Uuid([3; 16]), format::Sectors(64), "").await;
            made.expect("a volume");
            assert_eq!(room(&rig.set), Room { taken_bytes: 64 * SECTOR_BYTES, ..before });
        });
    }
}
