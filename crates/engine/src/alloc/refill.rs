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

async fn refill(alloc: &Allocator, wanted: usize) -> Result<usize, EngineError> {
    let prios = alloc.prios.hold().await;
    let picked = invalidate(alloc, wanted);
    if picked.is_empty() {
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

/// Keeps the list of ready buckets full.
pub(crate) async fn refill_task(alloc: Rc<Allocator>) {
    loop {
        alloc.pool.wanted.wait_until(|| alloc.device.is_stopping() || alloc.pool.missing() > 0).await;
        if alloc.device.is_stopping() {
            return;
        }
        match refill(&alloc, alloc.pool.missing()).await {
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
