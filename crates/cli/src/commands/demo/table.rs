//! The table of the demonstration.
//!
//! Owns its columns and its summary. Must not know how the figures are measured.

use std::fmt;

use super::load::Figures;
use super::server::Stats;
use crate::size;

/// A row of the table.
pub(super) struct PassRow {
    what: &'static str,
    iops: f64,
    /// Median, 95th and 99th percentile in microseconds.
    latency: [u64; 3],
    hit_ratio: Option<f64>,
    dirty_bytes: Option<u64>,
}

impl PassRow {
    pub(super) fn new(what: &'static str, figures: Figures) -> PassRow {
        PassRow {
            what,
            iops: figures.requests as f64 / figures.took.as_secs_f64().max(1e-9),
            latency: [0.50, 0.95, 0.99].map(|q| figures.latency.value_at_quantile(q)),
            hit_ratio: None,
            dirty_bytes: None,
        }
    }

    /// Adds the hit ratio between two snapshots, and the dirty data of the second one.
    pub(super) fn with_cache(mut self, before: &Stats, after: &Stats) -> PassRow {
        let [hits, misses] = [after.hits - before.hits, after.misses - before.misses];
        self.hit_ratio = (hits + misses > 0).then(|| hits as f64 / (hits + misses) as f64);
        self.dirty_bytes = Some(after.dirty_bytes);
        self
    }
}

/// The rows of the table.
#[derive(Default)]
pub(super) struct Table {
    rows: Vec<PassRow>,
}

impl Table {
    pub(super) fn push(&mut self, row: PassRow) {
        self.rows.push(row);
    }

    /// The table in one sentence.
    pub(super) fn verdict(&self) -> String {
        match (self.rows.first(), self.rows.last()) {
            (Some(alone), Some(cached)) if alone.iops > 0.0 => format!(
                "Once cached, {:.0} times as many requests per second as the HDD alone.",
                cached.iops / alone.iops
            ),
            _ => String::new(),
        }
    }
}

fn time(us: u64) -> String {
    match us {
        0..1000 => format!("{us} us"),
        1000..100_000 => format!("{:.1} ms", us as f64 / 1000.0),
        _ => format!("{:.0} ms", us as f64 / 1000.0),
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<22}{:>10}{:>11}{:>11}{:>11}{:>11}{:>12}",
            "4 KiB random 70/30", "IOPS", "p50", "p95", "p99", "hit ratio", "dirty data"
        )?;
        for row in &self.rows {
            let [p50, p95, p99] = row.latency.map(time);
            let hits = row.hit_ratio.map_or_else(|| "-".into(), |r| format!("{:.1} %", r * 100.0));
            let dirty = row.dirty_bytes.map_or_else(|| "-".into(), size::human);
            writeln!(
                f,
                "{:<22}{:>10.0}{p50:>11}{p95:>11}{p99:>11}{hits:>11}{dirty:>12}",
                row.what, row.iops
            )?;
        }
        Ok(())
    }
}
