//! Refilling the list of ready buckets.
//!
//! Owns the order that makes it safe to use a bucket again (format section 12.2): new generation in memory →
//! prio sets → journal entry that names them → (discard) → ready. Data never waits for this as long as the list is
//! refilled ahead of demand.

use std::rc::Rc;

use format::{BucketNr, Sectors};

use super::Allocator;
use super::prio::write_prios;
use crate::canary::{Bug, bug};
use crate::error::EngineError;
use crate::policy::replacement::Candidate;

/// Invalidates up to `wanted` buckets: their pointers are stale from now on.
fn invalidate(alloc: &Allocator, wanted: usize) -> Vec<BucketNr> {
    let buckets = &mut *alloc.buckets.borrow_mut();
    let mut picked = Vec::new();
    let candidates = |b: BucketNr| Candidate {
        eligible: buckets.may_invalidate(b),
        prio: buckets.prio(b),
        live_sectors: buckets.live(b).0 as u32,
    };
    alloc.eviction.borrow_mut().choose(wanted, &candidates, &mut picked);
    if picked.is_empty() {
        // A random policy can miss the few buckets that may be invalidated.
        picked.extend(buckets.all().filter(|b| buckets.may_invalidate(*b)).take(wanted));
    }
    let wrapped = picked.iter().filter(|b| buckets.invalidate(**b)).count();
    alloc.count(|c| c.gen_wraps += wrapped as u64);
    picked
}

/// Makes up to `wanted` buckets ready; returns how many. Also ends a request for a prio chain.
async fn refill(alloc: &Allocator, wanted: usize) -> Result<usize, EngineError> {
    let prios = alloc.prios.hold().await;
    let picked = if wanted > 0 { invalidate(alloc, wanted) } else { Vec::new() };
    if picked.is_empty() {
        store_if_requested(alloc).await?;
        return Ok(0);
    }
    alloc.pool.invalidated();
    let early = bug(Bug::ReuseBeforeGenerations);
    if early {
        alloc.pool.put_ready(picked.clone());
    }
    write_prios(alloc).await?;
    alloc.pool.settled();
    drop(prios);
    if alloc.device.discards_buckets() {
        let geometry = &alloc.geometry;
        let discards: Vec<_> = picked
            .iter()
            .map(|b| {
                alloc.device.disk().start_plain(
                    io::Op::Discard,
                    geometry.bucket_start(*b),
                    geometry.bucket_sectors,
                )
            })
            .collect();
        for d in discards {
            if let Err(e) = d.await.result {
                alloc.device.discard_failed(&e);
            }
        }
    }
    let n = picked.len();
    if !early {
        alloc.pool.put_ready(picked);
    }
    Ok(n)
}

/// Writes a prio chain if a task has requested one and there is room for it. The caller holds the permit of the chain.
async fn store_if_requested(alloc: &Allocator) -> Result<(), EngineError> {
    if alloc.prios.is_wanted() && alloc.may_store() {
        return write_prios(alloc).await;
    }
    if alloc.prios.is_wanted() {
        alloc.prios.end_request();
        alloc.pool.wanted.notify_all();
    }
    Ok(())
}

/// Keeps the list of ready buckets full, and writes the prio chains that other tasks request.
pub(crate) async fn refill_task(alloc: Rc<Allocator>) {
    loop {
        let has_work = || alloc.pool.missing() > 0 || alloc.prios.is_wanted();
        alloc.pool.wanted.wait_until(|| alloc.device.is_stopping() || has_work()).await;
        if alloc.device.is_stopping() {
            return;
        }
        let missing = alloc.pool.missing();
        match refill(&alloc, missing).await {
            Ok(0) if missing == 0 => {}
            Ok(0) => {
                // Nothing can be invalidated now: generations that ran ahead need a walk of the index, dirty data
                // needs writeback. Either wakes this task.
                alloc.pool.starved.set(true);
                // A walk that waits for the journal must not wait any more.
                alloc.journal.recheck();
                if alloc.buckets.borrow().reclaimable() > 0 {
                    alloc.walks.request();
                }
                alloc.pool.kick();
                alloc.pool.wanted.changed().await;
            }
            Ok(_) => {
                alloc.pool.starved.set(false);
                // Buckets were used up: packing may be due.
                alloc.walks.recheck();
            }
            Err(e) => {
                alloc.device.fail(e);
                return;
            }
        }
    }
}

/// At start, buckets without any live pointer may be used at once: whatever still points to them was stale by the
/// stored generation (format section 12.2, exception). Takes up to `wanted`.
pub(super) fn prime(alloc: &Allocator, wanted: usize) {
    let buckets = &mut *alloc.buckets.borrow_mut();
    let empty: Vec<BucketNr> = buckets
        .all()
        .filter(|b| buckets.may_invalidate(*b) && buckets.live(*b) == Sectors::ZERO)
        .take(wanted)
        .collect();
    for b in &empty {
        buckets.invalidate(*b);
    }
    alloc.pool.put_ready(empty);
}

#[cfg(test)]
mod tests;
