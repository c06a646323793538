//! The shape of a device: its queues, their depth, and the largest request.
//!
//! Owns the limits and the defaults. Must not know the driver's commands.

use crate::abi;

/// Largest request, in bytes. Each tag has a buffer of this size, which takes memory only where it was used.
pub(crate) const MAX_IO_BYTES: u32 = 512 << 10;

/// The default depth, if memory suffices.
const USUAL_DEPTH: u16 = 128;

/// Number of queues of a device, and their depth.
///
/// The thread of the volume serves all queues. Several queues avoid contention of the processors that send requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Number of hardware queues; the driver makes no more than there are processors.
    pub queues: u16,
    /// Number of requests of a queue at a time.
    pub depth: u16,
}

impl Shape {
    /// Numbers of queues that can be requested.
    pub const QUEUES: std::ops::RangeInclusive<u16> = 1..=64;
    /// Depths that can be requested. Below 8, the block layer could not leave a tag free.
    pub const DEPTH: std::ops::RangeInclusive<u16> = 8..=abi::MAX_QUEUE_DEPTH;

    /// The shape whose buffers take the least memory.
    pub const LEAST: Shape = Shape { queues: *Shape::QUEUES.start(), depth: *Shape::DEPTH.start() };

    /// The default shape whose buffers take `bytes` at most.
    ///
    /// It has one queue for each processor, at most four. The depth is limited by `bytes`, because every request has a buffer
    /// of the largest size.
    pub fn within(bytes: u64) -> Shape {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let queues = processors.min(4) as u16;
        let depths = std::iter::successors(Some(USUAL_DEPTH), |depth| Some(depth / 2));
        let mut possible = depths.take_while(|depth| *depth > *Shape::DEPTH.start());
        let depth = possible.find(|depth| Shape { queues, depth: *depth }.buffer_bytes() <= bytes);
        Shape { queues, depth: depth.unwrap_or(*Shape::DEPTH.start()) }
    }

    /// Length of the buffers of all requests of a device, in bytes.
    pub fn buffer_bytes(self) -> u64 {
        u64::from(self.queues) * u64::from(self.depth) * u64::from(MAX_IO_BYTES)
    }
}

impl Default for Shape {
    fn default() -> Self {
        Shape::within(u64::MAX)
    }
}
