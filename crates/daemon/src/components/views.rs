//! Views of devices and threads for answers of the API.
//!
//! Owns what clients see of a device and of a thread. Must not change either.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use serde::Serialize;
use serve::Snapshot;

use super::devices::{Device, DeviceState, WaitsFor};
use super::inventory::Inventory;
use crate::probe::{Probe, Role};
use crate::shared::Shared;
use crate::worker::Phase;

/// A device as clients see it.
#[derive(Clone, Serialize)]
pub(crate) struct DeviceView {
    pub(crate) path: PathBuf,
    pub(crate) uuid: Option<String>,
    /// `cache`, `backing`, or `None` if it could not be probed.
    pub(crate) kind: Option<&'static str>,
    pub(crate) set: Option<String>,
    pub(crate) label: String,
    /// Name of the volume, if the device has or had one.
    pub(crate) name: Option<String>,
    /// Whether the superblock said that the cache has dirty data of this device, when the device was probed.
    pub(crate) dirty: bool,
    /// `served`, `waiting`, `failed` or `stopped`.
    pub(crate) state: &'static str,
    pub(crate) why: Option<String>,
    /// What the device waits for; `None` if it does not wait, or waits until its volume is not in use.
    #[serde(skip)]
    pub(crate) waits_for: Option<WaitsFor>,
    /// Whether the cache device that it waits for is registered and has failed.
    #[serde(skip)]
    pub(crate) cache_failed: bool,
    /// Dirty data of this backing device in the cache, in bytes; `None` if its set is not served.
    pub(crate) dirty_bytes: Option<u64>,
}

/// A thread as clients see it.
#[derive(Clone, Serialize)]
pub(crate) struct SetView {
    /// UUID of the set, or of the backing device that is served alone.
    pub(crate) id: String,
    /// Whether the set has a cache device.
    pub(crate) has_cache: bool,
    /// `starting`, `serving`, `stopping`, `stopped` or `failed`.
    pub(crate) state: &'static str,
    /// Why the thread failed, or why there are no figures.
    pub(crate) why: Option<String>,
    /// Figures; empty unless the thread serves.
    #[serde(flatten)]
    pub(crate) figures: Snapshot,
}

/// The sets whose cache devices have failed, each with the failure as the end of a message.
fn failed_caches(devices: &BTreeMap<PathBuf, Device>) -> Vec<(String, String)> {
    let failed = devices.iter().filter_map(|(path, device)| {
        let role = device.probe.as_ref().map(|s| &s.role);
        let (DeviceState::Failed(why), Some(Role::Cache { set, .. })) = (&device.state, role) else {
            return None;
        };
        let (path, why) = (path.display().to_string(), why.text());
        let why = why.strip_prefix(&format!("{path}: ")).unwrap_or(&why);
        Some((set.clone(), format!("; its cache device {path} has failed: {why}")))
    });
    failed.collect()
}

/// Makes the views of devices and threads.
#[derive(Clone)]
pub(crate) struct Views {
    shared: Arc<Shared>,
    inventory: Inventory,
}

impl Views {
    pub(crate) fn new(shared: Arc<Shared>, inventory: Inventory) -> Views {
        Views { shared, inventory }
    }

    /// Every thread with its figures. The threads are asked concurrently.
    pub(crate) async fn sets(&self) -> Vec<SetView> {
        let asked: Vec<_> = self
            .inventory
            .workers
            .all()
            .into_iter()
            .map(|worker| {
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
                        Phase::Serving | Phase::Stopping => match worker.snapshot().await {
                            Ok(figures) => view.figures = figures,
                            Err(_) if worker.phase().is_over() => view.state = worker.phase().name(),
                            Err(e) => view.why = e.message().map(str::to_owned),
                        },
                        Phase::Failed(why) => view.why = Some(why.text()),
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

    /// Every registered device, with its state and with what these sets know of it.
    pub(crate) fn devices_with(&self, sets: &[SetView]) -> Vec<DeviceView> {
        let mut views = self.devices();
        for view in views.iter_mut().filter(|view| view.uuid.is_some()) {
            for set in sets {
                // Attach and detach change the state that was probed at the registration.
                if let Some(volume) = set.figures.volumes.iter().find(|v| v.backing_uuid == view.uuid) {
                    view.set = volume.attached.then(|| set.id.clone());
                    view.label.clone_from(&volume.label);
                }
                if view.kind == Some("backing") && set.has_cache && view.set.as_ref() == Some(&set.id) {
                    view.dirty_bytes = set.figures.dirty_of(view.uuid.as_deref());
                }
            }
        }
        views
    }

    /// The phase of the thread that serves the device.
    fn phase_of(&self, probe: &Probe) -> Option<Phase> {
        let set = match &probe.role {
            Role::Cache { set, .. } => Some(set),
            Role::Backing { set, .. } => set.as_ref(),
        };
        let workers = &self.inventory.workers;
        let mine = workers.get(&probe.uuid).or_else(|| workers.get(set?));
        mine.map(|worker| worker.phase())
    }

    /// Every registered device, with its state.
    pub(crate) fn devices(&self) -> Vec<DeviceView> {
        let devices = self.inventory.devices.all();
        let failed_caches = failed_caches(&devices);
        let of_cache = |probe: &Option<Probe>| {
            let Some(Role::Backing { set: Some(set), .. }) = probe.as_ref().map(|s| &s.role) else {
                return None;
            };
            failed_caches.iter().find(|(failed, _)| failed == set).map(|(_, why)| why.as_str())
        };
        let views = devices.into_iter().map(|(path, device)| {
            let (waits_for, failed_cache) = match &device.state {
                DeviceState::Waiting(what, _) => (Some(*what), of_cache(&device.probe)),
                _ => (None, None),
            };
            let (state, why) = match device.state {
                DeviceState::Served => match device.probe.as_ref().and_then(|probe| self.phase_of(probe)) {
                    Some(Phase::Failed(why)) => ("failed", Some(why.text())),
                    Some(Phase::Stopped) | None => ("stopped", None),
                    Some(_) => ("served", None),
                },
                DeviceState::Waiting(_, why) => ("waiting", Some(why + failed_cache.unwrap_or_default())),
                DeviceState::Replugged(why) => ("waiting", Some(why)),
                DeviceState::Failed(why) => ("failed", Some(why.text())),
                DeviceState::Unplugged(why) => ("failed", Some(why)),
                DeviceState::Stopped => ("stopped", None),
            };
            let dirty = device.probe.as_ref().is_some_and(Probe::is_dirty);
            let (uuid, role) = device.probe.map(|s| (s.uuid, s.role)).unzip();
            let (kind, set, label) = match role {
                Some(Role::Cache { set, label }) => (Some("cache"), Some(set), label),
                Some(Role::Backing { set, label, .. }) => (Some("backing"), set, label),
                None => (None, None, String::new()),
            };
            let name = uuid.as_ref().and_then(|uuid| self.shared.state().known_name(uuid));
            let cache_failed = failed_cache.is_some();
            DeviceView {
                path,
                uuid,
                kind,
                set,
                label,
                name,
                dirty,
                state,
                why,
                waits_for,
                cache_failed,
                dirty_bytes: None,
            }
        });
        views.collect()
    }
}
