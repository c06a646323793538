//! Attaching and detaching backing devices, creating and deleting volumes.
//!
//! Orders (format section 12.6): attach: UUID table durable → backing superblock names the set; detach: all dirty
//! data on the backing device and flushed → superblock without the set → slot void. An old slot of a device that ran
//! without this cache is void before the device gets a new one, so old data can never come back.

use std::rc::Rc;

use format::{BackingState, Inode, RegistrationNr, Sectors, Uuid, UuidEntry};
use io::Disk;

use super::{CacheSet, Core};
use crate::canary::{Bug, Mark, bug, mark};
use crate::device::BackingDevice;
use crate::error::EngineError;
use crate::events::SetEvent;
use crate::index::{MAX_POSITION, NotLoaded};
use crate::volume::Volume;

/// Where a device stands in the UUID table.
struct Slot {
    inode: Inode,
    /// The number of this registration, if the slot is new: the slot has it, and the superblock gets it with the set's UUID.
    new: Option<RegistrationNr>,
}

impl CacheSet {
    /// Registers a backing device with this set: one that belongs to it comes up with its cached data; one that
    /// belongs nowhere is attached.
    ///
    /// # Errors
    /// If the device belongs to another set, or has dirty data that this cache does not know, or does not fit.
    pub async fn register(&self, disk: Disk) -> Result<Rc<Volume>, EngineError> {
        let set = self.clone();
        let registered = async move {
            let backing = BackingDevice::open(disk).await?;
            set.attach(backing).await
        };
        self.core.cache.tasks.to_the_end(registered).await
    }

    pub(crate) async fn attach(&self, backing: Rc<BackingDevice>) -> Result<Rc<Volume>, EngineError> {
        let core = &self.core;
        let (slot, _attaching) = self.claim_slot(&backing).await?;
        let inode = slot.inode;
        self.refuse_dirty_outside(inode, &backing).await?;
        if slot.new.is_none() {
            self.number_registration(inode, &backing).await?;
        }
        if core.cache.index.tree().dirty_sectors(inode) > Sectors::ZERO {
            mark(Mark::KnownDirty);
            if backing.ensure_dirty(|| core.cache.device.check()).await? {
                mark(Mark::DirtyKeysOfClean);
                let device = backing.disk.info().name.to_string();
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

    /// The slot of this device, which then says that it belongs to the set. Nobody else attaches the device until the
    /// guard is dropped. The config lock is not held while the device is waited for: one that hangs must not hold up
    /// others.
    async fn claim_slot(&self, backing: &Rc<BackingDevice>) -> Result<(Slot, Attaching), EngineError> {
        let core = &self.core;
        let config = core.cache.uuids.lock().await;
        core.cache.device.check().inspect_err(|_| mark(Mark::RefusedByFailedSet))?;
        self.refuse_misfits(backing)?;
        let attaching = Attaching::begin(core, backing.uuid());
        let slot = self.slot_for(backing).await?;
        drop(config);
        if let Some(number) = slot.new {
            let set_uuid = self.uuid();
            backing
                .update(|sb| {
                    sb.set_set_uuid(set_uuid);
                    sb.set_state(BackingState::Clean);
                    sb.set_registration(Some(number));
                })
                .await?;
        }
        Ok((slot, attaching))
    }

    /// Gives a further registration its number, in the slot of the device and then in its superblock. A copy of the cache
    /// device that is older than this registration does not know the number. (The first has it from [`Self::slot_for`].)
    async fn number_registration(
        &self,
        inode: Inode,
        backing: &Rc<BackingDevice>,
    ) -> Result<(), EngineError> {
        let core = &self.core;
        let config = core.cache.uuids.lock().await;
        // Both count until the superblock has the new one.
        let (before, number) = (backing.registration(), RegistrationNr::from_random(core.cache.rt.random()));
        let renewed =
            core.cache.uuids.update_if_room(|u| u[inode.0 as usize].register(number, before)).await?;
        drop(config);
        if !renewed {
            // A cache that is full must start: to become empty it needs its volumes. The numbers before go on to count.
            return Ok(());
        }
        // The device is served all the same: only a copy that is restored later is not noticed.
        if let Err(e) = backing.update(|sb| sb.set_registration(Some(number))).await {
            core.cache.device.emit(SetEvent::DeviceError { what: e.to_string() });
        }
        Ok(())
    }

    /// Whether the cache device is older than the last registration of this device: it was restored from an older copy.
    fn is_rolled_back(&self, backing: &BackingDevice) -> bool {
        let of_another_set = backing.set_uuid() != self.uuid();
        // Without a slot there is nothing to be believed; one without numbers was made by a kernel, and says nothing.
        // A device without a number is one that a slot with numbers does not know, unless no number was before.
        let unknown = self.core.cache.uuids.slot_of(backing.uuid()).is_some_and(|inode| {
            let numbers = self.core.cache.uuids.entries()[inode.0 as usize].registrations();
            numbers.iter().any(Option::is_some) && !numbers.contains(&backing.registration())
        });
        unknown && !of_another_set && !bug(Bug::OlderCacheBelieved)
    }

    /// Dirty data of a newer cache device is not in this one.
    fn refuse_rolled_back<T>(&self, backing: &BackingDevice) -> Result<T, EngineError> {
        refuse(
            backing,
            format!(
                "has dirty data in another state of cache set {}: {} does not know the last registration of this device: \
                 the cache device (or this one) was restored from an older copy. Attach the newest one; `ubcache extract` \
                 reads what this one has; serving this device alone loses the dirty data",
                self.uuid(),
                self.core.cache.device.place().device
            ),
        )
    }

    /// What the superblocks alone say against this device in this set.
    fn refuse_misfits(&self, backing: &BackingDevice) -> Result<(), EngineError> {
        let core = &self.core;
        let state = backing.state();
        if core.volumes().iter().any(|v| v.backing_uuid() == Some(backing.uuid())) {
            mark(Mark::RefusedTwice);
            let (device, set) = (backing.uuid(), self.uuid());
            return refuse(backing, format!("a device with UUID {device} is already attached to set {set}"));
        }
        if core.attaching.borrow().contains(&backing.uuid()) {
            let (device, set) = (backing.uuid(), self.uuid());
            return refuse(backing, format!("a device with UUID {device} is being attached to set {set}"));
        }
        if backing.set_uuid() != self.uuid() && matches!(state, BackingState::Clean | BackingState::Dirty) {
            mark(Mark::RefusedOtherSet);
            let (state, theirs, ours) = (state.name(), backing.set_uuid(), self.uuid());
            return refuse(
                backing,
                format!("is {state} and attached to cache set {theirs}, expected set {ours}"),
            );
        }
        if backing.block_sectors() < core.cache.geometry.block_sectors {
            mark(Mark::RefusedBlockSize);
            let (least, found) = (core.cache.geometry.block_sectors, backing.block_sectors());
            return refuse(
                backing,
                format!("block size: expected at least the set's {least} sectors, found {found}"),
            );
        }
        if (backing.data_offset() + backing.data_sectors()) > MAX_POSITION {
            return refuse(backing, format!("is larger than {MAX_POSITION} sectors"));
        }
        Ok(())
    }

    /// The slot of this device: the one that it has, or a new one. The caller holds `config_lock`.
    async fn slot_for(&self, backing: &BackingDevice) -> Result<Slot, EngineError> {
        let core = &self.core;
        let state = backing.state();
        let now = core.cache.rt.wall_seconds() as u32;
        let rolled_back = self.is_rolled_back(backing);
        if rolled_back && state == BackingState::Dirty {
            return self.refuse_rolled_back(backing);
        }
        if let Some(inode) = core.cache.uuids.slot_of(backing.uuid()) {
            let usable = !rolled_back && !matches!(state, BackingState::None | BackingState::Stale);
            if usable || bug(Bug::StaleSlotReused) {
                mark(Mark::KnownSlot);
                return Ok(Slot { inode, new: None });
            }
            // The device ran without this state of the cache: what the cache has of it is void.
            mark(Mark::SlotOfStale);
            core.cache.index.invalidate_slot(inode);
            core.cache.uuids.update(|u| u[inode.0 as usize].invalidate(now)).await?;
            core.cache.alloc.walks().request();
        }
        if state == BackingState::Dirty {
            mark(Mark::RefusedUnknownDirty);
            let (set, device) = (self.uuid(), backing.uuid());
            return refuse(
                backing,
                format!(
                    "has dirty data in a cache, but cache set {set} does not know its UUID {device}: the dirty data is in \
                     another cache device, or this one is an older copy, made before the device was attached"
                ),
            );
        }
        mark(Mark::NewSlot);
        let Some(inode) = self.free_slot_after_walk().await? else {
            mark(Mark::RefusedNoSlot);
            let slots = core.cache.uuids.entries().len();
            return refuse(backing, format!("all {slots} slots of the set are in use"));
        };
        let number = RegistrationNr::from_random(core.cache.rt.random());
        let mut entry = UuidEntry::backing(backing.uuid(), backing.label_bytes(), now);
        // The number before is that of another set, or of a slot that is void.
        entry.register(number, None);
        core.cache.uuids.update(|u| u[inode.0 as usize] = entry).await?;
        Ok(Slot { inode, new: Some(number) })
    }

    /// A slot that nothing uses, after a walk of the index if need be: at first every slot that was given up counts as used,
    /// because keys of it may be left.
    async fn free_slot_after_walk(&self) -> Result<Option<Inode>, EngineError> {
        let core = &self.core;
        let free = || core.cache.uuids.free_slot(|inode| core.cache.index.is_invalid_slot(inode));
        if let Some(inode) = free() {
            return Ok(Some(inode));
        }
        crate::gc::collect(&core.cache.gc).await?;
        Ok(free())
    }

    /// Dirty data for sectors that the device does not have could never be written back: a device that was truncated,
    /// or a copy that is not complete, is not served.
    async fn refuse_dirty_outside(&self, inode: Inode, backing: &BackingDevice) -> Result<(), EngineError> {
        let core = &self.core;
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
                return Err(EngineError::Invalid(format!(
                    "{}: the cache has dirty data for sectors {at}..+{sectors}: expected all of it between sectors \
                     {start} and {end}, where the device has its data: was it truncated?",
                    backing.disk.info().name
                )));
            }
        }
        Ok(())
    }

    /// Creates a flash-only volume of `size` (rounded down to whole blocks).
    ///
    /// # Errors
    /// If no slot is free, or the size is zero.
    pub async fn create_volume(
        &self,
        uuid: Uuid,
        size: Sectors,
        label: &str,
    ) -> Result<Rc<Volume>, EngineError> {
        let (set, label) = (self.clone(), label.to_owned());
        self.core.cache.tasks.to_the_end(async move { set.create_volume_now(uuid, size, &label).await }).await
    }

    async fn create_volume_now(
        &self,
        uuid: Uuid,
        size: Sectors,
        label: &str,
    ) -> Result<Rc<Volume>, EngineError> {
        let core = &self.core;
        let block = core.cache.geometry.block_sectors.0;
        let size = Sectors(size.0 / block * block);
        if size == Sectors::ZERO || size.0 > MAX_POSITION.0 {
            return Err(EngineError::Invalid(format!("a volume of {size} sectors cannot be created")));
        }
        let _config = core.cache.uuids.lock().await;
        let Some(inode) = self.free_slot_after_walk().await? else {
            return Err(EngineError::Invalid(format!(
                "all {} slots of the set are in use",
                core.cache.uuids.entries().len()
            )));
        };
        let Some(bytes) = format::superblock::label_bytes(label) else {
            return Err(EngineError::Invalid(format!(
                "label: expected at most 32 bytes, found {}",
                label.len()
            )));
        };
        let entry = UuidEntry::volume(uuid, bytes, size, core.cache.rt.wall_seconds() as u32);
        core.cache.uuids.update(|u| u[inode.0 as usize] = entry).await?;
        let volume = Volume::flash_only(&core.cache, inode, size, label.to_owned());
        core.add(volume.clone());
        Ok(volume)
    }

    /// Deletes a flash-only volume and its data.
    ///
    /// # Errors
    /// If the slot is no flash-only volume.
    pub async fn delete_volume(&self, inode: Inode) -> Result<(), EngineError> {
        let set = self.clone();
        self.core.cache.tasks.to_the_end(async move { set.delete_volume_now(inode).await }).await
    }

    async fn delete_volume_now(&self, inode: Inode) -> Result<(), EngineError> {
        let core = &self.core;
        let volume = core.volume_of(inode).filter(|v| v.is_flash_only());
        let Some(volume) = volume else {
            return Err(EngineError::Invalid(format!("slot {inode} is no flash-only volume")));
        };
        volume.stop().await?;
        let _config = core.cache.uuids.lock().await;
        // Deleted by another caller meanwhile, the slot may be that of a new volume.
        if !core.volumes().iter().any(|v| Rc::ptr_eq(v, &volume)) {
            return Err(EngineError::Invalid(format!("the volume of slot {inode} has been deleted")));
        }
        let now = core.cache.rt.wall_seconds() as u32;
        core.cache.uuids.update(|u| u[inode.0 as usize].invalidate(now)).await?;
        core.cache.index.invalidate_slot(inode);
        core.remove(&volume);
        core.cache.alloc.walks().request();
        Ok(())
    }

    /// The first and long part of a detach, which can be given up: the volume takes no new dirty data, and what it has is
    /// written back. [`CacheSet::detach`] is to follow while the guard is held.
    ///
    /// # Errors
    /// If data cannot be written back.
    pub async fn begin_detach(&self, volume: &Rc<Volume>) -> Result<Detaching, EngineError> {
        if volume.inode().is_none() || volume.is_flash_only() {
            return Err(EngineError::Invalid(format!("{} is not attached", volume.label_or_name())));
        }
        volume.begin_detach();
        let guard = Detaching { volume: volume.clone() };
        volume.drained().await?;
        Ok(guard)
    }

    /// Stops a volume and lets its backing device go as it is: attached, with its dirty data in the cache. It can be
    /// registered again once nobody holds the volume any more. A flash-only volume is stopped for this run.
    ///
    /// # Errors
    /// If what was answered cannot be made durable; the volume is stopped all the same.
    pub async fn release(&self, volume: &Rc<Volume>) -> Result<(), EngineError> {
        let core = &self.core;
        let stopped = volume.stop().await;
        let Some(inode) = volume.inode() else { return stopped };
        if let Some(backing) = volume.backing() {
            backing.settle_direct_writes().await?;
        }
        core.cache.journal.commit_keys().await?;
        core.cache.device.settle_overwrites().await?;
        // One that is still on its way could bring old data over what the next owner of the device writes.
        volume.ranges.invalidate_misses();
        core.remove_with_device(volume, inode);
        Ok(())
    }

    /// Detaches a backing device: writes all its dirty data back, then lets it go. The volume stays up and serves
    /// the device alone.
    ///
    /// # Errors
    /// If data cannot be written back; the device stays attached then.
    pub async fn detach(&self, volume: &Rc<Volume>) -> Result<(), EngineError> {
        let (set, volume) = (self.clone(), volume.clone());
        self.core.cache.tasks.to_the_end(async move { set.detach_now(&volume).await }).await
    }

    async fn detach_now(&self, volume: &Rc<Volume>) -> Result<(), EngineError> {
        let (Some(inode), Some(backing)) = (volume.inode(), volume.backing()) else {
            return Err(EngineError::Invalid(format!("{} is not attached", volume.label_or_name())));
        };
        volume.begin_detach();
        let result = self.detach_drained(volume, inode, &backing).await;
        if result.is_err() {
            // It goes on as before; one that lost its cache meanwhile has nothing to cancel.
            volume.cancel_detach();
        }
        result
    }

    /// The volume takes no new dirty data: once what it has is written back, it is let go.
    async fn detach_drained(
        &self,
        volume: &Rc<Volume>,
        inode: Inode,
        backing: &Rc<BackingDevice>,
    ) -> Result<(), EngineError> {
        let core = &self.core;
        let guard = loop {
            if !bug(Bug::DetachWithDirtyData) {
                volume.drained().await?;
            }
            let guard = volume.block_all().await;
            core.cache.device.check()?;
            if volume.inode() != Some(inode) {
                return Err(EngineError::Invalid(format!("{} is not attached", volume.label_or_name())));
            }
            // A write that had chosen the cache before the detaching began may have ended only now.
            if core.cache.index.tree().dirty_sectors(inode) == Sectors::ZERO || bug(Bug::DetachWithDirtyData)
            {
                break guard;
            }
        };
        backing.gate.ensure(backing.gate.latest()).await?;
        backing
            .update(|sb| {
                sb.set_set_uuid(Uuid::NIL);
                sb.set_state(BackingState::None);
            })
            .await?;
        // Only now: everything before waits for this device, and whoever holds the lock for the cache device alone.
        let _config = core.cache.uuids.lock().await;
        // From here on the device has no cache, whatever becomes of the slot: it is void for a device that says so.
        core.cache.index.invalidate_slot(inode);
        volume.detached();
        core.remove_with_device(volume, inode);
        drop(guard);
        let now = core.cache.rt.wall_seconds() as u32;
        core.cache.uuids.update(|u| u[inode.0 as usize].invalidate(now)).await?;
        core.cache.alloc.walks().request();
        core.cache
            .device
            .emit(SetEvent::State { device: backing.disk.info().name.to_string(), state: "no cache" });
        Ok(())
    }
}

/// A device that is being attached: nobody else attaches it until this is dropped.
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

/// A volume that takes no new dirty data. It does again when the last of these is dropped, unless it was detached.
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

/// Why a device does not come up, with its name.
fn refuse<T>(backing: &BackingDevice, why: String) -> Result<T, EngineError> {
    Err(EngineError::Invalid(format!("{}: {why}", backing.disk.info().name)))
}
