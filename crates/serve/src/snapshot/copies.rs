//! Whether the dirty data of a volume is on two cache devices.
//!
//! Owns these figures. Must not know how a copy is made, nor since when there is one copy only.

use engine::{CacheSet, CopyState, Volume};
use format::Sectors;
use serde::Serialize;

/// The second copy of the dirty data of a volume whose set is in a group.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct CopyFigures {
    /// UUID of the set that has, or is getting, the second copy.
    pub second_set: Option<String>,
    /// Whether all dirty data is in both sets.
    pub complete: bool,
    /// While the copy is being made, the part of the dirty data that is in both sets, in percent; of a volume without dirty data, the
    /// part of the volume that is done.
    pub copied_percent: Option<f64>,
    /// While the copy is being made, the dirty data in bytes that is in both sets. It is safe only when the copy is complete.
    pub copied_bytes: Option<u64>,
    /// Dirty data in bytes that the loss of one cache device would lose.
    pub one_copy_bytes: u64,
    /// Unix time since which dirty data is in one set only; `None` while the copy is complete. The owner of the exports fills this in.
    pub one_copy_since_unix_seconds: Option<u64>,
}

impl CopyFigures {
    /// The figures of a volume; `None` if its set is in no group.
    pub(super) fn of(volume: &Volume, set: Option<&CacheSet>) -> Option<CopyFigures> {
        set.filter(|set| set.group().is_some() && !volume.is_flash_only())?;
        let dirty = volume.dirty_sectors();
        let (second, complete, making) = match volume.copy_state() {
            CopyState::None => (None, false, None),
            CopyState::Making { set, done, copied } => (Some(set), false, Some((done, copied.min(dirty)))),
            CopyState::Complete { set } => (Some(set), true, None),
        };
        let percent = |(done, copied): (Sectors, Sectors)| match dirty {
            Sectors::ZERO => percent_of(done, volume.size()),
            dirty => percent_of(copied, dirty),
        };
        Some(CopyFigures {
            second_set: second.map(|set| set.to_string()),
            complete,
            copied_percent: making.map(percent),
            copied_bytes: making.map(|(_, copied)| copied.bytes()),
            one_copy_bytes: if complete { 0 } else { dirty.bytes() },
            one_copy_since_unix_seconds: None,
        })
    }
}

/// A part in percent with one decimal, which is rounded down: only all is 100 percent.
fn percent_of(part: Sectors, whole: Sectors) -> f64 {
    (part.0.saturating_mul(1000) / whole.0.max(1)) as f64 / 10.0
}
