//! The cache device of a set.
//!
//! Owns the device, its superblock, flushes, errors and crash log, and the state of the set: running, stopping, or
//! disabled. A failure disables the set: metadata cannot be read or written, or data requests fail too often (semantics
//! sections 14.2 and 14.3). The set stays disabled until it is opened again.
//!
//! Invariants: the crash log is invalid from the first error after which the device may have lost data; data of a read
//! that was under way when the set failed is not used ([`ReadEpoch`]).

use std::cell::{Cell, OnceCell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use format::{CacheSuper, Geometry, Sector, Sectors, SetMagic};
use io::{Buffer, Disk, Handle, IoError, Nanos};

use super::{CrashLog, FlushGate, Meter, MeteredIo, ReadEpoch, SUPERBLOCK_SECTOR, Tick};
use crate::canary::{Bug, bug};
use crate::error::{EngineError, Place};
use crate::events::{Events, SetEvent};
use crate::policy::cost::CostModel;
use crate::refusal::Refusal;
use crate::stats::{CacheErrors, ErrorVerdict, SetCounters};

/// The limits at which errors of data requests disable the set (semantics section 14.2).
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct ErrorLimits {
    /// `io_error_limit`: the number of errors that disables the set.
    pub(crate) limit: u32,
    /// `io_error_halflife`: the number of requests after which the count of errors has halved; 0 for never.
    pub(crate) halflife: u32,
}

/// The cache device of a set, and the state of the set.
pub(crate) struct CacheDevice {
    rt: Handle,
    disk: Disk,
    place: Place,
    magic: SetMagic,
    superblock: RefCell<CacheSuper>,
    gate: FlushGate,
    /// The last write that overwrote dirty data in place; such a write inserts no key, so the journal does not flush
    /// it.
    overwritten: Cell<Tick>,
    meter: Rc<Meter>,
    crash_log: CrashLog,
    errors: RefCell<CacheErrors>,
    limits: Cell<ErrorLimits>,
    counters: RefCell<SetCounters>,
    /// Counts wipes and failures; see [`ReadEpoch`].
    read_epochs: Cell<u64>,
    failed: OnceCell<Arc<EngineError>>,
    stopping: Cell<bool>,
    /// Whether the set gets no copies of volumes of other sets any more, because it will stop.
    leaving: Cell<bool>,
    /// Wakes every task of the set that waits, so that it checks the state of the set again.
    wake: OnceCell<Box<dyn Fn()>>,
    events: Events,
}

impl CacheDevice {
    /// Makes the cache device of a set; its superblock was read and checked.
    pub(crate) fn new(disk: Disk, place: Place, superblock: CacheSuper) -> CacheDevice {
        CacheDevice {
            rt: disk.runtime().clone(),
            gate: FlushGate::new(disk.clone()),
            meter: Meter::new(&disk),
            place,
            magic: superblock.set_magic(),
            superblock: RefCell::new(superblock),
            overwritten: Cell::default(),
            crash_log: CrashLog::default(),
            errors: RefCell::new(CacheErrors::new()),
            limits: Cell::default(),
            counters: RefCell::default(),
            read_epochs: Cell::new(0),
            failed: OnceCell::new(),
            stopping: Cell::new(false),
            leaving: Cell::new(false),
            wake: OnceCell::new(),
            events: Events::default(),
            disk,
        }
    }

    /// Makes the set fail when a flush fails, also if no task waits for that flush any more. Called once, when the set is
    /// assembled.
    pub(crate) fn watch_flushes(self: &Rc<Self>) {
        // The gate belongs to the device and must not keep it alive.
        let device = Rc::downgrade(self);
        self.gate.set_on_failure(move |e| {
            if let Some(device) = device.upgrade()
                && !bug(Bug::FlushWithoutWaiterTrusted)
            {
                device.fail(e.clone().into());
            }
        });
    }

    /// Sets the function that wakes every waiting task of the set. It is called once, when the set is assembled.
    pub(crate) fn set_wake(&self, wake: impl Fn() + 'static) {
        assert!(self.wake.set(Box::new(wake)).is_ok(), "a set is assembled once");
    }

    /// The device, for requests that no other method sends.
    pub(crate) fn disk(&self) -> &Disk {
        &self.disk
    }

    /// The names of the device and the set, for errors.
    pub(crate) fn place(&self) -> &Place {
        &self.place
    }

    /// The magic of the set's structures.
    pub(crate) fn magic(&self) -> SetMagic {
        self.magic
    }

    /// The geometry in the superblock.
    pub(crate) fn geometry(&self) -> Geometry {
        *self.superblock.borrow().geometry()
    }

    /// The superblock as it is in memory.
    pub(crate) fn superblock(&self) -> std::cell::Ref<'_, CacheSuper> {
        self.superblock.borrow()
    }

    /// Changes the superblock in memory; [`Self::write_superblock`] makes it durable.
    pub(crate) fn change_superblock(&self, change: impl FnOnce(&mut CacheSuper)) {
        change(&mut self.superblock.borrow_mut());
    }

    /// Counts a write that was answered. A flush that begins from now on makes it durable.
    pub(crate) fn wrote(&self) -> Tick {
        self.gate.wrote()
    }

    /// The newest write that was counted.
    pub(crate) fn latest_write(&self) -> Tick {
        self.gate.latest()
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

    /// Starts a read of cached data.
    #[inline]
    pub(crate) fn read_data(
        &self,
        sector: Sector,
        sectors: Sectors,
        buffer: Buffer,
        offset_bytes: usize,
    ) -> MeteredIo {
        self.meter.read(&self.disk, sector, sectors, buffer, offset_bytes)
    }

    /// Starts a write of cached data.
    #[inline]
    pub(crate) fn write_data(
        &self,
        range: (Sector, Sectors),
        buffer: Buffer,
        offset_bytes: usize,
        fua: bool,
    ) -> MeteredIo {
        self.meter.write(&self.disk, range, buffer, offset_bytes, fua)
    }

    /// The crash log of the set.
    pub(crate) fn crash_log(&self) -> &CrashLog {
        &self.crash_log
    }

    /// The counters of writes to the device and of keys that were written back.
    pub(crate) fn counters(&self) -> std::cell::RefMut<'_, SetCounters> {
        self.counters.borrow_mut()
    }

    /// The number of errors of data requests, after decay.
    pub(crate) fn error_count(&self) -> u64 {
        self.errors.borrow().errors()
    }

    /// Sets the number of errors of data requests to 0.
    pub(crate) fn clear_errors(&self) {
        self.errors.borrow_mut().clear();
    }

    /// Sets the limits at which errors of data requests disable the set.
    pub(crate) fn set_error_limits(&self, limits: ErrorLimits) {
        self.limits.set(limits);
    }

    /// Whether buckets are discarded before they are reused.
    pub(crate) fn discards_buckets(&self) -> bool {
        self.superblock.borrow().discard() && self.disk.info().discard
    }

    /// The present read epoch; see [`ReadEpoch`].
    pub(crate) fn read_epoch(&self) -> ReadEpoch {
        ReadEpoch { number: self.read_epochs.get(), flush_failed: self.gate.has_failed() }
    }

    /// Begins a new read epoch: every read of cached data that is under way will look its key up again.
    pub(crate) fn next_read_epoch(&self) {
        self.read_epochs.set(self.read_epochs.get() + 1);
    }
}

/// The running, stopping or failed state of the set.
impl CacheDevice {
    /// Returns an error if the set is disabled.
    pub(crate) fn check(&self) -> Result<(), EngineError> {
        match self.failed.get() {
            None => Ok(()),
            Some(why) => Err(EngineError::Disabled { set: self.place.set.clone(), why: why.clone() }),
        }
    }

    /// Whether the set is disabled.
    pub(crate) fn is_failed(&self) -> bool {
        self.failed.get().is_some()
    }

    /// The failure of the set, if it has failed.
    pub(crate) fn failure(&self) -> Option<String> {
        self.failed.get().map(ToString::to_string)
    }

    /// Whether the tasks of the set should end, because it is being stopped or has failed.
    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.get() || self.is_failed()
    }

    /// From now on the set gets no copies of volumes of other sets.
    pub(crate) fn begin_leaving(&self) {
        self.leaving.set(true);
    }

    /// Whether the set gets no copies any more.
    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving.get()
    }

    /// Makes the set stop: its tasks should end. The caller wakes them.
    pub(crate) fn stop(&self) {
        self.stopping.set(true);
    }

    /// Adds an event for the operator.
    pub(crate) fn emit(&self, event: SetEvent) {
        self.events.push(event);
    }

    /// The events that were not taken yet.
    pub(crate) fn events(&self) -> &Events {
        &self.events
    }

    /// Makes the set fail, for example because metadata could not be read or written (semantics section 14.3).
    ///
    /// A task that finds its journal ended by a stop of the set is no failure of the set.
    pub(crate) fn fail(&self, e: EngineError) {
        let is_stop = matches!(&e, EngineError::Refused(why) if matches!(**why, Refusal::Stopping));
        if is_stop && self.stopping.get() {
            return;
        }
        if self.is_failed() {
            // The first failure may have been a lack of room, which loses no data. This failure may mean a loss.
            if let EngineError::Io(e) = e {
                self.request_failed(&e);
            }
            return;
        }
        let why = match e {
            EngineError::Disabled { why, .. } => why,
            other => Arc::new(other),
        };
        self.emit(SetEvent::Failed { why: why.clone() });
        if !why.is_out_of_room() {
            self.invalidate_crash_log(|| why.clone());
        }
        if self.failed.set(why).is_err() {
            return;
        }
        // The device may have lost data, so data that is being read from it must not be used.
        self.next_read_epoch();
        if let Some(wake) = self.wake.get() {
            wake();
        }
    }

    /// For how long the device has not answered its oldest request.
    pub(crate) fn unanswered_for(&self) -> Nanos {
        self.disk.in_flight().oldest
    }

    /// Makes the set fail because the device does not answer. Everything that waits for the device gets an error.
    pub(crate) fn give_up(&self) {
        let (device, waited) = (self.place.device.clone(), self.unanswered_for());
        self.fail(Refusal::NotAnswering { device, waited_ms: waited.0 / 1_000_000 }.into());
        self.disk.give_up();
    }

    /// Invalidates the crash log after a failed request: the device may have lost its power, and with it data that was
    /// answered and not flushed. Keys of such data must not be replayed over older data that was flushed.
    fn invalidate_crash_log(&self, why: impl FnOnce() -> Arc<EngineError>) {
        if self.crash_log.invalidate() {
            self.emit(SetEvent::CrashLogInvalid { why: why() });
        }
    }

    /// Handles a failed request: the device may have lost data that was not flushed, so the crash log becomes invalid.
    /// The caller decides whether the set fails.
    pub(crate) fn request_failed(&self, e: &IoError) {
        if !e.is_out_of_room() {
            self.invalidate_crash_log(|| Arc::new(e.clone().into()));
        }
    }

    /// Handles a failed discard. A discard is a hint: a device that refuses it loses no data.
    pub(crate) fn discard_failed(&self, e: &IoError) {
        if !e.is_unsupported() {
            self.request_failed(e);
        }
    }

    /// Records the result of a data request: counts an error, and makes the set fail at the limit (semantics section
    /// 14.2).
    pub(crate) fn observe_data(&self, result: &Result<(), IoError>) {
        let ErrorLimits { limit, halflife } = self.limits.get();
        // A lack of room does not count: the device can be read, and writes bypass it until there is room.
        let failed = result.as_ref().is_err_and(|e| !e.is_out_of_room());
        let verdict = self.errors.borrow_mut().observe(failed, limit, halflife);
        if let Err(e) = result {
            self.emit(SetEvent::DeviceError { error: e.clone().into() });
            self.request_failed(e);
            if verdict == ErrorVerdict::LimitReached {
                self.fail(e.clone().into());
            }
        }
    }

    /// Makes every write to the device up to this tick durable. If the flush fails, the device may have lost any of
    /// these writes, and the set fails.
    pub(crate) async fn flush(&self, tick: Tick) -> Result<(), EngineError> {
        let flushed = self.gate.ensure(tick).await;
        if let Err(e) = &flushed {
            self.fail(e.clone().into());
        }
        Ok(flushed?)
    }

    /// Records that dirty data was, or may have been, overwritten in place: the next flush must cover it.
    pub(crate) fn overwrote(&self) {
        self.overwritten.set(self.gate.wrote());
    }

    /// Makes overwrites in place durable. Usually the flush before a journal entry has covered them already.
    pub(crate) async fn settle_overwrites(&self) -> Result<(), EngineError> {
        self.flush(self.overwritten.get()).await
    }

    /// Writes metadata durably; if the write fails, the set fails.
    pub(crate) async fn write_metadata(&self, sector: Sector, buffer: Buffer) -> Result<(), EngineError> {
        let sectors = Sectors::from_bytes_floor(buffer.len() as u64);
        let written = self.disk.write(sector, buffer, true).await.map_err(EngineError::from);
        if let Err(e) = written {
            // The index in memory is newer than the device now.
            self.fail(e.clone());
            return Err(e);
        }
        self.counters.borrow_mut().count_btree_written(sectors);
        Ok(())
    }

    /// Writes the superblock that is in memory. There is one caller at a time, which holds the lock of the UUID table.
    pub(crate) async fn write_superblock(&self) -> Result<(), EngineError> {
        let (bytes, before, after) = {
            let sb = &mut *self.superblock.borrow_mut();
            let before = sb.seq();
            sb.prepare_write(self.rt.wall_seconds());
            (sb.encode(), before, sb.seq())
        };
        self.crash_log.tie([before, after]);
        self.write_metadata(SUPERBLOCK_SECTOR, self.rt.pool().copy_of(&bytes)).await?;
        self.crash_log.tie([after, after]);
        Ok(())
    }
}
