//! Tests of the FUSE export: volumes in memory behind the kernel's own FUSE and loop drivers, real file
//! systems on top. They need root, FUSE and loop devices; module `host` says what happens without.

mod devices;
mod ends;
mod files;
mod host;
mod server;
