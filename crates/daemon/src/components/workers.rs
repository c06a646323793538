//! The threads of sets, by the id of the set.
//!
//! Owns the list of threads, their start and their end, and the rule that nothing is started once the daemon stops. Must not
//! know which devices are registered; nothing here waits for a thread without a deadline.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serve::Failure;

use crate::hub::Kind;
use crate::order::{Order, Plan};
use crate::probe::{Probe, Role};
use crate::shared::Shared;
use crate::worker::{self, ANSWER_WITHIN, Phase, Worker, within};

/// Time after which a client that waits for the start of a set gets the answer that the set is still starting.
const UP_WITHIN: Duration = Duration::from_secs(90);

/// See the module head.
pub(crate) struct Workers {
    shared: Arc<Shared>,
    running: Mutex<BTreeMap<String, Arc<Worker>>>,
    /// Nothing new is begun.
    stopping: AtomicBool,
}

fn failed<T>(text: impl Into<String>) -> Result<T, Failure> {
    Err(Failure::Failed(text.into()))
}

impl Workers {
    pub(crate) fn new(shared: Arc<Shared>) -> Workers {
        Workers { shared, running: Mutex::default(), stopping: AtomicBool::new(false) }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Worker>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Every thread that has not ended in good order, by its id.
    pub(crate) fn all(&self) -> Vec<Arc<Worker>> {
        self.lock().values().cloned().collect()
    }

    /// The thread of this set, though it may have ended.
    pub(crate) fn get(&self, id: &str) -> Option<Arc<Worker>> {
        self.lock().get(id).cloned()
    }

    /// The thread of this set, if it serves.
    pub(crate) fn serving(&self, id: &str) -> Option<Arc<Worker>> {
        self.get(id).filter(|w| !w.phase().is_over())
    }

    /// The thread that has this device.
    pub(crate) fn of_device(&self, probe: &Probe) -> Option<Arc<Worker>> {
        let in_set = match &probe.role {
            Role::Cache { set } => Some(set),
            Role::Backing { set, .. } => set.as_ref(),
        };
        let alone = || self.serving(&probe.uuid).filter(|w| w.plan.alone.is_some());
        alone().or_else(|| in_set.and_then(|set| self.serving(set)))
    }

    /// The volume of the backing device with this UUID, by what the threads say.
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

    /// Starts a thread, and waits until its set is up.
    ///
    /// # Errors
    /// If one of this id serves already, the daemon is stopping, or the set cannot be had.
    pub(crate) async fn start(&self, plan: Plan) -> Result<(), Failure> {
        let id = plan.id.clone();
        if self.serving(&id).is_some() {
            return failed(format!("{id} is served already: is one device a copy of the other?"));
        }
        let old = self.lock().remove(&id);
        if let Some(old) = old {
            // Its phase says that it has ended, but its devices are free only after the end of the thread.
            let joined = tokio::task::spawn_blocking(move || old.join());
            let _ = tokio::time::timeout(ANSWER_WITHIN, joined).await;
        }
        let up = {
            let mut workers = self.lock();
            if self.stopping.load(Ordering::SeqCst) {
                return failed("the daemon is stopping");
            }
            let (worker, up) = worker::start(plan, self.shared.clone())?;
            workers.insert(id.clone(), Arc::new(worker));
            up
        };
        let result = within(&id, UP_WITHIN, up).await;
        if result.is_err() && self.lock().get(&id).is_some_and(|w| w.phase().is_over()) {
            self.lock().remove(&id);
        }
        result
    }

    /// Stops a thread and waits for its end; nothing if there is none.
    pub(crate) async fn stop(&self, id: &str) -> Result<(), Failure> {
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
            Phase::Failed(why) => Err(Failure::of(why)),
            _ => {
                self.lock().remove(id);
                Ok(())
            }
        }
    }

    /// Stops the volume of a backing device; whether there was one.
    pub(crate) async fn stop_backing(&self, probe: &Probe) -> Result<bool, Failure> {
        let Some((worker, volume)) = self.volume_of(&probe.uuid).await else { return Ok(false) };
        if worker.plan.alone.is_some() {
            self.stop(&worker.plan.id).await?;
        } else {
            worker.stop_volume(volume).await?;
        }
        Ok(true)
    }

    /// Figures of the engines of all threads. A thread that does not answer is omitted, and logged.
    pub(crate) async fn engine_figures(&self) -> metrics::Figures {
        let mut all = metrics::Figures::default();
        for worker in self.all() {
            if worker.phase() != Phase::Serving {
                continue;
            }
            match worker.figures().await {
                Ok(figures) => {
                    all.sets.extend(figures.sets);
                    all.alone.extend(figures.alone);
                }
                Err(e) => {
                    let why = e.message().unwrap_or_default();
                    self.shared.hub.publish(Kind::Set, Some(&worker.plan.id), "warning", why);
                }
            }
        }
        all
    }

    /// Stops all threads and waits for their end. `force` can be called meanwhile.
    pub(crate) async fn stop_all(&self) -> Result<(), Failure> {
        let workers: Vec<_> = {
            let workers = self.lock();
            self.stopping.store(true, Ordering::SeqCst);
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
                result = Err(Failure::because(format_args!("set {}", worker.plan.id), why));
            }
        }
        result
    }

    /// Has all threads stop without waiting for the users of their volumes.
    pub(crate) fn force(&self) {
        for worker in self.all() {
            let _ = worker.order(Order::Force);
        }
    }
}
