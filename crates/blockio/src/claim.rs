//! Opens a device and claims it, so that no other process writes to it at the same time.
//!
//! Owns the rules of exclusion:
//!
//! * A block device opened for writing is claimed with `O_EXCL`, which also keeps mounts, md, device
//!   mapper and the kernel's own bcache off, and is refused while one of them holds it.
//! * A loop device, and a device that is built on one, is refused while a process has a lock on the file below it. Its claim
//!   covers the part of the file below, so that other loop devices on the same file are refused (`below`).
//! * A file opened for writing is locked with flock(2) exclusively, and refused while a loop device uses it.
//! * A read-only opening takes a shared lock on a file. On a block device it only checks for a claim, because `O_EXCL` would
//!   exclude other readers; the check holds the claim for a moment.
//! * [`Claim::None`] skips all of it, for tools that read a device in use by request.
//!
//! A claim lasts as long as the file is open.

use std::fs::{File, FileType};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ::io::DeviceInfo;
use rustix::fs::FlockOperation;

use crate::below;
use crate::holder::{self, Holder, Lock};
use crate::info;
use crate::loops;
use crate::write_cache::WriteCache;

/// Number of tries to claim a device with a holder that is not lasting.
///
/// udev and blkid open devices for a few milliseconds after each change, and so do read-only openings of this module.
const TRIES: u32 = 10;
/// Number of tries to claim a device while no holder is found.
///
/// A killed process holds its devices until its requests in flight have ended.
const TRIES_AFTER_A_CRASH: u32 = 250;
const BETWEEN_TRIES: Duration = Duration::from_millis(20);

/// The access to a device.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Access {
    /// Reading and writing.
    #[default]
    ReadWrite,
    /// Only reading.
    ReadOnly,
}

/// How a device is claimed, so that other processes cannot use it.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Claim {
    /// Exclusive when opened for writing, shared with other readers otherwise.
    #[default]
    ByAccess,
    /// No claim. Only for reading; the data may change during the reads.
    None,
}

/// Options for the opening of a device.
#[derive(Clone, Copy, Default, Debug)]
pub struct OpenOptions {
    /// Whether the device is opened for reading only, or also for writing.
    pub access: Access,
    /// How the device is claimed.
    pub claim: Claim,
    /// Uses the page cache even if direct I/O is possible.
    pub buffered: bool,
    /// Makes the device refuse requests that are not in whole blocks of this size: 512 or 4096, and not below the device's own.
    ///
    /// It is meant for regular files.
    pub logical_block_bytes: Option<u32>,
}

/// Why a device could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another process or the kernel uses the device.
    #[error("{}: in use{}", path.display(), by(holder))]
    InUse {
        /// The device.
        path: PathBuf,
        /// Description of the user, if it was found.
        holder: Option<String>,
    },
    /// The block device takes no writes.
    #[error("{} is read-only", path.display())]
    ReadOnly {
        /// The device.
        path: PathBuf,
    },
    /// It is neither a block device nor a regular file.
    #[error("{}: expected a block device or a regular file, found {found}", path.display())]
    WrongType {
        /// The path.
        path: PathBuf,
        /// The type of the file.
        found: &'static str,
    },
    /// The requested logical block size is not possible.
    #[error("{}: logical blocks of {wanted} bytes are not possible: {why}", path.display())]
    BlockSize {
        /// The device.
        path: PathBuf,
        /// The requested size, in bytes.
        wanted: u32,
        /// The reason.
        why: String,
    },
    /// The system refused.
    #[error("{}: {action}: {source}", path.display())]
    System {
        /// The device.
        path: PathBuf,
        /// The failed action.
        action: &'static str,
        /// The error of the system.
        source: io::Error,
    },
}

fn by(holder: &Option<String>) -> String {
    holder.as_ref().map(|h| format!(" by {h}")).unwrap_or_default()
}

/// An open and claimed device.
pub(crate) struct Opened {
    pub(crate) file: OwnedFd,
    /// The claims of files and disks below the device.
    #[allow(dead_code, reason = "the claims last as long as the files are open")]
    pub(crate) below: Vec<File>,
    pub(crate) info: DeviceInfo,
    pub(crate) is_block: bool,
    /// Whether the device is a regular file of a file system in memory.
    pub(crate) in_memory: bool,
    /// Whether the device is a regular file of a file system that another process or host serves.
    pub(crate) served_by_others: bool,
    pub(crate) read_only: bool,
    /// Whether I/O bypasses the page cache.
    pub(crate) direct: bool,
    /// Alignment of memory that direct I/O needs.
    pub(crate) memory_align_bytes: usize,
    /// For a block device that is written without the page cache, if sysfs has the attribute.
    pub(crate) write_cache: Option<WriteCache>,
    /// Unusual properties, for the log.
    pub(crate) note: Option<String>,
}

pub(crate) fn open(path: &Path, options: &OpenOptions) -> Result<Opened, OpenError> {
    let system = |action| move |source| OpenError::System { path: path.to_path_buf(), action, source };
    let meta = std::fs::metadata(path).map_err(system("cannot be examined"))?;
    let kind = meta.file_type();
    let is_block = kind.is_block_device();
    if !is_block && !kind.is_file() {
        return Err(OpenError::WrongType { path: path.to_path_buf(), found: type_name(kind) });
    }
    // Root can open such a device for writing; then each write fails.
    if is_block && options.access == Access::ReadWrite && info::is_read_only(&info::sysfs_dir(meta.rdev())) {
        return Err(OpenError::ReadOnly { path: path.to_path_buf() });
    }
    let (file, direct_refused, below) = if is_block {
        open_block(path, options, meta.rdev())?
    } else {
        let (file, direct_refused) = open_file(path, options, &meta)?;
        (file, direct_refused, Vec::new())
    };

    let read_only = options.access == Access::ReadOnly;
    let name: Arc<str> = path.display().to_string().into();
    let direct = !options.buffered && !direct_refused;
    let alignment = if direct { info::direct_alignment(file.as_fd()) } else { None };
    let memory_align_bytes = alignment.map_or(512, |(memory, _)| memory.max(1) as usize);
    let mut info = if is_block {
        info::of_block_device(file.as_fd(), meta.rdev(), name)
            .map_err(|e| system("its size cannot be read")(e.into()))?
    } else {
        // The size is taken from the open file, because the path may name another file by now.
        let bytes = file.metadata().map_err(system("its size cannot be read"))?.len();
        let smallest = alignment.map_or(512, |(_, offset)| offset.max(512));
        let file = info::RegularFile { fd: file.as_fd(), bytes, dev: meta.dev(), writable: !read_only };
        file.info(smallest, name)
    };
    if let Some(wanted) = options.logical_block_bytes {
        set_block_size(path, &mut info, wanted)?;
    }
    let note = direct_refused
        .then(|| "direct I/O is not supported here: I/O goes through the page cache".to_string());
    let in_memory = !is_block && info::is_in_memory(file.as_fd());
    let served_by_others = !is_block && info::is_served_by_others(file.as_fd());
    let write_cache =
        (is_block && direct).then(|| WriteCache::of_queue(&info::queue_dir(meta.rdev()))).flatten();
    let file = file.into();
    Ok(Opened {
        file,
        below,
        info,
        is_block,
        in_memory,
        served_by_others,
        read_only,
        direct,
        memory_align_bytes,
        write_cache,
        note,
    })
}

/// The name of a file type that is neither a block device nor a regular file.
fn type_name(kind: FileType) -> &'static str {
    match kind {
        k if k.is_dir() => "a directory",
        k if k.is_char_device() => "a character device",
        k if k.is_socket() => "a socket",
        k if k.is_fifo() => "a pipe",
        _ => "something else",
    }
}

/// Gives the device logical blocks of `wanted` bytes, which must not be smaller than its own.
fn set_block_size(path: &Path, info: &mut DeviceInfo, wanted: u32) -> Result<(), OpenError> {
    let refuse = |why: String| OpenError::BlockSize { path: path.to_path_buf(), wanted, why };
    if wanted != 512 && wanted != 4096 {
        return Err(refuse("expected 512 or 4096".into()));
    }
    if wanted < info.logical_block_bytes {
        return Err(refuse(format!("the device has blocks of {} bytes", info.logical_block_bytes)));
    }
    let block_sectors = u64::from(wanted) / format::SECTOR_BYTES;
    info.logical_block_bytes = wanted;
    info.physical_block_bytes = info.physical_block_bytes.max(wanted);
    info.sectors = format::Sectors(info.sectors.0 / block_sectors * block_sectors);
    Ok(())
}

fn raw_open(path: &Path, options: &OpenOptions, flags: i32) -> io::Result<File> {
    let write = options.access == Access::ReadWrite;
    let file = File::options().read(true).write(write).custom_flags(libc::O_CLOEXEC | flags).open(path)?;
    // The access time of a cached device is not needed. A process that is neither its owner nor root may not set
    // this flag, so a failure is ignored.
    if let Ok(now) = rustix::fs::fcntl_getfl(&file) {
        let _ = rustix::fs::fcntl_setfl(&file, now | rustix::fs::OFlags::NOATIME);
    }
    Ok(file)
}

/// Opens with `O_DIRECT` unless the options exclude it or the file system refuses it; true beside the file if it was refused.
fn open_direct(path: &Path, options: &OpenOptions, flags: i32) -> io::Result<(File, bool)> {
    if !options.buffered {
        match raw_open(path, options, flags | libc::O_DIRECT) {
            // File systems without direct I/O return this error.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {}
            result => return result.map(|f| (f, false)),
        }
    }
    raw_open(path, options, flags).map(|f| (f, !options.buffered))
}

/// Opens and claims a block device. Beside the file it returns whether direct I/O was refused, and the claims of what lies
/// below the device.
fn open_block(path: &Path, options: &OpenOptions, rdev: u64) -> Result<(File, bool, Vec<File>), OpenError> {
    let system = |source| OpenError::System { path: path.to_path_buf(), action: "cannot be opened", source };
    let exclusive = |options: &OpenOptions| {
        retry(
            path,
            || open_direct(path, options, libc::O_EXCL),
            libc::EBUSY,
            || holder::of_block_device(rdev),
        )
    };
    let (file, refused) = match (options.claim, options.access) {
        (Claim::None, _) => {
            let (file, refused) = open_direct(path, options, 0).map_err(system)?;
            return Ok((file, refused, Vec::new()));
        }
        (Claim::ByAccess, Access::ReadWrite) => exclusive(options)?,
        (Claim::ByAccess, Access::ReadOnly) => {
            drop(exclusive(options)?);
            open_direct(path, options, 0).map_err(system)?
        }
    };
    let writes = options.access == Access::ReadWrite;
    if let Some(holder) = loops::locked_below(rdev, writes) {
        return Err(OpenError::InUse { path: path.to_path_buf(), holder: Some(holder.who) });
    }
    let others = || Some(Holder { who: "another device on the same file or disk".into(), lasting: false });
    let below = retry(path, || below::claim(rdev, writes), libc::EWOULDBLOCK, others)?;
    // Like the claim of the device itself, that of a reader ends at once.
    Ok((file, refused, if writes { below } else { Vec::new() }))
}

fn open_file(
    path: &Path,
    options: &OpenOptions,
    meta: &std::fs::Metadata,
) -> Result<(File, bool), OpenError> {
    let system = |action| move |source| OpenError::System { path: path.to_path_buf(), action, source };
    let (file, refused) = open_direct(path, options, 0).map_err(system("cannot be opened"))?;
    let operation = match (options.claim, options.access) {
        (Claim::None, _) => return Ok((file, refused)),
        (Claim::ByAccess, Access::ReadWrite) => FlockOperation::NonBlockingLockExclusive,
        (Claim::ByAccess, Access::ReadOnly) => FlockOperation::NonBlockingLockShared,
    };
    if options.access == Access::ReadWrite
        && let Some(device) = loops::device_on(path, meta)
    {
        return Err(OpenError::InUse { path: path.to_path_buf(), holder: Some(device) });
    }
    let lock = || Ok(rustix::fs::flock(&file, operation)?);
    retry(path, lock, libc::EWOULDBLOCK, || holder::of_locked_file(meta, Lock::Any))?;
    Ok((file, refused))
}

/// Repeats `attempt` while it fails with `busy` and `holder` finds no lasting holder.
///
/// # Errors
/// `InUse` if a lasting holder is found or the tries are used up, `System` for every other failure.
fn retry<T>(
    path: &Path,
    attempt: impl Fn() -> io::Result<T>,
    busy: i32,
    holder: impl Fn() -> Option<Holder>,
) -> Result<T, OpenError> {
    let mut tries = 0;
    loop {
        match attempt() {
            Err(e) if e.raw_os_error() == Some(busy) => {
                let holder = holder();
                tries += 1;
                let enough = if holder.is_some() { TRIES } else { TRIES_AFTER_A_CRASH };
                if tries >= enough || holder.as_ref().is_some_and(|h| h.lasting) {
                    let holder = holder.map(|h| h.who);
                    return Err(OpenError::InUse { path: path.to_path_buf(), holder });
                }
                std::thread::sleep(BETWEEN_TRIES);
            }
            Err(source) => {
                return Err(OpenError::System {
                    path: path.to_path_buf(),
                    action: "cannot be opened",
                    source,
                });
            }
            Ok(value) => return Ok(value),
        }
    }
}
