//! Damaged data in the cache: blocks that do not match their checksum.
//!
//! Clean data is invalidated: the next read takes it from the backing device. Dirty data stays in the index, because no
//! other device has it. It is listed, and every read of it fails, until it is overwritten. Owns this reaction. Must not
//! know checksums.

use format::{Ptr, Sector, Sectors};

use super::Target;
use crate::canary::{Bug, bug};
use crate::data::{DamagedBlock, Mismatch, ReadToken, Verdict};
use crate::error::EngineError;
use crate::events::SetEvent;
use crate::index::{Durability, Kind};

/// Cached data that was read: its position on the device and its place in the cache.
#[derive(Clone, Copy)]
pub(crate) struct CachedPiece {
    pub(crate) start: Sector,
    pub(crate) ptr: Ptr,
}

/// How much of a block the index has at its place.
#[derive(Clone, Copy, Default)]
struct LivePart {
    dirty: Sectors,
    clean: Sectors,
}

/// Checks data that was read from the cache: whole blocks, of which the first is that of `piece`. Returns false if the
/// caller must look the data up again: it was replaced during the read, or it was damaged and clean.
///
/// # Errors
/// If dirty data is damaged.
pub(crate) async fn is_sound(
    target: Target<'_>,
    piece: CachedPiece,
    data: &[u8],
    began: ReadToken,
) -> Result<bool, EngineError> {
    let mismatch = match target.cache.data.verify(piece.ptr, data, began).await {
        Verdict::Verified | Verdict::Unverified => return Ok(true),
        Verdict::ReadAgain => return Ok(false),
        Verdict::Damaged(mismatch) => mismatch,
    };
    let block = CachedPiece { start: piece.start + mismatch.at, ptr: piece.ptr.advanced(mismatch.at) };
    // Data that was dropped during the read may have been wiped. It is not damaged.
    let live = match bug(Bug::WipedTakenForDamaged) {
        true => LivePart { dirty: target.cache.geometry.block_sectors, clean: Sectors::ZERO },
        false => live_part(target, block).await?,
    };
    if live.dirty > Sectors::ZERO {
        return Err(damaged_dirty(target, block, mismatch));
    }
    if live.clean > Sectors::ZERO {
        invalidate_damaged(target, block, mismatch).await?;
    }
    Ok(false)
}

/// Looks up how much of a block the index still has at this place.
async fn live_part(target: Target<'_>, block: CachedPiece) -> Result<LivePart, EngineError> {
    let Target { cache, inode, .. } = target;
    let (mut at, end) = (block.start, block.start + cache.geometry.block_sectors);
    let mut live = LivePart::default();
    while at < end {
        let seg = cache.index.segment_loaded(inode, at, end).await?;
        let size = seg.end - at;
        match seg.kind {
            Kind::Hit { ptr, .. } if ptr != block.ptr.advanced(at - block.start) => {}
            Kind::Hit { dirty: true, .. } => live.dirty += size,
            Kind::Hit { dirty: false, .. } => live.clean += size,
            Kind::Hole { .. } => {}
        }
        at = seg.end;
    }
    match cache.alloc.buckets().is_current(block.ptr) {
        true => Ok(live),
        false => Ok(LivePart::default()),
    }
}

/// Lists a damaged block of dirty data; returns the error of the request.
fn damaged_dirty(target: Target<'_>, piece: CachedPiece, mismatch: Mismatch) -> EngineError {
    let Target { volume, cache, inode } = target;
    let size = cache.geometry.block_sectors;
    let CachedPiece { start, ptr } = piece;
    if cache.data.add_damaged(DamagedBlock { at: (inode, start), size, ptr }) {
        report(target, piece, true, mismatch);
    }
    let device = cache.device.place().device.clone();
    let sector = position(target, start);
    EngineError::DamagedData { volume: volume.name().into(), sector, device, at: ptr.offset() }
}

/// The damaged dirty data of the volume: its first sector, and how many sectors it has. Blocks that were replaced
/// meanwhile are removed from the list.
pub(crate) async fn damaged_left(target: Target<'_>) -> Result<Option<(Sector, Sectors)>, EngineError> {
    let Target { cache, inode, .. } = target;
    let (mut first, mut left) = (None, Sectors::ZERO);
    for block in cache.data.damaged().into_iter().filter(|b| b.at.0 == inode) {
        let start = block.at.1;
        let still = live_part(target, CachedPiece { start, ptr: block.ptr }).await?.dirty;
        if still == Sectors::ZERO {
            cache.data.remove_damaged(&block);
        } else {
            left += still;
            first = Some(first.map_or(start, |f: Sector| f.min(start)));
        }
    }
    Ok(first.map(|first| (position(target, first), left)))
}

/// Makes a damaged block of clean data a hole, where the index still has it.
async fn invalidate_damaged(
    target: Target<'_>,
    piece: CachedPiece,
    mismatch: Mismatch,
) -> Result<(), EngineError> {
    let Target { cache, inode, .. } = target;
    let (mut at, end) = (piece.start, piece.start + cache.geometry.block_sectors);
    let mut found = false;
    while at < end {
        cache.device.check()?;
        let here = piece.ptr.advanced(at - piece.start);
        let blocked = match cache.index.segment(inode, at, end) {
            Err(e) => e.into(),
            Ok(seg) => match seg.kind {
                Kind::Hit { ptr, dirty: false, may_be_durable } if ptr == here => {
                    let durability = match may_be_durable {
                        true => Durability::Journaled,
                        false => Durability::LeafOnly(cache.device.latest_write()),
                    };
                    match cache.index.try_change(inode, at, seg.end, None, durability) {
                        Ok((done, _)) => {
                            (at, found) = (done, true);
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
        cache.index.unblock(blocked).await?;
    }
    if found {
        report(target, piece, false, mismatch);
    }
    Ok(())
}

/// The position on the volume of a position on its device.
fn position(target: Target<'_>, start: Sector) -> Sector {
    Sector(start.0.saturating_sub(target.volume.offset.0))
}

fn report(target: Target<'_>, piece: CachedPiece, dirty: bool, mismatch: Mismatch) {
    let Target { volume, cache, .. } = target;
    cache.data.count_damaged();
    cache.device.emit(SetEvent::DamagedData {
        volume: volume.label_or_name(),
        sector: position(target, piece.start),
        sectors: cache.geometry.block_sectors,
        at: piece.ptr.offset(),
        dirty,
        expected: mismatch.expected,
        found: mismatch.found,
    });
}
