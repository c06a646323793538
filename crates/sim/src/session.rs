//! One boot: the set is opened, clients and an operator work, the set is stopped. The power may fail at any moment.
//!
//! Owns what happens between power on and power off. Must not know what survives; that is the run's business.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use engine::{CacheSet, EngineError, SetOptions, Volume};
use format::{BackingState, Sectors};
use io::{Handle, Nanos, Rng, ZeroFlags};

use crate::client::Client;
use crate::options::{Act, Options};
use crate::rig::{Parts, uuid_of};
use crate::stamp::Content;
use crate::world::World;

/// Sectors read at once when a volume is read back.
const READ_BACK: u64 = 96;

/// Number of the flash-only volume among the UUIDs.
const FLASH: usize = 100;

/// What one boot is to do.
pub struct Plan {
    /// The backing devices are served without the cache, where that loses nothing.
    pub alone: bool,
    /// Devices fail requests.
    pub errors: bool,
    /// Requests to be issued.
    pub requests: u64,
    /// Everything is written back before the end, and must be within bounds.
    pub drain: bool,
    /// The volumes are read as a whole at the start.
    pub read_all: bool,
}

/// Everything that the tasks of one boot share.
pub struct Session {
    /// The options of the run.
    pub options: Rc<Options>,
    /// The plan.
    pub plan: Plan,
    /// The world.
    pub world: World,
    /// The devices.
    pub parts: Parts,
    /// Clients of the cached devices, then that of the flash-only volume.
    pub clients: Vec<Rc<Client>>,
    /// What the contents are, by an independent judge, before anything runs.
    pub judged: Vec<Option<Vec<Content>>>,
    /// The flash-only volume was made in an earlier boot.
    pub flash_made: Rc<Cell<bool>>,
    rt: Handle,
    set: RefCell<Option<CacheSet>>,
    left: Cell<u64>,
    issued: Cell<u64>,
    detaches: Cell<u64>,
}

impl Session {
    /// A boot that has not begun.
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        options: Rc<Options>,
        plan: Plan,
        world: World,
        parts: Parts,
        clients: Vec<Rc<Client>>,
        judged: Vec<Option<Vec<Content>>>,
        flash_made: Rc<Cell<bool>>,
    ) -> Rc<Session> {
        let rt = parts.cache.runtime().clone();
        let left = Cell::new(plan.requests);
        Rc::new(Session {
            options,
            plan,
            world,
            parts,
            clients,
            judged,
            flash_made,
            rt,
            set: RefCell::new(None),
            left,
            issued: Cell::new(0),
            detaches: Cell::new(0),
        })
    }

    /// The set, once it is open.
    pub fn set(&self) -> Option<CacheSet> {
        self.set.borrow().clone()
    }

    /// Requests that were issued, and detaches that ended.
    pub fn counts(&self) -> (u64, u64) {
        (self.issued.get(), self.detaches.get())
    }

    /// After a power cut: lets go of everything that would keep itself alive.
    pub fn give_up(&self) {
        for c in &self.clients {
            c.set_volume(None);
        }
        if let Some(set) = self.set.take() {
            set.abandon();
        }
    }

    fn rng(&self) -> Rng {
        self.world.random(Rng::fork)
    }

    /// The whole boot. `Ok(true)`: everything was stopped in order.
    ///
    /// # Errors
    /// If the engine refused what it should have done.
    pub async fn run(self: Rc<Self>) -> Result<bool, String> {
        for c in &self.clients {
            c.set_tolerant(self.plan.errors);
        }
        let opened = if self.plan.alone { self.open_alone().await } else { self.open().await };
        match opened {
            Ok(()) => {}
            Err(e) if self.plan.errors => {
                self.world.log(|| format!("opening failed: {e}"));
                return Ok(false);
            }
            Err(e) => return Err(format!("opening failed: {e}")),
        }
        self.read_back().await?;
        let mut tasks = Vec::new();
        for (i, client) in self.clients.iter().enumerate() {
            for _ in 0..self.options.depth {
                if client.volume().is_some() {
                    let (this, client, rng) = (self.clone(), client.clone(), self.rng());
                    tasks.push(self.rt.spawn(async move { this.work(i, client, rng).await }));
                }
            }
        }
        let (this, rng) = (self.clone(), self.rng());
        let operator = self.rt.spawn(async move { this.operate(rng).await });
        for t in tasks {
            t.await;
        }
        self.world.log(|| "the clients are done".into());
        operator.await?;
        self.world.log(|| "the operator is done".into());
        if let Some(e) = self.set().and_then(|s| s.failure()).filter(|_| !self.plan.errors) {
            return Err(format!("the set has failed: {e}"));
        }
        if self.plan.drain {
            self.drain().await?;
        }
        self.stop().await
    }

    async fn open(&self) -> Result<(), EngineError> {
        let o = &self.options;
        let mut options = SetOptions { seed: o.seed, ..SetOptions::default() };
        let t = &mut options.tunables;
        t.btree_cache_limit = o.node_cache_bytes;
        t.journal_delay_ms = o.journal_delay_ms;
        t.writeback_batch_sectors = o.writeback_batch;
        (t.cutoff_writeback, t.cutoff_writeback_sync) = o.cutoffs;
        if !o.congestion {
            (t.congested_read_threshold_us, t.congested_write_threshold_us) = (0, 0);
        }
        let set = CacheSet::open(self.parts.cache.clone(), options).await?;
        *self.set.borrow_mut() = Some(set.clone());
        for (disk, client) in self.parts.backings.iter().zip(&self.clients) {
            let volume = set.register(disk.clone()).await?;
            self.tune(&volume).await?;
            client.set_volume(Some(volume));
        }
        if let Some(client) = self.clients.get(self.parts.backings.len()) {
            let there = set.volumes().into_iter().find(|v| v.is_flash_only());
            let volume = match there {
                Some(v) => v,
                None => {
                    assert!(!self.flash_made.get(), "the flash-only volume is gone");
                    set.create_volume(uuid_of(FLASH), Sectors(client.size()), "flash").await?
                }
            };
            self.flash_made.set(true);
            client.set_volume(Some(volume));
        }
        Ok(())
    }

    async fn tune(&self, volume: &Volume) -> Result<(), EngineError> {
        let o = &self.options;
        volume.set("writeback_delay", &o.writeback_delay.to_string()).await?;
        volume.set("writeback_percent", &o.writeback_percent.to_string()).await?;
        volume.set("writeback_running", if o.writeback_running { "1" } else { "0" }).await?;
        volume.set("sequential_cutoff", &o.sequential_cutoff.to_string()).await
    }

    async fn open_alone(&self) -> Result<(), EngineError> {
        for (disk, client) in self.parts.backings.iter().zip(&self.clients) {
            match Volume::pass_through(disk.clone(), false).await {
                Ok(v) => client.set_volume(Some(v)),
                Err(EngineError::Invalid(why)) => {
                    // With dirty data in the cache it must refuse.
                    assert!(why.contains("dirty data"), "{why}");
                }
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    async fn read_back(&self) -> Result<(), String> {
        let mut rng = self.rng();
        let percent = if self.plan.read_all { 100 } else { self.options.read_back_percent };
        for (i, client) in self.clients.iter().enumerate() {
            let size = client.size();
            let mut at = 0;
            while at < size && client.volume().is_some() {
                let n = READ_BACK.min(size - at);
                if rng.below(100) < percent
                    && let Some(found) = client.read(at, n).await
                    && let Some(judged) = self.judged.get(i).and_then(Option::as_ref)
                    && !self.plan.alone
                {
                    let expected = &judged[at as usize..(at + n) as usize];
                    if let Some(k) = found.iter().zip(expected).position(|(f, e)| f != e) {
                        return Err(format!(
                            "volume {i} sector {}: extraction before the start found {:?}, the engine reads {:?}",
                            at + k as u64,
                            expected[k],
                            found[k]
                        ));
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

    fn next_request(&self) -> bool {
        let left = self.left.get();
        self.left.set(left.saturating_sub(1));
        if left > 0 {
            self.issued.set(self.issued.get() + 1);
        }
        left > 0
    }

    /// A client that works until the requests are used up.
    async fn work(&self, _number: usize, client: Rc<Client>, mut rng: Rng) {
        let o = &self.options;
        let w = &o.weights;
        let total = w.read + w.write + w.flush + w.discard + w.zeroes + w.pause;
        let mut last_end = 0;
        while self.next_request() {
            let (start, sectors) = self.range(&mut rng, client.size(), last_end);
            let mut n = rng.below(total);
            let mut is = |weight: u64| {
                let hit = n < weight;
                n = n.wrapping_sub(weight);
                hit
            };
            if is(w.read) {
                client.read(start, sectors).await;
                last_end = start + sectors;
            } else if is(w.write) {
                client.write(start, sectors, rng.below(100) < o.fua_percent).await;
                last_end = start + sectors;
            } else if is(w.flush) {
                client.flush().await;
            } else if is(w.discard) {
                let (start, sectors) = self.larger(&mut rng, client.size(), start, sectors);
                client.discard(start, sectors).await;
            } else if is(w.zeroes) {
                let (start, sectors) = self.larger(&mut rng, client.size(), start, sectors);
                let flags = ZeroFlags { fua: rng.below(100) < o.fua_percent, may_unmap: rng.chance(1, 2) };
                client.write_zeroes(start, sectors, flags).await;
            } else {
                self.rt.sleep(Nanos(rng.below(o.max_pause.0 + 1))).await;
            }
        }
    }

    /// Where a request goes.
    fn range(&self, rng: &mut Rng, size: u64, last_end: u64) -> (u64, u64) {
        let o = &self.options;
        let align = o.align_sectors.max(1);
        let most = o.max_sectors.min(size).max(align);
        // Small ones more often than large ones.
        let log = rng.below(u64::from(most.ilog2()) + 1);
        let sectors = (1 + rng.below(1 << log) + rng.below(1 << log)).min(most).next_multiple_of(align);
        let space = if rng.below(100) < o.hot_percent { (size / 8).max(align) } else { size };
        let mut start = rng.below(space) / align * align;
        if rng.below(100) < o.sequential_percent && last_end < size {
            start = last_end / align * align;
        }
        (start, sectors.min(size - start))
    }

    /// Discards and zeros are often much larger than writes.
    fn larger(&self, rng: &mut Rng, size: u64, start: u64, sectors: u64) -> (u64, u64) {
        let factor = [1, 1, 8, 64][rng.below(4) as usize];
        (start, (sectors * factor).min(size - start))
    }

    async fn operate(self: &Rc<Self>, mut rng: Rng) -> Result<(), String> {
        let o = &self.options;
        if o.acts.is_empty() || o.acts_per_hundred == 0 || self.plan.alone {
            return Ok(());
        }
        let mut next = self.left.get();
        while self.left.get() > 0 {
            if self.left.get() > next {
                self.rt.sleep(Nanos(1 + rng.below(2_000_000))).await;
                continue;
            }
            next = self.left.get().saturating_sub(100 / o.acts_per_hundred);
            let act = o.acts[rng.below(o.acts.len() as u64) as usize];
            self.world.log(|| format!("operator: {act:?}"));
            let result = self.act(act, &mut rng).await;
            self.world.log(|| format!("operator: {act:?} ends"));
            if let Err(e) = result {
                if !self.plan.errors {
                    return Err(format!("{act:?}: {e}"));
                }
                self.world.log(|| format!("operator: {act:?}: {e}"));
            }
        }
        Ok(())
    }

    async fn act(self: &Rc<Self>, act: Act, rng: &mut Rng) -> Result<(), EngineError> {
        let Some(set) = self.set() else { return Ok(()) };
        let cached = &self.clients[..self.parts.backings.len()];
        let i = rng.below(cached.len() as u64) as usize;
        let client = &cached[i];
        let Some(volume) = client.volume() else { return Ok(()) };
        let mut any = |of: &[&'static str]| of[rng.below(of.len() as u64) as usize];
        match act {
            Act::Mode => {
                let mode = any(&["writeback", "writeback", "writethrough", "writearound", "none"]);
                volume.set("cache_mode", mode).await
            }
            Act::Writeback => {
                let (name, values): (_, &[_]) = match any(&["percent", "delay", "running", "rate"]) {
                    "percent" => ("writeback_percent", &["0", "10", "40"]),
                    "delay" => ("writeback_delay", &["0", "1", "30"]),
                    "running" => ("writeback_running", &["0", "1", "1"]),
                    _ => ("writeback_rate", &["1", "1000", "1000000"]),
                };
                volume.set(name, any(values)).await
            }
            Act::Sequential => volume.set("sequential_cutoff", any(&["0", "4096", "65536", "4194304"])).await,
            Act::Gc => set.gc().await,
            Act::CopyGc => {
                set.set("copy_gc_enabled", any(&["0", "1", "1"])).await?;
                set.gc().await
            }
            Act::GcAlwaysRewrite => {
                set.set("gc_always_rewrite", "1").await?;
                let result = set.gc().await;
                set.set("gc_always_rewrite", "0").await?;
                result
            }
            Act::Cutoff => {
                set.set("cutoff_writeback_sync", any(&["5", "70", "90"])).await?;
                set.set("cutoff_writeback", any(&["1", "40", "70"])).await
            }
            Act::JournalDelay => set.set("journal_delay_ms", any(&["0", "10", "100", "5000"])).await,
            Act::Label => volume.set("label", any(&["", "a", "some other name"])).await,
            Act::Detach => self.detach(&set, i, volume, rng).await,
            Act::Recreate => self.recreate(&set).await,
        }
    }

    /// Detaches a device under load; some time later it is attached again.
    async fn detach(
        &self,
        set: &CacheSet,
        i: usize,
        volume: Rc<Volume>,
        rng: &mut Rng,
    ) -> Result<(), EngineError> {
        let client = &self.clients[i];
        set.detach(&volume).await?;
        self.detaches.set(self.detaches.get() + 1);
        self.rt.sleep(Nanos(rng.below(3_000_000_000))).await;
        client.pause().await;
        volume.stop().await;
        let volume = set.register(self.parts.backings[i].clone()).await;
        if let Ok(v) = &volume {
            client.set_volume(Some(v.clone()));
        }
        client.resume();
        self.tune(&*volume?).await
    }

    /// Deletes the flash-only volume and makes a new one; its contents are zeros then.
    async fn recreate(&self, set: &CacheSet) -> Result<(), EngineError> {
        let Some(client) = self.clients.get(self.parts.backings.len()) else { return Ok(()) };
        let Some(volume) = client.volume() else { return Ok(()) };
        let Some(inode) = volume.inode() else { return Ok(()) };
        client.pause().await;
        // From the deletion on anything may be there, until the new volume is.
        let size = client.size();
        let id = client.oracle.borrow_mut().begin(crate::oracle::What::Zero, 0, size);
        self.flash_made.set(false);
        client.set_volume(None);
        let made = async {
            set.delete_volume(inode).await?;
            set.create_volume(uuid_of(FLASH), Sectors(size), "flash").await
        };
        let made = made.await;
        client.oracle.borrow_mut().end(id, made.is_ok(), made.is_ok());
        if let Ok(volume) = &made {
            self.flash_made.set(true);
            client.set_volume(Some(volume.clone()));
        }
        client.resume();
        made.map(drop)
    }

    /// Everything is written back, and the devices are clean.
    async fn drain(&self) -> Result<(), String> {
        for (disk, client) in self.parts.backings.iter().zip(&self.clients) {
            let Some(v) = client.volume() else { continue };
            v.drained().await.map_err(|e| format!("{}: not drained: {e}", disk.info().name))?;
            if v.dirty_sectors() > Sectors::ZERO {
                return Err(format!(
                    "{}: {} dirty sectors after draining",
                    disk.info().name,
                    v.dirty_sectors()
                ));
            }
            if v.state() == Some(BackingState::Dirty) {
                return Err(format!("{}: the state is dirty after draining", disk.info().name));
            }
        }
        Ok(())
    }

    async fn stop(&self) -> Result<bool, String> {
        let mut in_order = true;
        for client in &self.clients {
            if let Some(v) = client.volume() {
                v.stop().await;
            }
        }
        if let Some(set) = self.set() {
            let result = set.stop().await;
            if let Err(e) = result {
                self.world.log(|| format!("stop: {e}"));
                if !self.plan.errors {
                    return Err(format!("stop: {e}"));
                }
                in_order = false;
            }
        }
        // A device that fails may have kept from the medium what a stop promises.
        Ok(in_order && !self.plan.errors)
    }
}
