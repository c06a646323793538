//! Hotplug: which of the devices that are plugged in while the daemon runs are registered.
//!
//! Owns that decision. A device is registered if it was served and then unplugged. If the configuration permits it, any
//! device with a superblock is registered that no other program uses and no operator has unregistered. Such a device is
//! registered as by command. Must not know how changes are detected.

use std::path::PathBuf;
use std::sync::Arc;

use serve::message;

use super::admission::{Admission, By};
use super::devices::{Device, DeviceState};
use super::inventory::Inventory;
use super::registration::Registration;
use crate::asked::Asked;
use crate::audit::{self, Peer};
use crate::hub::{Hub, Kind};
use crate::names::Named;
use crate::probe::{Probe, block_devices, probe_all};
use crate::uevents::{Monitor, Uevents, is_taken};

/// The block devices of this host that may have a superblock of bcache and that no other program uses.
pub(crate) fn free_devices() -> Vec<PathBuf> {
    let mut found = block_devices();
    found.retain(|path| !is_taken(path));
    found
}

/// Registers devices that are plugged in.
pub(crate) struct Hotplug {
    hub: Arc<Hub>,
    inventory: Inventory,
    admission: Arc<Admission>,
    registration: Arc<Registration>,
}

impl Hotplug {
    pub(crate) fn new(
        hub: Arc<Hub>,
        inventory: Inventory,
        admission: Arc<Admission>,
        registration: Arc<Registration>,
    ) -> Hotplug {
        Hotplug { hub, inventory, admission, registration }
    }

    /// Reports unplugged devices and registers plugged ones until the monitor fails.
    ///
    /// With `all` it also registers devices that were not served before.
    pub(crate) async fn watch(&self, mut monitor: Monitor, all: bool) {
        loop {
            let devices = match monitor.uevents().await {
                Ok(Uevents::Devices(devices)) => devices,
                Ok(Uevents::Unplugged) => {
                    self.inventory.devices.note_unplugged();
                    continue;
                }
                Ok(Uevents::Everything) => {
                    let all = tokio::task::spawn_blocking(block_devices).await.unwrap_or_default();
                    all.into_iter().map(|path| (path, false)).collect()
                }
                Err(e) => {
                    let text = format!(
                        "hotplug events cannot be received any more; restart the daemon to receive \
                                 them: {e}"
                    );
                    message::message("error", &text);
                    return;
                }
            };
            self.inventory.devices.note_unplugged();
            if !all && !self.inventory.devices.has_unplugged() {
                continue;
            }
            let free = devices.into_iter().filter(|(path, _)| !is_taken(path));
            self.hotplugged(free.collect(), all).await;
        }
    }

    /// Registers the devices among these that have a superblock and are not registered.
    ///
    /// The flag of a device is true if it was just plugged in. Without `all` only devices that were served and unplugged
    /// are registered. The error of one device is logged and does not affect others.
    pub(crate) async fn hotplugged(&self, devices: Vec<(PathBuf, bool)>, all: bool) {
        let (paths, came): (Vec<_>, Vec<_>) = devices.into_iter().unzip();
        for ((_, probed), came) in probe_all(paths).await.into_iter().zip(came) {
            // Most devices have no superblock of bcache, or are unplugged again.
            let Ok(probe) = probed else { continue };
            let is_back = self.inventory.devices.was_unplugged(&probe) && (all || self.is_expected(&probe));
            // A refused device is tried again when it is plugged in again.
            let may_be_tried = came || !self.admission.is_released(&probe.uuid);
            if is_back && may_be_tried || all && self.is_new(&probe, came) {
                self.register_hotplugged(&probe).await;
            }
        }
    }

    async fn register_hotplugged(&self, probe: &Probe) {
        message::note(format!("{}: was plugged in", probe.path.display()));
        let registered = {
            let asked = Asked::inside(format!("register {}, which was plugged in", probe.path.display()));
            self.registration.register(vec![probe.path.clone()], By::Search, &asked).await
        };
        let result = registered.as_ref().map(|_| "done").map_err(|e| e.message().unwrap_or_default());
        let what =
            Named { device: Some(probe.path.clone()), uuid: Some(probe.uuid.clone()), ..Named::default() };
        audit::tell(&self.hub, Peer::Other("the device"), "register by hotplug", &[what], result);
        match registered {
            Ok(_) => self.admission.welcome(&probe.uuid),
            Err(e) => {
                let text =
                    format!("{}: cannot be registered: {}", probe.path.display(), e.message().unwrap_or(""));
                message::message("error", &text);
                self.hub.publish(Kind::Device, None, "error", &text);
                self.admission.refuse(&probe.uuid)
            }
        };
    }

    /// Whether a device that an uevent names is to be registered.
    ///
    /// It is not if a thread has it, if it waits or is stopped, or if it was refused or unregistered by the operator.
    /// `came`: the device was just plugged in, so it is tried again even after a refusal.
    fn is_new(&self, probe: &Probe, came: bool) -> bool {
        let is_it = |path: &PathBuf, d: &Device| {
            *path == probe.path || d.probe.as_ref().is_some_and(|s| s.uuid == probe.uuid)
        };
        let same: Vec<Device> =
            self.inventory.devices.all().into_iter().filter(|(p, d)| is_it(p, d)).map(|(_, d)| d).collect();
        let has = |d: &Device| match d.state {
            DeviceState::Served => {
                d.probe.as_ref().is_none_or(|s| self.inventory.workers.of_device(s).is_some())
            }
            DeviceState::Waiting(..) | DeviceState::Stopped | DeviceState::Replugged(..) => true,
            DeviceState::Failed(_) | DeviceState::Unplugged(_) => false,
        };
        if same.iter().any(has) {
            return false;
        }
        came || (same.iter().all(|d| d.probe.is_none()) && !self.admission.is_released(&probe.uuid))
    }

    /// Whether this is the unplugged device: it has the stored identity, or the path from before.
    fn is_expected(&self, probe: &Probe) -> bool {
        self.admission.is_surely(probe)
            || self.inventory.devices.unplugged_as(probe).as_ref() == Some(&probe.path)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use format::BackingState;

    use super::*;
    use crate::config::Config;
    use crate::registry::Registry;
    use crate::shared::Shared;
    use crate::state::State;
    use crate::testing::{backing_device, backing_device_in, cache_device};

    #[tokio::test]
    async fn a_missing_device_is_found_when_it_comes() {
        let dir = tempfile::tempdir().unwrap();
        let cache = cache_device(dir.path(), 2);
        let (away, link) = (dir.path().join("away"), dir.path().join("link"));
        std::os::unix::fs::symlink(&cache, &link).unwrap();
        std::fs::rename(&cache, &away).unwrap();
        let config = named(&[&link]);
        let state = State::open(&dir.path().join("state")).unwrap();
        let registry = Arc::new(Registry::new(Arc::new(Shared::new(config, state))));
        registry.startup.begin(Vec::new(), Vec::new).await;
        assert_eq!(served(&registry), 0);
        std::fs::rename(&away, &cache).unwrap();
        registry.hotplug.hotplugged(vec![(cache, true)], true).await;
        assert_eq!((registry.views.devices().len(), served(&registry)), (1, 1));
        registry.inventory.workers.stop_all().await.unwrap();
    }

    fn registry(dir: &Path) -> Arc<Registry> {
        let state = State::open(&dir.join("state")).unwrap();
        Arc::new(Registry::new(Arc::new(Shared::new(Config::default(), state))))
    }

    fn named(devices: &[&Path]) -> Config {
        Config::parse(&format!("devices = {devices:?}")).unwrap()
    }

    fn served(registry: &Registry) -> usize {
        registry.views.devices().iter().filter(|d| d.state == "served").count()
    }

    #[tokio::test]
    async fn a_device_that_appears_is_registered_once_and_not_after_its_release() {
        let dir = tempfile::tempdir().unwrap();
        let registry = registry(dir.path());
        let [one, two] = [2, 3].map(|n| cache_device(dir.path(), n));
        let (foreign, missing) = (dir.path().join("foreign"), dir.path().join("missing"));
        std::fs::write(&foreign, vec![7; 1 << 20]).unwrap();
        let all = vec![(foreign, true), (one.clone(), true), (missing, true), (two.clone(), false)];
        registry.hotplug.hotplugged(all, true).await;
        assert_eq!(served(&registry), 2, "a change is enough for one that was never seen");
        assert_eq!(registry.shared.state().devices().len(), 2, "they are remembered");

        registry.hotplug.hotplugged(vec![(one.clone(), true), (two.clone(), false)], true).await;
        assert!(registry.shared.hub.last(9, |e| e.level == "error").is_empty());
        registry.registration.unregister(two.to_str().unwrap(), &Asked::inside("a test")).await.unwrap();
        registry.hotplug.hotplugged(vec![(two.clone(), false)], true).await;
        assert_eq!(served(&registry), 1, "that it was closed changed it, and is no reason");
        registry.hotplug.hotplugged(vec![(two.clone(), true)], true).await;
        assert_eq!(served(&registry), 2, "it was taken out and put in again");

        // The daemon ignores a copy while the original is there.
        let copy = dir.path().join("copy");
        std::fs::copy(&one, &copy).unwrap();
        let errors = || registry.shared.hub.last(9, |e| e.kind == "device" && e.level == "error").len();
        for (came, wanted) in [(false, 0), (true, 0)] {
            registry.hotplug.hotplugged(vec![(copy.clone(), came)], true).await;
            assert_eq!((served(&registry), errors()), (2, wanted));
        }
        // After the original is unregistered the copy is refused, with one message, and tried again only after the next hotplug.
        registry.registration.unregister(one.to_str().unwrap(), &Asked::inside("a test")).await.unwrap();
        for uuid in [2 ^ 0x80, 3 ^ 0x80].map(|n| format::Uuid([n; 16]).to_string()) {
            registry.admission.welcome(&uuid);
        }
        for (came, wanted) in [(false, 1), (false, 1), (true, 2)] {
            registry.hotplug.hotplugged(vec![(copy.clone(), came)], true).await;
            assert_eq!((served(&registry), errors()), (1, wanted), "{came}");
        }
        registry.inventory.workers.stop_all().await.unwrap();
    }

    /// Only a disk that was made for the set waited. A disk that claimed to be attached got a slot.
    #[tokio::test]
    async fn a_disk_that_the_set_does_not_know_waits_for_the_operator() {
        let dir = tempfile::tempdir().unwrap();
        let (cache, own) = (cache_device(dir.path(), 2), backing_device(dir.path(), 2));
        let first = registry(dir.path());
        let asked = Asked::inside("a test");
        first.registration.register(vec![cache.clone(), own.clone()], By::NAME, &asked).await.unwrap();
        let strangers = [(7, BackingState::Clean), (8, BackingState::Stale), (9, BackingState::None)]
            .map(|(uuid, state)| backing_device_in(dir.path(), 2, uuid, state));
        first.hotplug.hotplugged(strangers.clone().map(|path| (path, true)).into(), true).await;
        let waiting = |registry: &Registry| {
            let all = registry.views.devices().into_iter().filter(|d| d.state == "waiting");
            all.map(|d| d.path).collect::<Vec<_>>()
        };
        assert_eq!(waiting(&first), strangers);
        first.inventory.workers.stop_all().await.unwrap();
        drop(first);
        // The set knows a disk that was attached once, also if the state is lost.
        std::fs::remove_dir_all(dir.path().join("state")).unwrap();
        let second = registry(dir.path());
        let mut all = vec![(own, true), (cache, true)];
        all.extend(strangers.clone().map(|path| (path, true)));
        second.hotplug.hotplugged(all, true).await;
        assert_eq!((served(&second), waiting(&second).len()), (2, 3));
        second.registration.register(strangers.to_vec(), By::NAME, &asked).await.unwrap();
        assert_eq!((served(&second), waiting(&second).len()), (5, 0));
        second.inventory.workers.stop_all().await.unwrap();
    }
}
