//! A cache set: one cache device, the backing devices attached to it, and its flash-only volumes.
//!
//! [`CacheSet`] is the interface for the crates above: opening (registering) a cache device, attaching and detaching
//! backing devices, creating and deleting volumes, stopping. The operations are in `open` (with `recover` and
//! `initialise`), `attach` and `stop`. `components` has the components that `open` has connected, `members` the volumes.
//! `memory` reserves the memory of a set.

mod attach;
mod components;
mod initialise;
mod members;
mod memory;
mod mirror;
mod open;
mod recover;
mod replay;
mod slow;
mod stop;
mod unsettled;

use std::rc::{Rc, Weak};

use format::{Inode, Sectors, SlotRole, Uuid};
use io::Disk;

use self::components::Components;
pub use attach::Detaching;
pub use open::SetOptions;

#[cfg(test)]
use crate::device::BackingDevice;
use crate::device::CacheDevice;
use crate::error::EngineError;
use crate::events::{Resolution, SetEvent};
use crate::refusal::Refusal;
use crate::scrub::{DamagedRange, ScrubFigures, ScrubReport};
use crate::volume::{Cache, Volume};
use crate::wipe::Wiped;

/// A running cache set. It is cheap to clone, and runs until [`CacheSet::stop`].
#[derive(Clone)]
pub struct CacheSet {
    components: Rc<Components>,
}

fn components_of(sets: &[CacheSet]) -> Vec<Rc<Components>> {
    sets.iter().map(|set| set.components.clone()).collect()
}

/// Whether a set that was stopped still has its cache device.
pub struct DeviceInUse(Weak<CacheDevice>);

impl DeviceInUse {
    /// Whether tasks of the set have not ended, or another has a reference to it.
    pub fn is_in_use(&self) -> bool {
        self.0.strong_count() > 0
    }
}

/// A summary of a set's state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetStatus {
    /// UUID of the set.
    pub set_uuid: Uuid,
    /// Label of the set; empty if it has none.
    pub label: String,
    /// Name of the cache device.
    pub device: String,
    /// Size of a bucket.
    pub bucket_sectors: Sectors,
    /// Number of buckets.
    pub nbuckets: u32,
    /// The percentage of buckets that cannot be reclaimed at once.
    pub in_use_percent: u8,
    /// Live data in the cache.
    pub cached_sectors: Sectors,
    /// Live dirty data of each slot that has some.
    pub dirty: Vec<(Inode, Sectors)>,
    /// Btree nodes.
    pub btree_nodes: usize,
    /// Bytes of the index in memory.
    pub index_bytes: usize,
    /// The number of free journal buckets, and of all journal buckets.
    pub journal_free: (usize, usize),
    /// The number of journal entries written since the start, and of their bytes.
    pub journal_written: (u64, u64),
    /// The failure that disabled the set, if it is disabled.
    pub failed: Option<String>,
    /// Errors of requests for data to the cache device, after decay.
    pub io_errors: u64,
}

/// Counts of the engine's own work, for tests, benches and metrics.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct EngineCounters {
    /// Btree nodes read after the start.
    pub btree_reads: u64,
    /// Leaves replaced by new nodes.
    pub btree_rewrites: u64,
    /// Priority chains written.
    pub prio_writes: u64,
    /// Walks of the index by the garbage collector.
    pub gc_runs: u64,
    /// Extents moved by the moving garbage collector.
    pub moved_extents: u64,
    /// Extents that were promoted: copied to another bucket because they were read.
    pub promoted_extents: u64,
    /// Writes that overwrote dirty data in place.
    pub overwrites: u64,
    /// The number of times that a new btree node had to wait for a bucket.
    pub btree_waits: u64,
    /// Buckets whose generation wrapped around.
    pub gen_wraps: u64,
}

impl CacheSet {
    /// Opens (registers) a cache device: initialises it if it is new, otherwise recovers its state.
    ///
    /// # Errors
    /// If a structure is damaged, unsupported or does not fit the device. In these cases nothing was written, except to
    /// a device that was being initialised.
    pub async fn open(cache: Disk, options: SetOptions) -> Result<CacheSet, EngineError> {
        open::open(cache, options).await.map(|components| CacheSet { components })
    }

    /// Copies the dirty data of a volume of this set to a second set. From now on, dirty data of the volume is there, too, before a write
    /// of it is acknowledged. The call ends when the copy is complete; the volume is served meanwhile.
    ///
    /// # Errors
    /// If the volume is not attached to this set or has a copy, if the sets do not fit each other, or if one of them fails.
    pub async fn mirror(&self, volume: &Rc<Volume>, secondary: &CacheSet) -> Result<(), EngineError> {
        let (one, two, volume) = (self.components.clone(), secondary.components.clone(), volume.clone());
        let copied = async move { mirror::mirror(&one, &two, &volume).await };
        self.components.cache.tasks.to_the_end(copied).await
    }

    /// Gives a volume to the set that has a copy of its dirty data, as after the loss of this set; clients do not notice it. What this set
    /// has of the volume is invalid from then on.
    ///
    /// # Errors
    /// If no other set has all of it, or the superblock of the backing device cannot be written; the volume stays in this set then.
    pub async fn hand_over(&self, volume: &Rc<Volume>) -> Result<(), EngineError> {
        let (theirs, volume) = (self.components.clone(), volume.clone());
        let handed = async move { mirror::hand_over(&theirs, &volume).await };
        self.components.cache.tasks.to_the_end(handed).await
    }

    /// Ends the copies that this set has of the dirty data of volumes of other sets, which go on without them.
    ///
    /// # Errors
    /// If the superblock of a backing device cannot be written. The copy that it names stays then.
    pub async fn give_up_copies(&self) -> Result<(), EngineError> {
        mirror::give_up_copies(&self.components).await
    }

    /// Ends the copy that this set has of the dirty data of one volume of another set, which goes on without it.
    ///
    /// # Errors
    /// If the superblock of the backing device cannot be written. The copy that it names stays then.
    pub async fn give_up_copy(&self, volume: &Rc<Volume>) -> Result<(), EngineError> {
        let (theirs, volume) = (self.components.clone(), volume.clone());
        let ended = async move { mirror::give_up_copy_of(&theirs, &volume).await };
        self.components.cache.tasks.to_the_end(ended).await
    }

    /// Writes the group of the set to the superblock of the cache device; `None`: it is in none.
    ///
    /// # Errors
    /// If the superblock cannot be written.
    pub async fn set_group(&self, group: Option<Uuid>) -> Result<(), EngineError> {
        let cache = self.cache().clone();
        let store = async move { mirror::set_group(&cache, group).await };
        self.cache().tasks.to_the_end(store).await
    }

    /// Ends the membership of the set in its group: the copies that it has end, and all its slots become invalid, so it is empty. `others`:
    /// the other sets of the group.
    ///
    /// # Errors
    /// If the set has a volume, or dirty data that none of the others has, or a device cannot be written. A part of the copies may have
    /// ended then.
    pub async fn leave_group(&self, others: &[CacheSet]) -> Result<(), EngineError> {
        let (theirs, others) = (self.components.clone(), components_of(others));
        let left = async move { mirror::leave_group(&theirs, &others).await };
        self.components.cache.tasks.to_the_end(left).await
    }

    /// Registers a backing device as [`CacheSet::register`] does, together with the set that has a copy of its dirty data. If that
    /// copy is not the newest one, the device has no copy any more, as after [`CacheSet::register`].
    ///
    /// # Errors
    /// Those of [`CacheSet::register`].
    pub async fn register_with(&self, secondary: &CacheSet, disk: Disk) -> Result<Rc<Volume>, EngineError> {
        mirror::register_with(&self.components, &secondary.components, disk).await
    }

    /// Registers a backing device of another set, of whose dirty data this set has a copy. From now on the device belongs to this set.
    /// The caller knows that no other program has used the other set alone.
    ///
    /// # Errors
    /// If this set has no copy of the dirty data, or the newest one is another; and those of [`CacheSet::register`].
    pub async fn take_over(&self, disk: Disk) -> Result<Rc<Volume>, EngineError> {
        mirror::take_over(&self.components, disk).await
    }

    /// The group of the set, if it is in one.
    pub fn group(&self) -> Option<Uuid> {
        self.components.cache.device.superblock().group()
    }

    /// The set that has the dirty data of a backing device of this set, too, as this set knows it; its copy may be out of date.
    pub fn second_set_of(&self, backing: Uuid) -> Option<Uuid> {
        mirror::second_set_of(&self.components.cache, backing)
    }

    /// Attaches a device, for tests.
    #[cfg(test)]
    pub(crate) async fn attached(&self, backing: Rc<BackingDevice>) -> Result<Rc<Volume>, EngineError> {
        attach::attach(&self.components, backing, None).await
    }

    /// Passes changed tunables on, for tests that change them directly.
    #[cfg(test)]
    pub(crate) fn tunables_changed(&self) {
        self.components.tunables_changed();
    }

    /// What the volumes of the set share, for the figures.
    pub(crate) fn cache(&self) -> &Rc<Cache> {
        &self.components.cache
    }

    /// UUID of the set.
    pub fn uuid(&self) -> Uuid {
        self.components.uuid()
    }

    /// Writes the label of the set to the superblock of the cache device.
    ///
    /// # Errors
    /// If the label is too long, or the superblock cannot be written.
    pub async fn set_label(&self, label: &str) -> Result<(), EngineError> {
        let Some(bytes) = format::superblock::label_bytes(label) else {
            return Err(Refusal::LabelTooLong { bytes: label.len() }.into());
        };
        let cache = self.cache().clone();
        let store = async move {
            let _config = cache.uuids.lock().await;
            cache.device.check()?;
            cache.device.change_superblock(|sb| sb.set_label(bytes));
            cache.device.write_superblock().await
        };
        self.cache().tasks.to_the_end(store).await
    }

    /// A summary of the set's state.
    pub fn status(&self) -> SetStatus {
        let cache = self.cache();
        let buckets = cache.alloc.buckets();
        let tree = cache.index.tree();
        SetStatus {
            set_uuid: self.uuid(),
            label: cache.device.superblock().label(),
            device: cache.device.place().device.to_string(),
            bucket_sectors: cache.geometry.bucket_sectors,
            nbuckets: cache.geometry.nbuckets,
            in_use_percent: buckets.in_use_percent() as u8,
            cached_sectors: buckets.live_total(),
            dirty: tree.all_dirty().filter(|(_, n)| *n > Sectors::ZERO).collect(),
            btree_nodes: tree.node_count(),
            index_bytes: tree.loaded_bytes(),
            journal_free: cache.journal.free_buckets(),
            journal_written: cache.journal.written(),
            failed: cache.device.failure(),
            io_errors: cache.device.error_count(),
        }
    }

    /// Calls `f` with the statistics of all devices of the set together, which have the views of the kernel.
    pub fn with_stats<T>(&self, f: impl FnOnce(&mut crate::stats::CacheStats) -> T) -> T {
        let cache = self.cache();
        let stats = &mut *cache.stats.borrow_mut();
        stats.tick(cache.rt.now());
        f(stats)
    }

    /// Zeroes the totals of the set: the statistics, and the counts of keys that were written back (`clear_stats`).
    pub fn clear_stats(&self) {
        self.cache().stats.borrow_mut().clear_total();
        self.cache().device.counters().clear_for_set();
    }

    /// Zeroes the counts of the cache device: the data written to it, and its errors (`clear_stats` of the cache
    /// device).
    pub fn clear_device_stats(&self) {
        self.cache().device.counters().clear_for_cache_device();
        self.cache().device.clear_errors();
    }

    /// Counts of what was written to the cache device and of the keys that were written back.
    pub fn set_counters(&self) -> crate::stats::SetCounters {
        *self.cache().device.counters()
    }

    /// Counts of the engine's own work.
    pub fn counters(&self) -> EngineCounters {
        let cache = self.cache();
        let (alloc, index, gc) = (cache.alloc.counters(), cache.index.counters(), cache.gc.counters());
        EngineCounters {
            prio_writes: alloc.prio_writes,
            gen_wraps: alloc.gen_wraps,
            btree_waits: alloc.btree_waits,
            btree_reads: index.reads,
            btree_rewrites: index.rewrites,
            gc_runs: gc.walks,
            moved_extents: gc.moved,
            promoted_extents: gc.promoted,
            overwrites: cache.overwrites(),
        }
    }

    /// Size of a block.
    pub fn block_sectors(&self) -> Sectors {
        self.cache().geometry.block_sectors
    }

    /// Whether cached data has checksums.
    pub fn has_checksums(&self) -> bool {
        self.cache().data.has_checksums()
    }

    /// Counts of checksums.
    pub fn checksum_counters(&self) -> crate::data::ChecksumCounters {
        self.cache().data.counters()
    }

    /// How much of the live data can be verified. In a large set it is counted at most every ten seconds.
    pub fn checksum_coverage(&self) -> crate::data::ChecksumCoverage {
        self.cache().data.coverage()
    }

    /// The damaged dirty data, by slot and position.
    pub fn damaged(&self) -> Vec<DamagedRange> {
        crate::scrub::damaged_ranges(&self.components.scrubber)
    }

    /// The buckets that have this data, ascending. After a restart [`CacheSet::read_again`] finds it by them.
    pub fn damaged_buckets(&self) -> Vec<format::BucketNr> {
        crate::scrub::damaged_buckets(&self.components.scrubber)
    }

    /// Reads the live data of these buckets and compares it with its checksums, so that damage which was known before a restart
    /// is known again. Dropping the future cancels it.
    ///
    /// # Errors
    /// If the set has no checksums, or fails or is stopped.
    pub async fn read_again(&self, buckets: Vec<format::BucketNr>) -> Result<(), EngineError> {
        crate::scrub::read_again(&self.components.scrubber, buckets).await
    }

    /// Accepts or drops damaged dirty data: that of a slot or of all slots, in a range of its volume or all of it. Returns the
    /// number of sectors.
    ///
    /// # Errors
    /// If the device fails a request, or the data of a device that is not registered is to be dropped. Some of the data may
    /// have been accepted or dropped then.
    pub async fn resolve_damaged(
        &self,
        of: Option<Inode>,
        range: Option<(format::Sector, Sectors)>,
        decision: Resolution,
    ) -> Result<Sectors, EngineError> {
        let scrubber = self.components.scrubber.clone();
        let resolve = async move { crate::scrub::resolve(&scrubber, of, range, decision).await };
        self.cache().tasks.to_the_end(resolve).await
    }

    /// Reads all live data in the cache and compares it with its checksums. Begins where an unfinished scrub has ended.
    /// Dropping the future cancels the scrub, and a later one continues there.
    ///
    /// # Errors
    /// If the set has no checksums, or fails or is stopped.
    pub async fn scrub(&self) -> Result<ScrubReport, EngineError> {
        crate::scrub::scrub(&self.components.scrubber).await
    }

    /// The scrub under way, and the last ones.
    pub fn scrub_figures(&self) -> ScrubFigures {
        ScrubFigures::of(&self.components.scrubber)
    }

    /// Flushes sent to the cache device.
    pub fn cache_flushes(&self) -> u64 {
        self.cache().device.flush_count()
    }

    /// The requests to the cache device that it has not answered.
    pub fn cache_in_flight(&self) -> io::InFlight {
        self.components.cache.device.disk().in_flight()
    }

    /// Every volume of the set: cached devices and flash-only ones.
    pub fn volumes(&self) -> Vec<Rc<Volume>> {
        self.components.members.volumes()
    }

    /// The events of the set since the last call.
    pub fn take_events(&self) -> Vec<SetEvent> {
        self.cache().device.events().take()
    }

    /// Waits until [`CacheSet::take_events`] returns an event.
    pub async fn events_arrived(&self) {
        self.cache().device.events().arrived().await;
    }

    /// The failure that has disabled the set, if there was one.
    pub fn failure(&self) -> Option<EngineError> {
        self.cache().device.check().err()
    }

    /// Walks the index now: drops stale keys and joins small leaves.
    pub async fn gc(&self) -> Result<(), EngineError> {
        let gc = self.cache().gc.clone();
        self.cache().tasks.to_the_end(async move { crate::gc::collect(&gc).await }).await
    }

    /// Overwrites with zeros all sectors that no volume of the set needs, durably. Dropping the future cancels the
    /// wipe; the sectors that were overwritten stay so.
    ///
    /// # Errors
    /// If the device fails a request, or the set fails or is stopped: some of the data is left, and another wipe
    /// removes it.
    pub async fn wipe(&self) -> Result<Wiped, EngineError> {
        crate::wipe::wipe(self.cache(), &self.components.wiper).await
    }

    /// The number of buckets that the wipe under way has finished, and of all its buckets.
    pub fn wipe_progress(&self) -> (u32, u32) {
        self.components.wiper.progress()
    }

    /// The number of live dirty sectors of a slot.
    pub fn dirty_sectors(&self, inode: Inode) -> Sectors {
        self.cache().index.tree().dirty_sectors(inode)
    }

    /// UUID and label of the backing device or flash-only volume that has a slot.
    pub fn slot(&self, inode: Inode) -> Option<(Uuid, String)> {
        let entries = self.cache().uuids.entries();
        entries.get(inode.0 as usize).filter(|e| e.is_live()).map(|e| (e.uuid, e.label()))
    }

    /// Whether the data of a slot is a copy of the dirty data of another set.
    pub fn has_copy_in(&self, inode: Inode) -> bool {
        let entries = self.cache().uuids.entries();
        let role = entries.get(inode.0 as usize).and_then(|entry| entry.role());
        matches!(role, Some(SlotRole::Secondary { .. }))
    }

    /// The slot of the backing device or flash-only volume with this UUID.
    pub fn slot_of(&self, uuid: Uuid) -> Option<Inode> {
        self.cache().uuids.slot_of(uuid)
    }

    /// The backing devices that have dirty data in the cache and are not registered: label or, without one, UUID, and the
    /// dirty data. Copies of the dirty data of another set do not count.
    pub fn dirty_without_volume(&self) -> Vec<(String, Sectors)> {
        let registered: Vec<Inode> = self.volumes().iter().filter_map(|v| v.inode()).collect();
        let uuids = &self.cache().uuids;
        // The keys of an invalid slot are in the index until a walk drops them.
        let is_wanted =
            |inode: Inode| uuids.is_live(inode) && !registered.contains(&inode) && !self.has_copy_in(inode);
        let dirty = self.status().dirty.into_iter().filter(|(inode, _)| is_wanted(*inode));
        dirty.map(|(inode, sectors)| (uuids.name_of(inode), sectors)).collect()
    }

    /// The devices whose dirty data this set has a copy of, and of which none of the other sets has the dirty data: label or UUID.
    pub fn lone_copies(&self, others: &[CacheSet]) -> Vec<(String, Sectors)> {
        mirror::lone_copies(&self.components, &components_of(others))
    }

    /// The value of a tunable of the set, by the kernel's name.
    pub fn get(&self, name: &str) -> Option<String> {
        self.cache().tunables.borrow().get(name).ok()
    }

    /// A copy of all tunables of the set.
    pub fn tunables(&self) -> crate::tunables::SetTunables {
        self.cache().tunables.borrow().clone()
    }

    /// Sets a tunable of the set, by the kernel's name. Tunables that the superblock stores are also written there.
    ///
    /// # Errors
    /// If the name is unknown, the value is invalid, or the superblock cannot be written.
    pub async fn set(&self, name: &str, value: &str) -> Result<(), EngineError> {
        let components = &self.components;
        let mut next = self.cache().tunables.borrow().clone();
        next.set(name, value).map_err(Refusal::from)?;
        if !next.synchronous {
            return Err(Refusal::NotSynchronous.into());
        }
        let stored = {
            let old = self.cache().tunables.borrow();
            (old.discard, old.cache_replacement_policy) != (next.discard, next.cache_replacement_policy)
        };
        if stored {
            let (components, name, value) = (components.clone(), name.to_owned(), value.to_owned());
            let store = async move { components.store_tunable(&name, &value).await };
            self.cache().tasks.to_the_end(store).await?;
        } else {
            components.set_tunable(name, value)?;
        }
        components.tunables_changed();
        Ok(())
    }

    /// Registers a backing device with this set. A device of this set is served with its cached data; a device of no
    /// set is attached.
    ///
    /// # Errors
    /// If the device belongs to another set, has dirty data that this cache does not know, or does not fit the set.
    pub async fn register(&self, disk: Disk) -> Result<Rc<Volume>, EngineError> {
        attach::register(&self.components, disk).await
    }

    /// Creates a flash-only volume of `size`, rounded down to whole blocks.
    ///
    /// # Errors
    /// If no slot is free, or the size is zero.
    pub async fn create_volume(
        &self,
        uuid: Uuid,
        size: Sectors,
        label: &str,
    ) -> Result<Rc<Volume>, EngineError> {
        attach::create_volume(&self.components, uuid, size, label).await
    }

    /// Deletes a flash-only volume with its data.
    ///
    /// # Errors
    /// If the slot is not that of a flash-only volume.
    pub async fn delete_volume(&self, inode: Inode) -> Result<(), EngineError> {
        attach::delete_volume(&self.components, inode).await
    }

    /// The first and longer part of a detach, which can be cancelled: the volume takes no new dirty data, and its dirty
    /// data is written back. The caller then calls [`CacheSet::detach`] while it holds the guard.
    ///
    /// # Errors
    /// If data cannot be written back.
    pub async fn begin_detach(&self, volume: &Rc<Volume>) -> Result<Detaching, EngineError> {
        attach::begin_detach(volume).await
    }

    /// Stops a volume and releases its backing device as it is: attached, with its dirty data in the cache. The device
    /// can be registered again when the last reference to the volume is dropped. A flash-only volume is stopped until
    /// the set is opened again.
    ///
    /// # Errors
    /// If answered writes cannot be made durable; the volume is stopped in this case, too.
    pub async fn release(&self, volume: &Rc<Volume>) -> Result<(), EngineError> {
        attach::release(&self.components, volume).await
    }

    /// Detaches a backing device after writing all its dirty data back. The volume stays up and serves the device
    /// without a cache.
    ///
    /// # Errors
    /// If data cannot be written back; the device then stays attached.
    pub async fn detach(&self, volume: &Rc<Volume>) -> Result<(), EngineError> {
        attach::detach(&self.components, volume).await
    }

    /// Stops the volumes and the set. Every answered write is durable afterwards.
    ///
    /// # Errors
    /// If a write or flush failed; data whose flush was answered before is durable in this case, too.
    pub async fn stop(&self) -> Result<(), EngineError> {
        stop::stop(&self.components).await
    }

    /// The use of the cache device, which ends some time after the stop of the set.
    pub fn device_in_use(&self) -> DeviceInUse {
        DeviceInUse(Rc::downgrade(&self.cache().device))
    }

    /// Ends the set as a process crash does: writes nothing and waits for nothing. The caller has dropped the tasks of
    /// the runtime; this function drops the references that would keep the set alive.
    pub fn abandon(self) {
        stop::abandon(&self.components);
    }
}

#[cfg(test)]
mod tests;
