//! Read epochs, which tell whether data that was read from the cache device is still valid.
//!
//! A read of cached data takes the [`ReadEpoch`] before it looks the key up, and again when the data has arrived. If
//! the two differ, the data may be zeros of a wipe, or older data of a device that lost its volatile cache. The read
//! then looks the key up again, which fails if the set is disabled.

/// The number of wipes and failures so far ([`super::CacheDevice::read_epoch`]). If two epochs differ, dead sectors may
/// have been overwritten between them, or the device may have failed.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct ReadEpoch {
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
    fn epochs_differ_after_each_begin_and_after_a_failed_flush() {
        run(|rt| async move {
            let disk = Watching::new(1024 * 16);
            let device = watched_cache_device(&disk, &rt, Sectors(16));
            let first = device.read_epoch();
            assert_eq!(device.read_epoch(), first);
            device.next_read_epoch();
            let second = device.read_epoch();
            device.next_read_epoch();
            let third = device.read_epoch();
            assert!(first != second && second != third && third != first);
            assert_eq!(device.read_epoch(), third);
            disk.refuses.set(|r| (r.op == Op::Flush).then_some(5));
            device.wrote();
            assert!(device.flush_all().await.is_err());
            assert!(device.read_epoch() != third, "a failed flush begins an epoch before the set fails");
        });
    }
}
