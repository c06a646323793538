//! How volumes are reached, over all sets: what the configuration says of those that are there, and what came of it.
//!
//! Owns no decision: whose a place is, is for `places` to say, and what a section applies to for `config`.

use std::sync::Arc;

use serde::Serialize;
use serve::{Failure, message};

use super::{DeviceView, Registry};
use crate::config::{Config, Key};
use crate::places::{self, Known};
use crate::probe::{Probe, Role};
use crate::settings::{key_of, set_key};
use crate::worker::Phase;

/// A volume that is served and cannot be reached as it should.
#[derive(Serialize)]
pub(crate) struct NotExported {
    volume: String,
    why: String,
}

impl Registry {
    /// A device is let go by order: its volume, or the volumes of its set, have no places any more.
    pub(super) fn let_go_of(&self, device: Probe) -> Result<(), Failure> {
        self.named_uuids().remove(&device.uuid);
        self.left().insert(device.uuid.clone());
        self.shared.state().forget_places(device.key())
    }

    /// Which volumes of these devices are not exported as they should be, and why.
    pub(crate) async fn not_exported(self: &Arc<Self>, devices: &[DeviceView]) -> Vec<NotExported> {
        let mut found = Vec::new();
        for set in self.sets().await {
            let whole = devices.iter().any(|d| d.kind == Some("cache") && d.set.as_ref() == Some(&set.id));
            for volume in set.figures.volumes {
                let named = volume.backing_uuid.is_some()
                    && devices.iter().any(|d| d.kind == Some("backing") && d.uuid == volume.backing_uuid);
                if let Some(why) = volume.problem.filter(|_| whole || named) {
                    found.push(NotExported { volume: volume.name, why });
                }
            }
        }
        found
    }

    /// Volumes that are served, by what names their sections of the configuration.
    async fn volumes(self: &Arc<Self>) -> Vec<Known> {
        let mut all = Vec::new();
        for worker in self.all_workers().into_iter().filter(|w| w.phase() == Phase::Serving) {
            if let Ok(figures) = self.figures_of(&worker).await {
                all.extend(figures.volumes.into_iter().map(|v| (key_of(&worker, &v), v.name)));
            }
        }
        all
    }

    /// Why a configuration cannot be used for the volumes that are served.
    pub(crate) async fn conflicts(self: &Arc<Self>, next: &Config) -> Option<String> {
        places::conflicts(next, &self.volumes().await)
    }

    /// Sections of a configuration that apply to nothing that is registered.
    pub(crate) async fn unmatched(self: &Arc<Self>, config: &Config) -> Vec<String> {
        if !config.has_sections() {
            return Vec::new();
        }
        let mut known: Vec<(Key, Option<String>)> =
            self.all_workers().iter().map(|w| (set_key(w), None)).collect();
        known.extend(self.volumes().await.into_iter().map(|(key, name)| (key, Some(name))));
        for probe in self.devices().values().filter_map(|d| d.probe.as_ref()) {
            let (label, set) = match &probe.role {
                Role::Cache { .. } => (String::new(), true),
                Role::Backing { label, .. } => (label.clone(), false),
            };
            let name = self.shared.state().known_name(probe.key());
            known.push((Key { id: probe.key().to_owned(), label, set }, name));
        }
        config.unmatched(&known)
    }

    /// Says which sections apply to nothing.
    pub(crate) async fn say_unmatched(self: &Arc<Self>) {
        let config = self.shared.config().clone();
        for line in self.unmatched(&config).await {
            self.shared.hub.publish("configuration", None, "warning", &line);
            message::warn(format!("configuration: {line}"));
        }
    }
}
