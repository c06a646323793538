//! What this host has: devices, the threads that serve them, and how one becomes the other.
//!
//! Owns the list of devices and threads, and every change of it, one at a time. A set is served when its cache device is
//! there; a backing device with it, or alone if it belongs to no set. A backing device whose cache is missing waits and
//! says so: it is never served without it. Must not know who asks; nothing here waits for a thread without a deadline.

mod admit;
mod begin;
mod find;
mod orders;
mod reached;
mod unplugged;
mod views;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blockio::bridge::{Answer as Awaited, Reply, oneshot};
use serve::{Failure, message};

use crate::history::History;
use crate::jobs::Jobs;
use crate::names::Named;
use crate::order::{Order, Plan};
use crate::probe::{Attachment, Probe, Role, probe_all, probe_device};
use crate::shared::Shared;
use crate::state::Known;
use crate::worker::{self, Phase, Worker};

pub(crate) use admit::By;
pub(crate) use find::Found;
pub(crate) use views::{DeviceView, SetView};

/// How long a set may take for its figures.
const FIGURES_WITHIN: Duration = Duration::from_secs(3);
/// How long a set may take for anything short.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);
/// How long a set may take to come up before whoever asked for it is told that it still does.
const UP_WITHIN: Duration = Duration::from_secs(90);
/// How often one that takes longer is looked at.
const LATE_LOOKS_EVERY: Duration = Duration::from_millis(200);

/// A registered device that has no volume at the moment, or that is one's.
#[derive(Clone, PartialEq, Eq, Debug)]
enum DeviceState {
    /// Its thread has it.
    Served,
    /// For something that is missing.
    Waiting(String),
    /// It was refused.
    Failed(String),
    /// Its volume was stopped.
    Stopped,
    /// It went away while its thread had it; what becomes of its volume.
    Unplugged(String),
    /// It is there again, and waits until nobody uses what it was for.
    Replugged(String),
}

impl DeviceState {
    /// A thread may have it, or one of that name.
    fn has_thread(&self) -> bool {
        matches!(self, DeviceState::Served | DeviceState::Unplugged(_) | DeviceState::Replugged(_))
    }
}

#[derive(Clone, Debug)]
struct Device {
    probe: Option<Probe>,
    state: DeviceState,
}

/// What came of registering devices.
pub(crate) struct Registered {
    pub(crate) devices: Vec<DeviceView>,
    /// What differs from what was remembered, and was accepted.
    pub(crate) accepted: Vec<String>,
}

/// See the module head.
pub(crate) struct Registry {
    pub(crate) shared: Arc<Shared>,
    pub(crate) jobs: Jobs,
    pub(crate) history: History,
    workers: Mutex<BTreeMap<String, Arc<Worker>>>,
    devices: Mutex<BTreeMap<PathBuf, Device>>,
    changing: tokio::sync::Mutex<()>,
    /// UUIDs of devices that the operator has named.
    named: Mutex<BTreeSet<String>>,
    /// UUIDs of devices that were let go by order, or refused when they appeared: that something about them changes is no
    /// reason to take them again.
    left: Mutex<BTreeSet<String>>,
    /// Nothing new is begun.
    stopping: AtomicBool,
}

fn failed<T>(text: impl Into<String>) -> Result<T, Failure> {
    Err(Failure::Failed(text.into()))
}

async fn within<T: Send>(
    who: &str,
    deadline: Duration,
    answer: Awaited<Result<T, Failure>>,
) -> Result<T, Failure> {
    match tokio::time::timeout(deadline, answer).await {
        Ok(Ok(result)) => result,
        Ok(Err(_)) => failed(format!("set {who} went away before it answered")),
        Err(_) => failed(format!("set {who} has not answered within {} seconds", deadline.as_secs())),
    }
}

/// Sends an order with a place for its answer, and waits for that.
async fn ask<T: Send>(
    worker: &Worker,
    deadline: Duration,
    order: impl FnOnce(Reply<Result<T, Failure>>) -> Order,
) -> Result<T, Failure> {
    let (reply, answer) = oneshot();
    worker.order(order(reply))?;
    within(&worker.plan.id, deadline, answer).await
}

impl Registry {
    pub(crate) fn new(shared: Arc<Shared>) -> Registry {
        Registry {
            jobs: Jobs::new(shared.hub.clone()),
            history: History::default(),
            shared,
            workers: Mutex::default(),
            devices: Mutex::default(),
            changing: tokio::sync::Mutex::default(),
            named: Mutex::default(),
            left: Mutex::default(),
            stopping: AtomicBool::new(false),
        }
    }

    fn workers(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Worker>>> {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn devices(&self) -> MutexGuard<'_, BTreeMap<PathBuf, Device>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn named_uuids(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.named.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn left(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stand(&self, probe: &Probe, state: DeviceState) {
        if let DeviceState::Waiting(why)
        | DeviceState::Failed(why)
        | DeviceState::Unplugged(why)
        | DeviceState::Replugged(why) = &state
        {
            let bad = matches!(state, DeviceState::Failed(_) | DeviceState::Unplugged(_));
            let level = if bad { "error" } else { "warning" };
            let text = format!("{}: {why}", probe.path.display());
            serve::message::message(level, &text);
            self.shared.hub.publish("device", None, level, &text);
        }
        self.devices().insert(probe.path.clone(), Device { probe: Some(probe.clone()), state });
    }

    /// Every thread that has not ended in good order, by its id.
    pub(crate) fn all_workers(&self) -> Vec<Arc<Worker>> {
        self.workers().values().cloned().collect()
    }

    /// The thread of this set, if it serves.
    fn serving(&self, id: &str) -> Option<Arc<Worker>> {
        self.workers().get(id).filter(|w| !w.phase().is_over()).cloned()
    }

    // ---- coming and going of devices ----

    /// Registers devices: each comes up as it should, waits for what is missing, or is refused; so is one that is registered
    /// already, unless that is as good.
    pub(crate) async fn register(
        self: &Arc<Self>,
        paths: Vec<PathBuf>,
        by: By,
    ) -> Result<Registered, Failure> {
        let _one = self.changing.lock().await;
        let known = self.shared.state().devices();
        let probe = self.probe_new(paths, &known, by.is_quiet()).await?;
        self.note_unplugged();
        let accepted = self.admit_all(&probe, by)?;
        accepted.iter().for_each(message::note);
        if by.is_operator() {
            self.named_uuids().extend(probe.iter().map(|s| s.uuid.clone()));
        }
        let paths: Vec<PathBuf> = probe.iter().map(|s| s.path.clone()).collect();
        let (back, probe): (Vec<Probe>, Vec<Probe>) = probe.into_iter().partition(|s| self.was_unplugged(s));
        for probe in back {
            self.replugged(probe).await?;
        }
        // One that a scan or the configuration brought is served already, and only to be remembered.
        let is_served = |s: &Probe| {
            self.devices().get(&s.path).is_some_and(|d| d.state == DeviceState::Served)
                && self.worker_of(s).is_some()
        };
        let (served, new): (Vec<Probe>, Vec<Probe>) = probe.into_iter().partition(is_served);
        let before: Vec<PathBuf> = self.devices().keys().cloned().collect();
        let mut placed = self.place(new).await;
        placed.extend(served.into_iter().map(|probe| (probe, Ok(()))));
        let mut first = Ok(());
        for (probe, result) in placed {
            let result = match result {
                Err(e) if !self.comes_up_late(&probe) => {
                    if before.contains(&probe.path) {
                        let why = e.message().unwrap_or_default().to_owned();
                        self.stand(&probe, DeviceState::Failed(why));
                    } else {
                        self.devices().remove(&probe.path);
                    }
                    Err(e)
                }
                result => {
                    self.forget_missing(&known, &probe);
                    self.forget_other_places(&probe);
                    result.and(self.remember(&probe))
                }
            };
            first = first.and(result);
        }
        first?;
        let devices = self.device_views().into_iter().filter(|v| paths.contains(&v.path)).collect();
        Ok(Registered { devices, accepted })
    }

    /// Looks at devices that are to be registered, each once.
    async fn probe_new(
        &self,
        paths: Vec<PathBuf>,
        known: &BTreeMap<PathBuf, Known>,
        quiet: bool,
    ) -> Result<Vec<Probe>, Failure> {
        let mut probe = Vec::new();
        for (_, probed) in probe_all(paths).await {
            let probed = probed?;
            if probe.iter().any(|s: &Probe| s.path == probed.path) {
                continue;
            }
            let is_served = self.devices().get(&probed.path).is_some_and(|d| d.state == DeviceState::Served);
            let is_known = known.contains_key(&probed.path) && !quiet;
            if is_served && is_known && self.worker_of(&probed).is_some() {
                return failed(format!("{}: is registered already", probed.path.display()));
            }
            probe.push(probed);
        }
        Ok(probe)
    }

    fn remember(&self, probe: &Probe) -> Result<(), Failure> {
        let named = self.named_uuids().contains(&probe.uuid);
        self.shared.state().add_device(&probe.path, &probe.uuid, named).map_err(|e| {
            let why = e.message().unwrap_or_default();
            Failure::Failed(format!(
                "{}: is registered, but only until the daemon ends: {why}: register it again when that is put right",
                probe.path.display()
            ))
        })
    }

    /// A thread that takes longer than whoever asked for it could wait has this device, and goes on: what waits for it gets
    /// its turn when it is up.
    fn comes_up_late(self: &Arc<Self>, probe: &Probe) -> bool {
        let of_cache = match &probe.role {
            Role::Cache { set } => set,
            Role::Backing { .. } => &probe.uuid,
        };
        let Some(worker) = self.serving(of_cache) else { return false };
        let its = [&worker.plan.cache, &worker.plan.alone];
        if !its.into_iter().any(|path| path.as_ref() == Some(&probe.path)) {
            return false;
        }
        self.stand(probe, DeviceState::Served);
        let (this, late) = (self.clone(), probe.clone());
        tokio::spawn(async move {
            while worker.phase() == Phase::Starting {
                tokio::time::sleep(LATE_LOOKS_EVERY).await;
            }
            let _one = this.changing.lock().await;
            if worker.phase() == Phase::Serving {
                this.note(&late).await;
            }
            this.add_waiting(&worker.plan.id).await;
        });
        true
    }

    /// As long as it is held, no device comes or goes, and nothing else changes what they are to be like.
    pub(crate) async fn nothing_changes(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.changing.lock().await
    }

    /// Gives devices to threads: caches first, at the same time, and then the rest.
    async fn place(self: &Arc<Self>, probe: Vec<Probe>) -> Vec<(Probe, Result<(), Failure>)> {
        let (caches, backings): (Vec<Probe>, Vec<Probe>) =
            probe.into_iter().partition(|s| matches!(s.role, Role::Cache { .. }));
        let mut results = Vec::new();
        for batch in [caches, backings] {
            let tasks: Vec<_> = batch
                .into_iter()
                .map(|probe| {
                    let (this, copy) = (self.clone(), probe.clone());
                    (probe, tokio::spawn(async move { this.place_one(&copy).await }))
                })
                .collect();
            for (probe, task) in tasks {
                let result = task.await.unwrap_or_else(|e| failed(format!("internal error: {e}")));
                results.push((probe, result));
            }
        }
        results
    }

    async fn place_one(self: &Arc<Self>, probe: &Probe) -> Result<(), Failure> {
        self.admit(probe)?;
        match &probe.role {
            Role::Cache { set } => {
                let plan = Plan { id: set.clone(), cache: Some(probe.path.clone()), alone: None };
                self.start(plan).await?;
                self.stand(probe, DeviceState::Served);
                self.note(probe).await;
                self.add_waiting(set).await;
                Ok(())
            }
            Role::Backing { set, attachment, .. } => {
                if let Some(worker) = set.as_ref().and_then(|set| self.serving(set)) {
                    if !self.may_be_attached(probe) {
                        self.waits_for_a_word(probe, &worker.plan.id);
                        return Ok(());
                    }
                    let path = probe.path.clone();
                    ask(&worker, ANSWER_WITHIN, |reply| Order::Add(path, reply)).await?;
                    self.stand(probe, DeviceState::Served);
                    self.note(probe).await;
                    return Ok(());
                }
                let what = match attachment {
                    Attachment::Free | Attachment::Stale => {
                        let alone = Some(probe.path.clone());
                        self.start(Plan { id: probe.uuid.clone(), cache: None, alone }).await?;
                        self.stand(probe, DeviceState::Served);
                        self.note(probe).await;
                        return Ok(());
                    }
                    Attachment::Made => "was made for",
                    Attachment::Clean => "is attached to",
                    Attachment::Dirty => "has dirty data in",
                };
                let set = set.as_deref().unwrap_or_default();
                let why =
                    format!("{what} cache set {set}, whose cache device is not registered: waits for it");
                self.stand(probe, DeviceState::Waiting(why));
                Ok(())
            }
        }
    }

    async fn start(&self, plan: Plan) -> Result<(), Failure> {
        let id = plan.id.clone();
        if self.serving(&id).is_some() {
            return failed(format!("{id} is served already: is one device a copy of the other?"));
        }
        let old = self.workers().remove(&id);
        if let Some(old) = old {
            // It has ended, as far as its phase says; what it held is free only when the thread is gone.
            let joined = tokio::task::spawn_blocking(move || old.join());
            let _ = tokio::time::timeout(ANSWER_WITHIN, joined).await;
        }
        let up = {
            let mut workers = self.workers();
            if self.stopping.load(Ordering::SeqCst) {
                return failed("the daemon is stopping");
            }
            let (worker, up) = worker::start(plan, self.shared.clone())?;
            workers.insert(id.clone(), Arc::new(worker));
            up
        };
        let result = within(&id, UP_WITHIN, up).await;
        if result.is_err() && self.workers().get(&id).is_some_and(|w| w.phase().is_over()) {
            self.workers().remove(&id);
        }
        result
    }

    /// The cache is there: so can be what waited for it. What is at its place may be another device by now.
    async fn add_waiting(self: &Arc<Self>, set: &str) {
        let waiting: BTreeMap<PathBuf, Probe> = {
            let devices = self.devices();
            let mine = devices.values().filter(|d| matches!(d.state, DeviceState::Waiting(_)));
            let mine = mine.filter_map(|d| d.probe.clone());
            let mine = mine.filter(|s| matches!(&s.role, Role::Backing { set: Some(s), .. } if s == set));
            mine.map(|probe| (probe.path.clone(), probe)).collect()
        };
        let Some(worker) = self.serving(set) else { return };
        for (path, probed) in probe_all(waiting.keys().cloned().collect()).await {
            let Some(was) = waiting.get(&path) else { continue };
            let now = match probed {
                Ok(now) if now.uuid == was.uuid => self.admit(&now).map(|()| now),
                Ok(now) => {
                    failed(format!("expected the device with UUID {}, found UUID {}", was.uuid, now.uuid))
                }
                Err(e) => Err(e),
            };
            let added = match now {
                Ok(now) if !self.may_be_attached(&now) => {
                    self.waits_for_a_word(&now, set);
                    continue;
                }
                Ok(_) => ask(&worker, ANSWER_WITHIN, |reply| Order::Add(path, reply)).await,
                Err(e) => Err(e),
            };
            match added {
                Ok(()) => {
                    self.stand(was, DeviceState::Served);
                    self.note(was).await;
                }
                Err(e) => self.stand(was, DeviceState::Failed(e.message().unwrap_or_default().to_owned())),
            }
        }
    }

    /// Whether a device that appears is one to register: nobody has it yet, and it was not let go on purpose. `came`: it
    /// was not there before, so that it may be tried again.
    pub(crate) fn is_new(&self, probe: &Probe, came: bool) -> bool {
        let is_it = |path: &PathBuf, d: &Device| {
            *path == probe.path || d.probe.as_ref().is_some_and(|s| s.uuid == probe.uuid)
        };
        let same: Vec<Device> =
            self.devices().iter().filter(|(p, d)| is_it(p, d)).map(|(_, d)| d.clone()).collect();
        let has = |d: &Device| match d.state {
            DeviceState::Served => d.probe.as_ref().is_none_or(|s| self.worker_of(s).is_some()),
            DeviceState::Waiting(_) | DeviceState::Stopped | DeviceState::Replugged(_) => true,
            DeviceState::Failed(_) | DeviceState::Unplugged(_) => false,
        };
        if same.iter().any(has) {
            return false;
        }
        came || (same.iter().all(|d| d.probe.is_none()) && !self.left().contains(&probe.uuid))
    }

    /// What was said of a device while it could not be found has come to an end.
    fn forget_missing(&self, known: &BTreeMap<PathBuf, Known>, probe: &Probe) {
        let is_it = |path: &PathBuf| {
            known.get(path).is_some_and(|k| k.uuid == probe.uuid)
                || path.canonicalize().is_ok_and(|found| found == probe.path)
        };
        self.devices().retain(|path, d| d.probe.is_some() || *path == probe.path || !is_it(path));
    }

    /// A device has one place: where its UUID was before, and is not served, there is nothing any more.
    fn forget_other_places(&self, probe: &Probe) {
        self.devices().retain(|path, d| {
            let same = d.probe.as_ref().is_some_and(|s| s.key() == probe.key());
            *path == probe.path || !same || d.state.has_thread()
        });
    }

    /// The thread that has this device.
    fn worker_of(&self, probe: &Probe) -> Option<Arc<Worker>> {
        let in_set = match &probe.role {
            Role::Cache { set } => Some(set),
            Role::Backing { set, .. } => set.as_ref(),
        };
        let alone = || self.serving(&probe.uuid).filter(|w| w.plan.alone.is_some());
        alone().or_else(|| in_set.and_then(|set| self.serving(set)))
    }

    /// Forgets a device: a cache device with its set goes down, dirty data stays dirty; a volume is stopped.
    pub(crate) async fn unregister(self: &Arc<Self>, device: &str) -> Result<Named, Failure> {
        let _one = self.changing.lock().await;
        let named = self.named(device).await?;
        let Some(path) = named.device.clone() else { return failed(format!("{named}: has no device")) };
        let known = self.devices().get(&path).cloned();
        let Some(known) = known else { return failed(format!("{named}: is not registered")) };
        if known.state.has_thread()
            && let Some(probe) = &known.probe
        {
            match &probe.role {
                Role::Cache { set } => {
                    self.stop_worker(set).await?;
                    self.devices().remove(&path);
                    self.orphans(set).await;
                }
                Role::Backing { .. } => {
                    self.stop_backing(probe).await?;
                }
            }
        }
        self.devices().remove(&path);
        known.probe.map_or(Ok(()), |probe| self.let_go_of(probe))?;
        self.shared.state().remove_device(&path)?;
        Ok(named)
    }

    async fn stop_worker(&self, id: &str) -> Result<(), Failure> {
        let Some(worker) = self.serving(id) else { return Ok(()) };
        worker.order(Order::Stop)?;
        let joined = worker.clone();
        let joined = tokio::task::spawn_blocking(move || joined.join());
        if tokio::time::timeout(ANSWER_WITHIN, joined).await.is_err() {
            return failed(format!(
                "set {id} has not stopped within {} seconds: is a volume in use?",
                ANSWER_WITHIN.as_secs()
            ));
        }
        match worker.phase() {
            Phase::Failed(why) => failed(why),
            _ => {
                self.workers().remove(id);
                Ok(())
            }
        }
    }

    /// Stops the volume of a backing device; whether there was one.
    async fn stop_backing(&self, probe: &Probe) -> Result<bool, Failure> {
        let Some((worker, volume)) = self.volume_of(&probe.uuid).await else { return Ok(false) };
        if worker.plan.alone.is_some() {
            self.stop_worker(&worker.plan.id).await?;
        } else {
            ask(&worker, ANSWER_WITHIN, |reply| Order::StopVolume(volume, reply)).await?;
        }
        Ok(true)
    }

    /// Attaches a backing device to a set. A device that is served is served again afterwards, through the cache; its
    /// clients have to connect again.
    pub(crate) async fn attach(self: &Arc<Self>, cache: &str, backing: &str) -> Result<Named, Failure> {
        let _one = self.changing.lock().await;
        let set = self.set_of(cache).await?;
        let Some(worker) = self.serving(&set) else { return failed(format!("set {set} is not served")) };
        let path = self.device_path(backing).await?;
        let probe = probe_device(&path).await?;
        self.admit(&probe)?;
        match &probe.role {
            Role::Cache { .. } => {
                return failed(format!("{backing}: expected a backing device, found a cache device"));
            }
            Role::Backing { set: Some(other), attachment: Attachment::Clean | Attachment::Dirty, .. } => {
                let already = if *other == set { "already " } else { "" };
                return failed(format!("{backing}: is {already}attached to cache set {other}"));
            }
            Role::Backing { .. } => {}
        }
        let was_served = self.stop_backing(&probe).await?;
        let added = ask(&worker, ANSWER_WITHIN, |reply| Order::Add(probe.path.clone(), reply)).await;
        let probed = probe_device(&path).await;
        if let Err(e) = added {
            // It goes on as it was.
            let now = probed.unwrap_or(probe);
            if was_served && let Err(why) = self.place_one(&now).await {
                self.stand(&now, DeviceState::Failed(why.message().unwrap_or_default().to_owned()));
            }
            return Err(e);
        }
        let now = probed.unwrap_or_else(|_| {
            let label = match &probe.role {
                Role::Backing { label, .. } => label.clone(),
                Role::Cache { .. } => String::new(),
            };
            Probe { role: Role::Backing { set: Some(set), attachment: Attachment::Clean, label }, ..probe }
        });
        self.stand(&now, DeviceState::Served);
        self.named_uuids().insert(now.uuid.clone());
        self.note(&now).await;
        self.remember(&now)?;
        Ok(self.named(&now.uuid).await?)
    }

    /// Stops a volume. Its device stays registered, for the next start.
    pub(crate) async fn stop_volume(self: &Arc<Self>, volume: &str) -> Result<Named, Failure> {
        let _one = self.changing.lock().await;
        let Found { worker, name, named } = self.find(volume).await?;
        if worker.plan.alone.is_some() {
            self.stop_worker(&worker.plan.id).await?;
        } else {
            ask(&worker, ANSWER_WITHIN, |reply| Order::StopVolume(name, reply)).await?;
        }
        for device in self.devices().values_mut() {
            let is_it = device.probe.as_ref().is_some_and(|s| Some(&s.uuid) == named.uuid.as_ref());
            if is_it && device.state.has_thread() {
                device.state = DeviceState::Stopped;
            }
        }
        Ok(named)
    }
}
