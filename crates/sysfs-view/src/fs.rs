//! The tree as a FUSE file system.
//!
//! Owns inode numbers, one for each path that was ever requested, and the text of open files. The text of a file is made at
//! open; each write is an order of its own. As in sysfs, a file without read permission cannot be opened for reading, not
//! even by root, and files have the size of a page. Must not know the mount.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use fuser::{
    FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, LockOwner, OpenAccMode,
    OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite,
    ReplyXattr, Request, TimeOrNow, WriteFlags,
};

use crate::owner::{Errno, Order, Owner, Snapshot, Writer};
use crate::tree::{Found, Kind, Located, Tree};

/// Devices appear and disappear, so the kernel must ask again each time.
const TTL: Duration = Duration::ZERO;
/// The size of files in sysfs.
const FILE_BYTES: u64 = 4096;

/// The tree as a FUSE file system. Mount it with `export_fuse::Tree`.
pub struct SysfsView {
    owner: Arc<dyn Owner>,
    state: Mutex<State>,
    user: (u32, u32),
    since: SystemTime,
}

#[derive(Default)]
struct State {
    /// The path of each inode except the root, which is number 1. The first path belongs to number 2.
    paths: Vec<String>,
    inodes: BTreeMap<String, u64>,
    open: BTreeMap<u64, Arc<str>>,
    next_handle: u64,
}

const FIRST_INODE: u64 = 2;

impl State {
    fn inode(&mut self, path: String) -> INodeNo {
        if path.is_empty() {
            return INodeNo::ROOT;
        }
        let next = FIRST_INODE + self.paths.len() as u64;
        let inode = *self.inodes.entry(path.clone()).or_insert(next);
        if inode == next {
            self.paths.push(path);
        }
        INodeNo(inode)
    }

    fn path(&self, inode: INodeNo) -> Option<String> {
        if inode == INodeNo::ROOT {
            return Some(String::new());
        }
        let index = usize::try_from(inode.0.checked_sub(FIRST_INODE)?).ok()?;
        self.paths.get(index).cloned()
    }
}

fn join(dir: &str, name: &str) -> String {
    if dir.is_empty() { name.to_owned() } else { format!("{dir}/{name}") }
}

impl SysfsView {
    /// A view of the sets of `owner`.
    pub fn new(owner: Arc<dyn Owner>) -> SysfsView {
        let user = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        SysfsView { owner, state: Mutex::default(), user, since: SystemTime::now() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change leaves a consistent state, so a poisoned lock is usable.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a snapshot, and finds a path in it.
    fn at<T>(&self, path: &str, see: impl FnOnce(&Located<'_>) -> Result<T, Errno>) -> Result<T, Errno> {
        // Entries that always exist need no answer of the owner.
        let fixed = matches!(path, "" | "fs");
        let snapshot = if fixed { Snapshot::default() } else { self.owner.snapshot()? };
        let tree = Tree { snapshot: &snapshot };
        let parts: Vec<&str> = path.split('/').filter(|p| !p.is_empty()).collect();
        see(&tree.find(&parts).ok_or(Errno::ENOENT)?)
    }

    fn attributes(&self, inode: INodeNo, found: &Found) -> FileAttr {
        let (kind, perm, nlink, size) = match found {
            Found::Dir(_) => (FileType::Directory, 0o755, 2, 0),
            Found::Link(target) => (FileType::Symlink, 0o777, 1, target.len() as u64),
            Found::File(file, _) => (FileType::RegularFile, file.mode(), 1, FILE_BYTES),
        };
        FileAttr {
            ino: inode,
            size,
            blocks: 0,
            atime: self.since,
            mtime: self.since,
            ctime: self.since,
            crtime: self.since,
            kind,
            perm,
            nlink,
            uid: self.user.0,
            gid: self.user.1,
            rdev: 0,
            blksize: FILE_BYTES as u32,
            flags: 0,
        }
    }

    fn path(&self, inode: INodeNo) -> Result<String, Errno> {
        self.lock().path(inode).ok_or(Errno::ENOENT)
    }

    fn attributes_of(&self, inode: INodeNo) -> Result<FileAttr, Errno> {
        self.at(&self.path(inode)?, |l| Ok(self.attributes(inode, &l.found)))
    }

    fn look_up(&self, parent: INodeNo, name: &OsStr) -> Result<FileAttr, Errno> {
        let path = join(&self.path(parent)?, name.to_str().ok_or(Errno::ENOENT)?);
        self.at(&path, |l| {
            let inode = self.lock().inode(path.clone());
            Ok(self.attributes(inode, &l.found))
        })
    }

    /// The entries of a directory, each with its inode number.
    fn list(&self, inode: INodeNo) -> Result<Vec<(INodeNo, FileType, String)>, Errno> {
        const ENOTDIR: Errno = Errno(20);
        let path = self.path(inode)?;
        let names = self.at(&path, |l| match &l.found {
            Found::Dir(names) => Ok(names.clone()),
            _ => Err(ENOTDIR),
        })?;
        let state = &mut *self.lock();
        let entry = |(name, kind): (String, Kind)| {
            let kind = match kind {
                Kind::Dir => FileType::Directory,
                Kind::Link => FileType::Symlink,
                Kind::File => FileType::RegularFile,
            };
            (state.inode(join(&path, &name)), kind, name)
        };
        Ok(names.into_iter().map(entry).collect())
    }

    /// Makes the text of a file at its open.
    fn open_file(&self, inode: INodeNo, access: OpenAccMode) -> Result<FileHandle, Errno> {
        const EISDIR: Errno = Errno(21);
        const EACCES: Errno = Errno(13);
        let text = self.at(&self.path(inode)?, |l| {
            let Found::File(file, place) = &l.found else { return Err(EISDIR) };
            let (reads, writes) = (file.mode() & 0o444 != 0, file.mode() & 0o200 != 0);
            if (access != OpenAccMode::O_WRONLY && !reads) || (access != OpenAccMode::O_RDONLY && !writes) {
                return Err(EACCES);
            }
            match access {
                OpenAccMode::O_WRONLY => Ok(String::new()),
                _ => file.read(*place, &l.subject(&*self.owner)),
            }
        })?;
        let state = &mut *self.lock();
        state.next_handle += 1;
        state.open.insert(state.next_handle, text.into());
        Ok(FileHandle(state.next_handle))
    }

    fn write_file(&self, inode: INodeNo, data: &[u8], by: Writer) -> Result<(), Errno> {
        let text = std::str::from_utf8(data).map_err(|_| Errno::EINVAL)?;
        let order = self.at(&self.path(inode)?, |l| match &l.found {
            Found::File(file, place) => file.write(*place, &l.subject(&*self.owner), text),
            _ => Err(Errno::EINVAL),
        })?;
        match order {
            Order::Nothing => Ok(()),
            order => self.owner.obey(order, by),
        }
    }
}

/// The process of a request. The kernel names the thread, and 0 if it is not visible here.
fn writer(request: &Request) -> Writer {
    let thread = i32::try_from(request.pid()).ok().filter(|thread| *thread != 0);
    Writer { uid: request.uid(), gid: request.gid(), pid: thread.map(|t| process_of(t).unwrap_or(t)) }
}

/// The process of a thread.
fn process_of(thread: i32) -> Option<i32> {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Tgid:"))?.trim().parse().ok()
}

fn refused(e: Errno) -> fuser::Errno {
    fuser::Errno::from_i32(e.0)
}

impl Filesystem for SysfsView {
    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.look_up(parent, name) {
            Ok(attributes) => reply.entry(&TTL, &attributes, Generation(0)),
            Err(e) => reply.error(refused(e)),
        }
    }

    fn getattr(&self, _request: &Request, inode: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        match self.attributes_of(inode) {
            Ok(attributes) => reply.attr(&TTL, &attributes),
            Err(e) => reply.error(refused(e)),
        }
    }

    fn setattr(
        &self,
        _request: &Request,
        inode: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        _size: Option<u64>,
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
        // A shell truncates the file that it writes to. As in sysfs, a truncation has no effect.
        if mode.is_some() || uid.is_some() || gid.is_some() {
            return reply.error(fuser::Errno::EPERM);
        }
        match self.attributes_of(inode) {
            Ok(attributes) => reply.attr(&TTL, &attributes),
            Err(e) => reply.error(refused(e)),
        }
    }

    fn readlink(&self, _request: &Request, inode: INodeNo, reply: ReplyData) {
        let target = self.path(inode).and_then(|path| {
            self.at(&path, |l| match &l.found {
                Found::Link(target) => Ok(target.clone()),
                _ => Err(Errno::EINVAL),
            })
        });
        match target {
            Ok(target) => reply.data(target.as_bytes()),
            Err(e) => reply.error(refused(e)),
        }
    }

    fn open(&self, _request: &Request, inode: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        match self.open_file(inode, flags.acc_mode()) {
            Ok(handle) => reply.opened(handle, FopenFlags::FOPEN_DIRECT_IO),
            Err(e) => reply.error(refused(e)),
        }
    }

    fn read(
        &self,
        _request: &Request,
        _inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let Some(text) = self.lock().open.get(&handle.0).cloned() else {
            return reply.error(fuser::Errno::EBADF);
        };
        let bytes = text.as_bytes();
        let from = usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len());
        let to = from.saturating_add(size as usize).min(bytes.len());
        reply.data(bytes.get(from..to).unwrap_or_default());
    }

    fn write(
        &self,
        request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        _offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        match self.write_file(inode, data, writer(request)) {
            Ok(()) => reply.written(u32::try_from(data.len()).unwrap_or(u32::MAX)),
            Err(e) => reply.error(refused(e)),
        }
    }

    fn release(
        &self,
        _request: &Request,
        _inode: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.lock().open.remove(&handle.0);
        reply.ok();
    }

    fn flush(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _handle: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn readdir(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let names = match self.list(inode) {
            Ok(names) => names,
            Err(e) => return reply.error(refused(e)),
        };
        let dots = [".", ".."].map(|name| (inode, FileType::Directory, name.to_owned()));
        // The offset of an entry is the position after it, at which the next call continues.
        let skip = usize::try_from(offset).unwrap_or(usize::MAX);
        for (at, (inode, kind, name)) in (1..).zip(dots.into_iter().chain(names)).skip(skip) {
            if reply.add(inode, at, kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn getxattr(&self, _request: &Request, _inode: INodeNo, _name: &OsStr, _size: u32, reply: ReplyXattr) {
        // The kernel remembers this answer and does not ask again.
        reply.error(fuser::Errno::ENOSYS);
    }
}
