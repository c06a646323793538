//! A thread that keeps free memory of the heap resident ahead of need.
//!
//! A thread that serves a block device must not touch a new page while memory is short (module [`crate::heap`]). Memory that is
//! made resident once is used up sooner or later: by an index that grows, by buffers of a burst, by fragmentation. So a thread
//! that may wait checks the free end of the heap from time to time and populates its next pages. It uses
//! `MADV_POPULATE_WRITE`, which changes no contents, so that other threads may allocate from these pages meanwhile.
//!
//! The thread also gives memory back that was not in use for a while (module `released`), beyond the memory that it keeps
//! resident.
//!
//! Owns that thread, and the amount of free memory that it keeps resident. Invariants: only threads that start an export wait
//! for it; it holds no lock while it waits for memory; it is not marked as a flusher (module [`crate::flusher`]), so that the
//! kernel swaps pages out and ends processes to give it memory. Must not know what the memory is for.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{io, thread};

use crate::heap::{self, PAGE_BYTES};
use crate::released::Released;

/// Pages are populated in pieces, because the kernel lets no other thread change the address space during one call.
const PIECE_BYTES: usize = 1 << 20;

/// An eighth of the resident memory may be used before the thread populates more: a smaller gap is not worth a system call.
pub const GAP_PART: usize = 8;

/// The heap grows before fewer bytes of addresses than this are free. The allocator does not serve larger requests from the heap's end.
const MIN_FREE_ADDRESSES_BYTES: usize = 24 << 20;

/// How often the thread checks the heap: the shorter period after the free end of the heap has moved, else the longer one.
const PERIODS: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// Longest time that the start of an export waits for the first fill.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// The thread makes a few calls, none of them deep.
const STACK_BYTES: usize = 64 << 10;

#[derive(Default)]
struct RefillState {
    /// Bytes to keep resident; zero before the first call of [`Refill::hold`].
    bytes: usize,
    /// Number of calls of [`Refill::hold`], and of those that were answered.
    asked: u64,
    answered: u64,
    /// Whether [`Refill::give_back`] was called since the last check.
    ended: bool,
    /// Bytes resident ahead at the last check, and the number of checks so far.
    ahead: usize,
    looks: u64,
}

#[derive(Default)]
struct SharedRefill {
    state: Mutex<RefillState>,
    changed: Condvar,
}

impl SharedRefill {
    fn lock(&self) -> MutexGuard<'_, RefillState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The thread that refills the heap. It runs until the process ends.
pub struct Refill {
    shared: Arc<SharedRefill>,
}

impl Refill {
    /// Starts the thread, which does nothing before the first [`Refill::hold`].
    ///
    /// The caller is not marked as a flusher and has called [`heap::retain_freed_memory`].
    ///
    /// # Errors
    /// If the system refuses the thread.
    pub fn start() -> io::Result<Refill> {
        let shared = Arc::<SharedRefill>::default();
        let theirs = shared.clone();
        let builder = thread::Builder::new().name("ubcache-heap".into()).stack_size(STACK_BYTES);
        builder.spawn(move || run(&theirs))?;
        Ok(Refill { shared })
    }

    /// Keeps `bytes` of free heap resident from now on, or more if an earlier call asked for more.
    ///
    /// The heap grows by `step` bytes of address space. Returns how many of `bytes` are resident: fewer if the system refuses
    /// more, or does not give them within 10 s.
    pub fn hold(&self, bytes: usize, step: usize) -> usize {
        heap::grow_in_steps_of(step);
        let mut state = self.shared.lock();
        state.bytes = state.bytes.max(bytes);
        state.asked += 1;
        let mine = state.asked;
        self.shared.changed.notify_all();
        let waiting = |state: &mut RefillState| state.answered < mine;
        let waited = self.shared.changed.wait_timeout_while(state, LONGEST_WAIT, waiting);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if state.answered < mine { 0 } else { state.ahead.min(bytes) }
    }

    /// Makes the thread give memory back that is free now. The caller calls this when a set has stopped.
    ///
    /// Without this call the memory goes back after it was free for 10 to 20 s. The call does not wait.
    pub fn give_back(&self) {
        let mut state = self.shared.lock();
        if state.asked > 0 {
            state.ended = true;
            self.shared.changed.notify_all();
        }
    }

    /// Free resident heap at the last check, in bytes.
    pub fn ahead(&self) -> usize {
        self.shared.lock().ahead
    }

    /// Number of checks.
    pub fn looks(&self) -> u64 {
        self.shared.lock().looks
    }
}

fn run(shared: &SharedRefill) {
    let mut resident = Resident::default();
    let (shortest, longest) = PERIODS;
    let mut period = longest;
    let mut state = shared.lock();
    loop {
        let (bytes, asked, ended) = (state.bytes, state.asked, std::mem::take(&mut state.ended));
        if asked > 0 {
            if state.answered < asked {
                resident.taken = None;
            }
            drop(state);
            if ended {
                resident.released.forget_peak();
            }
            let began_at = resident.begins;
            let ahead = resident.refill(bytes);
            resident.release(bytes);
            period = if resident.begins == began_at { longest.min(2 * period) } else { shortest };
            state = shared.lock();
            state.ahead = ahead;
            state.looks += 1;
            state.answered = asked;
            shared.changed.notify_all();
        }
        let until = Instant::now() + period;
        while state.asked == asked
            && !state.ended
            && let Some(left) = until.checked_duration_since(Instant::now())
        {
            state = match asked {
                0 => shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                _ => shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
    }
}

/// How far the heap is resident.
#[derive(Default)]
struct Resident {
    /// Start of the free end at the last check.
    begins: usize,
    /// All of the heap before this address is resident.
    to: usize,
    /// Bytes reserved in one call, if the kernel cannot populate a range (before Linux 5.14) or the allocator is not glibc's.
    taken: Option<usize>,
    released: Released,
}

impl Resident {
    /// Makes `bytes` of the free heap resident, unless seven eighths of them are. Returns how many are resident.
    fn refill(&mut self, bytes: usize) -> usize {
        if let Some(taken) = self.taken {
            return taken;
        }
        let Some(usage) = heap::usage() else { return self.take(bytes) };
        // Freed below, after the pages before it are populated: other threads may need some of these at once.
        let mut grown = None;
        if usage.free_end.len() < MIN_FREE_ADDRESSES_BYTES.min(bytes) {
            grown = heap::grow(&usage);
        }
        let free = heap::free_end().unwrap_or(usage.free_end);
        let ahead = self.ahead(&free);
        if ahead < bytes - bytes / GAP_PART {
            if !self.populate(&free, bytes) {
                return self.take(bytes);
            }
            // The heap is in use again, and uses these addresses before it grows.
            self.released.restore(bytes - ahead);
        }
        drop(grown);
        let free = heap::free_end().unwrap_or(free);
        self.begins = free.start;
        self.ahead(&free)
    }

    /// Gives memory back that was not in use recently, beyond `bytes` at the free end.
    fn release(&mut self, bytes: usize) {
        // Memory that the kernel cannot populate again is not given back.
        if self.taken.is_none()
            && let Some(usage) = heap::usage()
        {
            self.to = self.released.release(&usage, bytes, self.to);
        }
    }

    fn take(&mut self, bytes: usize) -> usize {
        *self.taken.insert(heap::reserve(bytes))
    }

    fn ahead(&self, free: &Range<usize>) -> usize {
        self.to.min(free.end).saturating_sub(free.start)
    }

    /// Populates `bytes` at the start of `free`. Returns false if the kernel does not support this.
    fn populate(&mut self, free: &Range<usize>, bytes: usize) -> bool {
        let end = free.start.saturating_add(bytes).min(free.end) / PAGE_BYTES * PAGE_BYTES;
        let mut at = self.to.max(free.start / PAGE_BYTES * PAGE_BYTES);
        while at < end {
            let piece = PIECE_BYTES.min(end - at);
            if let Err(e) = heap::populate(at, piece) {
                // Any other error: memory is short, or the heap does not end at `free.end`. The next check tries again.
                return e.raw_os_error() != Some(libc::EINVAL);
            }
            at += piece;
            self.to = at;
        }
        true
    }
}
