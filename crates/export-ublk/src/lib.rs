//! The ublk export: a volume as a block device of the kernel, `/dev/ublkbN`, without a kernel module of our own.
//!
//! [`Ublk::start`] makes devices of volumes or recovers those that a process left behind, [`Ublk::stop`] takes them
//! away, [`Ublk::hand_over`] leaves them to the next process, and [`obstacle`] tells beforehand why a host has none.
//! Requests are fetched and answered on the ring of the volumes' thread: there is no other thread and no copy but the
//! driver's own (decision 007). Must not know the cache.
//!
//! Invariants: every request that is answered was carried out to its end; a device that is in use is not taken away
//! unless by force; whoever dies leaves a device behind that the next process goes on with.
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
mod sysfs;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use device::Shape;
pub use error::UblkError;
pub use export::{Exported, Options, Ublk, obstacle};
pub use find::{Identity, Left, left_behind};
