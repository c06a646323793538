//! Requests for walks of the index and for packing.
//!
//! Owns the request for a walk, and the event that wakes the garbage collector, which serves it. Most requests come
//! from the allocator, because a walk makes buckets reclaimable. Must not know what a walk does.

use std::cell::Cell;

use io::sync::Event;

/// The requests for walks of the index.
#[derive(Default)]
pub(crate) struct WalkRequests {
    wanted: Cell<bool>,
    event: Event,
}

impl WalkRequests {
    /// Asks for a walk of the index.
    pub(crate) fn request(&self) {
        self.wanted.set(true);
        self.event.notify_all();
    }

    /// Makes the garbage collector check again whether a walk or packing is due.
    pub(crate) fn recheck(&self) {
        self.event.notify_all();
    }

    /// Whether a walk was requested and has not begun.
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted.get()
    }

    /// Records that a walk begins, which serves every request so far.
    pub(crate) fn begun(&self) {
        self.wanted.set(false);
    }

    /// Waits until `due` is true; it is evaluated on every event.
    pub(crate) async fn wait_until(&self, due: impl FnMut() -> bool) {
        self.event.wait_until(due).await;
    }

    /// Waits for the next event.
    pub(crate) async fn changed(&self) {
        self.event.changed().await;
    }
}
