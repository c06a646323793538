//! The FUSE export: a file for each volume, and a loop device over the file.
//!
//! The loop device is a real block device on hosts with neither ublk nor nbd, and needs no kernel module of this project.
//!
//! [`serve`] prepares a volume on its own thread, [`Fuse::mount`] makes files of such volumes, [`Fuse::attach_loop_devices`]
//! makes block devices of the files, [`Fuse::stop`] removes everything in the right order, and [`probe()`] finds out in advance
//! what the host offers. Must not know the cache.
//!
//! Invariants: no call blocks the thread of a driver; every request is answered; nothing that is in use is removed unless by
//! force.
#![deny(clippy::undocumented_unsafe_blocks)]

mod bytes;
mod errno;
mod error;
mod fs;
mod fuse;
mod gate;
mod hole;
mod loopdev;
mod mount;
mod probe;
mod service;
mod session;
mod spare;
mod stale;
mod tree;

pub use blockio::users::User;
pub use error::FuseError;
pub use fs::RequestLimits;
pub use fuse::{Exported, Fuse, FuseOptions, Refused};
pub use hole::PunchHole;
pub use mount::MountBy;
pub use probe::{Availability, probe};
pub use service::{ServeOptions, Served, serve};
pub use spare::{free_unused, set_most_spare};
pub use stale::{Leftover, leftovers};
pub use tree::Tree;
