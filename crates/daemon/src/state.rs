//! The state directory: registered devices, names and export addresses of volumes, tunables that were set at run time.
//!
//! Owns one file, which is written completely beside the old file and then renamed over it, so after a crash the file has
//! the old or the new state. Only the daemon can read it. A change is made in memory even if the file cannot be written: what
//! is served does not depend on the file, and the write is tried again until it succeeds. A command calls `ready` before it
//! acts, so that it is refused instead; `check_writable` asks from time to time whether it would be. Must not know what is running, nor
//! the meaning of a tunable.

mod remembered;
mod room;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::ops::Range;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use serve::{Failure, message};

use crate::config::{Values, present_word};
use crate::expected::plain_words;
use crate::hub::{Hub, Kind};

use remembered::Remembered;
pub(crate) use remembered::{Known, Mark, Owner};

/// The state and its file.
pub(crate) struct State {
    path: PathBuf,
    now: Remembered,
    /// Why the file has not the present state; `None` if it has.
    not_stored: Option<String>,
    /// Why `ready` refused the last time; `None` if it did not.
    refusing: Option<String>,
    /// Whether the file system last said that a write would fail.
    seems_full: bool,
    /// The kind of the last error of a write.
    last_error: Option<ErrorKind>,
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

/// What to do about a file that cannot be used.
fn advice(path: &Path) -> String {
    let path = path.display();
    format!(
        "restore the file from a backup, or give it up with `mv {path} {path}.old`: volumes then get new names, and devices that \
         the configuration does not name have to be registered again"
    )
}

/// Reads the contents of the file, also of earlier versions, whose words for tunables get their present ones.
fn parse(path: &Path, bytes: &[u8]) -> Result<Remembered, Failure> {
    let refused = |why: String| Failure::Failed(format!("{}: {why}", path.display()));
    if bytes.iter().all(|byte| byte.is_ascii_whitespace() || *byte == 0) {
        return Err(refused(format!(
            "expected the state of the daemon, found an empty file: {}",
            advice(path)
        )));
    }
    let mut read: Remembered = serde_json::from_slice(bytes).map_err(|e| {
        let why = plain_words(&e.to_string());
        let text = format!("{}: is damaged: {why}: {}", path.display(), advice(path));
        Failure::Caused { text, source: Box::new(e) }
    })?;
    if !(FIRST_VERSION..=VERSION).contains(&read.version) {
        let found = read.version;
        return Err(refused(format!(
            "expected version {VERSION} of the state, found {found}: start the version of ubcache that wrote it, or {}",
            advice(path)
        )));
    }
    if let Some(name) = read.names.values().find(|name| !serve::plain::is_volume_name(name)) {
        return Err(refused(format!(
            "names: expected bcache and a number, found {name:?}: {}",
            advice(path)
        )));
    }
    for (key, value) in read.tunables.values_mut().flatten() {
        if let Some(present) = present_word(key, value) {
            *value = present;
        }
    }
    Ok(Remembered { version: VERSION, ..read })
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
                let read = parse(&path, &bytes)?;
                close_to_others(&path);
                read
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                Remembered { version: VERSION, ..Remembered::default() }
            }
            Err(e) => return Err(Failure::at(&path, "cannot be read", e)),
        };
        let (not_stored, refusing, last_error) = (None, None, None);
        Ok(State { path, now, not_stored, refusing, seems_full: false, last_error, hub: None, locks })
    }

    /// Sends events about the file to this hub.
    pub(crate) fn report_to(&mut self, hub: Arc<Hub>) {
        self.hub = Some(hub);
    }

    /// Why the file has not the present state; `None` if it has.
    pub(crate) fn not_stored(&self) -> Option<&str> {
        self.not_stored.as_deref()
    }

    /// Why a command that changes something would be refused now; `None` if nothing is known against it.
    pub(crate) fn refusing(&self) -> Option<&str> {
        self.refusing.as_deref()
    }

    /// The command that shows why the last write failed.
    pub(crate) fn next_command(&self) -> String {
        let dir = self.dir().display();
        match self.last_error {
            Some(ErrorKind::ReadOnlyFilesystem) => format!("findmnt --target {dir}"),
            Some(ErrorKind::PermissionDenied) => format!("ls -ld {dir}"),
            _ => format!("df {dir}"),
        }
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
        let mut text = serde_json::to_vec_pretty(&self.now).map_err(Failure::of)?;
        // Blanks at the end change no JSON.
        text.resize(text.len() + GROWTH, b' ');
        let tried = self.replace(&text);
        self.last_error = tried.as_ref().err().map(std::io::Error::kind).or(self.last_error);
        let path = self.path.display();
        let why = tried.as_ref().err().map(|e| format!("{path}: cannot be written: {e}"));
        let was_refusing = std::mem::replace(&mut self.refusing, why.clone()).is_some();
        match (why, tried) {
            (Some(why), Err(e)) => {
                if !was_refusing && self.not_stored.is_none() {
                    self.report("error", &format!("{why}; commands that change something are refused"));
                }
                let text = format!(
                    "{path}: cannot be written: {e}; nothing was changed, because the next start of the daemon would not know \
                     of it; make room in this directory or make it writable, then run the command again"
                );
                Err(Failure::Caused { text, source: Box::new(e) })
            }
            _ if was_refusing => {
                let text = format!("{}: can be written again", self.path.display());
                self.report("", &text);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Checks whether the state could be written, before a command needs it. The first check writes; a later one asks the file
    /// system, and writes only if the answer has changed.
    pub(crate) fn check_writable(&mut self, is_first: bool) {
        self.store_again();
        if self.not_stored.is_some() {
            return;
        }
        let seems_full = room::refusal(&self.path, GROWTH as u64).is_some();
        let changed = std::mem::replace(&mut self.seems_full, seems_full) != seems_full;
        if is_first || changed || (self.refusing.is_some() && !seems_full) {
            let _is_reported = self.ready();
        }
    }

    fn report(&self, level: &'static str, text: &str) {
        message::message(level, text);
        if let Some(hub) = &self.hub {
            hub.publish(Kind::State, None, level, text);
        }
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
        let error = self.write(&self.now).err();
        let why = error.as_ref().map(|e| format!("{path}: cannot be written: {e}"));
        let (level, text) = match &why {
            None if failed_before => ("", format!("{path}: is written again, and has all changes")),
            Some(why) if !failed_before => (
                "error",
                format!("{why}; the daemon tries again, and its next start may not know the last changes"),
            ),
            _ => ("", String::new()),
        };
        self.last_error = error.map(|e| e.kind()).or(self.last_error);
        self.not_stored = why;
        if !text.is_empty() {
            self.report(level, &text);
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

    /// Forgets a device, and the addresses and labels of its volumes. Commands still find its path by its key, by this label and
    /// by the name of its volume.
    pub(crate) fn remove_device(&mut self, path: &Path, key: &str, label: &str) {
        let stored = self.now.devices.get(path).map(|known| self.key_of(&known.uuid));
        self.change(|s| {
            if let Some(mark) = s.marks.get_mut(key) {
                label.clone_into(&mut mark.label);
            }
            s.devices.remove(path);
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
