//! The room of a served set for flash-only volumes.
//!
//! Owns nothing: the rule is in `serve::room`. Must not know the client.

use engine::CacheSet;
use format::Sectors;
use serve::room::Room;

/// The room of the set now.
pub(super) fn room(set: &CacheSet) -> Room {
    let status = set.status();
    let flash_only = set.volumes().into_iter().filter(|v| v.is_flash_only());
    let taken = Sectors(flash_only.map(|v| v.size().0).sum());
    Room::new(status.nbuckets, status.bucket_sectors, set.tunables().cutoff_writeback_sync, taken)
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
            before.check(rig.set.uuid(), before.most_bytes).expect("it fits exactly");
            let said =
                before.check(rig.set.uuid(), before.most_bytes + 512).expect_err("too large").to_string();
            assert!(said.contains("70 % of the cache") && said.contains("does not fit"), "{said}");
            let made = rig.set.create_volume(format::Uuid([3; 16]), Sectors(64), "").await;
            made.expect("a volume");
            assert_eq!(room(&rig.set), Room { taken_bytes: Sectors(64).bytes(), ..before });
        });
    }
}
