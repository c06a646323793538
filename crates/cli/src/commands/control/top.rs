//! `top`: the activity of every volume, once a second.
//!
//! Rates are differences of counters between two updates. On a terminal each update redraws the screen; elsewhere it prints
//! another table.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Value, json};

use super::show::table;
use super::text;
use crate::client::Control;
use crate::failure::Failure;
use crate::{out, size};

/// Show the activity of volumes, updated regularly
#[derive(Args, Debug)]
pub(crate) struct Top {
    /// Seconds between two updates
    #[arg(short = 'i', long, value_name = "S", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=3600))]
    interval: u64,
    /// Number of updates [default: until interrupted]
    #[arg(short = 'n', long, value_name = "N")]
    count: Option<u64>,
    #[command(flatten)]
    control: Control,
}

/// The counters of a volume.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
struct Counts {
    reads: u64,
    read_bytes: u64,
    writes: u64,
    written_bytes: u64,
    hits: u64,
    misses: u64,
}

impl Counts {
    fn of(volume: &Value) -> Counts {
        let number = |of: &Value, key: &str| of[key].as_u64().unwrap_or(0);
        let (requests, total) = (&volume["requests"], &volume["stats"]["total"]);
        Counts {
            reads: number(requests, "reads"),
            read_bytes: number(requests, "read_bytes"),
            writes: number(requests, "writes"),
            written_bytes: number(requests, "written_bytes"),
            hits: number(total, "cache_hits"),
            misses: number(total, "cache_misses"),
        }
    }

    /// The difference since `before`. A counter that is smaller now counts from zero, because its volume was restarted.
    fn since(self, before: Counts) -> Counts {
        let past = |now: u64, then: u64| now.checked_sub(then).unwrap_or(now);
        Counts {
            reads: past(self.reads, before.reads),
            read_bytes: past(self.read_bytes, before.read_bytes),
            writes: past(self.writes, before.writes),
            written_bytes: past(self.written_bytes, before.written_bytes),
            hits: past(self.hits, before.hits),
            misses: past(self.misses, before.misses),
        }
    }
}

fn volumes(status: &Value) -> impl Iterator<Item = &Value> {
    let sets = status["sets"].as_array().into_iter().flatten();
    sets.flat_map(|s| s["volumes"].as_array().into_iter().flatten())
}

impl Top {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let clear = std::io::stdout().is_terminal() && !self.control.json;
        let mut before: BTreeMap<String, Counts> = BTreeMap::new();
        let mut looked: Option<Instant> = None;
        let mut left = self.count;
        loop {
            let status = self.control.get("/v1/status")?;
            let now = Instant::now();
            // The first update has no earlier counters.
            let seconds = looked.map(|l| now.duration_since(l).as_secs_f64());
            let counts: BTreeMap<String, Counts> =
                volumes(&status).map(|v| (text(&v["name"]).to_owned(), Counts::of(v))).collect();
            let past = |name: &str| {
                let now = counts.get(name).copied().unwrap_or_default();
                now.since(before.get(name).copied().unwrap_or(now))
            };
            if self.control.json {
                out::print_json_line(&as_json(&status, seconds, past))?;
            } else {
                let home = if clear { "\x1b[H\x1b[2J" } else { "" };
                out::print(&format!("{home}{}", screen(&status, seconds, past)))?;
            }
            if let Some(left) = &mut left {
                *left = left.saturating_sub(1);
                if *left == 0 {
                    return Ok(());
                }
            }
            (before, looked) = (counts, Some(now));
            std::thread::sleep(Duration::from_secs(self.interval));
        }
    }
}

fn per_second(n: u64, seconds: Option<f64>) -> u64 {
    seconds.map_or(0, |s| (n as f64 / s.max(0.001)).round() as u64)
}

fn as_json(status: &Value, seconds: Option<f64>, past: impl Fn(&str) -> Counts) -> Value {
    let each = volumes(status).map(|v| {
        let p = past(text(&v["name"]));
        json!({
            "name": v["name"],
            "reads_per_s": per_second(p.reads, seconds),
            "read_bytes_per_s": per_second(p.read_bytes, seconds),
            "writes_per_s": per_second(p.writes, seconds),
            "written_bytes_per_s": per_second(p.written_bytes, seconds),
            "hits": p.hits,
            "misses": p.misses,
            "dirty_bytes": v["dirty_bytes"],
        })
    });
    json!({"schema_version": 1, "seconds": seconds, "volumes": each.collect::<Vec<_>>()})
}

fn screen(status: &Value, seconds: Option<f64>, past: impl Fn(&str) -> Counts) -> String {
    let head =
        ["Volume", "Reads/s", "Read/s", "Writes/s", "Written/s", "Hits", "Dirty", "Writeback/s", "State"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for v in volumes(status) {
        let p = past(text(&v["name"]));
        let ratio = (p.hits * 100).checked_div(p.hits + p.misses);
        let rate = v["writeback"]["rate_bytes_per_s"].as_u64().unwrap_or(0);
        rows.push(vec![
            text(&v["name"]).to_owned(),
            per_second(p.reads, seconds).to_string(),
            size::human(per_second(p.read_bytes, seconds)),
            per_second(p.writes, seconds).to_string(),
            size::human(per_second(p.written_bytes, seconds)),
            ratio.map_or_else(|| "-".into(), |r| format!("{r} %")),
            size::human(v["dirty_bytes"].as_u64().unwrap_or(0)),
            size::human(rate),
            v["state"].as_str().unwrap_or("flash-only").to_owned(),
        ]);
    }
    let mut said = format!("ubcache {}, up {} s\n", text(&status["version"]), status["uptime_seconds"]);
    said.push_str(&table(&rows));
    for job in status["jobs"].as_array().into_iter().flatten() {
        said.push_str(&format!(
            "job {}: {} {}: {} %\n",
            job["id"],
            text(&job["kind"]),
            text(&job["target"]),
            job["percent"]
        ));
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_differences() {
        let volume = |reads: u64, bytes: u64| {
            json!({"name": "bcache0", "requests": {"reads": reads, "read_bytes": bytes, "writes": 0, "written_bytes": 0},
                "stats": {"total": {"cache_hits": reads, "cache_misses": 0}}, "dirty_bytes": 0, "state": "clean"})
        };
        let past = Counts::of(&volume(110, 9096)).since(Counts::of(&volume(10, 904)));
        assert_eq!((past.reads, past.read_bytes, past.hits), (100, 8192, 100));
        assert_eq!(Counts::of(&volume(5, 0)).since(past).reads, 5, "began anew");
        let status =
            json!({"version": "1", "uptime_seconds": 1, "sets": [{"volumes": [volume(1, 1)]}], "jobs": []});
        let said = screen(&status, Some(2.0), |_| past);
        assert!(said.contains("bcache0  50       4.0 KiB"), "{said}");
        assert_eq!(as_json(&status, Some(2.0), |_| past)["volumes"][0]["reads_per_s"], 50);
    }
}
