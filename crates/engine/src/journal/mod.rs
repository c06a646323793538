//! The journal, which makes inserted keys durable.
//!
//! Owns the open entry, the ring, the pins of entries that are still needed, and the roots (btree root, UUID table,
//! prio chain) that every entry has. One entry is written at a time. Keys that arrive during the write collect in the
//! next entry and are written with it, so commits are grouped without a delay. Must not know the index: leaves pin
//! entries and release them.
//!
//! Invariants:
//! * an entry is written after a flush of the cache device and with FUA, so the data to which its keys point, and the
//!   metadata to which its roots point, are durable before the entry is;
//! * entry n+1 is written after entry n is durable, so the ring never has a gap;
//! * a key enters the open entry only if the ring ([`Ring`]) has a place for that entry, so the write of an entry never
//!   waits for space;
//! * keys, and roots that can wait, leave a reserve of blocks in the ring. Before the pin of a leaf is released, the leaf
//!   may need an entry with a new root and one with new priorities; the reserve is for these entries.

mod crash_log;
mod partner;
mod pins;
mod replay;
mod reserve;
mod ring;

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use format::{Bkey, BucketNr, JournalSeq, Sector, Sectors, SetMagic};
use format::{JsetBuilder, JsetRoots};
use io::sync::{Either, Event, select};
use io::{Histogram, Nanos};

use crate::canary::{Bug, bug};
use crate::device::CacheDevice;
use crate::error::{EngineError, NoSpace};
use crate::refusal::Refusal;
pub(crate) use crash_log::newer_entries;
pub(crate) use partner::Coupling;
use partner::Partners;
pub(crate) use pins::Pins;
pub(crate) use replay::scan;
pub(crate) use ring::Ring;

/// Bytes of an entry before its keys (format section 9.1).
const HEADER_BYTES: usize = 240;
/// Largest entry (format section 9.1).
const MAX_ENTRY_BYTES: usize = 32768;

/// The open entry, the ring and the pins, which change together.
struct JournalState {
    /// The keys of the open entry.
    keys: Vec<Bkey>,
    spare: Vec<Bkey>,
    words: usize,
    /// The time at which the first key was added.
    since: Nanos,
    /// Whether the open entry must be written even without keys.
    forced: bool,
    open: JournalSeq,
    /// The newest entry for which a task waits.
    wanted: JournalSeq,
    ring: Ring,
    pins: Pins,
    roots: JsetRoots,
    /// The number of tasks that wait for a bucket for metadata.
    bucket_waits: usize,
}

/// Counts a task that waits for space, until it is dropped.
struct Refused<'a>(&'a Cell<usize>);

impl<'a> Refused<'a> {
    fn begin(count: &'a Cell<usize>) -> Refused<'a> {
        count.set(count.get() + 1);
        Refused(count)
    }
}

impl Drop for Refused<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// Counts a task that waits for a bucket for metadata, until it is dropped.
pub(crate) struct BucketWait<'a>(&'a Journal);

impl Drop for BucketWait<'_> {
    fn drop(&mut self) {
        self.0.state.borrow_mut().bucket_waits -= 1;
    }
}

/// Whether an entry with new roots can wait for space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Urgency {
    /// It waits while the ring has less room than the writes of leaves may need.
    CanWait,
    /// It must not wait, because it frees space of the ring.
    Frees,
}

/// The geometry of the journal on the cache device.
pub(crate) struct Layout {
    pub(crate) buckets: Vec<BucketNr>,
    pub(crate) bucket_sectors: Sectors,
    pub(crate) magic: SetMagic,
    pub(crate) block_sectors: Sectors,
}

/// The durable entries of a journal that recovery has read.
pub(crate) struct DurableEntries {
    /// The newest one; the next entry follows it.
    pub(crate) newest: JournalSeq,
    /// The oldest one that is still needed.
    pub(crate) oldest: JournalSeq,
    /// The roots that the newest one names.
    pub(crate) roots: JsetRoots,
    /// A start after the newest one replays keys.
    pub(crate) replays_keys: bool,
}

/// The journal of one cache set.
pub(crate) struct Journal {
    device: Rc<CacheDevice>,
    layout: Layout,
    max_entry_bytes: usize,
    state: RefCell<JournalState>,
    durable: Cell<JournalSeq>,
    /// A start after the newest durable entry replays keys.
    replays_keys: Cell<bool>,
    failed: RefCell<Option<EngineError>>,
    stopping: Cell<bool>,
    /// Whether the writer task has ended after a stop, so that no later key becomes durable.
    has_ended: Cell<bool>,
    /// The longest time that a key waits until its entry is written without a commit.
    delay: Cell<Nanos>,
    work: Event,
    progress: Event,
    /// The number of tasks that wait for space in the ring.
    refused: Cell<usize>,
    entries_written: Cell<u64>,
    bytes_written: Cell<u64>,
    write_times: RefCell<Histogram>,
    partners: Partners,
}

impl Journal {
    /// Makes a journal that continues the durable entries.
    pub(crate) fn new(
        device: Rc<CacheDevice>,
        layout: Layout,
        ring: Ring,
        entries: DurableEntries,
    ) -> Journal {
        let DurableEntries { newest, oldest, roots, replays_keys } = entries;
        let max_entry_bytes = MAX_ENTRY_BYTES.min(layout.bucket_sectors.bytes() as usize);
        Journal {
            device,
            layout,
            max_entry_bytes,
            state: RefCell::new(JournalState {
                keys: Vec::new(),
                spare: Vec::new(),
                words: 0,
                since: Nanos(0),
                forced: false,
                open: newest.next(),
                wanted: JournalSeq(0),
                ring,
                pins: Pins::new(oldest),
                roots,
                bucket_waits: 0,
            }),
            durable: Cell::new(newest),
            replays_keys: Cell::new(replays_keys),
            failed: RefCell::default(),
            stopping: Cell::new(false),
            has_ended: Cell::new(false),
            delay: Cell::new(Nanos::from_ms(100)),
            work: Event::default(),
            progress: Event::default(),
            refused: Cell::new(0),
            entries_written: Cell::new(0),
            bytes_written: Cell::new(0),
            write_times: RefCell::default(),
            partners: Partners::default(),
        }
    }

    pub(crate) fn set_delay(&self, delay: Nanos) {
        self.delay.set(delay);
    }

    /// The newest durable entry; all entries before it are durable, too.
    pub(crate) fn durable(&self) -> JournalSeq {
        self.durable.get()
    }

    /// The open entry, which collects keys.
    pub(crate) fn open_seq(&self) -> JournalSeq {
        self.state.borrow().open
    }

    /// The number of entries written since the start, and of their bytes.
    pub(crate) fn written(&self) -> (u64, u64) {
        (self.entries_written.get(), self.bytes_written.get())
    }

    /// The times of the writes of entries, each with the flush before it.
    pub(crate) fn write_times(&self) -> Histogram {
        *self.write_times.borrow()
    }

    pub(crate) fn roots(&self) -> JsetRoots {
        self.state.borrow().roots
    }

    /// Adds a key to the open entry if there is room. The index must take the key before the next await point.
    pub(crate) fn try_add(&self, key: &Bkey, now: Nanos) -> Option<JournalSeq> {
        let s = &mut *self.state.borrow_mut();
        let words = self.words_with(s, key.words())?;
        if s.keys.is_empty() {
            s.since = now;
            // The writer task starts the delay.
            self.work.notify_all();
        }
        s.words = words;
        s.keys.push(*key);
        self.device.crash_log().record(s.open, key);
        Some(s.open)
    }

    /// Writes keys of the crash log as the open entry. They are the keys of one entry, so they fit. Recovery calls this
    /// before any other key is added.
    pub(crate) async fn adopt(&self, keys: &[Bkey]) -> Result<(), EngineError> {
        {
            let s = &mut *self.state.borrow_mut();
            assert!(s.keys.is_empty(), "keys are adopted before there are others");
            s.words = keys.iter().map(Bkey::words).sum();
            s.keys.extend_from_slice(keys);
            s.forced = true;
        }
        self.write_entry().await
    }

    /// Waits until a new call of [`Journal::try_add`] may succeed.
    pub(crate) async fn wait_room(&self) -> Result<(), EngineError> {
        let entries = self.entries_written.get();
        {
            let s = &mut *self.state.borrow_mut();
            // An entry with keys is full and is written. If the open entry is empty, the ring is full, and writing the
            // entry would fill it further: the wait ends when leaves release their pins.
            if !s.keys.is_empty() {
                s.wanted = s.wanted.max(s.open);
            }
        }
        self.work.notify_all();
        let room =
            || self.failed.borrow().is_some() || self.entries_written.get() != entries || self.has_key_room();
        self.wait_refused(room).await;
        self.check_failed()
    }

    fn has_key_room(&self) -> bool {
        self.state.borrow().keys.is_empty() && self.has_room_to_spare()
    }

    /// Waits until the ring has more room than the entries that free it need, or `urgent` is true. It is for changes of
    /// the roots that can wait and free no space: many of them would fill the ring before the leaf that pins its oldest
    /// entries is written.
    pub(crate) async fn wait_room_to_spare(&self, urgent: impl Fn() -> bool) -> Result<(), EngineError> {
        let room =
            || self.failed.borrow().is_some() || self.stopping.get() || urgent() || self.has_room_to_spare();
        if !room() {
            self.wait_refused(room).await;
        }
        self.check_failed()
    }

    /// Whether the ring has room for a key beyond the room that the entries that free it need.
    pub(crate) fn has_room_to_spare(&self) -> bool {
        self.has_room_beside(JournalState::reserve_of_keys)
    }

    /// Whether the ring has room for an entry beyond the room that the leaves with pins need, or half of its room. Otherwise
    /// the leaves that pin the oldest entries are replaced before others.
    pub(crate) fn has_room_beside_holders(&self) -> bool {
        self.has_room_beside(JournalState::reserve_of_holders)
    }

    fn has_room_beside(&self, reserve: fn(&JournalState) -> u64) -> bool {
        let s = &mut *self.state.borrow_mut();
        let last_seq = self.last_seq_of_keys(s);
        s.ring.has_room(HEADER_BYTES + 24, reserve(s), last_seq)
    }

    /// The `last_seq` that an entry with keys has at least. The next process writes the keys of a crash log with the
    /// `last_seq` of the newest durable entry, because it replays all entries from there on. The reserve must be left then,
    /// too: without it the start could not free the ring.
    fn last_seq_of_keys(&self, s: &mut JournalState) -> JournalSeq {
        if self.device.crash_log().is_recording() && !bug(Bug::CrashLogWithoutReserve) {
            s.ring.durable_last_seq()
        } else {
            s.pins.oldest(s.open)
        }
    }

    /// Waits until `room` is true. Meanwhile the reclaim task writes leaves to free space.
    async fn wait_refused(&self, room: impl FnMut() -> bool) {
        let _refused = Refused::begin(&self.refused);
        self.progress.notify_all();
        self.progress.wait_until(room).await;
    }

    /// Wakes the tasks that wait for space, after pins were released.
    pub(crate) fn pins_released(&self) {
        self.progress.notify_all();
    }

    /// Whether less than half of the ring is free, or a task waits for space: leaves that pin old entries should then
    /// be written.
    pub(crate) fn is_pressed(&self) -> bool {
        if self.refused.get() > 0 {
            return true;
        }
        let s = self.state.borrow();
        let (left, total) = s.ring.left();
        left.0 * 2 < total.0
    }

    /// Whether a task waits for space.
    pub(crate) fn is_refusing(&self) -> bool {
        self.refused.get() > 0
    }

    /// Waits until [`Journal::is_pressed`] or `stop` holds.
    pub(crate) async fn wait_pressed(&self, stop: impl Fn() -> bool) {
        self.progress.wait_until(|| self.is_pressed() || stop()).await;
    }

    /// Waits until an entry is written, pins are released, or a task begins to wait; returns at once if the journal is
    /// stopped or has failed.
    pub(crate) async fn changed(&self) {
        if !self.stopping.get() && self.failed.borrow().is_none() {
            self.progress.changed().await;
        }
    }

    /// The newest entry in the ring bucket of the oldest needed entry: when no entry up to it is needed, the bucket is
    /// free.
    pub(crate) fn reclaim_target(&self) -> JournalSeq {
        let s = &mut *self.state.borrow_mut();
        let oldest = s.pins.oldest(s.open);
        s.ring.newest_beside(oldest).min(JournalSeq(s.open.0 - 1))
    }

    pub(crate) fn check_failed(&self) -> Result<(), EngineError> {
        self.failed.borrow().clone().map_or(Ok(()), Err)
    }

    /// Waits until entry `seq` and all before it are durable.
    pub(crate) async fn commit(&self, seq: JournalSeq) -> Result<(), EngineError> {
        if self.durable.get() >= seq {
            return Ok(());
        }
        {
            let s = &mut *self.state.borrow_mut();
            assert!(seq <= s.open, "journal entry {seq} does not exist yet, {} is open", s.open);
            s.wanted = s.wanted.max(seq);
        }
        self.work.notify_all();
        let is_over = || self.failed.borrow().is_some() || self.has_ended.get();
        self.progress.wait_until(|| is_over() || self.durable.get() >= seq).await;
        let refused = || self.check_failed().and(Err(Refusal::Stopping.into()));
        if self.durable.get() >= seq { Ok(()) } else { refused() }
    }

    /// The entry that has, or will have, the newest key that was added.
    pub(crate) fn newest_keys(&self) -> JournalSeq {
        let s = self.state.borrow();
        if s.keys.is_empty() && !s.forced { JournalSeq(s.open.0 - 1) } else { s.open }
    }

    /// Waits until every key that was added so far is durable.
    pub(crate) async fn commit_keys(&self) -> Result<(), EngineError> {
        self.commit(self.newest_keys()).await
    }

    /// Changes the roots and waits until an entry with them is durable. `urgency` is evaluated again whenever the
    /// journal changes; with [`Urgency::Frees`] the change is made without a wait for space.
    pub(crate) async fn commit_roots(
        &self,
        urgency: impl Fn() -> Urgency,
        change: impl FnOnce(&mut JsetRoots),
    ) -> Result<(), EngineError> {
        if !self.has_root_room(urgency()) {
            let room = || self.failed.borrow().is_some() || self.has_root_room(urgency());
            self.wait_refused(room).await;
        }
        self.check_failed()?;
        let seq = {
            let s = &mut *self.state.borrow_mut();
            change(&mut s.roots);
            s.forced = true;
            s.open
        };
        self.commit(seq).await
    }

    fn has_root_room(&self, urgency: Urgency) -> bool {
        let s = &mut *self.state.borrow_mut();
        // An entry that is written anyway has its place in the ring already.
        if urgency == Urgency::Frees || s.forced || !s.keys.is_empty() {
            return true;
        }
        let last_seq = s.pins.oldest(s.open);
        s.ring.has_room(HEADER_BYTES, s.reserve_of_roots(), last_seq)
    }

    /// Records that a task waits for a bucket for metadata: keys and roots that can wait leave less room meanwhile.
    pub(crate) fn begin_bucket_wait(&self) -> BucketWait<'_> {
        self.state.borrow_mut().bucket_waits += 1;
        self.progress.notify_all();
        BucketWait(self)
    }

    /// Whether the ring has room for roots that can wait.
    pub(crate) fn has_room_for_roots(&self) -> bool {
        self.has_root_room(Urgency::CanWait)
    }

    /// Waits until [`Journal::has_room_for_roots`] or `give_up` is true.
    pub(crate) async fn wait_room_for_roots(&self, give_up: impl Fn() -> bool) {
        self.wait_refused(|| give_up() || self.stopping.get() || self.has_room_for_roots()).await;
    }

    /// The first sector of the ring, for error messages.
    pub(crate) fn first_sector(&self) -> Sector {
        self.layout
            .buckets
            .first()
            .map_or(Sector(0), |b| Sector(u64::from(b.0) * self.layout.bucket_sectors.0))
    }

    /// Makes every waiting task evaluate its condition again.
    pub(crate) fn recheck(&self) {
        self.progress.notify_all();
    }

    pub(crate) fn pin(&self, seq: JournalSeq) {
        self.state.borrow_mut().pins.pin(seq);
    }

    pub(crate) fn unpin(&self, seq: JournalSeq) {
        self.state.borrow_mut().pins.unpin(seq);
    }

    /// The oldest entry that is still needed.
    pub(crate) fn oldest_needed(&self) -> JournalSeq {
        let s = &mut *self.state.borrow_mut();
        s.pins.oldest(s.open)
    }

    /// The number of free ring buckets, and of all ring buckets.
    pub(crate) fn free_buckets(&self) -> (usize, usize) {
        self.state.borrow().ring.free()
    }

    /// Whether an entry that only advances `last_seq` would free space.
    pub(crate) fn can_advance(&self) -> bool {
        let s = &mut *self.state.borrow_mut();
        let last_seq = s.pins.oldest(s.open);
        s.ring.would_free(last_seq)
    }

    /// Whether the last entry of a stop is worth its place: it frees space, or without it the next start replays keys
    /// that the index has.
    pub(crate) fn wants_last_entry(&self) -> bool {
        self.can_advance() || self.replays_keys.get() && self.has_root_room(Urgency::CanWait)
    }

    /// Makes the writer task end after it has written the pending keys.
    pub(crate) fn stop(&self) {
        self.stopping.set(true);
        self.work.notify_all();
        self.progress.notify_all();
    }

    /// Makes every present and later wait end with the error.
    pub(crate) fn fail(&self, e: EngineError) {
        self.failed.borrow_mut().get_or_insert(e);
        self.partners.report_failure();
        self.progress.notify_all();
        self.work.notify_all();
    }

    fn due(&self) -> bool {
        let s = self.state.borrow();
        s.wanted >= s.open || s.forced
    }

    /// The writer task. It ends after [`Journal::stop`], when everything is written, or at the first failure.
    pub(crate) async fn run(&self) -> Result<(), EngineError> {
        loop {
            self.check_failed()?;
            let has_keys = !self.state.borrow().keys.is_empty();
            if !self.due() {
                if self.stopping.get() {
                    if !has_keys {
                        self.has_ended.set(true);
                        self.progress.notify_all();
                        return Ok(());
                    }
                } else if has_keys {
                    let deadline = self.state.borrow().since.after(self.delay.get());
                    let wake = self.work.wait_until(|| self.due() || self.stopping.get());
                    match select(std::pin::pin!(wake), self.device.disk().runtime().sleep_until(deadline))
                        .await
                    {
                        Either::Left(()) if !self.due() => continue,
                        _ => {}
                    }
                } else {
                    self.work
                        .wait_until(|| {
                            self.due()
                                || self.stopping.get()
                                || self.failed.borrow().is_some()
                                || !self.state.borrow().keys.is_empty()
                        })
                        .await;
                    continue;
                }
            }
            self.wait_for_partners().await;
            if let Err(e) = self.write_entry().await {
                self.fail(e.clone());
                return Err(e);
            }
        }
    }

    /// Closes the open entry and writes it.
    async fn write_entry(&self) -> Result<(), EngineError> {
        // After a failure, pins may have been released for roots that were then refused. An entry that releases older
        // entries for these roots would lose their keys.
        self.check_failed()?;
        let began = self.device.disk().runtime().turn_time();
        let (buffer, keys, slot, seq, last_seq) = {
            let s = &mut *self.state.borrow_mut();
            let bytes = HEADER_BYTES + 8 * s.words;
            let last_seq = s.pins.oldest(s.open);
            if !s.ring.has_room(bytes, 0, last_seq) {
                let device = self.device.disk().info().name.clone();
                return Err(NoSpace::Journal { device, entry: s.open, bytes }.into());
            }
            let seq = s.open;
            let slot = s.ring.take(bytes, seq);
            let padded = s.ring.padded(bytes).bytes() as usize;
            // Header, keys and padding fill the whole buffer.
            let mut buffer = self.device.disk().runtime().pool().take(padded);
            let mut jset = JsetBuilder::begin(buffer.as_mut(), self.layout.block_sectors);
            for key in &s.keys {
                assert!(jset.push_key(key), "try_add counted the room for every key");
            }
            let encoded = jset.finish(self.layout.magic, seq, last_seq, &s.roots);
            assert_eq!(encoded, padded, "an entry is as large as its place in the ring");
            let spare = std::mem::take(&mut s.spare);
            let keys = std::mem::replace(&mut s.keys, spare);
            s.words = 0;
            s.forced = false;
            s.open = seq.next();
            (buffer, keys, slot, seq, last_seq)
        };
        if !bug(Bug::JournalBeforeData) {
            self.device.flush_all().await?;
        }
        let bucket = self.layout.buckets[slot.bucket];
        let sector = Sector(u64::from(bucket.0) * self.layout.bucket_sectors.0 + slot.offset.0);
        let bytes = buffer.len() as u64;
        self.device.disk().write(sector, buffer, true).await?;
        {
            let s = &mut *self.state.borrow_mut();
            s.ring.durable(last_seq);
            self.replays_keys.set(last_seq < seq || !keys.is_empty());
            s.spare = keys;
            s.spare.clear();
        }
        self.write_times.borrow_mut().record(self.device.disk().runtime().turn_time().since(began));
        self.durable.set(seq);
        self.entries_written.set(self.entries_written.get() + 1);
        self.bytes_written.set(self.bytes_written.get() + bytes);
        self.progress.notify_all();
        Ok(())
    }
}

#[cfg(test)]
mod tests;
