//! What this host has: the registered devices, and the threads that serve them.
//!
//! Owns nothing: it holds the two tables together. Must not know who changes them.

use std::sync::Arc;

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
