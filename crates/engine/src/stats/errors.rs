//! Counts of device errors, and the limit at which a device is disabled.
//!
//! Owns the error count of a cache device, which decays with later I/O (semantics section 14.2), and that of a backing
//! device, which does not (semantics section 14.1). Must not know what disabling a device means.

/// Errors of a cache device are counted in units of 2^-20 (semantics section 14.2).
const ERROR_SHIFT: u32 = 20;
/// Each decay multiplies a count by 127/128; 88 decays halve it (semantics section 14.2).
const DECAY_NUMERATOR: u64 = 127;
const DECAY_DENOMINATOR: u64 = 128;
/// The number of decays in a half-life (semantics section 14.2).
pub const DECAYS_PER_HALFLIFE: u32 = 88;

/// The verdict on the result of an I/O.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ErrorVerdict {
    /// The I/O succeeded.
    Fine,
    /// The I/O failed, and the number of errors is below the limit.
    Tolerated,
    /// The I/O failed, and the limit is reached: the device must be disabled.
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

    /// Records an I/O. `limit` is `io_error_limit`, `halflife` is `io_error_halflife` in I/Os; below 88 errors never
    /// decay.
    pub fn observe(&mut self, failed: bool, limit: u32, halflife: u32) -> ErrorVerdict {
        let period = halflife / DECAYS_PER_HALFLIFE;
        if period > 0 {
            self.ios = self.ios.saturating_add(1);
            // The loop runs more than once only after the half-life was lowered.
            while self.ios > period && self.scaled > 0 {
                self.ios -= period;
                let decayed = u128::from(self.scaled) * u128::from(DECAY_NUMERATOR);
                self.scaled = u64::try_from(decayed / u128::from(DECAY_DENOMINATOR)).unwrap_or(u64::MAX);
            }
            // Without errors there is nothing to decay, and only the position in the period matters.
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

    /// Clears all counts, as `clear_stats` of the cache device does.
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

    /// Records a failed request; read-ahead requests do not count. `limit` is `io_error_limit`.
    pub fn failed(&mut self, readahead: bool, limit: u32) -> ErrorVerdict {
        if readahead {
            return ErrorVerdict::Tolerated;
        }
        self.errors = self.errors.saturating_add(1);
        if self.errors >= u64::from(limit) { ErrorVerdict::LimitReached } else { ErrorVerdict::Tolerated }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_eighth_error_is_too_much() {
        let mut e = CacheErrors::new();
        for n in 1..=7 {
            assert_eq!(e.observe(true, 8, 0), ErrorVerdict::Tolerated);
            for _ in 0..10_000 {
                assert_eq!(e.observe(false, 8, 0), ErrorVerdict::Fine);
            }
            assert_eq!(e.errors(), n, "without a half-life they stay");
        }
        assert_eq!(e.observe(true, 8, 0), ErrorVerdict::LimitReached);
        e.clear();
        assert_eq!((e.errors(), e.observe(true, 0, 0)), (0, ErrorVerdict::LimitReached));
    }

    #[test]
    fn errors_fade_after_every_88th_of_the_half_life() {
        let mut e = CacheErrors::new();
        e.observe(true, 8, 880);
        for _ in 0..9 {
            e.observe(false, 8, 880);
        }
        assert_eq!(e.scaled, 1 << 20, "10 I/Os");
        e.observe(false, 8, 880);
        assert_eq!(e.scaled, (1 << 20) * 127 / 128, "and one more");
        for _ in 0..10 {
            e.observe(false, 8, 880);
        }
        assert_eq!(e.scaled, (1 << 20) * 127 / 128 * 127 / 128);
    }

    #[test]
    fn after_the_half_life_errors_count_half() {
        let mut e = CacheErrors::new();
        for _ in 0..1000 {
            e.observe(true, u32::MAX, 0);
        }
        for _ in 0..88_000 + 1 {
            e.observe(false, u32::MAX, 88_000);
        }
        // (127/128)^88 is 0.5014.
        assert_eq!(e.errors(), 501);
    }

    #[test]
    fn a_half_life_that_shrinks_catches_up_quickly() {
        let mut e = CacheErrors::new();
        e.observe(true, 8, u32::MAX);
        e.ios = u32::MAX - 1;
        assert_eq!(e.observe(false, 8, 88), ErrorVerdict::Fine);
        assert_eq!((e.scaled, e.ios), (0, 1));
        assert_eq!(e.observe(true, 8, 87), ErrorVerdict::Tolerated, "below 88: none");
    }

    proptest! {
        /// Compares the count with a loop that decays after each period of I/Os.
        #[test]
        fn errors_fade_by_the_period(
            steps in prop::collection::vec((prop::bool::weighted(0.3), 0u32..5, 0u8..8), 1..400)
        ) {
            let mut e = CacheErrors::new();
            let (mut scaled, mut ios, mut period) = (0u64, 0u32, 3);
            for (failed, limit, change) in steps {
                if change < 5 {
                    period = u32::from(change);
                }
                let halflife = period * 88 + 87;
                if period > 0 {
                    ios += 1;
                    while ios > period {
                        ios -= period;
                        scaled = scaled * 127 / 128;
                    }
                }
                scaled += u64::from(failed) << 20;
                let verdict = match (failed, scaled >> 20 >= u64::from(limit)) {
                    (false, _) => ErrorVerdict::Fine,
                    (true, false) => ErrorVerdict::Tolerated,
                    (true, true) => ErrorVerdict::LimitReached,
                };
                prop_assert_eq!(e.observe(failed, limit, halflife), verdict);
                prop_assert_eq!((e.scaled, e.ios, e.errors()), (scaled, ios, scaled >> 20));
            }
        }
    }

    #[test]
    fn backing_errors_stay_and_readahead_does_not_count() {
        let mut e = BackingErrors::new();
        for _ in 0..100 {
            assert_eq!(e.failed(true, 64), ErrorVerdict::Tolerated);
        }
        for _ in 0..63 {
            assert_eq!(e.failed(false, 64), ErrorVerdict::Tolerated);
        }
        assert_eq!(e.failed(false, 64), ErrorVerdict::LimitReached);
        assert_eq!(e.errors(), 64);
    }
}
