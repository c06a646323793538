//! The state directory: registered devices, names and export addresses of volumes, tunables that were set at run time.
//!
//! Owns the state in memory. What is served does not depend on the file: a change is made in memory, and the writer, a thread
//! of its own, stores it and tries again until it succeeds. So nothing here waits for a file system, and the state can be on a
//! volume of this daemon. A command asks for a test before it acts, so that it is refused if the state cannot be written. Must
//! not know what is running, nor the meaning of a tunable.

mod file;
mod remembered;
mod room;
mod wait;
mod writer;

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serve::Failure;

use crate::config::Values;
use crate::hub::Hub;

use file::StateFile;
pub(crate) use file::replace_file;
use remembered::Remembered;
pub(crate) use remembered::{Known, Mark, Owner};
pub(crate) use wait::say_if_late;
pub(crate) use writer::Storing;
use writer::{WriteKind, Writer};

/// The state, and the writer of its file.
pub(crate) struct State {
    path: PathBuf,
    now: Arc<Remembered>,
    writer: Writer,
}

/// The name of a volume.
pub(crate) struct Name {
    pub(crate) name: String,
    /// The write that stores a new name.
    pub(crate) storing: Option<Storing>,
}

/// Numbers of volumes whose first name could not be stored; all are possible numbers of a ublk device.
const UNSTORED_NAMES: Range<u32> = 100_000..1_000_000;
/// Time between two tries to write a state that could not be written.
pub(crate) const STORED_AGAIN_EVERY: Duration = Duration::from_secs(5);

impl State {
    /// Locks the directory and reads the state. Makes the directory if it does not exist.
    ///
    /// # Errors
    /// If another daemon has the directory, or the state cannot be read. Without the state, volumes would get other names
    /// and addresses than before.
    pub(crate) fn open(dir: &Path) -> Result<State, Failure> {
        let (file, found, is_there) = StateFile::open(dir)?;
        let (path, now) = (file.path.clone(), Arc::new(found));
        let writer = Writer::start(file, is_there.then(|| now.clone()))?;
        Ok(State { path, now, writer })
    }

    /// Sends events about the file to this hub.
    pub(crate) fn report_to(&self, hub: Arc<Hub>) {
        self.writer.report_to(hub);
    }

    /// Why the file has not the present state; `None` if it has, or if it is being written.
    pub(crate) fn not_stored(&self) -> Option<String> {
        self.writer.status().not_stored
    }

    /// Why a command that changes something would be refused now; `None` if nothing is known against it.
    pub(crate) fn refusing(&self) -> Option<String> {
        self.writer.status().refusing
    }

    /// The writes that were asked for until now.
    pub(crate) fn storing(&self) -> Storing {
        self.writer.last()
    }

    /// Asks for a write of the present state, if the file has not got it.
    pub(crate) fn store_again(&self) -> Storing {
        self.writer.ask(self.now.clone(), WriteKind::Store)
    }

    /// Asks for a test whether the state can be written, before a command acts: a write of the present state, and room for more.
    pub(crate) fn test(&self) -> Storing {
        self.writer.ask(self.now.clone(), WriteKind::Test)
    }

    /// Checks whether the state could be written, before a command needs it. The first check writes. A later one asks the file
    /// system, and writes only if the answer has changed.
    pub(crate) fn check_writable(&self, is_first: bool) -> Storing {
        self.writer.ask(self.now.clone(), if is_first { WriteKind::Test } else { WriteKind::Check })
    }

    /// Whether the file has all these devices as the operator names them. Each has a path and a UUID.
    pub(crate) fn has_stored(&self, devices: &[(&Path, &str)]) -> bool {
        let stored = self.writer.status().stored;
        let is_in = |s: &Remembered, (path, uuid)| {
            s.devices.get(path).is_some_and(|k: &Known| k.uuid == uuid && k.named)
        };
        stored.is_some_and(|stored| devices.iter().all(|&one| is_in(&stored, one)))
    }

    /// Whether the file lacks a change that the next start needs.
    pub(crate) fn lacks_a_change(&self) -> bool {
        let stored = self.writer.status().stored;
        stored.is_none_or(|stored| stored.needed() != self.now.needed())
    }

    /// The command that shows why the last write failed.
    pub(crate) fn next_command(&self) -> String {
        let dir = self.dir().display();
        match self.writer.status().last_error {
            Some(ErrorKind::ReadOnlyFilesystem | ErrorKind::TimedOut) => format!("findmnt --target {dir}"),
            Some(ErrorKind::PermissionDenied) => format!("ls -ld {dir}"),
            _ => format!("df {dir}"),
        }
    }

    /// The state directory.
    pub(crate) fn dir(&self) -> &Path {
        self.path.parent().unwrap_or(&self.path)
    }

    fn change(&mut self, change: impl FnOnce(&mut Remembered)) {
        let mut next = (*self.now).clone();
        change(&mut next);
        if next != *self.now {
            self.now = Arc::new(next);
            self.writer.ask(self.now.clone(), WriteKind::Store);
        }
    }

    pub(crate) fn devices(&self) -> BTreeMap<PathBuf, Known> {
        self.now.devices.clone()
    }

    /// Stores a device. With `named` the operator has named it; a device that was named once stays named.
    pub(crate) fn add_device(&mut self, path: &Path, uuid: &str, named: bool) {
        let before = self.now.devices.values().any(|k| k.uuid == uuid && k.named);
        let known = Known { uuid: uuid.to_owned(), named: named || before };
        self.change(|s| {
            // The device is at another path now.
            s.devices.retain(|p, k| k.uuid != known.uuid || p == path);
            s.devices.insert(path.to_owned(), known);
        });
    }

    /// Forgets a device, and the addresses and labels of its volumes. Commands still find its path by its key, by this label and
    /// by the name of its volume.
    pub(crate) fn remove_device(&mut self, path: &Path, key: &str, label: &str) {
        let stored = self.now.devices.get(path).map(|known| self.key_of(&known.uuid));
        self.change(|s| {
            if let Some(mark) = s.marks.get_mut(key) {
                label.clone_into(&mut mark.label);
            }
            s.devices.remove(path);
            s.forget_dirty_disk(key);
            s.one_copy_since.remove(key);
            stored.iter().for_each(|key| s.forget_places(key));
        });
    }

    /// Forgets a path alone, because the device that was registered there is served at another path.
    pub(crate) fn remove_path(&mut self, path: &Path) {
        self.change(|s| drop(s.devices.remove(path)));
    }

    /// The key of the device with this UUID: of a cache device the UUID of its set, else the UUID itself.
    pub(crate) fn key_of(&self, uuid: &str) -> String {
        let cache = self.now.marks.iter().find(|(_, mark)| mark.identity.cache_uuid() == Some(uuid));
        cache.map_or(uuid, |(set, _)| set).to_owned()
    }

    /// The path of the registered device with this key.
    pub(crate) fn registered_path(&self, key: &str) -> Option<PathBuf> {
        let found = self.now.devices.iter().find(|(_, known)| self.key_of(&known.uuid) == key);
        found.map(|(path, _)| path.clone())
    }

    /// Stores the directory of the links to block devices; `None` for the default one. Returns the one before.
    pub(crate) fn set_links(&mut self, dir: Option<PathBuf>) -> Option<PathBuf> {
        let before = self.now.links.clone();
        self.change(|s| s.links = dir);
        before
    }

    /// Export addresses and the volumes that own them.
    pub(crate) fn places(&self) -> BTreeMap<String, Owner> {
        self.now.places.clone()
    }

    /// Makes a volume the owner of these addresses and of no others.
    pub(crate) fn set_places(&mut self, owner: &Owner, places: &[String]) {
        self.change(|s| {
            s.places.retain(|_, other| other.volume != owner.volume);
            s.places.extend(places.iter().map(|place| (place.clone(), owner.clone())));
        });
    }

    /// Removes the addresses and the label of a volume, or of all flash-only volumes of a set.
    pub(crate) fn forget_places(&mut self, id: &str) {
        self.change(|s| s.forget_places(id));
    }

    /// The volume that owns a label; the label is in small letters.
    pub(crate) fn label_owner(&self, label: &str) -> Option<String> {
        self.now.labels.get(label).cloned()
    }

    /// Makes a volume own no label.
    pub(crate) fn forget_label(&mut self, id: &str) {
        self.change(|s| s.labels.retain(|_, owner| owner != id));
    }

    /// Makes a volume the owner of this label, which is in small letters, and of no other.
    pub(crate) fn set_label_owner(&mut self, label: &str, id: &str) {
        self.change(|s| {
            s.labels.retain(|of, owner| owner != id || of == label);
            s.labels.insert(label.to_owned(), id.to_owned());
        });
    }

    /// Removes everything that is stored of a volume, because it was destroyed.
    pub(crate) fn forget_volume(&mut self, id: &str) {
        self.change(|s| {
            s.names.remove(id);
            s.tunables.remove(id);
            s.places.retain(|_, owner| owner.volume != id);
            s.labels.retain(|_, owner| owner != id);
        });
    }

    /// Stores the new label of a volume with its addresses. The volume does not own the former label any more.
    pub(crate) fn relabel(&mut self, id: &str, label: &str) {
        self.forget_label(id);
        self.change(|s| {
            s.places.values_mut().filter(|o| o.volume == id).for_each(|o| label.clone_into(&mut o.label));
        });
    }

    /// The identity of the device with this key.
    pub(crate) fn mark(&self, key: &str) -> Option<Mark> {
        self.now.marks.get(key).cloned()
    }

    /// The last paths of what had this key, label or name of a volume.
    pub(crate) fn last_paths(&self, name: &str) -> Vec<PathBuf> {
        let is_it = |key: &String, mark: &Mark| {
            let volume = self.now.names.get(key).map(String::as_str);
            *key == name.to_ascii_lowercase()
                || volume == Some(name)
                || (mark.label == name && !name.is_empty())
        };
        let found = self.now.marks.iter().filter(|(key, mark)| is_it(key, mark));
        found.filter_map(|(_, mark)| mark.path.clone()).collect()
    }

    pub(crate) fn set_mark(&mut self, key: &str, mark: Mark) {
        self.change(|s| drop(s.marks.insert(key.to_owned(), mark)));
    }

    /// Stores which registered disks have dirty data in a set, when its cache device is unregistered.
    pub(crate) fn set_left_dirty(&mut self, set: &str, disks: Vec<String>) {
        self.change(|s| match disks.is_empty() {
            true => drop(s.left_dirty.remove(set)),
            false => drop(s.left_dirty.insert(set.to_owned(), disks)),
        });
    }

    /// Removes what is stored of the dirty data of a set, or of a disk, because the device is served.
    pub(crate) fn forget_left_dirty(&mut self, key: &str) {
        self.change(|s| {
            s.left_dirty.remove(key);
            s.forget_dirty_disk(key);
        });
    }

    /// The set that had dirty data of the disk at this path when its cache device was unregistered.
    pub(crate) fn left_dirty_in(&self, path: &Path, uuid: Option<&str>) -> Option<String> {
        // A disk that was not found at the start has no UUID but the stored one.
        let uuid = uuid.or_else(|| Some(self.now.devices.get(path)?.uuid.as_str()))?;
        let found = self.now.left_dirty.iter().find(|(_, disks)| disks.iter().any(|disk| disk == uuid));
        found.map(|(set, _)| set.clone())
    }

    /// The name of a volume, if it has one.
    pub(crate) fn known_name(&self, id: &str) -> Option<String> {
        self.now.names.get(id).cloned()
    }

    /// The name of a volume. A volume without a name gets the first free `bcacheN`. If that cannot be stored, the caller has to
    /// take [`State::lasting_name`].
    pub(crate) fn name(&mut self, id: &str) -> Name {
        if let Some(name) = self.now.names.get(id) {
            return Name { name: name.clone(), storing: None };
        }
        let name = self.free_name(|n| n);
        self.change(|s| drop(s.names.insert(id.to_owned(), name.clone())));
        Name { name, storing: Some(self.storing()) }
    }

    /// Gives a volume whose first name could not be stored a name that follows from its identity. Otherwise the next start, at
    /// which other devices may answer first, could give the name to another disk, whose clients write to it.
    pub(crate) fn lasting_name(&mut self, id: &str) -> String {
        let hash = format::checksum::crc32c(id.as_bytes());
        let number = |n| UNSTORED_NAMES.start + hash.wrapping_add(n) % UNSTORED_NAMES.len() as u32;
        let lasting = self.free_name(number);
        self.change(|s| drop(s.names.insert(id.to_owned(), lasting.clone())));
        lasting
    }

    /// The first name that no volume has; `number` returns the number of the n-th try.
    fn free_name(&self, number: impl Fn(u32) -> u32) -> String {
        let taken = |name: &String| self.now.names.values().any(|n| n == name);
        (0u32..).map(|n| format!("bcache{}", number(n))).find(|n| !taken(n)).unwrap_or_default()
    }

    /// Tunables that were set at run time.
    pub(crate) fn tunables(&self, id: &str) -> Values {
        self.now.tunables.get(id).cloned().unwrap_or_default()
    }

    /// The buckets of a set in which there was damaged dirty data.
    pub(crate) fn damaged(&self, set: &str) -> Vec<u32> {
        self.now.damaged.get(set).cloned().unwrap_or_default()
    }

    /// Stores the buckets of a set in which there is damaged dirty data.
    pub(crate) fn set_damaged(&mut self, set: &str, buckets: Vec<u32>) {
        self.change(|s| match buckets.is_empty() {
            true => drop(s.damaged.remove(set)),
            false => drop(s.damaged.insert(set.to_owned(), buckets)),
        });
    }

    /// Stores that the dirty data of a disk has one copy only, from this Unix time on unless it had one copy before. Returns the time.
    pub(crate) fn has_one_copy(&mut self, disk: &str, now: u64) -> u64 {
        self.change(|s| {
            s.one_copy_since.entry(disk.to_owned()).or_insert(now);
        });
        self.now.one_copy_since.get(disk).copied().unwrap_or(now)
    }

    /// Forgets since when the dirty data of a disk has one copy only.
    pub(crate) fn has_two_copies(&mut self, disk: &str) {
        self.change(|s| {
            s.one_copy_since.remove(disk);
        });
    }

    /// Stores the value of a tunable; `None` forgets it.
    pub(crate) fn set_tunable(&mut self, id: &str, key: &str, value: Option<&str>) {
        self.change(|s| {
            let values = s.tunables.entry(id.to_owned()).or_default();
            match value {
                Some(value) => drop(values.insert(key.to_owned(), value.to_owned())),
                None => drop(values.remove(key)),
            }
            s.tunables.retain(|_, values| !values.is_empty());
        });
    }
}

#[cfg(test)]
mod tests;
