//! The effect of "punch a hole" on a volume, and its cost on the backing device.
//!
//! The kernel's loop driver punches a hole for two kinds of requests, which the file cannot distinguish: a discard, after which
//! any contents are allowed, and a write of zeros that may be unmapped, after which the range must read as zeros. So a hole must
//! become zeros. A discard of a whole disk, which mkfs sends, then costs as much as zeros on the whole disk: almost no time for
//! a file or most SSDs, and hours for a disk that has to write the zeros.
//!
//! Owns the choice for a device. Must not know requests.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The effect of "punch a hole".
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum PunchHole {
    /// The range is made to read as zeros, and may be unmapped. It is always correct, and slow if the volume has to write zeros.
    #[default]
    Zero,
    /// Not supported: the loop device then offers no discard, and the kernel writes zeros as data.
    Refuse,
}

impl PunchHole {
    /// The best choice for a volume whose zeros are written to `device`.
    ///
    /// [`PunchHole::Zero`] if that is a file or a device with a fast command for zeros, else [`PunchHole::Refuse`], also if
    /// sysfs does not tell.
    pub fn for_device(device: &Path) -> PunchHole {
        let Ok(meta) = fs::metadata(device) else { return PunchHole::Refuse };
        if !meta.file_type().is_block_device() {
            return PunchHole::Zero;
        }
        let number = meta.rdev();
        let name = format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
        Self::by_queue(&queue_of(&Path::new("/sys/dev/block").join(name)))
    }

    fn by_queue(queue: &Path) -> PunchHole {
        let number = |name: &str| {
            fs::read_to_string(queue.join(name)).ok().and_then(|text| text.trim().parse::<u64>().ok())
        };
        // A disk with a moving head may have the command too, and then writes the zeros.
        match (number("rotational"), number("write_zeroes_max_bytes")) {
            (Some(0), Some(bytes)) if bytes > 0 => PunchHole::Zero,
            _ => PunchHole::Refuse,
        }
    }
}

/// The directory in sysfs of a device's queue. A partition uses the queue of its disk.
fn queue_of(sys: &Path) -> PathBuf {
    if sys.join("partition").exists() { sys.join("../queue") } else { sys.join("queue") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_zeroed_fast_and_the_unknown_is_not() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(PunchHole::for_device(file.path()), PunchHole::Zero);
        assert_eq!(PunchHole::for_device(Path::new("/no/such/device")), PunchHole::Refuse);
    }

    #[test]
    fn a_queue_says_what_zeros_cost() {
        let dir = tempfile::tempdir().unwrap();
        let queue = dir.path().join("sdb/queue");
        fs::create_dir_all(&queue).unwrap();
        fs::create_dir_all(dir.path().join("sdb/sdb1")).unwrap();
        fs::write(dir.path().join("sdb/sdb1/partition"), "1").unwrap();
        let with = |rotational: &str, bytes: &str| {
            fs::write(queue.join("rotational"), rotational).unwrap();
            fs::write(queue.join("write_zeroes_max_bytes"), bytes).unwrap();
            PunchHole::by_queue(&queue_of(&dir.path().join("sdb/sdb1")))
        };
        assert_eq!(with("0\n", "65536\n"), PunchHole::Zero);
        assert_eq!(with("0\n", "0\n"), PunchHole::Refuse);
        assert_eq!(with("1\n", "65536\n"), PunchHole::Refuse);
        assert_eq!(PunchHole::by_queue(&dir.path().join("none")), PunchHole::Refuse);
    }
}
