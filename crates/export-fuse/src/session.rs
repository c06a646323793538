//! The threads that read requests from `/dev/fuse`.
//!
//! Owns their number and their start. They read, decode and hand over; replies come from the volumes'
//! threads. Must not know the mounting: they end when the file system is unmounted.
//!
//! Why threads, and not reads of `/dev/fuse` on a volume's ring: one file system may serve volumes of several
//! threads, the protocol's codec exists and is used by many (fuser), and at depth the two threads work side
//! by side. It costs one crossing for each request. Measured on two busy cores, a volume in memory, 4 KiB on
//! the file, best of five: a session that answers by itself does 65k reads/s at depth 1 and 200k at 16; with
//! the crossing 52k and 131k. So the crossing is 4 µs for a single request; at depth 16 the volume's thread
//! is woken once for some 15 requests. One, two and four threads did not differ beyond the noise for small
//! requests; for large writes, which are copied here, a second one helped (1.6 instead of 1.4 GiB/s).

use std::io;
use std::os::fd::OwnedFd;

use blockio::flusher;
use fuser::{BackgroundSession, Config, Filesystem, Session, SessionACL};

/// Answers the requests that come from `device` until the file system is unmounted. Blocks while the
/// kernel and we agree on what both can do.
pub(crate) fn start(fs: impl Filesystem, device: OwnedFd, threads: usize) -> io::Result<BackgroundSession> {
    // Before the threads start: they inherit it.
    // The caller has told the operator if that is refused.
    let _ = flusher::mark_this_thread();
    let mut config = Config::default();
    config.n_threads = Some(threads.max(1));
    // Each thread has its own queue of requests that it has read, so they do not meet at one lock.
    config.clone_fd = threads > 1;
    // Who may do what is for the kernel to decide.
    Session::from_fd(fs, device, SessionACL::All, config)?.spawn()
}
