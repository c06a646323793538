//! Load whose every sector can be judged: which requests there are (`plan`), what sectors hold (`stamp`), who runs them
//! (`run`, against a `target`, which may fail as a kernel's does: `racing`), and what must be there afterwards (`model`).
//!
//! A plan is a pure function of its numbers, so the same requests come from the program in a guest and from a thread
//! here, and the model knows them without having seen them.

pub mod files;
pub mod model;
pub mod plan;
pub mod racing;
pub mod run;
pub mod stamp;
pub mod target;

pub use model::{Map, Model};
pub use plan::{Op, Plan, Random};
pub use target::{FileTarget, NbdTarget, Target};

/// The contents of a file or device from a sector on, as a volume.
///
/// # Panics
/// If it cannot be read.
#[track_caller]
pub fn raw_map(path: &std::path::Path, from_sector: u64, tag: u32) -> Map {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    Map::of(bytes.get(from_sector as usize * stamp::SECTOR..).unwrap_or_default(), tag)
}
