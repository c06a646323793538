//! A cache set with its exports on one thread: what `ubcache up` and the daemon share.
//!
//! Owns the order in which devices, set, volumes and exports come up and go down, and what a running set can be told
//! ([`Command`]). Everything here lives on the thread of one [`blockio::Driver`]; only [`Command`], [`Answer`] and
//! [`Snapshot`] are made to leave it. Must not know who asks: command line, standard input or a control socket.
//!
//! Where things are: `session` brings a set up and down; `exports` has one file per kind of export; `command` is what a
//! running set can be told, `snapshot` all its figures; `takeover` makes another process hand over; `crash_log` has
//! acknowledged writes outlive the process; `superblock` checks a device before anything is written; `read_only` opens devices
//! for reading; `message` and `events` tell the operator, through the thread of `log_writer` and as often as `quiet` allows;
//! `plain` keeps text of others from acting upon the terminal; `secret` reads keys and certificates; `ram` says how much memory there is, and `pressure` prepares a
//! thread for serving when memory is short.
#![forbid(unsafe_code)]

pub mod command;
pub mod crash_log;
pub mod events;
pub mod exports;
pub mod failure;
mod log_writer;
pub mod message;
pub mod plain;
pub mod pressure;
mod quiet;
pub mod ram;
pub mod read_only;
pub mod secret;
pub mod session;
pub mod snapshot;
pub mod superblock;
pub mod takeover;
pub mod tunables;

pub use command::{Answer, Command, Wiped, not_wiped, obey};
pub use failure::Failure;
pub use session::{Devices, Session};
pub use snapshot::Snapshot;
