//! The cache device of a set.
//!
//! Owns the device, its superblock, its flushes, its errors and its crash log, and the state of the set that depends on it:
//! running, stopping, or failed. The set fails when metadata cannot be read or written, or when data requests fail too often
//! (semantics sections 14.2 and 14.3). A failed set never runs again: every later request of it fails.
//!
//! Invariants: the crash log is invalid from the first error that may mean a loss of what the device held; a read of data
//! that was under way when the set failed is not believed ([`Turn`]).

use std::cell::{Cell, OnceCell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use format::{CacheSuper, Geometry, Sector, Sectors, SetMagic};
use io::{Buffer, Disk, Handle, IoError};

use super::{CrashLog, FlushGate, Meter, SUPERBLOCK_SECTOR, Tick, Turn, Watched};
use crate::error::{EngineError, Place};
use crate::events::{Events, SetEvent};
use crate::stats::{CacheErrors, ErrorVerdict, SetCounters};

/// When errors of data requests disable the set (semantics section 14.2).
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct ErrorLimits {
    /// `io_error_limit`: errors that are too many.
    pub(crate) limit: u32,
    /// `io_error_halflife`: requests after which the count of errors has halved; 0 for never.
    pub(crate) halflife: u32,
}

/// See the module head.
pub(crate) struct CacheDevice {
    rt: Handle,
    disk: Disk,
    place: Place,
    magic: SetMagic,
    superblock: RefCell<CacheSuper>,
    gate: FlushGate,
    /// The last write over dirty data in its place: no key says that it has to be flushed.
    overwritten: Cell<Tick>,
    meter: Rc<Meter>,
    crash_log: CrashLog,
    errors: RefCell<CacheErrors>,
    limits: Cell<ErrorLimits>,
    counters: RefCell<SetCounters>,
    /// Counts moments; see [`Turn`].
    turns: Cell<u64>,
    failed: RefCell<Option<Arc<EngineError>>>,
    stopping: Cell<bool>,
    /// Wakes every wait of the set, so that it looks at the state of the device again.
    wake: OnceCell<Box<dyn Fn()>>,
    events: Events,
}

impl CacheDevice {
    /// A device whose superblock was read and is valid.
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
            turns: Cell::new(0),
            failed: RefCell::default(),
            stopping: Cell::new(false),
            wake: OnceCell::new(),
            events: Events::default(),
            disk,
        }
    }

    /// Sets what wakes every wait of the set. Called once, when the set is assembled.
    pub(crate) fn set_wake(&self, wake: impl Fn() + 'static) {
        assert!(self.wake.set(Box::new(wake)).is_ok(), "a set is assembled once");
    }

    /// The device itself, for requests that no other method sends.
    pub(crate) fn disk(&self) -> &Disk {
        &self.disk
    }

    /// Names the device and the set in errors.
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

    /// Its flushes.
    pub(crate) fn gate(&self) -> &FlushGate {
        &self.gate
    }

    /// What requests for data cost it.
    pub(crate) fn meter(&self) -> &Rc<Meter> {
        &self.meter
    }

    /// Memory that outlives the process.
    pub(crate) fn crash_log(&self) -> &CrashLog {
        &self.crash_log
    }

    /// Counts of what was written to the device and of what became of its keys.
    pub(crate) fn counters(&self) -> std::cell::RefMut<'_, SetCounters> {
        self.counters.borrow_mut()
    }

    /// Errors of data requests, after decay.
    pub(crate) fn error_count(&self) -> u64 {
        self.errors.borrow().errors()
    }

    /// Forgets errors of data requests.
    pub(crate) fn clear_errors(&self) {
        self.errors.borrow_mut().clear();
    }

    /// Sets when errors of data requests disable the set.
    pub(crate) fn set_error_limits(&self, limits: ErrorLimits) {
        self.limits.set(limits);
    }

    /// Buckets are discarded before they are used again.
    pub(crate) fn discards_buckets(&self) -> bool {
        self.superblock.borrow().discard() && self.disk.info().discard
    }

    /// The moment; see [`Turn`].
    pub(crate) fn turn(&self) -> Turn {
        Turn { number: self.turns.get(), flush_failed: self.gate.has_failed() }
    }

    /// Makes every read of cached data that is under way look its key up again.
    pub(crate) fn next_turn(&self) {
        self.turns.set(self.turns.get() + 1);
    }
}

/// The state of the set.
impl CacheDevice {
    /// Fails if the set has been disabled.
    pub(crate) fn check(&self) -> Result<(), EngineError> {
        match &*self.failed.borrow() {
            None => Ok(()),
            Some(why) => Err(EngineError::Disabled { set: self.place.set.clone(), why: why.clone() }),
        }
    }

    /// Whether the set has been disabled.
    pub(crate) fn is_failed(&self) -> bool {
        self.failed.borrow().is_some()
    }

    /// Why the set has been disabled.
    pub(crate) fn failure(&self) -> Option<String> {
        self.failed.borrow().as_ref().map(ToString::to_string)
    }

    /// The set's tasks should end.
    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.get() || self.is_failed()
    }

    /// The set's tasks should end: it is being stopped. The caller wakes them.
    pub(crate) fn stop(&self) {
        self.stopping.set(true);
    }

    /// Tells the operator.
    pub(crate) fn emit(&self, event: SetEvent) {
        self.events.push(event);
    }

    /// What the operator has not been told yet.
    pub(crate) fn events(&self) -> &Events {
        &self.events
    }

    /// Metadata could not be read or written: the set is disabled at once (semantics section 14.3).
    pub(crate) fn fail(&self, e: EngineError) {
        if self.is_failed() {
            // What failed first may have been no sign of a loss: a device without room has lost nothing.
            if let EngineError::Io(e) = e {
                self.request_failed(&e);
            }
            return;
        }
        let why = match e {
            EngineError::Disabled { why, .. } => why,
            other => Arc::new(other),
        };
        self.emit(SetEvent::Failed { why: why.to_string() });
        if !why.is_out_of_room() {
            self.invalidate_crash_log(&why.to_string());
        }
        *self.failed.borrow_mut() = Some(why);
        // The device may have lost what it held: what is being read from it is not believed.
        self.next_turn();
        if let Some(wake) = self.wake.get() {
            wake();
        }
    }

    /// The device failed a request: it may have lost its power, and with it data that was answered and not flushed. Keys of
    /// such data must not be replayed over older data that was flushed.
    fn invalidate_crash_log(&self, why: &str) {
        if self.crash_log.invalidate() {
            self.emit(SetEvent::CrashLogInvalid { why: why.to_owned() });
        }
    }

    /// A request to the device failed. The device may have lost what was not flushed, so the crash log is not believed
    /// any more. Whether the set is disabled is the caller's decision.
    pub(crate) fn request_failed(&self, e: &IoError) {
        if !e.is_out_of_room() {
            self.invalidate_crash_log(&e.to_string());
        }
    }

    /// A data request has ended: counts its error, and disables the set at the limit (semantics section 14.2).
    pub(crate) fn observe_data(&self, result: &Result<(), IoError>) {
        let ErrorLimits { limit, halflife } = self.limits.get();
        // A device without room is not broken: what it has can be read, and writes go past it meanwhile.
        let failed = result.as_ref().is_err_and(|e| !e.is_out_of_room());
        let verdict = self.errors.borrow_mut().observe(failed, limit, halflife);
        if let Err(e) = result {
            self.emit(SetEvent::DeviceError { what: e.to_string() });
            self.request_failed(e);
            if verdict == ErrorVerdict::LimitReached {
                self.fail(e.clone().into());
            }
        }
    }

    /// Makes everything durable that the device was given up to this tick. If that fails, the device may have lost any of
    /// it, and the set is disabled.
    pub(crate) async fn flush(&self, tick: Tick) -> Result<(), EngineError> {
        let flushed = self.gate.ensure(tick).await;
        if let Err(e) = &flushed {
            self.fail(e.clone().into());
        }
        Ok(flushed?)
    }

    /// Dirty data was overwritten in its place, or may have been: the next flush covers it.
    pub(crate) fn overwrote(&self) {
        self.overwritten.set(self.gate.wrote());
    }

    /// Makes overwrites in place durable. Usually a flush of the journal has covered them already.
    pub(crate) async fn settle_overwrites(&self) -> Result<(), EngineError> {
        self.flush(self.overwritten.get()).await
    }

    /// Starts a read of cached data.
    pub(crate) fn read_data(
        &self,
        sector: Sector,
        sectors: Sectors,
        buffer: Buffer,
        offset_bytes: usize,
    ) -> Watched {
        self.meter.read(&self.disk, sector, sectors, buffer, offset_bytes)
    }

    /// Starts a write of data to be cached.
    pub(crate) fn write_data(
        &self,
        sector: Sector,
        sectors: Sectors,
        buffer: Buffer,
        offset_bytes: usize,
    ) -> Watched {
        self.meter.write(&self.disk, (sector, sectors), buffer, offset_bytes, false)
    }

    /// Writes metadata durably; the set fails if that fails.
    pub(crate) async fn write_metadata(&self, sector: Sector, buffer: Buffer) -> Result<(), EngineError> {
        let sectors = Sectors::from_bytes_floor(buffer.len() as u64);
        let written = self.disk.write(sector, buffer, true).await.map_err(EngineError::from);
        if let Err(e) = written {
            // The index in memory is ahead of the device now.
            self.fail(e.clone());
            return Err(e);
        }
        self.counters.borrow_mut().count_btree_written(sectors);
        Ok(())
    }

    /// Writes the superblock as it is in memory. One caller at a time: the set holds the lock of the UUID table.
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
