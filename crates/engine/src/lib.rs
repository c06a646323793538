//! The cache engine of ubcache: a bcache set in userspace.
//!
//! The engine is deterministic asynchronous code over the traits of crate `io`: it makes no system calls and has no
//! clock, thread or source of randomness. A [`CacheSet`] is opened on a cache device; each backing device that is
//! registered with it becomes a [`Volume`], which serves reads, writes, flushes and discards.
//!
//! Entry points: [`CacheSet::open`], [`CacheSet::register`], [`Volume::read`], [`Volume::write`], [`Volume::flush`],
//! [`CacheSet::stop`]. The modules: `index` (cached extents), `journal` (durability of keys), `alloc` (buckets),
//! `volume` (paths of requests), `writeback`, `gc`, `wipe`, `scrub`, `set` (registration and life cycle), `policy` (decisions),
//! `stats`, `tunables`.
#![forbid(unsafe_code)]

mod alloc;
#[cfg(feature = "canary")]
pub mod canary;
#[cfg(not(feature = "canary"))]
mod canary;
mod damage;
mod data;
mod device;
mod error;
mod events;
pub mod figures;
mod gc;
mod human;
mod index;
mod journal;
pub mod policy;
mod refusal;
mod scrub;
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

/// Whether this build has the deliberate bugs that tests switch on (feature `canary`).
pub const CANARIES: bool = cfg!(feature = "canary");

pub use damage::{Damage, Flaw, KeyFlaw, NodeFlaw, NodeKeyFlaw};
pub use data::{ChecksumCounters, ChecksumCoverage};
pub use error::{EngineError, NoSpace};
pub use events::{Resolution, SetEvent};
pub use refusal::{Cause, DeviceRefusal, MemoryLimit, MirrorRefusal, Refusal};
pub use scrub::{DamagedRange, ScrubFigures, ScrubReport};
pub use set::{CacheSet, Detaching, DeviceInUse, EngineCounters, SetOptions, SetStatus};
pub use volume::{CopyState, Volume, VolumeRef};
pub use wipe::Wiped;
