//! Threads and memory that a block device depends on.
//!
//! When memory is short, the kernel writes dirty pages back and swaps pages out before it gives a thread more. If the
//! pages are to go to a device that this very thread serves, both wait for ever. Two things prevent that:
//!
//! * a thread that is marked as a flusher does no I/O to get memory, and is not held back as a writer. Threads that it starts
//!   afterwards inherit the mark;
//! * locked memory is not swapped out, and code is not dropped that would have to be read again from a device.
//!
//! A ring of a file has workers of the kernel (`iou-wrk-*`), which carry out flushes and requests that would wait. A worker
//! inherits the mark if the thread had it when the worker was made (seen on Linux 6.12), so a thread is marked before it opens
//! its first ring. Block devices do without these workers (module `workers`).
//!
//! Neither helps a marked thread if there is no memory. A thread that touches a new page then waits until other processes free
//! some, and these may wait for it. So code is made resident when memory is locked, and all memory for requests is reserved
//! before the first of them: buffers ([`hold`]), and heap and stack (module [`crate::heap`]).
//!
//! Owns both requests to the kernel, and how much memory buffers may hold in the process. Must not know what is served.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::mm::{MlockAllFlags, mlockall};
use rustix::process::{Resource, getrlimit};
use rustix::thread::{CapabilitySet, capabilities};

/// Since Linux 5.6; not in every version of the C headers.
const PR_SET_IO_FLUSHER: libc::c_int = 57;

/// Marks the calling thread, and every thread that it starts from now on, for good.
///
/// # Errors
/// Without the right to do so (CAP_SYS_RESOURCE).
pub fn mark_this_thread() -> io::Result<()> {
    // SAFETY: this request reads no memory; unused arguments are zero as it demands.
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

/// The process has locked its memory.
static LOCKED: AtomicBool = AtomicBool::new(false);

/// Whether [`lock_memory`] has done so.
pub fn memory_is_locked() -> bool {
    LOCKED.load(Ordering::Acquire)
}

/// Locks all memory of the process, and all pages that it touches from now on: once for a process.
///
/// # Errors
/// Without the right to lock as much as it takes (CAP_IPC_LOCK, or no RLIMIT_MEMLOCK). Nothing is locked then: with a limit,
/// memory could no longer be allocated once it is reached.
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
    // Locks all pages that the process has mapped so far. Most of them are code. Those that were never executed are read in,
    // too: the file may be on a volume of this very process, or in a tmpfs that is swapped out to one.
    mlockall(MlockAllFlags::CURRENT)?;
    // From now on pages as they are touched: what is only reserved takes no memory.
    mlockall(MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT)?;
    LOCKED.store(true, Ordering::Release);
    Ok(())
}

/// How many bytes of buffers the process may still hold resident.
static LEFT_TO_HOLD: AtomicU64 = AtomicU64::new(32 << 20);

/// Sets how many bytes of buffers the process may hold resident: once, before any are held.
pub fn set_most_held(bytes: u64) {
    LEFT_TO_HOLD.store(bytes, Ordering::Release);
}

/// Buffers that are held resident; dropping this gives their share back.
#[derive(Debug)]
pub struct Held(u64);

/// Whether buffers of this size together may be touched, so that they stay resident. Not if the process has not locked its
/// memory, as they would be swapped out, nor if too much is held already.
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
        // SAFETY: this request reads no memory; unused arguments are zero as it demands.
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
        // In a thread of its own, which is marked for good.
        std::thread::spawn(test).join().unwrap();
    }
}
