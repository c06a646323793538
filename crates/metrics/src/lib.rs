//! The figures of the engine as metrics and as explanations.
//!
//! Two functions read the same plain figures: [`render`] makes text for Prometheus and other scrapers, [`explain`] makes
//! sentences about one volume. Every function here is a pure function of the figures. Must not know the source of the figures
//! or how the text is sent.
#![forbid(unsafe_code)]

mod checksums;
mod explain;
mod families;
mod family;
mod host;
mod states;
mod text;

pub use explain::{Explanation, explain};
pub use families::{families, names, render};
pub use family::FamilyInfo;
pub use host::{HostFigures, ProcessFigures};
pub use text::Format;

use std::collections::BTreeSet;

use engine::figures::{SetFigures, VolumeFigures};
use io::{DeviceFigures, InFlight};

/// A device and its requests, answered and in flight.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct DeviceLoad {
    /// Path of the device.
    pub device: String,
    /// Name of its volume; `None` for a cache device.
    pub volume: Option<String>,
    /// Label of its volume or set; empty if there is none.
    pub label: String,
    /// The requests that it has answered since it was opened.
    pub answered: u64,
    /// The requests that it has not answered.
    pub in_flight: InFlight,
}

impl DeviceLoad {
    /// The load of the cache device of a set.
    pub fn of_cache(set: &SetFigures, in_flight: InFlight) -> DeviceLoad {
        DeviceLoad {
            device: set.status.device.clone(),
            volume: None,
            label: set.status.label.clone(),
            answered: answered(&set.device),
            in_flight,
        }
    }

    /// The load of the backing device of a volume; `None` if it has none.
    pub fn of_backing(volume: &VolumeFigures, in_flight: InFlight) -> Option<DeviceLoad> {
        Some(DeviceLoad {
            device: volume.backing_name.clone()?,
            volume: Some(volume.name.clone()),
            label: volume.tunables.label.clone(),
            answered: answered(&volume.device),
            in_flight,
        })
    }
}

fn answered(device: &DeviceFigures) -> u64 {
    device.ops().iter().map(|(_, op)| op.latency.count()).sum()
}

/// The figures of a process: all sets, and backing devices that are served without a set.
#[derive(Clone, Default, Debug)]
pub struct Figures {
    /// Sets with their volumes.
    pub sets: Vec<SetFigures>,
    /// Volumes without a set.
    pub alone: Vec<VolumeFigures>,
    /// Names of volumes that clients cannot reach as the configuration says.
    pub not_exported: BTreeSet<String>,
    /// The requests in flight to each device; empty outside of the daemon.
    pub load: Vec<DeviceLoad>,
    /// The host and the process; `None` outside of the daemon.
    pub host: Option<HostFigures>,
}

impl Figures {
    /// Every volume with the UUID of its set; the UUID is empty for a volume without a set.
    pub fn volumes(&self) -> impl Iterator<Item = (String, &VolumeFigures)> {
        let of_sets = self.sets.iter().flat_map(|s| {
            let uuid = s.status.set_uuid.to_string();
            s.volumes.iter().map(move |v| (uuid.clone(), v))
        });
        of_sets.chain(self.alone.iter().map(|v| (String::new(), v)))
    }
}
