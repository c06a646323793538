//! What this host has: the registered devices, and the threads that serve them.
//!
//! Owns nothing: it holds the two tables together. Must not know who changes them.

use std::sync::Arc;

use serve::plain;

use super::devices::DeviceTable;
use super::workers::Workers;
use crate::probe::{Probe, Role};
use crate::worker::Phase;

/// The two tables, for the components that change or read both.
#[derive(Clone)]
pub(crate) struct Inventory {
    pub(crate) devices: Arc<DeviceTable>,
    pub(crate) workers: Arc<Workers>,
}

impl Inventory {
    /// Why a device that is served cannot be registered: a stop of its thread, or of its volume, has not ended.
    pub(crate) async fn is_stopping(&self, probe: &Probe) -> Option<String> {
        let worker = match self.workers.of_device(probe) {
            Some(worker) => worker,
            None => self.workers.volume_of(&probe.uuid).await?.0,
        };
        let figures = worker.snapshot().await.ok()?;
        let volume = figures.volumes.iter().find(|v| v.backing_uuid.as_ref() == Some(&probe.uuid));
        let is_it = |of: &String| volume.is_some_and(|volume| volume.name == *of);
        let stop = figures.stops.iter().find(|stop| stop.volume.as_ref().is_none_or(is_it))?;
        let what = match &stop.volume {
            Some(name) => plain::named(volume.map_or("", |v| &v.label), name),
            None => worker.title(),
        };
        Some(format!(
            "{}: {what} is still stopping, for {} s: a device may not answer; `ubcache status` shows what waits; run this \
             command again when the stop has ended",
            probe.path.display(),
            stop.seconds
        ))
    }

    /// Whether a thread serves this device.
    ///
    /// The state of the device alone does not tell: it can be that of an earlier thread, which has failed. So the thread is
    /// asked for its volumes.
    pub(crate) async fn serves(&self, probe: &Probe) -> bool {
        if !self.devices.is_served(&probe.path) {
            return false;
        }
        let Some(worker) = self.workers.of_device(probe) else {
            // The thread of a set still serves a volume that was detached from it.
            return self.workers.volume_of(&probe.uuid).await.is_some();
        };
        if worker.phase() != Phase::Serving || matches!(probe.role, Role::Cache { .. }) {
            return true;
        }
        match worker.snapshot().await {
            Ok(figures) => figures.volumes.iter().any(|v| v.backing_uuid.as_ref() == Some(&probe.uuid)),
            // A thread that does not answer has not failed, so the state of the device holds.
            Err(_) => true,
        }
    }
}
