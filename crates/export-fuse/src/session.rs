//! The threads that read requests from `/dev/fuse`.
//!
//! Owns the number and the start of these threads. They read, decode and pass requests on; the volumes' threads reply. The
//! threads end when the file system is unmounted. Must not know how it is mounted.
//!
//! Requests are not read on a volume's ring, for three reasons: one file system may serve volumes of several threads; the codec
//! of the protocol exists in a widely used crate (fuser); and at high queue depth two threads work side by side. The price is
//! one crossing between threads for each request. Measured on two busy cores with a volume in memory, 4 KiB requests to the
//! file, best of five runs: a session that answers by itself serves 65k reads/s at depth 1 and 200k at depth 16; with the
//! crossing, 52k and 131k. So the crossing costs 4 µs for a single request. At depth 16, one wake-up of the volume's thread
//! serves about 15 requests. For small requests, one, two and four threads did not differ beyond the noise. For large writes,
//! which these threads copy, a second thread helped (1.6 instead of 1.4 GiB/s).

use std::io;
use std::os::fd::OwnedFd;

use blockio::flusher;
use fuser::{BackgroundSession, Config, Filesystem, Session, SessionACL};

/// Answers requests from `device` until the file system is unmounted. Blocks while kernel and server negotiate.
pub(crate) fn start(fs: impl Filesystem, device: OwnedFd, threads: usize) -> io::Result<BackgroundSession> {
    // Before the threads start, because they inherit the mark. If the kernel refuses it, the caller has warned the operator.
    let _ = flusher::mark_this_thread();
    let mut config = Config::default();
    config.n_threads = Some(threads.max(1));
    // Each thread has its own queue of requests, so that threads do not compete for one lock.
    config.clone_fd = threads > 1;
    // The kernel decides about permissions.
    Session::from_fd(fs, device, SessionACL::All, config)?.spawn()
}
