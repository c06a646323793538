//! The output of `extract` and `salvage`: a file, a block device, or standard output.
//!
//! A file is written under a temporary name beside its own and renamed at the end, so an old file stays complete until the
//! new one is. Other users must not read the contents of a device: a new file has mode 0600, and a file that replaces
//! another has its mode and owner. A device that is in use or is part of a set is not overwritten. Must not know what is written.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{BufWriter, IsTerminal};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use format::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR};
use format::{Identity, SECTOR_BYTES, Sectors, identify};
use inspect::{FileSink, Sink, StreamSink};

use crate::failure::Failure;
use crate::size;

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

/// What is written to an output.
struct ImageContents<'c, T> {
    sectors: Sectors,
    copy: Copying<'c, T>,
}

/// Writes the contents to a sink.
type Copying<'c, T> = Box<dyn FnOnce(&mut dyn Sink) -> Result<T, Failure> + 'c>;

impl Image<'_> {
    /// Whether the contents go to standard output.
    pub(super) fn is_stdout(&self) -> bool {
        self.path.as_os_str() == "-"
    }

    /// Refuses standard output if it is a terminal, or has the JSON.
    pub(super) fn check_stdout(&self, json: bool) -> Result<(), Failure> {
        if self.is_stdout() && json {
            return Err(Failure::Usage(
                "--json and the contents cannot both go to standard output: write the contents to a file"
                    .into(),
            ));
        }
        if self.is_stdout() && std::io::stdout().is_terminal() {
            return Err(Failure::Usage(
                "expected standard output to be a file or a pipe, found a terminal: redirect it".into(),
            ));
        }
        Ok(())
    }

    /// Writes `sectors` sectors with `copy`. None of the `inputs` is overwritten.
    pub(super) fn write<'c, T>(
        &self,
        inputs: &[&Path],
        sectors: Sectors,
        copy: impl FnOnce(&mut dyn Sink) -> Result<T, Failure> + 'c,
    ) -> Result<T, Failure> {
        if self.is_stdout() {
            let stdout = BufWriter::with_capacity(1 << 20, std::io::stdout().lock());
            return copy(&mut StreamSink::new(stdout));
        }
        self.to_path(inputs, ImageContents { sectors, copy: Box::new(copy) })
    }

    fn to_path<T>(&self, inputs: &[&Path], contents: ImageContents<'_, T>) -> Result<T, Failure> {
        let path = self.path;
        let meta = match std::fs::metadata(path) {
            Ok(meta) => Some(meta),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
            Err(e) => return Err(Failure::at(path, "cannot be examined", e)),
        };
        for input in inputs {
            if let (Some(out), Ok(input_meta)) = (&meta, std::fs::metadata(input))
                && same_device(out, &input_meta)
            {
                return Err(Failure::Usage(format!("{} cannot be both input and output", input.display())));
            }
        }
        match meta {
            Some(m) if !m.is_file() && !m.file_type().is_block_device() => {
                // The output is a pipe, or a device such as /dev/null.
                if m.is_dir() {
                    return Err(Failure::Failed(format!(
                        "{}: expected a file, found a directory",
                        path.display()
                    )));
                }
                let file = OpenOptions::new().write(true).open(path);
                let file = file.map_err(|e| Failure::at(path, "cannot be opened for writing", e))?;
                (contents.copy)(&mut StreamSink::new(file))
            }
            Some(m) if !self.force => {
                let what = if m.is_file() { size::human(m.len()) } else { "a block device".into() };
                Err(Failure::Failed(format!(
                    "{}: exists ({what}): overwrite it with --force",
                    path.display()
                )))
            }
            Some(m) if m.file_type().is_block_device() => self.to_device(contents),
            before => self.to_file(contents, before.as_ref()),
        }
    }

    /// Claims the output that is to be overwritten, as a set claims its devices.
    pub(super) fn claim(&self) -> Result<Claimed, Failure> {
        let path = self.path;
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
            return Err(Failure::Failed(format!(
                "{}: in use: another process has locked it",
                path.display()
            )));
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

    fn to_device<T>(&self, contents: ImageContents<'_, T>) -> Result<T, Failure> {
        let path = self.path;
        let claim = self.claim()?;
        let room = io::Device::info(&claim.device).sectors;
        if room < contents.sectors {
            return Err(Failure::Failed(format!(
                "{}: expected at least {} sectors, found {room}",
                path.display(),
                contents.sectors
            )));
        }
        let file = OpenOptions::new().write(true).open(path);
        let file = file.map_err(|e| Failure::at(path, "cannot be opened for writing", e))?;
        let copied = (contents.copy)(&mut StreamSink::new(&file))?;
        file.sync_all().map_err(|e| Failure::at(path, "cannot be written", e))?;
        Ok(copied)
    }

    fn to_file<T>(&self, contents: ImageContents<'_, T>, before: Option<&Metadata>) -> Result<T, Failure> {
        let claim = before.map(|_| self.claim()).transpose()?;
        let (partial, file) = Partial::create(self.path)?;
        let about = file.try_clone().map_err(|e| Failure::at(self.path, "cannot be created", e))?;
        let copied = (contents.copy)(&mut FileSink::new(file))?;
        if let Some(before) = before {
            // A user who is neither root nor a member of that group cannot change the owner. The mode is restored in any
            // case.
            let _ = std::os::unix::fs::fchown(&about, Some(before.uid()), Some(before.gid()));
            let mode = std::fs::Permissions::from_mode(before.mode() & 0o777);
            about
                .set_permissions(mode)
                .map_err(|e| Failure::at(self.path, "its permissions cannot be restored", e))?;
        }
        partial.complete()?;
        drop(claim);
        Ok(copied)
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

/// The claim of an output, which no other process can take while this value lives.
pub(super) struct Claimed {
    device: blockio::FileDevice,
    _file: File,
    _driver: blockio::Driver,
}

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
        partial.push(format!(".partial-{}", std::process::id()));
        let partial = path.with_file_name(partial);
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&partial);
        let file = file.map_err(|e| Failure::at(path, "cannot be created", e))?;
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

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.complete {
            // An error changes nothing: the file is removed already, or it cannot be removed.
            let _ = std::fs::remove_file(&self.partial);
        }
    }
}
