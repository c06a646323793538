//! What an operator has to do on this host: the problems of sets, devices, commands, jobs, stops, exports and the state directory.
//!
//! Owns the sources of the list. `problems` has the rules, and `status` and `/metrics` show the result.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::exports::Exports;
use super::problems::{
    Problem, commands_that_wait, dead_exports, in_order, jobs_that_wait, problems, silent_devices,
    state_not_stored, stops_that_wait,
};
use super::registration::Registration;
use super::silences::Silences;
use super::views::{DeviceView, SetView, Views};
use crate::jobs::Jobs;
use crate::shared::Shared;

/// The sources of the problems.
#[derive(Clone)]
pub(crate) struct Overview {
    pub(crate) shared: Arc<Shared>,
    pub(crate) views: Views,
    pub(crate) registration: Arc<Registration>,
    pub(crate) exports: Arc<Exports>,
    pub(crate) jobs: Arc<Jobs>,
    pub(crate) silences: Arc<Silences>,
}

impl Overview {
    /// All problems of these sets and devices and of the host, the worst first.
    pub(crate) async fn problems(&self, sets: &[SetView], devices: &[DeviceView]) -> Vec<Problem> {
        let mut found = problems(sets, devices);
        found.extend(commands_that_wait(&self.registration.under_way(), devices));
        let silent = self.silences.all();
        found.extend(stops_that_wait(sets, devices, &silent));
        found.extend(silent_devices(&silent, sets));
        found.extend(jobs_that_wait(&self.jobs.all(), devices));
        found.extend(dead_exports(&self.exports.dead().await, sets));
        in_order(&mut found);
        found.extend(state_not_stored(&self.shared.state()));
        found
    }

    /// All problems now, the worst first, and the number of registered devices by state.
    pub(crate) async fn now(&self) -> (Vec<Problem>, BTreeMap<&'static str, u64>) {
        let sets = self.views.sets().await;
        let devices = self.views.devices_with_growth(&sets).await;
        (self.problems(&sets, &devices).await, states(&sets, &devices))
    }
}

/// The number of devices in each state. The device of a disabled set has failed, although its thread serves volumes.
fn states(sets: &[SetView], devices: &[DeviceView]) -> BTreeMap<&'static str, u64> {
    let is_disabled = |device: &DeviceView| {
        let mut own =
            sets.iter().filter(|set| device.kind == Some("cache") && device.set.as_ref() == Some(&set.id));
        own.any(|set| set.figures.set.as_ref().is_some_and(|figures| figures.failed.is_some()))
    };
    let mut states = BTreeMap::new();
    for device in devices {
        let state = if is_disabled(device) { "failed" } else { device.state };
        *states.entry(state).or_default() += 1;
    }
    states
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `/metrics` had no failed device while a set was disabled.
    #[test]
    fn the_device_of_a_disabled_set_counts_as_failed() {
        let dir = tempfile::tempdir().unwrap();
        let state = crate::state::State::open(dir.path()).unwrap();
        let registry =
            crate::registry::Registry::new(Arc::new(Shared::new(crate::config::Config::default(), state)));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let cache = crate::testing::cache_device(dir.path(), 2);
            let asked = crate::asked::Asked::inside("a test");
            registry.registration.register(vec![cache], crate::components::By::NAME, &asked).await.unwrap();
            let mut sets = registry.views.sets().await;
            let devices = registry.views.devices();
            assert_eq!(states(&sets, &devices), BTreeMap::from([("served", 1)]));
            sets[0].figures.set.as_mut().unwrap().failed = Some("broken".into());
            assert_eq!(states(&sets, &devices), BTreeMap::from([("failed", 1)]));
            registry.inventory.workers.stop_all().await.unwrap();
        });
    }
}
