//! The output of `extract` and `salvage`: a file, a block device, or standard output.
//!
//! A file is written under a temporary name beside its own and renamed at the end, so an old file stays complete until the
//! new one is. A symbolic link stays, and the file to which it leads is replaced. Other users must not read the contents of a
//! device: a new file has mode 0600, and a file that replaces another has its mode and owner. A device that is in use or is part
//! of a set is not overwritten. Must not know what is written.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{BufWriter, ErrorKind, IsTerminal};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use format::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR};
use format::{Identity, SECTOR_BYTES, Sectors, identify};
use inspect::{ExtractError, FileSink, Sink, StreamSink};

use crate::failure::Failure;
use crate::{out, size};

/// The warning about devices that are read while they change.
pub(super) const CHANGES: &str = "a device that is in use changes while it is read: the copy is of one moment only if the file systems on \
                                  the volume are frozen (fsfreeze) from before the start to the end";

/// An output that is to be written.
pub(super) struct Image<'a> {
    /// A file, a block device, or `-` for standard output.
    pub(super) path: &'a Path,
    /// Overwrite what exists.
    pub(super) force: bool,
}

impl Image<'_> {
    /// Whether the contents go to standard output.
    pub(super) fn is_stdout(&self) -> bool {
        self.path.as_os_str() == "-"
    }

    /// Refuses an output that cannot be written or must not be: before anything is read from the devices, and again before it is written.
    ///
    /// None of the `inputs` is overwritten. The JSON and the contents cannot both go to standard output.
    pub(super) fn check(&self, inputs: &[&Path], json: bool) -> Result<(), Failure> {
        if !self.is_stdout() {
            return self.examine(inputs).map(drop);
        }
        if json {
            return Err(Failure::Usage(
                "--json and the contents cannot both go to standard output: write the contents to a file"
                    .into(),
            ));
        }
        if std::io::stdout().is_terminal() {
            return Err(Failure::Usage(
                "expected standard output to be a file or a pipe, found a terminal: redirect it".into(),
            ));
        }
        self.refuse_input(inputs, self.metadata().as_ref())
    }

    /// What is known of the output; `None` if it does not exist.
    pub(super) fn metadata(&self) -> Option<Metadata> {
        if !self.is_stdout() {
            return std::fs::metadata(self.path).ok();
        }
        std::io::stdout().as_fd().try_clone_to_owned().ok().and_then(|fd| File::from(fd).metadata().ok())
    }

    /// The failure of a copy. An error of the output names it.
    pub(super) fn failed(&self, e: ExtractError) -> Failure {
        match e {
            ExtractError::Output(e) if self.is_stdout() => Failure::because("standard output", e),
            ExtractError::Output(e) => Failure::at(self.path, "cannot be written", e),
            e => e.into(),
        }
    }

    /// Writes `sectors` sectors with `copy`. None of the `inputs` is overwritten.
    pub(super) fn write<T>(
        &self,
        inputs: &[&Path],
        sectors: Sectors,
        copy: impl FnOnce(&mut dyn Sink) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        if self.is_stdout() {
            let stdout = BufWriter::with_capacity(1 << 20, std::io::stdout().lock());
            return copy(&mut StreamSink::new(stdout));
        }
        let existing = self.examine(inputs)?;
        match &existing.meta {
            Some(m) if m.file_type().is_block_device() => self.to_device(sectors, copy),
            Some(m) if !m.is_file() => {
                // The output is a pipe, or a device such as /dev/null.
                let file = OpenOptions::new().write(true).open(self.path);
                let file = file.map_err(|e| Failure::at(self.path, "cannot be opened for writing", e))?;
                copy(&mut StreamSink::new(file))
            }
            _ => to_file(&existing, copy),
        }
    }

    /// The file or device to write, and what is known of it.
    fn examine(&self, inputs: &[&Path]) -> Result<Existing, Failure> {
        let existing = Existing::of(self.path)?;
        self.refuse_input(inputs, existing.meta.as_ref())?;
        let is_stream = |m: &Metadata| !m.is_file() && !m.is_dir() && !m.file_type().is_block_device();
        match &existing.meta {
            Some(m) if m.is_dir() => {
                let path = self.path.display();
                Err(Failure::Failed(format!("{path}: expected a file, found a directory")))
            }
            Some(m) if !self.force && !is_stream(m) => Err(exists(self.path, m)),
            _ => Ok(existing),
        }
    }

    fn refuse_input(&self, inputs: &[&Path], meta: Option<&Metadata>) -> Result<(), Failure> {
        let is_output = |input: &Path| {
            let input = std::fs::metadata(input).ok();
            meta.zip(input.as_ref()).is_some_and(|(a, b)| same_device(a, b))
        };
        match inputs.iter().find(|input| is_output(input)) {
            Some(input) => {
                Err(Failure::Usage(format!("{} cannot be both input and output", input.display())))
            }
            None => Ok(()),
        }
    }

    fn to_device<T>(
        &self,
        sectors: Sectors,
        copy: impl FnOnce(&mut dyn Sink) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let path = self.path;
        let claim = claim(path)?;
        let room = io::Device::info(&claim.device).sectors;
        if room < sectors {
            return Err(Failure::Failed(format!(
                "{}: expected at least {} sectors, found {room}",
                path.display(),
                sectors
            )));
        }
        let file = OpenOptions::new().write(true).open(path);
        let file = file.map_err(|e| Failure::at(path, "cannot be opened for writing", e))?;
        let copied = copy(&mut StreamSink::new(&file))?;
        file.sync_all().map_err(|e| Failure::at(path, "cannot be written", e))?;
        Ok(copied)
    }
}

fn to_file<T>(
    existing: &Existing,
    copy: impl FnOnce(&mut dyn Sink) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let path = &*existing.path;
    let claim = existing.claim()?;
    let (partial, file) = Partial::create(path)?;
    let about = file.try_clone().map_err(|e| Failure::at(path, "cannot be created", e))?;
    let copied = copy(&mut FileSink::new(file))?;
    if let Some(before) = &existing.meta {
        // A user who is neither root nor a member of that group cannot change the owner. The mode is restored in any
        // case.
        let _ = std::os::unix::fs::fchown(&about, Some(before.uid()), Some(before.gid()));
        let mode = std::fs::Permissions::from_mode(before.mode() & 0o777);
        about
            .set_permissions(mode)
            .map_err(|e| Failure::at(path, "its permissions cannot be restored", e))?;
    }
    partial.complete()?;
    drop(claim);
    Ok(copied)
}

/// The refusal to overwrite a file or a block device.
pub(super) fn exists(path: &Path, meta: &Metadata) -> Failure {
    let what = if meta.is_file() { size::human(meta.len()) } else { "a block device".into() };
    Failure::Failed(format!("{}: exists ({what}): overwrite it with --force", path.display()))
}

/// A path to write to, and what is there.
pub(super) struct Existing {
    /// The path, or the file to which it leads by a symbolic link: a new file replaces that file, not the link.
    pub(super) path: PathBuf,
    /// `None` if nothing is there.
    pub(super) meta: Option<Metadata>,
}

impl Existing {
    /// Examines a path.
    pub(super) fn of(path: &Path) -> Result<Existing, Failure> {
        let meta = match std::fs::metadata(path) {
            Ok(meta) => Some(meta),
            Err(e) if e.kind() == ErrorKind::NotFound => None,
            Err(e) => return Err(Failure::at(path, "cannot be examined", e)),
        };
        let resolved = match &meta {
            None if path.is_symlink() => {
                return Err(Failure::Failed(format!(
                    "{}: a symbolic link to a file that does not exist: give the name of that file",
                    path.display()
                )));
            }
            Some(m) if m.is_file() && path.is_symlink() => std::fs::canonicalize(path)
                .map_err(|e| Failure::at(path, "a symbolic link that cannot be resolved", e))?,
            _ => path.to_path_buf(),
        };
        Ok(Existing { path: resolved, meta })
    }

    /// Claims what is to be overwritten; `None` if nothing is there.
    pub(super) fn claim(&self) -> Result<Option<Claimed>, Failure> {
        self.meta.as_ref().map(|_| claim(&self.path)).transpose()
    }
}

/// Whether two paths lead to one file or device.
pub(super) fn same_device(a: &std::fs::Metadata, b: &std::fs::Metadata) -> bool {
    match (a.file_type().is_block_device(), b.file_type().is_block_device()) {
        (true, true) => a.rdev() == b.rdev(),
        (false, false) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    }
}

/// Claims a file or device that is to be overwritten, as a set claims its devices.
fn claim(path: &Path) -> Result<Claimed, Failure> {
    let options = blockio::OpenOptions::default();
    let driver = blockio::Driver::new(blockio::DriverOptions {
        backend: blockio::Backend::Pool,
        ..blockio::DriverOptions::default()
    })
    .map_err(Failure::of)?;
    let device = blockio::FileDevice::open(driver.reactor(), path, &options)?;
    let mut head = vec![0; SUPERBLOCK_BYTES];
    let file = OpenOptions::new().read(true).write(true).open(path);
    let file = file.map_err(|e| Failure::at(path, "cannot be opened", e))?;
    // Virtual machines lock their images with fcntl(2). The claim uses flock(2), which is independent of that lock.
    let locked = rustix::fs::fcntl_lock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive);
    // On a file system without such locks, no process can hold one.
    if let Err(rustix::io::Errno::AGAIN | rustix::io::Errno::ACCESS) = locked {
        return Err(Failure::Failed(format!("{}: in use: another process has locked it", path.display())));
    }
    // A file that is too short for a superblock has none.
    if file.read_exact_at(&mut head, SUPERBLOCK_SECTOR.0 * SECTOR_BYTES).is_ok()
        && identify(&head) != Identity::NotBcache
    {
        return Err(Failure::Failed(format!(
            "{}: is a device of a cache set: the output would overwrite it: choose another output, or wipe \
             the superblock first",
            path.display()
        )));
    }
    Ok(Claimed { device, _file: file, _driver: driver })
}

/// The claim of an output, which no other process can take while this value lives.
pub(super) struct Claimed {
    device: blockio::FileDevice,
    _file: File,
    _driver: blockio::Driver,
}

/// What the name of an incomplete file has behind that of the output, before the number of the process.
const PARTIAL: &str = ".partial-";

/// A file that is not complete yet. It is removed on drop, unless it was completed.
pub(super) struct Partial {
    partial: PathBuf,
    path: PathBuf,
    complete: bool,
}

impl Partial {
    /// Creates the file under its temporary name.
    pub(super) fn create(path: &Path) -> Result<(Partial, File), Failure> {
        let name = path
            .file_name()
            .ok_or_else(|| Failure::Failed(format!("{}: not a file name", path.display())))?;
        let mut partial = name.to_os_string();
        partial.push(format!("{PARTIAL}{}", std::process::id()));
        let partial = path.with_file_name(partial);
        warn_of_left(path);
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&partial);
        let file = file.map_err(|e| match e.kind() {
            ErrorKind::AlreadyExists => Failure::caused(
                format!(
                    "{}: exists: another process writes this output, or a killed process has left the file: remove it if no \
                     process writes it",
                    partial.display()
                ),
                e,
            ),
            _ => Failure::at(path, "cannot be created", e),
        })?;
        // Other processes see by the lock that this file is not left over. It works without locks, too.
        let _ = rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive);
        Ok((Partial { partial, path: path.to_path_buf(), complete: false }, file))
    }

    /// Gives the file its name.
    pub(super) fn complete(mut self) -> Result<(), Failure> {
        std::fs::rename(&self.partial, &self.path)
            .map_err(|e| Failure::at(&self.path, "cannot be created", e))?;
        self.complete = true;
        Ok(())
    }
}

/// Warns of incomplete files that killed processes have left. They are as large as the output, and have its contents.
fn warn_of_left(path: &Path) {
    let Some(name) = path.file_name().map(|name| [name.as_encoded_bytes(), PARTIAL.as_bytes()].concat())
    else {
        return;
    };
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let is_partial = entry
            .file_name()
            .as_encoded_bytes()
            .strip_prefix(&*name)
            .is_some_and(|pid| !pid.is_empty() && pid.iter().all(u8::is_ascii_digit));
        // The open of a pipe would wait.
        let is_file = is_partial && entry.file_type().is_ok_and(|t| t.is_file());
        let Some(file) = is_file.then(|| File::open(entry.path()).ok()).flatten() else { continue };
        if rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_ok() {
            out::warn(format!(
                "{}: an incomplete file that a killed process has left: remove it",
                path.with_file_name(entry.file_name()).display()
            ));
        }
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.complete {
            // An error changes nothing: the file is removed already, or it cannot be removed.
            let _ = std::fs::remove_file(&self.partial);
        }
    }
}
