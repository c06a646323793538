//! What this host has: devices, the threads that serve them, and how one becomes the other.
//!
//! Owns the list of devices and threads, and every change of it, one at a time. A set is served when its cache device is
//! there; a backing device with it, or alone if it belongs to no set. A backing device whose cache is missing waits and
//! says so: it is never served without it. Must not know who asks; nothing here waits for a thread without a deadline.

mod begin;
mod gone;
mod views;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blockio::bridge::{Answer as Awaited, Reply, oneshot};
use engine::figures::{BucketFigures, BucketMap};
use serve::{Answer, Command, Failure, Snapshot};

use crate::devices::{Bond, Role, Seen, look, look_at_all};
use crate::history::History;
use crate::jobs::{Job, Jobs, Running};
use crate::pictures::DiskTrace;
use crate::shared::Shared;
use crate::state::Known;
use crate::worker::{self, Order, Phase, Plan, Worker};

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
enum Standing {
    /// Its thread has it.
    Served,
    /// For something that is missing.
    Waits(String),
    /// It was refused.
    Failed(String),
    /// Its volume was stopped.
    Stopped,
    /// It went away while its thread had it; what becomes of its volume.
    Gone(String),
    /// It is there again, and waits until nobody uses what it was for.
    Back(String),
}

impl Standing {
    /// A thread may have it, or one of that name.
    fn has_thread(&self) -> bool {
        matches!(self, Standing::Served | Standing::Gone(_) | Standing::Back(_))
    }
}

#[derive(Clone, Debug)]
struct Device {
    seen: Option<Seen>,
    standing: Standing,
}

/// See the module head.
pub(crate) struct Registry {
    pub(crate) shared: Arc<Shared>,
    pub(crate) jobs: Jobs,
    pub(crate) history: History,
    workers: Mutex<BTreeMap<String, Arc<Worker>>>,
    devices: Mutex<BTreeMap<PathBuf, Device>>,
    changing: tokio::sync::Mutex<()>,
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

    pub(crate) fn left(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stand(&self, seen: &Seen, standing: Standing) {
        if let Standing::Waits(why) | Standing::Failed(why) | Standing::Gone(why) | Standing::Back(why) =
            &standing
        {
            let bad = matches!(standing, Standing::Failed(_) | Standing::Gone(_));
            let level = if bad { "error" } else { "warning" };
            let text = format!("{}: {why}", seen.path.display());
            serve::message::message(level, &text);
            self.shared.hub.publish("device", None, level, &text);
        }
        self.devices().insert(seen.path.clone(), Device { seen: Some(seen.clone()), standing });
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
    /// already.
    pub(crate) async fn register(self: &Arc<Self>, paths: Vec<PathBuf>) -> Result<Vec<DeviceView>, Failure> {
        self.register_all(paths, false).await
    }

    /// The same, but one that is registered already is as good.
    pub(crate) async fn register_quietly(
        self: &Arc<Self>,
        paths: Vec<PathBuf>,
    ) -> Result<Vec<DeviceView>, Failure> {
        self.register_all(paths, true).await
    }

    async fn register_all(
        self: &Arc<Self>,
        paths: Vec<PathBuf>,
        quiet: bool,
    ) -> Result<Vec<DeviceView>, Failure> {
        let _one = self.changing.lock().await;
        let known = self.shared.state().devices();
        let mut seen = Vec::new();
        for (_, looked) in look_at_all(paths).await {
            let looked = looked?;
            if seen.iter().any(|s: &Seen| s.path == looked.path) {
                continue;
            }
            let is_served = self.devices().get(&looked.path).is_some_and(|d| d.standing == Standing::Served);
            let is_known = known.contains_key(&looked.path) && !quiet;
            if is_served && is_known && self.worker_of(&looked).is_some() {
                return failed(format!("{}: is registered already", looked.path.display()));
            }
            seen.push(looked);
        }
        let paths: Vec<PathBuf> = seen.iter().map(|s| s.path.clone()).collect();
        self.note_gone();
        let (back, seen): (Vec<Seen>, Vec<Seen>) = seen.into_iter().partition(|s| self.misses(s));
        for seen in back {
            self.came_back(seen).await?;
        }
        // One that a scan or the configuration brought is served already, and only to be remembered.
        let is_served = |s: &Seen| {
            self.devices().get(&s.path).is_some_and(|d| d.standing == Standing::Served)
                && self.worker_of(s).is_some()
        };
        let (served, new): (Vec<Seen>, Vec<Seen>) = seen.into_iter().partition(is_served);
        let before: Vec<PathBuf> = self.devices().keys().cloned().collect();
        let mut placed = self.place(new).await;
        placed.extend(served.into_iter().map(|seen| (seen, Ok(()))));
        let mut first = Ok(());
        for (seen, result) in placed {
            let result = match result {
                Err(e) if !self.comes_up_late(&seen) => {
                    if before.contains(&seen.path) {
                        let why = e.message().unwrap_or_default().to_owned();
                        self.stand(&seen, Standing::Failed(why));
                    } else {
                        self.devices().remove(&seen.path);
                    }
                    Err(e)
                }
                result => {
                    self.forget_missing(&known, &seen);
                    result.and(self.remember(&seen))
                }
            };
            first = first.and(result);
        }
        first?;
        Ok(self.device_views().into_iter().filter(|v| paths.contains(&v.path)).collect())
    }

    fn remember(&self, seen: &Seen) -> Result<(), Failure> {
        self.shared.state().add_device(&seen.path, &seen.uuid).map_err(|e| {
            let why = e.message().unwrap_or_default();
            Failure::Failed(format!(
                "{}: is registered, but only until the daemon ends: {why}: register it again when that is put right",
                seen.path.display()
            ))
        })
    }

    /// A thread that takes longer than whoever asked for it could wait has this device, and goes on: what waits for it gets
    /// its turn when it is up.
    fn comes_up_late(self: &Arc<Self>, seen: &Seen) -> bool {
        let of_cache = match &seen.role {
            Role::Cache { set } => set,
            Role::Backing { .. } => &seen.uuid,
        };
        let Some(worker) = self.serving(of_cache) else { return false };
        let its = [&worker.plan.cache, &worker.plan.alone];
        if !its.into_iter().any(|path| path.as_ref() == Some(&seen.path)) {
            return false;
        }
        self.stand(seen, Standing::Served);
        let this = self.clone();
        tokio::spawn(async move {
            while worker.phase() == Phase::Starting {
                tokio::time::sleep(LATE_LOOKS_EVERY).await;
            }
            let _one = this.changing.lock().await;
            this.add_waiting(&worker.plan.id).await;
        });
        true
    }

    /// As long as it is held, no device comes or goes, and nothing else changes what they are to be like.
    pub(crate) async fn nothing_changes(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.changing.lock().await
    }

    /// Gives devices to threads: caches first, at the same time, and then the rest.
    async fn place(self: &Arc<Self>, seen: Vec<Seen>) -> Vec<(Seen, Result<(), Failure>)> {
        let (caches, backings): (Vec<Seen>, Vec<Seen>) =
            seen.into_iter().partition(|s| matches!(s.role, Role::Cache { .. }));
        let mut results = Vec::new();
        for batch in [caches, backings] {
            let tasks: Vec<_> = batch
                .into_iter()
                .map(|seen| {
                    let (this, copy) = (self.clone(), seen.clone());
                    (seen, tokio::spawn(async move { this.place_one(&copy).await }))
                })
                .collect();
            for (seen, task) in tasks {
                let result = task.await.unwrap_or_else(|e| failed(format!("internal error: {e}")));
                results.push((seen, result));
            }
        }
        results
    }

    async fn place_one(self: &Arc<Self>, seen: &Seen) -> Result<(), Failure> {
        match &seen.role {
            Role::Cache { set } => {
                let plan = Plan { id: set.clone(), cache: Some(seen.path.clone()), alone: None };
                self.start(plan).await?;
                self.stand(seen, Standing::Served);
                self.add_waiting(set).await;
                Ok(())
            }
            Role::Backing { set, bond, .. } => {
                if let Some(worker) = set.as_ref().and_then(|set| self.serving(set)) {
                    let path = seen.path.clone();
                    ask(&worker, ANSWER_WITHIN, |reply| Order::Add(path, reply)).await?;
                    self.stand(seen, Standing::Served);
                    return Ok(());
                }
                let what = match bond {
                    Bond::Free | Bond::Stale => {
                        let alone = Some(seen.path.clone());
                        self.start(Plan { id: seen.uuid.clone(), cache: None, alone }).await?;
                        self.stand(seen, Standing::Served);
                        return Ok(());
                    }
                    Bond::Made => "was made for",
                    Bond::Clean => "is attached to",
                    Bond::Dirty => "has dirty data in",
                };
                let set = set.as_deref().unwrap_or_default();
                let why =
                    format!("{what} cache set {set}, whose cache device is not registered: waits for it");
                self.stand(seen, Standing::Waits(why));
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
            let gone = tokio::task::spawn_blocking(move || old.join());
            let _ = tokio::time::timeout(ANSWER_WITHIN, gone).await;
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

    /// The cache is there: so can be what waited for it.
    async fn add_waiting(self: &Arc<Self>, set: &str) {
        let waiting: Vec<Seen> = {
            let devices = self.devices();
            let mine = devices.values().filter(|d| matches!(d.standing, Standing::Waits(_)));
            let mine = mine.filter_map(|d| d.seen.clone());
            mine.filter(|s| matches!(&s.role, Role::Backing { set: Some(s), .. } if s == set)).collect()
        };
        let Some(worker) = self.serving(set) else { return };
        for seen in waiting {
            let path = seen.path.clone();
            let standing = match ask(&worker, ANSWER_WITHIN, |reply| Order::Add(path, reply)).await {
                Ok(()) => Standing::Served,
                Err(e) => Standing::Failed(e.message().unwrap_or_default().to_owned()),
            };
            self.stand(&seen, standing);
        }
    }

    /// Whether a device that appears is one to register: nobody has it yet, and it was not let go on purpose. `came`: it
    /// was not there before, so that it may be tried again.
    pub(crate) fn is_news(&self, seen: &Seen, came: bool) -> bool {
        let is_it = |path: &PathBuf, d: &Device| {
            *path == seen.path || d.seen.as_ref().is_some_and(|s| s.uuid == seen.uuid)
        };
        let same: Vec<Device> =
            self.devices().iter().filter(|(p, d)| is_it(p, d)).map(|(_, d)| d.clone()).collect();
        let has = |d: &Device| match d.standing {
            Standing::Served => d.seen.as_ref().is_none_or(|s| self.worker_of(s).is_some()),
            Standing::Waits(_) | Standing::Stopped | Standing::Back(_) => true,
            Standing::Failed(_) | Standing::Gone(_) => false,
        };
        if same.iter().any(has) {
            return false;
        }
        came || (same.iter().all(|d| d.seen.is_none()) && !self.left().contains(&seen.uuid))
    }

    /// What was said of a device while it could not be found has come to an end.
    fn forget_missing(&self, known: &BTreeMap<PathBuf, Known>, seen: &Seen) {
        let is_it = |path: &PathBuf| {
            known.get(path).is_some_and(|k| k.uuid == seen.uuid)
                || path.canonicalize().is_ok_and(|found| found == seen.path)
        };
        self.devices().retain(|path, d| d.seen.is_some() || *path == seen.path || !is_it(path));
    }

    /// The thread that has this device.
    fn worker_of(&self, seen: &Seen) -> Option<Arc<Worker>> {
        let in_set = match &seen.role {
            Role::Cache { set } => Some(set),
            Role::Backing { set, .. } => set.as_ref(),
        };
        let alone = || self.serving(&seen.uuid).filter(|w| w.plan.alone.is_some());
        alone().or_else(|| in_set.and_then(|set| self.serving(set)))
    }

    /// Forgets a device: a cache device with its set goes down, dirty data stays dirty; a volume is stopped.
    pub(crate) async fn unregister(self: &Arc<Self>, device: &str) -> Result<(), Failure> {
        let _one = self.changing.lock().await;
        let path = self.device_path(device)?;
        let known = self.devices().get(&path).cloned();
        let Some(known) = known else { return failed(format!("{device}: is not registered")) };
        if known.standing.has_thread()
            && let Some(seen) = &known.seen
        {
            match &seen.role {
                Role::Cache { set } => {
                    self.stop_worker(set).await?;
                    self.devices().remove(&path);
                    self.orphans(set).await;
                }
                Role::Backing { .. } => {
                    self.stop_backing(seen).await?;
                }
            }
        }
        self.devices().remove(&path);
        if let Some(seen) = known.seen {
            self.left().insert(seen.uuid);
        }
        self.shared.state().remove_device(&path)
    }

    /// The cache device of a set has gone: what it served waits for it, or is served alone if it was detached meanwhile.
    async fn orphans(self: &Arc<Self>, set: &str) {
        let served: Vec<PathBuf> = {
            let devices = self.devices();
            let mine = devices.iter().filter(|(_, d)| {
                d.standing == Standing::Served
                    && d.seen.as_ref().is_some_and(|s| match &s.role {
                        Role::Backing { set: Some(s), .. } => s == set,
                        _ => false,
                    })
            });
            mine.map(|(path, _)| path.clone()).collect()
        };
        for (path, looked) in look_at_all(served).await {
            let result = match &looked {
                Ok(seen) => self.place_one(seen).await,
                Err(e) => failed(e.message().unwrap_or_default()),
            };
            if let Err(e) = result {
                let why = e.message().unwrap_or_default().to_owned();
                self.devices().insert(path, Device { seen: looked.ok(), standing: Standing::Failed(why) });
            }
        }
    }

    async fn stop_worker(&self, id: &str) -> Result<(), Failure> {
        let Some(worker) = self.serving(id) else { return Ok(()) };
        worker.order(Order::Stop)?;
        let joined = worker.clone();
        let gone = tokio::task::spawn_blocking(move || joined.join());
        if tokio::time::timeout(ANSWER_WITHIN, gone).await.is_err() {
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
    async fn stop_backing(&self, seen: &Seen) -> Result<bool, Failure> {
        let place = self.find_by(|v| v.backing_uuid.as_deref() == Some(&seen.uuid)).await;
        let Some((worker, volume)) = place else { return Ok(false) };
        if worker.plan.alone.is_some() {
            self.stop_worker(&worker.plan.id).await?;
        } else {
            ask(&worker, ANSWER_WITHIN, |reply| Order::StopVolume(volume, reply)).await?;
        }
        Ok(true)
    }

    /// Attaches a backing device to a set. A device that is served is served again afterwards, through the cache; its
    /// clients have to connect again.
    pub(crate) async fn attach(self: &Arc<Self>, cache: &str, backing: &str) -> Result<(), Failure> {
        let _one = self.changing.lock().await;
        let set = self.set_of(cache)?;
        let Some(worker) = self.serving(&set) else { return failed(format!("set {set} is not served")) };
        let path = self.device_path(backing)?;
        let seen = look(&path).await?;
        match &seen.role {
            Role::Cache { .. } => {
                return failed(format!("{backing}: expected a backing device, found a cache device"));
            }
            Role::Backing { set: Some(other), bond: Bond::Clean | Bond::Dirty, .. } => {
                let already = if *other == set { "already " } else { "" };
                return failed(format!("{backing}: is {already}attached to cache set {other}"));
            }
            Role::Backing { .. } => {}
        }
        let was_served = self.stop_backing(&seen).await?;
        let added = ask(&worker, ANSWER_WITHIN, |reply| Order::Add(seen.path.clone(), reply)).await;
        let looked = look(&path).await;
        if let Err(e) = added {
            // It goes on as it was.
            let now = looked.unwrap_or(seen);
            if was_served && let Err(why) = self.place_one(&now).await {
                self.stand(&now, Standing::Failed(why.message().unwrap_or_default().to_owned()));
            }
            return Err(e);
        }
        let now = looked.unwrap_or_else(|_| {
            let label = match &seen.role {
                Role::Backing { label, .. } => label.clone(),
                Role::Cache { .. } => String::new(),
            };
            Seen { role: Role::Backing { set: Some(set), bond: Bond::Clean, label }, ..seen }
        });
        self.stand(&now, Standing::Served);
        self.remember(&now)
    }

    /// Stops a volume. Its device stays registered, for the next start.
    pub(crate) async fn stop_volume(&self, volume: &str) -> Result<(), Failure> {
        let _one = self.changing.lock().await;
        let (worker, name) = self.find(volume).await?;
        let path = self.figures_of(&worker).await?.volumes.into_iter().find(|v| v.name == name);
        if worker.plan.alone.is_some() {
            self.stop_worker(&worker.plan.id).await?;
        } else {
            ask(&worker, ANSWER_WITHIN, |reply| Order::StopVolume(name, reply)).await?;
        }
        let uuid = path.and_then(|v| v.backing_uuid);
        for device in self.devices().values_mut() {
            if device.seen.as_ref().is_some_and(|s| Some(&s.uuid) == uuid.as_ref()) {
                device.standing = Standing::Stopped;
            }
        }
        Ok(())
    }

    /// Makes a flash-only volume.
    pub(crate) async fn create(&self, set: &str, sectors: u64, label: String) -> Result<(), Failure> {
        let worker = self.set(set)?;
        ask(&worker, ANSWER_WITHIN, |reply| Order::Create(sectors, label, reply)).await
    }

    // ---- finding ----

    /// A device by path, or by the UUID or label of a registered one.
    pub(crate) fn device_path(&self, device: &str) -> Result<PathBuf, Failure> {
        let by_name: Vec<PathBuf> = {
            let devices = self.devices();
            let named = devices.iter().filter(|(path, d)| {
                path.as_os_str() == device
                    || d.seen.as_ref().is_some_and(|s| {
                        s.uuid == device || matches!(&s.role, Role::Backing { label, .. } if !label.is_empty() && label == device)
                    })
            });
            named.map(|(path, _)| path.clone()).collect()
        };
        match &by_name[..] {
            [one] => Ok(one.clone()),
            [] => Path::new(device).canonicalize().map_err(|e| {
                Failure::Failed(format!(
                    "{device}: expected a device, or the UUID or label of a registered one: {e}"
                ))
            }),
            several => {
                failed(format!("{device}: {} devices are called so: name one by its path", several.len()))
            }
        }
    }

    /// The UUID of a set that is named so, or by its cache device.
    pub(crate) fn set_of(&self, name: &str) -> Result<String, Failure> {
        if self.workers().contains_key(name) {
            return Ok(name.to_owned());
        }
        let path = self.device_path(name)?;
        let set = self.devices().get(&path).and_then(|d| match &d.seen {
            Some(Seen { role: Role::Cache { set }, .. }) => Some(set.clone()),
            _ => None,
        });
        set.ok_or_else(|| Failure::Failed(format!("{name}: is neither a set nor a registered cache device")))
    }

    /// The thread of a set that is named by UUID or cache device.
    pub(crate) fn set(&self, name: &str) -> Result<Arc<Worker>, Failure> {
        let id = self.set_of(name)?;
        self.workers().get(&id).cloned().ok_or_else(|| Failure::Failed(format!("set {id} is not served")))
    }

    async fn find_by(
        &self,
        wanted: impl Fn(&serve::snapshot::VolumeFigures) -> bool,
    ) -> Option<(Arc<Worker>, String)> {
        for worker in self.all_workers() {
            if worker.phase() != Phase::Serving {
                continue;
            }
            let Ok(figures) = self.figures_of(&worker).await else { continue };
            if let Some(volume) = figures.volumes.iter().find(|v| wanted(v)) {
                return Some((worker, volume.name.clone()));
            }
        }
        None
    }

    /// A volume by its name, label, backing device or that one's UUID: the thread that serves it, and its name.
    pub(crate) async fn find(&self, volume: &str) -> Result<(Arc<Worker>, String), Failure> {
        let by_name = self.find_by(|v| v.name == volume || v.backing_uuid.as_deref() == Some(volume)).await;
        if let Some(found) = by_name {
            return Ok(found);
        }
        let path = Path::new(volume).canonicalize().ok();
        let by_rest = self.find_by(|v| {
            let device = v.backing_device.as_ref().and_then(|d| Path::new(d).canonicalize().ok());
            (device.is_some() && device == path) || (!v.label.is_empty() && v.label == volume)
        });
        match by_rest.await {
            Some(found) => Ok(found),
            None => failed(format!("there is no volume {volume}")),
        }
    }

    // ---- commands ----

    /// Has a thread carry out a command.
    pub(crate) async fn command(&self, worker: &Worker, command: Command) -> Result<Answer, Failure> {
        ask(worker, ANSWER_WITHIN, |reply| Order::Do(command, reply)).await
    }

    /// Begins a job on a set's thread.
    pub(crate) fn begin_job(
        &self,
        worker: &Worker,
        kind: &'static str,
        target: &str,
        order: impl FnOnce(Running) -> Order,
    ) -> Result<Arc<Job>, Failure> {
        let Some(job) = self.jobs.begin(kind, target) else {
            return failed("too many jobs are running: wait for one to end, or cancel one");
        };
        match worker.order(order(Running(job.clone()))) {
            Ok(()) => Ok(job),
            Err(e) => Err(e),
        }
    }

    /// What the buckets of a set hold.
    pub(crate) async fn buckets(&self, set: &str) -> Result<BucketFigures, Failure> {
        let worker = self.set(set)?;
        ask(&worker, FIGURES_WITHIN, Order::Buckets).await
    }

    /// The same, part by part of the device.
    pub(crate) async fn bucket_map(&self, worker: &Worker, cells: u32) -> Result<BucketMap, Failure> {
        ask(worker, FIGURES_WITHIN, |reply| Order::BucketMap(cells, reply)).await
    }

    /// What reached the backing device of a volume since the request of this number.
    pub(crate) async fn disk_trace(
        &self,
        worker: &Worker,
        volume: &str,
        since: u64,
    ) -> Result<DiskTrace, Failure> {
        let name = volume.to_owned();
        ask(worker, FIGURES_WITHIN, |reply| Order::DiskTrace(name, since, reply)).await
    }

    /// What a set's cache device counts begins anew.
    pub(crate) async fn clear_device_stats(&self, set: &str) -> Result<(), Failure> {
        let worker = self.set(set)?;
        ask(&worker, ANSWER_WITHIN, Order::ClearDeviceStats).await
    }

    /// The figures of one thread.
    pub(crate) async fn figures_of(&self, worker: &Worker) -> Result<Snapshot, Failure> {
        match ask(worker, FIGURES_WITHIN, |reply| Order::Do(Command::Stats, reply)).await? {
            Answer::Stats(figures) => Ok(*figures),
            Answer::Done => failed("expected figures"),
        }
    }

    /// What the engines of all threads count. A thread that does not answer is left out, and said.
    pub(crate) async fn engine_figures(&self) -> metrics::Figures {
        let mut all = metrics::Figures::default();
        for worker in self.all_workers() {
            if worker.phase() != Phase::Serving {
                continue;
            }
            match ask(&worker, FIGURES_WITHIN, Order::Figures).await {
                Ok(figures) => {
                    all.sets.extend(figures.sets);
                    all.alone.extend(figures.alone);
                }
                Err(e) => {
                    let why = e.message().unwrap_or_default();
                    self.shared.hub.publish("set", Some(&worker.plan.id), "warning", why);
                }
            }
        }
        all
    }

    /// Why a volume does what it does.
    pub(crate) async fn explain(&self, volume: &str) -> Result<metrics::Explanation, Failure> {
        let (worker, name) = self.find(volume).await?;
        let figures = ask(&worker, FIGURES_WITHIN, Order::Figures).await?;
        for set in &figures.sets {
            if let Some(volume) = set.volumes.iter().find(|v| v.name == name) {
                return Ok(metrics::explain(volume, Some(set)));
            }
        }
        match figures.alone.iter().find(|v| v.name == name) {
            Some(volume) => Ok(metrics::explain(volume, None)),
            None => failed(format!("there is no volume {volume}")),
        }
    }

    /// Tells every thread to stop and waits until all have. `force` may be called later from elsewhere.
    pub(crate) async fn stop_all(&self) -> Result<(), Failure> {
        let workers: Vec<_> = {
            let workers = self.workers();
            self.stopping.store(true, Ordering::SeqCst);
            workers.values().cloned().collect()
        };
        for worker in &workers {
            // One that is gone has nothing to stop.
            let _ = worker.order(Order::Stop);
        }
        let mut result = Ok(());
        for worker in workers {
            let joined = worker.clone();
            let _ = tokio::task::spawn_blocking(move || joined.join()).await;
            if let Phase::Failed(why) = worker.phase() {
                result = failed(format!("set {}: {why}", worker.plan.id));
            }
        }
        result
    }

    /// Nobody is waited for any more.
    pub(crate) fn force(&self) {
        for worker in self.all_workers() {
            let _ = worker.order(Order::Force);
        }
    }
}
