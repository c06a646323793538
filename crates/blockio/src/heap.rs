//! Memory that a serving thread can use without a page fault.
//!
//! A page fault needs memory of the kernel. If swap or dirty pages are on a volume of this process, the kernel may have
//! no memory before the process has answered. So the process takes memory early, touches it, and returns none of it to the
//! kernel: the C library's allocator serves requests from it. Module [`crate::refill`] takes more when
//! some of it is in use.
//!
//! Owns the settings of that allocator, and the touching of heap and stack. Must not know what the memory is for.

use std::hint::black_box;
use std::ops::Range;

/// The heap is taken in pieces, so that one that cannot be had leaves the others. Each is small enough to come from the heap.
const PIECE_BYTES: usize = 1 << 20;

/// Pages are at least as large.
pub(crate) const PAGE_BYTES: usize = 4096;

/// How much of its stack a serving thread touches.
const STACK_BYTES: usize = 256 << 10;

/// How much a helper thread touches, which makes system calls only.
const HELPER_STACK_BYTES: usize = 16 << 10;

/// Makes the process retain freed memory, and all threads that have not allocated yet share one heap. The caller calls it
/// before it starts other threads. Returns whether the allocator supports this, as glibc's does.
pub fn retain_freed_memory() -> bool {
    settings::retain_freed_memory()
}

#[cfg(target_env = "gnu")]
mod settings {
    use std::ops::Range;

    /// What is smaller comes from the heap. It is the largest value that glibc takes. Larger memory, such as the tables of a
    /// large cache device, is mapped for itself and given back to the kernel when it is freed.
    const LARGEST_ON_HEAP_BYTES: libc::c_int = 32 << 20;
    const NEVER: libc::c_int = -1;

    pub(super) fn retain_freed_memory() -> bool {
        // A value that is set also ends the adjustment of both thresholds, by which glibc gives large memory back.
        set(libc::M_TRIM_THRESHOLD, NEVER)
            && set(libc::M_MMAP_THRESHOLD, LARGEST_ON_HEAP_BYTES)
            && set(libc::M_ARENA_MAX, 1)
    }

    pub(super) fn grow_in_steps_of(bytes: usize) -> bool {
        libc::c_int::try_from(bytes).is_ok_and(|bytes| set(libc::M_TOP_PAD, bytes))
    }

    pub(super) fn free_end() -> Option<Range<usize>> {
        // SAFETY: it takes nothing, and locks the heap while it counts.
        let free_at_end = unsafe { libc::mallinfo2() }.keepcost;
        // SAFETY: zero changes nothing: it asks where the heap ends.
        let end = unsafe { libc::sbrk(0) }.addr();
        Some(end.checked_sub(free_at_end)?..end)
    }

    fn set(what: libc::c_int, value: libc::c_int) -> bool {
        // SAFETY: mallopt takes two numbers and reads no memory of the caller. It locks the heap itself, so that other
        // threads may allocate meanwhile.
        unsafe { libc::mallopt(what, value) == 1 }
    }
}

#[cfg(not(target_env = "gnu"))]
mod settings {
    use std::ops::Range;

    pub(super) fn retain_freed_memory() -> bool {
        false
    }

    pub(super) fn grow_in_steps_of(_: usize) -> bool {
        false
    }

    pub(super) fn free_end() -> Option<Range<usize>> {
        None
    }
}

/// When the heap has to grow, it grows by so many bytes more than it needs: address space, which takes no memory until it is
/// touched. Returns whether the allocator can do that.
pub(crate) fn grow_in_steps_of(bytes: usize) -> bool {
    settings::grow_in_steps_of(bytes)
}

/// The free addresses at the end of the heap, which serve what fits into no free piece. Other threads may use some of them
/// before the call returns. `None` with an allocator that does not tell.
pub(crate) fn free_end() -> Option<Range<usize>> {
    settings::free_end()
}

/// Memory of the heap that is too large for the free end: the heap grows by that and by a step. The memory is touched.
/// `None` if the system refuses it.
pub(crate) fn grow(free_end: &Range<usize>) -> Option<Vec<u8>> {
    touched(free_end.len() + PAGE_BYTES)
}

/// Makes `bytes` bytes of the heap free and resident, after [`retain_freed_memory`], and returns how many it got.
///
/// It gets fewer bytes if the system refuses more.
pub fn reserve(bytes: usize) -> usize {
    let mut pieces: Vec<Vec<u8>> = Vec::new();
    for _ in 0..bytes.div_ceil(PIECE_BYTES) {
        if pieces.try_reserve(1).is_err() {
            break;
        }
        let Some(piece) = touched(PIECE_BYTES) else { break };
        pieces.push(piece);
    }
    bytes.min(pieces.len() * PIECE_BYTES)
}

/// Memory of which each page was written to; `None` if the system refuses it.
fn touched(bytes: usize) -> Option<Vec<u8>> {
    let mut piece = Vec::new();
    piece.try_reserve_exact(bytes).ok()?;
    for byte in piece.spare_capacity_mut().iter_mut().step_by(PAGE_BYTES) {
        byte.write(0);
    }
    // The compiler may leave out writes whose result is not used.
    Some(black_box(piece))
}

/// Touches the part of the calling thread's stack that is going to be used.
#[inline(never)]
pub fn touch_stack() {
    let mut room = [0u8; STACK_BYTES];
    black_box(&mut room);
}

/// Touches the part of a helper thread's stack that is going to be used.
#[inline(never)]
pub(crate) fn touch_stack_of_helper() {
    let mut room = [0u8; HELPER_STACK_BYTES];
    black_box(&mut room);
}
