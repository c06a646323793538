//! Loop devices: a block device over a file.
//!
//! Owns the ioctls of `/dev/loop-control` and `/dev/loopN`. Every function blocks, and waits for requests to the file: the setup
//! reads the partition table through the file, and the removal writes back the page cache of the block device. So no function
//! may run on the thread that answers these requests.
//!
//! For the same reason this process never keeps a loop device open. If the process were killed, the kernel would close the
//! device and `/dev/fuse` in any order, and could write back to a file that is no longer served. Devices also do not use
//! autoclear, because that would have the same effect.

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

/// Longest time that the removal of a device waits for processes that probe it. udev probes every new device.
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

/// A loop device over a file of this export. It is not removed when dropped: see [`LoopDevice::detach`].
pub(crate) struct LoopDevice {
    path: PathBuf,
    /// Device and inode number of the file, which identify the loop device later.
    file: (u64, u64),
    direct_io: bool,
}

fn result_of(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Number of a free loop device.
fn get_free(control: &File) -> io::Result<u32> {
    // SAFETY: the request takes no argument, so it accesses no memory. The descriptor is open during the call.
    let number = result_of(unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) })?;
    u32::try_from(number).map_err(io::Error::other)
}

fn configure(device: &File, config: &LoopConfig) -> io::Result<()> {
    // SAFETY: during the call, the kernel reads a `struct loop_config`, whose layout is checked above, from a live value.
    result_of(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &raw const *config) }).map(drop)
}

fn status(device: &File) -> io::Result<LoopInfo> {
    let mut info = NO_INFO;
    // SAFETY: during the call, the kernel writes a `struct loop_info64`, whose layout is checked above, to a live value.
    result_of(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_GET_STATUS64, &raw mut info) })?;
    Ok(info)
}

fn clear_fd(device: &File) -> io::Result<()> {
    // SAFETY: the request takes no argument, so it accesses no memory. The descriptor is open during the call.
    result_of(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CLR_FD) }).map(drop)
}

fn is_unbound(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENXIO)
}

/// Detaches the file from the loop device at `path`, at once or when the last user closes the device.
pub(crate) fn clear(path: &Path) -> io::Result<()> {
    // Opened for reading, because udev probes a device when a descriptor for writing is closed.
    match clear_fd(&File::open(path)?) {
        Err(e) if is_unbound(&e) => Ok(()),
        other => other,
    }
}

/// Opens `/dev/loop-control`. Only root may do so.
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
    /// Sets up a block device over `file`, with logical blocks of `block_bytes`.
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
                // Another process has taken the device and removed it again.
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

    /// The path `/dev/loopN`.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the device passes requests to the file with direct I/O, many at a time.
    ///
    /// Otherwise the kernel's driver carries them out one by one.
    pub(crate) fn has_direct_io(&self) -> bool {
        self.direct_io
    }

    /// Makes the kernel detect that the file refuses discards. The kernel offers discards until the file refuses the first one.
    ///
    /// Only for a file that refuses them. The limit in sysfs is not used for this, because it outlives the device and would
    /// apply to the next file on it.
    pub(crate) fn try_discard(&self) -> io::Result<()> {
        let device = OpenOptions::new().write(true).open(&self.path)?;
        let range: [u64; 2] = [0, 4096];
        // SAFETY: during the call, the kernel reads two numbers of 64 bits from the live array `range`.
        result_of(unsafe { libc::ioctl(device.as_raw_fd(), BLKDISCARD, range.as_ptr()) }).map(drop)
    }

    /// Writes the page cache back and detaches the file from the device, if the device has no users.
    ///
    /// The kernel closes the file soon after. `waits` tells whether the caller still waits.
    pub(crate) fn detach(&self, waits: &dyn Fn() -> bool) -> Result<(), FuseError> {
        let failed = |step| {
            let device = self.path.clone();
            move |source| FuseError::Loop { device, step, source }
        };
        self.refuse_users(waits)?;
        let mut options = OpenOptions::new();
        // The exclusive open prevents mounts from here on.
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

    /// Detaches the file from the device even if the device is in use. Returns the users.
    pub(crate) fn abandon(&self) -> io::Result<Vec<users::User>> {
        let users = users::of_block_device(&self.name());
        let device = File::open(&self.path)?;
        if self.is_ours(&device)? {
            clear_fd(&device)?;
        }
        Ok(users)
    }

    /// Waits up to 2 s for processes that probe the device, then refuses if it still has users.
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
