//! Probes of the host, for the choice of an export.
//!
//! Owns the probes. They change nothing. A positive result is no guarantee: for example, the rules of a container may still
//! refuse the mount.

use std::fs::OpenOptions;
use std::sync::Arc;

use crate::error::FuseError;
use crate::loopdev;
use crate::mount::{self, HELPER};

/// The available exports, or the reasons why they are not.
#[derive(Clone, Debug)]
pub struct Availability {
    /// A file system with a file per volume.
    pub fuse: Result<(), Arc<FuseError>>,
    /// Loop devices over such files.
    pub loop_device: Result<(), Arc<FuseError>>,
}

/// Number of the capability to mount.
const CAP_SYS_ADMIN: u32 = 21;

/// Probes the host.
pub fn probe() -> Availability {
    let fuse = probe_fuse().map_err(Arc::new);
    let loop_device = match &fuse {
        Err(why) => Err(why.clone()),
        Ok(()) => loopdev::open_control().map(drop).map_err(Arc::new),
    };
    Availability { fuse, loop_device }
}

fn probe_fuse() -> Result<(), FuseError> {
    let device = OpenOptions::new().read(true).write(true).open("/dev/fuse");
    device.map_err(mount::no_fuse)?;
    if may_mount() || mount::find_program(HELPER).is_some() {
        return Ok(());
    }
    Err(mount::helper_missing(std::io::ErrorKind::NotFound.into()))
}

fn may_mount() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    has_capability(&status, CAP_SYS_ADMIN)
}

fn has_capability(status: &str, number: u32) -> bool {
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    effective
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .is_some_and(|set| set >> number & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_read_from_the_mask() {
        assert!(has_capability("Name:\tx\nCapEff:\t0000000000200000\n", CAP_SYS_ADMIN));
        assert!(!has_capability("Name:\tx\nCapEff:\t0000000000100000\n", CAP_SYS_ADMIN));
        assert!(!has_capability("", CAP_SYS_ADMIN));
    }
}
