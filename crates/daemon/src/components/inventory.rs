//! What this host has: the registered devices, and the threads that serve them.
//!
//! Owns nothing: it holds the two tables together. Must not know who changes them.

use std::sync::Arc;

use super::devices::DeviceTable;
use super::workers::Workers;

/// The two tables, for the components that change or read both.
#[derive(Clone)]
pub(crate) struct Inventory {
    pub(crate) devices: Arc<DeviceTable>,
    pub(crate) workers: Arc<Workers>,
}
