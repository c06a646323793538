//! Dirty data in two sets at once (decision 037).
//!
//! Owns the steps in the second set, the *secondary*: the second copy of a dirty write, its durability, and its end. Must not know which
//! set is the primary, or how a set is lost.
//!
//! Invariants: a key of dirty data enters both sets in one step, in the same order in both; the secondary has no dirty data where the
//! primary has none, and no clean data before the copy is complete; at every moment each of the two sets, alone with the backing
//! device, keeps the promises of `docs/durability.md`.

use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::rc::Rc;

use format::{BackingState, BackingSuper, Inode, JournalSeq, Ptr, Sector, Sectors};
use io::sync::join;

use super::cache::Cache;
use super::write::{NotTaken, Write, outcome_of, piece_written, start_piece, wait_for_room};
use super::{Target, Volume};
use crate::alloc::{DataKind, Placed};
use crate::canary::{Bug, bug};
use crate::device::BackingDevice;
use crate::error::EngineError;
use crate::events::SetEvent;
use crate::index::{Blocked, Durability, Kind};
use crate::journal::Coupling;
use crate::policy::spread::Spread;
use crate::refusal::Refusal;

/// One of the two sets of a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Which {
    Primary,
    Secondary,
}

/// What a volume orders of its two sets when one of them is lost.
pub(crate) trait MirrorSets {
    /// Makes the secondary serve the volume: it has the volume and its device from then on, and writes its data back.
    fn adopt(&self, volume: &Rc<Volume>, inode: Inode);

    /// Records in one set, durably, that the two may differ anywhere in a slot of it.
    fn unsettle(&self, which: Which, inode: Inode) -> Pin<Box<dyn Future<Output = Result<(), EngineError>>>>;
}

/// The second set that has the dirty data of a volume, and the slot of the volume there.
pub(crate) struct Mirror {
    pub(crate) cache: Rc<Cache>,
    pub(crate) inode: Inode,
    backing: Rc<BackingDevice>,
    /// Writes below this position go to both sets. Above it, the secondary has no data.
    copied: Cell<Sector>,
    /// Whether the secondary has a copy of all dirty data, as the superblock of the backing device says.
    is_copy: Cell<bool>,
    /// `None` after the loss of one of the sets was recorded.
    coupling: RefCell<Option<Coupling>>,
    /// Which clean data the secondary keeps.
    spread: Spread,
    sets: Box<dyn MirrorSets>,
}

/// A range with its places in the two sets.
struct Pair {
    start: Sector,
    end: Sector,
    first: Ptr,
    second: Ptr,
}

impl Mirror {
    /// Makes the link to a second set that has no data of the volume, or all of its dirty data.
    pub(crate) fn new(
        (cache, inode, backing): (Rc<Cache>, Inode, Rc<BackingDevice>),
        (coupling, spread): (Coupling, Spread),
        sets: Box<dyn MirrorSets>,
        is_copy: bool,
    ) -> Mirror {
        let copied = if is_copy { Sector(u64::MAX) } else { Sector(0) };
        let (copied, is_copy, coupling) =
            (Cell::new(copied), Cell::new(is_copy), RefCell::new(Some(coupling)));
        if !bug(Bug::SecondLeafBeforeBacking) {
            cache.backings.add_copied(inode, backing.clone());
        }
        Mirror { cache, inode, backing, copied, is_copy, coupling, spread, sets }
    }

    /// Whether the secondary has a copy of all dirty data.
    pub(crate) fn is_copy(&self) -> bool {
        self.is_copy.get()
    }

    /// Whether the secondary may have clean data. It has none before the copy is complete: where the dirty data of the
    /// primary is missing, older clean data could come back.
    pub(super) fn may_have_clean(&self) -> bool {
        self.is_copy() || bug(Bug::IncompleteCopyRead)
    }

    /// The end of the range, of at most `(at, end)`, for which [`Mirror::keeps_clean`] gives the same answer.
    pub(super) fn end_of_part(&self, (at, end): (Sector, Sector)) -> Sector {
        end.min(self.spread.end_of_part(at))
    }

    /// Whether the secondary is to have the clean data of a position.
    pub(super) fn keeps_clean(&self, at: Sector) -> bool {
        self.may_have_clean() && self.spread.is_in_secondary(at)
    }

    /// Records that the superblock of the backing device names the copy.
    pub(crate) fn set_is_copy(&self) {
        self.is_copy.set(true);
    }

    /// The position up to which dirty data was copied.
    pub(crate) fn copied(&self) -> Sector {
        self.copied.get()
    }

    /// Records that all dirty data up to a position is in the secondary, too. No write of the range below it may be under way.
    pub(crate) fn set_copied(&self, to: Sector) {
        self.copied.set(to);
    }

    /// Ends the link after the loss of a set was recorded. `remaining` is the set that is left, with the slot there. Requests that wait
    /// for one of the journals may still hold this link.
    pub(super) fn end(&self, volume: &Volume, remaining: Option<(Rc<Cache>, Inode)>) {
        volume.links.lost(remaining);
        self.coupling.take();
        self.forget_device();
        volume.writeback.wake();
    }

    /// The secondary does not wait for the backing device any more. No start uses its slot, or the device has flushed all data that the
    /// slot has clean copies of.
    pub(crate) fn forget_device(&self) {
        self.cache.backings.remove(self.inode, &self.backing);
    }

    /// Whether it is durable that the secondary has no dirty data where it had some.
    pub(super) fn is_clean_durable(&self) -> bool {
        self.cache.index.tree().cleaned(self.inode) <= self.cache.journal.durable()
    }

    /// Waits for [`Mirror::is_clean_durable`].
    pub(super) async fn commit_clean(&self) -> Result<(), EngineError> {
        let cleaned = self.cache.index.tree().cleaned(self.inode);
        self.cache.journal.commit(cleaned).await
    }

    /// One of the sets has failed, and the backing device cannot record that. The other set records that the two may differ from now on,
    /// and its journal goes on without this volume, whose requests wait or fail.
    pub(super) async fn leave_unsettled(&self, first: Inode, remaining: Which) -> Result<(), EngineError> {
        if self.coupling.borrow().is_none() {
            return Ok(());
        }
        let inode = match remaining {
            Which::Primary => first,
            Which::Secondary => self.inode,
        };
        self.sets.unsettle(remaining, inode).await?;
        self.coupling.take();
        Ok(())
    }

    /// The journals of the two sets need not wait for each other for this volume any more.
    pub(super) fn uncouple(&self) {
        self.coupling.take();
    }

    /// Waits until every key of the secondary that was added so far is durable.
    pub(crate) async fn commit_keys(&self) -> Result<(), EngineError> {
        if bug(Bug::AcknowledgedAfterOneCopy) {
            return Ok(());
        }
        self.cache.journal.commit_keys().await
    }

    /// Makes the first part of a range of the secondary clean data, where that is to be kept, else a hole. Returns the end of the part.
    fn try_end_dirty(&self, (start, end): (Sector, Sector)) -> Result<Sector, Blocked> {
        let (index, inode) = (&self.cache.index, self.inode);
        let part = self.end_of_part((start, end));
        let segment = index.segment(inode, start, part)?;
        let new = match segment.kind {
            Kind::Hit { dirty: false, .. } | Kind::Hole { .. } => return Ok(segment.end),
            Kind::Hit { ptr, .. } => self.keeps_clean(start).then_some((ptr, false)),
        };
        index.try_change(inode, start, segment.end, new, Durability::Journaled).map(|(done, _)| done)
    }

    /// The end of the first part of a range, and whether the secondary has clean data there that it keeps.
    pub(crate) fn has_clean(&self, (start, end): (Sector, Sector)) -> (Sector, bool) {
        let part = self.end_of_part((start, end));
        if !self.keeps_clean(start) || self.coupling.borrow().is_none() {
            return (part, false);
        }
        match self.cache.index.segment(self.inode, start, part) {
            Ok(segment) => (segment.end, matches!(segment.kind, Kind::Hit { dirty: false, .. })),
            Err(_) => (part, false),
        }
    }

    /// Makes a range of the secondary a hole.
    pub(crate) async fn drop_range(&self, start: Sector, end: Sector) -> Result<(), EngineError> {
        let (index, inode) = (&self.cache.index, self.inode);
        let mut at = start;
        while at < end {
            let segment = index.segment_loaded(inode, at, end).await?;
            if let Kind::Hit { .. } = segment.kind {
                index.change(inode, at, segment.end, None, Durability::Journaled).await?;
            }
            at = segment.end;
        }
        Ok(())
    }
}

/// Writes data of a range to one of the sets and inserts its dirty keys. The caller holds the range.
pub(super) async fn insert_in(
    (cache, inode): (&Rc<Cache>, Inode),
    volume: &Volume,
    write: &Write,
) -> Result<(), NotTaken> {
    let mut at = write.start;
    while at < write.end {
        cache.device.check()?;
        let Some(placed) = cache.alloc.try_place(DataKind::Dirty, write.end - at) else {
            wait_for_room(volume, cache).await?;
            continue;
        };
        OnePlace { cache, inode, at, placed }.fill(volume, write).await?;
        at += placed.size;
    }
    Ok(())
}

/// A place in one set for a part of a write.
struct OnePlace<'a> {
    cache: &'a Rc<Cache>,
    inode: Inode,
    at: Sector,
    placed: Placed,
}

impl OnePlace<'_> {
    /// Writes the data and inserts its dirty key. Returns the journal entry of the key.
    async fn fill(self, volume: &Volume, write: &Write) -> Result<JournalSeq, NotTaken> {
        let OnePlace { cache, inode, at, placed } = self;
        let (piece, io) = start_piece((volume, cache), write, (at, placed.size), placed);
        let written = piece_written(volume, cache, piece, io.await.result);
        let mut outcome = outcome_of(volume, written).map(|()| JournalSeq(0));
        if outcome.is_ok() {
            let new = Some((placed.ptr, true));
            let inserted = cache.index.change(inode, at, at + placed.size, new, Durability::Journaled).await;
            outcome = inserted.map_err(NotTaken::Failed);
        }
        cache.alloc.release(placed);
        outcome
    }
}

/// Writes the data to both cache devices and inserts dirty keys into both indexes, as far as the mirror has got; the rest goes to the
/// primary alone. Returns the newest journal entry of the primary with one of these keys.
pub(super) async fn write_both(
    target: Target<'_>,
    mirror: &Mirror,
    write: &Write,
) -> Result<JournalSeq, NotTaken> {
    let Target { volume, cache, inode } = target;
    let (mut newest, mut at) = (JournalSeq(0), write.start);
    while at < write.end {
        cache.device.check()?;
        mirror.cache.device.check()?;
        // The caller holds the range, so `copied` does not move past its begin during a wait.
        let copied = mirror.copied();
        let until = if at < copied { write.end.min(copied) } else { write.end };
        let Some(first) = cache.alloc.try_place(DataKind::Dirty, until - at) else {
            wait_for_room(volume, cache).await?;
            continue;
        };
        if at >= copied {
            let place = OnePlace { cache, inode, at, placed: first };
            newest = newest.max(place.fill(volume, write).await?);
            at += first.size;
            continue;
        }
        let Some(second) = mirror.cache.alloc.try_place(DataKind::Dirty, first.size) else {
            cache.alloc.release(first);
            wait_for_room(volume, &mirror.cache).await?;
            continue;
        };
        // The rest of the larger place stays unused.
        let size = first.size.min(second.size);
        let written = write_pair(target, mirror, write, (at, size), (first, second)).await;
        cache.alloc.release(first);
        mirror.cache.alloc.release(second);
        newest = newest.max(written?);
        at += size;
    }
    volume.writeback.dirtied();
    Ok(newest)
}

/// Writes a part of a write, `size` sectors from `at` on, to its places in both sets. Returns the journal entry of the primary.
async fn write_pair(
    target: Target<'_>,
    mirror: &Mirror,
    write: &Write,
    (at, size): (Sector, Sectors),
    (first, second): (Placed, Placed),
) -> Result<JournalSeq, NotTaken> {
    let Target { volume, cache, .. } = target;
    let (one, first_io) = start_piece((volume, cache), write, (at, size), first);
    let (two, second_io) = start_piece((volume, &mirror.cache), write, (at, size), second);
    let (first_done, second_done) = join(first_io, second_io).await;
    let first_written = piece_written(volume, cache, one, first_done.result);
    let second_written = piece_written(volume, &mirror.cache, two, second_done.result);
    outcome_of(volume, first_written.and(second_written))?;
    let places = Pair { start: at, end: at + size, first: first.ptr, second: second.ptr };
    insert_both(target, mirror, &places).await.map_err(NotTaken::Failed)
}

/// Inserts the keys of a range into both indexes. Returns the newest journal entry of the primary.
async fn insert_both(target: Target<'_>, mirror: &Mirror, places: &Pair) -> Result<JournalSeq, EngineError> {
    let Pair { start, end, first, second } = *places;
    let (mut at, mut newest) = (start, JournalSeq(0));
    while at < end {
        let new = (first.advanced(at - start), second.advanced(at - start));
        let (done, seq) = change_both(target, mirror, (at, end), Some(new)).await?;
        newest = newest.max(seq);
        at = done;
    }
    Ok(newest)
}

/// Changes the first part of a range in both sets in one step: dirty data at these places, or a hole. Returns the end of the part and the
/// journal entry of the primary.
///
/// # Panics
/// If one of the sets does not take a change for which it has just had room.
async fn change_both(
    target: Target<'_>,
    mirror: &Mirror,
    (start, end): (Sector, Sector),
    new: Option<(Ptr, Ptr)>,
) -> Result<(Sector, JournalSeq), EngineError> {
    let Target { cache, inode, .. } = target;
    let is_hole = new.is_none();
    loop {
        cache.device.check()?;
        mirror.cache.device.check()?;
        let end = match cache.index.first_part(inode, (start, end), is_hole) {
            Ok(end) => end,
            Err(blocked) => {
                cache.index.unblock(blocked).await?;
                continue;
            }
        };
        let end = match mirror.cache.index.first_part(mirror.inode, (start, end), is_hole) {
            Ok(end) => end,
            Err(blocked) => {
                mirror.cache.index.unblock(blocked).await?;
                continue;
            }
        };
        let (one, two) = (new.map(|(ptr, _)| (ptr, true)), new.map(|(_, ptr)| (ptr, true)));
        let one = cache.index.try_change(inode, start, end, one, Durability::Journaled);
        let two = mirror.cache.index.try_change(mirror.inode, start, end, two, Durability::Journaled);
        let (Ok((first_end, own)), Ok((second_end, theirs))) = (one, two) else {
            panic!("{start}..{end} was changed in one of two sets only");
        };
        assert!(
            first_end == end && second_end == end,
            "{start}..{end} was changed to {first_end} and {second_end}"
        );
        if let Some(coupling) = &*mirror.coupling.borrow() {
            coupling.pair(own, theirs);
        }
        return Ok((end, own));
    }
}

/// Drops the dirty data of a range from both sets, in one step for each part: a start after a crash finds what one of them lacks by
/// the order of the journals. The caller holds the range.
pub(super) async fn drop_both(
    target: Target<'_>,
    mirror: &Mirror,
    start: Sector,
    end: Sector,
) -> Result<(), EngineError> {
    let Target { cache, inode, .. } = target;
    let mut at = start;
    while at < end {
        let segment = cache.index.segment_loaded(inode, at, end).await?;
        at = match segment.kind {
            Kind::Hit { dirty: true, .. } => change_both(target, mirror, (at, segment.end), None).await?.0,
            Kind::Hit { .. } | Kind::Hole { .. } => segment.end,
        };
    }
    Ok(())
}

/// Drops the first part of a range from the set of the volume, and from the second one if that has dirty data there, too. Returns the end
/// of the part and the journal entry of the first set. The caller holds the range.
pub(super) async fn drop_part(
    target: Target<'_>,
    (start, end): (Sector, Sector),
) -> Result<(Sector, JournalSeq), EngineError> {
    let Target { volume, cache, inode } = target;
    match volume.mirror().filter(|mirror| start < mirror.copied()) {
        Some(mirror) => change_both(target, &mirror, (start, end.min(mirror.copied())), None).await,
        None => {
            let seq = cache.index.change(inode, start, end, None, Durability::Journaled).await?;
            Ok((end, seq))
        }
    }
}

/// Makes dirty data of the primary a hole where a complete copy has no dirty data any more: the backing device has it. A change past the
/// cache could otherwise be seen in one of the sets only. The caller holds the range, and commits the keys.
pub(super) async fn drop_where_clean(
    target: Target<'_>,
    mirror: &Mirror,
    (start, end): (Sector, Sector),
) -> Result<(), EngineError> {
    let Target { cache, inode, .. } = target;
    let mut at = start;
    while at < end && mirror.is_copy() {
        let first = cache.index.segment_loaded(inode, at, end).await?;
        let second = mirror.cache.index.segment_loaded(mirror.inode, at, first.end).await?;
        let is_clean = !matches!(second.kind, Kind::Hit { dirty: true, .. });
        if is_clean && matches!(first.kind, Kind::Hit { dirty: true, .. }) {
            cache.index.change(inode, at, second.end, None, Durability::Journaled).await?;
        }
        at = second.end;
    }
    Ok(())
}

/// Ends the secondary's copy of an extent that was written back and flushed, except parts that have changed meanwhile. It becomes clean data
/// where the secondary keeps that, else a hole.
///
/// A part is unchanged if the primary still has it at `ptr`: every write enters both sets in one step.
///
/// # Errors
/// If a set has failed, or the secondary has taken the volume over: later writes are in that set alone.
pub(crate) async fn end_dirty_copy(
    target: Target<'_>,
    mirror: &Mirror,
    (start, end): (Sector, Sector),
    ptr: Ptr,
) -> Result<(), EngineError> {
    let Target { volume, cache, inode } = target;
    let mut at = start;
    while at < end {
        cache.device.check()?;
        mirror.cache.device.check()?;
        if !volume.links.is_as(cache, inode) {
            return Err(Refusal::NotAttached { volume: volume.label_or_name() }.into());
        }
        if mirror.coupling.borrow().is_none() && !volume.mirror().is_some_and(|m| std::ptr::eq(&*m, mirror)) {
            // The copy was given up. Its slot may belong to another device by now.
            return Ok(());
        }
        let here = ptr.advanced(at - start);
        let segment = match cache.index.segment(inode, at, end) {
            Ok(segment) => segment,
            Err(not_loaded) => {
                cache.index.unblock(not_loaded.into()).await?;
                continue;
            }
        };
        let unchanged = matches!(segment.kind, Kind::Hit { ptr, dirty: true, .. } if ptr == here);
        if !unchanged {
            at = segment.end;
            continue;
        }
        match mirror.try_end_dirty((at, segment.end)) {
            Ok(done) => at = done,
            Err(blocked) => mirror.cache.index.unblock(blocked).await?,
        }
    }
    Ok(())
}

/// The secondary has failed: from now on the primary alone has the dirty data. Before the next request is answered, the superblock
/// of the backing device says so.
pub(super) async fn handle_lost_copy(volume: &Rc<Volume>, mirror: &Rc<Mirror>) -> Result<(), EngineError> {
    let Some(backing) = volume.backing() else { return Ok(()) };
    if mirror.is_copy() && !bug(Bug::LossNotRecorded) {
        backing.update(|sb| sb.set_copy(None)).await?;
    }
    mirror.end(volume, volume.attached());
    if let Some((cache, _)) = volume.attached() {
        let (device, lost) =
            (backing.disk().info().name.to_string(), mirror.cache.device.place().device.to_string());
        cache.device.emit(SetEvent::CopyLost { device, cache: lost });
    }
    Ok(())
}

/// The primary has failed, and the secondary has a copy of all dirty data: from now on it serves the volume. The superblock of the
/// backing device names it before the next request is answered.
pub(super) async fn take_over(volume: &Rc<Volume>, mirror: &Rc<Mirror>) -> Result<(), EngineError> {
    let Some(backing) = volume.backing() else { return Ok(()) };
    let cache = &mirror.cache;
    let set = cache.device.superblock().set_uuid();
    let is_dirty = cache.index.tree().dirty_sectors(mirror.inode) > Sectors::ZERO;
    let named = |sb: &mut BackingSuper| {
        sb.set_set_uuid(set);
        sb.set_copy(None);
        if is_dirty {
            sb.set_state(BackingState::Dirty);
        }
    };
    if !bug(Bug::TakenOverUnrecorded) {
        backing.update(named).await?;
    }
    cache.device.check()?;
    if !volume.mirror().is_some_and(|m| Rc::ptr_eq(&m, mirror)) {
        // The volume was detached meanwhile.
        return Ok(());
    }
    volume.ranges.invalidate_misses();
    mirror.end(volume, Some((cache.clone(), mirror.inode)));
    mirror.sets.adopt(volume, mirror.inode);
    let (device, by) = (backing.disk().info().name.to_string(), cache.device.place().device.to_string());
    cache.device.emit(SetEvent::TookOver { device, cache: by });
    Ok(())
}
