//! The registry: the devices of this host, the threads that serve them, and the assignment of devices to threads.
//!
//! Connects the components (module `components`) with the history, the settings, the reload and the jobs. Must not have
//! logic of its own.

use std::sync::Arc;

use crate::components::admission::Admission;
use crate::components::devices::DeviceTable;
use crate::components::exports::Exports;
use crate::components::hotplug::Hotplug;
use crate::components::inventory::Inventory;
use crate::components::lookup::Lookup;
use crate::components::overview::Overview;
use crate::components::placement::Placement;
use crate::components::registration::Registration;
use crate::components::replug::Replug;
use crate::components::scrape::Scrape;
use crate::components::silences::Silences;
use crate::components::startup::Startup;
use crate::components::views::Views;
use crate::components::workers::Workers;
use crate::history::History;
use crate::jobs::Jobs;
use crate::reload::Reload;
use crate::settings::Settings;
use crate::shared::Shared;

/// The components and their connections.
pub(crate) struct Registry {
    pub(crate) shared: Arc<Shared>,
    pub(crate) jobs: Arc<Jobs>,
    pub(crate) history: Arc<History>,
    pub(crate) inventory: Inventory,
    pub(crate) views: Views,
    pub(crate) overview: Overview,
    pub(crate) scrape: Scrape,
    pub(crate) lookup: Arc<Lookup>,
    pub(crate) registration: Arc<Registration>,
    pub(crate) startup: Startup,
    pub(crate) hotplug: Hotplug,
    pub(crate) exports: Arc<Exports>,
    pub(crate) settings: Arc<Settings>,
    pub(crate) reload: Reload,
    #[cfg(test)]
    pub(crate) admission: Arc<Admission>,
}

impl Registry {
    pub(crate) fn new(shared: Arc<Shared>) -> Registry {
        let workers = Arc::new(Workers::new(shared.clone()));
        let devices = Arc::new(DeviceTable::new(shared.hub.clone()));
        let inventory = Inventory { devices, workers: workers.clone() };
        let lookup = Arc::new(Lookup::new(shared.clone(), inventory.clone()));
        let admission = Arc::new(Admission::new(shared.clone(), inventory.clone()));
        let placement = Arc::new(Placement::new(inventory.clone(), admission.clone()));
        let replug = Arc::new(Replug::new(inventory.clone(), admission.clone(), placement.clone()));
        let registration = Arc::new(Registration::new(
            inventory.clone(),
            lookup.clone(),
            admission.clone(),
            placement.clone(),
            replug,
        ));
        let exports = Arc::new(Exports::new(shared.clone(), inventory.clone()));
        let settings = Arc::new(Settings::new(shared.clone(), lookup.clone()));
        let views = Views::new(shared.clone(), inventory.clone());
        let jobs = Arc::new(Jobs::new(shared.hub.clone()));
        let overview = Overview {
            silences: Arc::new(Silences::new(shared.hub.clone())),
            shared: shared.clone(),
            views: views.clone(),
            registration: registration.clone(),
            exports: exports.clone(),
            jobs: jobs.clone(),
        };
        Registry {
            jobs,
            history: Arc::default(),
            scrape: Scrape::new(shared.clone(), inventory.clone(), overview.clone()),
            overview,
            views,
            startup: Startup::new(shared.clone(), inventory.clone(), admission.clone(), placement.clone()),
            hotplug: Hotplug::new(
                shared.hub.clone(),
                inventory.clone(),
                admission.clone(),
                registration.clone(),
            ),
            reload: Reload {
                shared: shared.clone(),
                workers,
                placement,
                registration: registration.clone(),
                exports: exports.clone(),
                settings: settings.clone(),
            },
            #[cfg(test)]
            admission,
            shared,
            inventory,
            lookup,
            registration,
            exports,
            settings,
        }
    }
}
