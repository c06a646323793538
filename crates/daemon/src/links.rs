//! Links to the block devices of volumes, by their labels: `/dev/ubcache/LABEL`.
//!
//! Owns the directory of the links. A label comes from a disk of any origin, so only a label that can be a name becomes a
//! link: it has no slash, no control character, and is neither `.` nor `..`. If two volumes have one label, the first one that
//! is served has the link. Must not know how a volume is exported.

use std::collections::BTreeMap;
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serve::{exports, message, plain};

/// Directory of the links, unless the configuration names another one.
pub(crate) const DEFAULT_LINKS: &str = "/dev/ubcache";

/// The block device of a volume, and its label.
struct Linked {
    label: String,
    device: PathBuf,
}

/// The links, by the keys of their volumes.
pub(crate) struct Links {
    dir: PathBuf,
    linked: Mutex<BTreeMap<String, Linked>>,
}

impl Links {
    pub(crate) fn new(dir: PathBuf) -> Links {
        Links { dir, linked: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Linked>> {
        self.linked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes the links to block devices of this program that an earlier daemon has left: by now, such a device can belong to
    /// another volume. Other links in the directory stay.
    pub(crate) fn remove_stale(&self) {
        let is_ours = |to: PathBuf| {
            let name = to.strip_prefix("/dev").map(|name| name.to_string_lossy().into_owned());
            name.is_ok_and(|name| exports::device_prefixes().any(|prefix| name.starts_with(prefix)))
        };
        for entry in std::fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let place = entry.path();
            if std::fs::read_link(&place).is_ok_and(is_ours)
                && let Err(e) = std::fs::remove_file(&place)
            {
                message::warn(format!("{}: cannot be removed: {e}", place.display()));
            }
        }
        // Fails if something else is there.
        let _ = std::fs::remove_dir(&self.dir);
    }

    /// The volume with this key is served as this block device.
    pub(crate) fn add(&self, id: &str, label: &str, device: &Path) {
        let linked = &mut *self.lock();
        linked.insert(id.to_owned(), Linked { label: label.to_owned(), device: device.to_owned() });
        self.make(linked, id);
    }

    /// The label of the volume with this key has changed.
    pub(crate) fn relabel(&self, id: &str, label: &str) {
        let linked = &mut *self.lock();
        let Some(old) = linked.remove(id) else { return };
        self.unmake(linked, &old);
        linked.insert(id.to_owned(), Linked { label: label.to_owned(), ..old });
        self.make(linked, id);
    }

    /// The volume with this key has no block device any more.
    pub(crate) fn remove(&self, id: &str) {
        let linked = &mut *self.lock();
        if let Some(old) = linked.remove(id) {
            self.unmake(linked, &old);
        }
    }

    /// Makes the link of a volume.
    fn make(&self, linked: &BTreeMap<String, Linked>, id: &str) {
        let wanted = linked.get(id).filter(|l| plain::is_word(&l.label) && !self.dir.as_os_str().is_empty());
        let Some(Linked { label, device }) = wanted else { return };
        let shown = plain::label(label);
        let place = self.dir.join(label);
        let has_it =
            |l: &Linked| l.label == *label && std::fs::read_link(&place).is_ok_and(|to| to == l.device);
        if linked.iter().any(|(other, l)| other != id && has_it(l)) {
            message::warn(format!(
                "{}: another volume has the label {shown}; {} has no link",
                self.dir.display(),
                device.display()
            ));
            return;
        }
        if let Err(e) = self.link(&place, device) {
            message::warn(format!(
                "{}: the link to {} cannot be made: {e}",
                place.display(),
                device.display()
            ));
        }
    }

    /// Makes a link, also in the place of one that a crash has left.
    fn link(&self, place: &Path, device: &Path) -> std::io::Result<()> {
        match std::fs::DirBuilder::new().mode(0o755).create(&self.dir) {
            Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => return Err(e),
            _ => {}
        }
        let other = |what: &str| std::io::Error::other(format!("{what} is there"));
        // A symbolic link in place of the directory could lead to any directory.
        if !std::fs::symlink_metadata(&self.dir)?.is_dir() {
            return Err(other("something that is no directory"));
        }
        if std::fs::symlink_metadata(place).is_ok_and(|m| !m.is_symlink()) {
            return Err(other("something that is no link"));
        }
        // A label has no control character, so this name is no label.
        let temporary = self.dir.join("\u{1}new");
        let _ = std::fs::remove_file(&temporary);
        symlink(device, &temporary)?;
        std::fs::rename(&temporary, place)
    }

    /// Removes the link of a volume, and gives it to another volume with the same label.
    fn unmake(&self, linked: &BTreeMap<String, Linked>, old: &Linked) {
        if !plain::is_word(&old.label) || self.dir.as_os_str().is_empty() {
            return;
        }
        let place = self.dir.join(&old.label);
        if !std::fs::read_link(&place).is_ok_and(|to| to == old.device) {
            return;
        }
        if let Err(e) = std::fs::remove_file(&place) {
            message::warn(format!("{}: cannot be removed: {e}", place.display()));
        }
        let next = linked.iter().find(|(_, l)| l.label == old.label).map(|(id, _)| id.clone());
        match next {
            Some(id) => self.make(linked, &id),
            // Fails if there are other links.
            None => drop(std::fs::remove_dir(&self.dir)),
        }
    }
}

#[cfg(test)]
mod tests {
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
        // Disks from elsewhere can have the same label: the first one keeps the link, and the other one inherits it.
        links.add("b", "archive", one);
        assert_eq!(target(&dir, "archive").as_deref(), Some(zero));
        links.remove("a");
        assert_eq!(target(&dir, "archive").as_deref(), Some(one));
        links.remove("b");
        links.remove("unknown");
        assert!(!dir.exists(), "an empty directory goes");
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

    /// A label is written on the disk, also by other hosts.
    #[test]
    fn a_hostile_label_gets_no_link() {
        let outer = tempfile::tempdir().unwrap();
        let dir = outer.path().join("ubcache");
        let links = Links::new(dir.clone());
        for label in
            ["../escaped", "..", ".", "", "/etc/x", "a/b", "a\nb", "a\u{1b}[2J", "bcache0", " x", "\u{1}new"]
        {
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
