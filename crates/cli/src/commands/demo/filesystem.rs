//! ext4 on the volume's block device, mounted.
//!
//! Owns the check whether this host permits the mount, and the mount, which ends when the value is dropped. Must not know
//! the load.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use rustix::mount::{MountFlags, UnmountFlags};

use crate::failure::Failure;
use crate::{exports, out};

/// Time limit for other programs to leave a file system that is to be unmounted.
const SETTLE_WITHIN: Duration = Duration::from_secs(5);
const AGAIN: Duration = Duration::from_millis(50);

/// Directories with the programs of administrators, which are not in the search path of every user.
const MORE_PATH: &str = ":/usr/sbin:/sbin";

/// Why no file system can be mounted here; `None` if one can.
pub(super) fn obstacle() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("that needs root".into());
    }
    if let Err(why) = exports::block_devices() {
        return Some(why.to_string());
    }
    for program in ["mkfs.ext4", "debugfs"] {
        if find(program).is_none() {
            return Some(format!("{program} is missing (Debian package e2fsprogs)"));
        }
    }
    let known = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    // The kernel may load ext4 as a module during the mount. Only the mount shows whether it can.
    let possible = known.contains("ext4") || Path::new("/proc/modules").exists();
    (!possible).then(|| "the kernel has no ext4".into())
}

fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var("PATH").unwrap_or_default() + MORE_PATH;
    path.split(':').map(|dir| Path::new(dir).join(program)).find(|p| p.is_file())
}

/// Runs a program; a failure of the program is an error.
pub(super) fn tool(program: &str, args: &[&str]) -> Result<Output, Failure> {
    let path = find(program).unwrap_or_else(|| program.into());
    let output = Command::new(path).args(args).output();
    let output = output.map_err(|e| Failure::because(program, e))?;
    if output.status.success() {
        return Ok(output);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(Failure::Failed(format!("{program} {}: {}: {}", args.join(" "), output.status, said.trim())))
}

/// Makes the file system and writes all of its structures at once, so that no background work disturbs the measurement.
pub(super) fn make(device: &str) -> Result<(), Failure> {
    tool("mkfs.ext4", &["-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard", device])
        .map(drop)
}

/// A mounted file system, which is unmounted on drop.
pub(super) struct Mounted {
    dir: PathBuf,
}

impl Mounted {
    pub(super) fn mount(device: &str, dir: &Path) -> Result<Mounted, Failure> {
        std::fs::create_dir_all(dir).map_err(|e| Failure::at(dir, "cannot be created", e))?;
        let flags = MountFlags::NOATIME | MountFlags::NODEV | MountFlags::NOSUID;
        rustix::mount::mount(device, dir, "ext4", flags, None)
            .map_err(|e| Failure::at(dir, "cannot be mounted", e))?;
        Ok(Mounted { dir: dir.to_path_buf() })
    }

    /// The path of the file that the load uses.
    pub(super) fn file(&self) -> PathBuf {
        self.dir.join("load")
    }

    /// Makes the file of the load, with these contents.
    pub(super) fn fill(&self, contents: &[u8]) -> Result<(), Failure> {
        let path = self.file();
        let made =
            File::create_new(&path).and_then(|mut f| f.write_all(contents).and_then(|()| f.sync_all()));
        made.map_err(|e| Failure::at(&path, "cannot be written", e))
    }

    /// Unmounts the file system, which makes all data durable.
    pub(super) fn unmount(self) -> Result<(), Failure> {
        let deadline = Instant::now() + SETTLE_WITHIN;
        loop {
            match rustix::mount::unmount(&self.dir, UnmountFlags::empty()) {
                Ok(()) => break,
                // Desktop programs read newly mounted file systems.
                Err(rustix::io::Errno::BUSY) if Instant::now() < deadline => std::thread::sleep(AGAIN),
                Err(e) => return Err(Failure::at(&self.dir, "cannot be unmounted", e)),
            }
        }
        std::mem::forget(self);
        Ok(())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Err(e) = rustix::mount::unmount(&self.dir, UnmountFlags::DETACH) {
            out::warn(format!("{}: cannot be unmounted: {e}", self.dir.display()));
        }
    }
}
