//! The start: the devices of the configuration, those that are remembered, and what a scan finds.
//!
//! Owns what is made of a device that is not where it was. Names such as `/dev/sdb` are given anew with each start of a
//! host, so a device that is remembered is looked for by its UUID wherever it may be; another one in its place is not taken
//! for it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use super::{Device, Registry, Standing};
use crate::devices::{Seen, look_at_all};
use crate::state::Known;

/// What was found at the places that are known.
#[derive(Default)]
struct Found {
    /// To be served.
    right: Vec<Seen>,
    /// Another device than the one that was there.
    displaced: Vec<(PathBuf, Seen)>,
    /// Asked for, and not to be had; why.
    missing: Vec<(PathBuf, String)>,
}

impl Registry {
    /// Registers devices at the start: those of the configuration, of the state directory, and what a scan has found. What
    /// cannot be had is said and waits for somebody to register it again. `elsewhere`: where else remembered devices may be;
    /// only asked if one is not where it was.
    pub(crate) async fn begin(
        self: &Arc<Self>,
        scanned: Vec<PathBuf>,
        elsewhere: impl FnOnce() -> Vec<PathBuf> + Send + 'static,
    ) {
        let _one = self.changing.lock().await;
        let known = self.shared.state().devices();
        let configured = self.shared.config().devices.clone();
        let mut paths: Vec<PathBuf> = known.keys().chain(&configured).cloned().collect();
        paths.sort();
        paths.dedup();
        let asked_for = paths.len();
        paths.extend(scanned.iter().filter(|p| !known.contains_key(*p)).cloned());
        let mut found = Found::default();
        for (n, (path, looked)) in look_at_all(paths).await.into_iter().enumerate() {
            match looked {
                Ok(seen) if known.get(&path).is_some_and(|k| k.uuid != seen.uuid) => {
                    found.displaced.push((path, seen));
                }
                Ok(seen) => found.right.push(seen),
                Err(e) if n < asked_for => {
                    found.missing.push((path, e.message().unwrap_or_default().to_owned()));
                }
                // A scan looks at everything; most of it is no business of ours.
                Err(_) => {}
            }
        }
        let moved = self.find_moved(&known, &mut found, elsewhere).await;
        for (path, seen) in std::mem::take(&mut found.displaced) {
            let expected = known.get(&path).map_or("", |k| &k.uuid);
            if !moved.contains_key(expected) {
                let why = format!(
                    "expected the device with UUID {expected}, found UUID {}: register it again",
                    seen.uuid
                );
                self.stand(&seen, Standing::Failed(why));
            } else if configured.contains(&path) || scanned.contains(&path) {
                found.right.push(seen);
            }
        }
        for (path, why) in found.missing {
            serve::message::message("error", &why);
            self.shared.hub.publish("device", None, "error", &why);
            self.devices().insert(path, Device { seen: None, standing: Standing::Failed(why) });
        }
        let mut unique: Vec<Seen> = Vec::new();
        for seen in found.right {
            if !unique.iter().any(|u| u.path == seen.path) {
                unique.push(seen);
            }
        }
        for (seen, result) in self.place(unique).await {
            if let Err(e) = result
                && !self.comes_up_late(&seen)
            {
                self.stand(&seen, Standing::Failed(e.message().unwrap_or_default().to_owned()));
            }
        }
    }

    /// Devices that are remembered and were found, but somewhere else; by UUID. They are remembered there from now on.
    async fn find_moved(
        &self,
        known: &BTreeMap<PathBuf, Known>,
        found: &mut Found,
        elsewhere: impl FnOnce() -> Vec<PathBuf> + Send + 'static,
    ) -> BTreeMap<String, PathBuf> {
        let mut moved = BTreeMap::new();
        let is_there = |k: &Known| found.right.iter().any(|s| s.uuid == k.uuid);
        let wanted: Vec<_> = known.iter().filter(|(_, k)| !is_there(k)).collect();
        if wanted.is_empty() {
            return moved;
        }
        let paths = tokio::task::spawn_blocking(elsewhere).await.unwrap_or_default();
        let mut candidates: Vec<Seen> = found.displaced.iter().map(|(_, seen)| seen.clone()).collect();
        for (_, looked) in look_at_all(paths).await {
            candidates.extend(looked.ok().filter(|s| candidates.iter().all(|c| c.path != s.path)));
        }
        for (old, Known { uuid }) in wanted {
            let places: Vec<&Seen> = candidates.iter().filter(|s| s.uuid == *uuid).collect();
            match places[..] {
                [] => {}
                [seen] => {
                    let now = seen.path.display();
                    serve::message::note(format!("{}: is called {now} now, by its UUID", old.display()));
                    if let Err(e) = self.shared.state().add_device(&seen.path, uuid) {
                        serve::message::warn(e.message().unwrap_or_default());
                    }
                    found.displaced.retain(|(path, _)| *path != seen.path);
                    found.missing.retain(|(path, _)| path != old);
                    found.right.push(seen.clone());
                    moved.insert(uuid.clone(), seen.path.clone());
                }
                [one, other, ..] => {
                    let (one, other) = (one.path.display(), other.path.display());
                    let why = format!(
                        "{}: UUID {uuid} is at {one} and at {other}: register the right one",
                        old.display()
                    );
                    serve::message::message("error", &why);
                    self.shared.hub.publish("device", None, "error", &why);
                }
            }
        }
        moved
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::Config;
    use crate::shared::Shared;
    use crate::state::State;
    use crate::testing::cache_device;

    fn registry(dir: &Path, config: &str) -> Arc<Registry> {
        let state = State::open(&dir.join("state")).unwrap();
        Arc::new(Registry::new(Arc::new(Shared::new(Config::parse(config).unwrap(), state))))
    }

    fn in_state(registry: &Registry, state: &str) -> Vec<PathBuf> {
        registry.device_views().into_iter().filter(|d| d.state == state).map(|d| d.path).collect()
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
        first.begin(found, Vec::new).await;
        assert_eq!(in_state(&first, "served"), [one.clone(), two.clone()]);
        assert_eq!(first.device_views().len(), 2, "what a scan cannot use is no business of ours");
        first.stop_all().await.unwrap();
        drop(first);

        // What was asked for by name is said.
        let none = dir.path().join("none");
        let registry = registry(dir.path(), &format!("devices = {:?}", [&broken, &one, &none]));
        registry.begin(vec![two.clone()], Vec::new).await;
        assert_eq!(in_state(&registry, "served"), [one, two]);
        assert_eq!(in_state(&registry, "failed"), [broken, none]);
        let said: Vec<String> = registry.device_views().into_iter().filter_map(|d| d.why).collect();
        assert!(said.iter().any(|w| w.contains("checksum")), "{said:?}");
        registry.stop_all().await.unwrap();
    }

    #[tokio::test]
    async fn remembered_devices_are_found_wherever_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let [one, two, three] = [2, 3, 4].map(|n| cache_device(dir.path(), n));
        let first = registry(dir.path(), "");
        first.register(vec![one.clone(), two.clone(), three.clone()]).await.unwrap();
        first.stop_all().await.unwrap();
        drop(first);
        // Two have changed places, one is somewhere else, and another one is where that was.
        let (aside, other) = (dir.path().join("aside"), dir.path().join("other"));
        std::fs::rename(&one, &aside).unwrap();
        std::fs::rename(&two, &one).unwrap();
        std::fs::rename(&aside, &two).unwrap();
        std::fs::rename(&three, &other).unwrap();
        std::fs::rename(cache_device(dir.path(), 5), &three).unwrap();
        let place = other.clone();
        let second = registry(dir.path(), "");
        second.begin(Vec::new(), move || vec![place]).await;
        assert_eq!(in_state(&second, "served"), [one.clone(), two, other.clone()]);
        assert_eq!(second.device_views().len(), 3, "the other one is nobody's");
        second.stop_all().await.unwrap();
        drop(second);

        // Which of two is meant is not guessed.
        let copy = dir.path().join("copy");
        std::fs::copy(&other, &copy).unwrap();
        std::fs::rename(&other, &three).unwrap();
        let third = registry(dir.path(), "");
        let places = vec![copy, three];
        third.begin(Vec::new(), move || places).await;
        assert_eq!((in_state(&third, "served").len(), in_state(&third, "failed")), (2, vec![other]));
        // With what is known, nobody looks elsewhere.
        third.stop_all().await.unwrap();
        drop(third);
        std::fs::remove_dir_all(dir.path().join("state")).unwrap();
        let fourth = registry(dir.path(), "");
        fourth.register(vec![one]).await.unwrap();
        fourth.stop_all().await.unwrap();
        drop(fourth);
        let fifth = registry(dir.path(), "");
        fifth.begin(Vec::new(), || panic!("everything is where it was")).await;
        assert_eq!(in_state(&fifth, "served").len(), 1);
        fifth.stop_all().await.unwrap();
    }

    #[tokio::test]
    async fn a_device_that_is_named_twice_is_registered_once() {
        let dir = tempfile::tempdir().unwrap();
        let registry = registry(dir.path(), "");
        let one = cache_device(dir.path(), 2);
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&one, &link).unwrap();
        registry.register(vec![one.clone(), link, one.clone()]).await.unwrap();
        assert_eq!(in_state(&registry, "served"), [one]);
        registry.stop_all().await.unwrap();
    }
}
