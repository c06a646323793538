//! Views of devices and threads for answers of the API.
//!
//! Owns what clients see of a device and of a thread. Must not change either.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serve::Snapshot;

use super::devices::{Device, DeviceState, WaitsFor};
use super::inventory::Inventory;
use crate::identity::{Identity, Likeness};
use crate::order::Holder;
use crate::probe::{Probe, Role, size_bytes};
use crate::shared::Shared;
use crate::worker::{Phase, Worker};

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
    /// What the device waits for; `None` if it does not wait.
    #[serde(skip)]
    pub(crate) awaits: Option<Awaited>,
    /// Whether the device at the path can be read and has no superblock of bcache.
    #[serde(skip)]
    pub(crate) blank: Option<Blank>,
    /// The path of the cache device of its set, present or last; `None` if the daemon has never served the set.
    #[serde(skip)]
    pub(crate) cache_path: Option<PathBuf>,
    /// The set that had dirty data of this disk when its cache device was unregistered.
    #[serde(skip)]
    pub(crate) left_dirty_in: Option<String>,
    /// Dirty data of this backing device in the cache, in bytes; `None` if its set is not served.
    pub(crate) dirty_bytes: Option<u64>,
    #[serde(flatten)]
    pub(crate) sizes: DeviceSizes,
}

/// What a device waits for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Awaited {
    /// Its cache device, which is not registered.
    Cache,
    /// Its cache device, which is registered and has failed.
    FailedCache,
    /// A command of the operator that names it.
    Operator,
    /// The end of the use of its volume. The command ends the first use, or shows it.
    EndOfUse(Option<String>),
}

/// A device without a superblock of bcache, at the path of a registered device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Blank {
    /// It is the registered device, which was overwritten.
    Overwritten,
    /// It may be another device, which has the path now.
    Another,
}

/// The sizes of a backing device as clients see it.
#[derive(Clone, Default, Serialize)]
pub(crate) struct DeviceSizes {
    /// Bytes of the volume that this device is or would be served as; `None` if that was not looked at.
    pub(crate) size_bytes: Option<u64>,
    /// Bytes by which this device is larger than what is served of it; `None` if it is not, or was not looked at.
    pub(crate) grown_bytes: Option<u64>,
    #[serde(skip)]
    pub(crate) data_offset_bytes: u64,
}

/// A thread as clients see it.
#[derive(Clone, Serialize)]
pub(crate) struct SetView {
    /// UUID of the set, or of the backing device that is served alone.
    pub(crate) id: String,
    /// UUID of the group of the set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) group: Option<String>,
    /// Whether the set has a cache device.
    pub(crate) has_cache: bool,
    /// `starting`, `serving`, `stopping`, `stopped` or `failed`.
    pub(crate) state: &'static str,
    /// Why the thread failed, or why there are no figures.
    pub(crate) why: Option<String>,
    /// The volumes whose users keep the stop of the thread waiting.
    #[serde(skip)]
    pub(crate) holders: Vec<Holder>,
    /// The last paths of disks with dirty data in the set, by UUID.
    #[serde(skip)]
    pub(crate) disks: BTreeMap<String, PathBuf>,
    /// The owner of the label of each volume whose label names a section that applies to that owner only, by the name of the
    /// volume.
    #[serde(skip)]
    pub(crate) without_section: BTreeMap<String, LabelOwner>,
    /// Figures; empty unless the thread serves.
    #[serde(flatten)]
    pub(crate) figures: Snapshot,
}

/// The volume that owns the label of another one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct LabelOwner {
    pub(crate) name: String,
    /// Its label, if it is served.
    pub(crate) label: Option<String>,
    pub(crate) is_served: bool,
    /// The command that forgets it, if it does not come back.
    pub(crate) forget: Option<String>,
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

/// Time limit of the question how large the served devices are.
const SIZES_WITHIN: Duration = Duration::from_millis(500);
/// Growth that is not reported: the end of a device that is no whole block of the cache is not served.
const LEAST_GROWTH_BYTES: u64 = 4096;

/// The bytes by which a device of this size is larger than what is served of it.
fn grown(device_bytes: u64, data_offset_bytes: u64, served_bytes: u64) -> Option<u64> {
    let more = device_bytes.checked_sub(data_offset_bytes)?.checked_sub(served_bytes)?;
    (more >= LEAST_GROWTH_BYTES).then_some(more)
}

/// The volumes of a thread whose label names a section that applies to another volume, with that one.
fn without_section(shared: &Shared, worker: &Worker, figures: &Snapshot) -> BTreeMap<String, LabelOwner> {
    let config = shared.config().clone();
    let volumes = figures.volumes.iter().filter_map(|volume| {
        let owner = shared.other_owner(&config, &worker.volume_key(volume))?;
        let (is_served, forget) = (shared.is_served(&owner), shared.forget_command(&owner));
        let name = shared.state().known_name(&owner).unwrap_or_else(|| owner.clone());
        Some((
            volume.name.clone(),
            LabelOwner { name, label: shared.served_label(&owner), is_served, forget },
        ))
    });
    volumes.collect()
}

/// Makes the views of devices and threads.
#[derive(Clone)]
pub(crate) struct Views {
    shared: Arc<Shared>,
    inventory: Inventory,
    /// Held by the task that asks how large devices are.
    sizing: Arc<tokio::sync::Mutex<()>>,
}

impl Views {
    pub(crate) fn new(shared: Arc<Shared>, inventory: Inventory) -> Views {
        Views { shared, inventory, sizing: Arc::default() }
    }

    /// Every thread with its figures. The threads are asked concurrently.
    pub(crate) async fn sets(&self) -> Vec<SetView> {
        let asked: Vec<_> = self
            .inventory
            .workers
            .all()
            .into_iter()
            .map(|worker| {
                let shared = self.shared.clone();
                tokio::spawn(async move {
                    let phase = worker.phase();
                    let mut view = SetView {
                        id: worker.plan.id.clone(),
                        group: worker.group(),
                        has_cache: worker.plan.cache.is_some(),
                        state: phase.name(),
                        why: None,
                        holders: Vec::new(),
                        disks: BTreeMap::new(),
                        without_section: BTreeMap::new(),
                        figures: Snapshot::default(),
                    };
                    if phase == Phase::Stopping {
                        view.holders = worker.holders().await.unwrap_or_default();
                    }
                    match phase {
                        Phase::Serving | Phase::Stopping => match worker.snapshot().await {
                            Ok(figures) => {
                                view.without_section = without_section(&shared, &worker, &figures);
                                view.figures = figures;
                            }
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
        let mut views: Vec<SetView> = Vec::new();
        for view in asked {
            views.extend(view.await);
        }
        for view in &mut views {
            let dirty = view.figures.set.iter().flat_map(|set| &set.dirty_by_slot);
            let uuids = dirty.filter_map(|slot| slot.uuid.clone());
            view.disks = uuids.filter_map(|uuid| Some((uuid.clone(), self.last_path(&uuid)?))).collect();
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
                let volumes = &set.figures.volumes;
                // A stop can end after its command has failed.
                if view.kind == Some("backing")
                    && (view.state, set.state) == ("served", "serving")
                    && view.set.as_ref() == Some(&set.id)
                    && set.why.is_none()
                    && !volumes.iter().any(|v| v.backing_uuid == view.uuid)
                {
                    view.state = "stopped";
                }
                if view.kind == Some("backing") && set.has_cache && view.set.as_ref() == Some(&set.id) {
                    view.dirty_bytes = set.figures.dirty_of(view.uuid.as_deref());
                }
            }
        }
        views
    }

    /// Every registered device as by [`Views::devices_with`], with the sizes of backing devices, and the growth of those that
    /// are served.
    ///
    /// The size of a file can be on a file system that hangs. So one task at a time asks for sizes, and has a deadline.
    pub(crate) async fn devices_with_growth(&self, sets: &[SetView]) -> Vec<DeviceView> {
        let mut views = self.devices_with(sets);
        // Another disk may be at the path of one that has failed.
        let is_there = |v: &&DeviceView| v.kind == Some("backing") && v.state != "failed";
        let paths: Vec<PathBuf> = views.iter().filter(is_there).map(|v| v.path.clone()).collect();
        let one = self.sizing.clone();
        let sizes = async move {
            let one = one.lock_owned().await;
            let read_sizes = move || {
                let sizes = paths.into_iter().filter_map(|path| Some((size_bytes(&path)?, path)));
                let sizes: Vec<(u64, PathBuf)> = sizes.collect();
                drop(one);
                sizes
            };
            tokio::task::spawn_blocking(read_sizes).await.unwrap_or_default()
        };
        for (size, path) in tokio::time::timeout(SIZES_WITHIN, sizes).await.unwrap_or_default() {
            let Some(view) = views.iter_mut().find(|v| v.path == path) else { continue };
            let mut volumes = sets.iter().flat_map(|set| &set.figures.volumes);
            let volume = volumes.find(|v| v.backing_uuid.is_some() && v.backing_uuid == view.uuid);
            view.sizes.grown_bytes =
                volume.and_then(|v| grown(size, view.sizes.data_offset_bytes, v.size_bytes));
            let data = size.checked_sub(view.sizes.data_offset_bytes);
            view.sizes.size_bytes = volume.map(|v| v.size_bytes).or(data);
        }
        views
    }

    /// The path at which a set or a disk with this UUID was served the last time.
    pub(crate) fn last_path(&self, uuid: &str) -> Option<PathBuf> {
        self.shared.state().mark(uuid)?.path
    }

    /// What a device without a superblock is, by the identity that is stored for the registered device; `None` if none was
    /// registered at this path.
    fn blank(&self, path: &Path, found: &Identity) -> Option<Blank> {
        let known = self.shared.state().devices().remove(path)?;
        let state = self.shared.state();
        let mark = state.mark(&state.key_of(&known.uuid));
        match mark.map(|mark| mark.identity.compare(found)) {
            Some(Likeness::Same) => Some(Blank::Overwritten),
            _ => Some(Blank::Another),
        }
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
            let failed_cache = match &device.state {
                DeviceState::Waiting(..) => of_cache(&device.probe),
                _ => None,
            };
            let awaits = awaited(&device.state, failed_cache.is_some());
            let blank = device.state.without_superblock().and_then(|found| self.blank(&path, found));
            let (state, why) = match device.state {
                DeviceState::Served => match device.probe.as_ref().and_then(|probe| self.phase_of(probe)) {
                    Some(Phase::Failed(why)) => ("failed", Some(why.text())),
                    Some(Phase::Stopped) | None => ("stopped", None),
                    Some(_) => ("served", None),
                },
                DeviceState::Waiting(_, why) => ("waiting", Some(why + failed_cache.unwrap_or_default())),
                DeviceState::Replugged(why, _) => ("waiting", Some(why)),
                DeviceState::Failed(why) => ("failed", Some(why.text())),
                DeviceState::Unplugged(why) => ("failed", Some(why)),
                DeviceState::Stopped => ("stopped", None),
            };
            let dirty = device.probe.as_ref().is_some_and(Probe::is_dirty);
            let data_offset_bytes = device.probe.as_ref().map_or(0, |probe| probe.data_offset_bytes);
            let (uuid, role) = device.probe.map(|s| (s.uuid, s.role)).unzip();
            let (kind, set, label) = match role {
                Some(Role::Cache { set, label, .. }) => (Some("cache"), Some(set), label),
                Some(Role::Backing { set, label, .. }) => (Some("backing"), set, label),
                None => (None, None, String::new()),
            };
            let name = uuid.as_ref().and_then(|uuid| self.shared.state().known_name(uuid));
            let left_dirty_in = self.shared.state().left_dirty_in(&path, uuid.as_deref());
            let of_set = set.as_deref().or(left_dirty_in.as_deref());
            let cache_path = of_set.and_then(|set| self.last_path(set));
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
                awaits,
                blank,
                cache_path,
                left_dirty_in,
                dirty_bytes: None,
                sizes: DeviceSizes { data_offset_bytes, ..DeviceSizes::default() },
            }
        });
        views.collect()
    }
}

/// What a device in this state waits for.
fn awaited(state: &DeviceState, cache_failed: bool) -> Option<Awaited> {
    match state {
        DeviceState::Waiting(WaitsFor::Operator, _) => Some(Awaited::Operator),
        DeviceState::Waiting(..) if cache_failed => Some(Awaited::FailedCache),
        DeviceState::Waiting(WaitsFor::Cache | WaitsFor::DirtyCache, _) => Some(Awaited::Cache),
        DeviceState::Replugged(_, command) => Some(Awaited::EndOfUse(command.clone())),
        DeviceState::Served | DeviceState::Failed(_) | DeviceState::Stopped | DeviceState::Unplugged(_) => {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::asked::Asked;
    use crate::components::By;
    use crate::config::Config;
    use crate::registry::Registry;
    use crate::state::State;

    /// Another disk that had got the path was reported as the registered one, which was overwritten.
    #[tokio::test]
    async fn a_device_is_overwritten_only_if_it_is_the_registered_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = crate::testing::cache_device(dir.path(), 2);
        let state = || State::open(&dir.path().join("state")).unwrap();
        let begin = async || {
            let registry = Registry::new(Arc::new(Shared::new(Config::default(), state())));
            registry.startup.begin(Vec::new(), Vec::new).await;
            registry
        };
        let first = begin().await;
        let asked = Asked::inside("a test");
        first.registration.register(vec![path.clone()], By::NAME, &asked).await.unwrap();
        first.inventory.workers.stop_all().await.unwrap();
        drop(first);
        let blank = async || begin().await.views.devices()[0].blank;
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        assert_eq!(blank().await, Some(Blank::Overwritten));
        let other = dir.path().join("other");
        std::fs::write(&other, vec![0; 1 << 20]).unwrap();
        std::fs::rename(&other, &path).unwrap();
        assert_eq!(blank().await, Some(Blank::Another));
        std::fs::remove_file(&path).unwrap();
        assert_eq!(blank().await, None, "it is missing");
    }

    #[test]
    fn the_rest_of_a_block_is_no_growth() {
        assert_eq!(grown(1 << 20, 8192, (1 << 20) - 8192), None);
        assert_eq!(grown((1 << 20) + 4095, 8192, (1 << 20) - 8192), None);
        assert_eq!(grown(2 << 20, 8192, (1 << 20) - 8192), Some(1 << 20));
        assert_eq!(grown(4096, 8192, 1 << 20), None, "it has shrunk");
    }
}
