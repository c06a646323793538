//! The figures for `/metrics`: those of all threads, of the registered devices, and of the process.
//!
//! Owns the counts of devices by state and by what they wait for. Must not know how figures are written.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use metrics::{Figures, HostFigures};

use super::devices::{DeviceState, WaitsFor};
use super::inventory::Inventory;
use super::overview::Overview;
use super::problems::counts;
use crate::probe::Role;
use crate::process;
use crate::shared::Shared;
use crate::worker::Phase;

/// Every state of a device view, so that a state without devices has a series, too.
const STATES: [&str; 4] = ["served", "waiting", "failed", "stopped"];
/// The reason of a device that is plugged in again and whose volume is in use.
const IN_USE: &str = "volume_in_use";

/// Collects the figures for `/metrics`.
#[derive(Clone)]
pub(crate) struct Scrape {
    shared: Arc<Shared>,
    inventory: Inventory,
    overview: Overview,
}

impl Scrape {
    pub(crate) fn new(shared: Arc<Shared>, inventory: Inventory, overview: Overview) -> Scrape {
        Scrape { shared, inventory, overview }
    }

    /// All figures. A thread that does not answer is left out.
    pub(crate) async fn figures(&self) -> Figures {
        let (mut figures, (problems, states)) =
            tokio::join!(self.inventory.workers.engine_figures(), self.overview.now());
        let mut devices = BTreeMap::from(STATES.map(|state| (state, 0)));
        devices.extend(states);
        figures.host = Some(HostFigures { problems: counts(&problems), devices, ..self.host() });
        figures
    }

    fn host(&self) -> HostFigures {
        let reasons = [WaitsFor::Cache, WaitsFor::DirtyCache, WaitsFor::Operator].map(WaitsFor::name);
        let mut waiting = BTreeMap::from(reasons.map(|reason| (reason, 0)));
        waiting.insert(IN_USE, 0);
        let mut failed_sets = BTreeSet::new();
        for device in self.inventory.devices.all().into_values() {
            match (&device.state, device.probe.map(|p| p.role)) {
                (DeviceState::Waiting(waits_for, _), _) => {
                    *waiting.entry(waits_for.name()).or_default() += 1;
                }
                (DeviceState::Replugged(..), _) => *waiting.entry(IN_USE).or_default() += 1,
                (DeviceState::Failed(_), Some(Role::Cache { set, .. })) => drop(failed_sets.insert(set)),
                _ => {}
            }
        }
        let workers = self.inventory.workers.all();
        let failed = workers.iter().filter(|w| matches!(w.phase(), Phase::Failed(_)));
        failed_sets.extend(failed.filter(|w| w.plan.cache.is_some()).map(|w| w.plan.id.clone()));
        let state_writable = {
            let state = self.shared.state();
            state.not_stored().is_none() && state.refusing().is_none()
        };
        HostFigures {
            version: env!("CARGO_PKG_VERSION"),
            devices: BTreeMap::new(),
            waiting,
            failed_sets,
            problems: BTreeMap::new(),
            state_writable,
            process: process::figures(),
        }
    }
}
