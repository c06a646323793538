//! The garbage collector: walks the index, leaf by leaf, beside everything else.
//!
//! Bucket counts are exact at all times, so nothing has to be marked. The walk is for what only it can know: how old
//! the oldest pointer to each bucket is (so that generations can go on), stale entries that fill leaves, keys of
//! devices that are gone, and small leaves that can share a node. Each step handles one leaf and lets others run.
//!
//! Every leaf with unwritten keys that is passed is written, so that no journal entry from before the walk can bring
//! back a pointer older than the walk has seen.

mod moving;

pub(crate) use moving::{compact_task, keep};

use std::collections::BTreeSet;
use std::iter::{once, successors};
use std::rc::Rc;

use format::{Gen, Inode};

use crate::error::EngineError;
use crate::index::{Bound, MAX_STALE_AGE, NodeId, Tree};
use crate::journal::Urgency;
use crate::set::Core;

/// Adjacent leaves that are looked at together.
const COALESCE: usize = 4;

/// What one leaf holds.
pub(crate) struct Survey {
    pub(crate) live: usize,
    pub(crate) stale: usize,
    pub(crate) max_age: u8,
}

/// Runs a walk whenever one is asked for or due.
pub(crate) async fn gc_task(core: Rc<Core>) {
    loop {
        let due = || {
            let buckets = core.alloc.buckets();
            // On average every bucket has been reused once.
            buckets.invalidated_since_gc() > u64::from(buckets.len())
        };
        core.alloc
            .walks()
            .wait_until(|| core.device.is_stopping() || core.alloc.walks().is_wanted() || due())
            .await;
        if core.device.is_stopping() {
            return;
        }
        if let Err(e) = collect(&core).await {
            core.device.fail(e);
            return;
        }
        core.alloc.look_again();
    }
}

/// One whole walk.
pub(crate) async fn collect(core: &Rc<Core>) -> Result<(), EngineError> {
    let _one = core.gc_lock.lock().await;
    core.alloc.walks().begun();
    core.gc_running.set(true);
    let began = core.rt.now();
    let result = walk(core).await;
    core.gc_running.set(false);
    result?;
    core.work.borrow_mut().gc_ended(began, core.rt.now());
    core.counters.borrow_mut().gc_runs += 1;
    if core.tunables.borrow().copy_gc_enabled {
        moving::run(core, moving::Victims::Partial).await?;
    }
    Ok(())
}

async fn walk(core: &Rc<Core>) -> Result<(), EngineError> {
    let void: BTreeSet<Inode> = core.index.invalid_slots();
    let started = core.index.tree().next_birth();
    let mut oldest: Vec<Gen> = core.alloc.buckets().generations();
    let mut passed: Option<Bound> = None;
    loop {
        core.device.check()?;
        let id = core.index.tree().next_leaf(passed);
        let Some(id) = id else { break };
        core.index.load_leaf(id).await?;
        core.rt.yield_now().await;
        if clean_leaf(core, id, &void, started).await? {
            // Replaced: look at what is there now.
            continue;
        }
        let bound = {
            let tree = core.index.tree();
            // Loaded above; if it went away again, or was replaced, come back to it.
            let Some(node) = tree.try_node(id).filter(|n| n.level == 0 && n.leaf().extents.is_some()) else {
                continue;
            };
            let buckets = core.alloc.buckets();
            tree.oldest_pointers(id, &buckets, &mut oldest);
            node.bound
        };
        passed = Some(bound);
    }
    // No leaf has keys of the void slots any more, so no later entry has. An entry from before may: data that is moved beside
    // the walk gets new keys until its leaf is purged.
    let purged_seq = core.journal.open_seq();
    // Nothing from before is replayed any more once these are written, and no node on disk has pointers that the walk has
    // not seen because they were replaced in memory.
    let changed: Vec<NodeId> = core.index.tree().changed_leaves();
    core.index.write_leaves_unhurried(changed).await?;
    core.journal.commit_roots(|| Urgency::CanWait, |_| ()).await?;
    core.index.tree().oldest_dead_pointers(&core.alloc.buckets(), &mut oldest);
    core.alloc.buckets_mut().finish_gc(&oldest);
    if core.journal.oldest_needed() >= purged_seq {
        core.index.slots_are_empty(&void);
    }
    Ok(())
}

/// Drops what must not stay in a leaf; true if the leaf was replaced.
async fn clean_leaf(
    core: &Rc<Core>,
    id: NodeId,
    void: &BTreeSet<Inode>,
    started: u64,
) -> Result<bool, EngineError> {
    let survey = {
        let tree = &mut *core.index.tree_mut();
        let loaded = tree.try_node(id).is_some_and(|n| n.level == 0 && n.leaf().extents.is_some());
        if !loaded {
            return Ok(false);
        }
        let buckets = &mut *core.alloc.buckets_mut();
        if !void.is_empty() {
            tree.purge(id, buckets, |inode, _| !void.contains(&inode));
        }
        tree.survey(id, buckets)
    };
    let always = core.tunables.borrow().gc_always_rewrite && created_before(core, id, started);
    let must = core.index.tree().node(id).leaf().must_rewrite;
    // With the leaf, the nodes above it are replaced.
    let dead_age = core.index.tree().dead_age_above(id, &core.alloc.buckets());
    if must || always || is_stale(&survey, dead_age) {
        core.index.wait_room_for_roots().await?;
        core.index.rewrite(&[id]).await?;
        return Ok(true);
    }
    let group = small_siblings(core, id, survey.live);
    if group.len() > 1 {
        core.index.wait_room_for_roots().await?;
        core.index.rewrite(&group).await?;
        return Ok(true);
    }
    Ok(false)
}

/// Whether a leaf is replaced for its stale pointers, or the nodes above it for those to children that are gone.
fn is_stale(survey: &Survey, dead_age: u8) -> bool {
    survey.max_age.max(dead_age) > MAX_STALE_AGE || survey.stale > survey.live.max(64)
}

/// Each leaf is rewritten once by a walk, never what the walk itself has made (docs/compat.md, item 25).
fn created_before(core: &Core, id: NodeId, started: u64) -> bool {
    core.index.tree().node(id).birth < started
}

/// The leaf and those behind it, under the same parent and in memory, that together fit into one node at two thirds.
fn small_siblings(core: &Core, id: NodeId, live: usize) -> Vec<NodeId> {
    let tree = core.index.tree();
    let buckets = core.alloc.buckets();
    let siblings = successors(Some(id), |at| next_sibling(&tree, *at));
    let behind = siblings.clone().skip(1).map(|s| tree.survey(s, &buckets).live);
    let count = fitting(core.index.leaf_words(), once(live).chain(behind));
    siblings.take(count).collect()
}

/// The leaf behind this one, if both can be replaced by one.
fn next_sibling(tree: &Tree, id: NodeId) -> Option<NodeId> {
    let node = tree.node(id);
    let next = tree.leaf_after(node.bound)?;
    let sibling = tree.node(next);
    let joins = sibling.parent == node.parent && sibling.leaf().extents.is_some() && !sibling.busy;
    joins.then_some(next)
}

/// How many adjacent leaves with so many live extents fit into one node of `leaf_words` at two thirds of what a new node
/// gets, the first of them first.
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
