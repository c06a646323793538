//! How many reads and writes the kernel has at a time.
//!
//! For each one it needs memory of its own (`struct io_async_rw`). Linux keeps that of 128 that have ended, and allocates
//! anew for what goes beyond. The thread that serves a volume with swap on it would wait for that memory, and the memory for
//! the thread (decision 028). So reads and writes beyond a limit wait here, which takes no memory of the kernel.
//!
//! Owns the count of those that the kernel has, and those that wait, in order of arrival. Must not know what they read or write.

use std::collections::VecDeque;

use io_uring::squeue::Entry;

/// The kernel keeps the memory of 128 (`IO_ALLOC_CACHE_MAX`, since 6.10). A few of them are left for reads of the ring itself.
const MOST_UNDER_WAY: usize = 120;

/// See the module head.
#[derive(Default)]
pub(crate) struct Transfers {
    under_way: usize,
    /// By the slot of the operation: whether its command is a transfer that the kernel has.
    of_slot: Vec<bool>,
    waiting: VecDeque<(u64, Entry)>,
}

/// The half of the name that says where the operation is.
fn slot(user_data: u64) -> usize {
    (user_data & 0xffff_ffff) as usize
}

impl Transfers {
    /// A transfer of this name begins: gives back the entry if the kernel may have it now.
    pub(crate) fn begin(&mut self, user_data: u64, entry: Entry) -> Option<Entry> {
        if self.under_way >= MOST_UNDER_WAY {
            self.waiting.push_back((user_data, entry));
            return None;
        }
        self.under_way += 1;
        let slot = slot(user_data);
        if slot >= self.of_slot.len() {
            self.of_slot.resize(slot + 1, false);
        }
        self.of_slot[slot] = true;
        Some(entry)
    }

    /// The kernel is done with the command of this name, of whatever kind it is.
    pub(crate) fn ended(&mut self, user_data: u64) {
        if let Some(is_transfer) = self.of_slot.get_mut(slot(user_data))
            && std::mem::take(is_transfer)
        {
            self.under_way -= 1;
        }
    }

    /// The next one that has waited, if the kernel may have it now.
    pub(crate) fn next(&mut self) -> Option<Entry> {
        if self.under_way >= MOST_UNDER_WAY {
            return None;
        }
        let (user_data, entry) = self.waiting.pop_front()?;
        self.begin(user_data, entry)
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

    #[test]
    fn what_is_too_much_waits_in_order() {
        let mut transfers = Transfers::default();
        let entry = |n| Nop::new().build().user_data(name(n));
        let most = MOST_UNDER_WAY as u64;
        let begun = (0..most + 3).filter(|n| transfers.begin(name(*n), entry(*n)).is_some()).count();
        assert_eq!(begun, MOST_UNDER_WAY);
        assert!(transfers.next().is_none());
        // Those that wait, commands that are no transfers, and ends that were counted, make no room.
        for other in [most, most + 100, 1 << 20] {
            transfers.ended(name(other));
        }
        assert!(transfers.next().is_none());
        transfers.ended(name(5));
        transfers.ended(name(5));
        transfers.ended(name(9));
        let next: Vec<u64> = std::iter::from_fn(|| transfers.next()).map(|e| e.get_user_data()).collect();
        assert_eq!(next, [name(most), name(most + 1)]);
        transfers.ended(name(most));
        assert_eq!(transfers.next().map(|e| e.get_user_data()), Some(name(most + 2)));
    }
}
