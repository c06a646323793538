//! `status`: sets, volumes and problems on one screen; `events`: events as they happen.

use std::cell::Cell;

use clap::Args;
use serde_json::Value;

use super::show::table;
use super::text;
use crate::client::{Control, segment};
use crate::failure::Failure;
use crate::when::{Since, Utc};
use crate::{out, size};

/// Show sets, volumes and problems on one screen
#[derive(Args, Debug)]
pub(crate) struct Status {
    #[command(flatten)]
    control: Control,
}

impl Status {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let status = self.control.get("/v1/status")?;
        if self.control.json { out::print_json(&status) } else { out::print(&screen(&status)) }
    }
}

fn bytes(value: &Value) -> String {
    size::human(value.as_u64().unwrap_or(0))
}

fn each(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn screen(status: &Value) -> String {
    let mut said = format!("ubcache {}, up {} s\n", text(&status["version"]), status["uptime_seconds"]);
    for set in each(&status["sets"]) {
        let figures = &set["set"];
        let what = if set["has_cache"] == true { "set" } else { "without a cache:" };
        said.push_str(&format!("\n{what} {}: {}", text(&set["id"]), text(&set["state"])));
        if let Some(why) = set["why"].as_str() {
            said.push_str(&format!(": {why}"));
        }
        if figures.is_object() {
            said.push_str(&format!(
                "\n  {}: {} cached, {} dirty, {} % of buckets in use",
                text(&figures["device"]),
                bytes(&figures["cached_bytes"]),
                bytes(&figures["dirty_bytes"]),
                figures["in_use_percent"]
            ));
            if let Some(why) = figures["failed"].as_str() {
                said.push_str(&format!("\n  DISABLED: {why}"));
            }
        }
        said.push('\n');
        said.push_str(&volumes(set));
    }
    for device in each(&status["devices"]).filter(|d| d["state"] == "waiting" || d["state"] == "failed") {
        said.push_str(&format!(
            "\n{}: {}: {}\n",
            text(&device["path"]),
            text(&device["state"]),
            text(&device["why"])
        ));
    }
    for job in each(&status["jobs"]) {
        said.push_str(&format!(
            "\njob {}: {} {}: {} %\n",
            job["id"],
            text(&job["kind"]),
            text(&job["target"]),
            job["percent"]
        ));
    }
    let errors: Vec<&Value> = each(&status["last_errors"]).collect();
    if !errors.is_empty() {
        said.push_str("\nlast errors and warnings:\n");
        errors
            .iter()
            .for_each(|e| said.push_str(&format!("  {}: {}\n", text(&e["level"]), text(&e["text"]))));
    }
    said
}

fn volumes(set: &Value) -> String {
    let mut rows: Vec<Vec<String>> = Vec::new();
    for v in each(&set["volumes"]) {
        if rows.is_empty() {
            let head = [
                "  Volume",
                "Size",
                "Mode",
                "State",
                "Dirty",
                "Hits",
                "Read",
                "Written",
                "Rate",
                "Reached by",
            ];
            rows.push(head.map(str::to_owned).to_vec());
        }
        let ways: Vec<&str> = each(&v["exports"]).map(|w| text(&w["address"])).collect();
        let reached = match v["problem"].as_str() {
            Some(problem) => format!("NOT EXPORTED: {problem}"),
            None => ways.join(", "),
        };
        let total = &v["stats"]["total"];
        let seen = total["cache_hits"].as_u64().unwrap_or(0) + total["cache_misses"].as_u64().unwrap_or(0);
        let rate = v["writeback"]["rate_bytes_per_s"].as_i64().unwrap_or(0);
        rows.push(vec![
            format!("  {}", text(&v["name"])),
            bytes(&v["size_bytes"]),
            text(&v["cache_mode"]).to_owned(),
            v["state"].as_str().unwrap_or("flash-only").to_owned(),
            bytes(&v["dirty_bytes"]),
            if seen == 0 { "-".into() } else { format!("{} %", total["cache_hit_ratio"]) },
            bytes(&v["requests"]["read_bytes"]),
            bytes(&v["requests"]["written_bytes"]),
            format!("{}/s", size::human(u64::try_from(rate).unwrap_or(0))),
            reached,
        ]);
    }
    table(&rows)
}

/// Explain writeback, bypassed requests and the hit ratio of a volume
#[derive(Args, Debug)]
pub(crate) struct Explain {
    /// Volume, by name, label or backing device
    volume: String,
    #[command(flatten)]
    control: Control,
}

impl Explain {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let body = self
            .control
            .get(&format!("/v1/volumes/{}/explain", segment(&self.control.device_name(&self.volume)?)))?;
        if self.control.json {
            return out::print_json(&body);
        }
        let parts = [("writeback", "Writeback"), ("bypassed", "Bypassed"), ("hits", "Hits")];
        let parts = parts.map(|(key, title)| {
            let sentences: String = each(&body[key]).map(|s| format!("  {}\n", text(s))).collect();
            format!("{title}\n{sentences}")
        });
        out::print(&parts.join("\n"))
    }
}

/// Print events: as they happen, or of the past with --since
///
/// The daemon stores the last events in its state directory (at most 8192 and at most 2 MiB), so that they outlive it.
/// Times are in UTC. With --json each event is one line.
#[derive(Args, Debug)]
#[command(after_help = "Example: ubcache events --since 2h --follow")]
pub(crate) struct Events {
    /// Print the stored events from this time on: 2026-11-25T14:05:00Z (UTC), 2026-11-25, or 15m, 2h, 7d before now
    #[arg(long, value_name = "TIME|DURATION")]
    since: Option<Since>,
    /// Then print events as they happen; without --since this is the default
    #[arg(long)]
    follow: bool,
    #[command(flatten)]
    control: Control,
}

impl Events {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let Some(since) = self.since else { return self.control.events(|| Ok(()), |e| self.print(e)) };
        let last = Cell::new(0);
        let print_past = || {
            let query = match since {
                Since::Moment(ms) => format!("since_ms={ms}"),
                Since::Before(ms) => format!("within_ms={ms}"),
            };
            let past = self.control.get(&format!("/v1/events/history?{query}"))?;
            each(&past["events"]).try_for_each(|event| {
                last.set(event["seq"].as_u64().unwrap_or(0));
                self.print(event)
            })
        };
        if !self.follow {
            return print_past();
        }
        // An event of the time between is in both.
        let is_new = |event: &Value| event["seq"].as_u64().is_none_or(|seq| seq > last.get());
        self.control.events(print_past, |event| if is_new(event) { self.print(event) } else { Ok(()) })
    }

    fn print(&self, event: &Value) -> Result<(), Failure> {
        if self.control.json { out::print_json_line(event) } else { out::print(&line(event)) }
    }
}

/// An event as one line of text.
fn line(event: &Value) -> String {
    let time = Utc(event["time_ms"].as_u64().unwrap_or(0));
    let set = event["set"].as_str().map(|s| format!("{s}: ")).unwrap_or_default();
    let level = match text(&event["level"]) {
        "info" => String::new(),
        other => format!("{other}: "),
    };
    format!("{time} {level}{set}{}\n", text(&event["text"]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_event_is_a_line_with_its_time() {
        let event =
            json!({"seq": 7, "time_ms": 1_795_615_500_000_u64, "level": "error", "set": "s", "text": "oh"});
        assert_eq!(line(&event), "2026-11-25T14:05:00Z error: s: oh\n");
    }

    #[test]
    fn one_screen_says_what_is_wrong() {
        let status = json!({
            "version": "1", "uptime_seconds": 5,
            "sets": [{"id": "s", "has_cache": true, "state": "serving", "why": null,
                "set": {"device": "/dev/c", "cached_bytes": 4096, "dirty_bytes": 512, "in_use_percent": 7, "failed": "broken"},
                "volumes": [{"name": "bcache0", "size_bytes": 1024, "cache_mode": "writeback", "state": "dirty",
                    "dirty_bytes": 512, "exports": [], "problem": "no socket",
                    "stats": {"total": {"cache_hits": 1, "cache_misses": 1, "cache_hit_ratio": 50}},
                    "requests": {"read_bytes": 1, "written_bytes": 2}, "writeback": {"rate_bytes_per_s": 4096}}]}],
            "devices": [{"path": "/dev/w", "state": "waiting", "why": "for its cache"}],
            "jobs": [{"id": 3, "kind": "detach", "target": "bcache0", "percent": 9}],
            "last_errors": [{"level": "error", "text": "oh"}],
        });
        let said = screen(&status);
        for words in [
            "DISABLED: broken",
            "NOT EXPORTED: no socket",
            "50 %",
            "4.0 KiB/s",
            "/dev/w: waiting: for its cache",
            "job 3: detach bcache0: 9 %",
            "error: oh",
        ] {
            assert!(said.contains(words), "{words}: {said}");
        }
    }
}
