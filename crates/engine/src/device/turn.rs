//! Whether data that was read from the cache device may be believed.
//!
//! What reads cached data takes the [`Turn`] before it looks the key up, and again when the data is there. If the two
//! differ, the data may be zeros of a wipe, or what was there before the device lost its volatile cache: it looks the key up
//! again, and finds out whether the set has failed.

/// A moment of the cache device ([`super::CacheDevice::turn`]). Between two different ones dead sectors may have been
/// overwritten, or the device may have failed.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Turn {
    /// Counts wipes and failures.
    pub(super) number: u64,
    /// The device failed a flush, and the set may not know it yet: tasks that wait for the flush run one after the other.
    pub(super) flush_failed: bool,
}
