//! Nodes of the btree that no node names.
//!
//! Owns the search for them. If the last bset of an internal node is destroyed, the node seems to end before it, and no key
//! names the children in it. A node that was freed has an older generation than its bucket, unless it was a root.

use std::collections::BTreeSet;

use format::{Bkey, BucketNr, Geometry, Ptr, Sector, parse_entry, parse_node};
use inspect::view::KeyRange;
use inspect::{ReadAt, SetView};

use crate::bits;

/// The ranges of the keys of nodes that no node names.
pub(super) fn orphans(view: &SetView, cache: &dyn ReadAt) -> Vec<KeyRange> {
    let g = view.geometry();
    let known: BTreeSet<BucketNr> = view.nodes.iter().map(|node| node.bucket).collect();
    let roots = former_roots(view, cache);
    let magic = view.superblock.set_magic().bset().to_le_bytes();
    let mut first = [0; 512];
    let mut found = Vec::new();
    let mut bucket = g.first_dynamic();
    while bucket.0 < g.nbuckets {
        let skipped = empty_buckets(cache, g, bucket);
        if skipped > 0 {
            bucket = BucketNr(bucket.0.saturating_add(skipped));
            continue;
        }
        let is_read = !known.contains(&bucket) && cache.read_at(g.bucket_start(bucket), &mut first).is_ok();
        if is_read && first.get(8..16) == Some(&magic[..]) {
            found.extend(orphan(view, cache, bucket).filter(|(ptr, _)| !roots.contains(&ptr.0)));
        }
        bucket = BucketNr(bucket.0.saturating_add(1));
    }
    found.into_iter().map(|(_, range)| range).collect()
}

/// Number of buckets from `bucket` on that lie in a hole as a whole.
fn empty_buckets(cache: &dyn ReadAt, g: &Geometry, bucket: BucketNr) -> u32 {
    let start = g.bucket_start(bucket);
    let hole = cache.next_data(start).checked_since(start).unwrap_or_default();
    let buckets = hole.0.checked_div(g.bucket_sectors.0).unwrap_or(0);
    u32::try_from(buckets).unwrap_or(u32::MAX)
}

/// The pointers to roots that journal entries name.
fn former_roots(view: &SetView, cache: &dyn ReadAt) -> BTreeSet<u64> {
    let (magic, block) = (view.superblock.set_magic(), view.geometry().block_sectors);
    let entries = view.journal.iter().flat_map(|journal| &journal.entries);
    let root = |info: &inspect::view::EntryInfo| {
        let mut bytes = vec![0; usize::try_from(info.sectors.bytes()).unwrap_or(0)];
        cache.read_at(info.sector, &mut bytes).ok()?;
        parse_entry(&bytes, magic, block).ok()?.0.btree_root.pointer().map(|ptr| ptr.0)
    };
    entries.filter_map(root).collect()
}

/// The node in a bucket, if its generation is that of the bucket.
///
/// The checksum of its first bset starts from the pointer to it.
fn orphan(view: &SetView, cache: &dyn ReadAt, bucket: BucketNr) -> Option<(Ptr, KeyRange)> {
    let g = view.geometry();
    let mut bytes = vec![0; usize::try_from(g.node_sectors.bytes()).ok()?];
    cache.read_at(g.bucket_start(bucket), &mut bytes).ok()?;
    let words = u32::from_le_bytes(*bytes.get(28..)?.first_chunk::<4>()?);
    let end = usize::try_from(words).ok()?.checked_mul(8)?.checked_add(32)?;
    let stored = u64::from_le_bytes(*bytes.first_chunk::<8>()?);
    let ptr = Ptr(bits::seed_of(stored, bytes.get(8..end)?));
    let is_here = ptr.dev() == view.superblock.nr_this_dev() && ptr.offset() == g.bucket_start(bucket);
    if !is_here || view.gens.age(ptr, g.node_sectors) != Some(0) {
        return None;
    }
    let key = Bkey::root(g.node_sectors, ptr);
    let node = match parse_node(&bytes, &key, view.superblock.set_magic(), g.block_sectors) {
        Ok(node) => node,
        Err(damage) => damage.before,
    };
    let keys = || node.bsets.iter().flat_map(|b| &b.keys).filter(|k| k.size().0 > 0);
    let after = keys().filter_map(Bkey::start_position).min()?;
    let last = keys().map(Bkey::position).max()?;
    Some((ptr, KeyRange { after: (after.0, Sector(after.1.0)), last }))
}
