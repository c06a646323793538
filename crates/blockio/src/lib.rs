//! Devices and sockets on the production driver of the executor.
//!
//! Owns every system call of the data path: the [`Driver`] that runs an `io::Runtime` on its thread,
//! with io_uring or, where the kernel does not grant that, with helper threads and poll(2); the device
//! on block devices and files with its exclusive claim; sockets for exports; the bridge to other
//! threads; and device wrappers for simulation of slow disks, statistics and tests.
//!
//! Invariants: a buffer that the kernel may touch is owned by an operation in a slot of the
//! [`Reactor`], never borrowed (module `reactor` says what happens on cancel and drop); nothing here
//! blocks the driver's thread but opening devices and the drop of the driver. Must not know the cache
//! or its format beyond the units.
#![deny(clippy::undocumented_unsafe_blocks)]

mod below;
pub mod bridge;
mod busy_poll;
mod claim;
mod clock;
mod cmd;
mod command;
pub mod conformance;
mod crash_log;
mod driver;
mod file;
pub mod flusher;
mod gather;
pub mod heap;
mod holder;
mod incarnation;
mod info;
mod loops;
mod message;
pub mod mountinfo;
mod net;
mod operation;
pub mod own_mapping;
mod polled;
mod reactor;
pub mod refill;
mod registered;
mod released;
mod signals;
mod signature;
mod slots;
mod sync;
mod transfers;
mod uring;
pub mod users;
mod wake;
mod workers;
pub mod wrap;
mod write_cache;

pub use busy_poll::{BusyPoll, BusyPollError};
pub use claim::{Access, Claim, OpenError, OpenOptions};
pub use clock::SystemClock;
pub use command::{CommandFile, CommandFuture};
pub use crash_log::CrashLogFile;
pub use driver::{Backend, Driver, DriverOptions};
pub use file::FileDevice;
pub use incarnation::{Incarnation, incarnation};
pub use message::{Message, Piece};
pub use net::{Address, Connection, Listener, PeerId, SharedListener};
pub use reactor::{Reactor, ReactorCounts};
pub use signals::{Signal, Signals, shutdown_signal};
pub use signature::{Signature, probe_before_bcache, probe_signature};
