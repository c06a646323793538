//! Refilling the list of ready buckets.
//!
//! Owns the choice of victims and the order that makes reuse safe (format section 12.2): new generation in memory →
//! prio sets → journal entry that names them → (discard) → ready. Data never waits for this as long as the list is
//! refilled ahead of demand.

use std::rc::Rc;

use format::{BucketNr, Gen, Sectors};

use super::write_prios;
use crate::canary::{Bug, bug};
use crate::error::EngineError;
use crate::policy::replacement::Candidate;
use crate::set::Core;

/// Invalidates up to `wanted` buckets: their pointers are stale from now on.
fn invalidate(core: &Core, wanted: usize) -> Vec<BucketNr> {
    let buckets = &mut *core.buckets.borrow_mut();
    let mut picked = Vec::new();
    let mut selector = core.selector.borrow_mut();
    let mut rng = core.rng.borrow_mut();
    let candidate = |b: BucketNr| Candidate {
        eligible: buckets.may_invalidate(b),
        prio: buckets.prio(b),
        live_sectors: buckets.live(b).0 as u32,
    };
    match core.reuse() {
        Some(mut reuse) => reuse.choose(wanted, candidate, &mut picked),
        None => selector.pick(wanted, core.min_prio.get(), &mut rng, candidate, &mut picked),
    }
    if picked.is_empty() {
        // A random policy can miss the few that there are.
        picked.extend(buckets.all().filter(|b| buckets.may_invalidate(*b)).take(wanted));
    }
    for b in &picked {
        buckets.invalidate(*b);
    }
    let wrapped = picked.iter().filter(|b| buckets.generation(**b) == Gen(0)).count();
    core.counters.borrow_mut().gen_wraps += wrapped as u64;
    picked
}

async fn refill(core: &Rc<Core>, wanted: usize) -> Result<usize, EngineError> {
    let prios = core.alloc.prios.lock().await;
    let picked = invalidate(core, wanted);
    if picked.is_empty() {
        return Ok(0);
    }
    core.alloc.invalidated();
    let early = bug(Bug::ReuseBeforeGenerations);
    if early {
        core.alloc.put_ready(picked.clone());
    }
    write_prios(core).await?;
    core.alloc.settled();
    drop(prios);
    if core.discards_buckets() {
        let geometry = &core.geometry;
        let discards: Vec<_> = picked
            .iter()
            .map(|b| {
                core.cache.start_plain(io::Op::Discard, geometry.bucket_start(*b), geometry.bucket_sectors)
            })
            .collect();
        for d in discards {
            // A discard is advice: a device that refuses it loses nothing. Another error may mean that it lost its power.
            if let Err(e) = d.await.result
                && !e.is_unsupported()
            {
                core.cache_request_failed(&e);
            }
        }
    }
    let n = picked.len();
    if !early {
        core.alloc.put_ready(picked);
    }
    Ok(n)
}

/// Keeps the list of ready buckets full.
pub(crate) async fn refill_task(core: Rc<Core>) {
    loop {
        core.alloc.wanted.wait_until(|| core.is_stopping() || core.alloc.missing() > 0).await;
        if core.is_stopping() {
            return;
        }
        match refill(&core, core.alloc.missing()).await {
            Ok(0) => {
                // Nothing can be invalidated now: generations that ran ahead need a walk of the index, dirty data
                // needs writeback. Either wakes this task.
                core.alloc.starved.set(true);
                // A walk that waits for the journal must not wait any more.
                core.journal.look_again();
                if core.buckets.borrow().reclaimable() > 0 {
                    core.request_gc();
                }
                core.alloc.kick();
                core.alloc.wanted.changed().await;
            }
            Ok(_) => {
                core.alloc.starved.set(false);
                // Buckets were used up: packing may be due.
                core.gc_event.notify_all();
            }
            Err(e) => {
                core.metadata_failed(e);
                return;
            }
        }
    }
}

/// At start, buckets without any live pointer may be used at once: whatever still points to them was stale by the
/// stored generation (format section 12.2, exception). Takes up to `wanted`.
pub(crate) fn prime(core: &Core, wanted: usize) {
    let buckets = &mut *core.buckets.borrow_mut();
    let empty: Vec<BucketNr> = buckets
        .all()
        .filter(|b| buckets.may_invalidate(*b) && buckets.live(*b) == Sectors::ZERO)
        .take(wanted)
        .collect();
    for b in &empty {
        buckets.invalidate(*b);
    }
    core.alloc.put_ready(empty);
}

#[cfg(test)]
mod tests;
