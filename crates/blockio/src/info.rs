//! Properties of a device, from ioctls and sysfs.
//!
//! Owns the mapping from an open file to [`DeviceInfo`]. Ioctls give the properties that correctness needs: size and block
//! sizes. sysfs gives advice: rotational, discard, RAID. sysfs may be missing (containers); an unknown property then has the
//! harmless value. Must not know what uses the properties.

use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ::io::DeviceInfo;
use format::Sectors;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

// `include/uapi/linux/fs.h`. BLKGETSIZE64 is `_IOR(0x12, 114, size_t)`, the others `_IO(0x12, n)`.
const BLKGETSIZE64: libc::c_ulong = 0x8008_1272;
const BLKSSZGET: libc::c_ulong = 0x1268;
const BLKIOOPT: libc::c_ulong = 0x1279;
const BLKPBSZGET: libc::c_ulong = 0x127b;

/// Maximum depth of stacked devices (dm on md on partitions) that is followed.
const MAX_STACK: u32 = 8;

fn ioctl_number<T: Default>(fd: BorrowedFd<'_>, request: libc::c_ulong) -> Result<T, Errno> {
    let mut value = T::default();
    // SAFETY: each request above writes one number of the type with which it is called, and only to `value`, which outlives
    // the call.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), request, &raw mut value) };
    if result < 0 {
        let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
        return Err(Errno::from_raw_os_error(errno));
    }
    Ok(value)
}

/// The directory of a block device in sysfs.
pub(crate) fn sysfs_dir(rdev: u64) -> PathBuf {
    let (major, minor) = (rustix::fs::major(rdev), rustix::fs::minor(rdev));
    PathBuf::from(format!("/sys/dev/block/{major}:{minor}"))
}

/// Whether the block device whose directory in sysfs is `dir` takes no writes.
pub(crate) fn is_read_only(dir: &Path) -> bool {
    read_number(&dir.join("ro")) == Some(1)
}

/// The directory of the whole disk of which `dir` may be a partition.
pub(crate) fn whole_disk(dir: &Path) -> PathBuf {
    if dir.join("partition").exists() { dir.join("..") } else { dir.to_path_buf() }
}

/// The directory of a block device's request queue in sysfs.
pub(crate) fn queue_dir(rdev: u64) -> PathBuf {
    whole_disk(&sysfs_dir(rdev)).join("queue")
}

pub(crate) fn read_number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The directory `dir` of a block device, and those of all devices that it is built on, as whole disks.
pub(crate) fn lower_devices(dir: &Path) -> Vec<PathBuf> {
    let mut found = vec![whole_disk(dir)];
    let mut of_level = 0..1;
    for _ in 0..MAX_STACK {
        let next = found.len();
        let level: Vec<PathBuf> = found.get(of_level).unwrap_or_default().to_vec();
        for slaves in level.iter().filter_map(|d| fs::read_dir(d.join("slaves")).ok()) {
            found.extend(slaves.flatten().map(|s| whole_disk(&s.path())));
        }
        of_level = next..found.len();
    }
    found
}

/// Whether `dir` is a RAID 4/5/6 array or is built on one.
fn stands_on_parity_raid(dir: &Path) -> bool {
    lower_devices(dir).iter().any(|d| {
        let level = fs::read_to_string(d.join("md/level"));
        level.is_ok_and(|l| matches!(l.trim(), "raid4" | "raid5" | "raid6"))
    })
}

/// The properties of the block device `fd`.
pub(crate) fn of_block_device(fd: BorrowedFd<'_>, rdev: u64, name: Arc<str>) -> Result<DeviceInfo, Errno> {
    let bytes: u64 = ioctl_number(fd, BLKGETSIZE64)?;
    let logical: i32 = ioctl_number(fd, BLKSSZGET)?;
    let logical_block_bytes = u32::try_from(logical).unwrap_or(512).max(512);
    let physical = ioctl_number::<u32>(fd, BLKPBSZGET).unwrap_or(logical_block_bytes);
    let optimal = ioctl_number::<u32>(fd, BLKIOOPT).unwrap_or(0);
    let (dir, queue) = (sysfs_dir(rdev), queue_dir(rdev));
    Ok(DeviceInfo {
        name,
        sectors: whole_blocks(bytes, logical_block_bytes),
        logical_block_bytes,
        physical_block_bytes: physical.max(logical_block_bytes),
        optimal_io_bytes: optimal,
        rotational: read_number(&queue.join("rotational")) == Some(1),
        discard: read_number(&queue.join("discard_max_bytes")).unwrap_or(0) > 0,
        sparse: false,
        partial_stripes_expensive: stands_on_parity_raid(&dir),
    })
}

/// The properties of an open regular file that its device needs.
pub(crate) struct RegularFile<'a> {
    pub(crate) fd: BorrowedFd<'a>,
    /// Size of the file.
    pub(crate) bytes: u64,
    /// Number of the device that its file system lies on.
    pub(crate) dev: u64,
    /// Whether the file is open for writing.
    pub(crate) writable: bool,
}

impl RegularFile<'_> {
    /// The properties of the file as a device with blocks of `logical_block_bytes`.
    pub(crate) fn info(&self, logical_block_bytes: u32, name: Arc<str>) -> DeviceInfo {
        let (dir, queue) = (sysfs_dir(self.dev), queue_dir(self.dev));
        DeviceInfo {
            name,
            sectors: whole_blocks(self.bytes, logical_block_bytes),
            logical_block_bytes,
            physical_block_bytes: logical_block_bytes.max(4096),
            optimal_io_bytes: 0,
            rotational: read_number(&queue.join("rotational")) == Some(1),
            discard: self.writable && punches_holes(self.fd, self.bytes),
            sparse: has_holes(self.fd, self.bytes),
            partial_stripes_expensive: stands_on_parity_raid(&dir),
        }
    }
}

fn whole_blocks(bytes: u64, logical_block_bytes: u32) -> Sectors {
    let block = u64::from(logical_block_bytes);
    Sectors::from_bytes_floor(bytes / block * block)
}

/// Whether the regular file `fd` lies in a file system in memory (tmpfs, ramfs).
pub(crate) fn is_in_memory(fd: BorrowedFd<'_>) -> bool {
    /// `include/uapi/linux/magic.h`.
    const TMPFS_MAGIC: i64 = 0x0102_1994;
    const RAMFS_MAGIC: i64 = 0x8584_58f6;
    rustix::fs::fstatfs(fd).is_ok_and(|s| {
        [TMPFS_MAGIC, RAMFS_MAGIC].iter().any(|&magic| s.f_type == magic as rustix::fs::FsWord)
    })
}

/// Whether another process or host serves the file system of the regular file `fd`.
///
/// The submission of a request to such a file system can wait without limit, in spite of flags that forbid to wait.
pub(crate) fn is_served_by_others(fd: BorrowedFd<'_>) -> bool {
    /// `include/uapi/linux/magic.h`: FUSE, NFS, SMB (both), 9P, Ceph, AFS, Coda.
    const MAGICS: [u64; 8] =
        [0x6573_5546, 0x6969, 0xff53_4d42, 0xfe53_4d42, 0x0102_1997, 0x00c3_6400, 0x5346_414f, 0x7375_7245];
    rustix::fs::fstatfs(fd).is_ok_and(|s| MAGICS.iter().any(|&magic| s.f_type == magic as rustix::fs::FsWord))
}

/// Whether the regular file `fd` has less space allocated than its size. False if the system does not report it.
fn has_holes(fd: BorrowedFd<'_>, bytes: u64) -> bool {
    // `st_blocks` counts units of 512 bytes for every file system.
    rustix::fs::fstat(fd).is_ok_and(|stat| (stat.st_blocks as u64).saturating_mul(512) < bytes)
}

/// Tests whether the file system punches holes, by a hole after the end of the file.
fn punches_holes(fd: BorrowedFd<'_>, bytes: u64) -> bool {
    let behind = bytes.next_multiple_of(1 << 20);
    rustix::fs::fallocate(fd, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, behind, 4096).is_ok()
}

/// The alignment of memory and of offsets that direct I/O on `fd` needs, in bytes.
///
/// `None` if the kernel does not report it (before Linux 6.1) or direct I/O is not supported.
pub(crate) fn direct_alignment(fd: BorrowedFd<'_>) -> Option<(u32, u32)> {
    /// `STATX_DIOALIGN`, `include/uapi/linux/stat.h`.
    const DIOALIGN: u32 = 0x2000;
    // SAFETY: all zeros is a valid value of this plain C struct, which the call fills.
    let mut buf: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the empty path with AT_EMPTY_PATH names the descriptor itself. `buf` is a live struct of the type that the
    // call fills.
    let result = unsafe {
        libc::statx(fd.as_fd().as_raw_fd(), c"".as_ptr(), libc::AT_EMPTY_PATH, DIOALIGN, &raw mut buf)
    };
    let reported = result == 0 && buf.stx_mask & DIOALIGN != 0 && buf.stx_dio_offset_align != 0;
    reported.then_some((buf.stx_dio_mem_align, buf.stx_dio_offset_align))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Makes directories like those of sysfs, for machines without the hardware.
    #[test]
    fn parity_raid_is_found_through_partitions_and_stacks() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        put(root, "md5/md/level", "raid5\n");
        put(root, "md1/md/level", "raid1\n");
        put(root, "sda/queue/rotational", "1\n");
        put(root, "md5/md5p1/partition", "1\n");
        let slave = |of: &str, on: &str| {
            let to = root.join(of).join("slaves");
            fs::create_dir_all(&to).unwrap();
            std::os::unix::fs::symlink(root.join(on), to.join(on.rsplit('/').next().unwrap())).unwrap();
        };
        slave("dm-0", "md5/md5p1");
        slave("dm-1", "dm-0");
        slave("dm-2", "md1");
        slave("dm-2", "sda");
        slave("loop-a", "loop-b");
        slave("loop-b", "loop-a");
        let found = |name: &str| stands_on_parity_raid(&root.join(name));
        assert!(found("md5") && found("md5/md5p1") && found("dm-0") && found("dm-1"));
        assert!(!found("md1") && !found("sda") && !found("dm-2") && !found("missing"));
        assert!(!found("loop-a"), "a circle ends");
    }

    #[test]
    fn sizes_are_whole_blocks() {
        assert_eq!(whole_blocks(4096 * 3 + 512, 4096), Sectors(24));
        assert_eq!(whole_blocks(1023, 512), Sectors(1));
    }
}
