//! Requests for walks of the index, and for packing.
//!
//! Owns whether a walk is wanted, and the event that says so. A walk makes buckets reclaimable, so the allocator is the one
//! that asks for it most; the garbage collector serves the requests. Must not know what a walk does.

use std::cell::Cell;

use io::sync::Event;

/// See the module head.
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

    /// Makes gc check again whether a walk or packing is due.
    pub(crate) fn recheck(&self) {
        self.event.notify_all();
    }

    /// Whether a walk is wanted.
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted.get()
    }

    /// A walk begins, which serves every request so far.
    pub(crate) fn begun(&self) {
        self.wanted.set(false);
    }

    /// Waits until `due` holds, looked at whenever something changes.
    pub(crate) async fn wait_until(&self, due: impl FnMut() -> bool) {
        self.event.wait_until(due).await;
    }

    /// Waits until something has changed.
    pub(crate) async fn changed(&self) {
        self.event.changed().await;
    }
}
