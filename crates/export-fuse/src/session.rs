//! The threads that read requests from `/dev/fuse`.
//!
//! Owns their number and their start. They read, decode and hand over; replies come from the volumes'
//! threads. Must not know who mounted the file system or will unmount it: they end when it is.

use std::io;
use std::os::fd::OwnedFd;

use fuser::{BackgroundSession, Config, Session, SessionACL};

use crate::flusher;
use crate::fs::VolumeFs;

/// Answers the requests that come from `device` until the file system is unmounted. Blocks while the
/// kernel and we agree on what both can do.
pub(crate) fn start(fs: VolumeFs, device: OwnedFd, threads: usize) -> io::Result<BackgroundSession> {
    // Before the threads start: they inherit it.
    flusher::mark_this_thread();
    let mut config = Config::default();
    config.n_threads = Some(threads.max(1));
    // Each thread has its own queue of requests that it has read, so they do not meet at one lock.
    config.clone_fd = threads > 1;
    // Who may do what is for the kernel to decide.
    Session::from_fd(fs, device, SessionACL::All, config)?.spawn()
}
