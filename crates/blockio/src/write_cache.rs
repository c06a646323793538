//! Checks whether a block device has a volatile write cache at this moment.
//!
//! On a device without such a cache, the kernel drops flushes: after direct writes, fdatasync(2) has no effect. Through io_uring
//! another thread still carries it out, with two wake-ups, which can take longer than the write itself. So a flush checks first
//! whether it has to do anything.
//!
//! Owns the open attribute of the device. The check is made for each flush, as in the kernel: a path of a multipath device or an
//! operator (`hdparm -W1`) may enable such a cache at any time. The check does not apply to writes through the page cache. Must
//! not know which data was written.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The attribute `write_cache` of a device's request queue.
pub(crate) struct WriteCache {
    attribute: File,
}

impl WriteCache {
    /// Opens the attribute in `queue`, the queue's directory in sysfs. `None` without it: then a cache may exist.
    pub(crate) fn of_queue(queue: &Path) -> Option<WriteCache> {
        Some(WriteCache { attribute: File::open(queue.join("write_cache")).ok()? })
    }

    /// Whether the kernel reports that there is no cache now. With any other answer, or without one, a cache may exist.
    pub(crate) fn is_absent(&self) -> bool {
        const NONE: &[u8] = b"write through\n";
        let mut said = [0; 2 * NONE.len()];
        self.attribute.read_at(&mut said, 0).is_ok_and(|length| said.get(..length) == Some(NONE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each check reads the attribute again, because an earlier answer may be out of date.
    #[test]
    fn only_what_the_kernel_says_now_counts() {
        let dir = tempfile::tempdir().unwrap();
        assert!(WriteCache::of_queue(dir.path()).is_none());
        let attribute = dir.path().join("write_cache");
        std::fs::write(&attribute, "write through\n").unwrap();
        let cache = WriteCache::of_queue(dir.path()).unwrap();
        for (said, absent) in [
            ("write through\n", true),
            ("write back\n", false),
            ("", false),
            ("write through\n", true),
            ("write through and back\n", false),
            ("write", false),
        ] {
            std::fs::write(&attribute, said).unwrap();
            assert_eq!(cache.is_absent(), absent, "{said:?}");
        }
    }

    /// The check accepts the attribute of each disk of this machine.
    #[test]
    fn disks_of_this_machine_are_understood() {
        let mut checked = 0;
        for disk in std::fs::read_dir("/sys/block").into_iter().flatten().flatten() {
            let queue = disk.path().join("queue");
            let Ok(said) = std::fs::read_to_string(queue.join("write_cache")) else { continue };
            let cache = WriteCache::of_queue(&queue).unwrap();
            assert_eq!(
                cache.is_absent(),
                said.trim() == "write through",
                "{}: {said:?}",
                disk.path().display()
            );
            checked += 1;
        }
        if checked == 0 {
            rig::skipped("no disk has the attribute queue/write_cache in /sys/block");
        }
    }
}
