//! Read-only view of a cache set: open, check, extract and dump it.
//!
//! The crate judges what the engine and the kernel wrote, so it shares no code with the engine except the parsers of `format`.
//! It reads devices only through [`source::ReadAt`], which cannot write. All calls are synchronous.
//!
//! Invariant: no contents of a device make it panic, loop, or use memory out of proportion to what is stored. Damage becomes a
//! [`Finding`] that names device, place, expected and found.
//!
//! Must not repair, read devices in use (their contents change during the read), or know the command line.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::unwrap_used, clippy::expect_used, clippy::panic)
)]

pub mod attach;
pub mod check;
pub mod copies;
pub mod device;
pub mod dump;
pub mod extent_map;
pub mod extract;
pub mod finding;
pub mod source;
pub mod usage;
pub mod view;

mod sparse;
mod verify;

pub use attach::{Attachment, Relation};
pub use check::{CheckOptions, CheckReport, DamagedDirtyData, SetReport, check, check_set, damaged_dirty};
pub use device::{DeviceSuper, SuperblockError, read_superblock};
pub use extent_map::{ExtentMap, Origin, Piece};
pub use extract::{
    DamagedDirty, ExtractError, ExtractOptions, Extracted, Extraction, FileSink, Progress, Remark, Sink,
    StreamSink, Target,
};
pub use finding::{Finding, Findings, Invariant, Mismatch, Place, Severity};
pub use source::{FileSource, OpenFileError, ReadAt, ReadError, ReadFailure, SliceSource};
pub use view::{Mode, NodeId, OpenError, PieceKind, SetView};

/// Version of all serialised documents of this crate.
///
/// Fields may be added within a version. The meaning and the presence of existing fields do not change.
pub const SCHEMA_VERSION: u32 = 1;
