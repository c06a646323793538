//! The limit of reads and writes of a device that the kernel has at a time.
//!
//! The kernel needs memory for each transfer (`struct io_async_rw`). Linux retains the memory of 128 ended transfers
//! and allocates memory for transfers beyond that. The thread that serves a volume with swap on it would wait for that
//! memory, and the memory for the thread (decision 028). So reads and writes beyond a limit wait here, which takes no
//! memory of the kernel. Each device has its own limit: a device that hangs delays no other (decision 023).
//!
//! Owns the count of transfers that the kernel has, and the waiting transfers, in order of arrival. Must not know what
//! they read or write.

use std::collections::VecDeque;
use std::os::fd::RawFd;

use io_uring::squeue::Entry;

/// A cache device and a backing device together have fewer than the 128 whose memory the kernel keeps (`IO_ALLOC_CACHE_MAX`,
/// since 6.10). A few of those are left for reads of the ring itself.
const MOST_OF_DEVICE: usize = 60;

/// The descriptor of a slot without a transfer.
const NONE: RawFd = -1;

#[derive(Default)]
struct OfDevice {
    under_way: usize,
    waiting: VecDeque<(u64, Entry)>,
}

/// The reads and writes that the kernel has, counted for each device, and those that wait.
#[derive(Default)]
pub(crate) struct Transfers {
    /// The state of each device, indexed by descriptor.
    devices: Vec<OfDevice>,
    /// For each slot of an operation, the descriptor of the device whose transfer the kernel has.
    of_slot: Vec<RawFd>,
    /// Transfers that have waited and may begin now.
    ready: VecDeque<Entry>,
}

/// The half of the operation's name that is its slot.
fn slot(user_data: u64) -> usize {
    (user_data & 0xffff_ffff) as usize
}

impl Transfers {
    /// Begins a transfer: returns the entry if the kernel may have it now, else keeps it.
    pub(crate) fn begin(&mut self, device: RawFd, user_data: u64, entry: Entry) -> Option<Entry> {
        let index = usize::try_from(device).ok()?;
        if index >= self.devices.len() {
            self.devices.resize_with(index + 1, OfDevice::default);
        }
        let of_device = &mut self.devices[index];
        if of_device.under_way >= MOST_OF_DEVICE {
            of_device.waiting.push_back((user_data, entry));
            return None;
        }
        of_device.under_way += 1;
        self.note(user_data, device);
        Some(entry)
    }

    fn note(&mut self, user_data: u64, device: RawFd) {
        let slot = slot(user_data);
        if slot >= self.of_slot.len() {
            self.of_slot.resize(slot + 1, NONE);
        }
        self.of_slot[slot] = device;
    }

    /// Records that the kernel has ended the command of this name, of any kind. A waiting transfer of the same device may then
    /// begin.
    pub(crate) fn ended(&mut self, user_data: u64) {
        let Some(of_slot) = self.of_slot.get_mut(slot(user_data)) else { return };
        let device = std::mem::replace(of_slot, NONE);
        let Some(of_device) = usize::try_from(device).ok().and_then(|index| self.devices.get_mut(index))
        else {
            return;
        };
        match of_device.waiting.pop_front() {
            Some((next, entry)) => {
                self.ready.push_back(entry);
                self.note(next, device);
            }
            None => of_device.under_way -= 1,
        }
    }

    /// Takes a transfer that has waited and may begin now.
    pub(crate) fn next(&mut self) -> Option<Entry> {
        self.ready.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use io_uring::opcode::Nop;

    use super::*;

    /// Names have a generation above the slot.
    fn name(slot: u64) -> u64 {
        7 << 32 | slot
    }

    fn begin(transfers: &mut Transfers, device: RawFd, slot: u64) -> bool {
        transfers.begin(device, name(slot), Nop::new().build().user_data(name(slot))).is_some()
    }

    fn ready(transfers: &mut Transfers) -> Vec<u64> {
        std::iter::from_fn(|| transfers.next()).map(|entry| entry.get_user_data()).collect()
    }

    #[test]
    fn transfers_above_the_limit_of_a_device_wait_in_order() {
        let mut transfers = Transfers::default();
        let most = MOST_OF_DEVICE as u64;
        assert_eq!((0..most + 3).filter(|n| begin(&mut transfers, 5, *n)).count(), MOST_OF_DEVICE);
        // A waiting transfer, a command that is no transfer, and an end that was counted already: none makes room.
        for other in [most, most + 100, 1 << 20] {
            transfers.ended(name(other));
        }
        assert_eq!(ready(&mut transfers), []);
        for end in [5, 5, 9] {
            transfers.ended(name(end));
        }
        assert_eq!(ready(&mut transfers), [name(most), name(most + 1)]);
        transfers.ended(name(most));
        assert_eq!(ready(&mut transfers), [name(most + 2)]);
        transfers.ended(name(0));
        assert!(
            ready(&mut transfers).is_empty() && begin(&mut transfers, 5, 0) && !begin(&mut transfers, 5, 200)
        );
    }

    #[test]
    fn a_device_that_hangs_holds_up_no_other() {
        let mut transfers = Transfers::default();
        assert_eq!((0..1000).filter(|n| begin(&mut transfers, 5, *n)).count(), MOST_OF_DEVICE);
        for n in 1000..1000 + MOST_OF_DEVICE as u64 {
            assert!(begin(&mut transfers, 6, n) && begin(&mut transfers, 3, n + 1000), "{n}");
        }
        transfers.ended(name(1000));
        assert!(ready(&mut transfers).is_empty() && begin(&mut transfers, 6, 1000));
    }
}
