//! `ubcache drain -C`, formerly `ubcache flush`: writes all dirty data back while the set is not in use.
//!
//! The command first checks the set read-only. It refuses before anything is written, and does not write to a set without
//! dirty data.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::rc::Rc;

use blockio::{Driver, DriverOptions};
use clap::Args;
use engine::{CacheSet, SetOptions, Volume};
use format::{BackingState, Inode, Sectors};
use inspect::{
    Attachment, DeviceSuper, ExtractOptions, Extraction, FileSource, Mode, ReadAt, Relation, SetView, Target,
};
use io::Nanos;
use io::sync::{Either, select};
use serde::Serialize;

use crate::crash_log::CrashLog;
use crate::events::{EventLog, Names};
use crate::failure::Failure;
use crate::session::{self, Devices, OpenBacking, Simulation};
use crate::{interrupt, out, size};

/// Write all dirty data back and mark it clean, offline: the former name of `drain -C`
#[derive(Args, Debug)]
pub(crate) struct OfflineDrain {
    /// Cache device
    #[arg(short = 'C', long = "cache", value_name = "DEV")]
    cache: PathBuf,
    /// Backing device
    #[arg(short = 'B', long = "backing", value_name = "DEV")]
    backing: Vec<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The result of the command.
#[derive(Serialize)]
struct DrainReport {
    schema_version: u32,
    set_uuid: String,
    drained: Vec<Drained>,
    /// The former name of `drained`, for one release.
    flushed: Vec<Drained>,
    /// Dirty data whose backing device is missing.
    missing: Vec<Missing>,
    /// Dirty data of flash-only volumes, which stays in the cache.
    volumes_dirty_bytes: u64,
}

#[derive(Clone, Serialize)]
struct Drained {
    device: String,
    uuid: String,
    drained_bytes: u64,
    /// The former name of `drained_bytes`, for one release.
    flushed_bytes: u64,
}

#[derive(Serialize)]
struct Missing {
    slot: u32,
    uuid: String,
    label: String,
    dirty_bytes: u64,
}

impl fmt::Display for DrainReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.drained.is_empty() && self.missing.is_empty() {
            writeln!(f, "cache set {}: nothing is dirty", self.set_uuid)?;
        }
        for d in &self.drained {
            writeln!(f, "{}: {} written back, clean now", d.device, size::human(d.drained_bytes))?;
        }
        Ok(())
    }
}

impl OfflineDrain {
    /// The command for these devices.
    pub(crate) fn new(cache: &Path, backing: &[PathBuf], json: bool) -> OfflineDrain {
        OfflineDrain { cache: cache.to_path_buf(), backing: backing.to_vec(), json }
    }

    pub(crate) fn run(&self) -> Result<(), Failure> {
        interrupt::exit_at_second_signal(std::time::Duration::ZERO)?;
        let options = DriverOptions { seed: session::seed(), ..DriverOptions::default() };
        let driver = Driver::new(options).map_err(|e| Failure::because("cannot start", e))?;
        let report = driver.block_on(self.drain(&driver))?;
        out::document(self.json, &report)?;
        if report.volumes_dirty_bytes > 0 {
            out::note(format!(
                "{} belong to flash-only volumes, which have no backing device",
                size::human(report.volumes_dirty_bytes)
            ));
        }
        for m in &report.missing {
            let label = if m.label.is_empty() { String::new() } else { format!(" ({:?})", m.label) };
            out::message(
                "error",
                &format!(
                    "{}: {} of dirty data belong to backing device {}{label}, which is missing: give it with -B",
                    self.cache.display(),
                    size::human(m.dirty_bytes),
                    m.uuid
                ),
            );
        }
        if report.missing.is_empty() { Ok(()) } else { Err(Failure::Found) }
    }

    async fn drain(&self, driver: &Driver) -> Result<DrainReport, Failure> {
        let none = Simulation::default();
        let mut devices = Devices::open(driver, &[&self.cache], &self.backing, none).await?;
        let source = FileSource::open(&self.cache)?;
        let view = SetView::open(&source, Mode::Strict)?;
        if self.backing.is_empty() {
            let found = find_backings(&self.cache, &view)?;
            let more = Devices::open(driver, &[], &found, none).await?;
            devices.backings = more.backings;
        }
        let Some((cache, superblock)) = devices.cache.take() else {
            return Err(Failure::Failed("no cache device".into()));
        };
        let mut report = DrainReport {
            schema_version: 1,
            set_uuid: superblock.set_uuid().to_string(),
            drained: Vec::new(),
            flushed: Vec::new(),
            missing: Vec::new(),
            volumes_dirty_bytes: 0,
        };
        let mut dirty: BTreeMap<Inode, u64> = BTreeMap::new();
        for (inode, slot) in &view.slots {
            let bytes = Sectors(view.totals_of(*inode).dirty_sectors).bytes();
            match slot.kind {
                inspect::view::SlotKind::Cached if bytes > 0 => drop(dirty.insert(*inode, bytes)),
                inspect::view::SlotKind::Volume(_) => report.volumes_dirty_bytes += bytes,
                _ => {}
            }
        }
        let mut chosen = Vec::new();
        for backing in devices.backings {
            if let Some(slot) = self.wanted(&view, &backing)? {
                // This refuses a set whose dirty data cannot be written back completely.
                let device = FileSource::open(&*backing.disk.info().name)?;
                let target = Target::Cached(&device);
                Extraction::new(&view, &source, target, ExtractOptions::default())?;
                let bytes = dirty.remove(&slot).unwrap_or(0);
                if bytes > 0 || backing.superblock.state() == BackingState::Dirty {
                    chosen.push((backing, bytes));
                }
            }
        }
        report.missing = missing(&view, &dirty);
        drop(view);
        if !chosen.is_empty() {
            let crash_log = CrashLog::open(&cache, &superblock)?;
            report.drained = drain(driver, cache, &crash_log, chosen).await?;
            report.flushed = report.drained.clone();
        }
        Ok(report)
    }

    /// The slot of a backing device; `None` if it cannot have dirty data.
    fn wanted(&self, view: &SetView, backing: &OpenBacking) -> Result<Option<Inode>, Failure> {
        let relation = Relation::of(view, &backing.superblock);
        let name = &backing.disk.info().name;
        let state = backing.superblock.state();
        match relation.attachment {
            // The set itself refuses a device with dirty data that does not belong to the present state of the cache.
            Attachment::Attached | Attachment::OlderDirty => Ok(relation.slot),
            Attachment::Unattached => {
                out::note(format!("{name}: is not attached to this set, so it has no dirty data in it"));
                Ok(None)
            }
            Attachment::NoSlot if state == BackingState::Clean => {
                out::note(format!("{name}: is clean, and the set has no data of it"));
                Ok(None)
            }
            Attachment::NoSlot | Attachment::OtherSet => Err(Failure::Failed(format!(
                "{name}: expected a device with data in cache set {}, found one in state {} of set {}, whose UUID {} \
                 this set does not know",
                view.superblock.set_uuid(),
                state.name(),
                backing.superblock.set_uuid(),
                backing.superblock.uuid()
            ))),
            Attachment::OlderClean => Err(Failure::Failed(format!(
                "{name}: the cache device does not know the last registration of this device: one of the two \
                 was restored from an older copy, so its data in the cache is out of date and is not written \
                 back"
            ))),
            Attachment::Invalid => Err(Failure::Failed(format!(
                "{name}: state {}: it ran without this cache or was detached, so its data in the cache is out \
                 of date and is not written back",
                state.name()
            ))),
        }
    }
}

/// Finds the backing devices of the set: among the block devices, and beside a cache that is a file.
fn find_backings(cache: &Path, view: &SetView) -> Result<Vec<PathBuf>, Failure> {
    let mut candidates: Vec<PathBuf> = Vec::new();
    for entry in std::fs::read_dir("/sys/class/block").into_iter().flatten().flatten() {
        candidates.push(Path::new("/dev").join(entry.file_name()));
    }
    if cache.is_file() {
        let dir = cache.parent().unwrap_or(Path::new(""));
        let listed = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
        let files = std::fs::read_dir(listed).into_iter().flatten().flatten();
        candidates.extend(files.map(|e| dir.join(e.file_name())).filter(|p| p.is_file()));
    }
    candidates.sort();
    let mut found: Vec<(format::Uuid, PathBuf)> = Vec::new();
    for path in candidates {
        let Ok(source) = FileSource::open(&path) else { continue };
        if source.sectors() < crate::superblock::HEAD {
            continue;
        }
        let Ok(DeviceSuper::Backing(sb)) = inspect::read_superblock(&source) else { continue };
        if Relation::of(view, &sb).attached().is_none() {
            continue;
        }
        if let Some((_, other)) = found.iter().find(|(uuid, _)| *uuid == sb.uuid()) {
            return Err(Failure::Failed(format!(
                "{} and {} have the same UUID {}: name the right one with -B",
                other.display(),
                path.display(),
                sb.uuid()
            )));
        }
        out::note(format!("found backing device {} ({})", path.display(), sb.uuid()));
        found.push((sb.uuid(), path));
    }
    Ok(found.into_iter().map(|(_, path)| path).collect())
}

/// The slots with dirty data whose backing devices are missing.
fn missing(view: &SetView, dirty: &BTreeMap<Inode, u64>) -> Vec<Missing> {
    let missing = dirty.iter().map(|(inode, bytes)| {
        let slot = view.slots.get(inode);
        Missing {
            slot: inode.0,
            uuid: slot.map(|s| s.uuid.to_string()).unwrap_or_default(),
            label: slot.map(|s| s.label.clone()).unwrap_or_default(),
            dirty_bytes: *bytes,
        }
    });
    missing.collect()
}

/// Runs the set until the chosen devices have no dirty data.
async fn drain(
    driver: &Driver,
    cache: io::Disk,
    crash_log: &CrashLog,
    chosen: Vec<(OpenBacking, u64)>,
) -> Result<Vec<Drained>, Failure> {
    // The crash log has acknowledged writes of a killed process. They are written back, too.
    let memory = serve::ram::budget_of_sets();
    let options =
        SetOptions { seed: session::seed(), crash_log: crash_log.file(), memory, ..SetOptions::default() };
    let set = CacheSet::open(cache, options).await?;
    let log = EventLog::default();
    log.log(&set.take_events(), &Names::of(Some(&set), &set.volumes()));
    let result = drain_all(driver, &set, chosen).await;
    let stopped = set.stop().await;
    log.log(&set.take_events(), &Names::of(Some(&set), &set.volumes()));
    log.end_window();
    let drained = result?;
    stopped?;
    crash_log.remove();
    Ok(drained)
}

async fn drain_all(
    driver: &Driver,
    set: &CacheSet,
    chosen: Vec<(OpenBacking, u64)>,
) -> Result<Vec<Drained>, Failure> {
    let mut signals = interrupt::signals()?;
    let mut volumes: Vec<(Rc<Volume>, u64)> = Vec::new();
    for (backing, bytes) in chosen {
        let volume = set.register(backing.disk).await?;
        // After the crash log is replayed there may be more dirty data than the view showed.
        let bytes = bytes.max(volume.dirty_sectors().bytes());
        volumes.push((volume, bytes));
    }
    let total: u64 = volumes.iter().map(|(v, _)| v.dirty_sectors().bytes()).sum();
    let rt = driver.handle();
    // The devices are drained concurrently, because they are independent.
    let tasks: Vec<_> = volumes
        .iter()
        .map(|(v, _)| {
            let v = v.clone();
            rt.spawn(async move { v.drained().await })
        })
        .collect();
    let mut progress = out::Progress::new("writing back");
    for task in tasks {
        let mut task = pin!(task);
        loop {
            let tick = rt.sleep(Nanos::from_ms(100));
            let waiting = pin!(select(task.as_mut(), tick));
            match select(waiting, pin!(signals.next())).await {
                Either::Left(Either::Left(result)) => {
                    result?;
                    break;
                }
                Either::Left(Either::Right(())) => {
                    let left: u64 = volumes.iter().map(|(v, _)| v.dirty_sectors().bytes()).sum();
                    progress.bytes(total.saturating_sub(left), total);
                }
                Either::Right(_) => {
                    progress.clear();
                    let left: u64 = volumes.iter().map(|(v, _)| v.dirty_sectors().bytes()).sum();
                    return Err(Failure::Failed(format!(
                        "interrupted: {} are still dirty",
                        crate::size::human(left)
                    )));
                }
            }
        }
    }
    progress.clear();
    Ok(volumes
        .iter()
        .map(|(v, bytes)| Drained {
            device: v.backing_name().unwrap_or_default(),
            uuid: v.backing_uuid().unwrap_or_default().to_string(),
            drained_bytes: *bytes,
            flushed_bytes: *bytes,
        })
        .collect())
}
