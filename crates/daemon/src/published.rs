//! Publishes the labels of block devices to udev. udev cannot read a label: it is on the backing device, in front of the volume.
//!
//! Owns one file for each block device, with the name of the device in the kernel and its label as a variable of udev. The rule
//! of the package imports it and makes `/dev/ubcache/LABEL`, so systemd has a unit for that path. After each change the module
//! asks the kernel for a `change` event of the device, for which udev evaluates the rule again. Must not know which volumes there
//! are.

use std::fs::Permissions;
use std::io::{self, ErrorKind};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serve::{exports, message, plain};

/// Directory of the files. The rule of udev names it.
const DIR: &str = "/run/ubcache/labels";

/// Devices of the kernel, by their names.
const SYS: &str = "/sys/class/block";

/// Start of the names of devices that stay with their volume when the daemon is killed.
const STAYS: &str = "ublkb";

/// The files.
pub(crate) struct PublishedLabels {
    dir: PathBuf,
    sys: PathBuf,
}

impl Default for PublishedLabels {
    fn default() -> PublishedLabels {
        PublishedLabels { dir: DIR.into(), sys: SYS.into() }
    }
}

impl PublishedLabels {
    /// Publishes the label of a device. A label that udev would change or split has no file.
    pub(crate) fn set(&self, device: &Path, label: &str) {
        let Some(name) = name_of(device) else { return };
        if !plain::is_new_label(label) || label.contains(' ') {
            return self.remove(device);
        }
        let text = text_of(label);
        self.remove_files(|other, there| other != name && there == text);
        let file = self.dir.join(name);
        if std::fs::read_to_string(&file).is_ok_and(|there| there == text) {
            return;
        }
        match self.write(&file, &text) {
            Ok(()) => self.report_change(name),
            Err(e) => {
                message::warn(format!("{}: udev does not get the label of {name}: {e}", file.display()))
            }
        }
    }

    /// The device has no label any more.
    pub(crate) fn remove(&self, device: &Path) {
        let Some(name) = name_of(device) else { return };
        self.remove_file(name);
    }

    /// The device has no label any more except this one, if it is published.
    pub(crate) fn remove_except(&self, device: &Path, label: &str) {
        let Some(name) = name_of(device) else { return };
        let there = std::fs::read_to_string(self.dir.join(name));
        if !there.is_ok_and(|there| there == text_of(label)) {
            self.remove_file(name);
        }
    }

    /// The device goes away, and its link with it. A `change` event would make udev read a device that may be ending.
    pub(crate) fn forget(&self, device: &Path) {
        if let Some(name) = name_of(device) {
            let _ = std::fs::remove_file(self.dir.join(name));
        }
    }

    /// Removes the files of an earlier daemon, except of devices that still belong to their volumes.
    ///
    /// A device of ublk that a crash has left still belongs to its volume: without its file, udev would remove the link, and
    /// systemd would unmount what is mounted by that name. A loop device stays in the kernel after its detachment, and another
    /// process can attach another file to it.
    pub(crate) fn remove_stale(&self) {
        self.remove_files(|name, _| !name.starts_with(STAYS) || !self.sys.join(name).exists());
    }

    /// Removes all files, because no daemon makes links in the directory of the rule any more.
    pub(crate) fn remove_all(&self) {
        self.remove_files(|_, _| true);
    }

    /// Removes the files for whose name and text `is_wrong` is true.
    fn remove_files(&self, is_wrong: impl Fn(&str, &str) -> bool) {
        for entry in std::fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let there = std::fs::read_to_string(entry.path()).unwrap_or_default();
            if let Some(name) = entry.file_name().to_str().filter(|name| is_wrong(name, &there)) {
                self.remove_file(name);
            }
        }
    }

    fn write(&self, file: &Path, text: &str) -> io::Result<()> {
        std::fs::create_dir_all(&self.dir)?;
        // No device has a name like this.
        let new = self.dir.join(".new");
        std::fs::write(&new, text)?;
        std::fs::set_permissions(&new, Permissions::from_mode(0o644))?;
        std::fs::rename(&new, file)
    }

    fn remove_file(&self, name: &str) {
        let file = self.dir.join(name);
        match std::fs::remove_file(&file) {
            Ok(()) => self.report_change(name),
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => message::warn(format!("{}: cannot be removed: {e}", file.display())),
        }
    }

    /// Asks the kernel for an event. A device that has gone has none, and a host without udev needs none.
    fn report_change(&self, name: &str) {
        let _ = std::fs::write(self.sys.join(name).join("uevent"), "change");
    }
}

/// What the rule of udev imports.
fn text_of(label: &str) -> String {
    format!("UBCACHE_LABEL={label}\n")
}

/// The name of a block device of this program in the kernel.
fn name_of(device: &Path) -> Option<&str> {
    let name = device.strip_prefix("/dev").ok()?.to_str()?;
    let is_ours = exports::device_prefixes().any(|prefix| name.starts_with(prefix)) && !name.contains('/');
    is_ours.then_some(name)
}

#[cfg(test)]
impl PublishedLabels {
    /// Files below a directory that stands for the root.
    pub(crate) fn below(root: &Path) -> PublishedLabels {
        PublishedLabels { dir: root.join("labels"), sys: root.join("sys") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// udev evaluates the tests of a rule before its import, so they have to be rules of their own.
    #[test]
    fn the_rule_of_the_package_imports_the_file_before_it_tests_the_label() {
        let rules = include_str!("../../../packaging/udev/69-ubcache-volumes.rules");
        let line = |words: &str| rules.lines().position(|l| !l.starts_with('#') && l.contains(words));
        let import = line(&format!("IMPORT{{file}}=\"{DIR}/$kernel\"")).expect("an import");
        let link = line("SYMLINK+=\"ubcache/$env{UBCACHE_LABEL}\"").expect("a link");
        assert!(import < link, "line {import}, then line {link}");
    }

    #[test]
    fn udev_gets_a_label_and_an_event_for_each_change() {
        let root = tempfile::tempdir().unwrap();
        let published = PublishedLabels::below(root.path());
        let (file, event) = (root.path().join("labels/ublkb0"), root.path().join("sys/ublkb0/uevent"));
        std::fs::create_dir_all(event.parent().unwrap()).unwrap();
        let text = || std::fs::read_to_string(&file).ok();
        let changed = || std::fs::remove_file(&event).is_ok();
        let device = Path::new("/dev/ublkb0");
        published.set(device, "data");
        assert_eq!((text().as_deref(), changed()), (Some("UBCACHE_LABEL=data\n"), true));
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o644);
        published.set(device, "data");
        assert!(!changed(), "nothing has changed");
        published.set(device, "films");
        assert_eq!((text().as_deref(), changed()), (Some("UBCACHE_LABEL=films\n"), true));
        published.remove(device);
        assert_eq!((text(), changed()), (None, true));
        published.remove(device);
        assert!(!changed());
        published.set(device, "data");
        assert!(changed());
        published.forget(device);
        assert_eq!((text(), changed()), (None, false), "udev reads no device that goes away");
        // What udev would not take as it is, and what is no device of this program.
        for (device, label) in
            [("/dev/ublkb0", "a b"), ("/dev/ublkb0", "a\nX=1"), ("/dev/sda", "x"), ("/dev/ublkb0/../x", "x")]
        {
            published.set(Path::new(device), label);
        }
        assert_eq!(std::fs::read_dir(root.path().join("labels")).unwrap().count(), 0);
    }

    /// A loop device stays in the kernel after its detachment. When another file was attached to it, udev made the link of the
    /// volume to that file.
    #[test]
    fn files_of_an_earlier_daemon_are_removed_except_of_devices_that_stay_with_their_volume() {
        let root = tempfile::tempdir().unwrap();
        let published = PublishedLabels::below(root.path());
        let has = |name: &str| root.path().join("labels").join(name).exists();
        let (ublk, other) = (Path::new("/dev/ublkb0"), Path::new("/dev/loop3"));
        for name in ["ublkb0", "loop3"] {
            std::fs::create_dir_all(root.path().join("sys").join(name)).unwrap();
        }
        published.set(ublk, "data");
        published.set(other, "films");
        published.remove_stale();
        assert_eq!((has("ublkb0"), has("loop3")), (true, false), "the device of ublk is the volume's");
        // The volume has another device now.
        published.set(other, "data");
        assert_eq!((has("ublkb0"), has("loop3")), (false, true), "a label leads to one device");
        published.set(ublk, "films");
        std::fs::remove_dir_all(root.path().join("sys")).unwrap();
        published.remove_stale();
        assert!(!has("ublkb0"), "the device has gone");
        published.set(ublk, "films");
        published.remove_all();
        assert!(!has("ublkb0"));
    }
}
