//! A backing device: its superblock, its flushes, its errors.
//!
//! Owns the backing superblock and the order of its states (format section 12.6): dirty before the first dirty write is
//! acknowledged, clean only after the last dirty key is removed, stale before any request is served without the cache.
//! Must not know the index.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use format::{BackingState, BackingSuper, CacheMode, CopyNr, RegistrationNr, Sector, Sectors, Uuid};
use io::sync::{Mutex, Permit};
use io::{Buffer, Disk, IoError, JoinHandle, Purpose};

use super::{BusyGuard, CacheDevice, FlushGate, Meter, MeteredIo, SUPERBLOCK_SECTOR, Tick, read_backing};
use crate::canary::{Bug, bug};
use crate::error::EngineError;
use crate::events::{Events, SetEvent};
use crate::policy::cost::CostModel;
use crate::stats::{BackingErrors, ErrorVerdict};

/// The number of failed requests at which a failed flush disables the device.
const LIMIT_OF_FLUSHES: u32 = 64;

/// A backing device of a cache set, or one that is served without a cache.
pub(crate) struct BackingDevice {
    disk: Disk,
    gate: FlushGate,
    /// Measures the costs of requests for data.
    meter: Rc<Meter>,
    superblock: RefCell<BackingSuper>,
    write_lock: Mutex,
    /// The state that is durable on the device; that in `superblock` may still be being written.
    durable_state: Cell<BackingState>,
    /// The newest write that a flush of a client must cover; writes of writeback do not count.
    direct_writes: Cell<Tick>,
    /// The newest write of writeback that was not flushed, because it failed: its keys stay dirty.
    failed_writeback: Cell<Tick>,
    /// See [`BackingDevice::is_late`].
    late: Cell<bool>,
    errors: RefCell<BackingErrors>,
    events: Events,
    /// Whether all requests fail, because of too many errors or because the operator set `io_disable`.
    disabled: Cell<bool>,
    /// Whether the costs of the device's requests decide which data is cached (`admission` is `cost`).
    by_cost: Cell<bool>,
}

impl BackingDevice {
    /// Opens a device: reads its superblock and makes it durable. Changes nothing.
    pub(crate) async fn open(disk: Disk) -> Result<Rc<BackingDevice>, EngineError> {
        let superblock = read_backing(&disk).await?;
        // From now on the set relies on the superblock that was read, so it must be durable, as for the cache device.
        disk.flush().await?;
        Ok(Rc::new(BackingDevice::new(disk, superblock)))
    }

    pub(crate) fn new(disk: Disk, superblock: BackingSuper) -> BackingDevice {
        BackingDevice {
            gate: FlushGate::new(disk.clone()),
            meter: Meter::new(&disk),
            disk,
            durable_state: Cell::new(superblock.state()),
            superblock: RefCell::new(superblock),
            write_lock: Mutex::default(),
            direct_writes: Cell::new(Tick::default()),
            failed_writeback: Cell::new(Tick::default()),
            late: Cell::new(false),
            errors: RefCell::new(BackingErrors::new()),
            events: Events::default(),
            disabled: Cell::new(false),
            by_cost: Cell::new(false),
        }
    }

    pub(crate) fn disk(&self) -> &Disk {
        &self.disk
    }

    /// The number of flushes.
    pub(crate) fn flush_count(&self) -> u64 {
        self.gate.count()
    }

    /// Makes every write durable that was counted.
    pub(crate) async fn flush_all(&self) -> Result<(), IoError> {
        self.gate.ensure(self.gate.latest()).await
    }

    /// Calls `read` with the cost model of the device.
    pub(crate) fn model<T>(&self, read: impl FnOnce(&CostModel) -> T) -> T {
        self.meter.model(read)
    }

    /// The meter of the device's requests for data.
    #[cfg(test)]
    pub(crate) fn meter(&self) -> &Rc<Meter> {
        &self.meter
    }

    /// Makes the device count as busy until the guard is dropped.
    pub(crate) fn busy(&self) -> BusyGuard {
        self.meter.busy()
    }

    /// Whether all requests fail, because of too many errors or because the operator set `io_disable`.
    pub(crate) fn is_disabled(&self) -> bool {
        self.disabled.get()
    }

    pub(crate) fn set_disabled(&self, disabled: bool) {
        self.disabled.set(disabled);
    }

    /// Sets whether the costs of the device's requests decide which data is cached.
    pub(crate) fn set_admits_by_cost(&self, by_cost: bool) {
        self.by_cost.set(by_cost);
    }

    pub(crate) fn admits_by_cost(&self) -> bool {
        self.by_cost.get()
    }

    pub(crate) fn uuid(&self) -> Uuid {
        self.superblock.borrow().uuid()
    }

    pub(crate) fn set_uuid(&self) -> Uuid {
        self.superblock.borrow().set_uuid()
    }

    pub(crate) fn state(&self) -> BackingState {
        self.durable_state.get()
    }

    /// The number of the last registration of the device; none if a kernel attached it, or if it was never attached.
    pub(crate) fn registration(&self) -> Option<RegistrationNr> {
        self.superblock.borrow().registration()
    }

    /// The number of the copy of the dirty data, if a second set has one.
    pub(crate) fn copy(&self) -> Option<CopyNr> {
        self.superblock.borrow().copy()
    }

    pub(crate) fn registered_sectors(&self) -> Option<Sectors> {
        self.superblock.borrow().registered_sectors()
    }

    pub(crate) fn data_offset(&self) -> Sector {
        self.superblock.borrow().data_offset()
    }

    pub(crate) fn data_sectors(&self) -> Sectors {
        self.superblock.borrow().data_sectors()
    }

    pub(crate) fn block_sectors(&self) -> Sectors {
        self.superblock.borrow().block_sectors()
    }

    pub(crate) fn cache_mode(&self) -> CacheMode {
        self.superblock.borrow().cache_mode().unwrap_or(CacheMode::None)
    }

    pub(crate) fn label(&self) -> String {
        self.superblock.borrow().label()
    }

    pub(crate) fn label_bytes(&self) -> [u8; 32] {
        *self.superblock.borrow().label_bytes()
    }

    /// Starts a read of data.
    pub(crate) fn read_data(
        &self,
        sector: Sector,
        sectors: Sectors,
        buffer: Buffer,
        offset_bytes: usize,
    ) -> MeteredIo {
        self.meter.read(&self.disk, sector, sectors, buffer, offset_bytes)
    }

    /// Starts a write of data.
    pub(crate) fn write_data(
        &self,
        sector: Sector,
        sectors: Sectors,
        buffer: Buffer,
        offset_bytes: usize,
        fua: bool,
    ) -> MeteredIo {
        self.meter.write(&self.disk, (sector, sectors), buffer, offset_bytes, fua)
    }

    /// Starts a read for writeback.
    pub(crate) fn read_for_writeback(
        &self,
        sector: Sector,
        sectors: Sectors,
        buffer: Buffer,
        offset_bytes: usize,
    ) -> MeteredIo {
        let disk = self.disk.with_purpose(Purpose::Writeback);
        self.meter.read(&disk, sector, sectors, buffer, offset_bytes)
    }

    /// Starts a write of dirty data.
    pub(crate) fn write_back(&self, sector: Sector, sectors: Sectors, buffer: Buffer) -> MeteredIo {
        let disk = self.disk.with_purpose(Purpose::Writeback);
        self.meter.write(&disk, (sector, sectors), buffer, 0, false)
    }

    /// Records that a write or discard of a client went to the device.
    pub(crate) fn wrote_directly(&self) {
        self.direct_writes.set(self.gate.wrote());
    }

    /// Records that a write of dirty data has ended. If it failed, the device may have a part of the data, and writeback sends
    /// no flush for it. A client can read that part after it has discarded the dirty data.
    pub(crate) fn wrote_back(&self, result: &Result<(), IoError>) {
        let tick = self.gate.wrote();
        if result.is_err() && !bug(Bug::FailedWritebackNotFlushed) {
            self.failed_writeback.set(tick);
        }
    }

    /// Makes every write durable that clients sent directly to the device.
    pub(crate) async fn settle_direct_writes(&self) -> Result<(), IoError> {
        self.settle(self.direct_writes.get()).await
    }

    /// Makes every write durable that can have changed what a read of the device returns.
    pub(crate) async fn settle_content(&self) -> Result<(), IoError> {
        self.settle(self.content_tick()).await
    }

    async fn settle(&self, tick: Tick) -> Result<(), IoError> {
        let result = self.gate.ensure(tick).await;
        if let Err(e) = &result {
            self.failed(e, LIMIT_OF_FLUSHES);
        }
        result
    }

    /// The newest write that can have changed what a read of the device returns.
    pub(crate) fn content_tick(&self) -> Tick {
        self.direct_writes.get().max(self.failed_writeback.get())
    }

    /// The newest write that a client sent directly to the device.
    #[cfg(test)]
    pub(crate) fn direct_tick(&self) -> Tick {
        self.direct_writes.get()
    }

    /// Whether every write up to `tick` is durable.
    pub(crate) fn is_durable(&self, tick: Tick) -> bool {
        self.gate.is_durable(tick)
    }

    /// Whether a flush of the device has failed: it may have dropped data that was written and not flushed.
    pub(crate) fn flush_has_failed(&self) -> bool {
        self.gate.has_failed()
    }

    /// Whether a flush has been under way for longer than tasks that serve other devices may wait.
    pub(crate) fn is_late(&self) -> bool {
        self.late.get()
    }

    /// Makes the device late until `flush` ends, and reports that with an event.
    pub(crate) fn late_until(self: &Rc<Self>, flush: JoinHandle<Result<(), IoError>>) {
        if self.late.replace(true) {
            return;
        }
        self.emit(SetEvent::FlushOverdue { device: self.disk.info().name.to_string() });
        let backing = self.clone();
        self.disk.runtime().spawn(async move {
            // If the flush fails, the next flush returns the error.
            let _ = flush.await;
            backing.late.set(false);
        });
    }

    /// Waits until no update of the superblock is under way. The caller of an update may have given it up.
    pub(crate) async fn updates_ended(&self) {
        if !bug(Bug::ReleaseOvertakesUpdate) {
            drop(self.write_lock.lock().await);
        }
    }

    /// Changes the superblock and waits until it is durable.
    pub(crate) async fn update(
        self: &Rc<Self>,
        change: impl FnOnce(&mut BackingSuper),
    ) -> Result<(), EngineError> {
        let lock = self.write_lock.lock().await;
        self.update_locked(lock, change).await
    }

    /// Changes the superblock and waits until it is durable; `lock` is held until the write has ended, also if the
    /// future of the caller is dropped. Otherwise a later update could overtake the write, and the superblock would end
    /// up in an older state than was acknowledged.
    async fn update_locked(
        self: &Rc<Self>,
        lock: Permit,
        change: impl FnOnce(&mut BackingSuper),
    ) -> Result<(), EngineError> {
        let (next, bytes) = {
            let mut next = self.superblock.borrow().clone();
            change(&mut next);
            let now = self.disk.runtime().wall_seconds();
            next.set_last_mount(now as u32);
            let bytes = next.encode();
            (next, bytes)
        };
        // Until the write has ended, no task may rely on the old or the new state.
        let state = next.state();
        if state != self.durable_state.get() && self.durable_state.get() == BackingState::Dirty {
            self.durable_state.set(state);
        }
        let backing = self.clone();
        let write = async move {
            let _lock = lock;
            let buffer = backing.disk.runtime().pool().copy_of(&bytes);
            let disk = backing.disk.with_purpose(Purpose::Metadata);
            disk.write(SUPERBLOCK_SECTOR, buffer, true).await?;
            *backing.superblock.borrow_mut() = next;
            backing.durable_state.set(state);
            Ok(())
        };
        if bug(Bug::GivenUpUpdateForgotten) {
            return write.await;
        }
        self.disk.runtime().spawn(write).await
    }

    /// Waits until the state in the superblock is dirty; no dirty write may be acknowledged before. Returns whether the
    /// state has changed. `allowed` is called with the lock held, and fails if the device has lost its cache meanwhile:
    /// the state stale must not become dirty.
    pub(crate) async fn ensure_dirty(
        self: &Rc<Self>,
        allowed: impl FnOnce() -> Result<(), EngineError>,
    ) -> Result<bool, EngineError> {
        if self.durable_state.get() == BackingState::Dirty {
            return Ok(false);
        }
        let lock = self.write_lock.lock().await;
        if !bug(Bug::DirtyAfterStale) {
            allowed()?;
        }
        if self.durable_state.get() == BackingState::Dirty {
            return Ok(false);
        }
        self.update_locked(lock, |sb| sb.set_state(BackingState::Dirty)).await?;
        Ok(true)
    }

    /// Sets the state in the superblock to clean if `still_clean` is true when no other update is under way. Returns
    /// whether the state has changed. A later writer finds that the state is not dirty and waits for its own update.
    pub(crate) async fn ensure_clean(
        self: &Rc<Self>,
        still_clean: impl FnOnce() -> bool,
    ) -> Result<bool, EngineError> {
        let lock = self.write_lock.lock().await;
        if self.durable_state.get() != BackingState::Dirty || !still_clean() {
            return Ok(false);
        }
        self.update_locked(lock, |sb| sb.set_state(BackingState::Clean)).await?;
        Ok(true)
    }

    /// Sets the state in the superblock to dirty before the first dirty key, unless the set has failed. Reports the change
    /// with an event of the set; see [`BackingDevice::emit_state`]. Returns whether the state has changed.
    #[cold]
    pub(crate) async fn begin_dirty(self: &Rc<Self>, cache: &CacheDevice) -> Result<bool, EngineError> {
        let changed = self.ensure_dirty(|| cache.check()).await?;
        if changed {
            self.emit_state(BackingState::Dirty, cache);
        }
        Ok(changed)
    }

    /// Reports a new state of the device with an event of the set. Events of the device itself are taken from its volume, and
    /// the set has no volume of a device that is being attached or was detached.
    pub(crate) fn emit_state(&self, state: BackingState, cache: &CacheDevice) {
        let device = self.disk.info().name.to_string();
        cache.emit(SetEvent::State { device, state: state.name() });
    }

    /// Counts a failed request, and disables the device at the limit (semantics section 14.1). A request that failed
    /// for lack of room does not count: the device can be read, and works again as soon as there is room.
    pub(crate) fn failed(&self, error: &IoError, limit: u32) {
        self.emit(SetEvent::DeviceError { error: error.clone().into() });
        if error.is_out_of_room() {
            return;
        }
        let verdict = self.errors.borrow_mut().failed(false, limit);
        if verdict == ErrorVerdict::LimitReached && !self.disabled.replace(true) {
            let (device, errors) = (error.device.to_string(), self.error_count());
            self.emit(SetEvent::GivenUp { device, errors });
        }
    }

    fn emit(&self, event: SetEvent) {
        self.events.push(event);
    }

    /// The events of the device since the last call.
    pub(crate) fn take_events(&self) -> Vec<SetEvent> {
        self.events.take()
    }

    /// Waits until there is an event.
    pub(crate) async fn events_arrived(&self) {
        self.events.arrived().await;
    }

    pub(crate) fn error_count(&self) -> u64 {
        self.errors.borrow().errors()
    }
}

#[cfg(test)]
mod tests;
