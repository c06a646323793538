//! One story for each known defect or limit of the kernel's bcache that a simulation can show: what the kernel does,
//! what a user saw of it, what happens here. The numbers are those of `docs/compat.md`. Every story would fail on
//! the kernel's behaviour.
#![allow(clippy::unwrap_used)]

mod costs;
mod crashes;
mod failures;
mod metadata;
mod stage;
mod upkeep;
