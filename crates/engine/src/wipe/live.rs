//! The live blocks of some buckets.
//!
//! Owns a map with one bit for each block. Must not know what is done with the dead blocks.

use std::collections::BTreeSet;
use std::rc::Rc;

use format::{BucketNr, Gen, Geometry, Inode, Sector, Sectors};

use crate::error::EngineError;
use crate::index::Bound;
use crate::volume::Cache;

/// The largest number of blocks in one survey: 4 MiB of bits.
const MOST_BLOCKS: u64 = 32 << 20;

/// The largest number of buckets in one survey, each of which takes 16 bytes.
const MOST_BUCKETS: usize = 1 << 20;

/// The number of buckets that are surveyed at a time.
pub(super) fn most_buckets(geometry: &Geometry) -> usize {
    let blocks_each = (geometry.bucket_sectors.0 / geometry.block_sectors.0).max(1);
    usize::try_from(MOST_BLOCKS / blocks_each).unwrap_or(MOST_BUCKETS).clamp(1, MOST_BUCKETS)
}

/// The live blocks of some buckets.
pub(super) struct Live {
    /// The surveyed buckets with their generations, ascending.
    buckets: Vec<(BucketNr, Gen)>,
    bits: Vec<u64>,
    blocks_each: u64,
    block: Sectors,
    bucket_sectors: Sectors,
}

impl Live {
    /// Makes the map of these buckets, which are ascending, with no block live.
    fn none(geometry: &Geometry, buckets: &[(BucketNr, Gen)]) -> Live {
        let blocks_each = geometry.bucket_sectors.0 / geometry.block_sectors.0;
        let words = (blocks_each * buckets.len() as u64).div_ceil(64) as usize;
        Live {
            buckets: buckets.to_vec(),
            bits: vec![0; words],
            blocks_each,
            block: geometry.block_sectors,
            bucket_sectors: geometry.bucket_sectors,
        }
    }

    /// The first bit of a bucket, if the bucket is surveyed.
    fn first_bit(&self, bucket: BucketNr) -> Option<u64> {
        let at = self.buckets.binary_search_by_key(&bucket, |(b, _)| *b).ok()?;
        Some(at as u64 * self.blocks_each)
    }

    /// Marks every block live that `[at, at + size)` of the cache device touches; the range lies inside one bucket.
    fn add(&mut self, at: Sector, size: Sectors) {
        let bucket = BucketNr((at.0 / self.bucket_sectors.0) as u32);
        let Some(first) = self.first_bit(bucket) else { return };
        let inside = at.0 % self.bucket_sectors.0;
        let end = (inside + size.0).div_ceil(self.block.0).min(self.blocks_each);
        for bit in first + inside / self.block.0..first + end {
            if let Some(word) = self.bits.get_mut((bit / 64) as usize) {
                *word |= 1 << (bit % 64);
            }
        }
    }

    fn is_live(&self, bit: u64) -> bool {
        self.bits.get((bit / 64) as usize).is_none_or(|word| word >> (bit % 64) & 1 != 0)
    }

    /// Whether nothing is live in a bucket.
    pub(super) fn is_empty(&self, bucket: BucketNr) -> bool {
        let first = self.first_bit(bucket);
        first.is_some_and(|first| (first..first + self.blocks_each).all(|bit| !self.is_live(bit)))
    }

    /// The ranges of the cache device in a bucket in which no block is live.
    pub(super) fn dead_in(&self, bucket: BucketNr) -> Vec<(Sector, Sectors)> {
        let mut dead: Vec<(Sector, Sectors)> = Vec::new();
        let Some(first) = self.first_bit(bucket) else { return dead };
        let start = Sector(u64::from(bucket.0) * self.bucket_sectors.0);
        for block in (0..self.blocks_each).filter(|block| !self.is_live(first + block)) {
            let at = start + Sectors(block * self.block.0);
            match dead.last_mut() {
                Some((from, size)) if *from + *size == at => *size += self.block,
                _ => dead.push((at, self.block)),
            }
        }
        dead
    }
}

/// Walks the index to find the live blocks in these buckets, which are ascending. No key in memory of a volume of the
/// set points to the other blocks, and none will until the generation of the bucket changes.
pub(super) async fn survey(cache: &Rc<Cache>, buckets: &[(BucketNr, Gen)]) -> Result<Live, EngineError> {
    let mut live = Live::none(&cache.geometry, buckets);
    // The index has keys of invalid slots until a walk has removed them.
    let invalid: BTreeSet<Inode> = cache.index.invalid_slots();
    let mut passed: Option<Bound> = None;
    loop {
        cache.device.check()?;
        let id = cache.index.tree().next_leaf(passed);
        let Some(id) = id else { return Ok(live) };
        cache.index.load_leaf(id).await?;
        {
            let (tree, table) = (cache.index.tree(), cache.alloc.buckets());
            let loaded = tree.try_node(id).filter(|n| n.level == 0 && n.leaf().extents.is_some());
            if let Some(node) = loaded {
                for (inode, _, size, ptr, _) in tree.live_extents(id, &table) {
                    if !invalid.contains(&inode) {
                        live.add(ptr.offset(), size);
                    }
                }
                passed = Some(node.bound);
            }
        }
        cache.rt.yield_now().await;
    }
}

#[cfg(test)]
mod properties;

#[cfg(test)]
mod tests {
    use io::Nanos;

    use super::*;
    use crate::set::SetOptions;
    use crate::testing::{TestDisk, Watching, backing_device, components, open_set, run};

    /// A survey waits for a leaf that a replacement reads. When it continues, the old leaf is empty and the new leaf has the
    /// keys.
    #[test]
    fn a_leaf_that_is_replaced_during_a_survey_is_surveyed() {
        run(|rt| async move {
            let device = Watching::new(16_384);
            let set = open_set(&device, &rt, (16, false), SetOptions::default()).await;
            let backing = backing_device(&TestDisk::new(8192), &rt);
            let volume = set.attached(backing).await.unwrap();
            volume.settings_mut().writeback_running = false;
            let cache = components(set, &rt);
            rt.sleep(Nanos::from_secs(60)).await;
            let data = rt.pool().zeroed(8 * 512);
            volume.write(Sector(0), Sectors(8), data, 0, io::WriteFlags::default()).await.unwrap();
            cache.journal.commit_keys().await.unwrap();
            cache.index.write_all_leaves().await.unwrap();
            let all = |b| (BucketNr(b), Gen(0));
            let buckets: Vec<_> = (0..cache.geometry.nbuckets).map(all).collect();
            let before = survey(&cache, &buckets).await.unwrap();
            assert_eq!(before.bits.iter().map(|b| b.count_ones()).sum::<u32>(), 8);

            let leaf = cache.index.tree().next_leaf(None).unwrap();
            cache.index.tree_mut().take_extents(leaf);
            device.disk().hold(true);
            let rewriting = cache.clone();
            let rewritten = rt.spawn(async move { rewriting.index.rewrite(&[leaf]).await });
            device.disk().held(1, &rt).await;
            let surveying = cache.clone();
            let surveyed = rt.spawn(async move { survey(&surveying, &buckets).await });
            rt.sleep(Nanos::from_ms(1)).await;
            device.disk().hold(false);
            assert_eq!(surveyed.await.unwrap().bits, before.bits);
            rewritten.await.unwrap();
            assert_ne!(cache.index.tree().next_leaf(None), Some(leaf));
        });
    }

    #[test]
    fn dead_is_what_is_not_live_in_a_bucket() {
        let mut live = Live {
            buckets: vec![(BucketNr(3), Gen(0)), (BucketNr(9), Gen(1))],
            bits: vec![0; 4],
            blocks_each: 100,
            block: Sectors(8),
            bucket_sectors: Sectors(800),
        };
        assert!(live.is_empty(BucketNr(3)) && live.is_empty(BucketNr(9)));
        live.add(Sector(7200), Sectors(16));
        live.add(Sector(7999 - 7), Sectors(8));
        live.add(Sector(7400), Sectors(1));
        live.add(Sector(800), Sectors(8));
        assert!(live.is_empty(BucketNr(3)) && !live.is_empty(BucketNr(9)));
        assert_eq!(live.dead_in(BucketNr(3)), [(Sector(2400), Sectors(800))]);
        assert_eq!(live.dead_in(BucketNr(9)), [(Sector(7216), Sectors(184)), (Sector(7408), Sectors(584))]);
        assert_eq!(live.dead_in(BucketNr(1)), []);
    }
}
