//! The memory in which the driver describes requests.
//!
//! Owns the mappings of the character device: one array for each queue, written by the driver, never by us. The driver
//! writes the descriptor of a tag before it completes the tag's fetch and leaves it alone until the tag is answered, so
//! it is read once after each fetch.

use std::ffi::c_void;
use std::io;
use std::os::fd::OwnedFd;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::abi::{self, IoDescriptor};

struct Mapping {
    start: *mut c_void,
    len_bytes: usize,
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `Descriptors::map` and nothing else refers to it: descriptors are handed out
        // as copies.
        let _ = unsafe { munmap(self.start, self.len_bytes) };
    }
}

/// See the module head.
pub(crate) struct Descriptors {
    queues: Vec<Mapping>,
    depth: u16,
}

impl Descriptors {
    /// Maps the descriptors of all queues of a device.
    pub(crate) fn map(file: &OwnedFd, queues: u16, depth: u16) -> io::Result<Descriptors> {
        let page = rustix::param::page_size();
        let (stride, len_bytes) = (abi::descriptors_stride(page), abi::descriptors_len(depth, page));
        let map = |queue: u16| {
            let offset = u64::from(queue) * stride as u64;
            // SAFETY: a new mapping at an address of the kernel's choice touches no memory that exists.
            let start = unsafe {
                mmap(
                    std::ptr::null_mut(),
                    len_bytes,
                    ProtFlags::READ,
                    MapFlags::SHARED | MapFlags::POPULATE,
                    file,
                    offset,
                )?
            };
            Ok(Mapping { start, len_bytes })
        };
        Ok(Descriptors { queues: (0..queues).map(map).collect::<io::Result<_>>()?, depth })
    }

    /// The descriptor of a tag, whose fetch has completed.
    pub(crate) fn get(&self, queue: u16, tag: u16) -> IoDescriptor {
        assert!(tag < self.depth, "tag {tag} of {}", self.depth);
        let mapping = &self.queues[usize::from(queue)];
        // SAFETY: the mapping has room for `depth` descriptors and is aligned to a page. Volatile, because the driver
        // writes there; it has completed the tag's fetch and so does not write to this one now. Any bytes are a value
        // of this structure.
        unsafe { mapping.start.cast::<IoDescriptor>().add(usize::from(tag)).read_volatile() }
    }
}
