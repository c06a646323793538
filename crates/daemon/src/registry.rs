//! What this host has: devices, the threads that serve them, and how one becomes the other.
//!
//! Owns the list of devices and threads, and every change of it, one at a time. A set is served when its cache device is
//! there; a backing device with it, or alone if it belongs to no set. A backing device whose cache is missing waits and
//! says so: it is never served without it. Must not know who asks; nothing here waits for a thread without a deadline.

mod admit;
mod begin;
mod find;
mod gone;
mod orders;
mod reached;
mod views;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blockio::bridge::{Answer as Awaited, Reply, oneshot};
use serve::{Failure, message};

use crate::devices::{Bond, Role, Seen, look, look_at_all};
use crate::history::History;
use crate::jobs::Jobs;
use crate::names::Named;
use crate::order::{Order, Plan};
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
    /// already, unless that is as good.
    pub(crate) async fn register(
        self: &Arc<Self>,
        paths: Vec<PathBuf>,
        by: By,
    ) -> Result<Registered, Failure> {
        let _one = self.changing.lock().await;
        let known = self.shared.state().devices();
        let seen = self.look_at_new(paths, &known, by.is_quiet()).await?;
        self.note_gone();
        let accepted = self.admit_all(&seen, by)?;
        accepted.iter().for_each(message::note);
        if by.is_operator() {
            self.named_uuids().extend(seen.iter().map(|s| s.uuid.clone()));
        }
        let paths: Vec<PathBuf> = seen.iter().map(|s| s.path.clone()).collect();
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
                    self.forget_other_places(&seen);
                    result.and(self.remember(&seen))
                }
            };
            first = first.and(result);
        }
        first?;
        let devices = self.device_views().into_iter().filter(|v| paths.contains(&v.path)).collect();
        Ok(Registered { devices, accepted })
    }

    /// Looks at devices that are to be registered, each once.
    async fn look_at_new(
        &self,
        paths: Vec<PathBuf>,
        known: &BTreeMap<PathBuf, Known>,
        quiet: bool,
    ) -> Result<Vec<Seen>, Failure> {
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
        Ok(seen)
    }

    fn remember(&self, seen: &Seen) -> Result<(), Failure> {
        let named = self.named_uuids().contains(&seen.uuid);
        self.shared.state().add_device(&seen.path, &seen.uuid, named).map_err(|e| {
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
        let (this, late) = (self.clone(), seen.clone());
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
        self.admit(seen)?;
        match &seen.role {
            Role::Cache { set } => {
                let plan = Plan { id: set.clone(), cache: Some(seen.path.clone()), alone: None };
                self.start(plan).await?;
                self.stand(seen, Standing::Served);
                self.note(seen).await;
                self.add_waiting(set).await;
                Ok(())
            }
            Role::Backing { set, bond, .. } => {
                if let Some(worker) = set.as_ref().and_then(|set| self.serving(set)) {
                    if !self.may_be_attached(seen) {
                        self.waits_for_a_word(seen, &worker.plan.id);
                        return Ok(());
                    }
                    let path = seen.path.clone();
                    ask(&worker, ANSWER_WITHIN, |reply| Order::Add(path, reply)).await?;
                    self.stand(seen, Standing::Served);
                    self.note(seen).await;
                    return Ok(());
                }
                let what = match bond {
                    Bond::Free | Bond::Stale => {
                        let alone = Some(seen.path.clone());
                        self.start(Plan { id: seen.uuid.clone(), cache: None, alone }).await?;
                        self.stand(seen, Standing::Served);
                        self.note(seen).await;
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

    /// The cache is there: so can be what waited for it. What is at its place may be another device by now.
    async fn add_waiting(self: &Arc<Self>, set: &str) {
        let waiting: BTreeMap<PathBuf, Seen> = {
            let devices = self.devices();
            let mine = devices.values().filter(|d| matches!(d.standing, Standing::Waits(_)));
            let mine = mine.filter_map(|d| d.seen.clone());
            let mine = mine.filter(|s| matches!(&s.role, Role::Backing { set: Some(s), .. } if s == set));
            mine.map(|seen| (seen.path.clone(), seen)).collect()
        };
        let Some(worker) = self.serving(set) else { return };
        for (path, looked) in look_at_all(waiting.keys().cloned().collect()).await {
            let Some(was) = waiting.get(&path) else { continue };
            let now = match looked {
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
                    self.stand(was, Standing::Served);
                    self.note(was).await;
                }
                Err(e) => self.stand(was, Standing::Failed(e.message().unwrap_or_default().to_owned())),
            }
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

    /// A device has one place: where its UUID was before, and is not served, there is nothing any more.
    fn forget_other_places(&self, seen: &Seen) {
        self.devices().retain(|path, d| {
            let same = d.seen.as_ref().is_some_and(|s| s.key() == seen.key());
            *path == seen.path || !same || d.standing.has_thread()
        });
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
    pub(crate) async fn unregister(self: &Arc<Self>, device: &str) -> Result<Named, Failure> {
        let _one = self.changing.lock().await;
        let named = self.named(device).await?;
        let Some(path) = named.device.clone() else { return failed(format!("{named}: has no device")) };
        let known = self.devices().get(&path).cloned();
        let Some(known) = known else { return failed(format!("{named}: is not registered")) };
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
        known.seen.map_or(Ok(()), |seen| self.let_go_of(seen))?;
        self.shared.state().remove_device(&path)?;
        Ok(named)
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
        let Some((worker, volume)) = self.volume_of(&seen.uuid).await else { return Ok(false) };
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
        let seen = look(&path).await?;
        self.admit(&seen)?;
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
            let is_it = device.seen.as_ref().is_some_and(|s| Some(&s.uuid) == named.uuid.as_ref());
            if is_it && device.standing.has_thread() {
                device.standing = Standing::Stopped;
            }
        }
        Ok(named)
    }
}
