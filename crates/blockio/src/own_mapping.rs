//! The allocator of the program: the C library's, except for the buffers that threads read FUSE requests into.
//!
//! The crate of the FUSE protocol gives each thread a zeroed buffer for the largest request of any kernel, 16 MiB, of which this
//! program's requests use at most 1 MiB. From the heap, which module [`crate::heap`] keeps resident, the whole buffer would take
//! memory: with two threads for each volume, 768 MiB for 24 volumes. A mapping takes memory only for the pages that were used.
//!
//! Owns the rule which allocations get a mapping of their own. Invariant: the rule depends on the layout alone, so that memory
//! is freed by what allocated it. Must not know who allocates.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ops::RangeInclusive;
use std::ptr::null_mut;

/// Sizes that get a mapping: 16 MiB and the little that the crate adds for the header of a request.
const OWN_MAPPING_BYTES: RangeInclusive<usize> = (16 << 20)..=(16 << 20) + (64 << 10);

/// Alignment of a mapping.
const MAPPING_ALIGN: usize = 4096;

/// The allocator of the program.
pub struct Allocator;

fn has_own_mapping(bytes: usize, align: usize) -> bool {
    OWN_MAPPING_BYTES.contains(&bytes) && align <= MAPPING_ALIGN
}

/// A mapping of zeroed memory; null if the system refuses it.
fn map(bytes: usize) -> *mut u8 {
    // SAFETY: a new private mapping at an address of the kernel's choice replaces no other one.
    let at = unsafe {
        libc::mmap(
            null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if at == libc::MAP_FAILED { null_mut() } else { at.cast() }
}

// SAFETY: an allocation is a mapping of its own or one of `System`, by a rule that depends on its layout alone. Mappings are
// page-aligned, which is enough for the layouts that get one.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if has_own_mapping(layout.size(), layout.align()) {
            return map(layout.size());
        }
        // SAFETY: the caller's promises are those of this call.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if has_own_mapping(layout.size(), layout.align()) {
            return map(layout.size());
        }
        // SAFETY: the caller's promises are those of this call.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        if has_own_mapping(layout.size(), layout.align()) {
            // SAFETY: `alloc` or `alloc_zeroed` made this mapping with this size, and nothing uses it any more. A failure
            // leaves the mapping, and cannot be reported.
            unsafe { libc::munmap(at.cast(), layout.size()) };
            return;
        }
        // SAFETY: the caller's promises are those of this call, and `System` made the allocation.
        unsafe { System.dealloc(at, layout) };
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        if !has_own_mapping(layout.size(), layout.align()) && !has_own_mapping(bytes, layout.align()) {
            // SAFETY: the caller's promises are those of this call, and `System` made the allocation.
            return unsafe { System.realloc(at, layout, bytes) };
        }
        // SAFETY: the caller promises that the new size, rounded up to the alignment, fits in an `isize`.
        let wanted = unsafe { Layout::from_size_align_unchecked(bytes, layout.align()) };
        // SAFETY: the caller promises that the size is not zero.
        let new = unsafe { self.alloc(wanted) };
        if !new.is_null() {
            // SAFETY: both allocations have at least this many bytes, and the new one is apart from the old one.
            unsafe { std::ptr::copy_nonoverlapping(at, new, layout.size().min(bytes)) };
            // SAFETY: the caller promises that the old allocation has this layout.
            unsafe { self.dealloc(at, layout) };
        }
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory of this process that is resident, in pages.
    fn resident_pages() -> usize {
        let text = std::fs::read_to_string("/proc/self/statm").unwrap();
        text.split(' ').nth(1).unwrap().parse().unwrap()
    }

    #[test]
    fn a_buffer_for_requests_takes_no_memory_until_it_is_used() {
        let layout = |bytes| Layout::from_size_align(bytes, 8).unwrap();
        let bytes = (16 << 20) + 4096;
        let before = resident_pages();
        let buffers: Vec<*mut u8> = (0..16)
            // SAFETY: the size is not zero.
            .map(|_| unsafe { Allocator.alloc_zeroed(layout(bytes)) })
            .collect();
        assert!(buffers.iter().all(|at| !at.is_null() && at.addr().is_multiple_of(MAPPING_ALIGN)));
        assert!(resident_pages() < before + 16 * 1024, "less than a quarter of them");
        for at in buffers {
            // SAFETY: the allocation has these bytes, and is freed with its layout.
            unsafe {
                assert_eq!((*at, *at.add(bytes - 1)), (0, 0));
                Allocator.dealloc(at, layout(bytes));
            }
        }
    }

    #[test]
    fn memory_moves_between_heap_and_mappings() {
        let sizes = [4096, 16 << 20, (16 << 20) + 4096, 17 << 20, 16 << 20, 512];
        // SAFETY: every call has the layout of the last one, and only bytes within it are used.
        unsafe {
            let mut layout = Layout::from_size_align(64, 8).unwrap();
            let mut at = Allocator.alloc_zeroed(layout);
            at.add(63).write(7);
            for bytes in sizes {
                at = Allocator.realloc(at, layout, bytes);
                assert!(!at.is_null());
                layout = Layout::from_size_align(bytes, 8).unwrap();
                assert_eq!(at.add(63).read(), 7, "{bytes}");
            }
            Allocator.dealloc(at, layout);
        }
    }
}
