//! Memory for written data on its way from a session's thread to the volume's thread.
//!
//! Buffers of the volume's thread cannot leave that thread, so written data is copied once more. Owns a bounded number of unused
//! pieces of memory, so that a write does not allocate.

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

#[derive(Default)]
pub(crate) struct Spare {
    free: Mutex<Free>,
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
        piece.extend_from_slice(bytes);
        piece
    }

    /// Takes back a piece of memory.
    pub(crate) fn give_back(&self, mut piece: Vec<u8>) {
        piece.clear();
        let mut free = self.lock();
        if piece.capacity() < LARGE_BYTES {
            if free.small.len() < SPARE_SMALL {
                free.small.push(piece);
            }
        } else if free.large.len() < SPARE_LARGE {
            free.large.push(piece);
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
}
