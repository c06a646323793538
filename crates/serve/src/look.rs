//! Devices that are only read: opened with a shared claim, so that what is seen stands still.
//!
//! Owns the refusal of devices that somebody writes to. A file is locked (shared) as long as the value lives; a block
//! device is only looked at, because a claim would keep other readers out.

use std::path::Path;

use blockio::{Access, Backend, Claim, Driver, DriverOptions, FileDevice, OpenOptions};
use inspect::FileSource;

use crate::failure::Failure;

/// Opens devices for reading.
pub struct Looker {
    driver: Driver,
    in_use: bool,
    how: &'static str,
}

/// A device open for reading.
pub struct Looked {
    /// What is read.
    pub source: FileSource,
    _claim: FileDevice,
}

impl Looker {
    /// A looker. `in_use`: the operator wants to see devices that somebody writes to, torn as they may be; `how` is how he
    /// says so.
    pub fn new(in_use: bool, how: &'static str) -> Result<Looker, Failure> {
        // No request goes through this driver: it only holds the claims.
        let options = DriverOptions { backend: Backend::Pool, ..DriverOptions::default() };
        let driver = Driver::new(options).map_err(|e| Failure::Failed(format!("cannot start: {e}")))?;
        Ok(Looker { driver, in_use, how })
    }

    /// Opens a device.
    ///
    /// # Errors
    /// If somebody writes to it, or it cannot be opened.
    pub fn open(&self, path: &Path) -> Result<Looked, Failure> {
        let claim = if self.in_use { Claim::None } else { Claim::ByAccess };
        let options =
            OpenOptions { access: Access::ReadOnly, claim, buffered: true, ..OpenOptions::default() };
        let claim = FileDevice::open(self.driver.reactor(), path, &options).map_err(|e| match e {
            blockio::OpenError::InUse { .. } => {
                Failure::Failed(format!("{e}: stop that first, or look at it all the same with {}", self.how))
            }
            other => other.into(),
        })?;
        Ok(Looked { source: FileSource::open(path)?, _claim: claim })
    }
}
