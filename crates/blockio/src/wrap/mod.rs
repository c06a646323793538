//! Devices around devices, and a device of memory.
//!
//! For simulation of slow disks, for benches and for tests. They know the device trait and the
//! runtime's sleep alone, so they work in simulated time as well as in real time.

mod counting;
mod delay;
mod mem;
mod slow;

pub use counting::{CountingDisk, Counts};
pub use delay::{DelayDisk, Delays};
pub use mem::MemDisk;
pub use slow::{HddModel, Queueing, SlowDisk};
