//! One scenario for each known defect or limit of the kernel's bcache that a simulation can show: what the kernel does,
//! its effect for a user, and what ubcache does. The numbers are those of `docs/compat.md`. Every scenario would fail on
//! the kernel's behaviour.
#![allow(clippy::unwrap_used)]

mod costs;
mod crashes;
mod failures;
mod metadata;
mod scenarios;
mod stage;
mod upkeep;
