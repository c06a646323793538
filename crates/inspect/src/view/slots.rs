//! Step 4: the UUID table.
//!
//! Owns the reading of the table and its rules (invariant 7). Module `attach` decides which backing device belongs to which
//! slot.

use std::collections::BTreeMap;

use format::uuid_table::{UUID_ENTRY_BYTES, parse_uuid_table, used};
use format::{
    BackingSuper, BucketNr, CacheSuper, Inode, Jset, RegistrationNr, Sectors, SlotRole, Uuid, UuidEntry,
};

use super::scan::{Scan, Stop};
use crate::device::unreadable_at;
use crate::finding::{Finding, Invariant, Mismatch, Place, Severity};

/// The use of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SlotKind {
    /// A backing device.
    Cached,
    /// A volume of this size, whose data is only in the cache.
    Volume(Sectors),
    /// A device that was detached, or a volume that was deleted. Its keys are unreachable.
    Invalidated,
}

/// A slot of the UUID table that is in use.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Slot {
    /// Use of the slot.
    pub kind: SlotKind,
    /// UUID of the device or volume.
    pub uuid: Uuid,
    /// Label of the device or volume.
    pub label: String,
    /// Time of the first registration, in Unix seconds.
    pub first_reg: u32,
    /// Time of the last registration, in Unix seconds.
    pub last_reg: u32,
    /// Time of the invalidation, in Unix seconds; 0 if the slot is valid.
    pub invalidated: u32,
    /// Numbers of the device's last registrations.
    pub registrations: [Option<RegistrationNr>; 2],
    /// The role of the set for the dirty data of the device, if there is a second set.
    pub role: Option<SlotRole>,
}

impl Slot {
    /// Whether the slot belongs to a backing device that was not detached.
    pub fn is_backing(&self) -> bool {
        self.kind == SlotKind::Cached
    }

    /// Whether the slot has numbers of registrations, and the number of `backing` is not among them.
    ///
    /// Then the cache device is older than the last registration, or the backing device is older than the one before. A slot
    /// that a kernel made has no numbers.
    pub fn is_of_another_registration(&self, backing: &BackingSuper) -> bool {
        let known = self.registrations.iter().any(Option::is_some);
        known && !self.registrations.contains(&backing.registration())
    }

    fn of(entry: &UuidEntry) -> Slot {
        let kind = if entry.is_invalidated() {
            SlotKind::Invalidated
        } else if entry.is_flash_only() {
            SlotKind::Volume(entry.sectors)
        } else {
            SlotKind::Cached
        };
        Slot {
            kind,
            uuid: entry.uuid,
            label: entry.label(),
            first_reg: entry.first_reg,
            last_reg: entry.last_reg,
            invalidated: entry.invalidated,
            registrations: entry.registrations(),
            role: entry.role(),
        }
    }
}

/// Reads the table that the newest journal entry names. With best effort, the result may be empty.
pub(super) fn open(
    scan: &mut Scan<'_>,
    superblock: &CacheSuper,
    newest: &Jset,
) -> Result<(Option<BucketNr>, BTreeMap<Inode, Slot>), Stop> {
    let geometry = superblock.geometry();
    let key = &newest.uuid_bucket;
    let place = Place::new(scan.source.name(), "uuid table");
    let ptr = key.pointer().filter(|p| p.dev() == superblock.nr_this_dev());
    let bucket = ptr.and_then(|p| geometry.ptr_bucket(p, key.size()));
    let (Some(ptr), Some(bucket)) = (ptr, bucket.filter(|_| key.size().0 > 0)) else {
        let (expected, found) = ("a pointer into a bucket", format!("{:#018x}", key.ptr.0));
        let finding = Finding::new(
            Severity::Fatal,
            Invariant::JournalRoots,
            place,
            Mismatch::new("uuid_bucket", expected, found),
        );
        scan.report(finding)?;
        scan.assume("no device and no volume is known");
        return Ok((None, BTreeMap::new()));
    };
    let place = place.sector(ptr.offset()).bucket(bucket).generation(ptr.generation());
    let mut bytes = vec![0; usize::try_from(key.size().bytes()).unwrap_or(0)];
    if let Err(e) = scan.source.read_at(ptr.offset(), &mut bytes) {
        scan.report(unreadable_at(Invariant::UuidTable, Severity::Fatal, place, &e))?;
        scan.assume("no device and no volume is known");
        return Ok((Some(bucket), BTreeMap::new()));
    }
    // Every size in sectors is a whole number of slots, so parsing does not fail.
    let entries = parse_uuid_table(&bytes, newest.version).unwrap_or_default();
    let mut slots = BTreeMap::new();
    let mut seen = BTreeMap::new();
    for (inode, entry) in used(&entries) {
        slots.insert(inode, Slot::of(entry));
        if !entry.is_live() {
            continue;
        }
        let at = format!("slot {inode}, byte {}", u64::from(inode.0) * UUID_ENTRY_BYTES as u64);
        let bad = |field, expected: String, found: String| {
            let place = place.clone().item(&at);
            Finding::new(Severity::Error, Invariant::UuidTable, place, Mismatch::new(field, expected, found))
        };
        if let Some(other) = seen.insert(entry.uuid, inode) {
            scan.report(bad("uuid", format!("another one than slot {other}"), entry.uuid.to_string()))?;
        }
        if entry.is_flash_only() && entry.sectors == Sectors::ZERO {
            scan.report(bad("sectors", "a volume of at least 1".into(), "0".into()))?;
        }
    }
    Ok((Some(bucket), slots))
}
