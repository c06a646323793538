//! Turns, which tell whether data that was read from the cache device is still valid.
//!
//! A read of cached data takes the [`Turn`] before it looks the key up, and again when the data has arrived. If the two
//! differ, the data may be zeros of a wipe, or older data of a device that lost its volatile cache. The read then looks
//! the key up again, which fails if the set has failed.

/// The number of wipes and failures so far ([`super::CacheDevice::turn`]). If two turns differ, dead sectors may have
/// been overwritten between them, or the device may have failed.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Turn {
    /// Counts wipes and failures.
    pub(super) number: u64,
    /// Whether the device failed a flush. The set may not have failed yet, because the tasks that wait for the flush
    /// run one after the other.
    pub(super) flush_failed: bool,
}

#[cfg(test)]
mod tests {
    use format::Sectors;
    use io::Op;

    use crate::testing::{Watching, run, watched_cache_device};

    #[test]
    fn moments_differ_after_each_turn_and_after_a_failed_flush() {
        run(|rt| async move {
            let disk = Watching::new(1024 * 16);
            let device = watched_cache_device(&disk, &rt, Sectors(16));
            let first = device.turn();
            assert_eq!(device.turn(), first);
            device.next_turn();
            let second = device.turn();
            device.next_turn();
            let third = device.turn();
            assert!(first != second && second != third && third != first);
            assert_eq!(device.turn(), third);
            disk.refuses.set(|r| (r.op == Op::Flush).then_some(5));
            assert!(device.gate().ensure(device.gate().wrote()).await.is_err());
            assert!(device.turn() != third, "nobody has told the set yet");
        });
    }
}
