//! `ubcache group show`: the sets of a group, and which dirty data has one copy only.

use std::fmt;
use std::path::PathBuf;

use clap::Args;
use format::{BackingState, BackingSuper, Sectors, Uuid};
use inspect::copies::has_copy;
use inspect::{DeviceSuper, Mode, SetView, read_superblock};
use serde::Serialize;

use crate::commands::IN_USE;
use crate::failure::Failure;
use crate::read_only::ReadOnlyOpener;
use crate::{out, size};

/// Show the sets of a group and which dirty data has one copy only
///
/// Reads the devices and changes nothing. Exit code 1 if dirty data has one copy only.
///
/// Example: ubcache group show -C /dev/nvme0n1p2 -C /dev/nvme1n1p2 -B /dev/sdb
#[derive(Args, Debug)]
pub(crate) struct GroupShow {
    /// Cache device; give all that work
    #[arg(short = 'C', long = "cache", value_name = "DEV", required = true)]
    caches: Vec<PathBuf>,
    /// Backing device
    #[arg(short = 'B', long = "backing", value_name = "DEV")]
    backings: Vec<PathBuf>,
    /// Also read devices that another process writes to; what is shown may be out of date
    #[arg(long)]
    in_use: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    schema_version: u32,
    group_uuid: Option<String>,
    sets: Vec<Member>,
    devices: Vec<Device>,
    /// Dirty data that the loss of one cache device would lose.
    one_copy_bytes: u64,
}

#[derive(Serialize)]
struct Member {
    device: String,
    set_uuid: String,
    label: String,
}

#[derive(Serialize)]
struct Device {
    device: String,
    uuid: String,
    label: String,
    state: &'static str,
    /// The set that serves the device, and the one that has its dirty data, too.
    set_uuid: String,
    second_set_uuid: Option<String>,
    /// `None` if the set of the device is not there.
    dirty_bytes: Option<u64>,
    one_copy_bytes: u64,
}

impl GroupShow {
    pub(super) fn run(&self) -> Result<(), Failure> {
        let opener = ReadOnlyOpener::new(self.in_use, IN_USE)?;
        let mut views = Vec::new();
        for path in &self.caches {
            let device = opener.open(path)?;
            views.push((path, SetView::open(&device.source, Mode::BestEffort)?));
        }
        let mut devices = Vec::new();
        for path in &self.backings {
            let device = opener.open(path)?;
            match read_superblock(&device.source).map_err(Failure::of)? {
                DeviceSuper::Backing(superblock) => {
                    devices.push(device_of(path.display().to_string(), &superblock, &views));
                }
                DeviceSuper::Cache(_) => {
                    let path = path.display();
                    return Err(Failure::Failed(format!(
                        "{path}: expected a backing device, found a cache device"
                    )));
                }
            }
        }
        let sets = views.iter().map(|(path, view)| Member {
            device: path.display().to_string(),
            set_uuid: view.superblock.set_uuid().to_string(),
            label: view.superblock.label(),
        });
        let report = Report {
            schema_version: 1,
            group_uuid: views.iter().find_map(|(_, view)| view.superblock.group()).map(|g| g.to_string()),
            sets: sets.collect(),
            one_copy_bytes: devices.iter().map(|d| d.one_copy_bytes).sum(),
            devices,
        };
        out::document(self.json, &report)?;
        if report.one_copy_bytes > 0 { Err(Failure::Found) } else { Ok(()) }
    }
}

fn device_of(device: String, backing: &BackingSuper, views: &[(&PathBuf, SetView)]) -> Device {
    let set_of = |uuid: Uuid| views.iter().map(|(_, view)| view).find(|v| v.superblock.set_uuid() == uuid);
    let primary = set_of(backing.set_uuid());
    let second = views.iter().map(|(_, view)| view).find(|view| has_copy(view, primary, backing));
    let dirty = primary.or(second).map(|view| dirty_in(view, backing));
    let is_attached = matches!(backing.state(), BackingState::Clean | BackingState::Dirty);
    let dirty = dirty.filter(|_| is_attached);
    let copies = usize::from(primary.is_some()) + usize::from(second.is_some());
    Device {
        device,
        uuid: backing.uuid().to_string(),
        label: backing.label(),
        state: backing.state().name(),
        set_uuid: backing.set_uuid().to_string(),
        second_set_uuid: second.map(|view| view.superblock.set_uuid().to_string()),
        dirty_bytes: dirty.map(Sectors::bytes),
        one_copy_bytes: dirty.filter(|_| copies == 1).map_or(0, Sectors::bytes),
    }
}

/// The dirty data of a device in a set.
fn dirty_in(view: &SetView, backing: &BackingSuper) -> Sectors {
    let slots = view.slots.iter().filter(|(_, slot)| slot.is_backing() && slot.uuid == backing.uuid());
    slots
        .map(|(inode, _)| Sectors(view.totals_of(*inode).dirty_sectors))
        .fold(Sectors::ZERO, |sum, n| sum + n)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.group_uuid {
            Some(group) => writeln!(f, "group {group}")?,
            None => writeln!(f, "no group")?,
        }
        for set in &self.sets {
            let label = if set.label.is_empty() { String::new() } else { format!(" ({})", set.label) };
            writeln!(f, "  {}: cache set {}{label}", set.device, set.set_uuid)?;
        }
        for d in &self.devices {
            let dirty = d.dirty_bytes.map_or("unknown".to_owned(), size::human);
            writeln!(f, "{}: backing device {}, {}: {dirty} of dirty data", d.device, d.uuid, d.state)?;
            match &d.second_set_uuid {
                Some(second) => writeln!(f, "  in sets {} and {second}", d.set_uuid)?,
                None => writeln!(f, "  in set {} only", d.set_uuid)?,
            }
        }
        match self.one_copy_bytes {
            0 => writeln!(f, "no dirty data has one copy only"),
            bytes => writeln!(
                f,
                "{} of dirty data has one copy only: serve the set with two cache devices (`ubcache group add`, `ubcache up`)",
                size::human(bytes)
            ),
        }
    }
}
