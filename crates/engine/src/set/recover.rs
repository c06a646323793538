//! Recovery: reads the state of a set from its cache device, and has the keys of the journal replayed in memory.
//!
//! Recovery needs no free place in the journal: replayed keys pin the entries in which they were found, and are written
//! to their leaves later.
//!
//! Owns the order in which the structures are read. Must not know volumes, or how the components are connected.

use std::rc::Rc;

use format::{Bkey, BucketNr, CacheSuper, FooterLayout, Inode, Jset, Replay, Sector, Sectors};
use io::{CrashLogRef, Disk, Reservation};

use super::open::SetOptions;
use super::replay::Replayer;
use super::unsettled::Unsettled;
use crate::alloc::{Buckets, LoadedPrios, apply_prios, load_prios};
use crate::canary::{Bug, Mark, bug, mark};
use crate::damage::Flaw;
use crate::device::{CacheDevice, Reader};
use crate::error::{EngineError, Place};
use crate::events::SetEvent;
use crate::index::{LoadedTree, MAX_POSITION, Tree, account_tree, claim_metadata, load_tree};
use crate::journal::{DurableEntries, Journal, Layout, Ring, newer_entries, scan};

/// The state that recovery has read from the cache device.
pub(super) struct Recovered {
    pub(super) buckets: Buckets,
    pub(super) tree: Tree,
    pub(super) journal: Journal,
    pub(super) prios: LoadedPrios,
    pub(super) uuids: Vec<format::UuidEntry>,
    /// Whether the UUID table has the old, shorter slots.
    pub(super) old_uuids: bool,
    pub(super) unsettled: Unsettled,
    pub(super) events: Vec<SetEvent>,
}

/// The journal as the device and the crash log have it, with all keys and roots checked.
struct ReadJournal {
    /// The entries to replay: those of the device, then those of the crash log.
    replay: Replay,
    /// The number of entries to replay that the device has.
    on_device: usize,
    /// The newest entry of the device, which names the roots.
    newest: Jset,
    ring: Ring,
    ring_buckets: Vec<BucketNr>,
}

impl ReadJournal {
    /// The number of keys to replay.
    fn keys(&self) -> u64 {
        self.replay.entries.iter().map(|e| e.keys.len() as u64).sum()
    }

    /// The keys of the newest entry of the device, and of the crash log.
    fn newest_keys(&self) -> impl Iterator<Item = &Bkey> {
        self.replay.entries.iter().skip(self.on_device.saturating_sub(1)).flat_map(|e| &e.keys)
    }

    fn durable_entries(&self) -> DurableEntries {
        let newest = &self.newest;
        let (oldest, replays_keys) = (self.replay.oldest, self.keys() > 0);
        DurableEntries { newest: newest.seq, oldest, roots: newest.roots(), replays_keys }
    }
}

/// Reads journal, priorities, UUID table and index, and replays the keys of the journal in memory.
pub(super) async fn recover(
    device: &Rc<CacheDevice>,
    options: &SetOptions,
    memory: &mut Reservation,
) -> Result<Recovered, EngineError> {
    let (cache, place) = (device.disk(), device.place());
    let superblock = device.superblock().clone();
    let limit_bytes = usize::try_from(options.tunables.btree_cache_limit).unwrap_or(usize::MAX);
    let reader =
        Reader { disk: cache, place, geometry: superblock.geometry(), magic: superblock.set_magic() };
    let g = reader.geometry;
    let tables_bytes = memory.bytes();
    let read = read_journal(&reader, &superblock, options.crash_log.as_ref(), memory).await?;
    let newest = &read.newest;
    let first_prio = newest.prio_bucket.get(usize::from(superblock.nr_this_dev())).copied().unwrap_or(0);
    let prios = load_prios(&reader, first_prio).await.inspect_err(|_| mark(Mark::BadPrios))?;
    let mut buckets = Buckets::new(g, g.first_dynamic(), g.nbuckets).map_err(|e| place.no_memory(g, e))?;
    apply_prios(&mut buckets, &prios);
    if let Some(footers) = superblock.checksum_key().and_then(|_| FooterLayout::of(g)) {
        buckets.leave_footer_room(footers.data_sectors());
    }
    let uuids = load_uuids(&reader, newest).await?;
    let LoadedTree { mut tree, mut events } = load_index(&reader, &read, limit_bytes, &mut buckets).await?;
    check_owners(&tree, &uuids).map_err(|flaw| place.damage(uuids_sector(newest), flaw))?;

    // No entry may be written before.
    let unsettled = Unsettled::open(device, &uuids, read.newest_keys()).await?;
    let (keys, entries) = (read.keys(), read.durable_entries());
    let layout = Layout {
        buckets: read.ring_buckets,
        bucket_sectors: g.bucket_sectors,
        magic: reader.magic,
        block_sectors: g.block_sectors,
    };
    let journal = Journal::new(device.clone(), layout, read.ring, entries);
    Replayer {
        tree: &mut tree,
        buckets: &mut buckets,
        journal: &journal,
        reader: &reader,
        entries: &read.replay.entries,
        limit_bytes,
    }
    .apply_all(memory)
    .await?;
    // Entries of the crash log are written to the journal before any new key.
    for entry in read.replay.entries.iter().skip(read.on_device) {
        mark(Mark::ReplayedCrashLog);
        journal.adopt(&entry.keys).await?;
    }
    if let Some(crash_log) = options.crash_log.clone() {
        device.crash_log().begin(crash_log);
    }
    events.push(SetEvent::Replayed { entries: read.replay.entries.len() as u64, keys });
    let old_uuids = newest.version == 0;
    // The memory of the entries is free now.
    memory.shrink_to(tables_bytes);
    Ok(Recovered { buckets, tree, journal, prios, uuids, old_uuids, unsettled, events })
}

/// The first sector of the UUID table that an entry names.
fn uuids_sector(newest: &Jset) -> Sector {
    newest.uuid_bucket.pointer().map_or(Sector(0), |p| p.offset())
}

/// Reads and checks the UUID table. The table has as many slots as this machine writes.
async fn load_uuids(reader: &Reader<'_>, newest: &Jset) -> Result<Vec<format::UuidEntry>, EngineError> {
    let place = reader.place;
    let uuids = read_uuids(reader.disk, place, newest).await.inspect_err(|_| mark(Mark::BadUuids))?;
    check_uuids(&uuids, newest, place).inspect_err(|_| mark(Mark::BadUuids))?;
    let slots = reader.geometry.nr_uuids as usize;
    fitted(uuids, slots).map_err(|flaw| place.damage(uuids_sector(newest), flaw))
}

/// Reads the journal ring and the crash log, and checks keys and roots.
async fn read_journal(
    reader: &Reader<'_>,
    superblock: &CacheSuper,
    crash_log: Option<&CrashLogRef>,
    memory: &mut Reservation,
) -> Result<ReadJournal, EngineError> {
    let Reader { place, geometry: g, .. } = *reader;
    let ring_buckets: Vec<BucketNr> = superblock.journal_buckets().collect();
    let found = scan(reader, &ring_buckets, superblock.discard(), memory)
        .await
        .inspect_err(|_| mark(Mark::BadJournal))?;
    let (mut replay, ring) = (found.replay, found.ring);
    let journal_sector = ring_buckets.first().map_or(Sector(0), |b| g.bucket_start(*b));
    let bad_journal = |c: &format::Corrupt| place.corrupt(journal_sector, c);
    let newest =
        replay.newest_entry().ok_or_else(|| place.damage(journal_sector, Flaw::NoNewestEntry))?.clone();
    let on_device = replay.entries.len();
    if let Some(s) = crash_log {
        let entries = newer_entries(&**s, superblock.seq(), &newest, g).map_err(|recorded| {
            place.damage(journal_sector, Flaw::OlderThanCrashLog { recorded, newest: newest.seq })
        })?;
        replay.entries.extend(entries);
    }
    let roots = newest.check_roots(g, superblock.nr_this_dev());
    roots.and(newest.check_level()).map_err(|c| bad_journal(&c))?;
    for e in &replay.entries {
        e.check_keys(g).map_err(|c| bad_journal(&c))?;
    }
    Ok(ReadJournal { replay, on_device, newest, ring, ring_buckets })
}

/// Reads the index. Raises the generations of the buckets to those of all pointers in index and journal; then counts
/// what each bucket holds.
async fn load_index(
    reader: &Reader<'_>,
    read: &ReadJournal,
    limit_bytes: usize,
    buckets: &mut Buckets,
) -> Result<LoadedTree, EngineError> {
    let newest = &read.newest;
    if let Some(ptr) = newest.btree_root.pointer() {
        buckets.raise(buckets.bucket_of(ptr), ptr.generation());
    }
    let mut loaded = load_tree(reader, newest.btree_root, newest.btree_level, limit_bytes, buckets)
        .await
        .inspect_err(|_| mark(Mark::BadNode))?;
    // Every key of the journal raises its generation before any pointer is considered stale (format section 10).
    for ptr in read.replay.entries.iter().flat_map(|e| &e.keys).filter_map(|k| k.pointer()) {
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
        claim_metadata(buckets, b, "UUID table", reader)?;
    }
    account_tree(reader, &mut loaded.tree, buckets).await.inspect_err(|_| mark(Mark::BadNode))?;
    Ok(loaded)
}

/// Checks the UUID table by the rules of the format, and that every position of a flash-only volume fits into the
/// index.
fn check_uuids(uuids: &[format::UuidEntry], newest: &Jset, place: &Place) -> Result<(), EngineError> {
    let sector = uuids_sector(newest);
    format::uuid_table::check_uuid_table(uuids).map_err(|c| place.corrupt(sector, &c))?;
    let too_large = |u: &format::UuidEntry| u.is_live() && u.is_flash_only() && u.sectors.0 > MAX_POSITION.0;
    match uuids.iter().enumerate().find(|(_, u)| too_large(u)) {
        None => Ok(()),
        Some(_) if bug(Bug::LargeVolumeBelieved) => Ok(()),
        Some((slot, u)) => {
            let flaw = Flaw::VolumeSize { slot, most: MAX_POSITION, found: u.sectors };
            Err(place.damage(sector, flaw))
        }
    }
}

/// Checks that all dirty data is of a slot that has been used. A slot that was used never becomes free again, so the table is damaged
/// otherwise, and a new device would get the slot.
fn check_owners(tree: &Tree, uuids: &[format::UuidEntry]) -> Result<(), Flaw> {
    let is_free = |inode: Inode| uuids.get(inode.0 as usize).is_none_or(|slot| slot.is_free());
    let mut dirty = tree.all_dirty().filter(|(_, sectors)| *sectors > Sectors::ZERO);
    match dirty.find(|(inode, _)| is_free(*inode) && !bug(Bug::OwnerlessDataIgnored)) {
        Some((slot, sectors)) => Err(Flaw::DirtyWithoutOwner { slot, sectors }),
        None => Ok(()),
    }
}

/// The slots that a table of this machine has. A kernel with larger pages writes more slots into large buckets. Those that are not
/// free are refused, because the next table that this program writes would lose them.
fn fitted(mut uuids: Vec<format::UuidEntry>, slots: usize) -> Result<Vec<format::UuidEntry>, Flaw> {
    let behind = uuids.get(slots..).unwrap_or_default();
    if let Some(at) = behind.iter().position(|slot| !slot.is_free()) {
        return Err(Flaw::SlotBehindTable { slot: slots + at, slots });
    }
    uuids.truncate(slots);
    Ok(uuids)
}

async fn read_uuids(
    cache: &Disk,
    place: &Place,
    newest: &Jset,
) -> Result<Vec<format::UuidEntry>, EngineError> {
    let (key, sector) = (newest.uuid_bucket, uuids_sector(newest));
    let buffer = cache.runtime().pool().take(key.size().bytes() as usize);
    let (buffer, result) = cache.read(sector, buffer).await;
    result?;
    format::uuid_table::parse_uuid_table(buffer.as_slice(), newest.version)
        .map_err(|c| place.corrupt(sector, &c))
}

#[cfg(test)]
mod tests {
    use format::{UuidEntry, uuid_table::parse_uuid_table};

    use super::*;

    /// A table with more slots than this machine writes ended the process at each start.
    #[test]
    fn free_slots_behind_the_table_are_dropped_and_used_ones_refused() {
        let mut slots = parse_uuid_table(&[0; 128 * 64], 1).unwrap();
        slots[31] = UuidEntry::backing(format::Uuid([7; 16]), [0; 32], 1);
        let whole = fitted(slots.clone(), 64).unwrap();
        assert_eq!(whole, slots);
        assert_eq!(fitted(slots.clone(), 32).unwrap(), slots[..32]);
        assert_eq!(fitted(slots.clone(), 100).unwrap(), slots);
        // Keys of an invalid slot may be in the index still.
        slots[31].invalidate(2);
        for used in [UuidEntry::backing(format::Uuid([7; 16]), [0; 32], 1), slots[31]] {
            let table = [&slots[..32], &[used]].concat();
            let refused = fitted(table, 32).unwrap_err().to_string();
            assert!(
                refused.starts_with(
                    "UUID table: slot 32 is in use, and a table that this program writes has 32 slots"
                ),
                "{refused}"
            );
        }
    }
}
