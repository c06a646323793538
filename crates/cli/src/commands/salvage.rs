//! `ubcache salvage`: copies the contents of a disk out of a damaged set, with a map of what is certain.
//!
//! Crate `repair` plans the repair in memory, judges, and extracts. `image` writes the output. This file opens the devices for
//! reading, and writes the map and the summary.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::ops::ControlFlow;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use format::{Inode, Uuid, counted};
use inspect::{DamagedDirty, ReadAt};
use repair::{MapLine, SalvageOptions, SalvageTarget, Salvaged};
use serve::plain;

use super::IN_USE;
use super::image::{CHANGES, Claimed, Image, Partial, same_device};
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::read_only::ReadOnlyOpener;
use crate::{out, size};

const EXAMPLE: &str =
    "Example: ubcache salvage -C /dev/nvme0n1p4 -B /dev/sdb -o /backup/disk.img --map /backup/disk.map";

/// Copy the contents of a disk out of a damaged set, with a map of what is certain
///
/// For sets that `ubcache extract` refuses, or whose contents it cannot vouch for. It rebuilds damaged structures as
/// `ubcache repair` does, but in memory: all devices are opened read-only and nothing on them is changed. The output is
/// the disk as a client of the running set would see it, as far as that is known. The map has a line of JSON for each
/// range of the disk. A range is *certain* if no damaged and no guessed structure could have decided about its bytes,
/// *uncertain* if one could, and *lost* if data existed whose bytes cannot be had: the output then has zeros, or what
/// --damaged says. Exit status 0 if everything is certain, 1 if a range is not.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Salvage {
    /// Cache device
    #[arg(short = 'C', long = "cache", value_name = "DEV")]
    cache: PathBuf,
    /// Backing device whose contents are copied; give the others of the set behind it, which helps to rebuild structures
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
    /// Take the newest journal entry that is found for the last one that was written
    ///
    /// A destroyed newest entry looks like the end of the journal. Unless older entries behind the end prove that none was
    /// written there, everything that it could have changed is uncertain. With this option it is not. Use it if nothing
    /// suggests that the end of the journal is damaged: the contents are then those after a power loss at that entry.
    #[arg(long)]
    trust_journal_end: bool,
    /// What the output gets in place of dirty data that is damaged: does not have its checksum in the cache
    ///
    /// The map calls these ranges lost in each case. Sectors that a device cannot read are zeros.
    #[arg(long, value_name = "WHAT", value_enum, default_value_t = InPlace::Zeros)]
    damaged: InPlace,
    /// Read devices that another process writes to; the contents may be inconsistent
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
        SalvageOptions { trust_journal_end: self.trust_journal_end, damaged }
    }

    pub(crate) fn run(&self) -> Result<(), Failure> {
        let image = Image { path: &self.output, force: self.force };
        image.check_stdout(self.json)?;
        if self.in_use {
            out::warn(CHANGES);
        }
        let opener = ReadOnlyOpener::new(self.in_use, IN_USE)?;
        let inputs: Vec<&Path> =
            std::iter::once(&*self.cache).chain(self.backings.iter().map(PathBuf::as_path)).collect();
        let devices = inputs.iter().map(|path| opener.open(path)).collect::<Result<Vec<_>, _>>()?;
        let sources: Vec<&dyn ReadAt> = devices.iter().map(|d| &d.source as &dyn ReadAt).collect();
        let Some((cache, backings)) = sources.split_first() else { return Ok(()) };
        let mut map = self.map.as_deref().map(|path| MapFile::create(path, self, &inputs)).transpose()?;
        let plan = repair::plan(*cache, backings, Uuid(uuid::Uuid::new_v4().into_bytes()));
        let target = match self.volume {
            Some(slot) => SalvageTarget::Volume(Inode(slot)),
            None => SalvageTarget::Backing(0),
        };
        let salvage = repair::Salvage::new(&plan, target, self.options()).map_err(Failure::of)?;
        let salvaged = image.write(&inputs, salvage.sectors(), |sink| {
            let mut progress = out::Progress::new("salvaging");
            let mut interrupt = Interrupt::new()?;
            let mut line = |line: &MapLine| map.as_mut().map_or(Ok(()), |map| map.line(line));
            let salvaged = salvage.run(sink, &mut line, &mut |p| {
                progress.bytes(p.done.bytes(), p.total.bytes());
                if interrupt.came() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            salvaged.map_err(Failure::of)
        })?;
        if let Some(map) = map {
            map.complete()?;
        }
        self.report(&salvaged, image.is_stdout())?;
        if salvaged.is_certain() { Ok(()) } else { Err(Failure::Found) }
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

/// The file of the map.
struct MapFile {
    to: BufWriter<File>,
    /// `None` if the map goes to a pipe or to a device such as /dev/null.
    partial: Option<Partial>,
    path: PathBuf,
    /// The claim of the file that the map replaces.
    _claim: Option<Claimed>,
}

impl MapFile {
    fn create(path: &Path, salvage: &Salvage, inputs: &[&Path]) -> Result<MapFile, Failure> {
        let meta = std::fs::metadata(path).ok();
        let others = inputs.iter().copied().chain([&*salvage.output]);
        let is_same = |other: &Path| {
            let other_meta = std::fs::metadata(other).ok();
            other == path || meta.as_ref().zip(other_meta.as_ref()).is_some_and(|(a, b)| same_device(a, b))
        };
        if let Some(other) = others.into_iter().find(|other| is_same(other)) {
            return Err(Failure::Usage(format!("{} cannot be the map, too", other.display())));
        }
        let new = |partial: Option<Partial>, file, claim| MapFile {
            to: BufWriter::new(file),
            partial,
            path: path.to_path_buf(),
            _claim: claim,
        };
        match meta {
            Some(m) if m.is_dir() || m.file_type().is_block_device() => {
                Err(Failure::Failed(format!("{}: expected a file for the map", path.display())))
            }
            Some(m) if !m.is_file() => {
                let file = OpenOptions::new().write(true).open(path);
                Ok(new(None, file.map_err(|e| Failure::at(path, "cannot be opened for writing", e))?, None))
            }
            Some(m) if !salvage.force => Err(Failure::Failed(format!(
                "{}: exists ({}): overwrite it with --force",
                path.display(),
                size::human(m.len())
            ))),
            before => {
                let claim = before.map(|_| Image { path, force: true }.claim()).transpose()?;
                let (partial, file) = Partial::create(path)?;
                Ok(new(Some(partial), file, claim))
            }
        }
    }

    fn line(&mut self, line: &MapLine) -> io::Result<()> {
        let text = serde_json::to_string(line).map_err(io::Error::other)?;
        let written = writeln!(self.to, "{}", plain::escaped_json(&text));
        written.map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", self.path.display())))
    }

    fn complete(mut self) -> Result<(), Failure> {
        let written = self.to.flush().and_then(|()| match self.partial {
            Some(_) => self.to.get_ref().sync_all(),
            None => Ok(()),
        });
        written.map_err(|e| Failure::at(&self.path, "cannot be written", e))?;
        self.partial.map_or(Ok(()), Partial::complete)
    }
}
