//! One batch of writeback: collect dirty extents in LBA order, read them, write them as large runs, flush, mark clean.
//!
//! Nothing here holds clients up: an extent that is overwritten meanwhile simply stays dirty, because its key is not
//! what it was; a change that must not overlap holds its range (`volume::ranges`), and such ranges are skipped.

use std::rc::Rc;

use format::{Inode, Ptr, Sector, Sectors};
use io::IoFuture;

use crate::canary::{Bug, bug};
use crate::error::EngineError;
use crate::index::{How, Kind, MAX_POSITION, NotLoaded};
use crate::set::{Backing, Core};
use crate::volume::{RangeGuard, Volume};

/// Most keys in one batch (the kernel's queue, section 11.2).
const MAX_KEYS: usize = 500;
/// Largest write to the backing device.
const MAX_RUN: Sectors = Sectors(2048);

/// A dirty extent that is being written back.
struct Extent {
    start: Sector,
    size: Sectors,
    ptr: Ptr,
    guard: RangeGuard,
}

/// Adjacent extents, written by one request.
struct Run {
    start: Sector,
    size: Sectors,
    extents: Vec<Extent>,
}

/// Writes back up to `limit` sectors; returns how many became clean or were tried.
pub(super) async fn write_back(
    volume: &Rc<Volume>,
    core: &Rc<Core>,
    inode: Inode,
    limit: Sectors,
) -> Result<Sectors, EngineError> {
    let Some(backing) = volume.backing() else { return Ok(Sectors::ZERO) };
    let extents = collect(volume, core, inode, limit).await?;
    if extents.is_empty() {
        return Ok(Sectors::ZERO);
    }
    // The dirty keys first: after a crash without them an older, clean key of the range would be believed, and the
    // backing device would hold newer data behind it (contract 9).
    if !bug(Bug::WritebackBeforeDirtyKey) {
        core.journal.commit_keys().await?;
    }
    let (cleaned, result) = write_out(volume, core, &backing, extents).await;
    if cleaned.is_empty() {
        return result.map(|()| Sectors::ZERO);
    }
    // Contract 4: the flush begins after the writes and ends before any key says clean.
    if !bug(Bug::CleanBeforeBackingFlush) {
        backing.gate.ensure(backing.gate.latest()).await?;
    }
    let mut written = Sectors::ZERO;
    for e in cleaned {
        written += e.size;
        mark_clean(core, inode, e.start, e.size, e.ptr).await?;
        // Only now may a change go past the cache: one that came earlier would find a dirty key, and behind its back
        // the key would become a clean one with old data.
        drop(e.guard);
    }
    result.map(|()| written)
}

/// What goes into a batch.
struct Picked {
    extents: Vec<Extent>,
    sectors: Sectors,
    limit: Sectors,
}

impl Picked {
    fn is_full(&self) -> bool {
        self.extents.len() >= MAX_KEYS || self.sectors >= self.limit
    }
}

/// What to write back next: stripes that are dirty as a whole, where partial ones are expensive; without any, the
/// next dirty extents of the sweep.
async fn collect(
    volume: &Rc<Volume>,
    core: &Rc<Core>,
    inode: Inode,
    limit: Sectors,
) -> Result<Vec<Extent>, EngineError> {
    let mut picked = Picked { extents: Vec::new(), sectors: Sectors::ZERO, limit };
    collect_stripes(volume, core, inode, &mut picked).await?;
    if picked.extents.is_empty() {
        collect_sweep(volume, core, inode, &mut picked).await?;
    }
    Ok(picked.extents)
}

/// The next dirty extents from the cursor on, ascending; wraps around at the end of the device.
async fn collect_sweep(
    volume: &Rc<Volume>,
    core: &Rc<Core>,
    inode: Inode,
    picked: &mut Picked,
) -> Result<(), EngineError> {
    let first = volume.writeback.cursor.get();
    let mut at = pick(volume, core, inode, first, MAX_POSITION, true, picked).await?;
    // A sweep ends at the end of the device; what lies before goes into the next batch, in order.
    if at == MAX_POSITION {
        at = Sector(0);
        if picked.extents.is_empty() {
            at = pick(volume, core, inode, Sector(0), first, true, picked).await?;
        }
    }
    volume.writeback.cursor.set(at);
    Ok(())
}

/// Stripes of which every sector is dirty, whole ones only; none where nobody counts stripes.
async fn collect_stripes(
    volume: &Rc<Volume>,
    core: &Rc<Core>,
    inode: Inode,
    picked: &mut Picked,
) -> Result<(), EngineError> {
    let first = volume.writeback.stripe_cursor.get();
    let mut from = first;
    let mut wrapped = first == Sector(0);
    while !picked.is_full() {
        let next = {
            let tree = core.tree.borrow();
            let Some(stripes) = tree.dirty_stripes(inode) else { return Ok(()) };
            stripes.full_dirty_stripes(from).find(|(start, _)| *start >= from)
        };
        match next {
            Some((start, _)) if wrapped && start >= first && first > Sector(0) => break,
            Some((start, size)) => {
                from = start + size;
                pick(volume, core, inode, start, from, false, picked).await?;
            }
            None if wrapped => break,
            None => {
                wrapped = true;
                from = Sector(0);
            }
        }
    }
    volume.writeback.stripe_cursor.set(from);
    Ok(())
}

/// Picks dirty extents of `[from, end)`, ascending, until the batch is full if it is to look at that. Returns where
/// it stopped.
async fn pick(
    volume: &Rc<Volume>,
    core: &Rc<Core>,
    inode: Inode,
    from: Sector,
    end: Sector,
    until_full: bool,
    picked: &mut Picked,
) -> Result<Sector, EngineError> {
    let mut at = from;
    while at < end && !(until_full && picked.is_full()) {
        core.check()?;
        let next = core.tree.borrow().next_dirty(inode, at, &core.buckets.borrow());
        match next {
            Err(NotLoaded(id)) => core.load_leaf(id).await?,
            Ok(Some((start, size, ptr))) if start < end => {
                let size = Sectors(size.0.min(MAX_RUN.0).min((end - start).0));
                at = start + size;
                if let Some(guard) = volume.ranges.try_writeback(start, at) {
                    picked.sectors += size;
                    picked.extents.push(Extent { start, size, ptr, guard });
                }
            }
            Ok(_) => return Ok(end),
        }
    }
    Ok(at)
}

/// Joins extents that follow each other on the backing device.
fn runs(extents: Vec<Extent>) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for e in extents {
        match runs.last_mut() {
            Some(r) if r.start + r.size == e.start && r.size + e.size <= MAX_RUN => {
                r.size += e.size;
                r.extents.push(e);
            }
            _ => runs.push(Run { start: e.start, size: e.size, extents: vec![e] }),
        }
    }
    runs
}

type Cleaned = Vec<Extent>;

/// Reads and writes all extents. Returns those that are on the backing device now, and the first error.
async fn write_out(
    volume: &Rc<Volume>,
    core: &Rc<Core>,
    backing: &Rc<Backing>,
    extents: Vec<Extent>,
) -> (Cleaned, Result<(), EngineError>) {
    let runs = runs(extents);
    let mut result = Ok(());
    // All reads at once, then the writes in LBA order, each as soon as its data is there.
    let mut reading: Vec<(Run, Vec<IoFuture>)> = Vec::with_capacity(runs.len());
    for run in runs {
        let futures = run
            .extents
            .iter()
            .map(|e| {
                let buffer = volume.rt.pool().take(e.size.bytes() as usize);
                core.cache.start_read(e.ptr.offset(), e.size, buffer, 0)
            })
            .collect();
        reading.push((run, futures));
    }
    let mut writing: Vec<(Run, IoFuture)> = Vec::with_capacity(reading.len());
    for (mut run, futures) in reading {
        let mut pieces = Vec::with_capacity(futures.len());
        for f in futures {
            let done = f.await;
            core.observe_cache_io(&done.result);
            if let (Err(e), Ok(())) = (&done.result, &result) {
                result = Err(EngineError::Io(e.clone()));
            }
            pieces.push(done.buffer.filter(|_| done.result.is_ok()));
        }
        // An extent that was replaced meanwhile may have lost its bucket: what was read is not its data.
        let usable = run
            .extents
            .iter()
            .zip(&pieces)
            .all(|(e, p)| p.is_some() && core.buckets.borrow().is_current(e.ptr));
        if !usable {
            continue;
        }
        let buffer = if pieces.len() == 1 {
            pieces.pop().flatten()
        } else {
            let mut whole = volume.rt.pool().take(run.size.bytes() as usize);
            let mut at = 0;
            for p in pieces.iter().flatten() {
                whole.as_mut()[at..at + p.len()].copy_from_slice(p.as_slice());
                at += p.len();
            }
            Some(whole)
        };
        let Some(buffer) = buffer else { continue };
        let future = backing.disk.start_write(run.start, run.size, buffer, 0, false);
        run.extents.shrink_to_fit();
        writing.push((run, future));
    }
    let mut cleaned = Vec::new();
    for (run, future) in writing {
        let done = future.await;
        backing.gate.wrote();
        match done.result {
            Ok(()) => cleaned.extend(run.extents),
            Err(e) => {
                backing.failed(&e, volume.tunables.borrow().io_error_limit);
                if result.is_ok() {
                    result = Err(e.into());
                }
            }
        }
    }
    (cleaned, result)
}

/// What is still the very extent that was written back becomes clean.
async fn mark_clean(
    core: &Rc<Core>,
    inode: Inode,
    start: Sector,
    size: Sectors,
    ptr: Ptr,
) -> Result<(), EngineError> {
    let end = start + size;
    let mut at = start;
    let mut collided = false;
    while at < end {
        core.check()?;
        let here = ptr.advanced(at - start);
        let blocked = match core.segment(inode, at, end) {
            Err(e) => e.into(),
            Ok(seg) => match seg.kind {
                Kind::Hit { ptr, dirty: true, .. } if ptr == here => {
                    match core.try_change(inode, at, seg.end, Some((here, false)), How::Journaled) {
                        Ok((done, _)) => {
                            at = done;
                            continue;
                        }
                        Err(b) => b,
                    }
                }
                _ => {
                    collided = true;
                    at = seg.end;
                    continue;
                }
            },
        };
        core.unblock(blocked).await?;
    }
    let counters = &mut *core.set_counters.borrow_mut();
    if collided {
        counters.writeback_keys_failed += 1;
    } else {
        counters.writeback_keys_done += 1;
    }
    Ok(())
}
