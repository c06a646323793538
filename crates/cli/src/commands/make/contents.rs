//! The contents of devices that `make` would overwrite.
//!
//! Owns the refusal to overwrite them: it names each device, what it holds and the option that overwrites it. Dirty data,
//! which exists nowhere else, has an option of its own. Never writes.

use std::error::Error;
use std::path::Path;

use blockio::{probe_before_bcache, probe_signature};
use format::{BackingState, Identity, Inode, RawSuperblock, Sector, Sectors, counted, identify};
use inspect::view::{Slot, SlotKind};
use inspect::{FileSource, Mode, SetView};
use io::Disk;

use super::{Make, Notes};
use crate::failure::Failure;
use crate::superblock::{self, HEAD};
use crate::{crash_log, size};

/// What overwriting a device destroys.
struct Contents {
    /// The contents in a few words.
    text: String,
    dirty: Dirty,
    /// The error because of which they are not known completely.
    cause: Option<Box<dyn Error + Send + Sync>>,
}

impl Contents {
    fn known(text: String, dirty: Dirty) -> Contents {
        Contents { text, dirty, cause: None }
    }
}

/// Whether data would be lost that exists nowhere else.
enum Dirty {
    No,
    /// This cache device has data that belongs on backing devices.
    OfDisks,
    /// It has data of the flash-only volumes in these slots, and also of backing devices or not.
    OfVolumes {
        slots: Vec<Inode>,
        and_disks: bool,
    },
    /// The cache device of this backing device has it.
    InItsCache,
    /// The metadata is damaged, so the dirty data cannot be counted.
    Unknown,
}

impl Make {
    /// Refuses to overwrite what the operator has not named. Returns, in a dry run, what each device holds.
    pub(super) async fn refuse_contents(
        &self,
        disks: &[(&Path, Disk)],
        notes: &Notes,
    ) -> Result<Vec<Option<String>>, Failure> {
        let (mut refused, mut lost) = (Vec::new(), Vec::new());
        for (path, disk) in disks {
            refused.extend(self.refusal(path, disk).await?);
            lost.push(if self.dry_run { held(path, disk).await? } else { None });
        }
        let Some(last) = refused.pop() else { return Ok(lost) };
        let messages = refused.iter().filter_map(Failure::message);
        notes.borrow_mut().extend(messages.map(|one| ("error", one.to_owned())));
        Err(last)
    }

    /// Whether the dirty data of this device may be lost.
    fn may_lose_dirty_data(&self, path: &Path) -> bool {
        self.wipe_dirty || self.wipe_dirty_of.iter().any(|named| named == path)
    }

    /// Why a device is not overwritten; `None` if it is.
    async fn refusal(&self, path: &Path, disk: &Disk) -> Result<Option<Failure>, Failure> {
        let found = probe_signature(path).map_err(|e| Failure::at(path, "cannot be read", e))?;
        let bytes =
            if disk.info().sectors < HEAD { Vec::new() } else { superblock::read_bytes(disk).await? };
        let path_text = path.display();
        if identify(&bytes) == Identity::NotBcache {
            return Ok(found.filter(|_| !self.force).map(|found| {
                Failure::Failed(format!("{path_text}: holds {found}: overwrite it with --force"))
            }));
        }
        if self.may_lose_dirty_data(path) {
            return Ok(None);
        }
        if !self.force
            && let Some(newer) =
                probe_before_bcache(path).map_err(|e| Failure::at(path, "cannot be read", e))?
        {
            return Ok(Some(Failure::Failed(format!(
                "{path_text}: holds {newer} and an older bcache superblock; pass --force to overwrite both"
            ))));
        }
        let Contents { text, dirty, cause } = describe(path, &bytes);
        let advice = match dirty {
            Dirty::No if self.wipe || self.force => return Ok(None),
            Dirty::No => "overwrite it with --wipe".to_owned(),
            Dirty::OfDisks => {
                format!(
                    "write the dirty data back with `ubcache drain -C {path_text}`, or lose it with --wipe-dirty"
                )
            }
            Dirty::OfVolumes { slots, and_disks } => of_volumes(path, &slots, and_disks),
            Dirty::InItsCache => format!(
                "with that cache device `ubcache drain -C CACHE-DEVICE -B {path_text}` writes it back; if that device is lost, \
                 `--wipe-dirty` gives it up and leaves the other data as it is; see the page \
                 dead-ssd-dirty of the guide"
            ),
            Dirty::Unknown => {
                format!(
                    "look at it with `ubcache check {path_text}`, or lose its dirty data with --wipe-dirty"
                )
            }
        };
        let text = format!("{path_text}: {text}: {advice}");
        Ok(Some(match cause {
            Some(cause) => Failure::caused(text, cause),
            None => Failure::Failed(text),
        }))
    }
}

/// What saves the data of flash-only volumes, which no backing device can get.
fn of_volumes(path: &Path, slots: &[Inode], and_disks: bool) -> String {
    let path = path.display();
    let drain = match and_disks {
        true => format!("write the dirty data of its disks back with `ubcache drain -C {path}`, then "),
        false => String::new(),
    };
    let (slot, which) = match slots {
        [one] => (one.0.to_string(), String::new()),
        several => {
            let all: Vec<String> = several.iter().map(|slot| slot.0.to_string()).collect();
            ("SLOT".to_owned(), format!(" (SLOT is one of {})", all.join(", ")))
        }
    };
    format!(
        "no backing device has the data of flash-only volumes: {drain}copy each with `ubcache extract -C {path} --volume {slot} \
         -o FILE`{which}, or lose the data with --wipe-dirty"
    )
}

/// Where the data of a backing device begins; `None` if the device has no superblock of one.
///
/// # Errors
/// If that superblock cannot be used, among others.
pub(super) async fn data_offset(disk: &Disk) -> Result<Option<Sector>, Failure> {
    if disk.info().sectors < HEAD {
        return Ok(None);
    }
    let bytes = superblock::read_bytes(disk).await?;
    if identify(&bytes) != Identity::Backing {
        return Ok(None);
    }
    let raw = RawSuperblock::from_prefix(&bytes).and_then(|raw| raw.check_backing(Sectors(u64::MAX), 0));
    let unknown = |e| {
        let name = &disk.info().name;
        let text = format!(
            "{name}: {e}: the superblock cannot say where the data begins: give --data-offset; it is {} unless another one was \
             given when the device was made",
            super::DATA_OFFSET
        );
        Failure::caused(text, e)
    };
    raw.map(|sb| Some(sb.data_offset())).map_err(unknown)
}

/// What a device holds, as far as it is known.
async fn held(path: &Path, disk: &Disk) -> Result<Option<String>, Failure> {
    let bytes = if disk.info().sectors < HEAD { Vec::new() } else { superblock::read_bytes(disk).await? };
    if identify(&bytes) != Identity::NotBcache {
        return Ok(Some(describe(path, &bytes).text));
    }
    let found = probe_signature(path).map_err(|e| Failure::at(path, "cannot be read", e))?;
    Ok(found.map(|found| format!("holds {found}")))
}

/// The contents of a device with a superblock of bcache.
fn describe(path: &Path, bytes: &[u8]) -> Contents {
    let raw = match RawSuperblock::from_prefix(bytes) {
        Ok(raw) => raw,
        Err(e) => {
            let text = "holds a bcache superblock".to_owned();
            return Contents { text, dirty: Dirty::Unknown, cause: Some(e.into()) };
        }
    };
    // The device may have another size than its superblock says. Whether it is usable does not matter here.
    let any = Sectors(u64::MAX);
    let damaged = |e: format::Corrupt| {
        let text = format!("holds a bcache superblock that cannot be used ({e})");
        Contents { text, dirty: Dirty::Unknown, cause: Some(e.into()) }
    };
    if identify(bytes) == Identity::Cache {
        return match raw.check_cache(any, 0) {
            Ok(sb) => {
                let name = format!("is the cache device {} of cache set {}", sb.uuid(), sb.set_uuid());
                match crash_log::left_behind(path, sb.set_uuid()) {
                    None => with_dirty_data(path, name),
                    Some(log) => {
                        let text = format!(
                            "{name}; {} may have acknowledged writes of a process that was killed",
                            log.display()
                        );
                        Contents::known(text, Dirty::OfDisks)
                    }
                }
            }
            Err(e) => damaged(e),
        };
    }
    match raw.check_backing(any, 0) {
        Ok(sb) => {
            let (dirty, data) = match sb.state() {
                BackingState::Dirty => {
                    let of = format!(" (cache set {} has data of it that is nowhere else)", sb.set_uuid());
                    (Dirty::InItsCache, of)
                }
                _ => (Dirty::No, String::new()),
            };
            let label = if sb.label().is_empty() { String::new() } else { format!(" {:?}", sb.label()) };
            let state = sb.state().name();
            let text = format!("is the bcache backing device {}{label}, state {state}{data}", sb.uuid());
            Contents::known(text, dirty)
        }
        Err(e) => damaged(e),
    }
}

/// A cache device of this name, with the dirty data of each device and volume of its set, and its flash-only volumes without
/// data.
fn with_dirty_data(path: &Path, name: String) -> Contents {
    let view = FileSource::open(path).map_err(Into::into).and_then(|source| {
        SetView::open(&source, Mode::Strict).map_err(Box::<dyn Error + Send + Sync>::from)
    });
    let view = match view {
        Ok(view) => view,
        Err(e) => {
            let text = format!("{name}, whose dirty data cannot be counted ({e})");
            return Contents { text, dirty: Dirty::Unknown, cause: Some(e) };
        }
    };
    let dirty = |inode: Inode| Sectors(view.totals_of(inode).dirty_sectors);
    let is_dirty = |inode: Inode, kind| kind != SlotKind::Invalidated && dirty(inode) != Sectors::ZERO;
    let of = |slot: &Slot| match slot.label.is_empty() {
        true => slot.uuid.to_string(),
        false => format!("{:?}", slot.label),
    };
    let all: Vec<_> = view.slots.iter().filter(|(inode, slot)| is_dirty(**inode, slot.kind)).collect();
    let parts: Vec<String> = all
        .iter()
        .map(|(inode, slot)| format!("{} of {}", size::human(dirty(**inode).bytes()), of(slot)))
        .collect();
    let empty = view.slots.iter().filter_map(|(inode, slot)| match slot.kind {
        SlotKind::Volume(sectors) if dirty(*inode) == Sectors::ZERO => {
            Some(format!("{} ({})", of(slot), size::human(sectors.bytes())))
        }
        _ => None,
    });
    let empty: Vec<String> = empty.collect();
    let empty = match empty.len() {
        0 => String::new(),
        n => format!(", with {} without data: {}", counted(n as u64, "flash-only volume"), empty.join(", ")),
    };
    if parts.is_empty() {
        return Contents::known(format!("{name}{empty}"), Dirty::No);
    }
    let text = format!("{name}{empty}, with dirty data that exists nowhere else: {}", parts.join(", "));
    let (volumes, disks): (Vec<_>, Vec<_>) =
        all.iter().partition(|(_, slot)| matches!(slot.kind, SlotKind::Volume(_)));
    let slots: Vec<Inode> = volumes.iter().map(|(inode, _)| **inode).collect();
    Contents::known(
        text,
        if slots.is_empty() {
            Dirty::OfDisks
        } else {
            Dirty::OfVolumes { slots, and_disks: !disks.is_empty() }
        },
    )
}
