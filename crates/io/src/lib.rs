//! The engine's environment: devices, time, randomness, buffers and the executor that polls it.
//!
//! Owns the traits between the engine, the exports and their environment ([`Device`], [`Clock`],
//! [`BlockVolume`]), the owned buffers that move through them, the memory budget that limits untrusted
//! sizes, and the single-threaded executor. In production io_uring or a thread pool drives it (crate
//! `blockio`), in tests simulated disks and virtual time do (crate `sim`).
//!
//! Invariants: this crate makes no system call, starts no thread and has no clock of its own. With the
//! same completions, times and scheduling choices it behaves identically. Must not know the cache, and of
//! its format only the units.
#![forbid(unsafe_code)]

mod buffer;
mod clock;
mod completion;
mod crash_log;
mod device;
mod executor;
mod histogram;
mod memory;
mod meter;
mod request;
mod rng;
mod runtime;
pub mod sync;
#[cfg(test)]
mod testing;
mod timer;
mod trace;
mod volume;

pub use buffer::{BUFFER_ALIGN_BYTES, Buffer, BufferPool, Registration, Registry};
pub use clock::Clock;
pub use completion::{Completer, Completion, IoFuture};
pub use crash_log::{CrashLogMemory, CrashLogRef, RECORDED_ENTRIES, RECORDED_WORDS};
pub use device::{Device, Disk};
pub use executor::{Fifo, JoinHandle, Schedule, Unpark};
pub use histogram::Histogram;
pub use memory::{MemoryBudget, MemoryFigures, NoMemory, OverBudget, Reservation, try_table};
pub use meter::{DeviceFigures, InFlight, OpFigures};
pub use request::{DeviceInfo, FailedOperation, IoError, Op, Request};
pub use rng::Rng;
pub use runtime::{Handle, Runtime};
pub use timer::{Nanos, Sleep};
pub use trace::{Purpose, TRACE_REQUESTS, TraceFigures, Traced};
pub use volume::{BlockVolume, RangeStatus, ReadFlags, VolumeError, WriteFlags, ZeroFlags};
