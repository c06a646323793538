//! The moving garbage collector, which packs the live data of sparsely filled buckets together, so that whole buckets
//! become free.
//!
//! Packing runs after a walk if `copy_gc_enabled` is set, and by itself when each of many buckets has a little dirty
//! data: random overwrites leave some data in every bucket, so the cache could take no more data long before it is
//! full. If a read from the backing device costs much more than a move, clean data is packed, too, before buckets that
//! are mostly empty would be evicted.
//!
//! Invariants: a moved extent stays clean or dirty. The new key of a dirty extent is journaled, so replay can never
//! bring the old place back over the new one (semantics section 18, item 8). A new key is inserted only where the index
//! still has the extent that was copied. Must not know volumes.

use std::ops::Range;
use std::rc::Rc;

use format::{BucketNr, Inode, Ptr, Sector, Sectors};
use io::Buffer;

use super::Gc;
use crate::alloc::{DataKind, Placed, Purpose};
use crate::canary::{Bug, bug};
use crate::data::{ReadToken, Verdict};
use crate::error::EngineError;
use crate::index::{Bound, Durability, Kind};
use crate::policy::cost::Costs;

/// A live extent in a bucket that is to be emptied.
struct LiveExtent {
    inode: Inode,
    start: Sector,
    size: Sectors,
    ptr: Ptr,
    dirty: bool,
}

/// A piece of an extent that is being copied.
struct MovePiece<'a> {
    found: &'a LiveExtent,
    at: Sector,
    from: Ptr,
    placed: Placed,
}

/// The limits for one batch of copies: foreground requests never wait behind more than this.
const BATCH_SECTORS: Sectors = Sectors(2048);
const BATCH_PIECES: usize = 64;

/// The largest number of promotions under way.
const MAX_PROMOTING: usize = 64;

/// The largest read that has several pieces.
const MAX_READ: Sectors = Sectors(1024);

/// Moving clean data is worth it if a request to the backing device costs more than this many times a request to the
/// cache device.
const WORTH_MOVING: u64 = 4;

/// The share of buckets in use from which sparsely filled ones are packed. It is below the first writeback cutoff, so
/// that fragmentation alone never makes writes bypass the cache.
const PACK_FROM_PERCENT: u8 = 30;

/// The share of buckets in use from which room is worth more than clean data. It is lower than the share from which
/// writes are throttled (`policy::yielding`).
const SHORT_FROM_PERCENT: u8 = 87;

/// The kind of buckets that are emptied.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Packing {
    /// All buckets that are less than three quarters full.
    Partial,
    /// Buckets with little data, some of it dirty; buckets with clean data only can be evicted without a copy.
    ThinlyDirty,
    /// Buckets with little dirty data. Clean data in them is not copied and is lost for the cache.
    DirtyOnly,
}

/// Whether dirty data takes more than twice the buckets that it would fill (1.5 times when room is short), while enough
/// buckets are in use for this to matter.
fn is_fragmented(gc: &Gc) -> bool {
    let buckets = gc.parts.alloc.buckets();
    let in_use_percent = buckets.in_use_percent() as u8;
    if in_use_percent < PACK_FROM_PERCENT {
        return false;
    }
    let dirty: u64 = gc.parts.index.tree().all_dirty().map(|(_, n)| n.0).sum();
    // The room of a footer is not empty: a bucket with as much data as it can have is full.
    let used = u64::from(buckets.len() - buckets.available()) * gc.parts.alloc.data_sectors().0;
    is_thin(in_use_percent, used, dirty)
}

/// Whether `dirty` sectors fill too small a part of the `used` sectors of the buckets in use.
fn is_thin(in_use_percent: u8, used: u64, dirty: u64) -> bool {
    if in_use_percent < SHORT_FROM_PERCENT { used > dirty * 2 } else { used * 2 > dirty * 3 }
}

/// Whether clean data will be evicted soon although a quarter of the space in the filled buckets is empty, and reading
/// the data again costs more than moving it.
fn is_wasteful(gc: &Gc) -> bool {
    {
        let buckets = gc.parts.alloc.buckets();
        let filled = u64::from(buckets.len() - buckets.unused()) * gc.parts.alloc.data_sectors().0;
        if gc.parts.alloc.has_plenty() || !is_quarter_empty(filled, buckets.live_total()) {
            return false;
        }
    }
    let Some(move_one) = gc.parts.device.model(|m| m.is_known().then(|| m.costs().per_request())) else {
        return false;
    };
    let worth = |costs: Costs| costs.per_request().0 > move_one.0.saturating_mul(WORTH_MOVING);
    gc.parts.backings.any_by_cost(worth)
}

/// Whether a quarter of the `filled` sectors of buckets has no live data.
fn is_quarter_empty(filled: u64, live: Sectors) -> bool {
    filled.saturating_sub(live.0) * 4 >= filled
}

/// The kind of buckets that should be packed now, if any.
fn due(gc: &Gc) -> Option<Packing> {
    if is_fragmented(gc) {
        let short = gc.parts.alloc.buckets().in_use_percent() as u8 >= SHORT_FROM_PERCENT;
        Some(if short { Packing::DirtyOnly } else { Packing::ThinlyDirty })
    } else {
        is_wasteful(gc).then_some(Packing::Partial)
    }
}

/// Packs sparsely filled buckets whenever there are too many of them.
pub(crate) async fn pack_task(gc: Rc<Gc>) {
    loop {
        gc.parts.alloc.walks().wait_until(|| gc.parts.device.is_stopping() || due(&gc).is_some()).await;
        if gc.parts.device.is_stopping() {
            return;
        }
        let Some(packing) = due(&gc) else { continue };
        let moved = gc.counters().moved;
        if let Err(e) = run(&gc, packing).await {
            gc.parts.device.fail(e);
            return;
        }
        gc.parts.alloc.recheck();
        if gc.counters().moved == moved {
            // There was nothing to pack, or no room for it: wait for the next event.
            gc.parts.alloc.walks().changed().await;
        }
        gc.rt.yield_now().await;
    }
}

/// The buckets to empty, ascending, because every extent of the index is looked up in the list.
struct Chosen {
    buckets: Vec<BucketNr>,
    /// Whether clean data in them is copied, too.
    clean_too: bool,
}

impl Chosen {
    fn contains(&self, bucket: BucketNr) -> bool {
        self.buckets.binary_search(&bucket).is_ok()
    }
}

/// Chooses the buckets to empty: the emptiest ones, as many as fit into the reserve for moved data.
fn candidates(gc: &Gc, packing: Packing) -> Chosen {
    let buckets = gc.parts.alloc.buckets();
    let bucket_sectors = gc.parts.alloc.data_sectors();
    let partial: Vec<(Sectors, BucketNr)> = buckets
        .all()
        .filter(|b| buckets.used(*b) == crate::alloc::Use::Data && buckets.pins(*b) == 0)
        .filter(|b| !buckets.is_moving(*b))
        .filter(|b| packing == Packing::Partial || buckets.dirty(*b) > Sectors::ZERO)
        .map(|b| (if packing == Packing::DirtyOnly { buckets.dirty(b) } else { buckets.live(b) }, b))
        .collect();
    let room = gc.parts.alloc.moving_reserve();
    let chosen = emptiest(partial, bucket_sectors, room);
    Chosen { buckets: chosen, clean_too: packing != Packing::DirtyOnly }
}

/// Chooses buckets that are less than three quarters full, the emptiest first, as long as their data fits into `room`;
/// returns them in ascending order. `buckets` has the number of sectors to copy from each.
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

/// Marks buckets as being emptied, so that no dirty data in them is overwritten in place. The marks are removed when it
/// is dropped, also if the future of the caller is dropped.
struct Marked<'a> {
    gc: &'a Gc,
    buckets: &'a [BucketNr],
}

impl<'a> Marked<'a> {
    fn new(gc: &'a Gc, buckets: &'a [BucketNr]) -> Marked<'a> {
        for b in buckets {
            let began = gc.parts.alloc.set_moving(*b, true);
            assert!(began, "bucket {b} is being emptied already");
        }
        Marked { gc, buckets }
    }
}

impl Drop for Marked<'_> {
    fn drop(&mut self) {
        for b in self.buckets {
            self.gc.parts.alloc.set_moving(*b, false);
        }
    }
}

/// Chooses buckets of this kind and empties them, if there are at least two. A stop of the set waits for the end.
pub(super) async fn run(gc: &Rc<Gc>, packing: Packing) -> Result<(), EngineError> {
    if gc.packing_stopped.get() {
        return Ok(());
    }
    let chosen = candidates(gc, packing);
    if chosen.buckets.len() < 2 {
        return Ok(());
    }
    let _background = gc.parts.tasks.begin();
    let _marked = Marked::new(gc, &chosen.buckets);
    empty(gc, &chosen).await
}

async fn empty(gc: &Rc<Gc>, chosen: &Chosen) -> Result<(), EngineError> {
    let mut passed: Option<Bound> = None;
    loop {
        gc.parts.device.check()?;
        if gc.packing_stopped.get() {
            return Ok(());
        }
        let id = gc.parts.index.tree().next_leaf(passed);
        let Some(id) = id else { return Ok(()) };
        gc.parts.index.load_leaf(id).await?;
        let mut found: Vec<LiveExtent> = {
            let tree = gc.parts.index.tree();
            let buckets = gc.parts.alloc.buckets();
            let Some(node) = tree.try_node(id).filter(|n| n.level == 0) else { continue };
            passed = Some(node.bound);
            tree.live_extents(id, &buckets)
                .filter(|(_, _, _, ptr, dirty)| {
                    (*dirty || chosen.clean_too) && chosen.contains(buckets.bucket_of(*ptr))
                })
                .map(|(inode, start, size, ptr, dirty)| LiveExtent { inode, start, size, ptr, dirty })
                .collect()
        };
        // Sorted by their place on the device, so that adjacent extents are read together.
        found.sort_unstable_by_key(|f| f.ptr.offset());
        if !move_extents(gc, &found).await? {
            return Ok(());
        }
        gc.rt.yield_now().await;
    }
}

/// Copies extents, many at the same time; returns false if there is no room for more.
async fn move_extents(gc: &Rc<Gc>, found: &[LiveExtent]) -> Result<bool, EngineError> {
    let mut batch = Vec::with_capacity(BATCH_PIECES);
    let mut left = BATCH_SECTORS;
    for f in found {
        let mut at = f.start;
        let end = f.start + f.size;
        while at < end {
            gc.parts.device.check()?;
            if !gc.is_in_use(f.inode) {
                break;
            }
            let want = Sectors((end - at).0.min(left.0));
            let Some(placed) = gc.parts.alloc.try_place(DataKind::Moving, want) else {
                copy(gc, &mut batch).await?;
                // There is no bucket to pack into.
                gc.parts.alloc.wait(Purpose::Moving, || true).await;
                return Ok(false);
            };
            batch.push(MovePiece { found: f, at, from: f.ptr.advanced(at - f.start), placed });
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

/// Reads the data of a batch, whose pieces are sorted by their place on the device. Pieces that are near to each other
/// are read together if reading the gap takes less time than another request.
async fn read(gc: &Gc, batch: &[MovePiece<'_>]) -> Vec<Option<Buffer>> {
    let costs = gc.parts.device.model(|m| m.costs());
    let places: Vec<(Sector, Sectors)> = batch.iter().map(|p| (p.from.offset(), p.placed.size)).collect();
    let read_one = |(pieces, start, size): (Range<usize>, Sector, Sectors)| {
        let buffer = gc.rt.pool().take(size.bytes() as usize);
        (pieces, gc.parts.data.read(start, size, buffer, 0))
    };
    let reads: Vec<_> = read_together(&places, &costs).into_iter().map(read_one).collect();
    let mut data = Vec::with_capacity(batch.len());
    for (range, read) in reads {
        let done = read.await;
        gc.parts.device.observe_data(&done.result);
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

/// Plans the reads of places that are sorted by their position on the device: the range of places in each read, its
/// start and its size.
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

/// Copies the pieces of `batch` and empties it: all reads at the same time, and one write for pieces whose new places
/// are adjacent.
async fn copy(gc: &Rc<Gc>, batch: &mut Vec<MovePiece<'_>>) -> Result<(), EngineError> {
    let token = gc.parts.data.read_token();
    let mut data = read(gc, batch).await;
    leave_out_damaged(gc, batch, &mut data, token).await;
    let copied = write(gc, batch, data).await;
    let tick = gc.parts.device.wrote();
    for (p, copied) in batch.iter().zip(&copied) {
        if *copied {
            replace(gc, p, Durability::LeafOnly(tick)).await?;
            gc.count(|c| c.moved += 1);
        }
    }
    for p in batch.drain(..) {
        gc.parts.alloc.release(p.placed);
    }
    Ok(())
}

/// Leaves out the pieces whose data does not match its checksum: damaged data is not moved, because its new place would
/// get a checksum of the damage. A read of the data reports it.
async fn leave_out_damaged(gc: &Gc, batch: &[MovePiece<'_>], data: &mut [Option<Buffer>], began: ReadToken) {
    if !gc.parts.data.has_checksums() {
        return;
    }
    for (piece, place) in batch.iter().zip(data) {
        let Some(bytes) = place.as_ref() else { continue };
        let verdict = gc.parts.data.verify(piece.from, bytes.as_slice(), began).await;
        if matches!(verdict, Verdict::Damaged(_) | Verdict::ReadAgain) && !bug(Bug::MovedUnverified) {
            *place = None;
        }
    }
}

/// Writes the data of each piece to its new place; returns for each piece whether it was written.
async fn write(gc: &Rc<Gc>, batch: &[MovePiece<'_>], data: Vec<Option<Buffer>>) -> Vec<bool> {
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
        let write = gc.parts.data.write(piece.placed.ptr, sectors, buffer, 0);
        writes.push((first..last, write));
        first = last;
    }
    for (pieces, write) in writes {
        let done = write.await;
        gc.parts.device.observe_data(&done.result);
        copied[pieces].fill(done.result.is_ok());
    }
    copied
}

/// Replaces the old place of a piece by the new one where the index still has the old place. `durability` applies to
/// clean copies that no crash can bring back. All other keys are journaled: otherwise a later invalidation of the new
/// copy would miss that a crash can bring the old one back.
async fn replace(gc: &Rc<Gc>, piece: &MovePiece<'_>, durability: Durability) -> Result<(), EngineError> {
    let MovePiece { found: f, at: start, from, placed: Placed { ptr: to, size } } = *piece;
    let end = start + size;
    let mut at = start;
    while at < end {
        gc.parts.device.check()?;
        let delta = at - start;
        let blocked = match gc.parts.index.segment(f.inode, at, end) {
            Err(e) => e.into(),
            Ok(seg) => match seg.kind {
                Kind::Hit { ptr, dirty, may_be_durable }
                    if ptr == from.advanced(delta) && dirty == f.dirty =>
                {
                    let may_be_durable = may_be_durable && !bug(Bug::MovedCleanNotJournaled);
                    let durability = if dirty || may_be_durable { Durability::Journaled } else { durability };
                    let new = Some((to.advanced(delta), dirty && !bug(Bug::MovedDirtyKeyForgotten)));
                    match gc.parts.index.try_change(f.inode, at, seg.end, new, durability) {
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
        gc.parts.index.unblock(blocked).await?;
    }
    Ok(())
}

/// Promotes clean data that was just read from `from`: copies it to a bucket that is not evicted soon, if there is room
/// now. `data` is the whole blocks at position `start` of the volume. The copy runs in the background.
#[cold]
pub(crate) fn promote(gc: &Rc<Gc>, inode: Inode, start: Sector, from: Ptr, data: &[u8]) {
    if gc.parts.device.is_stopping() || gc.parts.tasks.under_way() >= MAX_PROMOTING {
        return;
    }
    let size = Sectors::from_bytes_floor(data.len() as u64);
    let (end, found) = (start + size, LiveExtent { inode, start, size, ptr: from, dirty: false });
    let data = gc.rt.pool().copy_of(data);
    let (gc, background) = (gc.clone(), gc.parts.tasks.begin());
    gc.clone().rt.spawn(async move {
        let mut at = start;
        while at < end
            && gc.is_in_use(inode)
            && let Some(placed) = gc.parts.alloc.try_place(DataKind::Promoted, end - at)
        {
            let offset = (at - start).bytes() as usize;
            let done = gc.parts.data.write(placed.ptr, placed.size, data.clone(), offset).await;
            gc.parts.device.observe_data(&done.result);
            let mut promoted = done.result.is_ok();
            if promoted {
                let tick = gc.parts.device.wrote();
                let piece = MovePiece { found: &found, at, from: found.ptr.advanced(at - start), placed };
                // If the replacement fails, the set is disabled, which other code reports.
                promoted = replace(&gc, &piece, Durability::LeafOnly(tick)).await.is_ok();
            }
            gc.parts.alloc.release(placed);
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
    use crate::events::SetEvent;
    use crate::set::SetOptions;
    use crate::testing::{Watching, components, open_set, run};

    /// A read of data to be moved counts against the limit of errors, as every request for data does.
    #[test]
    fn a_read_that_fails_is_counted_and_has_no_data() {
        run(|rt| async move {
            let device = Watching::new(16_384);
            let cache = components(open_set(&device, &rt, (16, false), SetOptions::default()).await, &rt);
            let (start, size) = (Sector(0), Sectors(8));
            let ptr = Ptr::new(0, Sector(8000), format::Gen(0));
            let found = LiveExtent { inode: Inode(0), start, size, ptr, dirty: false };
            let one = || [MovePiece { found: &found, at: start, from: ptr, placed: Placed { ptr, size } }];
            for fails in [false, true] {
                device.refuses.set(if fails { |r| (r.op == io::Op::Read).then_some(5) } else { |_| None });
                cache.device.events().take();
                let data = read(&cache.gc, &one()).await;
                assert_eq!(data.iter().map(Option::is_none).collect::<Vec<_>>(), [fails]);
                let events = cache.device.events().take();
                let errors = events.iter().filter(|e| matches!(e, SetEvent::DeviceError { .. }));
                assert_eq!(errors.count(), usize::from(fails));
            }
        });
    }

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
        // A place that occurs twice is read twice.
        assert_eq!(read(&[(0, 8), (7, 8), (15, 2000)]), [(0..1, 0, 8), (1..2, 7, 8), (2..3, 15, 2000)]);
        assert_eq!(read(&[]), []);
    }

    proptest! {
        /// With any gaps, each piece is in exactly one read.
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
