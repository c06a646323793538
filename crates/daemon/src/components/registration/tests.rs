//! Tests of the registration of several devices, and after the failure of a set.

use super::*;
use crate::config::Config;
use crate::order::Order;
use crate::registry::Registry;
use crate::shared::Shared;
use crate::state::State;
use crate::testing::{backing_device, cache_device};
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
    assert!(said.ends_with("; nothing was changed, also for the other devices"), "{said}");
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
