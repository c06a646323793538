//! The threads of sets, by the id of the set.
//!
//! Owns the list of threads, their start and their end, and the rule that no thread starts once the daemon stops. Every
//! wait for a thread has a deadline. Must not know which devices are registered.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serve::Failure;
use tokio::sync::mpsc;

use crate::hub::Kind;
use crate::order::{Order, Plan};
use crate::places::VolumeKey;
use crate::probe::{Probe, Role};
use crate::shared::{Shared, Takeover};
use crate::worker::{self, ANSWER_WITHIN, Phase, Worker};

/// Time after which a client that waits for the start of a set gets the answer that the set is still starting.
const UP_WITHIN: Duration = Duration::from_secs(90);

/// The threads of all sets.
pub(crate) struct Workers {
    shared: Arc<Shared>,
    running: Mutex<BTreeMap<String, Arc<Worker>>>,
}

fn failed<T>(text: impl Into<String>) -> Result<T, Failure> {
    Err(Failure::Failed(text.into()))
}

impl Workers {
    pub(crate) fn new(shared: Arc<Shared>) -> Workers {
        Workers { shared, running: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Worker>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Every thread in the list, also if it has failed.
    pub(crate) fn all(&self) -> Vec<Arc<Worker>> {
        self.lock().values().cloned().collect()
    }

    /// The thread of this set, also if it has ended.
    pub(crate) fn get(&self, id: &str) -> Option<Arc<Worker>> {
        self.lock().get(id).cloned()
    }

    /// The thread of this set, unless it has ended.
    pub(crate) fn serving(&self, id: &str) -> Option<Arc<Worker>> {
        self.get(id).filter(|w| !w.phase().is_over())
    }

    /// The thread of the set that this device belongs to, or of the device if it is served alone.
    pub(crate) fn of_device(&self, probe: &Probe) -> Option<Arc<Worker>> {
        let in_set = match &probe.role {
            Role::Cache { set, .. } => Some(set),
            Role::Backing { set, .. } => set.as_ref(),
        };
        let alone = || self.serving(&probe.uuid).filter(|w| w.plan.alone.is_some());
        alone().or_else(|| in_set.and_then(|set| self.serving(set)))
    }

    /// The thread and the name of the volume of this backing device, as the threads report them.
    pub(crate) async fn volume_of(&self, uuid: &str) -> Option<(Arc<Worker>, String)> {
        for worker in self.all() {
            if worker.phase() != Phase::Serving {
                continue;
            }
            let Ok(figures) = worker.snapshot().await else { continue };
            let found = figures.volumes.iter().find(|v| v.backing_uuid.as_deref() == Some(uuid));
            if let Some(volume) = found {
                return Some((worker, volume.name.clone()));
            }
        }
        None
    }

    /// The served volumes, with their names.
    pub(crate) async fn volumes(&self) -> Vec<VolumeKey> {
        let mut all = Vec::new();
        for worker in self.all().into_iter().filter(|w| w.phase() == Phase::Serving) {
            if let Ok(figures) = worker.snapshot().await {
                all.extend(figures.volumes.into_iter().map(|v| (worker.volume_key(&v), v.name)));
            }
        }
        all
    }

    /// The takeovers by sets of groups, for the one task that follows them.
    pub(crate) fn takeovers(&self) -> Option<mpsc::UnboundedReceiver<Takeover>> {
        self.shared.takeovers()
    }

    /// Seconds for which a disk waits for its own set before another set of the group takes it over.
    pub(crate) fn takeover_after_s(&self) -> u64 {
        self.shared.config().takeover_after_s
    }

    /// Starts a thread, and waits until its set is up. A set of a group that has a thread is served by that one.
    ///
    /// # Errors
    /// If a thread with this id serves already, the daemon is stopping, or the set cannot start.
    pub(crate) async fn start(&self, plan: Plan) -> Result<(), Failure> {
        let id = plan.id.clone();
        if self.serving(&id).is_some() {
            return failed(format!("{id} is served already: is one device a copy of the other?"));
        }
        let old = self.lock().remove(&id);
        if let Some(old) = old {
            // The phase of the old thread says that it has ended, but its devices are free only after the end of the
            // thread.
            let joined = tokio::task::spawn_blocking(move || old.join());
            let _ = tokio::time::timeout(ANSWER_WITHIN, joined).await;
        }
        let (worker, up) = {
            let mut workers = self.lock();
            self.refuse_while_stopping()?;
            let of_group = |w: &&Arc<Worker>| plan.group.is_some() && w.group() == plan.group;
            let beside = workers.values().filter(of_group).find(|w| !w.phase().is_over());
            let beside = beside.and_then(|w| w.start_beside(plan.clone(), self.shared.clone()));
            let (worker, up) = match beside {
                Some(started) => started,
                None => worker::start(plan, self.shared.clone())?,
            };
            let worker = Arc::new(worker);
            workers.insert(id.clone(), worker.clone());
            (worker, up)
        };
        let result = worker.within(UP_WITHIN, up).await;
        if result.is_err() && self.lock().get(&id).is_some_and(|w| w.phase().is_over()) {
            self.lock().remove(&id);
        }
        result
    }

    /// Removes a thread that has ended from the list, because its device is not registered any more.
    pub(crate) fn forget(&self, id: &str) {
        self.lock().retain(|known, worker| known != id || !worker.phase().is_over());
    }

    /// Whether the daemon stops, so that no thread starts any more.
    pub(crate) fn is_stopping(&self) -> bool {
        self.shared.is_stopping()
    }

    /// Refuses a command about devices while the daemon stops.
    ///
    /// A set that has stopped already would look as if its cache device were not registered.
    pub(crate) fn refuse_while_stopping(&self) -> Result<(), Failure> {
        match self.is_stopping() {
            false => Ok(()),
            true => failed(
                "the daemon is stopping; `ubcache status` shows what it waits for; run this command again after its next start",
            ),
        }
    }

    /// Stops a thread and waits for its end; does nothing if no thread serves the set.
    pub(crate) async fn stop(&self, id: &str) -> Result<(), Failure> {
        let Some(worker) = self.serving(id) else { return Ok(()) };
        // One that is ending on its own has no answer; its end is awaited below.
        if worker.phase() != Phase::Stopping {
            worker.stop_if_free().await?;
        }
        let joined = worker.clone();
        let joined = tokio::task::spawn_blocking(move || joined.join());
        if tokio::time::timeout(ANSWER_WITHIN, joined).await.is_err() {
            return failed(format!(
                "{} is still stopping after {} seconds: a device does not answer; see `ubcache status`",
                worker.title(),
                ANSWER_WITHIN.as_secs()
            ));
        }
        match worker.phase() {
            Phase::Failed(why) => Err(Failure::of(why)),
            _ => {
                self.lock().remove(id);
                Ok(())
            }
        }
    }

    /// Stops the volume of a backing device. Returns whether it was served.
    ///
    /// # Errors
    /// If the thread of its set does not answer, among others: the thread may serve the device.
    pub(crate) async fn stop_backing(&self, probe: &Probe) -> Result<bool, Failure> {
        let Some((worker, volume)) = self.volume_of(&probe.uuid).await else {
            if let Some(worker) = self.of_device(probe) {
                worker.snapshot().await?;
            }
            return Ok(false);
        };
        if worker.plan.alone.is_some() {
            self.stop(&worker.plan.id).await?;
        } else {
            worker.stop_volume(volume).await?;
        }
        Ok(true)
    }

    /// Figures of the engines of all threads. A thread that does not answer is logged and left out.
    pub(crate) async fn engine_figures(&self) -> metrics::Figures {
        let mut all = metrics::Figures::default();
        for worker in self.all() {
            if !worker.phase().has_figures() {
                continue;
            }
            match worker.figures().await {
                Ok(figures) => {
                    all.sets.extend(figures.sets);
                    all.alone.extend(figures.alone);
                    all.not_exported.extend(figures.not_exported);
                }
                Err(_) if worker.phase().is_over() => {}
                Err(e) => {
                    let why = e.message().unwrap_or_default();
                    self.shared.hub.publish(Kind::Set, Some(&worker.plan.id), "warning", why);
                }
            }
        }
        all
    }

    /// Stops all threads and waits for their end. [`Workers::force`] can be called meanwhile.
    pub(crate) async fn stop_all(&self) -> Result<(), Failure> {
        let workers: Vec<_> = {
            let workers = self.lock();
            self.shared.begin_stop();
            workers.values().cloned().collect()
        };
        for worker in &workers {
            // A thread that has ended needs no stop.
            let _ = worker.order(Order::Stop);
        }
        let mut result = Ok(());
        for worker in workers {
            let joined = worker.clone();
            let _ = tokio::task::spawn_blocking(move || joined.join()).await;
            if let Phase::Failed(why) = worker.phase() {
                result = Err(Failure::because(worker.title(), why));
            }
        }
        result
    }

    /// Makes all threads stop without waiting for the users of their volumes.
    pub(crate) fn force(&self) {
        for worker in self.all() {
            let _ = worker.order(Order::Force);
        }
    }
}
