//! Links to the block devices of volumes, by their labels: `/dev/ubcache/LABEL`.
//!
//! Owns the directory of the links, by a lock on it: while one daemon has links there, another one makes and removes none. A
//! label comes from a disk of any origin, so only a label that can be a name becomes a link: it has no slash, no control
//! character, and is neither `.` nor `..`. A label of two volumes has no link, because the link would name one disk or the
//! other by the order of their starts.
//!
//! The daemon is root, and the configuration may name a directory below one that another user can write. So each change is made
//! in the directory that is locked, by its descriptor, and no symbolic link in its place is followed. A directory that another
//! user owns, or that every user may write, is refused. Must not know how a volume is exported.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, FlockOperation, Mode, OFlags, flock, openat, readlinkat, renameat, statat,
    symlinkat, unlinkat,
};
use rustix::io::Errno;
use rustix::process::geteuid;
use serve::{exports, message, plain};

use crate::published::PublishedLabels;

/// Directory of the links, unless the configuration names another one.
pub(crate) const DEFAULT_LINKS: &str = "/dev/ubcache";

/// Time limit for a daemon that was killed to release the directory, and the time between two tries.
const RELEASED_WITHIN: Duration = Duration::from_secs(1);
const BETWEEN_TRIES: Duration = Duration::from_millis(20);

/// Longest time for which a directory is made again that udev removes before a link is in it.
const REMOVED_WITHIN: Duration = Duration::from_secs(1);

/// Whether the directory is this daemon's.
enum Ownership {
    /// It is not there, or nothing was linked yet.
    Free,
    /// The directory, which is locked.
    Own(Arc<File>),
    /// Another daemon has it, or something else is in its place; this was reported.
    OfAnother,
}

/// The block device of a volume, and its label.
struct Linked {
    label: String,
    device: PathBuf,
}

/// The links, by the keys of their volumes.
pub(crate) struct Links {
    dir: PathBuf,
    /// The labels for udev, which makes the same links in the default directory.
    published: Option<PublishedLabels>,
    linked: Mutex<BTreeMap<String, Linked>>,
    /// Locked after `linked`.
    ownership: Mutex<Ownership>,
    /// Whether this daemon has taken the directory over, and not made all its links yet.
    taken_over: AtomicBool,
}

/// Refuses a directory in which other users could change what a link leads to.
fn is_fit(dir: &Path) -> std::io::Result<()> {
    let there = std::fs::symlink_metadata(dir)?;
    if !there.is_dir() {
        return Err(std::io::Error::other(
            "a symbolic link or a file is in the place of the directory, and is not followed: remove it",
        ));
    }
    if (there.uid() != 0 && there.uid() != geteuid().as_raw()) || there.mode() & 0o002 != 0 {
        return Err(std::io::Error::other(format!(
            "other users can change this directory (owner {}, mode {:o}): give it to root with mode 755, or remove it",
            there.uid(),
            there.mode() & 0o7777
        )));
    }
    Ok(())
}

/// Locks the directory for this process. `None` if another process has it.
fn try_to_own(dir: &Path, within: Duration) -> std::io::Result<Option<Arc<File>>> {
    let began = Instant::now();
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    loop {
        let lock = File::from(openat(CWD, dir, flags, Mode::empty())?);
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) if is_at(dir, &lock) => return Ok(Some(Arc::new(lock))),
            // Its owner or udev has removed the directory meanwhile, and another one may be there now.
            Ok(()) if began.elapsed() < within.max(BETWEEN_TRIES) => {}
            Err(Errno::WOULDBLOCK) if began.elapsed() < within => {
                std::thread::sleep(BETWEEN_TRIES);
            }
            Ok(()) | Err(Errno::WOULDBLOCK) => return Ok(None),
            Err(e) => return Err(e.into()),
        }
    }
}

/// Whether the open directory is the one at this path.
fn is_at(path: &Path, open: &File) -> bool {
    let there = std::fs::symlink_metadata(path).and_then(|there| Ok((there, open.metadata()?)));
    there.is_ok_and(|(there, open)| (open.dev(), open.ino()) == (there.dev(), there.ino()))
}

/// Where the link of this name in the directory leads to.
fn target_in(dir: &File, name: &OsStr) -> Option<PathBuf> {
    let to = readlinkat(dir, name, Vec::new()).ok()?;
    let to = Path::new(OsStr::from_bytes(to.as_bytes()));
    // Links of udev are relative.
    Some(to.strip_prefix("..").map_or_else(|_| to.to_owned(), |name| Path::new("/dev").join(name)))
}

/// Removes the links to block devices of this program.
fn clean(dir: &File, path: &Path) {
    let is_ours = |to: PathBuf| {
        let name = to.strip_prefix("/dev").map(|name| name.to_string_lossy().into_owned());
        name.is_ok_and(|name| exports::device_prefixes().any(|prefix| name.starts_with(prefix)))
    };
    for entry in Dir::read_from(dir).into_iter().flatten().flatten() {
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if target_in(dir, name).is_some_and(is_ours)
            && let Err(e) = unlinkat(dir, name, AtFlags::empty())
        {
            message::warn(format!("{}: cannot be removed: {e}", path.join(name).display()));
        }
    }
}

/// The labels for udev, whose rule makes links in the default directory only.
fn published_in(dir: &Path) -> Option<PublishedLabels> {
    (dir == Path::new(DEFAULT_LINKS)).then(PublishedLabels::default)
}

/// Removes the links that an earlier daemon has left in a directory that the configuration names no more, and the labels for udev.
pub(crate) fn remove_left_in(dir: &Path) {
    remove_left(dir, published_in(dir).as_ref());
}

fn remove_left(dir: &Path, published: Option<&PublishedLabels>) {
    let left = is_fit(dir).and_then(|()| try_to_own(dir, RELEASED_WITHIN));
    let has_no_daemon = match &left {
        Ok(owned) => owned.is_some(),
        Err(e) => e.kind() == std::io::ErrorKind::NotFound,
    };
    published.into_iter().filter(|_| has_no_daemon).for_each(PublishedLabels::remove_all);
    match left {
        Ok(Some(owned)) => {
            clean(&owned, dir);
            // It stays if it is not empty.
            let _ = std::fs::remove_dir(dir);
        }
        // Another daemon uses it.
        Ok(None) => {}
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
        Err(e) => {
            message::warn(format!("{}: links of an earlier daemon are not removed: {e}", dir.display()))
        }
    }
}

impl Links {
    pub(crate) fn new(dir: PathBuf) -> Links {
        Links {
            published: published_in(&dir),
            dir,
            linked: Mutex::default(),
            ownership: Mutex::new(Ownership::Free),
            taken_over: AtomicBool::new(false),
        }
    }

    /// Takes the lock of the directory if no daemon has it. Returns the directory if this daemon has it.
    ///
    /// A second daemon waits and warns once. It takes the directory over later, when the first one has ended. If another
    /// directory is there than the one that this daemon has, the links in the old one are removed.
    fn own(&self) -> std::io::Result<Option<Arc<File>>> {
        let ownership = &mut *self.ownership.lock().unwrap_or_else(PoisonError::into_inner);
        if let Ownership::Own(dir) = ownership {
            if is_at(&self.dir, dir) {
                return Ok(Some(dir.clone()));
            }
            clean(dir, &self.dir);
            let was_removed = dir.metadata().is_ok_and(|there| there.nlink() == 0);
            *ownership = if was_removed { Ownership::Free } else { Ownership::OfAnother };
        }
        is_fit(&self.dir)?;
        let has_waited = matches!(ownership, Ownership::OfAnother);
        let within = if has_waited { Duration::ZERO } else { RELEASED_WITHIN };
        match try_to_own(&self.dir, within)? {
            Some(dir) => {
                if has_waited {
                    self.taken_over.store(true, Ordering::Relaxed);
                    clean(&dir, &self.dir);
                }
                *ownership = Ownership::Own(dir.clone());
                Ok(Some(dir))
            }
            None if has_waited => Ok(None),
            None => {
                message::warn(format!(
                    "{}: another daemon has links here, and this one makes none: set `links` in the configuration to \
                     another directory, or to \"\" for no links",
                    self.dir.display()
                ));
                *ownership = Ownership::OfAnother;
                Ok(None)
            }
        }
    }

    /// Removes the directory and its lock, if nothing is in it.
    fn release(&self) {
        let ownership = &mut *self.ownership.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(ownership, Ownership::Own(dir) if is_at(&self.dir, dir))
            && std::fs::remove_dir(&self.dir).is_ok()
        {
            *ownership = Ownership::Free;
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Linked>> {
        self.linked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes the links to block devices of this program that an earlier daemon has left: by now, such a device can belong to
    /// another volume. Other links in the directory stay.
    pub(crate) fn remove_stale(&self) {
        let owned = self.own();
        if !matches!(owned, Ok(None)) {
            self.published.iter().for_each(PublishedLabels::remove_stale);
        }
        match owned {
            Ok(Some(dir)) => clean(&dir, &self.dir),
            Ok(None) => return,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return,
            Err(e) => return message::warn(format!("{}: links are not removed: {e}", self.dir.display())),
        }
        self.release();
    }

    /// The volume with this key is served as this block device.
    pub(crate) fn add(&self, id: &str, label: &str, device: &Path) {
        let linked = &mut *self.lock();
        linked.insert(id.to_owned(), Linked { label: label.to_owned(), device: device.to_owned() });
        self.update_volume(linked, label, device);
    }

    /// The label of the volume with this key has changed.
    ///
    /// The new link is made before the old one is removed: udev removes a directory without links. The new label takes the
    /// place of the old one in one step, with one event, so udev never finds the volume without a label.
    pub(crate) fn relabel(&self, id: &str, label: &str) {
        let linked = &mut *self.lock();
        let Some(old) = linked.remove(id) else { return };
        linked.insert(id.to_owned(), Linked { label: label.to_owned(), device: old.device.clone() });
        self.update_volume(linked, label, &old.device);
        if old.label != label {
            self.unmake(linked, &old);
        }
    }

    /// The volume with this key has no block device any more.
    pub(crate) fn remove(&self, id: &str) {
        let linked = &mut *self.lock();
        if let Some(old) = linked.remove(id) {
            self.published.iter().for_each(|published| published.forget(&old.device));
            self.unmake(linked, &old);
        }
    }

    /// Makes or removes the link of a volume with a new label or a new device.
    fn update_volume(&self, linked: &BTreeMap<String, Linked>, label: &str, device: &Path) {
        self.update(linked, label);
        // The volume or an earlier daemon may have published another label of this device.
        self.published.iter().for_each(|published| published.remove_except(device, label));
        if self.taken_over.swap(false, Ordering::Relaxed) {
            linked.values().for_each(|l| self.update(linked, &l.label));
        }
    }

    /// Makes the link of a label, if one volume has the label, and removes it if several have it.
    fn update(&self, linked: &BTreeMap<String, Linked>, label: &str) {
        if !plain::is_link_name(label) || self.dir.as_os_str().is_empty() {
            return;
        }
        let place = self.dir.join(label);
        let devices: Vec<&Path> = linked.values().filter(|l| l.label == label).map(|l| &*l.device).collect();
        let done = match devices[..] {
            [] => Ok(()),
            [device] => self.link(label, device),
            [..] => {
                let published = self.published.iter();
                published.for_each(|published| devices.iter().for_each(|device| published.remove(device)));
                self.unlink(label, &devices)
            }
        };
        if let Err(e) = done {
            message::warn(format!("{}: the link cannot be made or removed: {e}", place.display()));
        }
        if devices.len() > 1 {
            let all: Vec<String> = devices.iter().map(|d| d.display().to_string()).collect();
            message::warn(format!(
                "{}: {} volumes have the label {}, so it has no link: {}; give each a label of its own (ubcache set-label)",
                self.dir.display(),
                devices.len(),
                plain::label(label),
                all.join(", ")
            ));
        }
    }

    /// Removes a link if it leads to one of these devices.
    fn unlink(&self, label: &str, devices: &[&Path]) -> std::io::Result<()> {
        let dir = match self.own() {
            Ok(Some(dir)) => dir,
            Ok(None) => return Ok(()),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(e),
        };
        if target_in(&dir, label.as_ref()).is_some_and(|to| devices.contains(&&*to)) {
            match unlinkat(&dir, label, AtFlags::empty()) {
                // udev has removed it meanwhile.
                Ok(()) | Err(Errno::NOENT) => self.release(),
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    /// Makes a link, also in the place of one that a crash has left.
    ///
    /// When udev has removed the last link of the directory, it removes the directory. If that is the directory that was just
    /// made here, it is made again.
    fn link(&self, label: &str, device: &Path) -> std::io::Result<()> {
        let began = Instant::now();
        loop {
            match std::fs::DirBuilder::new().mode(0o755).create(&self.dir) {
                Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => return Err(e),
                _ => {}
            }
            match self.link_in_directory(label, device) {
                Err(e) if e.kind() == std::io::ErrorKind::NotFound && began.elapsed() < REMOVED_WITHIN => {}
                done => return done,
            }
        }
    }

    fn link_in_directory(&self, label: &str, device: &Path) -> std::io::Result<()> {
        let Some(dir) = self.own()? else { return Ok(()) };
        let there = statat(&dir, label, AtFlags::SYMLINK_NOFOLLOW);
        if there.is_ok_and(|m| FileType::from_raw_mode(m.st_mode) != FileType::Symlink) {
            return Err(std::io::Error::other("something that is no link is there"));
        }
        // A label has no control character, so this name is no label.
        let temporary = "\u{1}new";
        let _ = unlinkat(&dir, temporary, AtFlags::empty());
        symlinkat(device, &dir, temporary)?;
        renameat(&dir, temporary, &dir, label)?;
        self.published.iter().for_each(|published| published.set(device, label));
        Ok(())
    }

    /// Removes the link of a volume that is no longer among `linked`. A volume that alone has the label now gets a link.
    fn unmake(&self, linked: &BTreeMap<String, Linked>, old: &Linked) {
        if !plain::is_link_name(&old.label) || self.dir.as_os_str().is_empty() {
            return;
        }
        let place = self.dir.join(&old.label);
        if let Err(e) = self.unlink(&old.label, &[&old.device]) {
            message::warn(format!("{}: cannot be removed: {e}", place.display()));
        }
        self.update(linked, &old.label);
    }
}

#[cfg(test)]
mod tests;
