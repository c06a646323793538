//! Placement: assigns devices to threads.
//!
//! Owns the rule how a device is served: a set if its cache device is there; a backing device with its set, or alone if it
//! belongs to no set. A backing device whose cache device is missing waits, with a message: it is never served without its
//! cache device. If another set of the group has a copy of its dirty data, that set takes the device over after a time. Changes of what is
//! served happen one at a time, under the lock of this module. Must not know the client.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serve::Failure;

use super::admission::Admission;
use super::changes::{Changes, Scope};
use super::devices::{Device, DeviceState, WaitsFor};
use super::inventory::Inventory;
use crate::order::Plan;
use crate::probe::{Attachment, Probe, Role, probe_all, probe_device};
use crate::shared::Takeover;
use crate::worker::{Phase, Worker};

/// Interval between checks of a set that is still starting.
const LATE_LOOKS_EVERY: Duration = Duration::from_millis(200);

/// Assigns devices to threads. A caller has claimed what it places.
pub(crate) struct Placement {
    inventory: Inventory,
    admission: Arc<Admission>,
    changes: Changes,
}

fn failed<T>(text: impl Into<String>) -> Result<T, Failure> {
    Err(Failure::Failed(text.into()))
}

impl Placement {
    pub(crate) fn new(inventory: Inventory, admission: Arc<Admission>) -> Placement {
        Placement { inventory, admission, changes: Changes::default() }
    }

    /// The claims of those who change what is served.
    pub(crate) fn changes(&self) -> &Changes {
        &self.changes
    }

    /// Assigns devices to threads: first all cache devices at the same time, then the others.
    pub(crate) async fn place(self: &Arc<Self>, probes: Vec<Probe>) -> Vec<(Probe, Result<(), Failure>)> {
        let (caches, backings): (Vec<Probe>, Vec<Probe>) =
            probes.into_iter().partition(|p| matches!(p.role, Role::Cache { .. }));
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

    /// Serves a device on its thread, or marks it as waiting for its cache device.
    ///
    /// # Errors
    /// If the device is refused, or cannot be served.
    pub(crate) async fn place_one(self: &Arc<Self>, probe: &Probe) -> Result<(), Failure> {
        self.admission.admit(probe)?;
        self.admission.name_set(probe);
        self.inventory.workers.refuse_while_stopping()?;
        match &probe.role {
            Role::Cache { set, group, .. } => {
                let (id, cache) = (set.clone(), Some(probe.path.clone()));
                self.start(probe, Plan { id, cache, alone: None, group: group.clone() }).await?;
                self.add_waiting(set).await;
                Ok(())
            }
            Role::Backing { set, attachment, .. } => {
                if let Some(worker) = set.as_ref().and_then(|set| self.inventory.workers.serving(set)) {
                    return self.add(&worker, probe).await;
                }
                let (what, page) = match attachment {
                    Attachment::Free | Attachment::Stale => {
                        let alone = Some(probe.path.clone());
                        return self
                            .start(probe, Plan { id: probe.uuid.clone(), cache: None, alone, group: None })
                            .await;
                    }
                    Attachment::Made => ("was made for", "the page orphan of the guide"),
                    Attachment::Clean => ("is attached to", "the page dead-ssd-clean of the guide"),
                    Attachment::Dirty => ("has dirty data in", "the page dead-ssd-dirty of the guide"),
                };
                let set = set.as_deref().unwrap_or_default();
                let mut why = format!(
                    "{what} cache set {set}, whose cache device is not registered: waits for it; if that device is lost, \
                     see {page}"
                );
                if probe.has_copy {
                    let seconds = self.inventory.workers.takeover_after_s();
                    why = format!(
                        "{what} cache set {set}, whose cache device is not registered: another set of its group with a copy of the \
                         dirty data takes over in {}",
                        format::counted(seconds, "second")
                    );
                    self.take_over_later(probe.clone(), Duration::from_secs(seconds));
                }
                let waits_for = match attachment {
                    Attachment::Dirty => WaitsFor::DirtyCache,
                    _ => WaitsFor::Cache,
                };
                self.inventory.devices.set(probe, DeviceState::Waiting(waits_for, why));
                Ok(())
            }
        }
    }

    /// Has another set of the group serve a device that still waits for its own set after this time.
    fn take_over_later(self: &Arc<Self>, probe: Probe, after: Duration) {
        let this = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep(after).await;
            let mut scope = Scope { alone: [probe.key().to_owned()].into(), ..Scope::default() };
            scope.shared.extend(probe.set().map(str::to_owned));
            let title = format!("the takeover of {}", probe.path.display());
            let _claim = this.changes.wait(&title, &scope).await;
            let waits = this.inventory.devices.get(&probe.path).is_some_and(|device| {
                let is_it = device.probe.as_ref().is_some_and(|p| p.uuid == probe.uuid);
                is_it && matches!(device.state, DeviceState::Waiting(..))
            });
            let is_here = probe.set().is_some_and(|set| this.inventory.workers.serving(set).is_some());
            if waits && !is_here && this.inventory.workers.refuse_while_stopping().is_ok() {
                this.take_over(&probe).await;
            }
        });
    }

    /// Serves a device, whose own set is missing, with the first set of a group that has a copy of its dirty data.
    async fn take_over(&self, probe: &Probe) {
        let mut why = format!(
            "belongs to cache set {}, whose cache device is not registered, and no set that is served has a copy of its dirty data: \
             waits for it",
            probe.set().unwrap_or_default()
        );
        let all = self.inventory.workers.all();
        for worker in all.iter().filter(|w| w.group().is_some() && w.phase() == Phase::Serving) {
            match worker.take_over(probe.path.clone()).await {
                Ok(()) => {
                    let now = probe_device(&probe.path).await;
                    let known = || {
                        let device = self.inventory.devices.belongs_to(&probe.uuid, &worker.plan.id);
                        device.unwrap_or_else(|| probe.clone())
                    };
                    let now = now.unwrap_or_else(|_| known());
                    self.inventory.devices.set(&now, DeviceState::Served);
                    self.admission.record(&now).await;
                    return;
                }
                Err(e) => why = e.to_string(),
            }
        }
        self.inventory.devices.set(probe, DeviceState::Waiting(WaitsFor::DirtyCache, why));
    }

    /// Follows the devices that another set of their group has taken over while they were served.
    pub(crate) async fn follow_takeovers(self: Arc<Self>) {
        let Some(mut takeovers) = self.inventory.workers.takeovers() else { return };
        while let Some(Takeover { device, set }) = takeovers.recv().await {
            if let Some(probe) = self.inventory.devices.belongs_to(&device, &set) {
                self.admission.record(&probe).await;
            }
        }
    }

    /// Starts a thread for a device.
    async fn start(&self, probe: &Probe, plan: Plan) -> Result<(), Failure> {
        self.inventory.workers.start(plan).await?;
        self.inventory.devices.set(probe, DeviceState::Served);
        self.admission.record(probe).await;
        Ok(())
    }

    /// Adds a backing device to the set of a thread, or marks it as waiting for the operator.
    async fn add(&self, worker: &Worker, probe: &Probe) -> Result<(), Failure> {
        if self.inventory.serves(probe).await {
            // The start of the set has added it, because it was waiting for the set.
            return Ok(());
        }
        if let Some(why) = self.admission.why_to_wait(probe, worker).await? {
            self.admission.wait_for_operator(probe, why);
            return Ok(());
        }
        worker.add(probe.path.clone()).await?;
        self.inventory.devices.set(probe, DeviceState::Served);
        self.admission.record(probe).await;
        Ok(())
    }

    /// Whether the thread of this device is still starting after its client got an answer.
    ///
    /// In that case a task adds the devices that wait for the set as soon as the set is up.
    pub(crate) fn comes_up_late(self: &Arc<Self>, probe: &Probe) -> bool {
        let of_cache = match &probe.role {
            Role::Cache { set, .. } => set,
            Role::Backing { .. } => &probe.uuid,
        };
        let Some(worker) = self.inventory.workers.serving(of_cache) else { return false };
        let its = [&worker.plan.cache, &worker.plan.alone];
        if !its.into_iter().any(|path| path.as_ref() == Some(&probe.path)) {
            return false;
        }
        self.inventory.devices.set(probe, DeviceState::Served);
        let (this, late) = (self.clone(), probe.clone());
        tokio::spawn(async move {
            while worker.phase() == Phase::Starting {
                tokio::time::sleep(LATE_LOOKS_EVERY).await;
            }
            let scope = Scope { alone: [worker.plan.id.clone()].into(), ..Scope::default() };
            let _claim = this.changes.wait(&format!("the start of {}", worker.title()), &scope).await;
            if worker.phase() == Phase::Serving {
                this.admission.record(&late).await;
            }
            this.add_waiting(&worker.plan.id).await;
        });
        true
    }

    /// Serves the devices that waited for a cache device.
    ///
    /// The devices are probed again, because another device may be at a stored path by now.
    async fn add_waiting(self: &Arc<Self>, set: &str) {
        let waiting: BTreeMap<PathBuf, Probe> = {
            let waits = |d: &Device| matches!(d.state, DeviceState::Waiting(..));
            let all = self.inventory.devices.all().into_values().filter(waits).filter_map(|d| d.probe);
            let of_set = |p: &Probe| matches!(&p.role, Role::Backing { set: Some(s), .. } if s == set);
            all.filter(of_set).map(|probe| (probe.path.clone(), probe)).collect()
        };
        let Some(worker) = self.inventory.workers.serving(set) else { return };
        for (path, probed) in probe_all(waiting.keys().cloned().collect()).await {
            let Some(was) = waiting.get(&path) else { continue };
            let now = match probed {
                Ok(now) if now.uuid == was.uuid => self.admission.admit(&now).map(|()| now),
                Ok(now) => {
                    failed(format!("expected the device with UUID {}, found UUID {}", was.uuid, now.uuid))
                }
                Err(e) => Err(e),
            };
            let added = match now {
                Ok(now) => match self.admission.why_to_wait(&now, &worker).await {
                    Ok(Some(why)) => {
                        self.admission.wait_for_operator(&now, why);
                        continue;
                    }
                    Ok(None) => worker.add(path).await,
                    Err(e) => Err(e),
                },
                Err(e) => Err(e),
            };
            match added {
                Ok(()) => {
                    self.inventory.devices.set(was, DeviceState::Served);
                    self.admission.record(was).await;
                }
                Err(e) => self.inventory.devices.fail(was, e),
            }
        }
        if worker.group().is_some() {
            // The set may have a copy of the dirty data of a disk whose own set is missing.
            let waits = |d: &Device| matches!(d.state, DeviceState::Waiting(..));
            let all = self.inventory.devices.all().into_values().filter(waits).filter_map(|d| d.probe);
            let after = Duration::from_secs(self.inventory.workers.takeover_after_s());
            all.filter(|probe| probe.has_copy).for_each(|probe| self.take_over_later(probe, after));
        }
    }

    /// Handles the unregistration of a cache device.
    ///
    /// Its backing devices wait for it, or are served alone if they are detached.
    pub(crate) async fn replace_without_cache(self: &Arc<Self>, set: &str) {
        let served = self.inventory.devices.paths(|d| {
            d.state == DeviceState::Served
                && d.probe
                    .as_ref()
                    .is_some_and(|p| matches!(&p.role, Role::Backing { set: Some(s), .. } if s == set))
        });
        for (path, probed) in probe_all(served).await {
            let (probe, result) = match probed {
                Ok(probe) => {
                    let placed = self.place_one(&probe).await;
                    (Some(probe), placed)
                }
                Err(e) => (None, Err(e)),
            };
            if let Err(e) = result {
                self.inventory.devices.set_failed(path, probe, e);
            }
        }
    }

    /// Marks a device as failed if its placement failed.
    pub(crate) fn settle(&self, probe: &Probe, result: Result<(), Failure>) {
        if let Err(e) = result {
            self.inventory.devices.fail(probe, e);
        }
    }
}
