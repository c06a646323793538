//! Reading btree nodes: the whole tree at the start, and single leaves when they are needed again.
//!
//! At the start the keys of nodes raise the generations of the buckets to which they point (format section 5). Only
//! then is it known which pointers are stale, so the tree is read first and accounted for afterwards. Of a leaf, only
//! the merged keys of its bsets raise generations, because gc checks the age of these pointers alone. A superseded key
//! stays in its bset until the leaf is rewritten, perhaps for ever. Its bucket is reused meanwhile. After 128
//! generations the pointer of the key would look newer than the bucket.
//!
//! Several nodes are read at the same time. A torn last bset is dropped (format section 12.5): its journal entries are
//! still pinned, so no acknowledged write is lost. The leaf is rewritten, and an event reports the torn bset. Must not
//! know the journal.

use std::collections::{BTreeSet, VecDeque};

use format::node::{DamageKind, NodeSummary};
use format::{Bkey, BucketNr, Corrupt, Inode, JournalSeq, Ptr, Sector, Sectors, for_each_bset};
use io::{Buffer, IoFuture};

use super::Index;
use super::entry::{Entry, MAX_POSITION};
use super::extents::Extents;
use super::merged::Merged;
use super::node::{Body, Bound, Leaf, Node, NodeId};
use super::tree::{MAX_BOUND, Tree};
use crate::alloc::{Buckets, GEN_AGE_LIMIT, Use};
use crate::canary::{Bug, Mark, bug, mark};
use crate::damage::{Flaw, KeyFlaw, NodeFlaw, NodeKeyFlaw};
use crate::device::Reader;
use crate::error::EngineError;
use crate::events::SetEvent;

/// The number of nodes that are read at the same time.
pub(crate) const READ_AHEAD: usize = 16;

/// The largest number of live sectors that is counted in a bucket, whose count has 32 bits. In a sound cache set,
/// extents do not share sectors, so a bucket has no more live sectors than its size.
const MOST_LIVE: Sectors = Sectors(1 << 31);

/// The buckets of the nodes above a node, from the root on, for error messages.
type Path = Vec<BucketNr>;

/// A node that is to be read.
struct Wanted {
    key: Bkey,
    level: u16,
    parent: Option<NodeId>,
    path: Path,
    /// The index of the node among the children of its parent.
    child: usize,
}

/// The content of a node that was read.
struct Parsed {
    summary: NodeSummary,
    torn: Option<Corrupt>,
    keys: Vec<Bkey>,
}

impl Reader<'_> {
    fn bucket_of_node(&self, w: &Wanted) -> Result<BucketNr, EngineError> {
        let g = self.geometry;
        let bad = |flaw| {
            let sector = w.key.pointer().map_or(Sector(0), |p| p.offset());
            Err(self.place.damage_at(sector, None, w.path.clone(), Flaw::NodeKey(flaw)))
        };
        let Some(ptr) = w.key.pointer() else { return bad(NodeKeyFlaw::NoPointer) };
        let Some(bucket) = g.ptr_bucket(ptr, w.key.size()).filter(|b| *b >= g.first_dynamic()) else {
            let (first, end) = (g.first_dynamic(), g.nbuckets);
            return bad(NodeKeyFlaw::Outside { size: w.key.size(), first, end, found: ptr.offset() });
        };
        if g.bucket_start(bucket) != ptr.offset() || w.key.size() == Sectors::ZERO {
            return bad(NodeKeyFlaw::NotAtStart { bucket, found: ptr.offset() });
        }
        Ok(bucket)
    }

    fn start(&self, w: &Wanted) -> Result<IoFuture, EngineError> {
        let bucket = self.bucket_of_node(w)?;
        if w.path.contains(&bucket) {
            let sector = self.geometry.bucket_start(bucket);
            return Err(self.place.damage_at(
                sector,
                Some((bucket, None)),
                w.path.clone(),
                Flaw::Node(NodeFlaw::OwnAncestor),
            ));
        }
        let buffer = self.disk.runtime().pool().take(w.key.size().bytes() as usize);
        Ok(self.disk.start_read(self.geometry.bucket_start(bucket), w.key.size(), buffer, 0))
    }

    fn parse(&self, key: &Bkey, path: &Path, bytes: &Buffer) -> Result<Parsed, EngineError> {
        let mut keys = Vec::new();
        let visit = |_: usize, k: Bkey| keys.push(k);
        match for_each_bset(bytes.as_slice(), key, self.magic, self.geometry.block_sectors, visit) {
            Ok(summary) => Ok(Parsed { summary, torn: None, keys }),
            Err(d) if d.kind == DamageKind::TornLastBset => {
                mark(Mark::TornBset);
                Ok(Parsed { summary: d.before, torn: Some(d.error), keys })
            }
            Err(d) => {
                let ptr = key.pointer().unwrap_or_default();
                let bucket = self.geometry.bucket_of(ptr.offset()).unwrap_or_default();
                let at = ptr.offset() + Sectors::from_bytes_floor(d.error.offset_bytes);
                Err(self.place.damage_at(
                    at,
                    Some((bucket, Some(ptr.generation()))),
                    path.clone(),
                    Flaw::Field(d.error),
                ))
            }
        }
    }

    /// Parses a leaf that was read again: its extents, and the size of its merged bsets.
    ///
    /// `written` is what the leaf had in bsets when it was in memory. The journal entries of these bsets are released, so a bset
    /// that is torn now is damage, and not the end of a write that a crash interrupted.
    fn extents(
        &self,
        key: &Bkey,
        written: Sectors,
        bytes: &Buffer,
    ) -> Result<(Extents, Merged), EngineError> {
        let parsed = self.parse(key, &Vec::new(), bytes)?;
        let bad = |flaw| {
            let bucket = key.pointer().and_then(|p| self.geometry.bucket_of(p.offset())).unwrap_or_default();
            self.place.bad_node(key, Vec::new(), bucket, flaw)
        };
        let found = Sectors::from_bytes_floor(parsed.summary.written_bytes as u64);
        if found != written && !bug(Bug::ShorterLeafBelieved) {
            return Err(bad(NodeFlaw::ChangedBsets { expected: written, found }));
        }
        extents_of(&parsed.keys, self.geometry.bucket_sectors).map_err(bad)
    }

    /// Starts to read a leaf of the tree again.
    fn start_leaf(&self, leaf: &Node) -> IoFuture {
        let buffer = self.disk.runtime().pool().take(leaf.sectors.bytes() as usize);
        self.disk.start_read(leaf.ptr.offset(), leaf.sectors, buffer, 0)
    }

    /// Reads the extents of a leaf into memory if they are not there.
    pub(crate) async fn load_again(&self, tree: &mut Tree, id: NodeId) -> Result<(), EngineError> {
        if tree.node(id).leaf().extents.is_some() {
            return Ok(());
        }
        let done = self.start_leaf(tree.node(id)).await;
        done.result?;
        let closed = || self.place.damage(tree.node(id).ptr.offset(), Flaw::Node(NodeFlaw::Closed));
        let bytes = done.buffer.ok_or_else(closed)?;
        let node = tree.node(id);
        let (extents, _) = self.extents(&node.key(), node.written, &bytes)?;
        tree.set_extents(id, extents);
        Ok(())
    }

    /// The pointers in the keys of a node, each with its bucket. A pointer outside the buckets of the set is damage.
    fn pointers(&self, keys: &[Bkey], w: &Wanted) -> Result<Vec<(BucketNr, Ptr)>, EngineError> {
        let mut found = Vec::with_capacity(keys.len());
        for k in keys {
            let Some(ptr) = k.pointer().filter(|p| p.is_available() && k.size() > Sectors::ZERO) else {
                continue;
            };
            let Some(b) = self.geometry.ptr_bucket(ptr, k.size()) else {
                let sector = w.key.pointer().map_or(Sector(0), |p| p.offset());
                return Err(self.place.bad_node(
                    &w.key,
                    w.path.clone(),
                    self.geometry.bucket_of(sector).unwrap_or_default(),
                    NodeFlaw::Pointer {
                        inode: k.inode(),
                        end: k.offset(),
                        size: k.size(),
                        found: ptr.offset(),
                    },
                ));
            };
            found.push((b, ptr));
        }
        Ok(found)
    }
}

/// Merges the keys of all bsets of a leaf (format section 8.3). Returns the extents, and the size of the merged keys
/// with the holes.
///
/// # Errors
/// If a key lies beyond [`MAX_POSITION`]: if it were skipped, a later rewrite of the leaf would lose it.
fn extents_of(keys: &[Bkey], bucket_sectors: Sectors) -> Result<(Extents, Merged), NodeFlaw> {
    let mut x = Extents::new(bucket_sectors);
    for k in keys {
        let Some(start) = k.start().filter(|_| k.size() > Sectors::ZERO) else { continue };
        if k.offset() > MAX_POSITION {
            if bug(Bug::FarKeyLeftOut) {
                continue;
            }
            let why = KeyFlaw::TooFar { most: MAX_POSITION };
            return Err(NodeFlaw::Key { inode: k.inode(), end: k.offset(), why });
        }
        let entry = match k.pointer() {
            Some(p) if p.is_available() => Entry::extent(k.offset(), k.size(), k.dirty(), p),
            _ => Entry::hole(k.offset(), k.size(), JournalSeq(0)),
        };
        // All entries get the same flags, because entries with different flags would not be joined again.
        x.replace(k.inode(), start, k.offset(), Some(entry.unwritten()), |_| {});
    }
    let merged = Merged::of_extents(&x);
    x.retain(|_, e| {
        e.mark_written();
        !e.is_hole()
    });
    Ok((x, merged))
}

/// The tree that was loaded, and the events to report.
pub(crate) struct LoadedTree {
    pub(crate) tree: Tree,
    pub(crate) events: Vec<SetEvent>,
}

/// Reads the whole tree under `root` and raises generations, but does not account for the extents yet. Leaves stay in
/// memory up to `limit_bytes` of extents.
pub(crate) async fn load_tree(
    reader: &Reader<'_>,
    root: Bkey,
    level: u16,
    limit_bytes: usize,
    buckets: &mut Buckets,
) -> Result<LoadedTree, EngineError> {
    if root.position() != MAX_BOUND {
        let sector = root.pointer().map_or(Sector(0), |p| p.offset());
        let found = root.position();
        return Err(reader.place.damage(sector, Flaw::RootPosition { expected: MAX_BOUND, found }));
    }
    let root = Wanted { key: root, level, parent: None, path: Vec::new(), child: 0 };
    let mut loading = Loading {
        reader,
        buckets,
        tree: None,
        events: Vec::new(),
        queue: VecDeque::from([root]),
        node_buckets: BTreeSet::new(),
        limit_bytes,
    };
    let mut reading: VecDeque<(Wanted, IoFuture)> = VecDeque::new();
    loop {
        while reading.len() < READ_AHEAD
            && let Some(w) = loading.queue.pop_front()
        {
            let future = reader.start(&w)?;
            reading.push_back((w, future));
        }
        let Some((w, future)) = reading.pop_front() else { break };
        let done = future.await;
        done.result?;
        if let Some(bytes) = done.buffer {
            loading.take(&w, &bytes)?;
        }
    }
    loading.end()
}

/// A tree that is being loaded.
struct Loading<'a> {
    reader: &'a Reader<'a>,
    buckets: &'a mut Buckets,
    tree: Option<Tree>,
    events: Vec<SetEvent>,
    /// The nodes that are still to be read.
    queue: VecDeque<Wanted>,
    /// The buckets of the nodes that were read so far.
    node_buckets: BTreeSet<BucketNr>,
    /// The limit for the memory of extents that stay in memory.
    limit_bytes: usize,
}

impl Loading<'_> {
    /// Checks a node that was read and adds it to the tree.
    fn take(&mut self, w: &Wanted, bytes: &Buffer) -> Result<(), EngineError> {
        let reader = self.reader;
        let bucket = reader.bucket_of_node(w)?;
        if !self.node_buckets.insert(bucket) {
            return Err(reader.place.bad_node(&w.key, w.path.clone(), bucket, NodeFlaw::SharedBucket));
        }
        let parsed = reader.parse(&w.key, &w.path, bytes)?;
        let pointers = reader.pointers(&parsed.keys, w)?;
        if let Some(damage) = parsed.torn {
            let generation = w.key.pointer().unwrap_or_default().generation();
            self.events.push(SetEvent::TornBset { bucket, generation, damage });
        }
        if w.level == 0 {
            return self.take_leaf(w, bucket, &parsed);
        }
        pointers.iter().for_each(|(b, p)| self.buckets.raise(*b, p.generation()));
        self.take_internal(w, bucket, &parsed)
    }

    /// Adds a leaf. Its merged keys raise the generations of their buckets.
    fn take_leaf(&mut self, w: &Wanted, bucket: BucketNr, parsed: &Parsed) -> Result<(), EngineError> {
        let (extents, merged) = extents_of(&parsed.keys, self.reader.geometry.bucket_sectors)
            .map_err(|flaw| self.reader.place.bad_node(&w.key, w.path.clone(), bucket, flaw))?;
        for (_, e) in extents.iter() {
            self.buckets.raise(self.buckets.bucket_of(e.ptr()), e.ptr().generation());
        }
        let must_rewrite = parsed.torn.is_some() || !merged.fits(parsed.summary.written_bytes);
        let leaf = Leaf { must_rewrite, extents: None, merged, ..Leaf::default() };
        let id = self.add(w, node_of(w, parsed, Body::Leaf(leaf)));
        let tree = self.tree.as_mut().expect("a node was added to the tree");
        // The extents of a leaf that must be rewritten cannot be read from disk again as they are in memory.
        if must_rewrite || tree.loaded_bytes() < self.limit_bytes || bug(Bug::LoadIgnoresLimit) {
            tree.set_extents(id, extents);
        }
        Ok(())
    }

    /// Adds an internal node, and queues its live children for reading.
    fn take_internal(&mut self, w: &Wanted, bucket: BucketNr, parsed: &Parsed) -> Result<(), EngineError> {
        let children = live_children(self.reader, w, &parsed.keys, self.buckets)?;
        let mut node = node_of(w, parsed, Body::Internal(vec![NodeId::NONE; children.len()]));
        if parsed.torn.is_some() {
            // The nodes that a torn internal bset names were not in use yet, and all old children still exist. The node
            // takes no further bsets.
            node.written = node.sectors;
        }
        let live = |p: &Ptr| children.iter().any(|c| c.pointer() == Some(*p));
        let named = parsed.keys.iter().filter_map(Bkey::pointer).filter(|p| p.is_available());
        node.dead = named.filter(|p| !live(p)).collect();
        let id = self.add(w, node);
        let path = [w.path.as_slice(), &[bucket]].concat();
        for (child, key) in children.into_iter().enumerate() {
            self.queue.push_back(Wanted {
                key,
                level: w.level - 1,
                parent: Some(id),
                path: path.clone(),
                child,
            });
        }
        Ok(())
    }

    /// Adds a node to the tree and to the children of its parent. The first node is the root.
    fn add(&mut self, w: &Wanted, node: Node) -> NodeId {
        let Some(tree) = &mut self.tree else { return self.tree.insert(Tree::new(node)).root() };
        let id = tree.add_node(node);
        if let Some(p) = w.parent
            && let Some(slot) = tree.node_mut(p).children_mut().get_mut(w.child)
        {
            *slot = id;
        }
        id
    }

    /// Ends the loading after every node was read.
    fn end(self) -> Result<LoadedTree, EngineError> {
        let mut tree = self.tree.ok_or_else(|| self.reader.place.damage(Sector(0), Flaw::NoRoot))?;
        tree.rebuild_directory();
        check_order(self.reader, &tree)?;
        if self.node_buckets.len() > 1 {
            mark(Mark::TreeLoaded);
        }
        for b in self.node_buckets {
            claim_metadata(self.buckets, b, "btree node", self.reader)?;
        }
        Ok(LoadedTree { tree, events: self.events })
    }
}

/// Checks that the bounds of the leaves ascend. Each node has its children in order, but may begin before its left
/// neighbour ends.
fn check_order(reader: &Reader<'_>, tree: &Tree) -> Result<(), EngineError> {
    let mut lower: Option<Bound> = None;
    for id in tree.leaves() {
        let (found, ptr) = (tree.node(id).bound, tree.node(id).ptr);
        if let Some(lower) = lower.filter(|lower| *lower >= found) {
            let bucket = reader.geometry.bucket_of(ptr.offset()).map(|b| (b, Some(ptr.generation())));
            return Err(reader.place.damage_at(
                ptr.offset(),
                bucket,
                Vec::new(),
                Flaw::LeafOrder { lower, found },
            ));
        }
        lower = Some(found);
    }
    Ok(())
}

/// Makes the node in memory of a node that was read.
fn node_of(w: &Wanted, parsed: &Parsed, body: Body) -> Node {
    Node {
        level: w.level,
        bound: w.key.position(),
        ptr: w.key.pointer().unwrap_or_default(),
        sectors: w.key.size(),
        set_seq: parsed.summary.seq,
        written: Sectors::from_bytes_floor(parsed.summary.written_bytes as u64),
        parent: w.parent,
        busy: false,
        birth: 0,
        replaced: false,
        dead: Vec::new(),
        body,
    }
}

/// The keys of the live children of an internal node, in order (format section 8.4).
fn live_children(
    reader: &Reader<'_>,
    w: &Wanted,
    keys: &[Bkey],
    buckets: &Buckets,
) -> Result<Vec<Bkey>, EngineError> {
    let bucket = reader.bucket_of_node(w)?;
    let bad = |flaw| Err(reader.place.bad_node(&w.key, w.path.clone(), bucket, flaw));
    let mut live: Vec<Bkey> = Vec::new();
    for k in keys.iter().filter(|k| !k.is_zero_position()) {
        let Some(ptr) = k.pointer().filter(|p| p.is_available()) else { continue };
        let Some(b) = reader.geometry.ptr_bucket(ptr, k.size()) else { continue };
        let age = buckets.generation(b).age_of(ptr.generation());
        if age > GEN_AGE_LIMIT {
            let (inode, end) = (k.inode(), k.offset());
            return bad(NodeFlaw::Age { inode, end, most: GEN_AGE_LIMIT, found: age });
        }
        if age == 0 {
            live.push(*k);
        }
    }
    live.sort_by_key(Bkey::position);
    if let Some(two) = live.windows(2).find(|p| p[0].position() == p[1].position()) {
        return bad(NodeFlaw::TwoChildren { at: two[0].position() });
    }
    match live.last() {
        Some(last) if last.position() == w.key.position() => Ok(live),
        last => bad(NodeFlaw::LastChild { expected: w.key.position(), found: last.map(Bkey::position) }),
    }
}

/// Marks a bucket as metadata. It is an error if other metadata uses the bucket already.
pub(crate) fn claim_metadata(
    buckets: &mut Buckets,
    bucket: BucketNr,
    structure: &'static str,
    reader: &Reader<'_>,
) -> Result<(), EngineError> {
    if buckets.used(bucket) == Use::Data {
        buckets.mark_metadata(bucket);
        return Ok(());
    }
    let sector = reader.geometry.bucket_start(bucket);
    Err(reader.place.damage_at(sector, Some((bucket, None)), Vec::new(), Flaw::SharedBucket { structure }))
}

/// Checks that the extents of each leaf lie in the leaf and point to data, and counts them. A leaf that did not stay in
/// memory is read again, because only now is it known which of its pointers are stale.
pub(crate) async fn account_tree(
    reader: &Reader<'_>,
    tree: &mut Tree,
    buckets: &mut Buckets,
) -> Result<(), EngineError> {
    let mut ids = tree.leaves().collect::<Vec<_>>().into_iter();
    let mut reading: VecDeque<(NodeId, Option<IoFuture>)> = VecDeque::new();
    let mut lower: (Inode, Sector) = (Inode(0), Sector(0));
    loop {
        while reading.len() < READ_AHEAD
            && let Some(id) = ids.next()
        {
            let future = tree.node(id).leaf().extents.is_none().then(|| reader.start_leaf(tree.node(id)));
            reading.push_back((id, future));
        }
        let Some((id, future)) = reading.pop_front() else { return Ok(()) };
        match future {
            None => {
                let Some(extents) = tree.take_extents(id) else { continue };
                check_leaf(reader, tree.node(id), lower, &extents, buckets)?;
                tree.account_leaf(id, &extents, buckets);
                tree.set_extents(id, extents);
            }
            Some(future) => {
                let done = future.await;
                done.result?;
                let Some(bytes) = done.buffer else { continue };
                let node = tree.node(id);
                let (extents, _) = reader.extents(&node.key(), node.written, &bytes)?;
                check_leaf(reader, tree.node(id), lower, &extents, buckets)?;
                tree.account_leaf(id, &extents, buckets);
            }
        }
        lower = tree.node(id).bound;
    }
}

/// Checks the extents of one leaf, whose range begins behind `lower`, before they are counted.
fn check_leaf(
    reader: &Reader<'_>,
    node: &Node,
    lower: Bound,
    extents: &Extents,
    buckets: &Buckets,
) -> Result<(), EngineError> {
    let (ptr, bound) = (node.ptr, node.bound);
    let bad = |flaw| {
        let bucket = Some((buckets.bucket_of(ptr), Some(ptr.generation())));
        reader.place.damage_at(ptr.offset(), bucket, Vec::new(), flaw)
    };
    for (inode, e) in extents.iter() {
        let (start, end) = (e.start(), e.end());
        if (inode, start) < lower || (inode, end) > bound {
            return Err(bad(Flaw::OutsideLeaf { lower, upper: bound, inode, start, end }));
        }
        names_data(buckets, e.ptr(), e.size()).map_err(|why| bad(Flaw::LeafKey { inode, end, why }))?;
    }
    Ok(())
}

/// Checks that a current pointer to data names a bucket that can hold the data: a bucket of metadata cannot, and no
/// bucket can have more live sectors than its count.
pub(crate) fn names_data(buckets: &Buckets, ptr: Ptr, size: Sectors) -> Result<(), KeyFlaw> {
    if !buckets.is_current(ptr) {
        return Ok(());
    }
    let bucket = buckets.bucket_of(ptr);
    match buckets.used(bucket) {
        Use::Metadata | Use::Reserved => Err(KeyFlaw::InMetadata { bucket }),
        Use::Data | Use::Ready if buckets.live(bucket) + size > MOST_LIVE => {
            Err(KeyFlaw::TooMuch { most: MOST_LIVE, bucket, live: buckets.live(bucket), size })
        }
        Use::Data | Use::Ready => Ok(()),
    }
}

/// Reads a leaf that is not in memory; returns at once if it is.
pub(crate) async fn load_leaf(index: &Index, id: NodeId) -> Result<(), EngineError> {
    loop {
        index.device.check()?;
        let (leaf, sector) = {
            let tree = &mut *index.tree.borrow_mut();
            // If the leaf was replaced or loaded meanwhile, the caller looks the key up again.
            let leaf = tree.try_node(id).filter(|n| n.level == 0 && !n.replaced);
            let Some(node) = leaf else { return Ok(()) };
            if node.leaf().extents.is_some() {
                return Ok(());
            }
            let place = ((node.key(), node.written), node.ptr.offset());
            if node.leaf().loading {
                None
            } else {
                tree.node_mut(id).leaf_mut().loading = true;
                Some(place)
            }
        }
        .unzip();
        let (Some((key, written)), Some(sector)) = (leaf, sector) else {
            let loaded = || {
                index.device.check().is_err()
                    || index.tree.borrow().try_node(id).is_none_or(|n| n.level != 0 || !n.leaf().loading)
            };
            index.changed.wait_until(loaded).await;
            continue;
        };
        let began = index.rt.now();
        let buffer = index.rt.pool().take(key.size().bytes() as usize);
        let (buffer, result) = index.device.disk().read(sector, buffer).await;
        let reader = Reader {
            disk: index.device.disk(),
            place: index.device.place(),
            geometry: &index.geometry,
            magic: index.device.magic(),
        };
        let loaded = match result {
            Ok(()) => reader.extents(&key, written, &buffer),
            Err(e) => Err(e.into()),
        };
        let result = {
            let tree = &mut *index.tree.borrow_mut();
            // No task writes or replaces a leaf that is not in memory without loading it first.
            tree.node_mut(id).leaf_mut().loading = false;
            loaded.map(|(extents, merged)| {
                tree.set_extents(id, extents);
                tree.node_mut(id).leaf_mut().merged = merged;
                index.count(|c| c.reads += 1);
                index.tasks.times().borrow_mut().read.record(began, index.rt.now());
            })
        };
        index.changed.notify_all();
        index.memory_changed.notify_all();
        return result.inspect_err(|e| index.device.fail(e.clone()));
    }
}

#[cfg(test)]
mod tests;
