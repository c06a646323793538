//! The engine's environment: devices, time, randomness, buffers and the executor that polls it.
//!
//! Owns the traits by which the engine and the exports meet the outside world ([`Device`],
//! [`Clock`], [`BlockVolume`]), the owned buffers that move through them, the budget that untrusted sizes
//! are weighed against, and the single-threaded executor. Production drives it with io_uring or a thread
//! pool (crate `blockio`), tests with simulated disks and virtual time (crate `sim`).
//!
//! Invariants: no system call, no thread, no clock of its own; given the same completions, times and
//! scheduling choices, everything here behaves identically. Must not know the cache or its format
//! beyond the units.
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
pub use memory::{MemoryBudget, MemoryFigures, OverBudget, Reservation};
pub use meter::{DeviceFigures, OpFigures};
pub use request::{DeviceInfo, FailedOperation, IoError, Op, Request};
pub use rng::Rng;
pub use runtime::{Handle, Runtime};
pub use timer::{Nanos, Sleep};
pub use trace::{Purpose, TRACE_REQUESTS, TraceFigures, Traced};
pub use volume::{BlockVolume, RangeStatus, ReadFlags, VolumeError, WriteFlags, ZeroFlags};
