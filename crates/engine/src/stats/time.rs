//! The average period and duration of events of one kind.
//!
//! Owns the averages behind `btree_gc`, `btree_split`, `btree_sort` and `btree_read`
//! (semantics section 13): exponentially weighted, the newest event counting 1/8. Must not know what is
//! timed; the times come from the caller.

use io::Nanos;

/// The newest value has one part in this many of an average (semantics section 13).
const WEIGHT: u64 = 8;
/// Averages have this many more bits than are shown.
const FRACTION_BITS: u32 = 8;

/// The unit in which a time is shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TimeUnit {
    /// Seconds, `sec`.
    Seconds,
    /// Milliseconds, `ms`.
    Millis,
    /// Microseconds, `us`.
    Micros,
}

impl TimeUnit {
    /// Name at the end of an attribute's name.
    pub const fn name(self) -> &'static str {
        match self {
            TimeUnit::Seconds => "sec",
            TimeUnit::Millis => "ms",
            TimeUnit::Micros => "us",
        }
    }

    /// `span` in this unit, rounded down.
    pub const fn of(self, span: Nanos) -> u64 {
        match self {
            TimeUnit::Seconds => span.0 / 1_000_000_000,
            TimeUnit::Millis => span.0 / 1_000_000,
            TimeUnit::Micros => span.0 / 1_000,
        }
    }
}

/// Averages over the events of one kind.
#[derive(Clone, Debug, Default)]
pub struct TimeStats {
    average_duration: u64,
    average_period: Option<u64>,
    max_duration: Nanos,
    last: Option<Nanos>,
}

impl TimeStats {
    /// Makes averages without events.
    pub fn new() -> TimeStats {
        TimeStats::default()
    }

    /// Records an event that lasted from `start` to `end`.
    pub fn record(&mut self, start: Nanos, end: Nanos) {
        let duration = end.since(start);
        self.max_duration = self.max_duration.max(duration);
        match self.last {
            None => self.average_duration = scaled(duration),
            Some(last) => {
                self.average_duration = average(self.average_duration, duration);
                let period = end.since(last);
                self.average_period = Some(match self.average_period {
                    None => scaled(period),
                    Some(old) => average(old, period),
                });
            }
        }
        self.last = Some(end);
    }

    /// Average duration of an event.
    pub fn average_duration(&self) -> Nanos {
        Nanos(self.average_duration >> FRACTION_BITS)
    }

    /// Average time between the ends of two events; zero before the second one. (The kernel calls this
    /// `average_frequency`.)
    pub fn average_period(&self) -> Nanos {
        Nanos(self.average_period.unwrap_or_default() >> FRACTION_BITS)
    }

    /// Longest duration of an event.
    pub fn max_duration(&self) -> Nanos {
        self.max_duration
    }

    /// Time since the last event; `None` if there was none (shown as -1).
    pub fn since_last(&self, now: Nanos) -> Option<Nanos> {
        self.last.map(|last| now.since(last))
    }

    /// The four attributes that show these figures (semantics section 16.3): the end of the name after
    /// `btree_gc_` and the like, the unit that belongs behind it, and the value. `frequency` is the unit
    /// of average_frequency and last, `duration` that of the other two.
    pub fn attributes(
        &self,
        frequency: TimeUnit,
        duration: TimeUnit,
        now: Nanos,
    ) -> [(&'static str, TimeUnit, i64); 4] {
        let shown = |unit: TimeUnit, span: Nanos| i64::try_from(unit.of(span)).unwrap_or(i64::MAX);
        [
            ("average_frequency", frequency, shown(frequency, self.average_period())),
            ("average_duration", duration, shown(duration, self.average_duration())),
            ("max_duration", duration, shown(duration, self.max_duration())),
            ("last", frequency, self.since_last(now).map_or(-1, |span| shown(frequency, span))),
        ]
    }

    /// Clears all averages.
    pub fn clear(&mut self) {
        *self = TimeStats::default();
    }
}

fn scaled(span: Nanos) -> u64 {
    span.0.saturating_mul(1 << FRACTION_BITS)
}

fn average(old: u64, new: Nanos) -> u64 {
    let sum = u128::from(old) * u128::from(WEIGHT - 1) + u128::from(scaled(new));
    u64::try_from(sum / u128::from(WEIGHT)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(n: u64) -> Nanos {
        Nanos::from_ms(n)
    }

    #[test]
    fn averages_by_hand() {
        let mut t = TimeStats::new();
        assert_eq!(t.since_last(ms(5)), None);
        assert_eq!(t.attributes(TimeUnit::Seconds, TimeUnit::Millis, ms(5))[3].2, -1);
        t.record(ms(1000), ms(1008));
        assert_eq!((t.average_duration(), t.average_period()), (ms(8), ms(0)), "the first sets it");
        t.record(ms(2000), ms(2016));
        // (8 * 7 + 16) / 8 = 9; the ends are 1008 ms apart.
        assert_eq!((t.average_duration(), t.average_period()), (ms(9), ms(1008)));
        t.record(ms(4024), ms(4025));
        // (9 * 7 + 1) / 8 = 8; (1008 * 7 + 2009) / 8 = 1133.125.
        assert_eq!((t.average_duration(), t.average_period()), (ms(8), Nanos(1_133_125_000)));
        assert_eq!((t.max_duration(), t.since_last(ms(5025))), (ms(16), Some(ms(1000))));
        let shown = t.attributes(TimeUnit::Seconds, TimeUnit::Micros, ms(5025));
        assert_eq!(
            shown.map(|(name, unit, value)| format!("{name}_{}={value}", unit.name())),
            ["average_frequency_sec=1", "average_duration_us=8000", "max_duration_us=16000", "last_sec=1",]
        );
        t.clear();
        assert_eq!(t.since_last(ms(9000)), None);
    }

    #[test]
    fn units_round_down() {
        for (span, seconds, millis, micros) in [
            (0, 0, 0, 0),
            (999, 0, 0, 0),
            (1000, 0, 0, 1),
            (1_000_999, 0, 1, 1000),
            (999_999_999, 0, 999, 999_999),
            (1_000_000_000, 1, 1000, 1_000_000),
            (u64::MAX, 18_446_744_073, 18_446_744_073_709, 18_446_744_073_709_551),
        ] {
            let of = [TimeUnit::Seconds, TimeUnit::Millis, TimeUnit::Micros].map(|unit| unit.of(Nanos(span)));
            assert_eq!(of, [seconds, millis, micros], "{span} ns");
        }
    }

    /// Eight events of 8 ns after one of 0 ns: each adds an eighth of the difference, rounded to 1/256.
    #[test]
    fn averages_keep_fractions() {
        let mut t = TimeStats::new();
        t.record(Nanos(0), Nanos(0));
        let mut expected = 0;
        for n in 1..9 {
            t.record(Nanos(100 * n), Nanos(100 * n + 8));
            expected = (expected * 7 + 8 * 256) / 8;
            assert_eq!(t.average_duration(), Nanos(expected / 256), "{n}");
        }
        // The ends are first 108 and then 100 apart.
        assert_eq!((t.average_period().0 / 10, t.max_duration()), (10, Nanos(8)));
    }

    #[test]
    fn extremes_saturate() {
        let mut t = TimeStats::new();
        t.record(Nanos(0), Nanos(u64::MAX));
        t.record(Nanos(9), Nanos(3));
        t.record(Nanos(0), Nanos(u64::MAX));
        assert_eq!(t.max_duration(), Nanos(u64::MAX));
        assert!(t.average_duration() <= Nanos(u64::MAX >> FRACTION_BITS));
        assert_eq!(TimeUnit::Millis.of(Nanos(1_999_999)), 1);
    }
}
