//! The daemon as a process: real sockets, files as devices, NBD clients, and the commands that talk to it.

// Every function here is part of a test, also those that the lint does not know for one.
#![allow(clippy::unwrap_used)]

#[path = "../it/world.rs"]
#[allow(dead_code, reason = "shared with the other tests, which use the rest")]
mod world;

mod answers;
mod audit;
mod bit_rot;
mod busy;
mod clients;
mod copies;
mod every_export;
mod flash;
mod groups;
mod halfway;
mod hotplug;
mod huge;
mod hung;
mod labels;
mod life;
mod lost_cache;
mod make;
mod many;
mod memory_limit;
mod messages;
mod names;
mod nbd;
mod place;
mod problems;
mod prometheus;
mod settings;
mod state;
mod stop;
mod sysfs;
mod tcp;
mod web;
mod wipe;
