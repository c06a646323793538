//! Memory that a serving thread can use without a page fault.
//!
//! A page fault needs memory of the kernel. If swap or dirty pages are on a volume of this process, the kernel may have no memory
//! before the process has answered. So the process takes memory early, touches it, and the C library's allocator, which serves
//! requests from it, returns none of it to the kernel. Module [`crate::refill`] takes more when some of it is in use, and module
//! `released` returns memory that the allocator cannot use meanwhile.
//!
//! Owns the settings of that allocator, and the touching of heap and stack. Must not know what the memory is for.

use std::hint::black_box;
use std::io;
use std::ops::Range;

/// Length of a piece of reserved heap. If the system refuses one piece, the others stay. A piece is small enough for the heap.
const PIECE_BYTES: usize = 1 << 20;

/// Smallest page size.
pub(crate) const PAGE_BYTES: usize = 4096;

/// Length of the part of its stack that a serving thread touches.
const STACK_BYTES: usize = 256 << 10;

/// Length of the part of its stack that a helper thread touches. A helper thread only makes system calls.
const HELPER_STACK_BYTES: usize = 16 << 10;

/// Makes the process retain freed memory, and all threads that have not allocated yet share one heap.
///
/// Call it before other threads start. Returns whether the allocator supports this, as glibc's does.
pub fn retain_freed_memory() -> bool {
    settings::retain_freed_memory()
}

#[cfg(target_env = "gnu")]
mod settings {
    use super::HeapUsage;

    /// Allocations below this size come from the heap. It is the largest value that glibc takes.
    ///
    /// Larger memory, such as the tables of a large cache device, has its own mapping, which is unmapped when it is freed.
    const LARGEST_ON_HEAP_BYTES: libc::c_int = 32 << 20;
    const NEVER: libc::c_int = -1;

    pub(super) fn retain_freed_memory() -> bool {
        // An explicit value also stops the automatic adjustment of both thresholds, by which glibc returns large memory.
        set(libc::M_TRIM_THRESHOLD, NEVER)
            && set(libc::M_MMAP_THRESHOLD, LARGEST_ON_HEAP_BYTES)
            && set(libc::M_ARENA_MAX, 1)
    }

    pub(super) fn grow_in_steps_of(bytes: usize) -> bool {
        libc::c_int::try_from(bytes).is_ok_and(|bytes| set(libc::M_TOP_PAD, bytes))
    }

    pub(super) fn usage() -> Option<HeapUsage> {
        // Another thread can grow the heap between the calls. The start of its free end would then be wrong by the growth.
        let (counts, end) = loop {
            let end = self::end();
            // SAFETY: `mallinfo2` takes no argument, and locks the heap while it counts.
            let counts = unsafe { libc::mallinfo2() };
            if self::end() == end {
                break (counts, end);
            }
        };
        let free_end = end.checked_sub(counts.keepcost)?..end;
        let gaps = counts.fordblks.saturating_sub(counts.keepcost);
        Some(HeapUsage { used_bytes: counts.uordblks, gap_bytes: gaps, free_end })
    }

    /// The end of the heap.
    fn end() -> usize {
        // SAFETY: `sbrk(0)` changes nothing.
        unsafe { libc::sbrk(0) }.addr()
    }

    fn set(what: libc::c_int, value: libc::c_int) -> bool {
        // SAFETY: `mallopt` takes two numbers and reads no memory of the caller. It locks the heap itself, so other threads may
        // allocate at the same time.
        unsafe { libc::mallopt(what, value) == 1 }
    }
}

#[cfg(not(target_env = "gnu"))]
mod settings {
    use super::HeapUsage;

    pub(super) fn retain_freed_memory() -> bool {
        false
    }

    pub(super) fn grow_in_steps_of(_: usize) -> bool {
        false
    }

    pub(super) fn usage() -> Option<HeapUsage> {
        None
    }
}

/// Makes the heap grow by `bytes` more than an allocation needs. Returns whether the allocator supports this.
///
/// The growth is address space, which takes no memory until it is touched.
pub(crate) fn grow_in_steps_of(bytes: usize) -> bool {
    settings::grow_in_steps_of(bytes)
}

/// How much of the heap is in use, and where it is free.
pub(crate) struct HeapUsage {
    /// Bytes in use.
    pub(crate) used_bytes: usize,
    /// Free bytes between pieces in use. An allocation that fits there comes from there.
    pub(crate) gap_bytes: usize,
    /// The free addresses at the end of the heap. All other allocations come from there.
    pub(crate) free_end: Range<usize>,
}

/// The usage of the heap; `None` if the allocator does not report it. Other threads may change it before the call returns.
pub(crate) fn usage() -> Option<HeapUsage> {
    settings::usage()
}

/// The free addresses at the end of the heap; `None` if the allocator does not report them.
pub(crate) fn free_end() -> Option<Range<usize>> {
    usage().map(|usage| usage.free_end)
}

/// Grows the heap, and returns the memory that made it grow; `None` if the system refuses it.
///
/// The memory is larger than the free end. The allocator can serve such a piece from a gap between pieces in use, which does not
/// move the end, so the function takes pieces until no gap is left for them. It frees those at once: other threads need the gaps.
pub(crate) fn grow(usage: &HeapUsage) -> Option<Vec<u8>> {
    let piece_bytes = PIECE_BYTES.max(usage.free_end.len() + PAGE_BYTES);
    let most = usage.gap_bytes / piece_bytes + 1;
    let mut in_gaps: Vec<Vec<u8>> = Vec::new();
    in_gaps.try_reserve_exact(most).ok()?;
    for _ in 0..most {
        let mut piece = untouched(piece_bytes)?;
        if free_end().is_none_or(|now| now.end != usage.free_end.end) {
            drop(in_gaps);
            // It is in front of the new free end, and becomes a part of that when it is freed.
            touch(&mut piece);
            return Some(piece);
        }
        in_gaps.push(piece);
    }
    None
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

/// Makes the pages of a range resident, and changes none of their contents.
///
/// # Errors
/// If memory is short, or the kernel cannot do this (before Linux 5.14).
pub(crate) fn populate(address: usize, bytes: usize) -> io::Result<()> {
    let start = std::ptr::without_provenance_mut(address);
    // SAFETY: for any range, the call changes neither contents nor mappings; the kernel checks the addresses.
    let result = unsafe { libc::madvise(start, bytes, libc::MADV_POPULATE_WRITE) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Allocates memory and writes to each of its pages; `None` if the system refuses it.
fn touched(bytes: usize) -> Option<Vec<u8>> {
    let mut piece = untouched(bytes)?;
    touch(&mut piece);
    Some(piece)
}

/// Allocates memory; `None` if the system refuses it.
fn untouched(bytes: usize) -> Option<Vec<u8>> {
    let mut piece = Vec::new();
    piece.try_reserve_exact(bytes).ok()?;
    Some(piece)
}

/// Writes to each page of the spare capacity.
fn touch(piece: &mut Vec<u8>) {
    for byte in piece.spare_capacity_mut().iter_mut().step_by(PAGE_BYTES) {
        byte.write(0);
    }
    // Without this, the compiler may remove the writes, because their result is not used.
    black_box(piece);
}

/// Touches the part of the calling thread's stack that a serving thread uses.
#[inline(never)]
pub fn touch_stack() {
    let mut room = [0u8; STACK_BYTES];
    black_box(&mut room);
}

/// Touches the part of the calling thread's stack that a helper thread uses.
#[inline(never)]
pub(crate) fn touch_stack_of_helper() {
    let mut room = [0u8; HELPER_STACK_BYTES];
    black_box(&mut room);
}
