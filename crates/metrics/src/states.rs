//! States as samples, with the state as a label.
//!
//! Owns the values of these labels. Must not know the families.

use engine::figures::RateReason;
use format::BackingState;

use crate::text::Text;

/// Writes a sample for each of several states: 1 for the current state, 0 for the others.
pub(crate) fn states<T: PartialEq + Copy>(
    text: &mut Text,
    labels: &[(&str, &str)],
    name: &str,
    all: &[(T, &str)],
    now: T,
) {
    for (state, value) in all {
        text.count(&[labels, &[(name, value)]].concat(), u64::from(*state == now));
    }
}

/// Writes a sample for the current one of many states, which is 1. The others have no sample.
pub(crate) fn state<T: PartialEq + Copy>(
    text: &mut Text,
    labels: &[(&str, &str)],
    name: &str,
    all: &[(T, &str)],
    now: T,
) {
    for (_, value) in all.iter().filter(|(state, _)| *state == now) {
        text.count(&[labels, &[(name, value)]].concat(), 1);
    }
}

/// The reasons for a rate of writeback, with the values of the label.
pub(crate) const RATE_REASONS: [(RateReason, &str); 12] = [
    (RateReason::Never, "never"),
    (RateReason::NothingDirty, "nothing_dirty"),
    (RateReason::Stopped, "stopped"),
    (RateReason::Detaching, "detaching"),
    (RateReason::Draining, "draining"),
    (RateReason::CacheStarved, "cache_starved"),
    (RateReason::Filling, "filling"),
    (RateReason::Unthrottled, "unthrottled"),
    (RateReason::Delayed, "delayed"),
    (RateReason::Idle, "idle"),
    (RateReason::Fragmented, "fragmented"),
    (RateReason::Controlled, "controlled"),
];

/// The states of a backing device, with the values of the label.
pub(crate) const BACKING_STATES: [(BackingState, &str); 4] = [
    (BackingState::None, "no_cache"),
    (BackingState::Clean, "clean"),
    (BackingState::Dirty, "dirty"),
    (BackingState::Stale, "inconsistent"),
];
