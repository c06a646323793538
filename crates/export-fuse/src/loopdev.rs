//! Loop devices: a block device over a file.
//!
//! Owns the ioctls of `/dev/loop-control` and `/dev/loopN`. Everything here blocks, and waits for requests
//! to the file to be answered: setting up reads the partition table through it, taking away writes back
//! what the page cache of the block device holds. So nothing of it may run on the thread that answers.
//!
//! For the same reason this process never keeps a loop device open: if it were killed, the kernel would
//! close the device before or after `/dev/fuse` in any order, and write back to a file that is no longer served. Nor does a device clear itself when it is let go of (autoclear), which would be the same moment.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use blockio::users;

use crate::error::FuseError;

const LOOP_CLR_FD: libc::c_ulong = 0x4C01;
const LOOP_GET_STATUS64: libc::c_ulong = 0x4C05;
const LOOP_CONFIGURE: libc::c_ulong = 0x4C0A;
const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4C82;
const BLKDISCARD: libc::c_ulong = 0x1277;

const LO_FLAGS_READ_ONLY: u32 = 1;
const LO_FLAGS_PARTSCAN: u32 = 8;
const LO_FLAGS_DIRECT_IO: u32 = 16;

/// Number of tries if another process takes the free device first.
const RACES: usize = 100;

/// Time limit of processes that probe a device before its removal: udev probes every new one.
const GLANCE: Duration = Duration::from_secs(2);
const GLANCE_STEP: Duration = Duration::from_millis(20);

/// `struct loop_info64`.
#[derive(Clone, Copy)]
#[repr(C)]
struct LoopInfo {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config`.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

const _: () = assert!(size_of::<LoopInfo>() == 232);
const _: () = assert!(size_of::<LoopConfig>() == 304);

const NO_INFO: LoopInfo = LoopInfo {
    device: 0,
    inode: 0,
    rdevice: 0,
    offset: 0,
    size_limit: 0,
    number: 0,
    encrypt_type: 0,
    encrypt_key_size: 0,
    flags: 0,
    file_name: [0; 64],
    crypt_name: [0; 64],
    encrypt_key: [0; 32],
    init: [0; 2],
};

/// A loop device over one of our files. Stays when dropped: see [`LoopDevice::detach`].
pub(crate) struct LoopDevice {
    path: PathBuf,
    /// Device and inode number of the file, by which we know the device again.
    file: (u64, u64),
    direct_io: bool,
}

fn result_of(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Number of a free loop device.
fn get_free(control: &File) -> io::Result<u32> {
    // SAFETY: this request takes no argument; the descriptor is open for the call.
    let number = result_of(unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) })?;
    u32::try_from(number).map_err(io::Error::other)
}

fn configure(device: &File, config: &LoopConfig) -> io::Result<()> {
    // SAFETY: the kernel reads a `struct loop_config`, whose layout is checked above, during the call.
    result_of(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &raw const *config) }).map(drop)
}

fn status(device: &File) -> io::Result<LoopInfo> {
    let mut info = NO_INFO;
    // SAFETY: the kernel writes a `struct loop_info64`, whose layout is checked above, during the call.
    result_of(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_GET_STATUS64, &raw mut info) })?;
    Ok(info)
}

fn clear_fd(device: &File) -> io::Result<()> {
    // SAFETY: this request takes no argument; the descriptor is open for the call.
    result_of(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CLR_FD) }).map(drop)
}

fn is_unbound(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENXIO)
}

/// Takes the file off the loop device at `path`, at once or when the last user lets go of it.
pub(crate) fn clear(path: &Path) -> io::Result<()> {
    // For reading: a descriptor for writing would make udev look at the device when it is closed.
    match clear_fd(&File::open(path)?) {
        Err(e) if is_unbound(&e) => Ok(()),
        other => other,
    }
}

/// Opens `/dev/loop-control`, which only root may.
pub(crate) fn open_control() -> Result<File, FuseError> {
    OpenOptions::new().read(true).write(true).open("/dev/loop-control").map_err(|e| {
        let why = match e.raw_os_error() {
            Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => {
                "/dev/loop-control does not exist or has no driver: load the kernel module (modprobe loop), \
                 or give the container the devices"
                    .to_string()
            }
            Some(libc::EACCES | libc::EPERM) => "this user may not open /dev/loop-control".to_string(),
            _ => format!("/dev/loop-control: {e}"),
        };
        FuseError::NoLoop { why, source: e }
    })
}

impl LoopDevice {
    /// A block device over `file`, with logical blocks of `block_bytes`.
    pub(crate) fn attach(file: &Path, block_bytes: u32, read_only: bool) -> Result<LoopDevice, FuseError> {
        let at = |device: &Path, step| {
            let device = device.to_path_buf();
            move |source| FuseError::Loop { device, step, source }
        };
        let control = open_control()?;
        let backing = OpenOptions::new()
            .read(true)
            .write(!read_only)
            .custom_flags(libc::O_DIRECT)
            .open(file)
            .map_err(at(file, "opening it for a loop device"))?;
        let mut info = NO_INFO;
        info.flags = LO_FLAGS_DIRECT_IO | LO_FLAGS_PARTSCAN;
        if read_only {
            info.flags |= LO_FLAGS_READ_ONLY;
        }
        let name = file.as_os_str().as_encoded_bytes();
        let shown = name.len().min(info.file_name.len() - 1);
        info.file_name[..shown].copy_from_slice(&name[..shown]);
        // A descriptor is never negative.
        let fd = backing.as_raw_fd().cast_unsigned();
        let config = LoopConfig { fd, block_size: block_bytes, info, reserved: [0; 8] };
        for _ in 0..RACES {
            let number = get_free(&control).map_err(at(file, "asking for a free loop device"))?;
            let path = PathBuf::from(format!("/dev/loop{number}"));
            let device = match OpenOptions::new().read(true).write(true).open(&path) {
                // Taken and removed again by somebody else.
                Err(e) if is_unbound(&e) => continue,
                other => other.map_err(at(&path, "opening it"))?,
            };
            match configure(&device, &config) {
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) => continue,
                other => other.map_err(at(&path, "setting it up (LOOP_CONFIGURE, Linux 5.8 or later)"))?,
            }
            let status = status(&device).map_err(at(&path, "asking for its state"))?;
            return Ok(LoopDevice {
                path,
                file: (status.device, status.inode),
                direct_io: status.flags & LO_FLAGS_DIRECT_IO != 0,
            });
        }
        let source = io::Error::from_raw_os_error(libc::EBUSY);
        Err(FuseError::Loop { device: file.to_path_buf(), step: "finding a free loop device", source })
    }

    /// `/dev/loopN`.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether requests go to the file as they are, many at a time. If not, the kernel's driver carries
    /// them out one by one.
    pub(crate) fn has_direct_io(&self) -> bool {
        self.direct_io
    }

    /// Lets the kernel find out that the file takes no discards: it offers them until the first one was
    /// refused. Only for a file that refuses them. (Not by the limit in sysfs, which outlives the device
    /// and would be there for the next file on it.)
    pub(crate) fn try_discard(&self) -> io::Result<()> {
        let device = OpenOptions::new().write(true).open(&self.path)?;
        let range: [u64; 2] = [0, 4096];
        // SAFETY: the kernel reads two numbers of 64 bits during the call.
        result_of(unsafe { libc::ioctl(device.as_raw_fd(), BLKDISCARD, range.as_ptr()) }).map(drop)
    }

    /// Writes back what the page cache holds and takes the file off the device, if nobody uses it. The
    /// kernel lets go of the file soon after.
    ///
    /// `waits`: whether the caller still waits.
    pub(crate) fn detach(&self, waits: &dyn Fn() -> bool) -> Result<(), FuseError> {
        let failed = |step| {
            let device = self.path.clone();
            move |source| FuseError::Loop { device, step, source }
        };
        self.refuse_users(waits)?;
        let mut options = OpenOptions::new();
        // Exclusive: nobody mounts it from here on.
        let device = match options.read(true).custom_flags(libc::O_EXCL).open(&self.path) {
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {
                let users = users::of_block_device(&self.name());
                return Err(FuseError::LoopInUse { device: self.path.clone(), users });
            }
            other => other.map_err(failed("opening it"))?,
        };
        if !self.is_ours(&device).map_err(failed("asking for its state"))? {
            return Ok(());
        }
        device.sync_all().map_err(failed("writing back"))?;
        clear_fd(&device).map_err(failed("detaching its file"))
    }

    /// Detaches the file from the device without a check for users. Returns the users.
    pub(crate) fn abandon(&self) -> io::Result<Vec<users::User>> {
        let users = users::of_block_device(&self.name());
        let device = File::open(&self.path)?;
        if self.is_ours(&device)? {
            clear_fd(&device)?;
        }
        Ok(users)
    }

    /// Waits a moment for processes that probe the device, then refuses.
    pub(crate) fn refuse_users(&self, waits: &dyn Fn() -> bool) -> Result<(), FuseError> {
        let deadline = Instant::now() + GLANCE;
        loop {
            let users = users::of_block_device(&self.name());
            let lasting = users.iter().any(|u| !matches!(u, users::User::Process { .. }));
            if users.is_empty() {
                return Ok(());
            }
            if lasting || Instant::now() >= deadline || !waits() {
                return Err(FuseError::LoopInUse { device: self.path.clone(), users });
            }
            std::thread::sleep(GLANCE_STEP);
        }
    }

    fn is_ours(&self, device: &File) -> io::Result<bool> {
        match status(device) {
            Ok(info) => Ok((info.device, info.inode) == self.file),
            Err(e) if is_unbound(&e) => Ok(false),
            Err(e) => Err(e),
        }
    }

    fn name(&self) -> String {
        self.path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default()
    }
}
