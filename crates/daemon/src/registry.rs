//! The registry: the devices of this host, the threads that serve them, and the assignment of devices to threads.
//!
//! Wires the components and owns no logic of theirs. From the ground up, each names only those above it:
//!
//! * `devices`: the registered devices and their states; `workers`: the threads of sets; `inventory`: both.
//! * `views`: both as clients see them; `lookup`: names become devices, sets and volumes.
//! * `admission`: which device may be served.
//! * `placement`: devices are given to threads, one change at a time.
//! * `replug`: unplugged devices are plugged in again; `startup`: stored and configured devices are registered.
//! * `registration`: commands of the operator about devices; `hotplug`: devices that are plugged in.
//! * `exports`: the exports of all volumes.

pub(crate) mod admission;
pub(crate) mod devices;
pub(crate) mod exports;
pub(crate) mod hotplug;
pub(crate) mod inventory;
pub(crate) mod lookup;
pub(crate) mod placement;
pub(crate) mod registration;
pub(crate) mod replug;
pub(crate) mod startup;
pub(crate) mod views;
pub(crate) mod workers;

use std::sync::Arc;

use crate::history::History;
use crate::jobs::Jobs;
use crate::reload::Reload;
use crate::settings::Settings;
use crate::shared::Shared;

use admission::Admission;
use devices::DeviceTable;
use exports::Exports;
use hotplug::Hotplug;
use inventory::Inventory;
use placement::Placement;
use registration::Registration;
use replug::Replug;
use startup::Startup;
use views::Views;
use workers::Workers;

pub(crate) use admission::By;
pub(crate) use lookup::{Found, Lookup};
pub(crate) use views::SetView;

/// The components, wired. See the module head.
pub(crate) struct Registry {
    pub(crate) shared: Arc<Shared>,
    pub(crate) jobs: Jobs,
    pub(crate) history: Arc<History>,
    pub(crate) inventory: Inventory,
    pub(crate) views: Views,
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
        Registry {
            jobs: Jobs::new(shared.hub.clone()),
            history: Arc::default(),
            views: Views::new(inventory.clone()),
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
