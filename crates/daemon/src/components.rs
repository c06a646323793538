//! The components of the registry.
//!
//! From the ground up; each component names only those above it in this list:
//!
//! * `devices`: the registered devices and their states; `workers`: the threads of sets; `inventory`: both.
//! * `views`: devices and threads as clients see them; `problems`: what an operator has to do; `lookup`: resolves names to devices, sets and volumes.
//! * `admission`: decides which device may be served.
//! * `changes`: which command changes which devices; `placement`: assigns devices to threads.
//! * `replug`: serves devices that are plugged in again; `startup`: registers the stored and configured devices.
//! * `registration`: carries out the operator's commands about devices; `groups`: those that change groups; `hotplug`: registers devices that are plugged in.
//! * `exports`: reports on the exports of all volumes; `overview`: all problems; `scrape`: the figures for `/metrics`;
//!   `silences`: devices that do not answer.

pub(crate) mod admission;
pub(crate) mod changes;
pub(crate) mod devices;
pub(crate) mod exports;
pub(crate) mod groups;
pub(crate) mod hotplug;
pub(crate) mod inventory;
pub(crate) mod lookup;
pub(crate) mod overview;
pub(crate) mod placement;
pub(crate) mod problems;
pub(crate) mod registration;
pub(crate) mod replug;
pub(crate) mod scrape;
pub(crate) mod silences;
pub(crate) mod startup;
pub(crate) mod views;
pub(crate) mod workers;

pub(crate) use admission::By;
pub(crate) use exports::NotExported;
pub(crate) use groups::{GroupChange, Groups, Joining};
pub(crate) use lookup::{Found, Lookup};
pub(crate) use problems::{Problem, problems, shared_labels, volume_title};
pub(crate) use registration::{Attach, Ended};
pub(crate) use views::{DeviceView, SetView};
