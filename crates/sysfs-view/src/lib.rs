//! A tree of files laid out like the kernel's bcache in sysfs, so that scripts and exporters made for the kernel's work
//! when they are given its root: `fs/bcache/<set>/…`, `block/<device>/bcache/…`, `block/bcacheN/bcache`.
//!
//! Names, formats and write semantics are the kernel's (semantics section 16) and stand in one table, `table`; `tree`
//! knows where its files are, `fs` answers FUSE. What is read and done goes through [`Owner`], by whoever has the sets.
//! Must not know threads, sockets, or where devices come from.
//!
//! Invariants: a file's text is made when it is opened, all of it from one moment; nothing is remembered between two
//! opens but inode numbers and the numbers of `bcacheN`; a write is done when it is answered.
#![forbid(unsafe_code)]

mod fs;
mod names;
mod owner;
mod table;
mod tree;
mod values;

pub use fs::SysfsView;
pub use owner::{DeviceOrder, Errno, Order, Owner, SetOrder, Snapshot, VolumeId};
pub use table::{Place, files};
