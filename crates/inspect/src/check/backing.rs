//! Rules about backing devices: invariants 19 and 20.
//!
//! Owns the checks of a backing device's state and of clean data. Must not know how a set is opened.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use format::{BackingState, Inode, Sector, Sectors};

use super::Backing;
use crate::attach::{Attachment, Relation};
use crate::device::{superblock_place, unreadable_at};
use crate::extent_map::Piece;
use crate::finding::{Finding, Findings, Invariant, Mismatch, Severity};
use crate::source::{ReadAt, ReadError};
use crate::view::{PieceKind, SetView, data_place};

/// The finding that a cache device was given as a backing device.
pub(super) fn not_backing(source: &dyn ReadAt) -> Finding {
    let place = superblock_place(source, "superblock");
    let (expected, found) = ("a backing device (1, 4 or 6)", "a cache device");
    Finding::new(Severity::Error, Invariant::Superblock, place, Mismatch::new("version", expected, found))
}

/// Severity and consequence if the cache device does not know the last registration of a device in this state.
fn older_copy(state: BackingState) -> (Severity, &'static str) {
    match state {
        BackingState::Dirty => (
            Severity::Error,
            "the cache device (or this one) was restored from an older copy: a set refuses the device, and writes are missing \
             in this cache device",
        ),
        _ => (
            Severity::Notice,
            "the cache device (or this one) was restored from an older copy: the data of the slot is out of \
             date, and a set starts without it",
        ),
    }
}

/// Compares superblocks of backing devices with the contents of the cache.
pub(super) fn check_states(view: &SetView, backings: &[&Backing<'_>], findings: &mut Findings) {
    let set = view.superblock.set_uuid();
    for Backing { source, superblock } in backings {
        let relation = Relation::of(view, superblock);
        let totals = relation.slot.map(|slot| view.totals_of(slot)).unwrap_or_default();
        let (dirty, clean) = (totals.dirty_sectors, totals.clean_sectors);
        let slot = relation.slot.unwrap_or_default();
        let state = superblock.state();
        let place = superblock_place(*source, "backing superblock");
        let mut push = |severity, field, expected: String, found: String, note: &str| {
            let place = place.clone();
            findings.push(
                Finding::new(severity, Invariant::BackingState, place, Mismatch::new(field, expected, found))
                    .note(note),
            );
        };
        match relation.attachment {
            Attachment::Attached if state == BackingState::Clean && dirty > 0 => push(
                Severity::Notice,
                "state",
                format!("dirty, as slot {slot} has {dirty} dirty sectors"),
                "clean".into(),
                "legal after a crash; the device is not complete without its cache",
            ),
            Attachment::OlderDirty | Attachment::OlderClean => {
                let (severity, note) = older_copy(state);
                let holds = format!(
                    "a number that slot {slot} has, which holds {dirty} dirty and {clean} clean sectors"
                );
                push(severity, "registration", holds, "another one".into(), note);
            }
            Attachment::Invalid if dirty + clean > 0 => push(
                Severity::Notice,
                "state",
                format!("clean or dirty, as slot {slot} has {dirty} dirty and {clean} clean sectors"),
                state.name().into(),
                "the slot is invalid: its data is out of date",
            ),
            Attachment::NoSlot if state == BackingState::Dirty => push(
                Severity::Error,
                "uuid",
                format!("a slot for {} in set {set}, as the state is dirty", superblock.uuid()),
                "none".into(),
                "dirty data of this device is lost",
            ),
            Attachment::OtherSet => push(
                Severity::Notice,
                "set_uuid",
                set.to_string(),
                superblock.set_uuid().to_string(),
                "the device belongs to another set and was not checked against this one",
            ),
            _ => {}
        }
    }
}

/// Result of comparing clean data, by slot.
#[derive(Clone, Debug, Default)]
pub(super) struct Compared {
    /// Clean extents that differ from the backing device.
    pub(super) differing: BTreeMap<Inode, u64>,
    /// Whether the caller stopped the comparison early.
    pub(super) cancelled: bool,
}

/// Number of sectors that are read at a time.
const CHUNK: u64 = 2048;

/// Compares the data of all clean extents with the backing devices. `progress` is called with the number of sectors.
pub(super) fn compare_clean(
    view: &SetView,
    cache: &dyn ReadAt,
    backings: &[&Backing<'_>],
    findings: &mut Findings,
    progress: &mut dyn FnMut(Sectors) -> ControlFlow<()>,
) -> Compared {
    let mut compared = Compared::default();
    let mut buffers = (Vec::new(), Vec::new());
    for Backing { source, superblock } in backings {
        let Some(slot) = Relation::of(view, superblock).attached() else { continue };
        let differing = compared.differing.entry(slot).or_insert(0);
        for (piece, _) in view.live(slot).filter(|(_, kind)| *kind == PieceKind::Clean) {
            let (invariant, place) = (Invariant::CleanEqual, || data_place(view, slot, piece));
            match same(piece, cache, *source, &mut buffers) {
                Ok(None) => {}
                Ok(Some(sector)) => {
                    *differing += 1;
                    findings.push_with(invariant, Severity::Notice, || {
                        let (expected, found) = (
                            format!("as on {}", source.name()),
                            format!("something else at {}", view.range_text(slot, sector, Sectors(1))),
                        );
                        Finding::new(
                            Severity::Notice,
                            invariant,
                            place(),
                            Mismatch::new("clean data", expected, found),
                        )
                        .note("legal after a crash, for writes that were in flight; the cached data counts")
                    });
                }
                Err(e) => findings.push_with(invariant, Severity::Error, || {
                    unreadable_at(invariant, Severity::Error, place(), &e)
                }),
            }
            if progress(piece.len).is_break() {
                compared.cancelled = true;
                return compared;
            }
        }
    }
    compared
}

/// Compares the data of `piece` on both devices: the first sector that differs, in key positions.
fn same(
    piece: &Piece,
    cache: &dyn ReadAt,
    backing: &dyn ReadAt,
    buffers: &mut (Vec<u8>, Vec<u8>),
) -> Result<Option<Sector>, ReadError> {
    let Some(ptr) = piece.ptr else { return Ok(None) };
    // Another rule reports the part of the piece that lies outside the device.
    let Some(piece) = piece.cut(Sector(0), Sector(backing.sectors().0)) else { return Ok(None) };
    let mut at = 0;
    while at < piece.len.0 {
        let len = (piece.len.0 - at).min(CHUNK);
        let bytes = usize::try_from(len * 512).unwrap_or(0);
        buffers.0.resize(bytes, 0);
        buffers.1.resize(bytes, 0);
        cache.read_at(Sector(ptr.offset().0 + at), &mut buffers.0)?;
        backing.read_at(Sector(piece.start.0 + at), &mut buffers.1)?;
        let sectors = buffers.0.chunks(512).zip(buffers.1.chunks(512));
        if let Some((n, _)) = (0..).zip(sectors).find(|(_, (a, b))| a != b) {
            return Ok(Some(Sector(piece.start.0 + at + n)));
        }
        at += len;
    }
    Ok(None)
}
