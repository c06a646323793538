//! Damaged data in the cache: blocks that do not match their checksum.
//!
//! Clean data is invalidated: the next read takes it from the backing device. Dirty data stays in the index, because no
//! other device has it. It is listed, and every read of it fails, until a client overwrites it or the operator accepts or
//! drops it. Owns this reaction. Must not know where checksums are stored.

use std::rc::Rc;

use format::{Inode, JournalSeq, Ptr, Sector, Sectors, SlotRole};
use io::Nanos;

use super::copy::{restore_copy, settle_range};
use super::mirror::drop_part;
use super::{Cache, Target, Volume};
use crate::canary::{Bug, bug};
use crate::data::{DamagedBlock, Mismatch, ReadSum, ReadToken, Verdict};
use crate::error::EngineError;
use crate::events::{Resolution, SetEvent};
use crate::index::{Durability, Kind};
use crate::refusal::Refusal;

/// How often, and after which pause, a block is accepted again while the footer of its bucket is being written.
const ACCEPT_TRIES: u32 = 1000;
const ACCEPT_AGAIN: Nanos = Nanos::from_ms(10);

/// Cached data that was read: its position on the device and its place in the cache.
#[derive(Clone, Copy)]
pub(crate) struct CachedPiece {
    pub(crate) start: Sector,
    pub(crate) ptr: Ptr,
}

/// The owner of cached data: a slot of the set, and its volume if that is registered.
#[derive(Clone, Copy)]
pub(crate) struct Owner<'a> {
    pub(crate) volume: Option<&'a Rc<Volume>>,
    pub(crate) cache: &'a Rc<Cache>,
    pub(crate) inode: Inode,
}

impl<'a> From<Target<'a>> for Owner<'a> {
    fn from(target: Target<'a>) -> Owner<'a> {
        Owner { volume: Some(target.volume), cache: target.cache, inode: target.inode }
    }
}

impl Owner<'_> {
    /// Label or name of the volume. Of a device that is not registered: its label or UUID.
    pub(crate) fn name(&self) -> String {
        match self.volume {
            Some(volume) => {
                let label = volume.tunables.borrow().label.clone();
                if label.is_empty() { volume.name() } else { label }
            }
            None => self.cache.uuids.name_of(self.inode),
        }
    }

    /// The position on the volume of a position on its device. Where data begins on a device that is not registered is not
    /// known, so its positions stay as they are.
    pub(crate) fn position(&self, start: Sector) -> Sector {
        Sector(start.0.saturating_sub(self.volume.map_or(0, |v| v.offset.0)))
    }
}

/// How much of a block the index has at its place.
#[derive(Clone, Copy, Default)]
struct LivePart {
    dirty: Sectors,
    clean: Sectors,
}

/// What became of a damaged block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Found {
    /// The index does not have it any more, so it is not damaged.
    Replaced,
    /// Clean data, which was invalidated.
    Clean,
    /// Dirty data, which is listed.
    Dirty,
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
    match found_damaged(target.into(), block, mismatch).await? {
        Found::Replaced | Found::Clean => Ok(false),
        Found::Dirty => {
            let device = target.cache.device.place().device.clone();
            let sector = Owner::from(target).position(block.start);
            let (volume, at) = (target.volume.name().into(), block.ptr.offset());
            Err(EngineError::DamagedData { volume, sector, device, at })
        }
    }
}

/// Reacts to a block that does not match its checksum, also when it is read a second time.
pub(crate) async fn found_damaged(
    owner: Owner<'_>,
    block: CachedPiece,
    mismatch: Mismatch,
) -> Result<Found, EngineError> {
    // Data that was dropped during the read may have been wiped. It is not damaged.
    let live = match bug(Bug::WipedTakenForDamaged) {
        true => LivePart { dirty: owner.cache.geometry.block_sectors, clean: Sectors::ZERO },
        false => live_part(owner, block).await?,
    };
    if live.dirty > Sectors::ZERO {
        list_damaged(owner, block, mismatch);
        owner.cache.data.write_footer_of_damaged(block.ptr).await;
        return Ok(Found::Dirty);
    }
    if live.clean > Sectors::ZERO && invalidate_damaged(owner, block, mismatch).await? {
        return Ok(Found::Clean);
    }
    Ok(Found::Replaced)
}

/// Looks up how much of a block the index still has at this place.
async fn live_part(owner: Owner<'_>, block: CachedPiece) -> Result<LivePart, EngineError> {
    let Owner { cache, inode, .. } = owner;
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
    let is_current = cache.alloc.buckets().is_current(block.ptr);
    // The data of a volume that was detached or deleted may have been wiped.
    match is_current && !cache.index.is_invalid_slot(inode) {
        true => Ok(live),
        false => Ok(LivePart::default()),
    }
}

/// Lists a damaged block of dirty data.
fn list_damaged(owner: Owner<'_>, piece: CachedPiece, mismatch: Mismatch) {
    let size = owner.cache.geometry.block_sectors;
    let CachedPiece { start, ptr } = piece;
    if owner.cache.data.add_damaged(DamagedBlock { at: (owner.inode, start), size, ptr }) {
        report(owner, piece, true, mismatch);
        if let Some(volume) = owner.volume.filter(|v| v.mirror().is_some()) {
            let (volume, cache, range) = (volume.clone(), owner.cache.clone(), (start, start + size));
            // A read or the scrub has found the damage. A client may not read the range again for a long time.
            volume.rt.clone().spawn(async move {
                // A stop waits for it.
                let Ok(_guard) = volume.enter(Sector(0), Sectors::ZERO) else { return };
                // If it fails, the range stays in the list.
                let _ = match volume.links.is_to(&cache) {
                    true => super::heal(&volume, range).await,
                    false => restore_copy(&volume, &cache, range).await,
                };
            });
        }
    }
}

impl Owner<'_> {
    /// Whether the data is the copy of dirty data of another set, which decides about it.
    fn is_copy(&self) -> bool {
        let entries = self.cache.uuids.entries();
        let role = entries.get(self.inode.0 as usize).and_then(|entry| entry.role());
        let is_own = self.volume.is_some_and(|v| v.links.is_as(self.cache, self.inode));
        matches!(role, Some(SlotRole::Secondary { .. })) && !is_own
    }

    /// Repairs a damaged block of a copy from the set that decides about it.
    ///
    /// # Errors
    /// If the device is not registered, so that set is not known, or if the data there is damaged, too.
    async fn restore(&self, block: &DamagedBlock) -> Result<Sectors, EngineError> {
        let range = (block.at.1, block.at.1 + block.size);
        let is_restored = match self.volume {
            Some(volume) => restore_copy(volume, self.cache, range).await?,
            None => false,
        };
        if !is_restored {
            return Err(Refusal::CopyNeedsDevice { device: self.name() }.into());
        }
        self.cache.data.remove_damaged(block);
        Ok(block.size)
    }
}

/// The damaged dirty data of the volume: its first sector, and how many sectors it has. Blocks that were replaced
/// meanwhile are removed from the list.
pub(crate) async fn damaged_left(target: Target<'_>) -> Result<Option<(Sector, Sectors)>, EngineError> {
    let Target { cache, inode, .. } = target;
    let (mut first, mut left) = (None, Sectors::ZERO);
    for block in cache.data.damaged().into_iter().filter(|b| b.at.0 == inode) {
        let start = block.at.1;
        let still = live_part(target.into(), CachedPiece { start, ptr: block.ptr }).await?.dirty;
        if still == Sectors::ZERO {
            cache.data.remove_damaged(&block);
        } else {
            left += still;
            first = Some(first.map_or(start, |f: Sector| f.min(start)));
        }
    }
    Ok(first.map(|first| (Owner::from(target).position(first), left)))
}

/// Whether a block of the list is still dirty data at its place. A block whose leaf is not in memory counts as damaged.
pub(crate) fn is_still_damaged(cache: &Cache, block: &DamagedBlock) -> bool {
    let (inode, start) = block.at;
    let (mut at, end) = (start, start + block.size);
    while at < end && cache.alloc.buckets().is_current(block.ptr) && !cache.index.is_invalid_slot(inode) {
        let Ok(seg) = cache.index.segment(inode, at, end) else { return true };
        match seg.kind {
            Kind::Hit { ptr, dirty: true, .. } if ptr == block.ptr.advanced(at - start) => return true,
            Kind::Hit { .. } | Kind::Hole { .. } => at = seg.end,
        }
    }
    false
}

/// Accepts a damaged block of dirty data as it is now: it gets a checksum of the data that is read. Returns how many sectors
/// of it are still dirty data at this place; 0 if it was replaced.
///
/// The data itself does not change, so each footer that a crash can leave is either the old one, with which the block is
/// damaged again, or none, or the new one.
pub(crate) async fn accept(owner: Owner<'_>, block: &DamagedBlock) -> Result<Sectors, EngineError> {
    let Owner { volume, cache, .. } = owner;
    if owner.is_copy() {
        return owner.restore(block).await;
    }
    let (start, piece) = (block.at.1, CachedPiece { start: block.at.1, ptr: block.ptr });
    // No client overwrites the block meanwhile.
    let _range = match volume {
        Some(volume) => Some(volume.ranges.hold_for_change(start, start + block.size).await),
        None => None,
    };
    for _ in 0..ACCEPT_TRIES {
        let left = live_part(owner, piece).await?.dirty;
        if left == Sectors::ZERO {
            cache.data.remove_damaged(block);
            return Ok(left);
        }
        let began = cache.data.read_token();
        let buffer = cache.rt.pool().take(block.size.bytes() as usize);
        let done = cache.data.read(block.ptr.offset(), block.size, buffer, 0).await;
        cache.device.observe_data(&done.result);
        done.result?;
        let Some(buffer) = done.buffer else { return Err(Refusal::Closed.into()) };
        // This reads the footer if the checksums are not in memory.
        cache.data.verify(block.ptr, buffer.as_slice(), began).await;
        let sum = format::checksum::crc32c(buffer.as_slice());
        let found = [ReadSum { at: block.ptr, sum, began }];
        if cache.data.learn(&found, true).await? > 0 || cache.data.has_sum(block.ptr, sum) {
            cache.data.remove_damaged(block);
            resolved(owner, block, left, Resolution::Accepted);
            copy_accepted(owner, (start, start + block.size)).await?;
            return Ok(left);
        }
        // The footer of the bucket is being written.
        cache.rt.sleep(ACCEPT_AGAIN).await;
    }
    let device = cache.device.place().device.clone();
    Err(Refusal::NotAccepted { device, at: block.ptr.offset() }.into())
}

/// Copies data that the operator has accepted to the second set of the volume, whose data there is damaged as well. The caller holds the
/// range.
async fn copy_accepted(owner: Owner<'_>, range: (Sector, Sector)) -> Result<(), EngineError> {
    let Some(volume) = owner.volume else { return Ok(()) };
    let (Some((cache, inode)), Some(mirror)) = (volume.attached(), volume.mirror()) else { return Ok(()) };
    if !Rc::ptr_eq(&cache, owner.cache) {
        return Ok(());
    }
    let range = (range.0, range.1.min(mirror.copied()));
    settle_range(volume.target(&cache, inode), &mirror, range).await?;
    mirror.commit_keys().await
}

/// Drops a damaged block of dirty data, durably: reads return what the backing device has, or zeros from a flash-only
/// volume. Returns how many sectors were dropped; 0 if the block was replaced.
pub(crate) async fn drop_damaged(target: Target<'_>, block: &DamagedBlock) -> Result<Sectors, EngineError> {
    let Target { volume, cache, inode } = target;
    if Owner::from(target).is_copy() {
        return Owner::from(target).restore(block).await;
    }
    let (start, end) = (block.at.1, block.at.1 + block.size);
    let _range = volume.ranges.hold_for_change(start, end).await;
    volume.ranges.writeback_done(start, end).await;
    let (mut at, mut dropped, mut newest) = (start, Sectors::ZERO, JournalSeq(0));
    while at < end && cache.alloc.buckets().is_current(block.ptr) {
        let seg = cache.index.segment_loaded(inode, at, end).await?;
        let here = block.ptr.advanced(at - start);
        if matches!(seg.kind, Kind::Hit { ptr, dirty: true, .. } if ptr == here) {
            let (done, seq) = drop_part(target, (at, seg.end)).await?;
            newest = newest.max(seq);
            dropped += done - at;
            at = done;
        } else {
            at = seg.end;
        }
    }
    cache.journal.commit(newest).await?;
    if let Some(mirror) = volume.mirror() {
        mirror.commit_keys().await?;
    }
    cache.data.remove_damaged(block);
    if dropped > Sectors::ZERO {
        resolved(target.into(), block, dropped, Resolution::Dropped);
        volume.writeback.progressed();
        volume.writeback.wake();
    }
    Ok(dropped)
}

fn resolved(owner: Owner<'_>, block: &DamagedBlock, sectors: Sectors, decision: Resolution) {
    owner.cache.device.emit(SetEvent::DamageResolved {
        volume: owner.name(),
        sector: owner.position(block.at.1),
        sectors,
        decision,
    });
}

/// Makes a damaged block of clean data a hole, where the index still has it. Returns whether it had.
async fn invalidate_damaged(
    owner: Owner<'_>,
    piece: CachedPiece,
    mismatch: Mismatch,
) -> Result<bool, EngineError> {
    let Owner { cache, inode, .. } = owner;
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
        report(owner, piece, false, mismatch);
    }
    Ok(found)
}

fn report(owner: Owner<'_>, piece: CachedPiece, dirty: bool, mismatch: Mismatch) {
    let cache = owner.cache;
    cache.data.count_damaged();
    cache.device.emit(SetEvent::DamagedData {
        volume: owner.name(),
        sector: owner.position(piece.start),
        sectors: cache.geometry.block_sectors,
        at: piece.ptr.offset(),
        dirty,
        expected: mismatch.expected,
        found: mismatch.found,
    });
}
