//! The commands register, unregister, attach and stop.
//!
//! Owns the order of the steps of each command. A command claims the devices and sets that it changes, so no other command
//! changes them meanwhile. Must not know the client.

mod join;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use serde::Deserialize;
use serve::{Failure, message};

use super::admission::{Admission, By, Ordered};
use super::changes::{Claim, Scope};
use super::devices::{Device, DeviceState};
use super::inventory::Inventory;
use super::lookup::{Found, Lookup};
use super::placement::Placement;
use super::problems::CommandUnderWay;
use super::replug::Replug;
use super::views::{DeviceView, SetView};
use crate::asked::Asked;
use crate::names::Named;
use crate::order::StartedVolume;
use crate::probe::{Attachment, Probe, Role, probe_all, probe_device};
use crate::state::Known;
use crate::why::SharedFailure;

/// The parameters of an attachment.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Attach {
    /// The cache device, or the UUID of its set.
    pub(crate) cache: String,
    pub(crate) backing: String,
    /// A clean device leaves another set whose cache device is not registered.
    #[serde(default)]
    pub(crate) force: bool,
}

/// The result of a registration.
pub(crate) struct Registered {
    /// The paths of the devices, without links.
    pub(crate) paths: Vec<PathBuf>,
    /// The accepted differences from the stored identities, as text.
    pub(crate) accepted: Vec<String>,
    /// The devices that were registered and served before.
    pub(crate) already: Vec<PathBuf>,
    /// What the operator should know, such as dropped dirty data.
    pub(crate) warnings: Vec<String>,
}

/// A device that is no longer served, and the views of all sets and devices directly before that.
pub(crate) struct Ended {
    pub(crate) named: Named,
    pub(crate) sets: Vec<SetView>,
    pub(crate) devices: Vec<DeviceView>,
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

    /// Claims what `find` finds, unless the daemon has begun to stop during the wait.
    pub(crate) async fn claim<T, F>(
        &self,
        asked: &Asked,
        find: impl Fn() -> F,
    ) -> Result<(Claim<'_>, T), Failure>
    where
        F: Future<Output = Result<(T, Scope), Failure>>,
    {
        let claimed = self.placement.changes().claim_found(asked, find).await?;
        self.inventory.workers.refuse_while_stopping()?;
        Ok(claimed)
    }

    /// Registers devices: each is served, waits for what is missing, or is refused.
    ///
    /// A device that is registered and served already stays as it is.
    pub(crate) async fn register(
        &self,
        paths: Vec<PathBuf>,
        by: By,
        asked: &Asked,
    ) -> Result<Registered, Failure> {
        let find = || async {
            let probes = probe_once(paths.clone()).await.map_err(|e| none_of(&paths, e))?;
            let scope = self.scope_of(&probes);
            Ok((probes, scope))
        };
        let (_claim, probes) = self.claim(asked, find).await?;
        self.register_claimed(probes, by).await
    }

    /// As [`Registration::register`], for a caller that has claimed the devices.
    pub(crate) async fn register_claimed(&self, probes: Vec<Probe>, by: By) -> Result<Registered, Failure> {
        let paths: Vec<PathBuf> = probes.iter().map(|p| p.path.clone()).collect();
        let known = self.admission.remembered();
        self.inventory.devices.note_unplugged();
        let accepted = self.admission.admit_all(&probes, by).await.map_err(|e| none_of(&paths, e))?;
        accepted.iter().for_each(message::note);
        let ordered = by.is_operator().then(|| self.admission.name_at_paths(&probes));
        let (back, probes): (Vec<Probe>, Vec<Probe>) =
            probes.into_iter().partition(|p| self.inventory.devices.was_unplugged(p));
        for probe in &back {
            self.replug.replugged(probe.clone()).await?;
        }
        // A device that a scan or the configuration registered is served already, and only has to be stored.
        let (mut served, mut new, mut results) = (Vec::new(), Vec::new(), Vec::new());
        for probe in probes {
            if !self.inventory.serves(&probe).await {
                new.push(probe);
            } else if let Some(why) = self.inventory.is_stopping(&probe).await {
                results.push((probe, failed(why)));
            } else {
                served.push(probe);
            }
        }
        let already: Vec<PathBuf> =
            served.iter().map(|p| p.path.clone()).filter(|path| known.contains_key(path)).collect();
        let before = self.inventory.devices.paths(|_| true);
        let mut placed = self.placement.place(new).await;
        placed.extend(served.into_iter().map(|probe| (probe, Ok(()))));
        for (probe, result) in placed {
            let result = self.settled(&probe, result, &before, &known);
            results.push((probe, result));
        }
        results.extend(back.into_iter().map(|probe| (probe, Ok(()))));
        let warnings = ordered.as_ref().map(Ordered::warnings).unwrap_or_default();
        if ordered.is_some_and(|ordered| ordered.has_freed_labels) {
            self.admission.claim_freed_labels().await?;
        }
        self.all_or_what_became_of_each(results).map_err(|e| match warnings.is_empty() {
            true => e,
            false => Failure::caused(format!("{e}; {}", warnings.join("; ")), e),
        })?;
        Ok(Registered { paths, accepted, already, warnings })
    }

    /// Stores a device that was placed. If it was refused, it stays in the table, with the reason, only if it was there before.
    fn settled(
        &self,
        probe: &Probe,
        result: Result<(), Failure>,
        before: &[PathBuf],
        known: &BTreeMap<PathBuf, Known>,
    ) -> Result<(), Failure> {
        match result {
            Err(e) if !self.placement.comes_up_late(probe) => {
                let why = SharedFailure::from(e);
                if before.contains(&probe.path) {
                    self.inventory.devices.set(probe, DeviceState::Failed(why.clone()));
                } else {
                    self.inventory.devices.remove(&probe.path);
                }
                Err(Failure::of(why))
            }
            result => {
                self.inventory.devices.forget_missing(known, probe);
                self.inventory.devices.forget_other_places(probe);
                self.admission.remember(probe);
                result
            }
        }
    }

    /// The failure of the first device that is not registered, with what became of the others.
    fn all_or_what_became_of_each(&self, results: Vec<(Probe, Result<(), Failure>)>) -> Result<(), Failure> {
        let (mut first, mut others) = (None, Vec::new());
        for (probe, result) in results {
            let path = probe.path.display();
            match (result, self.inventory.devices.get(&probe.path).map(|device| device.state)) {
                (Err(e), _) if first.is_none() => first = Some(e),
                (Err(e), _) => others.push(e.to_string()),
                (Ok(()), Some(DeviceState::Waiting(_, why) | DeviceState::Replugged(why, _))) => {
                    others.push(format!("{path}: is registered: {why}"));
                }
                (Ok(()), Some(DeviceState::Failed(why))) => others.push(format!("{path}: {why}")),
                (Ok(()), _) => others.push(format!("{path}: is registered and served")),
            }
        }
        match first {
            None => Ok(()),
            Some(e) if others.is_empty() => Err(e),
            Some(e) => Err(Failure::caused(format!("{e}; {}", others.join("; ")), e)),
        }
    }

    /// What the registration of these devices changes.
    fn scope_of(&self, probes: &[Probe]) -> Scope {
        self.inventory.devices.note_unplugged();
        let mut scope = Scope::default();
        for probe in probes {
            if self.inventory.devices.was_unplugged(probe) {
                scope.alone.extend(self.replug.scope(probe).alone);
            }
            scope.alone.insert(probe.key().to_owned());
            if let Role::Backing { set: Some(set), .. } = &probe.role {
                scope.shared.insert(set.clone());
            }
        }
        scope.shared.retain(|set| !scope.alone.contains(set));
        scope
    }

    /// The commands of clients that are under way.
    pub(crate) fn under_way(&self) -> Vec<CommandUnderWay> {
        self.placement.changes().under_way()
    }

    /// What a command changes that stops a device or volume.
    pub(crate) fn scope_of_named(&self, named: &Named) -> Scope {
        let device = named.device.as_ref().and_then(|path| self.inventory.devices.get(path));
        let set = match device.and_then(|d| d.probe).map(|p| p.role) {
            Some(Role::Backing { set, .. }) => set,
            _ => None,
        };
        let mut scope = Scope::default();
        scope.alone.extend(named.set.iter().chain(&named.uuid).cloned());
        scope.shared.extend(set.iter().chain(&named.served_by).cloned());
        scope.shared.retain(|id| !scope.alone.contains(id));
        scope
    }

    /// Every set and device before a command that has its claim acts.
    async fn views(&self) -> (Vec<SetView>, Vec<DeviceView>) {
        let sets = self.lookup.views().sets().await;
        let devices = self.lookup.views().devices_with(&sets);
        (sets, devices)
    }

    /// Whether the registration of a device has failed, and no other registered device has its UUID: a failed copy says nothing
    /// about the original.
    fn is_last(&self, device: &Device, probe: &Probe) -> bool {
        let is_same = |d: &Device| d.probe.as_ref().is_some_and(|p| p.uuid == probe.uuid);
        matches!(device.state, DeviceState::Failed(_)) && self.inventory.devices.paths(is_same).len() <= 1
    }

    /// Unregisters a device: of a cache device the set is stopped, and dirty data stays dirty; of a backing device the volume. Volumes
    /// whose dirty data is on another cache device of the group, too, go on with that one.
    ///
    /// # Errors
    /// If a volume is in use, among others; it stays served then.
    pub(crate) async fn unregister(&self, device: &str, asked: &Asked) -> Result<Ended, Failure> {
        let find = || async {
            let named = self.lookup.named(device).await?;
            let scope = self.scope_of_named(&named);
            Ok((named, scope))
        };
        let (_claim, named) = self.claim(asked, find).await?;
        self.unregister_claimed(named).await
    }

    /// As [`Registration::unregister`], for a caller that has claimed the device and its set.
    pub(crate) async fn unregister_claimed(&self, named: Named) -> Result<Ended, Failure> {
        let Some(path) = named.device.clone() else { return failed(format!("{named}: has no device")) };
        let known = self.inventory.devices.get(&path);
        let Some(known) = known else { return failed(format!("{named}: is not registered")) };
        if let Some(Role::Cache { set, .. }) = known.probe.as_ref().map(|probe| &probe.role) {
            self.hand_over(set).await;
        }
        let (sets, devices) = self.views().await;
        match known.probe.as_ref().map(|probe| (probe, &probe.role)) {
            Some((_, Role::Cache { set, .. })) if known.state.has_thread() => {
                let stopped = self.inventory.workers.stop(set).await;
                if self.inventory.workers.serving(set).is_some() {
                    stopped?;
                } else if let Err(e) = stopped {
                    // A set that is disabled cannot be stopped in order, and its thread has ended.
                    message::warn(format!("{named}: {e}"));
                }
                self.inventory.devices.remove(&path);
                sets.iter()
                    .filter(|view| view.id == *set)
                    .for_each(|view| self.admission.remember_dirty(view));
                self.placement.replace_without_cache(set).await;
            }
            // An earlier thread may still serve a device whose last registration has failed.
            Some((probe, Role::Backing { .. }))
                if known.state.has_thread() || self.is_last(&known, probe) =>
            {
                self.inventory.workers.stop_backing(probe).await?;
            }
            _ => {}
        }
        self.inventory.devices.remove(&path);
        let key = self.admission.release(&path, known.probe.as_ref(), &named.label);
        // A thread that has failed would stay in the status, and make the exit code of the daemon 1.
        self.inventory.workers.forget(&key);
        self.admission.claim_freed_labels().await?;
        Ok(Ended { named, sets, devices })
    }

    /// Gives the volumes of a set that is to stop to the other sets of its group. A volume without a copy stays, and is stopped.
    async fn hand_over(&self, set: &str) {
        let Some(worker) = self.inventory.workers.serving(set).filter(|w| w.group().is_some()) else {
            return;
        };
        if let Err(e) = worker.hand_over().await {
            message::warn(format!("{}: {e}", worker.title()));
        }
    }

    /// Attaches a backing device to a set. A device that is served is served again afterwards, through the cache; its
    /// clients have to connect again.
    ///
    /// # Errors
    /// If the device is in use, among others; it stays served as it was then.
    pub(crate) async fn attach(&self, wanted: &Attach, asked: &Asked) -> Result<Named, Failure> {
        let Attach { cache, backing, .. } = wanted;
        let find = || async {
            let set = self.lookup.set_of(cache).await?;
            let probe = probe_device(&self.lookup.device_path(backing).await?).await?;
            let served_by = self.inventory.workers.of_device(&probe).map(|w| w.plan.id.clone());
            let others = [Some(set.clone()), served_by, probe.set().map(str::to_owned)];
            let shared = others.into_iter().flatten().filter(|id| *id != probe.uuid);
            let (alone, shared) = ([probe.key().to_owned()].into(), shared.collect());
            Ok(((set, probe), Scope { alone, shared, ..Scope::default() }))
        };
        let (_claim, (set, probe)) = self.claim(asked, find).await?;
        let Some(worker) = self.inventory.workers.serving(&set) else {
            return failed(self.lookup.set_is_not_served(&set));
        };
        self.admission.admit(&probe)?;
        self.refuse_of_disabled_set(backing, &probe).await?;
        self.admission.can_remember_all(std::slice::from_ref(&probe)).await?;
        let probe = self.free_to_join(&set, probe, wanted).await?;
        let was_served = self.inventory.workers.stop_backing(&probe).await?;
        let added = worker.add(probe.path.clone()).await;
        let probed = probe_device(&probe.path).await;
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
        self.admission.remember(&now);
        Ok(self.lookup.named(&now.uuid).await?)
    }

    /// Claims a served volume.
    async fn claim_volume(&self, volume: &str, asked: &Asked) -> Result<(Claim<'_>, Found), Failure> {
        let find = || async {
            let found = self.lookup.find(volume).await?;
            let scope = self.scope_of_named(&found.named);
            Ok((found, scope))
        };
        self.claim(asked, find).await
    }

    /// Stops a volume. Its device stays registered, for the next start.
    ///
    /// # Errors
    /// If it is in use, among others; it stays served then.
    pub(crate) async fn stop_volume(&self, volume: &str, asked: &Asked) -> Result<Ended, Failure> {
        let (_claim, Found { worker, name, named }) = self.claim_volume(volume, asked).await?;
        let (sets, devices) = self.views().await;
        if worker.plan.alone.is_some() {
            self.inventory.workers.stop(&worker.plan.id).await?;
        } else {
            worker.stop_volume(name).await?;
        }
        self.inventory.devices.stopped(named.uuid.as_ref());
        Ok(Ended { named, sets, devices })
    }

    /// Serves a stopped flash-only volume again.
    ///
    /// # Errors
    /// If there is no such volume, or its set is not served.
    pub(crate) async fn start_volume(
        &self,
        volume: &str,
        asked: &Asked,
    ) -> Result<(Named, StartedVolume), Failure> {
        let (_claim, Found { worker, name, named }) = self.claim_volume(volume, asked).await?;
        Ok((named, worker.start_volume(name).await?))
    }

    /// Destroys a flash-only volume with its data.
    ///
    /// # Errors
    /// If it is in use, or is not flash-only; it stays as it is then.
    pub(crate) async fn delete_volume(&self, volume: &str, asked: &Asked) -> Result<Named, Failure> {
        let (_claim, Found { worker, name, named }) = self.claim_volume(volume, asked).await?;
        self.admission.can_remember().await?;
        worker.delete_volume(name).await?;
        self.admission.claim_freed_labels().await?;
        Ok(named)
    }
}

/// The failure of a registration before its first change: it has registered none of its devices.
fn none_of(paths: &[PathBuf], e: Failure) -> Failure {
    match paths {
        [] | [_] => e,
        _ => Failure::caused(format!("{e}; nothing was changed on any of the devices"), e),
    }
}

/// Probes devices, each once.
async fn probe_once(paths: Vec<PathBuf>) -> Result<Vec<Probe>, Failure> {
    let mut probes: Vec<Probe> = Vec::new();
    for (_, probed) in probe_all(paths).await {
        let probed = probed?;
        if !probes.iter().any(|p| p.path == probed.path) {
            probes.push(probed);
        }
    }
    Ok(probes)
}

#[cfg(test)]
mod tests;
