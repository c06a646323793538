//! The superblocks of backing devices.
//!
//! Owns their repair: the one flipped bit, or a new superblock from the slot of the device in the UUID table.

use std::collections::BTreeSet;

use format::superblock::{BackingFormat, DEFAULT_DATA_OFFSET, SUPERBLOCK_SECTOR};
use format::{
    BackingState, BackingSuper, CacheMode, Identity, Inode, RawSuperblock, Sector, Sectors, Uuid, identify,
};
use inspect::device::read_superblock_bytes;
use inspect::view::{Slot, SlotKind};
use inspect::{DeviceSuper, PieceKind, ReadAt, SetView, read_superblock};

use crate::bits::{self, Extent};
use crate::evidence::Evidence;
use crate::reason::Unrepairable;
use crate::work::{Doubt, Work};

const STRUCTURE: &str = "backing superblock";

/// Flips one wrong bit back, so that the superblock says to which set the device belongs.
pub(crate) fn correct(work: &mut Work<'_>) {
    let mut corrected = Vec::new();
    for (i, backing) in work.backings.iter().enumerate() {
        if read_superblock(backing).is_ok() {
            continue;
        }
        let Ok(mut bytes) = read_superblock_bytes(backing) else { continue };
        let size = backing.sectors();
        if bits::correct_bit(&mut bytes[..], Extent::SUPERBLOCK, u64::MAX).is_some()
            && RawSuperblock::from_prefix(&bytes[..]).is_ok_and(|raw| raw.check_backing(size, 0).is_ok())
        {
            corrected.push((i, bytes, backing.name().to_owned()));
        }
    }
    for (i, bytes, device) in corrected {
        if let Some(backing) = work.backings.get_mut(i) {
            backing.write(SUPERBLOCK_SECTOR, &bytes[..]);
            work.step(STRUCTURE, device, "one bit was flipped; it is flipped back".into(), Vec::new());
        }
    }
}

/// Rebuilds the superblocks that are still damaged.
pub(crate) fn rebuild(work: &mut Work<'_>) {
    for i in 0..work.backings.len() {
        let Some(backing) = work.backings.get(i) else { continue };
        match read_superblock(backing) {
            Ok(DeviceSuper::Backing(_)) => {}
            Ok(DeviceSuper::Cache(_)) => {
                let what = format!("{}: expected a backing device, found a cache device", backing.name());
                work.refuse(what);
            }
            Err(_) => match rebuilt(work, i) {
                Ok((superblock, action, uncertain)) => {
                    let device = backing.name().to_owned();
                    if let Some(backing) = work.backings.get_mut(i) {
                        backing.write(SUPERBLOCK_SECTOR, &superblock.encode());
                    }
                    work.step(STRUCTURE, device, action, uncertain);
                    work.doubts.push(Doubt::BackingSuperblock(i));
                }
                Err(why) => {
                    let what = format!("{}: the {STRUCTURE} is destroyed: {why}", backing.name());
                    work.refuse(what);
                }
            },
        }
    }
}

type NewSuperblock = (BackingSuper, String, Vec<String>);

fn rebuilt(work: &Work<'_>, i: usize) -> Result<NewSuperblock, Unrepairable> {
    let backing = work.backings.get(i).ok_or("there is no such device")?;
    let view = work.view().ok_or("the cache device, which knows the device, cannot be read")?;
    let bytes = read_superblock_bytes(backing)?;
    if identify(&bytes[..]) == Identity::Cache {
        return Err("it names itself a cache device".into());
    }
    let others = given(work);
    let slots: Vec<(Inode, &Slot)> = view
        .slots
        .iter()
        .filter(|(_, slot)| slot.kind == SlotKind::Cached && !others.contains(&slot.uuid))
        .map(|(inode, slot)| (*inode, slot))
        .collect();
    let (inode, slot, evidence) = choose(work, &view, backing, &slots)?;
    let live = view.live(inode);
    let dirty = live.filter(|(_, kind)| *kind == PieceKind::Dirty).count() > 0;
    let first = view.live(inode).map(|(piece, _)| piece.start).min();
    if first.is_some_and(|first| first < DEFAULT_DATA_OFFSET) {
        return Err(format!(
            "cached data begins before sector {DEFAULT_DATA_OFFSET}, so this is not its device"
        )
        .into());
    }
    let end = view.live(inode).map(|(piece, _)| piece.end()).max().unwrap_or_default();
    if end > Sector(backing.sectors().0) {
        let why = format!("cached data reaches to sector {end}, and the device has {}", backing.sectors());
        return Err(why.into());
    }
    let g = *view.geometry();
    let mode = if dirty { CacheMode::Writeback } else { CacheMode::Writethrough };
    let want = BackingFormat {
        uuid: slot.uuid,
        set_uuid: view.superblock.set_uuid(),
        device_sectors: backing.sectors(),
        block_sectors: Sectors(
            g.block_sectors.0.max(u64::from(backing.logical_block_bytes().unwrap_or(512) / 512)),
        ),
        bucket_sectors: g.bucket_sectors,
        data_offset: DEFAULT_DATA_OFFSET,
        cache_mode: mode,
        label: format::superblock::label_bytes(&slot.label).unwrap_or_default(),
    };
    let mut superblock = BackingSuper::format(&want)?;
    superblock.set_state(if dirty { BackingState::Dirty } else { BackingState::Clean });
    superblock.set_registration(slot.registrations.first().copied().flatten());
    let state = superblock.state().name();
    let action = format!("rebuilt from slot {inode} ({evidence}), state {state}, mode {}", mode.name());
    let mut uncertain = vec![
        format!(
            "the data is assumed to begin at sector {DEFAULT_DATA_OFFSET}, as on devices made without --data-offset"
        ),
        "the block size is that of the cache device; the cache mode is assumed".to_owned(),
    ];
    if evidence == ONLY_SLOT {
        uncertain.push("nothing on the device confirms that it is the device of this slot".to_owned());
    }
    Ok((superblock, action, uncertain))
}

/// Refuses the only slot that is left, without clean data that confirms it, if another device could have it or the slot is a guess.
fn refuse_guess(work: &Work<'_>, inode: Inode) -> Result<(), Unrepairable> {
    if work.backings.iter().filter(|b| read_superblock(*b).is_err()).count() > 1 {
        return Err(format!(
            "several devices have no superblock, and no clean data says which of them has slot {inode}"
        )
        .into());
    }
    let is_guess = |doubt: &Doubt| matches!(doubt, Doubt::Slots(same) if !same.contains(&inode));
    if work.doubts.iter().any(is_guess) {
        return Err(format!(
            "slot {inode} is rebuilt from an older copy, and no clean data confirms that this is its device"
        )
        .into());
    }
    Ok(())
}

/// The UUIDs of the backing devices whose superblock is valid.
fn given(work: &Work<'_>) -> BTreeSet<Uuid> {
    let each = work.backings.iter().filter_map(|b| match read_superblock(b) {
        Ok(DeviceSuper::Backing(superblock)) => Some(superblock.uuid()),
        _ => None,
    });
    each.collect()
}

/// Chooses the slot of a device by its clean data, which both devices have.
fn choose<'s>(
    work: &Work<'_>,
    view: &SetView,
    backing: &dyn ReadAt,
    slots: &[(Inode, &'s Slot)],
) -> Result<(Inode, &'s Slot, String), Unrepairable> {
    let mut fitting = Vec::new();
    for (inode, slot) in slots {
        let evidence = Evidence::of(view, &work.cache, backing, *inode);
        if evidence.fits() {
            fitting.push((*inode, *slot, evidence.same, evidence.differing));
        }
    }
    let confirmed: Vec<_> = fitting.iter().filter(|(_, _, same, _)| *same > 0).collect();
    match (&confirmed[..], &fitting[..]) {
        ([(inode, slot, same, differing)], _) => Ok((
            *inode,
            slot,
            format!("{same} of {} clean extents have the data of the device", same + differing),
        )),
        ([], [(inode, slot, _, _)]) => {
            refuse_guess(work, *inode)?;
            Ok((*inode, slot, ONLY_SLOT.into()))
        }
        ([], []) if slots.is_empty() => Err("the UUID table has no slot without its device".into()),
        ([], []) => {
            Err("no slot has clean data that is on this device, so it is not certain that it is of this set"
                .into())
        }
        _ => Err("several slots of the UUID table fit: give the other backing devices, too".into()),
    }
}

/// The evidence for a slot if there is no clean data.
const ONLY_SLOT: &str = "the only slot without its device";
