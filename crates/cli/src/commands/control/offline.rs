//! `volume create --offline`: makes a flash-only volume in a set that no process serves.
//!
//! Owns the order: the command claims the cache device, checks the set read-only, and writes only after nothing is refused. Must
//! not know the daemon.

use std::path::Path;

use blockio::{Driver, DriverOptions};
use engine::tunables::SetTunables;
use format::Sectors;
use format::superblock::LABEL_BYTES;
use inspect::view::SlotKind;
use inspect::{FileSource, Mode, SetView};
use serde_json::{Value, json};
use serve::room::Room;

use crate::failure::Failure;
use crate::interrupt;
use crate::session::{self, Devices, Session, Simulation};

/// A flash-only volume that is wanted.
pub(super) struct NewVolume<'a> {
    pub(super) sectors: Sectors,
    pub(super) label: &'a str,
    /// Only find out whether it fits.
    pub(super) dry_run: bool,
}

/// Makes the volume. Returns the answer that the daemon gives, without a name of the volume.
///
/// # Errors
/// If the device is in use, the set is damaged, or the volume does not fit; nothing is written then.
pub(super) fn create(cache: &Path, wanted: &NewVolume<'_>) -> Result<Value, Failure> {
    interrupt::exit_at_second_signal(std::time::Duration::ZERO)?;
    let options = DriverOptions { seed: session::seed(), ..DriverOptions::default() };
    let driver = Driver::new(options).map_err(|e| Failure::because("cannot start", e))?;
    driver.block_on(create_in(&driver, cache, wanted))
}

async fn create_in(driver: &Driver, cache: &Path, wanted: &NewVolume<'_>) -> Result<Value, Failure> {
    let devices = Devices::open(driver, &[cache], &[], Simulation::default()).await?;
    let source = FileSource::open(cache)?;
    let view = SetView::open(&source, Mode::Strict)?;
    let superblock = &view.superblock;
    let set = superblock.set_uuid();
    check_label(&view, wanted.label)?;
    let room = room(&view);
    room.check(set, wanted.sectors.bytes())?;
    let resolved = json!({"set": set.to_string(), "device": cache, "uuid": superblock.uuid().to_string(),
        "label": superblock.label()});
    drop(view);
    if !wanted.dry_run {
        let session = Session::start(devices).await?;
        let made =
            session.needs_set()?.create_volume(session::new_uuid(), wanted.sectors, wanted.label).await;
        let stopped = session.stop().await;
        made?;
        stopped?;
    }
    let size_bytes = wanted.sectors.bytes();
    Ok(
        json!({"schema_version": 1, "resolved": resolved, "volume": null, "size_bytes": size_bytes, "room": room,
        "dry_run": wanted.dry_run}),
    )
}

/// The room of the set, whose tunables have their defaults when it starts.
fn room(view: &SetView) -> Room {
    let geometry = view.superblock.geometry();
    let taken = view.slots.values().map(|slot| match slot.kind {
        SlotKind::Volume(size) => size.0,
        SlotKind::Cached | SlotKind::Invalidated => 0,
    });
    let percent = SetTunables::default().cutoff_writeback_sync;
    Room::new(geometry.nbuckets, geometry.bucket_sectors, percent, Sectors(taken.sum()))
}

/// Refuses a label that cannot be a name, or that the set or one of its devices has.
fn check_label(view: &SetView, label: &str) -> Result<(), Failure> {
    if label.is_empty() {
        return Ok(());
    }
    serve::label_is_fit(label)?;
    if label.len() > LABEL_BYTES {
        return Err(Failure::Usage(format!(
            "label: expected at most {LABEL_BYTES} bytes, found {}",
            label.len()
        )));
    }
    let set = view.superblock.set_uuid();
    let is_live = |kind: SlotKind| !matches!(kind, SlotKind::Invalidated);
    let owner = match view.slots.values().find(|slot| is_live(slot.kind) && slot.label == label) {
        Some(slot) => format!("UUID {} in set {set}", slot.uuid),
        None if view.superblock.label() == label => format!("set {set}"),
        None => return Ok(()),
    };
    Err(Failure::Failed(format!(
        "label {label}: belongs to {owner}; a label names one device of the host: choose another one"
    )))
}
