//! `ubcache repair`: mends the structures of a damaged set offline, and takes a repair back.
//!
//! Crate `repair` plans. This file claims the devices, writes the undo file before the first change, and carries the plan out.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use blockio::{Backend, Driver, DriverOptions, FileDevice, OpenOptions};
use clap::Args;
use format::{Uuid, counted};
use inspect::{DamagedDirtyData, FileSource, ReadAt};
use repair::{Guard, IfUsed, Overlay, Plan, Report, Undo, UndoneDevice};
use serde_json::json;
use serve::plain;

use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::out;
use crate::read_only::{ReadOnlyOpener, stop_first};

/// Mend the structures of a damaged set
///
/// Finds damaged structures, and rebuilds them from what all other structures say. Before the first change it writes
/// an undo file, with which `--undo` makes the devices byte for byte what they were. It prints each step, what may be
/// wrong afterwards, and what it cannot mend. Exit code 0 if every damaged structure is mended, 1 if one remains;
/// --dry-run exits with the status that the repair would have. It does not mend data: of a set with checksums it reads the
/// dirty data, names what is damaged with the next command, and exits with 1. Copy the data with `ubcache extract` first if
/// there is room for it.
#[derive(Args, Debug)]
pub(crate) struct Repair {
    /// Cache device
    #[arg(short = 'C', long = "cache", value_name = "DEV", required_unless_present = "undo")]
    cache: Option<PathBuf>,
    /// Backing device; give all of the set
    #[arg(short = 'B', long = "backing", value_name = "DEV")]
    backings: Vec<PathBuf>,
    /// Print what would be done, and write nothing
    #[arg(long)]
    dry_run: bool,
    /// Structures only: do not compare dirty data with its checksums
    #[arg(long)]
    quick: bool,
    /// The undo file, which must not exist yet [default: ubcache-repair-TIME.undo in the current directory]
    #[arg(long, value_name = "FILE")]
    undo_file: Option<PathBuf>,
    /// Take the repair back that wrote this undo file
    #[arg(long, value_name = "FILE", conflicts_with_all = ["cache", "backings", "undo_file", "quick"])]
    undo: Option<PathBuf>,
    /// Also change a device with the signature of another format before its superblock; with --undo, take the repair back although the
    /// set was used since
    #[arg(long)]
    force: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Repair {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        match (&self.undo, &self.cache) {
            (Some(file), _) => self.take_back(file),
            (None, Some(cache)) => self.mend(cache),
            (None, None) => Err(Failure::Usage("expected -C or --undo".into())),
        }
    }

    fn mend(&self, cache: &Path) -> Result<(), Failure> {
        let paths: Vec<&Path> =
            std::iter::once(cache).chain(self.backings.iter().map(PathBuf::as_path)).collect();
        let claims = if self.dry_run { Claims::to_read(&paths)? } else { Claims::to_write(&paths)? };
        let sources = paths.iter().map(FileSource::open).collect::<Result<Vec<_>, _>>()?;
        let all: Vec<&dyn ReadAt> = sources.iter().map(|s| s as &dyn ReadAt).collect();
        let Some((cache, backings)) = all.split_first() else { return Ok(()) };
        let plan = repair::plan(*cache, backings, Uuid(uuid::Uuid::new_v4().into_bytes()));
        let mut report = plan.report();
        if !self.quick {
            report.damaged_data = damaged_data(&plan)?;
        }
        let undo = undo_of(&plan, &paths)?;
        if !self.force {
            undo.devices.iter().try_for_each(|device| refuse_other_format(&device.path))?;
        }
        let writes = !self.dry_run && !undo.devices.is_empty();
        let file = self.undo_file();
        if writes {
            undo.save(&file).map_err(Failure::of)?;
            undo.apply().map_err(|e| {
                Failure::because(
                    format!("the repair is not complete; take it back with --undo {}", file.display()),
                    e,
                )
            })?;
        }
        drop(claims);
        let is_complete = plan.is_complete() && report.damaged_data.is_empty();
        self.report(&plan, &report, writes.then_some(&*file))?;
        if is_complete { Ok(()) } else { Err(Failure::Found) }
    }

    fn undo_file(&self) -> PathBuf {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        self.undo_file.clone().unwrap_or_else(|| PathBuf::from(format!("ubcache-repair-{now}.undo")))
    }

    fn report(&self, plan: &Plan<'_>, report: &Report, written: Option<&Path>) -> Result<(), Failure> {
        if self.json {
            let mut doc = serde_json::to_value(report).map_err(Failure::of)?;
            if let Some(map) = doc.as_object_mut() {
                let is_complete = plan.is_complete() && report.damaged_data.is_empty();
                map.insert("written".into(), json!(written.is_some()));
                map.insert("complete".into(), json!(is_complete));
                map.insert("undo_file".into(), json!(written));
            }
            return out::print_json(&doc);
        }
        out::print(&report.to_string())?;
        report.damaged_data.iter().for_each(|data| out::note(self.next_for(data)));
        match written {
            Some(file) => {
                out::note(format!("written; `ubcache repair --undo {}` takes it back", file.display()))
            }
            None if plan.is_empty() => {}
            None => out::note("nothing was written"),
        }
        Ok(())
    }

    /// What to do about damaged dirty data.
    fn next_for(&self, data: &DamagedDirtyData) -> String {
        let cache = self.cache.as_deref().unwrap_or(Path::new("CACHE")).display();
        let backing = data.backing.as_deref();
        let of = match backing {
            Some(backing) => format!("-B {backing}"),
            None => format!("--volume {}", data.inode),
        };
        format!(
            "a repair does not mend data: copy what is sound with `ubcache extract -C {cache} {of} --damaged older -o FILE`, or serve \
             the set with `ubcache register {cache}{}` and decide with `ubcache damaged {}`",
            backing.map(|backing| format!(" {backing}")).unwrap_or_default(),
            plain::typed(&data.label, &data.uuid)
        )
    }

    fn take_back(&self, file: &Path) -> Result<(), Failure> {
        let undo = Undo::load(file).map_err(Failure::of)?;
        let used = if self.force { IfUsed::Revert } else { IfUsed::Refuse };
        let paths: Vec<&Path> = undo.devices.iter().map(|d| d.path.as_path()).collect();
        let guard = undo.guard.as_ref().map(|guard| guard.path.as_path()).filter(|_| !self.force);
        let claimed: Vec<&Path> =
            paths.iter().copied().chain(guard.filter(|guard| !paths.contains(guard))).collect();
        let claims = if self.dry_run { Claims::to_read(&claimed)? } else { Claims::to_write(&claimed)? };
        let sectors: usize = undo.devices.iter().flat_map(|d| &d.changes).map(|c| c.before.len() / 512).sum();
        match self.dry_run {
            true => undo.check_revert(used).map_err(Failure::of)?,
            false => undo.revert(used).map_err(Failure::of)?,
        }
        drop(claims);
        if self.json {
            let names: Vec<String> = paths.iter().map(|p| p.display().to_string()).collect();
            let doc =
                json!({"schema_version": 1, "devices": names, "sectors": sectors, "written": !self.dry_run});
            return out::print_json(&doc);
        }
        let done = if self.dry_run { "would be" } else { "are" };
        out::print(&format!(
            "{} of {} {done} what they were before the repair\n",
            counted(sectors, "sector"),
            counted(paths.len(), "device")
        ))
    }
}

/// The damaged dirty data of the set as the plan leaves it.
fn damaged_data(plan: &Plan<'_>) -> Result<Vec<DamagedDirtyData>, Failure> {
    let backings: Vec<&dyn ReadAt> = plan.backings().iter().map(|b| b as &dyn ReadAt).collect();
    let mut progress = out::Progress::new("reading dirty data");
    let mut interrupt = Interrupt::new()?;
    let found = inspect::damaged_dirty(plan.cache(), &backings, &mut |p| {
        progress.bytes(p.done.bytes(), p.total.bytes());
        if interrupt.came() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    progress.clear();
    found.ok_or_else(|| {
        Failure::Failed("interrupted before all dirty data was read; nothing was written".into())
    })
}

/// Refuses a device that something else was formatted on: bcache leaves the 4 KiB before a superblock empty.
fn refuse_other_format(path: &Path) -> Result<(), Failure> {
    match blockio::probe_before_bcache(path).map_err(|e| Failure::at(path, "cannot be read", e))? {
        None => Ok(()),
        Some(found) => Err(Failure::Failed(format!(
            "{}: holds {found}, so it may be no device of this set: a repair would overwrite its superblock; nothing was written; \
             if it is one, repeat with --force",
            path.display()
        ))),
    }
}

/// The changes of a plan, with absolute paths, so that they can be taken back from any directory.
fn undo_of(plan: &Plan<'_>, paths: &[&Path]) -> Result<Undo, Failure> {
    let overlays = std::iter::once(plan.cache()).chain(plan.backings());
    let changed = overlays.zip(paths).filter(|(overlay, _)| overlay.is_changed());
    let devices = changed.map(|(overlay, path)| of_device(overlay, path)).collect::<Result<_, _>>()?;
    let cache = paths.first().map(|path| absolute(path)).transpose()?;
    Ok(Undo { devices, guard: cache.map(|path| Guard::of(&path, plan.cache())) })
}

fn of_device(overlay: &Overlay<'_>, path: &Path) -> Result<UndoneDevice, Failure> {
    Ok(UndoneDevice { path: absolute(path)?, sectors: overlay.sectors(), changes: overlay.changes()? })
}

fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    std::fs::canonicalize(path).map_err(|e| Failure::at(path, "cannot be examined", e))
}

/// The claims of the devices, which no other process can take while this value lives.
struct Claims {
    _devices: Vec<FileDevice>,
    _read_only: Vec<crate::read_only::ReadOnlyDevice>,
    _driver: Option<Driver>,
}

impl Claims {
    fn to_write(paths: &[&Path]) -> Result<Claims, Failure> {
        let options = DriverOptions { backend: Backend::Pool, ..DriverOptions::default() };
        let driver = Driver::new(options).map_err(Failure::of)?;
        let open = |path: &&Path| {
            FileDevice::open(driver.reactor(), path, &OpenOptions::default()).map_err(|e| stop_first(path, e))
        };
        let devices = paths.iter().map(open).collect::<Result<Vec<_>, _>>()?;
        Ok(Claims { _devices: devices, _read_only: Vec::new(), _driver: Some(driver) })
    }

    fn to_read(paths: &[&Path]) -> Result<Claims, Failure> {
        let opener = ReadOnlyOpener::of_idle_devices()?;
        let devices = paths.iter().map(|p| opener.open(p)).collect::<Result<Vec<_>, _>>()?;
        Ok(Claims { _devices: Vec::new(), _read_only: devices, _driver: None })
    }
}
