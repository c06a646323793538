//! Sets brought up and down: what the commands that use the engine share.
//!
//! Owns the order: claim every device, look at every superblock, only then let the engine write. Must not know exports.

use std::path::{Path, PathBuf};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use blockio::wrap::{DelayDisk, Delays, HddModel, SlowDisk};
use blockio::{Driver, FileDevice, OpenOptions, Signals};
use engine::{CacheSet, SetOptions, Volume};
use format::{BackingSuper, CacheSuper};
use io::{Device, Disk, Nanos};

use crate::events::EventLog;
use crate::failure::Failure;
use crate::kept::Kept;
use crate::tunables::{Owner, Setting};
use crate::{out, superblock};

/// Notices SIGINT and SIGTERM in work that does not wait for anything. A second one ends the process at once.
pub(crate) struct Interrupt {
    signals: Signals,
    came: bool,
}

impl Interrupt {
    pub(crate) fn new() -> Result<Interrupt, Failure> {
        exit_at_second_signal(Duration::ZERO)?;
        Interrupt::without_exit()
    }

    /// One that leaves a second signal alone too: for work that has to clean up after itself.
    pub(crate) fn without_exit() -> Result<Interrupt, Failure> {
        Ok(Interrupt { signals: signals()?, came: false })
    }

    pub(crate) fn came(&mut self) -> bool {
        if !self.came {
            let next = pin!(self.signals.next());
            self.came = next.poll(&mut Context::from_waker(Waker::noop())).is_ready();
        }
        self.came
    }
}

/// The signals from now on.
pub(crate) fn signals() -> Result<Signals, Failure> {
    Signals::new().map_err(|e| Failure::Failed(format!("cannot listen for signals: {e}")))
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// What a shell says of a program that this signal ended.
pub(crate) fn exit_code(signal: blockio::Signal) -> u8 {
    match signal {
        blockio::Signal::Interrupt => 130,
        blockio::Signal::Terminate => 143,
        blockio::Signal::HandOver => 140,
    }
}

/// Ends the process at the second signal, whatever its other threads do then, if it does not end by itself within
/// `grace`; at the third one in any case.
pub(crate) fn exit_at_second_signal(grace: Duration) -> Result<(), Failure> {
    let mut signals = signals()?;
    let watch = move || {
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        let mut wait = |deadline: Option<Instant>| {
            let mut next = pin!(signals.next());
            loop {
                match (next.as_mut().poll(&mut Context::from_waker(&waker)), deadline) {
                    (Poll::Ready(signal), _) => return Some(signal),
                    (Poll::Pending, None) => std::thread::park(),
                    (Poll::Pending, Some(at)) => match at.checked_duration_since(Instant::now()) {
                        Some(left) => std::thread::park_timeout(left),
                        None => return None,
                    },
                }
            }
        };
        wait(None);
        if let Some(second) = wait(None) {
            wait(Some(Instant::now() + grace));
            out::warn("ended at once by a second signal; what was flushed before is safe");
            std::process::exit(exit_code(second).into());
        }
    };
    let spawned = std::thread::Builder::new().name("ubcache-exit".into()).spawn(watch);
    spawned.map(drop).map_err(|e| Failure::Failed(format!("cannot start a thread: {e}")))
}

/// How backing devices are slowed down, for demonstrations.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Simulation {
    /// Like a disk with a moving head.
    pub(crate) hdd: bool,
    /// Added to each request.
    pub(crate) delay_ms: u64,
}

/// Opens and claims a device for the engine.
pub(crate) fn open_device(driver: &Driver, path: &Path, simulation: Simulation) -> Result<Disk, Failure> {
    let device = FileDevice::open(driver.reactor(), path, &OpenOptions::default())?;
    if let Some(note) = device.note() {
        out::note(format!("{}: {note}", path.display()));
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
pub(crate) struct OpenBacking {
    pub(crate) disk: Disk,
    pub(crate) superblock: BackingSuper,
}

/// Devices that are claimed and fit together. Nothing has been written yet.
pub(crate) struct Devices {
    pub(crate) cache: Option<(Disk, CacheSuper)>,
    pub(crate) backings: Vec<OpenBacking>,
}

impl Devices {
    /// Claims devices and looks at their superblocks.
    ///
    /// # Errors
    /// If one cannot be had or does not belong here; nothing is modified then.
    pub(crate) async fn open(
        driver: &Driver,
        cache: Option<&Path>,
        backings: &[PathBuf],
        simulation: Simulation,
    ) -> Result<Devices, Failure> {
        let cache = match cache {
            Some(path) => {
                let disk = open_device(driver, path, Simulation::default())?;
                let superblock = superblock::cache(&disk, path).await?;
                Some((disk, superblock))
            }
            None => None,
        };
        let mut opened: Vec<OpenBacking> = Vec::new();
        for path in backings {
            let disk = open_device(driver, path, simulation)?;
            let superblock = superblock::backing(&disk, path).await?;
            if let Some((_, set)) = &cache {
                superblock::belongs(&disk.info().name, &superblock, set.set_uuid())?;
                let block = set.geometry().block_sectors;
                if superblock.block_sectors() < block {
                    return Err(Failure::Failed(format!(
                        "{}: block size: expected at least the cache set's {block} sectors, found {}",
                        disk.info().name,
                        superblock.block_sectors()
                    )));
                }
            }
            if let Some(other) = opened.iter().find(|b| b.superblock.uuid() == superblock.uuid()) {
                return Err(Failure::Failed(format!(
                    "{} and {} have the same UUID {}: is one a copy of the other?",
                    other.disk.info().name,
                    disk.info().name,
                    superblock.uuid()
                )));
            }
            opened.push(OpenBacking { disk, superblock });
        }
        Ok(Devices { cache, backings: opened })
    }
}

/// A set that runs, or backing devices that run without one.
pub(crate) struct Session {
    pub(crate) set: Option<CacheSet>,
    /// Those with a backing device in the order in which these were given, then the others by slot.
    pub(crate) volumes: Vec<Rc<Volume>>,
    /// What was answered and not flushed survives this process here.
    pub(crate) kept: Kept,
    log: EventLog,
}

impl Session {
    /// Brings devices up.
    pub(crate) async fn start(devices: Devices) -> Result<Session, Failure> {
        let Devices { cache, backings } = devices;
        let Some((disk, superblock)) = cache else { return Session::without_cache(backings).await };
        let kept = Kept::open(&disk, &superblock)?;
        let options = SetOptions { seed: seed(), survivor: kept.survivor(), ..SetOptions::default() };
        let set = CacheSet::open(disk, options).await?;
        let mut session = Session { set: Some(set), volumes: Vec::new(), kept, log: EventLog::default() };
        session.log_events();
        let attached = session.attach(backings).await;
        session.log_events();
        match attached {
            Ok(()) => Ok(session),
            Err(e) => {
                // What is up goes down in good order; the first error is the one that matters.
                let _ = session.stop().await;
                Err(e)
            }
        }
    }

    async fn attach(&mut self, backings: Vec<OpenBacking>) -> Result<(), Failure> {
        let Some(set) = &self.set else { return Ok(()) };
        for backing in backings {
            self.volumes.push(set.register(backing.disk).await?);
        }
        let mut alone: Vec<Rc<Volume>> = set.volumes().into_iter().filter(|v| v.is_flash_only()).collect();
        alone.sort_by_key(|v| v.inode());
        self.volumes.append(&mut alone);
        Ok(())
    }

    async fn without_cache(backings: Vec<OpenBacking>) -> Result<Session, Failure> {
        let mut session =
            Session { set: None, volumes: Vec::new(), kept: Kept::nothing(), log: EventLog::default() };
        for backing in backings {
            let before = backing.superblock.state();
            let volume = Volume::pass_through(backing.disk, false).await?;
            if before == format::BackingState::Clean {
                out::warn(format!(
                    "{}: runs without its cache: what cache set {} has of it is void from now on",
                    volume.backing_name().unwrap_or_default(),
                    backing.superblock.set_uuid()
                ));
            }
            session.volumes.push(volume);
        }
        Ok(session)
    }

    /// Changes a tunable of the set, or of every cached device.
    pub(crate) async fn apply(&self, setting: &Setting) -> Result<(), Failure> {
        match (setting.owner, &self.set) {
            (Owner::Set, Some(set)) => set.set(&setting.key, &setting.value).await?,
            (Owner::Set, None) => {}
            (Owner::Device, _) => {
                for volume in self.volumes.iter().filter(|v| !v.is_flash_only()) {
                    volume.set(&setting.key, &setting.value).await?;
                }
            }
        }
        Ok(())
    }

    /// Tells the operator what happened since the last call.
    pub(crate) fn log_events(&self) {
        let mut events = self.set.as_ref().map(CacheSet::take_events).unwrap_or_default();
        events.extend(self.volumes.iter().flat_map(|v| v.take_events()));
        self.log.log(&events);
    }

    /// Brings everything down. What was written is durable afterwards; dirty data stays dirty.
    pub(crate) async fn stop(&self) -> Result<(), Failure> {
        let result = match &self.set {
            Some(set) => set.stop().await.map_err(Failure::from),
            None => {
                for volume in &self.volumes {
                    volume.stop().await;
                }
                Ok(())
            }
        };
        self.log_events();
        self.log.end_window();
        if result.is_ok() {
            self.kept.remove();
        }
        result
    }
}

impl Session {
    /// Makes what was answered durable and leaves the rest as it is, like a process that dies: for the next one, which
    /// replays the journal sooner than this one could bring everything into order, and clients wait for it.
    pub(crate) async fn leave(&self) -> Result<(), Failure> {
        for volume in &self.volumes {
            volume.flush().await?;
        }
        self.log_events();
        Ok(())
    }
}

/// A seed for the engine's random choices, which need not be the same twice.
pub(crate) fn seed() -> u64 {
    let (seed, _) = uuid::Uuid::new_v4().as_u64_pair();
    seed
}
