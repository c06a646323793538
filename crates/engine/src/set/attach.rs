//! Attaching and detaching backing devices, and creating and deleting flash-only volumes.
//!
//! Owns the order of the steps (format section 12.6). An attach makes the UUID table durable before the backing superblock
//! names the set. A detach writes all dirty data to the backing device and flushes it, then removes the set from the
//! superblock, then makes the slot invalid. The old slot of a device that was served without this cache becomes invalid
//! before the device gets a new slot, so old data can never come back.

use std::rc::Rc;

use format::{BackingState, BackingSuper, Inode, RegistrationNr, Sectors, Uuid, UuidEntry};
use io::Disk;

use super::components::Components;
use super::members::{Attaching, Members};
use super::mirror;
use crate::canary::{Bug, Mark, bug, mark};
use crate::device::BackingDevice;
use crate::error::EngineError;
use crate::events::SetEvent;
use crate::index::{Durability, MAX_POSITION, NotLoaded};
use crate::refusal::{DeviceRefusal, Refusal};
use crate::uuids::TableChange;
use crate::volume::{Blocks, Cache, Volume, release_mirror, write_leaves_of_second};

/// The slot of a device in the UUID table.
struct UuidSlot {
    inode: Inode,
    /// The number of this registration, if the slot is new. The slot has it, and the superblock gets it together with
    /// the UUID of the set.
    new: Option<RegistrationNr>,
}

/// Registers a backing device; see [`CacheSet::register`](super::CacheSet::register).
pub(super) async fn register(components: &Rc<Components>, disk: Disk) -> Result<Rc<Volume>, EngineError> {
    let theirs = components.clone();
    let registered = async move {
        let backing = BackingDevice::open(disk).await?;
        attach(&theirs, backing, None).await
    };
    components.cache.tasks.to_the_end(registered).await
}

/// Attaches a backing device, and starts the writeback of its volume. `secondary`: a set that may have a copy of its dirty data.
pub(super) async fn attach(
    components: &Rc<Components>,
    backing: Rc<BackingDevice>,
    secondary: Option<&Rc<Components>>,
) -> Result<Rc<Volume>, EngineError> {
    let Components { cache, members, .. } = &**components;
    let (slot, _attaching) = claim_slot(components, &backing).await?;
    let inode = slot.inode;
    refuse_dirty_outside(cache, inode, &backing).await?;
    let known = secondary.filter(|_| slot.new.is_none());
    let mut copy = known.and_then(|s| Some((s, mirror::slot_of_copy(components, s, (inode, &backing))?)));
    if let Some((second, inode)) = copy
        && drop_copies_behind_end(&second.cache, inode, &backing).await.is_err()
    {
        copy = None;
    }
    if backing.copy().is_some() && copy.is_none() && !bug(Bug::LossNotRecorded) {
        backing.update(|sb| sb.set_copy(None)).await?;
    }
    if slot.new.is_none() {
        drop_copies_behind_end(cache, inode, &backing).await?;
        number_registration(cache, inode, &backing, copy.map(|(s, i)| (&*s.cache, i))).await?;
    }
    if cache.index.tree().dirty_sectors(inode) > Sectors::ZERO {
        mark(Mark::KnownDirty);
        if backing.begin_dirty(&cache.device).await? {
            mark(Mark::DirtyKeysOfClean);
        }
    } else if backing.state() == BackingState::Dirty {
        mark(Mark::DirtyWithoutKeys);
    }
    let volume = Volume::cached(cache, inode, backing.clone());
    if let Some((secondary, second_inode)) = copy {
        settle(components, secondary, &volume, second_inode).await?;
    }
    cache.backings.add(inode, backing);
    members.add(volume.clone());
    crate::writeback::start(&volume, cache, inode);
    Ok(volume)
}

/// Links a volume to its copy. If the set with the copy fails, the volume has none.
async fn settle(
    components: &Rc<Components>,
    secondary: &Rc<Components>,
    volume: &Rc<Volume>,
    second_inode: Inode,
) -> Result<(), EngineError> {
    let settled = mirror::settle(components, secondary, volume, second_inode).await;
    match (settled, volume.backing()) {
        (Err(e), Some(backing)) => {
            components.cache.device.check()?;
            let device = backing.disk().info().name.to_string();
            components.cache.device.emit(SetEvent::DeviceError { error: e });
            backing.update(|sb| sb.set_copy(None)).await?;
            let cache = secondary.cache.device.place().device.to_string();
            components.cache.device.emit(SetEvent::CopyLost { device, cache });
            Ok(())
        }
        (settled, _) => settled,
    }
}

/// Finds or makes the slot of a device, and makes the superblock of the device name the set. No other caller can
/// attach the device until the guard is dropped. The lock of the UUID table is not held during the write to the
/// device, because a device that hangs must not block others.
async fn claim_slot(
    components: &Components,
    backing: &Rc<BackingDevice>,
) -> Result<(UuidSlot, Attaching), EngineError> {
    let Components { cache, members, .. } = components;
    let config = cache.uuids.lock().await;
    cache.device.check().inspect_err(|_| mark(Mark::RefusedByFailedSet))?;
    refuse_misfits(components, backing)?;
    let attaching = members.exclude_attach(backing.uuid());
    let present = present_slot(components, backing)?;
    drop(config);
    let slot = match present {
        Some(inode) => UuidSlot { inode, new: None },
        None => new_slot(components, backing).await?,
    };
    if let Some(number) = slot.new {
        let set_uuid = components.uuid();
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
/// [`new_slot`].) `copy`: the set and slot with a copy of the dirty data, which get the number, too.
async fn number_registration(
    cache: &Cache,
    inode: Inode,
    backing: &Rc<BackingDevice>,
    copy: Option<(&Cache, Inode)>,
) -> Result<(), EngineError> {
    let config = cache.uuids.lock().await;
    // Both numbers are valid until the superblock has the new one.
    let (before, number) = (backing.registration(), RegistrationNr::from_random(cache.rt.random()));
    let mut renewed = cache.uuids.update_if_room(|u| u[inode.0 as usize].register(number, before)).await?;
    drop(config);
    if let Some((second, inode)) = copy.filter(|_| renewed) {
        let _config = second.uuids.lock().await;
        // Without the number its copy does not count after the next registration.
        let numbered = second.uuids.update_if_room(|u| u[inode.0 as usize].register(number, before)).await;
        renewed = numbered.unwrap_or(true);
    }
    if !renewed {
        // A full cache must start, because only its volumes can make it empty. The old numbers stay valid.
        return Ok(());
    }
    // The device is served in spite of the error: only the later restore of an older copy would not be detected.
    if let Err(e) = backing.update(|sb| register_as(sb, number)).await {
        cache.device.emit(SetEvent::DeviceError { error: e });
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
fn is_rolled_back(components: &Components, backing: &BackingDevice) -> bool {
    let of_another_set = backing.set_uuid() != components.uuid();
    // Without a slot there is no number to compare. A slot without numbers was made by a kernel, which does not
    // number registrations. A device without a number does not match a slot with numbers, unless the slot also
    // lists "no number" as the one before.
    let unknown = components.cache.uuids.slot_of(backing.uuid()).is_some_and(|inode| {
        let numbers = components.cache.uuids.entries()[inode.0 as usize].registrations();
        numbers.iter().any(Option::is_some) && !numbers.contains(&backing.registration())
    });
    unknown && !of_another_set && !bug(Bug::OlderCacheBelieved)
}

/// The error for a device whose dirty data is in a newer state of the cache device.
fn refuse_rolled_back<T>(components: &Components, backing: &BackingDevice) -> Result<T, EngineError> {
    let cache = components.cache.device.place().device.clone();
    refuse(backing, DeviceRefusal::DirtyInOtherState { set: components.uuid(), cache })
}

/// Refuses a device that does not fit the set according to the superblocks and to the devices that are attached.
fn refuse_misfits(components: &Components, backing: &BackingDevice) -> Result<(), EngineError> {
    let Components { cache, members, .. } = components;
    let state = backing.state();
    if members.has_device(backing.uuid()) {
        mark(Mark::RefusedTwice);
        let (device, set) = (backing.uuid(), components.uuid());
        return refuse(backing, DeviceRefusal::Attached { device, set });
    }
    if members.is_attaching(backing.uuid()) {
        let (device, set) = (backing.uuid(), components.uuid());
        return refuse(backing, DeviceRefusal::BeingAttached { device, set });
    }
    refuse_uuid_of_volume(components, backing)?;
    if backing.set_uuid() != components.uuid() && matches!(state, BackingState::Clean | BackingState::Dirty) {
        mark(Mark::RefusedOtherSet);
        let (found, expected) = (backing.set_uuid(), components.uuid());
        return refuse(backing, DeviceRefusal::InOtherSet { state, found, expected });
    }
    if backing.block_sectors() < cache.geometry.block_sectors {
        mark(Mark::RefusedBlockSize);
        let (least, found) = (cache.geometry.block_sectors, backing.block_sectors());
        return refuse(backing, DeviceRefusal::BlockSize { least, found });
    }
    if (backing.data_offset() + backing.data_sectors()) > MAX_POSITION {
        return refuse(backing, DeviceRefusal::TooLarge { most: MAX_POSITION });
    }
    Ok(())
}

/// Refuses a device with the UUID of a flash-only volume: it would read and change the data of the volume.
fn refuse_uuid_of_volume(components: &Components, backing: &BackingDevice) -> Result<(), EngineError> {
    let uuids = &components.cache.uuids;
    let slot = uuids.slot_of(backing.uuid());
    if slot.is_some_and(|inode| uuids.entries()[inode.0 as usize].is_flash_only()) {
        let (device, set) = (backing.uuid(), components.uuid());
        return refuse(backing, DeviceRefusal::UuidOfVolume { device, set });
    }
    Ok(())
}

/// The slot of this device, if the cached data in it is valid.
fn present_slot(components: &Components, backing: &BackingDevice) -> Result<Option<Inode>, EngineError> {
    let state = backing.state();
    let rolled_back = is_rolled_back(components, backing);
    if rolled_back && state == BackingState::Dirty {
        return refuse_rolled_back(components, backing);
    }
    let usable = !rolled_back && !matches!(state, BackingState::None | BackingState::Stale);
    let slot = components.cache.uuids.slot_of(backing.uuid());
    let slot = slot.filter(|_| usable || bug(Bug::StaleSlotReused));
    if slot.is_some() {
        mark(Mark::KnownSlot);
    } else if usable && state == BackingState::Dirty {
        mark(Mark::RefusedUnknownDirty);
        let (set, device) = (components.uuid(), backing.uuid());
        return refuse(backing, DeviceRefusal::DirtyInOtherCache { set, device });
    }
    Ok(slot)
}

/// Gives this device a new slot, and makes its old slot invalid. No other caller can attach the device meanwhile.
async fn new_slot(components: &Components, backing: &BackingDevice) -> Result<UuidSlot, EngineError> {
    let cache = &components.cache;
    let now = cache.rt.wall_seconds() as u32;
    if cache.uuids.slot_of(backing.uuid()).is_some() {
        let table = cache.uuids.begin_change().await?;
        refuse_uuid_of_volume(components, backing)?;
        if let Some(inode) = cache.uuids.slot_of(backing.uuid()) {
            // The device was served without this state of the cache, so the cached data of it is invalid.
            mark(Mark::SlotOfStale);
            invalidate_slots(cache, table, &[inode]).await?;
        }
    }
    mark(Mark::NewSlot);
    let Some((inode, mut table)) = begin_new_slot(cache).await? else {
        mark(Mark::RefusedNoSlot);
        let slots = cache.uuids.entries().len();
        return refuse(backing, DeviceRefusal::NoSlot { slots });
    };
    refuse_uuid_of_volume(components, backing)?;
    let number = RegistrationNr::from_random(cache.rt.random());
    let mut entry = UuidEntry::backing(backing.uuid(), backing.label_bytes(), now);
    // The old number belongs to another set or to an invalid slot.
    entry.register(number, None);
    table.apply(|u| u[inode.0 as usize] = entry).await?;
    Ok(UuidSlot { inode, new: Some(number) })
}

/// Makes slots invalid, in memory at once and in the table. A walk of the index frees what they had.
pub(super) async fn invalidate_slots(
    cache: &Cache,
    mut table: TableChange<'_>,
    slots: &[Inode],
) -> Result<(), EngineError> {
    slots.iter().for_each(|inode| cache.index.invalidate_slot(*inode));
    let now = cache.rt.wall_seconds() as u32;
    table.apply(|u| slots.iter().for_each(|inode| u[inode.0 as usize].invalidate(now))).await?;
    cache.alloc.walks().request();
    Ok(())
}

/// Finds a free slot and begins the change that gives it away. If there is none, walks the index first: before a walk, an
/// invalid slot counts as used, because the index may still have keys of it. The walk may wait for buckets, so it is made
/// without the lock of the UUID table.
pub(super) async fn begin_new_slot(cache: &Cache) -> Result<Option<(Inode, TableChange<'_>)>, EngineError> {
    for walked in [false, true] {
        let table = cache.uuids.begin_change().await?;
        if let Some(inode) = cache.uuids.free_slot(|inode| cache.index.is_invalid_slot(inode)) {
            return Ok(Some((inode, table)));
        }
        drop(table);
        if !walked {
            crate::gc::collect(&cache.gc).await?;
        }
    }
    Ok(None)
}

/// Refuses a device if the cache has dirty data for sectors outside its data area, which could never be written
/// back: the device was truncated, or is an incomplete copy.
async fn refuse_dirty_outside(
    cache: &Cache,
    inode: Inode,
    backing: &BackingDevice,
) -> Result<(), EngineError> {
    let start = backing.data_offset();
    let end = start + backing.data_sectors();
    for (from, inside) in [(format::Sector(0), true), (end, false)] {
        let found = loop {
            let next = cache.index.tree().next_dirty(inode, from, &cache.alloc.buckets());
            match next {
                Err(NotLoaded(id)) => cache.index.load_leaf(id).await?,
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
    cache: &Cache,
    inode: Inode,
    backing: &BackingDevice,
) -> Result<(), EngineError> {
    if backing.registered_sectors() == Some(backing.data_sectors()) || bug(Bug::CopiesBehindEndKept) {
        return Ok(());
    }
    let (mut from, mut newest) = (backing.data_offset() + backing.data_sectors(), None);
    loop {
        let next = cache.index.tree().next_mapped(inode, from);
        match next {
            Err(NotLoaded(id)) => cache.index.load_leaf(id).await?,
            Ok(None) => break,
            Ok(Some((start, end))) => {
                let change = cache.index.change(inode, start, end, None, Durability::Journaled);
                newest = Some(change.await?);
                from = end;
            }
        }
    }
    if let Some(newest) = newest {
        mark(Mark::CopiesBehindEnd);
        cache.journal.commit(newest).await?;
    }
    Ok(())
}

/// Creates a flash-only volume; see [`CacheSet::create_volume`](super::CacheSet::create_volume).
pub(super) async fn create_volume(
    components: &Rc<Components>,
    uuid: Uuid,
    size: Sectors,
    label: &str,
) -> Result<Rc<Volume>, EngineError> {
    let (theirs, label) = (components.clone(), label.to_owned());
    let create = async move { create_volume_now(&theirs, uuid, size, &label).await };
    components.cache.tasks.to_the_end(create).await
}

async fn create_volume_now(
    components: &Components,
    uuid: Uuid,
    size: Sectors,
    label: &str,
) -> Result<Rc<Volume>, EngineError> {
    let cache = &components.cache;
    let size = Blocks::of(&cache.geometry).whole(size);
    if size == Sectors::ZERO || size.0 > MAX_POSITION.0 {
        return Err(Refusal::VolumeSize { most: MAX_POSITION, size }.into());
    }
    let Some(bytes) = format::superblock::label_bytes(label) else {
        return Err(Refusal::LabelTooLong { bytes: label.len() }.into());
    };
    let Some((inode, mut table)) = begin_new_slot(cache).await? else {
        return Err(Refusal::NoSlot { slots: cache.uuids.entries().len() }.into());
    };
    let entry = UuidEntry::volume(uuid, bytes, size, cache.rt.wall_seconds() as u32);
    table.apply(|u| u[inode.0 as usize] = entry).await?;
    let volume = Volume::flash_only(cache, inode, size, label.to_owned());
    components.members.add(volume.clone());
    Ok(volume)
}

/// Deletes a flash-only volume; see [`CacheSet::delete_volume`](super::CacheSet::delete_volume).
pub(super) async fn delete_volume(components: &Rc<Components>, inode: Inode) -> Result<(), EngineError> {
    let theirs = components.clone();
    components.cache.tasks.to_the_end(async move { delete_volume_now(&theirs, inode).await }).await
}

async fn delete_volume_now(components: &Components, inode: Inode) -> Result<(), EngineError> {
    let Components { cache, members, .. } = components;
    let volume = members.volume_of(inode).filter(|v| v.is_flash_only());
    let Some(volume) = volume else {
        return Err(Refusal::NotFlashOnly { inode }.into());
    };
    volume.stop().await?;
    let mut table = cache.uuids.begin_change().await?;
    // Another caller may have deleted the volume meanwhile. Then the slot may be that of a new volume.
    if !members.has(&volume) {
        return Err(Refusal::Deleted { inode }.into());
    }
    let now = cache.rt.wall_seconds() as u32;
    table.apply(|u| u[inode.0 as usize].invalidate(now)).await?;
    cache.index.invalidate_slot(inode);
    members.remove(&volume);
    cache.alloc.walks().request();
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
pub(super) async fn release(components: &Components, volume: &Rc<Volume>) -> Result<(), EngineError> {
    let Components { cache, members, .. } = components;
    let stopped = volume.stop().await;
    let Some(inode) = volume.inode() else { return stopped };
    if let Some(backing) = volume.backing() {
        backing.settle_direct_writes().await?;
        // Copies in leaves that are not written yet count as durable when the device has left. If a flush fails, the leaves
        // are written without them.
        if !bug(Bug::ReleaseFlushesClientsOnly) && backing.settle_content().await.is_err() {
            cache.index.write_all_leaves().await?;
            write_leaves_of_second(volume).await;
        }
    }
    cache.journal.commit_keys().await?;
    release_mirror(volume).await;
    cache.device.settle_overwrites().await?;
    // A miss that is still being inserted could replace data that the next owner of the device writes by old data.
    volume.ranges().invalidate_misses();
    if let Some(backing) = volume.backing() {
        // An update may have begun after the stop.
        backing.updates_ended().await;
    }
    members.remove_with_device(volume, inode);
    Ok(())
}

/// Detaches a backing device; see [`CacheSet::detach`](super::CacheSet::detach).
pub(super) async fn detach(components: &Rc<Components>, volume: &Rc<Volume>) -> Result<(), EngineError> {
    let (theirs, volume) = (components.clone(), volume.clone());
    components.cache.tasks.to_the_end(async move { detach_now(&theirs, &volume).await }).await
}

async fn detach_now(components: &Components, volume: &Rc<Volume>) -> Result<(), EngineError> {
    let (Some(inode), Some(backing)) = (volume.inode(), volume.backing()) else {
        return Err(Refusal::NotAttached { volume: volume.label_or_name() }.into());
    };
    volume.begin_detach();
    let result = detach_drained(components, volume, inode, &backing).await;
    if result.is_err() {
        // The volume is served as before. If it lost its cache meanwhile, there is nothing to cancel.
        volume.cancel_detach();
    }
    result
}

/// Detaches a volume that takes no new dirty data: waits until its dirty data is written back, then removes it from
/// the set.
async fn detach_drained(
    components: &Components,
    volume: &Rc<Volume>,
    inode: Inode,
    backing: &Rc<BackingDevice>,
) -> Result<(), EngineError> {
    let Components { cache, members, .. } = components;
    let guard = loop {
        if !bug(Bug::DetachWithDirtyData) {
            volume.drained().await?;
        }
        let guard = volume.block_all().await;
        cache.device.check()?;
        if volume.inode() != Some(inode) {
            return Err(Refusal::NotAttached { volume: volume.label_or_name() }.into());
        }
        // A write that chose the cache before the detach began may have ended only now.
        if cache.index.tree().dirty_sectors(inode) == Sectors::ZERO || bug(Bug::DetachWithDirtyData) {
            break guard;
        }
    };
    backing.flush_all().await?;
    // The set may have stopped, or the device may have been released and given to another owner.
    cache.device.check()?;
    if cache.device.is_stopping() {
        return Err(Refusal::Stopping.into());
    }
    must_be_in(members, volume)?;
    let leave = |sb: &mut BackingSuper| {
        sb.set_set_uuid(Uuid::NIL);
        sb.set_state(BackingState::None);
        sb.set_copy(None);
    };
    backing.update(leave).await?;
    // The lock is taken only here: the steps before wait for this backing device without a limit, and holders of the lock
    // wait for the cache device only.
    let config = cache.uuids.lock().await;
    must_be_in(members, volume)?;
    let copy = volume.mirror();
    // From here on the device has no cache. If the update of the slot below fails, the slot is still invalid,
    // because the superblock of the device does not name the set.
    cache.index.invalidate_slot(inode);
    volume.detached();
    members.remove_with_device(volume, inode);
    drop(guard);
    // Until the table without the slot is durable, a copy of the device from before the detach would be served with the data
    // of the slot.
    let _detaching = members.exclude_attach(backing.uuid());
    drop(config);
    invalidate_slots(cache, cache.uuids.begin_change().await?, &[inode]).await?;
    copy.into_iter().for_each(|copy| mirror::invalidate_copy(copy, backing.clone()));
    backing.emit_state(BackingState::None, &cache.device);
    Ok(())
}

fn must_be_in(members: &Members, volume: &Rc<Volume>) -> Result<(), EngineError> {
    match members.has(volume) {
        true => Ok(()),
        false => Err(Refusal::NotAttached { volume: volume.label_or_name() }.into()),
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
