//! Initialising a device that was never used: the first metadata of an empty set (format section 13).
//!
//! Owns the places of that metadata and the order in which it becomes durable. Must not know the components of a set.

use format::bset::BsetBuilder;
use format::{
    Bkey, BucketNr, BucketPrio, CacheSuper, Gen, Geometry, JsetBuilder, JsetRoots, PrioHeader, Ptr, Sectors,
    SetMagic, encode_prio_set,
};
use io::Disk;

use crate::canary::{Bug, bug};
use crate::device::SUPERBLOCK_SECTOR;
use crate::error::{EngineError, Place};
use crate::refusal::DeviceRefusal;

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

/// The generation of the buckets of the first metadata.
const FIRST_GEN: Gen = Gen(1);

/// The buckets of the first metadata: prio sets, UUID table and root, one after the other.
struct FirstBuckets {
    prios: BucketNr,
    uuids: BucketNr,
    root: BucketNr,
}

impl FirstBuckets {
    fn of(g: &Geometry) -> FirstBuckets {
        let prios = g.first_dynamic();
        let behind = prios.0 + g.prio_buckets;
        FirstBuckets { prios, uuids: BucketNr(behind), root: BucketNr(behind + 1) }
    }

    fn covers(&self, b: u32) -> bool {
        b >= self.prios.0 && b <= self.root.0
    }
}

/// Initialises a new device as an empty set.
pub(super) async fn initialise(
    cache: &Disk,
    place: &Place,
    superblock: &mut CacheSuper,
) -> Result<(), EngineError> {
    let count = journal_buckets(superblock);
    superblock.set_journal_buckets(count).map_err(|c| place.corrupt(SUPERBLOCK_SECTOR, &c))?;
    let g = *superblock.geometry();
    let magic = superblock.set_magic();
    // If the device was formatted again with its old set UUID, recovery must not find old entries.
    for bucket in superblock.journal_buckets() {
        cache.write_zeroes(g.bucket_start(bucket), g.bucket_sectors).await?;
    }
    let first = FirstBuckets::of(&g);
    if first.root.0 >= g.nbuckets {
        return Err(DeviceRefusal::TooFewBuckets { least: first.root.0, found: g.nbuckets }
            .of(&place.device)
            .into());
    }
    write_first_prios(cache, &g, magic, &first).await?;
    let empty_table = cache.runtime().pool().zeroed(g.meta_sectors.bytes() as usize);
    cache.write(g.bucket_start(first.uuids), empty_table, false).await?;
    write_first_root(cache, &g, magic, &first).await?;
    cache.flush().await?;
    write_first_entry(cache, superblock, &first).await?;
    superblock.set_sync(true);
    superblock.prepare_write(cache.runtime().wall_seconds());
    write_first_superblock(cache, &superblock.encode()).await
}

/// Writes the prio sets of an empty set, the last one first.
async fn write_first_prios(
    cache: &Disk,
    g: &Geometry,
    magic: SetMagic,
    first: &FirstBuckets,
) -> Result<(), EngineError> {
    let prio_at = |i: u32| BucketNr(first.prios.0 + i);
    let prios: Vec<BucketPrio> = (0..g.nbuckets)
        .map(|b| match first.covers(b) {
            true => BucketPrio { prio: u16::MAX, generation: FIRST_GEN },
            false => BucketPrio { prio: 0, generation: Gen(0) },
        })
        .collect();
    for (i, group) in prios.chunks(g.prios_per_bucket as usize).enumerate().rev() {
        let i = i as u32;
        let next_bucket = if i + 1 < g.prio_buckets { u64::from(prio_at(i + 1).0) } else { 0 };
        let mut buffer = cache.runtime().pool().zeroed(g.meta_sectors.bytes() as usize);
        encode_prio_set(buffer.as_mut(), magic, PrioHeader { seq: 1, next_bucket }, group);
        cache.write(g.bucket_start(prio_at(i)), buffer, false).await?;
    }
    Ok(())
}

/// Writes the root of an empty index, which is a leaf without keys.
async fn write_first_root(
    cache: &Disk,
    g: &Geometry,
    magic: SetMagic,
    first: &FirstBuckets,
) -> Result<(), EngineError> {
    let root_ptr = Ptr::new(0, g.bucket_start(first.root), FIRST_GEN);
    let mut buffer = cache.runtime().pool().zeroed(g.block_sectors.bytes() as usize);
    let seq = cache.runtime().random() | 1;
    let len = BsetBuilder::begin(buffer.as_mut(), seq, g.block_sectors).finish(magic, root_ptr);
    buffer.set_len(len);
    cache.write(root_ptr.offset(), buffer, false).await?;
    Ok(())
}

/// Writes the first journal entry, which names the first metadata.
async fn write_first_entry(
    cache: &Disk,
    superblock: &CacheSuper,
    first: &FirstBuckets,
) -> Result<(), EngineError> {
    let g = superblock.geometry();
    let mut prio_bucket = [0; 8];
    if let Some(slot) = prio_bucket.get_mut(usize::from(superblock.nr_this_dev())) {
        *slot = u64::from(first.prios.0);
    }
    let ptr = |bucket| Ptr::new(0, g.bucket_start(bucket), FIRST_GEN);
    let roots = JsetRoots {
        uuid_bucket: Bkey::uuid_bucket(g.meta_sectors, ptr(first.uuids)),
        btree_root: Bkey::root(g.node_sectors, ptr(first.root)),
        btree_level: 0,
        prio_bucket,
    };
    let mut buffer = cache.runtime().pool().zeroed(g.block_sectors.bytes() as usize);
    let seq = format::JournalSeq(1);
    let len =
        JsetBuilder::begin(buffer.as_mut(), g.block_sectors).finish(superblock.set_magic(), seq, seq, &roots);
    buffer.set_len(len);
    // The first entry ever goes into the second bucket of the ring (format section 9.2).
    let at = g.journal_bucket(1).or(g.journal_bucket(0)).unwrap_or(g.first_bucket);
    cache.write(g.bucket_start(at), buffer, true).await?;
    Ok(())
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
