//! The results of measurements. Plain data; must not know the measurement.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// One figure of one contender, all its repetitions.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Figure {
    /// The figure: `randread depth 16`.
    pub what: String,
    /// Unit of the values: `IOPS`, `ms`, `s`.
    pub unit: String,
    /// Whether more is better.
    pub more_is_better: bool,
    /// The contender.
    pub subject: String,
    /// One value a repetition, in their order.
    pub values: Vec<f64>,
}

impl Figure {
    /// The middle value; of an even number the lower one of the two.
    pub fn median(&self) -> f64 {
        let mut sorted = self.values.clone();
        sorted.sort_by(f64::total_cmp);
        let middle = |n: usize| sorted.get(n / 2).copied().unwrap_or(f64::NAN);
        (middle(sorted.len().saturating_sub(1)) + middle(sorted.len())) / 2.0
    }

    /// Smallest and largest value.
    pub fn spread(&self) -> (f64, f64) {
        let fold = |f: fn(f64, f64) -> f64, from| self.values.iter().copied().fold(from, f);
        (fold(f64::min, f64::INFINITY), fold(f64::max, f64::NEG_INFINITY))
    }
}

/// Values over time, for a plot; of the last repetition.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Series {
    /// The label of the values: `writes per second`.
    pub what: String,
    /// The contender.
    pub subject: String,
    /// Seconds since the beginning, and the value.
    pub points: Vec<(f64, f64)>,
}

/// Everything that was measured of one benchmark in one run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Results {
    /// Layout of this document.
    pub schema_version: u32,
    /// The benchmark: `B1`.
    pub job: String,
    /// Machine, versions, devices.
    pub machine: BTreeMap<String, String>,
    /// 1 for figures that can be compared with others.
    pub shorten_by: u32,
    /// Figures in the order of their first measurement.
    pub figures: Vec<Figure>,
    /// Plots.
    pub series: Vec<Series>,
}

impl Results {
    /// Nothing measured yet.
    pub fn new(job: &str, machine: BTreeMap<String, String>, shorten_by: u32) -> Results {
        Results {
            schema_version: 2,
            job: job.into(),
            machine,
            shorten_by,
            figures: Vec::new(),
            series: Vec::new(),
        }
    }

    /// Adds a value to the figure that it belongs to.
    pub fn add(&mut self, what: &str, unit: &str, more_is_better: bool, subject: &str, value: f64) {
        eprintln!("    {what}: {value:.1} {unit}");
        let same = |f: &&mut Figure| f.what == what && f.subject == subject;
        if let Some(f) = self.figures.iter_mut().find(same) {
            f.values.push(value);
            return;
        }
        self.figures.push(Figure {
            what: what.into(),
            unit: unit.into(),
            more_is_better,
            subject: subject.into(),
            values: vec![value],
        });
    }

    /// Puts a series in the place of that of an earlier repetition.
    pub fn draw(&mut self, what: &str, subject: &str, points: Vec<(f64, f64)>) {
        self.series.retain(|s| !(s.what == what && s.subject == subject));
        self.series.push(Series { what: what.into(), subject: subject.into(), points });
    }
}

/// A value with three significant digits, and at most three places behind the point. The figures of two runs differ by more.
pub fn shown(v: f64) -> String {
    let magnitude = if v == 0.0 { 0 } else { v.abs().log10().floor() as i32 };
    let places = (2 - magnitude).min(3);
    let unit = 10f64.powi(places);
    format!("{:.*}", usize::try_from(places).unwrap_or(0), (v * unit).round() / unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_three_significant_digits() {
        let values = [31_867.0, 1000.4, 692.3, 63.04, 2.2, 0.401_4, 0.0273, 0.0, -31.44, 99.96];
        let expected = ["31900", "1000", "692", "63.0", "2.20", "0.401", "0.027", "0.00", "-31.4", "100.0"];
        assert_eq!(values.map(shown), expected);
    }

    #[test]
    fn medians_and_spreads() {
        let mut r = Results::new("B1", BTreeMap::new(), 1);
        for v in [3.0, 1.0, 2.0] {
            r.add("x", "IOPS", true, "raw", v);
        }
        assert_eq!((r.figures[0].median(), r.figures[0].spread()), (2.0, (1.0, 3.0)));
        r.add("x", "IOPS", true, "raw", 9.0);
        assert_eq!(r.figures[0].median(), 2.5);
        assert_eq!(r.figures.len(), 1);
    }
}
