//! A series of samples at falling resolution: seconds, then steps of 10 s, then steps of 2 min.
//!
//! Owns the rule by which old samples are merged, and the bound of a series: at most 2040 samples, for a volume up to 360 kB in
//! memory and 240 kB in the file. Must not know what the columns mean, except that the high quantiles are merged to their maximum.

use std::collections::VecDeque;

use serde_json::{Map, Value, json};

/// The resolution of a part of a series.
pub(super) struct Resolution {
    /// Time that a sample covers.
    pub(super) step_ms: u64,
    /// Largest number of samples.
    pub(super) samples: usize,
}

/// The parts of a series, the newest first: 10 minutes, 2 hours, 24 hours.
pub(super) const RESOLUTIONS: [Resolution; 3] = [
    Resolution { step_ms: 1_000, samples: 600 },
    Resolution { step_ms: 10_000, samples: 720 },
    Resolution { step_ms: 120_000, samples: 720 },
];
/// Age at which a sample is dropped.
pub(super) const SPAN_MS: u64 = 24 * 3600 * 1000;

/// Samples of one resolution, in the order of time. A value that was not measured is NaN.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Part {
    pub(super) times_ms: VecDeque<u64>,
    /// The values of all samples: as many for each time as the series has columns.
    pub(super) values: VecDeque<f32>,
}

impl Part {
    fn push(&mut self, time_ms: u64, values: &[f32]) {
        self.times_ms.push_back(time_ms);
        self.values.extend(values);
    }

    fn pop_oldest(&mut self, width: usize) -> Option<(u64, Vec<f32>)> {
        let time_ms = self.times_ms.pop_front()?;
        Some((time_ms, self.values.drain(..width).collect()))
    }

    fn pop_newest(&mut self, width: usize) {
        self.times_ms.pop_back();
        self.values.truncate(self.values.len().saturating_sub(width));
    }

    /// Removes the oldest samples that lie in the same step of `step_ms`, and returns them as one.
    fn pop_step(&mut self, step_ms: u64, columns: &[String]) -> Option<(u64, Vec<f32>)> {
        let step = self.times_ms.front()? / step_ms;
        let mut rows = Vec::new();
        let mut last = 0;
        while self.times_ms.front().is_some_and(|time| time / step_ms == step) {
            let (time_ms, row) = self.pop_oldest(columns.len())?;
            last = time_ms;
            rows.push(row);
        }
        Some((last, merged(&rows, columns)))
    }
}

/// Merges samples: the maximum of quantiles of the slowest requests, so that no slow second is lost; the mean of all others.
fn merged(rows: &[Vec<f32>], columns: &[String]) -> Vec<f32> {
    let of_column = |(n, name): (usize, &String)| {
        let measured = rows.iter().filter_map(|row| row.get(n).copied()).filter(|value| !value.is_nan());
        if name.ends_with("_p95_us") || name.ends_with("_p99_us") {
            return measured.fold(f32::NAN, f32::max);
        }
        let (sum, count) = measured.fold((0.0, 0u32), |(sum, n), value| (sum + f64::from(value), n + 1));
        if count == 0 { f32::NAN } else { (sum / f64::from(count)) as f32 }
    };
    columns.iter().enumerate().map(of_column).collect()
}

/// The samples of a set, of a volume or of the host.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Series {
    pub(super) columns: Vec<String>,
    pub(super) parts: [Part; RESOLUTIONS.len()],
}

impl Series {
    /// Adds a sample. Samples of a later time are dropped: the clock was set back.
    pub(super) fn add(&mut self, time_ms: u64, sample: &[(&'static str, Option<f32>)]) {
        if !self.columns.iter().eq(sample.iter().map(|(name, _)| name)) {
            self.set_columns(sample.iter().map(|(name, _)| (*name).to_owned()).collect());
        }
        let width = self.columns.len();
        for part in &mut self.parts {
            while part.times_ms.back().is_some_and(|last| *last >= time_ms) {
                part.pop_newest(width);
            }
        }
        let values: Vec<f32> = sample.iter().map(|(_, value)| value.unwrap_or(f32::NAN)).collect();
        self.parts[0].push(time_ms, &values);
        self.merge_old();
        for part in &mut self.parts {
            while part.times_ms.front().is_some_and(|first| first.saturating_add(SPAN_MS) < time_ms) {
                part.pop_oldest(width);
            }
        }
    }

    /// Moves samples of full parts to the next part, and drops them from the last.
    fn merge_old(&mut self) {
        for (n, resolution) in RESOLUTIONS.iter().enumerate() {
            while self.parts[n].times_ms.len() > resolution.samples {
                match RESOLUTIONS.get(n + 1) {
                    Some(coarser) => {
                        let step = self.parts[n].pop_step(coarser.step_ms, &self.columns);
                        if let Some((time_ms, values)) = step {
                            self.parts[n + 1].push(time_ms, &values);
                        }
                    }
                    None => drop(self.parts[n].pop_oldest(self.columns.len())),
                }
            }
        }
    }

    /// Gives a series that another version has stored the present columns. New columns have no values.
    fn set_columns(&mut self, columns: Vec<String>) {
        let places: Vec<Option<usize>> =
            columns.iter().map(|name| self.columns.iter().position(|old| old == name)).collect();
        let width = self.columns.len();
        for part in &mut self.parts {
            let rows = 0..part.times_ms.len();
            let value =
                |row: usize, place: &Option<usize>| place.map_or(f32::NAN, |n| part.values[row * width + n]);
            part.values = rows.flat_map(|row| places.iter().map(move |place| value(row, place))).collect();
        }
        self.columns = columns;
    }

    /// Time of the newest sample.
    pub(super) fn last_ms(&self) -> Option<u64> {
        self.parts.iter().find_map(|part| part.times_ms.back().copied())
    }

    /// The values of a column in the samples of the last seconds after `since_ms`, the newest first.
    pub(super) fn recent(&self, column: &str, since_ms: u64) -> Vec<Option<f32>> {
        let Some(place) = self.columns.iter().position(|name| name == column) else { return Vec::new() };
        let seconds = &self.parts[0];
        let rows = (0..seconds.times_ms.len()).rev();
        rows.take_while(|row| seconds.times_ms[*row] > since_ms)
            .map(|row| seconds.values.get(row * self.columns.len() + place).copied())
            .map(|value| value.filter(|v| !v.is_nan()))
            .collect()
    }

    /// The samples after `since_ms` in columns of equal length, with `time_ms` and the time `step_ms` that each covers.
    pub(super) fn after(&self, since_ms: u64) -> Map<String, Value> {
        let width = self.columns.len();
        let (mut times, mut steps) = (Vec::new(), Vec::new());
        let mut values = vec![Vec::new(); width];
        for (part, resolution) in self.parts.iter().zip(&RESOLUTIONS).rev() {
            for (row, time_ms) in part.times_ms.iter().enumerate().filter(|(_, time)| **time > since_ms) {
                times.push(json!(time_ms));
                steps.push(json!(resolution.step_ms));
                for (n, column) in values.iter_mut().enumerate() {
                    column.push(number(part.values.get(row * width + n).copied()));
                }
            }
        }
        let mut columns = Map::new();
        columns.insert("time_ms".into(), Value::Array(times));
        columns.insert("step_ms".into(), Value::Array(steps));
        for (name, column) in self.columns.iter().zip(values) {
            columns.insert(name.clone(), Value::Array(column));
        }
        columns
    }
}

/// A number with one decimal, or without decimals if it is whole; null for NaN.
pub(super) fn number(value: Option<f32>) -> Value {
    let Some(value) = value.filter(|v| v.is_finite()) else { return Value::Null };
    let tenths = (f64::from(value) * 10.0).round();
    if tenths % 10.0 == 0.0 { json!((tenths / 10.0) as i64) } else { json!(tenths / 10.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(n: f32) -> Vec<(&'static str, Option<f32>)> {
        vec![("reads", Some(n)), ("read_p99_us", (n > 0.0).then_some(n)), ("none", None)]
    }

    fn numbers(columns: &Map<String, Value>, name: &str) -> Vec<Option<f64>> {
        columns[name].as_array().unwrap().iter().map(Value::as_f64).collect()
    }

    /// Two days of samples, one a second: the last ten minutes are there by the second, older ones in steps of ten seconds
    /// and of two minutes, nothing is older than 24 hours, and the number of samples has a bound.
    #[test]
    fn the_resolution_falls_with_the_age_and_a_day_is_there() {
        let mut series = Series::default();
        let begin = 1_700_000_000_000;
        let seconds = 2 * 86_400;
        for n in 0..seconds {
            // One slow request in a thousand seconds.
            let mut sample = sample(100.0);
            if n % 1000 == 0 {
                sample[1].1 = Some(9000.0);
            }
            series.add(begin + n * 1000, &sample);
        }
        let end = begin + (seconds - 1) * 1000;
        let all = series.after(0);
        let times = numbers(&all, "time_ms");
        assert!(
            times.is_sorted() && times.len() <= RESOLUTIONS.iter().map(|r| r.samples).sum(),
            "{}",
            times.len()
        );
        let oldest = end as f64 - times[0].unwrap();
        assert!((23.9 * 3.6e6..=24.0 * 3.6e6).contains(&oldest), "{oldest} ms");
        let steps = numbers(&all, "step_ms");
        for (time, step) in times.iter().zip(&steps) {
            let age = end as f64 - time.unwrap();
            let expected = if age < 590_000.0 {
                1000.0
            } else if age < 7_700_000.0 {
                10_000.0
            } else {
                120_000.0
            };
            let at_border =
                (590_000.0..600_000.0).contains(&age) || (7_700_000.0..7_800_000.0).contains(&age);
            assert!(*step == Some(expected) || at_border, "{age} ms: {step:?}");
        }
        // Every slow request of the day is seen, and the rate is what it was.
        let slow = numbers(&all, "read_p99_us").iter().filter(|v| **v == Some(9000.0)).count();
        assert!((85..=87).contains(&slow), "{slow}");
        assert!(numbers(&all, "reads").iter().all(|v| *v == Some(100.0)));
        assert!(numbers(&all, "none").iter().all(Option::is_none));
    }

    #[test]
    fn merged_samples_have_the_mean_and_the_worst_quantile() {
        let columns: Vec<String> = ["reads", "read_p99_us"].map(String::from).into();
        let rows = [vec![1.0, f32::NAN], vec![2.0, 7.0], vec![6.0, 5.0]];
        assert_eq!(merged(&rows, &columns), [3.0, 7.0]);
        assert!(merged(&[vec![f32::NAN, f32::NAN]], &columns).iter().all(|v| v.is_nan()));
    }

    #[test]
    fn samples_are_asked_for_in_parts_and_times_without_samples_stay_empty() {
        let mut series = Series::default();
        for n in 0..20 {
            series.add(1000 + n, &sample(n as f32 / 4.0));
        }
        let rest = series.after(1017);
        assert_eq!(
            (rest["time_ms"].clone(), rest["reads"].clone()),
            (json!([1018, 1019]), json!([4.5, 4.8]))
        );
        assert_eq!(rest["step_ms"], json!([1000, 1000]));
        assert_eq!(series.recent("reads", 1017), [Some(4.75), Some(4.5)]);
        assert!(series.recent("unknown", 0).is_empty());
        series.add(1019 + SPAN_MS, &sample(1.0));
        assert_eq!(
            series.after(0)["time_ms"],
            json!([1019, 1019 + SPAN_MS]),
            "what is older than a day is dropped"
        );
    }

    /// A clock that is set back must not leave samples in the future, behind which no new sample would be seen.
    #[test]
    fn a_clock_that_is_set_back_drops_what_is_later() {
        let mut series = Series::default();
        for n in 0..2000 {
            series.add(1_000_000 + n * 1000, &sample(1.0));
        }
        series.add(1_003_500, &sample(2.0));
        let all = series.after(0);
        assert!(numbers(&all, "time_ms").is_sorted() && series.last_ms() == Some(1_003_500), "{all:?}");
        assert_eq!(numbers(&all, "reads").last(), Some(&Some(2.0)));
    }

    /// A file of another version has other columns.
    #[test]
    fn columns_of_another_version_are_taken_by_name() {
        let mut series = Series::default();
        series.add(1000, &[("old", Some(1.0)), ("reads", Some(2.0))]);
        series.add(2000, &[("reads", Some(3.0)), ("new", Some(4.0))]);
        let all = series.after(0);
        assert_eq!((&all["reads"], &all["new"]), (&json!([2, 3]), &json!([null, 4])));
        assert!(!all.contains_key("old"));
    }
}
