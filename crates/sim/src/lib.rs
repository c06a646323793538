//! The simulator: the engine on simulated disks and virtual time, judged by an oracle of the engine's promises.
//!
//! Owns the simulated world (`world`, `disk`, `image`, `hardware`), the contents of sectors (`stamp`), the oracle of the
//! durability contract (`oracle`), plans of runs (`plan`) and their generation from seeds (`generate`), the clients
//! (`client`), one boot (`session`), whole runs (`run`), shorter plans (`shrink`), scripted runs (`scenario`), every crash
//! of a scenario (`crash`), memory that outlives a process (`crash_log`), a substituted cache device (`substitute`),
//! damaged images (`rot`), independent judgement of images (`judge`), what a failed check found (`violation`), and times in
//! plans (`nanos`). Two runs of a seed are equal.
//!
//! Invariants: the only source of time is virtual, there are no threads, and the only randomness comes from the seed. A
//! fault that the engine does not claim to survive is not injected.
#![forbid(unsafe_code)]

pub mod client;
pub mod crash;
pub mod crash_log;
pub mod damaged_data;
pub mod disk;
pub mod edit;
mod faults;
#[cfg(feature = "canary")]
pub mod first_seeds;
pub mod generate;
pub mod group;
pub mod group_run;
pub mod hardware;
pub mod image;
pub mod judge;
pub mod landmark;
pub mod layout;
mod nanos;
pub mod oracle;
pub mod plan;
pub mod report;
pub mod rot;
pub mod run;
pub mod scenario;
pub mod session;
pub mod shrink;
pub mod stamp;
pub mod substitute;
pub mod violation;
pub mod world;
