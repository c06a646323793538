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
            // Its owner may have removed the directory meanwhile, and another one may be there now.
            Ok(()) if is_at(dir, &lock) => return Ok(Some(Arc::new(lock))),
            Ok(()) if began.elapsed() < within => {}
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
            *ownership = Ownership::OfAnother;
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
        // An earlier daemon may have published a label of this device.
        self.published.iter().filter(|_| !plain::is_link_name(label)).for_each(|p| p.remove(device));
        self.update(linked, label);
        if self.taken_over.swap(false, Ordering::Relaxed) {
            linked.values().for_each(|l| self.update(linked, &l.label));
        }
    }

    /// The label of the volume with this key has changed.
    pub(crate) fn relabel(&self, id: &str, label: &str) {
        let linked = &mut *self.lock();
        let Some(old) = linked.remove(id) else { return };
        self.unmake(linked, &old);
        linked.insert(id.to_owned(), Linked { label: label.to_owned(), ..old });
        self.update(linked, label);
    }

    /// The volume with this key has no block device any more.
    pub(crate) fn remove(&self, id: &str) {
        let linked = &mut *self.lock();
        if let Some(old) = linked.remove(id) {
            self.published.iter().for_each(|published| published.forget(&old.device));
            self.unmake(linked, &old);
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
            [..] => self.unlink(label, &devices),
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
        if let Some(published) = &self.published {
            devices.iter().for_each(|device| published.remove(device));
        }
        let dir = match self.own() {
            Ok(Some(dir)) => dir,
            Ok(None) => return Ok(()),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(e),
        };
        if target_in(&dir, label.as_ref()).is_some_and(|to| devices.contains(&&*to)) {
            unlinkat(&dir, label, AtFlags::empty())?;
            self.release();
        }
        Ok(())
    }

    /// Makes a link, also in the place of one that a crash has left.
    fn link(&self, label: &str, device: &Path) -> std::io::Result<()> {
        match std::fs::DirBuilder::new().mode(0o755).create(&self.dir) {
            Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => return Err(e),
            _ => {}
        }
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
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn target(dir: &Path, label: &str) -> Option<PathBuf> {
        std::fs::read_link(dir.join(label)).ok()
    }

    #[test]
    fn links_follow_volumes() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("ubcache");
        let links = Links::new(dir.clone());
        let (zero, one) = (Path::new("/dev/ublkb0"), Path::new("/dev/ublkb1"));
        links.add("a", "data", zero);
        assert_eq!(target(&dir, "data").as_deref(), Some(zero));
        links.relabel("a", "archive");
        assert_eq!((target(&dir, "data"), target(&dir, "archive").as_deref()), (None, Some(zero)));
        links.remove("a");
        links.add("b", "archive", one);
        assert_eq!(target(&dir, "archive").as_deref(), Some(one));
        links.remove("b");
        links.remove("unknown");
        assert!(!dir.exists(), "an empty directory goes");
    }

    /// udev knew no links, so systemd had no unit for them, and a mount by `/dev/ubcache/LABEL` waited for ever.
    #[test]
    fn udev_is_told_the_label_that_has_a_link() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("ubcache");
        let published = Some(PublishedLabels::below(root.path()));
        let links = Links { published, ..Links::new(dir.clone()) };
        let label = |name| std::fs::read_to_string(root.path().join("labels").join(name)).ok();
        let (zero, one) = (Path::new("/dev/ublkb0"), Path::new("/dev/ublkb1"));
        links.add("a", "data", zero);
        assert_eq!(label("ublkb0").as_deref(), Some("UBCACHE_LABEL=data\n"));
        links.add("b", "data", one);
        assert_eq!((label("ublkb0"), label("ublkb1")), (None, None), "two volumes have it");
        links.relabel("b", "films");
        assert_eq!(label("ublkb0").as_deref(), Some("UBCACHE_LABEL=data\n"));
        assert_eq!(label("ublkb1").as_deref(), Some("UBCACHE_LABEL=films\n"));
        // udev has replaced the link by its own.
        std::fs::remove_file(dir.join("films")).unwrap();
        symlink("../ublkb1", dir.join("films")).unwrap();
        links.remove("b");
        assert_eq!((std::fs::read_link(dir.join("films")).ok(), label("ublkb1")), (None, None));
    }

    /// Which disk the link named was a matter of the order of their starts.
    #[test]
    fn a_label_of_two_volumes_has_no_link() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("ubcache");
        let links = Links::new(dir.clone());
        let (zero, one) = (Path::new("/dev/ublkb0"), Path::new("/dev/ublkb1"));
        links.add("a", "data", zero);
        links.add("b", "data", one);
        assert_eq!(target(&dir, "data"), None);
        links.relabel("b", "other");
        assert_eq!(
            (target(&dir, "data").as_deref(), target(&dir, "other").as_deref()),
            (Some(zero), Some(one))
        );
        links.relabel("a", "other");
        assert_eq!((target(&dir, "data"), target(&dir, "other")), (None, None));
        links.remove("b");
        assert_eq!(target(&dir, "other").as_deref(), Some(zero));
    }

    /// A second daemon, with another state directory, took the links of the first one for stale.
    #[test]
    fn links_of_another_daemon_stay() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("ubcache");
        let (first, second) = (Links::new(dir.clone()), Links::new(dir.clone()));
        let (zero, one) = (Path::new("/dev/ublkb0"), Path::new("/dev/ublkb1"));
        first.add("a", "data", zero);
        second.remove_stale();
        second.add("b", "data", one);
        second.add("c", "films", one);
        assert_eq!((target(&dir, "data").as_deref(), target(&dir, "films")), (Some(zero), None));
        second.remove("b");
        assert_eq!(target(&dir, "data").as_deref(), Some(zero));
        first.remove("a");
        assert!(!dir.exists(), "an empty directory goes");
    }

    /// The first daemon was killed. Its links led to loop devices that the second one used for other volumes.
    #[test]
    fn a_second_daemon_takes_over_when_the_first_one_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("ubcache");
        let (first, second) = (Links::new(dir.clone()), Links::new(dir.clone()));
        let (zero, one, two) = (Path::new("/dev/loop0"), Path::new("/dev/loop1"), Path::new("/dev/loop2"));
        first.add("a", "data", zero);
        first.add("b", "films", one);
        second.add("c", "music", two);
        assert_eq!(target(&dir, "music"), None);
        drop(first);
        second.add("d", "data", one);
        let found = ["data", "films", "music"].map(|label| target(&dir, label));
        assert_eq!(found, [Some(one.to_owned()), None, Some(two.to_owned())]);
    }

    /// A crash left `data -> /dev/loop0`. Later, `/dev/loop0` was another volume, and an entry of fstab mounted it as `data`.
    #[test]
    fn links_of_an_earlier_daemon_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("ubcache");
        std::fs::create_dir(&dir).unwrap();
        for (label, to) in [("data", "/dev/loop0"), ("films", "/dev/ublkb3"), ("other", "/dev/sda1")] {
            symlink(to, dir.join(label)).unwrap();
        }
        std::fs::write(dir.join("loop"), "a file").unwrap();
        let links = Links::new(dir.clone());
        links.remove_stale();
        assert_eq!((target(&dir, "data"), target(&dir, "films")), (None, None));
        assert!(target(&dir, "other").is_some() && dir.join("loop").exists(), "they are not of this program");
        std::fs::remove_file(dir.join("other")).unwrap();
        std::fs::remove_file(dir.join("loop")).unwrap();
        links.remove_stale();
        assert!(!dir.exists(), "an empty directory goes");
    }

    /// Regression: the setting `links` was changed after a crash, and the links in the old directory stayed.
    #[test]
    fn links_in_a_directory_of_an_earlier_configuration_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("old");
        let killed = Links::new(dir.clone());
        killed.add("a", "data", Path::new("/dev/loop0"));
        remove_left_in(&dir);
        assert!(target(&dir, "data").is_some(), "a daemon uses them");
        drop(killed);
        symlink("/dev/sda1", dir.join("other")).unwrap();
        remove_left_in(&dir);
        assert_eq!((target(&dir, "data"), target(&dir, "other").is_some()), (None, true));
        std::fs::remove_file(dir.join("other")).unwrap();
        remove_left_in(&dir);
        assert!(!dir.exists(), "an empty directory goes");
        remove_left_in(&dir);
    }

    /// The setting `links` was changed after a crash. udev had the labels still, and made links to devices of other volumes.
    #[test]
    fn labels_for_udev_go_with_the_links_of_an_earlier_configuration() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("ubcache");
        let published = || PublishedLabels::below(root.path());
        let label = root.path().join("labels/ublkb0");
        let daemon = Links { published: Some(published()), ..Links::new(dir.clone()) };
        std::fs::create_dir_all(root.path().join("sys/ublkb0")).unwrap();
        daemon.add("a", "data", Path::new("/dev/ublkb0"));
        remove_left(&dir, Some(&published()));
        assert!(label.exists(), "a daemon uses them");
        drop(daemon);
        remove_left(&dir, None);
        assert!(label.exists(), "the rule of udev names another directory");
        remove_left(&dir, Some(&published()));
        assert!(!label.exists(), "also if the directory has gone");
        assert!(published_in(Path::new(DEFAULT_LINKS)).is_some() && published_in(&dir).is_none());
    }

    /// A symbolic link that another user has put in the place of the directory would let the daemon, which is root, make and
    /// remove files in any directory.
    #[test]
    fn a_symbolic_link_in_the_place_of_the_directory_is_not_followed() {
        let outer = tempfile::tempdir().unwrap();
        let [dir, moved, foreign] = ["ubcache", "moved", "foreign"].map(|name| outer.path().join(name));
        std::fs::create_dir(&foreign).unwrap();
        symlink("/dev/loop0", foreign.join("data")).unwrap();
        let links = Links::new(dir.clone());
        let (zero, one) = (Path::new("/dev/loop0"), Path::new("/dev/loop1"));
        links.add("a", "data", zero);
        std::fs::rename(&dir, &moved).unwrap();
        symlink(&foreign, &dir).unwrap();
        links.add("b", "films", one);
        links.relabel("a", "archive");
        links.remove("a");
        remove_left_in(&dir);
        Links::new(dir.clone()).remove_stale();
        assert_eq!(target(&foreign, "data").as_deref(), Some(zero), "nothing is removed there");
        assert_eq!(std::fs::read_dir(&foreign).unwrap().count(), 1, "nothing is made there");
        assert_eq!(std::fs::read_dir(&moved).unwrap().count(), 0, "its own links are removed");
        // When the place is free again, the links of all volumes are made again.
        std::fs::remove_file(&dir).unwrap();
        links.add("c", "music", one);
        assert_eq!(
            ["films", "music"].map(|label| target(&dir, label)),
            [Some(one.to_owned()), Some(one.to_owned())]
        );
        // A directory that every user may write is refused, too.
        let open = outer.path().join("open");
        std::fs::create_dir(&open).unwrap();
        std::fs::set_permissions(&open, PermissionsExt::from_mode(0o777)).unwrap();
        Links::new(open.clone()).add("d", "data", zero);
        assert_eq!(target(&open, "data"), None);
    }

    /// A label is written on the disk, also by other hosts.
    #[test]
    fn a_hostile_label_gets_no_link() {
        let outer = tempfile::tempdir().unwrap();
        let dir = outer.path().join("ubcache");
        let links = Links::new(dir.clone());
        for label in [
            "--force",
            "da\u{200b}ta",
            "../escaped",
            "..",
            ".",
            "",
            "/etc/x",
            "a/b",
            "a\nb",
            "a\u{1b}[2J",
            "bcache0",
            " x",
            "\u{1}new",
        ] {
            links.add("a", label, Path::new("/dev/ublkb0"));
            assert!(!dir.exists() && !outer.path().join("escaped").exists(), "{label:?}");
            links.remove("a");
        }
        // A stale link is replaced, and what is no link stays.
        std::fs::create_dir(&dir).unwrap();
        symlink("/dev/ublkb9", dir.join("data")).unwrap();
        std::fs::write(dir.join("file"), "x").unwrap();
        links.add("a", "data", Path::new("/dev/ublkb0"));
        links.add("b", "file", Path::new("/dev/ublkb1"));
        assert_eq!(target(&dir, "data").as_deref(), Some(Path::new("/dev/ublkb0")));
        links.remove("b");
        assert_eq!(std::fs::read_to_string(dir.join("file")).unwrap(), "x");
        // The directory itself is no link.
        let other = outer.path().join("other");
        symlink(&dir, &other).unwrap();
        Links::new(other).add("c", "more", Path::new("/dev/ublkb2"));
        assert_eq!(target(&dir, "more"), None);
    }
}
