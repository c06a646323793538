//! Injects the faults of a boot into the devices.
//!
//! Owns the translation of a plan's faults, and the choice of the blocks that are damaged. Must not know when a boot ends.

use format::{Sector, Sectors};

use crate::client::DamagedSectors;
use crate::damaged_data::{blocks_with_checksums, damaged_contents};
use crate::disk::{Fault, Kind, Matching, SimDisk};
use crate::hardware::Hardware;
use crate::plan::{DataDamage, Faults};
use crate::stamp::{Content, SECTOR, decode};

/// Injects the faults of a boot, except damage, which comes later.
pub(crate) fn inject(hardware: &Hardware, faults: &Faults) {
    hardware.cache.set_errors(faults.cache_one_in);
    hardware.backings.iter().for_each(|b| b.set_errors(faults.backing_one_in));
    let disk = |number: usize| hardware.disks().nth(number);
    if let Some((o, disk)) = faults.outage.as_ref().and_then(|o| Some((o, disk(o.device)?))) {
        disk.fail_between(o.after, o.requests);
    }
    if let Some((l, disk)) = faults.lossy_flush.as_ref().and_then(|l| Some((l, disk(l.device)?))) {
        disk.lose_in_flush(l.after, l.retained);
    }
    if let Some((p, disk)) = faults.pull.as_ref().and_then(|p| Some((p, disk(p.device)?))) {
        disk.pull_after(p.after, p.retained);
    }
    for (number, disk) in hardware.disks().enumerate() {
        disk.set_faults(of_requests(hardware, faults, number));
    }
}

/// The faults of single kinds of requests to the device with this number.
fn of_requests(hardware: &Hardware, faults: &Faults, number: usize) -> Vec<Fault> {
    let mut all = Vec::new();
    let unreadable = match number {
        0 => faults.unreadable,
        1 => faults.unreadable_backing,
        _ => None,
    };
    if let Some((at, sectors)) = unreadable {
        let matching = Matching { kind: Kind::Read, range: at..at + sectors };
        all.push(Fault { matching, skip: 0, count: u32::MAX });
    }
    let layout = number.checked_sub(1).and_then(|i| hardware.layout.backings.get(i));
    if let Some((w, layout)) = faults.failed_writes.as_ref().filter(|w| w.device == number).zip(layout) {
        let matching = Matching { kind: Kind::Write, range: layout.data_offset..u64::MAX };
        all.push(Fault { matching, skip: w.after, count: w.count });
    }
    all
}

/// Schedules the damage of a boot. `sectors` gets the sectors of volumes that are damaged.
pub(crate) fn damage_later(hardware: &Hardware, damage: &DataDamage, sectors: &DamagedSectors) {
    let (cache, layout, one_in) = (hardware.cache.clone(), hardware.layout.clone(), damage.one_in.max(1));
    let (sectors, world) = (sectors.clone(), hardware.world.clone());
    let at = world.effects() + damage.after;
    hardware.world.at_effect(at, move || {
        let image = cache.image();
        let blocks = blocks_with_checksums(&cache.medium(), &layout);
        world.random(|rng| {
            for &at in &blocks {
                if !rng.chance(1, one_in) {
                    continue;
                }
                let bytes = image.read_vec(Sector(at), Sectors(layout.block_sectors));
                let bad = damaged_contents(&image, &blocks, (at, &bytes), rng);
                damage_block(&cache, at, (&bytes, &bad), &sectors);
            }
        });
    });
}

/// Damages a block if clients wrote all of it. The oracle must know which sectors of which volume the damage hits.
fn damage_block(cache: &SimDisk, at: u64, (bytes, bad): (&[u8], &[u8]), sectors: &DamagedSectors) {
    let owner = |sector: &[u8]| match decode(sector) {
        Content::Data { volume, sector, .. } => Some((volume, sector)),
        _ => None,
    };
    let owners: Option<Vec<(u8, u64)>> = bytes.chunks_exact(SECTOR).map(owner).collect();
    if let Some(owners) = owners.filter(|_| bytes != bad) {
        sectors.borrow_mut().extend(owners);
        cache.damage(Sector(at), bad);
    }
}
