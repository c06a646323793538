//! The commands register, unregister, attach and stop.
//!
//! Owns the order of the steps of each command. A command holds the lock of placement, so nothing else changes the served
//! devices meanwhile. Must not know the client.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use serve::{Failure, message};

use super::admission::{Admission, By};
use super::devices::DeviceState;
use super::inventory::Inventory;
use super::lookup::{Found, Lookup};
use super::placement::Placement;
use super::replug::Replug;
use crate::names::Named;
use crate::probe::{Attachment, Probe, Role, probe_all, probe_device};
use crate::state::Known;
use crate::why::SharedFailure;

/// The result of a registration.
pub(crate) struct Registered {
    /// The paths of the devices, without links.
    pub(crate) paths: Vec<PathBuf>,
    /// The accepted differences from the stored identities, as text.
    pub(crate) accepted: Vec<String>,
}

/// Carries out the operator's commands about devices.
pub(crate) struct Registration {
    inventory: Inventory,
    lookup: Arc<Lookup>,
    admission: Arc<Admission>,
    placement: Arc<Placement>,
    replug: Arc<Replug>,
}

fn failed<T>(text: impl Into<String>) -> Result<T, Failure> {
    Err(Failure::Failed(text.into()))
}

impl Registration {
    pub(crate) fn new(
        inventory: Inventory,
        lookup: Arc<Lookup>,
        admission: Arc<Admission>,
        placement: Arc<Placement>,
        replug: Arc<Replug>,
    ) -> Registration {
        Registration { inventory, lookup, admission, placement, replug }
    }

    /// Registers devices: each is served, waits for what is missing, or is refused.
    ///
    /// A device that is registered already is refused, unless the command is quiet.
    pub(crate) async fn register(&self, paths: Vec<PathBuf>, by: By) -> Result<Registered, Failure> {
        let _one = self.placement.nothing_changes().await;
        let known = self.admission.remembered();
        let probes = self.probe_new(paths, &known, by.is_quiet()).await?;
        self.inventory.devices.note_unplugged();
        let accepted = self.admission.admit_all(&probes, by)?;
        accepted.iter().for_each(message::note);
        if by.is_operator() {
            self.admission.name_all(probes.iter().map(|p| p.uuid.clone()));
        }
        let paths: Vec<PathBuf> = probes.iter().map(|p| p.path.clone()).collect();
        let (back, probes): (Vec<Probe>, Vec<Probe>) =
            probes.into_iter().partition(|p| self.inventory.devices.was_unplugged(p));
        for probe in back {
            self.replug.replugged(probe).await?;
        }
        // A device that a scan or the configuration registered is served already, and only has to be stored.
        let is_served = |p: &Probe| {
            self.inventory.devices.is_served(&p.path) && self.inventory.workers.of_device(p).is_some()
        };
        let (served, new): (Vec<Probe>, Vec<Probe>) = probes.into_iter().partition(is_served);
        let before = self.inventory.devices.paths(|_| true);
        let mut placed = self.placement.place(new).await;
        placed.extend(served.into_iter().map(|probe| (probe, Ok(()))));
        let mut first = Ok(());
        for (probe, result) in placed {
            let result = match result {
                Err(e) if !self.placement.comes_up_late(&probe) => {
                    let why = SharedFailure::from(e);
                    if before.contains(&probe.path) {
                        self.inventory.devices.set(&probe, DeviceState::Failed(why.clone()));
                    } else {
                        self.inventory.devices.remove(&probe.path);
                    }
                    Err(Failure::of(why))
                }
                result => {
                    self.inventory.devices.forget_missing(&known, &probe);
                    self.inventory.devices.forget_other_places(&probe);
                    result.and(self.admission.remember(&probe))
                }
            };
            first = first.and(result);
        }
        first?;
        Ok(Registered { paths, accepted })
    }

    /// Probes the devices to register, without duplicates.
    async fn probe_new(
        &self,
        paths: Vec<PathBuf>,
        known: &BTreeMap<PathBuf, Known>,
        quiet: bool,
    ) -> Result<Vec<Probe>, Failure> {
        let mut probes = Vec::new();
        for (_, probed) in probe_all(paths).await {
            let probed = probed?;
            if probes.iter().any(|p: &Probe| p.path == probed.path) {
                continue;
            }
            let is_served = self.inventory.devices.is_served(&probed.path);
            let is_known = known.contains_key(&probed.path) && !quiet;
            if is_served && is_known && self.inventory.workers.of_device(&probed).is_some() {
                return failed(format!("{}: is registered already", probed.path.display()));
            }
            probes.push(probed);
        }
        Ok(probes)
    }

    /// Unregisters a device: stops the set of a cache device, or the volume of a backing device. Dirty data stays dirty.
    pub(crate) async fn unregister(&self, device: &str) -> Result<Named, Failure> {
        let _one = self.placement.nothing_changes().await;
        let named = self.lookup.named(device).await?;
        let Some(path) = named.device.clone() else { return failed(format!("{named}: has no device")) };
        let known = self.inventory.devices.get(&path);
        let Some(known) = known else { return failed(format!("{named}: is not registered")) };
        if known.state.has_thread()
            && let Some(probe) = &known.probe
        {
            match &probe.role {
                Role::Cache { set } => {
                    self.inventory.workers.stop(set).await?;
                    self.inventory.devices.remove(&path);
                    self.placement.replace_without_cache(set).await;
                }
                Role::Backing { .. } => {
                    self.inventory.workers.stop_backing(probe).await?;
                }
            }
        }
        self.inventory.devices.remove(&path);
        known.probe.map_or(Ok(()), |probe| self.admission.release(&probe))?;
        self.admission.forget(&path)?;
        Ok(named)
    }

    /// Attaches a backing device to a set.
    ///
    /// A served device is served again afterwards, through the cache; its clients have to connect again.
    pub(crate) async fn attach(&self, cache: &str, backing: &str) -> Result<Named, Failure> {
        let _one = self.placement.nothing_changes().await;
        let set = self.lookup.set_of(cache).await?;
        let Some(worker) = self.inventory.workers.serving(&set) else {
            return failed(format!("set {set} is not served"));
        };
        let path = self.lookup.device_path(backing).await?;
        let probe = probe_device(&path).await?;
        self.admission.admit(&probe)?;
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
        let was_served = self.inventory.workers.stop_backing(&probe).await?;
        let added = worker.add(probe.path.clone()).await;
        let probed = probe_device(&path).await;
        if let Err(e) = added {
            // The volume is served again without the cache.
            let now = probed.unwrap_or(probe);
            if was_served && let Err(why) = self.placement.place_one(&now).await {
                self.inventory.devices.fail(&now, why);
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
        self.inventory.devices.set(&now, DeviceState::Served);
        self.admission.name(now.uuid.clone());
        self.admission.record(&now).await;
        self.admission.remember(&now)?;
        Ok(self.lookup.named(&now.uuid).await?)
    }

    /// Stops a volume. Its device stays registered for the next start.
    pub(crate) async fn stop_volume(&self, volume: &str) -> Result<Named, Failure> {
        let _one = self.placement.nothing_changes().await;
        let Found { worker, name, named } = self.lookup.find(volume).await?;
        if worker.plan.alone.is_some() {
            self.inventory.workers.stop(&worker.plan.id).await?;
        } else {
            worker.stop_volume(name).await?;
        }
        self.inventory.devices.stopped(named.uuid.as_ref());
        Ok(named)
    }
}
