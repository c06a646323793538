//! Wrappers around devices, and a device in memory.
//!
//! They simulate slow disks, and serve benchmarks and tests. They know only the device trait and the runtime's sleep, so they
//! work in simulated time and in real time.

mod counting;
mod delay;
mod mem;
mod slow;

pub use counting::{CountingDisk, Counts};
pub use delay::{DelayDisk, Delays};
pub use mem::MemDisk;
pub use slow::{HddModel, Queueing, SlowDisk};
