//! Dirty data that is on one cache device of a group only.
//!
//! Owns the words about it. Must not know how a copy is made.

use serve::amount::human;
use serve::snapshot::VolumeFigures;

use super::{Problem, SetView, volume_title};

/// The problem of a volume of a group whose dirty data has one copy only.
pub(super) fn of_one_copy(set: &SetView, volume: &VolumeFigures, sets: &[SetView]) -> Option<Problem> {
    let copy = volume.held.copy.as_ref().filter(|copy| !copy.complete)?;
    let dirty = match copy.one_copy_bytes {
        0 => "new dirty data would be".to_owned(),
        bytes => format!("{} of dirty data are", human(bytes)),
    };
    let has_other = sets.iter().any(|other| {
        let works = other.figures.set.as_ref().is_some_and(|figures| figures.failed.is_none());
        other.id != set.id
            && other.state == "serving"
            && works
            && other.group.is_some()
            && other.group == set.group
    });
    let (why, command) = match (copy.copied_percent, has_other) {
        (Some(percent), _) => (format!("the copy is being made: {percent} %"), "ubcache status"),
        (None, true) => ("the copy is made soon".to_owned(), "ubcache status"),
        (None, false) => (
            "no other cache device of the group is served: register it, or make one by `ubcache group add`"
                .to_owned(),
            "ubcache register CACHE-DEVICE",
        ),
    };
    let text = format!("{}: {dirty} on one cache device only; {why}", volume_title(volume));
    Some(Problem::new("one_copy", text, command.to_owned()))
}
