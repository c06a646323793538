//! Rules about pointers that need slots, devices and final generations: invariants 13, 14 and 15.
//!
//! Owns the checks of the extent map. Must not know how extents are found.

use std::collections::BTreeMap;

use format::{Inode, Sector};

use super::Backing;
use crate::attach::Relation;
use crate::extent_map::Piece;
use crate::finding::{Finding, Findings, Invariant, Mismatch, Place, Severity};
use crate::view::{MAX_POINTER_AGE, NodeId, PieceKind, SetView, SlotKind, data_place};

/// Checks every piece of the extent map.
pub(super) fn check(view: &SetView, backings: &[&Backing<'_>], findings: &mut Findings) {
    let ranges = ranges(view, backings);
    let mut unknown: BTreeMap<Inode, u64> = BTreeMap::new();
    for (inode, piece, kind) in view.pieces() {
        if !view.slots.contains_key(&inode) {
            *unknown.entry(inode).or_insert(0) += 1;
        }
        // A hole may be older than the device that has the slot now, so its range is not checked.
        if let Some((first, end)) = ranges.get(&inode).filter(|_| piece.ptr.is_some()) {
            inside(view, inode, piece, (*first, *end), findings);
        }
        age(view, inode, piece, kind, findings);
        if kind.is_live() {
            alignment(view, inode, piece, findings);
        }
    }
    for (inode, count) in unknown {
        findings.push(Finding::new(
            Severity::Error,
            Invariant::ExtentValid,
            Place::new(&view.device, "uuid table").item(format!("slot {inode}")),
            Mismatch::new(
                "uuid",
                "one, as there are keys with this inode",
                format!("none, and {count} ranges"),
            ),
        ));
    }
}

/// Checks that every node's bucket still holds the node.
///
/// The generation of a pointer that was found after the node was read, or the stored generation of the root's bucket, can be
/// newer than that of the node's pointer. Then the bucket was freed and may have another use.
pub(super) fn check_nodes(view: &SetView, findings: &mut Findings) {
    let (severity, invariant) = (Severity::Error, Invariant::PointerAge);
    for (id, node) in (0..).map(NodeId).zip(&view.nodes) {
        let age = view.gens.age(node.key.ptr, node.key.size()).unwrap_or(0);
        if age > 0 {
            findings.push_with(invariant, severity, || {
                let found = format!("{age} generations behind");
                let place = view.node_place(id);
                Finding::new(
                    severity,
                    invariant,
                    place,
                    Mismatch::new("pointer to the node", "current", found),
                )
            });
        }
    }
}

/// The range in which keys of each inode may lie. Inodes whose range is not known are absent.
fn ranges(view: &SetView, backings: &[&Backing<'_>]) -> BTreeMap<Inode, (Sector, Sector)> {
    let volumes = view.slots.iter().filter_map(|(inode, slot)| match slot.kind {
        SlotKind::Volume(sectors) => Some((*inode, (Sector(0), Sector(sectors.0)))),
        _ => None,
    });
    let cached = backings.iter().filter_map(|backing| {
        let slot = Relation::of(view, &backing.superblock).attached()?;
        let first = backing.superblock.data_offset();
        let end = first.checked_add(backing.superblock.data_sectors())?;
        Some((slot, (first, end)))
    });
    volumes.chain(cached).collect()
}

fn inside(view: &SetView, inode: Inode, piece: &Piece, bounds: (Sector, Sector), findings: &mut Findings) {
    let (first, end) = bounds;
    if piece.start >= first && piece.end() <= end {
        return;
    }
    let invariant = Invariant::ExtentValid;
    findings.push_with(invariant, Severity::Error, || {
        let expected = format!("inside the device, sectors {first}+{} of it", end.0.saturating_sub(first.0));
        let found = format!("{}+{}", piece.start, piece.len);
        let place = data_place(view, inode, piece);
        Finding::new(Severity::Error, invariant, place, Mismatch::new("range", expected, found))
    });
}

fn age(view: &SetView, inode: Inode, piece: &Piece, kind: PieceKind, findings: &mut Findings) {
    let Some(ptr) = piece.ptr.filter(|_| kind == PieceKind::Stale) else { return };
    let (invariant, age) = (Invariant::PointerAge, view.gens.age(ptr, piece.len).unwrap_or(0));
    let place = || data_place(view, inode, piece);
    if age > MAX_POINTER_AGE {
        findings.push_with(invariant, Severity::Error, || {
            let field = "age of the pointer in generations";
            let expected = format!("at most {MAX_POINTER_AGE}");
            Finding::new(Severity::Error, invariant, place(), Mismatch::new(field, expected, age))
        });
    }
    if piece.dirty {
        findings.push_with(invariant, Severity::Notice, || {
            let expected = "current, as the key is dirty";
            let found = format!("{age} generations behind");
            Finding::new(Severity::Notice, invariant, place(), Mismatch::new("pointer", expected, found))
                .note("after a crash: written back before its bucket was reused; the backing data counts")
        });
    }
}

fn alignment(view: &SetView, inode: Inode, piece: &Piece, findings: &mut Findings) {
    let block = view.geometry().block_sectors.0.max(1);
    let numbers = [piece.start.0, piece.len.0, piece.ptr.map_or(0, |p| p.offset().0)];
    if numbers.iter().all(|n| n % block == 0) {
        return;
    }
    let invariant = Invariant::Alignment;
    findings.push_with(invariant, Severity::Notice, || {
        let expected = format!("multiples of {block} sectors");
        let found = format!("start {}, length {}, cache sector {}", numbers[0], numbers[1], numbers[2]);
        let place = data_place(view, inode, piece);
        Finding::new(
            Severity::Notice,
            invariant,
            place,
            Mismatch::new("start, length and cache sector", expected, found),
        )
    });
}
