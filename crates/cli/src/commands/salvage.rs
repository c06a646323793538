//! `ubcache salvage`: copies the contents of a disk out of a damaged set, with a map of what is certain.
//!
//! Crate `repair` plans the repair in memory, judges, and extracts. `image` writes the output. This file opens the devices for
//! reading, and writes the map and the summary.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::ops::ControlFlow;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use format::{Inode, Uuid, counted};
use inspect::{DamagedDirty, ReadAt, Sink};
use repair::{MapLine, SalvageError, SalvageOptions, SalvageTarget, Salvaged};
use serve::plain;

use super::IN_USE;
use super::image::{CHANGES, Claimed, Existing, Image, Partial, exists, same_device};
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::read_only::ReadOnlyOpener;
use crate::{out, size};

const EXAMPLE: &str =
    "Example: ubcache salvage -C /dev/nvme0n1p4 -B /dev/sdb -o /backup/disk.img --map /backup/disk.map";

/// Copy the contents of a disk out of a damaged set, with a map of what is certain
///
/// For sets that `ubcache extract` refuses. It rebuilds damaged structures as `ubcache repair` does, but in memory. It
/// opens all devices read-only and changes nothing on them. The output is the disk as a client of the running set would
/// read it, as far as that is known. The map has a line of JSON for each range of the disk. A range is *certain* if no
/// damaged and no guessed structure could have decided about its bytes. It is *uncertain* if such a structure could have
/// decided. It is *lost* if its data cannot be read or is damaged. The output then has zeros, or what --damaged says.
/// Exit code 0: everything is certain. Exit code 1: a range is not certain, or there is no output.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Salvage {
    /// Cache device
    #[arg(short = 'C', long = "cache", value_name = "DEV")]
    cache: PathBuf,
    /// Backing device to copy; give the other backing devices of the set behind it, because they help to rebuild structures
    ///
    /// With --volume no backing device is copied.
    #[arg(short = 'B', long = "backing", value_name = "DEV", required_unless_present = "volume")]
    backings: Vec<PathBuf>,
    /// Copy the flash-only volume in this slot
    #[arg(long, value_name = "SLOT")]
    volume: Option<u32>,
    /// Output: a file, a block device, or - for standard output
    #[arg(short = 'o', long = "output", value_name = "FILE|-")]
    output: PathBuf,
    /// Write the map to this file: lines of JSON with start_sector, sectors, state, from, and why it is not certain
    #[arg(long, value_name = "FILE")]
    map: Option<PathBuf>,
    /// Overwrite the output and the map if they exist
    #[arg(long)]
    force: bool,
    /// Assume that the newest journal entry that is found is the last one that was written
    ///
    /// A destroyed newest entry looks like the end of the journal. Older entries behind the end can prove that no newer one
    /// was written. Without that proof and without this option, everything is uncertain. Use the option if nothing suggests
    /// that the end of the journal is damaged. The contents are then those after a power loss at that entry.
    #[arg(long)]
    trust_journal_end: bool,
    /// What the output gets in place of dirty data that is damaged: does not have its checksum in the cache
    ///
    /// These ranges are lost in the map, whatever the output gets. Sectors that a device cannot read are zeros.
    #[arg(long, value_name = "WHAT", value_enum, default_value_t = InPlace::Zeros)]
    damaged: InPlace,
    /// Read devices that another process writes to; the contents may be inconsistent, and no range is certain
    #[arg(long)]
    in_use: bool,
    /// Print the summary as JSON
    #[arg(long)]
    json: bool,
}

/// Number of notes of the extraction in the text of a summary.
const SHOWN: usize = 5;

/// The values of `--damaged`.
#[derive(Clone, Copy, ValueEnum, Debug)]
enum InPlace {
    /// Write zeros
    Zeros,
    /// Write the older data of the backing device; zeros for a volume without one
    Older,
    /// Write the damaged bytes
    AsIs,
}

impl Salvage {
    fn options(&self) -> SalvageOptions {
        let damaged = match self.damaged {
            InPlace::Zeros => DamagedDirty::Zeros,
            InPlace::Older => DamagedDirty::Older,
            InPlace::AsIs => DamagedDirty::AsIs,
        };
        SalvageOptions { trust_journal_end: self.trust_journal_end, damaged, in_use: self.in_use }
    }

    fn image(&self) -> Image<'_> {
        Image { path: &self.output, force: self.force }
    }

    pub(crate) fn run(&self) -> Result<(), Failure> {
        let image = self.image();
        let inputs: Vec<&Path> =
            std::iter::once(&*self.cache).chain(self.backings.iter().map(PathBuf::as_path)).collect();
        image.check(&inputs, self.json)?;
        if self.in_use {
            out::warn(CHANGES);
        }
        let opener = ReadOnlyOpener::new(self.in_use, IN_USE)?;
        let devices = inputs.iter().map(|path| opener.open(path)).collect::<Result<Vec<_>, _>>()?;
        let sources: Vec<&dyn ReadAt> = devices.iter().map(|d| &d.source as &dyn ReadAt).collect();
        let Some((cache, backings)) = sources.split_first() else { return Ok(()) };
        let map = self.map.as_deref().map(|path| MapPlace::of(path, &image, &inputs)).transpose()?;
        let plan = repair::plan(*cache, backings, Uuid(uuid::Uuid::new_v4().into_bytes()));
        let target = match self.volume {
            Some(slot) => SalvageTarget::Volume(Inode(slot)),
            None => SalvageTarget::Backing(0),
        };
        let salvage = repair::Salvage::new(&plan, target, self.options()).map_err(Failure::of)?;
        let (salvaged, map) = image.write(&inputs, salvage.sectors(), |sink| {
            let mut map = map.map(MapPlace::create).transpose()?;
            let salvaged = self.copy(&salvage, sink, map.as_mut())?;
            // If the map cannot be stored, the image does not get its name either.
            map.as_mut().map_or(Ok(()), MapFile::store)?;
            Ok((salvaged, map))
        })?;
        let named = map.map_or(Ok(()), MapFile::complete);
        self.report(&salvaged, image.is_stdout())?;
        named?;
        if salvaged.is_certain() { Ok(()) } else { Err(Failure::Found) }
    }

    fn copy(
        &self,
        salvage: &repair::Salvage<'_>,
        sink: &mut dyn Sink,
        mut map: Option<&mut MapFile>,
    ) -> Result<Salvaged, Failure> {
        let mut progress = out::Progress::new("salvaging");
        let mut interrupt = Interrupt::new()?;
        let mut line = |line: &MapLine| map.as_mut().map_or(Ok(()), |map| map.line(line));
        let salvaged = salvage.run(sink, &mut line, &mut |p| {
            progress.bytes(p.done.bytes(), p.total.bytes());
            if interrupt.came() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        salvaged.map_err(|e| match e {
            SalvageError::Extract(e) => self.image().failed(e),
            SalvageError::Map(e) => {
                Failure::at(self.map.as_deref().unwrap_or(Path::new("")), CANNOT_WRITE, e)
            }
            e => Failure::of(e),
        })
    }

    fn report(&self, salvaged: &Salvaged, is_stdout: bool) -> Result<(), Failure> {
        if self.json {
            return out::print_json(salvaged);
        }
        let text = salvaged.to_string();
        if is_stdout {
            text.lines().for_each(out::note);
        } else {
            out::print(&text)?;
        }
        salvaged.notes.iter().take(SHOWN).for_each(out::note);
        if let Some(more @ 1..) = salvaged.notes.len().checked_sub(SHOWN) {
            out::note(format!("and {}, which --json lists", counted(more, "more note")));
        }
        salvaged.warnings.iter().for_each(out::warn);
        self.next(salvaged).iter().for_each(out::note);
        Ok(())
    }

    /// The next commands.
    fn next(&self, salvaged: &Salvaged) -> Vec<String> {
        let devices: String = self.backings.iter().map(|b| format!(" -B {}", b.display())).collect();
        let set = format!("-C {}{devices}", self.cache.display());
        let mut next = Vec::new();
        let by_end = salvaged.uncertain_by_journal_end.bytes;
        if let Some(entry) = salvaged.journal_entry.filter(|_| by_end > 0) {
            next.push(format!(
                "{} would be certain if journal entry {entry} was the last one: if nothing suggests that the end of the journal is \
                 damaged, repeat with --trust-journal-end",
                size::human(by_end)
            ));
        }
        if salvaged.backing_is_clean && salvaged.uncertain.sectors > 0 {
            next.push(
                "the state of the backing device is clean: it has every write that was acknowledged; the cache can have other bytes \
                 of writes that were under way at a crash"
                    .to_owned(),
            );
        }
        if salvaged.is_certain() {
            next.push(format!("`ubcache repair {set} --dry-run` says whether the set itself can be mended"));
        } else {
            let ranges = match &self.map {
                Some(map) => format!("{} has the ranges", plain::escaped(&map.display().to_string())),
                None => "repeat with --map FILE for the ranges".to_owned(),
            };
            next.push(format!(
                "{ranges}: check the file systems on a copy of the output, and compare the files in these ranges with a backup; \
                 `ubcache repair {set} --dry-run` says what a repair of the set itself would do"
            ));
        }
        next
    }
}

/// What failed if a map is not written to its end.
const CANNOT_WRITE: &str = "cannot be written";

/// The place of the map, before the contents are read.
enum MapPlace {
    /// A pipe, or a device such as /dev/null. It is open, because the opening of a pipe waits for its reader.
    Stream(PathBuf, File),
    /// A file, which is created together with the output.
    File(Existing),
}

impl MapPlace {
    /// Examines a path. It must not lead to an input or to the output.
    fn of(path: &Path, image: &Image<'_>, inputs: &[&Path]) -> Result<MapPlace, Failure> {
        if path.as_os_str() == "-" {
            return Err(Failure::Usage(
                "expected a file for the map, found -: the summary goes to standard output".into(),
            ));
        }
        let existing = Existing::of(path)?;
        let is_same = |other: &Path, meta: Option<&Metadata>| match (&existing.meta, meta) {
            (Some(a), Some(b)) => same_device(a, b),
            (None, None) => place(other) == place(path),
            _ => false,
        };
        let input = inputs.iter().find(|input| is_same(input, std::fs::metadata(input).ok().as_ref()));
        let output = Some(&image.path).filter(|output| is_same(output, image.metadata().as_ref()));
        if let Some(other) = input.or(output) {
            return Err(Failure::Usage(format!("{} cannot be the map, too", other.display())));
        }
        match &existing.meta {
            Some(m) if m.is_dir() || m.file_type().is_block_device() => {
                Err(Failure::Failed(format!("{}: expected a file for the map", path.display())))
            }
            Some(m) if !m.is_file() => {
                let file = OpenOptions::new().write(true).open(path);
                let file = file.map_err(|e| Failure::at(path, "cannot be opened for writing", e))?;
                Ok(MapPlace::Stream(path.to_path_buf(), file))
            }
            Some(m) if !image.force => Err(exists(path, m)),
            _ => Ok(MapPlace::File(existing)),
        }
    }

    /// Creates the file.
    fn create(self) -> Result<MapFile, Failure> {
        match self {
            MapPlace::Stream(path, file) => {
                Ok(MapFile { to: BufWriter::new(file), path, partial: None, _claim: None })
            }
            MapPlace::File(existing) => {
                let claim = existing.claim()?;
                let (partial, file) = Partial::create(&existing.path)?;
                let to = BufWriter::new(file);
                Ok(MapFile { to, path: existing.path, partial: Some(partial), _claim: claim })
            }
        }
    }
}

/// The name that a file would get, which has one spelling in each directory.
fn place(path: &Path) -> Option<PathBuf> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Some(dir.canonicalize().ok()?.join(path.file_name()?))
}

/// The file of the map.
struct MapFile {
    to: BufWriter<File>,
    path: PathBuf,
    /// `None` if the map goes to a pipe or to a device such as /dev/null.
    partial: Option<Partial>,
    /// The claim of the file that the map replaces.
    _claim: Option<Claimed>,
}

impl MapFile {
    fn line(&mut self, line: &MapLine) -> io::Result<()> {
        let text = serde_json::to_string(line).map_err(io::Error::other)?;
        writeln!(self.to, "{}", plain::escaped_json(&text))
    }

    /// Makes all lines durable.
    fn store(&mut self) -> Result<(), Failure> {
        let stored = self.to.flush().and_then(|()| match self.partial {
            Some(_) => self.to.get_ref().sync_all(),
            None => Ok(()),
        });
        stored.map_err(|e| Failure::at(&self.path, CANNOT_WRITE, e))
    }

    /// Gives the file its name.
    fn complete(self) -> Result<(), Failure> {
        self.partial.map_or(Ok(()), Partial::complete)
    }
}
