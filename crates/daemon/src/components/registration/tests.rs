//! Tests of the registration of several devices, and after the failure of a set.

use std::path::Path;

use ::format::BackingState;

use super::*;
use crate::config::Config;
use crate::order::Order;
use crate::registry::Registry;
use crate::settings::Of;
use crate::shared::Shared;
use crate::state::{Owner, State};
use crate::testing::{backing_device, backing_device_in, cache_device};
use crate::worker::Phase;

/// Of several devices one could not be served, and the answer did not say what became of the others.
#[tokio::test]
async fn a_registration_of_several_devices_says_what_became_of_each() {
    let dir = tempfile::tempdir().unwrap();
    let config = || Config::parse("exports = []").unwrap();
    let registry = |name: &str| {
        let state = State::open(&dir.path().join(name)).unwrap();
        Registry::new(Arc::new(Shared::new(config(), state)))
    };
    let (ours, theirs) = (registry("ours"), registry("theirs"));
    let [used, cache] = [2, 3].map(|n| cache_device(dir.path(), n));
    let [served, waiting] = [3, 4].map(|n| backing_device(dir.path(), n));
    let register = async |registry: &Registry, devices: &[&PathBuf]| {
        let devices = devices.iter().map(|d| (*d).clone()).collect();
        registry.registration.register(devices, By::NAME, &Asked::inside("a test")).await.map(drop)
    };
    register(&theirs, &[&used]).await.unwrap();
    let said = register(&ours, &[&used, &cache, &served, &waiting]).await.unwrap_err().to_string();
    let first = format!("{}: ", used.display());
    assert!(said.starts_with(&first), "{said}");
    for words in [
        format!("; {}: is registered and served", cache.display()),
        format!("; {}: is registered and served", served.display()),
        format!("; {}: is registered: was made for cache set", waiting.display()),
    ] {
        assert!(said.contains(&words), "{words}: {said}");
    }
    let missing = dir.path().join("missing");
    let said = register(&ours, &[&missing, &waiting]).await.unwrap_err().to_string();
    assert!(said.ends_with("; nothing was changed on any of the devices"), "{said}");
    let said = register(&ours, &[&missing]).await.unwrap_err().to_string();
    assert!(!said.contains("nothing was changed"), "{said}");
    for registry in [ours, theirs] {
        registry.inventory.workers.stop_all().await.unwrap();
    }
}

/// The set of a disk had failed and was started again. The disk was still marked as served, so `register` did nothing with
/// it, and its volume was gone.
#[tokio::test]
async fn a_disk_is_served_again_after_its_set_has_failed() {
    for together in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let (config, state) = ("exports = []", State::open(&dir.path().join("state")).unwrap());
        let registry = Registry::new(Arc::new(Shared::new(Config::parse(config).unwrap(), state)));
        let workers = &registry.inventory.workers;
        let (cache, disk) = (cache_device(dir.path(), 2), backing_device(dir.path(), 2));
        let register = async |devices: &[&PathBuf]| {
            let devices = devices.iter().map(|d| (*d).clone()).collect();
            registry.registration.register(devices, By::NAME, &Asked::inside("a test")).await.unwrap();
        };
        let set = format::Uuid([2; 16]).to_string();
        let volumes = async || workers.serving(&set).unwrap().snapshot().await.unwrap().volumes.len();
        register(&[&cache, &disk]).await;
        assert_eq!(volumes().await, 1);
        let worker = workers.serving(&set).unwrap();
        worker.order(Order::Panic).unwrap();
        worker.join();
        assert!(matches!(worker.phase(), Phase::Failed(_)));
        assert!(
            registry.inventory.devices.is_served(&disk),
            "the state of the disk is that of the failed thread"
        );
        if together {
            register(&[&cache, &disk]).await;
        } else {
            register(&[&cache]).await;
            register(&[&disk]).await;
        }
        assert_eq!(volumes().await, 1, "together: {together}");
        workers.stop_all().await.unwrap();
    }
}

fn registry_in(dir: &Path, config: &str) -> Registry {
    let state = State::open(&dir.join("state")).unwrap();
    Registry::new(Arc::new(Shared::new(Config::parse(config).unwrap(), state)))
}

async fn register(registry: &Registry, devices: &[&PathBuf]) -> Result<Registered, Failure> {
    let devices = devices.iter().map(|d| (*d).clone()).collect();
    registry.registration.register(devices, By::NAME, &Asked::inside("a test")).await
}

/// Makes a volume own a label and an address.
fn own(registry: &Registry, id: &str, label: &str) {
    let state = &mut *registry.shared.state();
    state.set_label_owner(label, id);
    state.set_places(&Owner { volume: id.into(), label: label.into() }, &[format!("fuse=/run/{label}")]);
}

/// The volumes that own a label or an address.
fn owners(registry: &Registry, labels: &[&str]) -> Vec<String> {
    let state = &*registry.shared.state();
    let mut all: Vec<_> = labels.iter().filter_map(|label| state.label_owner(label)).collect();
    all.extend(state.places().into_values().map(|owner| owner.volume));
    all.sort();
    all.dedup();
    all
}

/// An absent cache device was forgotten by its own UUID. Its flash-only volumes owned their addresses for ever, and the set
/// was named by the operator still.
#[tokio::test]
async fn an_absent_cache_device_is_forgotten_with_its_volumes() {
    let dir = tempfile::tempdir().unwrap();
    let cache = cache_device(dir.path(), 2);
    let set = format::Uuid([2; 16]).to_string();
    let first = registry_in(dir.path(), "exports = []");
    register(&first, &[&cache]).await.unwrap();
    own(&first, &format!("{set}/3"), "films");
    assert_eq!(first.shared.forget_command(&format!("{set}/3")), None, "it would stop the set");
    first.inventory.workers.stop_all().await.unwrap();
    drop(first);
    std::fs::rename(&cache, dir.path().join("away")).unwrap();
    let second = registry_in(dir.path(), "exports = []");
    second.startup.begin(Vec::new(), Vec::new).await;
    assert_eq!(owners(&second, &["films"]).len(), 1);
    assert!(!second.shared.named().is_empty());
    let said = second.shared.forget_command(&format!("{set}/3")).unwrap();
    assert_eq!(said, format!("ubcache unregister {}", cache.display()));
    second.registration.unregister(&cache.to_string_lossy(), &Asked::inside("a test")).await.unwrap();
    assert_eq!(owners(&second, &["films"]), Vec::<String>::new());
    assert!(second.shared.named().is_empty(), "it would be attached again without a command");
}

/// Another device at a path freed the label of the former one and not its addresses. Two devices that had changed places freed
/// the labels of each other.
#[tokio::test]
async fn a_device_at_the_path_of_another_frees_what_that_one_owns() {
    let dir = tempfile::tempdir().unwrap();
    let registry = registry_in(dir.path(), "exports = []");
    let [one, two, three] = [5, 6, 7].map(|own| backing_device_in(dir.path(), 0, own, BackingState::None));
    let [u5, u6, u7] = [5, 6, 7].map(|own| format::Uuid([own; 16]).to_string());
    {
        let state = &mut *registry.shared.state();
        // The state is of a time when the first two had the paths of each other, and the path of the third one was of another.
        state.add_device(&one, &u6, true);
        state.add_device(&two, &u5, true);
        state.add_device(&three, "gone", true);
    }
    own(&registry, &u5, "five");
    own(&registry, &u6, "six");
    own(&registry, "gone", "gone");
    register(&registry, &[&one, &two, &three]).await.unwrap();
    assert_eq!(owners(&registry, &["five", "six", "gone"]), [u5.clone(), u6.clone()]);
    // A volume that is served keeps its label.
    own(&registry, &u7, "seven");
    registry.shared.state().add_device(&one, &u7, true);
    registry.admission.name_at_paths(&[probe_device(&one).await.unwrap()]);
    assert_eq!(owners(&registry, &["five", "six", "seven"]), [u5, u6, u7]);
    registry.inventory.workers.stop_all().await.unwrap();
}

/// Gives this label to every volume, as disks of other hosts may have the same one.
async fn label_all(registry: &Registry, label: &str) {
    for worker in registry.inventory.workers.all() {
        let volume = worker.snapshot().await.unwrap().volumes.remove(0);
        let command = serve::Command::SetVolume {
            volume: volume.name.clone(),
            key: "label".into(),
            value: label.into(),
            beyond: serve::tunables::Beyond::Refused,
        };
        worker.command(command).await.unwrap();
        registry.shared.relabel(&worker.volume_key(&volume).id, label);
    }
}

/// A label was free after the end of its owner, and its section applied to all others with the label.
#[tokio::test]
async fn a_free_label_becomes_that_of_another_volume() {
    let dir = tempfile::tempdir().unwrap();
    let [u5, u6] = [5, 6].map(|own| format::Uuid([own; 16]).to_string());
    let section =
        format!("exports = []\n[volume.data]\npreset = \"latency\"\n[volume.\"{u5}\"]\nexports = []\n");
    let path = dir.path().join("config.toml");
    std::fs::write(&path, "exports = []\n[volume.data]\npreset = \"latency\"\n").unwrap();
    let registry = registry_in(dir.path(), &section);
    let disks = [5, 6].map(|own| backing_device_in(dir.path(), 0, own, BackingState::None));
    register(&registry, &[&disks[0], &disks[1]]).await.unwrap();
    label_all(&registry, "data").await;
    let owner = || registry.shared.state().label_owner("data");
    let asked = Asked::inside("a test");
    assert_eq!(owner(), Some(u6.clone()), "the other one has a section of its own");
    registry.reload.reload(&path, &asked).await.unwrap();
    assert_eq!(owner(), Some(u6.clone()), "an owner that is served keeps its label");
    registry.registration.unregister(&u6, &asked).await.unwrap();
    assert_eq!(owner(), Some(u5.clone()), "the owner has been unregistered");
    register(&registry, &[&disks[1]]).await.unwrap();
    registry.settings.set_tunable(Of::Volume(&u5), "label", "other", true).await.unwrap();
    assert_eq!(owner(), Some(u6), "the owner has another label");
    registry.inventory.workers.stop_all().await.unwrap();
}

/// A copy that the start had refused was unregistered. The device that was served lost its label, its addresses and its mark.
#[tokio::test]
async fn a_copy_of_a_served_device_is_forgotten_alone() {
    let dir = tempfile::tempdir().unwrap();
    let registry = registry_in(dir.path(), "exports = []");
    let (disk, cache) =
        (backing_device_in(dir.path(), 0, 5, BackingState::None), cache_device(dir.path(), 2));
    let copies = [&disk, &cache].map(|device| {
        let copy = device.with_extension("copy");
        std::fs::copy(device, &copy).unwrap();
        copy
    });
    register(&registry, &[&disk, &cache]).await.unwrap();
    let [volume, set] = [5, 2].map(|n| format::Uuid([n; 16]).to_string());
    let flash_only = format!("{set}/3");
    own(&registry, &volume, "data");
    own(&registry, &flash_only, "films");
    let named = registry.shared.named().clone();
    for copy in &copies {
        let why = Failure::Failed("is a copy".into());
        registry.inventory.devices.set(&probe_device(copy).await.unwrap(), DeviceState::Failed(why.into()));
        let path = copy.to_string_lossy();
        registry.registration.unregister(&path, &Asked::inside("a test")).await.unwrap();
        assert!(registry.inventory.devices.get(copy).is_none());
    }
    assert_eq!(owners(&registry, &["data", "films"]), [flash_only, volume]);
    assert_eq!(*registry.shared.named(), named);
    assert_eq!(registry.inventory.workers.all().len(), 2, "the originals are served");
    registry.inventory.workers.stop_all().await.unwrap();
}

/// The next owner of a label got no tunable of the section, and the former one kept them.
#[tokio::test]
async fn a_reload_that_changes_the_owner_of_a_label_applies_the_section_to_the_next_one() {
    let dir = tempfile::tempdir().unwrap();
    let [u5, u6] = [5, 6].map(|own| format::Uuid([own; 16]).to_string());
    let section = "exports = []\n[volume.data.tunables]\nwriteback_percent = 20\n";
    let path = dir.path().join("config.toml");
    let asked = Asked::inside("a test");
    let registry = registry_in(dir.path(), "exports = []");
    let disks = [5, 6].map(|own| backing_device_in(dir.path(), 0, own, BackingState::None));
    register(&registry, &[&disks[0], &disks[1]]).await.unwrap();
    label_all(&registry, "data").await;
    let reload = async |config: &str| {
        std::fs::write(&path, config).unwrap();
        registry.reload.reload(&path, &asked).await.unwrap()
    };
    let percent = async |uuid: &str| {
        registry.settings.tunable(Of::Volume(uuid), "writeback_percent").await.unwrap().value
    };
    reload(section).await;
    assert_eq!((&*percent(&u5).await, &*percent(&u6).await), ("20", "10"));
    let said = reload(&format!("{section}[volume.\"{u5}\"]\nexports = []\n")).await;
    assert_eq!(registry.shared.state().label_owner("data"), Some(u6.clone()));
    assert_eq!((&*percent(&u5).await, &*percent(&u6).await), ("10", "20"), "{said:?}");
    registry.inventory.workers.stop_all().await.unwrap();
}

/// The thread of the set did not answer. `unregister` of a disk said that it was done, and the disk stayed served.
#[tokio::test]
async fn a_disk_of_a_silent_set_is_not_unregistered() {
    let dir = tempfile::tempdir().unwrap();
    let registry = registry_in(dir.path(), "exports = []");
    let (disk, cache) =
        (backing_device_in(dir.path(), 0, 5, BackingState::None), cache_device(dir.path(), 2));
    register(&registry, &[&cache]).await.unwrap();
    register(&registry, &[&disk]).await.unwrap();
    let asked = Asked::inside("a test");
    let set = format::Uuid([2; 16]).to_string();
    let path = disk.to_string_lossy();
    registry
        .registration
        .attach(&Attach { cache: set.clone(), backing: path.to_string(), force: false }, &asked)
        .await
        .unwrap();
    let (release, until) = std::sync::mpsc::channel();
    registry.inventory.workers.serving(&set).unwrap().order(Order::Hang(until)).unwrap();
    // The deadlines of answers pass at once.
    tokio::time::pause();
    let refused = registry.registration.unregister(&path, &asked).await.map(drop).unwrap_err().to_string();
    tokio::time::resume();
    assert!(refused.contains("did not answer within"), "{refused}");
    assert!(registry.inventory.devices.get(&disk).is_some() && registry.shared.is_served(&set));
    drop(release);
    registry.registration.unregister(&path, &asked).await.unwrap();
    assert!(registry.inventory.devices.get(&disk).is_none());
    registry.inventory.workers.stop_all().await.unwrap();
}

/// What stayed dirty was read before the command waited for another one.
#[tokio::test]
async fn dirty_data_is_counted_under_the_claim() {
    let dir = tempfile::tempdir().unwrap();
    let registry = registry_in(dir.path(), "exports = []");
    let disk = backing_device_in(dir.path(), 0, 5, BackingState::None);
    register(&registry, &[&disk]).await.unwrap();
    let uuid = format::Uuid([5; 16]).to_string();
    let other = registry.reload.placement.changes().wait("a test", &Scope::everything()).await;
    let asked = Asked::inside("unregister");
    let unregister = registry.registration.unregister(&uuid, &asked);
    let change = async {
        tokio::task::yield_now().await;
        registry.inventory.devices.set(&probe_device(&disk).await.unwrap(), DeviceState::Stopped);
        drop(other);
    };
    let ended = tokio::join!(unregister, change).0.unwrap();
    assert_eq!(ended.devices[0].state, "stopped");
    registry.inventory.workers.stop_all().await.unwrap();
}

/// A device that was plugged in again was missing in the answer about a device that was refused.
#[tokio::test]
async fn a_device_that_was_plugged_in_again_is_in_the_answer() {
    let dir = tempfile::tempdir().unwrap();
    let registry = registry_in(dir.path(), "exports = []");
    let (disk, cache) =
        (backing_device_in(dir.path(), 0, 5, BackingState::None), cache_device(dir.path(), 2));
    let theirs = registry_in(&dir.path().join("theirs"), "exports = []");
    register(&theirs, &[&cache]).await.unwrap();
    let probe = probe_device(&disk).await.unwrap();
    registry.inventory.devices.set(&probe, DeviceState::Unplugged("was unplugged".into()));
    let said = register(&registry, &[&cache, &disk]).await.err().unwrap().to_string();
    assert!(said.contains(&format!("; {}: is registered and served", disk.display())), "{said}");
    for registry in [registry, theirs] {
        registry.inventory.workers.stop_all().await.unwrap();
    }
}

/// The command registered the cache device alone, and the disk was not served with it.
#[tokio::test]
async fn the_refusal_of_an_attachment_registers_the_disk_as_well() {
    let dir = tempfile::tempdir().unwrap();
    let registry = registry_in(dir.path(), "exports = []");
    let (cache, disk) =
        (cache_device(dir.path(), 2), backing_device_in(dir.path(), 3, 5, BackingState::Clean));
    register(&registry, &[&cache]).await.unwrap();
    let (cache, backing) = (cache.display().to_string(), disk.display().to_string());
    let wanted = Attach { cache, backing, force: false };
    let asked = Asked::inside("a test");
    let said = registry.registration.attach(&wanted, &asked).await.err().unwrap().to_string();
    let command = format!("`ubcache register CACHE-DEVICE {0}`, then `ubcache detach {0}`", disk.display());
    assert!(said.contains(&command), "{said}");
    register(&registry, &[&disk]).await.unwrap();
    let said = registry.registration.attach(&wanted, &asked).await.err().unwrap().to_string();
    assert!(said.contains("`ubcache register CACHE-DEVICE`, then"), "it waits for the cache device: {said}");
    registry.inventory.workers.stop_all().await.unwrap();
}

/// A stop had waited for a device for so long that its command had failed. `register` said that the set was served already.
#[tokio::test]
async fn a_set_whose_stop_has_not_ended_is_not_registered() {
    let dir = tempfile::tempdir().unwrap();
    let registry = registry_in(dir.path(), "exports = []");
    let (cache, disk) = (cache_device(dir.path(), 2), backing_device(dir.path(), 2));
    register(&registry, &[&cache, &disk]).await.unwrap();
    let set = format::Uuid([2; 16]).to_string();
    let (ends, until) = blockio::bridge::oneshot();
    registry.inventory.workers.serving(&set).unwrap().order(Order::StopWaits(until)).unwrap();
    for device in [&cache, &disk] {
        let refused = register(&registry, &[device]).await.err().unwrap().to_string();
        let words = format!("{}: set {set} is still stopping, for 0 s", device.display());
        assert!(refused.starts_with(&words), "{refused}");
        assert!(registry.inventory.devices.is_served(device), "it is as it was");
    }
    drop(ends);
    let stops = async || registry.inventory.workers.serving(&set).unwrap().snapshot().await.unwrap().stops;
    while !stops().await.is_empty() {
        tokio::task::yield_now().await;
    }
    register(&registry, &[&cache, &disk]).await.unwrap();
    registry.inventory.workers.stop_all().await.unwrap();
}

/// `attach` took a disk that was made for another set without a word.
#[tokio::test]
async fn a_disk_that_was_made_for_another_set_is_attached_by_force_alone() {
    let dir = tempfile::tempdir().unwrap();
    let registry = registry_in(dir.path(), "exports = []");
    let (cache, disk) = (cache_device(dir.path(), 2), backing_device(dir.path(), 3));
    register(&registry, &[&cache, &disk]).await.unwrap();
    let [ours, theirs] = [2, 3].map(|n| format::Uuid([n; 16]).to_string());
    let asked = Asked::inside("a test");
    let attach = async |force| {
        let (cache, backing) = (ours.clone(), disk.display().to_string());
        registry.registration.attach(&Attach { cache, backing, force }, &asked).await
    };
    let refused = attach(false).await.unwrap_err().to_string();
    let path = disk.display();
    for words in [
        format!(
            "was made for set {theirs}, expected one of set {ours}; to serve it with its own set, run `ubcache register"
        ),
        format!("run `ubcache attach --force {ours} {path}`"),
    ] {
        assert!(refused.contains(&words), "{refused}");
    }
    assert!(!registry.inventory.devices.is_served(&disk));
    attach(true).await.unwrap();
    assert!(registry.inventory.devices.is_served(&disk));
    registry.inventory.workers.stop_all().await.unwrap();
}

/// A disk that could not be read after its cache device was unregistered had lost its label, so no command could name it.
#[tokio::test]
async fn a_dead_disk_keeps_its_label() {
    let dir = tempfile::tempdir().unwrap();
    let registry = registry_in(dir.path(), "exports = []");
    let (cache, disk) = (cache_device(dir.path(), 2), backing_device(dir.path(), 2));
    register(&registry, &[&cache, &disk]).await.unwrap();
    let uuid = probe_device(&disk).await.unwrap().uuid;
    registry.inventory.devices.relabel(&uuid, "data");
    std::fs::remove_file(&disk).unwrap();
    let asked = Asked::inside("a test");
    registry.registration.unregister(&cache.to_string_lossy(), &asked).await.unwrap();
    let devices = registry.views.devices();
    let found: Vec<_> =
        devices.iter().map(|d| (&*d.label, d.state, d.uuid.as_ref() == Some(&uuid))).collect();
    assert_eq!(found, [("data", "failed", true)]);
    assert!(registry.lookup.named("data").await.is_ok());
    registry.inventory.workers.stop_all().await.unwrap();
}
