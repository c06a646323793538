//! A tree of files laid out like the kernel's bcache in sysfs: `fs/bcache/<set>/…`, `block/<device>/bcache/…`.
//!
//! Scripts and exporters that were made for the kernel's files work with this tree when they are given its root. A volume
//! also has the entry `block/bcacheN/bcache`.
//!
//! Names, formats and write semantics are the kernel's (semantics section 16) and are in one table, `table`; `tree` has the
//! paths of its files, `fs` answers FUSE. Reads and writes go through [`Owner`], which the owner of the sets implements.
//! Must not know threads, sockets, or the source of devices.
//!
//! Invariants: the text of a file is made at open, all of it from one snapshot. Only inode numbers and the numbers of
//! `bcacheN` are stored between two opens. A write is carried out before it is answered.
#![forbid(unsafe_code)]

mod fs;
mod names;
mod owner;
mod table;
mod tree;
mod values;

pub use fs::SysfsView;
pub use owner::{DeviceOrder, Errno, Order, Owner, SetOrder, Snapshot, VolumeId, Writer};
pub use table::{Place, files};
