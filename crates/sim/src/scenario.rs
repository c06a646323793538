//! Scenarios: a test scripts the events of each boot, and the moments at which the power fails.
//!
//! Owns the sequence of boots, with the oracle and the judges between them. Two runs of a scenario are equal.
//! [`crate::crash`] cuts the power at every moment of a scenario. Must not know plans.

use std::cell::RefCell;
use std::rc::Rc;

use engine::{CacheSet, SetOptions, Volume};
use format::{Sector, Sectors};
use io::{Handle, JoinHandle, Nanos};

use crate::client::Client;
use crate::disk::{Retained, SimDisk};
use crate::hardware::{Hardware, Layout, Parts, uuid_of};
use crate::image::Image;
use crate::judge;
use crate::oracle::Oracle;
use crate::plan::Cut;
use crate::stamp::{Content, SECTOR, decode};
use crate::violation::Violation;
use crate::world::{Machine, Order, Outcome, World};

/// Limit of the virtual time of one boot of a scenario.
const LIMIT: Nanos = Nanos::from_secs(100_000);

/// One boot of a scenario, as its tasks see it.
#[derive(Clone)]
pub struct Boot {
    /// A handle to start tasks.
    pub rt: Handle,
    /// The world.
    pub world: World,
    /// The devices with which the set is opened.
    pub parts: Parts,
    /// The cache device.
    pub cache: Rc<SimDisk>,
    /// The backing devices.
    pub backings: Vec<Rc<SimDisk>>,
    /// A client of each cached device, then one of the flash-only volume, if there is one.
    pub clients: Vec<Rc<Client>>,
    /// The second cache device.
    pub second: Option<Rc<SimDisk>>,
    set: Rc<RefCell<Option<CacheSet>>>,
    second_set: Rc<RefCell<Option<CacheSet>>>,
}

impl Boot {
    /// The open set.
    ///
    /// # Panics
    /// If the set was not opened.
    pub fn set(&self) -> CacheSet {
        self.set.borrow().clone().expect("the set is open")
    }

    /// The volume of a client.
    ///
    /// # Panics
    /// If the client has none.
    pub fn volume(&self, i: usize) -> Rc<Volume> {
        self.clients[i].volume().expect("the volume is there")
    }

    /// Opens the set with default settings and registers all devices.
    ///
    /// # Panics
    /// If the engine refuses.
    pub async fn open(&self) {
        self.open_with(SetOptions::default()).await;
    }

    /// Opens the set with these options and registers all devices.
    ///
    /// # Panics
    /// If the engine refuses.
    pub async fn open_with(&self, options: SetOptions) {
        let (set, volumes) = self.parts.open(options).await.expect("the set opens");
        for (c, v) in self.clients.iter().zip(volumes) {
            c.set_volume(Some(v));
        }
        *self.set.borrow_mut() = Some(set.clone());
        if let Some(c) = self.clients.get(self.backings.len()) {
            let there = set.volumes().into_iter().find(|v| v.is_flash_only());
            let flash = match there {
                Some(v) => v,
                None => {
                    let size = Sectors(c.size());
                    set.create_volume(uuid_of(100), size, "flash").await.expect("the volume is made")
                }
            };
            c.set_volume(Some(flash));
        }
    }

    pub(crate) fn set_sets(&self, first: Option<CacheSet>, second: Option<CacheSet>) {
        *self.set.borrow_mut() = first;
        *self.second_set.borrow_mut() = second;
    }

    pub(crate) fn both_sets(&self) -> (CacheSet, CacheSet) {
        (self.set(), self.second_set.borrow().clone().expect("the second set is open"))
    }

    /// Sets a tunable of a volume.
    ///
    /// # Panics
    /// If the engine refuses.
    pub async fn tune(&self, i: usize, name: &str, value: &str) {
        self.volume(i).set(name, value).await.expect("the tunable is set");
    }

    /// Sets a volume so that streams do not bypass the cache and dirty data stays in it.
    pub async fn stay_dirty(&self, i: usize) {
        self.tune(i, "sequential_cutoff", "0").await;
        self.tune(i, "writeback_running", "0").await;
    }

    /// The place on the cache device that has data of a write to this sector of the first volume.
    ///
    /// # Panics
    /// If no place has.
    pub fn place_of(&self, sector: u64) -> Sector {
        let image = self.cache.image();
        let has_it = |at: &u64| {
            let found = decode(&image.read_vec(Sector(*at), Sectors(1)));
            matches!(found, Content::Data { volume: 0, sector: s, write } if s == sector && write > 0)
        };
        (0..image.size().0).find(has_it).map(Sector).expect("the cache device has the data")
    }

    /// Waits until `done`, for at most 100 s of virtual time.
    ///
    /// # Panics
    /// If it is not done by then.
    pub async fn wait_until(&self, done: impl Fn() -> bool) {
        for _ in 0..100_000 {
            if done() {
                return;
            }
            self.sleep_ms(1).await;
        }
        panic!("expected the condition within 100 s");
    }

    /// Starts a write, and does not wait for its end.
    pub fn write_beside(&self, i: usize, start: u64, sectors: u64, fua: bool) -> JoinHandle<bool> {
        let c = self.clients[i].clone();
        self.rt.spawn(async move { c.write(start, sectors, fua).await })
    }

    /// Waits for this many milliseconds of virtual time.
    pub async fn sleep_ms(&self, ms: u64) {
        self.rt.sleep(Nanos::from_ms(ms)).await;
    }

    /// Reads a whole volume, which the oracle checks. Returns the contents.
    pub async fn read_all(&self, i: usize) -> Vec<Content> {
        let c = &self.clients[i];
        let (mut at, mut all) = (0, Vec::new());
        while at < c.size() {
            let n = 128.min(c.size() - at);
            all.extend(c.read(at, n).await.unwrap_or_default());
            at += n;
        }
        all
    }

    /// Stops all volumes and the set in order.
    ///
    /// # Panics
    /// If a stop fails.
    pub async fn stop(&self) {
        for c in &self.clients {
            if let Some(v) = c.volume() {
                v.stop().await.expect("the volume stops");
            }
        }
        self.stop_sets(true).await;
    }

    /// Stops all sets, the second one first if not `in_order`, with their volumes.
    ///
    /// # Panics
    /// If a stop fails.
    pub async fn stop_sets(&self, in_order: bool) {
        let mut sets = [self.set.borrow().clone(), self.second_set.borrow().clone()];
        if !in_order {
            sets.reverse();
        }
        for set in sets.into_iter().flatten() {
            set.stop().await.expect("the set stops");
        }
    }

    fn give_up(&self) {
        self.clients.iter().for_each(|c| c.set_volume(None));
        for set in [self.set.take(), self.second_set.take()].into_iter().flatten() {
            set.abandon();
        }
    }
}

/// The end of a boot.
pub(crate) enum End {
    /// The script ended.
    Finished,
    /// The power failed.
    Cut,
}

/// A scenario: simulated devices, and the oracles of their volumes, over several boots.
pub struct Scenario {
    /// The devices.
    pub hardware: Hardware,
    /// The oracles of the volumes.
    pub oracles: Vec<Rc<RefCell<Oracle>>>,
    order: Order,
    running: Option<(Machine, Boot)>,
    /// Whether the last end has lost the first of two sets.
    loses_first: bool,
}

impl Scenario {
    /// Makes a scenario on new devices, with a flash-only volume of `flash_sectors` if that is not 0.
    pub fn new(seed: u64, layout: Layout, flash_sectors: u64) -> Scenario {
        let world = World::new(seed);
        let mut oracles = Vec::new();
        for (i, b) in layout.backings.iter().enumerate() {
            let size = b.data_sectors / b.block_sectors * b.block_sectors;
            oracles.push(Rc::new(RefCell::new(Oracle::new(i as u8, size, false))));
        }
        if flash_sectors > 0 {
            let i = oracles.len() as u8;
            oracles.push(Rc::new(RefCell::new(Oracle::new(i, flash_sectors, true))));
        }
        Scenario {
            hardware: Hardware::new(&world, layout),
            oracles,
            order: Order::Fifo,
            running: None,
            loses_first: false,
        }
    }

    /// Makes a scenario on new devices, with a second set.
    pub fn with_second(seed: u64, layout: Layout) -> Scenario {
        let mut scenario = Scenario::new(seed, layout, 0);
        scenario.hardware.add_second();
        scenario
    }

    pub(crate) fn begin<F: Future<Output = ()> + 'static>(&mut self, script: impl FnOnce(Boot) -> F) -> End {
        assert!(self.running.is_none(), "the last boot was not ended");
        // Faults and power losses of a boot are set before the boot begins, so [`Hardware::boot`], which clears them, is not
        // used.
        let machine = Machine::boot(&self.hardware.world, self.order);
        let client = |(i, o): (usize, &Rc<RefCell<Oracle>>)| {
            Client::new(&self.hardware.world, machine.handle(), i as u8, o.clone())
        };
        let boot = Boot {
            rt: machine.handle(),
            world: self.hardware.world.clone(),
            parts: self.hardware.parts(&machine),
            cache: self.hardware.cache.clone(),
            backings: self.hardware.backings.clone(),
            clients: self.oracles.iter().enumerate().map(client).collect(),
            second: self.hardware.second.clone(),
            set: Rc::default(),
            second_set: Rc::default(),
        };
        let task = machine.handle().spawn(script(boot.clone()));
        let mut machine = machine;
        let outcome = machine.run(&task, LIMIT);
        assert!(self.hardware.disks().all(|d| !d.was_misused()), "a request broke the contract of devices");
        let end = match outcome {
            Outcome::Done(()) => End::Finished,
            Outcome::PowerLoss => End::Cut,
            Outcome::Stuck(why) => {
                let set = boot.set.borrow().as_ref().map(|s| format!("{:?}", s.status()));
                let disks: Vec<String> = self.hardware.disks().map(|d| d.dump()).collect();
                panic!("{why}; {}; {}", disks.join("; "), set.unwrap_or_default())
            }
        };
        self.running = Some((machine, boot));
        end
    }

    /// Runs a boot to its end and leaves the machine on, for [`Scenario::power_loss`] or [`Scenario::kill`].
    ///
    /// # Panics
    /// If the boot does not end, or a check fails.
    pub fn boot<F: Future<Output = ()> + 'static>(
        &mut self,
        script: impl FnOnce(Boot) -> F,
    ) -> &mut Scenario {
        assert!(matches!(self.begin(script), End::Finished), "expected the boot to end without a power loss");
        self
    }

    /// Runs a boot whose script stops everything in order, and then cuts the power.
    ///
    /// # Panics
    /// If the boot does not end, or a check fails.
    pub fn boot_and_stop<F: Future<Output = ()> + 'static>(
        &mut self,
        script: impl FnOnce(Boot) -> F,
    ) -> &mut Scenario {
        self.boot(script);
        self.oracles.iter().for_each(|o| o.borrow_mut().stopped());
        self.switch_off(|hardware, machine| hardware.power_loss(machine, Retained::Nothing));
        self
    }

    pub(crate) fn set_order(&mut self, order: Order) {
        self.order = order;
    }

    /// Tells the oracles that everything was stopped in order.
    pub(crate) fn stopped(&self) {
        self.oracles.iter().for_each(|o| o.borrow_mut().stopped());
    }

    fn switch_off(&mut self, off: impl FnOnce(&Hardware, Machine)) {
        let (machine, boot) = self.running.take().expect("the machine is on");
        off(&self.hardware, machine);
        boot.give_up();
        self.hardware.world.power_on();
    }

    /// Cuts the power of all devices.
    ///
    /// # Panics
    /// If the machine is off.
    pub fn power_loss(&mut self, retained: Retained) -> &mut Scenario {
        self.oracles.iter().for_each(|o| o.borrow_mut().crashed());
        self.switch_off(|hardware, machine| hardware.power_loss(machine, retained));
        self
    }

    /// Ends the process without a stop.
    ///
    /// # Panics
    /// If the machine is off.
    pub fn kill(&mut self) -> &mut Scenario {
        self.oracles.iter().for_each(|o| o.borrow_mut().crashed());
        self.switch_off(Hardware::kill);
        self
    }

    /// Ends the process without a stop, and cuts the power of the cache device alone; the host stays up.
    ///
    /// # Panics
    /// If the machine is off.
    pub fn cache_power_loss(&mut self, retained: Retained) -> &mut Scenario {
        self.oracles.iter().for_each(|o| o.borrow_mut().crashed());
        self.switch_off(|hardware, machine| hardware.cut(machine, Cut::Cache(retained)));
        self
    }

    /// Judges the structures and contents of the disks with crate `inspect`.
    ///
    /// # Panics
    /// If a check fails.
    #[track_caller]
    pub fn judge(&mut self) -> &mut Scenario {
        if self.hardware.second.is_some() {
            self.judge_group();
            return self;
        }
        let cache = self.hardware.cache.image();
        let backings: Vec<Image> = self.hardware.backings.iter().map(|b| b.image()).collect();
        judge_images(&cache, &backings, &self.oracles).unwrap_or_else(|e| panic!("{e}"));
        self
    }

    /// Runs a last boot without faults, which reads, drains and stops everything.
    ///
    /// After it the backing devices alone have all data of cached devices.
    ///
    /// # Panics
    /// If a check fails.
    pub fn happy_end(&mut self) {
        if self.hardware.second.is_some() {
            self.loses_first = !self.loses_first;
            return self.end_with_loss(self.loses_first);
        }
        self.boot_and_stop(|b| async move {
            b.open().await;
            for i in 0..b.clients.len() {
                b.read_all(i).await;
                b.volume(i).drained().await.expect("everything is written back");
            }
            b.stop().await;
        });
        self.judge().judge_backings();
    }

    /// Judges the backing devices alone, which have all data.
    ///
    /// # Panics
    /// If a check fails.
    #[track_caller]
    pub(crate) fn judge_backings(&mut self) {
        for (i, b) in self.hardware.layout.backings.iter().enumerate() {
            let (image, oracle) = (self.hardware.backings[i].image(), self.oracles[i].borrow());
            for sector in 0..oracle.size() {
                let bytes = image.read_vec(Sector(b.data_offset + sector), Sectors(1));
                oracle.check_sector(sector, &bytes).unwrap_or_else(|e| panic!("backing device alone: {e}"));
            }
        }
    }
}

pub(crate) fn judge_images(
    cache: &Image,
    backings: &[Image],
    oracles: &[Rc<RefCell<Oracle>>],
) -> Result<(), Violation> {
    let initialised =
        inspect::SetView::open(cache, inspect::Mode::BestEffort).is_ok_and(|v| v.is_initialised());
    if !initialised {
        return Ok(());
    }
    judge::check(cache, backings)?;
    for (i, oracle) in oracles.iter().enumerate() {
        let what = backings.get(i).map_or(judge::ExtractedVolume::Flash, judge::ExtractedVolume::Cached);
        if let Some(bytes) = judge::extract(cache, &what)? {
            let oracle = oracle.borrow();
            for (sector, s) in bytes.chunks_exact(SECTOR).take(oracle.size() as usize).enumerate() {
                oracle.check_sector(sector as u64, s)?;
            }
        }
    }
    Ok(())
}
