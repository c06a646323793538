//! The state directory: registered devices, names and export addresses of volumes, tunables that were set at run time.
//!
//! Owns one file, which is written completely beside the old file and then renamed over it, so after a crash the file has
//! the old or the new state. Only the daemon can read it. A change is made in memory even if the file cannot be written: what
//! is served does not depend on the file, and the write is tried again until it succeeds. A command calls `ready` before it
//! acts, so that it is refused instead. Must not know what is running, nor the meaning of a tunable.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use serve::{Failure, message};

use crate::config::Values;
use crate::hub::{Hub, Kind};
use crate::identity::Identity;

/// A device that was registered.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Known {
    /// UUID in its superblock; another UUID at the same path is another device.
    pub(crate) uuid: String,
    /// Whether the operator has named the device; others were found by a scan that the configuration permits.
    #[serde(default = "yes")]
    pub(crate) named: bool,
}

fn yes() -> bool {
    true
}

/// The volume that owns an export address.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Owner {
    /// Key under which its name is stored: UUID of the backing device, or set and slot.
    pub(crate) volume: String,
    /// Its label, which may name its section of the configuration.
    pub(crate) label: String,
}

/// The identity of a device, which distinguishes it from its copies and from older states.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Mark {
    /// The hardware or file of the device.
    pub(crate) identity: Identity,
    /// The newest sequence number of its superblock that was read.
    pub(crate) sequence: u64,
}

#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Remembered {
    version: u32,
    devices: BTreeMap<PathBuf, Known>,
    /// Identities, by UUID of the set or of the backing device. An entry stays when the device is unregistered.
    marks: BTreeMap<String, Mark>,
    names: BTreeMap<String, String>,
    tunables: BTreeMap<String, Values>,
    /// Owners of export addresses, by the address as the configuration writes it.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    places: BTreeMap<String, Owner>,
}

/// The state and its file.
pub(crate) struct State {
    path: PathBuf,
    now: Remembered,
    /// Why the file has not the present state; `None` if it has.
    not_stored: Option<String>,
    /// Gets an event when the file cannot be written, and when it can be written again.
    hub: Option<Arc<Hub>>,
    /// The locks, which keep other daemons out while this one runs. The first one is the directory.
    locks: Vec<File>,
}

/// Present version of the file, and the first one, which has no identities.
const VERSION: u32 = 2;
const FIRST_VERSION: u32 = 1;
/// Mode of the file: only its owner reads and writes it.
const MODE: u32 = 0o600;
/// Bytes that the file may grow by through one command, for which `ready` tests the room.
const GROWTH: usize = 8 << 10;
/// Numbers of volumes whose first name could not be stored; all are possible numbers of a ublk device.
const UNSTORED_NAMES: Range<u32> = 100_000..1_000_000;
/// Time between two tries to write a state that could not be written.
pub(crate) const STORED_AGAIN_EVERY: Duration = Duration::from_secs(5);
/// Time limit for an earlier daemon to release the state directory, and the time between two tries.
const LOCKED_WITHIN: Duration = Duration::from_secs(5);
const BETWEEN_TRIES: Duration = Duration::from_millis(20);

/// Replaces a file of the state directory as a whole, so that after a crash it is the old or the new one.
pub(crate) fn replace_file(path: &Path, contents: &[u8]) -> std::io::Result<()> {
    let temporary = path.with_extension("new");
    write_durably(&temporary, contents)
        .and_then(|()| std::fs::rename(&temporary, path))
        .inspect_err(|_| drop(std::fs::remove_file(&temporary)))?;
    match path.parent() {
        Some(dir) => File::open(dir)?.sync_all(),
        None => Ok(()),
    }
}

/// Writes a file that only its owner can read.
fn write_durably(path: &Path, contents: &[u8]) -> std::io::Result<()> {
    let mut file = File::options().write(true).create(true).truncate(true).mode(MODE).open(path)?;
    // A temporary file that an interrupted write has left would keep its mode.
    file.set_permissions(PermissionsExt::from_mode(MODE))?;
    file.write_all(contents)?;
    file.sync_all()
}

/// Takes the lock of the state directory. A daemon that was killed has it until its requests in flight have ended.
fn wait_for_lock(lock: &File) -> Result<(), Errno> {
    let began = Instant::now();
    loop {
        match rustix::fs::flock(lock, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if began.elapsed() < LOCKED_WITHIN => {
                std::thread::sleep(BETWEEN_TRIES);
            }
            result => return result,
        }
    }
}

/// Locks the directory, and the file `lock` in it, which is what earlier versions lock.
///
/// The file is left out if it is not there and cannot be made, because the directory is full or read-only.
fn lock(dir: &Path) -> Result<Vec<File>, Failure> {
    let place = dir.join("lock");
    let opened = File::options().write(true).create(true).truncate(false).open(&place);
    let file = opened.or_else(|_| File::open(&place));
    let held = [Some(File::open(dir).map_err(|e| Failure::at(dir, "cannot be opened", e))?), file.ok()];
    let locks: Vec<File> = held.into_iter().flatten().collect();
    for lock in &locks {
        wait_for_lock(lock).map_err(|e| match e {
            Errno::WOULDBLOCK => Failure::Failed(format!(
                "{}: another daemon has this state directory: stop it, or give this one a --state-dir and a --socket of \
                 its own",
                dir.display()
            )),
            e => Failure::at(dir, "cannot be locked", e),
        })?;
    }
    Ok(locks)
}

/// Makes the file readable for its owner only, as earlier versions did not.
fn close_to_others(path: &Path) {
    let is_closed = std::fs::metadata(path).is_ok_and(|m| m.permissions().mode() & 0o7777 == MODE);
    if !is_closed && let Err(e) = std::fs::set_permissions(path, PermissionsExt::from_mode(MODE)) {
        message::warn(format!("{}: its permissions cannot be set: {e}", path.display()));
    }
}

impl State {
    /// Locks the directory and reads the state. Makes the directory if it does not exist.
    ///
    /// # Errors
    /// If another daemon has the directory, or the state cannot be read. Without the state, volumes would get other names
    /// and addresses than before.
    pub(crate) fn open(dir: &Path) -> Result<State, Failure> {
        std::fs::create_dir_all(dir).map_err(|e| Failure::at(dir, "cannot be created", e))?;
        let locks = lock(dir)?;
        let path = dir.join("state.json");
        let now = match std::fs::read(&path) {
            Ok(bytes) => {
                let read: Remembered =
                    serde_json::from_slice(&bytes).map_err(|e| Failure::at(&path, "cannot be parsed", e))?;
                if !(FIRST_VERSION..=VERSION).contains(&read.version) {
                    return Err(Failure::Failed(format!(
                        "{}: expected version {VERSION}, found {}",
                        path.display(),
                        read.version
                    )));
                }
                if let Some(name) = read.names.values().find(|name| !serve::plain::is_volume_name(name)) {
                    return Err(Failure::Failed(format!(
                        "{}: names: expected bcache and a number, found {name:?}",
                        path.display()
                    )));
                }
                close_to_others(&path);
                Remembered { version: VERSION, ..read }
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                Remembered { version: VERSION, ..Remembered::default() }
            }
            Err(e) => return Err(Failure::at(&path, "cannot be read", e)),
        };
        Ok(State { path, now, not_stored: None, hub: None, locks })
    }

    /// Sends events about the file to this hub.
    pub(crate) fn report_to(&mut self, hub: Arc<Hub>) {
        self.hub = Some(hub);
    }

    /// Why the file has not the present state; `None` if it has.
    pub(crate) fn not_stored(&self) -> Option<&str> {
        self.not_stored.as_deref()
    }

    /// The state directory.
    pub(crate) fn dir(&self) -> &Path {
        self.path.parent().unwrap_or(&self.path)
    }

    /// Tests whether the state can be written, before a command acts: writes the present state, and room for more.
    ///
    /// # Errors
    /// If it cannot be written, or there is too little room for what a command adds.
    pub(crate) fn ready(&mut self) -> Result<(), Failure> {
        self.store_again();
        let tried = || {
            let mut text = serde_json::to_vec_pretty(&self.now)?;
            // Blanks at the end change no JSON.
            text.resize(text.len() + GROWTH, b' ');
            self.replace(&text)
        };
        tried().map_err(|e| {
            let text = format!(
                "{}: cannot be written: {e}; nothing was changed, because the next start of the daemon would not know of \
                 it; make room in this directory or make it writable, then run the command again",
                self.path.display()
            );
            Failure::Caused { text, source: Box::new(e) }
        })
    }

    /// Tests as [`State::ready`] whether these devices can be stored as the operator names them; those that the file has
    /// need no room. Each has a path and a UUID.
    pub(crate) fn ready_for(&mut self, devices: &[(&Path, &str)]) -> Result<(), Failure> {
        let is_in =
            |s: &Remembered, (path, uuid)| s.devices.get(path).is_some_and(|k| k.uuid == uuid && k.named);
        let stored = std::fs::read(&self.path).ok().and_then(|text| serde_json::from_slice(&text).ok());
        match stored {
            Some(stored)
                if devices.iter().all(|&(path, uuid): &(&Path, &str)| is_in(&stored, (path, uuid))) =>
            {
                Ok(())
            }
            _ => self.ready(),
        }
    }

    /// Writes the state again if the last write has failed.
    pub(crate) fn store_again(&mut self) {
        if self.not_stored.is_some() {
            self.store();
        }
    }

    fn change(&mut self, change: impl FnOnce(&mut Remembered)) {
        let mut next = self.now.clone();
        change(&mut next);
        if next != self.now {
            self.now = next;
            self.store();
        }
    }

    /// Writes the state. A failure is reported once until a write succeeds.
    fn store(&mut self) {
        let path = self.path.display();
        let failed_before = self.not_stored.is_some();
        let why = self.write(&self.now).err().map(|e| format!("{path}: cannot be written: {e}"));
        let (level, text) = match &why {
            None if failed_before => ("", format!("{path}: is written again, and has all changes")),
            Some(why) if !failed_before => (
                "error",
                format!("{why}; the daemon tries again, and its next start may not know the last changes"),
            ),
            _ => ("", String::new()),
        };
        self.not_stored = why;
        if text.is_empty() {
            return;
        }
        message::message(level, &text);
        if let Some(hub) = &self.hub {
            hub.publish(Kind::State, None, level, &text);
        }
    }

    fn write(&self, next: &Remembered) -> std::io::Result<()> {
        self.replace(serde_json::to_string_pretty(next)?.as_bytes())
    }

    /// Replaces the file, if the directory is still the one that is locked: the file of another one, which was mounted over it,
    /// is not overwritten.
    fn replace(&self, contents: &[u8]) -> std::io::Result<()> {
        let there = std::fs::metadata(self.dir())?;
        let locked = self.locks.first().map(File::metadata).transpose()?;
        if there.is_dir() && locked.is_some_and(|l| (l.dev(), l.ino()) != (there.dev(), there.ino())) {
            return Err(std::io::Error::other(
                "another directory is there than the one that this daemon has locked: restart the daemon",
            ));
        }
        replace_file(&self.path, contents)
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

    /// Forgets a device, and the addresses of its volume.
    pub(crate) fn remove_device(&mut self, path: &Path) {
        self.change(|s| {
            if let Some(known) = s.devices.remove(path) {
                s.places.retain(|_, owner| owner.volume != known.uuid);
            }
        });
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

    /// Removes the addresses of a volume, or of all flash-only volumes of a set.
    pub(crate) fn forget_places(&mut self, id: &str) {
        let flash_only = format!("{id}/");
        let is_it = |owner: &Owner| owner.volume == id || owner.volume.starts_with(&flash_only);
        self.change(|s| s.places.retain(|_, owner| !is_it(owner)));
    }

    /// Removes everything that is stored of a volume, because it was destroyed.
    pub(crate) fn forget_volume(&mut self, id: &str) {
        self.change(|s| {
            s.names.remove(id);
            s.tunables.remove(id);
            s.places.retain(|_, owner| owner.volume != id);
        });
    }

    /// Stores the new label of a volume with its addresses.
    pub(crate) fn relabel(&mut self, id: &str, label: &str) {
        self.change(|s| {
            s.places.values_mut().filter(|o| o.volume == id).for_each(|o| label.clone_into(&mut o.label));
        });
    }

    /// The identity of the device with this key.
    pub(crate) fn mark(&self, key: &str) -> Option<Mark> {
        self.now.marks.get(key).cloned()
    }

    pub(crate) fn set_mark(&mut self, key: &str, mark: Mark) {
        self.change(|s| drop(s.marks.insert(key.to_owned(), mark)));
    }

    /// The name of a volume, if it has one.
    pub(crate) fn known_name(&self, id: &str) -> Option<String> {
        self.now.names.get(id).cloned()
    }

    /// The name of a volume. A volume without a name gets the first free `bcacheN`.
    ///
    /// If the name cannot be stored, the volume gets a name that follows from its identity. Otherwise the next start, at which
    /// other devices may answer first, could give the name to another disk, whose clients write to it.
    pub(crate) fn name(&mut self, id: &str) -> String {
        if let Some(name) = self.now.names.get(id) {
            return name.clone();
        }
        let first = self.free_name(|n| n);
        self.change(|s| drop(s.names.insert(id.to_owned(), first.clone())));
        if self.not_stored.is_none() {
            return first;
        }
        self.now.names.remove(id);
        let hash = format::checksum::crc32c(id.as_bytes());
        let lasting =
            self.free_name(|n| UNSTORED_NAMES.start + hash.wrapping_add(n) % UNSTORED_NAMES.len() as u32);
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
mod tests {
    use super::*;

    /// A state file of the first version is readable for all users, and has no identities.
    #[test]
    fn the_first_version_is_read_and_closed_to_others() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.json");
        let mode = || std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777;
        let first = r#"{"version": 1, "devices": {"/dev/x": {"uuid": "u1"}}, "names": {"u1": "bcache0"}}"#;
        std::fs::write(&path, first).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
        let mut state = State::open(dir.path()).unwrap();
        assert_eq!(mode(), 0o600);
        assert!(state.devices()[Path::new("/dev/x")].named && state.mark("u1").is_none());
        std::fs::write(dir.path().join("state.new"), "left behind").unwrap();
        state.set_mark("u1", Mark { identity: Identity::default(), sequence: 7 });
        assert_eq!(mode(), 0o600);
        drop(state);
        assert_eq!(State::open(dir.path()).unwrap().mark("u1").unwrap().sequence, 7);
    }

    /// Names become parts of paths of sockets, files and links, so a name must not leave its directory.
    #[test]
    fn a_name_that_is_a_path_is_refused() {
        for name in ["../../etc/passwd", "a/b", "..", "", "bcache0\\n"] {
            let dir = tempfile::tempdir().unwrap();
            let text = format!(r#"{{"version": 2, "names": {{"u1": "{name}"}}}}"#);
            std::fs::write(dir.path().join("state.json"), text).unwrap();
            let said = State::open(dir.path()).err().unwrap();
            assert!(said.message().unwrap().contains("expected bcache and a number"), "{said:?}");
        }
    }

    /// Regression: the names of volumes could not be stored, and at each start the volume that answered first was bcache0.
    #[test]
    fn names_that_cannot_be_stored_do_not_depend_on_the_order() {
        let volumes = ["u1", "u2", "u3", "u4"];
        let names = |backwards: bool| {
            let dir = tempfile::tempdir().unwrap();
            let mut state = State::open(dir.path()).unwrap();
            assert_eq!(state.name("stored"), "bcache0");
            // Not even root can replace a directory by a file.
            std::fs::create_dir_all(dir.path().join("state.new/x")).unwrap();
            let mut named: Vec<_> = volumes.iter().map(|id| (id.to_owned(), String::new())).collect();
            if backwards {
                named.reverse();
            }
            named.iter_mut().for_each(|(id, name)| *name = state.name(id));
            assert!(state.not_stored().is_some());
            named.sort();
            assert!(
                named.iter().all(|(_, name)| serve::plain::is_volume_name(name) && name.len() == 12),
                "{named:?}"
            );
            std::fs::remove_dir_all(dir.path().join("state.new")).unwrap();
            state.store_again();
            drop(state);
            let mut state = State::open(dir.path()).unwrap();
            let again: Vec<_> = volumes.iter().map(|id| (id.to_owned(), state.name(id))).collect();
            assert_eq!(again, named, "they stay when they can be stored");
            named
        };
        assert_eq!(names(false), names(true));
    }

    /// Regression: a directory was mounted over the state directory of a running daemon, which overwrote the file in it.
    #[test]
    fn another_directory_in_the_place_of_the_own_one_is_not_written() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("state");
        let mut state = State::open(&place).unwrap();
        std::fs::rename(&place, dir.path().join("moved")).unwrap();
        std::fs::create_dir(&place).unwrap();
        state.set_tunable("a", "writeback_percent", Some("5"));
        assert!(state.not_stored().unwrap().contains("another directory is there"));
        assert!(state.ready().is_err() && std::fs::read_dir(&place).unwrap().next().is_none());
    }

    #[test]
    fn what_was_said_is_there_again() {
        let dir = tempfile::tempdir().unwrap();
        let mut state = State::open(dir.path()).unwrap();
        assert!(State::open(dir.path()).err().unwrap().message().unwrap().contains("another daemon"));
        assert_eq!(state.name("a"), "bcache0");
        assert_eq!(state.name("b"), "bcache1");
        state.add_device(Path::new("/dev/x"), "u1", true);
        state.add_device(Path::new("/dev/y"), "u1", false);
        state.set_tunable("a", "writeback_percent", Some("5"));
        state.set_tunable("a", "writeback_delay", Some("1"));
        state.set_tunable("a", "writeback_delay", None);
        drop(state);
        let mut state = State::open(dir.path()).unwrap();
        assert_eq!((state.name("b"), state.name("a")), ("bcache1".into(), "bcache0".into()));
        assert_eq!(state.devices().keys().collect::<Vec<_>>(), [Path::new("/dev/y")], "moved");
        assert!(state.devices()[Path::new("/dev/y")].named, "what was named stays named");
        assert_eq!(state.tunables("a"), Values::from([("writeback_percent".into(), "5".into())]));
        drop(state);
        std::fs::write(dir.path().join("state.json"), "{").unwrap();
        assert!(State::open(dir.path()).is_err());
    }
}
