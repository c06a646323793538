//! Times in options and output: moments in UTC, and durations.
//!
//! Owns the forms that options accept. Times are in UTC, because the daemon can be on a host in another time zone. Must not
//! know what happened.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A moment or a time before now, as an option.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Since {
    /// Milliseconds since 1970.
    Moment(u64),
    /// Milliseconds before now.
    Before(u64),
}

/// The reason why a text is no [`Since`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "expected a time in UTC, such as 2026-11-25T14:05:00Z or 2026-11-25, or a duration, such as 90s, 15m, 2h or 7d"
)]
pub(crate) struct NoTime;

fn milliseconds(time: Duration) -> Option<u64> {
    u64::try_from(time.as_millis()).ok()
}

/// A date with or without a time of day, in milliseconds since 1970.
fn moment(text: &str) -> Option<u64> {
    let forms = [text.to_owned(), format!("{text}:00"), format!("{text} 00:00:00")];
    let time: SystemTime = forms.iter().find_map(|form| humantime::parse_rfc3339_weak(form).ok())?;
    milliseconds(time.duration_since(UNIX_EPOCH).ok()?)
}

impl FromStr for Since {
    type Err = NoTime;

    fn from_str(text: &str) -> Result<Since, NoTime> {
        let duration = || humantime::parse_duration(text).ok().and_then(milliseconds);
        moment(text).map(Since::Moment).or_else(|| duration().map(Since::Before)).ok_or(NoTime)
    }
}

/// The longest interval.
const MOST_SECONDS: u64 = 3600;

/// The reason why a text is no number of seconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("expected whole seconds from 1 to {MOST_SECONDS}, such as 5, 5s or 2min")]
pub(crate) struct NoSeconds;

/// The reason why a text is no time limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("expected whole seconds, such as 0, 5, 5s or 2min")]
pub(crate) struct NoTimeout;

fn whole_seconds(text: &str) -> Option<u64> {
    let duration = || humantime::parse_duration(text).ok().filter(|d| d.subsec_nanos() == 0);
    text.parse().ok().or_else(|| Some(duration()?.as_secs()))
}

/// Reads an interval in whole seconds, also as a duration with a unit.
pub(crate) fn seconds(text: &str) -> Result<u64, NoSeconds> {
    whole_seconds(text).filter(|s| (1..=MOST_SECONDS).contains(s)).ok_or(NoSeconds)
}

/// Reads a time limit in whole seconds, also as a duration with a unit. Zero is no wait.
pub(crate) fn timeout(text: &str) -> Result<u64, NoTimeout> {
    whole_seconds(text).ok_or(NoTimeout)
}

/// The last millisecond of the year 9999, the last one with a date of four digits.
const LAST_MS: u64 = 253_402_300_799_999;

/// A moment as text, to the second, in UTC.
pub(crate) struct Utc(
    /// Milliseconds since 1970; later ones than the year 9999 are shown as its end.
    pub(crate) u64,
);

impl fmt::Display for Utc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = UNIX_EPOCH + Duration::from_millis(self.0.min(LAST_MS));
        humantime::format_rfc3339_seconds(time).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_whole() {
        for (text, seconds) in
            [("1", 1), ("3600", 3600), ("2s", 2), ("5min", 300), ("1h", 3600), ("2000ms", 2)]
        {
            assert_eq!(super::seconds(text), Ok(seconds), "{text}");
        }
        for bad in ["0.1", "0", "100ms", "3601", "2h", "-1", "", "soon"] {
            assert_eq!(super::seconds(bad), Err(NoSeconds), "{bad:?}");
        }
        assert!(NoSeconds.to_string().contains("such as 5"));
        for (text, seconds) in [("0", 0), ("86400", 86_400), ("2h", 7200), ("0s", 0)] {
            assert_eq!(timeout(text), Ok(seconds), "{text}");
        }
        for bad in ["0.5", "-1", "soon", ""] {
            assert_eq!(timeout(bad), Err(NoTimeout), "{bad:?}");
        }
    }

    #[test]
    fn options_are_moments_or_durations() {
        let of = |text: &str| text.parse::<Since>();
        for (text, ms) in
            [("90s", 90_000), ("15m", 900_000), ("2h", 7_200_000), ("7d", 604_800_000), ("5ms", 5)]
        {
            assert_eq!(of(text), Ok(Since::Before(ms)), "{text}");
        }
        // `date -u -d 2026-11-25T14:05:00 +%s`
        let afternoon = 1_795_615_500_000;
        for text in
            ["2026-11-25T14:05:00Z", "2026-11-25 14:05", "2026-11-25T14:05:00", "2026-11-25T14:05:00.0Z"]
        {
            assert_eq!(of(text), Ok(Since::Moment(afternoon)), "{text}");
        }
        assert_eq!(of("1970-01-01"), Ok(Since::Moment(0)));
        assert_eq!(of("2024-02-29"), Ok(Since::Moment(1_709_164_800_000)));
        for text in ["", "s", "5", "-5s", "2026-13-01", "2026-02-29", "2026-11-25T24:00", "1969-12-31", "+5s"]
        {
            assert_eq!(of(text), Err(NoTime), "{text}");
        }
    }

    /// The milliseconds come from a daemon, which may be on another host.
    #[test]
    fn every_number_has_a_text() {
        assert_eq!(Utc(1_795_615_500_999).to_string(), "2026-11-25T14:05:00Z");
        assert_eq!(Utc(0).to_string(), "1970-01-01T00:00:00Z");
        assert_eq!(Utc(u64::MAX).to_string(), "9999-12-31T23:59:59Z");
    }
}
