//! A cache set with its exports on one thread: the code that `ubcache up` and the daemon share.
//!
//! Owns the order in which devices, set, volumes and exports are started and stopped, and the commands of a running set
//! ([`Command`]). Everything here stays on the thread of one [`blockio::Driver`]; only [`Command`], [`Answer`] and
//! [`Snapshot`] may leave it. Must not know the source of commands: command line, standard input or control socket.
//!
//! Modules: `session` starts and stops a set; `exports` has one file per kind of export; `command` has the commands of a
//! running set, `snapshot` all its figures; `takeover` makes another process hand over; `crash_log` preserves acknowledged
//! writes after a process crash; `superblock` checks a device before anything is written; `read_only` opens devices for
//! reading; `message` and `events` write messages to the operator, through the thread of `log_writer` and as often as
//! `quiet` permits; `plain` escapes foreign text and `amount` writes numbers of bytes; `secret` reads keys and certificates; `ram` measures the available
//! memory, and `pressure` prepares a thread to serve when memory is short; `room` limits flash-only volumes; `checksums` says
//! which sets can have checksums.
#![forbid(unsafe_code)]

pub mod amount;
mod checksums;
pub mod command;
pub mod crash_log;
pub mod events;
pub mod exports;
pub mod failure;
pub mod group;
mod idle;
mod log_writer;
pub mod message;
pub mod plain;
pub mod pressure;
mod quiet;
pub mod ram;
pub mod read_only;
pub mod room;
pub mod secret;
pub mod session;
pub mod snapshot;
pub mod superblock;
pub mod takeover;
pub mod tunables;

pub use checksums::{checksums_fit, new_checksum_key, switch_checksums_on};
pub use command::{Answer, Command, Resolve, Wiped, not_wiped, obey};
pub use failure::Failure;
pub use session::{Devices, Session};
pub use snapshot::Snapshot;
pub use tunables::label_is_fit;
