//! Attaching and detaching backing devices, and creating and deleting flash-only volumes.
//!
//! Owns the order of the steps (format section 12.6). An attach makes the UUID table durable before the backing superblock
//! names the set. A detach writes all dirty data to the backing device and flushes it, then removes the set from the
//! superblock, then makes the slot invalid. The old slot of a device that was served without this cache becomes invalid
//! before the device gets a new slot, so old data can never come back.

use std::rc::Rc;

use format::{BackingState, BackingSuper, Inode, RegistrationNr, Sectors, Uuid, UuidEntry};
use io::Disk;

use super::Core;
use crate::canary::{Bug, Mark, bug, mark};
use crate::device::BackingDevice;
use crate::error::EngineError;
use crate::events::SetEvent;
use crate::index::{Durability, MAX_POSITION, NotLoaded};
use crate::refusal::{DeviceRefusal, Refusal};
use crate::volume::{Blocks, Volume};

/// The slot of a device in the UUID table.
struct UuidSlot {
    inode: Inode,
    /// The number of this registration, if the slot is new. The slot has it, and the superblock gets it together with
    /// the UUID of the set.
    new: Option<RegistrationNr>,
}

/// Registers a backing device; see [`CacheSet::register`](super::CacheSet::register).
pub(super) async fn register(core: &Rc<Core>, disk: Disk) -> Result<Rc<Volume>, EngineError> {
    let theirs = core.clone();
    let registered = async move {
        let backing = BackingDevice::open(disk).await?;
        attach(&theirs, backing).await
    };
    core.cache.tasks.to_the_end(registered).await
}

pub(crate) async fn attach(core: &Rc<Core>, backing: Rc<BackingDevice>) -> Result<Rc<Volume>, EngineError> {
    let (slot, _attaching) = claim_slot(core, &backing).await?;
    let inode = slot.inode;
    refuse_dirty_outside(core, inode, &backing).await?;
    if slot.new.is_none() {
        drop_copies_behind_end(core, inode, &backing).await?;
        number_registration(core, inode, &backing).await?;
    }
    if core.cache.index.tree().dirty_sectors(inode) > Sectors::ZERO {
        mark(Mark::KnownDirty);
        if backing.ensure_dirty(|| core.cache.device.check()).await? {
            mark(Mark::DirtyKeysOfClean);
            let device = backing.disk().info().name.to_string();
            core.cache.device.emit(SetEvent::State { device, state: "dirty" });
        }
    } else if backing.state() == BackingState::Dirty {
        mark(Mark::DirtyWithoutKeys);
    }
    let volume = Volume::cached(&core.cache, inode, backing.clone());
    core.cache.backings.add(inode, backing);
    core.add(volume.clone());
    crate::writeback::start(&volume, &core.cache);
    Ok(volume)
}

/// Finds or makes the slot of a device, and makes the superblock of the device name the set. No other caller can
/// attach the device until the guard is dropped. The lock of the UUID table is not held during the write to the
/// device, because a device that hangs must not block others.
async fn claim_slot(
    core: &Rc<Core>,
    backing: &Rc<BackingDevice>,
) -> Result<(UuidSlot, Attaching), EngineError> {
    let config = core.cache.uuids.lock().await;
    core.cache.device.check().inspect_err(|_| mark(Mark::RefusedByFailedSet))?;
    refuse_misfits(core, backing)?;
    let attaching = Attaching::begin(core, backing.uuid());
    let slot = slot_for(core, backing).await?;
    drop(config);
    if let Some(number) = slot.new {
        let set_uuid = core.uuid();
        backing
            .update(|sb| {
                sb.set_set_uuid(set_uuid);
                sb.set_state(BackingState::Clean);
                register_as(sb, number);
            })
            .await?;
    }
    Ok((slot, attaching))
}

/// Gives a registration of a known device its number, first in the slot and then in the superblock of the device.
/// An older copy of the cache device does not have this number. (The first registration gets its number from
/// [`slot_for`].)
async fn number_registration(
    core: &Rc<Core>,
    inode: Inode,
    backing: &Rc<BackingDevice>,
) -> Result<(), EngineError> {
    let config = core.cache.uuids.lock().await;
    // Both numbers are valid until the superblock has the new one.
    let (before, number) = (backing.registration(), RegistrationNr::from_random(core.cache.rt.random()));
    let renewed = core.cache.uuids.update_if_room(|u| u[inode.0 as usize].register(number, before)).await?;
    drop(config);
    if !renewed {
        // A full cache must start, because only its volumes can make it empty. The old numbers stay valid.
        return Ok(());
    }
    // The device is served in spite of the error: only the later restore of an older copy would not be detected.
    if let Err(e) = backing.update(|sb| register_as(sb, number)).await {
        core.cache.device.emit(SetEvent::DeviceError { error: e });
    }
    Ok(())
}

/// Records a registration in the superblock of the device: its number, and the size of the data area.
fn register_as(superblock: &mut BackingSuper, number: RegistrationNr) {
    superblock.set_registration(Some(number));
    superblock.set_registered_sectors(superblock.data_sectors());
}

/// Whether the cache device is older than the last registration of this backing device, because one of them was
/// restored from an older copy.
fn is_rolled_back(core: &Rc<Core>, backing: &BackingDevice) -> bool {
    let of_another_set = backing.set_uuid() != core.uuid();
    // Without a slot there is no number to compare. A slot without numbers was made by a kernel, which does not
    // number registrations. A device without a number does not match a slot with numbers, unless the slot also
    // lists "no number" as the one before.
    let unknown = core.cache.uuids.slot_of(backing.uuid()).is_some_and(|inode| {
        let numbers = core.cache.uuids.entries()[inode.0 as usize].registrations();
        numbers.iter().any(Option::is_some) && !numbers.contains(&backing.registration())
    });
    unknown && !of_another_set && !bug(Bug::OlderCacheBelieved)
}

/// The error for a device whose dirty data is in a newer state of the cache device.
fn refuse_rolled_back<T>(core: &Rc<Core>, backing: &BackingDevice) -> Result<T, EngineError> {
    let cache = core.cache.device.place().device.clone();
    refuse(backing, DeviceRefusal::DirtyInOtherState { set: core.uuid(), cache })
}

/// Refuses a device that does not fit the set according to the superblocks and to the devices that are attached.
fn refuse_misfits(core: &Rc<Core>, backing: &BackingDevice) -> Result<(), EngineError> {
    let state = backing.state();
    if core.volumes().iter().any(|v| v.backing_uuid() == Some(backing.uuid())) {
        mark(Mark::RefusedTwice);
        let (device, set) = (backing.uuid(), core.uuid());
        return refuse(backing, DeviceRefusal::Attached { device, set });
    }
    if core.attaching.borrow().contains(&backing.uuid()) {
        let (device, set) = (backing.uuid(), core.uuid());
        return refuse(backing, DeviceRefusal::BeingAttached { device, set });
    }
    // The slot of a flash-only volume has its data. A device with its UUID would read and change this data.
    let of_volume = core.cache.uuids.slot_of(backing.uuid());
    if of_volume.is_some_and(|inode| core.cache.uuids.entries()[inode.0 as usize].is_flash_only()) {
        let (device, set) = (backing.uuid(), core.uuid());
        return refuse(backing, DeviceRefusal::UuidOfVolume { device, set });
    }
    if backing.set_uuid() != core.uuid() && matches!(state, BackingState::Clean | BackingState::Dirty) {
        mark(Mark::RefusedOtherSet);
        let (found, expected) = (backing.set_uuid(), core.uuid());
        return refuse(backing, DeviceRefusal::InOtherSet { state, found, expected });
    }
    if backing.block_sectors() < core.cache.geometry.block_sectors {
        mark(Mark::RefusedBlockSize);
        let (least, found) = (core.cache.geometry.block_sectors, backing.block_sectors());
        return refuse(backing, DeviceRefusal::BlockSize { least, found });
    }
    if (backing.data_offset() + backing.data_sectors()) > MAX_POSITION {
        return refuse(backing, DeviceRefusal::TooLarge { most: MAX_POSITION });
    }
    Ok(())
}

/// The slot of this device: its present slot or a new one. The caller holds the lock of the UUID table.
async fn slot_for(core: &Rc<Core>, backing: &BackingDevice) -> Result<UuidSlot, EngineError> {
    let state = backing.state();
    let now = core.cache.rt.wall_seconds() as u32;
    let rolled_back = is_rolled_back(core, backing);
    if rolled_back && state == BackingState::Dirty {
        return refuse_rolled_back(core, backing);
    }
    if let Some(inode) = core.cache.uuids.slot_of(backing.uuid()) {
        let usable = !rolled_back && !matches!(state, BackingState::None | BackingState::Stale);
        if usable || bug(Bug::StaleSlotReused) {
            mark(Mark::KnownSlot);
            return Ok(UuidSlot { inode, new: None });
        }
        // The device was served without this state of the cache, so the cached data of it is invalid.
        mark(Mark::SlotOfStale);
        core.cache.index.invalidate_slot(inode);
        core.cache.uuids.update(|u| u[inode.0 as usize].invalidate(now)).await?;
        core.cache.alloc.walks().request();
    }
    if state == BackingState::Dirty {
        mark(Mark::RefusedUnknownDirty);
        let (set, device) = (core.uuid(), backing.uuid());
        return refuse(backing, DeviceRefusal::DirtyInOtherCache { set, device });
    }
    mark(Mark::NewSlot);
    let Some(inode) = free_slot_after_walk(core).await? else {
        mark(Mark::RefusedNoSlot);
        let slots = core.cache.uuids.entries().len();
        return refuse(backing, DeviceRefusal::NoSlot { slots });
    };
    let number = RegistrationNr::from_random(core.cache.rt.random());
    let mut entry = UuidEntry::backing(backing.uuid(), backing.label_bytes(), now);
    // The old number belongs to another set or to an invalid slot.
    entry.register(number, None);
    core.cache.uuids.update(|u| u[inode.0 as usize] = entry).await?;
    Ok(UuidSlot { inode, new: Some(number) })
}

/// A free slot. If there is none, walks the index first: before a walk, an invalid slot counts as used, because the
/// index may still have keys of it. The caller holds the lock of the UUID table during the walk.
async fn free_slot_after_walk(core: &Rc<Core>) -> Result<Option<Inode>, EngineError> {
    let free = || core.cache.uuids.free_slot(|inode| core.cache.index.is_invalid_slot(inode));
    if let Some(inode) = free() {
        return Ok(Some(inode));
    }
    crate::gc::collect(&core.cache.gc).await?;
    Ok(free())
}

/// Refuses a device if the cache has dirty data for sectors outside its data area, which could never be written
/// back: the device was truncated, or is an incomplete copy.
async fn refuse_dirty_outside(
    core: &Rc<Core>,
    inode: Inode,
    backing: &BackingDevice,
) -> Result<(), EngineError> {
    let start = backing.data_offset();
    let end = start + backing.data_sectors();
    for (from, inside) in [(format::Sector(0), true), (end, false)] {
        let found = loop {
            let next = core.cache.index.tree().next_dirty(inode, from, &core.cache.alloc.buckets());
            match next {
                Err(NotLoaded(id)) => core.cache.index.load_leaf(id).await?,
                Ok(found) => break found,
            }
        };
        if let Some((at, sectors, _)) = found
            && !(inside && at >= start)
        {
            mark(Mark::RefusedTruncated);
            return refuse(backing, DeviceRefusal::DirtyOutside { at, sectors, start, end });
        }
    }
    Ok(())
}

/// Makes keys for sectors behind the end of the device durable holes, if the device had another size at its last registration.
///
/// The device has lost these sectors. If it grows again they have other contents, so the clean copies must not come back.
async fn drop_copies_behind_end(
    core: &Rc<Core>,
    inode: Inode,
    backing: &BackingDevice,
) -> Result<(), EngineError> {
    if backing.registered_sectors() == Some(backing.data_sectors()) || bug(Bug::CopiesBehindEndKept) {
        return Ok(());
    }
    let (mut from, mut newest) = (backing.data_offset() + backing.data_sectors(), None);
    loop {
        let next = core.cache.index.tree().next_mapped(inode, from);
        match next {
            Err(NotLoaded(id)) => core.cache.index.load_leaf(id).await?,
            Ok(None) => break,
            Ok(Some((start, end))) => {
                let change = core.cache.index.change(inode, start, end, None, Durability::Journaled);
                newest = Some(change.await?);
                from = end;
            }
        }
    }
    if let Some(newest) = newest {
        mark(Mark::CopiesBehindEnd);
        core.cache.journal.commit(newest).await?;
    }
    Ok(())
}

/// Creates a flash-only volume; see [`CacheSet::create_volume`](super::CacheSet::create_volume).
pub(super) async fn create_volume(
    core: &Rc<Core>,
    uuid: Uuid,
    size: Sectors,
    label: &str,
) -> Result<Rc<Volume>, EngineError> {
    let (theirs, label) = (core.clone(), label.to_owned());
    core.cache.tasks.to_the_end(async move { create_volume_now(&theirs, uuid, size, &label).await }).await
}

async fn create_volume_now(
    core: &Rc<Core>,
    uuid: Uuid,
    size: Sectors,
    label: &str,
) -> Result<Rc<Volume>, EngineError> {
    let size = Blocks::of(&core.cache.geometry).whole(size);
    if size == Sectors::ZERO || size.0 > MAX_POSITION.0 {
        return Err(Refusal::VolumeSize { most: MAX_POSITION, size }.into());
    }
    let _config = core.cache.uuids.lock().await;
    let Some(inode) = free_slot_after_walk(core).await? else {
        return Err(Refusal::NoSlot { slots: core.cache.uuids.entries().len() }.into());
    };
    let Some(bytes) = format::superblock::label_bytes(label) else {
        return Err(Refusal::LabelTooLong { bytes: label.len() }.into());
    };
    let entry = UuidEntry::volume(uuid, bytes, size, core.cache.rt.wall_seconds() as u32);
    core.cache.uuids.update(|u| u[inode.0 as usize] = entry).await?;
    let volume = Volume::flash_only(&core.cache, inode, size, label.to_owned());
    core.add(volume.clone());
    Ok(volume)
}

/// Deletes a flash-only volume; see [`CacheSet::delete_volume`](super::CacheSet::delete_volume).
pub(super) async fn delete_volume(core: &Rc<Core>, inode: Inode) -> Result<(), EngineError> {
    let theirs = core.clone();
    core.cache.tasks.to_the_end(async move { delete_volume_now(&theirs, inode).await }).await
}

async fn delete_volume_now(core: &Rc<Core>, inode: Inode) -> Result<(), EngineError> {
    let volume = core.volume_of(inode).filter(|v| v.is_flash_only());
    let Some(volume) = volume else {
        return Err(Refusal::NotFlashOnly { inode }.into());
    };
    volume.stop().await?;
    let _config = core.cache.uuids.lock().await;
    // Another caller may have deleted the volume meanwhile. Then the slot may be that of a new volume.
    if !core.volumes().iter().any(|v| Rc::ptr_eq(v, &volume)) {
        return Err(Refusal::Deleted { inode }.into());
    }
    let now = core.cache.rt.wall_seconds() as u32;
    core.cache.uuids.update(|u| u[inode.0 as usize].invalidate(now)).await?;
    core.cache.index.invalidate_slot(inode);
    core.remove(&volume);
    core.cache.alloc.walks().request();
    Ok(())
}

/// Begins to detach a volume; see [`CacheSet::begin_detach`](super::CacheSet::begin_detach).
pub(super) async fn begin_detach(volume: &Rc<Volume>) -> Result<Detaching, EngineError> {
    if volume.inode().is_none() || volume.is_flash_only() {
        return Err(Refusal::NotAttached { volume: volume.label_or_name() }.into());
    }
    volume.begin_detach();
    let guard = Detaching { volume: volume.clone() };
    volume.drained().await?;
    Ok(guard)
}

/// Stops a volume and releases its backing device; see [`CacheSet::release`](super::CacheSet::release).
pub(super) async fn release(core: &Rc<Core>, volume: &Rc<Volume>) -> Result<(), EngineError> {
    let stopped = volume.stop().await;
    let Some(inode) = volume.inode() else { return stopped };
    if let Some(backing) = volume.backing() {
        backing.settle_direct_writes().await?;
        // Copies in leaves that are not written yet count as durable when the device has left. If a flush fails, the leaves
        // are written without them.
        if !bug(Bug::ReleaseFlushesClientsOnly) && backing.settle_content().await.is_err() {
            core.cache.index.write_all_leaves().await?;
        }
    }
    core.cache.journal.commit_keys().await?;
    core.cache.device.settle_overwrites().await?;
    // A miss that is still being inserted could replace data that the next owner of the device writes by old data.
    volume.ranges().invalidate_misses();
    if let Some(backing) = volume.backing() {
        // An update may have begun after the stop.
        backing.updates_ended().await;
    }
    core.remove_with_device(volume, inode);
    Ok(())
}

/// Detaches a backing device; see [`CacheSet::detach`](super::CacheSet::detach).
pub(super) async fn detach(core: &Rc<Core>, volume: &Rc<Volume>) -> Result<(), EngineError> {
    let (theirs, volume) = (core.clone(), volume.clone());
    core.cache.tasks.to_the_end(async move { detach_now(&theirs, &volume).await }).await
}

async fn detach_now(core: &Rc<Core>, volume: &Rc<Volume>) -> Result<(), EngineError> {
    let (Some(inode), Some(backing)) = (volume.inode(), volume.backing()) else {
        return Err(Refusal::NotAttached { volume: volume.label_or_name() }.into());
    };
    volume.begin_detach();
    let result = detach_drained(core, volume, inode, &backing).await;
    if result.is_err() {
        // The volume is served as before. If it lost its cache meanwhile, there is nothing to cancel.
        volume.cancel_detach();
    }
    result
}

/// Detaches a volume that takes no new dirty data: waits until its dirty data is written back, then removes it from
/// the set.
async fn detach_drained(
    core: &Rc<Core>,
    volume: &Rc<Volume>,
    inode: Inode,
    backing: &Rc<BackingDevice>,
) -> Result<(), EngineError> {
    let guard = loop {
        if !bug(Bug::DetachWithDirtyData) {
            volume.drained().await?;
        }
        let guard = volume.block_all().await;
        core.cache.device.check()?;
        if volume.inode() != Some(inode) {
            return Err(Refusal::NotAttached { volume: volume.label_or_name() }.into());
        }
        // A write that chose the cache before the detach began may have ended only now.
        if core.cache.index.tree().dirty_sectors(inode) == Sectors::ZERO || bug(Bug::DetachWithDirtyData) {
            break guard;
        }
    };
    backing.flush_all().await?;
    backing
        .update(|sb| {
            sb.set_set_uuid(Uuid::NIL);
            sb.set_state(BackingState::None);
        })
        .await?;
    // The lock is taken only here: the steps before wait for this backing device without a limit. Holders of the lock
    // wait for the cache device, and in a walk at most 5 s for a backing device that does not answer.
    let _config = core.cache.uuids.lock().await;
    // From here on the device has no cache. If the update of the slot below fails, the slot is still invalid,
    // because the superblock of the device does not name the set.
    core.cache.index.invalidate_slot(inode);
    volume.detached();
    core.remove_with_device(volume, inode);
    drop(guard);
    let now = core.cache.rt.wall_seconds() as u32;
    core.cache.uuids.update(|u| u[inode.0 as usize].invalidate(now)).await?;
    core.cache.alloc.walks().request();
    core.cache
        .device
        .emit(SetEvent::State { device: backing.disk().info().name.to_string(), state: "no cache" });
    Ok(())
}

/// Keeps other callers from attaching a device until it is dropped.
struct Attaching {
    core: Rc<Core>,
    device: Uuid,
}

impl Attaching {
    fn begin(core: &Rc<Core>, device: Uuid) -> Attaching {
        core.attaching.borrow_mut().insert(device);
        Attaching { core: core.clone(), device }
    }
}

impl Drop for Attaching {
    fn drop(&mut self) {
        self.core.attaching.borrow_mut().remove(&self.device);
    }
}

/// Keeps a volume from taking new dirty data. When the last guard is dropped, the volume takes dirty data again, unless
/// it was detached.
pub struct Detaching {
    volume: Rc<Volume>,
}

impl Drop for Detaching {
    fn drop(&mut self) {
        if self.volume.inode().is_some() {
            self.volume.cancel_detach();
        }
    }
}

/// The error for a refused device, with the name of the device.
fn refuse<T>(backing: &BackingDevice, why: DeviceRefusal) -> Result<T, EngineError> {
    Err(why.of(&backing.disk().info().name).into())
}
