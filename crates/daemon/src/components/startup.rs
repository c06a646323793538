//! The start: registers the configured devices, the stored devices, and the devices that a scan finds.
//!
//! Owns the search for a device that is not at its stored path. The kernel assigns names such as `/dev/sdb` at each boot,
//! so the daemon searches all block devices for the UUID of a stored device. A device with this UUID is accepted if its
//! serial number (or its inode) is the stored one. If the system reports no such identity, or none is stored because the
//! device was never served, the device could be a copy. It is then accepted at a path that the operator has named, and
//! elsewhere only if the configuration permits scans. Another device at the stored path is refused, and so is a copy. Must
//! not know the client.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use serve::Failure;

use super::admission::Admission;
use super::changes::Scope;
use super::inventory::Inventory;
use super::placement::Placement;
use crate::hub::Kind;
use crate::probe::{Probe, probe_all};
use crate::shared::Shared;
use crate::state::Known;

/// The results of probes at the known paths.
#[derive(Default)]
struct FoundDevices {
    /// Devices that may be served.
    right: Vec<Probe>,
    /// Devices at a stored path that have another UUID than the stored one.
    displaced: Vec<(PathBuf, Probe)>,
    /// The UUID is right, and the device is another one, or older; why.
    copies: Vec<(Probe, Failure)>,
    /// Asked for, and not to be had; why.
    missing: Vec<(PathBuf, Failure)>,
}

/// Registers devices at the start of the daemon.
pub(crate) struct Startup {
    shared: Arc<Shared>,
    inventory: Inventory,
    admission: Arc<Admission>,
    placement: Arc<Placement>,
}

impl Startup {
    pub(crate) fn new(
        shared: Arc<Shared>,
        inventory: Inventory,
        admission: Arc<Admission>,
        placement: Arc<Placement>,
    ) -> Startup {
        Startup { shared, inventory, admission, placement }
    }

    /// Registers the configured devices, the stored devices, and the devices that a scan has found.
    ///
    /// A device that cannot be served is logged and marked as failed. `elsewhere` returns the block devices to search; it
    /// is called only if a stored device is not at its path.
    pub(crate) async fn begin(
        &self,
        scanned: Vec<PathBuf>,
        elsewhere: impl FnOnce() -> Vec<PathBuf> + Send + 'static,
    ) {
        let everything = Scope::everything();
        let _claim = self.placement.changes().wait("the start of the daemon", &everything).await;
        let known = self.admission.remembered();
        let mut found = self.probe_known(&scanned, &known).await;
        let moved = self.find_moved(&known, &mut found, elsewhere).await;
        let configured = self.shared.config().devices.clone();
        for (path, probe) in std::mem::take(&mut found.displaced) {
            let expected = known.get(&path).map_or("", |k| &k.uuid);
            if !moved.contains_key(expected) {
                let why = format!(
                    "expected the device with UUID {expected}, found UUID {}: register it again",
                    probe.uuid
                );
                self.inventory.devices.fail(&probe, Failure::Failed(why));
            } else if configured.contains(&path) || scanned.contains(&path) {
                found.right.push(probe);
            }
        }
        for (probe, why) in found.copies {
            self.inventory.devices.fail(&probe, why);
        }
        for (path, why) in found.missing {
            let text = why.to_string();
            serve::message::message("error", &text);
            self.shared.hub.publish(Kind::Device, None, "error", &text);
            self.inventory.devices.set_failed(path, None, why);
        }
        let mut unique: Vec<Probe> = Vec::new();
        for probe in found.right {
            if !unique.iter().any(|u| u.path == probe.path) {
                unique.push(probe);
            }
        }
        let (unique, refused) = self.admission.sift(unique, &known);
        for (probe, why) in refused {
            self.inventory.devices.fail(&probe, why);
        }
        for (probe, result) in self.placement.place(unique).await {
            if let Err(e) = result
                && !self.placement.comes_up_late(&probe)
            {
                self.inventory.devices.fail(&probe, e);
            }
        }
    }

    /// Probes the stored, configured and found devices, and marks those that the operator has named.
    async fn probe_known(&self, scanned: &[PathBuf], known: &BTreeMap<PathBuf, Known>) -> FoundDevices {
        let configured = self.shared.config().devices.clone();
        self.admission.name_all(known.values().filter(|k| k.named).map(|k| k.uuid.clone()));
        let mut paths: Vec<PathBuf> = known.keys().chain(&configured).cloned().collect();
        paths.sort();
        paths.dedup();
        let asked_for = paths.len();
        paths.extend(scanned.iter().filter(|p| !known.contains_key(*p)).cloned());
        let mut found = FoundDevices::default();
        for (n, (path, probed)) in probe_all(paths).await.into_iter().enumerate() {
            let probe = match probed {
                Ok(probe) => probe,
                Err(e) if n < asked_for => {
                    found.missing.push((path, e));
                    continue;
                }
                // A scan probes all block devices. Most of them have no superblock of bcache.
                Err(_) => continue,
            };
            if configured.contains(&path) {
                self.admission.name(probe.uuid.clone());
            }
            if known.get(&path).is_some_and(|k| k.uuid != probe.uuid) {
                found.displaced.push((path, probe));
            } else if let Some(difference) = self.admission.difference(&probe) {
                let why = self.admission.admit(&probe).err();
                found.copies.push((probe, why.unwrap_or(Failure::Failed(difference))));
            } else {
                found.right.push(probe);
            }
        }
        found
    }

    /// Finds stored devices at other paths and stores those paths. Returns the new paths by UUID.
    async fn find_moved(
        &self,
        known: &BTreeMap<PathBuf, Known>,
        found: &mut FoundDevices,
        elsewhere: impl FnOnce() -> Vec<PathBuf> + Send + 'static,
    ) -> BTreeMap<String, PathBuf> {
        let mut moved = BTreeMap::new();
        let is_there = |k: &Known| found.right.iter().any(|s| s.uuid == k.uuid);
        let wanted: Vec<_> = known.iter().filter(|(_, k)| !is_there(k)).collect();
        if wanted.is_empty() {
            return moved;
        }
        let paths = tokio::task::spawn_blocking(elsewhere).await.unwrap_or_default();
        let mut candidates: Vec<Probe> = found.displaced.iter().map(|(_, probe)| probe.clone()).collect();
        for (_, probed) in probe_all(paths).await {
            candidates.extend(probed.ok().filter(|s| candidates.iter().all(|c| c.path != s.path)));
        }
        for (old, Known { uuid, named }) in wanted {
            let places: Vec<&Probe> = candidates.iter().filter(|s| s.uuid == *uuid).collect();
            match self.choose(&places, known) {
                Ok(None) => {}
                Ok(Some(probe)) => {
                    let now = probe.path.display();
                    serve::message::note(format!("{}: found at {now} by its UUID", old.display()));
                    self.shared.state().add_device(&probe.path, uuid, *named);
                    found.displaced.retain(|(path, _)| *path != probe.path);
                    found.missing.retain(|(path, _)| path != old);
                    found.right.push(probe.clone());
                    moved.insert(uuid.clone(), probe.path.clone());
                }
                Err(why) => {
                    let why = format!("{}: UUID {uuid}: {why}", old.display());
                    serve::message::message("error", &why);
                    self.shared.hub.publish(Kind::Device, None, "error", &why);
                }
            }
        }
        moved
    }

    /// Chooses the stored device among devices with its UUID; `None` if there are no such devices.
    ///
    /// # Errors
    /// If none of the devices is accepted as the stored one, or several could be; the text says why.
    fn choose<'s>(
        &self,
        places: &[&'s Probe],
        known: &BTreeMap<PathBuf, Known>,
    ) -> Result<Option<&'s Probe>, Failure> {
        let fits = |s: &&&Probe| self.admission.difference(s).is_none();
        let sure: Vec<&Probe> =
            places.iter().filter(fits).filter(|s| self.admission.is_surely(s)).copied().collect();
        // A device without an identity is accepted at a path that the operator has named.
        let configured = self.shared.config().devices.clone();
        let is_named = |s: &Probe| known.contains_key(&s.path) || configured.contains(&s.path);
        let may = |s: &Probe| self.admission.searches() || is_named(s);
        let fitting = || places.iter().filter(fits).filter(|s| may(s)).copied().collect();
        let left: Vec<&Probe> = if sure.is_empty() { fitting() } else { sure };
        match (&left[..], places) {
            ([], []) => Ok(None),
            ([one], _) => Ok(Some(one)),
            ([], [first, ..]) => Err(match self.admission.admit(first) {
                Err(e) => e,
                Ok(()) => Failure::Failed(format!(
                    "{0} has this UUID, but nothing shows that it is the device that was registered, and it may be a copy; \
                     if it is the right device: ubcache register {0}",
                    first.path.display()
                )),
            }),
            ([one, other, ..], _) => Err(Failure::Failed(format!(
                "is at {} and at {}; register the right device",
                one.path.display(),
                other.path.display()
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::asked::Asked;
    use std::path::Path;

    use super::*;
    use crate::components::By;
    use crate::config::Config;
    use crate::identity::Identity;
    use crate::registry::Registry;
    use crate::state::Mark;
    use crate::state::State;
    use crate::testing::cache_device;

    fn registry(dir: &Path, config: &str) -> Arc<Registry> {
        let state = State::open(&dir.join("state")).unwrap();
        Arc::new(Registry::new(Arc::new(Shared::new(Config::parse(config).unwrap(), state))))
    }

    fn in_state(registry: &Registry, state: &str) -> Vec<PathBuf> {
        registry.views.devices().into_iter().filter(|d| d.state == state).map(|d| d.path).collect()
    }

    #[tokio::test]
    async fn one_broken_device_among_good_ones_keeps_none_of_them() {
        let dir = tempfile::tempdir().unwrap();
        let [one, two, broken] = [2, 3, 4].map(|n| cache_device(dir.path(), n));
        let mut bytes = std::fs::read(&broken).unwrap();
        bytes[4096 + 100] ^= 1;
        std::fs::write(&broken, bytes).unwrap();
        let empty = dir.path().join("empty");
        std::fs::write(&empty, b"").unwrap();
        let found = vec![empty, broken.clone(), one.clone(), dir.path().to_owned(), two.clone()];
        let first = registry(dir.path(), "");
        first.startup.begin(found, Vec::new).await;
        assert_eq!(in_state(&first, "served"), [one.clone(), two.clone()]);
        assert_eq!(first.views.devices().len(), 2, "what a scan cannot use is no business of ours");
        first.inventory.workers.stop_all().await.unwrap();
        drop(first);

        // A failed probe of a stored or configured device is logged.
        let none = dir.path().join("none");
        let registry = registry(dir.path(), &format!("devices = {:?}", [&broken, &one, &none]));
        registry.startup.begin(vec![two.clone()], Vec::new).await;
        assert_eq!(in_state(&registry, "served"), [one, two]);
        assert_eq!(in_state(&registry, "failed"), [broken, none]);
        let said: Vec<String> = registry.views.devices().into_iter().filter_map(|d| d.why).collect();
        assert!(said.iter().any(|w| w.contains("checksum")), "{said:?}");
        registry.inventory.workers.stop_all().await.unwrap();
    }

    #[tokio::test]
    async fn remembered_devices_are_found_wherever_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let [one, two, three] = [2, 3, 4].map(|n| cache_device(dir.path(), n));
        let first = registry(dir.path(), "");
        first
            .registration
            .register(vec![one.clone(), two.clone(), three.clone()], By::NAME, &Asked::inside("a test"))
            .await
            .unwrap();
        first.inventory.workers.stop_all().await.unwrap();
        drop(first);
        // Two devices have swapped their paths. The third is at another path, and a fourth is at the path of the third.
        let (aside, other) = (dir.path().join("aside"), dir.path().join("other"));
        std::fs::rename(&one, &aside).unwrap();
        std::fs::rename(&two, &one).unwrap();
        std::fs::rename(&aside, &two).unwrap();
        std::fs::rename(&three, &other).unwrap();
        std::fs::rename(cache_device(dir.path(), 5), &three).unwrap();
        let place = other.clone();
        let second = registry(dir.path(), "");
        second.startup.begin(Vec::new(), move || vec![place]).await;
        assert_eq!(in_state(&second, "served"), [one.clone(), two, other.clone()]);
        assert_eq!(second.views.devices().len(), 3, "the other one is nobody's");
        second.inventory.workers.stop_all().await.unwrap();
        drop(second);

        // The original has moved again, and a copy is at another path: the daemon serves the original.
        let copy = dir.path().join("copy");
        std::fs::copy(&other, &copy).unwrap();
        std::fs::rename(&other, &three).unwrap();
        let third = registry(dir.path(), "");
        let places = vec![copy, three.clone()];
        third.startup.begin(Vec::new(), move || places).await;
        assert_eq!((in_state(&third, "served").len(), in_state(&third, "failed").len()), (3, 0));
        assert!(in_state(&third, "served").contains(&three));
        // All devices are at their stored paths, so the daemon searches no others.
        third.inventory.workers.stop_all().await.unwrap();
        drop(third);
        std::fs::remove_dir_all(dir.path().join("state")).unwrap();
        let fourth = registry(dir.path(), "");
        fourth.registration.register(vec![one], By::NAME, &Asked::inside("a test")).await.unwrap();
        fourth.inventory.workers.stop_all().await.unwrap();
        drop(fourth);
        let fifth = registry(dir.path(), "");
        fifth.startup.begin(Vec::new(), || panic!("everything is where it was")).await;
        assert_eq!(in_state(&fifth, "served").len(), 1);
        fifth.inventory.workers.stop_all().await.unwrap();
    }

    /// The stored device is missing, and there is a copy: at its path, elsewhere, or found by a scan.
    #[tokio::test]
    async fn a_copy_does_not_take_the_place_of_what_is_remembered() {
        for (at_its_place, config, scanned) in
            [(true, "", false), (false, "", false), (false, "scan = true", true), (true, "scan = true", true)]
        {
            let dir = tempfile::tempdir().unwrap();
            let one = cache_device(dir.path(), 2);
            let first = registry(dir.path(), "");
            first.registration.register(vec![one.clone()], By::NAME, &Asked::inside("a test")).await.unwrap();
            first.inventory.workers.stop_all().await.unwrap();
            drop(first);
            let (aside, copy) = (dir.path().join("aside"), dir.path().join("copy"));
            std::fs::copy(&one, &copy).unwrap();
            std::fs::rename(&one, &aside).unwrap();
            let place = if at_its_place { one.clone() } else { copy.clone() };
            std::fs::rename(&copy, &place).unwrap_or_default();
            let second = registry(dir.path(), config);
            let (found, elsewhere) =
                (if scanned { vec![place.clone()] } else { vec![] }, vec![place.clone()]);
            second.startup.begin(found, move || elsewhere).await;
            assert_eq!(in_state(&second, "served"), Vec::<PathBuf>::new(), "{place:?} {config}");
            let said: Vec<String> =
                second.shared.hub.last(9, |e| e.level == "error").iter().map(|e| e.text.clone()).collect();
            assert!(
                said.iter().any(|s| s.contains("inode: expected") && s.contains("--accept-replacement")),
                "{said:?}"
            );
            assert_eq!(
                second.shared.state().devices().keys().collect::<Vec<_>>(),
                [&one],
                "it is still remembered"
            );
            second.inventory.workers.stop_all().await.unwrap();
            drop(second);
            // The device is back at its path, so there is no message. The copy replaces it after the operator has accepted
            // the copy.
            let (third, found) = (registry(dir.path(), config), aside.clone());
            third.startup.begin(Vec::new(), move || vec![found]).await;
            assert_eq!(in_state(&third, "served"), std::slice::from_ref(&aside));
            let refused = third
                .registration
                .register(vec![place.clone()], By::Operator { accept: true }, &Asked::inside("a test"))
                .await;
            assert!(
                refused.err().unwrap().message().unwrap().contains("served already"),
                "while it is served"
            );
            third.registration.unregister(aside.to_str().unwrap(), &Asked::inside("a test")).await.unwrap();
            let refused = third
                .registration
                .register(vec![place.clone()], By::NAME, &Asked::inside("a test"))
                .await
                .err()
                .unwrap();
            assert!(refused.message().unwrap().contains("is not the device"), "{refused:?}");
            let by = By::Operator { accept: true };
            let registered =
                third.registration.register(vec![place.clone()], by, &Asked::inside("a test")).await.unwrap();
            assert!(registered.accepted[0].contains("inode: expected"), "{:?}", registered.accepted);
            third.inventory.workers.stop_all().await.unwrap();
            drop(third);
            let fourth = registry(dir.path(), "");
            fourth.startup.begin(Vec::new(), Vec::new).await;
            assert_eq!(in_state(&fourth, "served"), [place]);
            fourth.inventory.workers.stop_all().await.unwrap();
        }
    }

    /// A cache device gets back the contents that it had before it was last served.
    #[tokio::test]
    async fn an_older_state_of_a_device_is_refused_until_it_is_accepted() {
        let dir = tempfile::tempdir().unwrap();
        let one = cache_device(dir.path(), 2);
        let older = std::fs::read(&one).unwrap();
        let first = registry(dir.path(), "");
        first.registration.register(vec![one.clone()], By::NAME, &Asked::inside("a test")).await.unwrap();
        first.inventory.workers.stop_all().await.unwrap();
        drop(first);
        std::fs::write(&one, older).unwrap();
        let second = registry(dir.path(), "");
        second.startup.begin(Vec::new(), Vec::new).await;
        assert_eq!(in_state(&second, "failed"), std::slice::from_ref(&one));
        let why = second.views.devices().remove(0).why.unwrap();
        assert!(why.contains("is older than") && why.contains("sequence number"), "{why}");
        assert!(
            second
                .registration
                .register(vec![one.clone()], By::NAME, &Asked::inside("a test"))
                .await
                .is_err()
        );
        let by = By::Operator { accept: true };
        second.registration.register(vec![one.clone()], by, &Asked::inside("a test")).await.unwrap();
        second.inventory.workers.stop_all().await.unwrap();
        drop(second);
        let third = registry(dir.path(), "");
        third.startup.begin(Vec::new(), Vec::new).await;
        assert_eq!(in_state(&third, "served"), [one]);
        third.inventory.workers.stop_all().await.unwrap();
    }

    /// Stores an empty identity, as of a disk without a serial number.
    fn without_identity(registry: &Registry, uuid: &str) {
        let mark = Mark { identity: Identity::default(), sequence: 0, path: None, label: String::new() };
        registry.shared.state().set_mark(uuid, mark);
    }

    #[tokio::test]
    async fn a_device_like_its_copy_is_taken_at_the_path_of_the_operator() {
        let dir = tempfile::tempdir().unwrap();
        let [one, two] = [2, 3].map(|n| cache_device(dir.path(), n));
        let first = registry(dir.path(), "");
        first
            .registration
            .register(vec![one.clone(), two.clone()], By::NAME, &Asked::inside("a test"))
            .await
            .unwrap();
        let sets: Vec<String> = first.views.devices().into_iter().filter_map(|d| d.set).collect();
        first.inventory.workers.stop_all().await.unwrap();
        sets.iter().for_each(|set| without_identity(&first, set));
        drop(first);
        // The devices swap their paths. The operator has named both paths.
        let aside = dir.path().join("aside");
        std::fs::rename(&one, &aside).unwrap();
        std::fs::rename(&two, &one).unwrap();
        std::fs::rename(&aside, &two).unwrap();
        let second = registry(dir.path(), "");
        second.startup.begin(Vec::new(), Vec::new).await;
        assert_eq!(in_state(&second, "served"), [one.clone(), two.clone()]);
        second.inventory.workers.stop_all().await.unwrap();
        sets.iter().for_each(|set| without_identity(&second, set));
        drop(second);
        // One device is at another path.
        std::fs::rename(&one, &aside).unwrap();
        for (config, wanted) in [("", vec![two.clone()]), ("scan_on_events = true", vec![aside.clone(), two])]
        {
            let (third, place) = (registry(dir.path(), config), aside.clone());
            third.startup.begin(Vec::new(), move || vec![place]).await;
            assert_eq!(in_state(&third, "served"), wanted, "{config}");
            third.inventory.workers.stop_all().await.unwrap();
        }
    }

    /// A device that was registered and never served has no stored identity. Any device with its UUID was served, wherever it
    /// was.
    #[tokio::test]
    async fn a_device_without_a_stored_identity_is_taken_where_the_operator_said_so() {
        let dir = tempfile::tempdir().unwrap();
        let one = cache_device(dir.path(), 2);
        let uuid = format::Uuid([2 ^ 0x80; 16]).to_string();
        let elsewhere = dir.path().join("elsewhere");
        registry(dir.path(), "").shared.state().add_device(&one, &uuid, true);
        let begin = async |config: &str| {
            let (registry, place) = (registry(dir.path(), config), elsewhere.clone());
            registry.startup.begin(Vec::new(), move || vec![place]).await;
            let said = registry.shared.hub.last(9, |e| e.level == "error");
            let served = in_state(&registry, "served");
            registry.inventory.workers.stop_all().await.unwrap();
            (served, said.iter().map(|e| e.text.clone()).collect::<String>())
        };
        std::fs::rename(&one, &elsewhere).unwrap();
        let (served, said) = begin("").await;
        assert_eq!(served, Vec::<PathBuf>::new());
        let command = format!("ubcache register {}", elsewhere.display());
        assert!(said.contains("may be a copy") && said.contains(&command), "{said}");
        assert_eq!(begin(&format!("devices = {:?}", [&elsewhere])).await.0, std::slice::from_ref(&elsewhere));
        std::fs::remove_dir_all(dir.path().join("state")).unwrap();
        registry(dir.path(), "").shared.state().add_device(&one, &uuid, true);
        assert_eq!(begin("scan_on_events = true").await.0, std::slice::from_ref(&elsewhere));
    }

    /// Two unknown devices with the same UUID at the same time.
    #[tokio::test]
    async fn of_two_that_were_never_seen_neither_is_served() {
        let dir = tempfile::tempdir().unwrap();
        let one = cache_device(dir.path(), 2);
        let copy = dir.path().join("copy");
        std::fs::copy(&one, &copy).unwrap();
        let first = registry(dir.path(), "scan = true");
        first.startup.begin(vec![one.clone(), copy.clone()], Vec::new).await;
        assert_eq!(in_state(&first, "failed"), [one.clone(), copy.clone()]);
        assert!(
            first
                .registration
                .register(vec![one.clone(), copy.clone()], By::NAME, &Asked::inside("a test"))
                .await
                .is_err()
        );
        first.registration.register(vec![one.clone()], By::NAME, &Asked::inside("a test")).await.unwrap();
        let refused = first
            .registration
            .register(vec![copy.clone()], By::NAME, &Asked::inside("a test"))
            .await
            .err()
            .unwrap();
        assert!(refused.message().unwrap().contains("served already"), "{refused:?}");
        assert_eq!(in_state(&first, "served"), [one]);
        first.inventory.workers.stop_all().await.unwrap();
    }

    #[tokio::test]
    async fn a_device_that_is_named_twice_is_registered_once() {
        let dir = tempfile::tempdir().unwrap();
        let registry = registry(dir.path(), "");
        let one = cache_device(dir.path(), 2);
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&one, &link).unwrap();
        registry
            .registration
            .register(vec![one.clone(), link, one.clone()], By::NAME, &Asked::inside("a test"))
            .await
            .unwrap();
        assert_eq!(in_state(&registry, "served"), [one]);
        registry.inventory.workers.stop_all().await.unwrap();
    }
}
