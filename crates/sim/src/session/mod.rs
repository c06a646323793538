//! One boot: the set is opened, clients and an operator work, the set is stopped. The power may fail at any moment.
//!
//! Owns the events between power on and power off; the operator actions are in `operator`, the rules about waits in
//! `liveness`. Must not know what survives a crash: the run decides that.

mod liveness;
mod operator;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use engine::tunables::{InPlaceOfLru, Overwrite};
use engine::{CacheSet, DeviceRefusal, EngineError, Refusal, SetEvent, SetOptions, Volume};
use format::{BackingState, Sectors};
use io::sync::{Event, select};
use io::{CrashLogRef, Handle, JoinHandle, Nanos, Rng, ZeroFlags};

use crate::client::Client;
use crate::crash_log::Memory;
use crate::disk::SimDisk;
use crate::hardware::{Parts, uuid_of};
use crate::plan::{BootPlan, Plan, Request};
use crate::stamp::Content;
use crate::violation::Violation;
use crate::world::World;
use liveness::HungDevice;

/// Number of sectors that are read at once when a volume is read back.
const READ_BACK_SECTORS: u64 = 96;

/// Number of leaves that a start may have in memory beyond the limit, in addition to those with a torn bset.
const FEW_LEAVES: u64 = 4;

/// Interval between checks whether a request to a device has failed.
const FAILURE_CHECK_INTERVAL: Nanos = Nanos::from_ms(5);

/// The longest time for which a client waits until another one reads.
const LONGEST_WAIT_FOR_A_READ: Nanos = Nanos::from_secs(60);

/// Number of the flash-only volume among the UUIDs.
const FLASH: usize = 100;

/// The devices and oracles of a boot.
pub struct Given {
    /// The world.
    pub world: World,
    /// The devices, for the engine.
    pub parts: Parts,
    /// The cache device itself.
    pub cache: Rc<SimDisk>,
    /// The backing devices themselves.
    pub backings: Vec<Rc<SimDisk>>,
    /// Clients of the cached devices, then that of the flash-only volume.
    pub clients: Vec<Rc<Client>>,
    /// The contents of the volumes before the boot, by an independent judge. Empty if the engine may know more.
    pub judged: Vec<Option<Vec<Content>>>,
    /// Whether the flash-only volume was made in an earlier boot.
    pub flash_made: Rc<Cell<bool>>,
    /// The last process that opened the set stopped it: there is nothing to replay.
    pub was_stopped: bool,
    /// The memory that outlived the process before this one.
    pub memory: Option<Rc<Memory>>,
}

/// Counts of what happened in one boot.
#[derive(Clone, Copy, Default, Debug)]
pub struct Counts {
    /// Requests that were issued.
    pub requests: u64,
    /// Detaches that have ended.
    pub detaches: u64,
    /// Writes to the volume of a hung device that may not wait for the device.
    pub free_writes: u64,
    /// Flushes of that volume that may not wait for the device.
    pub free_flushes: u64,
}

/// State that the tasks of one boot share.
pub struct Session {
    /// The plan of this boot.
    pub boot: BootPlan,
    /// Number of requests in flight for each volume.
    depth: u64,
    /// Seed of the engine.
    seed: u64,
    bucket_bytes: u64,
    /// Offset of the data of each backing device, in sectors.
    offsets: Vec<u64>,
    /// For each backing device, the largest block of it and of the set in sectors. `None` if partial stripes are expensive:
    /// a write then looks the index up before it takes a path.
    blocks: Vec<Option<u64>>,
    /// The devices and oracles of the boot.
    pub given: Given,
    rt: Handle,
    set: RefCell<Option<CacheSet>>,
    /// The remaining requests of each volume.
    queues: Vec<RefCell<VecDeque<Request>>>,
    /// Failed flushes of each backing device before this boot.
    failed_flushes: Vec<u64>,
    issued: Cell<u64>,
    issued_more: Event,
    clients_done: Cell<bool>,
    opened: Cell<bool>,
    counts: Cell<Counts>,
    /// Clients of devices that were registered later.
    late_clients: RefCell<Vec<JoinHandle<()>>>,
}

impl Session {
    /// Makes a boot that has not begun.
    pub fn new(plan: &Plan, boot: BootPlan, given: Given) -> Rc<Session> {
        let rt = given.parts.cache.runtime().clone();
        let queues: Vec<RefCell<VecDeque<Request>>> =
            given.clients.iter().map(|_| RefCell::default()).collect();
        for (volume, request) in &boot.requests {
            if let Some(queue) = queues.get(*volume) {
                queue.borrow_mut().push_back(request.clone());
            }
        }
        Rc::new(Session {
            boot,
            depth: plan.depth,
            seed: plan.seed,
            bucket_bytes: Sectors(plan.layout.bucket_sectors).bytes(),
            offsets: plan.layout.backings.iter().map(|b| b.data_offset).collect(),
            blocks: (plan.layout.backings.iter())
                .map(|b| (b.stripe_bytes == 0).then(|| plan.layout.largest_block(b)))
                .collect(),
            failed_flushes: given.backings.iter().map(|b| b.counters().failed_flushes).collect(),
            given,
            rt,
            set: RefCell::new(None),
            queues,
            issued: Cell::new(0),
            issued_more: Event::default(),
            clients_done: Cell::new(false),
            opened: Cell::new(false),
            counts: Cell::default(),
            late_clients: RefCell::default(),
        })
    }

    /// The set; `None` before it is open.
    pub fn set(&self) -> Option<CacheSet> {
        self.set.borrow().clone()
    }

    /// What happened in the boot.
    pub fn counts(&self) -> Counts {
        Counts { requests: self.issued.get(), ..self.counts.get() }
    }

    fn count(&self, change: impl FnOnce(&mut Counts)) {
        let mut counts = self.counts.get();
        change(&mut counts);
        self.counts.set(counts);
    }

    /// Whether the set was opened and all devices were registered.
    pub fn was_opened(&self) -> bool {
        self.opened.get()
    }

    fn tolerant(&self) -> bool {
        self.boot.faults.is_some()
    }

    /// Releases, after a power loss, everything that would keep itself alive.
    pub fn give_up(&self) {
        for c in &self.given.clients {
            c.set_volume(None);
        }
        if let Some(set) = self.set.take() {
            set.abandon();
        }
    }

    fn rng(&self) -> Rng {
        self.given.world.random(Rng::fork)
    }

    /// Runs the whole boot. `Ok(true)`: everything was stopped in order.
    ///
    /// # Errors
    /// If the engine refused an operation that must succeed.
    pub async fn run(self: Rc<Self>) -> Result<bool, Violation> {
        for c in &self.given.clients {
            c.set_tolerant(self.tolerant() && !self.boot.only_damages());
        }
        let opened = if self.boot.alone { self.open_alone().await } else { self.open().await };
        match opened {
            Ok(()) => {}
            Err(e) if self.tolerant() => {
                self.given.world.log(|| format!("opening failed: {e}"));
                return Ok(false);
            }
            Err(e) => return Err(Violation::Opening(Box::new(e))),
        }
        self.opened.set(true);
        self.read_back().await?;
        let hung = HungDevice::of(&self);
        if let Some(hung) = &hung {
            hung.begin();
        }
        let mut tasks = Vec::new();
        for (i, client) in self.given.clients.iter().enumerate() {
            if client.volume().is_some() {
                tasks.extend(self.workers(i).into_iter().map(|t| (i, t)));
            }
        }
        let this = self.clone();
        let operator = self.rt.spawn(async move { this.operate().await });
        if let Some(hung) = hung {
            let (theirs, others) = tasks.into_iter().partition(|(i, _)| *i == hung.volume());
            tasks = theirs;
            hung.outlive(others).await?;
            if !hung.is_released() {
                return Ok(false);
            }
        }
        for (_, t) in tasks {
            t.await;
        }
        self.given.world.log(|| "the clients are done".into());
        self.clients_done.set(true);
        self.issued_more.notify_all();
        operator.await?;
        let late = self.late_clients.take();
        for t in late {
            t.await;
        }
        self.given.world.log(|| "the operator is done".into());
        if let Some(e) = self.set().and_then(|s| s.failure()).filter(|_| !self.tolerant()) {
            return Err(Violation::SetFailed(Box::new(e)));
        }
        if self.boot.drain {
            self.drain().await?;
        }
        self.stop().await
    }

    /// Starts the tasks that carry out the requests of a volume.
    fn workers(self: &Rc<Self>, i: usize) -> Vec<JoinHandle<()>> {
        let one = |_| {
            let this = self.clone();
            self.rt.spawn(async move { this.work(i).await })
        };
        (0..self.depth).map(one).collect()
    }

    async fn open(&self) -> Result<(), EngineError> {
        let o = &self.boot.settings;
        let crash_log = self.given.memory.clone().map(|m| CrashLogRef(m));
        let mut options = SetOptions { seed: self.seed, crash_log, ..SetOptions::default() };
        let t = &mut options.tunables;
        t.btree_cache_limit = o.node_cache_bytes;
        t.journal_delay_ms = o.journal_delay_ms;
        t.writeback_batch_sectors = o.writeback_batch;
        t.overwrite_in_place = match o.overwrite_in_place.as_str() {
            "always" => Overwrite::Always,
            "auto" => Overwrite::Auto,
            _ => Overwrite::Off,
        };
        t.replacement = InPlaceOfLru::named(&o.replacement).unwrap_or_default();
        (t.cutoff_writeback, t.cutoff_writeback_sync) = o.cutoffs;
        if !o.congestion {
            (t.congested_read_threshold_us, t.congested_write_threshold_us) = (0, 0);
        }
        let set = CacheSet::open(self.given.parts.cache.clone(), options).await?;
        self.check_index(&set);
        *self.set.borrow_mut() = Some(set.clone());
        for (i, (disk, client)) in self.given.parts.backings.iter().zip(&self.given.clients).enumerate() {
            if self.boot.absent.contains(&i) {
                continue;
            }
            let volume = set.register(disk.clone()).await?;
            self.tune(&volume).await?;
            client.set_volume(Some(volume));
        }
        if let Some(client) = self.given.clients.get(self.given.parts.backings.len()) {
            let there = set.volumes().into_iter().find(|v| v.is_flash_only());
            let volume = match there {
                Some(v) => v,
                None => {
                    assert!(!self.given.flash_made.get(), "the flash-only volume is gone");
                    set.create_volume(uuid_of(FLASH), Sectors(client.size()), "flash").await?
                }
            };
            self.given.flash_made.set(true);
            client.set_volume(Some(volume));
        }
        Ok(())
    }

    /// Checks that a start has no more of the index in memory than its limit and a few leaves: the last one that was read,
    /// and those with a torn bset.
    fn check_index(&self, set: &CacheSet) {
        let events = set.take_events();
        self.given.world.log(|| format!("opened: {events:?}"));
        let replayed = |e: &SetEvent| if let SetEvent::Replayed { keys, .. } = e { *keys } else { 0 };
        let keys = events.iter().map(replayed).sum::<u64>();
        assert!(
            !self.given.was_stopped || keys == 0,
            "journal: expected no keys to replay after a clean stop, found {keys}"
        );
        let torn = events.iter().filter(|e| matches!(e, SetEvent::TornBset { .. })).count() as u64;
        let most = self.boot.settings.node_cache_bytes + (FEW_LEAVES + torn) * self.bucket_bytes;
        let found = set.status().index_bytes as u64;
        assert!(found <= most, "index: expected at most {most} bytes, found {found}");
    }

    async fn tune(&self, volume: &Volume) -> Result<(), EngineError> {
        let o = &self.boot.settings;
        if let Some(mode) = &o.cache_mode {
            volume.set("cache_mode", mode).await?;
        }
        volume.set("writeback_delay", &o.writeback_delay.to_string()).await?;
        volume.set("writeback_percent", &o.writeback_percent.to_string()).await?;
        volume.set("writeback_running", if o.writeback_running { "1" } else { "0" }).await?;
        volume.set("admission", &o.admission).await?;
        volume.set("writeback_controller", &o.writeback_controller).await?;
        volume.set("writeback_bridge", &o.bridge.writeback_bridge).await?;
        volume.set("writeback_bridge_limit", &o.bridge.writeback_bridge_limit.to_string()).await?;
        volume.set("sequential_cutoff", &o.sequential_cutoff.to_string()).await
    }

    async fn open_alone(&self) -> Result<(), EngineError> {
        for (disk, client) in self.given.parts.backings.iter().zip(&self.given.clients) {
            match Volume::pass_through(disk.clone(), false).await {
                Ok(v) => client.set_volume(Some(v)),
                // The engine must refuse a device with dirty data in the cache.
                Err(EngineError::Refused(refusal)) => match &*refusal {
                    Refusal::Device { why: DeviceRefusal::DirtyInSet { .. }, .. } => {}
                    other => panic!("{other}"),
                },
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    async fn read_back(&self) -> Result<(), Violation> {
        let mut rng = self.rng();
        let percent = self.boot.read_back_percent;
        for (i, client) in self.given.clients.iter().enumerate() {
            let size = client.size();
            let mut at = 0;
            while at < size && client.volume().is_some() {
                let n = READ_BACK_SECTORS.min(size - at);
                if rng.below(100) < percent
                    && let Some(found) = client.read(at, n).await
                    && let Some(judged) = self.given.judged.get(i).and_then(Option::as_ref)
                    && !self.boot.alone
                {
                    let expected = &judged[at as usize..(at + n) as usize];
                    if let Some(k) = found.iter().zip(expected).position(|(f, e)| f != e) {
                        let (sector, expected, found) = (at + k as u64, expected[k], found[k]);
                        return Err(Violation::ReadBack { volume: i, sector, expected, found });
                    }
                }
                at += n;
            }
            if percent == 100 {
                client.check_status().await;
            }
        }
        Ok(())
    }

    /// Carries out requests of a volume until none are left.
    async fn work(&self, i: usize) {
        let client = &self.given.clients[i];
        loop {
            let Some(request) = self.queues[i].borrow_mut().pop_front() else { return };
            self.issued.set(self.issued.get() + 1);
            self.issued_more.notify_all();
            match request {
                Request::Read { start, sectors } => drop(client.read(start, sectors).await),
                Request::Write { start, sectors, fua } => drop(client.write(start, sectors, fua).await),
                Request::Flush => drop(client.flush().await),
                Request::Discard { start, sectors } => drop(client.discard(start, sectors).await),
                Request::Zeroes { start, sectors, fua, may_unmap } => {
                    client.write_zeroes(start, sectors, ZeroFlags { fua, may_unmap }).await;
                }
                Request::Pause { ns } => self.rt.sleep(Nanos(ns)).await,
                Request::FlushGivenUp { ns } => client.give_up_flush(Nanos(ns)).await,
                Request::PauseUntilRead { ns } => {
                    let read = client.read_begins();
                    select(std::pin::pin!(read), self.rt.sleep(LONGEST_WAIT_FOR_A_READ)).await;
                    self.rt.sleep(Nanos(ns)).await;
                }
                Request::PauseUntilFailure { ns } => self.pause_until_failure(i, Nanos(ns)).await,
            }
        }
    }

    /// Waits until a request to the backing device of a volume fails, for at most `limit`.
    async fn pause_until_failure(&self, volume: usize, limit: Nanos) {
        let failed = || self.given.backings.get(volume).map_or(0, |b| b.counters().failed);
        let (before, deadline) = (failed(), self.rt.now().after(limit));
        while failed() == before && self.rt.now() < deadline {
            self.rt.sleep(FAILURE_CHECK_INTERVAL).await;
        }
    }

    /// Drains all volumes, so that their devices are clean.
    async fn drain(&self) -> Result<(), Violation> {
        for (disk, client) in self.given.parts.backings.iter().zip(&self.given.clients) {
            let Some(v) = client.volume() else { continue };
            let device = disk.info().name.clone();
            if let Err(source) = v.drained().await {
                return Err(Violation::NotDrained { device, source: Box::new(source) });
            }
            let sectors = v.dirty_sectors();
            if sectors > Sectors::ZERO {
                return Err(Violation::DirtyAfterDrain { device, sectors });
            }
            if v.state() == Some(BackingState::Dirty) {
                return Err(Violation::StateAfterDrain { device });
            }
        }
        Ok(())
    }

    async fn stop(&self) -> Result<bool, Violation> {
        let mut in_order = true;
        for client in &self.given.clients {
            let stopped = match client.volume() {
                // The set stops its own volumes.
                Some(v) if self.boot.stops_set_alone && v.inode().is_some() => continue,
                Some(v) => v.stop().await,
                None => Ok(()),
            };
            if let Err(e) = stopped {
                client.loss_reported();
                self.given.world.log(|| format!("stop: {e}"));
                if !self.tolerant() {
                    return Err(Violation::Stop(Box::new(e)));
                }
                in_order = false;
            }
        }
        if let Some(set) = self.set() {
            let result = set.stop().await;
            if let Err(e) = result {
                if self.boot.stops_set_alone {
                    self.given.clients.iter().for_each(|c| c.loss_reported());
                }
                self.given.world.log(|| format!("stop: {e}"));
                if !self.tolerant() {
                    return Err(Violation::Stop(Box::new(e)));
                }
                in_order = false;
            }
        }
        // A failing device may have lost data that a stop promises to make durable.
        Ok(in_order && !self.tolerant())
    }
}
