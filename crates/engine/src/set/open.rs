//! Opening a cache device: recovers its state, connects the components, and starts the tasks of the set.
//!
//! A device that was never used (`sync` = 0) is initialised first (`initialise`). `recover` reads the state.
//!
//! Owns the order of these steps, and connects the components (`assemble`). Must not know the paths of requests.

use std::cell::RefCell;
use std::rc::Rc;

use format::{FooterLayout, Inode};
use io::{CrashLogRef, Disk, MemoryBudget, Reservation};

use super::components::Components;
use super::initialise::initialise;
use super::recover::{Recovered, recover};
use crate::alloc::{Allocator, Eviction, refill_task};
use crate::canary::{Bug, Mark, bug, mark};
use crate::data::{CachedData, footer_task};
use crate::device::{BackingDevices, CacheDevice, read_cache};
use crate::error::{EngineError, NoSpace, Place};
use crate::events::SetEvent;
use crate::gc::Gc;
use crate::index::{Index, evict_task, leaf_writer_task, reclaim_task, write_old_leaves_task};
use crate::policy::congestion::Congestion;
use crate::refusal::DeviceRefusal;
use crate::scrub::scrub_task;
use crate::stats::{CacheStats, Work};
use crate::tasks::Tasks;
use crate::tunables::SetTunables;
use crate::uuids::UuidTable;
use crate::volume::{Cache, Shared, Volume};
use crate::{gc, index};

/// The number of tasks that write queued leaves.
const LEAF_WRITERS: usize = 4;

/// The options for opening a set.
#[derive(Clone, Debug, Default)]
pub struct SetOptions {
    /// The initial settings; those that the superblock stores are taken from there.
    pub tunables: SetTunables,
    /// The seed of the set's random choices (bset sequence numbers, random replacement).
    pub seed: u64,
    /// Memory that outlives the process. With it a process crash loses no answered write, even one that was not
    /// flushed. The memory is for this cache device alone.
    pub crash_log: Option<CrashLogRef>,
    /// The memory budget of all sets of the process, in which the set reserves the memory that its superblock demands.
    pub memory: MemoryBudget,
}

/// Opens a cache device; see [`CacheSet::open`](super::CacheSet::open).
pub(super) async fn open(cache: Disk, options: SetOptions) -> Result<Rc<Components>, EngineError> {
    let crash_log = options.crash_log.clone();
    let opened = open_device(cache, options).await;
    // A device that failed a request may have lost data that an earlier process wrote and did not flush, unless it
    // only had no room.
    if let (Err(EngineError::Io(e)), Some(crash_log)) = (&opened, crash_log)
        && !e.is_out_of_room()
        && !bug(Bug::CrashLogAfterError)
    {
        crash_log.reset();
    }
    opened
}

async fn open_device(cache: Disk, options: SetOptions) -> Result<Rc<Components>, EngineError> {
    let mut superblock = read_cache(&cache).await?;
    let place = Place { device: cache.info().name.clone(), set: superblock.set_uuid().to_string() };
    let footers = superblock.checksum_key().and_then(|_| FooterLayout::of(superblock.geometry()));
    let mut memory =
        super::memory::reserve(&options.memory, superblock.geometry(), footers.as_ref(), &place)?;
    // From now on the set relies on data that an earlier process has left in the volatile cache of the device, so
    // it must be durable.
    if !bug(Bug::OpenWithoutFlush) {
        cache.flush().await?;
    }
    if superblock.has_obsolete_large_bucket() {
        return Err(DeviceRefusal::ObsoleteFormat.of(&place.device).into());
    }
    let mut events = Vec::new();
    if !superblock.sync() {
        mark(Mark::Initialised);
        initialise(&cache, &place, &mut superblock).await?;
        events.push(SetEvent::Initialised);
    }
    let device = Rc::new(CacheDevice::new(cache, place, superblock));
    let mut r = recover(&device, &options, &mut memory).await?;
    events.append(&mut r.events);
    let old_uuids = r.old_uuids;
    let components = assemble(device, r, options, memory)?;
    let cache = &components.cache;
    for e in events {
        cache.device.emit(e);
    }
    components.tunables_changed();
    invalidate_unreachable_slots(cache);
    let (ready, for_prios) = cache.alloc.prime();
    // No more buckets are needed: the buckets of the old priorities are free after the new ones are written.
    let needed = for_prios + usize::from(bug(Bug::StartWantsOneMore));
    if ready < needed {
        mark(Mark::NoBuckets);
        let device = cache.device.place().device.clone();
        return Err(NoSpace::Start { device, ready, needed }.into());
    }
    {
        let _lock = cache.uuids.lock().await;
        cache.device.write_superblock().await?;
    }
    start_tasks(&components);
    if old_uuids {
        // Journal entries of this version imply slots of 128 bytes, so the table is written first (format section
        // 7).
        cache.uuids.begin_change().await?.apply(|_| ()).await?;
    }
    start_volumes(&components);
    Ok(components)
}

/// The tunables of a set; those that the superblock stores are taken from there.
fn with_stored(mut tunables: SetTunables, device: &CacheDevice) -> SetTunables {
    tunables.discard = device.superblock().discard();
    if let Some(policy) = device.superblock().replacement() {
        tunables.cache_replacement_policy = policy;
    }
    tunables
}

/// Builds the components of a set from the recovered state, and connects them.
fn assemble(
    device: Rc<CacheDevice>,
    r: Recovered,
    options: SetOptions,
    memory: Reservation,
) -> Result<Rc<Components>, EngineError> {
    let rt = device.disk().runtime().clone();
    let geometry = device.geometry();
    let tunables = with_stored(options.tunables, &device);
    let eviction = Eviction::new(geometry, tunables.policy(), options.seed);
    let journal = Rc::new(r.journal);
    let alloc = Rc::new(Allocator::new(device.clone(), journal.clone(), r.buckets, r.prios, eviction));
    let data = Rc::new(CachedData::new(device.clone(), alloc.clone())?);
    let (backings, tasks) = (Rc::new(BackingDevices::default()), Rc::new(Tasks::new(rt.clone())));
    let parts = index::IndexParts {
        device: device.clone(),
        backings: backings.clone(),
        journal: journal.clone(),
        alloc: alloc.clone(),
        tasks: tasks.clone(),
    };
    let index = Rc::new(Index::new(r.tree, parts));
    let uuids = Rc::new(UuidTable::new(device.clone(), journal.clone(), alloc.clone(), r.uuids));
    let parts = gc::GcParts {
        device: device.clone(),
        backings: backings.clone(),
        journal: journal.clone(),
        alloc: alloc.clone(),
        data: data.clone(),
        index: index.clone(),
        uuids: uuids.clone(),
        tasks: tasks.clone(),
    };
    let gc = Rc::new(Gc::new(parts));
    let now = rt.now();
    let congestion =
        Congestion::new(tunables.congested_read_threshold_us, tunables.congested_write_threshold_us);
    let cache = Cache {
        rt,
        geometry,
        device,
        backings,
        journal,
        alloc,
        data,
        index,
        uuids,
        gc,
        tasks,
        tunables: RefCell::new(tunables),
        stats: RefCell::new(CacheStats::new(now)),
        shared: Shared::new(congestion),
    };
    let components = Rc::new(Components::new(Rc::new(cache), r.unsettled, memory));
    let members = Rc::downgrade(&components.members);
    components.scrubber.set_volumes(move |inode| members.upgrade()?.with_data_in(inode));
    watch(&components);
    Ok(components)
}

/// Makes the cache device wake the tasks of the set when it fails. The device belongs to the set and must not keep it alive.
fn watch(components: &Rc<Components>) {
    let device = &components.cache.device;
    device.watch_flushes();
    let weak = Rc::downgrade(components);
    device.set_wake(move || {
        if let Some(components) = weak.upgrade() {
            components.wake_all();
        }
    });
}

/// Invalidates the slots that no device can have any more; a walk of the index removes their keys.
fn invalidate_unreachable_slots(cache: &Cache) {
    let uuids = cache.uuids.entries();
    let live = |i: Inode| uuids.get(i.0 as usize).is_some_and(|u| u.is_live());
    let tree = cache.index.tree();
    for (i, u) in uuids.iter().enumerate() {
        if u.is_invalidated() {
            mark(Mark::InvalidSlot);
            cache.index.invalidate_slot(Inode(i as u32));
        }
    }
    for (inode, _) in tree.all_dirty().filter(|(i, _)| !live(*i)) {
        mark(Mark::UnreachableDirty);
        cache.index.invalidate_slot(inode);
    }
    if !cache.index.invalid_slots().is_empty() {
        cache.alloc.walks().request();
    }
}

fn start_tasks(components: &Rc<Components>) {
    let cache = &components.cache;
    // This task keeps the components alive until the set is stopped.
    let kept = components.clone();
    cache.tasks.spawn(Work::Journal, async move {
        if let Err(e) = kept.cache.journal.run().await {
            kept.cache.device.fail(e);
        }
    });
    for _ in 0..LEAF_WRITERS {
        cache.tasks.spawn(Work::Leaves, leaf_writer_task(cache.index.clone()));
    }
    cache.tasks.spawn(Work::Leaves, reclaim_task(cache.index.clone()));
    cache.tasks.spawn(Work::Leaves, write_old_leaves_task(cache.index.clone()));
    cache.tasks.spawn(Work::Leaves, evict_task(cache.index.clone()));
    cache.tasks.spawn(Work::Allocator, refill_task(cache.alloc.clone()));
    if cache.data.has_checksums() {
        cache.tasks.spawn(Work::Allocator, footer_task(cache.data.clone()));
    }
    if cache.data.has_checksums() {
        cache.tasks.spawn(Work::Gc, scrub_task(components.scrubber.clone()));
    }
    cache.tasks.spawn(Work::Gc, gc::gc_task(cache.gc.clone()));
    cache.tasks.spawn(Work::Gc, gc::pack_task(cache.gc.clone()));
}

fn start_volumes(components: &Components) {
    let cache = &components.cache;
    let slots: Vec<(Inode, format::UuidEntry)> = cache
        .uuids
        .entries()
        .iter()
        .enumerate()
        .filter(|(_, u)| u.is_live() && u.is_flash_only())
        .map(|(i, u)| (Inode(i as u32), *u))
        .collect();
    for (inode, slot) in slots {
        mark(Mark::FlashVolume);
        let volume = Volume::flash_only(cache, inode, slot.sectors, slot.label());
        components.members.add(volume);
    }
}
