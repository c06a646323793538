//! The live extents of some buckets, in the order of the cache device.
//!
//! Owns the walk of the index that finds them. Must not know what is done with them.

use std::collections::BTreeSet;
use std::rc::Rc;

use format::{BucketNr, Gen, Inode, Ptr, Sector, Sectors};

use crate::alloc::Use;
use crate::error::EngineError;
use crate::index::Bound;
use crate::volume::Cache;

/// The largest number of live blocks in one survey, each of which may be an extent: about 16 MiB of memory.
const MOST_BLOCKS: u64 = 1 << 19;

/// An extent of live data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct FoundExtent {
    pub(super) inode: Inode,
    pub(super) start: Sector,
    pub(super) size: Sectors,
    pub(super) ptr: Ptr,
}

/// The buckets of one survey.
pub(super) struct Group {
    /// Buckets with live data, with their generations, ascending.
    pub(super) buckets: Vec<(BucketNr, Gen)>,
    /// The first bucket behind the group.
    pub(super) end: BucketNr,
    /// Live data in the group.
    pub(super) live: Sectors,
}

impl Group {
    fn has(&self, bucket: BucketNr) -> bool {
        self.buckets.binary_search_by_key(&bucket, |(b, _)| *b).is_ok()
    }
}

/// The group of these buckets, as far as they have live data.
pub(super) fn group_of(cache: &Cache, wanted: &[BucketNr]) -> Group {
    let buckets = cache.alloc.buckets();
    let is_live = |b: &BucketNr| {
        b.0 < buckets.len() && buckets.live(*b) > Sectors::ZERO && buckets.used(*b) == Use::Data
    };
    let present: BTreeSet<BucketNr> = wanted.iter().copied().filter(is_live).collect();
    let live = present.iter().fold(Sectors::ZERO, |sum, b| sum + buckets.live(*b));
    let end = present.last().map_or(BucketNr(0), |last| BucketNr(last.0 + 1));
    Group { buckets: present.into_iter().map(|b| (b, buckets.generation(b))).collect(), end, live }
}

/// The next buckets with live data, from `at` on.
pub(super) fn next_group(cache: &Cache, at: BucketNr) -> Group {
    let buckets = cache.alloc.buckets();
    let most = Sectors(MOST_BLOCKS * cache.geometry.block_sectors.0);
    let mut group = Group { buckets: Vec::new(), end: BucketNr(buckets.len()), live: Sectors::ZERO };
    for b in (at.0..buckets.len()).map(BucketNr) {
        let live = buckets.live(b);
        if live == Sectors::ZERO || buckets.used(b) != Use::Data {
            continue;
        }
        if group.live + live > most && !group.buckets.is_empty() {
            group.end = b;
            break;
        }
        group.buckets.push((b, buckets.generation(b)));
        group.live += live;
    }
    group
}

/// Walks the index to find the live extents in a group, in the order of the cache device. Data that is written during the walk
/// may be missing.
pub(super) async fn survey(cache: &Rc<Cache>, group: &Group) -> Result<Vec<FoundExtent>, EngineError> {
    let mut found = Vec::new();
    let Some((first, _)) = group.buckets.first() else { return Ok(found) };
    let range = cache.geometry.bucket_start(*first)..cache.geometry.bucket_start(group.end);
    // The index has keys of invalid slots until a walk has removed them.
    let invalid: BTreeSet<Inode> = cache.index.invalid_slots();
    let mut passed: Option<Bound> = None;
    loop {
        cache.device.check()?;
        let id = cache.index.tree().next_leaf(passed);
        let Some(id) = id else { break };
        cache.index.load_leaf(id).await?;
        {
            let (tree, table) = (cache.index.tree(), cache.alloc.buckets());
            let loaded = tree.try_node(id).filter(|n| n.level == 0 && n.leaf().extents.is_some());
            if let Some(node) = loaded {
                let live = tree.live_extents(id, &table);
                let is_of_group =
                    |ptr: &Ptr| range.contains(&ptr.offset()) && group.has(table.bucket_of(*ptr));
                let wanted = live.filter(|(inode, .., ptr, _)| is_of_group(ptr) && !invalid.contains(inode));
                found.extend(wanted.map(|(inode, start, size, ptr, _)| FoundExtent {
                    inode,
                    start,
                    size,
                    ptr,
                }));
                passed = Some(node.bound);
            }
        }
        cache.rt.yield_now().await;
    }
    found.sort_unstable_by_key(|e| e.ptr.offset());
    Ok(found)
}
