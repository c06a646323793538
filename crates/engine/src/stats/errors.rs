//! Counting device errors up to the point where a device is given up.
//!
//! Owns the error counts of a cache device, which fade with the I/O that follows (runtime semantics
//! 14.2), and of a backing device, which do not (14.1). Must not know what giving up means.

/// Errors of a cache device are kept in units of 2^-20 (runtime semantics 14.2).
const ERROR_SHIFT: u32 = 20;
/// A count is multiplied by 127/128 each time; 88 times that is a half (runtime semantics 14.2).
const DECAY_NUMERATOR: u64 = 127;
const DECAY_DENOMINATOR: u64 = 128;
/// Decays per half-life (runtime semantics 14.2).
pub const DECAYS_PER_HALFLIFE: u32 = 88;

/// What to make of an I/O.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ErrorVerdict {
    /// It was fine.
    Fine,
    /// It failed, and the device has not failed too often yet.
    Tolerated,
    /// It failed, and the limit is reached: give the device up.
    LimitReached,
}

/// Errors of a cache device's data I/O.
#[derive(Clone, Debug, Default)]
pub struct CacheErrors {
    /// In units of 2^-20 errors.
    scaled: u64,
    /// I/Os since the last decay.
    ios: u32,
}

impl CacheErrors {
    /// No errors yet.
    pub fn new() -> CacheErrors {
        CacheErrors::default()
    }

    /// Errors, after decay, rounded down (`io_errors`).
    pub fn errors(&self) -> u64 {
        self.scaled >> ERROR_SHIFT
    }

    /// Takes note of an I/O. `limit` is `io_error_limit`, `halflife` is `io_error_halflife` in I/Os: below
    /// 88 errors never fade.
    pub fn observe(&mut self, failed: bool, limit: u32, halflife: u32) -> ErrorVerdict {
        let period = halflife / DECAYS_PER_HALFLIFE;
        if period > 0 {
            self.ios = self.ios.saturating_add(1);
            // More than once only after the half-life was lowered.
            while self.ios > period && self.scaled > 0 {
                self.ios -= period;
                let decayed = u128::from(self.scaled) * u128::from(DECAY_NUMERATOR);
                self.scaled = u64::try_from(decayed / u128::from(DECAY_DENOMINATOR)).unwrap_or(u64::MAX);
            }
            // Nothing to decay: only the phase matters.
            if self.ios > period {
                self.ios = (self.ios - 1) % period + 1;
            }
        }
        if !failed {
            return ErrorVerdict::Fine;
        }
        self.scaled = self.scaled.saturating_add(1 << ERROR_SHIFT);
        if self.errors() >= u64::from(limit) { ErrorVerdict::LimitReached } else { ErrorVerdict::Tolerated }
    }

    /// What `clear_stats` of the cache device does: no errors, nothing counted.
    pub fn clear(&mut self) {
        *self = CacheErrors::default();
    }
}

/// Errors of a backing device.
#[derive(Clone, Debug, Default)]
pub struct BackingErrors {
    errors: u64,
}

impl BackingErrors {
    /// No errors yet.
    pub fn new() -> BackingErrors {
        BackingErrors::default()
    }

    /// Errors so far (`io_errors`).
    pub fn errors(&self) -> u64 {
        self.errors
    }

    /// Takes note of a failed request; those that only read ahead do not count. `limit` is
    /// `io_error_limit`.
    pub fn failed(&mut self, readahead: bool, limit: u32) -> ErrorVerdict {
        if readahead {
            return ErrorVerdict::Tolerated;
        }
        self.errors = self.errors.saturating_add(1);
        if self.errors >= u64::from(limit) { ErrorVerdict::LimitReached } else { ErrorVerdict::Tolerated }
    }
}
