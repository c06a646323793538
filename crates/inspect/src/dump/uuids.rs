//! The UUID table: devices and volumes that the set knows.

use std::fmt;

use serde::Serialize;

use crate::SCHEMA_VERSION;
use crate::view::{SetView, SlotKind};

/// The slots that are in use.
#[derive(Clone, Debug, Serialize)]
pub struct UuidsDoc {
    /// Version of this document's layout.
    pub schema_version: u32,
    /// Cache device.
    pub device: String,
    /// UUID of the set.
    pub set_uuid: String,
    /// The slots.
    pub slots: Vec<SlotDoc>,
}

/// A slot.
#[derive(Clone, Debug, Serialize)]
pub struct SlotDoc {
    /// Index of the slot, which is the inode of all keys of its device.
    pub inode: u32,
    /// `cached`, `volume`, or `invalidated`.
    pub kind: &'static str,
    /// UUID of the device or volume.
    pub uuid: String,
    /// Label of the device or volume.
    pub label: String,
    /// Size of a volume.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sectors: Option<u64>,
    /// Time of the first registration, in Unix seconds.
    pub first_reg: u32,
    /// Time of the last registration, in Unix seconds.
    pub last_reg: u32,
    /// Time of the invalidation, in Unix seconds; 0 if the slot is valid.
    pub invalidated: u32,
    /// Dirty sectors in the cache.
    pub dirty_sectors: u64,
    /// Clean sectors in the cache.
    pub clean_sectors: u64,
}

/// Dumps the UUID table of a set.
pub fn uuids(view: &SetView) -> UuidsDoc {
    let slots = view.slots.iter().map(|(inode, slot)| {
        let totals = view.totals_of(*inode);
        let (kind, sectors) = match slot.kind {
            SlotKind::Cached => ("cached", None),
            SlotKind::Volume(sectors) => ("volume", Some(sectors.0)),
            SlotKind::Invalidated => ("invalidated", None),
        };
        SlotDoc {
            inode: inode.0,
            kind,
            uuid: slot.uuid.to_string(),
            label: slot.label.clone(),
            sectors,
            first_reg: slot.first_reg,
            last_reg: slot.last_reg,
            invalidated: slot.invalidated,
            dirty_sectors: totals.dirty_sectors,
            clean_sectors: totals.clean_sectors,
        }
    });
    UuidsDoc {
        schema_version: SCHEMA_VERSION,
        device: view.device.clone(),
        set_uuid: view.superblock.set_uuid().to_string(),
        slots: slots.collect(),
    }
}

impl fmt::Display for UuidsDoc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "set {}", self.set_uuid)?;
        for s in &self.slots {
            write!(f, "slot {}: {} {}", s.inode, s.kind, s.uuid)?;
            if !s.label.is_empty() {
                write!(f, " {:?}", s.label)?;
            }
            if let Some(sectors) = s.sectors {
                write!(f, ", {sectors} sectors")?;
            }
            write!(f, ", {} dirty, {} clean sectors", s.dirty_sectors, s.clean_sectors)?;
            write!(f, ", registered {} to {}", s.first_reg, s.last_reg)?;
            if s.invalidated != 0 {
                write!(f, ", invalidated {}", s.invalidated)?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}
