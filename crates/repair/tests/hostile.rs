//! No contents of the devices make a plan or a salvage panic or loop, or make a salvage call a wrong byte certain.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "test code")]

mod common;

use common::salvaged::{disks, salvaged, wrong};
use common::{Set, structures};
use format::Uuid;
use inspect::SliceSource;
use repair::plan;

#[test]
fn damage_at_many_places_ends_in_a_report() {
    for dir in ["08-synthetic", "04-writeback-killed", "09-small-buckets-killed"] {
        let set = Set::new(dir);
        let (all, disks) = (structures(&set), disks(&set));
        let mut x = 0x2545_F491_4F6C_DD1D_u64;
        let mut random = |below: usize| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            (x >> 11) as usize % below
        };
        let mut certain = 0;
        for _ in 0..40 {
            let (mut cache, mut backing) = (set.cache.clone(), set.backing.clone());
            // A destroyed newest entry cannot be told from the end of the journal.
            let mut is_end_intact = true;
            for _ in 0..1 + random(6) {
                let structure = &all[random(all.len())];
                is_end_intact &= structure.name != "newest journal entry";
                let image = if structure.on_cache { &mut cache } else { &mut backing };
                let at = structure.range.start + random(structure.range.len().min(600));
                let len = 1 + random(9);
                for byte in &mut image[at..at + len] {
                    *byte = if random(3) == 0 { 0xff } else { random(256) as u8 };
                }
            }
            let (c, b) = (SliceSource::new("cache", &cache), SliceSource::new("backing", &backing));
            let plan = plan(&c, &[&b], Uuid([3; 16]));
            let report = plan.report();
            assert!(plan.is_complete() || report.errors_after > 0 || !report.refused.is_empty(), "{report}");
            for (disk, good) in &disks {
                let Ok(got) = salvaged(&c, &b, *disk, is_end_intact) else { continue };
                certain += got.summary.certain.sectors;
                let wrong = wrong(&got, good);
                assert!(wrong.is_empty(), "{:?} of {disk:?}\n{}", &wrong[..5.min(wrong.len())], got.summary);
            }
        }
        assert!(certain > 0, "{dir}: nothing was ever certain");
    }
}
