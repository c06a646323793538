//! Compares a tree of three leaves with a map that has the place of each unit of each device.

use std::collections::BTreeMap;

use format::{BucketNr, Geometry};
use io::Nanos;
use proptest::prelude::*;

use super::*;
use crate::device::Tick;
use crate::index::node::Leaf;

/// The unit, of which all positions are multiples.
const UNIT: u64 = 512;
/// Units of a device: three stripes.
const UNITS: u64 = 48;
const BUCKET: Sectors = Sectors(1 << 15);
const NBUCKETS: u32 = 128;
const FIRST: u32 = 8;
/// Bounds of the leaves: device and unit.
const BOUNDS: [(u32, u64); 2] = [(1, 10), (2, 20)];

fn sector(unit: u64) -> Sector {
    Sector(unit * UNIT)
}

fn node(level: u16, bound: Bound, parent: Option<NodeId>, body: Body) -> Node {
    Node {
        level,
        bound,
        ptr: Ptr::new(0, Sector(0), Gen(0)),
        sectors: BUCKET,
        set_seq: 1,
        written: Sectors::ZERO,
        parent,
        busy: false,
        birth: 0,
        replaced: false,
        dead: Vec::new(),
        body,
    }
}

/// A root with three leaves in memory.
fn tree() -> (Tree, Vec<NodeId>) {
    let mut tree = Tree::new(node(1, MAX_BOUND, None, Body::Internal(Vec::new())));
    let bounds = BOUNDS.map(|(inode, unit)| (Inode(inode), sector(unit)));
    let root = tree.root();
    let leaves: Vec<NodeId> = bounds
        .into_iter()
        .chain([MAX_BOUND])
        .map(|bound| tree.add_node(node(0, bound, Some(root), Body::Leaf(Leaf::default()))))
        .collect();
    tree.node_mut(root).children_mut().extend(&leaves);
    tree.rebuild_directory();
    leaves.iter().for_each(|id| tree.set_extents(*id, Extents::new(BUCKET)));
    (tree, leaves)
}

/// The expected content of a unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Unit {
    At { ptr: Ptr, dirty: bool },
    Hole { seq: u64 },
}

struct Model {
    tree: Tree,
    leaves: Vec<NodeId>,
    buckets: Buckets,
    units: BTreeMap<(u32, u64), Unit>,
    seq: u64,
    /// The position at which the count of stripes continues.
    counting: Option<Sector>,
}

/// Index of the leaf that covers a unit.
fn leaf_of(inode: u32, unit: u64) -> usize {
    BOUNDS.iter().filter(|bound| **bound <= (inode, unit)).count()
}

impl Model {
    fn new() -> Model {
        let geometry = Geometry::new(BUCKET, Sectors(1), NBUCKETS.into(), 4, 4).expect("a geometry");
        let (mut tree, leaves) = tree();
        let stripes = StripeGeometry::new(Sectors(16 * UNIT), Sector(0), Sectors(UNITS * UNIT));
        tree.begin_stripes(Inode(1), stripes);
        Model {
            tree,
            leaves,
            buckets: Buckets::new(&geometry, BucketNr(FIRST), NBUCKETS).unwrap(),
            units: BTreeMap::new(),
            seq: 0,
            counting: Some(Sector(0)),
        }
    }

    fn is_current(&self, ptr: Ptr) -> bool {
        self.buckets.is_current(ptr)
    }

    /// The units of a device in order, including those that are not cached.
    fn of(&self, inode: u32) -> impl Iterator<Item = (u64, Option<Unit>)> + '_ {
        (0..UNITS).map(move |unit| (unit, self.units.get(&(inode, unit)).copied()))
    }

    /// Puts units into a bucket, or makes them a hole, up to the end of the leaf.
    fn change(&mut self, inode: u32, first: u64, units: u64, to: Option<(u32, u64, bool)>, journaled: bool) {
        let leaf = leaf_of(inode, first);
        let last = BOUNDS.get(leaf).filter(|b| b.0 == inode).map_or(UNITS, |b| b.1).min(first + units);
        let id = self.tree.leaf_at(Inode(inode), sector(first));
        assert_eq!(id, self.leaves[leaf]);
        assert_eq!(
            self.tree.node(id).clip(Inode(inode), sector(first + units)).min(sector(UNITS)),
            sector(last)
        );
        let new = to.map(|(bucket, unit, dirty)| {
            let at = Sector((u64::from(bucket) << 15) + unit * UNIT);
            (Ptr::new(0, at, self.buckets.generation(BucketNr(bucket))), dirty)
        });
        self.seq += 1;
        let seq = JournalSeq(self.seq);
        let via = match journaled {
            true => Via::Journal(seq),
            false => Via::LeafOnly { data: Tick::default(), direct: None, durable: seq },
        };
        let before = self.tree.node(id).leaf();
        let (words, extents, pin) =
            (before.unwritten_words, before.extents.as_ref().map_or(0, Extents::len), before.pin_pending);
        let mut pins = Vec::new();
        let (start, end) = (sector(first), sector(last));
        let pin_it = &mut |seq| pins.push(seq);
        let now = Nanos(self.seq);
        let change = LeafChange { leaf: id, inode: Inode(inode), start, end, new, via, now };
        let unwritten = self.tree.change(&change, &mut self.buckets, pin_it);
        let leaf = self.tree.node(id).leaf();
        let cut = leaf.extents.as_ref().map_or(0, Extents::len) > extents + 1;
        assert_eq!((unwritten, leaf.unwritten_words), (words + if cut { 6 } else { 3 }, unwritten));
        assert!(words > 0 || leaf.unwritten_since == now);
        assert_eq!(pins, Vec::from_iter((journaled && pin.is_none()).then_some(seq)));
        assert!(!journaled || leaf.newest_seq == seq);
        for unit in first..last {
            let what = match new {
                Some((ptr, dirty)) => Unit::At { ptr: ptr.advanced(sector(unit) - start), dirty },
                None => Unit::Hole { seq: if journaled { self.seq } else { 0 } },
            };
            self.units.insert((inode, unit), what);
        }
    }

    /// Reuses a bucket if it has no dirty data.
    fn invalidate(&mut self, bucket: u32) {
        let b = BucketNr(bucket);
        if self.buckets.may_invalidate(b) {
            self.buckets.invalidate(b);
            self.buckets.take(b, false);
        }
    }

    fn purge(&mut self, leaf: usize, inode: u32) {
        let id = self.leaves[leaf];
        self.tree.purge(id, &mut self.buckets, |i, _| i != Inode(inode));
        let before = self.units.len();
        self.units.retain(|(i, unit), _| *i != inode || leaf_of(*i, *unit) != leaf);
        let node = self.tree.node_mut(id).leaf_mut();
        assert!(node.must_rewrite || self.units.len() == before);
        node.must_rewrite = false;
    }

    /// Continues the count of stripes by one leaf.
    fn count(&mut self) {
        if let Some(from) = self.counting {
            self.counting =
                self.tree.count_stripes(Inode(1), from, &self.buckets).expect("leaves are in memory");
        }
    }

    fn compare(&mut self) {
        for inode in 1..4 {
            self.compare_segments(inode);
            self.compare_dirty(inode);
        }
        for leaf in 0..self.leaves.len() {
            self.compare_leaf(leaf);
        }
        let mut oldest = self.buckets.generations();
        self.leaves.iter().for_each(|id| self.tree.oldest_pointers(*id, &self.buckets, &mut oldest));
        let mut expected = self.buckets.generations();
        for (bucket, age, ptr) in self.ages(|_, _| true) {
            let current = self.buckets.generation(bucket);
            if age > current.age_of(expected[bucket.0 as usize]) {
                expected[bucket.0 as usize] = ptr.generation();
            }
        }
        assert_eq!(oldest, expected);
        let bytes = self.leaves.iter().filter_map(|id| self.tree.node(*id).leaf().extents.as_ref());
        assert_eq!(self.tree.loaded_bytes(), bytes.map(Extents::memory_bytes_hint).sum::<usize>());
        let fill = self.tree.fill();
        assert_eq!((fill.root_words, fill.words), (9, 9 + 3 * fill.extents));
    }

    /// Bucket, age and pointer of each unit that is cached, stale or not.
    fn ages(&self, which: impl Fn(u32, u64) -> bool) -> Vec<(BucketNr, u8, Ptr)> {
        let mut found = Vec::new();
        for ((inode, unit), what) in &self.units {
            if let Unit::At { ptr, .. } = what
                && which(*inode, *unit)
            {
                let bucket = self.buckets.bucket_of(*ptr);
                found.push((bucket, self.buckets.generation(bucket).age_of(ptr.generation()), *ptr));
            }
        }
        found
    }

    fn compare_segments(&mut self, inode: u32) {
        let (mut unit, end) = (0, sector(UNITS));
        while unit < UNITS {
            let s =
                self.tree.segment(Inode(inode), sector(unit), end, &self.buckets).expect("it is in memory");
            let last = s.end.0 / UNIT;
            assert!(unit < last && s.end == sector(last) && leaf_of(inode, last - 1) == leaf_of(inode, unit));
            for at in unit..last {
                let expected = match self.units.get(&(inode, at)) {
                    Some(Unit::At { ptr, dirty }) if self.is_current(*ptr) => Some((*ptr, *dirty)),
                    Some(Unit::Hole { seq }) => {
                        assert_eq!(s.kind, Kind::Hole { seq: Some(JournalSeq(*seq)) });
                        None
                    }
                    _ => {
                        assert_eq!(s.kind, Kind::Hole { seq: None });
                        None
                    }
                };
                let found = match s.kind {
                    Kind::Hit { ptr, dirty, .. } => Some((ptr.advanced(sector(at) - sector(unit)), dirty)),
                    Kind::Hole { .. } => None,
                };
                assert_eq!(found, expected, "{inode}:{at}");
            }
            unit = last;
        }
    }

    fn compare_dirty(&self, inode: u32) {
        let is_dirty = |what: Option<Unit>| match what {
            Some(Unit::At { ptr, dirty: true }) => Some(ptr),
            _ => None,
        };
        let dirty: BTreeMap<u64, Ptr> =
            self.of(inode).filter_map(|(u, what)| is_dirty(what).map(|p| (u, p))).collect();
        assert_eq!(self.tree.dirty_sectors(Inode(inode)), Sectors(dirty.len() as u64 * UNIT));
        // The search begins at the start and in the middle of each unit.
        for half in 0..2 * UNITS {
            let from = Sector(half * UNIT / 2);
            let next = self.tree.next_dirty(Inode(inode), from, &self.buckets).expect("it is in memory");
            let expected = dirty.range(half / 2..).next();
            let Some((start, size, ptr)) = next else {
                assert_eq!(expected, None);
                continue;
            };
            let (unit, there) = expected.expect("something is dirty");
            assert_eq!(start, sector(*unit).max(from));
            assert_eq!(ptr, there.advanced(start - sector(*unit)));
            let end = start + size;
            assert!(end.0.is_multiple_of(UNIT));
            for n in unit + 1..end.0 / UNIT {
                assert_eq!(dirty.get(&n), Some(&there.advanced(sector(n) - sector(*unit))));
            }
        }
        if inode == 1 && self.counting.is_none() {
            let stripes = self.tree.dirty_stripes(Inode(1)).expect("stripes are counted");
            let full: Vec<u64> = stripes.full_dirty_stripes(Sector(0)).map(|(at, _)| at.0 / UNIT).collect();
            let is_full = |s: &u64| (*s..*s + 16).all(|unit| dirty.contains_key(&unit));
            assert_eq!(full, [0, 16, 32].into_iter().filter(is_full).collect::<Vec<_>>());
        }
    }

    fn compare_leaf(&self, leaf: usize) {
        let id = self.leaves[leaf];
        let inside = |inode, unit| leaf_of(inode, unit) == leaf;
        let mut live = BTreeMap::new();
        for (inode, start, size, ptr, dirty) in self.tree.live_extents(id, &self.buckets) {
            for at in (0..size.0).step_by(UNIT as usize) {
                let unit = Unit::At { ptr: ptr.advanced(Sectors(at)), dirty };
                live.insert((inode.0, (start.0 + at) / UNIT), unit);
            }
        }
        let is_live = |what: &Unit| matches!(what, Unit::At { ptr, .. } if self.is_current(*ptr));
        let expected: BTreeMap<(u32, u64), Unit> = self
            .units
            .iter()
            .filter(|(at, what)| inside(at.0, at.1) && is_live(what))
            .map(|(at, what)| (*at, *what))
            .collect();
        assert_eq!(live, expected);
        let dirty = expected.values().filter(|what| matches!(what, Unit::At { dirty: true, .. })).count();
        assert_eq!(self.tree.node(id).leaf().dirty_sectors, dirty as u64 * UNIT);
        let s = self.tree.survey(id, &self.buckets);
        assert_eq!(s.live, self.tree.live_extents(id, &self.buckets).count());
        let stale: Vec<u8> =
            self.ages(inside).into_iter().map(|(_, age, _)| age).filter(|a| *a > 0).collect();
        assert_eq!((s.stale > 0, s.max_age), (!stale.is_empty(), stale.iter().copied().max().unwrap_or(0)));
        assert!(s.stale <= stale.len());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn the_tree_agrees_with_a_map_of_units(
        steps in prop::collection::vec(
            (0u8..12, 1u32..4, 0u64..UNITS, 1u64..9, (FIRST..FIRST + 5, 0u64..56), any::<bool>()),
            1..120,
        )
    ) {
        let mut m = Model::new();
        for (what, inode, unit, units, (bucket, at), flag) in steps {
            match what {
                0..=4 => m.change(inode, unit, units, Some((bucket, at, flag)), true),
                5 | 6 => m.change(inode, unit, units, Some((bucket, at, false)), false),
                7 | 8 => m.change(inode, unit, units, None, flag),
                9 => m.invalidate(bucket),
                10 => m.count(),
                _ if flag => m.purge(leaf_of(inode, unit), inode),
                _ => {}
            }
            m.compare();
        }
    }
}

/// A whole stripe in two leaves is dirty before the count, and another one after it.
#[test]
fn full_stripes_are_found_across_leaves() {
    let mut m = Model::new();
    m.change(1, 0, 10, Some((FIRST, 0, true)), true);
    m.change(1, 10, 6, Some((FIRST, 10, true)), true);
    m.count();
    m.count();
    assert_eq!(m.counting, None);
    m.compare();
    m.change(1, 32, 16, Some((FIRST + 1, 0, true)), true);
    m.compare();
    let full =
        |m: &Model| m.tree.dirty_stripes(Inode(1)).expect("counted").full_dirty_stripes(Sector(0)).count();
    assert_eq!(full(&m), 2);
    m.tree.drop_stripes(Inode(1));
    assert!(m.tree.dirty_stripes(Inode(1)).is_none());
}

/// A search for dirty data and a count of stripes do not need leaves without dirty data in memory, but need all others.
#[test]
fn leaves_that_are_not_in_memory() {
    let mut m = Model::new();
    m.change(1, 20, 1, Some((FIRST, 0, true)), true);
    m.change(1, 5, 1, Some((FIRST, 8, false)), true);
    let [first, second, third] = m.leaves[..] else { panic!("three leaves") };
    m.tree.take_extents(first);
    let next = |m: &Model, inode| m.tree.next_dirty(Inode(inode), Sector(0), &m.buckets);
    assert_eq!(next(&m, 1).map(|d| d.map(|d| d.0)), Ok(Some(sector(20))));
    assert_eq!(m.tree.count_stripes(Inode(1), Sector(0), &m.buckets), Ok(Some(sector(10))));
    m.tree.take_extents(second);
    assert_eq!(next(&m, 1), Err(NotLoaded(second)));
    assert_eq!(next(&m, 3), Ok(None), "of the leaf of another device nothing is known");
    assert_eq!(m.tree.count_stripes(Inode(1), sector(10), &m.buckets), Err(NotLoaded(second)));
    let segment = m.tree.segment(Inode(1), sector(10), sector(12), &m.buckets);
    assert_eq!(segment.err(), Some(NotLoaded(second)));
    assert_eq!(m.tree.survey(second, &m.buckets).live, 0);
    let fill = m.tree.fill();
    assert_eq!((fill.extents, fill.words), (0, 9), "the root, and an empty leaf");
    assert_eq!(m.tree.next_leaf(None), Some(first));
    let bounds: Vec<Bound> = m.leaves.iter().map(|id| m.tree.node(*id).bound).collect();
    assert_eq!(
        bounds.iter().map(|b| m.tree.leaf_after(*b)).collect::<Vec<_>>(),
        [Some(second), Some(third), None]
    );
}

/// Leaves are dropped from memory in the order of use. Those that are being written stay, and those with unwritten keys
/// are chosen last.
#[test]
fn the_leaf_that_was_used_least_recently_goes() {
    let mut m = Model::new();
    let [first, second, third] = m.leaves[..] else { panic!("three leaves") };
    let mut look = |inode, unit| {
        m.tree.segment(Inode(inode), sector(unit), sector(unit + 1), &m.buckets).expect("in memory");
        (m.tree.coldest_clean(), m.tree.coldest_dirty())
    };
    assert_eq!(look(1, 0), (Some(second), Some(second)));
    assert_eq!(look(1, 20), (Some(third), Some(third)));
    assert_eq!(look(3, 0), (Some(first), Some(first)));
    m.change(1, 0, 1, Some((FIRST, 0, true)), true);
    assert_eq!((m.tree.coldest_clean(), m.tree.coldest_dirty()), (Some(second), Some(first)));
    assert_eq!(m.tree.changed_leaves(), [first]);
    m.tree.node_mut(second).busy = true;
    assert_eq!(m.tree.coldest_clean(), Some(third));
    m.tree.take_extents(third);
    assert_eq!((m.tree.coldest_clean(), m.tree.coldest_dirty()), (None, Some(first)));
    m.tree.node_mut(first).busy = true;
    assert_eq!(m.tree.coldest_dirty(), None);
}

/// The path from the root to a leaf, with pointers on disk to former children.
#[test]
fn pointers_to_removed_nodes_age() {
    let mut m = Model::new();
    let root = m.tree.root();
    let ptr = |bucket: u32, generation| Ptr::new(0, Sector(u64::from(bucket) << 15), Gen(generation));
    m.tree.node_mut(root).dead = vec![ptr(FIRST, 0), ptr(FIRST + 1, 0)];
    for _ in 0..3 {
        m.invalidate(FIRST);
    }
    assert_eq!((m.tree.dead_age(root, &m.buckets), m.tree.dead_age(m.leaves[0], &m.buckets)), (3, 0));
    assert_eq!(
        (m.tree.dead_age_above(m.leaves[1], &m.buckets), m.tree.dead_age_above(root, &m.buckets)),
        (3, 0)
    );
    let mut oldest = m.buckets.generations();
    assert_eq!(oldest[FIRST as usize], Gen(3));
    m.tree.oldest_dead_pointers(&m.buckets, &mut oldest);
    assert_eq!((oldest[FIRST as usize], oldest[FIRST as usize + 1]), (Gen(0), Gen(0)));
    let mut older = oldest.clone();
    older[FIRST as usize] = Gen(255);
    let expected = older.clone();
    m.tree.oldest_dead_pointers(&m.buckets, &mut older);
    assert_eq!(older, expected, "what is older already stays");
    assert_eq!((m.tree.depth(), m.tree.node_count()), (1, 4));
}

/// The id of a removed node is not given to another node.
#[test]
fn nodes_come_and_go() {
    let (mut tree, leaves) = tree();
    let births = tree.next_birth();
    let new: Vec<NodeId> = (0..2)
        .map(|n| {
            let bound = if n == 0 { (Inode(2), Sector(0)) } else { tree.node(leaves[1]).bound };
            tree.add_node(node(0, bound, Some(tree.root()), Body::Leaf(Leaf::default())))
        })
        .collect();
    tree.replace_leaves(&leaves[1..2], &new);
    assert_eq!(tree.leaves().collect::<Vec<_>>(), [leaves[0], new[0], new[1], leaves[2]]);
    tree.remove_node(leaves[1]);
    assert!(tree.try_node(leaves[1]).is_none() && tree.node_count() == 5);
    let again = tree.add_node(node(0, MAX_BOUND, None, Body::Leaf(Leaf::default())));
    assert_eq!((again.slot, again.birth), (leaves[1].slot, births + 2));
    assert!(tree.try_node(leaves[1]).is_none() && tree.node_count() == 6);
    assert_eq!(tree.next_birth(), births + 3);
    assert_eq!(tree.ids().count(), 6);
    let at = |inode, unit| tree.leaf_at(Inode(inode), sector(unit));
    assert_eq!([at(1, 47), at(2, 0), at(2, 19), at(2, 20)], [new[0], new[1], new[1], leaves[2]]);
}
