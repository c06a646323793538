//! Tests of the program as its users meet it: as a process with arguments, files, signals and sockets.
//!
//! They need programs that speak NBD and make file systems; a test whose program is missing says which Debian package
//! has it: fio, libnbd-bin, qemu-utils, e2fsprogs, util-linux.

// Every function here is part of a test, also those that the lint does not know for one.
#![allow(clippy::unwrap_used)]

mod bad_input;
mod checksums;
mod clients;
mod common_checks;
mod crash;
mod damaged_data;
mod demo;
mod extract;
mod fixtures;
mod flush;
mod group;
#[allow(dead_code, reason = "shared with the tests of faults, which use the rest")]
mod load;
mod make;
mod multicall;
mod nbd_access;
mod page_faults;
mod repair;
mod salvage;
mod up;
mod world;
