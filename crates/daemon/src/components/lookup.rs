//! Lookup: resolves names to devices, sets and volumes of the kind that a command needs.
//!
//! Owns the list of everything with a name; module `names` decides which of these a name denotes. Must not know the
//! command.

use std::path::PathBuf;
use std::sync::Arc;

use serve::plain;

use super::devices::Device;
use super::inventory::Inventory;
use super::problems::{next_step, register_cache};
use super::views::{DeviceView, Views};
use crate::names::{Named, Unresolved, resolve};
use crate::probe::Role;
use crate::shared::Shared;
use crate::worker::Worker;

/// A served volume that a name resolved to.
pub(crate) struct Found {
    /// The thread that serves it.
    pub(crate) worker: Arc<Worker>,
    /// The name of the volume on its thread.
    pub(crate) name: String,
    /// The description of the device, set or volume, for messages.
    pub(crate) named: Named,
}

/// Resolves names against the registered devices and served volumes.
pub(crate) struct Lookup {
    shared: Arc<Shared>,
    inventory: Inventory,
    views: Views,
}

impl Lookup {
    pub(crate) fn new(shared: Arc<Shared>, inventory: Inventory) -> Lookup {
        let views = Views::new(shared.clone(), inventory.clone());
        Lookup { shared, inventory, views }
    }

    /// The views of devices and threads.
    pub(crate) fn views(&self) -> &Views {
        &self.views
    }

    /// Lists everything that has a name.
    async fn all_named(&self) -> Vec<Named> {
        let sets = self.views.sets().await;
        let devices = self.inventory.devices.all();
        let mut all: Vec<Named> =
            devices.into_iter().map(|(path, device)| self.named_device(path, device)).collect();
        for (id, volume) in sets.iter().flat_map(|s| s.figures.volumes.iter().map(move |v| (&s.id, v))) {
            let device = volume.backing_device.as_ref().map(PathBuf::from);
            let is_it = |n: &&mut Named| {
                n.uuid.is_some()
                    && n.uuid == volume.backing_uuid
                    && (n.device == device || n.served_by.is_some())
            };
            let (name, label) = (Some(volume.name.clone()), volume.label.clone());
            let served_by = Some(id.clone());
            match all.iter_mut().find(is_it) {
                // The label and name in the probe of the registration may be out of date.
                Some(named) => (named.name, named.label, named.served_by) = (name, label, served_by),
                None => {
                    let uuid = volume.backing_uuid.clone().or_else(|| volume.flash.flash_uuid.clone());
                    all.push(Named { name, device, uuid, label, served_by, ..Named::default() });
                }
            }
        }
        all
    }

    fn named_device(&self, path: PathBuf, device: Device) -> Named {
        let mut named = Named { device: Some(path.clone()), ..Named::default() };
        let Some(probe) = device.probe else { return named };
        named.displaced = probe.is_unplugged() && path.exists();
        let worker = device.state.has_thread().then(|| self.inventory.workers.of_device(&probe)).flatten();
        match probe.role {
            Role::Cache { set, label, .. } => (named.set, named.label) = (Some(set), label),
            Role::Backing { label, .. } => {
                named.name = self.shared.state().known_name(&probe.uuid);
                named.label = label;
                named.served_by = worker.map(|w| w.plan.id.clone());
            }
        }
        named.uuid = Some(probe.uuid);
        named
    }

    /// The registered device or served volume with this name.
    pub(crate) async fn named(&self, name: &str) -> Result<Named, Unresolved> {
        resolve(name, &self.all_named().await).cloned().map_err(|e| self.with_last_path(name, e))
    }

    /// A name that nothing has: adds the command that registers what had it, if the daemon knows where that was.
    fn with_last_path(&self, name: &str, unresolved: Unresolved) -> Unresolved {
        let Unresolved::Unknown(why) = unresolved else { return unresolved };
        let registered = self.inventory.devices.all();
        let mut paths = self.shared.state().last_paths(name);
        paths.retain(|path| !registered.contains_key(path));
        let shown: Vec<String> =
            paths.iter().map(|path| plain::in_shell(&path.to_string_lossy()).into_owned()).collect();
        Unresolved::Unknown(match shown.as_slice() {
            [] => why,
            [one] => format!("{why}; it was {one}, which is not registered: run `ubcache register {one}`"),
            several => {
                format!(
                    "{why}; several devices were: {}; run `ubcache register` with one of them",
                    several.join(", ")
                )
            }
        })
    }

    /// The label of a device has changed since it was probed.
    pub(crate) fn relabel(&self, uuid: &str, label: &str) {
        self.inventory.devices.relabel(uuid, label);
    }

    /// Every registered device and served volume with this label.
    pub(crate) async fn labelled(&self, label: &str) -> Vec<Named> {
        let mut all = self.all_named().await;
        all.retain(|named| named.label == label);
        all
    }

    /// The path of a device: of a registered one, however it is named, or a path of this host.
    pub(crate) async fn device_path(&self, device: &str) -> Result<PathBuf, Unresolved> {
        match self.named(device).await {
            Ok(Named { device: Some(path), .. }) => Ok(path),
            Ok(named) => Err(Unresolved::unknown(format!("{named}: has no device of its own"))),
            Err(Unresolved::NotRegistered(path)) => Ok(path),
            Err(e) => Err(e),
        }
    }

    /// The UUID of the set that `name` denotes, by its label, its UUID or its cache device.
    pub(crate) async fn set_of(&self, name: &str) -> Result<String, Unresolved> {
        let none = |what: String| {
            Unresolved::unknown(format!("{what}: is neither a set nor a registered cache device"))
        };
        match self.named(name).await {
            Ok(Named { set: Some(set), .. }) => Ok(set),
            // A backing device without a set has a thread of its own, which clients see as a set.
            Ok(Named { uuid: Some(uuid), served_by: Some(id), .. }) if uuid == id => Ok(id),
            Ok(named) => Err(match named.served_by.as_ref().and_then(|id| self.inventory.workers.get(id)) {
                Some(worker) if named.name.is_some() => Unresolved::OtherKind {
                    why: format!("{named}: expected a set, found a volume of {}", worker.title()),
                    name: name.to_owned(),
                    names: vec![worker.typed()],
                },
                _ => none(named.to_string()),
            }),
            Err(Unresolved::NotRegistered(path)) => Err(none(path.display().to_string())),
            Err(e) => Err(e),
        }
    }

    /// The thread of a set that is named by UUID or cache device.
    pub(crate) async fn set(&self, name: &str) -> Result<Arc<Worker>, Unresolved> {
        let id = self.set_of(name).await?;
        let found = self.inventory.workers.get(&id);
        found.ok_or_else(|| Unresolved::unknown(self.set_is_not_served(&id)))
    }

    /// The served volume with this name, with its thread.
    pub(crate) async fn find(&self, volume: &str) -> Result<Found, Unresolved> {
        let named = match self.named(volume).await {
            Err(Unresolved::NotRegistered(path)) => {
                return Err(Unresolved::unknown(format!("{}: is not registered", path.display())));
            }
            other => other?,
        };
        if let Some(set) = &named.set {
            return Err(self.set_for_volume(volume, &named, set).await);
        }
        let worker = named.served_by.as_ref().and_then(|id| self.inventory.workers.serving(id));
        match (worker, named.name.clone()) {
            (Some(worker), Some(name)) => Ok(Found { worker, name, named }),
            _ => Err(Unresolved::unknown(self.is_not_served(&named))),
        }
    }

    /// The refusal of a set whose name was given for a volume: it names the volumes of the set.
    async fn set_for_volume(&self, name: &str, named: &Named, set: &str) -> Unresolved {
        if self.inventory.workers.serving(set).is_none() {
            return Unresolved::unknown(self.set_is_not_served(set));
        }
        let names = self.volumes_of(set).await;
        let has = match names.as_slice() {
            [] => "it serves no volume".to_owned(),
            [one] => format!("its volume is {one}"),
            several => format!("its volumes are {}", several.join(", ")),
        };
        let why = format!("{named}: expected a volume, found a set; {has}");
        Unresolved::OtherKind { why, name: name.to_owned(), names }
    }

    /// The volumes of a set, as an operator types them.
    pub(crate) async fn volumes_of(&self, set: &str) -> Vec<String> {
        let sets = self.views.sets().await;
        let volumes = sets.iter().filter(|view| view.id == set).flat_map(|view| &view.figures.volumes);
        volumes.map(|v| plain::typed(&v.label, &v.name).to_owned()).collect()
    }

    /// Why a registered device or its volume is not served, and the command that serves it.
    fn is_not_served(&self, named: &Named) -> String {
        if self.inventory.workers.is_stopping() {
            return format!("{named}: is not served: the daemon is stopping");
        }
        let is_it = |d: &DeviceView| named.device.as_ref() == Some(&d.path) && d.uuid == named.uuid;
        match self.views.devices().iter().find(|d| is_it(d)) {
            Some(device) => format!("{named}: is not served: {}", next_step(device)),
            None => format!("{named}: is not served; `ubcache status` shows what is"),
        }
    }

    /// The path at which a set or a disk with this UUID was served the last time.
    pub(crate) fn last_path(&self, uuid: &str) -> Option<PathBuf> {
        self.views.last_path(uuid)
    }

    /// Why a set is not served, and the command that serves it.
    pub(crate) fn set_is_not_served(&self, set: &str) -> String {
        if self.inventory.workers.is_stopping() {
            return format!("set {set} is not served: the daemon is stopping");
        }
        let devices = self.views.devices();
        let cache = devices.iter().find(|d| d.kind == Some("cache") && d.set.as_deref() == Some(set));
        match cache {
            Some(device) => format!("set {set} is not served: {}", next_step(device)),
            None => format!(
                "set {set} is not served: its cache device is not registered; run `{}`",
                register_cache(self.views.last_path(set).as_deref())
            ),
        }
    }
}
