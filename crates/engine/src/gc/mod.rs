//! The garbage collector, which walks the index leaf by leaf while the set serves requests.
//!
//! Bucket counts are always exact, so a walk does not have to mark buckets. A walk finds the oldest pointer to each
//! bucket (so that generations can advance), removes stale entries that fill leaves and keys of invalid slots, and
//! joins small leaves. Each step handles one leaf and then lets other tasks run.
//!
//! At its end a walk writes every leaf with unwritten keys, so that no journal entry from before the walk can bring
//! back a pointer that is older than those that the walk has found. Must not know volumes.

mod moving;

pub(crate) use moving::{pack_task, promote};

use std::cell::Cell;
use std::collections::BTreeSet;
use std::iter::{once, successors};
use std::rc::Rc;

use format::{Gen, Inode};
use io::Handle;
use io::sync::Mutex;

use crate::alloc::Allocator;
use crate::data::CachedData;
use crate::device::{BackingDevices, CacheDevice};
use crate::error::EngineError;
use crate::index::{Bound, Index, MAX_STALE_AGE, NodeId, Survey, Tree};
use crate::journal::{Journal, Urgency};
use crate::tasks::Tasks;
use crate::uuids::UuidTable;

/// The largest number of adjacent leaves that are joined.
const COALESCE: usize = 4;

/// The tunables of the garbage collector.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct GcSettings {
    /// `copy_gc_enabled`: data is packed after each walk.
    pub(crate) packs: bool,
    /// `gc_always_rewrite`: a walk replaces every leaf.
    pub(crate) always_rewrites: bool,
}

/// Counts of the garbage collector's own work.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct GcCounters {
    /// Walks of the index.
    pub(crate) walks: u64,
    /// Extents that were packed.
    pub(crate) moved: u64,
    /// Extents that were promoted: copied to another bucket because they were read.
    pub(crate) promoted: u64,
}

/// The components that the garbage collector uses.
pub(crate) struct GcParts {
    pub(crate) device: Rc<CacheDevice>,
    pub(crate) backings: Rc<BackingDevices>,
    pub(crate) journal: Rc<Journal>,
    pub(crate) alloc: Rc<Allocator>,
    pub(crate) data: Rc<CachedData>,
    pub(crate) index: Rc<Index>,
    pub(crate) uuids: Rc<UuidTable>,
    pub(crate) tasks: Rc<Tasks>,
}

/// The garbage collector of one cache set.
pub(crate) struct Gc {
    rt: Handle,
    parts: GcParts,
    settings: Cell<GcSettings>,
    /// Held during a walk: there is one at a time.
    lock: Mutex,
    is_walking: Cell<bool>,
    counters: Cell<GcCounters>,
    /// Whether a stop of the set has ended packing.
    packing_stopped: Cell<bool>,
}

impl Gc {
    pub(crate) fn new(parts: GcParts) -> Gc {
        Gc {
            rt: parts.device.disk().runtime().clone(),
            parts,
            settings: Cell::default(),
            lock: Mutex::default(),
            is_walking: Cell::new(false),
            counters: Cell::default(),
            packing_stopped: Cell::new(false),
        }
    }

    pub(crate) fn set(&self, settings: GcSettings) {
        self.settings.set(settings);
    }

    /// Ends packing: the leaf that is being packed is finished, and no other follows.
    ///
    /// Walks continue, because the rest of a stop may need buckets that only a walk makes reclaimable.
    pub(crate) fn stop_packing(&self) {
        self.packing_stopped.set(true);
    }

    /// Whether a walk is under way.
    pub(crate) fn is_walking(&self) -> bool {
        self.is_walking.get()
    }

    /// Counts of the garbage collector's own work.
    pub(crate) fn counters(&self) -> GcCounters {
        self.counters.get()
    }

    fn count(&self, change: impl FnOnce(&mut GcCounters)) {
        let mut c = self.counters.get();
        change(&mut c);
        self.counters.set(c);
    }

    /// Whether the slot belongs to a volume of the set. Data of other slots is not copied, because a wipe may already
    /// have passed the bucket to which it would go.
    fn is_in_use(&self, inode: Inode) -> bool {
        self.parts.uuids.is_live(inode) && !self.parts.index.is_invalid_slot(inode)
    }
}

/// Runs a walk whenever one is requested or due.
pub(crate) async fn gc_task(gc: Rc<Gc>) {
    loop {
        let due = || {
            let buckets = gc.parts.alloc.buckets();
            // A walk is due when there were as many invalidations as there are buckets.
            buckets.invalidated_since_gc() > u64::from(buckets.len())
        };
        gc.parts
            .alloc
            .walks()
            .wait_until(|| gc.parts.device.is_stopping() || gc.parts.alloc.walks().is_wanted() || due())
            .await;
        if gc.parts.device.is_stopping() {
            return;
        }
        if let Err(e) = collect(&gc).await {
            gc.parts.device.fail(e);
            return;
        }
        gc.parts.alloc.recheck();
    }
}

/// Runs one whole walk, and packs data afterwards if `copy_gc_enabled` is set.
pub(crate) async fn collect(gc: &Rc<Gc>) -> Result<(), EngineError> {
    let _one = gc.lock.lock().await;
    gc.parts.alloc.walks().begun();
    gc.is_walking.set(true);
    let began = gc.rt.now();
    let result = walk(gc).await;
    gc.is_walking.set(false);
    result?;
    gc.parts.tasks.times().borrow_mut().gc_ended(began, gc.rt.now());
    gc.count(|c| c.walks += 1);
    if gc.settings.get().packs {
        moving::run(gc, moving::Packing::Partial).await?;
    }
    Ok(())
}

async fn walk(gc: &Rc<Gc>) -> Result<(), EngineError> {
    let invalid: BTreeSet<Inode> = gc.parts.index.invalid_slots();
    let started = gc.parts.index.tree().next_birth();
    let mut oldest: Vec<Gen> = gc.parts.alloc.buckets().generations();
    let mut passed: Option<Bound> = None;
    loop {
        gc.parts.device.check()?;
        let id = gc.parts.index.tree().next_leaf(passed);
        let Some(id) = id else { break };
        gc.parts.index.load_leaf(id).await?;
        gc.rt.yield_now().await;
        if clean_leaf(gc, id, &invalid, started).await? {
            // The leaf was replaced: continue with the leaf at the same place.
            continue;
        }
        let bound = {
            let tree = gc.parts.index.tree();
            // The leaf was loaded above. If it was dropped from memory or replaced since, it is handled again.
            let Some(node) = tree.try_node(id).filter(|n| n.level == 0 && n.leaf().extents.is_some()) else {
                continue;
            };
            let buckets = gc.parts.alloc.buckets();
            tree.oldest_pointers(id, &buckets, &mut oldest);
            node.bound
        };
        passed = Some(bound);
    }
    // No leaf has keys of the invalid slots any more, so no later journal entry has. An earlier entry may have some,
    // because data that is moved during the walk gets new keys until its leaf is purged.
    let purged_seq = gc.parts.journal.open_seq();
    // After these leaves are written, no entry from before the walk is replayed, and no node on disk has pointers that
    // the walk has missed because they were replaced in memory.
    let changed: Vec<NodeId> = gc.parts.index.tree().changed_leaves();
    gc.parts.index.write_leaves_in_background(changed).await?;
    // Leaf writes that free the journal may wait for the buckets that this walk makes reclaimable.
    let is_short = || gc.parts.alloc.is_starved() || gc.parts.alloc.is_short_of_btree();
    let urgency = || if is_short() { Urgency::Frees } else { Urgency::CanWait };
    gc.parts.journal.commit_roots(urgency, |_| ()).await?;
    gc.parts.index.tree().oldest_dead_pointers(&gc.parts.alloc.buckets(), &mut oldest);
    gc.parts.alloc.finish_gc(&oldest);
    if gc.parts.journal.oldest_needed() >= purged_seq {
        gc.parts.index.slots_are_empty(&invalid);
    }
    Ok(())
}

/// Removes stale and invalid keys from a leaf and joins it with small siblings, if worth it; returns true if the leaf
/// was replaced.
async fn clean_leaf(
    gc: &Rc<Gc>,
    id: NodeId,
    invalid: &BTreeSet<Inode>,
    started: u64,
) -> Result<bool, EngineError> {
    let survey = {
        let tree = &mut *gc.parts.index.tree_mut();
        let loaded = tree.try_node(id).is_some_and(|n| n.level == 0 && n.leaf().extents.is_some());
        if !loaded {
            return Ok(false);
        }
        let buckets = &mut *gc.parts.alloc.buckets_mut();
        if !invalid.is_empty() {
            tree.purge(id, buckets, |inode, _| !invalid.contains(&inode));
        }
        tree.survey(id, buckets)
    };
    let always = gc.settings.get().always_rewrites && created_before(gc, id, started);
    let must = gc.parts.index.tree().node(id).leaf().must_rewrite;
    // Replacing a leaf also replaces the nodes above it if their pointers are too old.
    let dead_age = gc.parts.index.tree().dead_age_above(id, &gc.parts.alloc.buckets());
    if must || always || is_stale(&survey, dead_age) {
        gc.parts.index.wait_room_for_roots().await?;
        gc.parts.index.rewrite(&[id]).await?;
        return Ok(true);
    }
    let group = small_siblings(gc, id, survey.live);
    if group.len() > 1 {
        gc.parts.index.wait_room_for_roots().await?;
        gc.parts.index.rewrite(&group).await?;
        return Ok(true);
    }
    Ok(false)
}

/// Whether a leaf must be replaced because of its stale pointers, or because of old pointers to former children in the
/// nodes above it.
fn is_stale(survey: &Survey, dead_age: u8) -> bool {
    survey.max_age.max(dead_age) > MAX_STALE_AGE || survey.stale > survey.live.max(64)
}

/// Whether a leaf is older than the walk: a walk never rewrites leaves that it has made itself (docs/compat.md, item
/// 25).
fn created_before(gc: &Gc, id: NodeId, started: u64) -> bool {
    gc.parts.index.tree().node(id).birth < started
}

/// The leaf and the leaves behind it that have the same parent, are in memory, and together fit into one node with a
/// third of its room to spare.
fn small_siblings(gc: &Gc, id: NodeId, live: usize) -> Vec<NodeId> {
    let tree = gc.parts.index.tree();
    let buckets = gc.parts.alloc.buckets();
    let siblings = successors(Some(id), |at| next_sibling(&tree, *at));
    let behind = siblings.clone().skip(1).map(|s| tree.survey(s, &buckets).live);
    let count = fitting(gc.parts.index.leaf_words(), once(live).chain(behind));
    siblings.take(count).collect()
}

/// The leaf behind this one, if one leaf can replace both.
fn next_sibling(tree: &Tree, id: NodeId) -> Option<NodeId> {
    let node = tree.node(id);
    let next = tree.leaf_after(node.bound)?;
    let sibling = tree.node(next);
    let joins = sibling.parent == node.parent && sibling.leaf().extents.is_some() && !sibling.busy;
    joins.then_some(next)
}

/// The number of adjacent leaves, from the first on, that fit into one node of `leaf_words` and fill at most two thirds
/// of the words that a new node gets. `live` has their numbers of live extents.
fn fitting(leaf_words: usize, live: impl Iterator<Item = usize>) -> usize {
    let room = leaf_words * 5 / 8 * 2 / 3;
    let mut words = 0;
    let fits = |extents: &usize| {
        words += extents * 3;
        words <= room
    };
    live.take(COALESCE).take_while(fits).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::set::SetOptions;
    use crate::testing::{Watching, components, open_set, run};

    /// Writeback does not raise the rate of an idle set during a walk.
    #[test]
    fn a_walk_is_under_way_until_it_ends() {
        run(|rt| async move {
            let set = open_set(&Watching::new(16_384), &rt, (16, false), SetOptions::default()).await;
            let gc = components(set, &rt).gc.clone();
            rt.sleep(io::Nanos::from_secs(60)).await;
            let (before, walking) = (gc.counters().walks, gc.clone());
            assert!(!gc.is_walking());
            let walk = rt.spawn(async move { collect(&walking).await });
            let mut turns = 0;
            while !gc.is_walking() && turns < 1000 {
                rt.yield_now().await;
                turns += 1;
            }
            assert!(gc.is_walking());
            assert_eq!(gc.counters().walks, before);
            walk.await.unwrap();
            assert!(!gc.is_walking());
            assert_eq!(gc.counters().walks, before + 1);
        });
    }

    /// With `gc_always_rewrite` a walk replaces each leaf once, and not the leaf that it has made.
    #[test]
    fn a_walk_replaces_each_leaf_once() {
        run(|rt| async move {
            let set = open_set(&Watching::new(16_384), &rt, (16, false), SetOptions::default()).await;
            let gc = components(set, &rt).gc.clone();
            rt.sleep(io::Nanos::from_secs(60)).await;
            for always_rewrites in [true, false, true] {
                gc.set(GcSettings { packs: false, always_rewrites });
                let before = gc.parts.index.counters().rewrites;
                collect(&gc).await.unwrap();
                assert_eq!(gc.parts.index.counters().rewrites - before, u64::from(always_rewrites));
            }
        });
    }

    /// A node of 4 KiB takes 211 words, which are 70 extents; one of 32 KiB 1704 words, which are 568.
    #[test]
    fn leaves_are_joined_that_fill_a_node_to_two_thirds() {
        for (leaf_words, most) in [(508, 70), (4092, 568), (32764, 4550)] {
            let count = |live: &[usize]| fitting(leaf_words, live.iter().copied());
            assert_eq!(count(&[most + 1, 0]), 0);
            assert_eq!(count(&[most, 0, 1, 0]), 2);
            assert_eq!(count(&[most - 9, 9, 1]), 2);
            assert_eq!(count(&[most - 9, 10, 0]), 1);
            assert_eq!(count(&[5]), 1);
            assert_eq!(count(&[1, 1, 1, 1, 1]), 4, "no more at once");
        }
    }

    #[test]
    fn leaves_are_replaced_for_old_or_many_stale_pointers() {
        let stale = |live, stale, max_age, dead_age| is_stale(&Survey { live, stale, max_age }, dead_age);
        assert!(!stale(9, 3, 10, 10) && stale(9, 3, 11, 0) && stale(9, 3, 0, 11));
        assert!(!stale(9, 64, 1, 0) && stale(9, 65, 1, 0));
        assert!(!stale(100, 100, 1, 0) && stale(100, 101, 1, 0));
    }
}
