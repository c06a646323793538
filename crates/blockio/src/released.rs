//! Free heap whose pages are given back to the kernel.
//!
//! A thread that serves a block device must not touch a new page while memory is short (module [`crate::heap`]). So the allocator
//! must give no request memory without pages. Two kinds of free memory can lose their pages:
//!
//! * *Gaps* between pieces in use. This module allocates a gap and then releases its pages, so the allocator gives the gap to no
//!   other code. When the heap needs memory again, this module populates the pages and then frees the gap.
//! * *The free end* of the heap behind its reserve. The refilling thread populates these pages again before the reserve is used up.
//!
//! The caller is the refilling thread (module [`crate::refill`]), which may wait for memory.
//!
//! Owns the released gaps, and the rule that chooses the memory to release: all that was free for at least [`QUIET`], except the
//! reserve. Must not know what the memory was for.

use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};

use crate::heap::{self, HeapUsage, PAGE_BYTES};

/// Length of a released piece. A gap of the heap that is smaller stays resident.
const PIECE_BYTES: usize = 256 << 10;

/// Less than this is not worth the system calls.
const MIN_SURPLUS_BYTES: usize = 4 << 20;

/// Most bytes of gaps that are released at one check, so that the allocator's lock is free in between.
const MOST_AT_ONCE_BYTES: usize = 32 << 20;

/// Resident pages that stay behind what is released of the free end: other threads allocate from there during the release.
const TAIL_BYTES: usize = 1 << 20;

/// Memory that was in use within this time stays resident. The next burst probably needs as much.
const QUIET: Duration = Duration::from_secs(10);

/// The most memory in use during the last [`QUIET`] to twice that time.
struct PeakUse {
    this_bytes: usize,
    last_bytes: usize,
    since: Instant,
}

impl PeakUse {
    /// Notes the bytes in use now, and returns the recent maximum.
    fn note(&mut self, used_bytes: usize, now: Instant) -> usize {
        if now.duration_since(self.since) >= QUIET {
            (self.last_bytes, self.this_bytes, self.since) = (self.this_bytes, 0, now);
        }
        self.this_bytes = self.this_bytes.max(used_bytes);
        self.this_bytes.max(self.last_bytes)
    }
}

/// The pieces of the heap whose pages are released. Each is an allocation, so the allocator gives it to no other code.
pub(crate) struct Released {
    pieces: Vec<Vec<u8>>,
    peak: PeakUse,
}

impl Default for Released {
    fn default() -> Released {
        let peak = PeakUse { this_bytes: 0, last_bytes: 0, since: Instant::now() };
        Released { pieces: Vec::new(), peak }
    }
}

impl Released {
    /// Bytes of the pieces.
    fn bytes(&self) -> usize {
        self.pieces.len() * PIECE_BYTES
    }

    /// Drops the recorded peaks of use. A set has stopped, so its memory is not needed again soon.
    pub(crate) fn forget_peak(&mut self) {
        self.peak.this_bytes = 0;
        self.peak.last_bytes = 0;
    }

    /// Releases memory that was free during the last [`QUIET`]: gaps of the heap, and pages behind the reserve of its free end.
    ///
    /// `resident_to` is the end of the resident heap. Returns the new end.
    pub(crate) fn release(&mut self, usage: &HeapUsage, reserve_bytes: usize, resident_to: usize) -> usize {
        let used_bytes = usage.used_bytes.saturating_sub(self.bytes());
        let slack = self.peak.note(used_bytes, Instant::now()) - used_bytes;
        let surplus = usage.gap_bytes.saturating_sub(slack);
        if surplus >= MIN_SURPLUS_BYTES {
            self.release_gaps(surplus.min(MOST_AT_ONCE_BYTES), usage.free_end.start);
        }
        let reserved_bytes = reserve_bytes.saturating_add(slack);
        let resident_bytes = resident_to.saturating_sub(usage.free_end.start);
        if resident_bytes.saturating_sub(reserved_bytes) < MIN_SURPLUS_BYTES {
            return resident_to;
        }
        release_end(&usage.free_end, reserved_bytes, resident_to).unwrap_or(resident_to)
    }

    /// Releases pieces of gaps, which lie before the free end of the heap.
    fn release_gaps(&mut self, bytes: usize, free_end: usize) {
        for _ in 0..bytes / PIECE_BYTES {
            let mut piece = Vec::<u8>::new();
            if self.pieces.try_reserve(1).is_err() || piece.try_reserve_exact(PIECE_BYTES).is_err() {
                return;
            }
            // The gaps that are left are too small, so the allocator took the piece from the end.
            if addresses(&piece).start >= free_end || !release_pages(&piece) {
                return;
            }
            self.pieces.push(piece);
        }
    }

    /// Populates pieces of `bytes` together, and frees them. It stops if memory is short.
    pub(crate) fn restore(&mut self, bytes: usize) {
        let pieces = bytes.div_ceil(PIECE_BYTES).min(self.pieces.len());
        for _ in 0..pieces {
            let Some(piece) = self.pieces.pop() else { return };
            let pages = whole_pages(&addresses(&piece));
            if heap::populate(pages.start, pages.len()).is_err() {
                self.pieces.push(piece);
                return;
            }
        }
    }
}

/// Releases the pages of the free end from `reserved_bytes` bytes on, and returns where the resident heap ends now.
///
/// `None` if nothing is released, because other threads allocate from there meanwhile.
fn release_end(free_end: &Range<usize>, reserved_bytes: usize, resident_to: usize) -> Option<usize> {
    let reserve_end = free_end.start.checked_add(reserved_bytes)?;
    let (mut reserve, mut surplus) = (Vec::<u8>::new(), Vec::<u8>::new());
    reserve.try_reserve_exact(reserved_bytes).ok()?;
    if !free_end.contains(&addresses(&reserve).start) {
        return None;
    }
    let surplus_bytes = resident_to.min(free_end.end).checked_sub(reserve_end)?.checked_sub(TAIL_BYTES)?;
    surplus.try_reserve_exact(surplus_bytes).ok()?;
    // Other threads can allocate from the reserve again.
    drop(reserve);
    let pages = whole_pages(&addresses(&surplus));
    let is_behind = pages.start >= reserve_end && pages.end <= free_end.end;
    (is_behind && release_pages(&surplus)).then_some(pages.start)
}

/// The addresses that a piece has reserved.
fn addresses(piece: &Vec<u8>) -> Range<usize> {
    let start = piece.as_ptr().addr();
    start..start + piece.capacity()
}

/// The pages that lie in the range with all their bytes.
fn whole_pages(range: &Range<usize>) -> Range<usize> {
    let start = range.start.next_multiple_of(PAGE_BYTES);
    start..(range.end / PAGE_BYTES * PAGE_BYTES).max(start)
}

/// Releases the whole pages of an empty piece. Returns false if the kernel refuses it, as before Linux 5.18 for locked memory.
fn release_pages(piece: &Vec<u8>) -> bool {
    debug_assert!(piece.is_empty());
    let pages = whole_pages(&addresses(piece));
    let advise = |advice| {
        let start = std::ptr::without_provenance_mut(pages.start);
        // SAFETY: the pages lie inside the allocation of `piece`. The length of `piece` is 0, so no value is lost.
        let result = unsafe { libc::madvise(start, pages.len(), advice) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    advise(libc::MADV_DONTNEED_LOCKED).or_else(|_| advise(libc::MADV_DONTNEED)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_recent_peak_of_use_is_known() {
        let start = Instant::now();
        let at = |s: u64| start + Duration::from_secs(s);
        let mut peak = PeakUse { this_bytes: 0, last_bytes: 0, since: start };
        assert_eq!([(100, 0), (30, 5), (40, 10)].map(|(used, s)| peak.note(used, at(s))), [100, 100, 100]);
        assert_eq!([(20, 20), (20, 29), (10, 30)].map(|(used, s)| peak.note(used, at(s))), [40, 40, 20]);
    }

    #[test]
    fn pages_of_others_are_left_alone() {
        assert_eq!(whole_pages(&(1..4 * PAGE_BYTES - 1)), PAGE_BYTES..3 * PAGE_BYTES);
        assert_eq!(whole_pages(&(PAGE_BYTES..2 * PAGE_BYTES)), PAGE_BYTES..2 * PAGE_BYTES);
        assert!(whole_pages(&(1..PAGE_BYTES + 1)).is_empty() && whole_pages(&(1..9)).is_empty());
    }
}
