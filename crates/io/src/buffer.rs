//! Owned, aligned, pooled buffers.
//!
//! Owns the memory that device I/O reads into and writes from. A [`Buffer`] moves into an operation, and the
//! completion returns it, so a device never uses borrowed memory. A clone shares the bytes for reading (one write
//! may go to two devices). Only an unshared buffer can be written to. Dropping the last handle returns the memory to
//! its pool.
//!
//! Invariants: memory is aligned to [`BUFFER_ALIGN_BYTES`] and never moves while a handle exists; a [`Registration`]
//! stays with its memory, in the pool too, until the memory is returned to the system.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::{Rc, Weak};

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Alignment of every buffer in bytes. It satisfies O_DIRECT for 512- and 4096-byte logical blocks.
pub const BUFFER_ALIGN_BYTES: usize = 4096;

/// Sizes are rounded up to `PAGE << class`; larger buffers are allocated and freed each time.
const CLASSES: usize = 14;

/// Memory that a pool retains for later buffers, of all classes together. It is what the requests of busy clients and
/// writeback use at a time; a limit for each class let a pool grow to fourteen times that.
const RETAINED_BYTES: usize = 32 << 20;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(4096))]
struct Page([u8; BUFFER_ALIGN_BYTES]);

/// Smallest size of memory that is allocated so that the system need not touch it before its first use.
///
/// An export's buffers have the size of its largest request, and most requests are smaller.
const LAZY_BYTES: usize = 128 << 10;

enum Memory {
    Pages(Box<[Page]>),
    /// The aligned part of a plain allocation begins at `start`.
    Lazy {
        bytes: Vec<u8>,
        start: usize,
    },
}

impl Memory {
    /// Allocates zeroed memory; `None` if the system has none.
    fn new(pages: usize) -> Option<Memory> {
        let len = pages.checked_mul(BUFFER_ALIGN_BYTES)?;
        if len < LAZY_BYTES {
            return <[Page]>::new_box_zeroed_with_elems(pages).ok().map(Memory::Pages);
        }
        let bytes = u8::new_vec_zeroed(len.checked_add(BUFFER_ALIGN_BYTES)?).ok()?;
        let start = bytes.as_ptr().align_offset(BUFFER_ALIGN_BYTES);
        Some(Memory::Lazy { bytes, start })
    }

    fn len_bytes(&self) -> usize {
        match self {
            Memory::Pages(pages) => pages.len() * BUFFER_ALIGN_BYTES,
            Memory::Lazy { bytes, .. } => bytes.len() - BUFFER_ALIGN_BYTES,
        }
    }

    fn as_bytes(&self, len: usize) -> &[u8] {
        match self {
            Memory::Pages(pages) => &pages.as_bytes()[..len],
            Memory::Lazy { bytes, start } => &bytes[*start..][..len],
        }
    }

    fn as_mut_bytes(&mut self, len: usize) -> &mut [u8] {
        match self {
            Memory::Pages(pages) => &mut pages.as_mut_bytes()[..len],
            Memory::Lazy { bytes, start } => &mut bytes[*start..][..len],
        }
    }
}

/// A device layer that assigns numbers to memory; see [`Registration`].
pub trait Registry {
    /// Releases `number`; its memory is freed afterwards.
    fn forget(&self, number: u16);
}

/// The number by which a device layer knows the first bytes of a buffer's memory.
///
/// With it the kernel need not look the memory up for each request.
pub struct Registration {
    /// The number.
    pub number: u16,
    /// How many bytes are registered, from the first on.
    pub bytes: usize,
    /// The device layer that assigned the number. Other layers must not use it.
    pub registry: Weak<dyn Registry>,
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let Some(registry) = self.registry.upgrade() {
            registry.forget(self.number);
        }
    }
}

struct Storage {
    /// Dropped before the memory.
    registration: Option<Registration>,
    memory: Memory,
    class: usize,
}

/// A pool of buffers for one thread. Cheap to clone.
#[derive(Clone)]
pub struct BufferPool {
    inner: Rc<PoolInner>,
}

struct PoolInner {
    free: [RefCell<Vec<Rc<Storage>>>; CLASSES],
    /// Size of the memory in `free`.
    free_bytes: Cell<usize>,
}

impl Default for BufferPool {
    fn default() -> Self {
        BufferPool {
            inner: Rc::new(PoolInner {
                free: std::array::from_fn(|_| RefCell::default()),
                free_bytes: Cell::new(0),
            }),
        }
    }
}

impl BufferPool {
    /// A buffer of `len_bytes` with unspecified contents.
    ///
    /// # Panics
    /// If the system has no memory. For requests of clients use [`BufferPool::try_take`].
    pub fn take(&self, len_bytes: usize) -> Buffer {
        self.try_take(len_bytes).unwrap_or_else(|| panic!("out of memory: {len_bytes} byte buffer"))
    }

    /// A buffer of `len_bytes` with unspecified contents; `None` if the system has no memory.
    pub fn try_take(&self, len_bytes: usize) -> Option<Buffer> {
        let pages = len_bytes.div_ceil(BUFFER_ALIGN_BYTES).max(1);
        let class = pages.checked_next_power_of_two()?.trailing_zeros() as usize;
        let pooled = self.inner.free.get(class).and_then(|f| f.borrow_mut().pop());
        let storage = match pooled {
            Some(storage) => {
                self.inner.free_bytes.set(self.inner.free_bytes.get() - storage.memory.len_bytes());
                storage
            }
            None => {
                let pages = if class < CLASSES { 1 << class } else { pages };
                Rc::new(Storage { registration: None, memory: Memory::new(pages)?, class })
            }
        };
        Some(Buffer { storage: Some(storage), pool: self.inner.clone(), len_bytes })
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

/// A handle to aligned bytes. Clones share them; only an unshared buffer can be written to.
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

    /// Size of the buffer's memory in bytes.
    pub fn capacity(&self) -> usize {
        self.storage().memory.len_bytes()
    }

    /// Changes the length within the capacity. Added bytes have unspecified contents.
    ///
    /// # Panics
    /// If `len_bytes` exceeds the capacity.
    pub fn set_len(&mut self, len_bytes: usize) {
        assert!(len_bytes <= self.capacity(), "{len_bytes} bytes in a buffer of {}", self.capacity());
        self.len_bytes = len_bytes;
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        self.storage().memory.as_bytes(self.len_bytes)
    }

    /// The bytes for writing; `None` while another handle shares them.
    pub fn get_mut(&mut self) -> Option<&mut [u8]> {
        let len = self.len_bytes;
        let storage = self.storage.as_mut().expect("storage lives until drop");
        Rc::get_mut(storage).map(|s| s.memory.as_mut_bytes(len))
    }

    /// The bytes for writing.
    ///
    /// # Panics
    /// If another handle shares them. That is a bug, because a device may be reading them.
    // Not `AsMut`: that trait promises a cheap conversion without a panic.
    #[allow(clippy::should_implement_trait)]
    pub fn as_mut(&mut self) -> &mut [u8] {
        self.get_mut().expect("a shared buffer cannot be written to")
    }

    /// Keeps `registration` with the memory until the memory is freed.
    ///
    /// # Panics
    /// If another handle shares the bytes.
    pub fn register(&mut self, registration: Registration) {
        let storage = self.storage.as_mut().and_then(Rc::get_mut);
        storage.expect("a shared buffer cannot be registered").registration = Some(registration);
    }

    /// The registration of the memory, if it has one.
    pub fn registration(&self) -> Option<&Registration> {
        self.storage().registration.as_ref()
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
    #[inline]
    fn drop(&mut self) {
        if !self.is_shared() {
            self.give_back();
        }
    }
}

impl Buffer {
    /// Returns the memory to the pool when the last handle is dropped.
    fn give_back(&mut self) {
        let Some(storage) = self.storage.take() else { return };
        if let Some(free) = self.pool.free.get(storage.class) {
            let free_bytes = self.pool.free_bytes.get() + storage.memory.len_bytes();
            if free_bytes <= RETAINED_BYTES {
                self.pool.free_bytes.set(free_bytes);
                free.borrow_mut().push(storage);
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

    /// A pool once retained 16 MiB of each of 14 sizes, 224 MiB for each thread that serves a set.
    #[test]
    fn memory_for_later_buffers_is_limited_for_all_sizes_together() {
        let pool = BufferPool::default();
        let in_pool = || {
            let free = pool.inner.free.iter().flat_map(|f| f.borrow().clone());
            free.map(|storage| storage.memory.len_bytes()).sum::<usize>()
        };
        for class in 0..CLASSES {
            let len = BUFFER_ALIGN_BYTES << class;
            drop((0..(16 << 20) / len).map(|_| pool.take(len)).collect::<Vec<_>>());
            assert!(in_pool() <= RETAINED_BYTES, "{} bytes after buffers of {len}", in_pool());
            assert_eq!(in_pool(), pool.inner.free_bytes.get());
        }
        assert_eq!(in_pool(), RETAINED_BYTES);
        let again = pool.take(BUFFER_ALIGN_BYTES);
        assert_eq!(in_pool(), RETAINED_BYTES - again.capacity());
        assert_eq!(in_pool(), pool.inner.free_bytes.get());
    }

    #[test]
    fn large_buffers_are_zeros_and_aligned_too() {
        for len in [LAZY_BYTES - 1, LAZY_BYTES, LAZY_BYTES + 1, 3 << 20, 100 << 20] {
            let pool = BufferPool::default();
            let mut b = pool.take(len);
            assert_eq!(b.as_slice().as_ptr() as usize % BUFFER_ALIGN_BYTES, 0);
            assert!(b.capacity() >= len && b.capacity().is_multiple_of(BUFFER_ALIGN_BYTES));
            assert!(b.as_slice().iter().all(|&x| x == 0));
            let whole = b.capacity();
            b.set_len(whole);
            b.as_mut()[whole - 1] = 1;
        }
    }

    #[test]
    fn a_buffer_without_memory_is_refused() {
        let pool = BufferPool::default();
        for len in [usize::MAX, isize::MAX as usize, 1 << 60] {
            assert!(pool.try_take(len).is_none(), "{len}");
        }
        assert_eq!(pool.try_take(5000).map(|b| b.len()), Some(5000));
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
