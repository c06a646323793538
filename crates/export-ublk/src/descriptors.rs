//! The memory in which the driver describes requests.
//!
//! Owns the mappings of the character device. Each queue has an array of descriptors, which only the driver writes. The driver
//! writes the descriptor of a tag before it completes the tag's fetch, and does not change it until the tag is answered. So the
//! server reads a descriptor once after each fetch.

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
        // SAFETY: `Descriptors::map` mapped this range. No reference to it exists, because `get` returns copies.
        let _ = unsafe { munmap(self.start, self.len_bytes) };
    }
}

/// The mapped descriptors of a device.
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
            // SAFETY: the kernel chooses the address of the new mapping, so it replaces no existing memory.
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

    /// The descriptor of a tag. The fetch of the tag must have completed.
    pub(crate) fn get(&self, queue: u16, tag: u16) -> IoDescriptor {
        assert!(tag < self.depth, "tag {tag} of {}", self.depth);
        let mapping = &self.queues[usize::from(queue)];
        // SAFETY: the mapping has room for `depth` descriptors and `tag` is below `depth`. The mapping is aligned to a page.
        // The read is volatile because the driver writes to this memory. The fetch of the tag has completed, so the driver
        // does not write to this descriptor now. All bit patterns are valid values of this structure.
        unsafe { mapping.start.cast::<IoDescriptor>().add(usize::from(tag)).read_volatile() }
    }
}
