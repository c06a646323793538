//! Serving while memory is short.
//!
//! Owns the preparation of a thread that serves block devices, and what the operator is told about what could not be had.
//! Must not know how it is done (`blockio::flusher`).

use std::sync::Once;

use blockio::flusher;

use crate::message;

/// Prepares the calling thread for serving block devices, before it starts any other thread or opens a ring. What could not
/// be had is said once for a process.
pub fn prepare_this_thread() {
    static MARK: Once = Once::new();
    static LOCK: Once = Once::new();
    if let Err(e) = flusher::mark_this_thread() {
        MARK.call_once(|| {
            message::warn(format!(
                "cannot mark this process as one that block devices depend on (PR_SET_IO_FLUSHER: {e}): when memory is \
                 short, it can wait for a file system that waits for it. Give it CAP_SYS_RESOURCE"
            ));
        });
    }
    if let Err(e) = flusher::lock_memory() {
        LOCK.call_once(|| {
            message::warn(format!(
                "cannot lock memory ({e}): when memory is short, requests can wait until pages are read from swap, and for \
                 ever if the swap is on a volume of this process. Give it CAP_IPC_LOCK, or `ulimit -l unlimited`"
            ));
        });
    }
}
