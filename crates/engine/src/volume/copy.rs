//! Copies dirty data of a volume from its set to the second one, and back where the first one cannot be read (decision 037).
//!
//! Owns the comparison of the two sets in a range, and the end of a copy. Must not know which ranges are to be copied.
//!
//! Invariant: while a range is copied it is held, and no writeback of it is under way, so the primary has the same data in it at the
//! end as at the beginning.

use std::rc::Rc;

use format::{CopyNr, Ptr, Sector, Sectors};
use io::Buffer;

use super::backing::read_directly;
use super::blocks::widened;
use super::cache::Cache;
use super::mirror::{Mirror, insert_in};
use super::read::read_merged;
use super::write::{Write, failure_of};
use super::{Target, Volume};
use crate::canary::{Bug, bug};
use crate::data::Verdict;
use crate::error::EngineError;
use crate::index::{Kind, NotLoaded};
use crate::refusal::{MirrorRefusal, Refusal};

/// The largest piece that is copied.
const PIECE: Sectors = Sectors(1 << 10);

/// Copies the dirty data of a range in which the secondary has none. Later dirty writes up to its end go to both sets.
pub(crate) async fn copy_dirty(
    volume: &Rc<Volume>,
    mirror: &Rc<Mirror>,
    (start, end): (Sector, Sector),
) -> Result<(), EngineError> {
    let mut _range = None;
    if !bug(Bug::CopyRangeNotHeld) {
        _range = Some(volume.ranges.hold_for_change(start, end).await);
        volume.ranges.writeback_done(start, end).await;
    }
    let Some((cache, inode)) = volume.attached() else { return lost(volume) };
    let target = volume.target(&cache, inode);
    let mut at = start;
    loop {
        let next = cache.index.tree().next_dirty(inode, at, &cache.alloc.buckets());
        match next {
            Err(NotLoaded(leaf)) => cache.index.load_leaf(leaf).await?,
            Ok(Some((from, sectors, _))) if from < end => {
                let piece_end = (from.max(at) + PIECE).min(from + sectors).min(end);
                copy_piece(target, mirror, (from.max(at), piece_end)).await?;
                at = piece_end;
            }
            Ok(_) => break,
        }
    }
    mirror.set_copied(end);
    Ok(())
}

/// Makes the dirty data of the secondary equal to that of the primary in a range. No request or writeback is under way.
pub(crate) async fn settle_range(
    target: Target<'_>,
    mirror: &Mirror,
    (start, end): (Sector, Sector),
) -> Result<(), EngineError> {
    let Target { cache, inode, .. } = target;
    let mut at = start;
    while at < end {
        let segment = cache.index.segment_loaded(inode, at, end).await?;
        let mut piece_end = segment.end;
        if matches!(segment.kind, Kind::Hit { dirty: true, .. }) {
            piece_end = piece_end.min(at + PIECE);
            copy_piece(target, mirror, (at, piece_end)).await?;
        } else {
            mirror.drop_range(at, piece_end).await?;
        }
        at = piece_end;
    }
    Ok(())
}

/// Copies a piece of dirty data.
async fn copy_piece(
    target: Target<'_>,
    mirror: &Mirror,
    (start, end): (Sector, Sector),
) -> Result<(), EngineError> {
    let buffer = read_merged(target, start, end).await?;
    let write = Write { start, end, buffer, offset_bytes: 0, fua: false, meta: false };
    let inserted = insert_in((&mirror.cache, mirror.inode), target.volume, &write).await;
    inserted.map_err(|e| failure_of(target.volume, e))
}

/// All dirty data is in both sets: the superblock of the backing device gets the number of the copy.
pub(crate) async fn finish_copy(
    volume: &Rc<Volume>,
    mirror: &Rc<Mirror>,
    number: CopyNr,
) -> Result<(), EngineError> {
    let Some((cache, _)) = volume.attached() else { return lost(volume) };
    // The keys of the primary, too: a crash that loses one would leave newer data in the copy, and no journal entry shows where. Later
    // keys are paired. The handling of a lost set must not wait for these journals, because they wait for it.
    if !bug(Bug::CopyNewerThanPrimary) {
        cache.journal.commit_keys().await?;
        cache.device.settle_overwrites().await?;
    }
    if !bug(Bug::CopyNamedBeforeDurable) {
        mirror.cache.journal.commit_keys().await?;
    }
    let _one = volume.failure_handling.lock().await;
    let is_linked = volume.links.is_to(&cache) && volume.mirror().is_some_and(|m| Rc::ptr_eq(&m, mirror));
    let is_linked = is_linked && !mirror.cache.device.is_leaving();
    let Some(backing) = volume.backing().filter(|_| is_linked && !volume.stopping.get()) else {
        return lost(volume);
    };
    // If the write fails, it may have reached the device all the same.
    mirror.set_is_copy();
    backing.update(|sb| sb.set_copy(Some(number))).await
}

/// Removes the link to a second set whose copy will not become complete.
pub(crate) async fn give_up_copy(volume: &Rc<Volume>, mirror: &Rc<Mirror>) {
    let _one = volume.failure_handling.lock().await;
    if !mirror.is_copy() && volume.mirror().is_some_and(|m| Rc::ptr_eq(&m, mirror)) {
        // Writes that wait for the second set begin again.
        mirror.end(volume, volume.attached());
    }
}

/// Replaces dirty data of a range that the primary cannot read, or that is damaged there, by that of the copy. Returns false if there is
/// no copy, or it cannot be read either.
pub(crate) async fn heal(volume: &Rc<Volume>, range: (Sector, Sector)) -> Result<bool, EngineError> {
    let (Some((cache, inode)), Some(mirror)) = (volume.attached(), volume.mirror()) else { return Ok(false) };
    let target = volume.target(&cache, inode);
    let (start, end) = widened(volume, &cache, range);
    let held = volume.ranges.hold_for_change(start, end).await;
    volume.ranges.writeback_done(start, end).await;
    let mut at = start;
    while at < end {
        // A set may have failed during any wait. Then another handles that, and the request begins again.
        let is_linked = volume.links.is_to(&cache) && mirror.is_copy() && !mirror.cache.device.is_failed();
        if !is_linked || cache.device.is_failed() {
            return Ok(false);
        }
        let segment = cache.index.segment_loaded(inode, at, end).await?;
        let piece_end = segment.end.min(at + PIECE);
        if matches!(segment.kind, Kind::Hit { dirty: true, .. }) {
            match heal_piece(target, &mirror, (at, piece_end)).await {
                Ok(true) => {}
                Ok(false) => return Ok(false),
                Err(_) => {
                    // A change that has begun with this set would end in it alone, because the set works.
                    drop(held);
                    let _all = volume.block_all().await;
                    return super::cache_failed::leave_to_second(volume, &cache).await.map(|()| true);
                }
            }
        }
        at = piece_end;
    }
    Ok(true)
}

/// Replaces damaged data of the copy in the set `second` by the data of the primary, which decides. Returns false if the volume does not
/// have its copy there.
pub(crate) async fn restore_copy(
    volume: &Rc<Volume>,
    second: &Rc<Cache>,
    range: (Sector, Sector),
) -> Result<bool, EngineError> {
    let (start, end) = widened(volume, second, range);
    let _range = volume.ranges.hold_for_change(start, end).await;
    volume.ranges.writeback_done(start, end).await;
    let mirror = volume.mirror().filter(|mirror| Rc::ptr_eq(&mirror.cache, second));
    let (Some((cache, inode)), Some(mirror)) = (volume.attached(), mirror) else { return Ok(false) };
    settle_range(volume.target(&cache, inode), &mirror, (start, end.min(mirror.copied()))).await?;
    mirror.commit_keys().await?;
    Ok(true)
}

/// Replaces a piece of dirty data of the primary by the data of the copy; or of the backing device, if it was written back and only the
/// copy does not have it any more. Returns false if that cannot be read.
async fn heal_piece(
    target: Target<'_>,
    mirror: &Mirror,
    (start, end): (Sector, Sector),
) -> Result<bool, EngineError> {
    let Target { volume, cache, inode } = target;
    let (second, mut at) = (&mirror.cache, start);
    while at < end {
        let segment = second.index.segment_loaded(mirror.inode, at, end).await?;
        let sectors = segment.end - at;
        let buffer = volume.rt.pool().take(sectors.bytes() as usize);
        let (buffer, is_sound) = match segment.kind {
            Kind::Hit { ptr, dirty: true, .. } => read_copy(second, ptr, sectors, buffer).await,
            Kind::Hit { .. } | Kind::Hole { .. } => {
                let (buffer, result) = read_directly(volume, at, sectors, buffer, 0).await;
                (buffer, result.is_ok())
            }
        };
        if !is_sound {
            return Ok(false);
        }
        let write = Write { start: at, end: segment.end, buffer, offset_bytes: 0, fua: false, meta: false };
        if let Err(e) = insert_in((cache, inode), volume, &write).await {
            // It can neither read the data nor store it again.
            return Err(failure_of(volume, e));
        }
        at = segment.end;
    }
    Ok(true)
}

/// Reads data of the copy. Returns whether it could be read and is not damaged.
async fn read_copy(second: &Cache, ptr: Ptr, sectors: Sectors, buffer: Buffer) -> (Buffer, bool) {
    let (len, token) = (buffer.len(), second.data.read_token());
    let done = second.data.read(ptr.offset(), sectors, buffer, 0).await;
    second.device.observe_data(&done.result);
    let buffer = done.buffer.unwrap_or_else(|| second.rt.pool().take(len));
    let mut is_sound = done.result.is_ok() && second.alloc.buckets().is_current(ptr);
    if is_sound && second.data.has_checksums() {
        let verdict = second.data.verify(ptr, buffer.as_slice(), token).await;
        is_sound = matches!(verdict, Verdict::Verified | Verdict::Unverified);
    }
    (buffer, is_sound)
}

fn lost<T>(volume: &Volume) -> Result<T, EngineError> {
    Err(Refusal::Mirror { volume: volume.label_or_name(), why: MirrorRefusal::Lost }.into())
}
