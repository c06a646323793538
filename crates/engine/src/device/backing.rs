//! A backing device: its superblock, its flushes, its errors.
//!
//! Owns what the backing superblock says and the order in which it says it (format section 12.6): dirty before the
//! first dirty write is acknowledged, clean only after the last dirty key is gone, stale before anything is served
//! without the cache. Must not know the index.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use format::{BackingState, BackingSuper, CacheMode, RegistrationNr, Sector, Sectors, Uuid};
use io::sync::{Mutex, Permit};
use io::{Buffer, Disk, IoError, JoinHandle, Purpose};

use super::{FlushGate, Meter, SUPERBLOCK_SECTOR, Tick, Watched, read_backing};
use crate::canary::{Bug, bug};
use crate::error::EngineError;
use crate::events::{Events, SetEvent};
use crate::stats::{BackingErrors, ErrorVerdict};

/// Flushes that may fail before the device is given up.
const LIMIT_OF_FLUSHES: u32 = 64;

pub(crate) struct BackingDevice {
    pub(crate) disk: Disk,
    pub(crate) gate: FlushGate,
    /// What requests for data cost it.
    pub(crate) meter: Rc<Meter>,
    superblock: RefCell<BackingSuper>,
    write_lock: Mutex,
    /// The state that is durable on the device; what `superblock` says may be on its way there.
    durable_state: Cell<BackingState>,
    /// The newest write that a client's flush must cover: writeback is not among them.
    direct_writes: Cell<Tick>,
    /// See [`BackingDevice::is_late`].
    late: Cell<bool>,
    errors: RefCell<BackingErrors>,
    events: Events,
    /// All requests fail: too many errors, or the operator said so.
    pub(crate) disabled: Cell<bool>,
    /// Its data is admitted to the cache by what the device's requests cost.
    by_cost: Cell<bool>,
}

impl BackingDevice {
    /// Opens a device without deciding anything about it.
    pub(crate) async fn open(disk: Disk) -> Result<Rc<BackingDevice>, EngineError> {
        let superblock = read_backing(&disk).await?;
        // As for the cache: what is read from now on must stay, the superblock's state above all.
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
            late: Cell::new(false),
            errors: RefCell::new(BackingErrors::new()),
            events: Events::default(),
            disabled: Cell::new(false),
            by_cost: Cell::new(false),
        }
    }

    /// Sets whether its data is admitted to the cache by what its requests cost.
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

    /// The number of the last registration that the device has seen; none if a kernel attached it, or nothing ever did.
    pub(crate) fn registration(&self) -> Option<RegistrationNr> {
        self.superblock.borrow().registration()
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
    ) -> Watched {
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
    ) -> Watched {
        self.meter.write(&self.disk, (sector, sectors), buffer, offset_bytes, fua)
    }

    /// Starts a read for writeback.
    pub(crate) fn read_for_writeback(
        &self,
        sector: Sector,
        sectors: Sectors,
        buffer: Buffer,
        offset_bytes: usize,
    ) -> Watched {
        let disk = self.disk.with_purpose(Purpose::Writeback);
        self.meter.read(&disk, sector, sectors, buffer, offset_bytes)
    }

    /// Starts a write of dirty data.
    pub(crate) fn write_back(&self, sector: Sector, sectors: Sectors, buffer: Buffer) -> Watched {
        let disk = self.disk.with_purpose(Purpose::Writeback);
        self.meter.write(&disk, (sector, sectors), buffer, 0, false)
    }

    /// A client's write (or discard) went to the device.
    pub(crate) fn wrote_directly(&self) {
        self.direct_writes.set(self.gate.wrote());
    }

    /// Makes every write that clients sent directly to the device durable.
    pub(crate) async fn settle_direct_writes(&self) -> Result<(), IoError> {
        let result = self.gate.ensure(self.direct_writes.get()).await;
        if let Err(e) = &result {
            self.failed(e, LIMIT_OF_FLUSHES);
        }
        result
    }

    /// The newest write that a client sent directly to the device.
    pub(crate) fn direct_tick(&self) -> Tick {
        self.direct_writes.get()
    }

    /// Every write up to `tick` is durable.
    pub(crate) fn is_durable(&self, tick: Tick) -> bool {
        self.gate.is_durable(tick)
    }

    /// A flush is under way for longer than anything that serves other devices waits for.
    pub(crate) fn is_late(&self) -> bool {
        self.late.get()
    }

    /// The device is late until `flush` ends.
    pub(crate) fn late_until(self: &Rc<Self>, flush: JoinHandle<Result<(), IoError>>) {
        if self.late.replace(true) {
            return;
        }
        self.emit(SetEvent::FlushOverdue { device: self.disk.info().name.to_string() });
        let backing = self.clone();
        self.disk.runtime().spawn(async move {
            // Its failure is found by the next flush.
            let _ = flush.await;
            backing.late.set(false);
        });
    }

    /// Changes the superblock and waits until it is durable.
    pub(crate) async fn update(
        self: &Rc<Self>,
        change: impl FnOnce(&mut BackingSuper),
    ) -> Result<(), EngineError> {
        let lock = self.write_lock.lock().await;
        self.update_locked(lock, change).await
    }

    /// The lock is held until the write has ended, also if the caller gives up the wait for it: a later update would
    /// overtake it, and what the superblock says in the end would be older than what was acknowledged.
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
        // Until the write has ended nobody may rely on either state.
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

    /// Waits until the superblock says dirty: no dirty write may be acknowledged before. `allowed` fails if the device
    /// has no cache any more by the time that its turn has come: stale must not become dirty.
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

    /// Makes the superblock say clean if `still_clean` holds once no other update is under way. A writer that comes
    /// later finds the state not dirty and waits for its own update.
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

    /// A request failed: counts it, and disables the device at the limit (semantics section 14.1). A
    /// device without room is not broken: what it has can be read, and it goes on as soon as there is room.
    pub(crate) fn failed(&self, error: &IoError, limit: u32) {
        self.emit(SetEvent::DeviceError { what: error.to_string() });
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

    /// What happened to the device since the last call.
    pub(crate) fn take_events(&self) -> Vec<SetEvent> {
        self.events.take()
    }

    /// Waits until there is something.
    pub(crate) async fn events_arrived(&self) {
        self.events.arrived().await;
    }

    pub(crate) fn error_count(&self) -> u64 {
        self.errors.borrow().errors()
    }
}

#[cfg(test)]
mod tests;
