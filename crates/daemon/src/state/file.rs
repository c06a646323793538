//! The files of the state directory: the locks, and a file that is read and replaced as a whole.
//!
//! Owns the rule that a file has its old or its new contents after a crash, and that only the daemon can read it. All of it waits
//! for the file system. Must not know when the state is stored.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use serve::{Failure, message};

use super::remembered::Remembered;
use crate::config::present_word;
use crate::expected::plain_words;

/// Present version of the file, and the first one, which has no identities.
const VERSION: u32 = 2;
const FIRST_VERSION: u32 = 1;
/// Mode of the file: only its owner reads and writes it.
const MODE: u32 = 0o600;
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
fn wait_for_lock(lock: &File, dir: &Path) -> Result<(), Errno> {
    let (began, mut is_said) = (Instant::now(), false);
    loop {
        match rustix::fs::flock(lock, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if began.elapsed() < LOCKED_WITHIN => {
                if !std::mem::replace(&mut is_said, true) {
                    message::note(format!(
                        "{}: another daemon has this state directory; waiting for its end for at most {} s",
                        dir.display(),
                        LOCKED_WITHIN.as_secs()
                    ));
                }
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
        wait_for_lock(lock, dir).map_err(|e| match e {
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

/// The file of the state, and the locks of its directory.
pub(super) struct StateFile {
    pub(super) path: PathBuf,
    /// The locks, which keep other daemons out while this one runs. The first one is the directory.
    locks: Vec<File>,
}

impl StateFile {
    /// Locks the directory and reads the state. Makes the directory if it does not exist. The second value tells whether there is
    /// a file.
    ///
    /// # Errors
    /// If another daemon has the directory, or the state cannot be read.
    pub(super) fn open(dir: &Path) -> Result<(StateFile, Remembered, bool), Failure> {
        std::fs::create_dir_all(dir).map_err(|e| Failure::at(dir, "cannot be created", e))?;
        let locks = lock(dir)?;
        let path = dir.join("state.json");
        let (found, is_there) = match std::fs::read(&path) {
            Ok(bytes) => {
                let read = parse(&path, &bytes)?;
                close_to_others(&path);
                (read, true)
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                (Remembered { version: VERSION, ..Remembered::default() }, false)
            }
            Err(e) => return Err(Failure::at(&path, "cannot be read", e)),
        };
        Ok((StateFile { path, locks }, found, is_there))
    }

    /// The state directory.
    fn dir(&self) -> &Path {
        self.path.parent().unwrap_or(&self.path)
    }

    /// Replaces the file, if the directory is still the one that is locked: the file of another one, which was mounted over it,
    /// is not overwritten.
    pub(super) fn replace(&self, contents: &[u8]) -> std::io::Result<()> {
        let there = std::fs::metadata(self.dir())?;
        let locked = self.locks.first().map(File::metadata).transpose()?;
        if there.is_dir() && locked.is_some_and(|l| (l.dev(), l.ino()) != (there.dev(), there.ino())) {
            return Err(std::io::Error::other(
                "another directory is there than the one that this daemon has locked: restart the daemon",
            ));
        }
        replace_file(&self.path, contents)
    }
}
