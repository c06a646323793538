//! The effects of the hint that a request is for metadata of a file system, in virtual time.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use bench::virt::{HDD, SSD, SlowRig, run, slow_rig};
use engine::policy::replacement::InPlaceOfLru;
use format::{Sector, Sectors};
use io::{Handle, ReadFlags, Rng};

const MIB: u64 = 2048;
const BLOCK: Sectors = Sectors(8);
const CACHE: Sectors = Sectors(64 * MIB);
const DISK: Sectors = Sectors(1024 * MIB);
/// One block of metadata in front of so many of data.
const GROUP_BLOCKS: u64 = 512;

async fn rig(rt: &Handle, settings: &[(&str, &str)], of_set: &[(&str, &str)]) -> SlowRig {
    let r = slow_rig(rt, (CACHE, SSD), (DISK, HDD), |_| 0).await;
    for (name, value) in settings {
        r.volume.set(name, value).await.unwrap();
    }
    for name in ["congested_read_threshold_us", "congested_write_threshold_us"] {
        r.set.set(name, "0").await.unwrap();
    }
    for (name, value) in of_set {
        r.set.set(name, value).await.unwrap();
    }
    r
}

async fn read(rt: &Handle, r: &SlowRig, at: Sector, sectors: Sectors, meta: bool) {
    let buffer = rt.pool().take(sectors.bytes() as usize);
    r.volume.read_as(at, sectors, buffer, 0, ReadFlags { meta }).await.1.unwrap();
}

/// Reads data, no two blocks twice in a row, as often as it fills the cache so many times.
async fn data(rt: &Handle, r: &SlowRig, rng: &mut Rng, times_percent: u64) {
    for _ in 0..CACHE.0 / BLOCK.0 * times_percent / 100 {
        let group = rng.below(DISK.0 / BLOCK.0 / GROUP_BLOCKS);
        let block = group * GROUP_BLOCKS + 1 + rng.below(GROUP_BLOCKS - 1);
        read(rt, r, Sector(block * BLOCK.0), BLOCK, false).await;
    }
}

/// Reads all metadata; returns how many blocks of a hundred came from the disk.
async fn metadata(rt: &Handle, r: &SlowRig, meta: bool) -> u64 {
    let (groups, before) = (DISK.0 / BLOCK.0 / GROUP_BLOCKS, r.backing.asked().reads);
    for group in 0..groups {
        read(rt, r, Sector(group * GROUP_BLOCKS * BLOCK.0), BLOCK, meta).await;
    }
    (r.backing.asked().reads - before) * 100 / groups
}

/// Misses of metadata, in percent, after data that would fill the cache so often.
async fn misses(rt: &Handle, replacement: &str, meta: bool, times_percent: u64) -> u64 {
    let settings = [("sequential_cutoff", "0"), ("writeback_bridge", "off")];
    let r = rig(rt, &settings, &[("replacement", replacement)]).await;
    let mut rng = Rng::new(9);
    data(rt, &r, &mut rng, 150).await;
    metadata(rt, &r, meta).await;
    data(rt, &r, &mut rng, times_percent).await;
    let missed = metadata(rt, &r, meta).await;
    r.set.abandon();
    missed
}

/// Metadata outlives data that was read after it, but not for ever.
#[test]
fn metadata_is_kept_longer() {
    for replacement in InPlaceOfLru::names() {
        run(move |rt| async move {
            let mut found = [0; 3];
            for (found, (meta, times_percent)) in
                found.iter_mut().zip([(false, 100), (true, 100), (true, 1200)])
            {
                *found = misses(&rt, replacement, meta, times_percent).await;
            }
            println!("{replacement}: {found:?} % of the metadata is missing");
            assert!(found[0] > 90 && found[1] < 10, "{replacement}: {found:?}");
            assert!(found[2] > 90, "{replacement}: {found:?}");
        });
    }
}

/// Reads four MiB in order, twice; returns the requests that the second time took from the disk.
async fn stream(rt: &Handle, r: &SlowRig, from: Sector, meta: bool) -> u64 {
    let mut before = 0;
    for _ in 0..2 {
        before = r.backing.asked().reads;
        for at in (0..4 * MIB).step_by(128) {
            read(rt, r, from + Sectors(at), Sectors(128), meta).await;
        }
        // What was read elsewhere ends the stream.
        read(rt, r, Sector(0), BLOCK, false).await;
    }
    r.backing.asked().reads - before
}

/// A stream of metadata goes into a full cache, one of data does not; by the kernel's rules neither does.
#[test]
fn metadata_is_admitted_in_streams() {
    run(|rt| async move {
        for admission in ["cost", "kernel"] {
            let settings = [("sequential_cutoff", "0"), ("admission", admission)];
            let r = rig(&rt, &settings, &[]).await;
            data(&rt, &r, &mut Rng::new(8), 200).await;
            r.volume.set("sequential_cutoff", "1M").await.unwrap();
            let plain = stream(&rt, &r, Sector(100 * MIB), false).await;
            let meta = stream(&rt, &r, Sector(200 * MIB), true).await;
            println!("{admission}: {plain} requests of a stream of data are missing, {meta} of metadata");
            assert!(
                plain > 40 && (meta > 40) == (admission == "kernel") && (meta < 10) == (admission == "cost"),
                "{admission}: {plain}, {meta}"
            );
            r.set.abandon();
        }
    });
}
