//! Whether a request that failed begins again (decision 037).
//!
//! Owns the decision. Must not know what a request does.
//!
//! The decision is boxed: what a future keeps across an await is copied with it. A write whose future has this decision in it needs 130
//! more instructions (`bench/engine/tests/instructions.rs`).

use std::pin::Pin;

use format::Sector;

use super::Target;
use super::cache_failed::{handle_failed_cache, has_lost_set};
use super::copy::heal;
use crate::error::EngineError;

/// A request that failed.
pub(super) struct Failed {
    pub(super) range: (Sector, Sector),
    /// How many sets the volume had lost when the request began.
    pub(super) losses: u32,
    pub(super) error: EngineError,
}

/// A decision that is being made.
pub(super) type Deciding<'a> = Pin<Box<dyn Future<Output = Result<(), EngineError>> + 'a>>;

/// Decides about a request that failed. `Ok`: it is to begin again, because one of two sets was lost, or because the data of the range was
/// replaced by that of the copy. The replacement is tried once for each request: `healed` says whether it was.
///
/// # Errors
/// That of the request, or of the set.
#[cold]
#[inline(never)]
pub(super) fn again<'a>(target: Target<'a>, failed: Failed, healed: &'a mut bool) -> Deciding<'a> {
    Box::pin(async move {
        let Target { volume, cache, .. } = target;
        let Failed { range, losses, error } = failed;
        if !has_lost_set(volume, cache, losses) {
            if !volume.links.has_second() || std::mem::replace(healed, true) {
                return Err(error);
            }
            let is_healed = matches!(heal(volume, range).await, Ok(true));
            if !is_healed && !has_lost_set(volume, cache, losses) {
                return Err(error);
            }
        }
        handle_failed_cache(target).await
    })
}

/// Decides about a request that found the set of the volume failed. `Ok`: it is to begin again; see [`handle_failed_cache`].
///
/// # Errors
/// That of the set.
#[cold]
#[inline(never)]
pub(super) fn handle_failed_set(target: Target<'_>) -> Deciding<'_> {
    Box::pin(handle_failed_cache(target))
}
