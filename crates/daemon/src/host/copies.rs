//! Since when the dirty data of the volumes of a group has one copy only.
//!
//! Owns the last known state of each volume. The state directory has the time, so that it outlives the process, and so that a volume
//! that another set takes over keeps it. Must not know how a copy is made.

use std::cell::RefCell;
use std::collections::BTreeMap;

use engine::{CopyState, Volume};
use format::Uuid;
use serve::snapshot::VolumeFigures;

use super::Host;
use crate::wall_clock;

/// The volumes of a set of a group, by backing device: the Unix time since which they have one copy, or `None` with two.
#[derive(Default)]
pub(super) struct OneCopy(RefCell<BTreeMap<Uuid, Option<u64>>>);

/// Stores which volumes have one copy, if that has changed.
pub(super) fn note_copies(host: &Host<'_>) {
    if host.session.set.as_ref().and_then(|set| set.group()).is_none() {
        return;
    }
    let mut known = host.one_copy.0.borrow_mut();
    let volumes = host.session.volumes();
    known.retain(|disk, _| volumes.iter().any(|volume| volume.backing_uuid() == Some(*disk)));
    for volume in volumes {
        let Some(disk) = volume.backing_uuid() else { continue };
        let is_complete = matches!(volume.copy_state(), CopyState::Complete { .. });
        if known.get(&disk).is_some_and(|since| since.is_none() == is_complete) {
            continue;
        }
        let (mut state, name) = (host.shared.state(), disk.to_string());
        let since = match is_complete {
            true => {
                state.has_two_copies(&name);
                None
            }
            false => Some(state.has_one_copy(&name, wall_clock::now_ms() / 1000)),
        };
        known.insert(disk, since);
    }
}

/// Adds the time to the figures of a volume.
pub(super) fn add_since(host: &Host<'_>, volume: &Volume, figures: &mut VolumeFigures) {
    let since = volume.backing_uuid().and_then(|disk| host.one_copy.0.borrow().get(&disk).copied().flatten());
    if let Some(copy) = figures.held.copy.as_mut().filter(|copy| !copy.complete) {
        copy.one_copy_since_unix_seconds = since;
    }
}
