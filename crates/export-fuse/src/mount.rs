//! Mounts and unmounts: makes an open `/dev/fuse` for a directory, and removes the mount.
//!
//! Owns both ways to mount: mount(2) if that is allowed, else the set-uid program `fusermount3`. Every function blocks, so none
//! may run on the thread of a driver. Must not know what is served.
//!
//! Invariant: it unmounts only its own mount. It checks the topmost mount first, because an operator may have unmounted it and
//! mounted another file system at the same place.

use std::ffi::{CString, OsString};
use std::fs::OpenOptions;
use std::io::{self, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use blockio::{mountinfo, users};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use crate::error::FuseError;

/// File system type of these mounts, as the kernel lists it.
pub(crate) const FS_TYPE: &str = "fuse.ubcache";

/// Name of the program that mounts for users.
pub(crate) const HELPER: &str = "fusermount3";

/// A mounted file system. Not unmounted when dropped: see [`Mount::unmount`] and [`Mount::abort`].
pub(crate) struct Mount {
    dir: PathBuf,
    /// Device number of the file system. No other file system has it as long as this one exists.
    device: (u32, u32),
    by_helper: bool,
}

/// How a file system is to be mounted.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum MountBy {
    /// By mount(2) if that is allowed, else by `fusermount3`.
    #[default]
    Auto,
    /// By `fusermount3`, also where mount(2) would work.
    Helper,
}

/// Mounts at `dir`, a path from [`mountinfo::located`]. Requests are read from the returned descriptor.
pub(crate) fn mount(dir: &Path, by: MountBy) -> Result<(OwnedFd, Mount), FuseError> {
    let at_dir = |source| FuseError::Directory { dir: dir.to_path_buf(), source };
    let metadata = match std::fs::metadata(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            std::fs::create_dir(dir).map_err(at_dir)?;
            std::fs::metadata(dir).map_err(at_dir)?
        }
        other => other.map_err(at_dir)?,
    };
    if std::fs::read_dir(dir).map_err(at_dir)?.next().is_some() {
        return Err(FuseError::NotEmpty(dir.to_path_buf()));
    }
    let direct = match by {
        MountBy::Auto => mount_directly(dir, metadata.permissions().mode())?,
        MountBy::Helper => None,
    };
    let by_helper = direct.is_none();
    let device = match direct {
        Some(device) => device,
        None => mount_by_helper(dir)?,
    };
    let failed = |source| FuseError::Mount { dir: dir.to_path_buf(), source };
    let mounted = mountinfo::topmost(dir).map_err(failed)?.filter(|m| m.fs_type == FS_TYPE);
    let Some(entry) = mounted else {
        return Err(failed(io::Error::other("expected the new mount in /proc/self/mountinfo, found none")));
    };
    Ok((device, Mount { dir: dir.to_path_buf(), device: entry.device, by_helper }))
}

/// Mounts with mount(2). `None` if this process may not mount and `fusermount3` may.
fn mount_directly(dir: &Path, mode: u32) -> Result<Option<OwnedFd>, FuseError> {
    let failed = |source| FuseError::Mount { dir: dir.to_path_buf(), source };
    let (user, group) = (rustix::process::geteuid(), rustix::process::getegid());
    if !user.is_root() {
        return Ok(None);
    }
    let device = OpenOptions::new().read(true).write(true).open("/dev/fuse").map_err(no_fuse)?;
    let data = format!(
        "fd={},rootmode={mode:o},user_id={},group_id={},default_permissions",
        device.as_raw_fd(),
        user.as_raw(),
        group.as_raw()
    );
    let data = CString::new(data).map_err(|e| failed(e.into()))?;
    let flags = MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOEXEC | MountFlags::NOATIME;
    match rustix::mount::mount("ubcache", dir, FS_TYPE, flags, data.as_c_str()) {
        Ok(()) => Ok(Some(device.into())),
        // Root in a container without the right to mount gets this error.
        Err(Errno::PERM | Errno::ACCESS) => Ok(None),
        Err(Errno::NODEV) => Err(no_fuse(io::Error::from(Errno::NODEV))),
        Err(e) => Err(failed(e.into())),
    }
}

/// The message about an error of opening `/dev/fuse`.
pub(crate) fn no_fuse(error: io::Error) -> FuseError {
    let why = match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => {
            "/dev/fuse does not exist or has no driver: load the kernel module (modprobe fuse), or give the \
             container the device"
                .to_string()
        }
        Some(libc::EACCES | libc::EPERM) => "this user may not open /dev/fuse".to_string(),
        _ => format!("/dev/fuse: {error}"),
    };
    FuseError::NoFuse { why, source: error }
}

fn mount_by_helper(dir: &Path) -> Result<OwnedFd, FuseError> {
    let failed = |message: String| FuseError::Helper { dir: dir.to_path_buf(), message };
    let lost = |source: io::Error| FuseError::HelperLost { dir: dir.to_path_buf(), source };
    let (ours, theirs) = UnixStream::pair().map_err(lost)?;
    // The program sends the descriptor to the socket that it finds under this number: its standard input.
    // The command is dropped at once, so that only the program holds the other end.
    let mut child = Command::new(HELPER)
        .arg("-o")
        .arg("fsname=ubcache,subtype=ubcache,default_permissions,nodev,nosuid,noexec")
        .arg("--")
        .arg(dir)
        .env("_FUSE_COMMFD", "0")
        .stdin(OwnedFd::from(theirs))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(helper_missing)?;
    let device = receive_descriptor(&ours);
    // The program ends when the socket is closed.
    drop(ours);
    let mut said = String::new();
    if let Some(mut stderr) = child.stderr.take() {
        // If this fails, the message is incomplete.
        let _ = stderr.read_to_string(&mut said);
    }
    let status = child.wait().map_err(lost)?;
    match device {
        Ok(Some(device)) => Ok(device),
        Ok(None) if said.trim().is_empty() => Err(failed(status.to_string())),
        Ok(None) => Err(failed(said.trim().trim_start_matches("fusermount3: ").to_string())),
        Err(e) => Err(lost(e)),
    }
}

/// The error if the program cannot be started.
pub(crate) fn helper_missing(error: io::Error) -> FuseError {
    let why = match error.kind() {
        io::ErrorKind::NotFound => {
            "fusermount3 is missing; it is needed to mount without CAP_SYS_ADMIN: install the package fuse3"
                .to_string()
        }
        _ => format!("fusermount3 cannot be started: {error}"),
    };
    FuseError::NoFuse { why, source: error }
}

/// Receives a descriptor; `None` if the other end closed the socket without sending one.
fn receive_descriptor(socket: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::io::retry_on_intr(|| {
        recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    if received.bytes == 0 {
        return Ok(None);
    }
    let descriptor = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    Ok(descriptor)
}

impl Mount {
    /// Unmounts the file system, if it is still mounted.
    pub(crate) fn unmount(&self) -> Result<(), FuseError> {
        let failed = |source| FuseError::Unmount { dir: self.dir.clone(), source };
        if !self.is_on_top().map_err(failed)? {
            return Ok(());
        }
        let result = if self.by_helper {
            run_helper(&self.dir, &["-u"])
        } else {
            rustix::mount::unmount(&self.dir, UnmountFlags::NOFOLLOW).map_err(io::Error::from)
        };
        match result {
            Ok(()) => Ok(()),
            Err(e) => {
                let users = users::of_directory(&self.dir);
                if users.is_empty() && e.raw_os_error() != Some(libc::EBUSY) {
                    return Err(failed(e));
                }
                Err(FuseError::FilesInUse { dir: self.dir.clone(), users })
            }
        }
    }

    /// Removes the mount at once, even in use: open requests fail, and the directory is free.
    pub(crate) fn abort(&self) -> io::Result<()> {
        if !self.is_on_top()? {
            return Ok(());
        }
        if self.by_helper {
            return run_helper(&self.dir, &["-u", "-z"]);
        }
        let flags = UnmountFlags::FORCE | UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
        Ok(rustix::mount::unmount(&self.dir, flags)?)
    }

    /// Ends the connection to the kernel, for every mount of the file system.
    pub(crate) fn end_connection(&self) -> io::Result<()> {
        std::fs::write(format!("/sys/fs/fuse/connections/{}/abort", self.device.1), "1")
    }

    fn is_on_top(&self) -> io::Result<bool> {
        // The number alone does not suffice: after this file system has ended, the next one gets its number.
        let top = mountinfo::topmost(&self.dir)?;
        Ok(top.is_some_and(|m| m.device == self.device && m.fs_type == FS_TYPE))
    }
}

/// Unmounts the file system at `dir` without waiting for its users.
pub(crate) fn detach_lazily(dir: &Path) -> io::Result<()> {
    match rustix::mount::unmount(dir, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
        Err(Errno::PERM) => run_helper(dir, &["-u", "-z"]),
        other => Ok(other?),
    }
}

fn run_helper(dir: &Path, arguments: &[&str]) -> io::Result<()> {
    let output = Command::new(HELPER).args(arguments).arg("--").arg(dir).stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_string();
    Err(io::Error::other(if said.is_empty() { output.status.to_string() } else { said }))
}

/// The path of a program, found by its name as a shell does it.
pub(crate) fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_else(|| OsString::from("/usr/bin:/bin"));
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|p| p.is_file())
}
