//! The moving garbage collector: packs the live data of emptyish buckets together, so that whole buckets come free.
//!
//! Runs after a walk if `copy_gc_enabled` says so, and by itself when dirty data fills many buckets thinly: random
//! overwrites leave a little in each bucket, which would stop the cache from taking more long before it is full of
//! data. Where reading something again from its backing device costs much more than moving it, clean data is packed too
//! before it is given up for buckets that are mostly empty. A moved extent keeps its state; its new key is journaled if it is
//! dirty, so replay can never bring the old place back over the new one (semantics section 18,
//! item 8); and it is inserted only where the index still has the very extent that was copied.

use std::ops::Range;
use std::rc::Rc;

use format::{BucketNr, Inode, Ptr, Sector, Sectors};
use io::Buffer;

use super::Gc;
use crate::alloc::{Placed, Purpose, Stream};
use crate::canary::{Bug, bug};
use crate::error::EngineError;
use crate::index::{Bound, Durability, Kind};
use crate::policy::cost::Costs;

/// A live extent in a bucket that is to be emptied.
struct Found {
    inode: Inode,
    start: Sector,
    size: Sectors,
    ptr: Ptr,
    dirty: bool,
}

/// A piece of an extent on its way.
struct Piece<'a> {
    found: &'a Found,
    at: Sector,
    from: Ptr,
    placed: Placed,
}

/// What is copied at once, so that foreground requests never queue behind more than this.
const BATCH_SECTORS: Sectors = Sectors(2048);
const BATCH_PIECES: usize = 64;

/// Copies of what was read, under way at most.
const MAX_PROMOTING: usize = 64;

/// Largest read that collects several pieces.
const MAX_READ: Sectors = Sectors(1024);

/// Requests that are so many times cheaper than those to the backing device are worth keeping data for.
const WORTH_MOVING: u64 = 4;

/// Share of the buckets in use from which thinly filled ones are packed: below the first writeback cutoff, so that
/// fragmentation alone never makes writes go past the cache.
const COMPACT_FROM_PERCENT: u8 = 30;

/// Share of the buckets in use from which room is worth more than clean data: less than where writes are held back
/// (`policy::yielding`).
const SHORT_FROM_PERCENT: u8 = 87;

/// Which buckets to empty.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Packing {
    /// Any that are not nearly full.
    Partial,
    /// Those that hold a little data, and some of it dirty: the clean ones come free without being copied.
    ThinlyDirty,
    /// Those that hold a little dirty data, whatever else is in them: that is given up.
    DirtyOnly,
}

/// Whether dirty data takes more than twice the buckets that it would fill (once room is short, half as many more), and
/// enough of them to matter.
fn is_fragmented(gc: &Gc) -> bool {
    let buckets = gc.wiring.alloc.buckets();
    let in_use_percent = buckets.in_use_percent() as u8;
    if in_use_percent < COMPACT_FROM_PERCENT {
        return false;
    }
    let dirty: u64 = gc.wiring.index.tree().all_dirty().map(|(_, n)| n.0).sum();
    let used = u64::from(buckets.len() - buckets.available()) * gc.geometry.bucket_sectors.0;
    is_thin(in_use_percent, used, dirty)
}

/// Whether so many dirty sectors fill the sectors of the buckets in use too thinly.
fn is_thin(in_use_percent: u8, used: u64, dirty: u64) -> bool {
    if in_use_percent < SHORT_FROM_PERCENT { used > dirty * 2 } else { used * 2 > dirty * 3 }
}

/// Whether data is about to be given up although a quarter of what the buckets in use could hold is empty, and the data
/// would cost more to read again than to move.
fn is_wasteful(gc: &Gc) -> bool {
    {
        let buckets = gc.wiring.alloc.buckets();
        let filled = u64::from(buckets.len() - buckets.unused()) * gc.geometry.bucket_sectors.0;
        if gc.wiring.alloc.has_plenty() || !is_quarter_empty(filled, buckets.live_total()) {
            return false;
        }
    }
    let Some(move_one) = gc.wiring.device.meter().model(|m| m.is_known().then(|| m.costs().per_request()))
    else {
        return false;
    };
    let worth = |costs: Costs| costs.per_request().0 > move_one.0.saturating_mul(WORTH_MOVING);
    gc.wiring.backings.any_by_cost(worth)
}

/// Whether a quarter of what buckets of `filled` sectors could hold is empty.
fn is_quarter_empty(filled: u64, live: Sectors) -> bool {
    filled.saturating_sub(live.0) * 4 >= filled
}

/// Which buckets had better be packed now.
fn due(gc: &Gc) -> Option<Packing> {
    if is_fragmented(gc) {
        let short = gc.wiring.alloc.buckets().in_use_percent() as u8 >= SHORT_FROM_PERCENT;
        Some(if short { Packing::DirtyOnly } else { Packing::ThinlyDirty })
    } else {
        is_wasteful(gc).then_some(Packing::Partial)
    }
}

/// Packs thinly filled buckets whenever there are too many of them.
pub(crate) async fn compact_task(gc: Rc<Gc>) {
    loop {
        gc.wiring.alloc.walks().wait_until(|| gc.wiring.device.is_stopping() || due(&gc).is_some()).await;
        if gc.wiring.device.is_stopping() {
            return;
        }
        let Some(packing) = due(&gc) else { continue };
        let moved = gc.counters().moved;
        if let Err(e) = run(&gc, packing).await {
            gc.wiring.device.fail(e);
            return;
        }
        gc.wiring.alloc.recheck();
        if gc.counters().moved == moved {
            // Nothing to pack, or no room to pack into: look again when something has changed.
            gc.wiring.alloc.walks().changed().await;
        }
        gc.rt.yield_now().await;
    }
}

/// Buckets to be emptied, in order: every extent of the index is looked up in them.
struct Chosen {
    buckets: Vec<BucketNr>,
    /// What is clean in them is copied as well.
    clean_too: bool,
}

impl Chosen {
    fn contains(&self, bucket: BucketNr) -> bool {
        self.buckets.binary_search(&bucket).is_ok()
    }
}

/// Buckets worth emptying, emptiest first, as many as the reserve for moving can take.
fn candidates(gc: &Gc, packing: Packing) -> Chosen {
    let buckets = gc.wiring.alloc.buckets();
    let bucket_sectors = gc.geometry.bucket_sectors;
    let partial: Vec<(Sectors, BucketNr)> = buckets
        .all()
        .filter(|b| buckets.used(*b) == crate::alloc::Use::Data && buckets.pins(*b) == 0)
        .filter(|b| !buckets.is_moving(*b))
        .filter(|b| packing == Packing::Partial || buckets.dirty(*b) > Sectors::ZERO)
        .map(|b| (if packing == Packing::DirtyOnly { buckets.dirty(b) } else { buckets.live(b) }, b))
        .collect();
    let room = gc.wiring.alloc.moving_reserve();
    let chosen = emptiest(partial, bucket_sectors, room);
    Chosen { buckets: chosen, clean_too: packing != Packing::DirtyOnly }
}

/// Of buckets with what would be copied of each, those that are less than three quarters full, the emptiest first, as
/// long as it all fits into `room`; in their order.
fn emptiest(mut buckets: Vec<(Sectors, BucketNr)>, bucket_sectors: Sectors, room: Sectors) -> Vec<BucketNr> {
    buckets.retain(|(copied, _)| *copied > Sectors::ZERO && copied.0 * 4 < bucket_sectors.0 * 3);
    buckets.sort_unstable();
    let mut total = Sectors::ZERO;
    let fits = |(copied, _): &(Sectors, BucketNr)| {
        total += *copied;
        total <= room
    };
    let mut chosen: Vec<BucketNr> = buckets.into_iter().take_while(fits).map(|(_, b)| b).collect();
    chosen.sort_unstable();
    chosen
}

/// Marks buckets that are being emptied: nobody writes into them meanwhile. The marks go with it, also when whoever
/// asked for a walk of the index gives up waiting for it.
struct Marked<'a> {
    gc: &'a Gc,
    buckets: &'a [BucketNr],
}

impl<'a> Marked<'a> {
    fn new(gc: &'a Gc, buckets: &'a [BucketNr]) -> Marked<'a> {
        for b in buckets {
            let began = gc.wiring.alloc.buckets_mut().set_moving(*b, true);
            assert!(began, "bucket {b} is being emptied already");
        }
        Marked { gc, buckets }
    }
}

impl Drop for Marked<'_> {
    fn drop(&mut self) {
        for b in self.buckets {
            self.gc.wiring.alloc.buckets_mut().set_moving(*b, false);
        }
    }
}

/// Empties buckets.
pub(super) async fn run(gc: &Rc<Gc>, packing: Packing) -> Result<(), EngineError> {
    let chosen = candidates(gc, packing);
    if chosen.buckets.len() < 2 {
        return Ok(());
    }
    let _marked = Marked::new(gc, &chosen.buckets);
    empty(gc, &chosen).await
}

async fn empty(gc: &Rc<Gc>, chosen: &Chosen) -> Result<(), EngineError> {
    let mut passed: Option<Bound> = None;
    loop {
        gc.wiring.device.check()?;
        let id = gc.wiring.index.tree().next_leaf(passed);
        let Some(id) = id else { return Ok(()) };
        gc.wiring.index.load_leaf(id).await?;
        let mut found: Vec<Found> = {
            let tree = gc.wiring.index.tree();
            let buckets = gc.wiring.alloc.buckets();
            let Some(node) = tree.try_node(id).filter(|n| n.level == 0) else { continue };
            passed = Some(node.bound);
            tree.live_extents(id, &buckets)
                .filter(|(_, _, _, ptr, dirty)| {
                    (*dirty || chosen.clean_too) && chosen.contains(buckets.bucket_of(*ptr))
                })
                .map(|(inode, start, size, ptr, dirty)| Found { inode, start, size, ptr, dirty })
                .collect()
        };
        // In the order of the device: what lies together is read together.
        found.sort_unstable_by_key(|f| f.ptr.offset());
        if !move_extents(gc, &found).await? {
            return Ok(());
        }
        gc.rt.yield_now().await;
    }
}

/// Copies extents, many at once; false if there is no room for more.
async fn move_extents(gc: &Rc<Gc>, found: &[Found]) -> Result<bool, EngineError> {
    let mut batch = Vec::with_capacity(BATCH_PIECES);
    let mut left = BATCH_SECTORS;
    for f in found {
        let mut at = f.start;
        let end = f.start + f.size;
        while at < end {
            gc.wiring.device.check()?;
            if !gc.is_in_use(f.inode) {
                break;
            }
            let want = Sectors((end - at).0.min(left.0));
            let Some(placed) = gc.wiring.alloc.try_place(Stream::Moving, (f.inode, at), want) else {
                copy(gc, &mut batch).await?;
                // Without a bucket there is nothing to pack into.
                gc.wiring.alloc.wait(Purpose::Moving, || true).await;
                return Ok(false);
            };
            batch.push(Piece { found: f, at, from: f.ptr.advanced(at - f.start), placed });
            at += placed.size;
            left -= placed.size;
            if left == Sectors::ZERO || batch.len() == BATCH_PIECES {
                copy(gc, &mut batch).await?;
                left = BATCH_SECTORS;
            }
        }
    }
    copy(gc, &mut batch).await?;
    Ok(true)
}

/// Reads what `batch` is to copy, its pieces being in the order of the device. Pieces that are near to each other are
/// read together, if what lies between them takes less time than another request.
async fn read(gc: &Gc, batch: &[Piece<'_>]) -> Vec<Option<Buffer>> {
    let costs = gc.wiring.device.meter().model(|m| m.costs());
    let places: Vec<(Sector, Sectors)> = batch.iter().map(|p| (p.from.offset(), p.placed.size)).collect();
    let read_one = |(pieces, start, size): (Range<usize>, Sector, Sectors)| {
        let buffer = gc.rt.pool().take(size.bytes() as usize);
        (pieces, gc.wiring.device.read_data(start, size, buffer, 0))
    };
    let reads: Vec<_> = read_together(&places, &costs).into_iter().map(read_one).collect();
    let mut data = Vec::with_capacity(batch.len());
    for (range, read) in reads {
        let done = read.await;
        gc.wiring.device.observe_data(&done.result);
        let whole = done.buffer.filter(|_| done.result.is_ok());
        let pieces = batch.get(range).unwrap_or_default();
        let start = pieces.first().map_or(Sector(0), |p| p.from.offset());
        data.extend(pieces.iter().map(|p| {
            let at = (p.from.offset() - start).bytes() as usize;
            let bytes = whole.as_ref()?.as_slice().get(at..at + p.placed.size.bytes() as usize)?;
            Some(gc.rt.pool().copy_of(bytes))
        }));
    }
    data
}

/// What is read of these places, which are in the order of the device: for each read the places in it, its start and size.
fn read_together(places: &[(Sector, Sectors)], costs: &Costs) -> Vec<(Range<usize>, Sector, Sectors)> {
    let mut reads: Vec<(Range<usize>, Sector, Sectors)> = Vec::new();
    for (n, &(at, size)) in places.iter().enumerate() {
        match reads.last_mut() {
            Some((pieces, start, read))
                if at >= *start + *read
                    && costs.transfer(at - (*start + *read)) < costs.per_request()
                    && at + size - *start <= MAX_READ =>
            {
                pieces.end = n + 1;
                *read = at + size - *start;
            }
            _ => reads.push((n..n + 1, at, size)),
        }
    }
    reads
}

/// Copies the pieces of `batch` and empties it: all reads at once, one write for what lies together.
async fn copy(gc: &Rc<Gc>, batch: &mut Vec<Piece<'_>>) -> Result<(), EngineError> {
    let data = read(gc, batch).await;
    let copied = write(gc, batch, data).await;
    let tick = gc.wiring.device.gate().wrote();
    for (p, copied) in batch.iter().zip(&copied) {
        if *copied {
            replace(gc, p, Durability::LeafOnly(tick)).await?;
            gc.count(|c| c.moved += 1);
        }
    }
    for p in batch.drain(..) {
        gc.wiring.alloc.release(p.placed);
    }
    Ok(())
}

/// Writes what was read of each piece to its new place; says for each whether it is there.
async fn write(gc: &Rc<Gc>, batch: &[Piece<'_>], data: Vec<Option<Buffer>>) -> Vec<bool> {
    let mut copied = vec![false; batch.len()];
    let mut writes = Vec::new();
    let mut first = 0;
    while first < batch.len() {
        let (Some(piece), Some(Some(_))) = (batch.get(first), data.get(first)) else {
            first += 1;
            continue;
        };
        let mut sectors = piece.placed.size;
        let mut last = first + 1;
        while let (Some(next), Some(Some(_))) = (batch.get(last), data.get(last))
            && next.placed.ptr == piece.placed.ptr.advanced(sectors)
        {
            sectors += next.placed.size;
            last += 1;
        }
        let mut buffer = gc.rt.pool().take(sectors.bytes() as usize);
        let mut at = 0;
        for part in data.iter().take(last).skip(first).flatten() {
            buffer.as_mut()[at..at + part.len()].copy_from_slice(part.as_slice());
            at += part.len();
        }
        let write = gc.wiring.device.write_data(piece.placed.ptr.offset(), sectors, buffer, 0);
        writes.push((first..last, write));
        first = last;
    }
    for (pieces, write) in writes {
        let done = write.await;
        gc.wiring.device.observe_data(&done.result);
        copied[pieces].fill(done.result.is_ok());
    }
    copied
}

/// Where the index still says `from`, it says `to` now; `durability` is good enough for clean copies that no crash can bring
/// back. For the others the journal must know: whoever forgets the new copy must not be surprised by the old one.
async fn replace(gc: &Rc<Gc>, piece: &Piece<'_>, durability: Durability) -> Result<(), EngineError> {
    let Piece { found: f, at: start, from, placed: Placed { ptr: to, size } } = *piece;
    let end = start + size;
    let mut at = start;
    while at < end {
        gc.wiring.device.check()?;
        let delta = at - start;
        let blocked = match gc.wiring.index.segment(f.inode, at, end) {
            Err(e) => e.into(),
            Ok(seg) => match seg.kind {
                Kind::Hit { ptr, dirty, may_be_durable }
                    if ptr == from.advanced(delta) && dirty == f.dirty =>
                {
                    let may_be_durable = may_be_durable && !bug(Bug::MovedCleanNotJournaled);
                    let durability = if dirty || may_be_durable { Durability::Journaled } else { durability };
                    let new = Some((to.advanced(delta), dirty && !bug(Bug::MovedDirtyKeyForgotten)));
                    match gc.wiring.index.try_change(f.inode, at, seg.end, new, durability) {
                        Ok((done, _)) => {
                            at = done;
                            continue;
                        }
                        Err(b) => b,
                    }
                }
                _ => {
                    at = seg.end;
                    continue;
                }
            },
        };
        gc.wiring.index.unblock(blocked).await?;
    }
    Ok(())
}

/// Copies clean data that was just read from `from` to a bucket that is not reused soon, if there is room at once. `data`
/// is what was read, at `at` of the volume. Happens behind the reader's back.
#[cold]
pub(crate) fn promote(gc: &Rc<Gc>, (inode, at): (Inode, Sector), from: Ptr, data: &[u8]) {
    // Whole blocks only.
    let block = gc.geometry.block_sectors.0;
    let start = Sector(at.0.next_multiple_of(block));
    let end = Sector((at + Sectors::from_bytes_floor(data.len() as u64)).0 / block * block);
    if start >= end || gc.wiring.device.is_stopping() || gc.wiring.tasks.under_way() >= MAX_PROMOTING {
        return;
    }
    let skip = start - at;
    let Some(data) = data.get(skip.bytes() as usize..(end - at).bytes() as usize) else { return };
    let found = Found { inode, start, size: end - start, ptr: from.advanced(skip), dirty: false };
    let data = gc.rt.pool().copy_of(data);
    let (gc, background) = (gc.clone(), gc.wiring.tasks.begin());
    gc.clone().rt.spawn(async move {
        let mut at = start;
        while at < end
            && gc.is_in_use(inode)
            && let Some(placed) = gc.wiring.alloc.try_place(Stream::Promoted, (inode, at), end - at)
        {
            let offset = (at - start).bytes() as usize;
            let done =
                gc.wiring.device.write_data(placed.ptr.offset(), placed.size, data.clone(), offset).await;
            gc.wiring.device.observe_data(&done.result);
            let mut promoted = done.result.is_ok();
            if promoted {
                let tick = gc.wiring.device.gate().wrote();
                let piece = Piece { found: &found, at, from: found.ptr.advanced(at - start), placed };
                // If that fails, the set has failed.
                promoted = replace(&gc, &piece, Durability::LeafOnly(tick)).await.is_ok();
            }
            gc.wiring.alloc.release(placed);
            if !promoted {
                break;
            }
            gc.count(|c| c.promoted += 1);
            at += placed.size;
        }
        drop(background);
    });
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn dirty_data_is_packed_that_takes_twice_its_buckets_or_half_as_many_more() {
        for (in_use_percent, even) in [(30, 200), (86, 200), (87, 150), (100, 150)] {
            assert!(!is_thin(in_use_percent, even, 100) && is_thin(in_use_percent, even + 1, 100));
        }
        assert!(is_thin(50, 1, 0) && !is_thin(50, 0, 0));
    }

    #[test]
    fn a_quarter_of_the_buckets_is_empty() {
        assert!(is_quarter_empty(400, Sectors(300)) && !is_quarter_empty(400, Sectors(301)));
        assert!(is_quarter_empty(400, Sectors(0)) && !is_quarter_empty(400, Sectors(500)));
    }

    #[test]
    fn the_emptiest_buckets_are_packed_that_fit() {
        let all = [(8, 30), (47, 31), (48, 32), (0, 33), (2, 34), (8, 29), (1, 40)];
        let some: Vec<_> = all.iter().map(|&(copied, b)| (Sectors(copied), BucketNr(b))).collect();
        let chosen = |room| emptiest(some.clone(), Sectors(64), Sectors(room));
        assert_eq!(chosen(0), []);
        assert_eq!(chosen(3), [34, 40].map(BucketNr));
        assert_eq!(chosen(11), [29, 34, 40].map(BucketNr));
        assert_eq!(chosen(18), [29, 34, 40].map(BucketNr), "19 sectors do not fit");
        assert_eq!(chosen(19), [29, 30, 34, 40].map(BucketNr));
        assert_eq!(chosen(65), [29, 30, 34, 40].map(BucketNr));
        assert_eq!(chosen(66), [29, 30, 31, 34, 40].map(BucketNr));
        assert_eq!(chosen(1000), [29, 30, 31, 34, 40].map(BucketNr), "the others are full, or empty");
    }

    /// A request costs 0.1 ms, as much as 102 sectors.
    #[test]
    fn pieces_are_read_together_over_gaps_that_cost_less_than_a_request() {
        let costs = Costs::usual(false);
        let read = |places: &[(u64, u64)]| {
            let places: Vec<_> = places.iter().map(|&(at, size)| (Sector(at), Sectors(size))).collect();
            read_together(&places, &costs).into_iter().map(|(r, at, n)| (r, at.0, n.0)).collect::<Vec<_>>()
        };
        assert_eq!(read(&[(100, 8), (108, 8), (218, 2)]), [(0..3, 100, 120)]);
        assert_eq!(read(&[(100, 8), (108, 8), (219, 2)]), [(0..2, 100, 16), (2..3, 219, 2)]);
        assert_eq!(read(&[(0, 1000), (1000, 24), (1024, 8)]), [(0..2, 0, 1024), (2..3, 1024, 8)]);
        assert_eq!(read(&[(0, 1000), (1000, 25)]), [(0..1, 0, 1000), (1..2, 1000, 25)]);
        // The same place twice is read twice.
        assert_eq!(read(&[(0, 8), (7, 8), (15, 2000)]), [(0..1, 0, 8), (1..2, 7, 8), (2..3, 15, 2000)]);
        assert_eq!(read(&[]), []);
    }

    proptest! {
        /// Whatever the gaps are, each piece is in one read.
        #[test]
        fn every_piece_is_read_once(pieces in prop::collection::vec((0u64..200, 1u64..300), 0..20)) {
            let mut at = 0;
            let places = pieces.iter().map(|&(gap, size)| {
                at += gap + size;
                (Sector(at - size), Sectors(size))
            });
            let places: Vec<_> = places.collect();
            let reads = read_together(&places, &Costs::usual(false));
            let all: Vec<usize> = reads.iter().flat_map(|(pieces, ..)| pieces.clone()).collect();
            prop_assert!(all.into_iter().eq(0..places.len()));
            for (pieces, start, size) in reads {
                prop_assert_eq!(places[pieces.start].0, start);
                let (last, sectors) = places[pieces.end - 1];
                prop_assert_eq!(last + sectors, start + size);
                prop_assert!(pieces.len() == 1 || size <= MAX_READ);
            }
        }
    }
}
