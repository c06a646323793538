//! The congestion of the cache device, which makes long streams bypass the cache.
//!
//! Owns the congestion level of a cache set (semantics section 4.2). A latency of the cache device above a threshold
//! raises the congestion; every millisecond and every fast completion lowers it. The level determines the stream length
//! above which requests bypass the cache. All times are in units of 1024 ns ("microseconds") and 1024 of those
//! ("milliseconds"), as in the kernel.
//!
//! *Invariant:* the level is in `-1024..=0`; 0 means that the device is not congested. *Must not know:* requests, and
//! which I/O was observed.

use format::Sectors;
use io::Nanos;

/// Depth of the congestion level (semantics section 4.2).
const DEPTH: i64 = 1024;
/// Bits to shift nanoseconds by for the unit of 1024 ns, and that for the unit of 1024 · 1024 ns.
const UNIT_SHIFT: u32 = 10;

/// The kind of I/O to the cache device that was observed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// A read.
    Read,
    /// A write.
    Write,
}

/// The congestion level of a cache set.
#[derive(Clone, Default, Debug)]
pub struct Congestion {
    read_threshold: u64,
    write_threshold: u64,
    /// The time at which the last slow I/O completed, in units of 1024 ns.
    last_slow: i64,
    /// `-1024..=0`.
    level: i64,
}

impl Congestion {
    /// Makes the state of a device that is not congested. The thresholds are in units of 1024 ns
    /// (`congested_read_threshold_us` and `congested_write_threshold_us`); 0 ignores that kind of I/O.
    pub fn new(read_threshold_us: u32, write_threshold_us: u32) -> Congestion {
        let mut c = Congestion::default();
        c.set_thresholds(read_threshold_us, write_threshold_us);
        c
    }

    /// Sets the thresholds; the level stays.
    pub fn set_thresholds(&mut self, read_threshold_us: u32, write_threshold_us: u32) {
        self.read_threshold = u64::from(read_threshold_us);
        self.write_threshold = u64::from(write_threshold_us);
    }

    /// Records that an I/O to the cache device (insertion, hit, move or btree write) completed at `now` after
    /// `latency`.
    pub fn observe_latency(&mut self, direction: Direction, latency: Nanos, now: Nanos) {
        let threshold = match direction {
            Direction::Read => self.read_threshold,
            Direction::Write => self.write_threshold,
        };
        if threshold == 0 {
            return;
        }
        let us = latency.0 >> UNIT_SHIFT;
        if us > threshold {
            let ms = i64::try_from(us >> UNIT_SHIFT).unwrap_or(DEPTH);
            self.last_slow = units(now);
            self.level -= ms.min(DEPTH + self.level);
        } else if self.level < 0 {
            self.level += 1;
        }
    }

    /// Whether the level is 0, so that there is no limit at any time.
    pub fn is_calm(&self) -> bool {
        self.level == 0
    }

    /// The stream length from which requests bypass the cache, or `None` if the cache is not congested.
    /// `random` is any 32 random bits: they blur the limit by 16 sectors on average.
    pub fn limit(&self, now: Nanos, random: u32) -> Option<Sectors> {
        if self.read_threshold == 0 && self.write_threshold == 0 {
            return None;
        }
        let since = units(now) - self.last_slow;
        if since < 0 {
            return None;
        }
        let level = (since >> UNIT_SHIFT) + self.level;
        if level >= 0 {
            return None;
        }
        let limit = fractional_exponent(level + DEPTH) - i64::from(random.count_ones());
        Some(Sectors(limit.max(1).unsigned_abs()))
    }
}

/// `now` in units of 1024 ns: 54 bits, so that the sign bit is free.
fn units(now: Nanos) -> i64 {
    (now.0 >> UNIT_SHIFT) as i64
}

/// About `2^(x/64)`, linear between the powers (semantics section 4.2): 1 for 0, 65 024 for 1023.
fn fractional_exponent(x: i64) -> i64 {
    ((64 + x % 64) << (x / 64)) >> 6
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// `n` units of 1024 ns.
    const fn us(n: u64) -> Nanos {
        Nanos(n << 10)
    }

    /// `n` units of 1024 · 1024 ns.
    const fn ms(n: u64) -> Nanos {
        Nanos(n << 20)
    }

    fn kernel_default() -> Congestion {
        Congestion::new(2000, 20000)
    }

    #[test]
    fn the_exponent_is_the_kernels() {
        let expected = [(0, 1), (1, 1), (63, 1), (64, 2), (96, 3), (128, 4), (512, 256), (1023, 65024)];
        for (x, y) in expected {
            assert_eq!(fractional_exponent(x), y, "{x}");
        }
    }

    #[test]
    fn a_slow_read_costs_its_milliseconds() {
        let mut c = kernel_default();
        c.observe_latency(Direction::Read, us(2000), ms(10));
        assert_eq!(c.level, 0, "at the threshold is not above it");
        c.observe_latency(Direction::Read, us(2001), ms(10));
        assert_eq!(c.level, -1, "2001 us are 1 ms and a bit");
        c.observe_latency(Direction::Write, us(20000), ms(10));
        assert_eq!(c.level, 0, "a fast write makes it good");
        c.observe_latency(Direction::Write, us(20001), ms(10));
        assert_eq!(c.level, -19);
        c.observe_latency(Direction::Read, Nanos(u64::MAX), ms(11));
        assert_eq!(c.level, -1024, "the bottom");
        c.observe_latency(Direction::Read, ms(5), ms(11));
        assert_eq!(c.level, -1024);
    }

    #[test]
    fn the_limit_recovers_by_a_unit_per_millisecond() {
        let mut c = kernel_default();
        assert_eq!(c.limit(ms(5), 0), None);
        c.observe_latency(Direction::Read, ms(512), ms(600));
        // -512 + 1024 = 512: 64 << 8 >> 6 = 256.
        assert_eq!(c.limit(ms(600), 0), Some(Sectors(256)));
        assert_eq!(c.limit(ms(600), 0xffff), Some(Sectors(240)), "16 random bits are set");
        // 100 - 512 + 1024 = 612 = 9 · 64 + 36: (64 + 36) << 9 >> 6 = 800.
        assert_eq!(c.limit(ms(700), 0), Some(Sectors(800)));
        // 511 - 512 + 1024 = 1023: the largest value.
        assert_eq!(c.limit(ms(1111), 0), Some(Sectors(65024)));
        assert_eq!(c.limit(ms(1112), 0), None, "512 ms later it is over");
        assert_eq!(c.limit(ms(599), 0), None, "time that goes back");
    }

    #[test]
    fn the_limit_is_one_sector_at_least() {
        let mut c = kernel_default();
        c.observe_latency(Direction::Write, ms(2000), ms(2000));
        assert_eq!(c.limit(ms(2000), 0), Some(Sectors(1)));
        assert_eq!(c.limit(ms(2000), u32::MAX), Some(Sectors(1)));
    }

    #[test]
    fn thresholds_of_zero_switch_tracking_off() {
        let mut c = Congestion::new(0, 20000);
        c.observe_latency(Direction::Read, ms(2000), ms(2000));
        assert_eq!(c.limit(ms(2000), 0), None);
        c.observe_latency(Direction::Write, ms(500), ms(2000));
        assert!(c.limit(ms(2000), 0).is_some());
        c.set_thresholds(0, 0);
        assert_eq!(c.limit(ms(2000), 0), None);
        c.set_thresholds(2000, 0);
        assert!(c.limit(ms(2000), 0).is_some(), "the level stays");
    }

    /// Slow requests of 2000 ms, and how the level returns: by one for each fast request and each millisecond.
    #[test]
    fn levels_by_hand() {
        let mut c = kernel_default();
        assert!(c.is_calm());
        c.observe_latency(Direction::Read, ms(3), ms(50));
        assert!(!c.is_calm());
        assert_eq!(c.level, -3);
        // 1021 = 15 * 64 + 61: (64 + 61) << 15 >> 6.
        assert_eq!(c.limit(ms(50), 0), Some(Sectors(64_000)));
        assert_eq!(c.limit(ms(50), 1), Some(Sectors(63_999)), "one random bit");
        assert_eq!(c.limit(ms(51), 0), Some(Sectors(64_512)));
        assert_eq!(c.limit(ms(52), 0), Some(Sectors(65_024)));
        assert_eq!(c.limit(ms(53), 0), None);
        assert_eq!(c.limit(Nanos(ms(53).0 - 1), 0), Some(Sectors(65_024)), "whole milliseconds");
        for level in [-2, -1, 0, 0] {
            c.observe_latency(Direction::Read, us(1), ms(50));
            assert_eq!(c.level, level);
            assert_eq!(c.is_calm(), level == 0);
        }
        // Only requests of one kind count, with the smallest threshold.
        let mut c = Congestion::new(1, 0);
        c.observe_latency(Direction::Write, ms(900), ms(50));
        assert!(c.is_calm(), "writes do not count");
        c.observe_latency(Direction::Read, us(1), ms(50));
        assert!(c.is_calm());
        c.observe_latency(Direction::Read, us(2), ms(50));
        assert!(c.is_calm(), "less than a millisecond");
        c.observe_latency(Direction::Read, ms(1), ms(50));
        assert_eq!(c.limit(ms(50), 0), Some(Sectors(65_024)));
        let mut c = Congestion::new(0, 1);
        c.observe_latency(Direction::Write, ms(1), ms(50));
        assert_eq!(c.limit(ms(50), 0), Some(Sectors(65_024)));
        // The lowest level: the limit is one sector, whatever the random bits are.
        c.observe_latency(Direction::Write, ms(1022), ms(50));
        assert_eq!((c.level, c.limit(ms(50), 0)), (-1023, Some(Sectors(1))));
        c.observe_latency(Direction::Write, ms(1), ms(50));
        assert_eq!(
            (c.level, c.limit(ms(50), 0), c.limit(ms(50), 7)),
            (-1024, Some(Sectors(1)), Some(Sectors(1)))
        );
        assert_eq!(c.limit(ms(50 + 64), 0), Some(Sectors(2)));
    }

    proptest! {
        #[test]
        fn the_level_and_the_limit_stay_in_range(
            events in prop::collection::vec((any::<bool>(), any::<u64>(), any::<u64>(), any::<u32>(), 0u32..64), 1..50)
        ) {
            let mut c = kernel_default();
            for (read, latency, now, random, shift) in events {
                let direction = if read { Direction::Read } else { Direction::Write };
                c.observe_latency(direction, Nanos(latency >> shift), Nanos(now));
                prop_assert!((-1024..=0).contains(&c.level));
                if let Some(limit) = c.limit(Nanos(now), random) {
                    prop_assert!((1..=65024).contains(&limit.0));
                }
            }
        }
    }
}
