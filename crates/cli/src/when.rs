//! Times in options and output: moments in UTC, and durations.
//!
//! Owns the conversion between milliseconds since 1970 and dates. UTC, because the files of time zones need a library, and
//! because the times of a daemon on another host would be in the zone of the wrong host. Must not know what happened.

use std::fmt;
use std::str::FromStr;

/// A moment or a time before now, as an option.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Since {
    /// Milliseconds since 1970.
    Moment(u64),
    /// Milliseconds before now.
    Before(u64),
}

/// What [`Since`] accepts.
const FORMS: &str = "expected a time in UTC, such as 2026-11-25T14:05:00Z or 2026-11-25, or a duration, such as 90s, 15m, 2h or 7d";

const DAY_MS: u64 = 86_400_000;

impl FromStr for Since {
    type Err = String;

    fn from_str(text: &str) -> Result<Since, String> {
        duration(text).map(Since::Before).or_else(|| moment(text).map(Since::Moment)).ok_or(FORMS.into())
    }
}

/// A number with a unit of time, in milliseconds.
fn duration(text: &str) -> Option<u64> {
    let units = [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000), ("d", DAY_MS), ("w", 7 * DAY_MS)];
    units.iter().find_map(|(unit, ms)| {
        let number = text.strip_suffix(unit)?.trim_end();
        let plain = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
        number.parse::<u64>().ok().filter(|_| plain)?.checked_mul(*ms)
    })
}

/// A date with or without a time of day, in milliseconds since 1970.
fn moment(text: &str) -> Option<u64> {
    let text = text.strip_suffix('Z').unwrap_or(text);
    let (date, time) = text.split_once(['T', ' ']).unwrap_or((text, "00:00:00"));
    let [year, month, day] = numbers(date, '-')?;
    let time = if time.matches(':').count() == 1 { format!("{time}:00") } else { time.to_owned() };
    let (time, millis) = time.split_once('.').unwrap_or((&time, "0"));
    let millis: u64 = format!("{millis:0<3}").get(..3)?.parse().ok()?;
    let [hour, minute, second] = numbers(time, ':')?;
    let fits =
        (1970..=9999).contains(&year) && (1..=12).contains(&month) && hour < 24 && minute < 60 && second < 61;
    if !fits || day < 1 || day > days_of(year, month) {
        return None;
    }
    let seconds = days_before(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second;
    Some(seconds * 1000 + millis)
}

/// Three numbers of digits.
fn numbers(text: &str, between: char) -> Option<[u64; 3]> {
    let mut parts = text.split(between).map(|part| {
        let plain = (1..=4).contains(&part.len()) && part.bytes().all(|b| b.is_ascii_digit());
        part.parse::<u64>().ok().filter(|_| plain)
    });
    let three = [parts.next()??, parts.next()??, parts.next()??];
    parts.next().is_none().then_some(three)
}

const fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

const fn days_of(year: u64, month: u64) -> u64 {
    match month {
        2 if is_leap(year) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// The days from 1970-01-01 to a date of a year from 1970 on.
fn days_before(year: u64, month: u64, day: u64) -> u64 {
    let leap_years = |year: u64| year / 4 - year / 100 + year / 400;
    let years = (year - 1970) * 365 + leap_years(year - 1) - leap_years(1969);
    years + (1..month).map(|m| days_of(year, m)).sum::<u64>() + day - 1
}

/// A moment as text, to the second, in UTC.
pub(crate) struct Utc(
    /// Milliseconds since 1970.
    pub(crate) u64,
);

impl fmt::Display for Utc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut days, seconds) = (self.0 / DAY_MS, self.0 % DAY_MS / 1000);
        // A whole cycle of the calendar has 400 years and 146097 days, so the loops are short for every number.
        let mut year = 1970 + days / 146_097 * 400;
        days %= 146_097;
        while days >= 365 + u64::from(is_leap(year)) {
            days -= 365 + u64::from(is_leap(year));
            year += 1;
        }
        let mut month = 1;
        while days >= days_of(year, month) {
            days -= days_of(year, month);
            month += 1;
        }
        let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
        write!(f, "{year:04}-{month:02}-{:02}T{hour:02}:{minute:02}:{second:02}Z", days + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_moments_or_durations() {
        let of = |text: &str| text.parse::<Since>();
        for (text, ms) in
            [("90s", 90_000), ("15m", 900_000), ("2h", 7_200_000), ("7d", 604_800_000), ("5ms", 5)]
        {
            assert_eq!(of(text), Ok(Since::Before(ms)), "{text}");
        }
        // `date -u -d 2026-11-25T14:05:00 +%s`
        let noon = 1_795_615_500_000;
        for text in
            ["2026-11-25T14:05:00Z", "2026-11-25 14:05", "2026-11-25T14:05:00", "2026-11-25T14:05:00.0Z"]
        {
            assert_eq!(of(text), Ok(Since::Moment(noon)), "{text}");
        }
        assert_eq!(of("1970-01-01"), Ok(Since::Moment(0)));
        assert_eq!(of("2024-02-29"), Ok(Since::Moment(1_709_164_800_000)));
        for text in [
            "",
            "s",
            "5",
            "-5s",
            "5 years",
            "2026-13-01",
            "2026-02-29",
            "2026-11-25T24:00",
            "1969-12-31",
            "+5s",
        ] {
            assert!(of(text).is_err(), "{text}");
        }
    }

    #[test]
    fn moments_as_text() {
        assert_eq!(Utc(1_795_615_500_999).to_string(), "2026-11-25T14:05:00Z");
        assert_eq!(Utc(0).to_string(), "1970-01-01T00:00:00Z");
        assert!(Utc(u64::MAX).to_string().ends_with('Z'));
    }

    #[test]
    fn a_moment_that_is_printed_is_read_back() {
        // The step is a hundred days and some seconds; the last second is that of the year 9999.
        for seconds in (0u64..253_402_300_800).step_by(8_641_313).chain([951_782_400, 253_402_300_799]) {
            let text = Utc(seconds * 1000).to_string();
            assert_eq!(text.parse(), Ok(Since::Moment(seconds * 1000)), "{text}");
        }
    }
}
