//! Owned, aligned, pooled buffers.
//!
//! Owns the memory that device I/O reads into and writes from. A [`Buffer`] moves into an operation
//! and comes back with its completion, so nothing that a device may touch is ever borrowed. Cloning
//! shares the bytes for reading (one write may go to two devices); only an unshared buffer can be
//! written to. Dropping the last handle gives the memory back to its pool.
//!
//! Invariants: memory is aligned to [`BUFFER_ALIGN_BYTES`] and never moves while a handle lives.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Alignment of every buffer: satisfies O_DIRECT for 512- and 4096-byte logical blocks.
pub const BUFFER_ALIGN_BYTES: usize = 4096;

/// Sizes are rounded up to `PAGE << class`; larger buffers are allocated and freed each time.
const CLASSES: usize = 14;

/// How much memory a class keeps for reuse.
const KEEP_BYTES_PER_CLASS: usize = 16 << 20;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(4096))]
struct Page([u8; BUFFER_ALIGN_BYTES]);

struct Storage {
    pages: Box<[Page]>,
    class: usize,
}

/// A pool of buffers for one thread. Cheap to clone.
#[derive(Clone)]
pub struct BufferPool {
    inner: Rc<PoolInner>,
}

struct PoolInner {
    free: [RefCell<Vec<Rc<Storage>>>; CLASSES],
}

impl Default for BufferPool {
    fn default() -> Self {
        BufferPool { inner: Rc::new(PoolInner { free: std::array::from_fn(|_| RefCell::default()) }) }
    }
}

impl BufferPool {
    /// A buffer of `len_bytes` with unspecified contents.
    pub fn take(&self, len_bytes: usize) -> Buffer {
        let pages = len_bytes.div_ceil(BUFFER_ALIGN_BYTES).max(1);
        let class = pages.next_power_of_two().trailing_zeros() as usize;
        let pooled = self.inner.free.get(class).and_then(|f| f.borrow_mut().pop());
        let storage = pooled.unwrap_or_else(|| {
            let pages = if class < CLASSES { 1 << class } else { pages };
            let pages = <[Page]>::new_box_zeroed_with_elems(pages)
                .unwrap_or_else(|_| panic!("out of memory: {len_bytes} byte buffer"));
            Rc::new(Storage { pages, class })
        });
        Buffer { storage: Some(storage), pool: self.inner.clone(), len_bytes }
    }

    /// A buffer of `len_bytes` zero bytes.
    pub fn zeroed(&self, len_bytes: usize) -> Buffer {
        let mut b = self.take(len_bytes);
        b.as_mut().fill(0);
        b
    }

    /// A buffer holding a copy of `bytes`.
    pub fn copy_of(&self, bytes: &[u8]) -> Buffer {
        let mut b = self.take(bytes.len());
        b.as_mut().copy_from_slice(bytes);
        b
    }
}

/// A handle to aligned bytes; see the module head for the sharing rule.
pub struct Buffer {
    /// `Some` until dropped.
    storage: Option<Rc<Storage>>,
    pool: Rc<PoolInner>,
    len_bytes: usize,
}

impl Buffer {
    fn storage(&self) -> &Rc<Storage> {
        self.storage.as_ref().expect("storage lives until drop")
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len_bytes
    }

    /// Whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len_bytes == 0
    }

    /// How many bytes the memory behind the buffer holds.
    pub fn capacity(&self) -> usize {
        self.storage().pages.len() * BUFFER_ALIGN_BYTES
    }

    /// Changes the length within the capacity. Bytes that appear have unspecified contents.
    ///
    /// # Panics
    /// If `len_bytes` exceeds the capacity.
    pub fn set_len(&mut self, len_bytes: usize) {
        assert!(len_bytes <= self.capacity(), "{len_bytes} bytes in a buffer of {}", self.capacity());
        self.len_bytes = len_bytes;
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        &self.storage().pages.as_bytes()[..self.len_bytes]
    }

    /// The bytes for writing; `None` while another handle shares them.
    pub fn get_mut(&mut self) -> Option<&mut [u8]> {
        let len = self.len_bytes;
        let storage = self.storage.as_mut().expect("storage lives until drop");
        Rc::get_mut(storage).map(|s| &mut s.pages.as_mut_bytes()[..len])
    }

    /// The bytes for writing.
    ///
    /// # Panics
    /// If another handle shares them: a bug, because a device may be reading them.
    // Not `AsMut`: that trait promises a cheap conversion without a panic.
    #[allow(clippy::should_implement_trait)]
    pub fn as_mut(&mut self) -> &mut [u8] {
        self.get_mut().expect("a shared buffer cannot be written to")
    }

    /// Whether another handle shares the bytes.
    pub fn is_shared(&self) -> bool {
        Rc::strong_count(self.storage()) > 1
    }
}

impl Clone for Buffer {
    /// Shares the bytes; nothing is copied.
    fn clone(&self) -> Self {
        Buffer { storage: self.storage.clone(), pool: self.pool.clone(), len_bytes: self.len_bytes }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(storage) = self.storage.take() else { return };
        if Rc::strong_count(&storage) > 1 {
            return;
        }
        if let Some(free) = self.pool.free.get(storage.class) {
            let mut free = free.borrow_mut();
            if (free.len() + 1) * storage.pages.len() * BUFFER_ALIGN_BYTES <= KEEP_BYTES_PER_CLASS {
                free.push(storage);
            }
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes{})", self.len_bytes, if self.is_shared() { ", shared" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_and_reused() {
        let pool = BufferPool::default();
        let mut b = pool.take(5000);
        assert_eq!(b.len(), 5000);
        assert_eq!(b.as_slice().as_ptr() as usize % BUFFER_ALIGN_BYTES, 0);
        b.as_mut().fill(7);
        let at = b.as_slice().as_ptr();
        drop(b);
        assert_eq!(pool.take(8192).as_slice().as_ptr(), at);
    }

    #[test]
    fn a_shared_buffer_is_read_only_until_the_other_handle_is_gone() {
        let pool = BufferPool::default();
        let mut b = pool.zeroed(512);
        let other = b.clone();
        assert!(b.get_mut().is_none());
        drop(other);
        assert!(b.get_mut().is_some());
    }
}
