//! The ublk export: makes a volume a block device `/dev/ublkbN`, without a kernel module of this project.
//!
//! [`Ublk::start`] makes devices of volumes or recovers those that a process left behind, [`Ublk::stop`] removes them,
//! [`Ublk::hand_over`] leaves them to the next process, and [`obstacle`] tells in advance why a host has none. The ring of the
//! volumes' thread fetches and answers requests. There is no other thread, and only the driver copies data (decision 007).
//! Must not know the cache.
//!
//! Invariants: every request that is answered was carried out to its end; a device in use is not removed unless by force; a
//! process that ends leaves its devices behind, and the next process recovers them.
#![deny(clippy::undocumented_unsafe_blocks)]

mod abi;
mod control;
mod descriptors;
mod device;
mod error;
mod export;
mod find;
mod params;
mod request;
mod server;
mod shape;
mod sysfs;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use error::UblkError;
pub use export::{Exported, Options, Ublk, obstacle};
pub use find::{Identities, Identity, Left, left_behind};
pub use shape::Shape;
