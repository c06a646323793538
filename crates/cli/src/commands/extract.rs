//! `ubcache extract`: copies the logical contents of a cached device or volume, and changes nothing on the devices.
//!
//! `image` writes the output.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use format::{Inode, counted, form};
use inspect::extract::Extracted;
use inspect::{DamagedDirty, ExtractOptions, Extraction, Mode, ReadAt, SetView, Target};

use super::IN_USE;
use super::image::Image;
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
    /// Continue at damage and report each range that is lost or uncertain; the exit code is then 1
    #[arg(long)]
    best_effort: bool,
    /// What the output gets in place of dirty data that is damaged: does not have its checksum in the cache
    ///
    /// The command names the damaged ranges in each case, and the exit code is then 1. Damaged clean data is read from
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
        let image = Image { path: &self.output, force: self.force };
        let inputs: Vec<&Path> = std::iter::once(&*self.cache).chain(self.backing.as_deref()).collect();
        image.check(&inputs, self.json)?;
        if self.in_use {
            out::warn(super::image::CHANGES);
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
        let extracted = image.write(&inputs, extraction.sectors(), |sink| {
            let mut progress = out::Progress::new("extracting");
            let mut interrupt = Interrupt::new()?;
            let extracted = extraction.run(sink, &mut |p| {
                progress.bytes(p.done.bytes(), p.total.bytes());
                if interrupt.came() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            extracted.map_err(|e| image.failed(e))
        })?;
        self.report(&extracted)
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
