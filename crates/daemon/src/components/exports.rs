//! Reports on the exports of all volumes: failed exports, devices that dead processes have left, conflicts, and sections of the configuration without effect.
//!
//! Owns no decision: `places` decides which volume owns an address, and `config` decides to which volume a section applies.

use std::path::Path;
use std::sync::Arc;

use serde::Serialize;
use serve::message;

use super::inventory::Inventory;
use super::problems::DeadExport;
use super::views::{DeviceView, Views};
use crate::config::{Config, Key};
use crate::hub::Kind;
use crate::places;
use crate::probe::Role;
use crate::shared::Shared;

/// A served volume without all its configured exports.
#[derive(Serialize)]
pub(crate) struct NotExported {
    pub(crate) volume: String,
    /// Its label; empty if there is none.
    pub(crate) label: String,
    pub(crate) why: String,
}

fn dead_exports_now() -> Vec<DeadExport> {
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let left = export_fuse::leftovers().into_iter();
    left.map(|left| DeadExport {
        users: blockio::users::of_block_device(&name(&left.device)),
        volume: name(&left.file),
        device: left.device,
    })
    .collect()
}

/// The exports of all volumes.
pub(crate) struct Exports {
    shared: Arc<Shared>,
    inventory: Inventory,
    views: Views,
}

impl Exports {
    pub(crate) fn new(shared: Arc<Shared>, inventory: Inventory) -> Exports {
        let views = Views::new(shared.clone(), inventory.clone());
        Exports { shared, inventory, views }
    }

    /// The volumes of these devices without all their configured exports, and why; all volumes if no devices are given.
    pub(crate) async fn not_exported(&self, devices: Option<&[DeviceView]>) -> Vec<NotExported> {
        let mut found = Vec::new();
        for set in self.views.sets().await {
            let (all, devices) = (devices.is_none(), devices.unwrap_or_default());
            let whole =
                all || devices.iter().any(|d| d.kind == Some("cache") && d.set.as_ref() == Some(&set.id));
            for volume in set.figures.volumes {
                let named = volume.backing_uuid.is_some()
                    && devices.iter().any(|d| d.kind == Some("backing") && d.uuid == volume.backing_uuid);
                if let Some(why) = volume.problem.filter(|_| whole || named) {
                    found.push(NotExported { volume: volume.name, label: volume.label, why });
                }
            }
        }
        found
    }

    /// The block devices of dead processes that are in use, which the exports of this process have found.
    pub(crate) async fn dead(&self) -> Vec<DeadExport> {
        tokio::task::spawn_blocking(dead_exports_now).await.unwrap_or_else(|e| {
            message::warn(format!("the devices of dead processes are not known: {e}"));
            Vec::new()
        })
    }

    /// Why a configuration cannot be used for the served volumes; `None` if it can.
    pub(crate) async fn conflicts(&self, next: &Config) -> Option<String> {
        places::conflicts(&self.shared, next, &self.inventory.workers.volumes().await)
    }

    /// Sections of a configuration that apply to no registered set or volume.
    pub(crate) async fn unmatched(&self, config: &Config) -> Vec<String> {
        if !config.has_sections() {
            return Vec::new();
        }
        let mut known: Vec<(Key, Option<String>)> =
            self.inventory.workers.all().iter().map(|w| (w.key(), None)).collect();
        known.extend(self.inventory.workers.volumes().await.into_iter().map(|(key, name)| (key, Some(name))));
        for probe in self.inventory.devices.all().into_values().filter_map(|d| d.probe) {
            let (label, set) = match &probe.role {
                Role::Cache { .. } => (String::new(), true),
                Role::Backing { label, .. } => (label.clone(), false),
            };
            let name = self.shared.state().known_name(probe.key());
            known.push((Key { id: probe.key().to_owned(), label, set }, name));
        }
        config.unmatched(&known)
    }

    /// Logs the sections that apply to no set or volume.
    pub(crate) async fn say_unmatched(&self) {
        let config = self.shared.config().clone();
        for line in self.unmatched(&config).await {
            self.shared.hub.publish(Kind::Configuration, None, "warning", &line);
            message::warn(format!("configuration: {line}"));
        }
    }
}
