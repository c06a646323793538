//! Preparations for requests while memory is short.
//!
//! Owns the preparation of a process and of its threads that serve block devices: how much memory is reserved before it is
//! needed, and the warnings about memory that could not be reserved. Must not know the means (`blockio::flusher`,
//! `blockio::heap`, `blockio::refill`).

use std::sync::{Mutex, MutexGuard, Once, OnceLock, PoisonError};

use blockio::refill::{self, Refill};
use blockio::{flusher, heap};
use export_fuse::RequestLimits;
use export_ublk::Shape;

use crate::message;
use crate::ram;

/// Free and resident heap from the start of an export on, in addition to the heap in use.
///
/// It is more than requests can use before the refilling thread runs again. Writeback takes 16 MiB to 32 MiB of it (8 MiB
/// of runs in flight), the insertion of misses 16 MiB, and the index 24 MiB for a million extents.
const RESERVE_BYTES: u64 = 64 << 20;

/// The reserve is at most the memory divided by this.
///
/// A host with 512 MiB then has the whole reserve. With half of it, a burst of writeback can use all of it before the thread that
/// fills it up runs again.
const SHARE_OF_RESERVE: u64 = 8;

/// The heap may grow by the memory divided by this, and at most by [`MOST_GROWTH_BYTES`].
///
/// If address space is limited, it grows at most by the reserve.
const SHARE_OF_GROWTH: u64 = 2;
const MOST_GROWTH_BYTES: u64 = 1 << 30;

/// The thread that refills the reserve.
static REFILL: OnceLock<Refill> = OnceLock::new();

/// The buffers of one block device whose queue depth is not configured take the memory divided by this.
const SHARE_OF_DEVICE: u64 = 16;

/// The buffers of all block devices together may hold the memory divided by this.
const SHARE_OF_DEVICES: u64 = 8;

/// The requests under way of one file system of FUSE may take the memory divided by this.
const SHARE_OF_FILE_SYSTEM: u64 = 64;

/// All file systems together may keep the memory divided by this unused, and at most [`MOST_SPARE_BYTES`].
const SHARE_OF_SPARE: u64 = 32;
const MOST_SPARE_BYTES: u64 = 64 << 20;

/// Prepares the process. The caller has not started a second thread yet.
pub fn prepare_process() {
    flusher::set_most_held(ram::available_bytes() / SHARE_OF_DEVICES);
    let spare = MOST_SPARE_BYTES.min(ram::available_bytes() / SHARE_OF_SPARE);
    export_fuse::set_most_spare(usize::try_from(spare).unwrap_or(0));
    if !heap::retain_freed_memory() {
        message::warn(
            "this program was built for a C library whose allocator returns freed memory to the system: when \
             memory is short, requests can wait for memory, and for ever if swap is on a volume of this process",
        );
    }
    // The allocator is configured before there is a second thread. The two threads that start here do not serve requests.
    message::write_elsewhere();
    match Refill::start() {
        Ok(refill) => drop(REFILL.set(refill)),
        Err(e) => message::warn(format!(
            "cannot start the thread that reserves memory for requests ({e}): when memory is short, requests \
             can wait for memory, and for ever if swap is on a volume of this process"
        )),
    }
}

/// Prepares the calling thread for serving block devices, before it starts any other thread or opens a ring.
///
/// A preparation that fails is logged once for a process.
pub fn prepare_this_thread() {
    static MARK: Once = Once::new();
    static LOCK: Once = Once::new();
    if let Err(e) = flusher::mark_this_thread() {
        MARK.call_once(|| {
            message::warn(format!(
                "cannot mark this process as one that block devices depend on (PR_SET_IO_FLUSHER: {e}): when memory is \
                 short, it can wait for a file system that waits for it. Give it CAP_SYS_RESOURCE"
            ));
        });
    }
    if let Err(e) = flusher::lock_memory() {
        LOCK.call_once(|| {
            message::warn(format!(
                "cannot lock memory ({e}): when memory is short, requests can wait until pages are read from swap, and for \
                 ever if the swap is on a volume of this process. Give it CAP_IPC_LOCK, or `ulimit -l unlimited`"
            ));
        });
    }
    heap::touch_stack();
}

/// Reserves heap for the requests of the process. The calling thread has just started an export.
///
/// From then on the refilling thread keeps that much heap free. The serving threads share a heap, so the start of an export
/// takes the reserve of earlier exports into account.
pub(crate) fn reserve_heap() {
    let available = ram::available_bytes();
    let wanted = heap_for(available);
    let growth = growth_for(available, ram::addresses_are_limited());
    let had = REFILL.get().map_or_else(|| heap::reserve(wanted), |refill| refill.hold(wanted, growth));
    if is_short(had, wanted) {
        message::warn(format!(
            "{} MiB of memory for requests could not be reserved, only {} MiB: when memory is short, requests \
             can wait for memory, and for ever if swap is on a volume of this process",
            wanted >> 20,
            had >> 20
        ));
    }
}

/// Gives the memory of a set that has stopped back to the system. The reserve stays.
pub fn give_back_heap() {
    if let Some(refill) = REFILL.get() {
        refill.give_back();
    }
}

/// Seconds between two calls of [`free_unused`].
pub const FREES_EVERY_S: u64 = 5;

/// Frees memory that exports have not used since the last call. The system gets it later, and the reserve stays.
pub fn free_unused() {
    export_fuse::free_unused();
}

/// Whether so much is missing from the reserve that an operator has to know it.
///
/// Requests of other exports use the reserve while it is measured, and the thread fills it up from a certain gap on only.
fn is_short(had_bytes: usize, wanted_bytes: usize) -> bool {
    had_bytes < wanted_bytes - wanted_bytes / refill::GAP_PART
}

fn heap_for(available_bytes: u64) -> usize {
    usize::try_from(RESERVE_BYTES.min(available_bytes / SHARE_OF_RESERVE)).unwrap_or(usize::MAX)
}

fn growth_for(available_bytes: u64, addresses_are_limited: bool) -> usize {
    let reserve = heap_for(available_bytes);
    let growth = MOST_GROWTH_BYTES.min(available_bytes / SHARE_OF_GROWTH);
    if addresses_are_limited { reserve } else { reserve.max(usize::try_from(growth).unwrap_or(0)) }
}

/// The queues and depth of the first block device for which none are configured, so that its buffers fit into the memory.
pub fn ublk_shape() -> Shape {
    Shape::within(ram::available_bytes() / SHARE_OF_DEVICE)
}

/// Bytes of buffers of the block devices for which this process has chosen queues and depth.
static DEVICES_BYTES: Mutex<u64> = Mutex::new(0);

/// The bytes of buffers that count for an export with block devices. Dropping it ends that.
pub(crate) struct DeviceBuffers(u64);

impl DeviceBuffers {
    /// Counts the buffers that the devices really have: a recovered device keeps its queues and depth.
    pub(crate) fn set(&mut self, bytes: u64) {
        let mut all_bytes = devices_bytes();
        *all_bytes = all_bytes.saturating_sub(self.0).saturating_add(bytes);
        self.0 = bytes;
    }
}

impl Drop for DeviceBuffers {
    fn drop(&mut self) {
        self.set(0);
    }
}

fn devices_bytes() -> MutexGuard<'static, u64> {
    DEVICES_BYTES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Chooses the queues and depth of a block device that starts now, so that its buffers fit into the memory that earlier ones leave.
///
/// The buffers are part of the heap. Its free part is resident from the first export on, also if the process cannot lock its memory.
pub(crate) fn start_ublk() -> (Shape, DeviceBuffers) {
    let mut all_bytes = devices_bytes();
    let shape = Shape::within(device_bytes(ram::available_bytes(), *all_bytes));
    *all_bytes += shape.buffer_bytes();
    (shape, DeviceBuffers(shape.buffer_bytes()))
}

/// Each device leaves half of the memory that all devices may still take to later ones.
fn device_bytes(available_bytes: u64, devices_bytes: u64) -> u64 {
    let left_bytes = (available_bytes / SHARE_OF_DEVICES).saturating_sub(devices_bytes);
    (available_bytes / SHARE_OF_DEVICE).min(left_bytes / 2)
}

/// Whether the buffers of a block device may be resident if no other device has any.
pub(crate) fn may_hold(shape: Shape) -> bool {
    shape.buffer_bytes() <= ram::available_bytes() / SHARE_OF_DEVICES
}

/// The limits of the requests of a file system, so that those under way fit into the memory.
pub(crate) fn fuse_limits() -> RequestLimits {
    RequestLimits::within(ram::available_bytes() / SHARE_OF_FILE_SYSTEM)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each of 24 devices had buffers of a sixteenth of the memory. The daemon used all memory of the host, and was ended by the
    /// kernel at each start.
    #[test]
    fn many_devices_leave_memory_to_the_host() {
        const VOLUMES: u64 = 24;
        let least = Shape::within(0).buffer_bytes();
        for gib in [1, 2, 4, 16, 64] {
            let available = gib << 30;
            let all = (0..VOLUMES)
                .fold(0, |all, _| all + Shape::within(device_bytes(available, all)).buffer_bytes());
            let most = available / SHARE_OF_DEVICES + VOLUMES * least;
            assert!(all <= most, "{gib} GiB: {} MiB of {} MiB", all >> 20, most >> 20);
            let first = Shape::within(device_bytes(available, 0));
            assert_eq!(first, Shape::within(available / SHARE_OF_DEVICE), "one device has what it had");
        }
    }

    /// Buffers that a process could not lock did not count, and each of its devices took a sixteenth of the memory.
    #[test]
    fn buffers_count_from_the_start_of_a_device_to_its_end() {
        let (shape, mut first) = start_ublk();
        assert_eq!(*devices_bytes(), shape.buffer_bytes());
        first.set(5 << 20);
        let (second_shape, second) = start_ublk();
        assert_eq!(*devices_bytes(), (5 << 20) + second_shape.buffer_bytes());
        drop(second);
        drop(first);
        assert_eq!(*devices_bytes(), 0);
    }

    /// A host with enough memory gets no warning while its volumes use a part of the reserve.
    #[test]
    fn a_reserve_in_use_is_not_short() {
        let wanted = 64 << 20;
        assert!([wanted, wanted - 1, 56 << 20].iter().all(|had| !is_short(*had, wanted)));
        assert!(is_short((56 << 20) - 1, wanted) && is_short(0, wanted) && !is_short(0, 0));
    }

    #[test]
    fn small_hosts_give_a_part_of_their_memory() {
        const MIB: u64 = 1 << 20;
        assert_eq!(heap_for(384 * MIB), 48 << 20);
        assert_eq!(heap_for(512 * MIB), 64 << 20);
        assert_eq!(heap_for(8192 * MIB), 64 << 20);
        assert_eq!([768, 8192].map(|mib| growth_for(mib * MIB, false)), [384 << 20, 1 << 30]);
        assert_eq!([384, 8192].map(|mib| growth_for(mib * MIB, true)), [48 << 20, 64 << 20]);
        for bytes in [64 * MIB, 768 * MIB, 16384 * MIB] {
            let shape = Shape::within(bytes / SHARE_OF_DEVICE);
            assert!(Shape::DEPTH.contains(&shape.depth) && shape.depth <= 128, "{bytes}: {shape:?}");
            let fits = shape.buffer_bytes() <= bytes / SHARE_OF_DEVICE;
            assert!(fits || shape.depth == *Shape::DEPTH.start(), "{bytes}: {shape:?}");
        }
    }
}
