//! The system refuses memory for a request's data: the request is answered with ENOMEM, and all other requests are served.
//!
//! A program of its own, because its global allocator fails on demand.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use export_nbd::codec::wire::command;
use rig::RamVolume;

#[allow(dead_code, reason = "the other test program uses the rest")]
#[path = "it/pipe.rs"]
mod pipe;
#[allow(dead_code, reason = "the other test program uses the rest")]
#[path = "it/wire.rs"]
mod wire;
#[allow(dead_code, reason = "the other test program uses the rest")]
#[path = "it/world.rs"]
mod world;

const ENOMEM: u32 = 12;

/// Allocations of at least this many bytes fail.
static LARGEST: AtomicUsize = AtomicUsize::new(usize::MAX);

struct Failing;

// SAFETY: every call is passed to the system's allocator unchanged, or answered with a null pointer, which is how an allocator
// says that it has no memory.
unsafe impl GlobalAlloc for Failing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() >= LARGEST.load(Ordering::Relaxed) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise is the system allocator's condition.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.size() >= LARGEST.load(Ordering::Relaxed) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise is the system allocator's condition.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: `ptr` came from the system's allocator with this layout.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static FAILING: Failing = Failing;

/// Calls `work` while the system has no more than 400 KiB in one piece.
fn short_of_memory<T>(work: impl FnOnce() -> T) -> T {
    LARGEST.store(400 << 10, Ordering::Relaxed);
    let result = work();
    LARGEST.store(usize::MAX, Ordering::Relaxed);
    result
}

/// An allocation that failed in the buffer pool was a panic, and took the process and all its volumes with it.
#[test]
fn requests_without_memory_are_answered_and_the_connection_goes_on() {
    for structured in [true, false] {
        let volume = RamVolume::new("disk", 64 << 20).shared();
        volume.fill(0, &vec![3; 2 << 20]);
        let world = world::World::new([&volume]);
        let client = world.connect("disk", structured, false);
        client.pipe.send(&wire::write(0, 77, 0, &vec![1; 1 << 20]));
        client.pipe.send(&wire::write(0, 78, 4 << 20, &[2; 4096]));
        short_of_memory(|| world.run());
        let replies = wire::replies(&client.pipe.received(), |_| 0);
        let mut answers: Vec<(u64, u32)> = replies.iter().map(|r| (r.cookie(), r.error())).collect();
        answers.sort_unstable();
        assert_eq!(answers, [(77, ENOMEM), (78, 0)], "the payload was received and forgotten");
        assert_eq!(volume.contents(0..512), [3; 512]);
        assert_eq!(volume.contents(4 << 20..(4 << 20) + 512), [2; 512]);

        for bytes in [1 << 20, 32 << 20] {
            client.post(command::READ, 0, 0, bytes);
            short_of_memory(|| world.run());
            let replies = wire::replies(&client.pipe.received(), |_| 0);
            assert_eq!(replies.iter().map(wire::Reply::error).collect::<Vec<_>>(), [ENOMEM]);
        }
        let (offset, bytes) = (1 << 20, 1 << 20);
        assert_eq!(client.read(offset, bytes), Ok(vec![3; 1 << 20]), "there is memory again");
    }
}
