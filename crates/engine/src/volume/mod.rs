//! A volume: a cached device or a flash-only volume, as clients use it.
//!
//! Owns what all requests have in common (bounds, in-flight count, bypass decision, statistics) and the state of the
//! volume (attached, detaching, pass-through, stopped). The paths are in `read`, `pieces`, `hit`, `backing`, `write`, `direct`,
//! `miss` and `overwrite`; `blocks` widens a request to whole blocks, or reduces it to them; `ranges` says which requests may
//! overlap; writeback is a separate task (`crate::writeback`).
//!
//! Invariants: positions handed to the index include the data offset; a volume with dirty data never serves requests
//! without its cache.

mod again;
mod alone;
mod backing;
mod blocks;
mod cache;
mod cache_failed;
mod clean_set;
mod copy;
mod damaged;
mod device;
mod direct;
mod drain;
mod hit;
mod links;
mod mirror;
mod miss;
mod overwrite;
mod pieces;
mod ranges;
mod read;
mod request;
mod settings;
mod write;
mod writeback_state;

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use format::{BackingState, CacheMode, Inode, Sector, Sectors, Uuid};
use io::sync::{Event, Mutex};
use io::{Disk, Handle, Nanos, TraceFigures, VolumeError};

pub(crate) use backing::is_usable;
pub(crate) use blocks::Blocks;
pub(crate) use cache::{Cache, Shared, VolumeLoad};
pub(crate) use cache_failed::{
    end_copy, handle_failed_sets, leave_to_second, release_mirror, uncouple_stopped, write_leaves_of_second,
};
pub(crate) use copy::{copy_dirty, finish_copy, give_up_copy, heal, settle_range};
pub(crate) use damaged::{
    CachedPiece, Found, Owner, accept, damaged_left, drop_damaged, found_damaged, is_sound, is_still_damaged,
};
pub use device::VolumeRef;
pub use links::CopyState;
use links::Links;
pub(crate) use mirror::{Mirror, MirrorSets, Which, end_dirty_copy};
pub(crate) use ranges::{RangeGuard, Ranges};

pub(crate) use writeback_state::WritebackState;

use crate::device::BackingDevice;
use crate::error::EngineError;
use crate::events::SetEvent;
use crate::policy::bypass::{
    BypassInputs, BypassReason, Comparison, Decision, RequestHints, RequestKind, decide_by_cost,
    dirty_limit_percent,
};
use crate::policy::cost::faster_for_stream;
use crate::policy::replacement::Saving;
use crate::policy::sequential::SequentialDetector;
use crate::policy::stripes::StripeGeometry;
use crate::policy::writeback_rate::{RateDebug, WritebackRate};
use crate::policy::yielding;
use crate::refusal::Refusal;
use crate::stats::{CacheStats, OpKind, Outcome, RequestCounters, RequestStats};
use crate::tunables::{Admission, Controller, DeviceTunables};

/// A cached device or flash-only volume.
pub struct Volume {
    rt: Handle,
    name: RefCell<String>,
    sectors: Sectors,
    /// The key position at which the volume begins: the data offset of the backing device.
    offset: Sector,
    links: Links,
    backing: Option<Rc<BackingDevice>>,
    ranges: Rc<Ranges>,
    tunables: RefCell<DeviceTunables>,
    stats: RefCell<CacheStats>,
    requests: RefCell<RequestCounters>,
    /// The outcomes and latencies of the requests.
    served: RefCell<RequestStats>,
    detector: RefCell<SequentialDetector>,
    stopping: Cell<bool>,
    /// The number of callers that detach the volume.
    detaching: Cell<u32>,
    in_flight: Cell<usize>,
    load: Rc<VolumeLoad>,
    /// Dirty writes that have begun and have not inserted all their keys into the index yet.
    dirty_in_flight: Cell<usize>,
    idle: Event,
    failure_handling: Mutex,
    writeback: WritebackState,
}

/// The target of a request or of writeback: a volume, the cache to which it is attached, and its slot there.
#[derive(Clone, Copy)]
pub(crate) struct Target<'a> {
    pub(crate) volume: &'a Rc<Volume>,
    pub(crate) cache: &'a Rc<Cache>,
    pub(crate) inode: Inode,
}

/// The key positions of a volume: its first one, and its size in whole blocks.
struct Area {
    offset: Sector,
    sectors: Sectors,
}

impl Area {
    /// The data area of a backing device.
    fn of(backing: &BackingDevice) -> Area {
        let sectors = Blocks::of_size(backing.block_sectors()).whole(backing.data_sectors());
        Area { offset: backing.data_offset(), sectors }
    }
}

impl Volume {
    fn new(
        rt: Handle,
        area: Area,
        link: Option<(Rc<Cache>, Inode)>,
        backing: Option<Rc<BackingDevice>>,
        label: &str,
    ) -> Rc<Volume> {
        let mode = backing.as_ref().map_or(CacheMode::Writeback, |b| b.cache_mode());
        let now = rt.now();
        let tunables = DeviceTunables::new(mode, label);
        if let Some(b) = &backing {
            b.set_admits_by_cost(tunables.admission == Admission::Cost);
        }
        let load = VolumeLoad::new(backing.clone(), WritebackRate::new(now));
        Rc::new(Volume {
            name: RefCell::new(if label.is_empty() { "bcache".into() } else { label.to_owned() }),
            sectors: area.sectors,
            offset: area.offset,
            links: Links::new(link),
            backing,
            ranges: Rc::default(),
            tunables: RefCell::new(tunables),
            stats: RefCell::new(CacheStats::new(now)),
            requests: RefCell::default(),
            served: RefCell::new(RequestStats::new(now)),
            detector: RefCell::new(SequentialDetector::new()),
            stopping: Cell::new(false),
            detaching: Cell::new(0),
            in_flight: Cell::new(0),
            dirty_in_flight: Cell::new(0),
            idle: Event::default(),
            failure_handling: Mutex::default(),
            writeback: WritebackState::new(load.clone()),
            load,
            rt,
        })
    }

    /// Makes the volume of a cached device.
    pub(crate) fn cached(cache: &Rc<Cache>, inode: Inode, backing: Rc<BackingDevice>) -> Rc<Volume> {
        let (area, label) = (Area::of(&backing), backing.label());
        Volume::new(cache.rt.clone(), area, Some((cache.clone(), inode)), Some(backing), &label)
    }

    /// Makes a flash-only volume.
    pub(crate) fn flash_only(cache: &Rc<Cache>, inode: Inode, sectors: Sectors, label: String) -> Rc<Volume> {
        let area = Area { offset: Sector(0), sectors };
        Volume::new(cache.rt.clone(), area, Some((cache.clone(), inode)), None, &label)
    }

    /// Makes the volume of a backing device that is served without a cache. If the device was attached, its state
    /// becomes stale first, so that its old cache content can never come back.
    ///
    /// # Errors
    /// If the device has dirty data in a cache and `lose_dirty` is false.
    pub async fn pass_through(disk: Disk, lose_dirty: bool) -> Result<Rc<Volume>, EngineError> {
        alone::pass_through(disk, lose_dirty).await
    }

    /// Makes a backing device leave its set without the cache device. What the cache has of it is invalid from then on.
    /// Returns the UUID of the set.
    ///
    /// # Errors
    /// If the device has dirty data in the cache; it is not changed then.
    pub async fn leave_set(disk: Disk) -> Result<Uuid, EngineError> {
        alone::leave_set(disk).await
    }

    /// The cache and the slot, while the volume is attached.
    pub(crate) fn attached(&self) -> Option<(Rc<Cache>, Inode)> {
        self.links.first()
    }

    /// The second set that has the dirty data of the volume.
    pub(crate) fn mirror(&self) -> Option<Rc<Mirror>> {
        self.links.second()
    }

    /// Whether the dirty data of the volume is in a second set, too.
    pub fn copy_state(&self) -> CopyState {
        self.links.copy_state((self.offset, self.offset + self.sectors))
    }

    /// The set that serves the volume, while it is attached.
    pub fn set_uuid(&self) -> Option<Uuid> {
        self.attached().map(|(cache, _)| cache.device.superblock().set_uuid())
    }

    pub(crate) fn set_mirror(&self, mirror: Option<Rc<Mirror>>) {
        self.links.set_second(mirror);
    }

    /// The target of a request to this volume through the given cache and slot.
    pub(crate) fn target<'a>(self: &'a Rc<Self>, cache: &'a Rc<Cache>, inode: Inode) -> Target<'a> {
        Target { volume: self, cache, inode }
    }

    /// Slot in the UUID table, while the volume is attached.
    pub fn inode(&self) -> Option<Inode> {
        self.links.inode()
    }

    pub(crate) fn backing(&self) -> Option<Rc<BackingDevice>> {
        self.backing.clone()
    }

    /// UUID of the backing device, if there is one.
    pub fn backing_uuid(&self) -> Option<Uuid> {
        self.backing.as_ref().map(|b| b.uuid())
    }

    /// Name of the backing device, if there is one.
    pub fn backing_name(&self) -> Option<String> {
        self.backing.as_ref().map(|b| b.disk().info().name.to_string())
    }

    /// Flushes sent to the backing device.
    pub fn backing_flushes(&self) -> u64 {
        self.backing.as_ref().map_or(0, |b| b.flush_count())
    }

    /// Requests to the backing device; see [`Disk::trace`]. None without such a device.
    pub fn backing_trace(&self, since: u64, lease: Nanos) -> Option<TraceFigures> {
        self.backing.as_ref().map(|b| b.disk().trace(since, lease))
    }

    /// Size of the backing device, if there is one.
    pub fn backing_size(&self) -> Option<Sectors> {
        self.backing.as_ref().map(|b| b.disk().info().sectors)
    }

    /// Failed requests to the backing device.
    pub fn io_errors(&self) -> u64 {
        self.backing.as_ref().map_or(0, |b| b.error_count())
    }

    /// The state in the backing superblock.
    pub fn state(&self) -> Option<BackingState> {
        self.backing.as_ref().map(|b| b.state())
    }

    /// Whether all data of the volume is in the cache: it has no backing device.
    pub fn is_flash_only(&self) -> bool {
        self.backing.is_none()
    }

    /// Size.
    pub fn size(&self) -> Sectors {
        self.sectors
    }

    /// Name for clients.
    pub fn name(&self) -> String {
        self.name.borrow().clone()
    }

    /// Sets the name by which clients find the volume.
    pub fn set_name(&self, name: &str) {
        *self.name.borrow_mut() = name.to_owned();
    }

    pub(crate) fn label_or_name(&self) -> String {
        self.backing_name().unwrap_or_else(|| self.name())
    }

    /// Logical block size, in bytes.
    pub fn block_bytes(&self) -> u32 {
        let sectors = match (&self.backing, self.attached()) {
            (Some(b), _) => b.block_sectors(),
            (None, Some((cache, _))) => cache.geometry.block_sectors,
            (None, None) => Sectors(1),
        };
        sectors.bytes() as u32
    }

    /// Unit that is stored without a read of the data around it, in bytes: the largest block size of volume, set and
    /// devices.
    pub fn physical_block_bytes(&self) -> u32 {
        let backing = self.backing.as_ref().map_or(0, |b| b.disk().info().physical_block_bytes);
        let cache = self.attached().map_or(0, |(cache, _)| cache.geometry.block_sectors.bytes() as u32);
        self.block_bytes().max(backing).max(cache)
    }

    /// Preferred size of requests, in bytes; 0 if there is none.
    pub fn optimal_io_bytes(&self) -> u32 {
        self.backing.as_ref().map_or(0, |b| b.disk().info().optimal_io_bytes)
    }

    /// The number of live dirty sectors.
    pub fn dirty_sectors(&self) -> Sectors {
        self.attached().map_or(Sectors::ZERO, |(cache, inode)| cache.index.tree().dirty_sectors(inode))
    }

    /// Calls `f` with the statistics, which have the views of the kernel.
    pub fn with_stats<T>(&self, f: impl FnOnce(&mut CacheStats) -> T) -> T {
        let stats = &mut *self.stats.borrow_mut();
        stats.tick(self.rt.now());
        f(stats)
    }

    /// Zeroes the total view of the statistics (`clear_stats`).
    pub fn clear_stats(&self) {
        self.stats.borrow_mut().clear_total();
    }

    /// Counts of requests.
    pub fn request_counters(&self) -> RequestCounters {
        *self.requests.borrow()
    }

    /// The value of a tunable, by the kernel's name.
    pub fn get(&self, name: &str) -> Option<String> {
        self.tunables.borrow_mut().writeback_rate = self.writeback.rate().max(1);
        self.tunables.borrow().get(name).ok()
    }

    /// A copy of all tunables.
    pub fn tunables(&self) -> DeviceTunables {
        self.tunables.borrow_mut().writeback_rate = self.writeback.rate().max(1);
        self.tunables.borrow().clone()
    }

    /// Sets a tunable, by the kernel's name. Cache mode and label are also written to the superblock.
    ///
    /// # Errors
    /// If the name is unknown, the value is invalid, or the superblock cannot be written; the tunable then keeps its
    /// old value.
    pub async fn set(&self, name: &str, value: &str) -> Result<(), EngineError> {
        settings::set(self, name, value).await
    }

    /// Stops the volume: refuses new requests, and waits for the requests under way and for the writeback task. On a
    /// volume without a cache every answered write is durable afterwards, so a client may rely on a stop instead of a
    /// flush. On a volume with a cache the stop of the set, or [`crate::CacheSet::release`], makes them durable.
    ///
    /// # Errors
    /// If the device could not be flushed: writes that were answered and not flushed may be lost. The volume is stopped
    /// in this case, too.
    pub async fn stop(&self) -> Result<(), EngineError> {
        drain::stop(self).await
    }

    /// Makes the volume take no new dirty data, once more than before.
    pub(crate) fn begin_detach(&self) {
        self.detaching.set(self.detaching.get() + 1);
        self.writeback.wake();
    }

    /// Ends the effect of one call of [`Volume::begin_detach`].
    pub(crate) fn cancel_detach(&self) {
        // The count is 0 if the volume was detached meanwhile.
        self.detaching.set(self.detaching.get().saturating_sub(1));
    }

    /// Whether the volume is being detached and takes no new dirty data.
    pub(crate) fn is_detaching(&self) -> bool {
        self.detaching.get() > 0
    }

    /// Waits until no dirty data is left. On a flash-only volume it returns at once, because that data has no other
    /// device to go to. Dropping the future cancels the wait.
    ///
    /// # Errors
    /// If the set fails, or the volume is stopped.
    pub async fn drained(&self) -> Result<(), EngineError> {
        drain::drained(self).await
    }

    /// Sets the state in the backing superblock to clean if nothing is dirty.
    pub(crate) async fn mark_clean(&self) -> Result<(), EngineError> {
        drain::mark_clean(self).await
    }

    /// The events of the backing device since the last call.
    pub fn take_events(&self) -> Vec<SetEvent> {
        self.backing.as_ref().map(|b| b.take_events()).unwrap_or_default()
    }

    /// Waits until [`Volume::take_events`] returns an event. On a flash-only volume the wait never ends.
    pub async fn events_arrived(&self) {
        match &self.backing {
            Some(b) => b.events_arrived().await,
            None => std::future::pending().await,
        }
    }

    /// Checks that a request may begin, and counts it as in flight until the guard is dropped.
    pub(super) fn enter(&self, sector: Sector, sectors: Sectors) -> Result<InFlight<'_>, VolumeError> {
        if self.stopping.get() {
            return Err(VolumeError::Stopped(self.name()));
        }
        let inside = sector.checked_add(sectors).is_some_and(|end| end <= Sector(self.sectors.0));
        if !inside {
            return Err(VolumeError::OutOfRange { sector, sectors, capacity: self.sectors });
        }
        if self.backing.as_ref().is_some_and(|b| b.is_disabled()) {
            return Err(VolumeError::failed(Refusal::IoDisabled { volume: self.label_or_name() }));
        }
        if self.links.is_disabled() {
            return Err(VolumeError::failed(Refusal::IoDisabledBySet { volume: self.label_or_name() }));
        }
        let before = self.in_flight.replace(self.in_flight.get() + 1);
        if before == 0 {
            self.set_busy(true);
        }
        Ok(InFlight(self))
    }

    fn set_busy(&self, waiting: bool) {
        self.load.set_busy(waiting, self.rt.turn_time());
    }

    /// The facts about this volume that the other volumes of the set use.
    pub(crate) fn load(&self) -> &Rc<VolumeLoad> {
        &self.load
    }

    /// The terms behind the writeback rate.
    pub fn writeback_debug(&self) -> RateDebug {
        let running = self.tunables.borrow().writeback_running;
        self.load.with_rate(|rate| rate.debug(self.dirty_sectors(), running, self.rt.now()))
    }

    /// Decides whether a request goes through the cache or bypasses it.
    pub(super) fn decide(
        &self,
        cache: &Cache,
        kind: RequestKind,
        start: Sector,
        sectors: Sectors,
        meta: bool,
    ) -> Decision {
        let now = self.rt.turn_time();
        let t = self.tunables.borrow();
        let congestion_limit = {
            let c = cache.congestion();
            if c.is_calm() { None } else { c.limit(now, self.rt.random() as u32) }
        };
        let inputs = BypassInputs {
            kind,
            hints: RequestHints { meta, ..RequestHints::default() },
            start,
            sectors,
            block: cache.geometry.block_sectors,
            mode: t.cache_mode,
            detaching: self.is_detaching(),
            stopping: cache.device.is_stopping(),
            in_use_percent: cache.alloc.in_use_percent(),
            readahead_policy: t.readahead_cache_policy,
            sequential_cutoff_bytes: t.sequential_cutoff,
            congestion_limit,
        };
        let stream = || self.detector.borrow_mut().observe(start, sectors, now);
        let by_cost = t.admission == Admission::Cost;
        decide_by_cost(&inputs, stream, || by_cost.then(|| self.compare(cache, sectors)))
    }

    /// Compares what requests of this size cost the two devices, and says whether the cache has room. While the costs
    /// of a device are unknown, the answers favour the cache.
    fn compare(&self, cache: &Cache, sectors: Sectors) -> Comparison {
        let free_room = cache.alloc.has_plenty();
        let (streams_faster, answers_first) = match self.backing() {
            Some(b) => cache.device.model(|cache| {
                b.model(|backing| {
                    let unknown = !cache.is_known() || !backing.is_known();
                    let streams_faster = unknown || faster_for_stream(cache, backing, sectors);
                    let answers_first = unknown || cache.answer_time(sectors) <= backing.answer_time(sectors);
                    (streams_faster, answers_first)
                })
            }),
            None => (true, true),
        };
        Comparison { free_room, streams_faster, answers_first }
    }

    /// The time that a hit saves.
    pub(super) fn saving_of(&self, meta: bool) -> Saving {
        match meta {
            true => self.load.saving().of_metadata(),
            false => self.load.saving(),
        }
    }

    /// The share of used buckets up to which this write becomes dirty data, if the costs decide that (`admission` is
    /// `cost`).
    pub(super) fn dirty_limit_percent(&self, cache: &Cache, sectors: Sectors) -> Option<u8> {
        let cutoffs = {
            let t = cache.tunables.borrow();
            (t.cutoff_writeback, t.cutoff_writeback_sync)
        };
        // Below both cutoffs every write becomes dirty data.
        let by_cost = self.tunables.borrow().admission == Admission::Cost;
        if !by_cost
            || cache.alloc.in_use_percent() <= cutoffs.0
            || !self.compare(cache, sectors).answers_first
        {
            return None;
        }
        let held_back = self.tunables.borrow().writeback_controller == Controller::Yield;
        let all_up_to = if held_back { cutoffs.1.max(yielding::BYPASS_FROM_PERCENT) } else { cutoffs.1 };
        Some(dirty_limit_percent(all_up_to, self.rt.random() as u32))
    }

    pub(super) fn count(&self, f: impl FnOnce(&mut RequestCounters)) {
        f(&mut self.requests.borrow_mut());
    }

    /// Counts a request that was answered.
    pub(super) fn answered(&self, op: OpKind, outcome: Outcome, sectors: Sectors, began: Nanos) {
        self.served.borrow_mut().record(op, outcome, sectors, began, self.rt.turn_time());
    }

    /// Counts a request that failed, and returns its error.
    pub(super) fn unanswered<E>(&self, op: OpKind, e: E) -> E {
        self.served.borrow_mut().failed(op);
        e
    }

    /// Counts a part of a request for which there was no bucket.
    pub(super) fn not_cached(&self, sectors: Sectors) {
        self.stats.borrow_mut().not_cached(BypassReason::NoBucket, sectors);
        self.served.borrow_mut().not_cached(sectors, self.rt.turn_time());
    }

    /// The stripes of the backing device, if writing a part of a stripe is expensive.
    pub(crate) fn expensive_stripes(&self) -> Option<StripeGeometry> {
        let info = self.backing.as_ref()?.disk().info();
        let optimal = Sectors::from_bytes_floor(u64::from(info.optimal_io_bytes));
        let expensive = info.partial_stripes_expensive && optimal > Sectors::ZERO;
        expensive.then(|| StripeGeometry::new(optimal, self.offset, self.size()))
    }

    pub(crate) fn wake(&self) {
        self.idle.notify_all();
        self.writeback.wake();
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.get()
    }

    /// Waits until no change is under way, and lets none begin until the guard is dropped.
    pub(crate) async fn block_all(&self) -> RangeGuard {
        self.ranges.hold_all_for_change().await
    }

    /// Makes the volume serve its backing device without the set.
    pub(crate) fn detached(&self) {
        self.ranges.invalidate_misses();
        self.links.clear();
        self.detaching.set(0);
        self.writeback.wake();
    }
}

/// Counts a request as in flight until it is dropped.
pub(super) struct InFlight<'a>(&'a Volume);

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        let n = self.0.in_flight.get() - 1;
        self.0.in_flight.set(n);
        if n == 0 {
            self.0.set_busy(false);
            self.0.idle.notify_all();
        }
    }
}
