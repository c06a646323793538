//! What this host has: devices, the threads that serve them, and how one becomes the other.
//!
//! Owns the list of devices and threads, and every change of it, one at a time. A set is served when its cache device is
//! there; a backing device with it, or alone if it belongs to no set. A backing device whose cache is missing waits and
//! says so: it is never served without it. Must not know who asks; nothing here waits for a thread without a deadline.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blockio::bridge::{Answer as Awaited, Reply, oneshot};
use engine::figures::{BucketFigures, BucketMap};
use serde::Serialize;
use serve::{Answer, Command, Failure, Snapshot};

use crate::devices::{Bond, Role, Seen, look, look_at_all};
use crate::history::History;
use crate::jobs::{Job, Jobs, Running};
use crate::pictures::DiskTrace;
use crate::shared::Shared;
use crate::worker::{self, Order, Phase, Plan, Worker};

/// How long a set may take for its figures.
const FIGURES_WITHIN: Duration = Duration::from_secs(3);
/// How long a set may take for anything short.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);
/// How long a set may take to come up before whoever asked for it is told that it still does.
const UP_WITHIN: Duration = Duration::from_secs(90);

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
}

#[derive(Clone, Debug)]
struct Device {
    seen: Option<Seen>,
    standing: Standing,
}

/// A device as clients see it.
#[derive(Clone, Serialize)]
pub(crate) struct DeviceView {
    pub(crate) path: PathBuf,
    pub(crate) uuid: Option<String>,
    /// `cache`, `backing`, or nothing if it could not be looked at.
    pub(crate) kind: Option<&'static str>,
    pub(crate) set: Option<String>,
    pub(crate) label: String,
    /// `served`, `waiting`, `failed` or `stopped`.
    pub(crate) state: &'static str,
    pub(crate) why: Option<String>,
}

/// A thread as clients see it.
#[derive(Clone, Serialize)]
pub(crate) struct SetView {
    /// UUID of the set, or of the backing device that is served alone.
    pub(crate) id: String,
    /// There is a cache device.
    pub(crate) has_cache: bool,
    /// `starting`, `serving`, `stopping`, `stopped` or `failed`.
    pub(crate) state: &'static str,
    /// Why it failed, or why there are no figures.
    pub(crate) why: Option<String>,
    /// Figures, while it is served.
    #[serde(flatten)]
    pub(crate) figures: Snapshot,
}

/// See the module head.
pub(crate) struct Registry {
    pub(crate) shared: Arc<Shared>,
    pub(crate) jobs: Jobs,
    pub(crate) history: History,
    workers: Mutex<BTreeMap<String, Arc<Worker>>>,
    devices: Mutex<BTreeMap<PathBuf, Device>>,
    changing: tokio::sync::Mutex<()>,
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
            stopping: AtomicBool::new(false),
        }
    }

    fn workers(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Worker>>> {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn devices(&self) -> MutexGuard<'_, BTreeMap<PathBuf, Device>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stand(&self, seen: &Seen, standing: Standing) {
        if let Standing::Waits(why) | Standing::Failed(why) = &standing {
            let level = if matches!(standing, Standing::Failed(_)) { "error" } else { "warning" };
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

    /// Registers devices at the start: those of the configuration, of the state directory, and what a scan finds. What
    /// cannot be had is said and waits for somebody to register it again.
    pub(crate) async fn begin(self: &Arc<Self>, scanned: Vec<PathBuf>) {
        let _one = self.changing.lock().await;
        let known = self.shared.state().devices();
        let mut paths: Vec<PathBuf> = known.keys().cloned().collect();
        paths.extend(self.shared.config().devices.clone());
        paths.sort();
        paths.dedup();
        let asked_for = paths.len();
        paths.extend(scanned.into_iter().filter(|p| !known.contains_key(p)));
        let mut all = Vec::new();
        for (n, (path, looked)) in look_at_all(paths).await.into_iter().enumerate() {
            match looked {
                Ok(seen) => match known.get(&path) {
                    Some(k) if k.uuid != seen.uuid => {
                        let why = format!(
                            "expected the device with UUID {}, found UUID {}: register it again",
                            k.uuid, seen.uuid
                        );
                        self.stand(&seen, Standing::Failed(why));
                    }
                    _ => all.push(seen),
                },
                // A scan looks at everything; most of it is no business of ours.
                Err(e) if n < asked_for => {
                    let why = e.message().unwrap_or_default().to_owned();
                    serve::message::message("error", &why);
                    self.shared.hub.publish("device", None, "error", &why);
                    let device = Device { seen: None, standing: Standing::Failed(why) };
                    self.devices().insert(path, device);
                }
                Err(_) => {}
            }
        }
        let mut unique: Vec<Seen> = Vec::new();
        for seen in all {
            if !unique.iter().any(|u| u.path == seen.path) {
                unique.push(seen);
            }
        }
        for (seen, result) in self.place(unique).await {
            if let Err(e) = result {
                self.stand(&seen, Standing::Failed(e.message().unwrap_or_default().to_owned()));
            }
        }
    }

    /// Registers devices: each comes up as it should, waits for what is missing, or is refused.
    pub(crate) async fn register(self: &Arc<Self>, paths: Vec<PathBuf>) -> Result<Vec<DeviceView>, Failure> {
        let _one = self.changing.lock().await;
        let mut seen = Vec::new();
        for (_, looked) in look_at_all(paths).await {
            let looked = looked?;
            if self.devices().get(&looked.path).is_some_and(|d| d.standing == Standing::Served)
                && self.worker_of(&looked).is_some()
            {
                return failed(format!("{}: is registered already", looked.path.display()));
            }
            seen.push(looked);
        }
        let paths: Vec<PathBuf> = seen.iter().map(|s| s.path.clone()).collect();
        let mut first = Ok(());
        for (seen, result) in self.place(seen).await {
            match result {
                Ok(()) => self.shared.state().add_device(&seen.path, &seen.uuid)?,
                Err(e) => {
                    self.devices().remove(&seen.path);
                    first = first.and(Err(e));
                }
            }
        }
        first?;
        Ok(self.device_views().into_iter().filter(|v| paths.contains(&v.path)).collect())
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
        if known.standing == Standing::Served
            && let Some(seen) = &known.seen
        {
            match &seen.role {
                Role::Cache { set } => {
                    self.stop_worker(set).await?;
                    self.devices().remove(&path);
                    self.orphans(set).await;
                }
                Role::Backing { .. } => self.stop_backing(seen).await?,
            }
        }
        self.devices().remove(&path);
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

    async fn stop_backing(&self, seen: &Seen) -> Result<(), Failure> {
        let place = self.find_by(|v| v.backing_uuid.as_deref() == Some(&seen.uuid)).await;
        let Some((worker, volume)) = place else { return Ok(()) };
        if worker.plan.alone.is_some() {
            return self.stop_worker(&worker.plan.id).await;
        }
        ask(&worker, ANSWER_WITHIN, |reply| Order::StopVolume(volume, reply)).await
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
        self.stop_backing(&seen).await?;
        let added = ask(&worker, ANSWER_WITHIN, |reply| Order::Add(seen.path.clone(), reply)).await;
        let now = look(&path).await?;
        if let Err(e) = added {
            // It goes on as it was.
            let _ = self.place_one(&now).await;
            return Err(e);
        }
        self.stand(&now, Standing::Served);
        self.shared.state().add_device(&now.path, &now.uuid)
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

    /// Every thread with its figures, asked at the same time.
    pub(crate) async fn sets(self: &Arc<Self>) -> Vec<SetView> {
        let asked: Vec<_> = self
            .all_workers()
            .into_iter()
            .map(|worker| {
                let this = self.clone();
                tokio::spawn(async move {
                    let phase = worker.phase();
                    let mut view = SetView {
                        id: worker.plan.id.clone(),
                        has_cache: worker.plan.cache.is_some(),
                        state: phase.name(),
                        why: None,
                        figures: Snapshot::default(),
                    };
                    match phase {
                        Phase::Serving => match this.figures_of(&worker).await {
                            Ok(figures) => view.figures = figures,
                            Err(e) => view.why = e.message().map(str::to_owned),
                        },
                        Phase::Failed(why) => view.why = Some(why),
                        _ => {}
                    }
                    view
                })
            })
            .collect();
        let mut views = Vec::new();
        for view in asked {
            views.extend(view.await);
        }
        views
    }

    /// Every registered device.
    pub(crate) fn device_views(&self) -> Vec<DeviceView> {
        let failure_of = |seen: &Option<Seen>| {
            let seen = seen.as_ref()?;
            let set = match &seen.role {
                Role::Cache { set } => Some(set),
                Role::Backing { set, .. } => set.as_ref(),
            };
            let workers = self.workers();
            let mine = workers.get(&seen.uuid).or_else(|| workers.get(set?));
            match mine?.phase() {
                Phase::Failed(why) => Some(why),
                _ => None,
            }
        };
        let devices = self.devices().clone();
        let views = devices.into_iter().map(|(path, device)| {
            let (state, why) = match device.standing {
                Standing::Served => match failure_of(&device.seen) {
                    Some(why) => ("failed", Some(why)),
                    None => ("served", None),
                },
                Standing::Waits(why) => ("waiting", Some(why)),
                Standing::Failed(why) => ("failed", Some(why)),
                Standing::Stopped => ("stopped", None),
            };
            let (uuid, role) = device.seen.map(|s| (s.uuid, s.role)).unzip();
            let (kind, set, label) = match role {
                Some(Role::Cache { set }) => (Some("cache"), Some(set), String::new()),
                Some(Role::Backing { set, label, .. }) => (Some("backing"), set, label),
                None => (None, None, String::new()),
            };
            DeviceView { path, uuid, kind, set, label, state, why }
        });
        views.collect()
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
