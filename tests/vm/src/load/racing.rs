//! Reads that the kernel's bcache fails although all is well.
//!
//! It fails a read that finds both dirty data and clean data whose bucket is reused meanwhile, and counts it. In small
//! caches that happens now and then, and says nothing about what is on the devices: such a read is asked again, and each that
//! is must have been counted. What else fails stays failed. Devices that no kernel's bcache serves have no such count.

use std::io;

use rustix::io::Errno;

use super::target::Target;

/// A device whose reads may race.
pub struct Racing<T, C> {
    target: T,
    /// How many reads have raced, of all devices since the kernel came up.
    count: C,
}

impl<T: Target, C: Fn() -> u64> Racing<T, C> {
    /// `count` says how many reads have raced.
    pub fn new(target: T, count: C) -> Racing<T, C> {
        Racing { target, count }
    }
}

impl<T: Target, C: Fn() -> u64> Target for Racing<T, C> {
    fn read(&mut self, sector: u64, sectors: u32) -> io::Result<Vec<u8>> {
        let mut before = (self.count)();
        loop {
            let failure = match self.target.read(sector, sectors) {
                Err(e) if e.raw_os_error() == Some(Errno::IO.raw_os_error()) => e,
                other => return other,
            };
            let now = (self.count)();
            if now <= before {
                return Err(failure);
            }
            before = now;
        }
    }

    fn write(&mut self, sector: u64, bytes: &[u8]) -> io::Result<()> {
        self.target.write(sector, bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.target.flush()
    }
}

/// The count of this machine's kernel.
pub fn counted_by_the_kernel() -> u64 {
    let Ok(sets) = std::fs::read_dir("/sys/fs/bcache") else { return 0 };
    let count = |set: std::fs::DirEntry| {
        let text = std::fs::read_to_string(set.path().join("internal/cache_read_races")).ok()?;
        text.trim().parse::<u64>().ok()
    };
    sets.flatten().filter_map(count).sum()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Fails with these errors, the last one first, then answers.
    struct Failing(Vec<Errno>);

    impl Target for Failing {
        fn read(&mut self, _: u64, _: u32) -> io::Result<Vec<u8>> {
            self.0.pop().map_or_else(|| Ok(vec![7]), |e| Err(e.into()))
        }

        fn write(&mut self, _: u64, _: &[u8]) -> io::Result<()> {
            Err(Errno::IO.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Err(Errno::IO.into())
        }
    }

    /// A device that fails so, and a kernel that counts `races` of that.
    fn reads(failures: &[Errno], races: u64) -> io::Result<Vec<u8>> {
        let asked = Cell::new(0);
        let count = || {
            let before = asked.replace(asked.get() + 1);
            races.min(before)
        };
        Racing::new(Failing(failures.to_vec()), count).read(0, 1)
    }

    #[test]
    fn only_what_the_kernel_counted_is_asked_again() {
        assert!(reads(&[], 0).is_ok());
        assert!(reads(&[Errno::IO], 1).is_ok());
        assert!(reads(&[Errno::IO, Errno::IO], 2).is_ok());
        assert!(reads(&[Errno::IO], 0).is_err());
        assert!(reads(&[Errno::IO, Errno::IO], 1).is_err());
        assert!(reads(&[Errno::NODEV], 1).is_err());
    }

    #[test]
    fn writes_and_flushes_fail_at_once() {
        let mut target = Racing::new(Failing(Vec::new()), || 1);
        assert!(target.write(0, &[0]).is_err() && target.flush().is_err());
    }
}
