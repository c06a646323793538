//! The file system: one directory with one file per volume.
//!
//! Owns names, inode numbers and attributes. A request that needs no volume is answered at once on the session's thread. Every
//! other request goes with its reply to the volume's thread (module `service`), so the session's thread is free for the next
//! request. Must not know how the file system is mounted.
//!
//! Files are opened with direct I/O: the kernel keeps no page of them. So a reader of a file gets the volume's data, and the
//! page cache exists only once, above the loop device. The size of a file is fixed. O_TRUNC does not change it, as on a block
//! device.

use std::ffi::OsStr;
use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use blockio::bridge::RemoteSender;
use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, OpenAccMode, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEmpty,
    ReplyEntry, ReplyIoctl, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};

use crate::error::FuseError;
use crate::hole::PunchHole;
use crate::service::{Job, Served};
use crate::spare::Spare;

/// The limits of the requests of a file system, which bound the memory that they take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RequestLimits {
    /// Largest request in bytes.
    request_bytes: u32,
    /// Maximum number of asynchronous requests under way.
    background: u16,
}

impl Default for RequestLimits {
    fn default() -> RequestLimits {
        RequestLimits { request_bytes: MAX_REQUEST_BYTES, background: MAX_BACKGROUND }
    }
}

impl RequestLimits {
    /// The limits of a file system whose requests under way may take this much memory.
    pub fn within(bytes: u64) -> RequestLimits {
        let size = bytes / u64::from(LEAST_BACKGROUND) / u64::from(LEAST_REQUEST_BYTES)
            * u64::from(LEAST_REQUEST_BYTES);
        let size = size.clamp(u64::from(LEAST_REQUEST_BYTES), u64::from(MAX_REQUEST_BYTES));
        let background = (bytes / size).clamp(u64::from(LEAST_BACKGROUND), u64::from(MAX_BACKGROUND));
        RequestLimits {
            request_bytes: u32::try_from(size).unwrap_or(MAX_REQUEST_BYTES),
            background: u16::try_from(background).unwrap_or(MAX_BACKGROUND),
        }
    }
}

/// The limits are not lower than these, whatever the memory.
const LEAST_REQUEST_BYTES: u32 = 128 << 10;
const LEAST_BACKGROUND: u16 = 8;

/// Largest request; the kernel reduces it to what it supports.
///
/// The limit counts pages. Requests from memory that does not begin at a page are shorter and may end within a sector; loop
/// devices never send such requests.
const MAX_REQUEST_BYTES: u32 = 1 << 20;

/// Maximum number of asynchronous requests under way in the whole file system: enough for four loop devices.
const MAX_BACKGROUND: u16 = 512;

/// Time for which the kernel may use names and attributes without a request.
///
/// They do not change while the file system is mounted. The time is short, so that a file system whose process has ended
/// does not look alive.
const TTL: Duration = Duration::from_secs(1);

/// Unit of the block counts, and the granularity of a loop device's discards.
const BLOCK_BYTES: u32 = 4096;

struct File {
    name: String,
    bytes: u64,
    read_only: bool,
    punch_hole: PunchHole,
    jobs: RemoteSender<Job>,
    spare: Arc<Spare>,
}

/// The file system of one mount.
pub(crate) struct VolumeFs {
    /// The files. The inode number of a file is its index plus [`FIRST_INODE`].
    files: Vec<File>,
    owner: (u32, u32),
    since: SystemTime,
    limits: RequestLimits,
}

/// Inode number of the first file; number 1 is the directory.
const FIRST_INODE: u64 = 2;

impl VolumeFs {
    /// A file system with a file for each of `volumes`.
    pub(crate) fn new(volumes: &[Served]) -> Result<VolumeFs, FuseError> {
        let mut files: Vec<File> = Vec::with_capacity(volumes.len());
        for v in volumes {
            if v.name.is_empty() || v.name == "." || v.name == ".." || v.name.len() > 255 {
                return Err(FuseError::BadName(v.name.clone()));
            }
            if v.name.contains(['/', '\0']) {
                return Err(FuseError::BadName(v.name.clone()));
            }
            if files.iter().any(|f| f.name == v.name) {
                return Err(FuseError::NameTaken(v.name.clone()));
            }
            files.push(File {
                name: v.name.clone(),
                bytes: v.bytes,
                read_only: v.read_only,
                punch_hole: v.punch_hole,
                jobs: v.jobs.clone(),
                spare: v.spare.clone(),
            });
        }
        let owner = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        Ok(VolumeFs { files, owner, since: SystemTime::now(), limits: RequestLimits::default() })
    }

    /// The file system with these limits of its requests.
    pub(crate) fn limited(self, limits: RequestLimits) -> VolumeFs {
        VolumeFs { limits, ..self }
    }

    fn file(&self, inode: INodeNo) -> Option<&File> {
        let index = inode.0.checked_sub(FIRST_INODE)?;
        self.files.get(usize::try_from(index).ok()?)
    }

    fn inode_of(index: usize) -> INodeNo {
        INodeNo(FIRST_INODE + index as u64)
    }

    fn attributes(&self, inode: INodeNo) -> Option<FileAttr> {
        let (kind, perm, nlink, size) = if inode == INodeNo::ROOT {
            (FileType::Directory, 0o700, 2, 0)
        } else {
            let file = self.file(inode)?;
            (FileType::RegularFile, if file.read_only { 0o400 } else { 0o600 }, 1, file.bytes)
        };
        Some(FileAttr {
            ino: inode,
            size,
            blocks: size.div_ceil(512),
            atime: self.since,
            mtime: self.since,
            ctime: self.since,
            crtime: self.since,
            kind,
            perm,
            nlink,
            uid: self.owner.0,
            gid: self.owner.1,
            rdev: 0,
            blksize: BLOCK_BYTES,
            flags: 0,
        })
    }

    /// Passes a job to the volume's thread. If that has ended, the job is dropped, and its reply then reports an error.
    fn submit(&self, inode: INodeNo, make: impl FnOnce(&File) -> Job) {
        if let Some(file) = self.file(inode) {
            let _ = file.jobs.send(make(file));
        }
    }
}

impl Filesystem for VolumeFs {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // If the kernel refuses one of these, requests are slower.
        let _ = config.set_max_write(self.limits.request_bytes);
        let _ = config.set_max_background(self.limits.background);
        for wanted in [
            InitFlags::FUSE_ASYNC_READ,
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_MAX_PAGES,
        ] {
            let _ = config.add_capabilities(wanted);
        }
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let index = self.files.iter().position(|f| parent == INodeNo::ROOT && *f.name == *name);
        match index.and_then(|i| self.attributes(Self::inode_of(i))) {
            Some(attributes) => reply.entry(&TTL, &attributes, Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _request: &Request, inode: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        match self.attributes(inode) {
            Some(attributes) => reply.attr(&TTL, &attributes),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn setattr(
        &self,
        _request: &Request,
        inode: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let Some(attributes) = self.attributes(inode) else { return reply.error(Errno::ENOENT) };
        // O_TRUNC sets size zero. The reply tells the kernel that the size has not changed.
        let size_stays = size.is_none_or(|s| s == 0 || s == attributes.size);
        if mode.is_some() || uid.is_some() || gid.is_some() || !size_stays {
            return reply.error(Errno::EPERM);
        }
        // A new time is accepted and not stored, because tools that copy files set it at their end.
        reply.attr(&TTL, &attributes);
    }

    fn open(&self, _request: &Request, inode: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let Some(file) = self.file(inode) else { return reply.error(Errno::EISDIR) };
        if file.read_only && flags.acc_mode() != OpenAccMode::O_RDONLY {
            return reply.error(Errno::EROFS);
        }
        reply.opened(
            FileHandle(0),
            FopenFlags::FOPEN_DIRECT_IO
                | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES
                | FopenFlags::FOPEN_NOFLUSH,
        );
    }

    fn read(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.submit(inode, |_| Job::Read { offset, bytes: size, reply });
    }

    fn write(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        // O_SYNC contains O_DSYNC; the kernel also sets it for single requests (RWF_DSYNC).
        let durable = flags.0 & libc::O_DSYNC != 0;
        self.submit(inode, |file| Job::Write { offset, data: file.spare.copy_of(data), durable, reply });
    }

    fn fsync(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        self.submit(inode, |_| Job::Flush { reply });
    }

    fn flush(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _handle: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        // Kernels without FOPEN_NOFLUSH send this at every close; it is not an fsync.
        reply.ok();
    }

    fn fallocate(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let keep = libc::FALLOC_FL_KEEP_SIZE;
        let Some(file) = self.file(inode) else { return reply.error(Errno::ENOENT) };
        let bytes = length;
        if file.read_only {
            reply.error(Errno::EROFS);
        } else if mode == libc::FALLOC_FL_PUNCH_HOLE | keep && file.punch_hole == PunchHole::Zero {
            self.submit(inode, |_| Job::Punch { offset, bytes, reply });
        } else if mode & !keep == libc::FALLOC_FL_ZERO_RANGE {
            if mode & keep == 0 && offset.saturating_add(bytes) > file.bytes {
                return reply.error(Errno::ENOSPC);
            }
            self.submit(inode, |_| Job::Zero { offset, bytes, reply });
        } else {
            reply.error(Errno::EOPNOTSUPP);
        }
    }

    fn readdir(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        if inode != INodeNo::ROOT {
            return reply.error(Errno::ENOTDIR);
        }
        let dots = [(INodeNo::ROOT, FileType::Directory, "."), (INodeNo::ROOT, FileType::Directory, "..")];
        let files = self.files.iter().enumerate();
        let files = files.map(|(i, f)| (Self::inode_of(i), FileType::RegularFile, &*f.name));
        // The offset of an entry is the position of the next one.
        let skip = usize::try_from(offset).unwrap_or(usize::MAX);
        for (at, (inode, kind, name)) in (1..).zip(dots.into_iter().chain(files)).skip(skip) {
            if reply.add(inode, at, kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn statfs(&self, _request: &Request, inode: INodeNo, reply: ReplyStatfs) {
        // For a file: a loop device uses the answer as the granularity of its discards.
        let bytes = match self.file(inode) {
            Some(file) => file.bytes,
            None => self.files.iter().map(|f| f.bytes).fold(0, u64::saturating_add),
        };
        let blocks = bytes / u64::from(BLOCK_BYTES);
        reply.statfs(blocks, 0, 0, self.files.len() as u64, 0, BLOCK_BYTES, 255, BLOCK_BYTES);
    }

    fn getxattr(&self, _request: &Request, _inode: INodeNo, _name: &OsStr, _size: u32, reply: ReplyXattr) {
        // The kernel stores this answer and sends no such request before later writes.
        reply.error(Errno::ENOSYS);
    }

    fn ioctl(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _handle: FileHandle,
        _flags: fuser::IoctlFlags,
        _command: u32,
        _input: &[u8],
        _output_bytes: u32,
        reply: ReplyIoctl,
    ) {
        reply.error(Errno::ENOTTY);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use blockio::bridge;

    use super::*;

    fn served(name: &str) -> Served {
        let (jobs, _) = bridge::channel(1);
        let (_, ended) = bridge::oneshot();
        Served {
            name: name.to_string(),
            bytes: 1 << 20,
            block_bytes: 512,
            read_only: name == "ro",
            punch_hole: PunchHole::Zero,
            jobs,
            spare: Arc::default(),
            ended,
        }
    }

    #[test]
    fn requests_fit_into_their_memory() {
        for (mib, request_kib, background) in [(1, 128, 8), (4, 512, 8), (64, 1024, 64), (4096, 1024, 512)] {
            let limits = RequestLimits { request_bytes: request_kib << 10, background };
            assert_eq!(RequestLimits::within(mib << 20), limits, "{mib} MiB");
        }
        assert_eq!(RequestLimits::within(0), RequestLimits::within(1 << 20));
    }

    #[test]
    fn names_are_file_names_and_differ() {
        for bad in ["", ".", "..", "a/b", "a\0b"] {
            assert!(matches!(VolumeFs::new(&[served(bad)]), Err(FuseError::BadName(_))), "{bad:?}");
        }
        let twice = [served("a"), served("b"), served("a")];
        assert!(matches!(VolumeFs::new(&twice), Err(FuseError::NameTaken(n)) if n == "a"));
    }

    #[test]
    fn attributes_say_what_a_volume_is() {
        let fs = VolumeFs::new(&[served("rw"), served("ro")]).unwrap();
        let of = |inode| fs.attributes(INodeNo(inode));
        assert_eq!(of(1).unwrap().kind, FileType::Directory);
        let (rw, ro) = (of(2).unwrap(), of(3).unwrap());
        assert_eq!((rw.size, rw.blocks, rw.perm), (1 << 20, 2048, 0o600));
        assert_eq!(ro.perm, 0o400);
        assert!(of(4).is_none() && of(0).is_none());
    }
}
