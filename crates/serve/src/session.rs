//! Sessions: start and stop of a set, for all commands that use the engine.
//!
//! Owns the order: claim every device, check every superblock, only then let the engine write. Must not know exports.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::rc::Rc;
use std::task::Poll;

use blockio::wrap::{DelayDisk, Delays, HddModel, SlowDisk};
use blockio::{Driver, DriverOptions, FileDevice, OpenOptions};
use engine::{CacheSet, SetOptions, Volume};
use format::{BackingSuper, CacheSuper};
use io::sync::Event;
use io::{Device, Disk, Handle, Nanos};

use crate::crash_log::CrashLog;
use crate::events::{EventLog, Names, WINDOW};
use crate::failure::Failure;
use crate::tunables::{Beyond, Owner, Setting, in_any_order};
use crate::{group, message, ram, superblock};

/// Time for which events are collected before they are logged.
const TOGETHER: Nanos = Nanos::from_ms(250);

/// The simulated slowness of backing devices, for demonstrations.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Simulation {
    /// Whether it is as slow as a disk with a moving head.
    pub hdd: bool,
    /// Delay of each request in milliseconds.
    pub delay_ms: u64,
}

/// Opens and claims a device for the engine.
pub fn open_device(driver: &Driver, path: &Path, simulation: Simulation) -> Result<Disk, Failure> {
    let device = FileDevice::open(driver.reactor(), path, &OpenOptions::default())?;
    if let Some(note) = device.note() {
        message::note(format!("{}: {note}", path.display()));
    }
    let mut device: Rc<dyn Device> = Rc::new(device);
    if simulation.hdd {
        device = Rc::new(SlowDisk::new(device, driver.handle(), HddModel::default()));
    }
    if simulation.delay_ms > 0 {
        let delay = Nanos::from_ms(simulation.delay_ms);
        let delays = Delays { read: delay, write: delay, flush: delay };
        device = Rc::new(DelayDisk::new(device, driver.handle(), delays));
    }
    Ok(Disk::new(device, driver.handle()))
}

/// A backing device that is claimed and has a valid superblock.
pub struct OpenBacking {
    /// The device, claimed.
    pub disk: Disk,
    /// Its superblock.
    pub superblock: BackingSuper,
}

/// Devices that are claimed and belong together. Nothing has been written to them.
pub struct Devices {
    /// Cache device and its superblock.
    pub cache: Option<(Disk, CacheSuper)>,
    /// The other cache devices of a group.
    pub others: Vec<(Disk, CacheSuper)>,
    /// The backing devices, in the order in which they were given.
    pub backings: Vec<OpenBacking>,
}

impl Devices {
    /// Claims devices and checks their superblocks. Several cache devices are of one group.
    ///
    /// # Errors
    /// If a device cannot be claimed or does not belong to the set. In that case no device is changed.
    pub async fn open(
        driver: &Driver,
        caches: &[&Path],
        backings: &[PathBuf],
        simulation: Simulation,
    ) -> Result<Devices, Failure> {
        let mut sets = Vec::new();
        for path in caches {
            let disk = open_device(driver, path, Simulation::default())?;
            // The device is claimed, so no other process uses its crash logs.
            let bytes = superblock::read_bytes(&disk).await.inspect_err(|_| CrashLog::forget(&disk))?;
            let superblock = superblock::cache_in(&disk, path, &bytes).map_err(|e| match caches.len() {
                1 => e,
                _ => Failure::caused(
                    format!(
                        "{e}; if this cache device is lost, leave it out: the others may have its dirty data"
                    ),
                    e,
                ),
            })?;
            sets.push((disk, superblock));
        }
        superblock::are_one_group(&sets)?;
        let mut opened: Vec<OpenBacking> = Vec::new();
        for path in backings {
            let backing = open_backing(driver, path, simulation, &sets).await?;
            if let Some(other) = opened.iter().find(|b| b.superblock.uuid() == backing.superblock.uuid()) {
                return Err(Failure::Failed(format!(
                    "{} and {} have the same UUID {}: is one a copy of the other?",
                    other.disk.info().name,
                    backing.disk.info().name,
                    backing.superblock.uuid()
                )));
            }
            opened.push(backing);
        }
        let mut sets = sets.into_iter();
        Ok(Devices { cache: sets.next(), others: sets.collect(), backings: opened })
    }
}

impl Devices {
    /// Refuses backing devices that were made for, or once attached to, other sets than these, unless one of these has a copy of their
    /// dirty data.
    ///
    /// # Errors
    /// Names both sets, and says how to attach such a device.
    pub fn refuse_strangers(&self) -> Result<(), Failure> {
        let Some(first) = &self.cache else { return Ok(()) };
        let all: Vec<&CacheSuper> = std::iter::once(first).chain(&self.others).map(|(_, set)| set).collect();
        for OpenBacking { disk, superblock } in &self.backings {
            if !superblock::is_of_one(superblock, &all) {
                superblock::made_for_another(disk, superblock, (&first.0, &first.1))?;
            }
        }
        Ok(())
    }
}

/// Claims a backing device and checks its superblock, against those of the cache devices if there are any.
///
/// # Errors
/// If the device cannot be claimed or does not belong to the set. In that case it is not changed.
pub async fn open_backing(
    driver: &Driver,
    path: &Path,
    simulation: Simulation,
    sets: &[(Disk, CacheSuper)],
) -> Result<OpenBacking, Failure> {
    let disk = open_device(driver, path, simulation)?;
    let superblock = superblock::backing(&disk, path).await?;
    let name = &disk.info().name;
    superblock::belongs_to_one(name, &superblock, sets)?;
    for (_, set) in sets {
        let block = set.geometry().block_sectors;
        if superblock.block_sectors() < block {
            return Err(Failure::Failed(format!(
                "{name}: block size: expected at least the cache set's {block} sectors, found {}",
                superblock.block_sectors()
            )));
        }
    }
    Ok(OpenBacking { disk, superblock })
}

/// Makes a backing device leave its set without the cache device, and returns the UUID of the set. Blocks the thread.
///
/// # Errors
/// If the device is in use or has dirty data in the cache. In that case it is not changed.
pub fn leave_set(path: &Path) -> Result<format::Uuid, Failure> {
    let options = DriverOptions { seed: seed(), ..DriverOptions::default() };
    let driver = Driver::new(options).map_err(|e| Failure::because("cannot start", e))?;
    driver.block_on(async {
        let backing = open_backing(&driver, path, Simulation::default(), &[]).await?;
        Ok(Volume::leave_set(backing.disk).await?)
    })
}

/// A running set, or backing devices that run without one.
pub struct Session {
    /// The set, unless backing devices run alone. Of a group it is the first one.
    pub set: Option<CacheSet>,
    /// The other sets of a group.
    others: Vec<Other>,
    volumes: RefCell<Vec<Rc<Volume>>>,
    /// Notified when a volume is added or removed.
    changed: Event,
    /// The crash log, which has acknowledged writes without a flush after a crash of this process.
    pub crash_log: CrashLog,
    log: EventLog,
}

/// A set of a group beside the first one.
struct Other {
    set: CacheSet,
    crash_log: CrashLog,
}

impl Session {
    fn new(set: Option<CacheSet>, crash_log: CrashLog) -> Session {
        Session {
            set,
            others: Vec::new(),
            volumes: RefCell::default(),
            changed: Event::default(),
            crash_log,
            log: EventLog::default(),
        }
    }

    /// Starts the set and its volumes, or backing devices without a set.
    ///
    /// # Errors
    /// If a device is refused. The devices that were started are stopped again.
    pub async fn start(devices: Devices) -> Result<Session, Failure> {
        let Devices { cache, others, backings } = devices;
        let Some(first) = cache else { return Session::without_cache(backings).await };
        let (set, crash_log) = open_set(first).await?;
        let mut session = Session::new(Some(set), crash_log);
        let started = session.start_others(others, backings).await;
        session.log_events();
        match started {
            Ok(()) => Ok(session),
            Err(e) => {
                // Started devices are stopped in order. The first error is returned.
                let _ = session.stop().await;
                Err(e)
            }
        }
    }

    async fn start_others(
        &mut self,
        others: Vec<(Disk, CacheSuper)>,
        backings: Vec<OpenBacking>,
    ) -> Result<(), Failure> {
        for other in others {
            let (set, crash_log) = open_set(other).await?;
            self.others.push(Other { set, crash_log });
        }
        self.log_events();
        for backing in backings {
            let volume = group::register(self.sets(), backing.disk, &backing.superblock).await?;
            self.add(volume);
        }
        let alone = self.sets().flat_map(|set| {
            let mut alone: Vec<Rc<Volume>> =
                set.volumes().into_iter().filter(|v| v.is_flash_only()).collect();
            alone.sort_by_key(|v| v.inode());
            alone
        });
        alone.collect::<Vec<_>>().into_iter().for_each(|v| self.add(v));
        Ok(())
    }

    /// The sets: none if backing devices run alone, several of a group.
    pub fn sets(&self) -> impl Iterator<Item = &CacheSet> {
        self.set.iter().chain(self.others.iter().map(|other| &other.set))
    }

    async fn without_cache(backings: Vec<OpenBacking>) -> Result<Session, Failure> {
        let session = Session::new(None, CrashLog::nothing());
        for backing in backings {
            let before = backing.superblock.state();
            let volume = Volume::pass_through(backing.disk, false).await?;
            if before == format::BackingState::Clean {
                message::warn(format!(
                    "{}: runs without its cache: what cache set {} has of it is invalid from now on",
                    volume.backing_name().unwrap_or_default(),
                    backing.superblock.set_uuid()
                ));
            }
            session.add(volume);
        }
        Ok(session)
    }

    /// The volumes.
    ///
    /// First those with a backing device in the order in which these were given, then the others by slot, then those that
    /// were added later.
    pub fn volumes(&self) -> Vec<Rc<Volume>> {
        self.volumes.borrow().clone()
    }

    /// The volume with this name.
    ///
    /// # Errors
    /// If there is none.
    pub fn volume(&self, name: &str) -> Result<Rc<Volume>, Failure> {
        let found = self.volumes.borrow().iter().find(|v| v.name() == name).cloned();
        found.ok_or_else(|| Failure::Failed(format!("there is no volume {name}")))
    }

    /// Adds a volume that is served from now on.
    pub fn add(&self, volume: Rc<Volume>) {
        self.volumes.borrow_mut().push(volume);
        self.changed.notify_all();
    }

    /// Removes a volume that is not served any more. The caller stops it.
    pub fn forget(&self, volume: &Rc<Volume>) {
        self.volumes.borrow_mut().retain(|v| !Rc::ptr_eq(v, volume));
        self.changed.notify_all();
    }

    /// The set.
    ///
    /// # Errors
    /// If there is none.
    pub fn needs_set(&self) -> Result<&CacheSet, Failure> {
        self.set.as_ref().ok_or_else(|| Failure::Failed("there is no cache set".into()))
    }

    /// Changes a tunable of the set, or of every cached device.
    ///
    /// # Errors
    /// If the value is refused; nothing has changed then. If the engine fails, a part may have changed.
    pub async fn apply(&self, setting: &Setting, beyond: Beyond) -> Result<(), Failure> {
        let Setting { owner, key, value } = setting;
        let refused = beyond == Beyond::Refused;
        match (owner, &self.set) {
            (Owner::Set, Some(_)) => {
                for set in self.sets().filter(|_| refused) {
                    set.tunables().check(key, value).map_err(Failure::bad_value)?;
                }
                for set in self.sets() {
                    set.set(key, value).await?;
                }
            }
            (Owner::Set, None) => {}
            (Owner::Device, _) => {
                let volumes: Vec<_> = self.volumes().into_iter().filter(|v| !v.is_flash_only()).collect();
                if refused {
                    let mut all = volumes.iter().map(|v| v.tunables().check(key, value));
                    all.try_for_each(|checked| checked.map_err(Failure::bad_value))?;
                }
                for volume in volumes {
                    volume.set(key, value).await?;
                }
            }
        }
        Ok(())
    }

    /// Changes several tunables. Their order does not matter where the range of one depends on another.
    ///
    /// # Errors
    /// If one is refused; the others may have changed then.
    pub async fn apply_all(&self, settings: &[Setting]) -> Result<(), Failure> {
        let set = async |setting: &&Setting| self.apply(setting, Beyond::Refused).await;
        let refused = in_any_order(settings.iter().collect(), set).await;
        refused.into_iter().next().map_or(Ok(()), |(_, e)| Err(e))
    }

    /// Tells the operator what happened since the last call.
    pub fn log_events(&self) {
        for other in &self.others {
            let names = Names::of(Some(&other.set), &self.volumes.borrow());
            self.log.log(&other.set.take_events(), &names);
        }
        let mut events = self.set.as_ref().map(CacheSet::take_events).unwrap_or_default();
        events.extend(self.volumes.borrow().iter().flat_map(|v| v.take_events()));
        if events.is_empty() && !self.log.counts() {
            return;
        }
        self.log.log(&events, &Names::of(self.set.as_ref(), &self.volumes.borrow()));
    }

    /// Waits until [`Session::log_events`] has events to log, or the volumes change. An idle set does not wake the caller.
    pub async fn until_events(&self, rt: &Handle) {
        let volumes = self.volumes();
        let mut any: Vec<Pin<Box<dyn Future<Output = ()> + '_>>> = vec![Box::pin(self.changed.changed())];
        any.extend(self.sets().map(|set| Box::pin(set.events_arrived()) as _));
        any.extend(volumes.iter().map(|volume| Box::pin(volume.events_arrived()) as _));
        if self.log.counts() {
            any.push(Box::pin(rt.sleep(WINDOW)));
        }
        poll_fn(|cx| match any.iter_mut().any(|one| one.as_mut().poll(cx).is_ready()) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        })
        .await;
        // A volume that has left the session must not keep its device open until the next event.
        drop(any);
        drop(volumes);
        // Events of the same time are logged together. The event of a set's failure comes before those of the failed
        // requests, and a device that fails every request does not wake the caller for each.
        rt.sleep(TOGETHER).await;
    }

    /// Stops the volumes and the set. All writes are durable afterwards; dirty data stays dirty.
    ///
    /// # Errors
    /// If something could not be written. Data that a flush acknowledged is durable even then.
    pub async fn stop(&self) -> Result<(), Failure> {
        let mut result = Ok(());
        // The set does not have the detached volumes any more.
        for volume in self.volumes().into_iter().filter(|v| v.inode().is_none()) {
            result = result.and(volume.stop().await.map_err(Failure::from));
        }
        let logs = std::iter::once(&self.crash_log).chain(self.others.iter().map(|other| &other.crash_log));
        for (set, log) in self.sets().zip(logs) {
            let is_left = group::is_left(set) && !self.others.is_empty();
            let stopped = set.stop().await.map_err(Failure::from);
            if stopped.is_ok() || is_left {
                // What a set that was lost has is out of date.
                log.remove();
            }
            if !is_left {
                result = result.and(stopped);
            }
        }
        self.log_events();
        self.log.end_window();
        result
    }

    /// Makes all answered writes durable and leaves the set as a crash would, for the process that takes over.
    ///
    /// The next process replays the journal in less time than this process needs to stop the set, and clients wait
    /// meanwhile.
    ///
    /// # Errors
    /// If a flush fails.
    pub async fn leave(&self) -> Result<(), Failure> {
        for volume in self.volumes() {
            volume.flush().await?;
        }
        self.log_events();
        Ok(())
    }
}

/// Opens the set of a cache device.
async fn open_set((disk, superblock): (Disk, CacheSuper)) -> Result<(CacheSet, CrashLog), Failure> {
    let crash_log = CrashLog::open(&disk, &superblock)?;
    if let Some(why) = crash_log.why_not() {
        message::warn(format!(
            "if this process is killed, the last writes that were not flushed are lost: there is no crash log: {why}"
        ));
    }
    let memory = ram::budget_of_sets();
    let mut options =
        SetOptions { seed: seed(), crash_log: crash_log.file(), memory, ..SetOptions::default() };
    if let Some(most) = ram::index_bytes() {
        let index = &mut options.tunables.btree_cache_limit;
        *index = (*index).min(most);
    }
    Ok((CacheSet::open(disk, options).await?, crash_log))
}

/// A new random UUID (version 4).
pub fn new_uuid() -> format::Uuid {
    format::Uuid(*uuid::Uuid::new_v4().as_bytes())
}

/// A random seed for the engine's random choices.
pub fn seed() -> u64 {
    let (seed, _) = uuid::Uuid::new_v4().as_u64_pair();
    seed
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use blockio::wrap::MemDisk;
    use engine::SetOptions;
    use format::{Sector, Sectors};
    use io::WriteFlags;

    use super::*;

    /// A running set in memory, and a backing device that was made for it.
    async fn new_set(rt: &Handle) -> (CacheSet, Disk) {
        let disk = |name, size| Disk::new(Rc::new(MemDisk::new(name, Sectors(size), 512)), rt.clone());
        let (cache, backing) = (disk("cache", 1 << 15), disk("backing", 1 << 16));
        rig::format(&cache, &backing, Sectors(8), Sectors(128)).await;
        (CacheSet::open(cache, SetOptions::default()).await.unwrap(), backing)
    }

    /// The task that waits for events held every volume of the session until the next event: the device of a volume that was
    /// detached and left an idle set could not be opened again, and `attach` made it fail.
    #[test]
    fn a_wait_for_events_does_not_hold_a_volume_that_has_left() {
        let driver = Driver::new(DriverOptions::default()).unwrap();
        let rt = driver.handle();
        driver.block_on(async {
            let (set, backing) = new_set(&rt).await;
            let volume = set.register(backing).await.unwrap();
            let session = Rc::new(Session::new(Some(set.clone()), CrashLog::nothing()));
            session.add(volume.clone());
            session.log_events();
            let (theirs, handle) = (session.clone(), rt.clone());
            let _waits = rt.spawn(async move { theirs.until_events(&handle).await });
            rt.yield_now().await;
            set.release(&volume).await.unwrap();
            session.forget(&volume);
            let deadline = rt.now().after(Nanos::from_secs(20));
            while Rc::strong_count(&volume) > 1 {
                assert!(rt.now() < deadline, "{} others hold the volume", Rc::strong_count(&volume) - 1);
                rt.sleep(Nanos::from_ms(1)).await;
            }
            set.stop().await.unwrap();
        });
    }

    /// The sets of a group share a thread: a set that has left it kept its cache device open until all others had ended.
    #[test]
    fn a_stopped_set_releases_its_device() {
        for step in 0..4 {
            let driver = Driver::new(DriverOptions::default()).unwrap();
            let rt = driver.handle();
            driver.block_on(async {
                let device = |name, size| Rc::new(MemDisk::new(name, Sectors(size), 512));
                let disk = |device: &Rc<MemDisk>| Disk::new(device.clone(), rt.clone());
                let (one, two, backing) =
                    (device("one", 1 << 15), device("two", 1 << 15), device("backing", 1 << 16));
                rig::format(&disk(&two), &disk(&backing), Sectors(8), Sectors(128)).await;
                rig::format(&disk(&one), &disk(&backing), Sectors(8), Sectors(128)).await;
                let first = CacheSet::open(disk(&one), SetOptions::default()).await.unwrap();
                let mut volume = None;
                if step > 0 {
                    let served = first.register(disk(&backing)).await.unwrap();
                    served.set("cache_mode", "writeback").await.unwrap();
                    let buffer = rt.pool().zeroed(4096);
                    served.write(Sector(0), Sectors(8), buffer, 0, WriteFlags::default()).await.unwrap();
                    volume = Some(served);
                }
                let mut left = (&one, first.clone());
                let mut second = None;
                if let Some(volume) = volume.as_ref().filter(|_| step > 1) {
                    let other = CacheSet::open(disk(&two), SetOptions::default()).await.unwrap();
                    first.mirror(volume, &other).await.unwrap();
                    if step == 2 {
                        other.give_up_copies().await.unwrap();
                        left = (&two, other);
                        second = Some(first);
                    } else {
                        first.hand_over(volume).await.unwrap();
                        second = Some(other);
                        drop(first);
                    }
                } else {
                    drop(first);
                }
                if step == 1 {
                    volume = None;
                }
                let (device, set) = left;
                set.stop().await.unwrap();
                drop(set);
                let deadline = rt.now().after(Nanos::from_secs(5));
                while Rc::strong_count(device) > 1 && rt.now() < deadline {
                    rt.sleep(Nanos::from_ms(1)).await;
                }
                assert_eq!(Rc::strong_count(device), 1, "step {step}: others hold the device");
                drop((volume, second));
            });
        }
    }

    /// A detached volume is served alone, and its device has a write in its volatile cache.
    ///
    /// The set does not have the volume any more, so a stop of the set alone left the write in the volatile cache.
    #[test]
    fn a_stop_flushes_volumes_that_were_detached() {
        let driver = Driver::new(DriverOptions::default()).unwrap();
        let rt = driver.handle();
        driver.block_on(async {
            let (set, backing) = new_set(&rt).await;
            let volume = set.register(backing.clone()).await.unwrap();
            let session = Session::new(Some(set.clone()), CrashLog::nothing());
            session.add(volume.clone());
            set.detach(&volume).await.unwrap();
            let flushes = || backing.figures().flushes.latency.count();
            let before = flushes();
            let buffer = rt.pool().zeroed(4096);
            volume.write(Sector(0), Sectors(8), buffer, 0, WriteFlags::default()).await.unwrap();
            assert_eq!(flushes(), before, "a write alone flushes nothing");
            session.stop().await.unwrap();
            assert_eq!(flushes(), before + 1);
        });
    }
}
