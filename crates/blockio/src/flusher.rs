//! Threads and memory that a block device depends on.
//!
//! When memory is short, the kernel writes dirty pages back and swaps pages out before it gives a thread more. If the
//! pages are to go to a device that this very thread serves, both wait for ever. Two things prevent that:
//!
//! * a thread that is marked as a flusher does no I/O to get memory, and is not held back as a writer; threads that it
//!   starts inherit the mark, and so do the kernel's workers of its rings (`iou-wrk-*`, which carry out flushes, and requests
//!   that would block) if they are started after it was marked. The kernel keeps a ring's first worker, so the mark comes
//!   before the ring's first request;
//! * locked memory is not swapped out, nor is code dropped that would have to be read again from a device.
//!
//! Neither gives a marked thread memory that is not there: one that touches a new page while there is none waits until others
//! give some back, who may wait for it. So code is brought in when memory is locked, and who serves touches the buffers of
//! its requests before the first of them.
//!
//! Owns both requests to the kernel. Must not know what is served.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

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

/// Locks all memory that the process has, and what it touches from now on: once for a process.
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
    // What there is now is mostly code: all of it, also what was never executed. It may be in a file on a volume of this very
    // process, or in a tmpfs whose pages are swapped out to one.
    mlockall(MlockAllFlags::CURRENT)?;
    // From now on pages as they are touched: what is only reserved takes no memory.
    mlockall(MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT)?;
    LOCKED.store(true, Ordering::Release);
    Ok(())
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
                // Whoever runs this may lack the right; then it is said.
                Err(e) => assert_eq!(e.kind(), io::ErrorKind::PermissionDenied),
            }
        };
        // In a thread of its own, which is marked for good.
        std::thread::spawn(test).join().unwrap();
    }
}
