//! Whether the cache device is so busy that large requests had better go to the backing device.
//!
//! Owns the congestion level of a cache set (runtime semantics 4.2). Latencies of cache-device I/O
//! above a threshold raise it, every millisecond and every fast completion lowers it, and from the
//! level follows a request size above which requests bypass the cache. All times are in units of
//! 1024 ns ("microseconds") and 1024 of those ("milliseconds"), as the kernel has it.
//!
//! *Invariant:* the level is in `-1024..=0`; 0 is "not congested". *Must not know:* requests, and
//! which I/O was observed.

use format::Sectors;
use io::Nanos;

/// Depth of the congestion level (runtime semantics 4.2).
const DEPTH: i64 = 1024;
/// Bits to shift nanoseconds by for the unit of 1024 ns, and that for the unit of 1024 · 1024 ns.
const UNIT_SHIFT: u32 = 10;

/// What kind of cache-device I/O was observed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// A read.
    Read,
    /// A write.
    Write,
}

/// The congestion level of a cache set.
#[derive(Clone, Debug)]
pub struct Congestion {
    read_threshold: u64,
    write_threshold: u64,
    /// When the last slow I/O completed, in units of 1024 ns.
    last_slow: i64,
    /// `-1024..=0`.
    level: i64,
}

impl Congestion {
    /// Not congested; thresholds in units of 1024 ns (`congested_read_threshold_us` and
    /// `congested_write_threshold_us`), 0 to ignore that kind of I/O.
    pub fn new(read_threshold_us: u32, write_threshold_us: u32) -> Congestion {
        let mut c = Congestion { read_threshold: 0, write_threshold: 0, last_slow: 0, level: 0 };
        c.set_thresholds(read_threshold_us, write_threshold_us);
        c
    }

    /// Takes over changed thresholds; the level stays.
    pub fn set_thresholds(&mut self, read_threshold_us: u32, write_threshold_us: u32) {
        self.read_threshold = u64::from(read_threshold_us);
        self.write_threshold = u64::from(write_threshold_us);
    }

    /// Takes note that a cache-device I/O (data insert, hit, move or btree write) completed at `now`
    /// and took `latency`.
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
        let room = level + DEPTH;
        let scaled = if room > 0 { fractional_exponent(room) } else { room };
        let limit = scaled - i64::from(random.count_ones());
        Some(Sectors(u64::try_from(limit).unwrap_or(0).max(1)))
    }
}

/// `now` in units of 1024 ns. 64 bits of nanoseconds leave 54, so the sign bit is free.
fn units(now: Nanos) -> i64 {
    (now.0 >> UNIT_SHIFT) as i64
}

/// About `2^(x/64)`, linear between the powers (runtime semantics 4.2): 1 for 0, 65 024 for 1023.
fn fractional_exponent(x: i64) -> i64 {
    ((64 + x % 64) << (x / 64)) >> 6
}
