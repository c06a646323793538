//! Selection of the extents of a writeback batch: dirty extents in LBA order, joined to runs. Each run is one write.
//!
//! Owns the choice of extents and runs. A run holds its whole range (`volume::ranges`), gaps included, from the look-up
//! in the index on, so nothing changes any part of the range on the backing device until the run is dropped. Must not
//! know how a run is read and written.
//!
//! Invariant: there is no await point between the look-up and the hold.

use std::rc::Rc;

use format::{Inode, Ptr, Sector, Sectors};
use io::Nanos;

use crate::canary::{Bug, bug};
use crate::device::{BackingDevice, ReadEpoch};
use crate::error::EngineError;
use crate::index::{Kind, MAX_POSITION, NotLoaded};
use crate::policy::bridging::{Bridging, Shape};
use crate::policy::cost::Costs;
use crate::policy::stripes::StripeGeometry;
use crate::volume::{Blocks, Cache, RangeGuard, Target, Volume, is_usable};

/// The largest number of keys in one batch: 32 MiB if each is one block of 4 KiB.
const MAX_KEYS: usize = 8192;
/// The largest write to the backing device.
const MAX_RUN: Sectors = Sectors(2048);
/// The time for which one batch may keep the backing device busy. A change past the cache may have to wait this long.
const BATCH_TIME: Nanos = Nanos::from_ms(500);
/// The smallest and the largest number of runs in a batch, whatever they cost.
const MIN_RUNS: usize = 8;
const MAX_RUNS: usize = 512;
/// The number of runs in a batch while their costs are unknown.
const RUNS_UNKNOWN: usize = 64;

/// A dirty extent that is being written back, or a clean copy in a gap.
#[derive(Clone, Copy)]
pub(super) struct Extent {
    pub(super) start: Sector,
    pub(super) size: Sectors,
    pub(super) ptr: Ptr,
}

impl Extent {
    pub(super) fn end(&self) -> Sector {
        self.start + self.size
    }
}

/// The data that a run needs for its gaps.
#[derive(Default)]
pub(super) struct Filling {
    /// The range to read from the backing device, in one request.
    pub(super) disk: Option<(Sector, Sectors)>,
    /// The clean copies to read from the cache.
    pub(super) copies: Vec<Extent>,
    /// The read epoch before the look-ups in the index; `write_back` sets it for all runs of a batch.
    pub(super) epoch: ReadEpoch,
}

/// Extents that are written by one request, with the gaps between them.
pub(super) struct Run {
    pub(super) start: Sector,
    pub(super) size: Sectors,
    /// The dirty extents, ascending.
    pub(super) extents: Vec<Extent>,
    pub(super) filling: Filling,
    pub(super) guard: RangeGuard,
}

impl Run {
    /// The number of sectors in the gaps.
    pub(super) fn gaps(&self) -> Sectors {
        self.extents.iter().fold(self.size, |left, e| left - e.size)
    }
}

/// The runs that were selected for a batch, and its limits.
pub(super) struct Picked {
    pub(super) runs: Vec<Run>,
    bridging: Bridging,
    /// The costs of requests to the backing device, if they are known.
    costs: Option<Costs>,
    stripes: Option<StripeGeometry>,
    /// The blocks of the backing device.
    blocks: Blocks,
    keys: usize,
    sectors: Sectors,
    limit: Sectors,
    time: Nanos,
}

impl Picked {
    fn is_full(&self) -> bool {
        let (most, least) = if self.costs.is_some() { (MAX_RUNS, MIN_RUNS) } else { (RUNS_UNKNOWN, 0) };
        self.keys >= MAX_KEYS
            || self.sectors >= self.limit
            || self.runs.len() >= most
            || (self.runs.len() >= least && self.time >= BATCH_TIME)
    }

    fn push(&mut self, run: Run) {
        self.keys += run.extents.len();
        self.sectors = run.extents.iter().fold(self.sectors, |n, e| n + e.size);
        if let Some(costs) = &self.costs {
            let read = run.filling.disk.map_or(Nanos(0), |(_, size)| costs.random(size));
            self.time = self.time.after(read).after(costs.random(run.size));
        }
        self.runs.push(run);
    }
}

/// Selects the runs of the next batch, up to `limit` dirty sectors. Where partial stripes are expensive, it selects
/// completely dirty stripes. If there are none, it selects the next dirty extents of the sweep.
pub(super) async fn collect(
    volume: &Rc<Volume>,
    cache: &Rc<Cache>,
    backing: &BackingDevice,
    inode: Inode,
    limit: Sectors,
) -> Result<Vec<Run>, EngineError> {
    let (costs, known) = backing.model(|m| (m.costs(), m.is_known()));
    let bridging = {
        let t = volume.settings();
        let gap = Sectors::from_bytes_floor(u64::from(t.writeback_bridge_limit));
        Bridging::new(t.writeback_bridge, gap, costs, known)
    };
    let mut picked = Picked {
        runs: Vec::new(),
        bridging,
        costs: known.then_some(costs),
        stripes: volume.expensive_stripes(),
        blocks: Blocks::of_disk(backing.disk()),
        keys: 0,
        sectors: Sectors::ZERO,
        limit,
        time: Nanos(0),
    };
    let target = volume.target(cache, inode);
    collect_stripes(target, &mut picked).await?;
    if picked.runs.is_empty() {
        collect_sweep(target, &mut picked).await?;
    }
    Ok(picked.runs)
}

/// Selects the next dirty extents from the cursor on, ascending; the sweep wraps around at the end of the device.
async fn collect_sweep(target: Target<'_>, picked: &mut Picked) -> Result<(), EngineError> {
    let volume = target.volume;
    let first = volume.writeback().cursor();
    let mut at = pick(target, first, MAX_POSITION, true, picked).await?;
    // A sweep ends at the end of the device; extents before the cursor go into the next batch, so that each batch is
    // ascending.
    if at == MAX_POSITION {
        at = Sector(0);
        if picked.runs.is_empty() {
            at = pick(target, Sector(0), first, true, picked).await?;
        }
    }
    volume.writeback().move_cursor(at);
    Ok(())
}

/// Selects completely dirty stripes; none if stripes are not counted.
async fn collect_stripes(target: Target<'_>, picked: &mut Picked) -> Result<(), EngineError> {
    let Target { volume, cache, inode } = target;
    let first = volume.writeback().stripe_cursor();
    let mut from = first;
    let mut wrapped = first == Sector(0);
    while !picked.is_full() {
        let next = {
            let tree = cache.index.tree();
            let Some(stripes) = tree.dirty_stripes(inode) else { return Ok(()) };
            stripes.full_dirty_stripes(from).find(|(start, _)| *start >= from)
        };
        match next {
            Some((start, _)) if wrapped && start >= first && first > Sector(0) => break,
            Some((start, size)) => {
                from = start + size;
                pick(target, start, from, false, picked).await?;
            }
            None if wrapped => break,
            None => {
                wrapped = true;
                from = Sector(0);
            }
        }
    }
    volume.writeback().move_stripe_cursor(from);
    Ok(())
}

/// Selects runs in `[from, end)`, ascending. With `until_full` it stops when the batch is full. Returns the position at
/// which it stopped.
async fn pick(
    target: Target<'_>,
    from: Sector,
    end: Sector,
    until_full: bool,
    picked: &mut Picked,
) -> Result<Sector, EngineError> {
    let cache = target.cache;
    let mut at = from;
    while at < end && !(until_full && picked.is_full()) {
        cache.device.check()?;
        match chain(target, &mut at, end, picked) {
            Err(NotLoaded(id)) => cache.index.load_leaf(id).await?,
            Ok(Some(next)) => at = next,
            Ok(None) => return Ok(end),
        }
    }
    Ok(at)
}

/// The next dirty extent in `[from, end)`, cut to at most `most` sectors. Moves `from` behind damaged data, also if a leaf is not in
/// memory: otherwise a search over the damaged data of several leaves would never end if only one of them may be in memory.
fn next_extent(
    cache: &Cache,
    inode: Inode,
    from: &mut Sector,
    end: Sector,
    most: Sectors,
) -> Result<Option<Extent>, NotLoaded> {
    loop {
        let next = cache.index.tree().next_dirty(inode, *from, &cache.alloc.buckets())?;
        let Some((start, size, ptr)) = next.filter(|(start, ..)| *start < end) else { return Ok(None) };
        let size = Sectors(size.0.min(most.0).min((end - start).0));
        // Damaged data is left out: it must not reach the backing device.
        let part = cache.data.first_part(ptr, size);
        if !part.is_damaged {
            return Ok(Some(Extent { start, size: part.sectors, ptr }));
        }
        *from = start + part.sectors;
    }
}

/// Adds the next dirty extents that may be one run to the batch: as one run, or as one for each group if that is
/// cheaper. Returns the position at which to continue, or `None` if there is no dirty data before `end`. `from` moves as in
/// [`next_extent`]. The function does not wait, so nothing changes between the look-up in the index and the hold on the ranges.
fn chain(
    target: Target<'_>,
    from: &mut Sector,
    end: Sector,
    picked: &mut Picked,
) -> Result<Option<Sector>, NotLoaded> {
    let Target { volume, cache, inode } = target;
    let Some(first) = next_extent(cache, inode, from, end, MAX_RUN)? else { return Ok(None) };
    if volume.ranges().is_busy(first.start, first.end()) {
        return Ok(Some(first.end()));
    }
    // If partial stripes are expensive, a run ends with its stripe.
    let end = picked.stripes.map_or(end, |s| {
        let (start, size) = s.extent(s.stripe_of(first.start));
        end.min((start + size).max(first.end()))
    });
    let mut extents = vec![first];
    let mut last = first;
    let room = picked.limit - picked.sectors.min(picked.limit);
    let mut dirty = first.size;
    // A leaf that is not in memory ends the run; the next run begins there.
    while let Ok(Some(next)) = next_extent(cache, inode, &mut last.end(), end, MAX_RUN) {
        let gap = next.start - last.end();
        let fits = next.end() - first.start <= MAX_RUN && dirty + next.size <= room.max(first.size);
        let joins = gap == Sectors::ZERO || picked.bridging.goes_over(gap, next.size);
        if !fits || !joins || volume.ranges().is_busy(last.end(), next.end()) {
            break;
        }
        dirty += next.size;
        extents.push(next);
        last = next;
    }
    add_runs(target, extents, picked);
    Ok(Some(last.end()))
}

/// Adds a chain of extents to the batch, as one run or as one run for each group of adjacent extents.
fn add_runs(target: Target<'_>, extents: Vec<Extent>, picked: &mut Picked) {
    let blocks = picked.blocks;
    let groups = groups(&extents);
    if groups.len() > 1 {
        let filling = filling(target, &extents);
        let (start, end) = ends(&extents);
        let shape = Shape {
            groups: groups.len() as u64,
            dirty: extents.iter().fold(Sectors::ZERO, |n, e| n + e.size),
            span: end - start,
            missing: filling.disk.map_or(Sectors::ZERO, |(_, size)| size),
        };
        if picked.bridging.pays(&shape) {
            if let Some(run) = hold_run(target, extents, filling, blocks) {
                picked.push(run);
            }
            return;
        }
    }
    for extents in groups {
        if let Some(run) = hold_run(target, extents, Filling::default(), blocks) {
            picked.push(run);
        }
    }
}

/// Makes a run that holds its range, unless something else holds a part of it.
fn hold_run(target: Target<'_>, extents: Vec<Extent>, filling: Filling, blocks: Blocks) -> Option<Run> {
    let (start, size, around) = whole_blocks(blocks, &extents);
    // The gaps between the extents must not change either.
    let held = if bug(Bug::BridgeHoldsDirtyOnly) { extents.first()?.end() } else { start + size };
    let guard = target.volume.ranges().try_hold_for_writeback(start, held)?;
    Some(Run { start, size, extents, filling: around.unwrap_or(filling), guard })
}

/// The range of whole blocks of the backing device in which extents are written. If a block is larger than the part of it that is
/// in the extents, the rest of the block is read from the device first, together with everything else in the range.
pub(super) fn whole_blocks(blocks: Blocks, extents: &[Extent]) -> (Sector, Sectors, Option<Filling>) {
    let (start, end) = blocks.around(ends(extents));
    let is_whole = extents.iter().all(|e| blocks.are_whole(e.start, e.size));
    let around = || Filling { disk: Some((start, end - start)), ..Filling::default() };
    (start, end - start, (!is_whole).then(around))
}

/// The start of the first and the end of the last of ascending extents.
fn ends(extents: &[Extent]) -> (Sector, Sector) {
    let start = extents.first().map_or(Sector(0), |e| e.start);
    (start, extents.last().map_or(start, Extent::end))
}

/// Splits ascending extents into groups without gaps.
pub(super) fn groups(extents: &[Extent]) -> Vec<Vec<Extent>> {
    extents.chunk_by(|a, b| a.end() == b.start).map(<[Extent]>::to_vec).collect()
}

/// Where to read the gaps between extents: a gap of which the cache has a clean copy as a whole is read from the cache;
/// the others are read from the backing device, in one request that includes everything between them. A copy that a read may
/// not use would bring back data that the backing device has dropped.
fn filling(target: Target<'_>, extents: &[Extent]) -> Filling {
    let Target { volume, cache, inode } = target;
    let mut copies: Vec<Extent> = Vec::new();
    let mut disk: Option<(Sector, Sector)> = None;
    for pair in extents.windows(2) {
        let [before, behind] = pair else { continue };
        let (start, end) = (before.end(), behind.start);
        let known = copies.len();
        let mut at = start;
        while at < end {
            match cache.index.segment(inode, at, end) {
                Ok(seg) => match seg.kind {
                    Kind::Hit { ptr, dirty: false, .. }
                        if is_usable(volume, seg.kind) || bug(Bug::DroppedCopyBridged) =>
                    {
                        copies.push(Extent { start: at, size: seg.end - at, ptr });
                        at = seg.end;
                    }
                    _ => break,
                },
                Err(_) => break,
            }
        }
        if at < end {
            copies.truncate(known);
            disk = Some((disk.map_or(start, |(first, _)| first), end));
        }
    }
    // A copy inside the range that is read from the device need not be read from the cache.
    if let Some((first, last)) = disk {
        copies.retain(|c| c.end() <= first || c.start >= last);
    }
    Filling { disk: disk.map(|(first, last)| (first, last - first)), copies, ..Filling::default() }
}

#[cfg(test)]
mod tests {
    use format::Gen;

    use super::*;
    use crate::index::Durability;
    use crate::set::SetOptions;
    use crate::testing::{TestDisk, Watching, backing_device, components, open_set, run};
    use crate::tunables::Bridge;
    use crate::volume::Ranges;

    fn picked(costs: Option<Costs>) -> Picked {
        let bridging = Bridging::new(Bridge::Off, Sectors(0), Costs::usual(true), false);
        let (keys, sectors, limit) = (0, Sectors::ZERO, Sectors(1_000_000));
        let blocks = Blocks::of_size(Sectors(1));
        Picked {
            runs: Vec::new(),
            bridging,
            costs,
            stripes: None,
            blocks,
            keys,
            sectors,
            limit,
            time: Nanos(0),
        }
    }

    /// A run of `extents` extents of one sector each, with its size and the number of sectors that are read.
    fn push(picked: &mut Picked, extents: u64, span: u64, read: u64) {
        let ranges = Rc::new(Ranges::default());
        let guard = ranges.try_hold_for_writeback(Sector(0), Sector(span)).expect("no other guard exists");
        let one = |n| Extent { start: Sector(n * 2), size: Sectors(1), ptr: Ptr::new(0, Sector(n), Gen(0)) };
        let disk = (read > 0).then_some((Sector(1), Sectors(read)));
        let filling = Filling { disk, ..Filling::default() };
        let extents = (0..extents).map(one).collect();
        picked.push(Run { start: Sector(0), size: Sectors(span), extents, filling, guard });
    }

    /// Pushes runs until the batch is full; returns their number.
    fn runs_until_full(mut picked: Picked, (extents, span, read): (u64, u64, u64)) -> usize {
        for n in 0..1000 {
            if picked.is_full() {
                return n;
            }
            push(&mut picked, extents, span, read);
        }
        panic!("1000 runs are no batch");
    }

    #[test]
    fn a_batch_ends_with_its_keys_its_sectors_its_runs_or_its_time() {
        assert_eq!(runs_until_full(picked(None), (1, 1, 0)), 64, "runs of unknown cost");
        let ssd = || picked(Some(Costs::usual(false)));
        assert_eq!(runs_until_full(ssd(), (1, 1, 0)), 512, "cheap runs");
        assert_eq!(runs_until_full(ssd(), (1000, 1999, 0)), 9, "8192 keys");
        assert_eq!(runs_until_full(ssd(), (1024, 2047, 0)), 8, "8192 keys");
        let limited = |limit| Picked { limit: Sectors(limit), ..picked(None) };
        assert_eq!(runs_until_full(limited(0), (1, 1, 0)), 0);
        assert_eq!(runs_until_full(limited(30), (10, 19, 0)), 3, "dirty sectors, not the gaps");
        assert_eq!(runs_until_full(limited(31), (10, 19, 0)), 4);
        // A disk takes 6.5 ms per request and 7 ms per MiB. Half a second is full after 76.9 runs of one sector, after
        // 37.04 runs of 1 MiB, and after 21.3 runs of 1 MiB of which half is read first.
        let disk = || picked(Some(Costs::usual(true)));
        assert_eq!(runs_until_full(disk(), (1, 0, 0)), 77);
        assert_eq!(runs_until_full(disk(), (1, 2048, 0)), 38);
        assert_eq!(runs_until_full(disk(), (1, 2048, 1024)), 22);
        let late = Picked { time: Nanos::from_ms(500), ..disk() };
        assert_eq!(runs_until_full(late, (1, 1, 0)), 8, "however long they take");
    }

    /// A device refused each write of a part of its block, and the data stayed dirty.
    #[test]
    fn the_rest_of_a_larger_block_is_read_before_a_part_of_it_is_written() {
        let extent = |(start, size)| Extent {
            start: Sector(start),
            size: Sectors(size),
            ptr: Ptr::new(0, Sector(0), Gen(0)),
        };
        let found = |block, extents: &[(u64, u64)]| {
            let extents: Vec<Extent> = extents.iter().copied().map(extent).collect();
            let (start, size, around) = whole_blocks(Blocks::of_size(Sectors(block)), &extents);
            let read = around.map(|filling| {
                assert!(filling.copies.is_empty());
                filling.disk
            });
            (start.0, size.0, read)
        };
        let all = |start, size| Some(Some((Sector(start), Sectors(size))));
        assert_eq!(found(1, &[(3, 4), (9, 2)]), (3, 8, None));
        assert_eq!(found(8, &[(8, 16), (32, 8)]), (8, 32, None), "the gap is whole blocks, too");
        assert_eq!(found(8, &[(8, 5)]), (8, 8, all(8, 8)));
        assert_eq!(found(8, &[(10, 5), (15, 1)]), (8, 8, all(8, 8)));
        assert_eq!(found(8, &[(15, 10)]), (8, 24, all(8, 24)));
    }

    #[test]
    fn extents_without_a_gap_are_one_group() {
        let extents: Vec<Extent> = [(0, 8), (8, 1), (10, 2), (12, 4), (20, 1)]
            .map(|(start, size)| Extent {
                start: Sector(start),
                size: Sectors(size),
                ptr: Ptr::new(0, Sector(0), Gen(0)),
            })
            .into();
        let ends: Vec<_> = groups(&extents).iter().map(|g| ends(g)).collect();
        assert_eq!(ends, [(0, 9), (10, 16), (20, 21)].map(|(start, end)| (Sector(start), Sector(end))));
    }

    /// The next batch begins behind the last full stripe of the batch before, or at the start of the device if there was
    /// none.
    #[test]
    fn the_cursor_stands_behind_the_last_full_stripe() {
        const STRIPE: u64 = 8192;
        run(|rt| async move {
            let set = open_set(&Watching::new(16_384), &rt, (16, false), SetOptions::default()).await;
            // The second stripe has 64 sectors in the data area, which begins at sector 16 of the device.
            let backing = backing_device(&TestDisk::with_stripes(STRIPE + 64, Sectors(STRIPE)), &rt);
            let volume = set.attached(backing.clone()).await.unwrap();
            volume.settings_mut().writeback_running = false;
            let cache = components(set, &rt);
            rt.sleep(Nanos::from_secs(60)).await;
            let (_, inode) = volume.attached().expect("the device was attached");
            for _ in 0..2 {
                for size in [63, 64] {
                    let data = rt.pool().zeroed(size as usize * 512);
                    let flags = io::WriteFlags::default();
                    volume.write(Sector(STRIPE - 16), Sectors(size), data, 0, flags).await.unwrap();
                    let runs = collect(&volume, &cache, &backing, inode, Sectors(1000)).await.unwrap();
                    let found: Vec<_> = runs.iter().map(|r| (r.start.0, r.size.0)).collect();
                    assert_eq!(found, [(STRIPE, size)]);
                    let wanted = if size == 64 { STRIPE + 64 } else { 0 };
                    assert_eq!(volume.writeback().stripe_cursor(), Sector(wanted));
                }
                volume.discard(Sector(STRIPE - 16), Sectors(64)).await.unwrap();
            }
        });
    }

    /// A gap with a copy is read from the cache, unless it is between gaps that are read from the device.
    #[test]
    fn each_gap_is_read_from_one_device() {
        run(|rt| async move {
            let set = open_set(&Watching::new(16_384), &rt, (16, false), SetOptions::default()).await;
            let backing = backing_device(&TestDisk::new(8192), &rt);
            let volume = set.attached(backing).await.unwrap();
            volume.settings_mut().writeback_running = false;
            let (cache, inode) = (components(set, &rt), volume.inode().unwrap());
            rt.sleep(Nanos::from_secs(60)).await;
            // Dirty extents and gaps in turn; every other gap has a clean copy.
            let mut all = Vec::new();
            for n in 0..9 {
                let (data, flags) = (rt.pool().zeroed(8 * 512), io::WriteFlags::default());
                volume.write(Sector(n * 8), Sectors(8), data, 0, flags).await.unwrap();
                let (start, end) = (Sector(16 + n * 8), Sector(24 + n * 8));
                let Kind::Hit { ptr, .. } = cache.index.segment(inode, start, end).unwrap().kind else {
                    panic!("the data is not cached")
                };
                let new = (n % 4 == 1).then_some((ptr, false));
                if n % 2 == 1 {
                    cache.index.change(inode, start, end, new, Durability::Journaled).await.unwrap();
                }
                all.push(Extent { start, size: Sectors(8), ptr });
            }
            let target = Target { volume: &volume, cache: &cache, inode };
            let dirty: Vec<Extent> = all.into_iter().step_by(2).collect();
            for (extents, disk, copies) in
                [(2, None, &[24][..]), (4, Some((40, 8)), &[24, 56]), (5, Some((40, 40)), &[24])]
            {
                let found = filling(target, dirty.get(..extents).unwrap());
                assert_eq!(found.disk.map(|(start, size)| (start.0, size.0)), disk);
                assert_eq!(found.copies.iter().map(|c| c.start.0).collect::<Vec<_>>(), copies);
            }
        });
    }
}
