//! Keeps the dirty data of a volume in a second set, too (decision 037).
//!
//! Owns what the devices record of it: the roles in the slots of both sets, and the number of the copy in the superblock of the backing
//! device. Must not know the paths of requests.
//!
//! Invariants: the superblock of a backing device has the number of a copy only while the second set has all dirty data of the device
//! and the same number in its slot. One write of that superblock makes a copy invalid, so no set has to be there for it.

use std::pin::Pin;
use std::rc::{Rc, Weak};

use format::{BackingState, CopyNr, Inode, Sector, Sectors, SlotRole, Uuid, UuidEntry};
use io::Disk;

use super::attach::{attach, begin_new_slot, invalidate_slots};
use super::components::Components;
use super::slow::{watch, watched};
use crate::canary::{Bug, bug};
use crate::device::BackingDevice;
use crate::error::EngineError;
use crate::index::NotLoaded;
use crate::journal::Coupling;
use crate::policy::spread::{Spread, SpreadSet};
use crate::refusal::{DeviceRefusal, MirrorRefusal, Refusal};
use crate::volume::{
    Cache, Mirror, MirrorSets, Volume, Which, copy_dirty, end_copy, finish_copy, give_up_copy,
    handle_failed_sets, leave_to_second, settle_range,
};

/// The largest range that is copied at once: it is held, so writes of it wait.
const CHUNK: Sectors = Sectors(1 << 11);

/// Makes a copy of the dirty data of a volume in a second set; see [`CacheSet::mirror`](super::CacheSet::mirror).
pub(super) async fn mirror(
    primary: &Rc<Components>,
    secondary: &Rc<Components>,
    volume: &Rc<Volume>,
) -> Result<(), EngineError> {
    let name = volume.label_or_name();
    let refuse = |why: MirrorRefusal| Err(Refusal::Mirror { volume: name.clone(), why }.into());
    let (first, second) = (&primary.cache, &secondary.cache);
    let attached = volume.attached().filter(|(cache, _)| Rc::ptr_eq(cache, first));
    let (Some((_, inode)), Some(backing)) = (attached, volume.backing()) else {
        return Err(Refusal::NotAttached { volume: name }.into());
    };
    if Rc::ptr_eq(first, second) {
        return refuse(MirrorRefusal::SameSet);
    }
    if volume.mirror().is_some() {
        return refuse(MirrorRefusal::HasCopy);
    }
    let (one, two) = (first.geometry.block_sectors, second.geometry.block_sectors);
    if one != two {
        return refuse(MirrorRefusal::BlockSize { first: one, second: two });
    }
    let number = CopyNr::from_random(first.rt.random());
    record_primary(primary, secondary, inode).await?;
    let recorded = record_secondary(primary, secondary, (inode, &backing), number);
    let second_inode = watched(primary, secondary, recorded).await?;
    let mirror = {
        // No write is under way while the link is set, so every later dirty write finds it. The journals are coupled only now: the wait
        // for these writes may need both.
        let _guard = volume.block_all().await;
        if !volume.attached().is_some_and(|(cache, i)| Rc::ptr_eq(&cache, first) && i == inode) {
            return Err(Refusal::NotAttached { volume: name }.into());
        }
        if volume.mirror().is_some() {
            return refuse(MirrorRefusal::HasCopy);
        }
        if second.device.is_leaving() {
            return Err(Refusal::Stopping.into());
        }
        let mirror = Rc::new(link(primary, secondary, (volume, &backing), second_inode, false));
        volume.set_mirror(Some(mirror.clone()));
        watch(primary, secondary, (volume, &mirror));
        mirror
    };
    let copied = async {
        copy_all(volume, &mirror, inode).await?;
        finish_copy(volume, &mirror, number).await
    };
    let copied = copied.await;
    if copied.is_err() {
        give_up_copy(volume, &mirror).await;
    }
    copied
}

/// Records in the slot of the primary which set has the copy.
async fn record_primary(
    primary: &Components,
    secondary: &Components,
    inode: Inode,
) -> Result<(), EngineError> {
    let cache = &primary.cache;
    count_other_uses(cache).await?;
    let other_uses = cache.device.superblock().other_uses().unwrap_or(0);
    let role = SlotRole::Primary { secondary: secondary.uuid(), other_uses };
    let mut table = cache.uuids.begin_change().await?;
    table.apply(|u| u[inode.0 as usize].set_role(Some(role))).await?;
    drop(table);
    // What differed from an older copy does not matter any more.
    primary.unsettled.settle(inode).await
}

/// From now on, uses of the cache device by other programs are counted.
async fn count_other_uses(cache: &Cache) -> Result<(), EngineError> {
    let _config = cache.uuids.lock().await;
    cache.device.check()?;
    cache.device.change_superblock(|sb| sb.count_other_uses());
    cache.device.write_superblock().await?;
    Ok(())
}

/// Gives a volume to the set that has its copy; see [`CacheSet::hand_over`](super::CacheSet::hand_over).
pub(super) async fn hand_over(primary: &Components, volume: &Rc<Volume>) -> Result<(), EngineError> {
    let cache = &primary.cache;
    let name = volume.label_or_name();
    let attached = volume.attached().filter(|(first, _)| Rc::ptr_eq(first, cache));
    let Some((_, inode)) = attached else { return Err(Refusal::NotAttached { volume: name }.into()) };
    {
        // Writes to this set have ended, as before a detach.
        let _guard = volume.block_all().await;
        leave_to_second(volume, cache).await?;
        if volume.attached().is_some_and(|(first, i)| Rc::ptr_eq(&first, cache) && i == inode) {
            return Err(Refusal::Mirror { volume: name, why: MirrorRefusal::NoCopy }.into());
        }
    }
    // A batch of writeback may still read the buckets of this set. Clients do not wait for it: the backing device may not answer.
    volume.writeback().earlier_task_ended().await;
    cache.index.invalidate_slot(inode);
    primary.members.remove_with_device(volume, inode);
    invalidate_slots(cache, cache.uuids.begin_change().await?, &[inode]).await
}

/// Ends the copies that a set has; see [`CacheSet::give_up_copies`](super::CacheSet::give_up_copies).
pub(super) async fn give_up_copies(secondary: &Components) -> Result<(), EngineError> {
    secondary.cache.device.begin_leaving();
    let mut result = Ok(());
    for volume in secondary.members.copies() {
        result = result.and(end_copy(&volume, &secondary.cache).await);
    }
    result
}

/// Ends the copy of one volume that a set has; see [`CacheSet::give_up_copy`](super::CacheSet::give_up_copy).
pub(super) async fn give_up_copy_of(secondary: &Components, volume: &Rc<Volume>) -> Result<(), EngineError> {
    end_copy(volume, &secondary.cache).await?;
    // A write that began before may still add its key to this set.
    drop(volume.block_all().await);
    Ok(())
}

/// Begins to make the slot of a copy invalid whose volume was detached, so its room becomes free and `wipe` does not take it for needed. If
/// that fails, the slot stays; no start trusts it. Nothing waits for it, because the second device may hang.
pub(super) fn invalidate_copy(copy: Rc<Mirror>, backing: Rc<BackingDevice>) {
    let (cache, inode) = (copy.cache.clone(), copy.inode);
    let under_way = cache.tasks.begin();
    cache.rt.clone().spawn(async move {
        let _under_way = under_way;
        let Ok(table) = cache.uuids.begin_change().await else { return };
        let is_copy =
            matches!(cache.uuids.entries()[inode.0 as usize].role(), Some(SlotRole::Secondary { .. }));
        if cache.uuids.slot_of(backing.uuid()) != Some(inode) || !is_copy {
            return;
        }
        // The slot is invalid in memory even if the table cannot be written; then the set has failed.
        let _ = invalidate_slots(&cache, table, &[inode]).await;
    });
}

/// Sets the group of a set; see [`CacheSet::set_group`](super::CacheSet::set_group).
pub(super) async fn set_group(cache: &Cache, group: Option<Uuid>) -> Result<(), EngineError> {
    let _config = cache.uuids.lock().await;
    cache.device.check()?;
    cache.device.change_superblock(|sb| sb.set_group(group));
    cache.device.write_superblock().await
}

/// Empties a set and ends its membership; see [`CacheSet::leave_group`](super::CacheSet::leave_group).
pub(super) async fn leave_group(set: &Components, others: &[Rc<Components>]) -> Result<(), EngineError> {
    let cache = &set.cache;
    let copies = set.members.copies();
    give_up_copies(set).await?;
    for volume in copies {
        // A write that began before may still add its key to this set.
        drop(volume.block_all().await);
    }
    let table = cache.uuids.begin_change().await?;
    let slots = slots_to_leave(set, others)?;
    invalidate_slots(cache, table, &slots).await?;
    set_group(cache, None).await
}

/// The slots of a set that can become invalid: no data is in this set alone.
fn slots_to_leave(set: &Components, others: &[Rc<Components>]) -> Result<Vec<Inode>, EngineError> {
    let refuse = |volume: String| Err(Refusal::HasVolume { volume }.into());
    if let Some(volume) = set.members.volumes().first() {
        return refuse(volume.label_or_name());
    }
    if let Some((device, _)) = lone_copies(set, others).into_iter().next() {
        return refuse(device);
    }
    let mut slots = Vec::new();
    for (inode, entry) in (0..).map(Inode).zip(set.cache.uuids.entries().iter()).filter(|(_, e)| e.is_live())
    {
        let is_copy = matches!(entry.role(), Some(SlotRole::Secondary { .. }));
        let dirty = set.cache.index.tree().dirty_sectors(inode);
        if entry.is_flash_only() || !is_copy && dirty > Sectors::ZERO {
            return refuse(set.cache.uuids.name_of(inode));
        }
        slots.push(inode);
    }
    Ok(slots)
}

/// Copies that may be all that there is of some dirty data; see [`CacheSet::lone_copies`](super::CacheSet::lone_copies).
pub(super) fn lone_copies(set: &Components, others: &[Rc<Components>]) -> Vec<(String, Sectors)> {
    let uuids = &set.cache.uuids;
    let is_elsewhere = |device: Uuid, primary: Uuid| {
        others.iter().any(|other| {
            let is_primary = other.uuid() == primary && other.cache.uuids.slot_of(device).is_some();
            is_primary || other.members.has_device(device)
        })
    };
    let lone = |(inode, entry): (Inode, &UuidEntry)| {
        let Some(SlotRole::Secondary { primary, .. }) = entry.role() else { return None };
        let dirty = set.cache.index.tree().dirty_sectors(inode);
        let is_lone = entry.is_live() && dirty > Sectors::ZERO && !is_elsewhere(entry.uuid, primary);
        is_lone.then(|| (uuids.name_of(inode), dirty))
    };
    (0..).map(Inode).zip(uuids.entries().iter()).filter_map(lone).collect()
}

/// The second set of a device; see [`CacheSet::second_set_of`](super::CacheSet::second_set_of).
pub(super) fn second_set_of(cache: &Cache, backing: Uuid) -> Option<Uuid> {
    let slot = cache.uuids.slot_of(backing)?;
    match cache.uuids.entries().get(slot.0 as usize)?.role()? {
        SlotRole::Primary { secondary, .. } => Some(secondary),
        SlotRole::Secondary { .. } => None,
    }
}

/// Gives the device a new slot in the secondary. An older slot may have older data.
async fn record_secondary(
    primary: &Components,
    secondary: &Components,
    (inode, backing): (Inode, &Rc<BackingDevice>),
    copy: CopyNr,
) -> Result<Inode, EngineError> {
    let second = &secondary.cache;
    let now = second.rt.wall_seconds() as u32;
    count_other_uses(second).await?;
    if second.uuids.slot_of(backing.uuid()).is_some() {
        let table = second.uuids.begin_change().await?;
        if let Some(old) = second.uuids.slot_of(backing.uuid()) {
            invalidate_slots(second, table, &[old]).await?;
        }
    }
    let Some((new, mut table)) = begin_new_slot(second).await? else {
        let slots = second.uuids.entries().len();
        return Err(DeviceRefusal::NoSlot { slots }.of(&backing.disk().info().name).into());
    };
    let mut entry = UuidEntry::backing(backing.uuid(), backing.label_bytes(), now);
    // The numbers of the registrations are those of the primary.
    entry.reserved = primary.cache.uuids.entries()[inode.0 as usize].reserved;
    entry.set_role(Some(SlotRole::Secondary { primary: primary.uuid(), copy }));
    table.apply(|u| u[new.0 as usize] = entry).await?;
    drop(table);
    secondary.unsettled.settle(new).await?;
    Ok(new)
}

/// The link of a volume to its second set.
fn link(
    primary: &Rc<Components>,
    secondary: &Rc<Components>,
    (volume, backing): (&Rc<Volume>, &Rc<BackingDevice>),
    inode: Inode,
    is_copy: bool,
) -> Mirror {
    let weak = Rc::downgrade(volume);
    let on_failure = move || {
        let Some(volume) = weak.upgrade() else { return };
        let rt = volume.rt().clone();
        rt.spawn(handle_failed_sets(volume));
    };
    let (one, two) = (&primary.cache.journal, &secondary.cache.journal);
    let coupling = Coupling::new(one, two, on_failure);
    secondary.members.add_copy(volume);
    let sets = TwoSets { primary: Rc::downgrade(primary), secondary: Rc::downgrade(secondary) };
    let spread = Spread::new(spread_set(primary), spread_set(secondary));
    let second = (secondary.cache.clone(), inode, backing.clone());
    Mirror::new(second, (coupling, spread), Box::new(sets), is_copy)
}

fn spread_set(set: &Components) -> SpreadSet {
    let geometry = &set.cache.geometry;
    let (sectors, bucket_shift) = (geometry.used_sectors(), geometry.bucket_shift());
    SpreadSet { uuid: set.uuid(), sectors, bucket_shift }
}

/// The two sets of a volume. The volume and its sets have references to each other, so these are weak.
struct TwoSets {
    primary: Weak<Components>,
    secondary: Weak<Components>,
}

impl MirrorSets for TwoSets {
    fn adopt(&self, volume: &Rc<Volume>, inode: Inode) {
        if let Some(old) = self.primary.upgrade() {
            old.members.remove(volume);
        }
        let (Some(new), Some(backing)) = (self.secondary.upgrade(), volume.backing()) else { return };
        new.cache.backings.add(inode, backing);
        new.members.add(volume.clone());
        crate::writeback::start(volume, &new.cache, inode);
    }

    fn unsettle(&self, which: Which, inode: Inode) -> Pin<Box<dyn Future<Output = Result<(), EngineError>>>> {
        let set = match which {
            Which::Primary => self.primary.upgrade(),
            Which::Secondary => self.secondary.upgrade(),
        };
        Box::pin(async move {
            match set {
                Some(set) => set.unsettled.unsettle(inode).await,
                None => Ok(()),
            }
        })
    }
}

/// Copies all dirty data of a volume, chunk by chunk; what is written meanwhile goes to both sets below the position that was reached.
async fn copy_all(volume: &Rc<Volume>, mirror: &Rc<Mirror>, inode: Inode) -> Result<(), EngineError> {
    loop {
        let at = mirror.copied();
        if at == Sector(u64::MAX) {
            return Ok(());
        }
        let is_linked = volume.mirror().is_some_and(|m| Rc::ptr_eq(&m, mirror));
        let Some((cache, _)) = volume.attached().filter(|_| is_linked) else {
            let volume = volume.label_or_name();
            return Err(Refusal::Mirror { volume, why: MirrorRefusal::Lost }.into());
        };
        if volume.is_stopping() || cache.device.is_stopping() || mirror.cache.device.is_stopping() {
            return Err(Refusal::Stopping.into());
        }
        let next = cache.index.tree().next_dirty(inode, at, &cache.alloc.buckets());
        let end = match next {
            Err(NotLoaded(leaf)) => {
                cache.index.load_leaf(leaf).await?;
                continue;
            }
            Ok(Some((start, ..))) => start.max(at) + CHUNK,
            Ok(None) => Sector(u64::MAX),
        };
        copy_dirty(volume, mirror, (at, end)).await?;
    }
}

/// Registers a device whose dirty data may also be in a second set; see [`CacheSet::register_with`](super::CacheSet::register_with).
pub(super) async fn register_with(
    primary: &Rc<Components>,
    secondary: &Rc<Components>,
    disk: Disk,
) -> Result<Rc<Volume>, EngineError> {
    let (one, two) = (primary.clone(), secondary.clone());
    let registered = async move {
        let backing = BackingDevice::open(disk).await?;
        attach(&one, backing, Some(&two)).await
    };
    primary.cache.tasks.to_the_end(registered).await
}

/// The slot of a device in its second set, if that set has a copy of all dirty data. The primary has the device in slot `inode`.
pub(super) fn slot_of_copy(
    primary: &Components,
    secondary: &Components,
    (inode, backing): (Inode, &BackingDevice),
) -> Option<Inode> {
    if secondary.cache.device.is_leaving() {
        return None;
    }
    if Rc::ptr_eq(&primary.cache, &secondary.cache) || !is_copy(primary.uuid(), secondary, backing) {
        return None;
    }
    let slots = primary.cache.uuids.entries();
    let Some(SlotRole::Primary { other_uses, .. }) = slots[inode.0 as usize].role() else { return None };
    // Another program may have used the primary alone.
    let unused = primary.cache.device.superblock().other_uses() == Some(other_uses);
    (unused || bug(Bug::OtherUseIgnored)).then(|| secondary.cache.uuids.slot_of(backing.uuid())).flatten()
}

/// Whether this set has a copy of all dirty data of a device, as far as the device and the set can tell.
fn is_copy(primary: Uuid, secondary: &Components, backing: &BackingDevice) -> bool {
    let uuids = &secondary.cache.uuids;
    let Some(inode) = uuids.slot_of(backing.uuid()) else { return false };
    let slot = uuids.entries()[inode.0 as usize];
    let Some(SlotRole::Secondary { primary: named, copy }) = slot.role() else { return false };
    let is_newest = backing.copy() == Some(copy) || bug(Bug::OldCopyTrusted);
    // A set that was restored from an older copy lacks the number of the last registration.
    let is_of_last_registration = slot.registrations().contains(&backing.registration());
    named == primary && is_newest && (is_of_last_registration || bug(Bug::RestoredCopyTrusted))
}

/// Makes the dirty data of both sets equal where they may differ after a crash, and links the volume to its second set. It is not
/// served yet. The primary decides: no client has an answer that the data there is durable.
pub(super) async fn settle(
    primary: &Rc<Components>,
    secondary: &Rc<Components>,
    volume: &Rc<Volume>,
    second_inode: Inode,
) -> Result<(), EngineError> {
    let (Some((cache, inode)), Some(backing)) = (volume.attached(), volume.backing()) else { return Ok(()) };
    let mirror = Rc::new(link(primary, secondary, (volume, &backing), second_inode, true));
    let settled = async {
        let ranges = primary.unsettled.of(inode).into_iter().chain(secondary.unsettled.of(second_inode));
        for range in ranges {
            if !bug(Bug::CopiesNotSettled) {
                settle_range(volume.target(&cache, inode), &mirror, range).await?;
            }
        }
        secondary.cache.journal.commit_keys().await?;
        primary.unsettled.settle(inode).await?;
        secondary.unsettled.settle(second_inode).await?;
        match secondary.cache.device.is_leaving() {
            true => Err(Refusal::Stopping.into()),
            false => Ok(()),
        }
    };
    let settled = settled.await;
    match settled {
        Ok(()) => {
            volume.set_mirror(Some(mirror.clone()));
            watch(primary, secondary, (volume, &mirror));
        }
        Err(_) => mirror.forget_device(),
    }
    settled
}

/// Makes the slot of a copy without dirty data invalid, before the set takes the device over without its primary: a kernel may have served
/// the primary and the device meanwhile, and leaves no trace on a device that stays clean. So the clean data may be old.
async fn drop_clean_copy(
    secondary: &Components,
    state: BackingState,
    backing: &BackingDevice,
) -> Result<(), EngineError> {
    let cache = &secondary.cache;
    let table = cache.uuids.begin_change().await?;
    let Some(inode) = cache.uuids.slot_of(backing.uuid()) else { return Ok(()) };
    let is_dirty = cache.index.tree().dirty_sectors(inode) > Sectors::ZERO;
    if is_dirty || state != BackingState::Clean || bug(Bug::CleanDataOfLostSetTrusted) {
        return Ok(());
    }
    invalidate_slots(cache, table, &[inode]).await
}

/// Registers a device without its set, with the copy of its dirty data; see [`CacheSet::take_over`](super::CacheSet::take_over).
pub(super) async fn take_over(secondary: &Rc<Components>, disk: Disk) -> Result<Rc<Volume>, EngineError> {
    let theirs = secondary.clone();
    let registered = async move {
        let backing = BackingDevice::open(disk).await?;
        let (primary, state) = (backing.set_uuid(), backing.state());
        let has_set = matches!(state, BackingState::Clean | BackingState::Dirty);
        if primary != theirs.uuid() {
            if !has_set || !is_copy(primary, &theirs, &backing) {
                let (set, copy_in) = (primary, theirs.uuid());
                return Err(DeviceRefusal::NoCopy { set, copy_in }.of(&backing.disk().info().name).into());
            }
            drop_clean_copy(&theirs, state, &backing).await?;
            let set = theirs.uuid();
            let named = |sb: &mut format::BackingSuper| {
                sb.set_set_uuid(set);
                sb.set_copy(None);
            };
            backing.update(named).await?;
        }
        attach(&theirs, backing, None).await
    };
    secondary.cache.tasks.to_the_end(registered).await
}
