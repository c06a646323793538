//! Problems of block devices that a process left when it died, and that are still in use.
//!
//! Owns these problems. A client that uses such a device gets errors, although the volume is served again at another device.
//! Must not know how such a device is found.

use std::path::PathBuf;

use blockio::users::{User, in_words};
use serve::exports::{Opens, Way};

use super::{Problem, SetView, volume_title};
use crate::host::end_of_use;

/// A block device of a process that has ended, and its users.
pub(crate) struct DeadExport {
    pub(crate) device: PathBuf,
    /// Name of the volume that the device was an export of.
    pub(crate) volume: String,
    pub(crate) users: Vec<User>,
}

/// The problem of each such device. It ends when the device is not in use any more.
pub(crate) fn dead_exports(dead: &[DeadExport], sets: &[SetView]) -> Vec<Problem> {
    dead.iter().map(|one| of_one(one, sets)).collect()
}

fn of_one(dead: &DeadExport, sets: &[SetView]) -> Problem {
    let device = dead.device.display();
    let served = sets.iter().find_map(|set| {
        let volume = set.figures.volumes.iter().find(|volume| volume.name == dead.volume)?;
        Some((set, volume))
    });
    let what = served.map_or_else(|| dead.volume.clone(), |(_, volume)| volume_title(volume));
    let all: Vec<&Way> = served.iter().flat_map(|(_, volume)| &volume.exports).collect();
    let is_device = |way: &&&Way| matches!(way.kind.opens, Opens::BlockDevice { .. });
    let ways: Vec<&str> = all.iter().filter(is_device).map(|way| &*way.address).collect();
    let now = match ways.is_empty() {
        true => "unmount or close it".to_owned(),
        false => format!("unmount or close it, and use {}, where the volume is served now", ways.join(", ")),
    };
    let text = format!(
        "{what}: {device} is of a process that has ended, and every access to it fails, but it is in use: {}; {now}",
        in_words(&dead.users)
    );
    let command = dead.users.first().map_or_else(|| format!("lsblk {device}"), end_of_use);
    let mut problem = Problem::new("dead_export", text, command);
    problem.of.volume = served.map(|(_, volume)| volume.name.clone());
    problem.of.set = served.filter(|(set, _)| set.has_cache).map(|(set, _)| set.id.clone());
    problem
}
