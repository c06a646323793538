//! Errors outside of requests. Each has the next step for the operator.
//!
//! Owns the texts of these errors. Must not know the steps in which they occur.

use std::io;
use std::path::PathBuf;

/// Why a device could not be made, recovered or removed.
#[derive(Debug, thiserror::Error)]
pub enum UblkError {
    /// The kernel has no ublk driver, or it is not loaded.
    #[error(
        "ublk cannot be used: {} is missing: load the driver (`modprobe ublk_drv` as root; Linux 6.5 or later, built \
         with CONFIG_BLK_DEV_UBLK), or choose another export",
        crate::abi::CONTROL
    )]
    NoDriver,
    /// This user may not use the driver.
    #[error(
        "ublk cannot be used: {}: permission denied: run as root, or let users make devices by a udev rule that opens \
         it and gives /dev/ublkc* and /dev/ublkb* to their owners",
        crate::abi::CONTROL
    )]
    NoPermission,
    /// The driver cannot be opened for another reason.
    #[error("ublk cannot be used: {}: {source}", crate::abi::CONTROL)]
    Control {
        /// The error of the system.
        source: io::Error,
    },
    /// The driver does not have a command that is needed.
    #[error(
        "ublk cannot be used: the kernel's driver does not know the command \"{0}\": Linux 6.5 or later is needed"
    )]
    TooOld(&'static str),
    /// io_uring cannot be used for requests.
    #[error("ublk cannot be used: {0}")]
    NoRing(#[source] io::Error),
    /// A device with this number exists.
    #[error("/dev/ublkb{number} is in use{}: choose another number, or leave it out", by(*.pid))]
    Taken {
        /// The requested number.
        number: u32,
        /// The process that serves that device, if the driver reports it.
        pid: Option<i32>,
    },
    /// The node of a new device does not belong to the user without privileges who made the device.
    #[error(
        "/dev/ublkc{number} does not belong to this user: add a udev rule that gives /dev/ublkc* and \
         /dev/ublkb* to their owners"
    )]
    NotOwner {
        /// The device.
        number: u32,
    },
    /// Another process serves this volume.
    #[error(
        "/dev/ublkb{number}: process {pid} serves this volume: stop it first, or let it hand the device over \
         (`ubcache up --takeover`)"
    )]
    InService {
        /// Number of the device.
        number: u32,
        /// The process that serves the device.
        pid: i32,
    },
    /// A device that was left behind has another size than the volume.
    #[error(
        "/dev/ublkb{number} was left behind with {found} sectors, and the volume has {expected}: stop its \
         users; it is removed when it is served with the right volume and then stopped"
    )]
    Changed {
        /// The device.
        number: u32,
        /// Sectors of the volume.
        expected: u64,
        /// Sectors of the device.
        found: u64,
    },
    /// A device was left behind, and the driver does not release its old server.
    #[error(
        "/dev/ublkb{number}, left behind by process {pid}, cannot be recovered: the driver still waits for that process"
    )]
    NotQuiet {
        /// The device.
        number: u32,
        /// The process that served the device.
        pid: i32,
    },
    /// The character device by which a device is served cannot be opened.
    #[error("{}: {source}", path.display())]
    Node {
        /// Path of the character device.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The driver refused a command.
    #[error("/dev/ublkb{number}: {step}: {source}")]
    Refused {
        /// The device.
        number: u32,
        /// The failed step.
        step: &'static str,
        /// The error of the driver.
        source: io::Error,
    },
    /// The driver refused to make a device.
    #[error("ublk: cannot make a device with {queues} queues of depth {depth}: {source}")]
    Add {
        /// Requested number of queues.
        queues: u16,
        /// Requested depth.
        depth: u16,
        /// The error of the driver.
        source: io::Error,
    },
}

fn by(pid: Option<i32>) -> String {
    pid.map(|p| format!(" by process {p}")).unwrap_or_default()
}
