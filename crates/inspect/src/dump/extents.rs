//! Extents: the state of every range, after replay of the journal.

use std::fmt;

use format::Inode;
use serde::Serialize;

use crate::SCHEMA_VERSION;
use crate::extent_map::Origin;
use crate::finding::path_text;
use crate::view::{PieceKind, SetView};

/// Ranges of one slot or of all slots.
#[derive(Clone, Debug, Serialize)]
pub struct ExtentsDoc {
    /// Version of this document's layout.
    pub schema_version: u32,
    /// Cache device.
    pub device: String,
    /// The ranges, in key order.
    pub extents: Vec<ExtentDoc>,
}

/// A range.
#[derive(Clone, Debug, Serialize)]
pub struct ExtentDoc {
    /// Slot of the device.
    pub inode: u32,
    /// First sector. For a cached device it is the sector of the backing device, the data offset included.
    pub start: u64,
    /// Length.
    pub sectors: u64,
    /// `dirty`, `clean`, `stale`, `hole`, `check`, or `invalid`.
    pub kind: &'static str,
    /// Whether the key is dirty. A stale key may be dirty too.
    pub dirty: bool,
    /// First sector on the cache device; absent if there is no pointer into a bucket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_sector: Option<u64>,
    /// Generation of the pointer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generation: Option<u8>,
    /// Buckets from the root to the leaf with the key; empty if it is in the journal.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub path: Vec<u32>,
    /// Number of the journal entry with the key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub journal_seq: Option<u64>,
}

/// Dumps the ranges of `inode`, or of all inodes.
pub fn extents(view: &SetView, inode: Option<Inode>) -> ExtentsDoc {
    let wanted = view.pieces().filter(|(of, ..)| inode.is_none_or(|inode| inode == *of));
    let extents = wanted.map(|(inode, piece, kind)| {
        let pointless = matches!(kind, PieceKind::Hole | PieceKind::Check | PieceKind::Invalid);
        let ptr = piece.ptr.filter(|_| !pointless);
        let (path, journal_seq) = match piece.origin {
            Origin::Node(id) => (view.path(id), None),
            Origin::Journal(seq) => (Vec::new(), Some(seq.0)),
        };
        ExtentDoc {
            inode: inode.0,
            start: piece.start.0,
            sectors: piece.len.0,
            kind: kind.name(),
            dirty: piece.dirty,
            cache_sector: ptr.map(|p| p.offset().0),
            generation: ptr.map(|p| p.generation().0),
            path,
            journal_seq,
        }
    });
    ExtentsDoc { schema_version: SCHEMA_VERSION, device: view.device.clone(), extents: extents.collect() }
}

impl fmt::Display for ExtentsDoc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for e in &self.extents {
            write!(f, "{}:{}+{} {}", e.inode, e.start, e.sectors, e.kind)?;
            if let (Some(at), Some(generation)) = (e.cache_sector, e.generation) {
                write!(f, " at sector {at} gen {generation}")?;
            }
            match e.journal_seq {
                Some(seq) => writeln!(f, " (journal entry {seq})")?,
                None => writeln!(f, " (node {})", path_text(&e.path))?,
            }
        }
        Ok(())
    }
}
