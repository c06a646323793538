//! Opening devices for reading only, with a shared claim, so that their contents do not change meanwhile.
//!
//! Owns the refusal of devices that another process writes to. A file is locked (shared) as long as the value lives; a
//! block device is only checked for processes that write to it, because a claim would exclude other readers. Must not know
//! what is read.

use std::path::Path;

use blockio::{Access, Backend, Claim, Driver, DriverOptions, FileDevice, OpenError, OpenOptions};
use inspect::FileSource;

use crate::failure::Failure;

/// Opens devices for reading.
pub struct ReadOnlyOpener {
    driver: Driver,
    in_use: bool,
    /// The option that reads a device in use all the same; `None` if there is none.
    flag: Option<&'static str>,
}

/// A device open for reading.
pub struct ReadOnlyDevice {
    /// The contents of the device.
    pub source: FileSource,
    _claim: FileDevice,
}

impl ReadOnlyOpener {
    /// Makes an opener.
    ///
    /// With `in_use` it also opens devices that another process writes to, whose contents may be torn. `flag` is the option
    /// by which an operator sets it, for messages.
    ///
    /// # Errors
    /// If the system cannot start a driver for the claims.
    pub fn new(in_use: bool, flag: &'static str) -> Result<ReadOnlyOpener, Failure> {
        Ok(ReadOnlyOpener { driver: driver()?, in_use, flag: Some(flag) })
    }

    /// Makes an opener that refuses every device that another process writes to.
    ///
    /// # Errors
    /// If the system cannot start a driver for the claims.
    pub fn of_idle_devices() -> Result<ReadOnlyOpener, Failure> {
        Ok(ReadOnlyOpener { driver: driver()?, in_use: false, flag: None })
    }

    /// Opens a device.
    ///
    /// # Errors
    /// If another process writes to it, or it cannot be opened.
    pub fn open(&self, path: &Path) -> Result<ReadOnlyDevice, Failure> {
        let claim = if self.in_use { Claim::None } else { Claim::ByAccess };
        let options =
            OpenOptions { access: Access::ReadOnly, claim, buffered: true, ..OpenOptions::default() };
        let claim =
            FileDevice::open(self.driver.reactor(), path, &options).map_err(|e| match (e, self.flag) {
                (e @ OpenError::InUse { .. }, Some(flag)) => Failure::Caused {
                    text: format!("{e}: stop that first, or read the device all the same with {flag}"),
                    source: e.into(),
                },
                (other, _) => stop_first(path, other),
            })?;
        Ok(ReadOnlyDevice { source: FileSource::open(path)?, _claim: claim })
    }
}

/// A driver through which no request goes: it only holds the claims.
fn driver() -> Result<Driver, Failure> {
    let options = DriverOptions { backend: Backend::Pool, ..DriverOptions::default() };
    Driver::new(options).map_err(|e| Failure::because("cannot start", e))
}

/// The failure to open a device that has to be idle: of one in use it has the command by which the daemon releases it.
pub fn stop_first(path: &Path, e: OpenError) -> Failure {
    match e {
        OpenError::InUse { .. } => Failure::caused(
            format!(
                "{e}: stop that first; what the daemon serves it releases by `ubcache unregister {}`",
                path.display()
            ),
            e,
        ),
        other => other.into(),
    }
}
