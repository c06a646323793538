//! `up --takeover`: takes over the ublk devices that another process serves.
//!
//! Owns the order. The new process checks everything that it can check without claiming the devices. It finds the process
//! that serves the set through its ublk devices and sends it a signal to hand over. The old process answers the requests in
//! flight, makes them durable, leaves its devices to the driver and ends, which releases its claims. The new process then
//! starts as usual and recovers the devices. Must not know how a set is served.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use blockio::{Access, Claim, Driver, FileDevice, OpenOptions};
use io::Disk;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::exports;
use crate::failure::Failure;
use crate::{message, superblock};

/// Time limit of the other process to answer the requests in flight and make them durable.
const HANDOVER_WITHIN: Timespec = Timespec { tv_sec: 120, tv_nsec: 0 };

/// Opens a device that another process has claimed, for reading.
fn open_read_only(driver: &Driver, path: &Path) -> Result<Disk, Failure> {
    let options = OpenOptions { access: Access::ReadOnly, claim: Claim::None, ..OpenOptions::default() };
    let device = FileDevice::open(driver.reactor(), path, &options)?;
    Ok(Disk::new(Rc::new(device), driver.handle()))
}

/// Makes the process that serves the set of these devices hand it over, and waits until that process has ended.
///
/// # Errors
/// If the devices do not belong together, or the other process does not end; it continues to serve.
pub async fn take_over(driver: &Driver, caches: &[PathBuf], backings: &[PathBuf]) -> Result<(), Failure> {
    let mut sets = Vec::new();
    for path in caches {
        let disk = open_read_only(driver, path)?;
        let superblock = superblock::cache(&disk, path).await?;
        sets.push((disk, superblock));
    }
    let Some(set) = sets.first().map(|(_, set)| set.set_uuid()) else { return Ok(()) };
    let mut uuids = Vec::new();
    for path in backings {
        let disk = open_read_only(driver, path)?;
        let superblock = superblock::backing(&disk, path).await?;
        superblock::belongs_to_one(&disk.info().name, &superblock, &sets)?;
        uuids.push(superblock.uuid().to_string());
    }
    let servers = exports::servers(driver, &set.to_string(), &uuids).await?;
    let &[pid] = &servers[..] else {
        if servers.is_empty() {
            message::note("no process serves this set by ublk: there is nothing to take over");
            return Ok(());
        }
        return Err(Failure::Failed(format!(
            "processes {servers:?} serve volumes of this set; stop them first"
        )));
    };
    let refused =
        |what: &str, e: rustix::io::Errno| Failure::because(format_args!("process {pid}: {what}"), e);
    let process = Pid::from_raw(pid).ok_or_else(|| refused("not a process", rustix::io::Errno::SRCH))?;
    let handle = pidfd_open(process, PidfdFlags::empty()).map_err(|e| refused("cannot be watched", e))?;
    // The handle now keeps the process id from being reused, so this checks that the id still is that of the server.
    if exports::servers(driver, &set.to_string(), &uuids).await? != servers {
        return Err(Failure::Failed(format!("process {pid} ended during the takeover; try again")));
    }
    pidfd_send_signal(&handle, Signal::USR2).map_err(|e| refused("cannot be asked to hand over", e))?;
    message::note(format!("process {pid} hands over"));
    let ended = driver.reactor().blocking(move || {
        loop {
            match poll(&mut [PollFd::new(&handle, PollFlags::IN)], Some(&HANDOVER_WITHIN)) {
                Err(rustix::io::Errno::INTR) => {}
                other => return other,
            }
        }
    });
    match ended.await {
        Ok(0) => Err(Failure::Failed(format!(
            "process {pid} has not handed over within {} seconds; it still serves",
            HANDOVER_WITHIN.tv_sec
        ))),
        Ok(_) => Ok(()),
        Err(e) => Err(refused("cannot be waited for", e)),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use blockio::DriverOptions;

    use super::*;
    use crate::crash_log::suffix_of;

    /// A start that cannot read a superblock removes the crash logs of the device. A takeover must not do that, because the
    /// process that serves the device uses its log.
    #[test]
    fn a_device_whose_superblock_cannot_be_read_keeps_its_crash_log() {
        let Ok(dir) = exports::runtime_dir() else {
            rig::skipped("this user has no directory for crash logs");
            return;
        };
        let place = tempfile::tempdir().unwrap();
        let device = place.path().join("cache");
        // The file is too short for a superblock.
        std::fs::write(&device, [0; 4096]).unwrap();
        let log = dir.join(format!("5e5e5e5e{}", suffix_of(&device).unwrap()));
        std::fs::write(&log, "keys").unwrap();
        let driver = Driver::new(DriverOptions::default()).unwrap();
        let refused = driver.block_on(take_over(&driver, std::slice::from_ref(&device), &[]));
        let found = std::fs::read(&log);
        std::fs::remove_file(&log).unwrap();
        let refused = refused.unwrap_err();
        let message = refused.message().unwrap();
        assert!(message.contains("cache: expected at least"), "{message}");
        assert_eq!(found.unwrap(), b"keys");
    }
}
