//! The FUSE export: a file per volume, and a loop device over it: a real block device on hosts that have
//! neither ublk nor nbd, without a kernel module of our own.
//!
//! [`serve`] makes a volume ready on its own thread, [`Fuse::mount`] makes files of such volumes,
//! [`Fuse::attach_loop_devices`] makes block devices of the files, [`Fuse::stop`] takes all of it away in
//! the right order, and [`probe()`] tells beforehand what the host offers. Must not know the cache.
//!
//! Invariants: nothing here blocks the thread of a driver; every request is answered; nothing that is in
//! use is taken away unless by force.
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
pub use fuse::{Exported, Fuse, FuseOptions, Refused};
pub use hole::PunchHole;
pub use mount::MountBy;
pub use probe::{Availability, probe};
pub use service::{ServeOptions, Served, serve};
pub use tree::Tree;
