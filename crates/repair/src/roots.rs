//! The root of the btree, if its children are leaves.
//!
//! Owns its rebuilding from leaves that are found by their magic. The checksum of a leaf starts from the pointer to it, so it confirms
//! bucket and generation. A leaf that was freed has an older generation than its bucket, unless that was not stored before a crash.
//! Such a leaf overlaps with those that replaced it, and then nothing is rebuilt.

use std::collections::BTreeSet;

use format::{Bkey, BsetBuilder, BucketNr, Gen, Inode, Ptr, Sector, parse_entry, parse_node};
use inspect::view::JournalStop;
use inspect::{Invariant, ReadAt, SetView};

use crate::reason::Unrepairable;
use crate::work::{Doubt, Work};

const STRUCTURE: &str = "btree";

/// Rebuilds the root if it is destroyed and its level is 1.
pub(crate) fn rebuild(work: &mut Work<'_>) {
    let Some(view) = work.view() else { return };
    let Some(newest) = view.journal.as_ref().and_then(|j| j.replay.last()) else { return };
    let Some(ptr) = newest.btree_root.pointer() else { return };
    let Some(root) = view.gens.bucket_of(ptr, newest.btree_root.size()) else { return };
    let unreadable =
        |f: &inspect::Finding| f.invariant == Invariant::NodeReadable && f.place.bucket == Some(root.0);
    if newest.btree_level != 1 || !view.findings.list().iter().any(unreadable) || !view.prio.complete {
        return;
    }
    let device = work.cache.name().to_owned();
    match leaves(work, &view, root) {
        Ok(Leaves { leaves, unreadable }) => {
            let key = newest.btree_root;
            let Some(bytes) = encode(&view, &key, &leaves) else {
                work.refuse(format!(
                    "{device}: the root of the btree is destroyed, and has no room for {} leaves",
                    leaves.len()
                ));
                return;
            };
            work.cache.write(ptr.offset(), &bytes);
            let action = format!(
                "the root is rebuilt from {} leaves that were found by their magic and checksum",
                leaves.len()
            );
            let mut uncertain = vec![
                "a leaf that was freed just before a crash, and that no other replaced, would count again"
                    .to_owned(),
            ];
            if unreadable > 0 {
                let buckets = format::counted(unreadable, "bucket");
                uncertain.push(format!("{buckets} cannot be read; if one was a leaf, its keys are missing"));
            }
            work.step(STRUCTURE, device, action, uncertain);
            work.doubts.push(Doubt::Root);
        }
        Err(why) => work.refuse(format!("{device}: the root of the btree is destroyed: {why}")),
    }
}

/// A leaf that was found, and the range of its keys.
struct Leaf {
    ptr: Ptr,
    bucket: BucketNr,
    first: (Inode, Sector),
    last: (Inode, Sector),
}

/// What the search for leaves has found.
struct Leaves {
    /// In the order of their keys.
    leaves: Vec<Leaf>,
    /// The number of buckets that cannot be read: each of them may be a leaf.
    unreadable: usize,
}

/// Searches all buckets for the leaves of the set.
fn leaves(work: &Work<'_>, view: &SetView, root: BucketNr) -> Result<Leaves, Unrepairable> {
    let g = *view.geometry();
    let magic = view.superblock.set_magic().bset().to_le_bytes();
    let former = former_roots(work, view)?;
    let (mut found, mut unreadable) = (Vec::new(), 0);
    let mut first = [0; 512];
    for bucket in (g.first_dynamic().0..g.nbuckets).map(BucketNr).filter(|b| *b != root) {
        let start = g.bucket_start(bucket);
        if work.cache.read_at(start, &mut first).is_err() {
            unreadable += 1;
            continue;
        }
        if first.get(8..16) != Some(&magic[..]) {
            continue;
        }
        match leaf(work, view, bucket)? {
            // A root that was split is not a child of the new one.
            Some(leaf) if !former.contains(&leaf.ptr.0) => found.push(leaf),
            _ => {}
        }
    }
    found.sort_by_key(|leaf| leaf.first);
    if found.is_empty() {
        return Err("no leaf of the set is found".into());
    }
    for pair in found.windows(2) {
        if let [a, b] = pair
            && b.first < a.last
        {
            return Err(format!(
                "the leaves in buckets {} and {} overlap, so one of them is older, and which one is not known",
                a.bucket, b.bucket
            )
            .into());
        }
    }
    Ok(Leaves { leaves: found, unreadable })
}

/// The pointers to roots that journal entries name, and that are not the root any more.
fn former_roots(work: &Work<'_>, view: &SetView) -> Result<BTreeSet<u64>, Unrepairable> {
    let Some(journal) = &view.journal else { return Ok(BTreeSet::new()) };
    if let Some(bucket) = journal.buckets.iter().find(|b| b.stop == JournalStop::Unreadable) {
        let bucket = bucket.bucket;
        return Err(format!(
            "journal bucket {bucket} cannot be read, so a former root could count as a leaf"
        )
        .into());
    }
    let (magic, block) = (view.superblock.set_magic(), view.geometry().block_sectors);
    let mut roots = BTreeSet::new();
    for info in &journal.entries {
        let mut bytes = vec![0; usize::try_from(info.sectors.bytes()).unwrap_or(0)];
        work.cache.read_at(info.sector, &mut bytes)?;
        roots.extend(parse_entry(&bytes, magic, block)?.0.btree_root.pointer().map(|ptr| ptr.0));
    }
    Ok(roots)
}

/// The leaf in a bucket; `None` if it was freed.
///
/// The checksum of its first bset starts from the pointer to it, so it names the generation. A generation that is older than
/// that of the bucket is that of a freed node.
fn leaf(work: &Work<'_>, view: &SetView, bucket: BucketNr) -> Result<Option<Leaf>, Unrepairable> {
    let g = view.geometry();
    let mut bytes = vec![0; usize::try_from(g.node_sectors.bytes()).unwrap_or(0)];
    work.cache.read_at(g.bucket_start(bucket), &mut bytes)?;
    let pointer =
        |generation| Ptr::new(view.superblock.nr_this_dev(), g.bucket_start(bucket), Gen(generation));
    let mut damage = None;
    for generation in 0..=u8::MAX {
        let ptr = pointer(generation);
        let key = Bkey::root(g.node_sectors, ptr);
        let node = match parse_node(&bytes, &key, view.superblock.set_magic(), g.block_sectors) {
            Ok(node) => node,
            // The keys of a torn bset are in the journal.
            Err(torn) if torn.kind == format::DamageKind::TornLastBset => torn.before,
            Err(other) => {
                if !other.before.bsets.is_empty() {
                    damage = Some((generation, other.error));
                }
                continue;
            }
        };
        if view.gens.age(ptr, g.node_sectors).is_none_or(|age| age > 0) {
            return Ok(None);
        }
        let keys = || node.bsets.iter().flat_map(|b| &b.keys).filter(|k| k.size().0 > 0);
        let ends = keys().filter_map(Bkey::start_position).min().zip(keys().map(Bkey::position).max());
        return Ok(ends.map(|(first, last)| Leaf { ptr, bucket, first, last }));
    }
    match damage {
        Some((generation, _))
            if view.gens.age(pointer(generation), g.node_sectors).is_none_or(|age| age > 0) =>
        {
            Ok(None)
        }
        Some((_, source)) => Err(Unrepairable::Node { bucket, source }),
        None => Err(format!(
            "the node in bucket {bucket} has no right checksum, so it is not known whether it is needed"
        )
        .into()),
    }
}

/// The bytes of a root with these leaves.
fn encode(view: &SetView, root: &Bkey, leaves: &[Leaf]) -> Option<Vec<u8>> {
    let g = view.geometry();
    let size = usize::try_from(root.size().bytes()).ok()?;
    let mut builder = BsetBuilder::begin(vec![0; size], 1, g.block_sectors);
    for (n, leaf) in leaves.iter().enumerate() {
        // The last leaf reaches to the end of all positions.
        let is_last = n + 1 == leaves.len();
        let (inode, end) = if is_last { root.position() } else { leaf.last };
        builder.push_key(&Bkey::node(inode, end, g.node_sectors, leaf.ptr)).then_some(())?;
    }
    builder.finish(view.superblock.set_magic(), root.pointer()?);
    Some(builder.into_inner())
}
