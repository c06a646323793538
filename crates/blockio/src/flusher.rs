//! Threads and memory that a block device depends on.
//!
//! When memory is short, the kernel writes dirty pages back and swaps pages out before it gives memory to a thread. If the
//! pages go to a device that this very thread serves, both wait for ever. Two requests to the kernel prevent that:
//!
//! * A thread that is marked as a flusher does no I/O to get memory, and the kernel does not throttle its writes. Threads that
//!   it starts afterwards inherit the mark.
//! * The kernel does not swap locked memory out, and does not drop code that it would have to read again from a device.
//!
//! The ring has kernel threads for files (`iou-wrk-*`), which carry out flushes and requests that would wait. Such a thread
//! inherits the mark if the creating thread has it at that time (seen on Linux 6.12), so a thread is marked before it opens
//! its first ring. Block devices do without these kernel threads (module `workers`).
//!
//! Neither request helps a marked thread if there is no memory at all. A thread that touches a new page then waits until other
//! processes free some, and these may wait for the thread. So the process makes its code resident when it locks its memory,
//! and reserves all memory for requests before the first request: buffers ([`hold`]), and heap and stack (module
//! [`crate::heap`]).
//!
//! Owns both requests to the kernel, and the limit of memory that buffers of the process may hold. Must not know what is served.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::mm::{MlockAllFlags, mlockall};
use rustix::process::{Resource, getrlimit};
use rustix::thread::{CapabilitySet, capabilities};

/// Since Linux 5.6; not in every version of the C headers.
const PR_SET_IO_FLUSHER: libc::c_int = 57;

/// Marks the calling thread permanently as a flusher. Threads that it starts afterwards inherit the mark.
///
/// # Errors
/// Without the right to do so (CAP_SYS_RESOURCE).
pub fn mark_this_thread() -> io::Result<()> {
    // SAFETY: this request reads no memory of the process; the unused arguments are zero, as the kernel demands.
    let result = unsafe {
        libc::prctl(
            PR_SET_IO_FLUSHER,
            1 as libc::c_ulong,
            0 as libc::c_ulong,
            0 as libc::c_ulong,
            0 as libc::c_ulong,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Whether the process has locked its memory.
static LOCKED: AtomicBool = AtomicBool::new(false);

/// Whether [`lock_memory`] has locked the memory of the process.
pub fn memory_is_locked() -> bool {
    LOCKED.load(Ordering::Acquire)
}

/// Locks all memory of the process, and all pages that it touches later. Later calls do nothing.
///
/// # Errors
/// Without the right to lock any amount of memory (CAP_IPC_LOCK, or no RLIMIT_MEMLOCK). The function then locks nothing: with
/// a limit, allocations would fail once it is reached.
pub fn lock_memory() -> io::Result<()> {
    if LOCKED.load(Ordering::Acquire) {
        return Ok(());
    }
    let limit = getrlimit(Resource::Memlock).current;
    let capable = capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
    if let Some(bytes) = limit.filter(|_| !capable) {
        let what = format!("RLIMIT_MEMLOCK is {bytes} bytes, and CAP_IPC_LOCK is missing");
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
    }
    // Locks all pages that the process has mapped so far. Most of them are code. Pages that were never executed are read in
    // too, because the file may be on a volume of this process, or in a tmpfs that is swapped out to such a volume.
    mlockall(MlockAllFlags::CURRENT)?;
    // Locks later pages when they are touched, so that reserved address space takes no memory.
    mlockall(MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT)?;
    LOCKED.store(true, Ordering::Release);
    Ok(())
}

/// How many bytes of buffers the process may still hold resident.
static LEFT_TO_HOLD: AtomicU64 = AtomicU64::new(32 << 20);

/// Sets the limit of bytes of buffers that the process may hold resident. Call it once, before the first [`hold`].
pub fn set_most_held(bytes: u64) {
    LEFT_TO_HOLD.store(bytes, Ordering::Release);
}

/// A share of the limit of resident buffers; dropping it returns the share.
#[derive(Debug)]
pub struct Held(u64);

/// Reserves `bytes` of the limit for buffers that are touched and stay resident.
///
/// `None` if the process has not locked its memory, because the buffers would be swapped out, or if the limit is reached.
pub fn hold(bytes: u64) -> Option<Held> {
    if !memory_is_locked() {
        return None;
    }
    let left = LEFT_TO_HOLD.fetch_update(Ordering::AcqRel, Ordering::Acquire, |left| left.checked_sub(bytes));
    left.is_ok().then_some(Held(bytes))
}

impl Drop for Held {
    fn drop(&mut self) {
        LEFT_TO_HOLD.fetch_add(self.0, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PR_GET_IO_FLUSHER: libc::c_int = 58;

    fn is_marked() -> bool {
        // SAFETY: this request reads no memory of the process; the unused arguments are zero, as the kernel demands.
        unsafe { libc::prctl(PR_GET_IO_FLUSHER, 0, 0, 0, 0) == 1 }
    }

    #[test]
    fn the_mark_is_inherited() {
        let test = || {
            match mark_this_thread() {
                Ok(()) => assert!(is_marked() && std::thread::spawn(is_marked).join().unwrap()),
                // A user without CAP_SYS_RESOURCE gets this error.
                Err(e) => assert_eq!(e.kind(), io::ErrorKind::PermissionDenied),
            }
        };
        // The mark is permanent, so the test runs in its own thread.
        std::thread::spawn(test).join().unwrap();
    }
}
