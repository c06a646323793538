//! The cache engine of ubcache: a bcache set in userspace.
//!
//! Deterministic asynchronous code over the traits of crate `io`: no system call, no clock, no thread, no randomness
//! of its own. A [`CacheSet`] is opened on a cache device; backing devices are registered with it and come up as
//! [`Volume`]s, which serve reads, writes, flushes and discards.
//!
//! Entry points: [`CacheSet::open`], [`CacheSet::register`], [`Volume::read`], [`Volume::write`], [`Volume::flush`],
//! [`CacheSet::stop`]. Where things are: `index` (what is cached), `journal` (what is durable), `alloc` (where data
//! goes), `volume` (the life of a request), `writeback`, `gc`, `wipe`, `set` (registration and life cycle), `policy`
//! (decisions), `stats`, `tunables`.
#![forbid(unsafe_code)]

mod alloc;
#[cfg(feature = "canary")]
pub mod canary;
#[cfg(not(feature = "canary"))]
mod canary;
mod device;
mod error;
mod events;
pub mod figures;
mod gc;
mod human;
mod index;
mod journal;
pub mod policy;
mod set;
pub mod stats;
mod tasks;
#[cfg(test)]
mod testing;
pub mod tunables;
mod uuids;
mod volume;
mod wipe;
mod writeback;

/// Deliberate bugs can be switched on in this build: it is the simulator's own.
pub const CANARIES: bool = cfg!(feature = "canary");

pub use error::{Damage, EngineError};
pub use events::SetEvent;
pub use set::{CacheSet, Detaching, EngineCounters, SetOptions, SetStatus};
pub use volume::{Volume, VolumeRef};
pub use wipe::Wiped;
