//! What the state directory stores of devices and volumes.
//!
//! Owns the form of the file. Must not know when it is read and written.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::config::Values;
use crate::identity::Identity;

/// A device that was registered.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Known {
    /// UUID in its superblock; another UUID at the same path is another device.
    pub(crate) uuid: String,
    /// Whether the operator has named the device; others were found by a scan that the configuration permits.
    #[serde(default = "yes")]
    pub(crate) named: bool,
}

fn yes() -> bool {
    true
}

/// The volume that owns an export address.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Owner {
    /// Key under which its name is stored: UUID of the backing device, or set and slot.
    pub(crate) volume: String,
    /// Its label, which may name its section of the configuration.
    pub(crate) label: String,
}

/// The identity of a device, which distinguishes it from its copies and from older states.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Mark {
    /// The hardware or file of the device.
    pub(crate) identity: Identity,
    /// The newest sequence number of its superblock that was read.
    pub(crate) sequence: u64,
    /// The path at which it was served the last time. It names the device in commands, also after it was unregistered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) path: Option<PathBuf>,
    /// The label that it had when it was unregistered; empty while it is registered.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) label: String,
}

#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Remembered {
    pub(super) version: u32,
    pub(super) devices: BTreeMap<PathBuf, Known>,
    /// Identities, by UUID of the set or of the backing device. An entry stays when the device is unregistered.
    pub(super) marks: BTreeMap<String, Mark>,
    pub(super) names: BTreeMap<String, String>,
    pub(super) tunables: BTreeMap<String, Values>,
    /// Owners of export addresses, by the address as the configuration writes it.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) places: BTreeMap<String, Owner>,
    /// Volumes that own a label, by the label in small letters. The section that the label names applies to no other volume.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) labels: BTreeMap<String, String>,
    /// Directory of the links to block devices, if it is not the default one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) links: Option<PathBuf>,
    /// Buckets with damaged dirty data, by UUID of the set.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) damaged: BTreeMap<String, Vec<u32>>,
    /// Disks with dirty data in a set whose cache device is not registered, by UUID of the set.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) left_dirty: BTreeMap<String, Vec<String>>,
    /// Unix times since which the dirty data of a disk of a group has one copy only, by UUID of the disk.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) one_copy_since: BTreeMap<String, u64>,
}

impl Remembered {
    /// The state without what the next start can do without: it reads the superblocks of the devices that it serves.
    pub(super) fn needed(&self) -> Remembered {
        let mut needed = self.clone();
        needed.left_dirty.clear();
        needed.one_copy_since.clear();
        for mark in needed.marks.values_mut() {
            (mark.sequence, mark.path) = (0, None);
            mark.label.clear();
        }
        needed
    }

    /// Removes what is stored of the dirty data of a disk.
    pub(super) fn forget_dirty_disk(&mut self, uuid: &str) {
        self.left_dirty.retain(|_, disks| {
            disks.retain(|disk| disk != uuid);
            !disks.is_empty()
        });
    }

    /// Removes the addresses and the label of a volume, or of all flash-only volumes of a set.
    pub(super) fn forget_places(&mut self, id: &str) {
        let flash_only = format!("{id}/");
        let is_it = |volume: &str| volume == id || volume.starts_with(&flash_only);
        self.places.retain(|_, owner| !is_it(&owner.volume));
        self.labels.retain(|_, owner| !is_it(owner));
    }
}
