//! The components of the registry. From the ground up, each names only those above it:
//!
//! * `devices`: the registered devices and their states; `workers`: the threads of sets; `inventory`: both.
//! * `views`: both as clients see them; `lookup`: names become devices, sets and volumes.
//! * `admission`: which device may be served.
//! * `changes`: which command changes what; `placement`: devices are given to threads.
//! * `replug`: unplugged devices are plugged in again; `startup`: stored and configured devices are registered.
//! * `registration`: commands of the operator about devices; `hotplug`: devices that are plugged in.
//! * `exports`: the exports of all volumes.

pub(crate) mod admission;
pub(crate) mod changes;
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

pub(crate) use admission::By;
pub(crate) use lookup::{Found, Lookup};
pub(crate) use views::SetView;
