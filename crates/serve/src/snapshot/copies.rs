//! Whether the dirty data of a volume is on two cache devices.
//!
//! Owns these figures. Must not know how a copy is made.

use engine::{CacheSet, CopyState, Volume};
use serde::Serialize;

/// The second copy of the dirty data of a volume whose set is in a group.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct CopyFigures {
    /// UUID of the set that has, or is getting, the second copy.
    pub second_set: Option<String>,
    /// Whether all dirty data is in both sets.
    pub complete: bool,
    /// While the copy is being made, the part of the volume that is done, in percent.
    pub copied_percent: Option<f64>,
    /// Dirty data in bytes that the loss of one cache device would lose.
    pub one_copy_bytes: u64,
}

impl CopyFigures {
    /// The figures of a volume; `None` if its set is in no group.
    pub(super) fn of(volume: &Volume, set: Option<&CacheSet>) -> Option<CopyFigures> {
        set.filter(|set| set.group().is_some() && !volume.is_flash_only())?;
        let (second, complete, done) = match volume.copy_state() {
            CopyState::None => (None, false, None),
            CopyState::Making { set, done } => (Some(set), false, Some(done)),
            CopyState::Complete { set } => (Some(set), true, None),
        };
        let percent = |done: format::Sectors| (done.0 * 1000 / volume.size().0.max(1)) as f64 / 10.0;
        Some(CopyFigures {
            second_set: second.map(|set| set.to_string()),
            complete,
            copied_percent: done.map(percent),
            one_copy_bytes: if complete { 0 } else { volume.dirty_sectors().bytes() },
        })
    }
}
