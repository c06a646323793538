//! The whole process where simulations end: real files, real signals, file systems without room, devices that fail on
//! command, and hosts that refuse things.
//!
//! `docs/faults.md` says what users see in each of these cases; the tests here show it. What a client was answered is
//! known for every sector (`load`), by the stronger of the promises: it survives a process crash, flushed or
//! not. Everything follows from seeds, which a failing test prints; `UBCACHE_CHAOS_SEED` chooses others, and
//! `UBCACHE_CHAOS_ROUNDS` how many rounds to run.
//!
//! Needs root: the tests mount (in a namespace of their own where that does), and change limits of processes.

// Every function here is part of a test, also those that the lint does not know for one.
#![allow(clippy::unwrap_used)]

#[path = "../../../export-fuse/tests/it/host.rs"]
#[allow(dead_code, reason = "shared with the tests of the export, which use the rest")]
mod host;
#[path = "../it/load.rs"]
#[allow(dead_code, reason = "shared with the other tests, which use the rest")]
mod load;
#[path = "../it/world.rs"]
#[allow(dead_code, reason = "shared with the other tests, which use the rest")]
mod world;

mod crashes;
mod faulty;
mod full;
mod limits;
mod place;
