//! Memory for written data on its way from a session's thread to the volume's thread.
//!
//! Buffers of the volume's thread cannot leave that thread, so written data is copied once more. Owns a bounded number of unused
//! pieces of memory, so that a write does not allocate, and the limit for those of all volumes together. Frees the pieces of a
//! volume after a time without writes.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Maximum number of unused small pieces.
const SPARE_SMALL: usize = 64;

/// Maximum number of unused large pieces, which bounds the unused memory.
const SPARE_LARGE: usize = 8;
const LARGE_BYTES: usize = 128 << 10;

#[derive(Default)]
struct Free {
    small: Vec<Vec<u8>>,
    large: Vec<Vec<u8>>,
    /// Whether a write has used a piece since the last [`free_unused`].
    used: bool,
}

/// The unused pieces of all file systems, for [`free_unused`].
static ALL: Mutex<Vec<Weak<Mutex<Free>>>> = Mutex::new(Vec::new());

/// Frees the unused pieces of the file systems that were not written since the last call.
pub fn free_unused() {
    let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    all.retain(|free| free.strong_count() > 0);
    let all: Vec<_> = all.iter().filter_map(Weak::upgrade).collect();
    for free in all {
        BUDGET.give_back(lock(&free).end_of_period());
    }
}

// No code that can panic runs under the lock, so the data of a poisoned lock is consistent.
fn lock(free: &Mutex<Free>) -> MutexGuard<'_, Free> {
    free.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Free {
    /// Frees all pieces if no write has used one since the last call. Returns how many bytes they had.
    fn end_of_period(&mut self) -> usize {
        if std::mem::take(&mut self.used) { 0 } else { self.empty() }
    }

    /// Frees all pieces, and returns how many bytes they had.
    fn empty(&mut self) -> usize {
        let pieces = self.small.drain(..).chain(self.large.drain(..));
        pieces.map(|piece| piece.capacity()).sum()
    }
}

/// The bytes that unused pieces may have together.
pub(crate) struct SpareBudget {
    left_bytes: AtomicUsize,
}

impl SpareBudget {
    const fn new(bytes: usize) -> SpareBudget {
        SpareBudget { left_bytes: AtomicUsize::new(bytes) }
    }

    fn take(&self, bytes: usize) -> bool {
        let less = |left: usize| left.checked_sub(bytes);
        self.left_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }

    fn give_back(&self, bytes: usize) {
        self.left_bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// The budget of the process.
static BUDGET: SpareBudget = SpareBudget::new(64 << 20);

/// Sets how much unused memory all file systems of the process may keep together. Call it once, before the first one.
pub fn set_most_spare(bytes: usize) {
    BUDGET.left_bytes.store(bytes, Ordering::Relaxed);
}

pub(crate) struct Spare {
    free: Arc<Mutex<Free>>,
    budget: &'static SpareBudget,
}

impl Default for Spare {
    fn default() -> Spare {
        let free = Arc::<Mutex<Free>>::default();
        ALL.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(&free));
        Spare { free, budget: &BUDGET }
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        self.budget.give_back(self.lock().empty());
    }
}

impl Spare {
    fn lock(&self) -> MutexGuard<'_, Free> {
        lock(&self.free)
    }

    /// Copies `bytes` to a piece of memory.
    pub(crate) fn copy_of(&self, bytes: &[u8]) -> Vec<u8> {
        let mut free = self.lock();
        free.used = true;
        let piece = if bytes.len() < LARGE_BYTES { free.small.pop() } else { free.large.pop() };
        drop(free);
        let mut piece = piece.unwrap_or_default();
        self.budget.give_back(piece.capacity());
        piece.extend_from_slice(bytes);
        piece
    }

    /// Takes back a piece of memory.
    pub(crate) fn give_back(&self, mut piece: Vec<u8>) {
        piece.clear();
        let mut free = self.lock();
        let is_small = piece.capacity() < LARGE_BYTES;
        let has_place =
            if is_small { free.small.len() < SPARE_SMALL } else { free.large.len() < SPARE_LARGE };
        if has_place && self.budget.take(piece.capacity()) {
            if is_small { free.small.push(piece) } else { free.large.push(piece) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_used_again_and_kept_within_bounds() {
        let spare = Spare::default();
        let piece = spare.copy_of(b"abc");
        let at = piece.as_ptr();
        spare.give_back(piece);
        let again = spare.copy_of(b"xyz");
        assert_eq!((again.as_ptr(), &again[..]), (at, &b"xyz"[..]));
        for _ in 0..2 * SPARE_SMALL {
            spare.give_back(Vec::with_capacity(4096));
            spare.give_back(Vec::with_capacity(1 << 20));
        }
        let free = spare.lock();
        assert_eq!((free.small.len(), free.large.len()), (SPARE_SMALL, SPARE_LARGE));
    }

    /// After a load each volume kept up to 16 MiB for as long as it was served.
    #[test]
    fn memory_that_is_not_used_is_freed() {
        let spare = Spare::default();
        let piece = spare.copy_of(b"abc");
        spare.give_back(piece);
        let mut free = spare.lock();
        assert_eq!((free.end_of_period(), free.small.len()), (0, 1), "it was used");
        assert!(free.end_of_period() >= 3 && free.small.is_empty());
    }

    /// Each of many volumes kept up to 16 MiB, whatever the memory of the host.
    #[test]
    fn all_volumes_together_keep_within_one_budget() {
        static SMALL: SpareBudget = SpareBudget::new(3 << 20);
        let spares: Vec<Spare> = (0..24).map(|_| Spare { free: Arc::default(), budget: &SMALL }).collect();
        for spare in &spares {
            (0..SPARE_LARGE).for_each(|_| spare.give_back(Vec::with_capacity(1 << 20)));
        }
        let kept = |spares: &[Spare]| spares.iter().map(|s| s.lock().large.len()).sum::<usize>();
        assert_eq!(kept(&spares), 3);
        // A piece that is used leaves its room to another one.
        let piece = spares[0].copy_of(&[7; LARGE_BYTES]);
        spares[23].give_back(Vec::with_capacity(1 << 20));
        spares[0].give_back(piece);
        assert_eq!((kept(&spares), spares[23].lock().large.len()), (3, 1));
        drop(spares);
        assert_eq!(SMALL.left_bytes.load(Ordering::Relaxed), 3 << 20);
    }
}
