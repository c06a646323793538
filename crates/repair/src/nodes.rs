//! The nodes of the btree.
//!
//! Owns the correction of flipped bits in bsets. The keys of a leaf that is destroyed are nowhere else, so it is refused, with
//! the range of the keys. `roots` rebuilds a root above leaves.

use std::collections::BTreeSet;

use format::{Bkey, BucketNr, CacheSuper, Sector, Sectors, SetMagic, counted, parse_node};
use inspect::{Invariant, ReadAt};

use crate::bits::{self, Extent};
use crate::work::Work;

const STRUCTURE: &str = "btree";

/// Corrects the bsets of all nodes that can be reached.
pub(crate) fn correct(work: &mut Work<'_>) {
    let Some(walk) = walk(work) else { return };
    let device = work.cache.name().to_owned();
    for (at, bytes) in &walk.corrected {
        work.cache.write(*at, bytes);
    }
    if !walk.corrected.is_empty() {
        let action =
            format!("{} had one flipped bit; it is flipped back", counted(walk.corrected.len(), "node"));
        work.step(STRUCTURE, device, action, Vec::new());
    }
}

/// Names the nodes that are still destroyed, with the ranges of their keys.
pub(crate) fn refuse(work: &mut Work<'_>) {
    let Some(walk) = walk(work) else { return };
    // A key may point to a node that was freed, and whose bucket has other contents.
    let Some(view) = work.view() else { return };
    let device = work.cache.name().to_owned();
    let unreadable = view.findings.list().iter().filter(|f| f.invariant == Invariant::NodeReadable);
    let needed: BTreeSet<u32> = unreadable.filter_map(|f| f.place.bucket).collect();
    for (_, what) in walk.destroyed.iter().filter(|(bucket, _)| needed.contains(&bucket.0)) {
        work.refuse(format!("{device}: {what}"));
    }
}

/// Walks over all nodes of an initialised set.
fn walk(work: &Work<'_>) -> Option<Walk> {
    let superblock = work.superblock().filter(CacheSuper::sync)?;
    let view = work.view()?;
    let newest = view.journal.as_ref()?.replay.last()?;
    let mut walk = Walk {
        magic: superblock.set_magic(),
        block: superblock.geometry().block_sectors,
        superblock,
        visited: BTreeSet::new(),
        corrected: Vec::new(),
        destroyed: Vec::new(),
    };
    walk.node(work, &newest.btree_root, newest.btree_level, (Sector(0), None));
    Some(walk)
}

/// A walk over the nodes.
struct Walk {
    magic: SetMagic,
    block: Sectors,
    superblock: CacheSuper,
    visited: BTreeSet<BucketNr>,
    /// Nodes with their corrected bytes.
    corrected: Vec<(Sector, Vec<u8>)>,
    /// Nodes that cannot be read, and what that means.
    destroyed: Vec<(BucketNr, String)>,
}

/// Where the range of a node begins, and the inode of that position if it is known.
type From = (Sector, Option<u32>);

/// No tree is higher.
const MAX_LEVEL: u16 = 16;

impl Walk {
    fn node(&mut self, work: &Work<'_>, key: &Bkey, level: u16, from: From) {
        let Some(ptr) = key.pointer() else { return };
        let geometry = self.superblock.geometry();
        let Some(bucket) = geometry.ptr_bucket(ptr, key.size()) else { return };
        if level > MAX_LEVEL || !self.visited.insert(bucket) {
            return;
        }
        let mut bytes = vec![0; usize::try_from(key.size().bytes()).unwrap_or(0)];
        if work.cache.read_at(ptr.offset(), &mut bytes).is_err() {
            self.destroyed.push((bucket, format!("the node in bucket {bucket} cannot be read")));
            return;
        }
        if self.correct(&mut bytes, key) {
            self.corrected.push((ptr.offset(), bytes.clone()));
        }
        let parsed = parse_node(&bytes, key, self.magic, self.block);
        let node = parsed.unwrap_or_else(|damage| {
            // A crash tears the last bset, whose keys are in the journal.
            if damage.kind == format::DamageKind::Other {
                let (inode, end) = key.position();
                let start = from.1.map_or("the start".to_owned(), |i| format!("inode {i} sector {}", from.0));
                let what = format!(
                    "the node of level {level} in bucket {bucket} is destroyed, and its keys are nowhere else: cached data between \
                     {start} and inode {inode} sector {end} is lost or older ({})",
                    damage.error
                );
                self.destroyed.push((bucket, what));
            }
            damage.before
        });
        if level == 0 {
            return;
        }
        let mut before = from;
        for bset in &node.bsets {
            for child in &bset.keys {
                let Some(below) = level.checked_sub(1) else { continue };
                self.node(work, child, below, before);
                before = (child.offset(), Some(child.inode().0));
            }
        }
    }

    /// Corrects flipped bits of a node, each in another bset.
    fn correct(&self, bytes: &mut [u8], key: &Bkey) -> bool {
        let Some(ptr) = key.pointer() else { return false };
        let mut changed = false;
        let mut from = 0;
        loop {
            let parsed = parse_node(bytes, key, self.magic, self.block);
            let at = match &parsed {
                Ok(node) => node.written_bytes,
                Err(damage) => damage.before.written_bytes,
            };
            if at < from {
                return changed;
            }
            // Behind the last bset there may be one whose number has a flipped bit.
            let Some(rest) = bytes.get_mut(at..) else { return changed };
            let mut trial = rest.to_vec();
            if bits::correct_bit(&mut trial, Extent::BSET, ptr.0).is_none() {
                return changed;
            }
            let seq = trial.get(16..24);
            let first = at == 0
                || parsed.as_ref().map_or_else(|d| d.before.seq, |n| n.seq).to_le_bytes()[..]
                    == *seq.unwrap_or_default();
            if trial.get(8..16) != Some(&self.magic.bset().to_le_bytes()[..]) || !first {
                return changed;
            }
            rest.copy_from_slice(&trial);
            (changed, from) = (true, at + 1);
        }
    }
}
