//! Memory for written data on its way from a session's thread to the volume's thread.
//!
//! Buffers of the volume's thread cannot leave that thread, so written data is copied once more. Owns a bounded number of unused
//! pieces of memory, so that a write does not allocate, and the limit for those of all volumes together.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Maximum number of unused small pieces.
const SPARE_SMALL: usize = 64;

/// Maximum number of unused large pieces, which bounds the unused memory.
const SPARE_LARGE: usize = 8;
const LARGE_BYTES: usize = 128 << 10;

#[derive(Default)]
struct Free {
    small: Vec<Vec<u8>>,
    large: Vec<Vec<u8>>,
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
    free: Mutex<Free>,
    budget: &'static SpareBudget,
}

impl Default for Spare {
    fn default() -> Spare {
        Spare { free: Mutex::default(), budget: &BUDGET }
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        let free = &mut *self.lock();
        let pieces = free.small.drain(..).chain(free.large.drain(..));
        self.budget.give_back(pieces.map(|piece| piece.capacity()).sum());
    }
}

impl Spare {
    fn lock(&self) -> MutexGuard<'_, Free> {
        // No code that can panic runs under the lock, so the data of a poisoned lock is consistent.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies `bytes` to a piece of memory.
    pub(crate) fn copy_of(&self, bytes: &[u8]) -> Vec<u8> {
        let mut free = self.lock();
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

    /// Each of many volumes kept up to 16 MiB, whatever the memory of the host.
    #[test]
    fn all_volumes_together_keep_within_one_budget() {
        static SMALL: SpareBudget = SpareBudget::new(3 << 20);
        let spares: Vec<Spare> = (0..24).map(|_| Spare { free: Mutex::default(), budget: &SMALL }).collect();
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
