//! What this host has: the registered devices, and the threads that serve them.

use std::sync::Arc;

use super::devices::DeviceTable;
use super::workers::Workers;

/// Both tables, for the components that change or read the two together.
#[derive(Clone)]
pub(crate) struct Inventory {
    pub(crate) devices: Arc<DeviceTable>,
    pub(crate) workers: Arc<Workers>,
}
