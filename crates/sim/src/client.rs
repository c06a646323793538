//! A client of a volume: sends requests and reports them to the oracle.
//!
//! Owns the way from a request to the volume that serves it now. The volume behind a client can be exchanged while no
//! request is in flight (detached, stopped, attached again). Every answer is checked at once. A wrong answer is a panic,
//! which ends the run and names the seed. Must not know which requests come.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;

use engine::Volume;
use engine::policy::bypass::BypassReason;
use format::geometry::MAX_BLOCK_SECTORS;
use format::{Sector, Sectors};
use io::sync::{Either, Event, select};
use io::{Handle, Nanos, VolumeError, WriteFlags, ZeroFlags};

use crate::disk::Landmark;
use crate::oracle::{ChangeKind, Oracle};
use crate::stamp::{Content, SECTOR, decode, fill_data};
use crate::world::World;

/// Damaged sectors: the number of the volume and the position in it.
pub type DamagedSectors = Rc<RefCell<BTreeSet<(u8, u64)>>>;

/// The largest block of a set in sectors. A request of a part of a block may need the whole block.
pub const LARGEST_BLOCK: u64 = MAX_BLOCK_SECTORS.0;

/// A request in flight.
#[derive(Clone, Debug)]
pub struct UnderWay {
    /// Time at which it was issued.
    pub since: Nanos,
    /// Its first sector.
    pub start: u64,
    /// Number of its sectors; 0 for a flush.
    pub sectors: u64,
    /// Its kind.
    pub kind: RequestKind,
    /// Whether it ends although the backing device answers nothing, by the rule of the client.
    pub needs_no_device: bool,
    /// The number of parts of requests, before this one, for which the cache had no room.
    pub without_room_before: u64,
}

impl UnderWay {
    /// The sectors of the volume that it touches.
    pub fn range(&self) -> Range<u64> {
        self.start..self.start + self.sectors
    }

    /// Whether it changes the volume in a block that a range touches.
    pub fn changes_near(&self, range: &Range<u64>) -> bool {
        let end = self.start + self.sectors + LARGEST_BLOCK;
        let near = self.start < range.end + LARGEST_BLOCK && range.start < end;
        self.sectors > 0 && self.kind != RequestKind::Read && near
    }
}

/// The number of parts of a volume's requests for which the cache had no room.
pub fn without_room(volume: &Volume) -> u64 {
    volume.with_stats(|s| s.reason(BypassReason::NoBucket).requests)
}

/// The kinds of requests of a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RequestKind {
    /// A read.
    Read,
    /// A write of data.
    Write,
    /// A flush.
    Flush,
    /// Any other request.
    Other,
}

/// Decides whether a request that is being issued to a volume ends although the backing device answers nothing. The last
/// argument says whether a change under way touches the same blocks.
pub type Rule = Box<dyn Fn(&Volume, &UnderWay, bool) -> bool>;

/// A client of one volume.
pub struct Client {
    /// Number of the volume in the run.
    pub number: u8,
    /// Oracle of the volume.
    pub oracle: Rc<RefCell<Oracle>>,
    world: World,
    rt: Handle,
    volume: RefCell<Option<Rc<Volume>>>,
    in_flight: RefCell<BTreeMap<u64, UnderWay>>,
    next: Cell<u64>,
    paused: Cell<bool>,
    changed: Event,
    /// Whether failed requests are permitted.
    tolerant: Cell<bool>,
    /// Sectors of all volumes whose data on the cache device is damaged: requests that need them may fail.
    damaged: DamagedSectors,
    errors: Cell<u64>,
    rule: RefCell<Option<Rule>>,
}

impl Client {
    /// A client without a volume yet.
    pub fn new(world: &World, rt: Handle, number: u8, oracle: Rc<RefCell<Oracle>>) -> Rc<Client> {
        Client::with_damage(world, rt, number, oracle, DamagedSectors::default())
    }

    /// A client whose requests may fail if they need damaged sectors.
    pub fn with_damage(
        world: &World,
        rt: Handle,
        number: u8,
        oracle: Rc<RefCell<Oracle>>,
        damaged: DamagedSectors,
    ) -> Rc<Client> {
        Rc::new(Client {
            damaged,
            number,
            oracle,
            world: world.clone(),
            rt,
            volume: RefCell::new(None),
            in_flight: RefCell::default(),
            next: Cell::new(0),
            paused: Cell::new(false),
            changed: Event::default(),
            tolerant: Cell::new(false),
            errors: Cell::new(0),
            rule: RefCell::new(None),
        })
    }

    /// The volume that serves the client.
    pub fn volume(&self) -> Option<Rc<Volume>> {
        self.volume.borrow().clone()
    }

    /// Sets the volume to which requests go from now on.
    pub fn set_volume(&self, volume: Option<Rc<Volume>>) {
        *self.volume.borrow_mut() = volume;
    }

    /// Sets whether failed requests are permitted from now on.
    pub fn set_tolerant(&self, tolerant: bool) {
        self.tolerant.set(tolerant);
    }

    /// Sets the rule for requests from now on.
    pub fn set_rule(&self, rule: Rule) {
        *self.rule.borrow_mut() = Some(rule);
    }

    /// Tells the oracle that the stop of the volume reported lost data.
    ///
    /// Data that was not durable may be lost, and later flushes promise nothing about it.
    pub fn loss_reported(&self) {
        self.oracle.borrow_mut().loss_reported();
    }

    /// Number of failed requests.
    pub fn errors(&self) -> u64 {
        self.errors.get()
    }

    /// Size of the volume in sectors.
    pub fn size(&self) -> u64 {
        self.oracle.borrow().size()
    }

    /// Holds new requests back and waits for those in flight.
    pub async fn pause(&self) {
        self.changed.wait_until(|| !self.paused.get()).await;
        self.paused.set(true);
        self.changed.wait_until(|| self.in_flight.borrow().is_empty()).await;
    }

    /// Ends [`Client::pause`].
    pub fn resume(&self) {
        self.paused.set(false);
        self.changed.notify_all();
    }

    /// Waits until a read is in flight.
    pub async fn read_begins(&self) {
        self.changed
            .wait_until(|| self.in_flight.borrow().values().any(|r| r.kind == RequestKind::Read))
            .await;
    }

    /// The requests in flight.
    pub fn under_way(&self) -> Vec<UnderWay> {
        self.in_flight.borrow().values().cloned().collect()
    }

    async fn enter(
        self: &Rc<Self>,
        (start, sectors): (u64, u64),
        kind: RequestKind,
    ) -> Option<(Rc<Volume>, InFlight)> {
        self.changed.wait_until(|| !self.paused.get()).await;
        let volume = self.volume()?;
        let id = self.next.get();
        self.next.set(id + 1);
        let mut request = UnderWay {
            since: self.rt.now(),
            start,
            sectors,
            kind,
            needs_no_device: false,
            without_room_before: without_room(&volume),
        };
        if let Some(rule) = &*self.rule.borrow() {
            let beside = self.in_flight.borrow().values().any(|r| r.changes_near(&request.range()));
            request.needs_no_device = rule(&volume, &request, beside);
        }
        self.in_flight.borrow_mut().insert(id, request);
        self.changed.notify_all();
        Some((volume, InFlight(self.clone(), id)))
    }

    fn failed(&self, what: &str, start: u64, sectors: u64, e: &VolumeError) {
        self.errors.set(self.errors.get() + 1);
        self.world.log(|| format!("client {}: {what} {start}+{sectors}: {e}", self.number));
        // A flash-only volume cannot grow beyond the cache.
        let no_space = matches!(e, VolumeError::NoSpace(_)) && self.is_flash_only();
        assert!(
            self.tolerant.get() || no_space || self.needs_damaged(start, sectors),
            "volume {}: {what} of {sectors} sectors at {start} failed: {e}",
            self.number
        );
    }

    /// Whether a block that a request touches has damaged data.
    fn needs_damaged(&self, start: u64, sectors: u64) -> bool {
        let range = start.saturating_sub(LARGEST_BLOCK)..start + sectors + LARGEST_BLOCK;
        let from = (self.number, range.start);
        self.damaged.borrow().range(from..(self.number, range.end)).next().is_some()
    }

    /// Reports a landmark: the answer to a change or a flush.
    fn answered(&self, durable: bool) {
        self.world.landmark(Landmark::Answer);
        if durable {
            self.world.landmark(Landmark::DurableAnswer);
        }
    }

    fn is_flash_only(&self) -> bool {
        self.volume().is_some_and(|v| v.is_flash_only())
    }

    fn log(&self, what: &str, start: u64, sectors: u64, id: u32, stage: &str) {
        self.world.log(|| format!("client {}: {stage} {what} {start}+{sectors} #{id}", self.number));
    }

    /// Writes stamped sectors. Returns whether the write succeeded.
    pub async fn write(self: &Rc<Self>, start: u64, sectors: u64, fua: bool) -> bool {
        let Some((volume, _guard)) = self.enter((start, sectors), RequestKind::Write).await else {
            return false;
        };
        let id = self.oracle.borrow_mut().begin(ChangeKind::Data, start, sectors);
        // The data does not begin at the start of its buffer, like a part of a larger request of a client.
        let skip = (id as usize % 3) * SECTOR;
        let mut buffer = self.rt.pool().take(skip + sectors as usize * SECTOR);
        for (i, s) in buffer.as_mut()[skip..].chunks_exact_mut(SECTOR).enumerate() {
            fill_data(s, self.number, start + i as u64, id);
        }
        self.log(if fua { "durable write" } else { "write" }, start, sectors, id, "begins");
        let flags = WriteFlags { fua, ..WriteFlags::default() };
        let result = volume.write(Sector(start), Sectors(sectors), buffer, skip, flags).await;
        self.log("write", start, sectors, id, "ends");
        self.world.note(u64::from(id) << 1 | u64::from(result.is_ok()));
        self.oracle.borrow_mut().end(id, result.is_ok(), fua);
        self.answered(fua && result.is_ok());
        if let Err(e) = &result {
            self.failed("write", start, sectors, e);
        }
        result.is_ok()
    }

    /// Reads sectors and checks them. Returns the contents; `None` if the read failed.
    pub async fn read(self: &Rc<Self>, start: u64, sectors: u64) -> Option<Vec<Content>> {
        let (volume, _guard) = self.enter((start, sectors), RequestKind::Read).await?;
        let reading = self.oracle.borrow_mut().begin_read(start, sectors);
        let skip = (start as usize % 2) * SECTOR;
        let buffer = self.rt.pool().take(skip + sectors as usize * SECTOR);
        self.log("read", start, sectors, 0, "begins");
        let (buffer, result) = volume.read(Sector(start), Sectors(sectors), buffer, skip).await;
        self.log("read", start, sectors, 0, "ends");
        self.world.note(start << 1 | u64::from(result.is_ok()));
        let bytes = &buffer.as_slice()[skip..];
        match result {
            Ok(()) => {
                if let Err(wrong) = self.oracle.borrow_mut().end_read(&reading, bytes) {
                    panic!("{wrong}");
                }
                Some(bytes.chunks_exact(SECTOR).map(decode).collect())
            }
            Err(e) => {
                self.oracle.borrow_mut().fail_read(reading);
                self.failed("read", start, sectors, &e);
                None
            }
        }
    }

    /// Queries the holes of a volume: the oracle must permit zeros in every reported range of zeros.
    pub async fn check_status(self: &Rc<Self>) {
        let Some((volume, _guard)) = self.enter((0, 0), RequestKind::Other).await else { return };
        let (mut at, size) = (0, self.size());
        while at < size {
            let Ok(runs) = volume.status(Sector(at), Sectors(size - at)).await else { return };
            assert!(!runs.is_empty(), "no status for sector {at} of {size}");
            for run in runs {
                assert!(run.sectors > Sectors::ZERO, "an empty run at sector {at}");
                let zeros = [0; SECTOR];
                for sector in (at..at + run.sectors.0).filter(|_| run.zero) {
                    if let Err(wrong) = self.oracle.borrow().check_sector(sector, &zeros) {
                        panic!("the status says zeros: {wrong}");
                    }
                }
                at += run.sectors.0;
            }
        }
        assert_eq!(at, size, "the status goes beyond the volume");
    }

    /// Flushes the volume. Returns whether the flush succeeded.
    pub async fn flush(self: &Rc<Self>) -> bool {
        let Some((volume, _guard)) = self.enter((0, 0), RequestKind::Flush).await else { return false };
        let flushing = self.oracle.borrow_mut().begin_flush();
        self.log("flush", 0, 0, 0, "begins");
        let result = volume.flush().await;
        self.log("flush", 0, 0, 0, "ends");
        self.world.note(u64::from(result.is_ok()));
        self.oracle.borrow_mut().end_flush(flushing, result.is_ok());
        self.answered(result.is_ok());
        if let Err(e) = &result {
            self.failed("flush", 0, 0, e);
        }
        result.is_ok()
    }

    /// Flushes the volume, and gives that up after some time.
    pub async fn give_up_flush(self: &Rc<Self>, after: Nanos) {
        let Some((volume, _guard)) = self.enter((0, 0), RequestKind::Flush).await else { return };
        let flushing = self.oracle.borrow_mut().begin_flush();
        self.log("flush", 0, 0, 0, "begins");
        let result = match select(std::pin::pin!(volume.flush()), self.rt.sleep(after)).await {
            Either::Left(result) => Some(result),
            Either::Right(()) => None,
        };
        let ok = matches!(result, Some(Ok(())));
        self.log("flush", 0, 0, 0, if result.is_some() { "ends" } else { "is given up" });
        self.world.note(u64::from(ok));
        self.oracle.borrow_mut().end_flush(flushing, ok);
        self.answered(ok);
        if let Some(Err(e)) = &result {
            self.failed("flush", 0, 0, e);
        }
    }

    /// Discards sectors. Returns whether the discard succeeded.
    pub async fn discard(self: &Rc<Self>, start: u64, sectors: u64) -> bool {
        let Some((volume, _guard)) = self.enter((start, sectors), RequestKind::Other).await else {
            return false;
        };
        let id = self.oracle.borrow_mut().begin(ChangeKind::Discard, start, sectors);
        self.log("discard", start, sectors, id, "begins");
        let result = volume.discard(Sector(start), Sectors(sectors)).await;
        self.log("discard", start, sectors, id, "ends");
        self.oracle.borrow_mut().end(id, result.is_ok(), false);
        self.answered(false);
        if let Err(e) = &result {
            self.failed("discard", start, sectors, e);
        }
        result.is_ok()
    }

    /// Writes zeros. Returns whether the request succeeded.
    pub async fn write_zeroes(self: &Rc<Self>, start: u64, sectors: u64, flags: ZeroFlags) -> bool {
        let Some((volume, _guard)) = self.enter((start, sectors), RequestKind::Other).await else {
            return false;
        };
        let id = self.oracle.borrow_mut().begin(ChangeKind::Zero, start, sectors);
        self.log("zeroes", start, sectors, id, "begins");
        let result = volume.write_zeroes(Sector(start), Sectors(sectors), flags).await;
        self.log("zeroes", start, sectors, id, "ends");
        self.oracle.borrow_mut().end(id, result.is_ok(), flags.fua);
        self.answered(flags.fua && result.is_ok());
        if let Err(e) = &result {
            self.failed("write of zeros", start, sectors, e);
        }
        result.is_ok()
    }
}

struct InFlight(Rc<Client>, u64);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.borrow_mut().remove(&self.1);
        self.0.changed.notify_all();
    }
}
