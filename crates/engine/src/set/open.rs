//! Opening a cache device: reading its structures, replaying the journal, starting the tasks of the set.
//!
//! Recovery needs no free place in the journal: replayed keys pin the entries in which they were found, and are written
//! to their leaves later. A device that was never used (`sync` = 0) is initialised first (format section 13).
//!
//! Owns the order of recovery, and connects the components (`assemble`). Must not know the paths of requests.

use std::cell::RefCell;
use std::rc::Rc;

use format::bset::BsetBuilder;
use format::{
    Bkey, BucketNr, BucketPrio, CacheSuper, Gen, Inode, Jset, JsetBuilder, JsetRoots, PrioHeader, Ptr,
    Replay, Sector, Sectors, encode_prio_set,
};
use io::{CrashLogRef, Disk, MemoryBudget, Reservation};

use super::CacheSet;
use super::core::Core;
use crate::alloc::{Allocator, Buckets, Eviction, LoadedPrios, apply_prios, load_prios, refill_task};
use crate::canary::{Bug, Mark, bug, mark};
use crate::device::{BackingDevices, CacheDevice, SUPERBLOCK_SECTOR, Tick, read_cache};
use crate::error::{EngineError, Place};
use crate::events::SetEvent;
use crate::gc::Gc;
use crate::index::{
    Index, MAX_POSITION, Reader, Tree, Via, account_tree, claim_metadata, evict_task, leaf_writer_task,
    load_tree, names_data, reclaim_task, write_old_leaves_task,
};
use crate::journal::{Journal, Layout, newer_entries, scan};
use crate::policy::congestion::Congestion;
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

/// The state that recovery has read from the cache device.
struct Recovered {
    buckets: Buckets,
    tree: Tree,
    journal: Journal,
    prios: LoadedPrios,
    uuids: Vec<format::UuidEntry>,
    /// Whether the UUID table has the old, shorter slots.
    old_uuids: bool,
    events: Vec<SetEvent>,
}

impl CacheSet {
    /// Opens (registers) a cache device: initialises it if it is new, otherwise recovers its state.
    ///
    /// # Errors
    /// If a structure is damaged, unsupported or does not fit the device. In these cases nothing was written, except to
    /// a device that was being initialised.
    pub async fn open(cache: Disk, options: SetOptions) -> Result<CacheSet, EngineError> {
        let crash_log = options.crash_log.clone();
        let opened = CacheSet::open_device(cache, options).await;
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

    async fn open_device(cache: Disk, options: SetOptions) -> Result<CacheSet, EngineError> {
        let mut superblock = read_cache(&cache).await?;
        let place = Place { device: cache.info().name.clone(), set: superblock.set_uuid().to_string() };
        let mut memory = super::memory::reserve(&options.memory, superblock.geometry(), &place)?;
        // From now on the set relies on data that an earlier process has left in the volatile cache of the device, so
        // it must be durable.
        if !bug(Bug::OpenWithoutFlush) {
            cache.flush().await?;
        }
        if superblock.has_obsolete_large_bucket() {
            return Err(EngineError::Invalid(format!(
                "{}: the set uses the obsolete large-bucket format, which is read-only: extract its data instead",
                place.device
            )));
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
        let set = CacheSet { core: assemble(device, r, options, memory) };
        let core = &set.core;
        for e in events {
            core.cache.device.emit(e);
        }
        core.tunables_changed();
        invalidate_unreachable_slots(core);
        let (ready, for_prios) = core.cache.alloc.prime();
        // No more buckets are needed: the buckets of the old priorities are free after the new ones are written.
        let needed = for_prios + usize::from(bug(Bug::StartWantsOneMore));
        if ready < needed {
            mark(Mark::NoBuckets);
            return Err(EngineError::NoSpace(format!(
                "{}: {ready} buckets are empty, {needed} are needed to write priorities: all others hold data or metadata. \
                 `ubcache extract` reads the volumes",
                core.cache.device.place().device,
            )));
        }
        {
            let _lock = core.cache.uuids.lock().await;
            core.cache.device.write_superblock().await?;
        }
        start_tasks(core);
        if old_uuids {
            // Journal entries of this version imply slots of 128 bytes, so the table is written first (format section
            // 7).
            let _lock = core.cache.uuids.lock().await;
            core.cache.uuids.update(|_| ()).await?;
        }
        start_volumes(core);
        Ok(set)
    }
}

/// The smallest number of blocks in the journal of a new set: enough even if every leaf of a small index needs a new
/// root.
const MIN_JOURNAL_BLOCKS: u64 = 64;

/// The number of buckets of a new journal: the kernel's number, or more if the buckets are very small.
fn journal_buckets(superblock: &CacheSuper) -> u16 {
    let g = superblock.geometry();
    let blocks_each = g.bucket_sectors.0 / g.block_sectors.0;
    let most = u64::from(g.nbuckets / 8).min(256);
    let wanted = MIN_JOURNAL_BLOCKS.div_ceil(blocks_each).min(most);
    superblock.default_journal_buckets().max(wanted as u16)
}

/// Initialises a new device as an empty set.
async fn initialise(cache: &Disk, place: &Place, superblock: &mut CacheSuper) -> Result<(), EngineError> {
    let count = journal_buckets(superblock);
    superblock.set_journal_buckets(count).map_err(|c| place.corrupt(SUPERBLOCK_SECTOR, &c))?;
    let g = *superblock.geometry();
    let magic = superblock.set_magic();
    let pool = cache.runtime().pool().clone();
    // If the device was formatted again with its old set UUID, recovery must not find old entries.
    for bucket in superblock.journal_buckets() {
        cache.write_zeroes(g.bucket_start(bucket), g.bucket_sectors).await?;
    }
    let first = g.first_dynamic();
    let prio_at = |i: u32| BucketNr(first.0 + i);
    let uuid_bucket = prio_at(g.prio_buckets);
    let root_bucket = prio_at(g.prio_buckets + 1);
    if root_bucket.0 >= g.nbuckets {
        return Err(EngineError::Invalid(format!(
            "{}: expected more than {root_bucket} buckets, for the metadata of a set, found {}: format it with smaller buckets",
            place.device, g.nbuckets
        )));
    }
    let one = Gen(1);
    let metadata = |b: u32| b >= first.0 && b <= root_bucket.0;
    let prios: Vec<BucketPrio> = (0..g.nbuckets)
        .map(|b| match metadata(b) {
            true => BucketPrio { prio: u16::MAX, generation: one },
            false => BucketPrio { prio: 0, generation: Gen(0) },
        })
        .collect();
    for (i, group) in prios.chunks(g.prios_per_bucket as usize).enumerate().rev() {
        let i = i as u32;
        let next_bucket = if i + 1 < g.prio_buckets { u64::from(prio_at(i + 1).0) } else { 0 };
        let mut buffer = pool.zeroed(g.meta_sectors.bytes() as usize);
        encode_prio_set(buffer.as_mut(), magic, PrioHeader { seq: 1, next_bucket }, group);
        cache.write(g.bucket_start(prio_at(i)), buffer, false).await?;
    }
    cache.write(g.bucket_start(uuid_bucket), pool.zeroed(g.meta_sectors.bytes() as usize), false).await?;
    let root_ptr = Ptr::new(0, g.bucket_start(root_bucket), one);
    let mut buffer = pool.zeroed(g.block_sectors.bytes() as usize);
    let seq = cache.runtime().random() | 1;
    let len = BsetBuilder::begin(buffer.as_mut(), seq, g.block_sectors).finish(magic, root_ptr);
    buffer.set_len(len);
    cache.write(root_ptr.offset(), buffer, false).await?;
    cache.flush().await?;

    let mut prio_bucket = [0; 8];
    if let Some(slot) = prio_bucket.get_mut(usize::from(superblock.nr_this_dev())) {
        *slot = u64::from(first.0);
    }
    let roots = JsetRoots {
        uuid_bucket: Bkey::uuid_bucket(g.meta_sectors, Ptr::new(0, g.bucket_start(uuid_bucket), one)),
        btree_root: Bkey::root(g.node_sectors, root_ptr),
        btree_level: 0,
        prio_bucket,
    };
    let mut buffer = pool.zeroed(g.block_sectors.bytes() as usize);
    let seq = format::JournalSeq(1);
    let len = JsetBuilder::begin(buffer.as_mut(), g.block_sectors).finish(magic, seq, seq, &roots);
    buffer.set_len(len);
    // The first entry ever goes into the second bucket of the ring (format section 9.2).
    let at = g.journal_bucket(1).or(g.journal_bucket(0)).unwrap_or(g.first_bucket);
    cache.write(g.bucket_start(at), buffer, true).await?;
    superblock.set_sync(true);
    superblock.prepare_write(cache.runtime().wall_seconds());
    write_first_superblock(cache, &superblock.encode()).await
}

/// Writes the first superblock of a set with the list of journal buckets. A power loss may tear a write between
/// sectors, and the list may be longer than the first sector. The checksum on the device does not cover the list, so
/// the list is written first; afterwards only the first sector changes.
async fn write_first_superblock(cache: &Disk, bytes: &[u8]) -> Result<(), EngineError> {
    let pool = cache.runtime().pool().clone();
    let sector = Sectors(1).bytes() as usize;
    let (first, rest) = bytes.split_at(sector);
    let one = cache.info().logical_block_bytes as usize > sector || rest.iter().all(|b| *b == 0);
    if one || bug(Bug::SuperblockInOnePiece) {
        cache.write(SUPERBLOCK_SECTOR, pool.copy_of(bytes), true).await?;
        return Ok(());
    }
    cache.write(SUPERBLOCK_SECTOR + Sectors(1), pool.copy_of(rest), true).await?;
    cache.write(SUPERBLOCK_SECTOR, pool.copy_of(first), true).await?;
    Ok(())
}

/// Reads journal, priorities, UUID table and index, and replays the keys of the journal in memory.
async fn recover(
    device: &Rc<CacheDevice>,
    options: &SetOptions,
    memory: &mut Reservation,
) -> Result<Recovered, EngineError> {
    let (cache, place) = (device.disk(), device.place());
    let superblock = device.superblock().clone();
    let crash_log = options.crash_log.clone();
    let limit_bytes = usize::try_from(options.tunables.btree_cache_limit).unwrap_or(usize::MAX);
    let g = superblock.geometry();
    let magic = superblock.set_magic();
    let ring_buckets: Vec<BucketNr> = superblock.journal_buckets().collect();
    let tables_bytes = memory.bytes();
    let mut found = scan(cache, place, g, magic, &ring_buckets, superblock.discard(), memory)
        .await
        .inspect_err(|_| mark(Mark::BadJournal))?;
    let journal_sector = ring_buckets.first().map_or(Sector(0), |b| g.bucket_start(*b));
    let bad_journal = |c: &format::Corrupt| place.corrupt(journal_sector, c);
    let newest =
        found.replay.newest_entry().ok_or_else(|| place.damage(journal_sector, "journal: no entry"))?.clone();
    let on_device = found.replay.entries.len();
    if let Some(s) = &crash_log {
        found.replay.entries.extend(newer_entries(&**s, superblock.seq(), &newest, g));
    }
    newest.check_roots(g, superblock.nr_this_dev()).map_err(|c| bad_journal(&c))?;
    for e in &found.replay.entries {
        e.check_keys(g).map_err(|c| bad_journal(&c))?;
    }
    let first_prio = newest.prio_bucket.get(usize::from(superblock.nr_this_dev())).copied().unwrap_or(0);
    let prios = load_prios(cache, place, g, magic, first_prio).await.inspect_err(|_| mark(Mark::BadPrios))?;
    let mut buckets = Buckets::new(g, g.first_dynamic(), g.nbuckets);
    apply_prios(&mut buckets, &prios);
    let uuids = read_uuids(cache, place, &newest).await.inspect_err(|_| mark(Mark::BadUuids))?;
    check_uuids(&uuids, &newest, place).inspect_err(|_| mark(Mark::BadUuids))?;

    let reader = Reader { disk: cache, place, geometry: g, magic };
    if let Some(ptr) = newest.btree_root.pointer() {
        buckets.raise(buckets.bucket_of(ptr), ptr.generation());
    }
    let loaded = load_tree(&reader, (newest.btree_root, newest.btree_level), limit_bytes, &mut buckets)
        .await
        .inspect_err(|_| mark(Mark::BadNode))?;
    let (mut tree, mut events) = (loaded.tree, loaded.events);
    // Every key of the journal raises its generation before any pointer is considered stale (format section 10).
    for ptr in found.replay.entries.iter().flat_map(|e| &e.keys).filter_map(|k| k.pointer()) {
        if ptr.is_available() && !bug(Bug::ReplayRaisesNothing) {
            if ptr.generation().age_of(buckets.generation(buckets.bucket_of(ptr))) > 0 {
                mark(Mark::ReplayRaised);
            }
            buckets.raise(buckets.bucket_of(ptr), ptr.generation());
        }
    }
    if let Some(ptr) = newest.uuid_bucket.pointer() {
        let b = buckets.bucket_of(ptr);
        buckets.raise(b, ptr.generation());
        claim_metadata(&mut buckets, b, "UUID table", &reader)?;
    }
    account_tree(&reader, &mut tree, &mut buckets).await.inspect_err(|_| mark(Mark::BadNode))?;

    let layout = Layout {
        buckets: ring_buckets,
        bucket_sectors: g.bucket_sectors,
        magic,
        block_sectors: g.block_sectors,
    };
    let oldest = found.replay.oldest;
    let roots = newest.roots();
    let journal = Journal::new(device.clone(), layout, found.ring, newest.seq, oldest, roots);
    replay_keys(&found.replay, &mut tree, &mut buckets, &journal, &reader).await?;
    // Entries of the crash log are written to the journal before any new key.
    for entry in found.replay.entries.iter().skip(on_device) {
        mark(Mark::ReplayedCrashLog);
        journal.adopt(&entry.keys).await?;
    }
    if let Some(crash_log) = crash_log {
        device.crash_log().begin(crash_log);
    }
    let keys = found.replay.entries.iter().map(|e| e.keys.len() as u64).sum();
    events.push(SetEvent::Replayed { entries: found.replay.entries.len() as u64, keys });
    let old_uuids = newest.version == 0;
    // The memory of the entries is free now.
    memory.shrink_to(tables_bytes);
    Ok(Recovered { buckets, tree, journal, prios, uuids, old_uuids, events })
}

/// Applies the keys of the journal to the index, in order. The leaves pin the entries.
async fn replay_keys(
    replay: &Replay,
    tree: &mut Tree,
    buckets: &mut Buckets,
    journal: &Journal,
    reader: &Reader<'_>,
) -> Result<(), EngineError> {
    let place = reader.place;
    let skipped = usize::from(bug(Bug::ReplayBeginsTooLate));
    if replay.entries.iter().all(|e| e.keys.is_empty()) {
        mark(Mark::NothingToReplay);
    }
    for entry in replay.entries.iter().skip(skipped) {
        for key in &entry.keys {
            let end = key.offset();
            let Some(mut start) = key.start().filter(|s| *s < end) else { continue };
            mark(Mark::Replayed);
            if key.pointer().is_none() {
                mark(Mark::ReplayedHole);
                if bug(Bug::ReplayDropsHoles) {
                    continue;
                }
            } else if key.pointer().is_some_and(|p| !buckets.is_current(p)) {
                mark(Mark::ReplayedStale);
            }
            if end > MAX_POSITION {
                return Err(place.damage(
                    Sector(0),
                    format!(
                        "journal entry {}: key {}:{end}: expected an offset of at most {MAX_POSITION}",
                        entry.seq,
                        key.inode()
                    ),
                ));
            }
            // A stale key still replaces older keys: it acts as a hole (format section 4.5).
            let mut new = key
                .pointer()
                .filter(|p| p.is_available() && buckets.is_current(*p))
                .map(|p| (p, key.dirty()));
            if let Some((ptr, _)) = new {
                let bad = |what| format!("journal entry {}: key {}:{end}: {what}", entry.seq, key.inode());
                names_data(buckets, ptr, key.size()).map_err(|what| place.damage(Sector(0), bad(what)))?;
            }
            while start < end {
                let via = if bug(Bug::ReplayedNotPinned) {
                    Via::LeafOnly { data: Tick::default(), direct: None, durable: journal.durable() }
                } else {
                    Via::Journal(entry.seq)
                };
                let now = io::Nanos(0);
                let id = tree.leaf_at(key.inode(), start);
                reader.load_again(tree, id).await?;
                let done = tree.node(id).clip(key.inode(), end);
                let pin = &mut |seq| journal.pin(seq);
                tree.change(id, key.inode(), start, done, new, via, now, buckets, pin);
                new = new.map(|(p, dirty)| (p.advanced(done - start), dirty));
                start = done;
            }
        }
    }
    Ok(())
}

/// Checks the UUID table by the rules of the format, and that every position of a flash-only volume fits into the
/// index.
fn check_uuids(uuids: &[format::UuidEntry], newest: &Jset, place: &Place) -> Result<(), EngineError> {
    let sector = newest.uuid_bucket.pointer().map_or(Sector(0), |p| p.offset());
    format::uuid_table::check_uuid_table(uuids).map_err(|c| place.corrupt(sector, &c))?;
    let too_large = |u: &format::UuidEntry| u.is_live() && u.is_flash_only() && u.sectors.0 > MAX_POSITION.0;
    match uuids.iter().enumerate().find(|(_, u)| too_large(u)) {
        None => Ok(()),
        Some(_) if bug(Bug::LargeVolumeBelieved) => Ok(()),
        Some((slot, u)) => {
            let what = format!(
                "UUID table: slot {slot}: flash-only volume: expected at most {MAX_POSITION} sectors, found {}",
                u.sectors
            );
            Err(place.damage(sector, what))
        }
    }
}

async fn read_uuids(
    cache: &Disk,
    place: &Place,
    newest: &Jset,
) -> Result<Vec<format::UuidEntry>, EngineError> {
    let key = newest.uuid_bucket;
    let sector = key.pointer().map_or(Sector(0), |p| p.offset());
    let buffer = cache.runtime().pool().take(key.size().bytes() as usize);
    let (buffer, result) = cache.read(sector, buffer).await;
    result?;
    format::uuid_table::parse_uuid_table(buffer.as_slice(), newest.version)
        .map_err(|c| place.corrupt(sector, &c))
}

/// Builds the components of a set from the recovered state, and connects them.
fn assemble(device: Rc<CacheDevice>, r: Recovered, options: SetOptions, memory: Reservation) -> Rc<Core> {
    let rt = device.disk().runtime().clone();
    let geometry = device.geometry();
    let mut tunables = options.tunables;
    tunables.discard = device.superblock().discard();
    if let Some(policy) = device.superblock().replacement() {
        tunables.cache_replacement_policy = policy;
    }
    let eviction = Eviction::new(geometry, tunables.policy(), options.seed);
    let journal = Rc::new(r.journal);
    let alloc = Rc::new(Allocator::new(device.clone(), journal.clone(), r.buckets, r.prios, eviction));
    let (backings, tasks) = (Rc::new(BackingDevices::default()), Rc::new(Tasks::new(rt.clone())));
    let wiring = index::Wiring {
        device: device.clone(),
        backings: backings.clone(),
        journal: journal.clone(),
        alloc: alloc.clone(),
        tasks: tasks.clone(),
    };
    let index = Rc::new(Index::new(r.tree, wiring));
    let uuids = Rc::new(UuidTable::new(device.clone(), journal.clone(), alloc.clone(), r.uuids));
    let wiring = gc::Wiring {
        device: device.clone(),
        backings: backings.clone(),
        journal: journal.clone(),
        alloc: alloc.clone(),
        index: index.clone(),
        uuids: uuids.clone(),
        tasks: tasks.clone(),
    };
    let gc = Rc::new(Gc::new(wiring));
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
        index,
        uuids,
        gc,
        tasks,
        tunables: RefCell::new(tunables),
        stats: RefCell::new(CacheStats::new(now)),
        shared: Shared::new(congestion),
    };
    let core = Rc::new(Core::new(Rc::new(cache), memory));
    // The device belongs to the set and must not keep it alive.
    let weak = Rc::downgrade(&core);
    core.cache.device.set_wake(move || {
        if let Some(core) = weak.upgrade() {
            core.wake_all();
        }
    });
    core
}

/// Invalidates the slots that no device can have any more; a walk of the index removes their keys.
fn invalidate_unreachable_slots(core: &Rc<Core>) {
    let uuids = core.cache.uuids.entries();
    let live = |i: Inode| uuids.get(i.0 as usize).is_some_and(|u| u.is_live());
    let tree = core.cache.index.tree();
    for (i, u) in uuids.iter().enumerate() {
        if u.is_invalidated() {
            mark(Mark::InvalidSlot);
            core.cache.index.invalidate_slot(Inode(i as u32));
        }
    }
    for (inode, _) in tree.all_dirty().filter(|(i, _)| !live(*i)) {
        mark(Mark::UnreachableDirty);
        core.cache.index.invalidate_slot(inode);
    }
    if !core.cache.index.invalid_slots().is_empty() {
        core.cache.alloc.walks().request();
    }
}

fn start_tasks(core: &Rc<Core>) {
    let c = core.clone();
    core.cache.tasks.spawn(Work::Journal, async move {
        if let Err(e) = c.cache.journal.run().await {
            c.cache.device.fail(e);
        }
    });
    for _ in 0..LEAF_WRITERS {
        core.cache.tasks.spawn(Work::Leaves, leaf_writer_task(core.cache.index.clone()));
    }
    core.cache.tasks.spawn(Work::Leaves, reclaim_task(core.cache.index.clone()));
    core.cache.tasks.spawn(Work::Leaves, write_old_leaves_task(core.cache.index.clone()));
    core.cache.tasks.spawn(Work::Leaves, evict_task(core.cache.index.clone()));
    core.cache.tasks.spawn(Work::Allocator, refill_task(core.cache.alloc.clone()));
    core.cache.tasks.spawn(Work::Gc, gc::gc_task(core.cache.gc.clone()));
    core.cache.tasks.spawn(Work::Gc, gc::compact_task(core.cache.gc.clone()));
}

fn start_volumes(core: &Rc<Core>) {
    let slots: Vec<(Inode, format::UuidEntry)> = core
        .cache
        .uuids
        .entries()
        .iter()
        .enumerate()
        .filter(|(_, u)| u.is_live() && u.is_flash_only())
        .map(|(i, u)| (Inode(i as u32), *u))
        .collect();
    for (inode, slot) in slots {
        mark(Mark::FlashVolume);
        let volume = Volume::flash_only(&core.cache, inode, slot.sectors, slot.label());
        core.add(volume);
    }
}
