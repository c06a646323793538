//! The table of registered devices, by path, with their states.
//!
//! Owns the table, and the messages when a device waits, fails, or is unplugged. Must not know why a device is registered, nor
//! which thread serves it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serve::{Failure, plain};

use crate::hub::{Hub, Kind};
use crate::identity::Identity;
use crate::probe::{Probe, Role};
use crate::state::Known;
use crate::why::SharedFailure;

/// What a device waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WaitsFor {
    /// Its cache device, which is not registered.
    Cache,
    /// Its cache device, which is not registered and has dirty data of the device.
    DirtyCache,
    /// A command of the operator that names it.
    Operator,
}

impl WaitsFor {
    /// Name for metrics.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            WaitsFor::Cache => "cache",
            WaitsFor::DirtyCache => "cache_with_dirty_data",
            WaitsFor::Operator => "operator",
        }
    }
}

/// The state of a registered device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum DeviceState {
    /// A thread serves it.
    Served,
    /// It waits for something that is missing, such as its cache device.
    Waiting(WaitsFor, String),
    /// It was refused.
    Failed(SharedFailure),
    /// Its volume was stopped.
    Stopped,
    /// It was unplugged while a thread served it; the text is the consequence for its volume.
    Unplugged(String),
    /// It is plugged in again, and waits until its volume is not in use. The text says for whom, with the command that ends the
    /// first use, if there is one.
    Replugged(String, Option<String>),
}

impl DeviceState {
    /// Whether a thread may have the device, or had it before it was unplugged.
    pub(crate) fn has_thread(&self) -> bool {
        matches!(self, DeviceState::Served | DeviceState::Unplugged(_) | DeviceState::Replugged(..))
    }

    /// The identity of the device at the path, if it can be read and has no superblock of bcache.
    pub(crate) fn without_superblock(&self) -> Option<&Identity> {
        match self {
            DeviceState::Failed(why) => crate::probe::without_superblock(why),
            _ => None,
        }
    }
}

/// A registered device.
#[derive(Clone, Debug)]
pub(crate) struct Device {
    /// The result of the probe; `None` if the device could not be probed.
    pub(crate) probe: Option<Probe>,
    pub(crate) state: DeviceState,
}

/// The table of registered devices, by path.
pub(crate) struct DeviceTable {
    hub: Arc<Hub>,
    devices: Mutex<BTreeMap<PathBuf, Device>>,
}

impl DeviceTable {
    pub(crate) fn new(hub: Arc<Hub>) -> DeviceTable {
        DeviceTable { hub, devices: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<PathBuf, Device>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A copy of the table.
    pub(crate) fn all(&self) -> BTreeMap<PathBuf, Device> {
        self.lock().clone()
    }

    /// The label of the device with this UUID has changed.
    pub(crate) fn relabel(&self, uuid: &str, to: &str) {
        for probe in self.lock().values_mut().filter_map(|d| d.probe.as_mut()).filter(|p| p.uuid == uuid) {
            let (Role::Backing { label, .. } | Role::Cache { label, .. }) = &mut probe.role;
            to.clone_into(label);
        }
    }

    /// The device with this UUID belongs to another set now. Returns its probe.
    pub(crate) fn belongs_to(&self, uuid: &str, to: &str) -> Option<Probe> {
        let mut devices = self.lock();
        let probe = devices.values_mut().filter_map(|d| d.probe.as_mut()).find(|p| p.uuid == uuid)?;
        if let Role::Backing { set, .. } = &mut probe.role {
            *set = Some(to.to_owned());
        }
        probe.has_copy = false;
        Some(probe.clone())
    }

    /// The set of a cache device is in this group now, or in none.
    pub(crate) fn set_group(&self, of: &str, to: Option<&String>) {
        for probe in self.lock().values_mut().filter_map(|d| d.probe.as_mut()) {
            if let Role::Cache { set, group, .. } = &mut probe.role
                && set == of
            {
                *group = to.cloned();
            }
        }
    }

    pub(crate) fn get(&self, path: &Path) -> Option<Device> {
        self.lock().get(path).cloned()
    }

    /// The paths of the devices for which `wanted` is true.
    pub(crate) fn paths(&self, wanted: impl Fn(&Device) -> bool) -> Vec<PathBuf> {
        self.lock().iter().filter(|(_, d)| wanted(d)).map(|(path, _)| path.clone()).collect()
    }

    /// Whether a thread serves the device at this path.
    pub(crate) fn is_served(&self, path: &Path) -> bool {
        self.lock().get(path).is_some_and(|d| d.state == DeviceState::Served)
    }

    pub(crate) fn remove(&self, path: &Path) {
        self.lock().remove(path);
    }

    /// Marks a device as failed and logs why.
    pub(crate) fn fail(&self, probe: &Probe, failure: Failure) {
        self.set(probe, DeviceState::Failed(failure.into()));
    }

    /// Marks a device as failed without a message. A device that could not be probed has its last probe, so that its label is
    /// known, or none.
    pub(crate) fn set_failed(&self, path: PathBuf, probe: Option<Probe>, why: Failure) {
        let state = DeviceState::Failed(why.into());
        let devices = &mut *self.lock();
        let probe = probe.or_else(|| devices.get(&path).and_then(|device| device.probe.clone()));
        devices.insert(path, Device { probe, state });
    }

    /// Changes the state of a registered device without a message.
    pub(crate) fn change(&self, path: &Path, change: impl FnOnce(&mut DeviceState)) {
        if let Some(device) = self.lock().get_mut(path) {
            change(&mut device.state);
        }
    }

    /// Marks the device with this UUID as stopped, because its volume has been stopped.
    pub(crate) fn stopped(&self, uuid: Option<&String>) {
        for device in self.lock().values_mut() {
            let is_it = device.probe.as_ref().is_some_and(|p| Some(&p.uuid) == uuid);
            if is_it && device.state.has_thread() {
                device.state = DeviceState::Stopped;
            }
        }
    }

    /// Sets the state of a device and logs why it waits or fails.
    pub(crate) fn set(&self, probe: &Probe, state: DeviceState) {
        let why = match &state {
            DeviceState::Failed(why) => Some(why.text()),
            DeviceState::Waiting(WaitsFor::Operator, why) => {
                Some(format!("{why}; to attach it: ubcache register {}", probe.path.display()))
            }
            DeviceState::Waiting(_, why) | DeviceState::Unplugged(why) | DeviceState::Replugged(why, _) => {
                Some(why.clone())
            }
            DeviceState::Served | DeviceState::Stopped => None,
        };
        if let Some(why) = why {
            let bad = matches!(state, DeviceState::Failed(_) | DeviceState::Unplugged(_));
            let level = if bad { "error" } else { "warning" };
            let text = format!("{}: {why}", plain::named(probe.label(), probe.path.display()));
            serve::message::message(level, &text);
            self.hub.publish(Kind::Device, None, level, &text);
        }
        self.lock().insert(probe.path.clone(), Device { probe: Some(probe.clone()), state });
    }

    /// Logs each served device that was unplugged, with the consequence for its volume.
    pub(crate) fn note_unplugged(&self) {
        let unplugged: Vec<Probe> = {
            let devices = self.lock();
            let served = devices
                .values()
                .filter(|d| matches!(d.state, DeviceState::Served | DeviceState::Replugged(..)));
            served.filter_map(|d| d.probe.clone()).filter(Probe::is_unplugged).collect()
        };
        for probe in unplugged {
            let why = match &probe.role {
                Role::Cache { set, .. } => format!(
                    "was unplugged; it is the cache device of set {set}: volumes with dirty data in it fail until \
                     it is plugged in again"
                ),
                Role::Backing { .. } => {
                    "was unplugged: requests that the cache cannot answer fail until it is plugged in again"
                        .into()
                }
            };
            self.set(&probe, DeviceState::Unplugged(why));
        }
    }

    /// Whether any device is unplugged.
    pub(crate) fn has_unplugged(&self) -> bool {
        self.lock().values().any(|d| matches!(d.state, DeviceState::Unplugged(_)))
    }

    /// Whether this is a device that was unplugged.
    pub(crate) fn was_unplugged(&self, probe: &Probe) -> bool {
        self.unplugged_as(probe).is_some()
    }

    /// The path that the device had before it was unplugged.
    pub(crate) fn unplugged_as(&self, probe: &Probe) -> Option<PathBuf> {
        let devices = self.lock();
        let same = devices.iter().find(|(_, d)| {
            matches!(d.state, DeviceState::Unplugged(_))
                && d.probe.as_ref().is_some_and(|s| s.uuid == probe.uuid)
        });
        same.map(|(path, _)| path.clone())
    }

    /// Removes the entries of a device that could not be found, because it is here now.
    pub(crate) fn forget_missing(&self, known: &BTreeMap<PathBuf, Known>, probe: &Probe) {
        let is_it = |path: &PathBuf| {
            known.get(path).is_some_and(|k| k.uuid == probe.uuid)
                || path.canonicalize().is_ok_and(|found| found == probe.path)
        };
        self.lock().retain(|path, d| d.probe.is_some() || *path == probe.path || !is_it(path));
    }

    /// Removes the entries of this device at other paths, unless a thread serves them.
    pub(crate) fn forget_other_places(&self, probe: &Probe) {
        self.lock().retain(|path, d| {
            let same = d.probe.as_ref().is_some_and(|s| s.key() == probe.key());
            *path == probe.path || !same || d.state.has_thread()
        });
    }
}
