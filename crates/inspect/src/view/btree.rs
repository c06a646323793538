//! Step 5: the btree, from the root to its leaves.
//!
//! Owns the walk over the nodes, the rule which keys of an internal node denote children (format section 8.4), and the rules
//! about a single node or a node and its parent (invariants 8 to 12, and the part of 13 about single keys).
//!
//! Invariants: the walk is iterative, and a bucket is read as a node at most once, so that cycles end and depth needs no stack.
//! A node's first block is checked before the rest is read, so that a pointer to something that is no node costs little.

use std::collections::BTreeMap;

use format::bset::BSET_HEADER_BYTES;
use format::{
    Bkey, BsetKind, BucketNr, CacheSuper, DamageKind, Inode, Jset, MAX_BTREE_LEVEL, Node, Sector, Sectors,
    check_bset_order, parse_node,
};

use super::gens::Gens;
use super::scan::{Scan, Stop};
use super::{KeyRange, SetView};
use crate::device::unreadable_at;
use crate::extent_map::{ExtentMap, NodeId, Origin, Piece};
use crate::finding::{Finding, Invariant, Mismatch, Place, Severity};
use crate::source::{ReadAt, ReadError};
use crate::sparse::Sparse;

/// A bset of keys in a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BsetInfo {
    /// Start of the bset, in bytes from the start of the node.
    pub offset_bytes: u64,
    /// Version of the bset.
    pub version: u32,
    /// Number of keys.
    pub keys: u64,
}

/// A btree node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NodeView {
    /// The key that points to the node.
    pub key: Bkey,
    /// Level; leaves have 0.
    pub level: u16,
    /// Parent of the node; `None` for the root.
    pub parent: Option<NodeId>,
    /// Bucket of the node.
    pub bucket: BucketNr,
    /// Position after which all keys of the node lie; the position of `key` is the last possible one.
    pub after: (Inode, Sector),
    /// Random number that the node's bsets share.
    pub seq: u64,
    /// The node's bsets, oldest first.
    pub bsets: Vec<BsetInfo>,
    /// Sectors that the bsets take.
    pub written: Sectors,
    /// Whether some of the node's bsets could not be read.
    pub damaged: bool,
    /// Number of children in an internal node; number of ranges with keys in a leaf.
    pub live: u64,
}

impl NodeView {
    /// Adds sector, bucket and generation of this node to `place`.
    pub(super) fn place(&self, place: Place) -> Place {
        place.sector(self.key.ptr.offset()).bucket(self.bucket).generation(self.key.ptr.generation())
    }
}

/// Statistics of the btree.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BtreeStats {
    /// Level of the root.
    pub root_level: u16,
    /// Nodes that were read.
    pub nodes: u64,
    /// Number of bsets in the nodes that were read.
    pub bsets: u64,
    /// Largest number of bsets in a node.
    pub max_bsets: u64,
    /// Keys in internal nodes that denote no child and state that a node was freed.
    pub freeing_keys: u64,
    /// Keys in internal nodes whose node was freed.
    pub stale_child_keys: u64,
    /// Nodes that a key names and that could not be read.
    pub missing: u64,
}

/// A node that a key names and that is not read yet.
struct Pending {
    key: Bkey,
    level: u16,
    parent: Option<NodeId>,
    after: (Inode, Sector),
}

/// Maximum age of a pointer. For older pointers, the wrap-around of generations would be ambiguous.
pub(crate) const MAX_POINTER_AGE: u8 = 96;

/// Reads the btree below the root that the newest journal entry names.
pub(super) fn open(scan: &mut Scan<'_>, newest: &Jset, view: &mut SetView) -> Result<(), Stop> {
    let mut walk = Walk {
        superblock: &view.superblock,
        gens: &mut view.gens,
        nodes: &mut view.nodes,
        extents: &mut view.extents,
        stats: &mut view.btree,
        unknown: &mut view.unknown,
        used: Sparse::new(u64::from(view.superblock.geometry().nbuckets)),
        pending: Vec::new(),
        buffer: Vec::new(),
    };
    walk.stats.root_level = newest.btree_level;
    let key = newest.btree_root;
    if newest.btree_level > MAX_BTREE_LEVEL {
        let place = Place::new(scan.source.name(), "btree node").sector(key.ptr.offset());
        let (invariant, expected) = (Invariant::NodeShape, format!("at most {MAX_BTREE_LEVEL}"));
        let (severity, found) = (Severity::Fatal, newest.btree_level);
        walk.stats.missing += 1;
        walk.unknown.push(KeyRange { after: Bkey::ZERO_POSITION, last: Bkey::MAX_POSITION });
        scan.report(Finding::new(
            severity,
            invariant,
            place,
            Mismatch::new("level of the root", expected, found),
        ))?;
        scan.assume("nothing is known of the btree");
        return Ok(());
    }
    walk.gens.raise(key.ptr, key.size());
    walk.pending.push(Pending { key, level: newest.btree_level, parent: None, after: Bkey::ZERO_POSITION });
    while let Some(next) = walk.pending.pop() {
        walk.visit(scan, &next)?;
    }
    Ok(())
}

/// Buckets of the nodes from the root to this one.
pub(super) fn path(nodes: &[NodeView], mut at: Option<NodeId>) -> Vec<u32> {
    let mut path = Vec::new();
    while let Some(node) = at.and_then(|id| nodes.get(usize::try_from(id.0).ok()?)) {
        path.push(node.bucket.0);
        // Parents have smaller numbers than their children, so the loop ends.
        at = node.parent;
    }
    path.reverse();
    path
}

/// Prints a position for messages.
fn position_text(p: (Inode, Sector)) -> String {
    if p == Bkey::MAX_POSITION { "the end".to_owned() } else { format!("{}:{}", p.0, p.1) }
}

struct Walk<'v> {
    superblock: &'v CacheSuper,
    gens: &'v mut Gens,
    nodes: &'v mut Vec<NodeView>,
    extents: &'v mut ExtentMap,
    stats: &'v mut BtreeStats,
    unknown: &'v mut Vec<KeyRange>,
    used: Sparse<bool>,
    pending: Vec<Pending>,
    buffer: Vec<u8>,
}

impl Walk<'_> {
    fn visit(&mut self, scan: &mut Scan<'_>, next: &Pending) -> Result<(), Stop> {
        let mut path = path(self.nodes, next.parent);
        let (ptr, key) = (next.key.ptr, &next.key);
        let mut place = Place::new(scan.source.name(), "btree node");
        if let Some(bucket) = self.gens.bucket_of(ptr, key.size()) {
            path.push(bucket.0);
            place = place.sector(ptr.offset()).bucket(bucket).generation(ptr.generation());
        }
        place = place.node(next.level, path);
        let read = self.claim(next, &place).and_then(|bucket| {
            let (node, damage) = self.read(scan.source, key, &place)?;
            Ok((bucket, node, damage))
        });
        let (bucket, node, damage) = match read {
            Ok(read) => read,
            Err(finding) => {
                self.stats.missing += 1;
                scan.report(*finding)?;
                self.assume_lost(scan, next, "nothing is known of the keys of");
                return Ok(());
            }
        };
        let damaged = damage.is_some();
        if let Some(finding) = damage {
            scan.report(finding)?;
            let bsets = node.bsets.len();
            self.assume_lost(scan, next, &format!("the first {bsets} bsets stand for all of"));
        }
        let id = self.store(next, bucket, &node, damaged);
        self.check_bsets(scan, next, &node, &place)?;
        let live = if next.level == 0 {
            let (live, merged_words) = self.leaf(id, &node);
            self.check_merged(scan, &node, merged_words, &place)?;
            live
        } else {
            let children = self.children(scan, &node, &place)?;
            if !damaged {
                self.check_end(scan, next, &children, &place)?;
            }
            self.queue(id, next, &children)
        };
        if let Some(node) = self.nodes.last_mut() {
            node.live = live;
        }
        Ok(())
    }

    /// Adds a node that was read to the view.
    fn store(&mut self, next: &Pending, bucket: BucketNr, node: &Node, damaged: bool) -> NodeId {
        let id = NodeId(u32::try_from(self.nodes.len()).unwrap_or(u32::MAX));
        let bsets = node.bsets.iter().map(|bset| BsetInfo {
            offset_bytes: count(bset.offset_bytes),
            version: bset.version,
            keys: count(bset.keys.len()),
        });
        self.stats.nodes += 1;
        self.stats.bsets += count(node.bsets.len());
        self.stats.max_bsets = self.stats.max_bsets.max(count(node.bsets.len()));
        self.nodes.push(NodeView {
            key: next.key,
            level: next.level,
            parent: next.parent,
            bucket,
            after: next.after,
            seq: node.seq,
            bsets: bsets.collect(),
            written: Sectors::from_bytes_ceil(count(node.written_bytes)),
            damaged,
            live: 0,
        });
        id
    }

    fn assume_lost(&mut self, scan: &mut Scan<'_>, next: &Pending, what: &str) {
        let (from, to) = (position_text(next.after), position_text(next.key.position()));
        self.unknown.push(KeyRange { after: next.after, last: next.key.position() });
        scan.assume(format!("{what} the btree node for keys from {from} to {to}"));
    }

    /// Finds the node's bucket and claims it: no other node may have it.
    fn claim(&mut self, next: &Pending, place: &Place) -> Result<BucketNr, Box<Finding>> {
        let bad = |field, expected: String, found: String| {
            let place = place.clone();
            let (severity, invariant) = (Severity::Fatal, Invariant::NodeShape);
            Err(Box::new(Finding::new(severity, invariant, place, Mismatch::new(field, expected, found))))
        };
        let geometry = self.superblock.geometry();
        let (key, ptr) = (&next.key, next.key.ptr);
        if key.nptrs() == 0 || key.size().0 == 0 || key.dirty() {
            return bad("key", "a clean key with size and pointer".into(), format!("{:#018x}", key.high));
        }
        let bucket = self.gens.bucket_of(ptr, key.size()).filter(|b| *b >= geometry.first_dynamic());
        let Some(bucket) = bucket else {
            let (first, last) = (geometry.first_dynamic(), geometry.nbuckets - 1);
            let expected =
                format!("{} sectors inside one of buckets {first} to {last} of device 0", key.size());
            return bad("pointer", expected, format!("device {} sector {}", ptr.dev(), ptr.offset()));
        };
        if geometry.bucket_start(bucket) != ptr.offset() {
            let expected = format!("the start of bucket {bucket}, sector {}", geometry.bucket_start(bucket));
            return bad("pointer", expected, format!("sector {}", ptr.offset()));
        }
        match self.used.get_mut(bucket) {
            Some(used) if !*used => *used = true,
            _ => return bad("bucket", "a bucket with no other btree node".into(), bucket.to_string()),
        }
        Ok(bucket)
    }

    /// Reads a node. Of a damaged node it returns the readable part, and reports findings.
    fn read(
        &mut self,
        source: &dyn ReadAt,
        key: &Bkey,
        place: &Place,
    ) -> Result<(Node, Option<Finding>), Box<Finding>> {
        let (magic, block) = (self.superblock.set_magic(), self.superblock.geometry().block_sectors);
        let corrupt = |e| Finding::corrupt(Severity::Fatal, Invariant::NodeReadable, place.clone(), e);
        let unreadable = |e| unreadable_at(Invariant::NodeReadable, Severity::Fatal, place.clone(), &e);
        let mut head = *key;
        head.set_size(Sectors(key.size().0.min(8)));
        self.fill(source, &head).map_err(unreadable)?;
        if let Err(damage) = parse_node(&self.buffer, &head, magic, block) {
            // Most nodes do not parse when they are cut off. These two fields are in the first block, so more bytes do not help.
            if damage.before.bsets.is_empty() && ["seq", "magic"].contains(&damage.error.field) {
                return Err(Box::new(corrupt(&damage.error)));
            }
        }
        self.fill(source, key).map_err(unreadable)?;
        match parse_node(&self.buffer, key, magic, block) {
            Ok(node) => Ok((node, None)),
            Err(damage) if damage.before.bsets.is_empty() => Err(Box::new(corrupt(&damage.error))),
            Err(damage) => {
                let finding = corrupt(&damage.error).note(match damage.kind {
                    DamageKind::TornLastBset => {
                        "in the last bset of the node: an incomplete append (its keys are in the journal), or \
                         later damage (its keys are lost)"
                    }
                    DamageKind::Other => "the keys of this bset and those behind it are lost",
                });
                let index = damage.before.bsets.len();
                let item = finding.place.item.as_deref().unwrap_or_default();
                let item = format!("bset {index}, {item}");
                Ok((damage.before, Some(Finding { place: finding.place.clone().item(item), ..finding })))
            }
        }
    }

    fn fill(&mut self, source: &dyn ReadAt, key: &Bkey) -> Result<(), ReadError> {
        self.buffer.resize(usize::try_from(key.size().bytes()).unwrap_or(0), 0);
        source.read_at(key.ptr.offset(), &mut self.buffer)
    }

    /// Checks invariants 10 and 11, and for leaves the part of 13 about single keys.
    fn check_bsets(
        &self,
        scan: &mut Scan<'_>,
        next: &Pending,
        node: &Node,
        place: &Place,
    ) -> Result<(), Stop> {
        let kind = BsetKind::of_level(next.level);
        for (index, bset) in node.bsets.iter().enumerate() {
            if let Err(e) = check_bset_order(kind, bset.keys.iter().copied()) {
                let place = place.clone().item(format!("bset {index}"));
                scan.report(Finding::corrupt(Severity::Error, Invariant::BsetOrder, place, &e))?;
            }
            for (n, key) in bset.keys.iter().enumerate() {
                let place = || place.clone().item(format!("bset {index}, key {n}"));
                if kind == BsetKind::Leaf {
                    self.check_extent(scan, key, &place)?;
                }
                let counts = if kind == BsetKind::Leaf { key.size().0 > 0 } else { !key.is_zero_position() };
                if !counts {
                    continue;
                }
                let inside = match (kind, key.start_position()) {
                    (BsetKind::Leaf, Some(start)) => start >= next.after,
                    (BsetKind::Leaf, None) => true,
                    (BsetKind::Internal, _) => key.position() > next.after,
                };
                if !inside || key.position() > next.key.position() {
                    let (from, to) = (position_text(next.after), position_text(next.key.position()));
                    let found = match kind {
                        BsetKind::Leaf => {
                            format!("{}, {} sectors", position_text(key.position()), key.size())
                        }
                        BsetKind::Internal => position_text(key.position()),
                    };
                    let expected = format!("inside the node's range, {from} to {to}");
                    let (severity, invariant) = (Severity::Error, Invariant::NodeRange);
                    scan.report(Finding::new(
                        severity,
                        invariant,
                        place(),
                        Mismatch::new("key", expected, found),
                    ))?;
                }
            }
        }
        Ok(())
    }

    fn check_extent(&self, scan: &mut Scan<'_>, key: &Bkey, place: &dyn Fn() -> Place) -> Result<(), Stop> {
        let (severity, invariant) = (Severity::Error, Invariant::ExtentValid);
        if key.start().is_none() {
            let (expected, found) = (format!("at most {}", key.offset()), key.size());
            scan.report(Finding::new(severity, invariant, place(), Mismatch::new("size", expected, found)))?;
        }
        let Some(ptr) = key.pointer().filter(|p| !p.is_check() && key.size().0 > 0) else { return Ok(()) };
        if self.gens.bucket_of(ptr, key.size()).is_none() {
            let expected = format!("{} sectors inside one bucket of device 0", key.size());
            let found = format!("device {} sector {}", ptr.dev(), ptr.offset());
            scan.report(Finding::new(
                severity,
                invariant,
                place(),
                Mismatch::new("pointer", expected, found),
            ))?;
        }
        Ok(())
    }

    /// Checks that the merged bsets of a leaf take no more space than the bsets.
    ///
    /// A kernel merges the bsets of a leaf at the start of the node, and adds new bsets after the blocks that the bsets take on
    /// disk. The merged bset must not reach these blocks.
    fn check_merged(
        &self,
        scan: &mut Scan<'_>,
        node: &Node,
        words: usize,
        place: &Place,
    ) -> Result<(), Stop> {
        let needed = BSET_HEADER_BYTES + 8 * words;
        if needed <= node.written_bytes {
            return Ok(());
        }
        let (expected, found) = (format!("at most the {} bytes of the bsets", node.written_bytes), needed);
        let (severity, invariant) = (Severity::Error, Invariant::MergedSize);
        scan.report(Finding::new(
            severity,
            invariant,
            place.clone(),
            Mismatch::new("bytes of the merged bsets", expected, found),
        ))
    }

    /// Applies the bsets of a leaf to the extent map, and raises generations by the keys that no newer bset replaces (format
    /// section 5). Returns the number of ranges of the leaf, and the words that the keys of these ranges take.
    fn leaf(&mut self, id: NodeId, node: &Node) -> (u64, usize) {
        let mut own = ExtentMap::default();
        for key in node.bsets.iter().flat_map(|bset| &bset.keys) {
            if let Some(piece) = Piece::of(key, Origin::Node(id)) {
                own.insert(key.inode(), piece);
            }
        }
        for (inode, piece) in own.iter() {
            if let Some(ptr) = piece.ptr {
                self.gens.raise(ptr, piece.len);
            }
            self.extents.insert(inode, *piece);
        }
        let words = own.iter().map(|(_, piece)| if piece.ptr.is_some() { 3 } else { 2 }).sum();
        (count(own.len()), words)
    }

    /// The children of an internal node, by their end positions. Every key raises generations.
    fn children(
        &mut self,
        scan: &mut Scan<'_>,
        node: &Node,
        place: &Place,
    ) -> Result<BTreeMap<(Inode, Sector), Bkey>, Stop> {
        for key in node.bsets.iter().flat_map(|bset| &bset.keys) {
            self.gens.raise(key.ptr, if key.pointer().is_some() { key.size() } else { Sectors(0) });
        }
        let mut children: BTreeMap<(Inode, Sector), Bkey> = BTreeMap::new();
        for (index, bset) in node.bsets.iter().enumerate() {
            for (n, key) in bset.keys.iter().enumerate() {
                let place = || place.clone().item(format!("bset {index}, key {n}"));
                if key.is_zero_position() {
                    self.stats.freeing_keys += 1;
                    continue;
                }
                let age = key.pointer().and_then(|p| self.gens.age(p, key.size()));
                if let Some(age) = age.filter(|&age| age > 0) {
                    self.stats.stale_child_keys += 1;
                    if age > MAX_POINTER_AGE {
                        let expected = format!("at most {MAX_POINTER_AGE}");
                        let (severity, invariant) = (Severity::Error, Invariant::PointerAge);
                        let field = "age of the pointer in generations";
                        scan.report(Finding::new(
                            severity,
                            invariant,
                            place(),
                            Mismatch::new(field, expected, age),
                        ))?;
                    }
                    continue;
                }
                // A key without a usable pointer stays in the map; `claim` reports it.
                if let Some(other) = children.insert(key.position(), *key) {
                    let finding = Finding::new(
                        Severity::Fatal,
                        Invariant::NodePartition,
                        place(),
                        Mismatch::new(
                            "child",
                            format!("one child that ends at {}", position_text(key.position())),
                            format!(
                                "a second one at sector {}, besides sector {}",
                                key.ptr.offset(),
                                other.ptr.offset()
                            ),
                        ),
                    );
                    scan.report(finding)?;
                    scan.assume(format!(
                        "of two children the later one counts, at sector {}",
                        key.ptr.offset()
                    ));
                }
            }
        }
        Ok(children)
    }

    /// Reports an internal node whose last child does not end where the node ends.
    fn check_end(
        &mut self,
        scan: &mut Scan<'_>,
        next: &Pending,
        children: &BTreeMap<(Inode, Sector), Bkey>,
        place: &Place,
    ) -> Result<(), Stop> {
        let last = children.last_key_value().map(|(p, _)| *p);
        if last != Some(next.key.position()) {
            let found = last.map_or_else(|| "no child at all".to_owned(), position_text);
            let finding = Finding::new(
                Severity::Fatal,
                Invariant::NodePartition,
                place.clone(),
                Mismatch::new("end of the last child", position_text(next.key.position()), found),
            );
            scan.report(finding)?;
            self.assume_lost(scan, next, "nothing is known of keys behind the last child of");
        }
        Ok(())
    }

    /// Queues the children of a node; returns how many there are.
    fn queue(&mut self, id: NodeId, next: &Pending, children: &BTreeMap<(Inode, Sector), Bkey>) -> u64 {
        let mut after = next.after;
        let first = self.pending.len();
        for (position, key) in children {
            let level = next.level.saturating_sub(1);
            self.pending.push(Pending { key: *key, level, parent: Some(id), after });
            after = *position;
        }
        // The last node in `pending` is visited first, so the order is reversed to visit children in key order.
        self.pending.get_mut(first..).unwrap_or_default().reverse();
        count(children.len())
    }
}

fn count(n: usize) -> u64 {
    u64::try_from(n).unwrap_or(u64::MAX)
}
