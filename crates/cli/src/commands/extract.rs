//! `ubcache extract`: copies the logical contents of a cached device or volume, and changes nothing on the devices.
//!
//! A file is written under a temporary name beside its own and renamed at the end, so an old file stays complete until the
//! new one is. Other users must not read the contents of a device: a new file has mode 0600, and a file that replaces
//! another has its mode and owner. The command does not overwrite a device that is in use or is part of a set.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{BufWriter, IsTerminal};
use std::ops::ControlFlow;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use format::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR};
use format::{Identity, Inode, SECTOR_BYTES, counted, form, identify};
use inspect::extract::Extracted;
use inspect::{
    DamagedDirty, ExtractOptions, Extraction, FileSink, Mode, ReadAt, SetView, Sink, StreamSink, Target,
};

use super::IN_USE;
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::read_only::ReadOnlyOpener;
use crate::{out, size};

/// Copy the contents of a cached device or volume out of a set
///
/// The cache merged over the backing device, as a user of the running device would read it. Both are opened read-only
/// and nothing is changed: works on a set that was not shut down.
#[derive(Args, Debug)]
pub(crate) struct Extract {
    /// Cache device
    #[arg(short = 'C', long = "cache", value_name = "DEV")]
    cache: PathBuf,
    /// Backing device
    #[arg(short = 'B', long = "backing", value_name = "DEV", required_unless_present = "volume")]
    #[arg(conflicts_with = "volume")]
    backing: Option<PathBuf>,
    /// The flash-only volume in this slot
    #[arg(long, value_name = "SLOT")]
    volume: Option<u32>,
    /// Output: a file, a block device, or - for standard output
    #[arg(short = 'o', long = "output", value_name = "FILE|-")]
    output: PathBuf,
    /// Overwrite the output if it exists
    #[arg(long)]
    force: bool,
    /// Ignore clean cached data and read these ranges from the backing device
    #[arg(long)]
    dirty_only: bool,
    /// Continue at damage and report each range that is lost or uncertain; the exit status is then 1
    #[arg(long)]
    best_effort: bool,
    /// What the output gets in place of dirty data that is damaged: does not have its checksum in the cache
    ///
    /// The command names the damaged ranges in each case, and the exit status is then 1. Damaged clean data is read from
    /// the backing device. [default: refuse, or zeros with --best-effort]
    #[arg(long, value_name = "WHAT", value_enum, hide_default_value = true)]
    damaged: Option<OnDamage>,
    /// Read devices that another process writes to; the contents may be inconsistent
    #[arg(long)]
    in_use: bool,
    /// Print JSON about what was extracted
    #[arg(long)]
    json: bool,
}

/// The values of `--damaged`.
#[derive(Clone, Copy, ValueEnum, Debug)]
enum OnDamage {
    /// Write no output, and name the damaged ranges
    Refuse,
    /// Write zeros
    Zeros,
    /// Write the older data of the backing device; zeros for a volume without one
    Older,
    /// Write the damaged bytes
    AsIs,
}

impl Extract {
    fn options(&self) -> ExtractOptions {
        let damaged = match (self.damaged, self.best_effort) {
            (Some(OnDamage::Refuse), _) | (None, false) => DamagedDirty::Refuse,
            (Some(OnDamage::Zeros), _) | (None, true) => DamagedDirty::Zeros,
            (Some(OnDamage::Older), _) => DamagedDirty::Older,
            (Some(OnDamage::AsIs), _) => DamagedDirty::AsIs,
        };
        ExtractOptions { dirty_only: self.dirty_only, best_effort: self.best_effort, damaged }
    }

    pub(crate) fn run(&self) -> Result<(), Failure> {
        let to_stdout = self.output.as_os_str() == "-";
        if to_stdout && self.json {
            return Err(Failure::Usage(
                "--json and the contents cannot both go to standard output: write the \
                                       contents to a file"
                    .into(),
            ));
        }
        if to_stdout && std::io::stdout().is_terminal() {
            return Err(Failure::Usage(
                "expected standard output to be a file or a pipe, found a terminal: redirect it".into(),
            ));
        }
        if self.in_use {
            out::warn(
                "a device that is in use changes while it is read: the copy is of one moment only if the file systems on \
                 the volume are frozen (fsfreeze) from before the start to the end",
            );
        }
        let opener = ReadOnlyOpener::new(self.in_use, IN_USE)?;
        let cache = opener.open(&self.cache)?;
        let backing = self.backing.as_ref().map(|p| opener.open(p)).transpose()?;
        let mode = if self.best_effort { Mode::BestEffort } else { Mode::Strict };
        let view = SetView::open(&cache.source, mode)?;
        let target = match (&backing, self.volume) {
            (Some(b), _) => Target::Cached(&b.source as &dyn ReadAt),
            (None, Some(slot)) => Target::Volume(Inode(slot)),
            (None, None) => return Err(Failure::Usage("expected -B or --volume".into())),
        };
        let extraction = Extraction::new(&view, &cache.source, target, self.options())?;
        let extracted = if to_stdout {
            run(
                &extraction,
                &mut StreamSink::new(BufWriter::with_capacity(1 << 20, std::io::stdout().lock())),
            )?
        } else {
            self.to_path(&extraction)?
        };
        self.report(&extracted)
    }

    fn to_path(&self, extraction: &Extraction<'_>) -> Result<Extracted, Failure> {
        let path = &self.output;
        let meta = match std::fs::metadata(path) {
            Ok(meta) => Some(meta),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
            Err(e) => return Err(Failure::at(path, "cannot be examined", e)),
        };
        for input in [Some(&self.cache), self.backing.as_ref()].into_iter().flatten() {
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
                run(extraction, &mut StreamSink::new(file))
            }
            Some(m) if !self.force => {
                let what = if m.is_file() { size::human(m.len()) } else { "a block device".into() };
                Err(Failure::Failed(format!(
                    "{}: exists ({what}): overwrite it with --force",
                    path.display()
                )))
            }
            Some(m) if m.file_type().is_block_device() => self.to_device(extraction),
            before => self.to_file(extraction, before.as_ref()),
        }
    }

    /// Claims the output that is to be overwritten, as a set claims its devices.
    fn claim(&self) -> Result<Claimed, Failure> {
        let path = &self.output;
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

    fn to_device(&self, extraction: &Extraction<'_>) -> Result<Extracted, Failure> {
        let path = &self.output;
        let claim = self.claim()?;
        let room = io::Device::info(&claim.device).sectors;
        if room < extraction.sectors() {
            return Err(Failure::Failed(format!(
                "{}: expected at least {} sectors, found {room}",
                path.display(),
                extraction.sectors()
            )));
        }
        let file = OpenOptions::new().write(true).open(path);
        let file = file.map_err(|e| Failure::at(path, "cannot be opened for writing", e))?;
        let extracted = run(extraction, &mut StreamSink::new(&file))?;
        file.sync_all().map_err(|e| Failure::at(path, "cannot be written", e))?;
        Ok(extracted)
    }

    fn to_file(&self, extraction: &Extraction<'_>, before: Option<&Metadata>) -> Result<Extracted, Failure> {
        let claim = before.map(|_| self.claim()).transpose()?;
        let (partial, file) = Partial::create(&self.output)?;
        let about = file.try_clone().map_err(|e| Failure::at(&self.output, "cannot be created", e))?;
        let extracted = run(extraction, &mut FileSink::new(file))?;
        if let Some(before) = before {
            // A user who is neither root nor a member of that group cannot change the owner. The mode is restored in any
            // case.
            let _ = std::os::unix::fs::fchown(&about, Some(before.uid()), Some(before.gid()));
            let mode = std::fs::Permissions::from_mode(before.mode() & 0o777);
            about
                .set_permissions(mode)
                .map_err(|e| Failure::at(&self.output, "its permissions cannot be restored", e))?;
        }
        partial.complete()?;
        drop(claim);
        Ok(extracted)
    }

    fn report(&self, e: &Extracted) -> Result<(), Failure> {
        if self.json {
            let mut doc = serde_json::to_value(e).map_err(Failure::of)?;
            if let Some(map) = doc.as_object_mut() {
                map.insert("schema_version".into(), inspect::SCHEMA_VERSION.into());
            }
            out::print_json(&doc)?;
        } else {
            let size = |sectors: u64| size::human(sectors.saturating_mul(512));
            out::note(format!(
                "{} extracted: {} dirty and {} clean from the cache, {} from the backing device, {} zeros",
                size(e.sectors),
                size(e.dirty_sectors),
                size(e.clean_sectors),
                size(e.backing_sectors),
                size(e.zero_sectors)
            ));
        }
        for note in &e.notes {
            out::note(note);
        }
        e.warnings.iter().for_each(out::warn);
        for lost in &e.lost {
            out::warn(format!("sectors {}+{} of the volume: {}", lost.start, lost.sectors, lost.reason));
        }
        if e.lost_sectors > 0 {
            return Err(Failure::Failed(format!(
                "{} {} lost",
                counted(e.lost_sectors, "sector"),
                form(e.lost_sectors, "is", "are")
            )));
        }
        // With best effort, errors have become notes.
        if self.best_effort && !e.notes.is_empty() { Err(Failure::Found) } else { Ok(()) }
    }
}

fn same_device(a: &std::fs::Metadata, b: &std::fs::Metadata) -> bool {
    match (a.file_type().is_block_device(), b.file_type().is_block_device()) {
        (true, true) => a.rdev() == b.rdev(),
        (false, false) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    }
}

fn run(extraction: &Extraction<'_>, sink: &mut dyn Sink) -> Result<Extracted, Failure> {
    let mut progress = out::Progress::new("extracting");
    let mut interrupt = Interrupt::new()?;
    let result = extraction.run(sink, &mut |p| {
        progress.bytes(p.done.bytes(), p.total.bytes());
        if interrupt.came() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    Ok(result?)
}

/// The claim of an output, which no other process can take while this value lives.
struct Claimed {
    device: blockio::FileDevice,
    _file: File,
    _driver: blockio::Driver,
}

/// A file that is not complete yet. It is removed on drop, unless it was completed.
struct Partial {
    partial: PathBuf,
    path: PathBuf,
    complete: bool,
}

impl Partial {
    fn create(path: &Path) -> Result<(Partial, File), Failure> {
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

    fn complete(mut self) -> Result<(), Failure> {
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
